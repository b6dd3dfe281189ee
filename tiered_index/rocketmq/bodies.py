"""Compressed bodies: zlib by the standard library, LZ4 frames and zstd by Arrow's codecs. Pure.

A body says nothing of its size before it is decompressed, so every decompression has a bound: a few KiB can claim gigabytes.
"""

from __future__ import annotations

import zlib

import pyarrow as pa

from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.rocketmq.layout import COMPRESSED, COMPRESSION_LZ4, COMPRESSION_MASK, COMPRESSION_ZLIB, COMPRESSION_ZSTD

__all__ = ["MAX_BODY_BYTES", "compress", "compression_of", "decompress"]

MAX_BODY_BYTES = 1 << 27
"""Bound of a decompressed body unless the caller says otherwise: 128 MiB, 32 times the broker's default bound of a message."""

_NAMES = {0: "zlib", COMPRESSION_LZ4: "lz4", COMPRESSION_ZSTD: "zstd", COMPRESSION_ZLIB: "zlib"}
# type 0 stands in messages of clients older than the compression types


def compression_of(sys_flag: int) -> str | None:
    """Return "zlib", "lz4" or "zstd", None for a plain body, or "unknown" for a type that RocketMQ has not got."""
    return _NAMES.get(sys_flag & COMPRESSION_MASK, "unknown") if sys_flag & COMPRESSED else None


def decompress(body: bytes, sys_flag: int, *, file: str = "message", offset: int | None = None, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Return the plain body of at most `max_bytes` bytes; raises `CorruptFile` naming `file` and `offset` for anything else."""
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
