"""Reads the rows of text, compressed or not: NDJSON and CSV.

Text is read in blocks; a block that the quick parser refuses is read line by line, so that a bad row is named. Memory:
some blocks. One thread.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import lzma
import re
import zlib
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv

from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.json_paths import Unclear, searched
from tiered_index.kernels import GzipFile, crc32, gzip_error
from tiered_index.sources.blocks import RestartPoint
from tiered_index.sources.columns import MAX_ROW_BYTES
from tiered_index.sources.messages import json_object
from tiered_index.sources.restart import RESTARTED, PointedText, packed_text
from tiered_index.sources.rows.batch import (
    BYTE_ORDER_MARK,
    BadRow,
    File,
    RowBatch,
    RowFile,
    RowReading,
    SingleRows,
    batch_of_columns,
)
from tiered_index.sources.rows.mapping import Dialect, RowMapping, no_key

BLOCK_BYTES = 2 << 20
SUM_BYTES = 256 << 10
"""The bytes of a block with a checksum: the least that is read for a row."""
HEAD_BYTES = 64 << 10
_MAGICS = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    # pzstd begins with a frame that is skipped
    b"\x50\x2a\x4d\x18": "zstd",
}
_DAMAGE = (EOFError, gzip.BadGzipFile, gzip_error, zlib.error, lzma.LZMAError, OSError)


# of JSON; a parser of numbers forgets the sign
_MINUS_ZERO = re.compile(rb"[:,\[]\s*-0\s*[,}\]]")


class BlockSums:
    """The CRC32 of each `SUM_BYTES` of bytes that arrive in pieces, and the number of their line ends."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._lines: list[int] = []
        self._last, self._filled, self._ends = 0, 0, 0

    def update(self, data: bytes, newlines: npt.NDArray[np.int64]) -> None:
        """Add the next bytes, in which line ends are at `newlines`."""
        view, at = memoryview(data), 0
        while at < len(view):
            piece = view[at : at + SUM_BYTES - self._filled]
            self._last = crc32(piece, self._last)
            begin, end = np.searchsorted(newlines, (at, at + len(piece)))
            self._ends += int(end - begin)
            self._filled += len(piece)
            at += len(piece)
            if self._filled == SUM_BYTES:
                self._sums.append(self._last)
                self._lines.append(self._ends)
                self._last = self._filled = self._ends = 0

    @property
    def blocks(self) -> tuple[int, tuple[int, ...]]:
        """As `LinkedSegment.blocks`."""
        return SUM_BYTES, (*self._sums, *([self._last] if self._filled else []))

    @property
    def lines(self) -> tuple[int, ...]:
        """The number of line ends in each block."""
        return (*self._lines, *([self._ends] if self._filled else []))


def compression_of(head: bytes) -> str | None:
    """Return the compression of a file by its first bytes; None: it has none."""
    return next((name for magic, name in _MAGICS.items() if head.startswith(magic)), None)


@contextlib.contextmanager
def decompressed(file: File, compression: str | None, *, noting: bool = False) -> Iterator[IO[bytes]]:
    """Yield the text of a file. Read it by `read_text`.

    `noting`: it is read as a whole. So its next pieces are read ahead, and it has `points` if it may have some.
    """
    with file.ahead() if noting else file.open() as raw:
        if compression == "gzip" and not noting:
            yield cast(IO[bytes], GzipFile(fileobj=raw))
        elif compression in RESTARTED:
            yield cast(IO[bytes], packed_text(raw, compression))
        else:
            yield raw


def read_text(file: File, handle: IO[bytes], compression: str | None, size: int) -> bytes:
    """Return the next bytes of an open text, fewer only at its end. Raises `CorruptFile` for damage."""
    try:
        pieces, left = [], size
        while left and (piece := handle.read(left)):
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces) if len(pieces) != 1 else pieces[0]
    except _DAMAGE as error:
        if compression is None:
            raise
        raise CorruptFile(str(file), f"damaged {compression} file: {error}") from error


# a compressed text has about so many times the bytes of its file: if it has more, a further segment begins
_RATIO, _LEAST_BOUND = 64, 4 * MAX_ROW_BYTES


