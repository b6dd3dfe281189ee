"""One message of the commit log, whole: decoded, checked, decompressed, and encoded again. Pure.

`Message` is an immutable value and safe to share between threads. Source: RocketMQ's `MessageDecoder`, `CommitLog` and
`MessageExtEncoder`; unlike them, a negative length, a size that doesn't add up and a topic that is no UTF-8 are damage,
not a message.

Bodies are decompressed as zlib by the standard library, as LZ4 frames and zstd by Arrow's codecs. A body does not say
its size before it is decompressed, and a few KiB can claim gigabytes, so every decompression has a bound.

What a message's head claims is checked before that much is read (`check_head`, `check_tail`): four wrong bytes could
otherwise make a reader fetch, and hold, a whole segment. RocketMQ's bound of a message is set at the broker
(`maxMessageSize`, 4 MiB by default); `MAX_MESSAGE_BYTES` is 32 times that, and what claims more is damage.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.rocketmq.log.layout import (
    BORN_V6,
    COMPRESSED,
    COMPRESSION_LZ4,
    COMPRESSION_MASK,
    COMPRESSION_ZLIB,
    COMPRESSION_ZSTD,
    MAGIC_V1,
    MAGIC_V2,
    MAX_PROPERTIES_BYTES,
    MAX_TOPIC_V1_BYTES,
    MIN_MESSAGE_BYTES,
    STORE_V6,
    TAGS,
    TRANSACTION_MASK,
    TRANSACTION_PREPARED,
    TRANSACTION_ROLLBACK,
    UNIQ_KEY,
    Host,
    header_dtype,
    index_keys,
    java_text,
    offset_msg_id,
    pack_host,
    parse_properties,
    tags_code,
    unpack_host,
)
from tiered_index.types import MAX_TIMESTAMP_MS, MAX_TOPIC_UNITS

__all__ = [
    "BODY_CRC_MASK",
    "HEAD_BYTES",
    "MAX_BODY_BYTES",
    "MAX_MESSAGE_BYTES",
    "Buffer",
    "Claim",
    "Head",
    "Host",
    "Message",
    "body_crc",
    "check_head",
    "check_tail",
    "compress",
    "compression_of",
    "decode_head",
    "decode_message",
    "decompress",
    "encode_fields",
    "message_size",
    "problem_of_values",
]

# Bound of a decompressed body unless the caller says otherwise: 128 MiB, 32 times the broker's default bound of a
# message.
MAX_BODY_BYTES = 1 << 27

# Type 0 stands in messages of clients older than the compression types.
_NAMES = {0: "zlib", COMPRESSION_LZ4: "lz4", COMPRESSION_ZSTD: "zstd", COMPRESSION_ZLIB: "zlib"}


def compression_of(sys_flag: int) -> str | None:
    """Return "zlib", "lz4" or "zstd", None for a plain body, or "unknown" for a type that RocketMQ has not got."""
    return _NAMES.get(sys_flag & COMPRESSION_MASK, "unknown") if sys_flag & COMPRESSED else None


def decompress(
    body: bytes, sys_flag: int, *, file: str = "message", offset: int | None = None, max_bytes: int = MAX_BODY_BYTES
) -> bytes:
    """Return the plain body of at most `max_bytes` bytes.

    Raises `CorruptFile` naming `file` and `offset` for anything else.
    """
    name = compression_of(sys_flag)
    if name is None or not body:
        return body
    if name == "unknown":
        raise CorruptFile(file, f"unknown compression type {(sys_flag & COMPRESSION_MASK) >> 8}", offset=offset)
    try:
        plain, ended = _inflate(body, max_bytes) if name == "zlib" else _stream(body, name, max_bytes)
    except (zlib.error, OSError, pa.ArrowException) as error:
        raise CorruptFile(file, f"the {name} body can't be decompressed ({error})", offset=offset) from error
    if len(plain) > max_bytes:
        raise CorruptFile(file, f"the {name} body is larger than {max_bytes:,} bytes", offset=offset)
    if not ended:
        raise CorruptFile(file, f"the {name} body is cut short", offset=offset)
    return plain


def _inflate(body: bytes, max_bytes: int) -> tuple[bytes, bool]:
    stream = zlib.decompressobj()
    plain = stream.decompress(body, max_bytes + 1)
    return plain, stream.eof or len(plain) > max_bytes


def _stream(body: bytes, name: str, max_bytes: int) -> tuple[bytes, bool]:
    # Arrow reports a stream that is cut short as an error of its own
    with pa.CompressedInputStream(pa.BufferReader(body), name) as stream:
        return stream.read(max_bytes + 1), True


def compress(body: bytes, name: str) -> tuple[bytes, int]:
    """Return the compressed body and its sys flag bits; `name` is "zlib", "lz4" or "zstd"."""
    if name == "zlib":
        return zlib.compress(body), COMPRESSED | COMPRESSION_ZLIB
    if name not in ("lz4", "zstd"):
        raise InvalidArgument(f"unknown compression {name!r}")
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, name) as stream:
        stream.write(body)
    return sink.getvalue().to_pybytes(), COMPRESSED | (COMPRESSION_LZ4 if name == "lz4" else COMPRESSION_ZSTD)


# Bytes to decode; nothing of them is kept beyond the call but copies.
Buffer = bytes | bytearray | memoryview
# As much as any message's fixed part has.
HEAD_BYTES = header_dtype(BORN_V6 | STORE_V6).itemsize
_MAX_TOPIC_BYTES = 32_767
# The longest message that is read: a body of 128 MiB, and everything else as long as it can be.
MAX_MESSAGE_BYTES = MAX_BODY_BYTES + HEAD_BYTES + 2 + _MAX_TOPIC_BYTES + 2 + MAX_PROPERTIES_BYTES
_size_and_magic = struct.Struct(">iI").unpack_from
_dtype_of = cache(header_dtype)


class Head(NamedTuple):
    """A message's fixed part.

    `fields` as `header_dtype` names them, where the body begins, how many bytes the topic's length takes.
    """

    size: int
    fields: Any
    body_at: int
    length_bytes: int


def decode_head(data: Buffer, most: int, damage: Callable[..., CorruptFile], physical_offset: int | None) -> Head:
    """Return the fixed part of the message that begins at `data[0]`; of its lengths only the size is checked.

    Raises what `damage` (as `CorruptFile`, from the problem on) makes of a message that has more than `most` bytes,
    another physical offset (None: any), or a head that is none.
    """
    if len(data) < MIN_MESSAGE_BYTES:
        raise damage("no whole message", expected=f"{MIN_MESSAGE_BYTES} bytes or more", found=f"{len(data)} bytes")
    size, magic = _size_and_magic(data)
    if magic not in (MAGIC_V1, MAGIC_V2):
        raise damage("wrong magic of a message", expected=f"{MAGIC_V1:#x} or {MAGIC_V2:#x}", found=f"{magic:#x}")
    if not MIN_MESSAGE_BYTES <= size <= most:
        raise damage("the message's size lies", expected=f"{MIN_MESSAGE_BYTES} to {most} bytes", found=size)
    dtype = _dtype_of(int.from_bytes(data[36:40], "big", signed=True))
    if size < dtype.itemsize + 3 or len(data) < dtype.itemsize:
        expected = f"{dtype.itemsize + 3} bytes or more for its hosts"
        raise damage("the message's size lies", expected=expected, found=min(size, len(data)))
    fields = np.frombuffer(data[: dtype.itemsize], dtype)[0]
    if physical_offset is not None and int(fields["physical_offset"]) != physical_offset:
        raise damage(
            "the message belongs elsewhere",
            expected=f"physical offset {physical_offset}",
            found=int(fields["physical_offset"]),
        )
    return Head(size, fields, dtype.itemsize, 1 if magic == MAGIC_V1 else 2)


class Claim(NamedTuple):
    """What a head claims: the message's size, where the length of the topic stands, and the bytes of that length."""

    size: int
    tail_at: int
    length_bytes: int


