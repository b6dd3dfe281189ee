"""Reads files of messages: Parquet, NDJSON, and CSV with a header. Text may be gzipped.

One thread; memory: a few blocks. Other columns and blank lines are skipped. A message without key makes no entry. A
position is a row number of a Parquet file, or a byte offset in uncompressed text. A last line without newline may still
be written. Unless it is a complete JSON object, it is held back and the position stays before it. Arrow parses a block
of lines at once. If that fails, or gives another number of rows, the lines are parsed one by one. In CSV one record is
one line; `keys` are separated by blanks, as in RocketMQ; times are epoch milliseconds or ISO 8601. The name of a source
is `file:PATH#LENGTH-HASH`, with the absolute path or URI and a fingerprint of the content. A file that grows keeps its
name; another file at the same path has another one. With --column or --constant, ``/`` and a hash of these options
follow: other messages need another position. After --restart, ``~`` and a number follow: the file is read again under
a position of its own.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import hashlib
import io
import json
import os
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json as pj

from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.sources.columns import (
    MAX_BLANK_BYTES,
    MAX_ROW_BYTES,
    CheckedMessage,
    check_kinds,
    entry_columns,
    has_items,
    is_text,
    own_type,
)
from tiered_index.sources.messages import ROW_NUMBER, Fields, MessageBatch, Record, json_fields, json_object
from tiered_index.sources.parquet import ParquetTable
from tiered_index.sources.places import CSV, NDJSON, LocalFile, Place, Stdin, StoredFile

MAGIC = b"PAR1"
_FOOTER_BYTES = 1 << 20
_AGAIN = "Give it another name, or read it from its start with --restart"


class ParquetSource:
    """One file. Raises `InvalidArgument` for missing columns or bad rows, `CorruptFile` for damage."""

    unit = "rows"
    held_back_bytes = 0

    def __init__(self, place: LocalFile | StoredFile, fields: Fields | None = None) -> None:
        self.place = place
        self.fields = fields or Fields()
        self._table = ParquetTable(place)
        self.schema = schema = self._table.schema
        self.group_rows = self._table.group_rows
        self.fields.check_columns(schema.names, str(place))
        there = {name: column for name, column in self.fields.names.items() if column in schema.names}
        kinds = {name: schema.field(column).type for name, column in there.items()}
        check_kinds(kinds, self.fields.shown, f"{place}: ", self.fields.schema.caller_columns)
        self.unused = self.fields.unused(schema.names)
        self.counts_rows = self.fields.counts_rows(schema.names)
        self._names = list(dict.fromkeys(there.values()))
        self.total: int | None = self._table.rows

    def fingerprint(self, length: int | None) -> tuple[int, str]:
        """Return the file's size and a hash of its last MiB, which has the footer."""
        with self.place.ranges() as handle:
            size = handle.seek(0, io.SEEK_END)
            handle.seek(max(0, size - _FOOTER_BYTES))
            return size, hashlib.sha256(handle.read(_FOOTER_BYTES)).hexdigest()[:16]

    def batches(self, start: int) -> Iterator[MessageBatch]:
        """Yield the rows from number `start` on."""
        if self.total is not None and start > self.total:
            raise InvalidArgument(
                f"{self.place} has changed since it was read up to row {start}: it has {self.total} rows. {_AGAIN}"
            )
        for first, rows in self._table.read(self._names, start):
            yield self._batch(rows, first + len(rows))

    def part(self, begin: int, end: int | None) -> Iterator[MessageBatch]:
        """Yield the rows with the numbers [begin, end), which are those of row groups (None: to the end)."""
        for batch in self.batches(begin) if end is None or begin < end else ():
            yield batch
            if batch.end == end:
                return

    def has_every_key(self, begin: int, end: int | None) -> bool:
        """Return whether the statistics of the file say that each row of the row groups in [begin, end) has one key."""
        last = sum(self.group_rows) if end is None else end
        groups = [number for number, rows in enumerate(accumulate(self.group_rows)) if begin < rows <= last]
        column = self.fields.names.get("key", "")
        # a repeated column that is no list by the file's schema has its own name, too
        is_one = column in self.schema.names and is_text(self.schema.field(column).type)
        return is_one and all(self._table.has_every_text(number, column) for number in groups)

    def _batch(self, rows: pa.Table, end: int) -> MessageBatch:
        if self.counts_rows:
            rows = rows.append_column(ROW_NUMBER, pa.array(range(end - len(rows), end), pa.int64()))
        table = self.fields.of_table(rows)
        keys = table["keys" if "keys" in table.column_names else "key"]
        has_key = pc.not_equal(keys, "") if is_text(keys.type) else pc.is_valid(keys)
        # the filter leaves nulls out, too
        with_key = table if pc.all(has_key, skip_nulls=False).as_py() else table.filter(has_key)
        columns = entry_columns(with_key, self.fields.own)
        keyless = len(rows) - len(with_key) + _empty_lists(with_key)
        return MessageBatch(columns, len(rows), end, partial(self._records, table, end - len(rows)), keyless)

    def _records(self, table: pa.Table, first: int) -> Iterator[Record]:
        for number, fields in enumerate(table.to_pylist(), first):
            where = f"row {number + 1}"
            if fields.get("key", fields.get("keys")) is None:
                fields["keys"] = []
            try:
                yield Record(where, number, number + 1, self.fields.checked(fields))
            except InvalidArgument as error:
                yield Record(where, number, number + 1, None, str(error))


