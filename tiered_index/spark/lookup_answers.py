"""The answering half of a bulk lookup: all that was found for a question, in answer order, each identity once, cut to `max_count`.

Runs in tasks, which take one partition of questions after the other. Memory: a million rows and a partition's questions; with a
`max_count` of millions, the rows of its answers.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.errors import StorageUnavailable
from tiered_index.format.schema import Schema
from tiered_index.service.answers.batch import Found, best_answers
from tiered_index.service.answers.rows import row_dtype
from tiered_index.spark.lookup_plan import LookupPlan
from tiered_index.spark.lookup_questions import QUESTION, PackedBatch, cells_of, distinct, places_of, records_of
from tiered_index.spark.lookup_tasks import ASKED, FAILED, FOUND, MISSING

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["answer_partitions", "answer_schema", "entry_columns"]

_HELD_ROWS = 1 << 20
_BATCH_ROWS = 1 << 16
_STATUSES = ("complete", "truncated", "partial")
_FAILED = pa.list_(pa.struct([("file", pa.string()), ("error", pa.string())]))
Array = npt.NDArray[Any]


def entry_columns(schema: Schema) -> list[tuple[str, pa.DataType]]:
    """Return the columns of an entry in an answer, with their types."""
    plain = [
        ("topic_id", pa.int32()), ("queue_id", pa.int32()), ("offset", pa.int64()), ("size", pa.int32()), ("timestamp_ms", pa.int64()),
        ("key_hash", pa.int32()),
    ]  # fmt: skip
    return plain + [(column.name, _arrow_type(np.dtype(column.dtype))) for column in schema.extra]


def answer_schema(schema: Schema, *, nested: bool) -> StructType:
    """Return Spark's schema of what `answer_partitions` yields."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(_arrow_schema(schema, nested=nested))


def _arrow_schema(schema: Schema, *, nested: bool) -> pa.Schema:
    head = [("_question", pa.binary()), ("status", pa.string()), ("failed", _FAILED)]
    columns = entry_columns(schema)
    if nested:
        return pa.schema([*head, ("entries", pa.list_(pa.struct(columns)))])
    return pa.schema([*head, ("position", pa.int32()), *columns])


def _arrow_type(dtype: np.dtype[Any]) -> pa.DataType:
    """Return a type that Spark has and that holds every value of a stored column."""
    if dtype.kind in "iu":
        return pa.decimal128(20, 0) if dtype.kind == "u" and dtype.itemsize == 8 else pa.int64()
    return pa.float64() if dtype.kind == "f" else pa.binary()


def answer_partitions(batches: Iterable[pa.RecordBatch], plan: LookupPlan, *, nested: bool) -> Iterator[pa.RecordBatch]:
    """Yield the answers to the questions of partitions; blocks (kind, partition, questions, rows, more) come by partition, then kind.

    Raises `StorageUnavailable` where a task gave up since an object was gone: what it found is no whole answer, whatever it lacks.
    """
    partition, number = _Partition(plan), -1
    for batch in batches:
        for here, kind, blocks in _runs(batch):
            if here != number:
                yield from partition.answers(nested=nested)
                partition, number = _Partition(plan), here
            partition.add(kind, blocks)
    yield from partition.answers(nested=nested)


def _runs(batch: pa.RecordBatch) -> Iterator[tuple[int, int, pa.RecordBatch]]:
    """Yield the neighbours of one partition and kind together, with both."""
    partitions, kinds = batch.column("partition").to_numpy(), batch.column("kind").to_numpy()
    starts = np.flatnonzero((np.diff(partitions, prepend=-1) != 0) | (np.diff(kinds, prepend=-1) != 0)).tolist()
    for start, stop in itertools.pairwise([*starts, len(kinds)]):
        yield int(partitions[start]), int(kinds[start]), batch.slice(start, stop - start)


