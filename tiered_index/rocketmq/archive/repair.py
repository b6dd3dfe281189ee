"""Damaged and missing archived segments, put back under new names: from other uploads, a copied index or the source.

A copy is good where its bytes have the CRC32 that the log keeps. Of a segment out of which messages were erased the
source's file, or an upload of before, is one too: the log keeps that one's CRC32 for followers. Then all messages are
overwritten that any tombstone the log ever stated hides: those that were erased, and those that were hidden only. Where
the log can't tell all of them, since it began as a copy of another, the segment is left and named. What has no good
copy is given up if that is asked for. One thread.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tiered_index.errors import CorruptFile, InvalidArgument, ObjectNotFound
from tiered_index.format.archived import SegmentSums, SegmentTable
from tiered_index.format.hashing import code_units, hash_batch
from tiered_index.format.names import store_prefix
from tiered_index.rocketmq.archive.erasure import overwritten
from tiered_index.rocketmq.log.columns import IndexBatch, MessageColumns
from tiered_index.rocketmq.log.commitlog import CommitLogReader
from tiered_index.rocketmq.log.layout import ERASED
from tiered_index.rocketmq.log.property_columns import key_columns
from tiered_index.rocketmq.log.segments import Segment, list_segments
from tiered_index.rocketmq.log.store import StoreDirectory
from tiered_index.service.checks.checks import check_segments
from tiered_index.service.checks.repair import Repair
from tiered_index.service.checks.report import Report
from tiered_index.service.erasure.segments import Patch, patched, put_in_place
from tiered_index.service.lifecycle.segment_archive import SegmentArchive
from tiered_index.service.log.log import StorageLog, own_objects
from tiered_index.service.log.records import ArchivedSegment, LogRecord
from tiered_index.service.log.state import LogState
from tiered_index.storage.base import Storage
from tiered_index.tombstones import Tombstones

_STEP_BYTES = 16 << 20


@dataclass(frozen=True)
class SegmentRepairs:
    """Repairs the archived segments of one index. `standby` has a copy of the index, `source` is a store's folder;
    `give_up`: a log record removes what has no good copy.
    """

    storage: Storage
    log: StorageLog
    standby: Storage | None = None
    source: StoreDirectory | None = None
    give_up: bool = False
    # what the last run found, or put in its place: by the names of segments, None for those that were given up
    _found: dict[str, tuple[_Copy, tuple[Patch, ...]] | None] = field(default_factory=dict)

    def run(self, report: Report, *, yes: bool) -> list[Repair]:
        """Return what is done about the findings of a deep `report` in archived segments; without `yes` nothing is.
        Why a copy is no good, though it seems to be one, becomes a note of the report. Raises as `Repairs.run`.
        """
        found = {one.file for one in report.findings}
        done: list[Repair] = []
        for segment in [one for one in self.log.refresh().archive.values() if one.name in found]:
            again = Report()
            check_segments(self.storage, [segment], again, lambda number, what: None, deep=True)
            if not again.findings:
                continue
            if (repair := self._repaired(segment, report, yes=yes)) is not None:
                done.append(repair)
            elif self.give_up:
                done.append(self._given_up(segment, yes=yes))
        return done

    def mended(self, archive: SegmentArchive, state: LogState) -> tuple[SegmentArchive, LogState]:
        """Return the archive and the state of the log as they are after the last run, or would be."""
        kept = {name: one for name, one in state.archive.items() if self._found.get(name, ()) is not None}
        copies = {name: known for name, known in self._found.items() if known is not None}
        mended = _MendedArchive(archive.storage, archive.state, archive.refresh, copies)
        return mended, replace(state, archive=kept)

    def _given_up(self, segment: ArchivedSegment, *, yes: bool) -> Repair:
        def make(state: LogState) -> LogRecord | None:
            if segment.name not in state.archive:
                return None  # an earlier try got as far as the log, or it has expired
            return LogRecord(0, "remove", 0, "", 0, remove=(segment.name,))

        if yes:
            self.log.append("an archived segment that was lost", None, make)
        self._found[segment.name] = None
        return Repair(segment.name, "give up", f"offsets {segment.start:,} to {segment.end:,} of {segment.store}")

    def _repaired(self, segment: ArchivedSegment, report: Report, *, yes: bool) -> Repair | None:
        originals: list[_Copy] = []
        for copy in self._copies(segment):
            crc32 = copy.crc32()
            if crc32 == segment.crc32:
                self._found[segment.name] = copy, ()
                name = self._put_in_place(segment, copy, crc32, ()) if yes else None
                return Repair(segment.name, "restore", copy.name, name)
            if segment.source is not None and crc32 == segment.source[0]:
                originals.append(copy)
        for copy in originals[:1]:
            try:
                stones = self._stated(segment)
                patches = _patches_of(copy, stones)
            except CorruptFile as error:
                report.note(f"{segment.name} is not restored from {copy.name}: {error}")
                return None
            self._found[segment.name] = copy, patches
            name = self._put_in_place(segment, copy, copy.crc32(), patches) if yes else None
            return Repair(segment.name, "restore", f"{copy.name}, erased messages left out", name)
        return None

    def _copies(self, segment: ArchivedSegment) -> Iterator[_Copy]:
        """Yield what may have the bytes of a segment."""
        prefix = f"{store_prefix(segment.store)}{segment.start:020d}/"
        for info in list(own_objects(self.storage, prefix)):
            if info.name != segment.name:
                yield _Copy.of_object(self.storage, info.name, info.name, segment)
        if self.standby is not None:
            for info in list(own_objects(self.standby, prefix)):
                yield _Copy.of_object(self.standby, info.name, f"{self.standby.uri}: {info.name}", segment)
        if self.source is not None and self.source.name == segment.store:
            for file in list_segments(self.source.commitlog):
                if file.start == segment.start:
                    yield _Copy(str(file.path), segment, file.read)

    def _stated(self, segment: ArchivedSegment) -> Tombstones:
        """Return all tombstones that the log ever stated. Raises `CorruptFile` where more may have been erased."""
        stones = Tombstones()
        for number in range(1, self.log.refresh().number + 1):
            record = self.log.record(number)
            if record.expired:
                stones = stones.joined(record.expired.tombstones)
            for one in record.archive:
                if one.place == segment.place and one.source is not None and record.kind not in ("erase", "repair"):
                    problem = f"record {number} has it from another index, whose log says what was erased out of it"
                    raise CorruptFile(segment.name, problem)
        return stones

    def _put_in_place(
        self, segment: ArchivedSegment, copy: _Copy, crc32: int | None, patches: tuple[Patch, ...]
    ) -> str | None:
        """Send the copy; None: the segment was replaced or removed meanwhile."""

        def pieces(part_bytes: int) -> Iterator[bytes]:
            sent = 0
            for data in copy.pieces(part_bytes):
                sent = zlib.crc32(data, sent)
                yield data
            CorruptFile.unless_equal(copy.name, "changed while it was read", crc32, sent)

        state = put_in_place(
            self.storage, self.log, segment, lambda part_bytes: patched(pieces(part_bytes), patches), "repair"
        )
        there = state.segment_at(*segment.place)
        return there.name if there is not None else None


class _Copy(Segment):
    """What may have the bytes of a segment, read as if it were a file of the source's log."""

    is_closed = True

    def __init__(self, name: str, segment: ArchivedSegment, read: Callable[[int, int], bytes]) -> None:
        super().__init__(Path(name), segment.start, segment.size_bytes, segment.end)
        self.name, self._read = name, read

    @classmethod
    def of_object(cls, storage: Storage, name: str, called: str, segment: ArchivedSegment) -> _Copy:
        """Return one that lies in a storage."""
        return cls(called, segment, lambda size_bytes, position: storage.get_range(name, position, size_bytes))

    def read(self, size_bytes: int, position: int) -> bytes:
        """Return up to `size_bytes` bytes at `position`, fewer only at the end of the segment."""
        size = min(size_bytes, self.file_size - position)
        return self._read(size, position) if size > 0 else b""

    def pieces(self, length: int) -> Iterator[bytes]:
        """Yield the bytes, `length` at a time."""
        for position in range(0, self.file_size, length):
            yield self.read(length, position)

    def crc32(self) -> int | None:
        """Return the CRC32 of the bytes, None where they are fewer than the segment's or gone."""
        crc32 = read = 0
        with contextlib.suppress(ObjectNotFound, InvalidArgument, FileNotFoundError):
            for data in self.pieces(_STEP_BYTES):
                crc32, read = zlib.crc32(data, crc32), read + len(data)
        return crc32 if read == self.file_size else None


