"""Sources of a build: a DataFrame, Parquet (`parquet`) and NDJSON files, commit logs (`log_sources`).

Parquet is read inside the tasks that need its entries (`entries_of`). Where it can't be, and for other sources, Spark
makes entries of messages by its own expressions (`entry_frame`). Tasks read NDJSON as `ingest` does.
docs/spark-cluster.md says which fields there are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.format.schema import ROCKETMQ_SCHEMA, Schema
from tiered_index.rocketmq.log.store import StoreDirectory
from tiered_index.service.answers.validation import TopicTable, batch_columns
from tiered_index.sources.columns import Message, check_unicode, columns_of
from tiered_index.sources.files import NdjsonSource
from tiered_index.sources.messages import Batch
from tiered_index.sources.places import LocalFile, StoredFile
from tiered_index.spark.addresses import AddressOf, StorageAddress
from tiered_index.spark.build.folders import files_below, find_stored, kind_of_all, partition_columns
from tiered_index.spark.build.log_sources import (
    LOG_COLUMNS,
    SKIPPED,
    LogEntries,
    archive_entries,
    is_archive,
    log_entries,
)
from tiered_index.spark.build.parquet import HAS_KEY, EntryReader, Field, ParquetFiles, columns_not_in_all, spark_type
from tiered_index.spark.frames import arrow_schema, each_split, frame_of_splits
from tiered_index.spark.local_files import is_local, local_path, to_read
from tiered_index.spark.workers import spare_collections

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from typing_extensions import TypeIs


SourceLike: TypeAlias = "DataFrame | str | Path | Sequence[str | Path]"
_ENTRY = "topic string, queue_id long, key string, offset long, size long, timestamp_ms long, topic_id long"

# A task reads so much of a file of NDJSON.
_PART_BYTES = 128 << 20


def frame_of(
    spark: SparkSession, source: SourceLike, address_of: AddressOf, *, skip_corrupt: bool = False
) -> DataFrame:
    """Return the messages, or a commit log's entries, of a source. Raises `InvalidArgument`, as the storage."""
    if is_frame(source):
        return source
    log = _log_of(spark, source, address_of, skip_corrupt)
    if log is not None:
        return log.frame
    found, below = _files(source, address_of)
    kind, partitions = kind_of_all(found, address_of), partition_columns(below)
    if kind == "ndjson":
        _check_folders(partitions)
        read = partial(_read_ndjson, address_of=address_of)
        parts = [part for file in found for part in _parts(*file)]
        return frame_of_splits(spark, parts).mapInArrow(read, _ENTRY)
    if found[0][0] or partitions:
        return _frame_of_files(spark, ParquetFiles.of(found, address_of, partitions))
    return _parquet_frame(spark, [Path(name) for _, name in found])


def _log_of(spark: SparkSession, source: SourceLike, address_of: AddressOf, skip_corrupt: bool) -> LogEntries | None:
    """Return the entries of the commit logs that a source is, None for another one. Raises as `frame_of`."""
    archives, _, local = ([], [], []) if is_frame(source) else _places(source)
    if archives:
        return archive_entries(spark, archives, address_of, skip_corrupt)
    if any((path / "commitlog").is_dir() for path in local):
        return log_entries(spark, [StoreDirectory.open(path) for path in local], skip_corrupt)
    return None


def _places(source: str | os.PathLike[str] | Sequence[str | Path]) -> tuple[list[str], list[str], list[Path]]:
    """Return the paths of a source: archives, URIs of a storage, or local ones, which are there."""
    check_paths(source)
    paths = [os.fspath(p) for p in ([source] if isinstance(source, str | os.PathLike) else source)]
    if not paths:
        raise InvalidArgument("no source is given")
    if archives := [path for path in paths if is_archive(path)]:
        if len(archives) < len(paths):
            raise InvalidArgument(f"sources are all archived segments or none is: {archives[0]} is mixed with others")
        return archives, [], []
    stored = [path for path in paths if not is_local(path)]
    if stored and len(stored) < len(paths):
        raise InvalidArgument(f"sources are all local or all in a storage: {stored[0]} is not local")
    if stored:
        return [], stored, []
    local = [local_path(path) for path in paths]
    if missing := [path for path in local if not path.exists()]:
        raise InvalidArgument(f"{missing[0]}: no such file or folder")
    return [], [], local


