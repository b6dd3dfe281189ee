"""Restores damaged and missing archived segments under new names, from other uploads, a copied index or the source.

A copy is used only if its bytes have the segment's CRC32 in the log. If messages of the segment were erased, the
source's file and earlier uploads still have them. The repair then overwrites, in a copy, the messages that the damaged
object marks as erased, or that the tombstones of that time hide. This result, too, must have the segment's CRC32: a
tombstone has only a hash of a key, which other keys may have. One thread.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tiered_index.errors import CorruptFile, InvalidArgument, ObjectArchived, ObjectNotFound
from tiered_index.format.hashing import code_units, hash_batch
from tiered_index.format.names import store_prefix
from tiered_index.rocketmq.archive.erasure import SYS_FLAG_AT, MessagePatches, overwritten
from tiered_index.rocketmq.log.columns import IndexBatch, MessageColumns
from tiered_index.rocketmq.log.commitlog import CommitLogReader
from tiered_index.rocketmq.log.layout import ERASED
from tiered_index.rocketmq.log.property_columns import key_columns
from tiered_index.rocketmq.log.segments import Segment, list_segments
from tiered_index.rocketmq.log.store import StoreDirectory
from tiered_index.service.jobs.catalogs import replace_catalog
from tiered_index.service.jobs.erase_segments import Patch, patched, replace_segment
from tiered_index.service.jobs.repair import Repair
from tiered_index.service.jobs.verify_report import Report
from tiered_index.service.jobs.whole import is_bad
from tiered_index.service.log.log import StorageLog, own_objects
from tiered_index.service.log.records import ArchivedSegment, StoredCatalog
from tiered_index.service.log.state import LogState
from tiered_index.service.read.segments import Segments
from tiered_index.storage.base import Storage
from tiered_index.tombstones import Tombstones

_STEP_BYTES = 16 << 20


@dataclass(frozen=True)
class SegmentRepairs:
    """Repairs the archived segments of one index.

    `standby` is the storage of a copy of the index, `source` a store's folder.
    """

    storage: Storage
    log: StorageLog
    standby: Storage | None = None
    source: StoreDirectory | None = None

    def run(self, report: Report, *, yes: bool) -> list[Repair]:
        """Repair the archived segments with findings in a deep `report`; return the repairs. Without `yes` only plan.

        Adds a note to the report for a copy that can't be used. Raises as `Repairs.run`.
        """
        reported = {defect.file for defect in report.findings}
        catalogs = [stored for name, stored in self.log.refresh().catalogs.items() if name in reported]
        done = [repair for stored in catalogs if (repair := self._repaired_catalog(stored, yes=yes)) is not None]
        for segment in Segments(self.log.refresh(), self.storage).named(reported):
            if not is_bad(self.storage, segment):
                continue
            if (repair := self._repaired(segment, report, yes=yes)) is not None:
                done.append(repair)
        return done

    def _repaired_catalog(self, stored: StoredCatalog, *, yes: bool) -> Repair | None:
        """Restore a catalog from the copy of the index, whose catalogs have the same names."""
        if self.standby is None:
            return None
        name, fresh = stored.name, None
        try:
            if is_bad(self.standby, stored):
                return None
        except ObjectArchived:
            return None
        if yes:
            rows = Segments(LogState(catalogs={name: stored}), self.standby)
            fresh = replace_catalog(self.log, stored, rows.all)
        return Repair(name, "restore", f"{self.standby.uri}: {name}", fresh)

    def _repaired(self, segment: ArchivedSegment, report: Report, *, yes: bool) -> Repair | None:
        originals: list[_Copy] = []
        for copy in self._copies(segment):
            crc32 = copy.crc32()
            if crc32 == segment.crc32:
                name = self._put_in_place(segment, copy, ()) if yes else None
                return Repair(segment.name, "restore", copy.name, name)
            if segment.columns is None and segment.source is not None and crc32 == segment.source[0]:
                originals.append(copy)
        for copy in originals[:1]:
            for patches in self._erasures(segment, copy):
                if copy.crc32(patches) == segment.crc32:
                    name = self._put_in_place(segment, copy, patches) if yes else None
                    return Repair(segment.name, "restore", f"{copy.name}, erased messages left out", name)
            report.note(
                f"{segment.name} is not restored from {copy.name}: the log and the damaged object do not show exactly "
                f"which of its messages were erased. Pass --from with a copy of the index that has the segment"
            )
        return None

    def _erasures(self, segment: ArchivedSegment, copy: _Copy) -> Iterator[MessagePatches]:
        """Yield possible erasures in a segment, as patches of the source's bytes; the caller checks the CRC32."""
        damaged = _Copy.of_object(self.storage, segment.name, segment.name, segment)
        with contextlib.suppress(ObjectNotFound, InvalidArgument):
            yield _patches_of(copy, lambda batch, columns: _marked(batch, damaged))
        with contextlib.suppress(CorruptFile):
            stones = self._stated(segment)
            yield _patches_of(copy, lambda batch, columns: _hidden(batch, columns, stones))

    def _copies(self, segment: ArchivedSegment) -> Iterator[_Copy]:
        """Yield possible copies of a segment."""
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
                    yield _Copy.of_file(file, segment)

    def _stated(self, segment: ArchivedSegment) -> Tombstones:
        """Return the tombstones of the log at the last erasure of messages of the segment."""
        stones = erased = Tombstones()
        for number in range(1, self.log.refresh().number + 1):
            record = self.log.record(number)
            if record.expired:
                stones = stones.joined(record.expired.tombstones)
            # a repair stores the same bytes: tombstones since the last erasure do not apply to them
            if record.kind != "repair" and any(archived.place == segment.place for archived in record.archive):
                erased = stones
        return erased

    def _put_in_place(self, segment: ArchivedSegment, copy: _Copy, patches: Iterable[Patch]) -> str | None:
        """Store the copy and return its object's name; None: another record replaced or removed the segment."""

        def pieces(part_bytes: int) -> Iterator[bytes]:
            sent = 0
            for data in patched(copy.pieces(part_bytes), patches):
                sent = zlib.crc32(data, sent)
                yield data
            CorruptFile.unless_equal(copy.name, "changed while it was read", segment.crc32, sent)

        return replace_segment(self.log, segment, pieces)


