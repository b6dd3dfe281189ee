"""The layout of a commit log message, as RocketMQ's `MessageExtEncoder` writes it. Big-endian. Pure.

```
 0 i32 total size           28 i64 physical offset       then  i64 store timestamp (ms)
 4 u32 magic                36 i32 sys flag                    store host, as the born host
 8 i32 CRC of the body      40 i64 born timestamp (ms)         i32 reconsume times
12 i32 queue id             48 born host: 4 or 16 bytes        i64 prepared transaction offset
16 i32 flag                    of address, i32 port            i32 body length, body
20 i64 queue offset                                            topic length (magic V1: i8, V2: i16), topic
                                                               i16 properties length, properties
```

Lengths are signed, as RocketMQ reads them; it writes no negative one. The body CRC is CRC-32 of the stored (compressed)
body without its highest bit. A segment ends with a blank: i32 bytes left, u32 magic `BLANK`, then anything. In a
segment that is being written, zeros follow the last message.

Properties are `name 0x01 value 0x02 name 0x01 value 0x02 ...`; the last 0x02 may be missing. A piece without name,
separator or value is ignored; of two pieces of one name the last counts. Keys are those of RocketMQ's `MessageDecoder`
and `IndexService`.

A message id is the store host's address, its port and the physical offset, as 32 (IPv4) or 56 (IPv6) hexadecimal
digits.
"""

from __future__ import annotations

import ipaddress
import re
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tiered_index.errors import InvalidArgument

# A message whose topic has at most 127 bytes.
MAGIC_V1 = 0xDAA320A7
# A message whose topic length takes two bytes.
MAGIC_V2 = 0xDAA320AB
MAGICS = (MAGIC_V1, MAGIC_V2)
# The rest of the segment holds no message.
BLANK = 0xCBD43194
BLANK_MAGIC = BLANK.to_bytes(4, "big")
# Least free bytes after the last message of a segment
BLANK_BYTES = 8

COMPRESSED = 0x1
TRANSACTION_MASK = 0xC
TRANSACTION_PREPARED = 0x4
TRANSACTION_COMMIT = 0x8
TRANSACTION_ROLLBACK = 0xC
BORN_V6 = 0x10
STORE_V6 = 0x20
# The message is a batch of several, in a queue of batches
INNER_BATCH = 0x80
COMPRESSION_MASK = 0x700
COMPRESSION_LZ4 = 0x100
COMPRESSION_ZSTD = 0x200
COMPRESSION_ZLIB = 0x300
# Our own bit, only in archived segments: body and properties were erased. RocketMQ ignores it.
ERASED = 0x4000_0000

MAX_TOPIC_V1_BYTES = 127
MAX_PROPERTIES_BYTES = 32_767


def header_dtype(sys_flag: int) -> np.dtype[np.void]:
    """Return the record up to and including the body length; two address bits of `sys_flag` decide its size."""
    born = "V20" if sys_flag & BORN_V6 else "V8"
    store = "V20" if sys_flag & STORE_V6 else "V8"
    return np.dtype(
        [
            ("size", ">i4"),
            ("magic", ">u4"),
            ("body_crc", ">i4"),
            ("queue_id", ">i4"),
            ("flag", ">i4"),
            ("queue_offset", ">i8"),
            ("physical_offset", ">i8"),
            ("sys_flag", ">i4"),
            ("born_ms", ">i8"),
            ("born_host", born),
            ("store_ms", ">i8"),
            ("store_host", store),
            ("reconsume_times", ">i4"),
            ("prepared_offset", ">i8"),
            ("body_length", ">i4"),
        ]
    )


# A message of IPv4 hosts with empty body, topic and properties.
MIN_MESSAGE_BYTES = header_dtype(0).itemsize + 1 + 2


NAME_END = "\x01"
VALUE_END = "\x02"
KEYS = "KEYS"
UNIQ_KEY = "UNIQ_KEY"
TAGS = "TAGS"

