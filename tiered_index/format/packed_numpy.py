"""Packed runs in plain NumPy: the reference of the compiled core, its substitute, and the errors that name damage.

Runs lie side by side, and a column of all of them is read by one gather whose places and widths differ from run to run.
Memory of reading: some 200 bytes a key and 100 an item. Pure; safe under threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tiered_index.errors import CorruptFile
from tiered_index.format.hashing import normal_hashes
from tiered_index.format.layout import MOST_ITEMS
from tiered_index.format.slots import hash_rank

if TYPE_CHECKING:
    from tiered_index.format.packed import Packing

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

# bits of a column that are written at once: with 7 before them they are in 8 bytes
_AT_ONCE = 56
# behind data of n bytes from n % 8 on: words that can be read with the one behind
_PADDING = bytes(16)
_ONE, _LAST_BIT = np.uint64(1), np.uint64(63)


def padded(pieces: Sequence[bytes | memoryview], size: int) -> UInt64:
    """Return words that have all data, of `size` bytes, and one behind it."""
    return np.frombuffer(b"".join([*pieces, _PADDING[size & 7 :]]), "<u8")


def unpack(
    packing: Packing, pieces: Sequence[bytes | memoryview], counts: Int64, file: str, ranks: Int64 | None
) -> tuple[Array, Int64]:
    """Do as `Packing.unpack`."""
    runs = _Runs.parse(packing, pieces, counts, file)
    # of each key: its run, its number in it, its rank or hash, its first item and the one behind its last
    ends = np.cumsum(runs.keys)
    run = np.repeat(np.arange(len(counts)), runs.keys)
    number: Int64 = np.arange(len(run)) - (ends - runs.keys)[run]
    is_ranked = runs.is_ranked[run]
    steps = _bits(runs.words, runs.keys_at[run] + number * runs.key_bits[run], runs.masks[run, 0]).view(np.int64)
    sums = np.cumsum(steps)
    before = np.append(0, sums[ends[:-1] - 1])
    codes = np.where(is_ranked, sums - before[run], steps) + runs.least[run, 0].view(np.int64)
    if (codes >= np.where(is_ranked, packing.ranks, 2**31)).any():
        raise CorruptFile(file, "a packed run has hashes of more than 32 bits")
    starts = _first_items(runs, counts, number, run, file)
    stops = np.append(starts[1:], 0)
    stops[ends - 1] = counts
    slots, above = np.divmod(codes, packing.quotients)
    hashes = np.where(is_ranked, above * packing.base + slots, codes)
    if ranks is not None:
        if not is_ranked.all():
            codes = np.where(is_ranked, codes, hash_rank(normal_hashes(hashes), packing.base).view(np.int64))
        asked = np.flatnonzero(np.isin(codes, ranks))
        run, number, hashes, starts, stops = (part[asked] for part in (run, number, hashes, starts, stops))
    times = stops - starts
    of_runs = np.bincount(run, times, len(counts)).astype(np.int64)
    # the columns of the keys, then, a row an item, those of the items
    bits: Int64 = runs.keys_at[run] + number * runs.key_bits[run]
    columns = [hashes.view(np.uint64), *runs.columns(run, bits, range(packing.of_keys))[1:]]
    columns = [np.repeat(column, times) for column in columns]
    run = np.repeat(run, times)
    place: Int64 = np.repeat(starts - np.cumsum(times) + times, times) + np.arange(len(run))
    bits = runs.items_at[run] + place * runs.item_bits[run]
    columns += runs.columns(run, bits, range(packing.of_keys, len(packing.order)))
    offsets, seconds = (column.view(np.int64) for column in columns[-2:])
    columns[-1] = (seconds + packing.line.at(offsets)).view(np.uint64)
    items = np.empty(len(run), packing.schema.item)
    words = items.view(packing.words)
    for name, column in zip(packing.order, columns, strict=True):
        words[name] = column
    return items, of_runs


class _Runs(NamedTuple):
    """Runs (r) side by side in `words`: whether hashes are by rank; keys of each; `masks` and `least` (r x columns) of
    its columns; the bits where its rows of keys, its marks of first items and its rows of items begin; bits of a row.
    """

    words: UInt64
    is_ranked: npt.NDArray[np.bool_]
    keys: Int64
    widths: Int64
    masks: UInt64
    least: UInt64
    keys_at: Int64
    marks_at: Int64
    items_at: Int64
    key_bits: Int64
    item_bits: Int64

    @classmethod
    def parse(cls, packing: Packing, pieces: Sequence[bytes | memoryview], counts: Int64, file: str) -> _Runs:
        """Parse the headers. Raises `CorruptFile`."""
        dtype = packing.header_dtype
        lengths = np.fromiter(map(len, pieces), np.int64)
        if (shortest := int(lengths.min())) < dtype.itemsize:
            raise CorruptFile(file, "a packed run is too short", expected=dtype.itemsize, found=shortest)
        ends = lengths.cumsum()
        words, begins = padded(pieces, int(ends[-1])), ends - lengths
        heads = words.view(np.uint8)[begins[:, None] + np.arange(dtype.itemsize)].view(dtype)[:, 0]
        keys = heads["keys"].astype(np.int64)
        widths = np.stack([heads[f"width {name}"] for name in packing.order], 1).astype(np.int64)
        least = np.stack([_native(heads[f"least {name}"]).view(np.uint64) for name in packing.order], 1)
        key_bits, item_bits = widths[:, : packing.of_keys].sum(1), widths[:, packing.of_keys :].sum(1)
        marks_at = dtype.itemsize + (keys * key_bits + 7 >> 3)
        items_at = marks_at + np.where(keys < counts, counts + 7 >> 3, 0)
        expected = items_at + (counts * item_bits + 7 >> 3)
        right = (heads["is_ranked"] <= 1) & (keys > 0) & (keys <= counts) & (counts <= MOST_ITEMS)
        right &= (widths.max(1) <= 64) & (lengths == expected)
        for wrong in np.flatnonzero(~right)[:1].tolist():
            about = {"expected": int(expected[wrong]), "found": int(lengths[wrong])}
            raise CorruptFile(file, f"not a packed run of {counts[wrong]} items", **about)
        is_ranked, first = heads["is_ranked"] == 1, least[:, 0].view(np.int64)
        limits = np.where(is_ranked, packing.ranks, 2**31)
        if ((widths[:, 0] > 32) | (first < -(2**31)) | (first >= limits)).any():
            raise CorruptFile(file, "a packed run has hashes of more than 32 bits")
        # as many ones as a column has bits
        wide = widths.astype(np.uint64)
        masks = np.where(wide > _LAST_BIT, ~np.uint64(0), (_ONE << np.minimum(wide, _LAST_BIT)) - _ONE)
        keys_at, marks_at, items_at = (8 * (begins + part) for part in (dtype.itemsize, marks_at, items_at))
        return cls(words, is_ranked, keys, widths, masks, least, keys_at, marks_at, items_at, key_bits, item_bits)

    def columns(self, run: Int64, bits: Int64, columns: range) -> list[UInt64]:
        """Return columns (u64, n each) of rows, each of a run and beginning at one of `bits`, which move on."""
        found = []
        for column in columns:
            found.append(_bits(self.words, bits, self.masks[run, column]) + self.least[run, column])
            bits += self.widths[run, column]
        return found


def _first_items(runs: _Runs, counts: Int64, number: Int64, run: Int64, file: str) -> Int64:
    """Return the first item (i64, keys) of each key among its run's. Raises `CorruptFile`."""
    starts = number.copy()
    marked = np.flatnonzero(runs.keys < counts)
    if not len(marked):
        return starts
    sizes = counts[marked] + 7 >> 3
    ends = np.cumsum(sizes)
    begins = ends - sizes
    places = np.repeat((runs.marks_at[marked] >> 3) - begins, sizes) + np.arange(int(ends[-1]))
    marks = np.flatnonzero(np.unpackbits(runs.words.view(np.uint8)[places], bitorder="little"))
    owners = np.searchsorted(8 * ends, marks, "right")
    marks -= 8 * begins[owners]
    keys = np.bincount(owners, minlength=len(marked))
    wrong = (keys != runs.keys[marked]) | (np.bincount(owners, marks == 0, len(marked)) != 1)
    wrong |= np.bincount(owners, marks >= counts[marked][owners], len(marked)) > 0
    for place in marked[wrong][:1].tolist():
        raise CorruptFile(file, f"a packed run's number of keys differs from the {runs.keys[place]} of its header")
    starts[(runs.keys < counts)[run]] = marks
    return starts


