"""The entries of archived segments, as a follower would have put them: to make an index, or parts of one, anew.

Segments come in the order of their log, each read by ranged requests and checked against its table. Memory: some chunks
of 16 MiB. One thread a reading.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from tiered_index.rocketmq.archive.archive import ArchivedLog
from tiered_index.rocketmq.log.columns import IndexBatch, Selection, SkippedRange
from tiered_index.rocketmq.log.commitlog import CommitLogReader, MissingOffsets
from tiered_index.rocketmq.log.store import StoreDirectory
from tiered_index.service.lifecycle.segment_archive import SegmentArchive
from tiered_index.service.log.records import ArchivedSegment
from tiered_index.service.log.state import LogState

# how far a broker's clock may have gone back within a log of which only a time range is read
_BACK_MS = 3_600_000


def archived_batches(
    archive: SegmentArchive,
    segments: Sequence[ArchivedSegment],
    position: int | None,
    selection: Selection,
    *,
    skip_corrupt: bool = False,
    skip_missing: bool = False,
) -> Iterator[IndexBatch]:
    """Yield the entries of one store's segments from a position of its log (None: the first segment's) on.

    Raises `CorruptFile` at damage and `MissingOffsets` where a segment is missing in between; with `skip_corrupt` and
    `skip_missing` the next batch says what was `skipped` instead. Messages that reach into a damaged piece are skipped.
    """
    missing: tuple[SkippedRange, ...] = ()
    for segment in segments:
        if position is not None and segment.end <= position:
            continue
        begin = segment.start if position is None else max(position, segment.start)
        if position is not None and begin > position:
            gap = MissingOffsets(segment.name, "no archived segment has them", position, begin)
            if not skip_missing:
                raise gap
            missing = (SkippedRange(position, begin, gap.problem, gap.file),)
        log = ArchivedLog(archive, segment, skip_corrupt=skip_corrupt, selection=selection)
        for batch in log.batches(begin, skip_corrupt=skip_corrupt):
            yield replace(batch, columns=trusted(batch.columns, log), skipped=missing + batch.skipped)
            missing = ()
            if batch.end >= segment.end:
                break
        position = segment.end


def trusted(columns: Any, log: CommitLogReader) -> Any:
    """Return the rows whose messages lie wholly in pieces of the archived segment that match their checksums."""
    if len(columns) and isinstance(log, ArchivedLog) and log.damaged:
        begin = columns.column("offset").to_numpy()
        end = begin + columns.column("size").to_numpy()
        bad = np.zeros(len(begin), np.bool_)
        for piece in log.damaged:
            bad |= (begin < piece.end) & (end > piece.begin)
        columns = columns.filter(pa.array(~bad))
    return columns


def entries_of_messages(
    archive: SegmentArchive, state: LogState, store: StoreDirectory | None, second_min: int, second_max: int
) -> Iterator[Any]:
    """Yield columns of the messages of an inclusive range of epoch seconds, and of others, each once: those of archived
    segments, and of a local `store`, which is read where both have them.
    """
    reader = CommitLogReader(store.commitlog, check_crc=True, selection=Selection()) if store is not None else None
    local = reader.begin_offset() if reader is not None else None
    for name in state.stores:
        is_local = store is not None and name == store.name and local is not None
        segments = [
            segment
            for segment in state.segments_of(name)
            # what it holds is older than its upload
            if segment.published_ms >= second_min * 1000 and not (is_local and segment.start >= (local or 0))
        ]
        for segment in segments:
            passed = False
            for batch in archived_batches(archive, [segment], None, Selection()):
                yield batch.columns
                passed = batch.last_store_ms is not None and batch.last_store_ms > second_max * 1000 + _BACK_MS
                if passed:
                    break
            if passed:
                break
    if reader is not None and local is not None:
        for batch in reader.batches(local):
            yield batch.columns