class TextFile(RowFile):
    """NDJSON or CSV. `size_bytes` are those of the file; 0: its text has no row."""

    def __init__(self, file: File, compression: str | None, size_bytes: int) -> None:
        super().__init__(file)
        self.compression, self.size_bytes = compression, size_bytes
        self.format = self.kind if compression is None else f"{self.kind}+{compression}"

    kind: str

    def length_bound(self, position: int) -> int:
        if self.compression is None or not self.size_bytes:
            return self.size_bytes - position
        return max(_LEAST_BOUND, _RATIO * self.size_bytes)

    def reading(self, mapping: RowMapping, position: int, end: int, *, whole: bool = False) -> TextReading:
        return TextReading(self, mapping, position, end)

    @cached_property
    def head(self) -> bytes:
        """The first whole lines; the first one, if it is longer than 64 KiB."""
        with decompressed(self.file, self.compression) as handle:
            size = HEAD_BYTES
            while True:
                data = read_text(self.file, handle, self.compression, size)
                if b"\n" in data or len(data) < size or size >= MAX_ROW_BYTES:
                    return data[: data.rfind(b"\n") + 1] or data
                data += read_text(self.file, handle, self.compression, MAX_ROW_BYTES - size)
                return data[: data.find(b"\n") + 1] or data

    @property
    def begin(self) -> int:
        """The position of the first row."""
        return 0

    @abstractmethod
    def members(self, lines: bytes, mapping: RowMapping) -> list[Sequence[Any] | pa.Array]:
        """Return the keys and the time of all lines, by path. Raises `Unclear`, an `ArrowException`."""

    @abstractmethod
    def members_of(self, line: bytes, mapping: RowMapping) -> list[Any]:
        """Return the keys and the time of one line, by path. Raises `InvalidArgument`."""

    def are_plain(
        self, units: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
    ) -> bool:
        """Return whether lines, which begin at `starts` of `units`, may be read together."""
        return True

    @abstractmethod
    def is_complete(self, line: bytes) -> bool:
        """Return whether a last line without newline is a whole row."""

    def split(self, lines: bytes) -> Iterator[bytes]:
        """Yield the rows of whole lines. All but the last one have all of their lines."""
        return iter(io.BytesIO(lines))

    def is_cut(self, row: bytes) -> bool:
        """Return whether the last row that `split` yielded also has the next line."""
        return False

    def lacking(self, mapping: RowMapping) -> list[tuple[str, str]]:
        if len(self.head) >= MAX_ROW_BYTES and b"\n" not in self.head[:-1]:
            raise InvalidArgument(f"{self.file}: the first line is longer than {MAX_ROW_BYTES:,} bytes")
        present, problem, objects = [False] * len(mapping.names), "", dict[str, Any]()
        for line in self.split(self.head[self.begin :]):
            try:
                members = self.members_of(line, mapping)
            except InvalidArgument as error:
                # a bad line behind a sound one is named when it is read
                problem = problem or (f"{error}" if line.strip() else "")
                continue
            for number, (path, member) in enumerate(zip(mapping.keys, members, strict=False)):
                first = member[0] if isinstance(member, list) and member else member
                if isinstance(first, dict):
                    objects.setdefault(path, member)
                    members[number] = None
            present = [was or member not in (None, "", []) for was, member in zip(present, members, strict=True)]
        for path, was in zip(mapping.keys, present, strict=False):
            if not was and path in objects:
                is_list = isinstance(objects[path], list)
                raise no_key(self.file, path, [*(objects[path][0] if is_list else objects[path])], is_list=is_list)
        if problem and not any(present):
            with contextlib.suppress(UnicodeDecodeError):
                self.head.decode()
                raise InvalidArgument(f"{self.file}: the first row is bad: {problem}")
            command = "iconv -f LATIN1 -t UTF-8 FILE > FILE.utf8"
            raise InvalidArgument(f"{self.file} is not UTF-8: write UTF-8, for example with `{command}`")
        return [name for name, is_there in zip(mapping.names, present, strict=True) if not is_there]


