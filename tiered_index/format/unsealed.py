"""Unsealed files: hash chains, newest entry first, over an append-only array of entries. SPEC.md section 3.

Invariants:

- Entry i of the file has index i, from 1.
- `heads[s]` is the newest committed entry of slot s, or 0.
- An entry's `previous` is smaller than its own index.

Pure. Threads: one writer, and any number of readers of `heads` and of entries up to `count`. It follows RocketMQ's
`IndexStoreFile.putKey`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.errors import InvalidArgument
from tiered_index.format.hashing import normal_hashes
from tiered_index.format.layout import Header, Layout
from tiered_index.format.schema import PREVIOUS
from tiered_index.kernels import compiled

Array = npt.NDArray[Any]
# Entries inserted at a time: a sort that fits the cache is twice as fast as a sort of a whole batch
_INSERT_CHUNK = 1 << 15


def time_differences(timestamps_ms: Array, begin_ms: int) -> npt.NDArray[np.int32]:
    """Return (timestamp - begin) / 1000 truncated toward zero, wrapped to 32 bits, as Java computes it."""
    difference = timestamps_ms.astype(np.int64) - begin_ms
    if not len(difference) or int(difference.min()) >= 0:
        return (difference // 1000).astype(np.int32)
    truncated: npt.NDArray[np.int64] = np.sign(difference) * (np.abs(difference) // 1000)
    return truncated.astype(np.int32)


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """Entries from index `first` on that are ready to be written, and the chain heads that `commit` will set.

    `make` makes the entries of a slice of the batch.
    """

    first: int
    count: int
    make: Callable[[slice], Array]
    heads: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]]
    fresh_slots: int
    end_ms: int

    def __len__(self) -> int:
        return self.count

    @property
    def entries(self) -> Array:
        """All entries. Each call makes them."""
        return self.make(slice(0, self.count))

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes of the entries in pieces of about 1 MiB, which fit the CPU's cache."""
        for start in range(0, self.count, _INSERT_CHUNK):
            yield memoryview(self.make(slice(start, min(start + _INSERT_CHUNK, self.count))).view(np.uint8))  # type: ignore[arg-type]


