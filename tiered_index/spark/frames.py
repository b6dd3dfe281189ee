"""Data between driver and executors: broadcasts, placed rows, packed records. Threads: any."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.errors import InvalidArgument

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType


_T = TypeVar("_T")


@contextlib.contextmanager
def broadcast(spark: SparkSession, value: Any) -> Iterator[Any]:
    """Send a value to each executor once; yield its handle, which the end of the block invalidates."""
    shared = spark.sparkContext.broadcast(value)
    with cleaned_up(shared.destroy):
        yield shared


@contextlib.contextmanager
def cleaned_up_on_error(clean: Callable[[], object]) -> Iterator[None]:
    """Call `clean` after an error of the block, which hides one of `clean`: Spark may have ended."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            clean()
        raise


@contextlib.contextmanager
def cleaned_up(clean: Callable[[], object]) -> Iterator[None]:
    """Call `clean` at the end of the block. An error of the block hides one of `clean`."""
    with cleaned_up_on_error(clean):
        yield
    clean()


@contextlib.contextmanager
def _configured(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    """Set a value of Spark's SQL configuration during the block, and unset it again if it was unset.

    If another thread's block has set it in the session, it holds until that block ends: the rest of this block needs
    more time or space. All blocks set the same value of a name, so none can restore a wrong one.
    """
    before = spark.conf.get(name, None)
    if before == value:
        yield
        return
    spark.conf.set(name, value)
    restore = partial(spark.conf.unset, name) if before is None else partial(spark.conf.set, name, before)
    with cleaned_up(restore):
        yield


def large_batches(spark: SparkSession) -> contextlib.AbstractContextManager[None]:
    """Let Spark pass rows to Python in batches of 2^17 during the block, or of 64 MiB if that is less."""
    return _configured(spark, "spark.sql.execution.arrow.maxRecordsPerBatch", f"{1 << 17}")


def batches_of_arrow(spark: SparkSession) -> contextlib.AbstractContextManager[None]:
    """Let Spark hold tables as batches of Arrow for the frames that are made in the block.

    By default it makes rows of up to 48 MB of them: a million keys then fill Java's heap of 1 GiB, and Spark hangs.
    """
    return _configured(spark, "spark.sql.execution.arrow.localRelationThreshold", "0")


def shuffles_deleted(spark: SparkSession) -> contextlib.AbstractContextManager[None]:
    """Let Spark delete the shuffle files of a query at its end, for the frames that are made in the block.

    Otherwise, and always before Spark 4.1, it keeps them until the JVM collects garbage. A second query of such a frame
    shuffles again.
    """
    return _configured(spark, "spark.sql.classic.shuffleDependency.fileCleanup.enabled", "true")


def times_of_day_written(spark: SparkSession) -> contextlib.AbstractContextManager[None]:
    """Let Spark write times of day to files during the block, which it refuses by default."""
    return _configured(spark, "spark.sql.timeType.enabled", "true")


def repartitioned(frame: DataFrame, count: int, place: Column) -> DataFrame:
    """Return the rows in `count` partitions, each in that of its number `place` (int, from 0 on)."""
    by_id: Any = getattr(frame, "repartitionById", None)
    return by_id(count, place) if by_id is not None else repartitioned_by_hash(frame, count, place)


def repartitioned_by_hash(frame: DataFrame, count: int, place: Column) -> DataFrame:
    """Do what `repartitioned` does, before Spark 4.1: by integers whose hashes fall into the partitions."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    number = F.col("id").cast("int")
    partition = F.pmod(F.hash(number), F.lit(count)).alias("partition")
    # so many integers leave a partition out with a probability of less than count * e^-64
    tried = frame.sparkSession.range(64 * count).groupBy(partition).agg(F.min(number)).sort("partition").collect()
    numbers = F.split(F.lit(",".join(str(least) for _, least in tried)), ",")
    return frame.repartition(count, F.get(numbers, place).cast("int"))


_ARROW_TYPES = {
    "int": pa.int32(),
    "long": pa.int64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us", "UTC"),
    "array<string>": pa.list_(pa.string()),
    "map<string,string>": pa.map_(pa.string(), pa.string()),
}


def gathered(items: Iterable[_T], size: Callable[[_T], int], most: int) -> Iterator[list[_T]]:
    """Yield the items in lists, each with a total size of at least `most`, except the last one."""
    held: list[_T] = []
    total = 0
    for item in items:
        held.append(item)
        total += size(item)
        if total >= most:
            yield held
            held, total = [], 0
    if held:
        yield held


def arrow_schema(columns: str) -> pa.Schema:
    """Return the Arrow schema of columns in Spark's notation, like ``side int, identity binary``."""
    return pa.schema(
        [(name, _ARROW_TYPES[kind]) for name, kind in (declared.split() for declared in columns.split(", "))]
    )


def arrow_type_of(kind: Any) -> pa.DataType:
    """Return the Arrow type of a type of Spark; times have the zone UTC."""
    from pyspark.sql.pandas.types import to_arrow_type

    return _in_utc(to_arrow_type, kind)


def arrow_schema_of(columns: StructType) -> pa.Schema:
    """Return the Arrow schema of columns of Spark; times have the zone UTC."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return _in_utc(to_arrow_schema, columns)


def _in_utc(convert: Any, kind: Any) -> Any:
    try:
        return convert(kind, timezone="UTC")
    except TypeError:
        # before Spark 4.2 it has no such parameter, and this zone
        return convert(kind)


def one_row(schema: pa.Schema, *cells: Any) -> pa.RecordBatch:
    """Return a batch of one row with these cells."""
    columns = [pa.array([cell], kind) for cell, kind in zip(cells, schema.types, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def arrow_function(function: Callable[..., pa.Array], kind: Any) -> Any:
    """Return a function of Spark columns that tasks compute by `function` from Arrow arrays; `kind` is its type."""
    from pyspark.sql.pandas import functions

    make: Any = getattr(functions, "arrow_udf", None)
    if make is not None:
        return make(function, kind)

    # before Spark 4.1
    import pandas as pd

    def by_pandas(*columns: Any) -> Any:
        return function(*map(pa.Array.from_pandas, columns)).to_pandas()

    # Spark learns the kind of the function from them
    by_pandas.__annotations__ = {"columns": pd.Series, "return": pd.Series}
    made: Any = functions.pandas_udf
    return made(by_pandas, kind)


def cells_of(records: npt.NDArray[Any], starts: npt.NDArray[np.int64]) -> pa.Array:
    """Return runs of records, one from each of `starts` (i64, n) up to the next, as a binary column.

    Raises `InvalidArgument` from 2 GiB on.
    """
    data = np.ascontiguousarray(records)
    if data.nbytes >= 1 << 31:
        many = f"{len(data):,} records of {data.dtype.itemsize:,} bytes"
        raise InvalidArgument(f"{many} do not fit a batch of Spark, which has less than 2 GiB: use fewer keys at once")
    offsets = (np.append(starts, len(data)) * data.dtype.itemsize).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data.view(np.uint8))]
    return pa.BinaryArray.from_buffers(pa.binary(), len(starts), buffers)


def records_of(column: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the concatenated cells of a binary column as records (n, `dtype`), without a copy."""
    if not len(column):
        return np.empty(0, dtype)
    _, offset_buffer, data = column.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64 if pa.types.is_large_binary(column.type) else np.int32)
    start, stop = int(offsets[column.offset]), int(offsets[column.offset + len(column)])
    return np.frombuffer(data, dtype, (stop - start) // dtype.itemsize, start)
