"""Reads the rows of text, compressed or not: NDJSON and CSV.

Text is read in blocks of whole rows; a block that the quick parser refuses is read row by row, so that a bad row is
named. Memory: some blocks. One thread.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import gzip
import io
import lzma
import re
import zlib
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
import pyarrow.json

from tiered_index.base.kernels import GzipFile, crc32, gzip_error
from tiered_index.connectors.files.rows.batch import (
    BYTE_ORDER_MARK,
    MOST_BAD_ROWS,
    UNREADABLE,
    Damage,
    RowBatch,
    RowFile,
    RowReading,
    SingleRows,
    batch_of_columns,
)
from tiered_index.connectors.files.rows.columns import MAX_ROW_BYTES
from tiered_index.connectors.files.rows.fields import json_object
from tiered_index.connectors.files.rows.mapping import Dialect, RowMapping
from tiered_index.connectors.files.rows.places import Place, Stdin
from tiered_index.connectors.files.rows.restart import PointedText, RestartPoint, packed_text
from tiered_index.connectors.files.rows.values import distinct_names, object_as_json
from tiered_index.connectors.json_paths import Unclear, searched
from tiered_index.errors import CorruptFile, InvalidArgument, TieredIndexError, listed
from tiered_index.format.segments.segment import MOST_TEXT_RATIO

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
# a row that is null: Arrow's parser takes it for an object, and crashes if it is the first
_NULL_ROW = re.compile(rb"^(\xef\xbb\xbf)?[ \t\r]*null", re.MULTILINE)
# lines of blanks alone, any number of them: a packed file of 1 MB may have a billion
_BLANK_LINES = re.compile(rb"(?:[ \t\r\v\f]*\n)+")
_IS_BLANK = np.zeros(256, bool)
_IS_BLANK[list(b" \t\n\r\v\f")] = True
# lines that begin with a blank, and are looked at one by one
_FEW_LINES = 1000
_BLANK_LINE = re.compile(rb"^[ \t\r\v\f]*\n", re.MULTILINE)
# most bytes of a bad line that is known again, and most such lines: of those in one pattern, and of all
_KNOWN_BYTES, _KNOWN_LINES, _MOST_KNOWN_LINES = 64, 64, 1 << 16
# lines behind a quote that is not closed that are looked at
_LOOKED_LINES = 100


_RETURNS = "its lines end with a carriage return alone: write newlines, for example with `tr '\\r' '\\n' < FILE > NEW`"
# an object behind another one, on a line of its own
_OBJECTS = re.compile(rb"\}[ \t]*\r[ \t]*\{")
# a byte that is not UTF-8, as Python reads it
_STRAY_BYTE = re.compile("[\udc80-\udcff]")


def _has_stray_byte(member: Any) -> bool:
    if isinstance(member, str):
        return _STRAY_BYTE.search(member) is not None
    return isinstance(member, list) and any(map(_has_stray_byte, member))


class KnownBadLines:
    """Short bad lines, which are judged once: a packed file of 1 MB may have a billion, but few different ones."""

    def __init__(self) -> None:
        # each with its problem
        self._problems: dict[bytes, str] = {}
        self._lines: re.Pattern[bytes] | None = None

    def add(self, line: bytes, problem: str) -> None:
        """Add a line, with its newline."""
        if len(line) > _KNOWN_BYTES or len(self._problems) == _MOST_KNOWN_LINES or not line.endswith(b"\n"):
            return
        self._problems[line] = problem
        if len(self._problems) <= _KNOWN_LINES:
            # without a way back, which would need memory for each line
            self._lines = re.compile(rb"(?:[ \t\r\v\f]*\n|" + b"|".join(map(re.escape, self._problems)) + rb")++")

    def problem(self, line: bytes) -> str | None:
        """Return the problem of a line; None: it is not known."""
        return self._problems.get(line)

    def end(self, text: bytes, at: int) -> int:
        """Return the end of the known and the blank lines from a place of a text on."""
        lines = None if self._lines is None else self._lines.match(text, at)
        return at if lines is None else lines.end()


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

    def copy(self) -> BlockSums:
        """Return the sums so far, which later bytes do not change."""
        other = copy.copy(self)
        other._sums, other._lines = [*self._sums], [*self._lines]
        return other

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
def decompressed(
    file: Place, compression: str | None, *, noting: bool = False, to_damage: bool = False
) -> Iterator[IO[bytes]]:
    """Yield the text of a file. Read it by `read_text`, or `text_before_damage` if it is wanted up `to_damage`.

    `noting`: it is read as a whole. So its next pieces are read ahead, and it has `points` if it may have some.
    """
    with file.ahead() if noting and not isinstance(file, Stdin) else file.open() as raw:
        if compression == "gzip" and not (noting or to_damage):
            yield cast(IO[bytes], GzipFile(fileobj=raw))
        elif compression is not None:
            yield cast(IO[bytes], packed_text(raw, compression))
        else:
            yield raw


def read_text(file: Place, handle: IO[bytes], compression: str | None, size: int) -> bytes:
    """Return the next bytes of an open text, fewer only at its end.

    Raises `CorruptFile` for damage, and `InvalidArgument` if the disk does not give them.
    """
    data, damage = text_before_damage(file, handle, compression, size)
    if damage is not None:
        raise damage
    return data


def text_before_damage(
    file: Place, handle: IO[bytes], compression: str | None, size: int
) -> tuple[bytes, TieredIndexError | None]:
    """Return the next bytes of an open text, fewer only at its end or before damage, and the damage."""
    pieces, left = list[bytes](), size
    damage: TieredIndexError | None = None
    try:
        while left and (piece := handle.read(left)):
            pieces.append(piece)
            left -= len(piece)
    except _DAMAGE as error:
        if compression is None:
            damage = InvalidArgument(f"{file} can't be read: {error}")
        else:
            damage = CorruptFile(str(file), f"damaged {compression} file: {error}")
        damage.__cause__ = error
    return b"".join(pieces) if len(pieces) != 1 else pieces[0], damage


# a compressed text has about so many times the bytes of its file: if it has more, a further segment begins
_RATIO, _LEAST_BOUND = 64, 4 * MAX_ROW_BYTES


class TextFile(RowFile):
    """NDJSON or CSV. `size_bytes` are those of the file; 0: its text has no row."""

    def __init__(self, file: Place, compression: str | None, size_bytes: int) -> None:
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
        """The first whole lines; the first one, if it is longer than 64 KiB, or of stdin."""
        if isinstance(self.file, Stdin):
            return self.file.first_line(MAX_ROW_BYTES)
        with decompressed(self.file, self.compression, to_damage=True) as handle:
            # what is behind the damage of a file is no part of its head
            data, _ = text_before_damage(self.file, handle, self.compression, HEAD_BYTES)
            if b"\n" in data or len(data) < HEAD_BYTES:
                return data[: data.rfind(b"\n") + 1] or data
            data += text_before_damage(self.file, handle, self.compression, max(0, MAX_ROW_BYTES - HEAD_BYTES))[0]
            return data[: data.find(b"\n") + 1] or data

    @property
    def begin(self) -> int:
        """The position of the first row."""
        return 0

    def table(self, lines: bytes, kinds: Mapping[str, pa.DataType]) -> pa.Table:
        """Return the columns of these types of whole lines. Raises `Unclear`, an `ArrowException`."""
        try:
            lines.decode()  # Arrow accepts invalid UTF-8 as text
        except UnicodeDecodeError as error:
            raise Unclear from error
        return self.columns(lines, kinds)

    @abstractmethod
    def columns(self, lines: bytes, kinds: Mapping[str, pa.DataType]) -> pa.Table:
        """As `table`, of valid UTF-8."""

    @abstractmethod
    def row(self, line: bytes) -> dict[str, Any]:
        """Return the fields of a row. Raises `InvalidArgument`."""

    def shown_line(self, line: bytes, position: int) -> bytes:
        """Return the row of a line at a position as it is shown.

        A line of NDJSON is shown without a carriage return at its end, and a byte order mark at byte 0.
        """
        return (line if position else line.removeprefix(BYTE_ORDER_MARK)).removesuffix(b"\r")

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield all rows, each with its line for people. Raises `InvalidArgument`, which names the line."""
        for block in TextBlocks(self, is_closed=True).read():
            if block.too_long is not None:
                raise InvalidArgument(f"{self.file}: line {block.lines + 1:,}: {too_long(block.too_long)}")
            for number, at, line in self.numbered(block.data, block.begin, block.lines + 1):
                if at >= self.begin:
                    where = f"line {number:,}"
                    try:
                        yield where, self.row(line)
                    except InvalidArgument as error:
                        raise InvalidArgument(f"{self.file}: {where}: {error}") from error

    def numbered(
        self, lines: bytes, position: int, number: int, known: KnownBadLines | None = None
    ) -> Iterator[tuple[int, int, bytes]]:
        """Yield each row of whole lines that is not blank, with the number of its first line and its position.

        Bad lines that are known are yielded together if they follow one another.
        """
        for row in self.split(lines, known):
            if row.strip():
                yield number, position, row
            position, number = position + len(row), number + row.count(b"\n")

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
        return bool(units[starts].all()) and int(sizes.max(initial=0)) <= MAX_ROW_BYTES

    def batch(
        self, block: TextBlock, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], mapping: RowMapping
    ) -> RowBatch | None:
        """Return the rows of a block, whose lines are at `starts` (i64, n); None: they must be read by themselves."""
        data = block.data
        if not self.are_plain(np.frombuffer(data, np.uint8), starts, sizes):
            return None
        try:
            columns = self.members(data, mapping)
        except (Unclear, pa.ArrowException):
            return None
        if len(columns[0]) != len(starts):
            return None

        def may_be_minus_zero(rows: npt.NDArray[np.int64]) -> bool:
            return any(
                _MINUS_ZERO.search(data, at, at + size)
                for at, size in zip(starts[rows].tolist(), sizes[rows].tolist(), strict=True)
            )

        end = block.begin + len(data)
        return batch_of_columns(columns, mapping, block.begin + starts, sizes, end, may_be_minus_zero)

    @abstractmethod
    def is_complete(self, line: bytes) -> bool:
        """Return whether a last line without newline is a whole row."""

    def split(self, lines: bytes, known: KnownBadLines | None = None, *, is_end: bool = True) -> Iterator[bytes]:
        """Yield the rows of whole lines, and lines that are blank or known as bad together.

        All but the last row have all of their lines. `is_end`: the text ends there.
        """
        return _lines_of(lines, known)

    def is_alone(self, line: bytes) -> bool:
        """Return whether a line is a row by itself, whatever lines are around it."""
        return True

    def never_ends(self, last: bytes) -> str | None:
        """Return why a last row, which is not whole, will never be; None: the rest of it may still be written."""
        return _RETURNS if has_returns_alone(last) else None

    def is_cut(self, row: bytes) -> bool:
        """Return whether the last row that `split` yielded also has the next line."""
        return False

    def is_one_row(self, text: bytes) -> bool:
        """Return whether a text without the newline at its end is one whole row, not several and not a part of one."""
        return bool(text.strip()) and len([*self.split(text + b"\n")]) == 1 and not self.is_cut(text)