class NdjsonFile(TextFile):
    """One object a line."""

    kind = "ndjson"

    def fields(self) -> list[str]:
        for line in io.BytesIO(self.head):
            if line.strip():
                return [*dict.fromkeys([*json_object(line, f"{self.file}: "), *self.partition])]
        return []

    def members(self, lines: bytes, mapping: RowMapping) -> list[Sequence[Any] | pa.Array]:
        if mapping.reader is None:
            raise Unclear
        columns = mapping.reader.members_of_lines(lines)
        for number, (_, path) in enumerate(mapping.names if self.partition else ()):
            if (name := _column_name(path, mapping, [*self.partition])) is not None:
                value = self.partition[name]
                columns[number] = [value if member is None else member for member in columns[number]]
        return [*columns]

    def members_of(self, line: bytes, mapping: RowMapping) -> list[Any]:
        document = json_object(line)
        for name, value in self.partition.items():
            if document.get(name) is None:
                document[name] = value
        return [searched(path, document) for path in mapping.paths]

    def are_plain(
        self, units: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
    ) -> bool:
        # JSON has no place where "}", a newline and "{" follow one another, so such lines have whole objects
        ends = starts + sizes - 1
        ends = ends - (units[ends] == 13)
        return bool((units[starts] == ord("{")).all() and (units[ends] == ord("}")).all())

    def is_complete(self, line: bytes) -> bool:
        with contextlib.suppress(InvalidArgument):
            json_object(line)
            return line.rstrip().endswith(b"}")
        return False


# most bytes of a record of several lines
_MOST_QUOTED = 1 << 20


class CsvFile(TextFile):
    """A header, and records. A value in quotes may have newlines.

    If a dialect is given, the format names it: ``csv:``, and delimiter and quote as two hexadecimal digits each.
    """

    kind = "csv"

    def __init__(self, file: File, compression: str | None, size_bytes: int, dialect: Dialect | None = None) -> None:
        super().__init__(file, compression, size_bytes)
        header, mark, _ = self.head.partition(b"\n")
        self._begin = len(header) + len(mark)
        try:
            text = header.removeprefix(BYTE_ORDER_MARK).decode().rstrip("\r")
        except UnicodeDecodeError as error:
            raise InvalidArgument(f"{file}: the header is not UTF-8") from error
        marks = dialect or Dialect()
        self.delimiter, self.quote = max(marks.delimiters, key=text.count), marks.quote
        if dialect is not None:
            named = f"{ord(self.delimiter):02x}{ord(self.quote or chr(0)):02x}"
            self.format = self.format.replace(self.kind, f"{self.kind}:{named}", 1)
        try:
            self.header = self._cells(text)
        except InvalidArgument as error:
            if "\r" in text:
                raise InvalidArgument(
                    f"{file}: its lines end with a carriage return alone: write newlines, for example with "
                    r"`tr '\r' '\n' < FILE > FILE.csv`"
                ) from error
            raise InvalidArgument(f"{file}: the header is {error}") from error

    @property
    def begin(self) -> int:
        return self._begin

    def fields(self) -> list[str]:
        return [*dict.fromkeys([*self.header, *self.partition])]

    def lacking(self, mapping: RowMapping) -> list[tuple[str, str]]:
        lacking = super().lacking(mapping)
        if self.head[self.begin :].strip():
            return lacking
        # there are no rows yet
        return [name for name in lacking if _column_name(name[1], mapping, self.fields()) is None]

    def _cells(self, line: str) -> list[str]:
        before = csv.field_size_limit(MAX_ROW_BYTES)
        try:
            quoting = csv.QUOTE_MINIMAL if self.quote else csv.QUOTE_NONE
            marks: dict[str, Any] = {"delimiter": self.delimiter, "quotechar": self.quote or None, "quoting": quoting}
            return next(csv.reader([line], strict=True, **marks), [])
        except csv.Error as error:
            raise InvalidArgument(f"not CSV: {error}") from error
        finally:
            csv.field_size_limit(before)

    def split(self, lines: bytes) -> Iterator[bytes]:
        if not self.has_odd_line(lines):
            yield from io.BytesIO(lines)
            return
        quote = self.quote.encode()
        # the lines of a record whose quote is open. After `_MOST_QUOTED` bytes its first line is a bad row
        held: list[bytes] = []
        held_bytes, waiting = 0, deque[bytes]()
        stream = io.BytesIO(lines)
        while line := waiting.popleft() if waiting else stream.readline():
            is_odd = line.count(quote) % 2
            if not held and not (is_odd and self.is_cut(line)):
                yield line
                continue
            held.append(line)
            held_bytes += len(line)
            if is_odd and len(held) > 1:
                yield b"".join(held)
            elif held_bytes > _MOST_QUOTED:
                yield held[0]
                waiting.extendleft(reversed(held[1:]))
            else:
                continue
            held, held_bytes = [], 0
        if held:
            yield b"".join(held)

    def is_cut(self, row: bytes) -> bool:
        if not self.quote or row.count(self.quote.encode()) % 2 == 0 or len(row) > _MOST_QUOTED:
            return False
        try:
            self._cells(row.decode(errors="replace").rstrip("\r\n"))
        except InvalidArgument as error:
            return "unexpected end of data" in str(error)
        return False

    def row(self, line: bytes) -> dict[str, str]:
        """Return the cells of a line by column. Raises `InvalidArgument`."""
        try:
            cells = self._cells(line.decode().rstrip("\r\n"))
        except UnicodeDecodeError as error:
            raise InvalidArgument("not UTF-8") from error
        if len(cells) != len(self.header):
            raise InvalidArgument(f"{len(cells)} columns, not {len(self.header)}")
        return dict(zip(self.header, cells, strict=True))

    def members(self, lines: bytes, mapping: RowMapping) -> list[Sequence[Any] | pa.Array]:
        fields = self.fields()
        names = [_column_name(path, mapping, fields) for _, path in mapping.names]
        of_lines = [name for name in dict.fromkeys(names) if name in self.header]
        if None in names or not of_lines or len(set(self.header)) != len(self.header):
            raise Unclear
        if self.has_odd_line(lines):
            raise Unclear
        try:
            lines.decode()  # Arrow accepts invalid UTF-8 as text
        except UnicodeDecodeError as error:
            raise Unclear from error
        table = pyarrow.csv.read_csv(
            io.BytesIO(lines),
            pyarrow.csv.ReadOptions(use_threads=False, block_size=len(lines) + 1, column_names=self.header),
            pyarrow.csv.ParseOptions(delimiter=self.delimiter, quote_char=self.quote or False),
            pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(of_lines, pa.string()), include_columns=of_lines),
        )
        return [
            table[name].combine_chunks() if name in of_lines else pa.repeat(self.partition[name or ""], len(table))
            for name in names
        ]

    def members_of(self, line: bytes, mapping: RowMapping) -> list[Any]:
        row = self.partition | self.row(line)
        return [
            row[name] if (name := _column_name(path, mapping, self.fields())) is not None else searched(compiled, row)
            for (_, path), compiled in zip(mapping.names, mapping.paths, strict=True)
        ]

    def is_complete(self, line: bytes) -> bool:
        return False  # the last value may be incomplete

    def has_odd_line(self, lines: bytes) -> bool:
        """Return whether a line has an odd number of quotes: one of them may be open at the line's end."""
        if not self.quote or self.quote.encode() not in lines:
            return False
        units = np.frombuffer(lines, np.uint8)
        quotes, ends = np.flatnonzero(units == ord(self.quote)), np.flatnonzero(units == 10)
        # the number of quotes before each end of a line: all are even only if those of each line are
        return len(quotes) % 2 == 1 or bool((np.searchsorted(quotes, ends) & 1).any())


