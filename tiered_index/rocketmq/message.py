"""One message of the commit log, whole: decoded, checked, and encoded again. Pure.

`Message` is an immutable value and safe to share between threads. Source: RocketMQ's `MessageDecoder`, `CommitLog` and
`MessageExtEncoder`; unlike them, a negative length, a size that doesn't add up and a topic that is no UTF-8 are damage, not a message.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from functools import partial

from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.rocketmq import bodies
from tiered_index.rocketmq.hosts import Host, offset_msg_id, pack_host, unpack_host
from tiered_index.rocketmq.layout import (
    BORN_V6,
    MAGIC_V1,
    MAGIC_V2,
    MAX_PROPERTIES_BYTES,
    MAX_TOPIC_V1_BYTES,
    MIN_MESSAGE_BYTES,
    STORE_V6,
    TRANSACTION_MASK,
    TRANSACTION_PREPARED,
    TRANSACTION_ROLLBACK,
)
from tiered_index.rocketmq.message_head import Buffer, decode_head
from tiered_index.rocketmq.properties import TAGS, UNIQ_KEY, index_keys, java_text, parse_properties, tags_code
from tiered_index.types import MAX_TIMESTAMP_MS, MAX_TOPIC_UNITS

__all__ = ["BODY_CRC_MASK", "Buffer", "Host", "Message", "body_crc", "decode_message", "encode_fields", "message_size", "problem_of_values"]

BODY_CRC_MASK = 0x7FFFFFFF
"""Which bits of a body's CRC-32 are stored: all but the highest."""


def body_crc(body: Buffer) -> int:
    """Return the CRC as RocketMQ stores it: CRC-32 without the highest bit; 0 for an empty body."""
    return zlib.crc32(body) & BODY_CRC_MASK


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Every stored field. Times are epoch milliseconds, offsets count bytes of the commit log (`queue_offset`: messages of the queue)."""

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    size: int
    """Whole length in the commit log, in bytes."""
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
    raw_body: bytes
    """The body as stored, perhaps compressed."""
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
        return bodies.compression_of(self.sys_flag)

    def body(self, max_bytes: int = bodies.MAX_BODY_BYTES) -> bytes:
        """Return the plain body; raises `CorruptFile` where it can't be decompressed or is larger than `max_bytes`."""
        return bodies.decompress(self.raw_body, self.sys_flag, file=f"message {self.offset_msg_id}", max_bytes=max_bytes)

    def encode(self) -> bytes:
        """Return the stored bytes; `size` and `body_crc` are taken as they are, so a decoded message gives its own bytes."""
        return encode_fields(
            self.size, self.magic, self.body_crc, self.queue_id, self.flag, self.queue_offset, self.physical_offset, self.sys_flag,
            self.born_ms, pack_host(self.born_host), self.store_ms, pack_host(self.store_host), self.reconsume_times, self.prepared_offset,
            self.raw_body, self.topic.encode(), self.raw_properties,
        )  # fmt: skip


_HEADS = {
    born | store: struct.Struct(f">iIiiiqqiq{20 if born else 8}sq{20 if store else 8}siqi").pack
    for born in (0, BORN_V6)
    for store in (0, STORE_V6)
}
_short = struct.Struct(">h").pack
_byte = struct.Struct(">b").pack
_NUMBERS = (
    "size", "magic", "body_crc", "queue_id", "flag", "queue_offset", "physical_offset", "sys_flag", "born_ms", "store_ms",
    "reconsume_times", "prepared_offset",
)  # fmt: skip


def encode_fields(
    size: int, magic: int, crc: int, queue_id: int, flag: int, queue_offset: int, physical_offset: int, sys_flag: int, born_ms: int,
    born_host: bytes, store_ms: int, store_host: bytes, reconsume_times: int, prepared_offset: int, body: bytes, topic: bytes,
    properties: bytes,
) -> bytes:  # fmt: skip
    """Return a message's stored bytes; hosts as `pack_host` gives them, in the kinds that `sys_flag` says. Nothing is checked."""
    head = _HEADS[sys_flag & (BORN_V6 | STORE_V6)](
        size, magic, crc, queue_id, flag, queue_offset, physical_offset, sys_flag, born_ms, born_host, store_ms, store_host,
        reconsume_times, prepared_offset, len(body),
    )  # fmt: skip
    topic_length = _byte(len(topic)) if magic == MAGIC_V1 else _short(len(topic))
    return b"".join((head, body, topic_length, topic, _short(len(properties)), properties))


def message_size(sys_flag: int, magic: int, topic_bytes: int, body_bytes: int, properties_bytes: int) -> int:
    """Return a message's whole length in bytes; raises `InvalidArgument` for lengths that have no room in their field."""
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
    data: Buffer, position: int = 0, *, file: str = "message", file_offset: int = 0, physical_offset: int | None = None,
    check_crc: bool = True,
) -> Message:  # fmt: skip
    """Return the message that begins at `data[position]`; bytes behind it are not looked at.

    Raises `CorruptFile` for `file` at byte `file_offset + position` (`data[0]` is the file's byte `file_offset`) where the bytes are no
    whole message: wrong magic, lengths that don't add up or reach past `data`, a physical offset other than `physical_offset` (None: any),
    a topic that is no UTF-8 or empty, and, with `check_crc`, a body that contradicts its CRC.
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
        raise damage("the lengths don't add up: length of the properties", expected=size - properties_at, found=properties_length)
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
