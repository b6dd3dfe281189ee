"""One file of the broker's classic index: read, and written byte for byte as the broker does. Pure.

```
header, 40 bytes: i64 begin (ms), i64 end (ms), i64 begin offset, i64 end offset,
                  i32 slots in use, i32 count (one more than entries)
slots x i32: index of the newest entry
items x 20 bytes: i32 key hash, i64 commit log offset, i32 seconds since begin,
                  i32 index of the previous entry of the slot
```

Entry 0 is unused, so a file of n items holds n - 1. The geometry isn't stored: the broker's default is 5,000,000 slots
and 20,000,000 items, others are found by `infer_geometry`. It follows RocketMQ's `IndexFile` and `IndexHeader`. One
thread writes a file; any thread reads one that is not being written.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.format.hashing import absolute_hash

HEADER_BYTES = 40
SLOT_BYTES = 4
# One entry; packed, big-endian.
ENTRY = np.dtype([("key_hash", ">i4"), ("offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])
ENTRY_BYTES = ENTRY.itemsize

_header = struct.Struct(">4q2i")
_entry = struct.Struct(">iqii")
_slot = struct.Struct(">i")
_MAX_SECONDS = 2**31 - 1


class Geometry(NamedTuple):
    """How many slots and items a file has room for."""

    slots: int
    items: int

    @property
    def entries_at(self) -> int:
        """Byte position of entry 0."""
        return HEADER_BYTES + SLOT_BYTES * self.slots

    @property
    def file_bytes(self) -> int:
        """Size of every file of this geometry."""
        return self.entries_at + ENTRY_BYTES * self.items


DEFAULT_GEOMETRY = Geometry(5_000_000, 20_000_000)


class ClassicHeader(NamedTuple):
    """The header's fields in their order; times in epoch milliseconds."""

    begin_ms: int
    end_ms: int
    begin_offset: int
    end_offset: int
    slots_in_use: int
    # One more than there are entries; never below 1.
    index_count: int


def decode_header(data: bytes, file: str = "index file") -> ClassicHeader:
    """Return the header in the first 40 bytes of `data`; raises `CorruptFile` where it is cut short or can't be one."""
    if len(data) < HEADER_BYTES:
        raise CorruptFile(file, "the header is cut short", offset=len(data), expected=HEADER_BYTES, found=len(data))
    header = ClassicHeader(*_header.unpack_from(data))
    header = header._replace(index_count=max(header.index_count, 1))
    if header.slots_in_use < 0 or header.begin_offset < 0 or header.end_offset < 0:
        raise CorruptFile(file, "the header holds a negative count or offset", offset=0, found=header)
    return header


