"""The segments of a broker's store for repairs of the archive (`service/jobs/repair.py`), and their erased messages.

The messages that were erased are those that the damaged object marks as erased, or that the tombstones of that time
hide. A tombstone has only a hash of a key, which other keys may have: so the repair checks the result's CRC32. One
thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tiered_index.connectors.rocketmq.archive.erasure import SYS_FLAG_AT, MessagePatches, overwritten
from tiered_index.connectors.rocketmq.log.columns import IndexBatch, MessageColumns
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader
from tiered_index.connectors.rocketmq.log.layout import ERASED
from tiered_index.connectors.rocketmq.log.property_columns import key_columns
from tiered_index.connectors.rocketmq.log.segments import Segment, list_segments
from tiered_index.connectors.rocketmq.log.store import StoreDirectory
from tiered_index.errors import CorruptFile, InvalidArgument, ObjectNotFound
from tiered_index.format.keys.hashing import code_units, hash_batch
from tiered_index.service.jobs.repair import Copy
from tiered_index.service.log.expired import Expired
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import ArchivedSegment, LogRecord
from tiered_index.service.log.tombstones import Tombstones
from tiered_index.service.read.segments.segments import Segments
from tiered_index.storage.base import Storage

Erased = Callable[[IndexBatch, MessageColumns], npt.NDArray[np.int64]]
"""Returns the indices (i64, n) of the erased messages of a batch."""


@dataclass(frozen=True)
class StoreSegments:
    """The segments of the archive in `storage` as the broker wrote them: a `SourceOfSegments`.

    `store` has the broker's files; None: there are none.
    """

    storage: Storage
    log: StorageLog
    store: StoreDirectory | None = None

    def lacks(self) -> str | None:
        """Return why the store restores nothing; None: it may."""
        stores = Segments(self.log.state, self.storage).byte_stores
        if self.store is None or not stores or self.store.name in stores:
            return None
        names = ", ".join(map(repr, stores))
        return (
            f"{self.store.folder} restores nothing: the index has archived segments of {names}, not of "
            f"{self.store.name!r}. Pass the name in the index with --store-name"
        )

    def copies(self, segment: ArchivedSegment) -> Iterator[Copy]:
        """Yield the store's file of a segment, if there is one."""
        if self.store is not None and self.store.name == segment.store:
            for file in list_segments(self.store.commitlog):
                if file.start == segment.start:
                    yield Copy(str(file.path), segment.size_bytes, partial(_read, file))

    def erasures(self, segment: ArchivedSegment, copy: Copy) -> Iterator[MessagePatches]:
        """Yield possible erasures in a copy of the source's bytes, as patches."""
        damaged = Copy.of_segment(self.storage, segment.name, segment.name, segment)

        def marked(batch: IndexBatch, _: MessageColumns) -> npt.NDArray[np.int64]:
            """They may be wrong."""
            begin = batch.begin - segment.start
            data = damaged.read(begin, min(len(batch.data), damaged.size_bytes - begin))
            flags = [data[at + SYS_FLAG_AT : at + SYS_FLAG_AT + 4] for at in np.asarray(batch.positions).tolist()]
            return np.flatnonzero([int.from_bytes(flag, "big") & ERASED for flag in flags])

        with contextlib.suppress(ObjectNotFound, InvalidArgument):
            yield _patches_of(segment, copy, marked)
        # not within: a log that went back in time is no damage of a record
        last = self.log.refresh().number
        with contextlib.suppress(CorruptFile):
            stones = self._stated(segment, last)
            yield _patches_of(segment, copy, lambda batch, columns: _hidden(batch, columns, stones))

    def _stated(self, segment: ArchivedSegment, last: int) -> Tombstones:
        """Return the tombstones at the last erasure of messages of the segment, by the records up to `last`."""
        stones = erased = Tombstones()
        for number in range(1, last + 1):
            record = self.log.record(number)
            stones = stones.joined(record.expired.tombstones)
            # a repair stores the same bytes: tombstones since the last erasure do not apply to them
            if record.kind != "repair" and _states(record, segment):
                erased = stones
        return erased


def _states(record: LogRecord, segment: ArchivedSegment) -> bool:
    """Return whether a record replaces a segment, or is of a copy and brings it."""
    listed = record.catalogs if record.copied else ()
    replaced = any(gone.place == segment.place for gone in record.retire)
    return replaced or any(stored.has(*segment.place) for stored in listed)


def _read(file: Segment, position: int, length: int) -> bytes:
    return file.read(length, position)


def _patches_of(segment: ArchivedSegment, copy: Copy, erased: Erased) -> MessagePatches:
    """Return the patches that erase messages of a copy of a segment."""
    whole = Segment(
        Path(segment.name), segment.start, copy.size_bytes, segment.end, lambda length, at: copy.read(at, length)
    )
    rows = []
    # as an erasure reads it: damage of the log itself is skipped
    log = CommitLogReader(whole.path.parent, check_crc=True, fixed=(whole,))
    for batch in log.batches(skip_corrupt=True):
        columns = batch.message_columns()
        rows.append(overwritten(columns, erased(batch, columns), batch.begin - segment.start))
    return MessagePatches(tuple(rows))


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
    whole = Expired(tombstones=tuple([stone for stone in stones if not stone.hashes]))
    keyed = Expired(tombstones=tuple([stone for stone in stones if stone.hashes]))
    hidden = ~whole.keeps(items(everyone), seconds, names)
    if len(hashes):
        rows = items(keys.message) | {"key_hash": hashes, "fingerprint": prints}
        hidden[keys.message[~keyed.keeps(rows, seconds[keys.message], names)]] = True
    return np.flatnonzero(hidden & (columns.head["sys_flag"] & ERASED == 0))