def _empty_lists(table: pa.Table) -> int:
    """Return the number of messages with an empty list of keys."""
    if "keys" not in table.column_names or not has_items(table["keys"].type):
        return 0
    return pc.sum(pc.equal(pc.list_value_length(table["keys"]), 0)).as_py() or 0


BLOCK_BYTES = 8 << 20
FINGERPRINT_BYTES = 1 << 20
GZIP_MAGIC = b"\x1f\x8b"
_KEY_FIELDS = ("key", "keys")
_INTEGERS = ("queue_id", "offset", "size", "topic_id")


class TextSource(ABC):
    """One file. Raises `InvalidArgument` for a line that is not a message, `CorruptFile` for a damaged gzip file."""

    unit = "bytes"
    # Position of the first message
    begin = 0
    # Bytes of a last line without newline, which is held back
    held_back_bytes = 0
    # Columns that are no field
    unused: Sequence[str] = ()
    # whether the offset or another field is the generated row number
    counts_rows = False

    def __init__(self, place: Place, fields: Fields) -> None:
        self.place = place
        self.fields = fields
        self._gzipped, self.total = False, cast(int | None, None)
        if not isinstance(place, Stdin):
            with place.open() as raw:
                self._gzipped = raw.read(2) == GZIP_MAGIC
                self.total = None if self._gzipped else raw.seek(0, io.SEEK_END)

    @abstractmethod
    def _read(self, block: bytes) -> pa.Table:
        """Return the columns of a block of lines. Raises an `ArrowException`, `InvalidArgument`."""

    def _fields_of(self, table: pa.Table) -> pa.Table:
        """Return the message fields of a table from `_read`. Raises as `_read`."""
        return self.fields.of_table(table)

    @abstractmethod
    def _is_whole(self, line: bytes) -> bool:
        """Return whether a line without newline is complete."""

    @abstractmethod
    def _message(self, line: bytes, number: int) -> CheckedMessage:
        """Return the message of line `number`, from 0. Raises `InvalidArgument`."""

    def fingerprint(self, length: int | None) -> tuple[int, str]:
        """Return the number of first bytes that the hash covers (`length`, or up to 1 MiB), and the hash."""
        with self._open() as handle:
            head = self._checked(handle.read, FINGERPRINT_BYTES if length is None else length)
        return len(head), hashlib.sha256(head).hexdigest()[:16]

    def part(self, begin: int, end: int | None) -> Iterator[MessageBatch]:
        """Yield the lines that begin within bytes [begin, end) of uncompressed text (None: to its end)."""
        if self._gzipped and begin:
            return
        start = begin
        if begin:
            with self._open() as handle:
                handle.seek(begin - 1)
                start += len(self._checked(handle.readline, MAX_ROW_BYTES)) - 1
        if end is None or start < end:
            yield from self.batches(start, None if self._gzipped else end)

    def batches(self, start: int, end: int | None = None) -> Iterator[MessageBatch]:
        """Yield the lines that begin from byte `start`, the end of a line, to before `end`."""
        with self._open() as handle:
            position = max(start, self.begin)
            read = self.place.read if isinstance(self.place, Stdin) else handle.read
            if not isinstance(self.place, Stdin):
                self._seek(handle, position)
            # Lines before the block; None: counted on use
            number = None if start else int(self.begin > 0)
            if number is None and self.counts_rows:
                number = self._lines_before(position)
            blank_bytes = 0
            last = 1 << 62 if end is None else end
            while block := self._checked(read, min(BLOCK_BYTES, max(0, last - position))):
                if not block.endswith(b"\n"):
                    rest = self._checked(handle.readline, MAX_ROW_BYTES)
                    if len(rest) == MAX_ROW_BYTES:
                        begun = position + block.rfind(b"\n") + 1
                        raise InvalidArgument(f"{self.place}: the line at byte {begun} is longer than 16 MiB")
                    block += rest
                read_bytes = len(block)
                block = self._without_open_line(block)
                blank_bytes = 0 if block.strip() else blank_bytes + len(block)
                stop = position + len(block)
                if blank_bytes > MAX_BLANK_BYTES:
                    raise InvalidArgument(
                        f"{self.place}: {blank_bytes:,} bytes up to byte {stop} are blank lines only; delete them"
                    )
                columns, messages, keyless = self._columns(block, number or 0)
                yield MessageBatch(columns, messages, stop, partial(self._records, block, position, number), keyless)
                if len(block) < read_bytes:
                    # the rest of the held line may be there by now, and would pass for a line
                    return
                position = stop
                number = None if number is None else number + block.count(b"\n")

    def _without_open_line(self, block: bytes) -> bytes:
        """Return a block without an incomplete last line, which is held back."""
        begin = block.rfind(b"\n") + 1
        last = block[begin:]
        if not last.strip() or self._is_whole(last):
            return block
        self.held_back_bytes = len(last)
        return block[:begin]

    @contextlib.contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        with self.place.open() as raw:
            yield cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if self._gzipped else raw

    def _seek(self, handle: IO[bytes], start: int) -> None:
        if not start:
            return
        changed = f"{self.place} has changed since it was read up to byte {start}: "
        if self._checked(handle.seek, start - 1) != start - 1:
            raise InvalidArgument(changed + "it is shorter. " + _AGAIN)
        before = self._checked(handle.read, 1)
        if before == b"\n":
            return
        # The last line that was read may have had no newline. It must have one now, or still be the last line.
        if not before or self._checked(handle.read, 1) not in (b"", b"\n", b"\r"):
            raise InvalidArgument(changed + ("no line ends there. " if before else "it is shorter. ") + _AGAIN)
        self._checked(handle.seek, start)

    def _checked(self, read: Any, argument: int) -> Any:
        try:
            return read(argument)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise CorruptFile(str(self.place), f"damaged gzip file: {error}") from error

    def _records(self, block: bytes, position: int, number: int | None) -> Iterator[Record]:
        if not block.strip():
            return
        number = self._lines_before(position) if number is None else number
        for line in io.BytesIO(block):
            number += 1
            start, position = position, position + len(line)
            if not line.strip():
                continue
            try:
                yield Record(f"line {number}", start, position, self._message(line, number - 1))
            except InvalidArgument as error:
                yield Record(f"line {number}", start, position, None, str(error))

    def _lines_before(self, position: int) -> int:
        lines = 0
        with self._open() as handle:
            while position > 0 and (piece := self._checked(handle.read, min(position, BLOCK_BYTES))):
                lines += piece.count(b"\n")
                position -= len(piece)
        return lines

    def _columns(self, block: bytes, first: int) -> tuple[pa.RecordBatch | None, int, int]:
        """Return a block's entries, its number of messages, and the number of messages without key.

        The entries are None if the lines must be parsed one by one. `first` is the number of the first line.
        """
        if not block.strip():
            return None, 0, 0
        numbers = [number for number, line in enumerate(block.split(b"\n"), first) if line.strip()]
        lines = len(numbers)
        try:
            block.decode()  # Arrow accepts invalid UTF-8 as text
            table = self._read(block)
            if len(table) != lines:
                return None, lines, 0
            if self.counts_rows:
                counted = pa.array(self._rows(np.array(numbers, np.int64)))
                if ROW_NUMBER in table.column_names:  # members of NDJSON
                    counted = pc.coalesce(table[ROW_NUMBER].cast(pa.int64()), counted)
                    table = table.drop_columns([ROW_NUMBER])
                table = table.append_column(ROW_NUMBER, counted)
            fields = self._fields_of(table)
            keyless = lines - len(fields) + _empty_lists(fields)
            return entry_columns(fields, self.fields.own), lines, keyless
        except (UnicodeDecodeError, pa.ArrowException, InvalidArgument):
            return None, lines, 0

    def _rows(self, lines: Any) -> Any:
        """Return row numbers from line numbers; the header is no row."""
        return lines - int(self.begin > 0)


