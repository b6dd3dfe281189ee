"""Reads files of messages, the entry form of `ingest`: rows of files that have the fields of entries.

One thread; memory: a few blocks. Other columns and blank lines are skipped. A message without key makes no entry. A
position is a row number of a file with columns, or a byte offset in unpacked text. A last line without newline may
still be written. Unless it is a complete JSON object, it is held back and the position stays before it. Arrow parses a
block of lines at once. If that fails, or gives another number of rows, the lines are parsed one by one. In CSV `keys`
are separated by blanks, as in RocketMQ; times are epoch milliseconds or ISO 8601. The name of a source is
`file:PATH#LENGTH-HASH`, with the absolute path or URI and a fingerprint of the content. A file that grows keeps its
name; another file at the same path has another one. With --column or --constant, ``/`` and a hash of these options
follow: other messages need another position. After --restart, ``~`` and a number follow: the file is read again under
a position of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cache, partial
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.connectors.files.rows.batch import RowFile
from tiered_index.connectors.files.rows.columns import (
    MAX_ROW_BYTES,
    CheckedMessage,
    check_kinds,
    entry_columns,
    has_items,
    is_text,
    own_type,
)
from tiered_index.connectors.files.rows.fields import ROW_NUMBER, Fields, MessageBatch, Record, written_keys
from tiered_index.connectors.files.rows.forms import rows_at
from tiered_index.connectors.files.rows.parquet import ParquetTable
from tiered_index.connectors.files.rows.places import Place, Stdin
from tiered_index.connectors.files.rows.table import ColumnsFile
from tiered_index.connectors.files.rows.text import (
    CsvFile,
    NdjsonFile,
    TextBlock,
    TextBlocks,
    decompressed,
    read_text,
    too_long,
)
from tiered_index.connectors.json_paths import Unclear
from tiered_index.errors import InvalidArgument

FINGERPRINT_BYTES = 1 << 20
_AGAIN = "Give it another name, or read it from its start with --restart"
_KEY_FIELDS = ("key", "keys")
_INTEGERS = ("queue_id", "offset", "size", "topic_id")


class MessageFile(ABC):
    """The messages of one file. Raises `InvalidArgument` for one that is no message, `CorruptFile` for damage."""

    unit: str
    """The unit of positions."""
    held_back_bytes = 0
    """Bytes of a last line without newline, or of a last row with an open quote: they are held back."""
    held_back_lines = 0
    """The number of newlines in them: 0, unless a quote is open."""

    def __init__(self, place: Place, fields: Fields, total: int | None, names: Iterable[str]) -> None:
        self.place, self.fields = place, fields
        self.total = total
        """The greatest position; None: not known."""
        there = list(names)
        self.unused = fields.unused(there)
        """Columns that are no field."""
        self.counts_rows = fields.counts_rows(there)
        """Whether the offset or another field is the generated row number."""

    @abstractmethod
    def fingerprint(self, length: int | None) -> tuple[int, str]:
        """Return the number of bytes that a hash covers (`length`, or as many as a new name has), and the hash."""

    @abstractmethod
    def batches(self, start: int, end: int | None = None) -> Iterator[MessageBatch]:
        """Yield the messages from position `start`, the end of one, to before `end`, which is the end of one, too."""

    @abstractmethod
    def part(self, begin: int, end: int | None) -> Iterator[MessageBatch]:
        """Yield the messages that begin at positions [begin, end) (None: to the end)."""

    def _entries(self, rows: pa.Table) -> tuple[pa.RecordBatch | None, int]:
        """Return the entries of rows with the fields of messages, and the number of rows without key.

        None: rows must be read by themselves.
        """
        with_key = self._with_key(rows)
        keyless = len(rows) - len(with_key) + _empty_lists(with_key)
        return entry_columns(with_key, self.fields.own), keyless

    @abstractmethod
    def _with_key(self, rows: pa.Table) -> pa.Table:
        """Return rows without those that have no key."""


class ColumnMessages(MessageFile):
    """The messages of a file with columns: Parquet or Arrow. Raises `InvalidArgument` also for missing columns."""

    unit = "rows"

    def __init__(self, rows: ColumnsFile, fields: Fields) -> None:
        place = rows.place
        self._file, self.table = rows.place, rows.table
        self.schema = schema = self.table.schema
        super().__init__(place, fields, self.table.rows, schema.names)
        fields.check_columns(schema.names, str(place))
        there = {name: column for name, column in fields.names.items() if column in schema.names}
        kinds = {name: schema.field(column).type for name, column in there.items()}
        check_kinds(kinds, fields.shown, f"{place}: ", fields.schema.caller_columns)
        self._names = list(dict.fromkeys(there.values()))
        self.group_rows = self.table.group_rows if isinstance(self.table, ParquetTable) else [self.table.rows]

    def fingerprint(self, length: int | None) -> tuple[int, str]:
        """Return the file's size and a hash of its last MiB, which has the footer of Parquet."""
        with self._file.ranges() as handle:
            size = handle.seek(0, io.SEEK_END)
            handle.seek(max(0, size - FINGERPRINT_BYTES))
            return size, hashlib.sha256(handle.read(FINGERPRINT_BYTES)).hexdigest()[:16]

    def batches(self, start: int, end: int | None = None) -> Iterator[MessageBatch]:
        if self.total is not None and start > self.total:
            raise InvalidArgument(
                f"{self.place} has changed since it was read up to row {start}: it has {self.total} rows. {_AGAIN}"
            )
        for first, rows in self.table.read(self._names, start) if end is None or start < end else ():
            yield self._batch(rows, first)
            if first + len(rows) == end:
                return

    def part(self, begin: int, end: int | None) -> Iterator[MessageBatch]:
        """As `MessageFile`; the rows are those of row groups."""
        return self.batches(begin, end)

    def has_every_key(self, begin: int, end: int | None) -> bool:
        """Return whether the statistics of the file say that each row of the row groups in [begin, end) has one key."""
        last = sum(self.group_rows) if end is None else end
        groups = [number for number, rows in enumerate(accumulate(self.group_rows)) if begin < rows <= last]
        column = self.fields.names.get("key", "")
        # a repeated column that is no list by the file's schema has its own name, too
        is_one = column in self.schema.names and is_text(self.schema.field(column).type)
        table = self.table
        return is_one and isinstance(table, ParquetTable) and all(table.has_every_text(n, column) for n in groups)

    def _batch(self, rows: pa.Table, first: int) -> MessageBatch:
        end = first + len(rows)
        if self.counts_rows:
            rows = rows.append_column(ROW_NUMBER, pa.array(range(first, end), pa.int64()))
        messages = self.fields.of_table(rows)
        columns, keyless = self._entries(messages)
        return MessageBatch(columns, len(rows), end, partial(self._records, messages, first), keyless)

    def _with_key(self, rows: pa.Table) -> pa.Table:
        keys = rows["keys" if "keys" in rows.column_names else "key"]
        has_key = pc.not_equal(keys, "") if is_text(keys.type) else pc.is_valid(keys)
        # the filter leaves nulls out, too
        return rows if pc.all(has_key, skip_nulls=False).as_py() else rows.filter(has_key)

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


