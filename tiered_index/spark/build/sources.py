"""What a build reads, as a DataFrame: a given one, Parquet and NDJSON files, commit logs (`log_sources`).

Spark itself reads local files. Files of a storage are read inside tasks by pyarrow through ranged GETs, a Parquet row
group or a whole NDJSON file at a time; the driver reads only folders and footers. `entry_frame` makes entries of
messages, by Spark's own expressions; docs/spark.md says which fields there are.
"""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pyarrow as pa
import pyarrow.json as pj
import pyarrow.parquet as pq

from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.format.schema import Schema
from tiered_index.rocketmq.log.store import StoreDirectory
from tiered_index.spark.build.log_sources import SKIPPED, archive_frame, is_archive, log_frame
from tiered_index.spark.executors import (
    AddressOf,
    StorageAddress,
    arrow_schema,
    check_lines,
    each_split,
    first_wrong_line,
    frame_of_splits,
    is_local,
    local_path,
    to_read,
    typed_errors,
)
from tiered_index.storage.base import ObjectReader

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from typing_extensions import TypeIs


def _find(address_of: AddressOf, uri: str) -> list[tuple[str, str]]:
    """Return (storage's URI, name) of the object that `uri` names, or of the Parquet and NDJSON files below it."""
    place, mark, parameters = uri.partition("?")
    if _kind(place):
        folder, _, name = place.rpartition("/")
        return [(folder + mark + parameters, name)]
    with address_of(uri).open() as storage:
        found = [info.name for info in storage.list() if _kind(info.name)]
    names = [name for name in found if not name.rpartition("/")[2].startswith(("_", "."))]
    if not names:
        raise InvalidArgument(f"{uri} has no Parquet or NDJSON file")
    return [(uri, name) for name in names]


@contextmanager
def _opened(address: StorageAddress, name: str) -> Iterator[io.RawIOBase]:
    with address.open() as storage:
        yield ObjectReader(storage, name, storage.head(name).size_bytes)


SourceLike: TypeAlias = "DataFrame | str | Path | Sequence[str | Path]"
NDJSON = (".ndjson", ".jsonl", ".json", ".ndjson.gz", ".jsonl.gz", ".json.gz")
_MESSAGE = (
    "topic string, queue_id long, keys array<string>, key string, offset long, size long, timestamp_ms long, "
    "topic_id long"
)
# NDJSON is read so many bytes at a time.
_BLOCK_BYTES = 8 << 20


def frame_of(
    spark: SparkSession, source: SourceLike, address_of: AddressOf, *, skip_corrupt: bool = False
) -> DataFrame:
    """Return the messages, or a commit log's entries, of a source. Raises `InvalidArgument`, as the storage."""
    if is_frame(source):
        return source
    paths = [os.fspath(p) for p in ([source] if isinstance(source, str | os.PathLike) else source)]
    if not paths:
        raise InvalidArgument("no source is given")
    if archives := [path for path in paths if is_archive(path)]:
        if len(archives) < len(paths):
            raise InvalidArgument(f"sources are all archived segments or none is: {archives[0]} stands beside others")
        return archive_frame(spark, archives, address_of, skip_corrupt)
    stored = [path for path in paths if not is_local(path)]
    if stored and len(stored) < len(paths):
        raise InvalidArgument(f"sources are all local or all in a storage: {stored[0]} is not local")
    if stored:
        return _stored_frame(spark, stored, address_of)
    local = [local_path(path) for path in paths]
    if missing := [path for path in local if not path.exists()]:
        raise InvalidArgument(f"{missing[0]}: no such file or folder")
    if any((path / "commitlog").is_dir() for path in local):
        return log_frame(spark, [StoreDirectory.open(path) for path in local], skip_corrupt)
    files = [file for path in local for file in _files_below(path)]
    urls = [to_read(file) for file in files]
    if _kind_of([str(file) for file in files]) == "parquet":
        return spark.read.parquet(*urls)
    with typed_errors("reading the source"):
        check_lines(spark, files)
    return _message_frame(spark.read.schema(_MESSAGE).option("mode", "FAILFAST").json(urls))


def is_frame(source: SourceLike) -> TypeIs[DataFrame]:
    """Return whether a source is a DataFrame, Spark's own or Spark Connect's."""
    return hasattr(source, "mapInArrow")


def has_log_offsets(source: SourceLike) -> bool:
    """Return whether the offsets of a source are positions in a commit log."""
    paths = [] if is_frame(source) else [source] if isinstance(source, str | os.PathLike) else list(source)
    return bool(paths) and all(is_archive(path) or (Path(path) / "commitlog").is_dir() for path in paths)


