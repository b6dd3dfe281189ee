"""Reads the rows of files with columns, Parquet and Arrow, and of tables. Memory: some batches of rows. One thread."""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.connectors.files.rows.arrow import ArrowTable
from tiered_index.connectors.files.rows.batch import (
    UNREADABLE,
    Damage,
    RowBatch,
    RowFile,
    RowReading,
    SingleRows,
    batch_of_columns,
)
from tiered_index.connectors.files.rows.columns import has_items
from tiered_index.connectors.files.rows.mapping import KEY_TYPE, RowMapping, no_key, path_of
from tiered_index.connectors.files.rows.parquet import ParquetTable
from tiered_index.connectors.files.rows.places import CheckedFile, File, sums_of
from tiered_index.connectors.files.rows.text import SUM_BYTES
from tiered_index.connectors.files.rows.values import python_rows, python_values
from tiered_index.connectors.json_paths import fields_of, searched
from tiered_index.errors import InvalidArgument, listed

TABLES: dict[str, Callable[[File], ParquetTable | ArrowTable]] = {"parquet": ParquetTable, "arrow": ArrowTable}
"""The readers of files with columns, by the format of their segments."""


# About the bytes of the texts of rows that are made at once: each cell is a value of Python then
_TEXTS_BYTES = 4 << 20


class ColumnsFile(RowFile):
    """A file with columns, of a format of `TABLES`: Parquet, or Arrow IPC as a file or a stream."""

    is_text = False

    def __init__(self, file: File, file_format: str) -> None:
        super().__init__(file)
        self.place, self.format, self.table = file, file_format, TABLES[file_format](file)
        names = self.table.schema.names
        self.partition = {name: value for name, value in self.partition.items() if name not in names}
        self.schema = pa.schema([*self.table.schema, *((name, KEY_TYPE) for name in self.partition)])
        """The columns of the file, and those of its partition."""

    def columns_of(self, ways: Sequence[Way | None]) -> list[str]:
        """Return what the table must read for columns and fields of structures."""
        names: list[str] = []
        for way in filter(None, ways):
            if way.is_expression:
                names += way.names
            else:
                # of a structure in Parquet only the wanted field
                names.append(".".join(way.names) if self.format == "parquet" else way.names[0])
        return list(dict.fromkeys(names))

    def length_bound(self, position: int) -> int:
        return self.table.rows - position

    def fields(self) -> list[str]:
        return list(self.schema.names)

    def completed(self, table: pa.Table, names: Sequence[str]) -> pa.Table:
        """Return some rows of the file with the columns of its partition that are among `names`."""
        for name in names:
            if (value := self.partition.get(name)) is not None:
                table = table.append_column(name, pa.repeat(pa.scalar(value, KEY_TYPE), len(table)))
        return table

    def lacking(self, mapping: RowMapping) -> dict[tuple[str, str], InvalidArgument | None]:
        lacking = dict[tuple[str, str], InvalidArgument | None]()
        for number, field in enumerate(mapping.names):
            if (way := self._way(field[1], mapping)) is None:
                lacking[field] = None
            elif number < len(mapping.keys) and (kind := self._no_key(way)) is not None:
                lacking[field] = self._is_no_key(mapping.keys[number], way, kind)
        return lacking

    def _is_no_key(self, key: str, way: Way, kind: pa.DataType) -> InvalidArgument:
        if pa.types.is_map(kind):
            return InvalidArgument(f"{self.file}: --key {key} is a map, which is no key: write it as columns")
        return no_key(self.file, key, [field.name for field in kind], is_list=has_items(self._type(way)))

    def _way(self, path: str, mapping: RowMapping) -> Way | None:
        way, columns = way_of(self.schema, path, mapping), self.schema.names
        for name in () if way is None else way.names[: None if way.is_expression else 1]:
            if columns.count(name) > 1:
                raise InvalidArgument(
                    f"{self.file} has {columns.count(name)} columns with the name {name}: write it again with a name "
                    "for each, or choose another field"
                )
        return way

    def reading(self, mapping: RowMapping, position: int, end: int, *, whole: bool = False) -> ColumnsReading:
        ways = [self._way(path, mapping) for _, path in mapping.names]
        needed = list(zip(mapping.names, ways, strict=True))[len(mapping.keys) :]
        if lacking := [name for name, way in needed if way is None]:
            raise InvalidArgument(
                f"{self.file} has no column for {mapping.shown(lacking)}; it has {listed(self.fields())}"
            )
        keys = [None if way is None or self._no_key(way) else way for way in ways[: len(mapping.keys)]]
        return ColumnsReading(self, mapping, [*keys, *ways[len(keys) :]], position, end, whole)

    def _no_key(self, way: Way) -> pa.DataType | None:
        """Return the type of a column that is no key, an object or a map, or the one of its items; None: it may be."""
        if way.is_expression:
            return None
        kind = self._type(way)
        kind = kind.value_type if has_items(kind) else kind
        return kind if pa.types.is_struct(kind) or pa.types.is_map(kind) else None

    def _type(self, way: Way) -> pa.DataType:
        kind = self.schema.field(way.names[0]).type
        for name in way.names[1:]:
            kind = kind.field(name).type
        return kind

    def members_of(self, row: pa.Table, mapping: RowMapping) -> list[Any]:
        """Return the keys, and the time and the topic of a row, by path; None for a column that the file lacks."""
        ways = [self._way(path, mapping) for _, path in mapping.names]
        needed = {name for way in ways if way is not None for name in way.names[: None if way.is_expression else 1]}
        (values,) = python_rows(self.completed(row, [*needed]).select([*needed])) if needed else ({},)
        members = []
        for way, expression in zip(ways, mapping.paths, strict=True):
            if way is not None and way.is_expression:
                members.append(searched(expression, values))
                continue
            member: Any = None if way is None else values
            for name in () if way is None else way.names:
                member = member.get(name) if isinstance(member, Mapping) else None
            members.append(member)
        return members

    def row(self, number: int) -> pa.Table:
        """Return a row. Raises `CorruptFile`, and `InvalidArgument` for a number that the file does not have."""
        for _, rows in self.table.read(self.table.schema.names, number):
            return rows.slice(0, 1)
        raise InvalidArgument(f"{self.file} has no row {number:,}")


