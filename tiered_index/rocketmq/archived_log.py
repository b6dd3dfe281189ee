"""Reading an archived segment as if it were a file of a commit log: by ranged requests of whole pieces, each checked.

What the storage gives that does not match the table behind the segment is `CorruptFile`; or, where damage is to be passed over, bytes that
no message has, and the piece is named in `ArchivedLog.damaged`. One thread. Memory: what is asked for, and one piece.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

from tiered_index.errors import CorruptFile
from tiered_index.rocketmq.commitlog import CommitLogReader
from tiered_index.rocketmq.index_columns import SkippedRange
from tiered_index.rocketmq.segments import Segment
from tiered_index.service.lifecycle.segment_archive import SegmentArchive
from tiered_index.service.log.records import ArchivedSegment

__all__ = ["ArchivedLog"]


class _Pieces:
    """The bytes of one archived segment."""

    def __init__(self, archive: SegmentArchive, segment: ArchivedSegment, skip_corrupt: bool) -> None:
        self.damaged: list[SkippedRange] = []
        self._archive, self._segment, self._skip_corrupt = archive, segment, skip_corrupt
        self._table = archive.table(segment)
        self._held: tuple[int, bytes] = (-1, b"")
        # the last piece of the last reading: the next one mostly begins within it

    def read(self, size_bytes: int, position: int) -> bytes:
        size = min(size_bytes, self._segment.size_bytes - position)
        if size <= 0:
            return b""
        length = self._table.piece_bytes
        first, last = position // length, (position + size - 1) // length
        held, data = self._held
        begin = first
        if held == first:
            first += 1
        else:
            data = b""
        if first <= last:
            parts = [data, *self._fetched(first, last)]
            self._held = last, parts[-1]
            data = b"".join(parts)
        at = position - begin * length
        return data[at : at + size]

    def _fetched(self, first: int, last: int) -> list[bytes]:
        """Return the pieces `first` to `last`, by one request."""
        length, segment = self._table.piece_bytes, self._segment
        begin, end = first * length, min((last + 1) * length, segment.size_bytes)
        data = self._archive.read(segment, segment.start + begin, end - begin)
        return [self._checked(number, data[number * length - begin :][:length]) for number in range(first, last + 1)]

    def _checked(self, number: int, data: bytes) -> bytes:
        expected, found = int(self._table.pieces[number]), zlib.crc32(data)
        if expected == found:
            return data
        at = number * self._table.piece_bytes
        problem = "a piece of an archived segment does not match its CRC32"
        if not self._skip_corrupt:
            raise CorruptFile(self._segment.name, problem, offset=at, expected=expected, found=found)
        begin = self._segment.start + at
        damage = SkippedRange(begin, begin + len(data), problem, self._segment.name)
        if damage not in self.damaged:
            self.damaged.append(damage)
        return b"\xff" * len(data)


@dataclass(frozen=True, slots=True)
class _ArchivedFile(Segment):
    pieces: _Pieces

    @property
    def is_closed(self) -> bool:
        return True  # only such are archived

    def read(self, size_bytes: int, position: int) -> bytes:
        return self.pieces.read(size_bytes, position)


class ArchivedLog(CommitLogReader):
    """A log of one archived segment. Bodies are checked."""

    def __init__(
        self, archive: SegmentArchive, segment: ArchivedSegment, *, skip_corrupt: bool = False, chunk_bytes: int = 1 << 24
    ) -> None:
        """Fetch the table of the segment's pieces. Raises `CorruptFile` where it contradicts the log, what the storage raises."""
        super().__init__(Path(segment.name).parent, chunk_bytes, check_crc=True)
        pieces = _Pieces(archive, segment, skip_corrupt)
        object.__setattr__(self, "_pieces", pieces)
        object.__setattr__(self, "_segment", _ArchivedFile(Path(segment.name), segment.start, segment.size_bytes, segment.end, pieces))

    _pieces: _Pieces
    _segment: _ArchivedFile

    @property
    def damaged(self) -> tuple[SkippedRange, ...]:
        """The pieces that did not match, of those that have been read so far; no message that reaches into one can be believed."""
        return tuple(self._pieces.damaged)

    def segments(self) -> tuple[Segment, ...]:
        """Return the segment."""
        return (self._segment,)
