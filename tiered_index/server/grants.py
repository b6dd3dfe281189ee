"""Reads the files that grant access: tokens, and the keys of RocketMQ's callers.

The files are read strictly, because a misspelt member would open every topic. An unknown member, a member that is given
twice and an empty prefix are refused with their line. So is a file that every user of the host can write. Threads: any.
"""

from __future__ import annotations

import difflib
import json
import json.scanner
import re
import stat
from collections.abc import Sequence
from json.decoder import JSONObject  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

from tiered_index.errors import ConfigError, SetupUnavailable


class GrantError(ValueError):
    """A grant that is refused. The message has a line and the name of a member, and nothing else of the file."""


class _Decoder(json.JSONDecoder):
    """Decodes the objects that lie in `depth` other ones as grants, with no other members than `members`."""

    def __init__(self, members: Sequence[str], depth: int) -> None:
        super().__init__()
        self._members, self._depth, self._outer_objects = members, depth, 0
        self.parse_object = self._object
        # the scanner of C calls no `parse_object`
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _object(self, text_and_begin: tuple[str, int], strict: bool, scan: Any, *hooks: Any) -> tuple[Any, int]:
        self._outer_objects += 1
        pairs, end = JSONObject(text_and_begin, strict, scan, None, list, *hooks[2:])
        self._outer_objects -= 1
        text, begin = text_and_begin
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                self._refuse(text, begin, end, name, "is given twice")
            if self._outer_objects == self._depth and name not in self._members:
                near = difflib.get_close_matches(name.lower(), self._members, 1, 0.6)
                hint = f"did you mean {near[0]!r}?" if near else f"the members are {', '.join(self._members)}"
                self._refuse(text, begin, end, name, f"is unknown: {hint}")
        topics = dict(pairs).get("topics")
        if self._outer_objects == self._depth and isinstance(topics, list) and "" in topics:
            problem = "has an empty prefix, which would open every topic: to open every topic, leave 'topics' out"
            self._refuse(text, begin, end, "topics", problem)
        return dict(pairs), end

    @staticmethod
    def _refuse(text: str, begin: int, end: int, name: str, problem: str) -> None:
        """Raise `GrantError` for the last member `name` of the object from `begin` to `end`."""
        places = [match.start() for match in re.finditer(rf"{re.escape(json.dumps(name))}\s*:", text[begin:end])]
        line = text.count("\n", 0, begin + (places[-1] if places else 0)) + 1
        raise GrantError(f"line {line}: the member {name!r:.80} {problem}")


def read_grants(path: Path, members: Sequence[str], *, depth: int = 0) -> Any:
    """Return the JSON document of a file whose grants have `members`, and lie in `depth` other objects.

    Raises `SetupUnavailable` if the file can't be read, and `ConfigError` if every user of the host can write it.
    Raises `GrantError` if a grant is refused or the file is not JSON.
    """
    try:
        mode, data = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        raise SetupUnavailable(f"{path} can't be read: {error.strerror}") from error
    if mode & stat.S_IWOTH and stat.S_ISREG(mode):
        raise ConfigError(f"every user of this host can write {path}, and so grant access: chmod o-w {path}")
    try:
        return _Decoder(members, depth).decode(data.decode("utf-8-sig"))
    except GrantError:
        raise
    except (ValueError, RecursionError):
        raise GrantError("it is not JSON") from None


def access_warning(path: Path) -> str | None:
    """Return a warning if every user of the host can read the file, or its group can write it; None: neither.

    None also for a file that can't be looked at: reading it raises the error.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return None
    if not mode & (stat.S_IROTH | stat.S_IWGRP) or not stat.S_ISREG(mode):
        return None
    who = "every user of this host can read" if mode & stat.S_IROTH else "its group can write"
    return f"{path} grants access, and {who} it: chmod o-r,g-w {path}"
