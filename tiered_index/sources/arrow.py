"""Reads untrusted Arrow streams within a bound of memory. Pure.

A few kilobytes of a stream can become any number of bytes: compressed buffers, one long text that many cells of a
dictionary share, a topic with a million keys. The sum is known before Arrow decodes the stream. Types that can't be
added up (nested types, views, dictionaries that grow from batch to batch) are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import pyarrow as pa

from tiered_index.errors import InvalidArgument
from tiered_index.sources.columns import is_list, text_bytes

_NO_STREAM = "the body is not an Arrow stream"
# Fields of the flat buffers `Message`, `RecordBatch` and `DictionaryBatch`, by their order in Arrow's format.
_MESSAGE_HEADER, _BATCH_BUFFERS, _BATCH_COMPRESSION, _DICTIONARY_DATA, _DICTIONARY_IS_DELTA = 2, 2, 3, 1, 2
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


def _decompressed_bytes(message: pa.ipc.Message) -> int:
    """Return the decompressed size of a batch's buffers, as declared; Arrow never decompresses more."""
    meta, body = memoryview(message.metadata), memoryview(message.body or b"")
    header = _child(meta, _u32(meta, 0), _MESSAGE_HEADER)
    if header is None:
        raise InvalidArgument(_NO_STREAM)
    if message.type == "dictionary":
        is_delta = _field(meta, header, _DICTIONARY_IS_DELTA)
        if is_delta is not None and meta[is_delta]:
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
