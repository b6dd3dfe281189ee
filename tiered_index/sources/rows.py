"""Reads the rows of files of any form as entries: NDJSON and CSV, compressed or not, Parquet and Arrow.

A `RowMapping` says where a row has its keys and its time. The position of a row is the byte of its line in the
decompressed text, or its number in a file with columns. Text is read in blocks; a block that the quick parser refuses
is read line by line, so that a bad row is named. Memory: some blocks. One thread.
"""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import io
import lzma
import re
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import IO, Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from tiered_index.encoding import json_text
from tiered_index.errors import CorruptFile, InvalidArgument, listed
from tiered_index.format.segment import Times, times_of
from tiered_index.json_paths import FieldReader, Unclear, compiled_path, fields_of, key_texts, plain_path, searched
from tiered_index.kernels import GzipFile, crc32, gzip_error
from tiered_index.service.read.rows import check_topic
from tiered_index.service.write.validation import keys_of_rows, milliseconds
from tiered_index.sources.arrow import FILE_MAGIC, STREAM_MAGIC, ArrowTable
from tiered_index.sources.blocks import RestartPoint
from tiered_index.sources.columns import MAX_ROW_BYTES, is_text, plain_text, times_ms
from tiered_index.sources.messages import json_object
from tiered_index.sources.parquet import ParquetTable
from tiered_index.sources.places import LocalFile, StoredFile
from tiered_index.sources.restart import RESTARTED, PointedText, packed_text
from tiered_index.sources.values import key_value, python_rows, python_values, rows_as_json, run_ends_decoded
from tiered_index.types import MAX_KEY_UNITS, MAX_TIMESTAMP_MS, exact_time

File = LocalFile | StoredFile
Unit = Literal["s", "ms", "us", "ns"]
BLOCK_BYTES = 2 << 20
SUM_BYTES = 256 << 10
"""The bytes of a block with a checksum: the least that is read for a row."""
_PER_SECOND: dict[Unit, int] = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
# seconds since 1970 of the years 1990 to 2100: numbers in them have one likely unit
_LIKELY_S = 631_152_000, 4_102_444_800
# the type of keys: `put_batch` copies the offsets of others
_TEXT = pa.large_string()
TOPIC_FIELD = "field:"
"""Begin of a `--topic` that is a field of the rows."""
_DELIMITERS = (",", "\t", ";", "|")
_NUMBER_TEXT = r"^-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?$"
_NUMBER = re.compile(rf"\s*{_NUMBER_TEXT[1:-1]}\s*")
# without the marks of a JMESPath
_FIELD_NAME = re.compile(r"""[^][.(){}|&*@`'"?!<>=,\\\x00-\x1f]+""")
_HEAD_BYTES = 64 << 10
_MAGICS = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    # pzstd begins with a frame that is skipped
    b"\x50\x2a\x4d\x18": "zstd",
}
# the usual properties, and dictionary sizes of whole 64 KiB; it has no magic number
_LZMA = b"\x5d\0\0"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PARQUET = b"PAR1"
_UNPACK = {"gzip": "gzip -dc", "bzip2": "bzip2 -dc", "xz": "xz -dc", "zstd": "zstd -dc"}
# forms that are not read, by their first bytes
_OTHERS = {
    b"Obj\x01": "an Avro file",
    b"ORC": "an ORC file",
    b"PK\x03\x04": "a ZIP archive",
    b"FEA1": "a Feather file of version 1",
    b"\x04\x22\x4d\x18": "packed by LZ4",
    b"SQLite format 3": "an SQLite database",
    b"%PDF": "a PDF file",
}
# bytes that no text has
_NO_TEXT = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f\xc0\xc1\xf5-\xff]")
_DAMAGE = (EOFError, gzip.BadGzipFile, gzip_error, zlib.error, lzma.LZMAError, OSError)


@dataclass(frozen=True, slots=True)
class Dialect:
    """The characters of CSV: `delimiter` between values, None if the header decides; `quote` around values, "" if none.

    Each is one ASCII character other than a newline. Raises `InvalidArgument`.
    """

    delimiter: str | None = None
    quote: str = '"'

    def __post_init__(self) -> None:
        for option, mark in (("--delimiter", self.delimiter), ("--quote", self.quote or None)):
            if mark is not None and (len(mark) != 1 or not mark.isascii() or mark in "\0\r\n"):
                raise InvalidArgument(f"{option} is one ASCII character other than a newline, not {mark!r}")
        if self.delimiter == self.quote:
            raise InvalidArgument(f"--delimiter and --quote are both {self.quote!r}: they must differ")

    @property
    def delimiters(self) -> Sequence[str]:
        """The characters of which one is between values."""
        found_out = [mark for mark in _DELIMITERS if mark != self.quote]
        return found_out if self.delimiter is None else [self.delimiter]

    @classmethod
    def of(cls, segment_format: str) -> Dialect | None:
        """Return the dialect that the format of a segment names; None: it names none."""
        _, _, marks = segment_format.partition("+")[0].partition(":")
        if not re.fullmatch("[0-9a-f]{4}", marks):
            return None
        named = bytes.fromhex(marks).decode("latin-1")
        return cls(named[0], named[1].strip("\0"))


