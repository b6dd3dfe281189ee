"""Decodes, checks, decompresses, shows and encodes one message of the commit log. Pure.

It follows RocketMQ's `MessageDecoder`, `CommitLog` and `MessageExtEncoder`. Unlike them, it treats a negative length, a
size that does not add up and a topic that is not UTF-8 as damage. The lengths in a head are checked before so many
bytes are read (`check_head`, `check_tail`): four wrong bytes could otherwise make a reader load a whole segment. Errors
never quote stored bytes, because the caller may not be allowed to see the message.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from tiered_index.base.encoding import EXCERPT_OF_BYTES, MAX_BODY_BYTES, BodyFormat, show_bytes
from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.connectors.rocketmq.log import layout
from tiered_index.connectors.rocketmq.log.layout import Host
from tiered_index.errors import CorruptFile
from tiered_index.types import MAX_TOPIC_UNITS

# Type 0 is in messages of clients older than the compression types.
_NAMES = {0: "zlib", layout.COMPRESSION_LZ4: "lz4", layout.COMPRESSION_ZSTD: "zstd", layout.COMPRESSION_ZLIB: "zlib"}


def _compression_of(sys_flag: int) -> str | None:
    """Return "zlib", "lz4" or "zstd", None for a plain body, or "unknown" for a type that RocketMQ does not have."""
    return _NAMES.get(sys_flag & layout.COMPRESSION_MASK, "unknown") if sys_flag & layout.COMPRESSED else None


def decompress(
    body: bytes, sys_flag: int, *, file: str = "message", max_bytes: int = MAX_BODY_BYTES, only_begin: bool = False
) -> bytes:
    """Return the plain body (of zlib, LZ4 frames or zstd).

    A few KiB can become gigabytes, so a body of more than `max_bytes` raises, or is cut if `only_begin`. Raises
    `CorruptFile` for `file`.
    """
    name = _compression_of(sys_flag)
    if name is None or not body:
        return body[:max_bytes] if only_begin else body
    if name == "unknown":
        raise CorruptFile(file, f"unknown compression type {(sys_flag & layout.COMPRESSION_MASK) >> 8}")
    # Imported on use, as below: few bodies are compressed
    import pyarrow as pa

    try:
        if name == "zlib":
            inflater = zlib.decompressobj()
            plain = inflater.decompress(body, max_bytes + 1)
            ended = inflater.eof or len(plain) > max_bytes
        else:  # Arrow reports a stream that is cut short as an error of its own
            with pa.CompressedInputStream(pa.BufferReader(body), name) as stream:
                plain, ended = stream.read(max_bytes + 1), True
    except (zlib.error, OSError, pa.ArrowException) as error:
        raise CorruptFile(file, f"the {name} body can't be decompressed ({error})") from error
    if len(plain) > max_bytes:
        if only_begin:
            return plain[:max_bytes]
        raise CorruptFile(file, f"the {name} body is larger than {max_bytes:,} bytes")
    if not ended:
        raise CorruptFile(file, f"the {name} body is cut short")
    return plain


# Stored bytes of zlib that are decompressed at once to find the size, to at most 1,032 times as many; others are read
# in pieces.
_STEP_BYTES, _PIECE_BYTES = 1 << 10, 1 << 20


def _plain_sizes(body: bytes, name: str) -> Iterator[int]:
    """Yield the sizes of the plain body's pieces, each about a MiB at most. Raises if the body is damaged."""
    if name == "zlib":
        inflater = zlib.decompressobj()
        for at in range(0, len(body), _STEP_BYTES):
            yield len(inflater.decompress(body[at : at + _STEP_BYTES]))
            if inflater.eof:
                return
    elif name != "unknown" and body:
        import pyarrow as pa

        with pa.CompressedInputStream(pa.BufferReader(body), name) as stream:
            while piece := stream.read(_PIECE_BYTES):
                yield len(piece)


Buffer = bytes | bytearray | memoryview
# The fixed part of a message, which has one of four lengths, as `header_dtype` names its fields.
_HEADS = {
    born | store: struct.Struct(f">iIiiiqqiq{20 if born else 8}sq{20 if store else 8}siqi")
    for born in (0, layout.BORN_V6)
    for store in (0, layout.STORE_V6)
}
_FIELDS = layout.header_dtype(0).names or ()
_values_of = attrgetter(*_FIELDS[:-1])
_BORN_HOST, _STORE_HOST = _FIELDS.index("born_host"), _FIELDS.index("store_host")
# The longest fixed part of a message
HEAD_BYTES = _HEADS[layout.BORN_V6 | layout.STORE_V6].size
_MAX_TOPIC_BYTES = 32_767
# The longest message that is read: a body of 128 MiB, and everything else as long as it can be.
MAX_MESSAGE_BYTES = MAX_BODY_BYTES + HEAD_BYTES + 2 + _MAX_TOPIC_BYTES + 2 + layout.MAX_PROPERTIES_BYTES
_size_and_magic = struct.Struct(">iI").unpack_from