def _bits(words: UInt64, bits: Int64, masks: UInt64) -> UInt64:
    """Return the numbers (u64, n) that begin at `bits` (n), as wide as `masks` (n)."""
    places, shifts = bits >> 6, (bits & 63).astype(np.uint64)
    values = words.take(places)
    values >>= shifts
    # the word behind goes above; two shifts, as none is by 64
    behind = words.take(places + 1)
    behind <<= _ONE
    behind <<= _LAST_BIT - shifts
    values |= behind
    values &= masks
    return values


def pack(packing: Packing, items: Array, counts: Sequence[int]) -> list[bytes]:
    """Do as `Packing.pack`."""
    starts = np.cumsum([0, *counts])
    words = items.view(packing.words)
    columns = [_native(words[name]) for name in packing.order]
    new = np.zeros(len(items), bool)
    for column in columns[: packing.of_keys]:
        new[1:] |= column[1:] != column[:-1]
    new[starts[:-1]] = True
    rows = np.flatnonzero(new)
    raw, *others = (column[rows] for column in columns[: packing.of_keys])
    key_starts = np.searchsorted(rows, starts)
    ranks = hash_rank(normal_hashes(raw), packing.base).astype(np.int64)
    steps = np.diff(ranks, prepend=ranks[:1])
    steps[key_starts[:-1]] = 0
    is_ranked = (np.minimum.reduceat(np.minimum(steps, raw), key_starts[:-1]) >= 0).tolist()
    columns[-1] = columns[-1] - packing.line.at(columns[-2])
    of_keys, as_steps = (_Rows([first, *others], key_starts) for first in (raw, steps))
    of_items = _Rows(columns[packing.of_keys :], starts)
    packed = []
    for run, (start, stop) in enumerate(itertools.pairwise(starts.tolist())):
        keys = as_steps if is_ranked[run] else of_keys
        about = [number for pair in (*keys.about(run), *of_items.about(run)) for number in pair]
        if is_ranked[run]:
            about[1] = int(ranks[key_starts[run]])
        count = int(key_starts[run + 1] - key_starts[run])
        parts = [
            np.array((is_ranked[run], count, *about), packing.header_dtype).tobytes(),
            keys.packed(run),
            b"" if count == stop - start else np.packbits(new[start:stop], bitorder="little").tobytes(),
            of_items.packed(run),
        ]
        packed.append(b"".join(parts))
    return packed