@dataclass
class RowMapping:
    """The fields with the keys, the time and perhaps the topic of a row: JMESPaths, or names of columns.

    `unit` is that of times that are numbers. None: the first ones decide, for the whole run; then `is_guessed`, and a
    later number that is likely in another unit only is a bad row. `has_numbers`: a time was a number. `topic` None: all
    rows have one topic. `dialect` is that of CSV files; None: their headers decide.
    """

    keys: Sequence[str]
    time: str
    unit: Unit | None = None
    topic: str | None = None
    dialect: Dialect | None = None
    is_guessed: bool = False
    has_numbers: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not self.keys:
            raise InvalidArgument("--key is missing: it says where a row has its key, such as --key order_id")
        self.paths = [_path_of(path, f"--key {path}") for path in self.keys]
        self.paths.append(_path_of(self.time, f"--time {self.time}"))
        if self.topic is not None:
            self.paths.append(_path_of(self.topic, f"--topic {TOPIC_FIELD}{self.topic}"))
        self.reader = FieldReader.of(self.paths)

    @property
    def names(self) -> list[tuple[str, str]]:
        """Option and path of all fields: the keys, the time, and the topic if it is a field."""
        topic = [] if self.topic is None else [(f"--topic {TOPIC_FIELD}", self.topic)]
        return [*(("--key ", path) for path in self.keys), ("--time ", self.time), *topic]

    def names_of_path(self, path: str) -> tuple[str, ...] | None:
        """Return the names of a plain path; None: it is another expression."""
        return plain_path(_path_of(path, path).parsed)

    def decide(self, number: float) -> Unit:
        """Return the unit of times that are numbers, which the first `number` decides. Raises `InvalidArgument`."""
        likely = [unit for unit in _PER_SECOND if _may_count(unit, number)]
        if self.unit is None:
            if len(likely) != 1:
                raise InvalidArgument(
                    f"time {number!r} is of the years 1990 to 2100 in no unit of s, ms, us and ns: give --time-unit"
                )
            self.unit, self.is_guessed = likely[0], True
        elif self.is_guessed and likely and self.unit not in likely:
            raise InvalidArgument(
                f"time {number!r} seems to be in {likely[0]}, but the first one was in {self.unit}: give --time-unit"
            )
        self.has_numbers = True
        return self.unit

    def time_ms(self, value: Any) -> int:
        """Return the time of one row in epoch milliseconds. Raises `InvalidArgument`."""
        if value is None or value == "":
            raise InvalidArgument(f"no time at {self.time}")
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise InvalidArgument(f"{self.time} is no time: {value!r:.80}")
        if isinstance(value, str) and not _NUMBER.fullmatch(value):
            try:
                time_ms = exact_time(value)
            except ValueError as error:
                raise InvalidArgument(f"{self.time} is neither a number nor an ISO 8601 time: {value!r:.80}") from error
        else:
            is_integer = isinstance(value, int) or (
                isinstance(value, str) and value.strip().removeprefix("-").isdecimal()
            )
            try:
                number = int(value) if is_integer else float(value)
                time_ms = int(number * 1000 // _PER_SECOND[self.decide(number)])
            except (ValueError, OverflowError) as error:
                if isinstance(error, InvalidArgument):
                    raise
                raise InvalidArgument(f"{self.time} is out of range: {value!r:.80}") from error
        if not 0 <= time_ms <= MAX_TIMESTAMP_MS:
            raise InvalidArgument(f"{self.time} is out of range: {value!r:.80}")
        return time_ms

    def times_ms(self, values: Sequence[Any] | pa.Array) -> npt.NDArray[np.int64] | None:
        """Return the times of rows in epoch milliseconds; None: one of them must be read by itself."""
        try:
            column = values if isinstance(values, pa.Array) else _one_type(values)
            if column.null_count or not len(column):
                return None
            if pa.types.is_timestamp(column.type):
                times = milliseconds(column).to_numpy()
            elif pa.types.is_date(column.type):
                times = milliseconds(column.cast(pa.timestamp("ms"))).to_numpy()
            elif pa.types.is_integer(column.type):
                times = self._ms_of_integers(column.cast(pa.int64()).to_numpy())
            elif pa.types.is_floating(column.type):
                times = self._ms_of_floats(column.cast(pa.float64()).to_numpy())
            elif is_text(column.type):
                column = plain_text(column)
                is_number = pc.match_substring_regex(column, _NUMBER_TEXT)
                if not pc.any(is_number).as_py():
                    times = times_ms(pa.chunked_array([column])).to_numpy()
                elif pc.all(is_number).as_py():
                    times = self._ms_of_texts(column)
                else:
                    return None
            else:
                return None
        except (pa.ArrowException, OverflowError, InvalidArgument, UnicodeEncodeError):
            return None
        is_sound = int(times.min()) >= 0 and int(times.max()) <= MAX_TIMESTAMP_MS
        return np.asarray(times, np.int64) if is_sound else None

    def _per_second(self, numbers: npt.NDArray[Any]) -> int:
        """Return how many of the unit of numbers (n) are a second. Raises `InvalidArgument` as `decide` for any."""
        unit = self.decide(numbers[0].item())
        if self.is_guessed and not _may_count(unit, numbers).all():
            for other in _PER_SECOND.keys() - {unit}:
                if (is_other := _may_count(other, numbers)).any():
                    self.decide(numbers[is_other][0].item())
        return _PER_SECOND[unit]

    def _ms_of_integers(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        per = self._per_second(numbers)
        if per > 1000:
            return numbers // (per // 1000)
        if per == 1000:
            return numbers
        # numbers out of range stay out of range, and do not overflow
        return np.clip(numbers, -1, MAX_TIMESTAMP_MS + 1) * (1000 // per)

    def _ms_of_floats(self, numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        per = self._per_second(numbers)
        if not np.isfinite(numbers).all():
            raise InvalidArgument("a time is not finite")
        return np.clip(numbers * 1000 // per, -1, MAX_TIMESTAMP_MS + 1).astype(np.int64)

    def _ms_of_texts(self, texts: pa.Array) -> npt.NDArray[np.int64]:
        """Return the times of the texts of numbers. Integers are exact, others are floats as in `time_ms`."""
        is_integer = pc.match_substring_regex(texts, "^-?[0-9]+$")
        self.decide(float(texts[0].as_py()))
        zero = pa.scalar("0", texts.type)
        integers = pc.if_else(is_integer, texts, zero).cast(pa.int64()).to_numpy()
        if pc.all(is_integer).as_py():
            return self._ms_of_integers(integers)
        floats = pc.if_else(is_integer, zero, texts).cast(pa.float64()).to_numpy()
        choice = is_integer.to_numpy(zero_copy_only=False)
        return np.where(choice, self._ms_of_integers(integers), self._ms_of_floats(floats))

    def topic_of(self, member: Any) -> str:
        """Return the topic of a row by the member at its path. Raises `InvalidArgument`."""
        texts = [] if isinstance(member, list) else list(key_texts(key_value(member)))
        if not texts:
            raise InvalidArgument(f"no topic at {self.topic}")
        return check_topic(texts[0])

    def topics_of(self, values: Sequence[Any] | pa.Array) -> pa.DictionaryArray | None:
        """Return the topics of rows; None: one of them must be read by itself."""
        if (column := _key_column(values, bool)) is None or column.null_count:
            return None
        topics = column.dictionary_encode()
        try:
            for topic in topics.dictionary.to_pylist():
                check_topic(topic)
        except InvalidArgument:
            return None
        return topics

    def keys_of(self, members: Iterable[Any]) -> list[str]:
        """Return the distinct keys of a row by the members at its key paths. Raises `InvalidArgument`."""
        keys = dict.fromkeys(text for member in members for text in key_texts(key_value(member)) if text)
        for key in keys:
            try:
                units = len(key.encode("utf-16-le")) // 2
            except UnicodeEncodeError as error:
                raise InvalidArgument(f"a key is no valid Unicode: {key!r:.80}") from error
            if units > MAX_KEY_UNITS:
                raise InvalidArgument(f"a key has {units:,} UTF-16 code units; {MAX_KEY_UNITS:,} are allowed")
        return list(keys)


def _path_of(path: str, shown: str) -> Any:
    """Return a compiled JMESPath; a name that is none, such as that of a column with blanks, is the field itself.

    `shown` names it in errors. Raises as `compiled_path`.
    """
    try:
        return compiled_path(path, shown)
    except InvalidArgument as error:
        if _FIELD_NAME.fullmatch(path):
            return compiled_path(json_text(path), shown)
        raise InvalidArgument(
            f"{error}. A field with such a name is written in quotes, as '\"No. of order\"'"
        ) from error


def _may_count(unit: Unit, number: Any) -> Any:
    """Return whether a number, or each of some (n), is a likely time in a unit."""
    first, end = (second * _PER_SECOND[unit] for second in _LIKELY_S)
    return (number >= first) & (number < end)


# of JSON; a parser of numbers forgets the sign
_MINUS_ZERO = re.compile(rb"[:,\[]\s*-0\s*[,}\]]")


def _one_type(values: Sequence[Any]) -> pa.Array:
    """Return values as an array. Texts, if some are integers and some the texts of other numbers."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        if not {*map(type, values)} <= {int, str}:
            raise
        return pa.array([*map(str, values)])


def _key_column(
    values: Sequence[Any] | pa.Array, may_be_minus_zero: Callable[[npt.NDArray[np.int64]], bool] = lambda rows: False
) -> pa.Array | None:
    """Return the keys of rows, one a row, as texts with nulls; None: rows must be read by themselves.

    `may_be_minus_zero` gets the numbers of rows whose key is 0, and says whether the text of one of them is -0.
    """
    try:
        if isinstance(values, pa.Array):
            column = values
        else:
            # texts are not inspected first, and not copied to longer offsets then
            are_texts = {*map(type, values)} <= {str, type(None)}
            column = pa.array(values, _TEXT if are_texts else None)
        if pa.types.is_null(column.type):
            return pa.nulls(len(column), _TEXT)
        if pa.types.is_integer(column.type):
            if pc.any(is_zero := pc.equal(column, 0).fill_null(False)).as_py():
                zeros = np.flatnonzero(is_zero.to_numpy(zero_copy_only=False))
                if may_be_minus_zero(zeros):
                    return None
            return column.cast(_TEXT)
        if pa.types.is_boolean(column.type):
            return column.cast(_TEXT)
        if not is_text(column.type):
            return None
        column = plain_text(column)
        sizes = pc.min_max(pc.binary_length(column)).as_py()
        if (sizes["max"] or 0) > MAX_KEY_UNITS:
            return None
        if sizes["min"] == 0:
            column = pc.if_else(pc.equal(column, "").fill_null(False), pa.scalar(None, _TEXT), column)
        return column
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        return None


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is no entry: its place for people, and the problem."""

    where: str
    problem: str


@dataclass(frozen=True)
class RowBatch:
    """Rows up to position `end` of a file.

    `positions`, `sizes`, `times_ms`, and `topics` if the topic is a field, have a value for each row with a key; a row
    that was read by itself is there once for each key. `keys` are columns with at most one key for each of them: a row
    has an entry for each key that is not null, and no key twice. `rows` also counts the `keyless`.
    """

    end: int
    rows: int
    keys: tuple[pa.Array, ...]
    positions: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    times_ms: npt.NDArray[np.int64]
    keyless: int = 0
    bad: tuple[BadRow, ...] = ()
    topics: pa.DictionaryArray | None = None
    begin: int = 0
    """The position of the first row of `source`."""
    source: bytes | pa.Table = b""
    """The lines of a text from `begin` on; the rows with all their columns, if the reading is whole."""
    lines_before: int | None = None
    """The number of lines of a text before `begin`; None: not known."""

    def lines(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """Return the number of the line at each position, from 1; None: not known."""
        if self.lines_before is None or not isinstance(self.source, bytes):
            return None
        ends = np.flatnonzero(np.frombuffer(self.source, np.uint8) == 10)
        return np.searchsorted(ends, positions - self.begin) + self.lines_before + 1

    def texts(self, positions: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> list[bytes]:
        """Return the rows at positions, whose lines have these sizes; rows of a file with columns as JSON."""
        places = (positions - self.begin).tolist()
        if isinstance(self.source, bytes):
            lines = zip(places, sizes.tolist(), strict=True)
            return [row_of_line(self.source[at : at + size], self.begin + at) for at, size in lines]
        return rows_as_json(run_ends_decoded(self.source).take(pa.array(places, pa.int64())))

    @property
    def entries(self) -> int:
        """The number of entries."""
        return sum(len(column) - column.null_count for column in self.keys)

    def by_entry(self) -> tuple[npt.NDArray[np.int64], pa.ChunkedArray]:
        """Return, for each entry, the number of its row in `positions` (i64), and its key."""
        keys, rows = keys_of_rows(self.keys)
        every_row = np.arange(len(self.positions))
        return np.tile(every_row, len(keys)) if rows is None else rows, pa.chunked_array(keys, _TEXT)

    @property
    def times(self) -> Times | None:
        """The least and the greatest time of the entries."""
        return times_of(self.times_ms)


def _joined(
    keys: Sequence[pa.Array], positions: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64],
    times: npt.NDArray[np.int64], end: int, topics: pa.DictionaryArray | None,
) -> RowBatch:  # fmt: skip
    """Return the batch of rows that have at most one key for each path."""
    rows, parts = len(positions), list[pa.Array]()
    for number, column in enumerate(keys):
        for earlier in keys[:number]:
            same = pc.equal(column, earlier)
            if pc.any(same).as_py():
                column = pc.if_else(same.fill_null(False), pa.scalar(None, _TEXT), column)
        parts.append(column)
    keyless = 0
    if all(column.null_count for column in parts):
        has_key = np.logical_or.reduce([column.is_valid().to_numpy(zero_copy_only=False) for column in parts])
        if keyless := rows - int(has_key.sum()):
            mask = pa.array(has_key)
            parts = [column.filter(mask) for column in parts]
            positions, sizes, times = positions[has_key], sizes[has_key], times[has_key]
            topics = None if topics is None else topics.filter(mask)
    return RowBatch(end, rows, tuple(parts), positions, sizes, times, keyless, topics=topics)


def _batch_of(
    columns: Sequence[Sequence[Any] | pa.Array], mapping: RowMapping, positions: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64], end: int,
    may_be_minus_zero: Callable[[npt.NDArray[np.int64]], bool] = lambda rows: False,
) -> RowBatch | None:  # fmt: skip
    """Return the batch of rows by their columns, as `RowMapping.names`; None: rows must be read by themselves."""
    count = len(mapping.keys)
    keys = [_key_column(column, may_be_minus_zero) for column in columns[:count]]
    times_ms = mapping.times_ms(columns[count])
    topics = None if mapping.topic is None else mapping.topics_of(columns[count + 1])
    if times_ms is None or any(column is None for column in keys) or (mapping.topic is not None and topics is None):
        return None
    return _joined([column for column in keys if column is not None], positions, sizes, times_ms, end, topics)


class _SingleRows:
    """Gathers rows that are read one by one."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.topics: list[str] = []
        self.places: list[tuple[int, int, int]] = []
        self.bad: list[BadRow] = []
        self.rows = self.keyless = 0

    def add(self, members: Sequence[Any], mapping: RowMapping, position: int, size: int) -> None:
        """Add a row by its members, as `RowMapping.names`. Raises `InvalidArgument`."""
        count = len(mapping.keys)
        time_ms = mapping.time_ms(members[count])
        topics = [mapping.topic_of(topic) for topic in members[count + 1 :]]
        try:
            keys = mapping.keys_of(members[:count])
        except ValueError as error:
            if isinstance(error, InvalidArgument):
                raise
            raise InvalidArgument(f"a key is a number of too many digits: {error}") from error
        self.rows += 1
        self.keyless += not keys
        self.keys += keys
        self.topics += topics * len(keys)
        self.places += [(position, size, time_ms)] * len(keys)

    def batch(self, end: int, mapping: RowMapping) -> RowBatch:
        columns = np.array(self.places, np.int64).reshape(-1, 3)
        arrays = columns[:, 0], columns[:, 1], columns[:, 2]
        topics = None if mapping.topic is None else pa.array(self.topics, pa.string()).dictionary_encode()
        keys, bad = (pa.array(self.keys, _TEXT),), tuple(self.bad)
        return RowBatch(end, self.rows, keys, *arrays, self.keyless, bad, topics)


def row_of_line(line: bytes, position: int) -> bytes:
    """Return the row of a line at a position: without a carriage return at its end, and a byte order mark at byte 0."""
    return (line if position else line.removeprefix(_BYTE_ORDER_MARK)).removesuffix(b"\r")


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


class RowFile(ABC):
    """The rows of one file. Raises `InvalidArgument` for a file of another form, `CorruptFile` for damage."""

    format: str
    is_text = True

    def __init__(self, file: File) -> None:
        self.file = file

    @abstractmethod
    def length_bound(self, position: int) -> int:
        """Return a number of positions to reserve for the file behind `position`: all that it has, unless unknown."""

    @abstractmethod
    def fields(self) -> list[str]:
        """Return the names of the fields of the first row, or of all columns."""

    @abstractmethod
    def lacking(self, mapping: RowMapping) -> list[tuple[str, str]]:
        """Return option and path of the fields that none of the first rows has."""

    @abstractmethod
    def reading(self, mapping: RowMapping, position: int, end: int, *, whole: bool = False) -> RowReading:
        """Return a reading of the rows at positions [`position`, `end`). `whole`: batches have all columns."""


class RowReading(ABC):
    """One reading of a part of a file."""

    end: int
    """The position behind the last whole row that was read."""
    is_whole = False
    """Whether the file has no whole row behind `end`, as far as `end` of the reading lets know."""
    held_back_bytes = 0
    """The bytes of a last line without newline, which may still be written."""
    blocks: tuple[int, tuple[int, ...]] | None = None
    lines_before: int | None = None
    """The number of lines of a text before the reading's begin; None: not known."""
    lines: tuple[int, tuple[int, ...]] | None = None
    """As `LinkedSegment.lines`."""

    @property
    def points(self) -> list[RestartPoint]:
        """The restart points that were found, of packed text; the caller may remove some."""
        return []

    @abstractmethod
    def batches(self, start: int) -> Iterator[RowBatch]:
        """Yield the rows from position `start` on, the end of a row. Rows before it are checksummed only."""


def compression_of(head: bytes) -> str | None:
    """Return the compression of a file by its first bytes; None: it has none."""
    return next((name for magic, name in _MAGICS.items() if head.startswith(magic)), None)


@contextlib.contextmanager
def decompressed(file: File, compression: str | None, *, noting: bool = False) -> Iterator[IO[bytes]]:
    """Yield the text of a file. Read it by `read_text`.

    `noting`: it is read as a whole. So its next pieces are read ahead, and it has `points` if it may have some.
    """
    with file.ahead() if noting else file.open() as raw:
        if compression == "zstd" or (compression in RESTARTED and noting):
            yield cast(IO[bytes], packed_text(raw, compression))
        elif compression == "gzip":
            yield cast(IO[bytes], GzipFile(fileobj=raw))
        elif compression == "bzip2":
            with bz2.open(raw) as text:
                yield cast(IO[bytes], text)
        elif compression == "xz":
            with lzma.open(raw) as text:
                yield cast(IO[bytes], text)
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
    """NDJSON or CSV."""

    def __init__(self, file: File, compression: str | None, size_bytes: int) -> None:
        super().__init__(file)
        self.compression, self.size_bytes = compression, size_bytes
        self.format = self.kind if compression is None else f"{self.kind}+{compression}"

    kind: str

    def length_bound(self, position: int) -> int:
        if self.compression is None:
            return self.size_bytes - position
        return max(_LEAST_BOUND, _RATIO * self.size_bytes)

    def reading(self, mapping: RowMapping, position: int, end: int, *, whole: bool = False) -> TextReading:
        return TextReading(self, mapping, position, end)

    @cached_property
    def head(self) -> bytes:
        """The first whole lines; the first one, if it is longer than 64 KiB."""
        with decompressed(self.file, self.compression) as handle:
            size = _HEAD_BYTES
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
        present = [False] * len(mapping.names)
        for line in self.split(self.head[self.begin :]):
            # a bad line is named when it is read
            with contextlib.suppress(InvalidArgument):
                members = self.members_of(line, mapping)
                present = [was or member not in (None, "", []) for was, member in zip(present, members, strict=True)]
        return [name for name, is_there in zip(mapping.names, present, strict=True) if not is_there]


class NdjsonFile(TextFile):
    """One object a line."""

    kind = "ndjson"

    def fields(self) -> list[str]:
        for line in io.BytesIO(self.head):
            if line.strip():
                return list(json_object(line))
        return []

    def members(self, lines: bytes, mapping: RowMapping) -> list[Sequence[Any] | pa.Array]:
        if mapping.reader is None:
            raise Unclear
        return [*mapping.reader.members_of_lines(lines)]

    def members_of(self, line: bytes, mapping: RowMapping) -> list[Any]:
        document = json_object(line)
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
            text = header.removeprefix(_BYTE_ORDER_MARK).decode().rstrip("\r")
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
        return self.header

    def lacking(self, mapping: RowMapping) -> list[tuple[str, str]]:
        lacking = super().lacking(mapping)
        if self.head[self.begin :].strip():
            return lacking
        # there are no rows yet
        return [name for name in lacking if _column_name(name[1], mapping, self.header) is None]

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
        names = [_column_name(path, mapping, self.header) for _, path in mapping.names]
        if None in names or len(set(self.header)) != len(self.header):
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
            pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(cast(list[str], names), pa.string()), include_columns=[*dict.fromkeys(names)]
            ),
        )
        return [table[name].combine_chunks() for name in names]

    def members_of(self, line: bytes, mapping: RowMapping) -> list[Any]:
        row = self.row(line)
        return [
            row[name] if (name := _column_name(path, mapping, self.header)) is not None else searched(compiled, row)
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

        return _batch_of(columns, mapping, begin + starts, sizes, end, may_be_minus_zero) or self._slowly(block, begin)

    def _slowly(self, block: bytes, begin: int) -> RowBatch:
        rows, position = _SingleRows(), begin
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


TABLES: dict[str, Callable[[File], ParquetTable | ArrowTable]] = {"parquet": ParquetTable, "arrow": ArrowTable}
"""The readers of files with columns, by the format of their segments."""


class ColumnsFile(RowFile):
    """A file with columns, of a format of `TABLES`: Parquet, or Arrow IPC as a file or a stream."""

    is_text = False

    def __init__(self, file: File, file_format: str) -> None:
        super().__init__(file)
        self.format, self.table = file_format, TABLES[file_format](file)

    def columns_of(self, ways: Sequence[Way]) -> list[str]:
        """Return what the table must read for columns and fields of structures."""
        names: list[str] = []
        for way in ways:
            if way.is_expression:
                names += way.names
            else:
                # of a structure in Parquet only the wanted field
                names.append(".".join(way.names) if self.format == "parquet" else way.names[0])
        return list(dict.fromkeys(names))

    def length_bound(self, position: int) -> int:
        return self.table.rows - position

    def fields(self) -> list[str]:
        return list(self.table.schema.names)

    def lacking(self, mapping: RowMapping) -> list[tuple[str, str]]:
        return [name for name in mapping.names if self._way(name[1], mapping) is None]

    def _way(self, path: str, mapping: RowMapping) -> Way | None:
        way, columns = way_of(self.table.schema, path, mapping), self.table.schema.names
        for name in () if way is None else way.names[: None if way.is_expression else 1]:
            if columns.count(name) > 1:
                raise InvalidArgument(
                    f"{self.file} has {columns.count(name)} columns with the name {name}: write it again with a name "
                    "for each, or choose another field"
                )
        return way

    def reading(self, mapping: RowMapping, position: int, end: int, *, whole: bool = False) -> ColumnsReading:
        ways = [self._way(path, mapping) for _, path in mapping.names]
        if None in ways:
            lacking = ", ".join(path for (_, path), way in zip(mapping.names, ways, strict=True) if way is None)
            raise InvalidArgument(f"{self.file} has no column {lacking}; it has {listed(self.fields())}")
        return ColumnsReading(self, mapping, [way for way in ways if way is not None], position, end, whole)

    def members_of(self, row: pa.Table, mapping: RowMapping) -> list[Any]:
        """Return the keys, and the time and the topic of a row, by path; None for a column that the file lacks."""
        ways = [self._way(path, mapping) for _, path in mapping.names]
        needed = {name for way in ways if way is not None for name in way.names[: None if way.is_expression else 1]}
        (values,) = python_rows(row.select([*needed])) if needed else ({},)
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
    """One reading of a part of a file with columns."""

    is_whole = True

    def __init__(
        self, file: ColumnsFile, mapping: RowMapping, ways: Sequence[Way], position: int, bound: int, whole: bool
    ) -> None:
        self._file, self._mapping, self._ways, self._whole = file, mapping, ways, whole
        self.end, self._bound = position, min(bound, file.table.rows)

    def batches(self, start: int) -> Iterator[RowBatch]:
        names = self._file.table.schema.names if self._whole else self._file.columns_of(self._ways)
        for first, table in self._file.table.read(names, max(start, self.end)):
            rows = table.slice(0, self._bound - first)
            self.end = first + len(rows)
            batch = self._batch(rows.combine_chunks(), first)
            yield replace(batch, begin=first, source=rows) if self._whole else batch
            if self.end == self._bound:
                break
        self.end = self._bound

    def _batch(self, table: pa.Table, first: int) -> RowBatch:
        return rows_of_columns(table, self._ways, self._mapping, np.arange(first, first + len(table)))


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
        columns = [name for name in schema.names if name in fields_of(_path_of(path, path).parsed)]
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
    table: pa.Table, ways: Sequence[Way], mapping: RowMapping, positions: npt.NDArray[np.int64]
) -> RowBatch:
    """Return the rows (n) of a table at positions (i64, n) of a file; `ways` are those of `mapping.names`."""
    columns: list[Any] = []
    for way, path in zip(ways, mapping.paths, strict=True):
        if way.is_expression:
            columns.append([searched(path, row) for row in python_rows(table.select(way.names))])
            continue
        name, *below = way.names
        column = table[name].combine_chunks() if table[name].num_chunks != 1 else table[name].chunk(0)
        for field_name in below:
            column = pc.struct_field(column, field_name)
        columns.append(column)
    sizes, end = np.broadcast_to(np.int64(0), len(table)), int(positions[-1]) + 1 if len(positions) else 0
    if (batch := _batch_of(columns, mapping, positions, sizes, end)) is not None:
        return batch
    time = columns[len(mapping.keys)]
    if isinstance(time, list):
        # an expression has found times of Python, or other values
        with contextlib.suppress(pa.ArrowException, OverflowError, UnicodeEncodeError):
            time = pa.array(time)
    if isinstance(time, pa.Array) and pa.types.is_date(time.type):
        time = time.cast(pa.timestamp("ms"))
    if isinstance(time, pa.Array) and pa.types.is_timestamp(time.type):
        # the column says its unit
        columns[len(mapping.keys)] = time.cast(pa.int64())
        mapping = replace(mapping, unit=time.type.unit, is_guessed=False)
    rows = _SingleRows()
    values = [python_values(column) if isinstance(column, pa.Array) else column for column in columns]
    members_of_rows = zip(*values, strict=True)
    for number, members in zip(positions.tolist(), members_of_rows, strict=True):
        try:
            rows.add(members, mapping, number, 0)
        except InvalidArgument as error:
            rows.bad.append(BadRow(f"row {number + 1:,}", str(error)))
    return rows.batch(end, mapping)


def is_growing_text(head: bytes) -> bool:
    """Return whether a file may be a text whose last line is not written yet. The other forms are written whole."""
    whole = (_PARQUET, FILE_MAGIC, STREAM_MAGIC, b"[")
    begin = head.removeprefix(_BYTE_ORDER_MARK).lstrip()
    is_packed = compression_of(head) is not None or _is_lzma(head)
    return not is_packed and not begin.startswith(whole) and _other_form(begin) is None


def _is_lzma(head: bytes) -> bool:
    return head.startswith(_LZMA) and _NO_TEXT.search(head) is not None


def _other_form(head: bytes) -> str | None:
    """Return the form of a file that is not read; None: it may be read. A text may begin with the letters of one."""
    form = next((name for magic, name in _OTHERS.items() if head.startswith(magic)), None)
    return None if form is None or not _NO_TEXT.search(head) else form


def _other_encoding(head: bytes) -> str | None:
    """Return the encoding of a text of units of 2 or 4 bytes, by its mark or by its first character; None: of bytes."""
    if head.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "UTF-32"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16"
    if len(head) >= 4 and head[:4].count(0) == 2 and head[0] != head[1]:
        return "UTF-16BE" if not head[0] and not head[2] else "UTF-16LE" if not head[1] and not head[3] else None
    return None


def open_rows(file: File, size_bytes: int, head: bytes, dialect: Dialect | None = None) -> RowFile:
    """Return the rows of a file by `head`, its first 64 KiB; `dialect` is for CSV. Raises `InvalidArgument`."""
    if head.startswith(_PARQUET):
        return ColumnsFile(file, "parquet")
    if head.startswith((FILE_MAGIC, STREAM_MAGIC)):
        return ColumnsFile(file, "arrow")
    compression = compression_of(head)
    if _is_lzma(head):
        command = "xz --format=lzma -dc FILE | xz --block-size=4MiB > FILE.xz"
        raise InvalidArgument(f"{file} is packed by LZMA alone: pack it by xz, for example with `{command}`")
    text = head
    if compression is not None:
        with decompressed(file, compression) as handle:
            text = read_text(file, handle, compression, _HEAD_BYTES)
    if (encoding := _other_encoding(text)) is not None:
        unpacked = "FILE" if compression is None else f"<({_UNPACK[compression]} < FILE)"
        command = f"iconv -f {encoding} -t UTF-8 {unpacked} > FILE.utf8"
        raise InvalidArgument(f"{file} is {encoding}: write UTF-8, for example with `{command}`")
    begin = text.removeprefix(_BYTE_ORDER_MARK).lstrip()
    line = begin.partition(b"\n")[0]
    if begin.startswith(b"[") or line.rstrip() == b"{":
        unpacked = "" if compression is None else f"{_UNPACK[compression]} < FILE | "
        what, each = ("a JSON array", ".[]") if begin.startswith(b"[") else ("JSON of several lines", ".")
        source = "FILE " if compression is None else ""
        command = f"{unpacked}jq -c '{each}' {source}> FILE.ndjson"
        raise InvalidArgument(f"{file} is {what}: write one object a line, for example with `{command}`")
    if begin.startswith(b"{"):
        return NdjsonFile(file, compression, size_bytes)
    if (form := _other_form(text)) is not None:
        raise InvalidArgument(f"{file} is {form}: convert it to NDJSON, CSV, Parquet or Arrow")
    if b"\0" not in begin and any(mark.encode() in line for mark in (dialect or Dialect()).delimiters):
        return CsvFile(file, compression, size_bytes, dialect)
    raise InvalidArgument(
        f"{file} is neither NDJSON nor CSV, Parquet or Arrow: convert it to one of these, "
        "or give the --delimiter of CSV"
    )