class Head(NamedTuple):
    """The fixed part of a message: its size, its fields, and the positions of the body and of the topic's length.

    Positions are relative to the message's first byte; the topic's length takes `length_bytes`.
    """

    size: int
    fields: dict[str, Any]
    body_at: int
    tail_at: int
    length_bytes: int


def _decode_head(
    data: Buffer, most: int, damage: Callable[..., CorruptFile], physical_offset: int | None, *, bounded: bool
) -> Head:
    """Return the head of the message that begins at `data[0]`, its size and the body's length checked.

    Raises `damage(...)`, called like `CorruptFile` without the file, for more than `most` bytes, another physical
    offset (None: any), or an invalid head. With `bounded`, topic and properties must not be longer than possible.
    """
    if len(data) < layout.MIN_MESSAGE_BYTES:
        raise damage(
            "no whole message", expected=f"{layout.MIN_MESSAGE_BYTES} bytes or more", found=f"{len(data)} bytes"
        )
    size, magic = _size_and_magic(data)
    if magic not in layout.MAGICS:
        raise damage("wrong magic of a message", expected=f"{layout.MAGIC_V1:#x} or {layout.MAGIC_V2:#x}")
    if not layout.MIN_MESSAGE_BYTES <= size <= most:
        raise damage("the message's size is wrong", expected=f"{layout.MIN_MESSAGE_BYTES} to {most} bytes")
    head = _HEADS[int.from_bytes(data[36:40], "big") & (layout.BORN_V6 | layout.STORE_V6)]
    if size < head.size + 3 or len(data) < head.size:
        raise damage("the message is too short for its host addresses")
    fields = dict(zip(_FIELDS, head.unpack_from(data), strict=True))
    if physical_offset is not None and fields["physical_offset"] != physical_offset:
        raise damage("the message belongs elsewhere", expected=f"physical offset {physical_offset}")
    length_bytes = 1 if magic == layout.MAGIC_V1 else 2
    body_length, longest = fields["body_length"], size - head.size - length_bytes - 2
    most_of_topic = layout.MAX_TOPIC_V1_BYTES if length_bytes == 1 else _MAX_TOPIC_BYTES
    shortest = max(longest - most_of_topic - layout.MAX_PROPERTIES_BYTES, 0) if bounded else 0
    if not shortest <= body_length <= longest:
        raise damage("the body's length is wrong")
    return Head(size, fields, head.size, head.size + body_length, length_bytes)


def _topic_bytes(head: Head, tail: Buffer, damage: Callable[..., CorruptFile]) -> int:
    """Return the topic's length; `tail` begins at `head.tail_at`. Raises `damage(...)` if lengths don't add up."""
    length_bytes, room = head.length_bytes, head.size - head.tail_at
    length = int.from_bytes(tail[:length_bytes], "big", signed=True)
    properties_at = length_bytes + length + 2
    if len(tail) < room or length < 0 or properties_at > room:
        raise damage("the topic's length is wrong")
    properties = int.from_bytes(tail[properties_at - 2 : properties_at], "big", signed=True)
    if properties_at + properties != room:
        raise damage("the lengths don't add up: length of the properties")
    return length


def check_head(head: Buffer, left: int, *, file: str, file_offset: int, physical_offset: int) -> Head:
    """Return the decoded head of a message, before the rest of the message is read.

    `head` has the message's first `HEAD_BYTES` bytes, or all of the `left` ones. Raises `CorruptFile` for `file` at
    `file_offset` unless it can be the head of a message of at most `left` and `MAX_MESSAGE_BYTES` bytes.
    """
    damage = partial(CorruptFile, file, offset=file_offset)
    return _decode_head(head, min(left, MAX_MESSAGE_BYTES), damage, physical_offset, bounded=True)


def check_tail(head: Head, tail: Buffer, *, file: str, file_offset: int) -> None:
    """Raise `CorruptFile` if lengths in the `tail`, from byte `head.tail_at`, contradict the head."""
    _topic_bytes(head, tail, partial(CorruptFile, file, offset=file_offset))


# A topic with its length, however long.
_TOPIC_BYTES = 2 + _MAX_TOPIC_BYTES


