"""Lookups in RocketMQ's own index files as RocketMQ makes them, without its bounds: oracles of the files' entries.

They compare stored times in milliseconds. They return copies of items with normalised hashes, newest insertion first.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.errors import CorruptFile
from tiered_index.format.foreign import ForeignCompacted, ForeignUnsealed, Read, items_of, read_exactly
from tiered_index.format.keys.hashing import normal_hashes
from tiered_index.format.layout import HEADER_SIZE, SLOT_SIZE, Layout

Array = npt.NDArray[Any]


def stored_ms(items: Array, begin_ms: int) -> npt.NDArray[np.int64]:
    """Return the items' times (i64, n; epoch ms) as RocketMQ computes them: the header's `begin_ms` + difference."""
    times: npt.NDArray[np.int64] = begin_ms + items["time_diff_s"].astype(np.int64) * 1000
    return times


def find_unsealed(image: ForeignUnsealed, key_hash: int, begin_ms: int, end_ms: int) -> Array:
    """Return the items of a normal hash in [begin_ms, end_ms], epoch ms."""
    rows = np.flatnonzero(normal_hashes(image.entries["key_hash"]) == key_hash)[::-1]
    return _within(
        items_of(image.entries[rows], image.layout.schema), key_hash, begin_ms, end_ms, image.header.begin_ms
    )


def find_compacted(file: ForeignCompacted, read: Read, key_hash: int, begin_ms: int, end_ms: int) -> Array:
    """Return the items of a normal hash in [begin_ms, end_ms], epoch ms.

    It takes two reads: the slot's 8 bytes, then its array, unless that is empty. If RocketMQ's compaction kept a hash
    of `Integer.MIN_VALUE`, it is in slot 0, the slot of its normal form 0. Raises `CorruptFile`.
    """
    slot = key_hash % file.layout.slots
    slot_item = read_exactly(read, HEADER_SIZE + SLOT_SIZE * slot, SLOT_SIZE, file.file)
    position, length = bare_slot_run(slot_item, file.layout, file.file, file.file_size, slot)
    if not length:
        return np.empty(0, file.layout.schema.item)
    items = np.frombuffer(read_exactly(read, position, length, file.file), file.layout.schema.item).copy()
    items["key_hash"] = normal_hashes(items["key_hash"])
    return _within(items, key_hash, begin_ms, end_ms, file.header.begin_ms)


def bare_slot_run(slot_item: bytes, layout: Layout, file: str, file_size: int, slot: int) -> tuple[int, int]:
    """Return (position, length) in bytes of a slot's array, from the slot's 8 bytes. Raises `CorruptFile`."""
    position, length = np.frombuffer(slot_item, ">i4").tolist()
    size = layout.schema.item.itemsize
    if length < 0 or length % size or position < layout.items_position or position + length > file_size:
        at = HEADER_SIZE + SLOT_SIZE * slot
        raise CorruptFile(file, f"slot {slot} points outside the file", offset=at, found=(position, length))
    return position, length


def _within(items: Array, key_hash: int, begin_ms: int, end_ms: int, file_begin_ms: int) -> Array:
    times = stored_ms(items, file_begin_ms)
    return items[(items["key_hash"] == key_hash) & (times >= begin_ms) & (times <= end_ms)]