def check_head(head: Buffer, left: int, *, file: str, file_offset: int, physical_offset: int) -> Claim:
    """Return what a head claims.

    `head` is a message's first `HEAD_BYTES` bytes, or all of the `left` ones that there are. Raises `CorruptFile` for
    `file` at `file_offset` where no message of at most `left` and `MAX_MESSAGE_BYTES` bytes can begin so.
    """
    damage = partial(CorruptFile, file, offset=file_offset)
    size, fields, body_at, length_bytes = decode_head(head, min(left, MAX_MESSAGE_BYTES), damage, physical_offset)
    longest = size - body_at - length_bytes - 2
    shortest = max(longest - (MAX_TOPIC_V1_BYTES if length_bytes == 1 else _MAX_TOPIC_BYTES) - MAX_PROPERTIES_BYTES, 0)
    if not shortest <= int(fields["body_length"]) <= longest:
        raise damage("the body's length lies", expected=f"{shortest} to {longest}", found=int(fields["body_length"]))
    return Claim(size, body_at + int(fields["body_length"]), length_bytes)


def check_tail(claim: Claim, tail: Buffer, *, file: str, file_offset: int) -> None:
    """Raise `CorruptFile` where topic and properties aren't as long as the head left room for.

    `tail` begins at `claim.tail_at`.
    """
    room = claim.size - claim.tail_at
    properties_at = claim.length_bytes + int.from_bytes(tail[: claim.length_bytes], "big", signed=True) + 2
    if len(tail) < room or not claim.length_bytes + 2 <= properties_at <= room:
        raise CorruptFile(
            file,
            "the topic's length lies",
            offset=file_offset,
            expected=f"0 to {room - claim.length_bytes - 2}",
            found=properties_at - claim.length_bytes - 2,
        )
    length = int.from_bytes(tail[properties_at - 2 : properties_at], "big", signed=True)
    if properties_at + length != room:
        raise CorruptFile(
            file,
            "the lengths don't add up: length of the properties",
            offset=file_offset,
            expected=room - properties_at,
            found=length,
        )


