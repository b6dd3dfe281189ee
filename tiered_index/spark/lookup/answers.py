"""The answers of a bulk lookup: entries in answer order, one for each identity, cut to `max_count`; and their messages.

A task answers one partition of lookups after the other. Memory: a million rows and a partition's lookups, or with a
`max_count` of millions the rows of its answers. Messages are read each time that the DataFrame is used.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.clock import SystemClock
from tiered_index.errors import ConfigError, CorruptFile, InvalidArgument, StorageUnavailable
from tiered_index.format.arrow import array_of
from tiered_index.format.schema import Column as StoredColumn
from tiered_index.format.schema import Schema
from tiered_index.rocketmq.archive.messages import RocketmqMessages
from tiered_index.rocketmq.log.message import Message
from tiered_index.service.answers.batch import Matches, best_answers
from tiered_index.service.lifecycle.segment_archive import SegmentArchive
from tiered_index.service.log.log import StorageLog
from tiered_index.service.lookup.messages import Fetched
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.frames import arrow_function, arrow_schema, cells_of, gathered
from tiered_index.spark.lookup.plan import LOOKUP, LookupPlan, PackedBatch, distinct, places_of, records_of
from tiered_index.spark.lookup.search import ASKED, FAILED, FOUND, MISSING
from tiered_index.types import IndexItem

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_HELD_ROWS = 1 << 20
_BATCH_ROWS = 1 << 16
STATUSES = ("complete", "truncated", "partial")
_ENTRY = arrow_schema("topic_id int, queue_id int, offset long, size int, timestamp_ms long, key_hash int")
_FAILED = pa.list_(pa.struct([("file", pa.string()), ("error", pa.string())]))
Array = npt.NDArray[Any]


def entry_columns(schema: Schema) -> list[tuple[str, pa.DataType]]:
    """Return (name, type) of the columns of an entry in an answer."""
    plain = [(field.name, field.type) for field in _ENTRY]
    return plain + [(column.name, _arrow_type(column)) for column in schema.extra]


def column_names(schema: Schema, *, messages: str | None) -> list[str]:
    """Return the names of answers' columns. Raises `InvalidArgument` if a caller's column has the same name."""
    # `with_messages` makes and drops a column `_message`
    joined = ("_message", *MESSAGE_COLUMNS) if messages is not None else ()
    own = {"status", "failed", "position", *joined}
    if (clash := schema.clashing(own)) is not None:
        has = f"the index's entries have a column {clash!r}, which is the name of a column of answers"
        raise InvalidArgument(f"{has}: look up by the table function tiered_index_lookup")
    return ["_lookup", "status", "failed", "position", *(name for name, _ in entry_columns(schema)), *joined]


def answer_schema(plan: LookupPlan) -> pa.Schema:
    """Return the schema of `answer_partitions`; `_lookup` identifies a lookup as in blocks."""
    name = pa.binary() if plan.asked is None else pa.int64()
    own = ("_lookup", name), ("status", pa.string()), ("failed", _FAILED), ("position", pa.int32())
    return pa.schema([*own, *entry_columns(plan.schema)])


def _arrow_type(column: StoredColumn) -> pa.DataType:
    """Return a type of Spark for all values of a stored column."""
    if column.is_text:
        return pa.string()
    dtype = np.dtype(column.dtype)
    if dtype.kind in "iu":
        return pa.decimal128(20, 0) if dtype.kind == "u" and dtype.itemsize == 8 else pa.int64()
    return pa.float64() if dtype.kind == "f" else pa.binary()


def answer_partitions(batches: Iterable[pa.RecordBatch], plan: LookupPlan) -> Iterator[pa.RecordBatch]:
    """Yield the answers of blocks, which are sorted by partition and kind. Raises `StorageUnavailable` for `MISSING`.

    If the plan has all lookups, those of partitions without a block have no answer here: they have no entries.
    """
    partition, number = _Partition(plan, -1), -1
    for batch in batches:
        for here, kind, blocks in _runs(batch):
            if here != number:
                yield from partition.answers()
                partition, number = _Partition(plan, here), here
            partition.add(kind, blocks)
    yield from partition.answers()


def _runs(batch: pa.RecordBatch) -> Iterator[tuple[int, int, pa.RecordBatch]]:
    partitions, kinds = batch.column("partition").to_numpy(), batch.column("kind").to_numpy()
    starts = np.flatnonzero((np.diff(partitions, prepend=-1) != 0) | (np.diff(kinds, prepend=-1) != 0)).tolist()
    for start, stop in itertools.pairwise([*starts, len(kinds)]):
        yield int(partitions[start]), int(kinds[start]), batch.slice(start, stop - start)


class _Partition:
    def __init__(self, plan: LookupPlan, number: int) -> None:
        self._plan, self._number = plan, number
        self._asked: list[Array] = []
        self._held: list[Matches] = []
        self._count = 0
        self._failed: dict[int, list[dict[str, str]]] = {}

    def add(self, kind: int, blocks: pa.RecordBatch) -> None:
        if kind == MISSING:
            name = blocks.column("more")[0].as_py().decode()
            removed = f"{name} was removed since these keys were looked up"
            raise StorageUnavailable(f"{removed}, and Spark lost its data: look up again")
        if kind == ASKED:
            self._asked.append(records_of(blocks.column("lookups")))
        elif kind == FAILED:
            for cell, more in zip(blocks.column("lookups"), blocks.column("more").to_pylist(), strict=True):
                file, error = pickle.loads(more)
                for place in self._places(pa.array([cell.as_py()], pa.binary())).tolist():
                    self._failed.setdefault(place, []).append({"file": file, "error": error})
        elif kind == FOUND:
            places = self._places(blocks.column("lookups"))
            self._held.append(Matches(places, records_of(blocks.column("rows"), self._plan.schema.row)))
            self._count += len(places)
            if self._count > _HELD_ROWS:
                rows, starts, _ = best_answers(self.batch, self._held, self._plan.schema)
                self._held = [Matches(np.repeat(np.arange(len(self.batch)), np.diff(starts)), rows)]
                self._count = len(rows)

    def _places(self, cells: Any) -> npt.NDArray[np.int64]:
        """Return the places (i64, n) in the batch of the lookups of blocks."""
        if self._plan.asked is None:
            return places_of(self.batch.packed, records_of(cells))
        places: npt.NDArray[np.int64] = records_of(cells, np.dtype(np.int64)).copy()
        places -= self._plan.partition(self._number).start
        return places

    @cached_property
    def batch(self) -> PackedBatch:
        """All lookups of the partition, with `max_count` + 1 to recognise truncated answers."""
        if self._plan.asked is not None:
            asked = self._plan.asked[self._plan.partition(self._number)]
        else:
            asked = distinct(np.concatenate(self._asked)) if self._asked else np.zeros(0, LOOKUP)
        return PackedBatch(asked, self._plan.topics, self._plan.max_count + 1)

    def answers(self) -> Iterator[pa.RecordBatch]:
        if self._number < 0:
            return
        plan, most = self._plan, self._plan.max_count
        rows, starts, _ = best_answers(self.batch, self._held, plan.schema)
        self._held = []
        counts = np.diff(starts)
        rank = np.arange(len(rows)) - np.repeat(starts[:-1], counts)
        rows = rows[rank < most]
        status = (counts > most).astype(np.int8)
        status[list(self._failed)] = STATUSES.index("partial")
        counts = np.minimum(counts, most)
        rows["key_hash"] = np.repeat(self.batch.key_hash, counts)  # by rule abs, whatever the rule of the file
        if plan.schema.keyed:  # that of the key as given, whatever its spelling in the file
            rows["fingerprint"] = np.repeat(self.batch.fingerprint, counts)
        ends = np.cumsum(counts)
        first = 0
        while first < len(counts):
            # lookups with about `_BATCH_ROWS` rows, at least one lookup
            begin = int(ends[first] - counts[first])
            stop = max(first + 1, int(np.searchsorted(ends, begin + _BATCH_ROWS, "right")))
            stop = min(stop, first + _BATCH_ROWS)
            part = slice(first, stop)
            yield self._rows(part, rows[begin : int(ends[stop - 1])], counts[part], status[part])
            first = stop

    def _rows(self, part: slice, rows: Array, counts: Array, status: Array) -> pa.RecordBatch:
        failed = pa.nulls(part.stop - part.start, _FAILED)
        if self._failed:
            failed = pa.array([self._failed.get(place) for place in range(part.start, part.stop)], _FAILED)
        statuses = pa.DictionaryArray.from_arrays(pa.array(status), pa.array(STATUSES)).cast(pa.string())
        names = self._names(part)
        entries = [
            array_of(rows["second"] * 1000 if name == "timestamp_ms" else rows[name], kind)
            for name, kind in entry_columns(self._plan.schema)
        ]
        # a lookup without entries has one row
        index = np.repeat(np.arange(len(counts)), np.maximum(counts, 1))
        some = np.repeat(counts > 0, np.maximum(counts, 1))
        place = pa.array(np.cumsum(some) - 1, mask=~some)
        starts = np.cumsum(np.maximum(counts, 1)) - np.maximum(counts, 1)
        position = pa.array((np.arange(len(index)) - starts[index]).astype(np.int32), mask=~some)
        repeated = pa.array(index)
        head = [column.take(repeated) for column in (names, statuses, failed)]
        columns = [*head, position, *(column.take(place) for column in entries)]
        return pa.RecordBatch.from_arrays(columns, schema=answer_schema(self._plan))

    def _names(self, part: slice) -> pa.Array:
        """Return the column `_lookup` for a part of the partition's lookups."""
        if self._plan.asked is None:
            return cells_of(self.batch.packed[part], np.arange(part.stop - part.start))
        first = self._plan.partition(self._number).start
        return pa.array(np.arange(first + part.start, first + part.stop))