def zeros_before(data: bytes) -> int:
    """Return the number of bytes that are 0 at the begin of data: there may be gigabytes of them."""
    is_other = np.frombuffer(data, np.bool_)
    return int(is_other.argmax()) if is_other.any() else len(data)


def has_returns_alone(text: bytes) -> bool:
    """Return whether lines of a text without a newline end with a carriage return alone."""
    at = text.find(b"\r")
    is_of_cells = 0 <= at < len(text.rstrip(b"\r")) and b'"' not in text[:at]
    return is_of_cells or _OBJECTS.search(text) is not None


class NdjsonFile(TextFile):
    """One object a line."""

    kind = "ndjson"

    def fields(self) -> list[str]:
        return [*dict.fromkeys([*self.first_row(), *self.partition])]

    def first_row(self) -> list[str]:
        """Return the members of the first row; none, if there is no row. Raises `InvalidArgument`."""
        line = self.head.lstrip().partition(b"\n")[0]
        return [*json_object(line, f"{self.file}: ")] if line else []

    def members(self, lines: bytes, mapping: RowMapping) -> list[Sequence[Any] | pa.Array]:
        if mapping.reader is None:
            raise Unclear
        columns = mapping.reader.members_of_lines(lines)
        for number, (_, path) in enumerate(mapping.names if self.partition else ()):
            if (name := _column_name(path, mapping, [*self.partition])) is not None:
                value = self.partition[name]
                columns[number] = [value if member is None else member for member in columns[number]]
        return [*columns]

    def columns(self, lines: bytes, kinds: Mapping[str, pa.DataType]) -> pa.Table:
        if b"null" in lines and _NULL_ROW.search(lines):
            raise Unclear
        return pyarrow.json.read_json(
            io.BytesIO(lines),
            pyarrow.json.ReadOptions(use_threads=False, block_size=len(lines) + 1),
            pyarrow.json.ParseOptions(explicit_schema=pa.schema(kinds), unexpected_field_behavior="ignore"),
        )

    def row(self, line: bytes) -> dict[str, Any]:
        return json_object(line)

    def members_of(self, line: bytes, mapping: RowMapping) -> list[Any]:
        text = ""
        try:
            line.decode()
            document = json_object(line)
        except UnicodeDecodeError:
            text = line.removeprefix(BYTE_ORDER_MARK).decode(errors="surrogateescape")
            document = json_object(text)
        for name, value in self.partition.items():
            if document.get(name) is None:
                document[name] = value
        members = [searched(path, document) for path in mapping.paths]
        # other fields may have any bytes
        if _STRAY_BYTE.search(text) and any(map(_has_stray_byte, members)):
            raise InvalidArgument("not UTF-8")
        return members

    def shown_line(self, line: bytes, position: int) -> bytes:
        """Return the line as `TextFile.shown_line`. Bytes that are not UTF-8 are escapes such as ``\\\\xff``."""
        shown = super().shown_line(line, position)
        text = shown.decode(errors="surrogateescape")
        return _STRAY_BYTE.sub(lambda byte: rf"\\x{ord(byte[0]) - 0xDC00:02x}", text).encode()

    def are_plain(
        self, units: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
    ) -> bool:
        # JSON has no place where "}", a newline and "{" follow one another, so such lines have whole objects
        ends = starts + sizes - 1
        ends = ends - (units[ends] == 13)
        is_object = (units[starts] == ord("{")) & (units[ends] == ord("}"))
        return bool(is_object.all()) and super().are_plain(units, starts, sizes)

    def is_complete(self, line: bytes) -> bool:
        with contextlib.suppress(InvalidArgument):
            json_object(line)
            return line.rstrip().endswith(b"}")
        return False


