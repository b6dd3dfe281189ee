"""Reads untrusted Arrow streams and files within a bound of memory.

A few kilobytes of a stream can become any number of bytes: compressed buffers, one long text that many cells of a
dictionary share, a topic with a million keys. The sum is known before Arrow decodes the stream. Types that can't be
added up (nested types, views, and in a body dictionaries that grow from batch to batch) are refused.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
from collections.abc import Callable, Iterator, Sequence, Set
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.connectors.files.rows.columns import is_list, text_bytes
from tiered_index.connectors.files.rows.parquet import BATCH_ROWS, bounded
from tiered_index.connectors.files.rows.places import File
from tiered_index.errors import CorruptFile, InvalidArgument

_NO_STREAM = "the body is not an Arrow stream"
# Fields of the flat buffers `Message`, `RecordBatch` and `DictionaryBatch`, by their order in Arrow's format.
_MESSAGE_TYPE, _MESSAGE_HEADER, _MESSAGE_BODY = 1, 2, 3
_BATCH_ROWS, _BATCH_BUFFERS, _BATCH_COMPRESSION, _DICTIONARY_DATA, _DICTIONARY_IS_DELTA = 0, 2, 3, 1, 2
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
# Fields of the flat buffer `Footer`, its end, and the bytes of a `Block`
_FOOTER_SCHEMA, _FOOTER_DICTIONARIES, _FOOTER_BATCHES = 1, 2, 3
_FOOTER_END, _BLOCK_BYTES = b"ARROW1", 24
# A flat buffer `Message` of a schema (format V5) without the schema, which is at a later place of the same buffer
_SCHEMA_MESSAGE = struct.Struct("<I4xHHHHH2xiIHBx")
_SCHEMA_TABLE_AT, _SCHEMA_OFFSET_AT = 20, 24
FILE_MAGIC, STREAM_MAGIC = b"ARROW1\0\0", b"\xff\xff\xff\xff"
"""The first bytes of a file, and of a stream. Most files have a stream behind their first bytes."""
# Most bytes of a message's metadata, and most bytes of a batch with its dictionaries, as they are and decompressed
_METADATA_BYTES, _FILE_BATCH_BYTES = 16 << 20, 128 << 20
_BUFFER_BYTES = 16
# Mark of an uncompressed buffer in a compressed batch
_AS_IT_IS = -1


class TooLarge(InvalidArgument):
    """A stream has more bytes, decompressed, than its reader accepts."""


def read_table(body: bytes, most_bytes: int) -> pa.Table:
    """Return the validated table of a stream. Raises `InvalidArgument`, `TooLarge`.

    The stream may have `most_bytes` bytes, decompressed and with the text of each cell counted separately.
    """
    try:
        left, source = most_bytes, pa.BufferReader(body)
        for message in pa.ipc.MessageReader.open_stream(source):
            if message.type in ("record batch", "dictionary"):
                left -= _decompressed_bytes(message)
            if left < 0:
                raise _too_large(most_bytes)
        if source.tell() < len(body):
            # perhaps a second stream, whose entries would be lost without an error
            raise InvalidArgument("the body has data after the end of the Arrow stream")
        with pa.ipc.open_stream(pa.py_buffer(body)) as stream:
            for field in stream.schema:
                _check_type(field)
            # An empty list column may have no offsets: Arrow aborts the process when it flattens one
            table = pa.Table.from_batches([batch for batch in stream if len(batch)], stream.schema)
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, struct.error, IndexError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(_NO_STREAM) from error
    for column in table.itercolumns():
        if pa.types.is_dictionary(column.type):
            left -= sum(int(text_bytes(chunk).sum()) for chunk in column.chunks)
    if left < 0:
        raise _too_large(most_bytes)
    return table


class ArrowTable:
    """The rows of one file, or of a stream that was written to a file. One thread.

    The constructor reads the header of each message: one request for each batch of some MiB. `damage` is why not all
    batches are known: `rows` are those of the batches before it. Raises `CorruptFile`, and `InvalidArgument` for a
    batch that needs too much memory.
    """

    damage: CorruptFile | None = None

    def __init__(self, place: File) -> None:
        self._place = place
        # position and size of each message before the first batch, and of each later one with its first row
        self._batches: list[tuple[int, int, int]] = []
        self._dictionaries: list[tuple[int, int, int]] = []
        self.rows = 0
        with place.open() as handle:
            end = handle.seek(0, os.SEEK_END)
            handle.seek(0)
            if handle.read(len(FILE_MAGIC)) == FILE_MAGIC:
                # the messages may not be behind one another, as a stream has them: Polars writes such files
                self._open_by_footer(handle, end)
            else:
                self._open_stream(handle, end)

    @property
    def starts(self) -> list[int]:
        """The first row of each batch."""
        return [first for _, _, first in self._batches]

    def _open_stream(self, handle: IO[bytes], end: int, begin: int = 0) -> None:
        size = self._size(handle, begin, end)[0]
        handle.seek(begin)
        self._set_schema(handle.read(size))
        position = begin + size
        try:
            # a stream may end without the mark of its end
            while position < end and (size := self._add(handle, position, end)):
                position += size
        except CorruptFile as error:
            if not self.rows:
                raise
            self.damage = error

    def _open_by_footer(self, handle: IO[bytes], end: int) -> None:
        handle.seek(max(0, end - 4 - len(_FOOTER_END)))
        tail = handle.read()
        length = struct.unpack_from("<i", tail)[0] if tail.endswith(_FOOTER_END) and len(tail) > 4 else 0
        if not 0 < length <= min(_METADATA_BYTES, end - len(FILE_MAGIC) - len(tail)):
            damage = self._damaged("it is cut off: there is no footer")
            # its batches are behind one another if Arrow has written it
            with contextlib.suppress(CorruptFile):
                self._open_stream(handle, end, len(FILE_MAGIC))
            if not self.rows:
                raise damage
            self.damage = damage
            return
        handle.seek(end - len(tail) - length)
        footer = memoryview(handle.read(length))
        try:
            root = _u32(footer, 0)
            schema = _child(footer, root, _FOOTER_SCHEMA)
            blocks = [(at, _DICTIONARY) for at in _blocks(footer, root, _FOOTER_DICTIONARIES)]
            blocks += [(at, _BATCH) for at in _blocks(footer, root, _FOOTER_BATCHES)]
            message = b"" if schema is None else _schema_message(footer, schema)
        except (struct.error, IndexError, InvalidArgument) as error:
            raise self._damaged("its footer can't be read") from error
        if not message:
            raise self._damaged("its footer has no schema")
        self._set_schema(message)
        for position, kind in blocks:
            if not 0 < position < end or not self._add(handle, position, end, {kind}):
                raise self._damaged(f"byte {position:,} begins no message")

    def _add(
        self, handle: IO[bytes], position: int, end: int, kinds: Set[int] = frozenset({_DICTIONARY, _BATCH})
    ) -> int:
        """Add the message at a position, of one of some kinds, and return its size; 0: the stream ends there."""
        size, kind, rows = self._size(handle, position, end)
        if size and kind not in kinds:
            raise self._damaged(f"the message at byte {position:,} is of another kind")
        if kind == _BATCH:
            self._batches.append((position, size, self.rows))
            self.rows += rows
        elif kind == _DICTIONARY:
            self._dictionaries.append((position, size, len(self._batches)))
        return size

    def _size(self, handle: IO[bytes], position: int, end: int) -> tuple[int, int, int]:
        """Return the size, the kind and the rows of the message at a position; size 0: the stream ends there."""
        handle.seek(position)
        begin = handle.read(8)
        if begin[:4] != STREAM_MAGIC or len(begin) < 8:
            raise self._damaged(f"byte {position:,} begins no message")
        length = struct.unpack_from("<i", begin, 4)[0]
        if length == 0:
            return 0, 0, 0
        if not 0 < length <= _METADATA_BYTES:
            raise self._damaged(f"the message at byte {position:,} states {length:,} bytes of metadata")
        data = memoryview(handle.read(length))
        if len(data) < length:
            raise self._damaged(f"the message at byte {position:,} is cut off")
        try:
            table = _u32(data, 0)
            kind_at, body_at = _field(data, table, _MESSAGE_TYPE), _field(data, table, _MESSAGE_BODY)
            kind = 0 if kind_at is None else data[kind_at]
            body = 0 if body_at is None else struct.unpack_from("<q", data, body_at)[0]
            rows_at = None
            if kind == _BATCH and (header := _child(data, table, _MESSAGE_HEADER)) is not None:
                rows_at = _field(data, header, _BATCH_ROWS)
            rows = 0 if rows_at is None else struct.unpack_from("<q", data, rows_at)[0]
        except (struct.error, IndexError, InvalidArgument) as error:
            raise self._damaged(f"the message at byte {position:,} has no readable metadata") from error
        if body < 0 or rows < 0 or position + 8 + length + body > end:
            raise self._damaged(f"the message at byte {position:,} is cut off, or has false sizes")
        return 8 + length + body, kind, rows

    def _damaged(self, problem: str) -> CorruptFile:
        return CorruptFile(str(self._place), f"not an Arrow file that can be read: {problem}")

    def _set_schema(self, message: bytes) -> None:
        self._schema_bytes = message
        try:
            self.schema = pa.ipc.read_schema(pa.py_buffer(message))
            # raises for a name that is not UTF-8
            self.names = self.schema.names
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._damaged(str(error)) from error

    def _bytes(self, handle: IO[bytes], position: int, size: int) -> bytes:
        """Return the bytes of a message."""
        handle.seek(position)
        return handle.read(size)

    def read(self, names: Sequence[str], start: int = 0) -> Iterator[tuple[int, pa.Table]]:
        """Yield columns `names` of the rows from `start`, as tables with the number of their first row."""
        columns = [number for number, name in enumerate(self.names) if name in names]
        options = pa.ipc.IpcReadOptions(included_fields=columns, use_threads=False)
        with self._place.open() as handle:
            stream = _Stream(options)
            for number, (_, _, first) in enumerate(self._batches):
                ends = self._batches[number + 1 :][:1]
                # a batch that states no row may be damaged
                if first < (ends[0][2] if ends else self.rows) <= start:
                    continue
                rows = self._batch(handle, number, stream)
                skip = max(0, start - first)
                try:
                    stream.validate(rows)
                    for at in range(skip, len(rows), BATCH_ROWS):
                        for begin, part in bounded(rows.slice(at, BATCH_ROWS), first + at, self._place):
                            yield begin, pa.Table.from_batches([part])
                except (pa.ArrowException, UnicodeDecodeError) as error:
                    raise self._damaged(f"rows from {first:,} on: {error}") from error

    def _batch(self, handle: IO[bytes], number: int, stream: _Stream) -> pa.RecordBatch:
        """Return a batch. `stream` has the dictionaries of the one before it."""
        position, size, first = self._batches[number]
        before = [(at, length) for at, length, batch in self._dictionaries if batch <= number]
        total, new = sum(length for _, length in before) + size, before[stream.dictionaries :]
        try:
            if total <= _FILE_BATCH_BYTES:
                messages = [self._bytes(handle, at, length) for at, length in (*new, (position, size))]
                sizes = [_decompressed_bytes(pa.ipc.read_message(message), may_grow=True) for message in messages]
                total = stream.dictionary_bytes + sum(sizes)
            if total > _FILE_BATCH_BYTES:
                raise InvalidArgument(
                    f"{self._place}: the batch of row {first + 1:,} has {total:,} bytes, but may have "
                    f"{_FILE_BATCH_BYTES:,}: write the file with smaller batches"
                )
            stream.dictionaries, stream.dictionary_bytes = len(before), total - sizes[-1]
            rows = stream.next(self._schema_bytes, messages)
        except (pa.ArrowException, OSError, ValueError, struct.error, IndexError, StopIteration) as error:
            if isinstance(error, InvalidArgument) and str(error) != _NO_STREAM:
                raise
            raise self._damaged(f"the batch of row {first + 1:,}: {error}") from error
        stated = (self._batches[number + 1][2] if number + 1 < len(self._batches) else self.rows) - first
        CorruptFile.unless_equal(str(self._place), f"rows of the batch at byte {position:,}", stated, len(rows))
        return rows


class _Stream(io.RawIOBase):
    """A stream of messages as Arrow reads them, one batch at a time: so each dictionary is decoded once."""

    def __init__(self, options: pa.ipc.IpcReadOptions) -> None:
        super().__init__()
        self._options, self._left = options, memoryview(b"")
        self._reader: Any = None
        self._valid: dict[int, pa.Array] = {}
        self.dictionaries = self.dictionary_bytes = 0
        """The number of dictionaries that were read, and their decompressed bytes."""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        size = len(self._left) if size < 0 else size
        data, self._left = self._left[:size], self._left[size:]
        return data.tobytes()

    def next(self, schema: bytes, messages: Sequence[bytes]) -> pa.RecordBatch:
        """Return the batch of further messages. Raises Arrow's errors, and `StopIteration`."""
        self._left = memoryview(b"".join(messages if self._reader is not None else (schema, *messages)))
        if self._reader is None:
            self._reader = pa.ipc.open_stream(pa.PythonFile(self, "r"), options=self._options)
        rows: pa.RecordBatch = self._reader.read_next_batch()
        return rows

    def validate(self, rows: pa.RecordBatch) -> None:
        """Validate a batch, each dictionary once. Raises Arrow's errors."""
        for number, column in enumerate(rows.columns):
            known = self._valid.get(number)
            if known is None or not _is_shared(column, known):
                column.validate(full=True)
                if pa.types.is_dictionary(column.type):
                    self._valid[number] = column
                continue
            column.indices.validate(full=True)
            places = pc.min_max(column.indices)
            if len(column) > column.null_count and not 0 <= places["min"].as_py() <= places["max"].as_py() < len(
                column.dictionary
            ):
                raise pa.ArrowInvalid("an index is outside its dictionary")


