"""Reads the broker's classic index files.

```
header, 40 bytes: i64 begin (ms), i64 end (ms), i64 begin offset, i64 end offset,
                  i32 slots in use, i32 count (one more than entries)
slots x i32: index of the newest entry
items x 20 bytes: i32 key hash, i64 commit log offset, i32 seconds since begin,
                  i32 index of the previous entry of the slot
```

Entry 0 is unused, so a file of n items has n - 1 entries. The geometry is not stored: the broker's default is 5,000,000
slots and 20,000,000 items; `infer_geometry` finds others. The names of files are the times at which they were made
(RocketMQ's `IndexFile`, `IndexHeader`).

Pure, except for the functions that read files; any thread.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tiered_index.connectors.rocketmq.log.segments import local_errors, pread
from tiered_index.errors import CorruptFile

HEADER_BYTES = 40
SLOT_BYTES = 4
# One entry; packed, big-endian.
ENTRY = np.dtype([("key_hash", ">i4"), ("offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])
ENTRY_BYTES = ENTRY.itemsize

_header = struct.Struct(">4q2i")
_NAME_DIGITS = 17


class Geometry(NamedTuple):
    """The numbers of slots and items of a file."""

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
    """Return the header in the first 40 bytes of `data`. Raises `CorruptFile` if it is cut short or invalid."""
    if len(data) < HEADER_BYTES:
        raise CorruptFile(file, "the header is cut short", offset=len(data), expected=HEADER_BYTES, found=len(data))
    header = ClassicHeader(*_header.unpack_from(data))
    header = header._replace(index_count=max(header.index_count, 1))
    if header.slots_in_use < 0 or header.begin_offset < 0 or header.end_offset < 0:
        raise CorruptFile(file, "the header holds a negative count or offset", offset=0)
    return header


def infer_geometry(data: bytes | bytearray, file: str = "index file") -> Geometry:
    """Return the geometry of a file by its contents: the one with which each slot's newest entry belongs to the slot.

    For a file without entries, it returns the broker's ratio of one slot to four items. Raises `CorruptFile` if no
    geometry fits. It tries the slot counts that fit the size and for which the first entry has the header's begin
    offset.
    """
    header = decode_header(bytes(data[:HEADER_BYTES]), file)
    room = len(data) - HEADER_BYTES
    usual = Geometry(room // 84, room // 84 * 4)
    if usual.slots and usual.file_bytes == len(data) and _fits(data, usual, header):
        return usual
    first_slots = room // SLOT_BYTES % 5 or 5
    # 4 * slots + 20 * items is the room: possible slot counts differ by 5, and their first entries' positions by 20
    # bytes
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
    """Return whether each slot's newest entry belongs to the slot, as in a file of this geometry."""
    if header.index_count > geometry.items:
        return False
    items = np.frombuffer(data, ENTRY, geometry.items - 1, geometry.entries_at + ENTRY_BYTES)
    heads = np.frombuffer(data, ">i4", geometry.slots, HEADER_BYTES).astype(np.int64)
    if heads.min() < 0 or heads.max() >= geometry.items:
        return False
    # the broker may have put more entries since the header was read: go back to the ones before them
    while len(late := np.flatnonzero(heads >= header.index_count)):
        before = items["previous"][heads[late] - 1].astype(np.int64)
        if ((before < 0) | (before >= heads[late])).any():
            return False
        heads[late] = before
    used = np.flatnonzero(heads)
    if not (header.index_count > 1) <= len(used) <= header.slots_in_use < header.index_count:
        return False
    if (items["key_hash"][heads[used] - 1] % geometry.slots != used).any():
        return False
    # brokers before mid-2020 counted a slot for each entry; then all entries have to prove the geometry
    return len(used) == header.slots_in_use or _are_chains(_entries(data, geometry, header), geometry.slots)


def _are_chains(entries: npt.NDArray[np.void], slots: int) -> bool:
    """Return whether each entry names the one before it in its slot, or 0."""
    slot = entries["key_hash"].astype(np.int64) % slots
    order = np.argsort(slot, kind="stable")
    before = np.zeros(len(order), np.int64)
    before[1:] = np.where(slot[order[1:]] == slot[order[:-1]], order[:-1] + 1, 0)
    return bool((entries["previous"][order] == before).all())


def _entries(data: bytes | bytearray, geometry: Geometry, header: ClassicHeader) -> npt.NDArray[np.void]:
    return np.frombuffer(data, ENTRY, header.index_count - 1, geometry.entries_at + ENTRY_BYTES)


def classic_file_names(folder: Path) -> list[str]:
    """Return the names of the index files in a folder, oldest first; a missing folder is empty."""
    with local_errors(folder):
        try:
            entries = [entry.name for entry in os.scandir(folder) if entry.is_file()]
        except FileNotFoundError:
            return []
    return sorted(name for name in entries if len(name) == _NAME_DIGITS and name.isascii() and name.isdecimal())


def read_entries(path: Path) -> npt.NDArray[np.void]:
    """Return all entries (`ENTRY`, n) of an index file in order of insertion. Raises `CorruptFile`."""
    with local_errors(path):
        size_bytes = path.stat().st_size
    data = pread(path, min(size_bytes, 2**31), 0)
    return _entries(data, infer_geometry(data, str(path)), decode_header(data, str(path)))
