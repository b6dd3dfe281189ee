"""The answers of a bulk lookup: a task looks its rows up in batches, with the engine's reader. Runs in tasks.

A row has the fields of its lookup in a struct `LOOKUP`, whose place the answer takes. Memory: a batch of rows and its
answers, about half a million entries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs

from tiered_index.base.units import parse_time
from tiered_index.config import IndexConfig
from tiered_index.errors import InvalidArgument
from tiered_index.format.keys.arrow import array_of
from tiered_index.format.schema import Column as StoredColumn
from tiered_index.format.schema import Schema
from tiered_index.service.read.answers.budget import LookupLimits
from tiered_index.service.read.answers.lookup_columns import LookupColumns
from tiered_index.service.read.answers.results import QueryResults
from tiered_index.service.reader import IndexReader
from tiered_index.spark.frames import arrow_schema
from tiered_index.spark.lookup.keys import LOOKUP
from tiered_index.spark.lookup.messages import MESSAGE_COLUMNS
from tiered_index.spark.versions import DRIVER_VERSION, DriverVersion
from tiered_index.spark.workers import between_tasks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

STATUSES = ("complete", "truncated", "partial")
SKIPPED = "skipped"
"""The status of a row without topic or key, which is left out in the end."""
# entries of the answers of a batch, about, and the fewest and most lookups of one
_ENTRIES, _FEWEST, _MOST = 1 << 19, 1 << 10, 1 << 17
_SHOWN = 40
_ENTRY = arrow_schema("topic_id int, queue_id int, offset long, size int, timestamp_ms long, key_hash int")
_FAILED = pa.list_(pa.struct([("file", pa.string()), ("error", pa.string())]))


def entry_columns(schema: Schema) -> list[tuple[str, pa.DataType]]:
    """Return (name, type) of the columns of an entry in an answer."""
    plain = [(field.name, field.type) for field in _ENTRY]
    return plain + [(column.name, _arrow_type(column)) for column in schema.extra]


def column_names(schema: Schema, *, messages: str | None) -> list[str]:
    """Return the names of answers' columns. Raises `InvalidArgument` if a caller's column has the same name."""
    joined = MESSAGE_COLUMNS if messages is not None else ()
    own = {"status", "failed", "position", *joined}
    if (clash := schema.clashing(own)) is not None:
        has = f"the index's entries have a column {clash!r}, which is the name of a column of answers"
        raise InvalidArgument(f"{has}: look up by the table function tiered_index_lookup")
    return [LOOKUP, "status", "failed", "position", *(name for name, _ in entry_columns(schema)), *joined]


def _arrow_type(column: StoredColumn) -> pa.DataType:
    """Return a type of Spark for all values of a stored column."""
    if column.is_text:
        return pa.string()
    dtype = np.dtype(column.dtype)
    if dtype.kind in "iu":
        return pa.decimal128(20, 0) if dtype.kind == "u" and dtype.itemsize == 8 else pa.int64()
    return pa.float64() if dtype.kind == "f" else pa.binary()


@dataclass(frozen=True)
class TaskLookups:
    """Looks up the rows of tasks. `names` are those of the rows' columns by field, for messages; `limits` are a task's.

    `spent` is an accumulator: requests, bytes and cost of the tasks, `replaced` rows, and a count for each (file,) that
    was read.
    """

    config: IndexConfig
    schema: Schema
    names: Mapping[str, str]
    max_count: int
    allow_partial: bool
    skip_null: bool
    limits: LookupLimits
    spent: Any
    version: DriverVersion = DRIVER_VERSION

    def columns(self, frame: DataFrame) -> StructType:
        """Return the columns of answers for rows of `frame`."""
        from pyspark.sql.pandas.types import from_arrow_schema
        from pyspark.sql.types import StructType

        own = [("status", pa.string()), ("failed", _FAILED), ("position", pa.int32()), *entry_columns(self.schema)]
        others = [field for field in frame.schema.fields if field.name != LOOKUP]
        return StructType([*others, *from_arrow_schema(pa.schema(own)).fields])

    def open_reader(self) -> IndexReader:
        """Return the reader of a task, which closes it."""
        return IndexReader.open(config=self.config, environment=False)

    def of(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the answers of rows. Raises as `look_up`."""
        at_once = max(_FEWEST, min(_MOST, _ENTRIES // self.max_count))
        with between_tasks(), ExitStack() as ending:
            reader: IndexReader | None = None
            for batch in filter(len, batches):
                if reader is None:
                    reader = ending.enter_context(self.open_reader())
                    opening, prices = reader.storage.total, reader.storage.prices
                    cost_usd = prices.cost_usd(opening.requests_by_kind, opening.bytes_read)
                    self._spend(opening.requests, opening.bytes_read, cost_usd)
                    left = self.limits.less(opening.requests, opening.bytes_read)
                start = 0
                while start < len(batch):
                    part = batch.slice(start, at_once)
                    made, results = self._answered(part, reader, left)
                    yield made
                    start, entries = start + len(part), len(results.rows)
                    left = left.less(results.explain.requests, results.explain.bytes)
                    # by the answers so far, since most lookups have fewer than `max_count`
                    at_once = max(_FEWEST, min(_MOST, 2 * at_once, _ENTRIES * len(part) // max(1, entries)))

    def _spend(self, requests: int, size_bytes: int, cost_usd: float, files: Sequence[str] = ()) -> None:
        spent: dict[Any, Any] = {"requests": requests, "bytes": size_bytes, "cost_usd": cost_usd}
        self.spent.add(Counter(spent | {(file,): 1 for file in files}))

    def _answered(
        self, rows: pa.RecordBatch, reader: IndexReader, limits: LookupLimits
    ) -> tuple[pa.RecordBatch, QueryResults[Any]]:
        """Return the answers of rows, as columns and as the reader's."""
        lookup = rows.column(LOOKUP)
        topics, keys, begins, ends, _ = lookup.flatten()
        whole = pc.and_(pc.is_valid(topics), pc.is_valid(keys))
        if not self.skip_null:
            for name, values in (("topic", topics), ("key", keys)):
                if values.null_count:
                    needed = "a value is needed in every row (or skip_null)"
                    raise InvalidArgument(f"column {self.names[name]} has nulls; {needed}")
        there = whole.to_numpy(zero_copy_only=False)
        results = self._looked_up([column.filter(whole) for column in (topics, keys, begins, ends)], reader, limits)
        spent = results.explain
        read = [report.file for report in spent.files if report.outcome == "read"]
        self._spend(spent.requests, spent.bytes, spent.cost_usd, read)
        if results.replaced is not None:
            self.spent.add(Counter(replaced=int(results.replaced.sum())))
        counts, status = np.zeros(len(rows), np.int64), np.full(len(rows), len(STATUSES))
        counts[there], status[there] = results.counts, results.more
        failed = pa.nulls(len(rows), _FAILED)
        if results.failed:
            reports = [results.failed_of(number) for number in range(len(results))]
            lacking = np.array(list(map(bool, reports)))
            status[np.flatnonzero(there)[lacking]] = STATUSES.index("partial")
            told = iter([[{"file": report.file, "error": report.error} for report in each] or None for each in reports])
            failed = pa.array([next(told) if is_there else None for is_there in there.tolist()], _FAILED)
        statuses = pa.array([*STATUSES, SKIPPED]).take(pa.array(status))
        # a lookup without entries has one row
        repeated = np.maximum(counts, 1)
        index, some = np.repeat(np.arange(len(rows)), repeated), np.repeat(counts > 0, repeated)
        position = np.arange(len(index)) - np.repeat(np.cumsum(repeated) - repeated, repeated)
        place, at = pa.array(np.cumsum(some) - 1, mask=~some), pa.array(index)
        entries = [
            array_of(results.rows["second"] * 1000 if name == "timestamp_ms" else results.rows[name], kind).take(place)
            for name, kind in entry_columns(self.schema)
        ]
        own = [statuses.take(at), failed.take(at), pa.array(position.astype(np.int32), mask=~some), *entries]
        columns = {name: rows.column(name).take(at) for name in rows.schema.names if name != LOOKUP}
        names = ["status", "failed", "position", *(name for name, _ in entry_columns(self.schema))]
        return pa.RecordBatch.from_arrays([*columns.values(), *own], [*columns, *names]), results

    def _looked_up(self, fields: Sequence[pa.Array], reader: IndexReader, limits: LookupLimits) -> QueryResults[Any]:
        """Return the answers for the columns of `LOOKUP`, which have no null topic or key."""
        topics, keys, begins, ends = fields
        bounds = []
        for name, values in (("begin_ms", begins), ("end_ms", ends)):
            if pa.types.is_string(values.type):
                values = times_of(values, self.names[name], end=name == "end_ms")
            bounds.append(values.to_pylist())
        names, texts = values_of(topics, "a topic"), values_of(keys, "a key")
        is_bounded = any(bound.count(None) < len(bound) for bound in bounds)
        low, high = bounds
        for begin, end, key in zip(low, high, texts, strict=True) if is_bounded else ():
            if begin is not None and end is not None and begin > end:
                raise InvalidArgument(f"begin_ms {begin} is after end_ms {end}, for key {shown(key)!r}")
        lookups = LookupColumns(names, texts, low, high, [self.max_count] * len(keys), [None] * len(keys))
        try:
            return reader.query_many(lookups, self.allow_partial, **structs.asdict(limits))
        except InvalidArgument as error:
            raise InvalidArgument(f"columns {self.names['topic']} and {self.names['key']}: {error}") from error


def shown(text: str) -> str:
    """Return a text for a message, cut after 40 characters."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def values_of(texts: pa.Array, what: str) -> list[Any]:
    """Return the values of texts. Spark casts any bytes to text: raises `InvalidArgument`, which tells `what` it is."""
    try:
        return list(texts.to_pylist())
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{what} has bytes that are not UTF-8") from error


def times_of(texts: pa.Array, column: str, *, end: bool) -> pa.Array:
    """Return the epoch milliseconds (i64, n) of texts, null for null, as `parse_time`.

    Raises `InvalidArgument`, which names the column.
    """
    encoded = texts.dictionary_encode()
    times = []
    for text in values_of(encoded.dictionary, f"column {column}"):
        try:
            times.append(parse_time(shown(text.strip()), end=end))
        except ValueError as error:
            raise InvalidArgument(f"column {column}: {error}") from error
    return pa.array(times, pa.int64()).take(encoded.indices)
