"""Sources of a build: a DataFrame, Parquet (`parquet`) and NDJSON files, commit logs (`log_sources`).

Tasks read files and logs with the engine's readers, as entries (`entries_of`). Of a DataFrame Spark makes the entries
(`entry_frame`).
docs/spark.md lists the fields.
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

from tiered_index.errors import InvalidArgument
from tiered_index.format.schema import Schema
from tiered_index.rocketmq.log.store import StoreDirectory
from tiered_index.service.write.validation import TopicTable, batch_columns
from tiered_index.sources.columns import CheckedMessage, check_kinds, columns_of, own_type
from tiered_index.sources.files import NdjsonSource
from tiered_index.sources.messages import Fields, MessageBatch
from tiered_index.sources.places import LocalFile, StoredFile, local_path, readings
from tiered_index.spark.addresses import AddressOf, StorageAddress
from tiered_index.spark.frames import arrow_schema, arrow_type_of, each_split, frame_of_splits
from tiered_index.spark.workers import plainly, spare_collections
from tiered_index.spark.writing.folders import files_below, find_stored, kind_of_all, partition_columns
from tiered_index.spark.writing.log_sources import (
    LOG_COLUMNS,
    SKIPPED,
    LogEntries,
    archive_entries,
    is_archive,
    log_entries,
)
from tiered_index.spark.writing.parquet import HAS_KEY, EntryReader, Field, ParquetFiles

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from typing_extensions import TypeIs


SourceLike: TypeAlias = "DataFrame | str | Path | Sequence[str | Path]"
_ENTRY = "topic string, queue_id long, key string, offset long, size long, timestamp_ms long, topic_id long"

# Bytes of an NDJSON file that a task reads.
_PART_BYTES = 128 << 20


def _entry_schema(schema: Schema) -> pa.Schema:
    own = {column: own_type(column) for column in schema.caller_columns}
    # bytes are read as text
    kinds = {c.name: pa.binary() if pa.types.is_string(k) and not c.is_text else k for c, k in own.items()}
    return pa.schema([*arrow_schema(_ENTRY), *kinds.items()])


def _log_of(spark: SparkSession, source: SourceLike, address_of: AddressOf, skip_corrupt: bool) -> LogEntries | None:
    """Return the entries of a source that consists of commit logs, None for another one. Raises as `frame_of`."""
    paths = [] if is_frame(source) else _paths(source)
    if any(map(is_archive, paths)):
        return archive_entries(spark, paths, address_of, skip_corrupt)
    if any(map(_is_store, paths)):
        return log_entries(spark, [StoreDirectory.open(Path(path)) for path in paths], skip_corrupt)
    return None


def _is_store(path: str) -> bool:
    return (place := local_path(path)) is not None and (place / "commitlog").is_dir()


def _paths(source: object) -> list[str]:
    """Return the paths of a source: archives, storage URIs, or absolute local paths, which exist."""
    sources = [source] if isinstance(source, str | os.PathLike) else source
    if not isinstance(sources, Sequence | set | frozenset) or not all(
        isinstance(p, str | os.PathLike) for p in sources
    ):
        raise InvalidArgument(f"a source is a DataFrame of Spark, a path or a list of paths, not {shown_kind(source)}")
    paths = [os.fspath(path) for path in sources]
    if not paths:
        raise InvalidArgument("no source is given")
    if archives := [path for path in paths if is_archive(path)]:
        if len(archives) < len(paths):
            raise InvalidArgument(
                f"build {archives[0]} without the other sources: archived segments can't be mixed with files"
            )
        return archives
    local = [place for path in paths if (place := local_path(path)) is not None]
    if missing := [path for path in local if not path.exists()]:
        raise InvalidArgument(f"{missing[0]}: no such file or folder")
    if not local:
        return paths
    if len(local) < len(paths):
        stored = next(path for path in paths if local_path(path) is None)
        raise InvalidArgument(f"sources are all local or all in a storage: {stored} is not local")
    return [str(place) for place in local]


def shown_kind(value: object) -> str:
    """Return the type of a value that is not a Spark DataFrame, with a hint, for a message."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}: make a DataFrame by spark.createDataFrame(...)"


