"""Sources of a build: a DataFrame, files of messages (`files`), commit logs (`log_sources`).

Tasks read files and logs with the engine's readers, as entries (`entries_of`). Of a DataFrame Spark makes the entries
(`entry_frame`).
docs/spark-jobs.md lists the fields.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from tiered_index.config import IndexConfig
from tiered_index.connectors.files.listing import missing_paths
from tiered_index.connectors.files.rows.columns import check_kinds
from tiered_index.connectors.files.rows.fields import Fields
from tiered_index.connectors.files.rows.places import local_path
from tiered_index.errors import InvalidArgument
from tiered_index.format.schema import Schema
from tiered_index.spark.addresses import AddressOf
from tiered_index.spark.frames import arrow_type_of, broadcast, large_batches
from tiered_index.spark.workers import spare_collections
from tiered_index.spark.writing.census import CENSUS_COLUMNS, HAS_KEY, Census, WindowScale, census_of
from tiered_index.spark.writing.files import MessageFiles, PartsReader
from tiered_index.spark.writing.log_sources import LOG_COLUMNS, LogReader, is_archive, log_stretches

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from typing_extensions import TypeIs


SourceLike: TypeAlias = "DataFrame | str | Path | Sequence[str | Path]"


def is_log(paths: Sequence[str]) -> bool:
    """Return whether the paths of a source name a commit log."""
    local = [place for path in paths if (place := local_path(path)) is not None]
    return any(map(is_archive, paths)) or any((place / "commitlog").is_dir() for place in local)


def _paths(source: object) -> list[str]:
    """Return the paths of a source: archives, storage URIs, absolute local paths. Raises `InvalidArgument` for none."""
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
    for path in paths:
        # entries of a list that lacks a file would be too few
        missing_paths([path])
    return [path if (place := local_path(path)) is None else str(place) for path in paths]


def shown_kind(value: object) -> str:
    """Return the type of a value that is not a Spark DataFrame, with a hint, for a message."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}: make a DataFrame by spark.createDataFrame(...)"


def check_source(source: SourceLike, columns: Mapping[str, object], schema: Schema, config: IndexConfig) -> None:
    """Raise the errors of `entries_of` that need no Spark: missing paths, missing columns, types of Parquet files."""
    if is_frame(source):
        return
    if is_log(paths := _paths(source)):
        _checked_log_fields(columns, schema)
        return
    wanted_fields(columns, (), schema)
    names = {name: column for name, column in columns.items() if isinstance(column, str)}
    constants = {name: 0 for name in columns if name not in names}
    MessageFiles.of(paths, Fields(names, constants, schema), config)


def is_frame(source: SourceLike) -> TypeIs[DataFrame]:
    """Return whether a source is a DataFrame, of Spark or Spark Connect."""
    return hasattr(source, "mapInArrow")


def has_log_offsets(source: SourceLike) -> bool:
    """Return whether the offsets of a source are positions in a commit log."""
    return not is_frame(source) and is_log(_paths(source))


# Fields of every message; `topic_id` is optional.
FIELDS = ("topic", "queue_id", "key", "offset", "size", "timestamp_ms")


# Reads the fields of the entries of parts; with `HAS_KEY` among them also censuses of what it learned of the parts
ReadParts: TypeAlias = Callable[[Iterable[Any], Sequence[str]], Iterator["pa.RecordBatch | Census"]]


