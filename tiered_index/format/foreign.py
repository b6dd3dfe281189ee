"""Reads index files without a journal or trailer, as RocketMQ writes them. SPEC.md sections 3 and 4.

The caller gives the geometry of an unsealed file (RocketMQ has it in its configuration). Slots and `previous` fields
are only compared with the entries. Results are copies with normal hashes. Pure; any thread. It follows RocketMQ's
`IndexStoreFile`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tiered_index.errors import ConfigError, CorruptFile
from tiered_index.format.compacted import CHUNK
from tiered_index.format.keys.hashing import normal_hashes
from tiered_index.format.layout import (
    HEADER_SIZE,
    NATIVE,
    PRESETS,
    ROCKETMQ,
    SHARD_MAGIC,
    SLOT_SIZE,
    Header,
    Layout,
    Preset,
    read_header,
)
from tiered_index.format.schema import Schema
from tiered_index.format.trailer import TAIL_MAGIC, TAIL_SIZE, Tail
from tiered_index.format.unsealed import entries_view

Array = npt.NDArray[Any]
# ``read(position, length)`` returns exactly these bytes of one file, for example by a range GET
Read = Callable[[int, int], bytes]
# Bytes from the start of a file that `recognise` and `ForeignCompacted.open` need
HEAD_SIZE = HEADER_SIZE + SLOT_SIZE
_NO_BYTES = "the file is empty; RocketMQ uploads such an object for an index file without entries"


@dataclass(frozen=True, slots=True)
class FileKind:
    """A file's state, its preset, and whether it has a trailer. For shards only the trailer has the true preset."""

    state: Literal["unsealed", "compacted", "shard"]
    preset: Preset
    has_trailer: bool


def recognise(head: bytes, tail: bytes, file_size: int, file: str) -> FileKind:
    """Return the kind of a file of `file_size` bytes, from its first `HEAD_SIZE` and last `TAIL_SIZE` bytes.

    Raises `CorruptFile` for a file that is neither ours nor RocketMQ's, and for a damaged tail. Raises
    `UnsupportedVersion` for another version.
    """
    if not file_size:
        raise CorruptFile(file, _NO_BYTES)
    header = read_header(head, file)
    if header.magic == SHARD_MAGIC:
        Tail.decode(tail, file, file_size)
        return FileKind("shard", NATIVE, True)
    preset = next(p for p in PRESETS.values() if header.magic in (p.begin_magic, p.end_magic))
    if header.magic == preset.begin_magic:
        return FileKind("unsealed", preset, False)
    if tail[-TAIL_SIZE:].startswith(TAIL_MAGIC):
        Tail.decode(tail, file, file_size)
        return FileKind("compacted", preset, True)
    if preset is NATIVE:
        # a compacted native file always has a trailer, so this is a full unsealed file
        return FileKind("unsealed", preset, False)
    # A full unsealed file has the end magic, too. Its slot 0 has an entry's index, at most `items`, and the file is
    # longer than 28 * items + items. In a compacted file slot 0 has a position p with p + 28 * items >= size. These
    # conditions exclude each other.
    first = int.from_bytes(head[HEADER_SIZE : HEADER_SIZE + 4], "big", signed=True)
    reaches_end = first + preset.schema.item.itemsize * header.items >= file_size
    return FileKind("compacted" if reaches_end else "unsealed", preset, False)


def items_of(entries: Array, schema: Schema) -> Array:
    """Return unsealed entries (n) as compacted items (a copy, n) with normal hashes. Memory: 60 bytes per entry."""
    raw = np.ascontiguousarray(entries).view(np.uint8).reshape(len(entries), schema.entry.itemsize)
    items = raw[:, : schema.item.itemsize].copy().reshape(-1).view(schema.item)
    items["key_hash"] = normal_hashes(items["key_hash"])
    return items


def read_exactly(read: Read, position: int, length: int, file: str) -> bytes:
    """Return `read(position, length)`. Raises `CorruptFile` unless it has exactly `length` bytes."""
    data = read(position, length)
    if len(data) != length:
        raise CorruptFile(file, "file is cut off", offset=position, expected=length, found=len(data))
    return data