def _column_name(path: str, mapping: RowMapping, there: Sequence[str]) -> str | None:
    """Return the column of a path: one of exactly this name, or that of the unquoted name."""
    if path in there:
        return path
    names = mapping.names_of_path(path)
    return names[0] if names is not None and len(names) == 1 and names[0] in there else None


class TextReading(RowReading):
    """One reading of a part of a text."""

    def __init__(self, text: TextFile, mapping: RowMapping, position: int, end: int) -> None:
        self._text, self._mapping, self._position, self._bound = text, mapping, position, end
        self._sums = BlockSums()
        self._lines = 0
        self.lines_before = None if position else 0
        self._packed: PointedText | None = None
        self.end = position

    @property
    def points(self) -> list[RestartPoint]:
        return [] if self._packed is None else self._packed.points

    def batches(self, start: int) -> Iterator[RowBatch]:
        text = self._text
        with decompressed(text.file, text.compression, noting=True) as handle:
            self._packed = handle if isinstance(handle, PointedText) else None
            self._skip_to(handle, self._position)
            carried, is_last = b"", False
            while not is_last:
                piece = read_text(text.file, handle, text.compression, BLOCK_BYTES)
                data, is_last = carried + piece, len(piece) < BLOCK_BYTES
                cut = data.rfind(b"\n", 0 if is_last else len(carried)) + 1
                if self.end + cut > self._bound:
                    # the rest is of a further segment
                    cut, is_last = data.rfind(b"\n", 0, self._bound - self.end) + 1, True
                    cut -= self._cut_bytes(data[:cut])
                elif is_last:
                    cut -= self._cut_bytes(data[:cut])
                    last = data[cut:]
                    self.is_whole = True
                    if last.strip() and self.end + len(data) <= self._bound:
                        if text.compression is not None or text.is_complete(last):
                            cut = len(data)
                        else:
                            self.held_back_bytes = len(last)
                else:
                    cut -= self._cut_bytes(data[:cut])
                if not is_last and len(data) - cut > MAX_ROW_BYTES:
                    at = self.end + cut
                    raise InvalidArgument(
                        f"{text.file}: the line at byte {at:,} is longer than {MAX_ROW_BYTES:,} bytes"
                    )
                block, carried = data[:cut], data[cut:]
                newlines = np.flatnonzero(np.frombuffer(block, np.uint8) == 10)
                self._sums.update(block, newlines)
                begin, self.end = self.end, self.end + len(block)
                # of an earlier run, or a header
                skip = min(len(block), max(0, max(start, text.begin) - begin))
                skipped_lines = int(np.searchsorted(newlines, skip))
                self._lines += skipped_lines
                if len(block) > skip:
                    before = None if self.lines_before is None else self.lines_before + self._lines
                    rows, begin = block[skip:], begin + skip
                    batch = self._batch(rows, begin, newlines[skipped_lines:] - skip)
                    yield replace(batch, begin=begin, source=rows, lines_before=before)
        self.blocks = self._sums.blocks
        self.lines = None if self.lines_before is None else (self.lines_before, self._sums.lines)

    def _cut_bytes(self, lines: bytes) -> int:
        """Return the bytes of a last row that also has the next line."""
        if not isinstance(self._text, CsvFile) or not self._text.has_odd_line(lines):
            return 0
        last = b""
        for row in self._text.split(lines):
            last = row
        return len(last) if self._text.is_cut(last) else 0

    def _skip_to(self, handle: IO[bytes], position: int) -> None:
        if self._text.compression is None:
            handle.seek(position)
            return
        self.lines_before = 0
        while position and (
            piece := read_text(self._text.file, handle, self._text.compression, min(position, BLOCK_BYTES))
        ):
            position -= len(piece)
            self.lines_before += piece.count(b"\n")

    def _batch(self, block: bytes, begin: int, newlines: npt.NDArray[np.int64]) -> RowBatch:
        """Return the rows of a block of whole lines, which end at `newlines`. Memory: the block some times."""
        text, mapping = self._text, self._mapping
        units, ends = np.frombuffer(block, np.uint8), newlines + 1
        if not block.endswith(b"\n"):
            ends = np.append(ends, len(block))
        self._lines += len(ends)
        starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        # without the newline; lines of one carriage return are blank, too
        sizes = ends - starts - (units[ends - 1] == 10)
        is_blank = (sizes == 0) | ((sizes == 1) & (units[starts] == 13))
        if is_blank.any():
            starts, sizes = starts[~is_blank], sizes[~is_blank]
        end = begin + len(block)
        if not text.are_plain(units, starts, sizes):
            return self._slowly(block, begin)
        try:
            columns = text.members(block, mapping)
        except (Unclear, pa.ArrowException):
            return self._slowly(block, begin)
        if len(columns[0]) != len(starts):
            return self._slowly(block, begin)

        def may_be_minus_zero(rows: npt.NDArray[np.int64]) -> bool:
            return any(
                _MINUS_ZERO.search(block, at, at + size)
                for at, size in zip(starts[rows].tolist(), sizes[rows].tolist(), strict=True)
            )

        batch = batch_of_columns(columns, mapping, begin + starts, sizes, end, may_be_minus_zero)
        return batch or self._slowly(block, begin)

    def _slowly(self, block: bytes, begin: int) -> RowBatch:
        rows, position = SingleRows(), begin
        number = self._lines - block.count(b"\n") - (not block.endswith(b"\n"))
        for line in self._text.split(block):
            start, position = position, position + len(line)
            number += 1
            at, number = number, number + line.rstrip(b"\n").count(b"\n")
            if not line.strip():
                continue
            try:
                members = self._text.members_of(line, self._mapping)
                rows.add(members, self._mapping, start, len(line.rstrip(b"\n")))
            except InvalidArgument as error:
                before = self.lines_before
                where = f"byte {start:,}" if before is None else f"line {before + at:,} (byte {start:,})"
                rows.bad.append(BadRow(where, str(error)))
        return rows.batch(position, self._mapping)
