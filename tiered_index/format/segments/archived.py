"""Archived segments: the bytes of a source's log file, optional queue offsets, and CRC32s. SPEC.md section 9.

Offset o of the log is byte o - start of the object, so a reader gets a message with one range. A columnar segment is a
Parquet file of records instead. Its CRC32s are before its footer, so that the object is also a Parquet file. Pure.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from tiered_index.errors import CorruptFile, UnsupportedVersion

SEGMENT_MAGIC = b"TIXSEGM\n"
SEGMENT_VERSION = 5
PIECE_BYTES = 16 << 10
"""Bytes with one checksum. A lookup reads whole pieces; the table of a segment of 1 GiB takes 256 KiB."""
HEAD_BYTES = 1 << 20
"""Most bytes of a segment that the `head_crc32` of its log record covers."""
DAMAGED_PIECE = "a piece of an archived segment does not match its CRC32"
# 0 magic | 8 version | 12 bytes of a piece | 16 start offset | 24 S | 32 CRC32 of the segment | 36 CRC32 of the table |
# 40 zero | 44 CRC32 of bytes 0..43
_TAIL = struct.Struct(">8sIIQQIIII")


def footer_bytes_of(file: bytes) -> int:
    """Return the bytes of a Parquet file's footer, with the length field and the magic."""
    return int.from_bytes(file[-8:-4], "little") + 8


def segment_object_bytes(size_bytes: int, piece_bytes: int = PIECE_BYTES) -> int:
    """Return the size of the object that holds a segment of `size_bytes`, without queue offsets."""
    return size_bytes + 4 * -(-size_bytes // piece_bytes) + _TAIL.size


def queues_bytes_of(size_bytes: int, object_bytes: int) -> int:
    """Return the bytes of queue offsets in an object of `object_bytes`; 0: it has none."""
    return max(0, object_bytes - segment_object_bytes(size_bytes))


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """The table and tail after a segment's bytes; `start` is the segment's first offset in its log."""

    start: int
    size_bytes: int
    crc32: int
    piece_bytes: int
    # CRC32 of each piece, in order; the last piece may be shorter
    pieces: npt.NDArray[np.uint32]
    # bytes of queue offsets between the segment and the table; 0: none
    queues_bytes: int = 0
    # the last bytes of a columnar segment, after the tail; empty: not columnar
    footer: bytes = b""

    def encode(self) -> bytes:
        """Return the bytes that follow the segment and its queue offsets, without its footer."""
        table = self.pieces.astype(">u4").tobytes()
        sizes = (self.piece_bytes, self.start, self.size_bytes)
        tail = _TAIL.pack(SEGMENT_MAGIC, SEGMENT_VERSION, *sizes, self.crc32, zlib.crc32(table), 0, 0)[:-4]
        return table + tail + zlib.crc32(tail).to_bytes(4, "big")

    @classmethod
    def decode(cls, data: bytes, object_bytes: int, file: str, footer_bytes: int = 0) -> SegmentTable:
        """Return the table in `data`, the last bytes of an object of `object_bytes`. Raises `CorruptFile`.

        The footer is not checked.
        """
        data, footer = data[: len(data) - footer_bytes], data[len(data) - footer_bytes :]
        damage = partial(CorruptFile, file, offset=object_bytes - footer_bytes - _TAIL.size)
        if len(data) < _TAIL.size or not data.endswith(zlib.crc32(data[-_TAIL.size : -4]).to_bytes(4, "big")):
            raise damage("the tail of an archived segment does not match its CRC32")
        magic, version, piece_bytes, start, size_bytes, crc32, table_crc32, zero, _ = _TAIL.unpack(data[-_TAIL.size :])
        if magic != SEGMENT_MAGIC:
            raise damage("wrong magic of an archived segment", expected=SEGMENT_MAGIC, found=magic)
        UnsupportedVersion.unless_read(file, "archived segment", SEGMENT_VERSION, version)
        queues_bytes = object_bytes - segment_object_bytes(size_bytes, piece_bytes) if piece_bytes else -1
        if zero or queues_bytes < 0 or (footer and queues_bytes):
            problem = "the sizes in the tail of an archived segment don't add up to the object's"
            raise damage(problem, expected=object_bytes, found=(size_bytes, piece_bytes))
        table = data[-(object_bytes - size_bytes - queues_bytes) : -_TAIL.size]
        if len(table) != object_bytes - size_bytes - queues_bytes - _TAIL.size or zlib.crc32(table) != table_crc32:
            raise CorruptFile(file, "the table of an archived segment does not match its CRC32", offset=size_bytes)
        pieces = np.frombuffer(table, ">u4").astype(np.uint32)
        return cls(start, size_bytes, crc32, piece_bytes, pieces, queues_bytes, footer)

    def check(self, file: str, start: int, size_bytes: int, crc32: int) -> None:
        """Raise `CorruptFile` unless the table is that of a segment as the log describes it."""
        logged, own = (start, size_bytes, crc32), (self.start, self.size_bytes, self.crc32)
        CorruptFile.unless_equal(file, "start, size or CRC32 differ from the log", logged, own)

    def whole_pieces(self, begin: int, end: int) -> tuple[int, int]:
        """Return the range (begin, end) of whole pieces that covers bytes [begin, end) of the segment."""
        length = self.piece_bytes
        return begin // length * length, min(-(-end // length) * length, self.size_bytes)

    def damage(self, file: str, position: int, data: bytes | memoryview) -> list[CorruptFile]:
        """Return an error for each damaged piece in `data`, which has whole pieces from byte `position` on."""
        damages, view, length = [], memoryview(data), self.piece_bytes
        for at in range(0, len(view), length):
            if zlib.crc32(view[at : at + length]) != int(self.pieces[(position + at) // length]):
                damages.append(CorruptFile(file, DAMAGED_PIECE, offset=position + at))
        return damages


class SegmentSums:
    """CRC32 of a segment and of its pieces, computed as its bytes arrive in order. One thread."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.crc32 = 0
        # of the first MiB at most
        self.head_crc32 = 0
        self._pieces: list[int] = []

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes."""
        self.crc32 = zlib.crc32(data, self.crc32)
        view, at = memoryview(data), 0
        self.head_crc32 = zlib.crc32(view[: max(HEAD_BYTES - self.size_bytes, 0)], self.head_crc32)
        while at < len(view):
            begun = self.size_bytes % PIECE_BYTES
            part = view[at : at + PIECE_BYTES - begun]
            if begun:
                self._pieces[-1] = zlib.crc32(part, self._pieces[-1])
            else:
                self._pieces.append(zlib.crc32(part))
            at += len(part)
            self.size_bytes += len(part)

    def table(self, start: int, queues_bytes: int = 0, footer: bytes = b"") -> SegmentTable:
        """Return the table of the segment, which begins at offset `start` of its log."""
        pieces = np.array(self._pieces, np.uint32)
        return SegmentTable(start, self.size_bytes, self.crc32, PIECE_BYTES, pieces, queues_bytes, footer)