class UnsealedTable:
    """The counters and chain heads (i32, one per slot) of one unsealed file. Memory: 8 bytes per slot."""

    def __init__(self, layout: Layout, begin_ms: int) -> None:
        self.layout = layout
        self.begin_ms = begin_ms
        self.end_ms = 0
        self.count = 0
        self.slots_in_use = 0
        self.heads: npt.NDArray[np.int32] = np.zeros(layout.slots, np.int32)
        # the heads after the prepared batch; hidden from readers until `commit`
        self._next_heads: npt.NDArray[np.int32] = np.zeros(layout.slots, np.int32)
        self._prepared = False

    @property
    def free(self) -> int:
        """The number of entries that still fit."""
        return self.layout.capacity - self.count

    def prepare(self, hashes: Array, timestamps_ms: Array, columns: Mapping[str, Array]) -> PreparedBatch:
        """Prepare the entries of a batch for `commit`. The table is unchanged.

        `hashes` (i32, n) are normal hashes, `timestamps_ms` (i64, n) are times. `columns` has every other column of the
        schema by name (n each). Raises `InvalidArgument` if n is more than `free`.
        """
        n = len(hashes)
        if n > self.free:
            raise InvalidArgument(f"{n} entries do not fit: {self.free} are free")
        # the batch prepared before was never committed
        if self._prepared:
            self._next_heads[:] = self.heads
        self._prepared = True
        first = self.count + 1
        heads, all_previous = [], np.empty(n, np.int32)
        fresh_slots = 0
        for start in range(0, n, _INSERT_CHUNK):
            part = slice(start, start + _INSERT_CHUNK)
            all_previous[part], slots, values, fresh = self._insert(hashes[part], first + start)
            heads.append((slots, values))
            fresh_slots += fresh
        end_ms = max(self.end_ms, int(timestamps_ms.max())) if n else self.end_ms
        entry = self.layout.schema.entry
        others = [name for name in entry.names or () if name not in ("key_hash", "time_diff_s", PREVIOUS)]

        def make(part: slice) -> Array:
            rows = np.empty(part.stop - part.start, entry)
            rows["key_hash"], rows[PREVIOUS] = hashes[part], all_previous[part]
            rows["time_diff_s"] = time_differences(timestamps_ms[part], self.begin_ms)
            for name in others:
                rows[name] = columns[name][part]
            return rows

        return PreparedBatch(first, n, make, heads, fresh_slots, end_ms)

    def commit(self, batch: PreparedBatch) -> None:
        """Make the last prepared batch visible to readers. Raises `InvalidArgument` if entries were added since."""
        if batch.first != self.count + 1:
            raise InvalidArgument(f"batch starts at entry {batch.first}, the table's next is {self.count + 1}")
        self._prepared = False
        self.slots_in_use += batch.fresh_slots
        self.end_ms = batch.end_ms
        # first the count: readers that start at the heads must not find entries beyond it
        self.count += len(batch)
        for slots, values in batch.heads:
            self.heads[slots] = values

    def load(self, entries: Array, end_ms: int) -> None:
        """Add verified entries that are in the file (structured, from index `count` + 1 on), in chunks."""
        for start in range(0, len(entries), _INSERT_CHUNK):
            hashes = normal_hashes(entries["key_hash"][start : start + _INSERT_CHUNK])
            _, slots, values, fresh = self._insert(hashes, self.count + 1)
            self.slots_in_use += fresh
            self.count += len(hashes)
            self.heads[slots] = values
        self.end_ms = max(self.end_ms, end_ms)

    def header(self) -> Header:
        """Return the header for the present state. It has the end magic if no entry is free."""
        preset = self.layout.preset
        magic = preset.end_magic if self.free == 0 else preset.begin_magic
        return Header(magic, self.begin_ms, self.end_ms, self.slots_in_use, self.count)

    def slot_table(self) -> memoryview:
        """Return a view of the slot table's bytes (8 per slot). A copy would hold the interpreter lock for long."""
        table = np.zeros((self.layout.slots, 2), ">i4")
        table[:, 0] = self.heads
        return memoryview(table.reshape(-1).view(np.uint8))  # type: ignore[arg-type]

    def _insert(
        self, hashes: Array, first: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int32], int]:
        """Insert rows (normal hashes, i32, n) from index `first` on into `_next_heads`.

        Return `previous` (i32, n), slots (i64, n), new heads (i32, n), and the number of slots that were empty. Memory:
        40 bytes per row.
        """
        n = len(hashes)
        heads = self._next_heads
        if (loops := compiled()) is not None:
            previous, values = np.empty(n, np.int32), np.empty(n, np.int32)
            slots = np.empty(n, np.int64)
            return (
                previous,
                slots,
                values,
                loops.insert(hashes, self.layout.slots, first, heads, previous, slots, values),
            )
        slots = (hashes.view(np.uint32) % np.uint32(self.layout.slots)).astype(np.int64)
        order = np.argsort(slots, kind="stable")
        again = np.diff(slots[order], prepend=-1) == 0
        # `previous` of a slot's first row is the head, and of each further row the row before
        previous = np.empty(n, np.int32)
        previous[order[again]] = first + order[np.flatnonzero(again) - 1]
        firsts = order[~again]
        previous[firsts] = heads[slots[firsts]]
        lasts = order[np.append(~again[1:], True)]
        heads[slots[lasts]] = first + lasts
        return previous, slots, heads[slots], int(np.count_nonzero(previous[firsts] == 0))


def entries_view(data: Any, layout: Layout, count: int) -> Array:
    """Return entries 1..count as a structured array over `data` (no copy)."""
    return np.frombuffer(data, layout.schema.entry, count, layout.entry_position(1))


def walk_chains(
    data: Any,
    layout: Layout,
    heads: npt.NDArray[np.int32],
    hashes: npt.NDArray[np.int32],
    wanted: npt.NDArray[np.int64],
    limit: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
    """Return the entries (i64, m) with one of the wanted hashes, and the number of that hash (i64, m), in any order.

    `wanted` (i64, n) are places in `hashes`. `data` is the file's bytes, `heads` are the heads of its slots. Return
    None if a chain is longer than `limit`, does not fall, or begins behind the last entry. The caller then scans the
    hash column.
    """
    schema = layout.schema
    entries = np.frombuffer(data, schema.entry, layout.items, layout.items_position)
    stored, following = entries["key_hash"], entries[PREVIOUS]
    index = heads[hashes[wanted] % layout.slots].astype(np.int64)
    if (index >= layout.items).any():
        return None
    pairs = [(wanted[:0], wanted[:0])]
    for _ in range(limit):
        going = np.flatnonzero(index > 0)
        if not len(going):
            break
        index, wanted = index[going], wanted[going]
        hit = normal_hashes(stored[index]) == hashes[wanted]
        pairs.append((index[hit], wanted[hit]))
        older = following[index].astype(np.int64)
        if ((older >= index) | (older < 0)).any():
            return None
        index = older
    if np.any(index > 0):
        return None
    numbers, owners = zip(*pairs, strict=True)
    return np.concatenate(numbers), np.concatenate(owners)
