"""Files that can't be read, or not as a whole: what a run tells of them, and what the log notes.

A file that can't be read never stops the others. The log notes why, at the segment of its rows; a file without a row
that can be read has a segment of one offset. So the next run does not read it again, unless it was changed. What is no
fault of the bytes, such as a file that may not be opened, is not noted, and is tried again. One thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from tiered_index.base.clock import SystemClock
from tiered_index.base.kernels import crc32
from tiered_index.connectors.files.listing import FileMoved, SourceFile, is_listed
from tiered_index.connectors.files.rows.batch import UNREADABLE, Damage
from tiered_index.connectors.files.rows.forms import is_growing_text, open_rows
from tiered_index.connectors.files.rows.mapping import RowMapping
from tiered_index.connectors.files.rows.table import ColumnsFile
from tiered_index.connectors.files.rows.text import BLOCK_BYTES, TextFile, decompressed, read_text
from tiered_index.connectors.source import FIRST
from tiered_index.errors import InvalidArgument, ObjectArchived, ObjectNotFound
from tiered_index.format.segments.segment import LinkedSegment

MOST_NAMED = 100
"""The most damaged files that a run names."""
_MOST_CHARACTERS = 1000


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

    def name_damaged(self, file: str, reason: str, position: int | None = None) -> None:
        """Count a damaged file, and name it."""
        self.damaged += 1
        _name(self.damaged_first, file, reason, position)


def damage_text(damage: Mapping[str, Any]) -> str:
    """Return a damaged file, the position of the first row that was not read, and the reason, as text."""
    position = "" if damage["position"] is None else f" at {damage['position']:,}"
    return f"{damage['file']}{position}: {damage['reason']}"


def files_text(count: int) -> str:
    """Return a number of files as text."""
    return f"{count:,} file{'' if count == 1 else 's'}"


def known_damage(count: int, first: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return notes of the files that an earlier run could not read, or not as a whole, and that are as they were."""
    named = map(damage_text, first[:FIRST])
    return [f"{files_text(count)} could not be read as a whole by an earlier run:", *named] if count else []


class DamagedFiles:
    """Notes the damaged files of one run. If it `is_strict`, the first one raises its error."""

    def __init__(self, counts: DamageCounts, mapping: RowMapping, *, is_strict: bool = False) -> None:
        self._counts, self._is_strict = counts, is_strict
        self.are_read_later = False
        """Whether files were passed over that may be read later, as they are."""
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
        self._counts.name_damaged(listed.uri, damage.problem, damage.position if damage.where else None)
        is_denied = isinstance(error, InvalidArgument) and isinstance(error.__cause__, OSError)
        is_read_later = is_denied or isinstance(error, ObjectArchived | ObjectNotFound)
        self.are_read_later |= is_read_later
        return not is_read_later

    def noted(self, segment: LinkedSegment, damage: Damage) -> LinkedSegment:
        """Return a finished segment with the damage of its file."""
        return structs.replace(segment, damage=(_short(damage.problem), damage.position, self._options))

    def unread(self, segment: LinkedSegment, damage: Damage) -> LinkedSegment:
        """Return the segment of a file without a row that can be read, in place of an open one."""
        facts: dict[str, Any] = {"rows": 0, "times": None, "blocks": None, "lines": None, "is_open": False}
        return self.noted(structs.replace(segment, length=1, **facts), damage)


class WrittenFiles:
    """Tells which local files are still being written, for a run that looks at them again and again.

    A packed file or one with columns is of use once it is whole. Its end says so, or its size and time have stood still
    for `still_s`. Lines of a text are whole as they come.
    """

    def __init__(self, still_s: float, clock_s: Callable[[], float]) -> None:
        self._still_s, self._clock_s = still_s, clock_s
        # size and stamp of files when they were seen last, since when, and whether they are whole, if it is known
        self._seen: dict[str, tuple[int, str, float, bool | None]] = {}

    def has(self, listed: SourceFile) -> bool:
        """Return whether a file is being written. Raises as `SourceFile.head`."""
        if not listed.uri.startswith("file:"):
            return False
        age_ms = SystemClock().now_ms() - int(listed.stamp.rpartition("-")[2]) // 1_000_000
        if age_ms > 1000 * self._still_s or is_growing_text(listed.head()):
            return False
        now_s, seen = self._clock_s(), self._seen.get(listed.uri)
        if seen is None:
            seen = (listed.size_bytes, listed.stamp, now_s, _is_whole(listed))
        elif not listed.is_same(*seen[:2]):
            # looked at once it stands still
            seen = (listed.size_bytes, listed.stamp, now_s, None)
        elif seen[3] is None:
            seen = (*seen[:3], _is_whole(listed))
        self._seen[listed.uri] = seen
        return not seen[3] and now_s - seen[2] < self._still_s


def _is_whole(listed: SourceFile) -> bool:
    """Return whether a file can be read to its end."""
    try:
        rows = open_rows(listed.file, listed.size_bytes, listed.head())
        if isinstance(rows, ColumnsFile):
            return rows.table.damage is None
        assert isinstance(rows, TextFile), "it has no columns"
        with decompressed(listed.file, rows.compression) as handle:
            while read_text(listed.file, handle, rows.compression, BLOCK_BYTES):
                pass
    except UNREADABLE:
        return False
    return True


def _name(named: list[dict[str, Any]], uri: str, reason: str, position: int | None) -> None:
    if len(named) < MOST_NAMED:
        named.append({"file": uri, "reason": reason, "position": position})


def _short(problem: str) -> str:
    return problem if len(problem) <= _MOST_CHARACTERS else f"{problem[:_MOST_CHARACTERS]}..."