def peek_topic(head: Buffer, left: int, physical_offset: int, read: Callable[[int, int], Buffer]) -> str | None:
    """Return the topic of the message that begins with `head`; None if no message does.

    For `head` and `left` see `check_head`. `read(position, size)` returns bytes relative to the message's first one. It
    is always called once, for the same size, so that the cost of a call does not show what is there.
    """
    try:
        claim = check_head(head, left, file="message", file_offset=0, physical_offset=physical_offset)
    except CorruptFile:
        claim = None
    size = min(_TOPIC_BYTES, left)
    begin = min(claim.tail_at if claim is not None else 0, left - size)
    window = read(begin, size)
    if claim is None:
        return None
    tail = bytes(window[claim.tail_at - begin :])
    end = claim.length_bytes + int.from_bytes(tail[: claim.length_bytes], "big", signed=True)
    if not claim.length_bytes <= end <= len(tail):
        return None
    try:
        return tail[claim.length_bytes : end].decode()
    except UnicodeDecodeError:
        return None


# The stored bits of a body's CRC-32: all but the highest
BODY_CRC_MASK = 0x7FFFFFFF


def body_crc(body: Buffer) -> int:
    """Return the CRC as RocketMQ stores it: CRC-32 without the highest bit; 0 for an empty body."""
    return zlib.crc32(body) & BODY_CRC_MASK


class Message(NamedTuple):
    """Every stored field, in RocketMQ's order: so it has more attributes than other classes.

    Times are epoch milliseconds, offsets bytes of the commit log (`queue_offset`: messages).
    """

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    # Whole length in the commit log, in bytes.
    size: int
    magic: int
    body_crc: int
    flag: int
    sys_flag: int
    born_ms: int
    born_host: Host
    store_ms: int
    store_host: Host
    reconsume_times: int
    prepared_offset: int
    # The body as stored, perhaps compressed.
    raw_body: bytes
    raw_properties: bytes

    @property
    def properties(self) -> dict[str, str]:
        """The properties, decoded as the broker does."""
        return layout.parse_properties(layout.java_text(self.raw_properties))

    @property
    def index_keys(self) -> tuple[str, ...]:
        """The keys of the message's entries: unique key and keys, each once."""
        return layout.index_keys(self.properties)

    @property
    def lookup_keys(self) -> tuple[str, ...]:
        """The message's keys, and the `tag_key` of its tags."""
        return (*self.index_keys, *([layout.tag_key(self.tags)] if self.tags else []))

    def carries(self, topic: str, key: str) -> bool:
        """Return whether the message has this topic, and `key` is one of its `lookup_keys`."""
        return self.topic == topic and key in self.lookup_keys

    @property
    def uniq_key(self) -> str | None:
        """The id that the client assigned."""
        return self.properties.get(layout.UNIQ_KEY)

    @property
    def tags(self) -> str | None:
        """Its tags, as sent."""
        return self.properties.get(layout.TAGS)

    @property
    def offset_msg_id(self) -> str:
        """The id that has the message's place."""
        return layout.offset_msg_id(self.store_host, self.physical_offset)

    @property
    def is_visible(self) -> bool:
        """Whether consumers see the message and its keys are indexed: neither prepared nor rolled back."""
        return self.sys_flag & layout.TRANSACTION_MASK not in (layout.TRANSACTION_PREPARED, layout.TRANSACTION_ROLLBACK)

    @property
    def is_erased(self) -> bool:
        """Whether body and properties were erased from an archived segment."""
        return bool(self.sys_flag & layout.ERASED)

    @property
    def compression(self) -> str | None:
        """The compression of the body: "zlib", "lz4", "zstd", "unknown" or None."""
        return _compression_of(self.sys_flag)

    @property
    def texts(self) -> tuple[str, ...]:
        """Message id, keys and values of properties."""
        return (self.offset_msg_id, *self.index_keys, *self.properties.values())

    def body(self, max_bytes: int = MAX_BODY_BYTES, *, only_begin: bool = False) -> bytes:
        """Return the plain body; with `only_begin`, up to `max_bytes` of it.

        Raises `CorruptFile` if it can't be decompressed, or is larger than `max_bytes` without `only_begin`.
        """
        file = f"message {self.offset_msg_id}"
        return decompress(self.raw_body, self.sys_flag, file=file, max_bytes=max_bytes, only_begin=only_begin)

    def plain_bytes(self, max_bytes: int) -> int:
        """Return the bytes that `body(max_bytes)` decompresses. It takes little memory, also for a damaged body."""
        if self.compression is None:
            return len(self.raw_body)
        import pyarrow as pa

        size = 0
        with contextlib.suppress(zlib.error, OSError, pa.ArrowException):
            for piece in _plain_sizes(self.raw_body, self.compression):
                if (size := size + piece) > max_bytes:
                    return max_bytes + 1
        return size

    def encode(self) -> bytes:
        """Return the stored bytes, `size` and `body_crc` as they are: a decoded message gives its own bytes."""
        values = list(_values_of(self))
        values[_BORN_HOST], values[_STORE_HOST] = layout.pack_host(self.born_host), layout.pack_host(self.store_host)
        head = _HEADS[self.sys_flag & (layout.BORN_V6 | layout.STORE_V6)].pack(*values, len(self.raw_body))
        topic, properties = self.topic.encode(), self.raw_properties
        topic_length = len(topic).to_bytes(1 if self.magic == layout.MAGIC_V1 else 2, "big", signed=True)
        properties_length = len(properties).to_bytes(2, "big", signed=True)
        return b"".join((head, self.raw_body, topic_length, topic, properties_length, properties))

    def to_dict(self, body: BodyFormat = "text", max_body_bytes: int = MAX_BODY_BYTES) -> dict[str, Any]:
        """Return every field for JSON, and the body as `show_body`."""
        return {
            "topic": self.topic,
            "queue_id": self.queue_id,
            "queue_offset": self.queue_offset,
            "msg_id": self.offset_msg_id,
            "uniq_key": self.uniq_key,
            "keys": list(self.index_keys),
            "tags": self.tags,
            "properties": self.properties,
            "born_ms": self.born_ms,
            "born_host": str(self.born_host),
            "store_ms": self.store_ms,
            "store_host": str(self.store_host),
            "physical_offset": self.physical_offset,
            "size": self.size,
            "flag": self.flag,
            "sys_flag": self.sys_flag,
            "reconsume_times": self.reconsume_times,
            "prepared_offset": self.prepared_offset,
            "visible": self.is_visible,
            "compression": self.compression,
            "body_crc": self.body_crc,
            "body_bytes": len(self.raw_body),
            **show_body(self, body, max_body_bytes),
        }