def _files_below(path: Path) -> list[Path]:
    """Return a file, or those of a folder that have a name of ours; hidden ones and Spark's own are none."""
    if path.is_file():
        return [path]
    there = [p for p in sorted(path.rglob("*")) if p.is_file() and not p.name.startswith((".", "_"))]
    found = [p for p in there if _kind(str(p))]
    if not found:
        raise InvalidArgument(f"{path} has no Parquet or NDJSON file, and is no RocketMQ store: it has no commitlog/")
    return found


def _kind(name: str) -> str:
    return "parquet" if name.endswith(".parquet") else "ndjson" if name.endswith(NDJSON) else ""


def _kind_of(names: Sequence[str]) -> str:
    kinds = {_kind(name) for name in names}
    if kinds - {"parquet", "ndjson"} or len(kinds) != 1:
        raise InvalidArgument(
            f"sources are all Parquet (.parquet) or all NDJSON (.ndjson, .jsonl, .json, each also .gz), not {names[0]}"
        )
    return kinds.pop()


def _message_frame(frame: DataFrame) -> DataFrame:
    """Return NDJSON's messages, whose keys stand in `keys`, as this project writes them, or one in `key`."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    keys = F.coalesce("keys", F.when(F.col("key").isNotNull(), F.array("key")))
    return frame.select("topic", "queue_id", keys.alias("key"), "offset", "size", "timestamp_ms", "topic_id")


def _stored_frame(spark: SparkSession, uris: Sequence[str], address_of: AddressOf) -> DataFrame:
    splits: list[list[Any]] = []
    files = [file for uri in uris for file in _find(address_of, uri)]
    kind = _kind_of([name for _, name in files])
    schema: Any = None
    for uri, name in files:
        if kind == "ndjson":
            splits.append([uri, name, 0])
            continue
        with _opened(address_of(uri), name) as handle, _parquet(name, handle) as parquet:
            schema = schema or parquet.schema_arrow
            if parquet.schema_arrow.names != schema.names:
                has = ", ".join(parquet.schema_arrow.names)
                raise InvalidArgument(f"{name} has other columns than {files[0][1]}: {has}")
            splits += [[uri, name, group] for group in range(parquet.metadata.num_row_groups)]
    # the columns as Spark sees them: an empty frame of that schema says so
    frame_schema = _MESSAGE if kind == "ndjson" else spark.createDataFrame(schema.empty_table()).schema
    read = partial(_read_ndjson if kind == "ndjson" else _read_parquet, address_of=address_of)
    frame = frame_of_splits(spark, splits).mapInArrow(read, frame_schema)
    return _message_frame(frame) if kind == "ndjson" else frame


def _parquet(name: str, handle: Any) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(handle, pre_buffer=True)
    except pa.ArrowException as error:
        raise CorruptFile(name, f"not a Parquet file that can be read: {error}") from error


def _read_parquet(batches: Iterable[pa.RecordBatch], address_of: AddressOf) -> Iterator[pa.RecordBatch]:
    for uri, name, group in each_split(batches):
        with _opened(address_of(uri), name) as handle, _parquet(name, handle) as parquet:
            try:
                yield from parquet.iter_batches(row_groups=[group])
            except pa.ArrowException as error:
                raise CorruptFile(name, f"row group {group} can't be read: {error}") from error


def _read_ndjson(batches: Iterable[pa.RecordBatch], address_of: AddressOf) -> Iterator[pa.RecordBatch]:
    blocks = pj.ReadOptions(block_size=_BLOCK_BYTES)
    options = pj.ParseOptions(explicit_schema=arrow_schema(_MESSAGE), unexpected_field_behavior="ignore")
    for uri, name, _ in each_split(batches):
        try:
            with (
                _lines(address_of(uri), name) as plain,
                pj.open_json(pa.PythonFile(plain, mode="r"), blocks, options) as reader,
            ):
                yield from reader
        except pa.ArrowInvalid as error:
            if "Empty JSON file" in str(error):
                continue
            # pyarrow names the column of some errors, and the line of none
            with _lines(address_of(uri), name) as plain:
                wrong = first_wrong_line(plain) or f"not NDJSON of messages: {error}"
            raise InvalidArgument(f"{name}: {wrong}") from error


@contextmanager
def _lines(address: StorageAddress, name: str) -> Iterator[io.BufferedIOBase]:
    """Yield the plain lines of a stored file. Each filling of the buffer is a request."""
    with _opened(address, name) as handle:
        buffered = io.BufferedReader(handle, _BLOCK_BYTES)
        yield gzip.GzipFile(fileobj=buffered) if name.endswith(".gz") else buffered


# What every message has; `topic_id` is optional.
FIELDS = ("topic", "queue_id", "key", "offset", "size", "timestamp_ms")
_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_TIMES = (*_INTEGERS, "timestamp", "timestamp_ntz")
_KINDS = {
    "topic": (("string",), "text is"),
    "key": (("string", "array<string>"), "text or a list of text is"),
    **dict.fromkeys(("queue_id", "offset", "size", "topic_id"), (_INTEGERS, "integers are")),
    "timestamp_ms": (_TIMES, "integers (epoch milliseconds) or a timestamp are"),
}


def entry_frame(frame: DataFrame, columns: Mapping[str, str | Column], schema: Schema) -> DataFrame:
    """Return the fields of entries, one row an entry (its key null where a message has none).

    `columns` say which column a field is, or are one (``lit("orders")``). Raises `InvalidArgument` naming the column.
    """
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    wanted = [*FIELDS, *(column.name for column in schema.caller_columns)]
    if unknown := [name for name in columns if name not in (*wanted, "topic_id")]:
        fields = ", ".join((*wanted, "topic_id"))
        raise InvalidArgument(f"columns: {unknown[0]!r} is no field of an entry; these are {fields}")
    if "topic_id" in columns or "topic_id" in frame.columns:
        wanted.append("topic_id")
    selected = []
    for field in wanted:
        source: Any = columns.get(field, field)
        if isinstance(source, str):
            if field == "key" and source == "key" and "key" not in frame.columns and "keys" in frame.columns:
                source = "keys"
            source = column_of(frame, field, source, "the source has")
        selected.append(source.alias(field))
    if SKIPPED in frame.columns:
        selected.append(F.col(SKIPPED))
    entries = frame.select(*selected)
    for name in wanted:
        check_kind(name, entries.schema[name].dataType.simpleString(), columns.get(name, name))
    if entries.schema["key"].dataType.simpleString() != "string":
        entries = entries.withColumn("key", F.explode_outer(F.array_compact(F.array_distinct("key"))))
    return entries


def column_of(frame: DataFrame, field: str, name: str, whose: str) -> Column:
    """Return the column of that name, which is a field. Raises `InvalidArgument` where the frame lacks it."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    if name not in frame.columns:
        there = ", ".join(frame.columns) or "no columns"
        raise InvalidArgument(f"column {shown_column(field, name)} is missing; {whose} {there}")
    return F.col(f"`{name.replace('`', '``')}`")