def check_paths(source: object) -> None:
    """Raise `InvalidArgument` for what is neither a path nor some, as a frame of pandas, which looks like a list."""
    given = [source] if isinstance(source, str | os.PathLike) else source
    if not isinstance(given, Sequence | set | frozenset) or not all(isinstance(p, str | os.PathLike) for p in given):
        raise InvalidArgument(f"a source is a DataFrame of Spark, a path or a list of paths, not {shown_kind(source)}")


def shown_kind(value: object) -> str:
    """Return what an error calls something that is no DataFrame of Spark, and what makes one of it."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}: make a DataFrame by spark.createDataFrame(...)"


def _files(
    source: str | os.PathLike[str] | Sequence[str | Path], address_of: AddressOf
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the files of a source, each with a storage's URI, or nothing where it is local, and their names below what
    was given.
    """
    _, stored, local = _places(source)
    found = [file for uri in stored for file in find_stored(address_of, uri)]
    below = [name if uri in stored else "" for uri, name in found]
    for path in local:
        files = files_below(path)
        found += [("", str(file)) for file in files]
        below += [file.relative_to(path).as_posix() for file in files]
    return found, below


def _check_folders(partitions: Mapping[str, object]) -> None:
    """Raise `InvalidArgument` where folders of NDJSON are named for a field: lines alone have those."""
    if named := [name for name in partitions if name in (*FIELDS, "keys", "topic_id")]:
        raise InvalidArgument(
            f"folders are named for {named[0]!r}, and of NDJSON fields stand in the lines: give a DataFrame that has "
            "the folders' columns, as spark.read.json makes it"
        )


def check_source(source: SourceLike, columns: Mapping[str, object], schema: Schema, address_of: AddressOf) -> None:
    """Raise what `entries_of` does for paths, as far as that needs no Spark: what is not there, or lacks a column of
    Parquet that is named by `columns` or as its field.
    """
    if is_frame(source):
        return
    files = _parquet_files(source, address_of)
    if files is None:
        _wanted(columns, (), schema)
        _, stored, local = _places(source)
        if (stored or local) and not any((path / "commitlog").is_dir() for path in local):
            found, below = _files(source, address_of)
            if kind_of_all(found, address_of) == "ndjson":
                _check_folders(partition_columns(below))
        return
    for field in _wanted(columns, files.schema.names, schema):
        name = columns.get(field, field)
        # what another column is to be, Spark says
        if isinstance(name, str):
            name = _default(field, files.schema.names) if name == field else name
            _check_there(field, name, files.schema.names, "the source has")
            _check_typed(field, name, files)


def is_frame(source: SourceLike) -> TypeIs[DataFrame]:
    """Return whether a source is a DataFrame, Spark's own or Spark Connect's."""
    return hasattr(source, "mapInArrow")


def has_log_offsets(source: SourceLike) -> bool:
    """Return whether the offsets of a source are positions in a commit log."""
    if is_frame(source):
        return False
    check_paths(source)
    paths = [source] if isinstance(source, str | os.PathLike) else list(source)
    return bool(paths) and all(is_archive(path) or (Path(path) / "commitlog").is_dir() for path in paths)


def _parquet_frame(spark: SparkSession, files: Sequence[Path]) -> DataFrame:
    """Return the rows of local files, with the columns that all have, `topic_id` where one has it."""
    frame = spark.read.parquet(*map(to_read, files))
    return frame.drop(*columns_not_in_all(frame.columns, files) - {"topic_id"})


