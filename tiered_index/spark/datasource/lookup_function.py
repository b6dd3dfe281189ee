"""`tiered_index_lookup(uri, topic, key[, begin_ms, end_ms])`: a table function that looks up a key; it also joins
laterally with a table of keys. docs/spark-data.md.

`analyze` runs on the driver and reads the index's log for the columns. An instance belongs to one task, and its reader
follows the log, so rows of one query may be of several log positions.
"""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from pyspark.sql.types import DecimalType, StructType
from pyspark.sql.udtf import AnalyzeArgument, AnalyzeResult

from tiered_index.config import IndexConfig
from tiered_index.errors import InvalidArgument
from tiered_index.format.schema import Schema
from tiered_index.service.reader import IndexReader
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.datasource.entries import columns_of
from tiered_index.spark.versions import DRIVER_VERSION, DriverVersion

NAME = "tiered_index_lookup"
# entries of a page: more than most lookups find
_PAGE = 100_000
_USAGE = f"{NAME}('URI', topic, key[, begin_ms, end_ms])"


@dataclass
class AnalyzedLookup(AnalyzeResult):
    """The columns of a lookup, and the version of the driver: executors with another one can't unpickle it."""

    version: DriverVersion = DRIVER_VERSION


class LookupFunction:
    """The entries of one key of one topic, newest first and without duplicates, as `IndexReader.query` returns them.

    For a null topic or key there are no rows. Raises as `IndexReader.query`; partial answers are errors.
    """

    def __init__(self, analyzed: AnalyzedLookup | None = None) -> None:
        self._reader: IndexReader | None = None
        self._uri = ""

    @staticmethod
    def analyze(
        uri: AnalyzeArgument,
        topic: AnalyzeArgument,
        key: AnalyzeArgument,
        begin_ms: AnalyzeArgument | None = None,
        end_ms: AnalyzeArgument | None = None,
    ) -> AnalyzeResult:
        """Return the columns: those of a read with option key. Raises `InvalidArgument`, the storage's errors."""
        if not uri.isConstantExpression or not isinstance(uri.value, str):
            raise InvalidArgument(f"{_USAGE}: the URI must be a constant text, not a column")
        for name, argument, kinds in (
            ("topic", topic, ("string", "void")),
            ("key", key, ("string", "void")),
            ("begin_ms", begin_ms, ("int", "bigint", "void")),
            ("end_ms", end_ms, ("int", "bigint", "void")),
        ):
            if argument is not None and (kind := argument.dataType.simpleString()) not in kinds:
                needed = "text is" if kinds[0] == "string" else "epoch milliseconds (unix_millis(time)) are"
                raise InvalidArgument(f"{_USAGE}: {name} is {kind}; {needed} needed: cast it")
        genesis = StorageAddress(uri.value).state().genesis
        assert genesis is not None
        return AnalyzedLookup(columns_of(genesis.layout.schema, keyed=True))

    def eval(
        self, uri: str, topic: str | None, key: str | None, begin_ms: int | None = None, end_ms: int | None = None
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of one lookup. Executor."""
        if topic is None or key is None:
            return
        if self._reader is None or uri != self._uri:
            self.terminate()
            self._reader, self._uri = IndexReader.open(config=IndexConfig(storage=StorageAddress(uri).uri)), uri
        reader = self._reader
        more = _columns(reader.genesis.layout.schema)
        for page in reader.query_all(topic, key, begin_ms, end_ms, _PAGE):
            for item in page.items:
                second = dt.datetime.fromtimestamp(item.timestamp_ms // 1000, dt.UTC)
                known = (item.topic, item.key_hash, key, item.queue_id, item.offset, item.size, second)
                yield (*known, *(value(item) for value in more))

    def terminate(self) -> None:
        """Close the index's reader, at the end of a task."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


def _columns(schema: Schema) -> list[Any]:
    """Return a function for each of the caller's columns that gets its value of an item, in Spark's type."""
    columns: StructType = columns_of(schema)
    return [
        (lambda item, name=own_column.name: decimal.Decimal(getattr(item, name)))
        if isinstance(columns[own_column.name].dataType, DecimalType)
        else attrgetter(own_column.name)
        for own_column in schema.caller_columns
    ]
