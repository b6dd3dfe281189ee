"""Parquet files as tasks read them: row groups by the reader of `sources`, as the fields of entries.

The driver reads footers; no row goes through the JVM. Types are those that Spark's own reader gives the same values of:
other ones (nanoseconds, unsigned, nested) are left to it. Memory of a task: a batch of up to 32 MiB, beside the column
chunks of a row group where the file is in a storage.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tiered_index.errors import InvalidArgument
from tiered_index.sources.parquet import ParquetTable
from tiered_index.sources.places import LocalFile, StoredFile
from tiered_index.spark.addresses import AddressOf
from tiered_index.storage.base import Storage

# Whether an entry has a key, for those who don't need it.
HAS_KEY = "has_key"
# A part has at least so many rows, where there are so many, so that blocks of a piece are not small; and at most about
# so many, so that a task that is repeated repeats little.
_LEAST_ROWS, _MOST_ROWS = 1 << 17, 1 << 21
# Where a batch's rows stand, in its metadata: [file, row group, first row] as JSON; and of each the row from there on
# (i64), where that is not its number
PLACE, ROWS = b"tiered_index.place", b"tiered_index.rows"
# Footers that the driver reads at once
_FOOTERS = 16
# A field's column, or its value in every row.
Field = tuple[str, None] | tuple[None, str | int]


def _table(storage: Storage | None, name: str) -> ParquetTable:
    """Read the footer of a file of a storage, or of a local one (None)."""
    place = LocalFile(Path(name)) if storage is None else StoredFile(name, storage, name, storage.head(name).size_bytes)
    return ParquetTable(place, "us")


def _shared(schema: pa.Schema, found: pa.Schema) -> pa.Schema | None:
    """Return the columns that two files have, None where that would lose any. A type that is left to Spark remains."""
    if found.equals(schema):
        return schema
    both = [name for name in schema.names if name in found.names]
    # to Spark, names in other letters are the same
    lower = {name.lower() for name in found.names} & {name.lower() for name in schema.names}
    optional = "topic_id" in {*found.names, *schema.names} and "topic_id" not in both
    if optional or len(lower) != len(both) or len(set(found.names)) != len(found):
        return None
    pairs = [(schema.field(name), found.field(name)) for name in both]
    typed = [pair for pair in pairs if not any(pa.types.is_null(field.type) for field in pair)]
    if any(pa.types.is_list(one.type) != pa.types.is_list(other.type) for one, other in typed):
        return None
    return pa.schema([one if spark_type(other.type) else other for one, other in pairs])


@dataclass(frozen=True)
class ParquetFiles:
    """Files, as (storage's URI or nothing, name); `groups` are (file, row group, rows).

    `schema` has the columns that all have; a table's may gain one, or a wider type, in time. `untyped` are columns
    without a type, as pandas writes one that is empty, with the first file where they are. `partitions` are columns of
    the schema that the files' folders are named for, a value a file; `doubled` such ones that a file has, too, with it.
    """

    files: Sequence[tuple[str, str]]
    address_of: AddressOf
    schema: pa.Schema
    groups: Sequence[tuple[int, int, int]]
    untyped: Mapping[str, str] = field(default_factory=dict)
    partitions: Mapping[str, pa.Array] = field(default_factory=dict)
    doubled: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, files: Sequence[tuple[str, str]], address_of: AddressOf, partitions: Mapping[str, pa.Array] | None = None
    ) -> ParquetFiles:
        """Read the footers, some at once. Raises `InvalidArgument` where columns that not all have matter, or are named
        in other letters, `CorruptFile`, as the storage.
        """
        schema: pa.Schema | None = None
        groups: list[tuple[int, int, int]] = []
        untyped: dict[str, str] = {}
        doubled: dict[str, str] = {}
        folders = partitions or {}
        with ExitStack() as held, ThreadPoolExecutor(_FOOTERS) as pool:
            # one a URI: a client of S3 takes longer to make than a footer to read
            uris = dict.fromkeys(uri for uri, _ in files if uri)
            storages = {uri: held.enter_context(address_of(uri).open()) for uri in uris}
            tables = pool.map(lambda file: _table(storages.get(file[0]), file[1]), files)
            for number, ((_, name), table) in enumerate(zip(files, tables, strict=True)):
                found = table.schema.remove_metadata()
                schema = found if schema is None else _shared(schema, found)
                if schema is None:
                    has = ", ".join(found.names)
                    raise InvalidArgument(f"{name} has other columns than {files[0][1]}: {has}")
                lower = {one.lower() for one in found.names}
                for column_name in folders:
                    if column_name.lower() in lower:
                        doubled.setdefault(column_name, name)
                for column in found:
                    if pa.types.is_null(column.type):
                        untyped.setdefault(column.name, name)
                groups += [(number, group, rows) for group, rows in enumerate(table.group_rows)]
        assert schema is not None
        for column_name, values in folders.items():
            if column_name not in schema.names:
                schema = schema.append(pa.field(column_name, values.type))
        return cls(files, address_of, schema, groups, untyped, folders, doubled)

    def parts(self, parallelism: int) -> list[tuple[int, list[int]]]:
        """Return (file, its row groups) for each task: some tasks for each of `parallelism` cores."""
        rows = sum(group[2] for group in self.groups)
        aim = max(_LEAST_ROWS, min(_MOST_ROWS, rows // max(1, 2 * parallelism)))
        parts: list[tuple[int, list[int]]] = []
        for number, of_file in groupby(self.groups, itemgetter(0)):
            held = 0
            parts.append((number, []))
            for _, group, count in of_file:
                if held and held + count > aim:
                    held = 0
                    parts.append((number, []))
                held += count
                parts[-1][1].append(group)
        return parts

    def batches(
        self, part: tuple[int, list[int]], columns: Sequence[str], texts: Sequence[str] = (), if_null: str | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the columns of a part, and `if_null` of row groups where it may have nulls. Raises `CorruptFile`,
        `InvalidArgument` where the file is another one.
        """
        number, groups = part
        uri, name = self.files[number]
        with ExitStack() as held:
            table = _table(held.enter_context(self.address_of(uri).open()) if uri else None, name)
            if table.group_rows != [rows for file, _, rows in self.groups if file == number]:
                raise InvalidArgument(f"{name} was replaced while it was read: build from a copy that does not change")
            for group in groups:
                # a batch without columns would have no rows
                wanted = [c for c in columns if c not in self.partitions] or table.schema.names[:1]
                if if_null is not None and if_null not in wanted and _may_be_null(table.metadata, group, if_null):
                    wanted.append(if_null)
                for first, found in table.read_group(group, wanted, shared=texts):
                    whole = self._with_folders(found, (*columns, if_null), number)
                    yield whole.replace_schema_metadata({PLACE: json.dumps([name, group, first])})

    def _with_folders(self, rows: pa.RecordBatch, columns: Sequence[str | None], number: int) -> pa.RecordBatch:
        """Return the rows of a file with those of the columns that its folders are named for."""
        for column in columns:
            if column is not None and column in self.partitions and column not in rows.schema.names:
                rows = rows.append_column(column, pa.repeat(self.partitions[column][number], len(rows)))
        return rows


def _may_be_null(metadata: pq.FileMetaData, group: int, column: str) -> bool:
    """Return whether a column of no levels may have a null, or is none."""
    for number in range(metadata.num_columns):
        about = metadata.row_group(group).column(number)
        if about.path_in_schema == column:
            told = about.statistics
            return not (told is not None and told.has_null_count and told.null_count == 0)
    return True


def spark_type(kind: pa.DataType) -> str | None:
    """Return what Spark calls the type that it reads a column as, None where it may read other values than pyarrow."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_timestamp(kind) and kind.unit in ("ms", "us"):
        return "timestamp"
    if pa.types.is_list(kind) and pa.types.is_string(kind.value_type):
        return "array<string>"
    return _PLAIN.get(kind)


_PLAIN = {
    pa.string(): "string",
    pa.large_string(): "string",
    pa.int8(): "tinyint",
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.binary(): "binary",
}


def columns_not_in_all(names: Sequence[str], files: Sequence[Path]) -> set[str]:
    """Return which of these columns a local file lacks: Spark gives nulls there, and a message without key is none.

    Raises `InvalidArgument` where Spark would take dates for numbers: it reads all files by the columns of one.
    """
    lacking: set[str] = set()
    kinds: dict[str, tuple[str, Path]] = {}
    for file in files:
        # Spark says what is wrong with a file that can't be read
        with suppress(pa.ArrowException, OSError):
            there = {field.name.lower(): field.type for field in pq.read_schema(file)}
            lacking.update(name for name in names if name.lower() not in there)
            for name, kind in there.items():
                if pa.types.is_integer(kind) or pa.types.is_temporal(kind):
                    told = "integers" if pa.types.is_integer(kind) else spark_type(kind) or str(kind)
                    other, first = kinds.setdefault(name, (told, file))
                    if told != other:
                        raise InvalidArgument(f"{file}: column {name!r} is {told}, and {other} in {first}")
    return lacking


@dataclass(frozen=True)
class EntryReader:
    """Makes entries of parts of Parquet files, in tasks: `fields` say which column or value each field is."""

    files: ParquetFiles
    parts: Sequence[tuple[int, list[int]]]
    fields: Mapping[str, Field]

    def __call__(self, batches: Iterable[pa.RecordBatch], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the fields `names` of the entries of the parts whose numbers stand in `batches`."""
        key = self.fields["key"][0]
        listed = key is not None and pa.types.is_list(self.files.schema.field(key).type)
        topic = self.fields["topic"][0]
        # a list is counted key by key
        columns = {self.fields[name][0] for name in (*names, *(["key"] if listed else [])) if name != HAS_KEY}
        wanted = [column for column in columns if column is not None]
        texts = [] if topic is None or topic == key else [topic]
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for rows in self.files.batches(self.parts[number], wanted, texts, key if HAS_KEY in names else None):
                    yield self._entries(rows, names, listed)

    def _entries(self, rows: pa.RecordBatch, names: Sequence[str], listed: bool) -> pa.RecordBatch:
        key = self.fields["key"][0]
        keys = rows.column(key) if key in rows.schema.names else None
        place = rows.schema.metadata
        if listed:
            places, keys = each_key(keys)
            rows = rows.take(places)
            place |= {ROWS: places.astype(np.int64).tobytes()}
        columns = []
        for name in names:
            column, value = self.fields.get(name, (None, None))
            if name == HAS_KEY:
                columns.append(pa.repeat(True, len(rows)) if keys is None else pc.is_valid(keys))
            elif name == "key" and keys is not None:
                columns.append(keys)
            elif column is not None:
                columns.append(rows.column(column))
            elif isinstance(value, str):
                numbers = pa.array(np.zeros(len(rows), np.int32))
                columns.append(pa.DictionaryArray.from_arrays(numbers, pa.array([value])))
            else:
                columns.append(pa.repeat(pa.scalar(value, pa.int64()), len(rows)))
        return pa.RecordBatch.from_arrays(columns, list(names), metadata=place)


def each_key(lists: pa.ListArray) -> tuple[npt.NDArray[np.int64], pa.Array]:
    """Return each different key of each list with its row (i64); of a row that has none, null."""
    flat, rows = pc.list_flatten(lists), pc.list_parent_indices(lists).to_numpy()
    codes = flat.dictionary_encode()
    valid = np.flatnonzero(pc.is_valid(flat).to_numpy(zero_copy_only=False))
    indices = codes.indices.fill_null(0).to_numpy().astype(np.int64)
    pairs = rows[valid].astype(np.int64) * max(1, len(codes.dictionary)) + indices[valid]
    kept = valid[np.unique(pairs, return_index=True)[1]]
    keyless = np.setdiff1d(np.arange(len(lists)), rows[kept])
    places = np.concatenate([rows[kept], keyless]).astype(np.int64)
    return places, pa.concat_arrays([flat.take(pa.array(kept)), pa.nulls(len(keyless), flat.type)])