class NdjsonSource(TextSource):
    """One NDJSON file."""

    def __init__(self, place: Place, fields: Fields | None = None) -> None:
        super().__init__(place, fields or Fields())
        self.counts_rows = self.fields.counts_rows(())
        types = {"topic": pa.string(), "keys": pa.list_(pa.string())}
        types |= {column.name: own_type(column) for column in self.fields.schema.caller_columns}
        # A `key` is one key or a list, a time is a number or text. The last successful combination is tried first.
        self._options = [
            pj.ParseOptions(
                explicit_schema=pa.schema(
                    {
                        column: {"key": key, "timestamp_ms": time, **types}.get(n, pa.int64())
                        for n, column in self.fields.names.items()
                    }
                ),
                unexpected_field_behavior="ignore",
            )
            for time in (pa.int64(), pa.string())
            for key in (pa.string(), pa.list_(pa.string()))
        ]

    def _read(self, block: bytes) -> pa.Table:
        if not self.unused:
            self.unused = self._unused(block)
        options = pj.ReadOptions(use_threads=False, block_size=len(block) + 1)
        for place, kinds in enumerate(self._options):
            try:
                table = pj.read_json(io.BytesIO(block), options, kinds)
            except pa.ArrowException:
                if place == len(self._options) - 1:
                    raise
            else:
                self._options.insert(0, self._options.pop(place))
                break
        return table

    def _unused(self, block: bytes) -> list[str]:
        """Return the members of the block's first object that are no field."""
        try:
            return self.fields.unused(list(json_object(block.lstrip().partition(b"\n")[0])))
        except InvalidArgument:
            return []

    def _is_whole(self, line: bytes) -> bool:
        try:
            json.loads(line)
        except (ValueError, RecursionError):
            return False
        return line.rstrip().endswith((b"}", b"]"))  # digits may still follow a number

    def _fields_of(self, table: pa.Table) -> pa.Table:
        table = self.fields.of_table(table)
        if "key" not in table.column_names or not pa.types.is_string(table["key"].type):
            return table
        empty = pc.equal(table["key"], "")
        return table.filter(pc.invert(empty.fill_null(False))) if pc.any(empty).as_py() else table

    def _message(self, line: bytes, number: int) -> CheckedMessage:
        row = json_fields(line, [self.fields.names.get(name) for name in _KEY_FIELDS])
        if self.counts_rows and row.get(ROW_NUMBER) is None:
            row[ROW_NUMBER] = number
        return self.fields.checked(self.fields.of_row(row))