@dataclass(frozen=True)
class _Copy:
    """A possible copy of a segment, called `name` in reports, and its bytes."""

    name: str
    segment: Segment

    @classmethod
    def of_object(cls, storage: Storage, name: str, called: str, segment: ArchivedSegment) -> _Copy:
        """Return the copy in an object of a storage."""

        def fetch(size_bytes: int, position: int) -> bytes:
            return b"".join(storage.get_range(name, *extent) for extent in segment.ranges(position, size_bytes))

        end = segment.start + segment.size_bytes
        return cls(called, Segment(Path(name), segment.start, segment.size_bytes, end, fetch))

    @classmethod
    def of_file(cls, file: Segment, segment: ArchivedSegment) -> _Copy:
        """Return the copy in a file of the source."""
        return cls(str(file.path), Segment(file.path, segment.start, segment.size_bytes, segment.end, file.read))

    def pieces(self, length: int) -> Iterator[bytes]:
        """Yield the bytes, `length` at a time."""
        for position in range(0, self.segment.file_size, length):
            yield self.segment.read(length, position)

    def crc32(self, patches: Iterable[Patch] = ()) -> int | None:
        """Return the CRC32 of the bytes with `patches` applied; None if bytes are missing."""
        crc32 = read = 0
        with contextlib.suppress(ObjectNotFound, InvalidArgument, FileNotFoundError):
            for data in patched(self.pieces(_STEP_BYTES), patches):
                crc32, read = zlib.crc32(data, crc32), read + len(data)
        return crc32 if read == self.segment.file_size else None


def _patches_of(copy: _Copy, erased: Callable[[IndexBatch, MessageColumns], npt.NDArray[np.int64]]) -> MessagePatches:
    """Return the patches that erase the messages of a copy at the indices (i64, n) that `erased` returns."""
    rows = []
    # as an erasure reads it: damage of the log itself is skipped
    log = CommitLogReader(copy.segment.path.parent, check_crc=True, fixed=(copy.segment,))
    for batch in log.batches(skip_corrupt=True):
        columns = batch.message_columns()
        rows.append(overwritten(columns, erased(batch, columns), batch.begin - copy.segment.start))
    return MessagePatches(tuple(rows))


def _marked(batch: IndexBatch, damaged: _Copy) -> npt.NDArray[np.int64]:
    """Return the indices (i64, n) of the messages that a damaged copy marks as erased. They may be wrong."""
    data = damaged.segment.read(len(batch.data), batch.begin - damaged.segment.start)
    flags = [data[at + SYS_FLAG_AT : at + SYS_FLAG_AT + 4] for at in np.asarray(batch.positions).tolist()]
    return np.flatnonzero([int.from_bytes(flag, "big") & ERASED for flag in flags])


def _hidden(batch: IndexBatch, columns: MessageColumns, stones: Tombstones) -> npt.NDArray[np.int64]:
    """Return the indices (i64, n) of the messages that tombstones hide, also by one of their keys."""
    topics, index = columns.topics()
    names = dict(enumerate(topics))
    seconds = columns.head["store_ms"] // 1000
    keys = key_columns(batch.data, columns.properties_at, columns.ends, tags=True)
    hashes, prints = hash_batch(topics, index[keys.message], code_units(keys.keys))

    def items(of: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.int64]]:
        return {"topic_id": index[of], "queue_id": columns.head["queue_id"][of]}

    everyone = np.arange(len(seconds))
    whole = Tombstones(tuple([stone for stone in stones if not stone.hashes]))
    keyed = Tombstones(tuple([stone for stone in stones if stone.hashes]))
    hidden = whole.hides(items(everyone), seconds, names) if len(whole) else np.zeros(len(seconds), np.bool_)
    if len(keyed) and len(hashes):
        rows = items(keys.message) | {"key_hash": hashes, "fingerprint": prints}
        hidden[keys.message[keyed.hides(rows, seconds[keys.message], names)]] = True
    return np.flatnonzero(hidden & (columns.head["sys_flag"] & ERASED == 0))
