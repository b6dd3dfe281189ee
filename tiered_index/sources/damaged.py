"""Files that can't be read, or not as a whole: what a run tells of them, and what the log notes.

A file that can't be read never stops the others. The log notes why, at the segment of its rows; a file without a row
that can be read has a segment of one offset. So the next run does not read it again, unless it was changed. What is no
fault of the bytes, such as a file that may not be opened, is not noted, and is tried again. One thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from tiered_index.errors import InvalidArgument, ObjectArchived, ObjectNotFound
from tiered_index.format.segment import LinkedSegment
from tiered_index.kernels import crc32
from tiered_index.sources.listing import FileMoved, SourceFile, is_listed
from tiered_index.sources.rows.batch import UNREADABLE, Damage
from tiered_index.sources.rows.mapping import RowMapping

_MOST_NAMED, _MOST_CHARACTERS = 100, 1000


@dataclass
class DamageCounts:
    """The counts of a run of files that could not be read as a whole.

    - `damaged` files; `damaged_first` has the first ones, each with `file`, `reason` and `position`: the first row that
      was not read, a byte of a text or the number of a row; None: no row is known.
    - `known_damaged` files are as they were when an earlier run named them; `known_damaged_first` as above.
    - `vanished` files were there when they were listed.
    """

    damaged: int = 0
    damaged_first: list[dict[str, Any]] = field(default_factory=list)
    known_damaged: int = 0
    known_damaged_first: list[dict[str, Any]] = field(default_factory=list)
    vanished: int = 0


class DamagedFiles:
    """Notes the damaged files of one run. If it `is_strict`, the first one raises its error."""

    def __init__(self, counts: DamageCounts, mapping: RowMapping, *, is_strict: bool = False) -> None:
        self._counts, self._is_strict = counts, is_strict
        unit = None if mapping.is_guessed else mapping.unit
        # a file that was not read is read again if it is to be read in another way
        zone = None if mapping.zone is None else mapping.zone.name
        self._options = crc32(repr((mapping.time, unit, mapping.topic, mapping.dialect, zone)).encode())

    def is_known(self, segment: LinkedSegment) -> bool:
        """Return whether a file of this last segment need not be read again while it is as it was. It is counted."""
        if segment.damage is None:
            return True
        reason, position, options = segment.damage
        if segment.is_unread and options != self._options:
            return False
        self._counts.known_damaged += 1
        _name(self._counts.known_damaged_first, segment.uri, reason, None if segment.is_unread else position)
        return True

    @contextlib.contextmanager
    def passed_over(self, listed: SourceFile, note: Callable[[Damage], object] = lambda damage: None) -> Iterator[None]:
        """Pass over the rest of the block if the file can't be read. `note` gets the damage, if it is of its bytes.

        Raises `FileMoved`.
        """
        try:
            yield
        except FileMoved:
            raise
        except UNREADABLE as error:
            if self.is_damaged(listed, damage := Damage(error, 0, "")):
                note(damage)

    def is_damaged(self, listed: SourceFile, damage: Damage) -> bool:
        """Count a file that was not read as a whole. Return whether this is due to its bytes. Raises the error."""
        error = damage.error
        if isinstance(error, ObjectNotFound) and not is_listed(listed):
            self._counts.vanished += 1
            return False
        if self._is_strict:
            raise error
        self._counts.damaged += 1
        _name(self._counts.damaged_first, listed.uri, damage.problem, damage.position if damage.where else None)
        # else it may be read later, as it is
        is_denied = isinstance(error, InvalidArgument) and isinstance(error.__cause__, OSError)
        return not (is_denied or isinstance(error, ObjectArchived | ObjectNotFound))

    def noted(self, segment: LinkedSegment, damage: Damage) -> LinkedSegment:
        """Return a finished segment with the damage of its file."""
        return structs.replace(segment, damage=(_short(damage.problem), damage.position, self._options))

    def unread(self, segment: LinkedSegment, damage: Damage) -> LinkedSegment:
        """Return the segment of a file without a row that can be read, in place of an open one."""
        facts: dict[str, Any] = {"rows": 0, "times": None, "blocks": None, "lines": None, "is_open": False}
        return self.noted(structs.replace(segment, length=1, **facts), damage)


def _name(named: list[dict[str, Any]], uri: str, reason: str, position: int | None) -> None:
    if len(named) < _MOST_NAMED:
        named.append({"file": uri, "reason": reason, "position": position})


def _short(problem: str) -> str:
    return problem if len(problem) <= _MOST_CHARACTERS else f"{problem[:_MOST_CHARACTERS]}..."
