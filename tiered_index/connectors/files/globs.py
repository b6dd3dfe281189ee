"""Globs of files: one translation for the paths of local files and the names of objects. One thread.

A pattern is split at slashes first: no wildcard but ``**`` matches a slash.

- ``*`` is any text, ``?`` one character, ``[abc0-9]`` one of these, ``[!abc]`` and ``[^abc]`` one of all others. A
  bracket without an end is a character. A range that ends before it starts is an error.
- ``**`` between slashes is any number of folders, and at the end all files below. Elsewhere it is ``*``.
- A name that begins with ``.`` or ``_`` is hidden: unfinished output, and files of tools. No wildcard matches the first
  character of such a name. ``_day=1`` is a partition, and not hidden.
- ``[*]`` is a star. In a URI ``%2A`` is one, too: what is escaped is no wildcard.
"""

from __future__ import annotations

import errno
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote

from tiered_index.errors import InvalidArgument

_HIDDEN = r"\.|_[^/=]*(?:/|\Z)"
_HIDDEN_PART = re.compile(rf"(?:\A|/)(?:{_HIDDEN})")
_CLASS = r"\[[!^]?(?:\][^\]/]*|[^\]/]+)\]"
_TOKEN = re.compile(rf"\*+|\?|{_CLASS}|[^*?\[]+|\[", re.DOTALL)
_WILDCARD = re.compile(rf"[*?]|{_CLASS}", re.DOTALL)
_RANGE = re.compile(r"(.)-(.)|(.)", re.DOTALL)
_ANY_FILE = re.compile(rf"(?!{_HIDDEN})[^/]*", re.DOTALL)
# The text of one name, or the expression of several; None: any number of folders
_Part: TypeAlias = str | re.Pattern[str] | None


def wildcard_at(text: str) -> int | None:
    """Return the place of the first wildcard in a path or URI; None: it has none."""
    wildcard = _WILDCARD.search(text)
    return wildcard and wildcard.start()


def is_hidden(name: str) -> bool:
    """Return whether a file or one of its folders is hidden."""
    return _HIDDEN_PART.search(name) is not None


@dataclass(frozen=True)
class Glob:
    """A pattern, by its parts between slashes. The last one is never None."""

    parts: tuple[_Part, ...]

    @classmethod
    def of(cls, text: str, *, is_escaped: bool = False) -> Glob:
        """Return the pattern of a path or, with the escapes of URIs, of a part of one. Raises `InvalidArgument`."""
        parts: list[_Part] = []
        for name in text.split("/"):
            if name != "**":
                parts.append(_part(name, text, is_escaped=is_escaped))
            elif not parts or parts[-1] is not None:
                parts.append(None)
        return cls((*parts, *([_ANY_FILE] if parts[-1] is None else [])))

    @classmethod
    def below(cls, folder: Path) -> Glob:
        """Return the pattern of all files below a local folder, whatever its name is."""
        return cls(("", *folder.parts[1:], None, _ANY_FILE))

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        written = []
        for part in self.parts:
            if part is None:
                written.append(rf"(?:(?!{_HIDDEN})[^/]*/)*")
            else:
                written += [re.escape(part) if isinstance(part, str) else part.pattern, "/"]
        return re.compile("".join(written[:-1]), re.DOTALL)

    def matches(self, name: str) -> bool:
        """Return whether an object's name fits the pattern."""
        return self._expression.fullmatch(name) is not None

    def paths(self) -> Iterator[Path]:
        """Yield the local files of an absolute pattern. Raises `InvalidArgument` for a folder that can't be read.

        Links to folders are followed after all other folders, so that a folder is known by its own name, and each
        folder is read once. A file or folder that vanishes meanwhile is left out.
        """
        first = next((at for at, part in enumerate(self.parts) if not isinstance(part, str)), len(self.parts))
        start = "/".join(str(part) for part in self.parts[:first]) or "/"
        if first == len(self.parts):
            yield from [Path(start)] if os.path.isfile(start) else []  # noqa: PTH113 - False for a loop of links
            return
        folders, links = deque([(start, self._opened(first))]), deque[tuple[str, set[int]]]()
        read, last = set[tuple[int, int, int]](), len(self.parts) - 1
        while folders or links:
            folder, places = (folders or links).popleft()
            for entry in _entries(folder, places, read):
                if (below := self._below(entry.name, places)) and _is(entry.is_dir, entry.path):
                    (links if entry.is_symlink() else folders).append((entry.path, below))
                elif last in places and _fits(self.parts[last], entry.name) and _is(entry.is_file, entry.path):
                    yield Path(entry.path)

    def _opened(self, place: int) -> set[int]:
        """Return the parts that names in a folder may fit, after it has fitted those before `place`."""
        return {place, place + 1} if self.parts[place] is None else {place}

    def _below(self, name: str, places: set[int]) -> set[int]:
        """Return the parts that names in a folder may fit; its own name fits one of `places`."""
        below = set[int]()
        for place in places:
            part = self.parts[place]
            if part is None:
                below |= set() if is_hidden(name) else self._opened(place)
            elif place + 1 < len(self.parts) and _fits(part, name):
                below |= self._opened(place + 1)
        return below