class ForeignUnsealed:
    """An unsealed file's bytes or memory map, with the geometry of `layout`.

    Raises `CorruptFile` for a wrong magic, for a size or count that does not fit the geometry, and for slots that
    contradict the entries. The end timestamp of the header may be wrong, because RocketMQ's recovery overwrites it, so
    `interval_ms` is computed from the entries.
    """

    def __init__(self, data: Any, layout: Layout, file: str) -> None:
        view = memoryview(data)
        self.layout, self.file, damage = layout, file, partial(CorruptFile, file)
        self.header: Header = read_header(view[:HEADER_SIZE], file)
        magics = (layout.preset.begin_magic, layout.preset.end_magic)
        if self.header.magic not in magics:
            expected, magic = [f"{m:#x}" for m in magics], f"{self.header.magic:#x}"
            raise damage(f"not a {layout.preset.name} file", offset=0, expected=expected, found=magic)
        if len(view) != layout.unsealed_size:
            cut_off = "file is cut off, or " if len(view) < layout.unsealed_size else ""
            geometry = f"{layout.slots} slots and {layout.items} items"
            problem = f"{cut_off}the geometry is wrong: {geometry} do not fit its size"
            raise damage(problem, expected=layout.unsealed_size, found=len(view))
        if self.header.items > layout.capacity:
            problem = "more entries than the geometry holds"
            raise damage(problem, offset=24, expected=layout.capacity, found=self.header.items)
        self.count = self.header.items
        self.entries = entries_view(view, layout, self.count)
        self._check_heads(view)

    def _check_heads(self, view: memoryview) -> None:
        """Raise `CorruptFile` if most heads name no entry of their slot: the numbers of slots and items are wrong."""
        layout = self.layout
        if any(view[layout.entry_position(0) : layout.entry_position(1)]):
            raise CorruptFile(self.file, "entry 0 is not empty: the geometry is wrong", offset=layout.entry_position(0))
        heads = np.frombuffer(view, ">i4", layout.slots * 2, HEADER_SIZE)[::2]
        used = np.flatnonzero(heads)
        values = heads[used].astype(np.int64)
        known = (values > 0) & (values <= self.count)
        stored = self.entries["key_hash"][values[known] - 1]
        agree = int((normal_hashes(stored).astype(np.int64) % layout.slots == used[known]).sum())
        if agree < len(used) - agree or (not agree and bool((self.entries["key_hash"] > 0).any())):
            problem = "slots and entries contradict each other: the geometry is wrong"
            raise CorruptFile(self.file, problem, offset=HEADER_SIZE, expected=len(used), found=agree)

    @cached_property
    def interval_ms(self) -> tuple[int, int] | None:
        """The smallest and greatest time of the entries, inclusive, in epoch milliseconds; None without entries."""
        if not self.count:
            return None
        differences = self.entries["time_diff_s"]
        begin_ms = self.header.begin_ms
        return begin_ms + 1000 * int(differences.min()), begin_ms + 1000 * int(differences.max())

    def items(self) -> Iterator[Array]:
        """Yield all items in order of insertion, at most `CHUNK` at a time."""
        for start in range(0, self.count, CHUNK):
            yield items_of(self.entries[start : start + CHUNK], self.layout.schema)


def bare_slots(first_slot_item: bytes, file: str) -> int:
    """Return the slot count of a compacted file without a trailer.

    `first_slot_item` is the 8 bytes at position 28. The position in slot 0 is the end of the slot table. The header has
    only the number of slots *in use*, and the configuration may have changed since. Raises `CorruptFile`.
    """
    if len(first_slot_item) < SLOT_SIZE:
        raise CorruptFile(file, "no slot table", offset=HEADER_SIZE, expected=SLOT_SIZE, found=len(first_slot_item))
    position = int.from_bytes(first_slot_item[:4], "big", signed=True)
    slots, rest = divmod(position - HEADER_SIZE, SLOT_SIZE)
    if rest or slots < 1:
        raise CorruptFile(file, "slot 0 does not point after a slot table", offset=HEADER_SIZE, found=position)
    return slots


@dataclass(frozen=True)
class ForeignCompacted:
    """A compacted RocketMQ file without a trailer.

    `count` is the number of its items. The count in its header may be greater, because RocketMQ's compaction loses
    entries whose hash is `Integer.MIN_VALUE`. The slots in the header are those *in use*.
    """

    layout: Layout
    header: Header
    count: int
    file_size: int
    file: str

    @classmethod
    def open(cls, read: Read, file_size: int, file: str) -> ForeignCompacted:
        """Open a file with two small reads. Raises `CorruptFile` if header and slots contradict each other."""
        damage = partial(CorruptFile, file)
        if not file_size:
            raise damage(_NO_BYTES)
        head = read_exactly(read, 0, min(HEAD_SIZE, file_size), file)
        header = read_header(head, file)
        if header.magic != ROCKETMQ.end_magic:
            expected, magic = f"{ROCKETMQ.end_magic:#x}", f"{header.magic:#x}"
            raise damage("not a compacted rocketmq file", offset=0, expected=expected, found=magic)
        slots = bare_slots(head[HEADER_SIZE:], file)
        items_position = HEADER_SIZE + SLOT_SIZE * slots
        if items_position > file_size:
            problem = "slot 0 has a position behind the file's end"
            raise damage(problem, offset=HEADER_SIZE, expected=file_size, found=items_position)
        count, rest = divmod(file_size - items_position, ROCKETMQ.schema.item.itemsize)
        last_at = items_position - SLOT_SIZE
        last = read_exactly(read, last_at, SLOT_SIZE, file)
        end = int.from_bytes(last[:4], "big", signed=True) + int.from_bytes(last[4:], "big", signed=True)
        if end != file_size or rest:
            problem = "the array of the last slot does not end at the file's end"
            raise damage(problem, offset=last_at, expected=file_size, found=end)
        if not header.slots_in_use <= slots or not count <= header.items:
            problem, found_both = "header and slot table contradict each other", (header.slots_in_use, header.items)
            raise damage(problem, offset=20, expected=(slots, count), found=found_both)
        try:
            layout = Layout(ROCKETMQ, ROCKETMQ.schema, slots, max(2, count + 1))
        except ConfigError as error:
            raise damage(f"impossible geometry: {error}", offset=HEADER_SIZE) from error
        return cls(layout, header, count, file_size, file)

    def items(self, read: Read) -> Iterator[Array]:
        """Yield all items by slot, the newest first within a slot, at most `CHUNK` at a time."""
        size = CHUNK * self.layout.schema.item.itemsize
        for position in range(self.layout.items_position, self.file_size, size):
            data = read_exactly(read, position, min(size, self.file_size - position), self.file)
            items = np.frombuffer(data, self.layout.schema.item).copy()
            items["key_hash"] = normal_hashes(items["key_hash"])
            yield items