def _frame_of_files(spark: SparkSession, files: ParquetFiles) -> DataFrame:
    parts = files.parts(spark.sparkContext.defaultParallelism)
    first, others = files.files[0][1], len(files.files) - 1
    where = f"{first} or one of {others:,} files beside it" if others else first
    typed = [field for field in files.schema if field.name not in {*files.untyped, *files.doubled}]
    known = pa.schema([field.with_type(_known_type(field, where)) for field in typed])
    if "topic_id" in files.untyped:
        # other files may have some
        known = known.append(pa.field("topic_id", pa.int64()))

    def read_parts(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for rows in files.batches(parts[number], known.names):
                    yield rows.select(known.names).cast(known)

    # the columns as Spark sees them: an empty frame of that schema says so
    schema = spark.createDataFrame(known.empty_table()).schema
    return _numbers(spark, len(parts)).mapInArrow(read_parts, schema)


def _known_type(field: pa.Field, file: str) -> pa.DataType:
    """Return a column's type as Spark takes it from Python: of times in microseconds, of unsigned numbers a wider one.
    Nanoseconds are an error here as in local files, which Spark reads itself.
    """
    if pa.types.is_unsigned_integer(field.type):
        return pa.int64() if field.type.bit_width < 64 else pa.decimal128(20)
    if not pa.types.is_timestamp(field.type):
        return field.type
    if field.type.unit == "ns":
        raise InvalidArgument(f"{file}: column {field.name!r} has times in nanoseconds: write times in microseconds")
    return pa.timestamp("us", field.type.tz)


def _numbers(spark: SparkSession, count: int) -> DataFrame:
    """Return a DataFrame of the numbers below `count`, each in a partition of its own."""
    return spark.range(0, count, 1, max(1, count))


def _parts(uri: str, name: str) -> Iterator[list[Any]]:
    """Yield the parts of a file of NDJSON that tasks read: of a large local one several."""
    size = 0 if uri or name.lower().endswith(".gz") else Path(name).stat().st_size
    for begin in range(0, max(1, size), _PART_BYTES):
        yield [uri, name, begin, begin + _PART_BYTES if size else None]


def _read_ndjson(batches: Iterable[pa.RecordBatch], address_of: AddressOf) -> Iterator[pa.RecordBatch]:
    """Yield a row for each key of the files' messages, and one without key for a message that has none."""
    for uri, name, begin, end in each_split(batches):
        with _place(address_of(uri) if uri else None, name) as place:
            source = NdjsonSource(place)
            for batch in source.part(begin, end):
                yield from _entry_rows(batch, str(place))
            if source.held_back_bytes:
                raise InvalidArgument(f"{place}: the last line has no newline, and may be cut: add the newline")


@contextmanager
def _place(address: StorageAddress | None, name: str) -> Iterator[LocalFile | StoredFile]:
    if address is None:
        yield LocalFile(Path(name))
        return
    with address.open() as storage:
        yield StoredFile(f"{address.uri.partition('?')[0]}/{name}", storage, name, storage.head(name).size_bytes)


def _entry_rows(batch: Batch, where: str) -> Iterator[pa.RecordBatch]:
    """Yield a batch's rows. Raises `InvalidArgument` naming the first line that is wrong."""
    columns = batch.columns
    if columns is not None:
        try:
            batch_columns(columns, ROCKETMQ_SCHEMA, TopicTable())
        except InvalidArgument:
            columns = None
    if columns is None:
        messages = list[Message]()
        for record in batch.records():
            try:
                if record.message is None:
                    raise InvalidArgument(record.problem)
                check_unicode(record.message)
            except InvalidArgument as error:
                raise InvalidArgument(f"{where}, {record.where}: {error}") from error
            messages.append(record.message)
        # a batch has topic ids or none
        for with_ids in (True, False):
            some = [message for message in messages if (message.topic_id is not None) == with_ids]
            if some:
                yield from _entry_batches(pa.table(columns_of(some)))
        keyless = sum(not message.keys for message in messages)
    else:
        yield from _entry_batches(pa.Table.from_batches([columns]))
        keyless = batch.keyless
    if keyless:
        yield from _entry_batches(pa.table({"key": pa.nulls(keyless, pa.string())}))


def _entry_batches(table: pa.Table) -> Iterator[pa.RecordBatch]:
    schema = arrow_schema(_ENTRY)
    there = {name: table[name] for name in table.column_names}
    columns = [there[f.name].cast(f.type) if f.name in there else pa.nulls(len(table), f.type) for f in schema]
    yield from pa.table(columns, schema=schema).to_batches()


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


@dataclass(frozen=True, slots=True)
class Entries:
    """A source's entries, one row each (its key null where a message has none), as tasks take them.

    `frame` has their fields `names`; or it has numbers of parts of the source, and `read` makes fields of those.
    """

    frame: DataFrame
    names: tuple[str, ...]
    read: Callable[[Iterable[pa.RecordBatch], Sequence[str]], Iterator[pa.RecordBatch]] | None = None

    def mapped(
        self, make: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], names: Sequence[str], schema: str
    ) -> DataFrame:
        """Return what `make` makes, in tasks, of the fields `names`; `HAS_KEY` is one of them."""
        from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

        read = self.read

        def made(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            spare_collections()
            return make(batches if read is None else read(batches, names))

        frame = self.frame
        if read is None:
            frame = frame.withColumn(HAS_KEY, F.col("key").isNotNull()).select(*names)
        return frame.mapInArrow(made, schema)


def entries_of(
    spark: SparkSession,
    source: SourceLike,
    columns: Mapping[str, str | Column],
    schema: Schema,
    address_of: AddressOf,
    *,
    skip_corrupt: bool = False,
) -> Entries:
    """Return the entries of a source. Raises `InvalidArgument` naming the column, `CorruptFile`, as the storage."""
    fields = {name: _field(given) for name, given in columns.items()}
    if all(fields.values()) and (files := _parquet_files(source, address_of)) is not None:
        there = files.schema.names
        wanted = _wanted(columns, there, schema)
        given: dict[str, Any] = {name: fields.get(name, (name, None)) for name in wanted}
        if given["key"] == ("key", None):
            given["key"] = _default("key", there), None
        for name, (column, _) in given.items():
            _check_typed(name, column, files)
        if _is_plain(given, files.schema):
            for name, (column, _) in given.items():
                check_kind(name, spark_type(files.schema.field(column).type) or "", column) if column else None
            parts = files.parts(spark.sparkContext.defaultParallelism)
            return Entries(_numbers(spark, len(parts)), tuple(wanted), EntryReader(files, parts, given))
    log = _log_of(spark, source, address_of, skip_corrupt)
    if log is not None and not columns and set(wanted := _wanted({}, (), schema)) < set(LOG_COLUMNS):
        return Entries(log.segments, (*wanted, SKIPPED), partial(_of_log, log.read))
    there = frame_of(spark, source, address_of, skip_corrupt=skip_corrupt) if log is None else log.frame
    frame = entry_frame(there, columns, schema)
    return Entries(frame, tuple(frame.columns))


def _of_log(
    read: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    batches: Iterable[pa.RecordBatch],
    names: Sequence[str],
) -> Iterator[pa.RecordBatch]:
    """Yield the fields `names` of a log's entries, `HAS_KEY` among them."""
    for batch in read(batches):
        yield batch.append_column(HAS_KEY, pc.is_valid(batch.column("key"))).select(list(names))


def _parquet_files(source: SourceLike, address_of: AddressOf) -> ParquetFiles | None:
    """Return the Parquet files that a source is, None for another one, or one that is left to Spark."""
    if is_frame(source):
        return None
    check_paths(source)
    paths = [os.fspath(p) for p in ([source] if isinstance(source, str | os.PathLike) else source)]
    if any(map(is_archive, paths)) or len({is_local(path) for path in paths}) != 1:
        return None
    stored = not is_local(paths[0])
    local = [] if stored else [local_path(path) for path in paths]
    if not all(path.exists() for path in local) or any((path / "commitlog").is_dir() for path in local):
        return None
    found, below = _files(source, address_of)
    if kind_of_all(found, address_of) != "parquet":
        return None
    partitions = partition_columns(below)
    try:
        return ParquetFiles.of(found, address_of, partitions)
    except (InvalidArgument, CorruptFile):
        if stored or partitions:
            raise
        return None  # Spark says what is wrong, or knows better: files of a folder may differ


def _field(given: str | Column) -> Field | None:
    """Return the column's name, or the value of a literal; None for any other expression."""
    if isinstance(given, str):
        return given, None
    node = getattr(getattr(given, "_jc", None), "node", None)
    value = node().value() if node is not None and node().getClass().getSimpleName() == "Literal" else None
    return (None, value) if isinstance(value, str) or type(value) is int else None


def _is_plain(given: Mapping[str, Field], schema: pa.Schema) -> bool:
    """Return whether pyarrow reads all columns as Spark does. To Spark, names in other letters are the same."""
    columns = [column for column, _ in given.values() if column is not None]
    names = [name.lower() for name in schema.names]
    return (
        given["timestamp_ms"][0] is not None
        and len(set(names)) == len(names)
        and all(column in schema.names and "." not in column for column in columns)
        and all(spark_type(schema.field(column).type) is not None for column in columns)
        and all(isinstance(value, str) == (name in ("topic", "key")) for name, (c, value) in given.items() if not c)
    )


def _wanted(columns: Mapping[str, object], there: Sequence[str], schema: Schema) -> list[str]:
    """Return the fields of entries; `there` are the source's columns. Raises `InvalidArgument` for an unknown one."""
    wanted = [*FIELDS, *(column.name for column in schema.caller_columns)]
    if unknown := [name for name in columns if name not in (*wanted, "topic_id")]:
        fields = ", ".join((*wanted, "topic_id"))
        raise InvalidArgument(f"columns: {unknown[0]!r} is not a field of an entry; these are {fields}")
    if "topic_id" in columns or "topic_id" in there:
        wanted.append("topic_id")
    return wanted


def _default(field: str, there: Sequence[str]) -> str:
    """Return the column that a field is where nothing is said, or `key` is said to be `key`."""
    return "keys" if field == "key" and "key" not in there and "keys" in there else field


def entry_frame(frame: DataFrame, columns: Mapping[str, str | Column], schema: Schema) -> DataFrame:
    """Return the fields of entries, one row an entry (its key null where a message has none).

    `columns` say which column a field is, or are one (``lit("orders")``). Raises `InvalidArgument` naming the column.
    """
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    wanted = _wanted(columns, frame.columns, schema)
    selected = []
    for field in wanted:
        source: Any = columns.get(field, field)
        if isinstance(source, str):
            source = _default(field, frame.columns) if source == field else source
            source = column_of(frame, field, source, "the source has")
        selected.append(source.alias(field))
    if SKIPPED in frame.columns:
        selected.append(F.col(SKIPPED))
    entries = frame.select(*selected)
    for name in wanted:
        kind: Any = entries.schema[name].dataType
        given = columns.get(name, name)
        named = isinstance(given, str) and kind.typeName() == "struct"
        check_kind(name, kind.simpleString(), given, kind.fieldNames() if named else ())
    if entries.schema["key"].dataType.simpleString() != "string":
        entries = entries.withColumn("key", F.explode_outer(F.array_compact(F.array_distinct("key"))))
    return entries


def column_of(frame: DataFrame, field: str, name: str, whose: str) -> Column:
    """Return the column of that name, which is a field. Raises `InvalidArgument` where the frame lacks it."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    _check_there(field, name, frame.columns, whose)
    # to Spark, names in other letters are the same
    if sum(column.lower() == name.lower() for column in frame.columns) > 1:
        raise InvalidArgument(f"column {shown_column(field, name)} is one of two columns {name!r}: rename or drop one")
    return F.col(f"`{name.replace('`', '``')}`")


def _check_there(field: str, name: str, there: Sequence[str], whose: str) -> None:
    """Raise `InvalidArgument` where a column that is a field is none of those that are there."""
    if name not in there:
        inside = name.partition(".")[0] in there
        hint = f"; a field within a column is given in Python, as F.col({name!r})" if inside else ""
        whose += f" {', '.join(there) or 'no columns'}"
        raise InvalidArgument(f"column {shown_column(field, name)} is missing; {whose}{hint}")


def _check_typed(field: str, name: str | None, files: ParquetFiles) -> None:
    """Raise `InvalidArgument` where a file's column has no type: maybe what it had got lost where it was written."""
    if name is not None and name in files.doubled:
        raise InvalidArgument(
            f"column {shown_column(field, name)} is in {files.doubled[name]} and in the name of its folder: give the "
            "files themselves, whose columns count then, or a DataFrame"
        )
    # messages need no id of their topic
    if name is not None and name in files.untyped and field != "topic_id":
        raise InvalidArgument(
            f"column {shown_column(field, name)} has no type in {files.untyped[name]}, which has nulls only there: "
            "write it with the type that it has where it is not empty"
        )


def shown_column(field: str, given: object) -> str:
    """Return what errors call the column that the user gave for a field."""
    return f"{given!r} ({field})" if isinstance(given, str) and given != field else f"{field!r}"


def check_kind(field: str, found: str, given: object, inside: Sequence[str] = ()) -> None:
    """Raise `InvalidArgument` where Spark's type `found` of the user's column `given` can't be that of `field`; for a
    struct with the fields `inside` the error shows how to give its first field.
    """
    kinds, expected = _KINDS.get(field, ((), ""))
    if kinds and found == "decimal(20,0)":
        found += " (a uint64 column of Parquet, to Spark)"
    if kinds and found not in kinds:
        hint = f"; one of its fields is given in Python, as F.col({f'{given}.{inside[0]}'!r})" if inside else ""
        raise InvalidArgument(f"column {shown_column(field, given)} is {found}; {expected} needed{hint}")