def _fits(part: _Part, name: str) -> bool:
    return name == part if isinstance(part, str) or part is None else part.fullmatch(name) is not None


def _entries(folder: str, places: set[int], read: set[tuple[int, int, int]]) -> list[os.DirEntry[str]]:
    """Return the entries of a folder in order of name, and leave in `places` those that were not `read` in it yet."""
    try:
        status = os.stat(folder)  # noqa: PTH116 - in one way with the next call
        places -= {place for place in places if (status.st_dev, status.st_ino, place) in read}
        read |= {(status.st_dev, status.st_ino, place) for place in places}
        if not places:
            return []
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise InvalidArgument(f"{folder}: {error.strerror}") from error


def _is(test: Callable[[], bool], path: str) -> bool:
    """Return what a test of an entry says; False for a link to itself. Raises `InvalidArgument`."""
    try:
        return test()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise InvalidArgument(f"{path}: {error.strerror}") from error


def _part(name: str, pattern: str, *, is_escaped: bool) -> str | re.Pattern[str]:
    """Return the text or the expression of a part of a pattern. Raises `InvalidArgument`."""
    decode = unquote if is_escaped else str
    # texts, and expressions of wildcards
    pieces: list[tuple[str, str | None]] = []
    for token in _TOKEN.findall(name):
        if token[0] == "*":
            pieces.append(("", "[^/]*"))
        elif token == "?":
            pieces.append(("", "[^/]"))
        elif token[0] == "[" and len(token) > 1:
            pieces.append(_class(decode(token), pattern))
        else:
            pieces.append((decode(token), None))
    if all(wildcard is None for _, wildcard in pieces):
        return "".join(text for text, _ in pieces)
    first = "" if pieces[0][1] is None else rf"(?!/|\Z|{_HIDDEN})"
    written = [re.escape(text) if wildcard is None else wildcard for text, wildcard in pieces]
    return re.compile("".join([first, *written]), re.DOTALL)


def _class(token: str, pattern: str) -> tuple[str, str | None]:
    """Return the text of a class of one character, or the expression of another one. Raises `InvalidArgument`."""
    inner = token[1:-1]
    is_negated = len(inner) > 1 and inner[0] in "!^"
    written = ""
    for start, end, single in _RANGE.findall(inner[is_negated:]):
        if start > end:
            raise InvalidArgument(
                f"{pattern}: {token} has the range {start}-{end}, which has no character: swap the two"
            )
        written += re.escape(single) if single else f"{re.escape(start)}-{re.escape(end)}"
    if len(inner) == 1:
        return inner, None
    return "", f"(?!/)[{'^' * is_negated}{written}]"
