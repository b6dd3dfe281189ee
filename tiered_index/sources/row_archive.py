"""Copies of the rows of files in an index's archive: Parquet files, as those of Kafka's records.

The copies of a log of files have a store of their own, with the same offsets (`rows_store`). A row is copied before its
entries are put. So the log says up to which offset rows are copied, and a run that was killed copies only the rest. A
row has its keys beside its text, so that a lookup and an erasure need no other file. One thread uses a `RowArchiver`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.errors import CorruptFile, ObjectNotFound
from tiered_index.format.columnar import NUMBER, decode_columns, encode_columns, row_group_of
from tiered_index.format.names import ROWS, rows_store, topic_of_store
from tiered_index.format.segment import times_of
from tiered_index.service.index import IndexService
from tiered_index.service.jobs.erase import EraseRequest
from tiered_index.service.jobs.erase_segments import FoundMessages
from tiered_index.service.jobs.segment_archive import SegmentArchive
from tiered_index.service.log.records import ArchivedSegment
from tiered_index.service.read.messages import Search
from tiered_index.sources.restart import group_rows
from tiered_index.sources.rows.batch import RowBatch

SCHEMA = pa.schema(
    {
        "topic": pa.string(),
        "file": pa.string(),
        "row": pa.int64(),
        "line": pa.int64(),
        NUMBER: pa.int64(),
        "timestamp": pa.timestamp("ms", "UTC"),
        "keys": pa.list_(pa.string()),
        "text": pa.binary(),
    }
)
# the columns of texts in a file
_TEXTS = ("file", "keys.list.element", "text")
SEGMENT_BYTES = 32 << 20
"""About the bytes of rows in one object, before they are compressed."""


def encode_rows(table: pa.Table) -> bytes:
    """Return the archived file of rows."""
    sizes = pc.binary_length(table["text"]).to_numpy().astype(np.int64) + 40 * pc.list_value_length(
        table["keys"]
    ).to_numpy().astype(np.int64)
    return encode_columns(table, sizes, _TEXTS, {})


def archived_row(
    archive: SegmentArchive, segment: ArchivedSegment, offset: int, search: Search
) -> dict[str, Any] | None:
    """Return the row at an offset of a segment, by column; None: it has none. `search` is charged.

    Raises `ObjectNotFound` (removed), `CorruptFile`, and the errors of the storage.
    """
    rows = group_rows(archive, segment, partial(row_group_of, number=offset), search)
    if rows is None:
        return None
    at = rows.column(NUMBER).index(offset).as_py()
    return rows.slice(at, 1).to_pylist()[0] if at >= 0 else None


class RowArchiver:
    """Copies the rows of one log of files."""

    def __init__(self, index: IndexService, store: str) -> None:
        self._index, self.store = index, rows_store(store)
        self._parts: list[pa.Table] = []
        self.size_bytes = 0
        """The bytes of rows that wait for the next `send`."""
        self._begin, self._end = 0, self.end
        self.archived = 0
        """The number of objects that were sent."""

    @property
    def end(self) -> int:
        """The offset before which rows are copied, or were."""
        segments = self._index.segment_archive.segments()
        return max(segments.end(self.store), segments.state.expired.segments.get(self.store, 0))

    def add(self, topics: pa.DictionaryArray, uri: str, batch: RowBatch, shift: int) -> None:
        """Let the rows of a batch wait. `topics` has that of each row; `shift` is added to positions as offsets."""
        begin, (of_keys, keys) = max(self._end, batch.begin + shift), batch.by_entry()
        order = np.argsort(batch.positions[of_keys], kind="stable")
        order = order[batch.positions[of_keys[order]] + shift >= begin]
        of_keys = of_keys[order]
        positions, firsts = np.unique(batch.positions[of_keys], return_index=True)
        rows = of_keys[firsts]
        if not self._parts:
            self._begin = begin
        self._end = max(self._end, batch.end + shift)
        if not len(positions):
            return
        texts = pa.array(batch.texts(positions, batch.sizes[rows]), pa.binary())
        ends = np.append(firsts, len(order)).astype(np.int32)
        in_order = keys.take(pa.array(order)).cast(pa.string()).combine_chunks()
        columns = {
            "topic": topics.take(pa.array(rows)).cast(pa.string()),
            "file": pa.repeat(pa.scalar(uri, pa.string()), len(positions)),
            "row": pa.array(positions),
            "line": pa.nulls(len(positions), pa.int64()) if (of_text := batch.lines(positions)) is None else of_text,
            NUMBER: pa.array(positions + shift),
            "timestamp": pa.array(batch.times_ms[rows]).cast(SCHEMA.field("timestamp").type),
            "keys": pa.ListArray.from_arrays(pa.array(ends), in_order),
            "text": texts,
        }
        self._parts.append(pa.table(columns, schema=SCHEMA))
        self.size_bytes += self._parts[-1].nbytes

    def send(self) -> None:
        """Archive the rows that wait, by one object and one record. Raises as `IndexService.archive_columns`."""
        parts, self._parts, self.size_bytes = self._parts, [], 0
        if not parts:
            return
        table = pa.concat_tables(parts).combine_chunks()
        times = times_of(table["timestamp"].cast(pa.int64()).to_numpy())
        place = self.store, self._begin
        if self._index.send_columns(*place, self._end - self._begin, encode_rows(table), len(table), times):
            self.archived += self._index.name_columns([place])

    def begin_again(self) -> None:
        """Forget the rows that wait."""
        self._parts, self.size_bytes, self._end = [], 0, self.end


@dataclass(frozen=True)
class RowsToErase:
    """Finds the rows of a request in the archived copies of files: a `FindMessages`.

    Rows with a time before `before_ms` are erased. `keyed`: the index has fingerprints.
    """

    request: EraseRequest
    before_ms: int
    keyed: bool = True

    def __call__(self, archive: SegmentArchive, segment: ArchivedSegment) -> FoundMessages:
        """Return the result for a segment. Raises as the storage."""
        request, queue = self.request, segment.store.rpartition("/")[2]
        if topic_of_store(segment.store) not in (request.topic, None) or str(request.queue_id) not in ("None", queue):
            return FoundMessages()
        try:
            table = decode_columns(archive.verified(segment, 0, segment.size_bytes))
        except (CorruptFile, ObjectNotFound) as error:
            return FoundMessages(problem=str(error))
        is_due = pc.and_(
            pc.equal(table["topic"], request.topic),
            pc.less(table["timestamp"].cast(pa.int64()), self.before_ms // 1000 * 1000),
        )
        stays, others, sought = np.ones(len(table), bool), list[str](), set(request.spellings)
        due = np.flatnonzero(is_due.to_numpy())
        for at, keys in zip(due.tolist(), table["keys"].take(pa.array(due)).to_pylist(), strict=True):
            others += {*keys} - sought if sought else ()
            stays[at] = bool(sought) and sought.isdisjoint(keys)
        if stays.all():
            return FoundMessages()
        hashed = pa.array(others, pa.large_string())
        collisions = request.collisions(hashed, np.zeros(len(others), np.bool_), keyed=self.keyed)
        rest = table.filter(pa.array(stays)).cast(SCHEMA)
        times = times_of(rest["timestamp"].cast(pa.int64()).to_numpy())
        gone = len(table) - len(rest)
        return FoundMessages(gone, file=encode_rows(rest), collisions=collisions, rows=len(rest), times=times)


def has_rows(segment: ArchivedSegment) -> bool:
    """Return whether an archived segment has rows of files."""
    return segment.store.startswith(ROWS)