@dataclass(frozen=True, slots=True)
class Entries:
    """A source's entries for tasks, one row for each; the key is null for a message without keys.

    `frame` has the fields `names`. With `read` it has numbers of `parts`, whose entries `read` yields.
    `rows` is the number of messages in Parquet files.
    """

    frame: DataFrame
    names: tuple[str, ...]
    read: ReadParts | None = None
    parts: Sequence[Any] = ()
    rows: int = 0

    @classmethod
    def of_parts(
        cls, spark: SparkSession, parts: Sequence[Any], names: Sequence[str], read: ReadParts, rows: int = 0
    ) -> Entries:
        """Return the entries that `read` yields from parts, each in a task of its own."""
        return cls(spark.range(0, len(parts), 1, max(1, len(parts))), tuple(names), read, parts, rows)

    @contextmanager
    def mapped(
        self, make: Callable[[Iterator[Any]], Iterator[pa.RecordBatch]], names: Sequence[str], schema: str
    ) -> Iterator[DataFrame]:
        """Apply `make`, in tasks, to the fields `names`, which may include `HAS_KEY`; yield its rows, for the block."""
        from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

        read, frame = self.read, self.frame
        if read is None:
            fields = frame.withColumn(HAS_KEY, F.col("key").isNotNull()).select(*names)

            def made_of_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
                spare_collections()
                yield from make(batches)

            yield fields.mapInArrow(made_of_rows, schema)
            return
        with broadcast(frame.sparkSession, self.parts) as parts:

            def made_of_parts(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
                spare_collections()
                mine = (parts.value[number] for batch in batches for number in batch.column(0).to_pylist())
                try:
                    yield from make(read(mine, names))
                except InvalidArgument as error:
                    if isinstance(read, PartsReader):
                        read.name_row(error)
                    raise

            yield frame.mapInArrow(made_of_parts, schema)


def take_census(entries: Entries, scale: WindowScale, max_windows: int) -> Census:
    """Count a source's entries in tasks. Raises `InvalidArgument`."""
    names = [name for name in CENSUS_COLUMNS if name in entries.names]

    def count(batches: Iterable[pa.RecordBatch | Census]) -> Iterator[pa.RecordBatch]:
        counted = pickle.dumps(census_of(batches, scale, max_windows))
        yield pa.record_batch({"census": pa.array([counted], pa.binary())})

    total = Census()
    counting = entries.mapped(count, [*names, HAS_KEY], "census binary")
    with large_batches(entries.frame.sparkSession), counting as censuses:
        for row in censuses.collect():
            total.add(pickle.loads(row[0]))
    return total


def entries_of(
    spark: SparkSession,
    source: SourceLike,
    columns: Mapping[str, str | Column],
    schema: Schema,
    config: IndexConfig,
    address_of: AddressOf,
    *,
    skip_corrupt: bool = False,
) -> Entries:
    """Return the entries of a source; `config` has the storage of the index.

    Raises `InvalidArgument`, which names the column, `CorruptFile`, the storage's errors.
    """
    if is_frame(source):
        frame = entry_frame(source, columns, schema)
        return Entries(frame, tuple(frame.columns))
    if is_log(paths := _paths(source)):
        for name in _checked_log_fields(columns, schema):
            check_there(name, name, LOG_COLUMNS, "a commit log has")
        stretches = log_stretches(paths, address_of, skip_corrupt=skip_corrupt)
        return Entries.of_parts(spark, stretches, LOG_COLUMNS, LogReader(address_of, skip_corrupt))
    named = {name: value for name, column in columns.items() if (value := _name_or_literal(column)) is not None}
    if expressions := [name for name in columns if name not in named]:
        raise InvalidArgument(
            f"columns: {expressions[0]} is an expression, which needs a DataFrame: read the files by spark.read, and "
            "pass the DataFrame"
        )
    wanted = wanted_fields(columns, ("topic_id",), schema)
    names = {name: column for name, (column, _) in named.items() if column is not None}
    constants = {name: value for name, (column, value) in named.items() if column is None}
    check_fields({name: pa.scalar(value).type for name, value in constants.items()}, columns)
    fields, settings = Fields(names, constants, schema), config.changed(root=None)
    files = MessageFiles.of(paths, fields, settings, spark.sparkContext.defaultParallelism)
    return Entries.of_parts(spark, files.parts, wanted, PartsReader(fields, settings, address_of), files.rows)


def _checked_log_fields(columns: Mapping[str, object], schema: Schema) -> list[str]:
    """Return the fields of entries of a commit log. Raises `InvalidArgument` for `columns`."""
    if columns:
        raise InvalidArgument(
            "columns: a commit log has its own fields; to map others, read it as a DataFrame of format "
            "rocketmq_commitlog, and pass the DataFrame"
        )
    return wanted_fields({}, (), schema)


def _name_or_literal(column: str | Column) -> tuple[str, None] | tuple[None, str | int] | None:
    """Return the column's name, or the value of a literal; None for any other expression."""
    if isinstance(column, str):
        return column, None
    node = getattr(getattr(column, "_jc", None), "node", None)
    value = node().value() if node is not None and node().getClass().getSimpleName() == "Literal" else None
    return (None, value) if isinstance(value, str) or type(value) is int else None


def wanted_fields(columns: Mapping[str, object], there: Sequence[str], schema: Schema) -> list[str]:
    """Return the fields of entries; `there` are the source's columns. Raises `InvalidArgument` for an unknown field."""
    wanted = [*FIELDS, *(column.name for column in schema.caller_columns)]
    if unknown := [name for name in columns if name not in (*wanted, "topic_id")]:
        fields = ", ".join((*wanted, "topic_id"))
        raise InvalidArgument(f"columns: {unknown[0]!r} is not a field of an entry; these are {fields}")
    if "topic_id" in columns or "topic_id" in there:
        wanted.append("topic_id")
    return wanted


def default_column(field: str, there: Sequence[str]) -> str:
    """Return the default column of a field: `keys` for `key` if the source has no column `key`."""
    return "keys" if field == "key" and "key" not in there and "keys" in there else field


def entry_frame(frame: DataFrame, columns: Mapping[str, str | Column], schema: Schema) -> DataFrame:
    """Return a frame with the fields of entries, one row for each; the key is null for a message without keys.

    `columns` has by field the name of its column, or a Spark column (``lit("orders")``). Raises `InvalidArgument`,
    which names the column.
    """
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it
    from pyspark.sql.types import ArrayType

    wanted = wanted_fields(columns, frame.columns, schema)
    selected = []
    for field in wanted:
        source: Any = columns.get(field, field)
        if isinstance(source, str):
            source = default_column(field, frame.columns) if source == field else source
            source = column_of(frame, field, source, "the source has")
        selected.append(source.alias(field))
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

    check_there(field, name, frame.columns, whose)
    # Spark ignores the case of names
    if sum(column.lower() == name.lower() for column in frame.columns) > 1:
        raise InvalidArgument(f"column {shown_column(field, name)} is one of two columns {name!r}: rename or drop one")
    return F.col(f"`{name.replace('`', '``')}`")


def check_there(field: str, name: str, there: Sequence[str], whose: str) -> None:
    """Raise `InvalidArgument` if a field's column is not among the columns `there`."""
    if name not in there:
        inside = name.partition(".")[0] in there
        hint = f"; a field within a column is given in Python, as F.col({name!r})" if inside else ""
        whose += f" {', '.join(there) or 'no columns'}"
        raise InvalidArgument(f"column {shown_column(field, name)} is missing; {whose}{hint}")


def shown_column(field: str, column: object) -> str:
    """Return the text for a field's column in messages."""
    return f"{column!r} ({field})" if isinstance(column, str) and column != field else f"{field!r}"


def check_fields(kinds: Mapping[str, pa.DataType], columns: Mapping[str, object]) -> None:
    """Raise `InvalidArgument` if a field has a wrong type; `columns` are those of the user."""
    plain = {name: kind for name, kind in kinds.items() if name in (*FIELDS, "topic_id")}
    for name, kind in plain.items():
        if pa.types.is_struct(kind) and isinstance(named := columns.get(name, name), str) and kind.num_fields:
            inside = f"{named}.{kind.field(0).name}"
            has = f"column {shown_column(name, named)} is a struct"
            raise InvalidArgument(f"{has}; one of its fields is given in Python, as F.col({inside!r})")
    check_kinds(plain, lambda name: shown_column(name, columns.get(name, name)))