class TextMessages(MessageFile):
    """The messages of a text: NDJSON or CSV. Raises `InvalidArgument` also for columns that CSV lacks."""

    unit = "bytes"

    def __init__(self, text: NdjsonFile | CsvFile, fields: Fields) -> None:
        self._text, place = text, text.file
        is_whole_known = text.compression is None and not isinstance(place, Stdin)
        names = list[str]()
        if isinstance(text, CsvFile):
            names = text.header
            fields.check_columns(names, str(place))
        else:
            with contextlib.suppress(InvalidArgument):
                names = text.first_row()
        super().__init__(place, fields, text.size_bytes if is_whole_known else None, names)
        self.counts_rows = fields.counts_rows(text.header if isinstance(text, CsvFile) else ())
        # the types of columns. The last ones with which a block could be read are tried first
        self._kinds = list(self._possible_kinds())

    def _possible_kinds(self) -> Iterator[dict[str, pa.DataType]]:
        names = self.fields.names
        own = {column.name: own_type(column) for column in self.fields.schema.caller_columns}
        if isinstance(self._text, CsvFile):
            # a time is an integer or text
            kinds = {**dict.fromkeys(names, pa.string()), **dict.fromkeys(_INTEGERS, pa.int64()), **own}
            yield {column: kinds[name] for name, column in names.items() if column in self._text.header}
            return
        # a `key` is one key or a list
        kinds = {"topic": pa.string(), "keys": pa.list_(pa.string()), **own}
        for time in (pa.int64(), pa.string()):
            for key in (pa.string(), pa.list_(pa.string())):
                of_names = {"key": key, "timestamp_ms": time, **kinds}
                yield {column: of_names.get(name, pa.int64()) for name, column in names.items()}

    def fingerprint(self, length: int | None) -> tuple[int, str]:
        """Return the number of first bytes of text that the hash covers (`length`, or up to 1 MiB), and the hash."""
        size = FINGERPRINT_BYTES if length is None else length
        with decompressed(self.place, self._text.compression) as handle:
            head = read_text(self.place, handle, self._text.compression, size)
        return len(head), hashlib.sha256(head).hexdigest()[:16]

    def part(self, begin: int, end: int | None) -> Iterator[MessageBatch]:
        """As `MessageFile`. A record of CSV that has several lines is refused in one of several parts of a file."""
        if isinstance(self._text, CsvFile):
            self._text.has_short_records = begin > 0 or end is not None
        start = self._line_from(begin)
        last = None if end is None else self._line_from(end)
        if last is None or start < last:
            yield from self.batches(start, last)

    def _line_from(self, position: int) -> int:
        """Return the position of the first line that begins at a position of an unpacked text, or behind it."""
        if not position:
            return 0
        with self.place.open() as handle:
            handle.seek(position - 1)
            return position - 1 + len(handle.readline(MAX_ROW_BYTES))

    def batches(self, start: int, end: int | None = None) -> Iterator[MessageBatch]:
        text, bound = self._text, () if end is None else (end,)
        reading = TextBlocks(text, max(start, text.begin), *bound)
        if not start:
            reading.lines_before = text.head.count(b"\n", 0, text.begin)
        elif self.counts_rows and text.compression is None:
            reading.lines_before = self._lines_before(start)
        is_checked = not start or isinstance(self.place, Stdin)
        for block in reading.read():
            if not is_checked:
                self._check_unchanged(start, reading.before, block.data[:1])
                is_checked = True
            before = None if reading.lines_before is None else reading.lines_before + block.lines
            end_of_block = block.begin + len(block.data)
            if block.too_long is not None:
                if block.is_end:
                    number = (self._lines_before(block.too_long) if before is None else before) + 1
                    bad = Record(f"line {number}", block.too_long, end_of_block, None, too_long(block.too_long))
                    yield MessageBatch(None, 1, end_of_block, partial(iter, [bad]))
                continue
            columns, messages, keyless = self._columns(block, before or 0)
            yield MessageBatch(columns, messages, end_of_block, partial(self._records, block, before), keyless)
        if not is_checked:
            self._check_unchanged(start, reading.before, b"" if not reading.held_back_bytes else b"held back")
        self.held_back_bytes, self.held_back_lines = reading.held_back_bytes, reading.held_back_lines

    def _check_unchanged(self, start: int, before: bytes, behind: bytes) -> None:
        """Raise `InvalidArgument` unless a line ends at `start`, by the bytes around it.

        The last line that was read may have had no newline. It must have one now, or still be the last line.
        """
        if before != b"\n" and (not before or behind not in (b"", b"\n", b"\r")):
            problem = "no line ends there" if before else "it is shorter"
            raise InvalidArgument(f"{self.place} has changed since it was read up to byte {start}: {problem}. {_AGAIN}")

    def _lines_before(self, position: int) -> int:
        return sum(len(block.newlines) for block in TextBlocks(self._text, 0, position, is_closed=True).read())

    def _columns(self, block: TextBlock, lines_before: int) -> tuple[pa.RecordBatch | None, int, int]:
        """Return a block's entries, its number of messages, and the number of messages without key.

        The entries are None if the lines must be parsed one by one.
        """
        starts, _ = block.places()
        if not len(starts):
            return None, 0, 0
        try:
            table = self._table(block.data)
            if len(table) != len(starts):
                return None, len(starts), 0
            if self.counts_rows:
                lines = np.searchsorted(block.newlines, starts) + lines_before
                counted = pa.array(self._row_of(lines))
                if ROW_NUMBER in table.column_names:  # members of NDJSON
                    counted = pc.coalesce(table[ROW_NUMBER].cast(pa.int64()), counted)
                    table = table.drop_columns([ROW_NUMBER])
                table = table.append_column(ROW_NUMBER, counted)
            columns, keyless = self._entries(self.fields.of_table(table))
            return columns, len(starts), keyless
        except (Unclear, pa.ArrowException, InvalidArgument):
            return None, len(starts), 0

    def _table(self, lines: bytes) -> pa.Table:
        for place, kinds in enumerate(self._kinds):
            try:
                table = self._text.table(lines, kinds)
            except pa.ArrowException:
                if place == len(self._kinds) - 1:
                    raise
            else:
                self._kinds.insert(0, self._kinds.pop(place))
                break
        return table

    def _with_key(self, rows: pa.Table) -> pa.Table:
        is_csv = isinstance(self._text, CsvFile)
        if is_csv and "key" not in rows.column_names:
            # texts of keys
            keys = pc.utf8_trim_whitespace(rows["keys"])
            rows = rows.set_column(rows.column_names.index("keys"), "keys", pc.utf8_split_whitespace(keys))
            return rows.filter(pc.not_equal(keys, ""))
        if "key" not in rows.column_names or not pa.types.is_string(rows["key"].type):
            return rows
        # a null of NDJSON may be a key that is missing: such rows are read by themselves
        has_key = pc.not_equal(rows["key"], "").fill_null(True)
        return rows if pc.all(has_key).as_py() else rows.filter(has_key)

    def _row_of(self, line: Any) -> Any:
        """Return the numbers of rows from those of lines, from 0; the header is no row."""
        return line - int(isinstance(self._text, CsvFile))

    def _records(self, block: TextBlock, lines_before: int | None) -> Iterator[Record]:
        if not block.data.strip():
            return
        before = self._lines_before(block.begin) if lines_before is None else lines_before
        for number, start, line in self._text.numbered(block.data, block.begin, before + 1):
            where, end = f"line {number}", start + len(line)
            try:
                yield Record(where, start, end, self._message(line, number - 1))
            except InvalidArgument as error:
                yield Record(where, start, end, None, str(error))

    def _message(self, line: bytes, number: int) -> CheckedMessage:
        """Return the message of line `number`, from 0. Raises `InvalidArgument`."""
        row = self._text.row(line)
        if self.counts_rows and row.get(ROW_NUMBER) is None:
            row[ROW_NUMBER] = self._row_of(number)
        if not isinstance(self._text, CsvFile):
            return self.fields.checked(self.fields.of_row(written_keys(row, map(self.fields.names.get, _KEY_FIELDS))))
        fields = self.fields.of_row(row)
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