# most bytes of a record of several lines
_MOST_QUOTED = 1 << 20
_OPEN = "a quote is not closed"
# the usual errors of module `csv`, and what they mean here
_TOLD = {
    "unexpected end of data": _OPEN,
    "' expected after '": "'\"' in a quoted cell is not doubled",
    "new-line character": "a line ends with \\r alone, or a cell with \\r has no quotes",
}


class CsvFile(TextFile):
    """A header, and records. A value in quotes may have newlines, unless `has_short_records` says that none has.

    If a dialect is given, the format names it: ``csv:``, and delimiter and quote as two hexadecimal digits each.
    """

    kind = "csv"
    has_short_records = False

    def __init__(self, file: Place, compression: str | None, size_bytes: int, dialect: Dialect | None = None) -> None:
        super().__init__(file, compression, size_bytes)
        begun = self.head.lstrip(b"\r\n")
        header, mark, _ = begun.partition(b"\n")
        if not mark and len(header) >= MAX_ROW_BYTES:
            raise InvalidArgument(f"{file}: the first line is longer than {MAX_ROW_BYTES:,} bytes")
        self._begin = len(self.head) - len(begun) + len(header) + len(mark)
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

    def lacking(self, mapping: RowMapping) -> dict[tuple[str, str], InvalidArgument | None]:
        fields = self.fields()
        return dict.fromkeys(field for field in mapping.names if _column_name(field[1], mapping, fields) is None)

    def reading(self, mapping: RowMapping, position: int, end: int, *, whole: bool = False) -> TextReading:
        # an expression may have a value of its own
        needed = [field for field in mapping.names[len(mapping.keys) :] if mapping.names_of_path(field[1])]
        if lacking := [field for field in needed if field in self.lacking(mapping)]:
            there = listed(self.fields())
            raise InvalidArgument(f"{self.file} has no column for {mapping.shown(lacking)}; it has {there}")
        return super().reading(mapping, position, end, whole=whole)

    def _cells(self, line: str) -> list[str]:
        before = csv.field_size_limit(MAX_ROW_BYTES)
        try:
            quoting = csv.QUOTE_MINIMAL if self.quote else csv.QUOTE_NONE
            marks: dict[str, Any] = {"delimiter": self.delimiter, "quotechar": self.quote or None, "quoting": quoting}
            return next(csv.reader([line], strict=True, **marks), [])
        except csv.Error as error:
            problem = str(error)
            told = next((ours for theirs, ours in _TOLD.items() if theirs in problem), problem)
            raise InvalidArgument(f"not CSV: {told}") from error
        finally:
            csv.field_size_limit(before)

    def split(self, lines: bytes, known: KnownBadLines | None = None, *, is_end: bool = True) -> Iterator[bytes]:
        if self.has_short_records or not self.has_odd_line(lines):
            yield from _lines_of(lines, known)
            return
        quote = self.quote.encode()
        # the lines of a record whose quote is open. After `_MOST_QUOTED` bytes its first line is a bad row
        held: list[bytes] = []
        held_bytes, waiting = 0, deque[bytes]()
        stream = _lines_of(lines, known)
        while True:
            line = waiting.popleft() if waiting else next(stream, b"")
            if not line and is_end and self._is_stray(held):
                # the rows behind it are no part of a cell
                yield held[0]
                waiting.extend(held[1:])
                held, held_bytes = [], 0
                continue
            if not line:
                break
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

    def _is_stray(self, held: Sequence[bytes]) -> bool:
        """Return whether lines begin with one whose quote is not closed by mistake: most others are whole records."""
        others = [line for line in held[1 : 1 + _LOOKED_LINES] if line.strip() and line.endswith(b"\n")]
        return len(self.header) > 1 < len(others) <= 2 * sum(map(self._is_record, others))

    def _is_record(self, line: bytes) -> bool:
        with contextlib.suppress(InvalidArgument):
            return len(self._cells(line.decode(errors="replace").rstrip("\r\n"))) == len(self.header)
        return False

    def is_alone(self, line: bytes) -> bool:
        return not self.quote or self.quote.encode() not in line

    def never_ends(self, last: bytes) -> str | None:
        return _OPEN if b"\n" in last else super().never_ends(last)

    def is_cut(self, row: bytes) -> bool:
        is_even = not self.quote or row.count(self.quote.encode()) % 2 == 0
        if self.has_short_records or is_even or len(row) > _MOST_QUOTED:
            return False
        try:
            self._cells(row.decode(errors="replace").rstrip("\r\n"))
        except InvalidArgument as error:
            return _OPEN in str(error)
        return False

    def row(self, line: bytes) -> dict[str, str]:
        try:
            cells = self._cells(line.decode().rstrip("\r\n"))
        except UnicodeDecodeError as error:
            raise InvalidArgument("not UTF-8") from error
        if len(cells) != len(self.header):
            raise InvalidArgument(f"{len(cells)} columns, not {len(self.header)}")
        return dict(zip(self.header, cells, strict=True))

    def shown_line(self, line: bytes, position: int) -> bytes:
        """Return a row as a JSON object with the names of the header; a line that is none, as it is."""
        try:
            cells = self._cells(line.decode(errors="backslashreplace").rstrip("\r\n"))
        except InvalidArgument:
            cells = []
        if len(cells) != len(self.header):
            return super().shown_line(line, position)
        return object_as_json(dict(zip(self._names, cells, strict=True)))

    @cached_property
    def _names(self) -> list[str]:
        return distinct_names(self.header)

    def columns(self, lines: bytes, kinds: Mapping[str, pa.DataType]) -> pa.Table:
        if self.has_odd_line(lines):
            raise Unclear
        return pyarrow.csv.read_csv(
            io.BytesIO(lines),
            pyarrow.csv.ReadOptions(use_threads=False, block_size=len(lines) + 1, column_names=self.header),
            pyarrow.csv.ParseOptions(delimiter=self.delimiter, quote_char=self.quote or False),
            pyarrow.csv.ConvertOptions(column_types=kinds, include_columns=[*kinds]),
        )

    def members(self, lines: bytes, mapping: RowMapping) -> list[Sequence[Any] | pa.Array]:
        fields = self.fields()
        names = [_column_name(path, mapping, fields) for _, path in mapping.names]
        of_lines = [name for name in dict.fromkeys(names) if name is not None and name in self.header]
        paths = [path for name, (_, path) in zip(names, mapping.names, strict=True) if name is None]
        # a column that is not there has no keys; an expression may have some
        has_others = any(mapping.names_of_path(path) is None for path in paths)
        if has_others or not of_lines or len(set(self.header)) != len(self.header):
            raise Unclear
        table = self.table(lines, dict.fromkeys(of_lines, pa.string()))
        values: dict[str | None, Any] = {None: pa.nulls(len(table))}
        values |= {name: pa.repeat(value, len(table)) for name, value in self.partition.items()}
        values |= {name: table[name].combine_chunks() for name in of_lines}
        return [values[name] for name in names]

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