class _Partition:
    def __init__(self, plan: LookupPlan) -> None:
        self._plan = plan
        self._asked: list[Array] = []
        self._batch: PackedBatch | None = None
        self._held: list[Found] = []
        self._count = 0
        self._failed: dict[int, list[dict[str, str]]] = {}

    def add(self, kind: int, blocks: pa.RecordBatch) -> None:
        if kind == MISSING:
            name = blocks.column("more")[0].as_py().decode()
            raise StorageUnavailable(f"{name} was removed since these keys were looked up, and Spark lost what it held: look up again")
        if kind == ASKED:
            self._asked.append(records_of(blocks.column("questions")))
        elif kind == FAILED:
            for cell, more in zip(blocks.column("questions"), blocks.column("more").to_pylist(), strict=True):
                file, error = pickle.loads(more)
                for place in places_of(self.batch.questions, records_of(pa.array([cell.as_py()], pa.binary()))).tolist():
                    self._failed.setdefault(place, []).append({"file": file, "error": error})
        elif kind == FOUND:
            places = places_of(self.batch.questions, records_of(blocks.column("questions")))
            self._held.append(Found(places, records_of(blocks.column("rows"), row_dtype(self._plan.schema))))
            self._count += len(places)
            if self._count > _HELD_ROWS:
                rows, starts, _ = best_answers(self.batch, self._held, self._plan.schema)
                self._held = [Found(np.repeat(np.arange(len(self.batch)), np.diff(starts)), rows)]
                self._count = len(rows)

    @property
    def batch(self) -> PackedBatch:
        """All questions of the partition, with one more answer than asked, which tells a full answer from a truncated one."""
        if self._batch is None:
            asked = distinct(np.concatenate(self._asked)) if self._asked else np.zeros(0, QUESTION)
            self._batch = PackedBatch(asked, self._plan.topics, self._plan.max_count + 1)
        return self._batch

    def answers(self, *, nested: bool) -> Iterator[pa.RecordBatch]:
        if not self._asked:
            return
        plan, most = self._plan, self._plan.max_count
        rows, starts, _ = best_answers(self.batch, self._held, plan.schema)
        self._held = []
        counts = np.diff(starts)
        rank = np.arange(len(rows)) - np.repeat(starts[:-1], counts)
        rows = rows[rank < most]
        status = (counts > most).astype(np.int8)
        status[list(self._failed)] = _STATUSES.index("partial")
        counts = np.minimum(counts, most)
        ends = np.cumsum(counts)
        first = 0
        while first < len(counts):
            # as many questions as have about so many rows, at least one
            begin = int(ends[first] - counts[first])
            stop = max(first + 1, int(np.searchsorted(ends, begin + _BATCH_ROWS, "right")))
            stop = min(stop, first + _BATCH_ROWS)
            part = slice(first, stop)
            yield self._rows(part, rows[begin : int(ends[stop - 1])], counts[part], status[part], nested=nested)
            first = stop

    def _rows(self, part: slice, rows: Array, counts: Array, status: Array, *, nested: bool) -> pa.RecordBatch:
        schema = _arrow_schema(self._plan.schema, nested=nested)
        failed = pa.nulls(part.stop - part.start, _FAILED)
        if self._failed:
            failed = pa.array([self._failed.get(place) for place in range(part.start, part.stop)], _FAILED)
        statuses = pa.DictionaryArray.from_arrays(pa.array(status), pa.array(_STATUSES)).cast(pa.string())
        questions = self.batch.questions[part]
        entries = _entries(rows, self._plan.schema)
        if nested:
            records = pa.StructArray.from_arrays(entries, fields=list(schema.field("entries").type.value_type))
            lists = pa.ListArray.from_arrays(np.append(0, np.cumsum(counts)).astype(np.int32), records)
            columns = [cells_of(questions, np.arange(len(questions))), statuses, failed, lists]
            return pa.RecordBatch.from_arrays(columns, schema=schema)
        # a question without entries has one row, too
        index = np.repeat(np.arange(len(counts)), np.maximum(counts, 1))
        some = np.repeat(counts > 0, np.maximum(counts, 1))
        place = pa.array(np.cumsum(some) - 1, mask=~some)
        starts = np.cumsum(np.maximum(counts, 1)) - np.maximum(counts, 1)
        position = pa.array((np.arange(len(index)) - starts[index]).astype(np.int32), mask=~some)
        repeated = pa.array(index)
        columns = [
            cells_of(questions[index], np.arange(len(index))), statuses.take(repeated), failed.take(repeated), position,
            *(column.take(place) for column in entries),
        ]  # fmt: skip
        return pa.RecordBatch.from_arrays(columns, schema=schema)


def _entries(rows: Array, schema: Schema) -> list[pa.Array]:
    found = []
    for name, kind in entry_columns(schema):
        values = rows["second"] * 1000 if name == "timestamp_ms" else rows[name]
        if values.dtype.kind == "S":
            found.append(pa.array(values.tolist(), kind))
        else:
            found.append(pa.array(np.ascontiguousarray(values)).cast(kind))
    return found