def _is_shared(column: pa.DictionaryArray, known: pa.DictionaryArray) -> bool:
    """Return whether two columns have one dictionary in memory."""
    buffers = (
        [None if each is None else (each.address, each.size) for each in array.dictionary.buffers()]
        for array in (column, known)
    )
    return len(column.dictionary) == len(known.dictionary) and next(buffers) == next(buffers)


def _too_large(most_bytes: int) -> TooLarge:
    return TooLarge(f"the Arrow stream has more than {most_bytes:,} bytes when it is decompressed")


def _check_type(field: pa.Field) -> None:
    kind, of_texts = field.type, (pa.types.is_string, pa.types.is_large_string)
    plain: tuple[Callable[[pa.DataType], bool], ...] = (*of_texts, pa.types.is_integer, pa.types.is_null)
    if pa.types.is_dictionary(kind):
        kind, plain = kind.value_type, of_texts
    elif is_list(kind):
        kind = kind.value_type
    if not any(is_so(kind) for is_so in plain):
        raise InvalidArgument(f"column {field.name!r:.80} has a type that no message column may have: cast it")


def _decompressed_bytes(message: pa.ipc.Message, *, may_grow: bool = False) -> int:
    """Return the decompressed size of a batch's buffers, as declared; Arrow never decompresses more.

    Raises `InvalidArgument` for a part of a dictionary, unless it `may_grow`.
    """
    meta, body = memoryview(message.metadata), memoryview(message.body or b"")
    header = _child(meta, _u32(meta, 0), _MESSAGE_HEADER)
    if header is None:
        raise InvalidArgument(_NO_STREAM)
    if message.type == "dictionary":
        is_delta = _field(meta, header, _DICTIONARY_IS_DELTA)
        if is_delta is not None and meta[is_delta] and not may_grow:
            raise InvalidArgument("a dictionary grows from batch to batch; send it whole")
        header = _child(meta, header, _DICTIONARY_DATA)
    if header is None:
        raise InvalidArgument(_NO_STREAM)
    buffers = _child(meta, header, _BATCH_BUFFERS)
    if buffers is None:
        return 0
    is_compressed = _field(meta, header, _BATCH_COMPRESSION) is not None
    total = 0
    for number in range(_u32(meta, buffers)):
        at, length = struct.unpack_from("<qq", meta, buffers + 4 + number * _BUFFER_BYTES)
        if at < 0 or length < 0 or at + length > len(body):
            raise InvalidArgument(_NO_STREAM)
        declared = struct.unpack_from("<q", body, at)[0] if is_compressed and length else length
        if declared < _AS_IT_IS:
            raise InvalidArgument(_NO_STREAM)
        total += length if declared == _AS_IT_IS else declared
    return total