def files_of(
    source: str | os.PathLike[str] | Sequence[str | Path],
    address_of: AddressOf,
    texts: Sequence[str] = ("ndjson",),
    columns: Mapping[str, object] | None = None,
) -> ParquetFiles | list[tuple[str, str]]:
    """Return the Parquet files of a source, or its files of one of the kinds `texts` as (storage URI or "", name).

    `columns` has by field the name of its column, or another expression of it.

    Raises `InvalidArgument`, the storage's errors.
    """
    # names relative to the given paths: their folders may be columns
    places, below = list[tuple[str, str]](), list[str]()
    for path in _paths(source):
        place = local_path(path)
        if place is None:
            places += (stored := find_stored(address_of, path))
            meant = {*readings(path.partition("?")[0])}
            below += [name if uri.partition("?")[0] in meant else "" for uri, name in stored]
        else:
            files = files_below(place)
            places += [("", str(file)) for file in files]
            below += [file.relative_to(place).as_posix() for file in files]
    kind, partitions = kind_of_all(places, address_of, ("parquet", *texts)), partition_columns(below, columns)
    if kind == "parquet":
        return ParquetFiles.of(places, address_of, partitions)
    if named := [name for name in partitions if name in (*FIELDS, "keys", "topic_id")]:
        raise InvalidArgument(
            f"folders have values of {named[0]!r} in their names, but fields of {kind.upper()} must be in the lines: "
            "give a DataFrame that has the folders' columns, as spark.read makes it"
        )
    return places


def check_source(source: SourceLike, columns: Mapping[str, object], schema: Schema, address_of: AddressOf) -> None:
    """Raise the errors of `entries_of` that need no Spark: missing paths and missing columns of Parquet files."""
    if is_frame(source):
        return
    if any(is_archive(path) or _is_store(path) for path in _paths(source)):
        _checked_log_fields(columns, schema)
        return
    files = files_of(source, address_of, columns=columns)
    for field in _wanted(columns, files.schema.names if isinstance(files, ParquetFiles) else (), schema):
        if isinstance(files, ParquetFiles) and isinstance(name := columns.get(field, field), str):
            _checked_name(field, name, files)


def is_frame(source: SourceLike) -> TypeIs[DataFrame]:
    """Return whether a source is a DataFrame, of Spark or Spark Connect."""
    return hasattr(source, "mapInArrow")


def has_log_offsets(source: SourceLike) -> bool:
    """Return whether the offsets of a source are positions in a commit log."""
    return not is_frame(source) and all(is_archive(path) or _is_store(path) for path in _paths(source))


def _numbers(spark: SparkSession, count: int) -> DataFrame:
    """Return a DataFrame of the numbers below `count`, one in each partition."""
    return spark.range(0, count, 1, max(1, count))


def _parts(uri: str, name: str) -> Iterator[list[Any]]:
    """Yield the parts of an NDJSON file, one for each task: several of a large local file."""
    size = 0 if uri or name.lower().endswith(".gz") else Path(name).stat().st_size
    for begin in range(0, max(1, size), _PART_BYTES):
        yield [uri, name, begin, begin + _PART_BYTES if size else None]


def _read_ndjson(batches: Iterable[pa.RecordBatch], address_of: AddressOf, fields: Fields) -> Iterator[pa.RecordBatch]:
    """Yield a row for each key of the files' messages, and a row without a key for a message without keys."""
    for uri, name, begin, end in each_split(batches):
        with _place(address_of(uri) if uri else None, name) as place:
            source = NdjsonSource(place, fields)
            for batch in source.part(begin, end):
                yield from _entry_rows(batch, str(place), fields)
            if source.held_back_bytes:
                raise InvalidArgument(f"{place}: the last line has no newline, and may be cut: add the newline")


@contextmanager
def _place(address: StorageAddress | None, name: str) -> Iterator[LocalFile | StoredFile]:
    if address is None:
        yield LocalFile(Path(name))
        return
    with address.open(any_names=True) as storage:
        yield StoredFile(f"{address.uri.partition('?')[0]}/{name}", storage, name, storage.head(name).size_bytes)


def _entry_rows(batch: MessageBatch, where: str, fields: Fields) -> Iterator[pa.RecordBatch]:
    """Yield a batch's rows. Raises `InvalidArgument`, which names the first wrong line."""
    columns = batch.columns
    if columns is not None:
        try:
            batch_columns(columns, fields.schema, TopicTable())
        except InvalidArgument:
            columns = None
    if columns is None:
        messages = list[CheckedMessage]()
        for record in batch.records():
            try:
                if record.message is None:
                    raise InvalidArgument(record.problem)
            except InvalidArgument as error:
                raise InvalidArgument(f"{where}, {record.where}: {error}") from error
            messages.append(record.message)
        # all messages of one batch have topic ids, or none has
        for with_ids in (True, False):
            some = [message for message in messages if (message.topic_id is not None) == with_ids]
            if some:
                yield from _entry_batches(pa.table(columns_of(some, fields.own)), fields.schema)
        keyless = sum(not message.keys for message in messages)
    else:
        yield from _entry_batches(pa.Table.from_batches([columns]), fields.schema)
        keyless = batch.keyless
    if keyless:
        yield from _entry_batches(pa.table({"key": pa.nulls(keyless, pa.string())}), fields.schema)