# Which bits of a body's CRC-32 are stored: all but the highest.
BODY_CRC_MASK = 0x7FFFFFFF


def body_crc(body: Buffer) -> int:
    """Return the CRC as RocketMQ stores it: CRC-32 without the highest bit; 0 for an empty body."""
    return zlib.crc32(body) & BODY_CRC_MASK


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Every stored field.

    Times are epoch milliseconds, offsets count bytes of the commit log (`queue_offset`: messages of the queue).
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
        return parse_properties(java_text(self.raw_properties))

    @property
    def index_keys(self) -> tuple[str, ...]:
        """What the message is found under: unique key and keys, each once."""
        return index_keys(self.properties)

    @property
    def uniq_key(self) -> str | None:
        """The id that the client gave it."""
        return self.properties.get(UNIQ_KEY)

    @property
    def tags(self) -> str | None:
        """Its tags, as sent."""
        return self.properties.get(TAGS)

    @property
    def tags_code(self) -> int:
        """What its consume queue entry carries (with the default delay levels)."""
        return tags_code(self.topic, self.properties, self.store_ms)

    @property
    def offset_msg_id(self) -> str:
        """The id that names it by its place."""
        return offset_msg_id(self.store_host, self.physical_offset)

    @property
    def transaction(self) -> int:
        """The transaction bits of the sys flag: 0, prepared, commit or rollback."""
        return self.sys_flag & TRANSACTION_MASK

    @property
    def is_visible(self) -> bool:
        """Whether consumers see it, so that its keys are indexed: neither prepared nor rolled back."""
        return self.transaction not in (TRANSACTION_PREPARED, TRANSACTION_ROLLBACK)

    @property
    def compression(self) -> str | None:
        """How the body is compressed: "zlib", "lz4", "zstd", "unknown" or None."""
        return compression_of(self.sys_flag)

    def body(self, max_bytes: int = MAX_BODY_BYTES) -> bytes:
        """Return the plain body; raises `CorruptFile` where it can't be decompressed or is larger than `max_bytes`."""
        return decompress(self.raw_body, self.sys_flag, file=f"message {self.offset_msg_id}", max_bytes=max_bytes)

    def encode(self) -> bytes:
        """Return the stored bytes.

        `size` and `body_crc` are taken as they are, so a decoded message gives its own bytes.
        """
        return encode_fields(
            self.size,
            self.magic,
            self.body_crc,
            self.queue_id,
            self.flag,
            self.queue_offset,
            self.physical_offset,
            self.sys_flag,
            self.born_ms,
            pack_host(self.born_host),
            self.store_ms,
            pack_host(self.store_host),
            self.reconsume_times,
            self.prepared_offset,
            self.raw_body,
            self.topic.encode(),
            self.raw_properties,
        )


_HEADS = {
    born | store: struct.Struct(f">iIiiiqqiq{20 if born else 8}sq{20 if store else 8}siqi").pack
    for born in (0, BORN_V6)
    for store in (0, STORE_V6)
}
_short = struct.Struct(">h").pack
_byte = struct.Struct(">b").pack
_NUMBERS = (
    "size",
    "magic",
    "body_crc",
    "queue_id",
    "flag",
    "queue_offset",
    "physical_offset",
    "sys_flag",
    "born_ms",
    "store_ms",
    "reconsume_times",
    "prepared_offset",
)