def open_source(place: Place, fields: Fields | None = None) -> ColumnMessages | TextMessages:
    """Return the messages at `place`. Raises `InvalidArgument`, `CorruptFile`."""
    return messages_of(rows_at(place), fields or Fields())


def messages_of(rows: RowFile, fields: Fields) -> ColumnMessages | TextMessages:
    """Return the messages of a file of rows. Raises `InvalidArgument`."""
    if isinstance(rows, ColumnsFile):
        return ColumnMessages(rows, fields)
    assert isinstance(rows, NdjsonFile | CsvFile)
    return TextMessages(rows, fields)


def _path_text(source: MessageFile) -> str:
    """Return a source's path as valid Unicode, which names of sources are, and names of files need not be."""
    return os.fsencode(str(source.place)).decode("utf-8", "backslashreplace")


def other_files(source: MessageFile, known: Iterable[str]) -> list[str]:
    """Return the places of files with other content than `source`, among the names `known` of an index."""
    places = []
    for name in known:
        match = _NAME.fullmatch(name)
        if match is not None and match["path"] != _path_text(source):
            length = int(match["length"])
            if source.fingerprint(length) != (length, match["hash"]):
                places.append(match["path"])
    return places


def source_name(source: MessageFile, known: Iterable[str], *, restart: bool, called: str | None = None) -> str | None:
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
        raise InvalidArgument(f"{source.place} has changed since it was read: its start differs. {_AGAIN}")
    length, digest = source.fingerprint(None)
    return f"file:{place}#{length}-{digest}{fields}"