@dataclass(frozen=True)
class _MendedArchive(SegmentArchive):
    """An archive of which some segments are read from their copies, by name."""

    copies: Mapping[str, tuple[_Copy, tuple[Patch, ...]]]

    def read(self, segment: ArchivedSegment, offset: int, length: int) -> bytes:
        if (known := self.copies.get(segment.name)) is None:
            return super().read(segment, offset, length)
        copy, patches = known
        position = offset - segment.start
        return b"".join(patched([copy.read(length, position)], patches, position))

    def table(self, segment: ArchivedSegment) -> SegmentTable:
        """As that of the archive; a copy is read whole."""
        if (known := self.copies.get(segment.name)) is None:
            return super().table(segment)
        sums = SegmentSums()
        for data in patched(known[0].pieces(_STEP_BYTES), known[1]):
            sums.update(data)
        return sums.table(segment.start)


class _CopyLog(CommitLogReader):
    """A log of one copy."""

    def __init__(self, copy: _Copy) -> None:
        super().__init__(copy.path.parent)
        self._copy = copy

    def segments(self) -> tuple[Segment, ...]:
        """Return the copy."""
        return (self._copy,)


def _patches_of(copy: _Copy, stones: Tombstones) -> tuple[Patch, ...]:
    """Return what overwrites all messages of a copy that are hidden. Raises `CorruptFile` where some can't be told."""
    patches: list[Patch] = []
    for batch in _CopyLog(copy).batches():
        if len(batch.positions):
            columns = MessageColumns(np.frombuffer(batch.data, np.uint8), batch.positions, batch.begin)
            for message in overwritten(columns, _hidden(batch, columns, stones), batch.begin - copy.start):
                patches += message
    return tuple(patches)


def _hidden(batch: IndexBatch, columns: MessageColumns, stones: Tombstones) -> npt.NDArray[np.int64]:
    """Return the places (i64, n) of the messages that are hidden, by a key of theirs, too."""
    topics, index = columns.topics()
    names = dict(enumerate(topics))
    seconds = columns.head["store_ms"] // 1000
    keys = key_columns(batch.data, columns.properties_at, columns.ends, tags=True)
    hashes, prints = hash_batch(topics, index[keys.message], code_units(keys.keys))

    def items(of: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.int64]]:
        return {"topic_id": index[of], "queue_id": columns.head["queue_id"][of]}

    everyone = np.arange(len(seconds))
    whole = Tombstones(tuple([one for one in stones if not one.hashes]))
    keyed = Tombstones(tuple([one for one in stones if one.hashes]))
    hidden = whole.hides(items(everyone), seconds, names) if len(whole) else np.zeros(len(seconds), np.bool_)
    if len(keyed) and len(hashes):
        rows = items(keys.message) | {"key_hash": hashes, "fingerprint": prints}
        hidden[keys.message[keyed.hides(rows, seconds[keys.message], names)]] = True
    return np.flatnonzero(hidden & (columns.head["sys_flag"] & ERASED == 0))
