"""`spark.read.format("tiered_index").load(URI)`: the entries of an index as rows. docs/spark-data.md.

A reader is pickled before `partitions` is called, so partitions carry all that tasks need. Spark up to 4.3.0 keeps the
partitions with the loaded DataFrame, not with a scan of it: after `df.filter(...)` was planned, `df.count()` reads the
filtered partitions. A reader that leaves entries out would then return too few rows without an error, so this source
accepts no pushed filters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyspark
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from tiered_index.errors import InvalidArgument, SchemaMismatch
from tiered_index.format.schema import Schema
from tiered_index.service.log.state import LogState
from tiered_index.service.read.export import ExportRange
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.datasource.options import DataSourceOptions, TaskPartition
from tiered_index.spark.datasource.reading import TaskPlan, plan_tasks, read_task, selection_of
from tiered_index.spark.datasource.rows import OF_ROWS, RowWriter
from tiered_index.spark.datasource.writing import STREAM_OPTIONS, WRITE_OPTIONS, EntryStreamWriter, EntryWriter
from tiered_index.spark.frames import arrow_schema, arrow_schema_of
from tiered_index.spark.versions import OLDEST_OF_STREAMS, check_version

_OPTIONS = ("topic", "queues", "beginMs", "endMs", "maxPartitionBytes")
_USES = {"reads": _OPTIONS, "writes": WRITE_OPTIONS, "writes of rows of files": OF_ROWS, "streams": STREAM_OPTIONS[-1:]}
_PARTITION_BYTES = 64 << 20
_COLUMNS = arrow_schema(
    "topic string, key_hash int, key string, queue_id int, offset long, size int, timestamp timestamp"
)
_KEY = "key"
# Spark's type for each type of a stored column; Spark has no unsigned integers.
_EXTRA = {f"i{size}": pa.from_numpy_dtype(f"i{size}") for size in (1, 2, 4, 8)}
_EXTRA |= {"u1": pa.int16(), "u2": pa.int32(), "u4": pa.int64(), "u8": pa.decimal128(20, 0)}
_EXTRA |= {"f2": pa.float32(), "f4": pa.float32(), "f8": pa.float64()}


class EntrySource(DataSource):
    """The data source of entries."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "tiered_index"

    def schema(self) -> StructType:
        """Return the columns of the index's entries, for which it reads the log. Raises the storage's errors."""
        options = self._options()
        selection_of(options)
        return columns_of(_schema_of(StorageAddress(options.path).state()))

    def reader(self, schema: StructType) -> EntryScan:
        """Return a reader of the entries that the options select."""
        options = self._options()
        selection = selection_of(options)
        size = options.size("maxPartitionBytes") or _PARTITION_BYTES
        return EntryScan(StorageAddress(options.path), selection, size, schema)

    def writer(self, schema: StructType, overwrite: bool) -> EntryWriter | RowWriter:
        """Return the writer of a DataFrame, of rows of files with the option `files`."""
        if any(option.lower() == "files" for option in self.options):
            if overwrite:
                raise InvalidArgument("rows of files are appended, each file once: use mode append")
            return RowWriter(self._options((*WRITE_OPTIONS, *OF_ROWS)), schema)
        return EntryWriter(self._options(WRITE_OPTIONS), schema, "replace" if overwrite else "append")

    def streamWriter(self, schema: StructType, overwrite: bool) -> EntryStreamWriter:  # noqa: N802 - Spark's name
        """Return the writer of a micro-batch. Raises `ConfigError` before Spark 4.1."""
        check_version("PySpark", pyspark.__version__, OLDEST_OF_STREAMS)
        if overwrite:
            raise InvalidArgument("a stream appends to an index: use outputMode append")
        return EntryStreamWriter(self._options(STREAM_OPTIONS), schema)

    def _options(self, known: tuple[str, ...] = _OPTIONS) -> DataSourceOptions:
        return DataSourceOptions(self.name(), dict(self.options), known, _USES)


@dataclass(eq=False)
class EntryScan(DataSourceReader):
    """Plans and reads one scan of the entries that the options select."""

    address: StorageAddress
    selection: ExportRange
    partition_bytes: int
    schema: StructType

    def partitions(self) -> list[InputPartition]:
        """Return one partition for each task, all of the same log position. Driver."""
        state = self.address.state()
        require_columns(self.schema, columns_of(_schema_of(state)), f"the index in {self.address.uri}")
        return [TaskPartition(task) for task in plan_tasks(state, self.selection, self.partition_bytes)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield a task's entries. Executor."""
        if isinstance(partition, TaskPartition):  # Spark makes another kind if there are no partitions
            plan: TaskPlan = partition.value
            with self.address.open() as storage:
                own = require_columns(self.schema, columns_of(plan.schema), f"the index in {self.address.uri}")
                for batch in read_task(plan, storage, arrow_schema_of(own)):
                    yield batch.rename_columns(self.schema.names)


def columns_of(schema: Schema, *, keyed: bool = False) -> StructType:
    """Return the columns of entries, with `key` only if `keyed`: an index stores no keys, so a read has none.

    Raises `SchemaMismatch` for a type that Spark lacks, and for names that differ only in case.
    """
    columns = {field.name: field.type for field in _COLUMNS}
    for extra in schema.caller_columns:
        dtype = np.dtype(extra.dtype)
        of_bytes = pa.string() if extra.is_text else pa.binary()
        kind = of_bytes if dtype.kind == "S" else _EXTRA.get(f"{dtype.kind}{dtype.itemsize}")
        if kind is None or extra.name.lower() in map(str.lower, columns):
            lacks = f"has type {extra.dtype}, which Spark lacks"
            problem = lacks if kind is None else "has a name that another column has in Spark"
            raise SchemaMismatch(f"column {extra.name!r} of schema {schema.name} {problem}")
        columns[extra.name] = kind
    if not keyed:
        del columns[_KEY]
    return from_arrow_schema(pa.schema(columns))


def require_columns(wanted: StructType, columns: StructType, what: str) -> StructType:
    """Return the `columns` that `wanted` names (in any case), in its order.

    Raises `SchemaMismatch` for a missing column and for another type.
    """
    own = {column.name.lower(): column for column in columns}
    for column in wanted:
        known, kind = own.get(column.name.lower()), column.dataType.simpleString()
        if known is None or known.dataType.simpleString() != kind:
            told = "there is no such column" if known is None else f"it is {known.dataType.simpleString()}"
            there = ", ".join(f"{each.name} {each.dataType.simpleString()}" for each in columns)
            wanted_as = f"{what}: column {column.name!r} was requested as {kind}"
            raise SchemaMismatch(f"{wanted_as}, and {told}; the columns are {there}")
    return StructType([own[column.name.lower()] for column in wanted])


def _schema_of(state: LogState) -> Schema:
    assert state.genesis is not None
    return state.genesis.layout.schema