def _blocks(footer: memoryview, root: int, number: int) -> list[int]:
    """Return the positions of the messages that a footer lists in a field."""
    blocks = _child(footer, root, number)
    count = 0 if blocks is None else _u32(footer, blocks)
    return [struct.unpack_from("<q", footer, (blocks or 0) + 4 + _BLOCK_BYTES * each)[0] for each in range(count)]


def _schema_message(footer: memoryview, schema: int) -> bytes:
    """Return the message of the schema that is at a place of a footer."""
    size = _SCHEMA_MESSAGE.size
    # offset of the table; its list of fields: bytes of the list and the table, places of version, type and schema
    begin = _SCHEMA_MESSAGE.pack(_SCHEMA_TABLE_AT, 10, 12, 8, 10, 4, 12, size + schema - _SCHEMA_OFFSET_AT, 4, _SCHEMA)
    data = begin + footer
    data += bytes(-len(data) % 8)
    return STREAM_MAGIC + struct.pack("<i", len(data)) + data


# flat buffers: a table begins with its distance from its list of fields; offsets point onwards


def _u32(data: memoryview, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])


def _field(data: memoryview, table: int, number: int) -> int | None:
    """Return the position of a table's field; None: the table omits it."""
    fields = table - struct.unpack_from("<i", data, table)[0]
    if fields < 0:
        raise InvalidArgument(_NO_STREAM)
    size = struct.unpack_from("<H", data, fields)[0]
    place = 4 + 2 * number
    distance = struct.unpack_from("<H", data, fields + place)[0] if place < size else 0
    return table + distance if distance else None


def _child(data: memoryview, table: int, number: int) -> int | None:
    """Return the position of the table or vector that a field points to; None: the table omits the field."""
    at = _field(data, table, number)
    return None if at is None else at + _u32(data, at)
