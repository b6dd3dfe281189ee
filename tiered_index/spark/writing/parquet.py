"""Parquet files as a source of a build: the driver reads the footers, tasks read row groups as the fields of entries.

Memory of a task: a batch of up to 32 MiB and, for a file in a storage, the column chunks of a row group.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.errors import InvalidArgument
from tiered_index.sources.columns import each_key, has_items
from tiered_index.sources.parquet import ParquetTable
from tiered_index.sources.places import LocalFile, StoredFile
from tiered_index.spark.addresses import AddressOf
from tiered_index.storage.base import Storage

# Column (bool): the entry has a key; for readers that do not need the key itself.
HAS_KEY = "has_key"
# Rows of a part: enough for large blocks of a piece, and few enough for a cheap repetition of its task.
_LEAST_ROWS, _MOST_ROWS = 1 << 17, 1 << 21
# Metadata of a batch: [file, row group, first row] as JSON; and the number of each row in the file, counted from there
# (i64), if the batch does not have all rows in order
PLACE, ROWS = b"tiered_index.place", b"tiered_index.rows"
# Footers that the driver reads at once
_FOOTERS = 16
# The column of a field, or its constant value.
Field = tuple[str, None] | tuple[None, str | int]


def _written(storage: Storage | None, name: str) -> tuple[int, int]:
    """Return the size and the time of change of a file of a storage, or of a local one (None)."""
    if storage is not None:
        info = storage.head(name)
        return info.size_bytes, info.modified_ms
    # of an open file, because network disks may give older times of a closed one
    with LocalFile(Path(name)).open() as handle:
        status = os.fstat(handle.fileno())
    return status.st_size, status.st_mtime_ns


def _table(storage: Storage | None, name: str) -> tuple[ParquetTable, tuple[int, int]]:
    """Read the footer of a file. Return it with the size and time that the file had before."""
    written = _written(storage, name)
    place = LocalFile(Path(name)) if storage is None else StoredFile(name, storage, name, written[0])
    return ParquetTable(place, "us"), written


def _type_of_both(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return a type that can represent the values of both types, None if there is none."""
    if one == other:
        return one
    if pa.types.is_timestamp(one) and pa.types.is_timestamp(other):
        # a time without a zone is UTC
        return pa.timestamp("us", one.tz or other.tz)
    try:
        both = [pa.schema([("column", kind)]) for kind in (one, other)]
        return pa.unify_schemas(both, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None


@dataclass(frozen=True)
class ParquetFiles:
    """Files, as (storage's URI or nothing, name); `groups` are (file, row group, rows).

    `written` are size and time of change of each file. They differ if another file replaced it. `schema` has the
    columns that all files have, with the widest type, and `topic_id` if one file has it. `unusable` has by column the
    reason why it can't be a field. `partitions` are columns from the names of the folders, with one value for each
    file.
    """

    files: Sequence[tuple[str, str]]
    address_of: AddressOf
    schema: pa.Schema
    groups: Sequence[tuple[int, int, int]]
    written: Sequence[tuple[int, int]]
    unusable: Mapping[str, str] = field(default_factory=dict)
    partitions: Mapping[str, pa.Array] = field(default_factory=dict)

    @classmethod
    def of(
        cls, files: Sequence[tuple[str, str]], address_of: AddressOf, partitions: Mapping[str, pa.Array] | None = None
    ) -> ParquetFiles:
        """Read the footers, some at once. Raises `CorruptFile`, as the storage."""
        groups: list[tuple[int, int, int]] = []
        written: list[tuple[int, int]] = []
        # the type of each column, and the first file that has it
        kinds: dict[str, tuple[pa.DataType, str]] = {}
        in_files: Counter[str] = Counter()
        unusable: dict[str, str] = {}
        folders = partitions or {}
        with ExitStack() as held, ThreadPoolExecutor(_FOOTERS) as pool:
            # one for each URI: an S3 client takes longer to create than a footer to read
            uris = dict.fromkeys(uri for uri, _ in files if uri)
            storages = {uri: held.enter_context(address_of(uri).open(any_names=True)) for uri in uris}
            tables = pool.map(lambda file: _table(storages.get(file[0]), file[1]), files)
            for number, ((_, name), (table, of_file)) in enumerate(zip(files, tables, strict=True)):
                written.append(of_file)
                groups += [(number, group, rows) for group, rows in enumerate(table.group_rows)]
                in_files.update(set(table.schema.names))
                for column in table.schema:
                    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
                    known, first = kinds.get(column.name, (kind, name))
                    both = _type_of_both(known, kind)
                    kinds[column.name] = both or known, first
                    if column.name in folders:
                        reason = f"is in {name} and in the name of its folder"
                        unusable.setdefault(
                            column.name, f"{reason}: pass the paths of the files, to read it from them, or a DataFrame"
                        )
                    elif pa.types.is_null(kind) and column.name != "topic_id":
                        # the writer may have lost the values
                        what_to_do = "write it with the type that it has in other files"
                        unusable.setdefault(column.name, f"has no type in {name}, only nulls: {what_to_do}")
                    elif both is None:
                        unusable.setdefault(column.name, f"is {kind} in {name}, and {known} in {first}")
                    elif table.schema.names.count(column.name) > 1:
                        unusable.setdefault(column.name, f"is twice in {name}")
        typed = {n: kind for n, (kind, _) in kinds.items() if in_files[n] == len(files) or n == "topic_id"}
        typed |= {name: values.type for name, values in folders.items() if name not in typed}
        return cls(files, address_of, pa.schema(typed), groups, written, unusable, folders)

    def parts(self, parallelism: int) -> list[tuple[int, list[int]]]:
        """Return (file, row groups) for each task, with some tasks for each of `parallelism` cores."""
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
        """Yield the columns of a part, and the column `if_null` of row groups that may have nulls in it.

        Raises `CorruptFile`, `InvalidArgument` if the file was replaced.
        """
        number, groups = part
        uri, name = self.files[number]
        with ExitStack() as held:
            storage = held.enter_context(self.address_of(uri).open(any_names=True)) if uri else None
            table, written = _table(storage, name)
            listed = [rows for file, _, rows in self.groups if file == number]
            replaced = InvalidArgument(f"{name} was replaced while it was read: use a copy that does not change")
            if (written, table.group_rows) != (self.written[number], listed):
                raise replaced
            for group in groups:
                # a batch without columns would have no rows
                wanted = [c for c in columns if c in table.schema.names] or table.schema.names[:1]
                if if_null is not None and if_null in table.schema.names and if_null not in wanted:
                    wanted += [if_null] if table.may_have_nulls(group, if_null) else []
                for first, found in table.read_group(group, wanted, shared=texts):
                    whole = self._with_folders(found, [*columns, *([if_null] if if_null else [])], number)
                    yield whole.replace_schema_metadata({PLACE: json.dumps([name, group, first])})
            # each row group opens the file again
            if _written(storage, name) != written:
                raise replaced

    def _with_folders(self, rows: pa.RecordBatch, columns: Sequence[str], number: int) -> pa.RecordBatch:
        """Return the rows of a file with the columns that it lacks: those from its folders, and null topic ids."""
        for column in columns:
            if column in self.partitions and column not in rows.schema.names:
                rows = rows.append_column(column, pa.repeat(self.partitions[column][number], len(rows)))
            elif column == "topic_id" and column not in rows.schema.names:
                rows = rows.append_column(column, pa.nulls(len(rows), pa.int64()))
        return rows


@dataclass(frozen=True)
class EntryReader:
    """Reads parts of Parquet files as entries, in tasks; `fields` name the column or the value of each field."""

    files: ParquetFiles
    parts: Sequence[tuple[int, list[int]]]
    fields: Mapping[str, Field]

    def __call__(self, batches: Iterable[pa.RecordBatch], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the fields `names` of the entries of the parts whose numbers `batches` have."""
        key = self.fields["key"][0]
        listed = key is not None and has_items(self.files.schema.field(key).type)
        topic = self.fields["topic"][0]
        # each key of a list is an entry, so the list is read even if only `HAS_KEY` is wanted
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
            places, found = each_key(keys)
            # a row with an empty list stays a row without a key
            keyless = np.setdiff1d(np.arange(len(rows)), places)
            places, keys = (
                np.concatenate([places, keyless]),
                pa.concat_arrays([found, pa.nulls(len(keyless), found.type)]),
            )
            rows = rows.take(pa.array(places))
            place |= {ROWS: places.tobytes()}
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
