"""Parquet as tables of bounded size, whatever a file says: text that rows share is read once, and each table has a
bounded number of rows and bytes. One thread.

All damage is `CorruptFile`. Pages are checked against their checksums, if they have any.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tiered_index.errors import CorruptFile, InvalidArgument, TieredIndexError
from tiered_index.sources.columns import MAX_ROW_BYTES, has_items, plain_text, text_bytes
from tiered_index.sources.footers import chunk_values
from tiered_index.sources.places import LocalFile, StoredFile

# Rows that are read at once, about how many bytes of all their columns, and of text, however many rows share it.
BATCH_ROWS, BATCH_BYTES, TEXT_BYTES = 1 << 17, 32 << 20, 32 << 20
# A few bytes can stand for any number of keys: rows with lists that are read at once, keys of a table, and of a row.
LIST_ROWS, TABLE_KEYS, MAX_ROW_KEYS = 4096, 1 << 20, 1 << 20
# Values that a row group's list column may have: so many a row, so many where it has few rows, and the most of all. One
# row may have nearly all of them, and Arrow decodes a row whole, by some 10 bytes a value.
ROW_VALUES, FEW_VALUES, MOST_VALUES = 64, 1 << 24, 1 << 26
# Of a file behind its footer: the footer's length, and a mark.
_TAIL_BYTES = 8
# What Arrow raises for bytes that it can't read.
DAMAGE = (pa.ArrowException, OSError, UnicodeDecodeError)


class ParquetTable:
    """The rows of one file, whose footer is read; old times (INT96) are read in the unit `times`.

    Raises `CorruptFile`, and as the storage.
    """

    def __init__(self, place: LocalFile | StoredFile, times: str = "ms", buffer_bytes: int = 0) -> None:
        self._place, self._times, self._buffer_bytes = place, times, buffer_bytes
        with self._opened() as file:
            self.metadata: pq.FileMetaData = file.metadata
            self.schema = pa.schema(
                # a UUID's column is one of bytes
                [pa.field(f.name, _stored(f.type)) for f in file.schema_arrow],
                file.schema_arrow.metadata,
            )
            columns = [file.schema.column(number) for number in range(len(file.schema))]
        plain = {field.name for field in self.schema if not pa.types.is_nested(_value_type(field.type))}
        # paths of text and bytes, by their columns; a name may have a dot
        paths = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
        tops = [path if path in plain else path.partition(".")[0] for path in paths]
        self._texts = [(top, path) for top, path in zip(tops, paths, strict=True) if top in plain]
        self._lists = {field.name for field in self.schema if has_items(field.type)}
        # how many rows each row group has
        self.group_rows = [self._rows(self.metadata.row_group(n)) for n in range(self.metadata.num_row_groups)]
        *self._begins, self.rows = accumulate(self.group_rows, initial=0)
        CorruptFile.unless_equal(str(place), "rows of all row groups", self.metadata.num_rows, self.rows)

    @contextlib.contextmanager
    def _opened(self, texts: Sequence[str] = (), metadata: pq.FileMetaData | None = None) -> Iterator[pq.ParquetFile]:
        """Yield the file, whose pages are compared with their checksums; `texts` are read as dictionaries."""
        where = self._place.path if isinstance(self._place, LocalFile) else None
        try:
            with contextlib.nullcontext(where) if where is not None else self._place.ranges() as handle:
                with pq.ParquetFile(
                    handle,
                    metadata=metadata,
                    pre_buffer=where is None,
                    buffer_size=0 if where is None else self._buffer_bytes,
                    coerce_int96_timestamp_unit=self._times,
                    read_dictionary=list(texts),
                    page_checksum_verification=True,
                ) as file:
                    yield file
        except TieredIndexError:
            raise
        except DAMAGE as error:
            raise CorruptFile(str(self._place), f"not a Parquet file that can be read: {error}") from error

    def _rows(self, group: pq.RowGroupMetaData) -> int:
        # not by column: Arrow ends the process for what can be wrong with a column's metadata
        if group.num_rows < 0 or group.total_byte_size < 0:
            raise CorruptFile(str(self._place), "a row group has a negative size")
        return int(group.num_rows)

    @cached_property
    def _values(self) -> list[dict[str, int]]:
        """Return how many values the list columns of each row group have."""
        try:
            with self._place.ranges() as handle:
                size = handle.seek(-_TAIL_BYTES, io.SEEK_END)
                length = int.from_bytes(handle.read(4), "little")
                handle.seek(max(0, size - length))
                groups = [
                    {top: values for top, values in chunks if top in self._lists}
                    for chunks in chunk_values(handle.read(length))
                ]
        except (OSError, ValueError) as error:
            raise CorruptFile(str(self._place), f"not a Parquet file that can be read: {error}") from error
        CorruptFile.unless_equal(str(self._place), "row groups of the footer", len(self.group_rows), len(groups))
        return groups

    def _check_values(self, number: int, names: Sequence[str]) -> None:
        if self._lists.isdisjoint(names):
            return
        rows = self.group_rows[number]
        most = min(MOST_VALUES, max(FEW_VALUES, ROW_VALUES * rows))
        for name, values in self._values[number].items():
            if name in names and values > most:
                raise InvalidArgument(
                    f"{self._place}: row group {number} has {values:,} values of column {name!r} in {rows:,} rows; "
                    f"{most:,} are allowed: write the file with smaller row groups"
                )

    def read(self, names: Sequence[str], start: int = 0) -> Iterator[tuple[int, pa.Table]]:
        """Yield columns of the rows from number `start` on, each table with its first row's number. Raises
        `CorruptFile`, and `InvalidArgument` for a row that is too long, or may be.
        """
        for number, (begin, count) in enumerate(zip(self._begins, self.group_rows, strict=True)):
            if begin + count > start:
                for first, rows in self.read_group(number, names, max(0, start - begin)):
                    yield begin + first, pa.Table.from_batches([rows])

    def read_group(
        self, number: int, names: Sequence[str], start: int = 0, shared: Sequence[str] = ()
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield columns of the rows of one row group from its row `start` on, each batch with the number of its first
        row in the group. Text columns `shared` stay dictionaries. Raises as `read`.
        """
        self._check_values(number, names)
        count, size_bytes = self.group_rows[number], self.metadata.row_group(number).total_byte_size
        most = BATCH_ROWS if self._lists.isdisjoint(names) else LIST_ROWS
        at_once = max(1, min(most, count, BATCH_BYTES * count // max(1, size_bytes)))
        begin, position = self._begins[number], 0
        with self._opened(self._dictionaries(number, names, at_once, shared), self.metadata) as file:
            try:
                for rows in file.iter_batches(at_once, row_groups=[number], columns=list(names), use_threads=False):
                    skip = min(len(rows), max(0, start - position))
                    for first, part in self._bounded(rows.slice(skip), begin + position + skip, shared):
                        yield first - begin, part
                    position += len(rows)
            except DAMAGE as error:
                problem = f"row group {number} can't be read from its row {position} on: {error}"
                raise CorruptFile(str(self._place), problem) from error
        CorruptFile.unless_equal(str(self._place), f"rows of row group {number}", count, position)

    def _dictionaries(self, number: int, names: Sequence[str], at_once: int, shared: Sequence[str]) -> list[str]:
        """Return the paths of the columns to read as dictionaries: text that many rows may share, and that is so large
        that `at_once` rows would exceed `TEXT_BYTES`. Text that few rows share is read faster without one.

        Arrow reads the whole dictionary of a column with its first row, and refuses a second dictionary.
        """
        texts = [(name, path) for name, path in self._texts if name in names]
        plain = [name for name, path in texts if name == path and name not in shared]
        bounded = set()
        # a request for each column costs more than the dictionaries
        if plain and isinstance(self._place, LocalFile):
            # the caller's own reading tells the damage with its row
            with contextlib.suppress(CorruptFile), self._opened(plain, self.metadata) as file:
                for rows in file.iter_batches(1, row_groups=[number], columns=plain, use_threads=False):
                    bounded = {name for name in plain if _longest(rows.column(name)) * at_once <= TEXT_BYTES}
                    break
        return [path for name, path in texts if name not in bounded]

    def _bounded(self, rows: pa.RecordBatch, first: int, shared: Sequence[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
        rows.validate(full=True)
        rows = pa.RecordBatch.from_arrays([_storage(column) for column in rows.columns], rows.schema.names)
        keys = np.zeros(len(rows), np.int64)
        for column in rows.columns:
            if has_items(column.type):
                keys += pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
        self._check_rows(keys, first, "it has {:,} keys", MAX_ROW_KEYS)
        for begin, end in _slices(keys, TABLE_KEYS):
            yield from self._of_bounded_text(rows.slice(begin, end - begin), first + begin, shared)

    def _of_bounded_text(
        self, rows: pa.RecordBatch, first: int, shared: Sequence[str]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        sizes = np.zeros(len(rows), np.int64)
        for column in rows.columns:
            sizes += text_bytes(column)
        self._check_rows(sizes, first, "its text has {:,} bytes", MAX_ROW_BYTES)
        for begin, end in _slices(sizes, TEXT_BYTES):
            part = rows.slice(begin, end - begin)
            columns = [
                column if name in shared else plain_text(column)
                for name, column in zip(part.schema.names, part.columns, strict=True)
            ]
            yield first + begin, pa.RecordBatch.from_arrays(columns, part.schema.names)

    def _check_rows(self, sizes: npt.NDArray[np.int64], first: int, has: str, most: int) -> None:
        if (large := np.flatnonzero(sizes > most)).size:
            row = int(large[0])
            raise InvalidArgument(
                f"{self._place}, row {first + row + 1}: {has.format(int(sizes[row]))}; {most:,} are allowed"
            )


def _slices(sizes: npt.NDArray[np.int64], most: int) -> Iterator[tuple[int, int]]:
    """Yield [begin, end) of neighbouring rows that have about `most` together."""
    parts, begin = np.cumsum(sizes) // most, 0
    while begin < len(sizes):
        end = int(np.searchsorted(parts, parts[begin], "right"))
        yield begin, end
        begin = end


def _longest(column: pa.Array) -> int:
    """Return the bytes of the longest value of a dictionary; without one, more than any bound."""
    # of a single value it is unknown whether the file has a dictionary
    if not isinstance(column, pa.DictionaryArray) or len(column.dictionary) < 2:
        return TEXT_BYTES + 1
    return int(pc.max(pc.binary_length(column.dictionary)).as_py())


def _value_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if has_items(kind) else kind


def _stored(kind: pa.DataType) -> pa.DataType:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _storage(column: pa.Array) -> pa.Array:
    return column.storage if isinstance(column, pa.ExtensionArray) else column