class CsvSource(TextSource):
    """One CSV file, separated by commas. Raises `InvalidArgument` also for missing columns."""

    def __init__(self, place: Place, fields: Fields | None = None) -> None:
        super().__init__(place, fields or Fields())
        with self._open() as handle:
            line = self._checked(handle.readline, MAX_ROW_BYTES)
        self.begin = len(line)
        self._header = self._cells(line.removeprefix(b"\xef\xbb\xbf"))
        self.fields.check_columns(self._header, str(place))
        self.unused = self.fields.unused(self._header)
        self.counts_rows = self.fields.counts_rows(self._header)

    def _is_whole(self, line: bytes) -> bool:
        return False  # the last value may be incomplete

    def _cells(self, line: bytes) -> list[str]:
        # Arrow reads cells of any length; the module's own limit is 131,072 characters
        before = csv.field_size_limit(MAX_ROW_BYTES)
        try:
            if line.count(b'"') % 2:  # else the second line of a value would look like a record
                raise csv.Error("a quote is left open")
            return next(csv.reader([line.decode().rstrip("\r\n")], strict=True), [])
        except (ValueError, csv.Error) as error:
            raise InvalidArgument(f"not CSV of one record a line: {error}") from error
        finally:
            csv.field_size_limit(before)

    def _read(self, block: bytes) -> pa.Table:
        if b'"' in block and any(line.count(b'"') % 2 for line in block.split(b"\n")):
            raise InvalidArgument("a quote is left open")
        names = [item for item in self.fields.names.items() if item[1] in self._header]
        # time and own columns may be other than int64: a time is read as text
        kinds = {column: pa.int64() for name, column in names if name in _INTEGERS}
        kinds |= {column: pa.string() for name, column in names if name not in _INTEGERS}
        own = {column.name: own_type(column) for column in self.fields.schema.caller_columns}
        kinds |= {column: own[name] for name, column in names if name in own}
        return pyarrow.csv.read_csv(
            io.BytesIO(block),
            pyarrow.csv.ReadOptions(use_threads=False, block_size=len(block) + 1, column_names=self._header),
            pyarrow.csv.ParseOptions(),
            pyarrow.csv.ConvertOptions(column_types=kinds, include_columns=list(kinds)),
        )

    def _fields_of(self, table: pa.Table) -> pa.Table:
        table = self.fields.of_table(table)
        if "key" in table.column_names:
            return table.filter(pc.not_equal(table["key"], ""))
        keys = pc.utf8_trim_whitespace(table["keys"])
        table = table.set_column(table.column_names.index("keys"), "keys", pc.utf8_split_whitespace(keys))
        return table.filter(pc.not_equal(keys, ""))

    def _message(self, line: bytes, number: int) -> CheckedMessage:
        cells = self._cells(line)
        if len(cells) != len(self._header):
            raise InvalidArgument(f"{len(cells)} columns, not {len(self._header)}")
        row: dict[str, Any] = dict(zip(self._header, cells, strict=True))
        fields = self.fields.of_row(row | ({ROW_NUMBER: self._rows(number)} if self.counts_rows else {}))
        for name in _INTEGERS:
            # Arrow ignores blanks around a number
            if re.fullmatch(r"[ \t]*-?[0-9]{1,20}[ \t]*", str(fields.get(name, ""))):
                fields[name] = int(fields[name])
        fields["topic_id"] = None if fields.get("topic_id") == "" else fields.get("topic_id")
        if "key" in fields:
            fields["key"] = fields["key"] or None
        else:
            fields["keys"] = fields["keys"].split()
        return self.fields.checked(fields)


