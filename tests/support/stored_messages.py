"""The length, the properties and the compressed body of a message that a test stores as a broker does."""

import struct
import zlib
from collections.abc import Mapping

import pyarrow as pa

from tiered_index.connectors.rocketmq.log import layout
from tiered_index.connectors.rocketmq.log.layout import NAME_END, VALUE_END
from tiered_index.errors import InvalidArgument


def format_properties(properties: Mapping[str, str]) -> str:
    """Return the stored text, each value with its end mark (`MessageDecoder.messageProperties2String`)."""
    return "".join(f"{name}{NAME_END}{value}{VALUE_END}" for name, value in properties.items())


def message_size(sys_flag: int, magic: int, topic_bytes: int, body_bytes: int, properties_bytes: int) -> int:
    """Return a message's length in bytes. Raises `InvalidArgument` for lengths that exceed their field."""
    if not topic_bytes <= (layout.MAX_TOPIC_V1_BYTES if magic == layout.MAGIC_V1 else 32_767):
        raise InvalidArgument(f"a topic of {topic_bytes:,} bytes doesn't fit this message version")
    if properties_bytes > layout.MAX_PROPERTIES_BYTES:
        raise InvalidArgument(f"properties of {properties_bytes:,} bytes are more than {layout.MAX_PROPERTIES_BYTES:,}")
    head = (
        layout.MIN_MESSAGE_BYTES
        + (magic == layout.MAGIC_V2)
        + 12 * bool(sys_flag & layout.BORN_V6)
        + 12 * bool(sys_flag & layout.STORE_V6)
    )
    return head + body_bytes + topic_bytes + properties_bytes


def compress(body: bytes, name: str) -> tuple[bytes, int]:
    """Return the compressed body and its sys flag bits; `name` is "zlib", "lz4" or "zstd"."""
    if name == "zlib":
        return zlib.compress(body), layout.COMPRESSED | layout.COMPRESSION_ZLIB
    if name == "lz4":
        return _lz4_frame(body), layout.COMPRESSED | layout.COMPRESSION_LZ4
    if name == "zstd":
        return pa.compress(body, "zstd", asbytes=True), layout.COMPRESSED | layout.COMPRESSION_ZSTD
    raise InvalidArgument(f"unknown compression {name!r}")


# Magic, independent blocks of at most 64 KiB each, no sizes and no checksums; the header's checksum.
_LZ4_HEAD = bytes.fromhex("04224d18604082")
_LZ4_BLOCK_BYTES = 1 << 16
_LZ4_AS_IT_IS = 1 << 31


def _lz4_frame(body: bytes) -> bytes:
    """Return an LZ4 frame of independent blocks. RocketMQ's reader refuses linked blocks, such as Arrow's."""
    codec, parts = pa.Codec("lz4_raw"), [_LZ4_HEAD]
    for at in range(0, len(body), _LZ4_BLOCK_BYTES):
        block = body[at : at + _LZ4_BLOCK_BYTES]
        packed = codec.compress(block, asbytes=True)
        if len(packed) < len(block):
            parts += [struct.pack("<I", len(packed)), packed]
        else:
            parts += [struct.pack("<I", len(block) | _LZ4_AS_IT_IS), block]
    return b"".join([*parts, bytes(4)])