def _entry_batches(table: pa.Table, of: Schema) -> Iterator[pa.RecordBatch]:
    schema = _entry_schema(of)
    there = {name: table[name] for name in table.column_names}
    columns = [there[f.name].cast(f.type) if f.name in there else pa.nulls(len(table), f.type) for f in schema]
    yield from pa.table(columns, schema=schema).to_batches()


# Fields of every message; `topic_id` is optional.
FIELDS = ("topic", "queue_id", "key", "offset", "size", "timestamp_ms")


@dataclass(frozen=True, slots=True)
class Entries:
    """A source's entries for tasks, one row for each; the key is null for a message without keys.

    `frame` has the fields `names`. With `read` it has parts of the source, which `read` turns into fields.
    """

    frame: DataFrame
    names: tuple[str, ...]
    read: Callable[[Iterable[pa.RecordBatch], Sequence[str]], Iterator[pa.RecordBatch]] | None = None

    @property
    def rows(self) -> int:
        """The number of messages if the source consists of Parquet files, else 0."""
        return sum(rows for _, _, rows in self.read.files.groups) if isinstance(self.read, EntryReader) else 0

    def mapped(
        self, make: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], names: Sequence[str], schema: str
    ) -> DataFrame:
        """Apply `make`, in tasks, to the fields `names`, which include `HAS_KEY`; return its rows."""
        from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

        read = self.read

        def made(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            spare_collections()
            yield from make(batches if read is None else read(batches, names))

        frame = self.frame
        if read is None:
            frame = frame.withColumn(HAS_KEY, F.col("key").isNotNull()).select(*names)
        return frame.mapInArrow(plainly(made), schema)


def entries_of(
    spark: SparkSession,
    source: SourceLike,
    columns: Mapping[str, str | Column],
    schema: Schema,
    address_of: AddressOf,
    *,
    skip_corrupt: bool = False,
) -> Entries:
    """Return the entries of a source.

    Raises `InvalidArgument`, which names the column, `CorruptFile`, the storage's errors.
    """
    if is_frame(source):
        frame = entry_frame(source, columns, schema)
        return Entries(frame, tuple(frame.columns))
    if (log := _log_of(spark, source, address_of, skip_corrupt)) is not None:
        for name in _checked_log_fields(columns, schema):
            _check_there(name, name, LOG_COLUMNS[:-1], "a commit log has")
        return Entries(log.segments, LOG_COLUMNS, partial(_with_keys_marked, log.read))
    fields = {name: field for name, given in columns.items() if (field := _field(given)) is not None}
    if expressions := [name for name in columns if name not in fields]:
        raise InvalidArgument(
            f"columns: {expressions[0]} is an expression, which needs a DataFrame: read the files by spark.read, and "
            "pass the DataFrame"
        )
    files = files_of(source, address_of, columns=columns)
    if isinstance(files, ParquetFiles):
        return _entries_of_files(spark, files, fields, columns, schema)
    wanted = _wanted(columns, ("topic_id",), schema)
    # `ingest` reads NDJSON by the same mapping
    names = {name: column for name, (column, _) in fields.items() if column is not None}
    constants = {name: value for name, (column, value) in fields.items() if column is None}
    read = partial(_read_ndjson, address_of=address_of, fields=Fields(names, constants, schema))
    splits = frame_of_splits(spark, [part for file in files for part in _parts(*file)])
    return Entries(splits, tuple(wanted), partial(_with_keys_marked, read))


def _checked_log_fields(columns: Mapping[str, object], schema: Schema) -> list[str]:
    """Return the fields of entries of a commit log. Raises `InvalidArgument` for `columns`."""
    if columns:
        raise InvalidArgument(
            "columns: a commit log has its own fields; to map others, read it as a DataFrame of format "
            "rocketmq_commitlog, and pass the DataFrame"
        )
    return _wanted({}, (), schema)


def _with_keys_marked(
    read: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    batches: Iterable[pa.RecordBatch],
    names: Sequence[str],
) -> Iterator[pa.RecordBatch]:
    """Yield the fields `names`, which may include `HAS_KEY`, of the entries that `read` returns."""
    for batch in read(batches):
        yield batch.append_column(HAS_KEY, pc.is_valid(batch.column("key"))).select(list(names))


def _entries_of_files(
    spark: SparkSession, files: ParquetFiles, fields: Mapping[str, Field], columns: Mapping[str, Any], schema: Schema
) -> Entries:
    """Return the entries of files, which tasks read; `fields` are the parsed `columns`."""
    entry_fields: dict[str, Field] = {}
    kinds: dict[str, pa.DataType] = {}
    for name in _wanted(columns, files.schema.names, schema):
        column, value = entry_fields[name] = fields.get(name, (name, None))
        if column is None:
            kinds[name] = pa.scalar(value).type
        else:
            column = _checked_name(name, column, files)
            entry_fields[name], kinds[name] = (column, None), files.schema.field(column).type
    check_fields(kinds, columns)
    parts = files.parts(spark.sparkContext.defaultParallelism)
    return Entries(_numbers(spark, len(parts)), tuple(entry_fields), EntryReader(files, parts, entry_fields))


def _field(given: str | Column) -> Field | None:
    """Return the column's name, or the value of a literal; None for any other expression."""
    if isinstance(given, str):
        return given, None
    node = getattr(getattr(given, "_jc", None), "node", None)
    value = node().value() if node is not None and node().getClass().getSimpleName() == "Literal" else None
    return (None, value) if isinstance(value, str) or type(value) is int else None


def _wanted(columns: Mapping[str, object], there: Sequence[str], schema: Schema) -> list[str]:
    """Return the fields of entries; `there` are the source's columns. Raises `InvalidArgument` for an unknown field."""
    wanted = [*FIELDS, *(column.name for column in schema.caller_columns)]
    if unknown := [name for name in columns if name not in (*wanted, "topic_id")]:
        fields = ", ".join((*wanted, "topic_id"))
        raise InvalidArgument(f"columns: {unknown[0]!r} is not a field of an entry; these are {fields}")
    if "topic_id" in columns or "topic_id" in there:
        wanted.append("topic_id")
    return wanted


def _default(field: str, there: Sequence[str]) -> str:
    """Return the default column of a field: `keys` for `key` if the source has no column `key`."""
    return "keys" if field == "key" and "key" not in there and "keys" in there else field


def entry_frame(frame: DataFrame, columns: Mapping[str, str | Column], schema: Schema) -> DataFrame:
    """Return a frame with the fields of entries, one row for each; the key is null for a message without keys.

    `columns` has by field the name of its column, or a Spark column (``lit("orders")``). Raises `InvalidArgument`,
    which names the column.
    """
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it
    from pyspark.sql.types import ArrayType

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
    check_fields({name: arrow_type_of(entries.schema[name].dataType) for name in wanted}, columns)
    if isinstance(entries.schema["key"].dataType, ArrayType):
        # another collation may take different keys for equal ones
        keys = F.array_distinct(F.col("key").cast("array<string>"))
        entries = entries.withColumn("key", F.explode_outer(F.array_compact(keys)))
    return entries


def column_of(frame: DataFrame, field: str, name: str, whose: str) -> Column:
    """Return the frame's column `name` for a field. Raises `InvalidArgument` if it is missing or ambiguous."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    _check_there(field, name, frame.columns, whose)
    # Spark ignores the case of names
    if sum(column.lower() == name.lower() for column in frame.columns) > 1:
        raise InvalidArgument(f"column {shown_column(field, name)} is one of two columns {name!r}: rename or drop one")
    return F.col(f"`{name.replace('`', '``')}`")


def _check_there(field: str, name: str, there: Sequence[str], whose: str) -> None:
    """Raise `InvalidArgument` if a field's column is not among the columns `there`."""
    if name not in there:
        inside = name.partition(".")[0] in there
        hint = f"; a field within a column is given in Python, as F.col({name!r})" if inside else ""
        whose += f" {', '.join(there) or 'no columns'}"
        raise InvalidArgument(f"column {shown_column(field, name)} is missing; {whose}{hint}")


def _checked_name(field: str, name: str, files: ParquetFiles) -> str:
    """Return the name of a field's column in files. Raises `InvalidArgument` if it can't be used."""
    name = _default(field, files.schema.names) if name == field else name
    _check_there(field, name, files.schema.names, "the source has")
    if name in files.unusable:
        raise InvalidArgument(f"column {shown_column(field, name)} {files.unusable[name]}")
    return name


def shown_column(field: str, given: object) -> str:
    """Return the text for a field's column in messages."""
    return f"{given!r} ({field})" if isinstance(given, str) and given != field else f"{field!r}"


def check_fields(kinds: Mapping[str, pa.DataType], columns: Mapping[str, object]) -> None:
    """Raise `InvalidArgument` if a field has a wrong type; `columns` are those of the user."""
    plain = {name: kind for name, kind in kinds.items() if name in (*FIELDS, "topic_id")}
    for name, kind in plain.items():
        if pa.types.is_struct(kind) and isinstance(given := columns.get(name, name), str) and kind.num_fields:
            inside = f"{given}.{kind.field(0).name}"
            has = f"column {shown_column(name, given)} is a struct"
            raise InvalidArgument(f"{has}; one of its fields is given in Python, as F.col({inside!r})")
    check_kinds(plain, lambda name: shown_column(name, columns.get(name, name)))