_NAME = re.compile(
    r"(?P<first>file:(?P<path>.*)#(?P<length>[0-9]+)-(?P<hash>[0-9a-f]{16})(?P<fields>/[0-9a-f]{16})?)"
    r"(~(?P<again>[0-9]+))?",
    re.DOTALL,
)
_HEAD_BYTES = 4096


Source = NdjsonSource | CsvSource | ParquetSource


def open_source(place: Place, fields: Fields | None = None) -> Source:
    """Return the source at `place`, by its name and first bytes. Raises `InvalidArgument`, `CorruptFile`."""
    if isinstance(place, LocalFile) and place.path.is_dir():
        raise InvalidArgument(f"{place} is a folder; give one NDJSON, CSV or Parquet file")
    name = str(place)
    with place.open() as handle:
        head = _head(place, handle)
    if head.startswith(MAGIC):
        if isinstance(place, Stdin):
            raise InvalidArgument("Parquet can't be read from stdin, because its end must be read first: give a file")
        return ParquetSource(place, fields)
    if name.endswith(".parquet"):
        raise CorruptFile(name, "not a Parquet file", offset=0, expected=MAGIC, found=head[:4])
    if name.endswith(CSV):
        return CsvSource(place, fields)
    if (
        not name.endswith(NDJSON)
        and not head.lstrip().startswith((b"{", b"["))
        and (head or not isinstance(place, Stdin))
    ):
        if b"," in head.partition(b"\n")[0]:
            return CsvSource(place, fields)
        raise InvalidArgument(f"{place} is neither NDJSON nor CSV nor Parquet: convert it to one of these")
    return NdjsonSource(place, fields)


