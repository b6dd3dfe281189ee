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
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tiered_index.base.kernels import compiled
from tiered_index.errors import InvalidArgument
from tiered_index.format.keys.hashing import normal_hashes
from tiered_index.format.layout import Header, Layout
from tiered_index.format.schema import PREVIOUS

Array = npt.NDArray[Any]
# Entries inserted or made at a time: a sort, or the bytes, that fit the cache are twice as fast as those of a batch
_INSERT_CHUNK = 1 << 14
_SLOTS_AT_ONCE = 1 << 16
# a copy of all heads costs as much as so many times fewer single heads
_MANY = 8


def time_differences(timestamps_ms: Array, begin_ms: int) -> npt.NDArray[np.int32]:
    """Return (timestamp - begin) / 1000 truncated toward zero, wrapped to 32 bits, as Java computes it."""
    difference = timestamps_ms.astype(np.int64) - begin_ms
    if not len(difference) or int(difference.min()) >= 0:
        return (difference // 1000).astype(np.int32)
    truncated: npt.NDArray[np.int64] = np.sign(difference) * (np.abs(difference) // 1000)
    return truncated.astype(np.int32)


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """Entries from index `first` on that are ready to be written, and the slots whose heads `commit` will set.

    `hashes` (i32, n) are those of the entries. `make` makes the entries of a slice of the batch.
    """

    first: int
    hashes: npt.NDArray[np.int32]
    make: Callable[[slice], Array]
    fresh_slots: int
    end_ms: int

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def entries(self) -> Array:
        """All entries. Each call makes them."""
        return self.make(slice(0, len(self)))

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes of the entries in pieces of about 0.5 MiB, which fit the CPU's cache."""
        for start in range(0, len(self), _INSERT_CHUNK):
            yield memoryview(self.make(slice(start, min(start + _INSERT_CHUNK, len(self)))).view(np.uint8))  # type: ignore[arg-type]


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

    def prepare(self, hashes: Array, times: Array, columns: Mapping[str, Array], unit_ms: int = 1) -> PreparedBatch:
        """Prepare the entries of a batch for `commit`. The table is unchanged.

        `hashes` (i32, n) are normal hashes, `times` (i64, n) are in units of `unit_ms`. `columns` has every other
        column of the schema by name (n each). Raises `InvalidArgument` if n is more than `free`.
        """
        n = len(hashes)
        if n > self.free:
            raise InvalidArgument(f"{n} entries do not fit: {self.free} are free")
        # the batch prepared before was never committed
        if self._prepared:
            self._next_heads[:] = self.heads
        self._prepared = True
        previous, fresh_slots = self._insert(hashes, self.count + 1)
        end_ms = max(self.end_ms, int(times.max()) * unit_ms) if n else self.end_ms
        entry = self.layout.schema.entry
        stored = {"key_hash": hashes, PREVIOUS: previous}
        for name in entry.names or ():
            if name != "time_diff_s" and name not in stored:
                stored[name] = columns[name]

        make = _maker(entry, stored, times, unit_ms, self.begin_ms)
        return PreparedBatch(self.count + 1, hashes, make, fresh_slots, end_ms)

    def commit(self, batch: PreparedBatch) -> None:
        """Make the last prepared batch visible to readers. Raises `InvalidArgument` if entries were added since."""
        if batch.first != self.count + 1:
            raise InvalidArgument(f"batch starts at entry {batch.first}, the table's next is {self.count + 1}")
        self._prepared = False
        self.slots_in_use += batch.fresh_slots
        self.end_ms = batch.end_ms
        # first the count: readers that start at the heads must not find entries beyond it
        self.count += len(batch)
        self._show_heads(batch.hashes)

    def load(self, entries: Array, end_ms: int) -> None:
        """Add verified entries that are in the file (structured, from index `count` + 1 on), in chunks."""
        for start in range(0, len(entries), _INSERT_CHUNK):
            hashes = normal_hashes(entries["key_hash"][start : start + _INSERT_CHUNK])
            _, fresh = self._insert(hashes, self.count + 1)
            self.slots_in_use += fresh
            self.count += len(hashes)
            self._show_heads(hashes)
        self.end_ms = max(self.end_ms, end_ms)

    def header(self) -> Header:
        """Return the header for the present state. It has the end magic if no entry is free."""
        preset = self.layout.preset
        magic = preset.end_magic if self.free == 0 else preset.begin_magic
        return Header(magic, self.begin_ms, self.end_ms, self.slots_in_use, self.count)

    def slot_pieces(self) -> Iterator[memoryview]:
        """Yield the slot table's bytes (8 per slot) in pieces of up to 0.5 MiB, which fit the CPU's cache.

        They are views. A copy would hold the interpreter lock for long.
        """
        for start in range(0, self.layout.slots, _SLOTS_AT_ONCE):
            heads = self.heads[start : start + _SLOTS_AT_ONCE]
            table = np.zeros((len(heads), 2), ">i4")
            table[:, 0] = heads
            yield memoryview(table.reshape(-1).view(np.uint8))  # type: ignore[arg-type]

    def _insert(self, hashes: Array, first: int) -> tuple[npt.NDArray[np.int32], int]:
        """Insert rows (normal hashes, i32, n) from index `first` on into `_next_heads`.

        Return `previous` (i32, n), and the number of slots that were empty.
        """
        previous = np.empty(len(hashes), np.int32)
        if (loops := compiled()) is not None:
            return previous, loops.insert(hashes, self.layout.slots, first, self._next_heads, previous)
        fresh = 0
        for start in range(0, len(hashes), _INSERT_CHUNK):
            part = slice(start, start + _INSERT_CHUNK)
            fresh += self._insert_sorted(hashes[part], first + start, previous[part])
        return previous, fresh

    def _insert_sorted(self, hashes: Array, first: int, previous: npt.NDArray[np.int32]) -> int:
        """As `_insert`, by a sort. Memory: 40 bytes per row."""
        heads, slots = self._next_heads, self._slots_of(hashes)
        order = np.argsort(slots, kind="stable")
        again = np.diff(slots[order], prepend=-1) == 0
        # `previous` of a slot's first row is the head, and of each further row the row before
        previous[order[again]] = first + order[np.flatnonzero(again) - 1]
        firsts = order[~again]
        previous[firsts] = heads[slots[firsts]]
        lasts = order[np.append(~again[1:], True)]
        heads[slots[lasts]] = first + lasts
        return int(np.count_nonzero(previous[firsts] == 0))

    def _show_heads(self, hashes: Array) -> None:
        """Set the heads of the slots of hashes (normal, i32, n) to the prepared ones."""
        if _MANY * len(hashes) > self.layout.slots:
            self.heads[:] = self._next_heads
        else:
            slots = self._slots_of(hashes)
            self.heads[slots] = self._next_heads[slots]

    def _slots_of(self, hashes: Array) -> npt.NDArray[np.int64]:
        return (hashes.view(np.uint32) % np.uint32(self.layout.slots)).astype(np.int64)


def _maker(
    entry: np.dtype[Any], columns: Mapping[str, Array], times: Array, unit_ms: int, begin_ms: int
) -> Callable[[slice], Array]:
    """Return a function that makes the entries of a slice of columns and times (n each)."""
    loops, fields = compiled(), cast(Mapping[str, Any], entry.fields)
    if loops is None:

        def make(part: slice) -> Array:
            rows = np.empty(part.stop - part.start, entry)
            rows["time_diff_s"] = time_differences(times[part] * unit_ms, begin_ms)
            for name, values in columns.items():
                rows[name] = values[part]
            return rows

        return make
    kinds = {name: fields[name][0].newbyteorder("=") for name in columns}
    data = [values.astype(kinds[name], copy=False)[:, None].view(np.uint8) for name, values in columns.items()]
    places = np.array([(fields[name][1], kind.kind != "S") for name, kind in kinds.items()], np.int64)
    # aligned, because the core reads whole words; a column of packed rows is not
    seconds = np.require(times, np.int64, "A"), unit_ms, begin_ms, fields["time_diff_s"][1]

    def make_in_core(part: slice) -> Array:
        rows = np.empty((part.stop - part.start, entry.itemsize), np.uint8)
        loops.write_entries(rows, part.start, data, places, *seconds)
        return rows.view(entry)[:, 0]

    return make_in_core


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