def _lines_of(text: bytes, known: KnownBadLines | None = None) -> Iterator[bytes]:
    """Yield the lines of a text, and lines that are blank or known as bad, and follow one another, together."""
    at = 0
    while at < len(text):
        end = at if known is None else known.end(text, at)
        if end == at:
            blank = _BLANK_LINES.match(text, at)
            end = blank.end() if blank is not None else text.find(b"\n", at) + 1 or len(text)
        yield text[at:end]
        at = end


def _column_name(path: str, mapping: RowMapping, there: Sequence[str]) -> str | None:
    """Return the column of a path: one of exactly this name, or that of the unquoted name."""
    if path in there:
        return path
    names = mapping.names_of_path(path)
    return names[0] if names is not None and len(names) == 1 and names[0] in there else None


@dataclass(frozen=True, slots=True)
class TextBlock:
    """Whole lines of a text from position `begin` on, with the places of their newlines.

    `lines` is the number of lines of the reading before them. `too_long` is the position of a line that is longer than
    a row may be: then the bytes are a part of it, and the last one if it `is_end`.
    """

    begin: int
    data: bytes
    newlines: npt.NDArray[np.int64]
    lines: int
    too_long: int | None = None
    is_end: bool = True

    def without(self, size: int) -> TextBlock:
        """Return the block without its first bytes, which are whole lines."""
        if not size:
            return self
        skipped = int(np.searchsorted(self.newlines, size))
        newlines = self.newlines[skipped:] - size
        return TextBlock(self.begin + size, self.data[size:], newlines, self.lines + skipped)

    def places(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return where each line that is not blank begins in the block, and its bytes without the newline."""
        units, ends = np.frombuffer(self.data, np.uint8), self.newlines + 1
        if not self.data.endswith(b"\n"):
            ends = np.append(ends, len(self.data))
        starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        sizes = ends - starts - (units[ends - 1] == 10)
        is_filled = sizes > 0
        # lines of blanks are blank, too: no other line begins with one, as a rule
        rows = np.flatnonzero(is_filled & (units[starts] <= 32))
        if len(rows) <= _FEW_LINES:
            for row in rows.tolist():
                is_filled[row] = bool(self.data[starts[row] : starts[row] + sizes[row]].strip())
        else:
            # a line is blank if its first byte that is no blank is behind it
            filled = np.append(np.flatnonzero(~_IS_BLANK[units]), len(units))
            is_filled[rows] = filled[np.searchsorted(filled, starts[rows])] < starts[rows] + sizes[rows]
        return (starts, sizes) if is_filled.all() else (starts[is_filled], sizes[is_filled])


_NO_BOUND = 1 << 62


class TextBlocks:
    """The whole rows of a part of a text, in blocks.

    `noting`: restart points are noted, and the next bytes are read ahead. `is_closed`: nothing more will be written, so
    that the last line is a row. `goes_on`: damage does not raise an error, but ends the text. `end`, `is_whole`,
    `held_back_bytes`, `held_back_lines`, `damage` and `lines_before` are those of `RowReading`.
    """

    damage: Damage | None = None

    def __init__(
        self,
        text: TextFile,
        position: int = 0,
        bound: int = _NO_BOUND,
        *,
        noting: bool = False,
        is_closed: bool = False,
        goes_on: bool = False,
    ) -> None:
        self._text, self._position, self._bound = text, position, bound
        self._is_noting, self._is_closed = noting, is_closed or text.compression is not None
        self._goes_on = goes_on
        self._error: TieredIndexError | None = None
        self._endless: str | None = None
        self.lines_before = None if position else 0
        self.end, self.is_whole, self.held_back_bytes, self.held_back_lines = position, False, 0, 0
        self.before = b""
        """The byte before the position, once the first block was read; empty if the text has none there."""
        self._packed: PointedText | None = None
        self._lines = 0

    @property
    def points(self) -> list[RestartPoint]:
        """As `RowReading.points`."""
        return [] if self._packed is None else self._packed.points

    def read(self) -> Iterator[TextBlock]:
        """Yield the rows that end up to the bound. Raises `CorruptFile`."""
        text = self._text
        with contextlib.ExitStack() as stack:
            handle = self._opened(stack)
            self._skip(handle)
            # the bytes of a line that is too long, as far as it was read
            carried, is_last, long_bytes = b"", False, 0
            while not is_last:
                piece = self._next(handle, BLOCK_BYTES)
                # stdin gives what is there
                is_last = len(piece) < (1 if isinstance(text.file, Stdin) else BLOCK_BYTES)
                data, searched = carried + piece, len(carried)
                if long_bytes:
                    at = data.find(b"\n") + 1
                    is_end = bool(at) or (is_last and self._is_closed and self._error is None)
                    part = data[:at] if at else data
                    if self.end + long_bytes + len(part) > self._bound:
                        return
                    yield self._part(part, long_bytes, is_end=is_end)
                    long_bytes += len(part)
                    if not is_end:
                        continue
                    self.end, long_bytes, data, searched = self.end + long_bytes, 0, data[len(part) :], 0
                cut = self._cut(data, 0 if is_last else searched, is_last=is_last)
                is_last = is_last or self.end + len(data) > self._bound
                yield from self._block(data[:cut])
                carried = data[cut:]
                if not is_last and len(carried) > MAX_ROW_BYTES:
                    # lines before it whose quote is open, and bytes that are 0
                    cut = carried.rfind(b"\n") + 1
                    cut = cut or zeros_before(carried)
                    yield from self._block(carried[:cut])
                    carried = carried[cut:]
                    if len(carried) > MAX_ROW_BYTES:
                        yield self._part(carried, 0, is_end=False)
                        carried, long_bytes = b"", len(carried)
            if long_bytes:
                self.is_whole, self.held_back_bytes = True, long_bytes
        if self._error is not None and self.is_whole:
            self.held_back_bytes = self.held_back_lines = 0
        elif self._endless is not None and self.is_whole:
            self._error = CorruptFile(str(text.file), self._endless)
        if self._error is not None and self.is_whole:
            before = None if self.lines_before is None else self.lines_before + self._lines
            self.damage = Damage(self._error, self.end, where_of(before, self.end))

    def _opened(self, stack: contextlib.ExitStack) -> IO[bytes]:
        text = self._text
        try:
            handle = stack.enter_context(decompressed(text.file, text.compression, noting=self._is_noting))
        except UNREADABLE as error:
            if not self._goes_on:
                raise
            self._error = error
            return io.BytesIO()
        self._packed = handle if isinstance(handle, PointedText) else None
        return handle

    def _cut(self, data: bytes, searched: int, *, is_last: bool) -> int:
        """Return the bytes of whole rows at the begin of data, which has no newline before `searched`."""
        cut = data.rfind(b"\n", searched) + 1
        if self.end + cut > self._bound:
            # the rest is of a further segment
            cut = data.rfind(b"\n", 0, self._bound - self.end) + 1
            return cut - self._cut_bytes(data[:cut], is_end=self.end + cut == self._bound)
        cut -= self._cut_bytes(data[:cut], is_end=is_last)
        if is_last:
            last = data[cut:]
            self.is_whole = True
            if last.strip() and self.end + len(data) <= self._bound:
                if (self._is_closed and self._error is None) or self._text.is_complete(last):
                    return len(data)
                self.held_back_bytes, self.held_back_lines = len(last), last.count(b"\n")
                self._endless = self._text.never_ends(last)
        return cut

    def _block(self, data: bytes) -> Iterator[TextBlock]:
        """Yield the next rows, and move behind them."""
        if data:
            begin, self.end = self.end, self.end + len(data)
            newlines = np.flatnonzero(np.frombuffer(data, np.uint8) == 10)
            yield TextBlock(begin, data, newlines, self._lines)
            self._lines += len(newlines)

    def _part(self, data: bytes, at: int, *, is_end: bool) -> TextBlock:
        """Return the next bytes of a line that is too long, from its byte `at` on."""
        has_newline = data.endswith(b"\n")
        newlines = np.array([len(data) - 1] if has_newline else [], np.int64)
        block = TextBlock(self.end + at, data, newlines, self._lines, self.end, is_end)
        self._lines += has_newline
        return block

    def _next(self, handle: IO[bytes], size: int) -> bytes:
        """Return the next bytes of the text, fewer only at its end; of stdin those that are there."""
        text = self._text
        if isinstance(text.file, Stdin):
            return handle.read(size)
        if not self._goes_on:
            return read_text(text.file, handle, text.compression, size)
        if self._error is not None:
            return b""
        try:
            data, self._error = text_before_damage(text.file, handle, text.compression, size)
        except UNREADABLE as error:
            data, self._error = b"", error
        return data

    def _skip(self, handle: IO[bytes]) -> None:
        """Go to the position."""
        left = self._position
        if self._text.compression is None and not isinstance(self._text.file, Stdin):
            handle.seek(max(0, left - 1))
            self.before = self._next(handle, min(1, left))
            return
        self.lines_before = 0
        while left and (piece := self._next(handle, min(left, BLOCK_BYTES))):
            left -= len(piece)
            self.lines_before += piece.count(b"\n")
            self.before = b"" if left else piece[-1:]

    def _cut_bytes(self, lines: bytes, *, is_end: bool) -> int:
        """Return the bytes of a last row that also has the next line. `is_end`: there may be none."""
        if not isinstance(self._text, CsvFile) or not self._text.has_odd_line(lines):
            return 0
        last = b""
        for row in self._text.split(lines, is_end=is_end):
            last = row
        return len(last) if self._text.is_cut(last) else 0


class TextReading(TextBlocks, RowReading):
    """One reading of a part of a text, with checksums."""

    def __init__(self, text: TextFile, mapping: RowMapping, position: int, end: int) -> None:
        super().__init__(text, position, end, noting=True, goes_on=True)
        self._mapping = mapping
        self._known = KnownBadLines()

    def batches(self, start: int) -> Iterator[RowBatch]:
        sums, text, before_long = BlockSums(), self._text, None
        for block in self.read():
            if block.too_long is not None and before_long is None:
                before_long = sums.copy()
            if text.compression is not None and self._is_too_much(block):
                break
            sums.update(block.data, block.newlines)
            before = None if self.lines_before is None else self.lines_before + block.lines
            end = block.begin + len(block.data)
            if block.too_long is not None:
                if block.is_end:
                    before_long = None
                    if end > start:
                        bad = SingleRows()
                        bad.refuse(where_of(before, block.too_long), too_long(block.too_long), block.too_long)
                        yield bad.batch(end, self._mapping)
                continue
            # of an earlier run, or a header
            skip = min(len(block.data), max(0, max(start, text.begin) - block.begin))
            if len(block.data) > skip:
                rows = block.without(skip)
                before = None if self.lines_before is None else self.lines_before + rows.lines
                batch = self._batch(rows, before)
                of_text: dict[str, Any] = {"source": rows.data, "lines_before": before}
                of_text["shown_line"] = self._text.shown_line
                yield replace(batch, begin=rows.begin, **of_text)
        # a line that is too long and has no end yet is no part of what was read
        sums = before_long or sums
        self.blocks = sums.blocks
        self.lines = None if self.lines_before is None else (self.lines_before, sums.lines)

    def _is_too_much(self, block: TextBlock) -> bool:
        """Return whether a packed text is so long with a block that it is none of a log. Then it ends before it."""
        text = self._text
        if block.begin + len(block.data) - SUM_BYTES <= text.size_bytes * MOST_TEXT_RATIO:
            return False
        problem = f"its text is more than {MOST_TEXT_RATIO:,} times as long as the file: unpack it if it is a log"
        self.end, self.is_whole = block.begin if block.too_long is None else block.too_long, True
        before = None if self.lines_before is None else self.lines_before + block.lines
        self.damage = Damage(InvalidArgument(f"{text.file}: {problem}"), self.end, where_of(before, self.end))
        return True

    def _batch(self, block: TextBlock, lines_before: int | None) -> RowBatch:
        """Return the rows of a block. Memory: the block some times."""
        text, mapping, data = self._text, self._mapping, block.data
        if not data.strip():
            return SingleRows().batch(block.begin + len(data), mapping)
        if 2 * self._known.end(data, 0) > len(data):
            # it has no row that can be read together with the others
            return self._slowly(block, lines_before)
        return text.batch(block, *block.places(), mapping) or self._slowly(block, lines_before)

    def _slowly(self, block: TextBlock, lines_before: int | None) -> RowBatch:
        rows, known = SingleRows(), self._known
        for number, at, text in self._text.numbered(block.data, block.begin, (lines_before or 0) + 1, known):
            if known.end(text, 0):
                self._refuse_known(rows, text, at, None if lines_before is None else number - 1)
                continue
            line, start = text.rstrip(b"\n"), at
            where = where_of(None if lines_before is None else number - 1, at)
            if (problem := known.problem(text)) is not None:
                rows.refuse(where, problem, at)
                continue
            if line.startswith(b"\0"):
                # a program goes on writing at the same place after another one has truncated the file
                zeros = zeros_before(line)
                line, start = line[zeros:], at + zeros
                rows.refuse(where, f"{zeros:,} bytes that are 0, as after a truncation", at)
                if not line.strip():
                    continue
            try:
                if len(line) > MAX_ROW_BYTES:
                    raise InvalidArgument(too_long(start))
                rows.add(self._text.members_of(line, self._mapping), self._mapping, start, len(line))
            except InvalidArgument as error:
                rows.refuse(where, str(error), at)
                if start == at and self._text.is_alone(text):
                    known.add(text, str(error))
        return rows.batch(block.begin + len(block.data), self._mapping)

    def _refuse_known(self, rows: SingleRows, text: bytes, at: int, lines_before: int | None) -> None:
        """Count lines that are known as bad, or blank, and name the first ones."""
        named, handle, number = 0, io.BytesIO(text), lines_before
        while len(rows.bad) < MOST_BAD_ROWS and (line := handle.readline()):
            if (problem := self._known.problem(line)) is not None:
                rows.refuse(where_of(number, at), problem, at)
                named += 1
            at, number = at + len(line), None if number is None else number + 1
        rows.bad_rows += text.count(b"\n") - len(_BLANK_LINE.findall(text)) - named


def too_long(position: int) -> str:
    """Return the problem of a line that is longer than a row may be."""
    return f"the line at byte {position:,} is longer than {MAX_ROW_BYTES:,} bytes"


def where_of(lines_before: int | None, position: int) -> str:
    """Return the place of a line for people. `lines_before` is the number of lines before it; None: not known."""
    return f"byte {position:,}" if lines_before is None else f"line {lines_before + 1:,} (byte {position:,})"
