"""Reads untrusted Parquet files as tables of bounded size, by Arrow. One thread.

A row group that states more than `MAX_ROW_GROUP_ROW_BYTES` for each of its rows is refused before it is read. A file
whose sizes are false is `CorruptFile` where Arrow finds that out; otherwise it can use more memory. Pages with
checksums are verified. Arrow aborts the process if it is asked for damaged metadata of a column, but raises an error if
it reads the column. So this module asks for the metadata of a column only after it has read some of the column.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import IO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tiered_index.connectors.files.rows.columns import MAX_ROW_BYTES, has_items, plain_text, text_bytes
from tiered_index.connectors.files.rows.places import CheckedFile, File, LocalFile
from tiered_index.errors import CorruptFile, InvalidArgument, TieredIndexError
from tiered_index.service.write.validation import in_known_layout, known_layout

# Most rows that are read at once, and about how many bytes: of all columns, and of text
BATCH_ROWS, BATCH_BYTES, TEXT_BYTES = 1 << 17, 64 << 20, 32 << 20
# A few bytes can become any number of keys. Most rows with lists that are read at once, keys of a table, keys of a row:
LIST_ROWS, TABLE_KEYS, MAX_ROW_KEYS = 4096, 1 << 20, 1 << 20
# Most decompressed bytes that a row group may state for each row, all columns together
MAX_ROW_GROUP_ROW_BYTES = 128 << 20
# Bytes of a cell of a number, and of the place of a text
_CELL_BYTES = 8
# Decompressed bytes of a large row group, and how many times those of the file it may state
LARGE_ROW_GROUP_BYTES, MAX_ROW_GROUP_RATIO = 256 << 20, 1000
# A local file, and a large row group of an object, are read in pieces, one of each column at a time
_PIECE_BYTES, _LARGE_PIECE_BYTES = 1 << 20, 8 << 20
# Bytes of the pieces of all columns, and least bytes of a piece
_PIECES_BYTES, _LEAST_PIECE_BYTES = 64 << 20, 64 << 10
# Items of lists in a row group, above which they may be at most so many times the bytes of the file
LARGE_ITEMS = 16 << 20
# Arrow copies text with offsets of 64 bits twice as fast. It has the option from version 21 on.
_TEXT = {"binary_type": pa.large_binary()} if "binary_type" in inspect.signature(pq.ParquetFile).parameters else {}
_POOL = threading.Lock()
# Arrow's errors for damaged files
DAMAGE = (pa.ArrowException, OSError, UnicodeDecodeError)


class ParquetTable:
    """The rows of one file. `times` is the unit for times of the old type INT96. `starts` has the first row of each row
    group.

    The constructor reads the footer. Raises `CorruptFile` and the storage's errors.
    """

    damage: CorruptFile | None = None
    """Why not all rows are known: never so, because the footer names them."""

    def __init__(self, place: File, times: str = "ms") -> None:
        self._place, self._times = place, times
        # until the footer is known
        self._is_small = True
        with self._place.ranges() as handle, self._opened(handle) as file:
            self._file_bytes = handle.seek(0, os.SEEK_END)
            self.metadata: pq.FileMetaData = file.metadata
            self.schema = pa.schema(
                [pa.field(f.name, known_layout(f.type), f.nullable) for f in file.schema_arrow],
                file.schema_arrow.metadata,
            )
        # Rows of each row group
        self.group_rows = [self._rows(self.metadata.row_group(n)) for n in range(self.metadata.num_row_groups)]
        *self.starts, self.rows = accumulate(self.group_rows, initial=0)
        CorruptFile.unless_equal(str(place), "rows of all row groups", self.metadata.num_rows, self.rows)
        sizes = [int(self.metadata.row_group(n).total_byte_size) for n in range(self.metadata.num_row_groups)]
        self._is_small = max(sizes, default=0) <= LARGE_ROW_GROUP_BYTES

    @contextlib.contextmanager
    def _opened(
        self,
        handle: IO[bytes] | _NoPages,
        metadata: pq.FileMetaData | None = None,
        *,
        whole: bool = True,
        dictionaries: Sequence[str] = (),
        leaves: int = 1,
    ) -> Iterator[pq.ParquetFile]:
        """Yield the open file; checksums of pages are verified. `whole`: columns are read to their ends.

        Columns of text whose paths are in `dictionaries` are read as dictionaries. So many `leaves` are read at once.
        """
        place = self._place.file if isinstance(self._place, CheckedFile) else self._place
        is_local, is_stub = isinstance(place, LocalFile), isinstance(handle, _NoPages)
        is_buffered = whole and not is_local and self._is_small
        piece_bytes = _PIECE_BYTES if is_local or not whole else _LARGE_PIECE_BYTES
        piece_bytes = max(_LEAST_PIECE_BYTES, min(piece_bytes, _PIECES_BYTES // max(1, leaves)))
        try:
            # with the footer it reads nothing yet
            with contextlib.nullcontext() if metadata is None else _memory_of_system():
                file = pq.ParquetFile(
                    # Arrow reads a path faster than a Python file
                    self._place.path if isinstance(self._place, LocalFile) and not is_stub else handle,
                    metadata=metadata,
                    # one request for neighbouring columns of a row group, which are in memory then
                    pre_buffer=is_buffered,
                    buffer_size=0 if is_buffered else piece_bytes,
                    coerce_int96_timestamp_unit=self._times,
                    page_checksum_verification=True,
                    **({"read_dictionary": list(dictionaries)} if dictionaries else _TEXT),
                )
            with file:
                yield file
        except TieredIndexError:
            raise
        except (*DAMAGE, ValueError) as error:
            raise CorruptFile(str(self._place), f"not a Parquet file that can be read: {error}") from error

    def _rows(self, group: pq.RowGroupMetaData) -> int:
        if group.num_rows < 0 or group.total_byte_size < 0:
            raise CorruptFile(str(self._place), "a row group has a negative size")
        return int(group.num_rows)

    def read(self, names: Sequence[str], start: int = 0) -> Iterator[tuple[int, pa.Table]]:
        """Yield columns `names` of the rows from `start`, as tables with the number of their first row.

        Raises `CorruptFile`, and `InvalidArgument` for a row that needs too much memory.
        """
        leaves = len(self._leaves(names))
        with self._place.ranges() as handle, self._opened(handle, self.metadata, leaves=leaves) as file:
            for number, (begin, count) in enumerate(zip(self.starts, self.group_rows, strict=True)):
                if begin + count > start:
                    yield from self._group(file, number, names, max(0, start - begin))

    def _group(
        self, file: pq.ParquetFile, number: int, names: Sequence[str], skipped: int
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield the rows of one row group behind the first `skipped` ones, as `read`."""
        count, begin, position = self.group_rows[number], self.starts[number], 0
        at_once = self._rows_at_once(number, names, skipped)
        try:
            for rows in file.iter_batches(at_once, row_groups=[number], columns=list(names), use_threads=False):
                for column in rows.columns:
                    if not _is_ascii(column):
                        column.validate(full=True)
                skip = min(len(rows), max(0, skipped - position))
                for first, part in bounded(rows.slice(skip), begin + position + skip, self._place):
                    yield first, pa.Table.from_batches([part])
                position += len(rows)
        except DAMAGE as error:
            problem = f"row group {number} can't be read from its row {position} on: {error}"
            raise CorruptFile(str(self._place), problem) from error
        CorruptFile.unless_equal(str(self._place), f"rows of row group {number}", count, position)

    def has_every_text(self, number: int, name: str) -> bool:
        """Return whether the statistics of a row group say that a text column has neither nulls nor empty texts.

        False for a small group, whose column costs less to read. Raises `CorruptFile`.
        """
        leaves = [self.metadata.schema.column(place) for place in range(self.metadata.num_columns)]
        place = next((place for place, leaf in enumerate(leaves) if leaf.path == name), None)
        if place is None or leaves[place].physical_type != "BYTE_ARRAY" or self.group_rows[number] < BATCH_ROWS:
            return False
        with self._place.ranges() as handle, self._opened(handle, self.metadata, whole=False) as file:
            try:
                next(file.iter_batches(1, row_groups=[number], columns=[name], use_threads=False), None)
            except DAMAGE as error:
                raise CorruptFile(str(self._place), f"row group {number} can't be read: {error}") from error
        column = self.metadata.row_group(number).column(place)
        statistics = column.statistics if column.physical_type == "BYTE_ARRAY" else None
        if statistics is None or not (statistics.has_null_count and statistics.has_min_max):
            return False
        return statistics.null_count == 0 and bool(statistics.min_raw)

    def _rows_at_once(self, number: int, names: Sequence[str], skipped: int) -> int:
        """Return the number of rows of a row group to read at once, by its stated size and the bytes of their cells.

        Raises `InvalidArgument` if a row may need more than `MAX_ROW_GROUP_ROW_BYTES`, and for a large row group that
        states far more bytes than the file has: a page of it may need as many.
        """
        count, size_bytes = self.group_rows[number], int(self.metadata.row_group(number).total_byte_size)
        if size_bytes > max(1, count) * MAX_ROW_GROUP_ROW_BYTES:
            raise InvalidArgument(
                f"{self._place}: row group {number} states {size_bytes:,} bytes for {count:,} rows, but a row may have "
                f"{MAX_ROW_GROUP_ROW_BYTES:,} bytes: write the file without its large columns"
            )
        if size_bytes > max(LARGE_ROW_GROUP_BYTES, self._file_bytes * MAX_ROW_GROUP_RATIO):
            raise InvalidArgument(
                f"{self._place}: row group {number} states {size_bytes:,} bytes, more than {MAX_ROW_GROUP_RATIO:,} "
                "times those of the file: write smaller row groups, or pages"
            )
        lists = [name for name in names if any(self._is_list(place) for place in self._leaves([name]))]
        self._check_items(number, lists)
        most = LIST_ROWS if lists else BATCH_ROWS
        at_once = max(1, min(most, count, BATCH_BYTES * count // max(1, size_bytes)))
        if at_once * (size_bytes + _CELL_BYTES * len(names)) <= BATCH_BYTES:
            # also if each cell has all that the row group states
            return at_once
        if skipped:
            # a row is looked for: this is sooner than to find out how long the others are
            at_once = min(at_once, LIST_ROWS)
        else:
            at_once = min(at_once, BATCH_BYTES // max(1, self._cell_bytes(number, names)))
        return max(1, at_once)

    def _leaves(self, names: Sequence[str]) -> list[int]:
        """Return the numbers of the leaves of columns, or of fields of structures."""
        wanted = {*names}
        paths = (self.metadata.schema.column(place).path for place in range(self.metadata.num_columns))
        return [
            place
            for place, path in enumerate(paths)
            if path in wanted or path.partition(".")[0] in wanted or any(path.startswith(f"{name}.") for name in wanted)
        ]

    def _is_list(self, place: int) -> bool:
        return int(self.metadata.schema.column(place).max_repetition_level) > 0

    def _check_items(self, number: int, names: Sequence[str]) -> None:
        """Raise `InvalidArgument` if lists of a row group state more items than its rows may have, or than it may.

        Arrow has all items of a row in memory at once. `names` are columns with lists.
        """
        if not names or not self._has_metadata(number, names):
            return
        group, count = self.metadata.row_group(number), self.group_rows[number]
        most = max(LARGE_ITEMS, self._file_bytes * MAX_ROW_GROUP_RATIO)
        for place in self._leaves(names):
            items = int(group.column(place).num_values)
            if items > count * MAX_ROW_KEYS or items > most:
                raise InvalidArgument(
                    f"{self._place}: row group {number} states {items:,} items of {group.column(place).path_in_schema} "
                    f"in {count:,} rows, but a row may have {MAX_ROW_KEYS:,}, and a row group of this file "
                    f"{most:,}: write the file without this column"
                )

    def _has_metadata(self, number: int, names: Sequence[str]) -> bool:
        """Return whether Arrow can read the metadata of columns of a row group. It reads no page of them."""
        with self._opened(_NoPages(self._file_bytes), self.metadata, whole=False) as file:
            try:
                next(file.iter_batches(1, row_groups=[number], columns=list(names), use_threads=False), None)
            except _PageWanted:
                return True
            except DAMAGE:
                # the reading of the rows says why
                return False
        return False

    def _cell_bytes(self, number: int, names: Sequence[str]) -> int:
        """Return the most bytes of the cells of a row in columns: of text those of the longest that cells repeat.

        A few bytes can say that a million cells have the same long text. Text that is not repeated has its own bytes.
        """
        leaves = [self.metadata.schema.column(place) for place in self._leaves(names)]
        texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        fixed = sum(max(_CELL_BYTES, int(leaf.length)) for leaf in leaves)
        if not texts:
            return fixed
        with self._place.ranges() as handle:
            try:
                with self._opened(handle, self.metadata, whole=False, dictionaries=texts) as file:
                    rows = next(file.iter_batches(1, row_groups=[number], columns=texts, use_threads=False), None)
                return fixed + sum(map(_longest_repeated, () if rows is None else rows.columns))
            except (CorruptFile, *DAMAGE):
                # the reading of the rows says why
                return fixed


class _PageWanted(OSError):
    """Arrow wants to read a page."""


class _NoPages(io.RawIOBase):
    """Stands for a file of which no byte may be read."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        self._size_bytes, self._position = size_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size_bytes)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        raise _PageWanted(size)


def _longest_repeated(column: pa.Array) -> int:
    """Return the bytes of the longest text in the dictionaries of a column, all of its fields together."""
    if pa.types.is_dictionary(column.type):
        return int(pc.max(pc.binary_length(column.dictionary)).as_py() or 0)
    if pa.types.is_struct(column.type):
        return sum(map(_longest_repeated, column.flatten()))
    return _longest_repeated(column.values) if has_items(column.type) else 0


@contextlib.contextmanager
def _memory_of_system() -> Iterator[None]:
    """Let the Parquet files that are opened here take memory from the C library for as long as they are read.

    Arrow's own pool asks for huge pages. The kernel then moves other memory and zeroes more than is used: 70 ms of
    processor time for 2 million rows of three columns, a fifth of their ingest.
    """
    with _POOL:
        before = pa.default_memory_pool()
        pa.set_memory_pool(pa.system_memory_pool())
        try:
            yield
        finally:
            pa.set_memory_pool(before)


def bounded(rows: pa.RecordBatch, first: int, place: object) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield validated rows in parts of bounded size, with the number of their first row; `first` is that of `rows`.

    Raises `InvalidArgument` for a row that needs too much memory, and Arrow's errors for damage.
    """
    rows = pa.RecordBatch.from_arrays([in_known_layout(column) for column in rows.columns], rows.schema.names)
    if 0 < rows.nbytes <= MAX_ROW_BYTES and all(map(_is_flat, rows.schema.types)):
        yield first, _plain(rows)
        return
    keys = np.zeros(len(rows), np.int64)
    for column in rows.columns:
        if has_items(column.type):
            keys += pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    _check_rows(keys, first, place, "it has {:,} keys", MAX_ROW_KEYS)
    for begin, end in _slices(keys, TABLE_KEYS):
        yield from _of_bounded_text(rows.slice(begin, end - begin), first + begin, place)


def _is_flat(kind: pa.DataType) -> bool:
    """Return whether a column's bytes are those of its cells: cells of a dictionary share a text, lists have items."""
    if pa.types.is_struct(kind):
        return all(_is_flat(kind.field(place).type) for place in range(kind.num_fields))
    return not (pa.types.is_nested(kind) or pa.types.is_dictionary(kind))


def _is_ascii(column: pa.Array) -> bool:
    """Return whether Arrow's own offsets of text lead only to ASCII: such text is valid, and this is known sooner."""
    if pa.types.is_struct(column.type):
        return all(map(_is_ascii, column.flatten()))
    if not pa.types.is_large_string(column.type) or not len(column):
        return False
    _, offsets, data = column.buffers()
    begin, end = np.frombuffer(offsets, np.int64)[[column.offset, column.offset + len(column)]]
    return begin == end or int(np.frombuffer(data, np.uint8)[begin:end].max()) < 0x80


def _of_bounded_text(rows: pa.RecordBatch, first: int, place: object) -> Iterator[tuple[int, pa.RecordBatch]]:
    sizes = np.zeros(len(rows), np.int64)
    for column in rows.columns:
        sizes += text_bytes(column)
    _check_rows(sizes, first, place, "its text has {:,} bytes", MAX_ROW_BYTES)
    for begin, end in _slices(sizes, TEXT_BYTES):
        yield first + begin, _plain(rows.slice(begin, end - begin))


def _plain(rows: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([plain_text(column) for column in rows.columns], rows.schema.names)


def _check_rows(sizes: npt.NDArray[np.int64], first: int, place: object, has: str, most: int) -> None:
    if (large := np.flatnonzero(sizes > most)).size:
        row = int(large[0])
        raise InvalidArgument(f"{place}, row {first + row + 1}: {has.format(int(sizes[row]))}; {most:,} are allowed")


def _slices(sizes: npt.NDArray[np.int64], most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges [begin, end) of neighbouring rows whose sizes add up to about `most`."""
    parts, begin = np.cumsum(sizes) // most, 0
    while begin < len(sizes):
        end = int(np.searchsorted(parts, parts[begin], "right"))
        yield begin, end
        begin = end