def shown_column(field: str, given: object) -> str:
    """Return what errors call the column that the user gave for a field."""
    return f"{given!r} ({field})" if isinstance(given, str) and given != field else f"{field!r}"


def check_kind(field: str, found: str, given: object) -> None:
    """Raise `InvalidArgument` where Spark's type `found` of the user's column `given` can't be that of `field`."""
    kinds, expected = _KINDS.get(field, ((), ""))
    if kinds and found not in kinds:
        raise InvalidArgument(f"column {shown_column(field, given)} is {found}; {expected} needed")


_MIN_VALUE = 1 << 31


def hash_key(topic: Column | str, key: Column | str, rule: Literal["abs", "mask"] = "abs") -> Column:
    """Return `tiered_index.hash_key` of two text columns (or their names) as an int column, null where either is.

    `rule` as there. Raises `InvalidArgument` for another one.
    """
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    if rule not in ("abs", "mask"):
        raise InvalidArgument(f"a key is hashed by rule 'abs' or 'mask', not by {rule!r}")

    # the fold's functions name nothing outside of them: Spark would evaluate that again for every code unit
    digits = F.hex(F.encode(F.concat(topic, F.lit("#"), key), "UTF-16BE"))
    units = F.regexp_extract_all(digits, F.lit("(.{4})"), F.lit(1))

    def add(value: Any, unit: Any) -> Any:
        return (value * 31 + F.conv(unit, 16, 10).cast("bigint")).bitwiseAND(F.lit(0xFFFFFFFF))

    def absolute(value: Any) -> Any:
        # abs() of Integer.MIN_VALUE is itself in Java; as the format demands it becomes 0
        return F.when(value < _MIN_VALUE, value).when(value == _MIN_VALUE, 0).otherwise((1 << 32) - value).cast("int")

    def masked(value: Any) -> Any:
        return value.bitwiseAND(F.lit(0x7FFFFFFF)).cast("int")

    return F.aggregate(units, F.lit(0).cast("bigint"), add, absolute if rule == "abs" else masked)
