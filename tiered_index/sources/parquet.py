"""Reads untrusted Parquet files as tables of bounded size. One thread.

Each table has a bounded number of rows and bytes. Text that rows share is read once. No row, with its pages, may need
more than `DECODED_BYTES`. All damage is `CorruptFile`. Pages with checksums are verified.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import IO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tiered_index.errors import CorruptFile, InvalidArgument, TieredIndexError
from tiered_index.service.answers.validation import in_known_layout, known_layout
from tiered_index.sources.columns import MAX_ROW_BYTES, has_items, plain_text, text_bytes
from tiered_index.sources.footers import Chunk, column_chunks
from tiered_index.sources.pages import DECODED_BYTES, Column, Pages, chunk_pages, most_bytes
from tiered_index.sources.places import LocalFile, ObjectReader, StoredFile

# Most rows that are read at once, and about how many bytes: of all columns, and of text, shared text counted by row
BATCH_ROWS, BATCH_BYTES, TEXT_BYTES = 1 << 17, 32 << 20, 32 << 20
# A few bytes can become any number of keys. Most rows with lists that are read at once, keys of a table, keys of a row:
LIST_ROWS, TABLE_KEYS, MAX_ROW_KEYS = 4096, 1 << 20, 1 << 20
# The length of the footer and a mark follow the footer
_TAIL_BYTES = 8
# A local file is read in pieces
_PIECE_BYTES = 1 << 20
# Arrow's errors for damaged files
DAMAGE = (pa.ArrowException, OSError, UnicodeDecodeError)


class ParquetTable:
    """The rows of one file. `times` is the unit for times of the old type INT96.

    The constructor reads the footer. Raises `CorruptFile` and the storage's errors.
    """

    def __init__(self, place: LocalFile | StoredFile, times: str = "ms") -> None:
        self._place, self._times = place, times
        with self._place.ranges() as handle, self._opened(handle) as file:
            self.metadata: pq.FileMetaData = file.metadata
            self.schema = pa.schema(
                [pa.field(f.name, known_layout(f.type)) for f in file.schema_arrow], file.schema_arrow.metadata
            )
            columns = [file.schema.column(number) for number in range(len(file.schema))]
            # Not by Arrow: it may end the process when it writes metadata
            handle.seek(-self.metadata.serialized_size - _TAIL_BYTES, io.SEEK_END)
            self._footer = handle.read(self.metadata.serialized_size)
        kinds = {f.name: f.type.value_type if has_items(f.type) else f.type for f in self.schema}
        plain = {name for name, kind in kinds.items() if not pa.types.is_nested(kind)}
        # paths of text and bytes, by their columns; a name may have a dot
        paths = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
        tops = {path: path if path in plain else path.partition(".")[0] for path in paths}
        self._texts = {path: top for path, top in tops.items() if top in plain}
        self._columns = [
            Column(
                column.max_repetition_level,
                column.max_definition_level,
                column.physical_type == "BYTE_ARRAY",
                column.path in self._texts,
                column.length if column.physical_type == "FIXED_LEN_BYTE_ARRAY" else 0,
            )
            for column in columns
        ]
        self._lists = {field.name for field in self.schema if has_items(field.type)}
        # Rows of each row group
        self.group_rows = [self._rows(self.metadata.row_group(n)) for n in range(self.metadata.num_row_groups)]
        *self._begins, self.rows = accumulate(self.group_rows, initial=0)
        CorruptFile.unless_equal(str(place), "rows of all row groups", self.metadata.num_rows, self.rows)

    @contextlib.contextmanager
    def _opened(
        self, handle: IO[bytes], texts: Sequence[str] = (), metadata: pq.FileMetaData | None = None
    ) -> Iterator[pq.ParquetFile]:
        """Yield the open file; checksums of pages are verified, and columns `texts` are read as dictionaries."""
        try:
            with pq.ParquetFile(
                # Arrow reads a path faster than a Python file
                self._place.path if isinstance(self._place, LocalFile) else handle,
                metadata=metadata,
                pre_buffer=False,
                buffer_size=_PIECE_BYTES,
                coerce_int96_timestamp_unit=self._times,
                read_dictionary=list(texts),
                page_checksum_verification=True,
            ) as file:
                yield file
        except TieredIndexError:
            raise
        except DAMAGE as error:
            raise self._damage(error) from error

    def _rows(self, group: pq.RowGroupMetaData) -> int:
        # Not by column: Arrow aborts the process for some damage of a column's metadata
        if group.num_rows < 0 or group.total_byte_size < 0:
            raise CorruptFile(str(self._place), "a row group has a negative size")
        return int(group.num_rows)

    @cached_property
    def _chunks(self) -> list[list[Chunk]]:
        """Return the column chunks of each row group."""
        try:
            groups = column_chunks(self._footer)
        except ValueError as error:
            raise self._damage(error) from error
        CorruptFile.unless_equal(str(self._place), "row groups of the footer", len(self.group_rows), len(groups))
        for group in groups:
            CorruptFile.unless_equal(str(self._place), "columns of a row group", len(self._columns), len(group))
        return groups

    def _damage(self, error: Exception) -> CorruptFile:
        return CorruptFile(str(self._place), f"not a Parquet file that can be read: {error}")

    def read(self, names: Sequence[str], start: int = 0) -> Iterator[tuple[int, pa.Table]]:
        """Yield columns `names` of the rows from `start`, as tables with the number of their first row.

        Raises `CorruptFile`, and `InvalidArgument` for a row that may need too much memory.
        """
        for number, (begin, count) in enumerate(zip(self._begins, self.group_rows, strict=True)):
            if begin + count > start:
                for first, rows in self.read_group(number, names, max(0, start - begin)):
                    yield begin + first, pa.Table.from_batches([rows])

    def read_group(
        self, number: int, names: Sequence[str], start: int = 0, shared: Sequence[str] = ()
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield columns `names` of one row group from its row `start`, as batches with the number of their first row.

        Numbers count from the group's first row. Text columns `shared` stay dictionaries. Raises as `read`.
        """
        count, size_bytes = self.group_rows[number], self.metadata.row_group(number).total_byte_size
        most = BATCH_ROWS if self._lists.isdisjoint(names) else LIST_ROWS
        at_once = max(1, min(most, count, BATCH_BYTES * count // max(1, size_bytes)))
        begin, position = self._begins[number], 0
        with self._place.ranges() as handle:
            chosen = [n for n, chunk in enumerate(self._chunks[number]) if _is_of(chunk, names)]
            chunks = [self._chunks[number][n] for n in chosen]
            if isinstance(handle, ObjectReader):
                handle.fetch((chunk.begin, chunk.begin + chunk.size_bytes) for chunk in chunks)
            pages = self._pages(handle, number, chosen)
            at_once, texts = self._at_once(number, chunks, pages, at_once, shared)
            with self._opened(handle, texts, self.metadata) as file:
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

    def _pages(self, handle: IO[bytes], number: int, columns: Sequence[int]) -> list[Pages]:
        def read(begin: int, size_bytes: int) -> bytes:
            handle.seek(begin)
            return handle.read(size_bytes)

        try:
            return [
                chunk_pages(read, self._chunks[number][n], self._columns[n], self.group_rows[number]) for n in columns
            ]
        except ValueError as error:
            raise CorruptFile(str(self._place), f"row group {number} can't be read: {error}") from error

    def _at_once(
        self, number: int, chunks: Sequence[Chunk], pages: list[Pages], at_once: int, shared: Sequence[str]
    ) -> tuple[int, list[str]]:
        """Return the number of rows to read at once (up to `at_once`), and the paths to read as dictionaries.

        These are text columns that are shared, in lists, or could exceed `TEXT_BYTES` in these rows. Other text is read
        faster without a dictionary. Raises `InvalidArgument` if one row needs too much memory.
        """
        texts = []
        for chunk, found in zip(chunks, pages, strict=True):
            path = ".".join(chunk.path)
            if found.coded:
                at_once = min(at_once, max(1, DECODED_BYTES // max(1, found.longest)))
            elif path in self._texts and (
                self._texts[path] in (*shared, *self._lists) or found.longest * at_once > TEXT_BYTES
            ):
                texts.append(path)
        while at_once > 1 and most_bytes(pages, at_once) > DECODED_BYTES:
            at_once //= 2
        if most_bytes(pages, at_once) > DECODED_BYTES:
            largest = max(zip(pages, chunks, strict=True), key=lambda pair: most_bytes([pair[0]], at_once))[1]
            raise InvalidArgument(
                f"{self._place}: row group {number} has a row whose pages become more than {DECODED_BYTES:,} bytes in "
                f"memory, most of them for column {largest.path[0]!r}: write the file with smaller pages"
            )
        return at_once, texts

    def _bounded(self, rows: pa.RecordBatch, first: int, shared: Sequence[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
        rows.validate(full=True)
        rows = pa.RecordBatch.from_arrays([in_known_layout(column) for column in rows.columns], rows.schema.names)
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
                _as_dictionary(column) if name in shared else plain_text(column)
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
    """Yield ranges [begin, end) of neighbouring rows whose sizes add up to about `most`."""
    parts, begin = np.cumsum(sizes) // most, 0
    while begin < len(sizes):
        end = int(np.searchsorted(parts, parts[begin], "right"))
        yield begin, end
        begin = end


def _is_of(chunk: Chunk, names: Sequence[str]) -> bool:
    """Return whether Arrow may read a chunk for columns `names`; a name may have a dot."""
    return any(".".join(chunk.path[: end + 1]) in names for end in range(len(chunk.path)))


def _as_dictionary(column: pa.Array) -> pa.Array:
    # Arrow can't read some encodings as dictionaries
    return column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