class ColumnsReading(RowReading):
    """One reading of a part of a file with columns. A row group or batch that can't be read is passed over."""

    is_whole = True

    def __init__(
        self, file: ColumnsFile, mapping: RowMapping, ways: Sequence[Way | None], position: int, bound: int, whole: bool
    ) -> None:
        self._file, self._mapping, self._ways, self._whole = file, mapping, ways, whole
        self.end, self._bound = position, min(bound, file.table.rows)

    def sum_up(self) -> None:
        """Sum up blocks of the file, before rows are read: as large a part of all blocks as the rows are of all rows.

        So the parts of a file have all blocks. If it is written to meanwhile, a later run finds other sums.
        """
        place, rows = self._file.place, self._file.table.rows
        assert not isinstance(place, CheckedFile), "it was summed up"
        # the reading of the rows says why a file can't be read
        with contextlib.suppress(*UNREADABLE):
            with place.open() as handle:
                count = -(-handle.seek(0, os.SEEK_END) // SUM_BYTES)
            first, end = (count if row >= rows else count * row // rows for row in (self.end, self._bound))
            self.blocks = SUM_BYTES, sums_of(place, SUM_BYTES, first * SUM_BYTES, end * SUM_BYTES)

    def batches(self, start: int) -> Iterator[RowBatch]:
        file, self.end = self._file, max(start, self.end)
        names = file.schema.names if self._whole else file.columns_of(self._ways)
        # a table of no columns has no rows
        of_file = [name for name in names if name not in file.partition] or file.table.schema.names[:1]
        read = file.table.read(of_file, self.end)
        while self.end < self._bound:
            try:
                if (rows_from := next(read, None)) is None:
                    break
            except UNREADABLE as error:
                self.damage = self.damage or Damage(error, self.end, f"row {self.end + 1:,}")
                behind = file.table.starts[bisect_right(file.table.starts, self.end) :]
                self.end = min([*behind, self._bound])
                # its entries are durable only with a batch behind them
                yield SingleRows().batch(self.end, self._mapping)
                read = file.table.read(of_file, self.end)
                continue
            first, table = rows_from
            for rows in _texts_at_once(table.slice(0, self._bound - first), whole=self._whole):
                self.end = first + len(rows)
                batch = self._batch(file.completed(rows.combine_chunks(), names), first)
                yield replace(batch, begin=first, source=rows) if self._whole else batch
                first = self.end
        self.end = self._bound
        if file.table.damage is not None and self._bound == file.table.rows:
            self.damage = self.damage or Damage(file.table.damage, self.end, f"row {self.end + 1:,}")

    def _batch(self, table: pa.Table, first: int) -> RowBatch:
        return rows_of_columns(table, self._ways, self._mapping, np.arange(first, first + len(table)))


def _texts_at_once(rows: pa.Table, *, whole: bool) -> Iterator[pa.Table]:
    """Yield rows, those that are wanted as `whole` texts in parts of about `_TEXTS_BYTES`.

    The text of a number has its name and some 20 characters, which are three times its bytes.
    """
    names_bytes = sum(len(name) + 4 for name in rows.schema.names)
    most = max(1, _TEXTS_BYTES // (names_bytes + 3 * rows.nbytes // max(1, len(rows)))) if whole else len(rows)
    yield from (rows.slice(begin, most) for begin in range(0, len(rows), most))


class Way(NamedTuple):
    """Where a table has the members at a path.

    `names` are a column and the fields of the structures below it. With `is_expression` they are the columns that a
    JMESPath needs, which finds the members of each row.
    """

    names: tuple[str, ...]
    is_expression: bool = False


def way_of(schema: pa.Schema, path: str, mapping: RowMapping) -> Way | None:
    """Return the way to the members at a path; None: there is no column for it."""
    if path in schema.names:
        return Way((path,))
    names = mapping.names_of_path(path)
    if names is None:
        columns = [name for name in schema.names if name in fields_of(path_of(path).parsed)]
        return Way(tuple(columns), is_expression=True) if columns else None
    if names[0] not in schema.names:
        return None
    kind = schema.field(names[0]).type
    for name in names[1:]:
        if not pa.types.is_struct(kind) or (at := kind.get_field_index(name)) < 0:
            return None
        kind = kind.field(at).type
    return Way(names)


def rows_of_columns(
    table: pa.Table, ways: Sequence[Way | None], mapping: RowMapping, positions: npt.NDArray[np.int64]
) -> RowBatch:
    """Return the rows (n) of a table at positions (i64, n) of a file; `ways` are those of `mapping.names`."""
    columns: list[Any] = []
    for way, path in zip(ways, mapping.paths, strict=True):
        if way is None:
            columns.append(pa.nulls(len(table)))
            continue
        if way.is_expression:
            columns.append([searched(path, row) for row in python_rows(table.select(way.names))])
            continue
        name, *below = way.names
        column = table[name].combine_chunks() if table[name].num_chunks != 1 else table[name].chunk(0)
        for field_name in below:
            column = pc.struct_field(column, field_name)
        columns.append(column)
    sizes, end = np.broadcast_to(np.int64(0), len(table)), int(positions[-1]) + 1 if len(positions) else 0
    if (batch := batch_of_columns(columns, mapping, positions, sizes, end)) is not None:
        return batch
    time = columns[len(mapping.keys)]
    if isinstance(time, list):
        # an expression has found times of Python, or other values
        with contextlib.suppress(pa.ArrowException, OverflowError, UnicodeEncodeError):
            time = pa.array(time)
    if isinstance(time, pa.Array) and (pa.types.is_date(time.type) or pa.types.is_timestamp(time.type)):
        # the column says its unit
        columns[len(mapping.keys)] = mapping.ms_of_timestamps(time)
        mapping = replace(mapping, unit="ms", is_guessed=False)
    rows = SingleRows()
    values = [python_values(column) if isinstance(column, pa.Array) else column for column in columns]
    members_of_rows = zip(*values, strict=True)
    for number, members in zip(positions.tolist(), members_of_rows, strict=True):
        try:
            rows.add(members, mapping, number, 0)
        except InvalidArgument as error:
            rows.refuse(f"row {number + 1:,}", str(error), number)
    return rows.batch(end, mapping)