class ClassicIndexFile:
    """A classic index file in memory."""

    def __init__(
        self, data: bytes | bytearray, geometry: Geometry = DEFAULT_GEOMETRY, *, file: str = "index file"
    ) -> None:
        """Take a whole file's bytes (a `bytearray` can be written to); `CorruptFile` where the geometry is another."""
        _check_geometry(geometry)
        if len(data) != geometry.file_bytes:
            problem = f"size of a file of {geometry.slots:,} slots and {geometry.items:,} items"
            raise CorruptFile(file, problem, expected=geometry.file_bytes, found=len(data))
        self.data = data
        self.geometry = geometry
        self.file = file
        self.header = decode_header(bytes(data[:HEADER_BYTES]), file)
        if self.header.index_count > geometry.items:
            found = self.header.index_count
            raise CorruptFile(file, "more entries than items", offset=36, expected=geometry.items, found=found)

    @classmethod
    def create(
        cls, geometry: Geometry, *, end_offset: int = 0, end_ms: int = 0, file: str = "index file"
    ) -> ClassicIndexFile:
        """Return a new file that inherits end offset and end timestamp of the one before it (0: there is none)."""
        _check_geometry(geometry)
        made = cls(bytearray(geometry.file_bytes), geometry, file=file)
        time, offset = max(end_ms, 0), max(end_offset, 0)
        made._set(ClassicHeader(time, time, offset, offset, 0, 1))
        return made

    @property
    def is_full(self) -> bool:
        """Whether the next `put_key` is refused."""
        return self.header.index_count >= self.geometry.items

    def _set(self, header: ClassicHeader) -> None:
        if not isinstance(self.data, bytearray):
            raise InvalidArgument(f"{self.file} was opened for reading")
        _header.pack_into(self.data, 0, *header)
        self.header = header

    def put_key(self, key: str, offset: int, store_ms: int) -> bool:
        """Add an entry for `key` (`topic#key`) as Java does; False where the file is full."""
        header = self.header
        if self.is_full:
            return False
        if not isinstance(self.data, bytearray):
            raise InvalidArgument(f"{self.file} was opened for reading")
        hashed = absolute_hash(key)
        slot_at = HEADER_BYTES + SLOT_BYTES * (hashed % self.geometry.slots)
        (newest,) = _slot.unpack_from(self.data, slot_at)
        if not 0 < newest <= header.index_count:
            newest = 0
        late = store_ms - header.begin_ms
        # toward zero as in Java, then cut to what the field holds; late ones count as none
        seconds = min(late // 1000, _MAX_SECONDS) if header.begin_ms > 0 and late > 0 else 0
        _entry.pack_into(
            self.data, self.geometry.entries_at + ENTRY_BYTES * header.index_count, hashed, offset, seconds, newest
        )
        _slot.pack_into(self.data, slot_at, header.index_count)
        first = header.index_count <= 1
        self._set(
            ClassicHeader(
                store_ms if first else header.begin_ms,
                store_ms,
                offset if first else header.begin_offset,
                offset,
                header.slots_in_use + (newest == 0),
                header.index_count + 1,
            )
        )
        return True

    def entries(self) -> npt.NDArray[np.void]:
        """Return all entries (`ENTRY`, n) in order of insertion: a copy."""
        return np.frombuffer(
            self.data, ENTRY, self.header.index_count - 1, self.geometry.entries_at + ENTRY_BYTES
        ).copy()


def _check_geometry(geometry: Geometry) -> None:
    if geometry.slots < 1 or geometry.items < 2 or geometry.file_bytes > 2**31 - 1:
        raise InvalidArgument(f"{geometry} can't be: at least 1 slot and 2 items, and a file below 2 GiB")


def infer_geometry(data: bytes | bytearray, file: str = "index file") -> Geometry:
    """Return the geometry of a file out of its contents: the one under which every entry is in the chain of its slot.

    A file without entries says nothing, and is taken for the broker's ratio of one slot to four items. Raises
    `CorruptFile` where no geometry fits. Tries every slot count that suits the size, but looks closer only where the
    first entry has the header's begin offset.
    """
    header = decode_header(bytes(data[:HEADER_BYTES]), file)
    room = len(data) - HEADER_BYTES
    usual = Geometry(room // 84, room // 84 * 4)
    if usual.slots and usual.file_bytes == len(data) and _fits(data, usual, header):
        return usual
    first_slots = room // SLOT_BYTES % 5 or 5
    # 4 * slots + 20 * items is the room, so slot counts that suit it differ by 5, and their first entries' positions by
    # 20 bytes
    most = (room - 2 * ENTRY_BYTES) // SLOT_BYTES
    if room % SLOT_BYTES == 0 and most >= first_slots:
        begin = HEADER_BYTES + SLOT_BYTES * first_slots + ENTRY_BYTES
        offsets = np.frombuffer(data, ENTRY, (most - first_slots) // 5 + 1, begin)["offset"]
        for place in np.flatnonzero(offsets == header.begin_offset).tolist():
            slots = first_slots + 5 * place
            geometry = Geometry(slots, (room - SLOT_BYTES * slots) // ENTRY_BYTES)
            if header.index_count > 1 and _fits(data, geometry, header):
                return geometry
    raise CorruptFile(
        file, f"no geometry fits a file of {len(data):,} bytes and its {header.index_count - 1:,} entries"
    )


def _fits(data: bytes | bytearray, geometry: Geometry, header: ClassicHeader) -> bool:
    """Return whether each slot's newest entry is one of its own: those of a file of this geometry are."""
    if header.index_count > geometry.items or not (header.index_count > 1) <= header.slots_in_use <= geometry.slots:
        return False
    entries = np.frombuffer(data, ENTRY, header.index_count - 1, geometry.entries_at + ENTRY_BYTES)
    heads = np.frombuffer(data, ">i4", geometry.slots, HEADER_BYTES)
    used = np.flatnonzero(heads)
    newest = heads[used].astype(np.int64)
    if len(newest) != header.slots_in_use or (
        len(newest) and not (newest.min() > 0 and newest.max() < header.index_count)
    ):
        return False
    return bool((entries["key_hash"][newest - 1] % geometry.slots == used).all())
