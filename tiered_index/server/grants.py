"""Reads the files that grant access: tokens, and the keys of RocketMQ's callers.

The files are read strictly, because a misspelt member would open every topic. An unknown member, a member that is given
twice and an empty prefix are refused with their line. So is a file that every user of the host can write. Threads: any.
"""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

from tiered_index.errors import ConfigError, SetupUnavailable, did_you_mean
from tiered_index.stored import typed

T = TypeVar("T")
Prefix = Annotated[str, Meta(min_length=1)]
"""A prefix of topics. An empty one would open every topic."""


class Grant(Struct, kw_only=True, forbid_unknown_fields=True):
    """A grant of a file. `topics` are prefixes of topics; None: every topic."""

    topics: tuple[Prefix, ...] | None = None


def read_grants(path: Path, what: str, kind: type[T]) -> T:
    """Return the grants of a JSON file, whose document is a `kind`; `what` names the file in errors.

    Raises `SetupUnavailable` if the file can't be read or is another document, and `ConfigError` if every user of the
    host can write it. Errors name the line and the member, and have no value of the file, which may be a secret.
    """
    try:
        mode, data = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        raise SetupUnavailable(f"{path} can't be read: {error.strerror}") from error
    if mode & stat.S_IWOTH and stat.S_ISREG(mode):
        raise ConfigError(f"every user of this host can write {path}, and so grant access: chmod o-w {path}")
    try:
        text = data.decode("utf-8-sig")
        return typed(json.loads(text, object_pairs_hook=_once), kind)
    except _GivenTwice as error:
        (name,) = error.args
        problem = f"{_line(text, name, 2)}the member {name!r:.80} is given twice"
    except msgspec.ValidationError as error:
        problem = str(error)
        if unknown := re.match(r"Object contains unknown field `(.*?)`", problem):
            members = get_args(kind)[-1].__struct_fields__
            hint = did_you_mean(unknown[1], members) or f"; the members are {', '.join(members)}"
            problem = f"{_line(text, unknown[1])}the member {unknown[1]!r:.80} is unknown{hint}"
        elif (empty := _EMPTY_PREFIX.search(text)) and re.search(r"\.topics\[\d+\]`\Z", problem):
            every = "which would open every topic: to open every topic, leave 'topics' out"
            problem = f"line {_number(text, empty.start())}: the member 'topics' has an empty prefix, {every}"
    except (ValueError, RecursionError):
        problem = "it is not JSON"
    raise SetupUnavailable(f"{path} is not {what}: {problem}")


class _GivenTwice(ValueError):
    """A member is given twice; the argument is its name."""


_GRANT = re.compile(r"\{[^{}]*\}")
_EMPTY_PREFIX = re.compile(r'"topics"\s*:\s*\[[^\]]*(?<=[\[,\s])""')


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise _GivenTwice(max(names, key=names.count))
    return members


def _line(text: str, name: str, times: int = 1) -> str:
    """Return the line of member `name` in the first grant that has it so often; empty if escapes spell it."""
    for grant in _GRANT.finditer(text):
        places = [member.start() for member in re.finditer(rf"{re.escape(json.dumps(name))}\s*:", grant[0])]
        if len(places) >= times:
            return f"line {_number(text, grant.start() + places[-1])}: "
    return ""


def _number(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


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