def _head(place: Place, handle: IO[bytes]) -> bytes:
    """Return the first bytes of the text, or of a Parquet file."""
    if isinstance(place, Stdin):
        return place.head()
    head = handle.read(_HEAD_BYTES)
    if not head.startswith(GZIP_MAGIC):
        return head
    handle.seek(0)
    try:
        return gzip.GzipFile(fileobj=handle).read(_HEAD_BYTES)
    except (EOFError, OSError, zlib.error) as error:
        raise CorruptFile(str(place), f"damaged gzip file: {error}") from error


def _path_text(source: Source) -> str:
    """Return a source's path as valid Unicode, which names of sources are, and names of files need not be."""
    return os.fsencode(str(source.place)).decode("utf-8", "backslashreplace")


def other_files(source: Source, known: Iterable[str]) -> list[str]:
    """Return the places of files with other content than `source`, among the names `known` of an index."""
    places = []
    for name in known:
        match = _NAME.fullmatch(name)
        if match is not None and match["path"] != _path_text(source):
            length = int(match["length"])
            if source.fingerprint(length) != (length, match["hash"]):
                places.append(match["path"])
    return places


def source_name(source: Source, known: Iterable[str], *, restart: bool, called: str | None = None) -> str | None:
    """Return the name of `source` in an index that knows the names `known`; None for stdin.

    The name has the source's path, or `called` in its place, so that the file may move. Raises `InvalidArgument` if the
    content changed, unless `restart` is True: then the name is a new one.
    """
    if isinstance(source.place, Stdin):
        if called is not None:
            raise InvalidArgument("--store-name can't be used with stdin, which is read from its start each time")
        return None
    place = _path_text(source) if called is None else called
    fields = source.fields.fingerprint()
    changed = same = False
    fingerprint = cache(source.fingerprint)
    read: list[tuple[int, str]] = []
    for name in known:
        match = _NAME.fullmatch(name)
        if match is None or match["path"] != place:
            continue
        length, digest = fingerprint(int(match["length"]))
        if (length, digest) != (int(match["length"]), match["hash"]):
            changed = True
        elif (match["fields"] or "") == fields:
            read.append((int(match["again"] or 0), match["first"]))
        else:
            same = True
    if read:
        # a position only grows, so a run with `restart` that is interrupted needs its own
        again, first = max(read)
        again += restart
        return f"{first}~{again}" if again else first
    if changed and not same and not restart:
        raise InvalidArgument(f"{source.place} has changed since it was read: its beginning differs. {_AGAIN}")
    length, digest = source.fingerprint(None)
    return f"file:{place}#{length}-{digest}{fields}"