_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]?")
# The topic of newer brokers' prepared messages until they are committed
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
_SYSTEM_TOPICS = frozenset(
    {
        "SCHEDULE_TOPIC_XXXX",
        HALF_TOPIC,
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "RMQ_SYS_TRACE_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "TBW102",
        "BenchmarkTest",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
        "CHECKPOINT_TOPIC",
    }
)


def java_text(data: bytes) -> str:
    """Return `new String(data, UTF_8)` of Java: invalid bytes become U+FFFD, so that keys hash as in the broker."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        # Java replaces an encoded surrogate, cut short or not, as one character, Python as three
        return _SURROGATE.sub(b"\xef\xbf\xbd", data).decode(errors="replace")


def parse_properties(text: str) -> dict[str, str]:
    """Return names and values in order of first appearance (`MessageDecoder.string2messageProperties`)."""
    properties: dict[str, str] = {}
    for piece in text.split(VALUE_END):
        name, separator, value = piece.partition(NAME_END)
        if separator and name and value:
            properties[name] = value
    return properties


def index_keys(properties: Mapping[str, str]) -> tuple[str, ...]:
    """Return the keys a message is indexed under, each once: the unique key, then KEYS split on spaces."""
    keys = properties.get(KEYS, "").split(" ")
    return tuple(dict.fromkeys(key for key in (properties.get(UNIQ_KEY, ""), *keys) if key))


def tag_key(tags: str) -> str:
    """Return the key under which a message with these tags is indexed (as newer brokers do: `topic#T#tags`)."""
    return f"T#{tags}"


TAG_NAME = tag_key("")
"""What the keys of tags begin with."""


def is_system_topic(topic: str) -> bool:
    """Return whether a topic is RocketMQ's own or a light queue's; its tiered store leaves these out.

    It follows `TopicValidator.isSystemTopic` and `MixAll.isLmq`. RocketMQ's `MessageStoreTopicFilter` also leaves out
    the topics with the names of the cluster and the broker, which a store does not have.
    """
    return topic in _SYSTEM_TOPICS or topic.startswith(("rmq_sys_", "%LMQ%"))


_MAX_PORT = 65_535


class Host(NamedTuple):
    """An address and a port."""

    # IPv4 or IPv6, in the shortest spelling.
    ip: str
    port: int

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


@lru_cache(maxsize=1_024)
def pack_host(host: Host) -> bytes:
    """Return address and port as stored: 8 bytes for IPv4, 20 for IPv6."""
    try:
        return ipaddress.ip_address(host.ip).packed + struct.pack(">i", host.port)
    except (ValueError, struct.error) as error:
        raise InvalidArgument(f"{host!r} is not an address and port ({error})") from error


@lru_cache(maxsize=1_024)
def unpack_host(packed: bytes) -> Host:
    """Return what `pack_host` packed."""
    return Host(str(ipaddress.ip_address(packed[:-4])), int.from_bytes(packed[-4:], "big", signed=True))


def offset_msg_id(store_host: Host, physical_offset: int) -> str:
    """Return the id of a message's place: 32 hexadecimal digits for an IPv4 store host, 56 for IPv6."""
    return (pack_host(store_host) + struct.pack(">q", physical_offset)).hex().upper()


def decode_offset_msg_id(msg_id: str) -> tuple[Host, int]:
    """Return store host and physical offset of an `offset_msg_id`. Raises `InvalidArgument` for other text.

    Unique keys have as many digits. Most of them are refused, because they have a process id in place of the port.
    """
    try:
        packed = bytes.fromhex(msg_id) if msg_id.isalnum() else b""
    except ValueError:
        packed = b""
    if len(packed) not in (16, 28):
        raise InvalidArgument(f"{msg_id!r:.80} is not an offset message id, which has 32 or 56 hexadecimal digits")
    host, offset = unpack_host(packed[:-8]), int.from_bytes(packed[-8:], "big", signed=True)
    if offset < 0 or not 0 <= host.port <= _MAX_PORT:
        raise InvalidArgument(f"{msg_id} is not an offset message id: it names no place in a commit log")
    return host, offset