class _Rows:
    """Columns of the rows of several runs. `starts` has where each run begins, and the end."""

    def __init__(self, columns: Sequence[Array], starts: Int64) -> None:
        self._columns, self._starts = columns, starts.tolist()
        self._least = [np.minimum.reduceat(values, starts[:-1]) for values in columns]
        self._most = [np.maximum.reduceat(values, starts[:-1]) for values in columns]

    def about(self, run: int) -> list[tuple[int, int]]:
        """Return of each column the bits that a run's values need, and the smallest one."""
        bounds = ((int(least[run]), int(most[run])) for least, most in zip(self._least, self._most, strict=True))
        return [((most - least).bit_length(), least) for least, most in bounds]

    def packed(self, run: int) -> bytes:
        """Return a run's rows, their bits behind one another."""
        start, stop = self._starts[run : run + 2]
        widths = [width for width, _ in self.about(run)]
        bits, n = sum(widths), stop - start
        if not bits:
            return b""
        stride = (bits + 7 >> 3) + 8
        rows = np.zeros((n, stride), np.uint8)
        at = 0
        for column, least, width in zip(self._columns, self._least, widths, strict=True):
            values = (column[start:stop] - least[run]).view(np.uint64)
            for low in range(0, width, _AT_ONCE):
                part = values if width <= _AT_ONCE else values >> np.uint64(low) & np.uint64((1 << _AT_ONCE) - 1)
                where = np.ndarray((n,), "<u8", rows, at + low >> 3, (stride,))
                where |= part << np.uint64(at + low & 7)
            at += width
        return np.packbits(np.unpackbits(rows, axis=1, count=bits, bitorder="little"), bitorder="little").tobytes()


def _native(column: Array) -> Array:
    """Return a column's values as i64, or u64 where they are unsigned."""
    return column.astype(np.int64 if column.dtype.kind == "i" else np.uint64)