def problem_of_values(topic: str, queue_id: int, store_ms: int) -> str | None:
    """Return the problem of values that no broker writes and no index accepts, or None."""
    if not topic.strip() or len(topic.encode("utf-16-le")) > 2 * MAX_TOPIC_UNITS:
        return f"invalid topic: it needs 1 to {MAX_TOPIC_UNITS:,} characters, not only blanks"
    if queue_id < 0:
        return "the queue id is negative"
    if not 0 <= store_ms <= MAX_TIMESTAMP_MS:
        return f"the store timestamp is outside 0..{MAX_TIMESTAMP_MS}"
    return None


def decode_message(
    data: Buffer,
    position: int = 0,
    *,
    file: str = "message",
    file_offset: int = 0,
    physical_offset: int | None = None,
    size: int | None = None,
    check_crc: bool = True,
) -> Message:
    """Return the message that begins at `data[position]`; later bytes are ignored.

    Raises `CorruptFile` for `file` at byte `file_offset + position` (`data[0]` is the file's byte `file_offset`) if the
    bytes are not a whole message: wrong magic, lengths that don't add up or exceed `data`, a physical offset other than
    `physical_offset` or a size other than `size` (None: any), a topic that is empty or not UTF-8, and, with
    `check_crc`, a body that contradicts its CRC.
    """
    view = memoryview(data)[position:]
    damage = partial(CorruptFile, file, offset=file_offset + position)
    head = _decode_head(view, len(view), damage, physical_offset, bounded=False)
    topic_at = head.tail_at + head.length_bytes
    topic_end = topic_at + _topic_bytes(head, view[head.tail_at : head.size], damage)
    body = bytes(view[head.body_at : head.tail_at])
    fields = head.fields
    if check_crc and body_crc(body) != fields["body_crc"]:
        raise damage("the body contradicts its CRC")
    try:
        topic = bytes(view[topic_at:topic_end]).decode()
    except UnicodeDecodeError as error:
        raise damage("the topic is not UTF-8") from error
    if problem := problem_of_values(topic, fields["queue_id"], fields["store_ms"]):
        raise damage(problem)
    if size is not None and size != head.size:
        raise damage("another message than the one expected", expected=f"{size} bytes")
    del fields["body_length"]
    fields["born_host"], fields["store_host"] = (
        layout.unpack_host(fields["born_host"]),
        layout.unpack_host(fields["store_host"]),
    )
    return Message(topic=topic, **fields, raw_body=body, raw_properties=bytes(view[topic_end + 2 : head.size]))


def show_body(message: Message, wanted: BodyFormat, max_bytes: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """Return ``body`` and ``body_format``. A body that is not JSON becomes text; one that is not text, hexadecimal.

    A body that can't be decompressed within `max_bytes` is returned as stored, in hexadecimal digits, with
    ``body_problem``. "excerpt" returns only the beginning, and decompresses no more. "none" returns an empty dict.
    """
    if wanted == "none":
        return {}
    most_bytes, only_begin = (EXCERPT_OF_BYTES, True) if wanted == "excerpt" else (max_bytes, False)
    try:
        plain = message.body(most_bytes, only_begin=only_begin)
    except CorruptFile as error:
        return {"body": message.raw_body.hex(), "body_format": "hex", "body_problem": str(error)}
    return show_bytes(plain, wanted)
