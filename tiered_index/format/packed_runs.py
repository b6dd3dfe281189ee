"""Whole packed runs, many at once: their headers side by side, all their items by the compiled core.

What loops can't take (a run that is not as it should be, hashes that are not by rank) `Packing` opens one by one, which
tells what is wrong. Pure; safe under threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tiered_index.format.packed import Packing

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

MOST_ITEMS = 1 << 14
"""Items of a run, at most: one of 256 KiB of unpacked items has less."""


class Runs(NamedTuple):
    """Runs (r) side by side in `words` (u64): items and keys of each; `widths` and `least` (r x columns, u64) of its
    columns; the bits where its rows of keys, its marks of first items and its rows of items begin.
    """

    words: UInt64
    data: npt.NDArray[np.uint8]
    counts: Int64
    keys: Int64
    widths: Int64
    least: UInt64
    keys_at: Int64
    marks_at: Int64
    items_at: Int64
    key_bits: Int64
    item_bits: Int64

    @classmethod
    def parse(cls, packing: Packing, given: Sequence[tuple[bytes | memoryview, int]]) -> Runs | None:
        """Return the runs; None where one is not as it should be, or its hashes are not by rank."""
        lengths = np.array([len(data) for data, _ in given], np.int64)
        counts = np.array([count for _, count in given], np.int64)
        dtype = packing.header_dtype
        if lengths.min() < dtype.itemsize:
            return None
        # each word can be read with the one behind it
        padding = bytes(16 + -int(lengths.sum()) % 8)
        data = np.frombuffer(b"".join([*(data for data, _ in given), padding]), np.uint8)
        begins = np.cumsum(lengths) - lengths
        heads = data[begins[:, None] + np.arange(dtype.itemsize)].view(dtype)[:, 0]
        keys = heads["keys"].astype(np.int64)
        widths = np.stack([heads[f"width {name}"] for name in packing.order], 1).astype(np.int64)
        least = np.stack([_wide(heads[f"least {name}"]) for name in packing.order], 1)
        of_keys = 1 + len(packing.of_keys)
        key_bits, item_bits = widths[:, :of_keys].sum(1), widths[:, of_keys:].sum(1)
        marks_at = dtype.itemsize + (keys * key_bits + 7 >> 3)
        items_at = marks_at + np.where(keys < counts, counts + 7 >> 3, 0)
        first = least[:, 0].view(np.int64)
        right = (heads["is_ranked"] == 1) & (keys > 0) & (keys <= counts) & (counts <= MOST_ITEMS)
        right &= (widths.max(1) <= 64) & (widths[:, 0] <= 32) & (lengths == items_at + (counts * item_bits + 7 >> 3))
        right &= (first >= -(2**31)) & (first < packing.ranks)
        if not right.all():
            return None
        keys_at, marks_at, items_at = (8 * (begins + part) for part in (dtype.itemsize, marks_at, items_at))
        words = data.view("<u8")
        return cls(words, data, counts, keys, widths, least, keys_at, marks_at, items_at, key_bits, item_bits)


def unpacked_runs(loops: ModuleType, packing: Packing, given: Sequence[tuple[bytes | memoryview, int]]) -> Array | None:
    """Return the items (structured, n) of runs, each given by its data and count, one behind the other; None where one
    has to be opened.
    """
    if (runs := Runs.parse(packing, given)) is None:
        return None
    items = np.empty((int(runs.counts.sum()), packing.schema.item.itemsize), np.uint8)
    table = np.stack([runs.counts, runs.keys, runs.keys_at, runs.marks_at, runs.items_at], 1)
    whole = loops.unpack_items(
        *(runs.words, table, runs.widths, runs.least, packing.base, 1 + len(packing.of_keys)),
        *(packing.for_loops, packing.line.as_numbers, items),
    )
    return items.view(packing.schema.item)[:, 0] if whole else None


def packed_runs(loops: ModuleType, packing: Packing, items: Array, counts: Sequence[int]) -> list[bytes]:
    """Return the packed forms of several runs; `items` are theirs, one behind the other, `counts` of each."""
    starts = np.cumsum([0, *counts])
    columns = packing.for_loops
    # 64 bits a column and item, a mark, and what is left of a byte behind keys, marks and items
    room = len(items) * (8 * len(columns) + 1) + len(counts) * (packing.header.size + 3)
    packed, ends = np.empty(room, np.uint8), np.empty(len(counts), np.int64)
    data = np.ascontiguousarray(items).view(np.uint8).reshape(len(items), -1)
    loops.pack_items(
        *(data, starts, packing.base, 1 + len(packing.of_keys), columns, packing.line.as_numbers, packed, ends)
    )
    stops = ends.tolist()
    whole = packed[: stops[-1]].tobytes()
    return [whole[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]


def _wide(column: Array) -> UInt64:
    """Return a column's values modulo 2**64."""
    values: UInt64 = column.astype(np.int64 if column.dtype.kind == "i" else np.uint64).view(np.uint64)
    return values