def encode_fields(
    size: int,
    magic: int,
    crc: int,
    queue_id: int,
    flag: int,
    queue_offset: int,
    physical_offset: int,
    sys_flag: int,
    born_ms: int,
    born_host: bytes,
    store_ms: int,
    store_host: bytes,
    reconsume_times: int,
    prepared_offset: int,
    body: bytes,
    topic: bytes,
    properties: bytes,
) -> bytes:
    """Return a message's stored bytes; nothing is checked.

    Hosts are as `pack_host` gives them, in the kinds that `sys_flag` says.
    """
    head = _HEADS[sys_flag & (BORN_V6 | STORE_V6)](
        size,
        magic,
        crc,
        queue_id,
        flag,
        queue_offset,
        physical_offset,
        sys_flag,
        born_ms,
        born_host,
        store_ms,
        store_host,
        reconsume_times,
        prepared_offset,
        len(body),
    )
    topic_length = _byte(len(topic)) if magic == MAGIC_V1 else _short(len(topic))
    return b"".join((head, body, topic_length, topic, _short(len(properties)), properties))


def message_size(sys_flag: int, magic: int, topic_bytes: int, body_bytes: int, properties_bytes: int) -> int:
    """Return a message's whole length in bytes.

    Raises `InvalidArgument` for lengths that have no room in their field.
    """
    if not topic_bytes <= (MAX_TOPIC_V1_BYTES if magic == MAGIC_V1 else 32_767):
        raise InvalidArgument(f"a topic of {topic_bytes:,} bytes doesn't fit this message version")
    if properties_bytes > MAX_PROPERTIES_BYTES:
        raise InvalidArgument(f"properties of {properties_bytes:,} bytes are more than {MAX_PROPERTIES_BYTES:,}")
    head = MIN_MESSAGE_BYTES + (magic == MAGIC_V2) + 12 * bool(sys_flag & BORN_V6) + 12 * bool(sys_flag & STORE_V6)
    return head + body_bytes + topic_bytes + properties_bytes


def problem_of_values(topic: str, queue_id: int, store_ms: int) -> str | None:
    """Return what no broker writes and no index takes, or None."""
    if not topic.strip() or len(topic.encode("utf-16-le")) > 2 * MAX_TOPIC_UNITS:
        return f"a topic of {len(topic):,} characters is none: 1 to {MAX_TOPIC_UNITS:,} are, not only blanks"
    if queue_id < 0:
        return f"queue id {queue_id} is negative"
    if not 0 <= store_ms <= MAX_TIMESTAMP_MS:
        return f"store timestamp {store_ms} is outside 0..{MAX_TIMESTAMP_MS}"
    return None


def decode_message(
    data: Buffer,
    position: int = 0,
    *,
    file: str = "message",
    file_offset: int = 0,
    physical_offset: int | None = None,
    check_crc: bool = True,
) -> Message:
    """Return the message that begins at `data[position]`; bytes behind it are not looked at.

    Raises `CorruptFile` for `file` at byte `file_offset + position` (`data[0]` is the file's byte `file_offset`) where
    the bytes are no whole message: wrong magic, lengths that don't add up or reach past `data`, a physical offset other
    than `physical_offset` (None: any), a topic that is no UTF-8 or empty, and, with `check_crc`, a body that
    contradicts its CRC.
    """
    view = memoryview(data)[position:]
    damage = partial(CorruptFile, file, offset=file_offset + position)
    size, head, body_at, length_bytes = decode_head(view, len(view), damage, physical_offset)
    body_length = int(head["body_length"])
    topic_at = body_at + body_length + length_bytes
    if body_length < 0 or topic_at + 2 > size:
        raise damage("the body's length lies", expected=f"0 to {size - body_at - length_bytes - 2}", found=body_length)
    topic_length = int.from_bytes(view[topic_at - length_bytes : topic_at], "big", signed=True)
    properties_at = topic_at + topic_length + 2
    if topic_length < 0 or properties_at > size:
        raise damage("the topic's length lies", expected=f"0 to {size - topic_at - 2}", found=topic_length)
    properties_length = int.from_bytes(view[properties_at - 2 : properties_at], "big", signed=True)
    if properties_at + properties_length != size:
        raise damage(
            "the lengths don't add up: length of the properties", expected=size - properties_at, found=properties_length
        )
    body = bytes(view[body_at : body_at + body_length])
    if check_crc and body_crc(body) != int(head["body_crc"]):
        raise damage("the body contradicts its CRC", expected=int(head["body_crc"]), found=body_crc(body))
    try:
        topic = bytes(view[topic_at : topic_at + topic_length]).decode()
    except UnicodeDecodeError as error:
        raise damage(f"the topic is no UTF-8 ({error})") from error
    if problem := problem_of_values(topic, int(head["queue_id"]), int(head["store_ms"])):
        raise damage(problem)
    return Message(
        topic=topic,
        **{name: int(head[name]) for name in _NUMBERS},
        born_host=unpack_host(head["born_host"].tobytes()),
        store_host=unpack_host(head["store_host"].tobytes()),
        raw_body=body,
        raw_properties=bytes(view[properties_at:size]),
    )
