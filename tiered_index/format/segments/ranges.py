"""Tables of ranges: objects with the offsets of one log whose entries are no answers any more. SPEC.md section 9. Pure.

A head, then the columns of the table, compressed: 64-bit numbers, each as its difference from the one before.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt

from tiered_index.base.documents import unpacked
from tiered_index.base.kernels import crc32
from tiered_index.errors import CorruptFile, UnsupportedVersion

RANGES_MAGIC = b"TIXRANG\n"
RANGES_VERSION = 1
COLUMNS = 5
"""Start, end, generation, first and last second of each range."""
# 0 magic | 8 version | 12 ranges | 20 CRC32 of the compressed columns | 24 CRC32 of bytes 0..23
_HEAD = struct.Struct(">8sIQII")
MOST_RANGES = 1 << 24
"""Most ranges of one table."""

Rows = npt.NDArray[np.int64]


def encode_ranges(rows: Rows) -> bytes:
    """Return the object of a table (i64, n x `COLUMNS`)."""
    data = zlib.compress(_columns(rows), 6)
    head = _HEAD.pack(RANGES_MAGIC, RANGES_VERSION, len(rows), crc32(data), 0)[:-4]
    return head + crc32(head).to_bytes(4, "big") + data


def decode_ranges(data: bytes, file: str) -> Rows:
    """Return the table (i64, n x `COLUMNS`) in an object. Raises `CorruptFile` and `UnsupportedVersion`."""
    if len(data) < _HEAD.size or crc32(data[: _HEAD.size - 4]) != int.from_bytes(
        data[_HEAD.size - 4 : _HEAD.size], "big"
    ):
        raise CorruptFile(file, "the head of a table of ranges does not match its CRC32", offset=0)
    magic, version, count, expected, _ = _HEAD.unpack(data[: _HEAD.size])
    if magic != RANGES_MAGIC:
        raise CorruptFile(file, "wrong magic of a table of ranges", offset=0, expected=RANGES_MAGIC, found=magic)
    UnsupportedVersion.unless_read(file, "table of ranges", RANGES_VERSION, version)
    packed = data[_HEAD.size :]
    problem = "a table of ranges does not match its CRC32"
    CorruptFile.unless_equal(file, problem, expected, crc32(packed), offset=_HEAD.size)
    size = min(count, MOST_RANGES) * COLUMNS * 8
    text = unpacked(packed, size + 1, file, "a table of ranges")
    CorruptFile.unless_equal(file, "a table of ranges has another number of ranges", count * COLUMNS * 8, len(text))
    columns = np.frombuffer(text, ">i8").reshape(COLUMNS, count).astype(np.int64)
    return np.cumsum(columns, axis=1).T


def ranges_crc32(rows: Rows) -> int:
    """Return the CRC32 of a table (i64, n x `COLUMNS`), which does not depend on its compression."""
    return crc32(_columns(rows))


def _columns(rows: Rows) -> bytes:
    # the first number of each column, then differences; the sum of these is exact also where one overflows
    return np.diff(rows, axis=0, prepend=np.zeros((1, COLUMNS), np.int64)).T.astype(">i8").tobytes()