# Value of `messages` for the archived segments in the index's storage.
ARCHIVE = "archive"
MESSAGE_COLUMNS = ("message_state", "message_body", "message_tags", "message_properties", "message_problem")
_MESSAGE_TYPES = (pa.string(), pa.binary(), pa.string(), pa.map_(pa.string(), pa.string()), pa.string())
_ARROW = pa.struct(list(zip(MESSAGE_COLUMNS, _MESSAGE_TYPES, strict=True)))


def check_place(messages: str, offset_space: str) -> None:
    """Raise `ConfigError` if the index's offsets are not commit log offsets, or `messages` is not a store."""
    if offset_space != "commitlog":
        raise ConfigError(f"the index's offsets are in {offset_space!r}: messages are found by places in a commit log")
    if messages != ARCHIVE and not (Path(messages) / "commitlog").is_dir():
        raise ConfigError(
            f"messages is {ARCHIVE!r} or the folder of a RocketMQ store, and {messages} has no commitlog/"
        )


def with_messages(
    answers: DataFrame, topic: Column, key: Column, messages: str, address: StorageAddress, *, allow_partial: bool
) -> DataFrame:
    """Return the rows of `answers` (one for each entry) with `MESSAGE_COLUMNS`, which are null without an entry.

    `message_state` is that of `Fetched`, or ``other_key`` for a message of another key with the same hash. A read error
    fails the job; with `allow_partial` the message is ``missing``, and `message_problem` has the reason.
    """
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it
    from pyspark.sql.pandas.types import from_arrow_type

    def fetch(parts: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        with address.open() as storage:
            log = StorageLog(storage, SystemClock())
            log.open()
            archive = SegmentArchive(storage, lambda: log.state, log.refresh)
            source = RocketmqMessages(None if messages == ARCHIVE else Path(messages), archive)
            yield from message_arrays(parts, source, allow_partial=allow_partial)

    fetch.__annotations__ = {"parts": Iterator[tuple[pa.Array, ...]], "return": Iterator[pa.Array]}
    message = arrow_function(fetch, from_arrow_type(_ARROW))
    joined = answers.withColumn("_message", message(topic, key, *(F.col(name) for name in _ENTRY.names)))
    return joined.select(*(F.col(f"`{name.replace('`', '``')}`") for name in answers.columns), "_message.*")


# Stored bytes of the messages that are fetched at once, and plain bytes of the bodies in one array, about
_MESSAGE_BYTES, _LEAST_BYTES = 16 << 20, 1 << 10
# Place of an entry's size in a row of topic, key and `_ENTRY`
_SIZE = 2 + _ENTRY.names.index("size")


def message_arrays(
    parts: Iterable[tuple[pa.Array, ...]], source: RocketmqMessages, *, allow_partial: bool
) -> Iterator[pa.Array]:
    """Yield the messages (`MESSAGE_COLUMNS`) of rows of topic, key and `_ENTRY`, in order. Raises as `_row`."""
    for columns in parts:
        rows = zip(*(column.to_pylist() for column in columns), strict=True)
        for held in gathered(rows, lambda row: max(_LEAST_BYTES, row[_SIZE] or 0), _MESSAGE_BYTES):
            topics, keys, *values = (list(column) for column in zip(*held, strict=True))
            made = (_row(one, allow_partial=allow_partial) for one in _fetched(source, topics, keys, values))
            for some in gathered(made, lambda row: len((row or {}).get("message_body") or b""), _MESSAGE_BYTES):
                yield pa.array(some, _ARROW)


def _fetched(
    source: RocketmqMessages, topics: list[str], keys: list[str], values: list[list[Any]]
) -> list[Fetched | None]:
    """Return the fetched message of each row, None for a row without an entry; rows of one key are read together."""
    found: list[Fetched | None] = [None] * len(topics)
    places: dict[tuple[str, str], list[int]] = {}
    for place, pair in enumerate(zip(topics, keys, strict=True)):
        if values[2][place] is not None:
            places.setdefault(pair, []).append(place)
    for (topic, key), rows in places.items():
        entries = [dict(zip(_ENTRY.names, (column[row] for column in values), strict=True)) for row in rows]
        items = [IndexItem(topic=topic, **entry) for entry in entries]
        for row, one in zip(rows, source.fetch(items, topic, key), strict=True):
            found[row] = one
    return found


def _row(one: Fetched | None, *, allow_partial: bool) -> dict[str, Any] | None:
    if one is None:
        return None
    if one.error is not None and one.message is None and not allow_partial:
        raise one.error
    row: dict[str, Any] = {"message_state": one.state, "message_problem": one.problem}
    message = one.message
    if not one.carries_key:
        row["message_state"] = "other_key"
    elif isinstance(message, Message):
        row |= {"message_tags": message.tags, "message_properties": list(message.properties.items())}
        try:
            row["message_body"] = message.body()
        except CorruptFile as error:
            # its producer sent it so: no other place has a better one
            row["message_problem"] = str(error)
    return row
