"""Lookups in the broker's classic index: as the broker answers them, and without its bounds."""

from __future__ import annotations

from typing import NamedTuple

from tests.support.classic_writer import ClassicIndex, ClassicIndexFile, _entry, _slot, absolute_hash
from tiered_index.errors import CorruptFile
from tiered_index.rocketmq.classic import ENTRY_BYTES, HEADER_BYTES, SLOT_BYTES

# The broker's bound of a lookup (`maxMsgsNumBatch`)
MAX_COUNT = 64


class ClassicAnswer(NamedTuple):
    """The broker's answer: commit log offsets, newest first, and the end of its newest file."""

    offsets: list[int]
    last_ms: int
    last_offset: int


def query(
    index: ClassicIndex, topic: str, key: str, max_count: int = MAX_COUNT, begin_ms: int = 0, end_ms: int = 2**63 - 1
) -> ClassicAnswer:
    """Return the broker's answer (`queryOffset`), with its bounds and early stops. The range is inclusive.

    Raises `CorruptFile` if Java would loop endlessly.
    """
    offsets: list[int] = []
    limit = min(max_count, MAX_COUNT)
    for file in reversed(index.files):
        if is_time_matched(file, begin_ms, end_ms):
            select_offsets(file, offsets, f"{topic}#{key}", limit, begin_ms, end_ms)
        if file.header.begin_ms < begin_ms or len(offsets) >= limit:
            break
    newest = index.files[-1].header if index.files else None
    return ClassicAnswer(offsets, newest.end_ms if newest else 0, newest.end_offset if newest else 0)


def find(index: ClassicIndex, topic: str, key: str, begin_ms: int = 0, end_ms: int = 2**63 - 1) -> list[int]:
    """Return every offset under the key's hash in the inclusive range of milliseconds, newest file and entry first."""
    return [offset for file in reversed(index.files) for offset in find_in(file, f"{topic}#{key}", begin_ms, end_ms)]


def is_time_matched(file: ClassicIndexFile, begin_ms: int, end_ms: int) -> bool:
    """Return whether Java looks into this file for a range (`isTimeMatched`)."""
    low, high = file.header.begin_ms, file.header.end_ms
    return (begin_ms < low and end_ms > high) or low <= begin_ms <= high or low <= end_ms <= high


def select_offsets(
    file: ClassicIndexFile, offsets: list[int], key: str, max_count: int, begin_ms: int, end_ms: int
) -> None:
    """Add to `found` the offsets that Java finds (`selectPhyOffset`), newest first, until it has `max_count`.

    The range is inclusive. Java stops at the first entry older than the range, though older entries may follow it in
    the chain. Raises `CorruptFile` if the chain has a cycle.
    """
    hashed = absolute_hash(key)
    count = file.header.index_count
    (index,) = _slot.unpack_from(file.data, HEADER_BYTES + SLOT_BYTES * (hashed % file.geometry.slots))
    if not 0 < index <= count or count <= 1:
        return
    for _ in range(count):
        if len(offsets) >= max_count or index >= file.geometry.items:
            return
        read, offset, seconds, previous = _entry.unpack_from(file.data, file.geometry.entries_at + ENTRY_BYTES * index)
        if seconds < 0:
            return
        time_ms = file.header.begin_ms + seconds * 1000
        if read == hashed and begin_ms <= time_ms <= end_ms:
            offsets.append(offset)
        if not 0 < previous <= count or previous == index or time_ms < begin_ms:
            return
        index = previous
    raise CorruptFile(
        file.file, "a chain of entries has a cycle", offset=file.geometry.entries_at + ENTRY_BYTES * index
    )


def find_in(file: ClassicIndexFile, key: str, begin_ms: int = 0, end_ms: int = 2**63 - 1) -> list[int]:
    """Return all offsets under the hash of `key` in the inclusive range, newest first: no bound, no early stop.

    Times are whole seconds after the file's begin, or the begin itself for older messages. The first entry's time is
    the begin: its stored difference counts from the end of the previous file. Raises `CorruptFile` for a wrong chain.
    """
    hashed = absolute_hash(key)
    slot = hashed % file.geometry.slots
    (index,) = _slot.unpack_from(file.data, HEADER_BYTES + SLOT_BYTES * slot)
    offsets = []
    # A broker sets the slot before it counts the entry. So while it writes, a head that is one more than the count is
    # no damage.
    before = min(file.header.index_count + 1, file.geometry.items)
    while index != 0:
        at = file.geometry.entries_at + ENTRY_BYTES * index
        if not 0 < index < before:
            raise CorruptFile(
                file.file, "a chain points to no older entry", offset=at, expected=f"1 to {before - 1}", found=index
            )
        read, offset, seconds, previous = _entry.unpack_from(file.data, at)
        if read < 0 or read % file.geometry.slots != slot:
            raise CorruptFile(file.file, "an entry in another slot's chain", offset=at, expected=slot, found=read)
        time_ms = file.header.begin_ms + (max(seconds, 0) * 1000 if index > 1 else 0)
        if read == hashed and begin_ms <= time_ms <= end_ms:
            offsets.append(offset)
        before, index = index, previous
    return offsets
