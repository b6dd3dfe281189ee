"""Packed runs: the items of a slot group or block, column-wise in as many bits as they need. SPEC.md section 11.

What the entries of a key share is stored once a key; hashes are steps from key to key, since a table's entries rise by
`hash_rank`; of a time what is left when a line through the file's offsets and times was taken off, since both grow
together. What was packed comes back byte for byte, in whatever order it was. Pure; safe under threads.
"""

from __future__ import annotations

import itertools
import operator
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tiered_index.errors import CorruptFile
from tiered_index.format.hashing import normal_hashes
from tiered_index.format.packed_rows import BitReader, PackedRows, Place, bytes_of, unpacked
from tiered_index.format.packed_runs import MOST_ITEMS, packed_runs, unpacked_runs
from tiered_index.format.schema import Schema
from tiered_index.format.slots import SlotMap, hash_rank
from tiered_index.format.time_line import TimeLine
from tiered_index.kernels import compiled

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

_CODES = {"i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q"}
# stored once a key, beside the hash
_OF_KEYS = ("topic_id", "fingerprint")
# bytes of an item's 28 that are about saved: of hash 2.5, topic and queue 7, offset 4, size 2.5, time 3
_SAVED = 19
# runs that are unpacked together: what they take fits the cache
_TOGETHER = 32
# items that are read one by one
_FEW = 16
# behind data of n bytes from n % 8 on: words that can be read with the one behind
_PADDING = bytes(16)


def packed_bytes(schema: Schema, count: int) -> int:
    """Return about how many bytes packed items have, for estimates: fingerprints, offsets and extra columns most."""
    return count * (schema.item.itemsize - _SAVED)


class Packing:
    """How the runs of one file are packed: `base` are the base slots, by which hashes have their rank, of `ranks`.

    A run is `header`, its keys, marks of their first items unless each has one, its items; `order` are the columns.
    """

    def __init__(self, schema: Schema, base: int, line: TimeLine) -> None:
        self.schema, self.base, self.line = schema, base, line
        self.words = _words_of(schema)
        names = self.words.names or ()
        self.of_keys = [name for name in names if name in _OF_KEYS]
        self.of_items = [name for name in names if name not in (*_OF_KEYS, "key_hash", "offset", "time_diff_s")]
        codes = [_CODES[self.words[name].str[1:]] for name in (*self.of_keys, *self.of_items)]
        self.order = ("key_hash", *self.of_keys, *self.of_items, "offset", "time_diff_s")
        fields: Mapping[str, Any] = self.words.fields or {}
        # the same fields in the order in which they are stored
        self._ordered = np.dtype(
            {
                "names": self.order,
                "formats": [fields[name][0] for name in self.order],
                "offsets": [fields[name][1] for name in self.order],
                "itemsize": schema.item.itemsize,
            }
        )
        self.quotients = SlotMap(base).quotients
        self.ranks = self.quotients * base
        # kind of hashes | keys | for each column its bits and its smallest value
        self.header = struct.Struct(">BI" + "".join("B" + code for code in ("q", *codes, "q", "q")))
        named = zip(self.order, ("q", *codes, "q", "q"), strict=True)
        columns = [pair for name, code in named for pair in ((f"width {name}", "u1"), (f"least {name}", f">{code}"))]
        self.header_dtype = np.dtype([("is_ranked", "u1"), ("keys", ">u4"), *columns])

    def pack(self, items: Array) -> bytes:
        """Return the packed form of a run's items (structured as the schema's, n), one at least."""
        return self.pack_runs(items, [len(items)])[0]

    def pack_runs(self, items: Array, counts: Sequence[int]) -> list[bytes]:
        """Return the packed forms of several runs; `items` are theirs, one behind the other, `counts` of each."""
        if not counts:
            return []
        if (loops := compiled()) is not None:
            return packed_runs(loops, self, items, counts)
        starts = np.cumsum([0, *counts])
        words = items.view(self.words)
        shared = [items["key_hash"].astype(np.int64), *(_native(words[name]) for name in self.of_keys)]
        new = np.zeros(len(items), bool)
        for column in shared:
            new[1:] |= column[1:] != column[:-1]
        new[starts[:-1]] = True
        rows = np.flatnonzero(new)
        raw, *others = shared if len(rows) == len(items) else [column[rows] for column in shared]
        key_starts = np.searchsorted(rows, starts)
        ranks = hash_rank(normal_hashes(raw), self.base).astype(np.int64)
        steps = np.diff(ranks, prepend=ranks[:1])
        steps[key_starts[:-1]] = 0
        is_ranked = (np.minimum.reduceat(np.minimum(steps, raw), key_starts[:-1]) >= 0).tolist()
        offsets = _native(items["offset"])
        line = items["time_diff_s"] - self.line.at(offsets)
        of_keys, as_steps = (PackedRows([first, *others], key_starts) for first in (raw, steps))
        of_items = PackedRows([*(_native(words[name]) for name in self.of_items), offsets, line], starts)
        packed = []
        for run, (start, stop) in enumerate(itertools.pairwise(starts.tolist())):
            mine = as_steps if is_ranked[run] else of_keys
            about = [number for rows in (mine, of_items) for column in rows.columns for number in column.about[run]]
            if is_ranked[run]:
                about[1] = int(ranks[key_starts[run]])
            count = int(key_starts[run + 1] - key_starts[run])
            parts = [
                self.header.pack(is_ranked[run], count, *about),
                mine.packed(run),
                b"" if count == stop - start else np.packbits(new[start:stop], bitorder="little").tobytes(),
                of_items.packed(run),
            ]
            packed.append(b"".join(parts))
        return packed

    def unpack(
        self,
        data: bytes | memoryview,
        count: int,
        file: str,
        key_hash: int | None = None,
        words: UInt64 | None = None,
        at: int = 0,
    ) -> Array:
        """Return the `count` items (structured) of a run, in a new array; where a normal `key_hash` is given, those
        from the first to the last of it. `words`: what has `data` from its byte `at` on, so that it needn't be copied.
        Raises `CorruptFile` where `data` is no packed run of `count` items.
        """
        if key_hash is not None and (loops := compiled()) is not None:
            size, items = len(data), np.empty((min(count, MOST_ITEMS), self.schema.item.itemsize), np.uint8)
            if words is None:
                words, at = np.frombuffer(b"".join((data, _PADDING[size & 7 :])), np.uint64), 0
            found = loops.find_one(
                *(words, at, size, count, key_hash, self.base),
                *(MOST_ITEMS, 1 + len(self.of_keys), self.for_loops, self.line.as_numbers, items),
            )
            if found >= 0:
                return np.ndarray(found, self.schema.item, items)
        run = self._open(data, count, file)
        part = _Part(run, 0, run.keys, 0, count) if key_hash is None else self._find(run, key_hash)
        few = self._few(part) if part.stop - part.start <= _FEW else None
        return self._rows([part]) if few is None else few

    def find(
        self,
        loops: ModuleType,
        pieces: Sequence[bytes | memoryview],
        counts: Int64,
        ranks: Int64,
        mapped: tuple[UInt64, Int64] | None = None,
    ) -> tuple[Array, Int64] | None:
        """Return the items (structured, n) of runs, each given by its data and count, whose key's rank is one of the
        rising `ranks`; and how many each run has. `mapped`: words that have all data, and where in their bytes each
        begins. None where a run has to be opened, which tells what is wrong with it, or finds hashes that are not by
        rank.
        """
        lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
        if mapped is None:
            ends = np.cumsum(lengths)
            words = np.frombuffer(b"".join([*pieces, _PADDING[int(ends[-1]) & 7 :]]), np.uint64)
            begins = ends - lengths
        else:
            words, begins = mapped
        # all is set by the loop or cut off: what it doesn't touch takes no memory
        items = np.empty((int(np.minimum(counts, MOST_ITEMS).sum()), self.schema.item.itemsize), np.uint8)
        of_runs = np.empty(len(pieces), np.int64)
        found = loops.find_items(
            *(words, np.stack((begins, lengths, counts), 1), ranks, self.base, MOST_ITEMS, 1 + len(self.of_keys)),
            *(self.for_loops, self.line.as_numbers, items, of_runs),
        )
        return (items[:found].view(self.schema.item)[:, 0], of_runs) if found >= 0 else None

    @cached_property
    def for_loops(self) -> Int64:
        """The columns as the compiled core takes them (i64, columns x 3)."""
        fields: Mapping[str, Any] = self.words.fields or {}
        sizes = [self.header_dtype[f"least {name}"] for name in self.order]
        signed = [dtype.itemsize if dtype.kind == "u" else -dtype.itemsize for dtype in sizes]
        places = [(fields[name][1], fields[name][0].itemsize) for name in self.order]
        return np.array([(size, *place) for size, place in zip(signed, places, strict=True)])

    def unpack_runs(self, runs: Iterable[tuple[bytes | memoryview, int]], file: str) -> Array:
        """Return the items of several runs, one behind the other, each given by its data and count, as `unpack`."""
        given = list(runs)
        items = np.empty(sum(count for _, count in given), self.schema.item)
        loops = compiled() if given else None
        if loops is not None and (found := unpacked_runs(loops, self, given)) is not None:
            return found
        at = 0
        for first in range(0, len(given), _TOGETHER):
            opened = [self._open(data, count, file) for data, count in given[first : first + _TOGETHER]]
            some = self._rows([_Part(run, 0, run.keys, 0, run.count) for run in opened])
            # as bytes, since NumPy copies records column by column
            items.view(np.void)[at : at + len(some)] = some.view(np.void)
            at += len(some)
        return items

    def _open(self, data: bytes | memoryview, count: int, file: str) -> _Run:
        size = self.header.size
        try:
            is_ranked, n, *about = self.header.unpack_from(data)
        except struct.error as error:
            raise CorruptFile(file, "a packed run is too short", expected=size, found=len(data)) from error
        widths, least = about[::2], about[1::2]
        keys = 1 + len(self.of_keys)
        key_widths, item_widths = widths[:keys], widths[keys:]
        starts_at = size + bytes_of(n * sum(key_widths))
        items_at = starts_at + (bytes_of(count) if n < count else 0)
        expected = items_at + bytes_of(count * sum(item_widths))
        if is_ranked > 1 or not 0 < n <= count <= MOST_ITEMS or max(widths) > 64 or len(data) != expected:
            raise CorruptFile(file, f"not a packed run of {count} items", expected=expected, found=len(data))
        bits = BitReader(data)
        codes = bits.column(8 * size, sum(key_widths), widths[0], n).view(np.int64)
        codes = (np.cumsum(codes) if is_ranked else codes) + least[0]
        limit = self.ranks if is_ranked else 2**31
        if widths[0] > 32 or not -(2**31) <= least[0] < limit or codes.max() >= limit:
            raise CorruptFile(file, "a packed run has hashes of more than 32 bits")
        starts = None
        if n < count:
            held = np.frombuffer(bits.data, np.uint8, items_at - starts_at, starts_at)
            starts = np.unpackbits(held, bitorder="little").nonzero()[0]
            if len(starts) != n or starts[0] or starts[-1] >= count:
                raise CorruptFile(file, f"a packed run has not the {n} keys that it says")
        return _Run(
            bits, bool(is_ranked), n, count, codes, starts, key_widths, item_widths, least, 8 * size, 8 * items_at
        )

    def _find(self, run: _Run, key_hash: int) -> _Part:
        """Return the part of a run from the first to the last key of a hash."""
        if run.is_ranked:
            rank = self._rank(key_hash)
            low, high = int(run.codes.searchsorted(rank)), int(run.codes.searchsorted(rank, "right"))
        else:
            there = np.flatnonzero(run.codes == key_hash if key_hash else run.codes <= 0)
            low, high = (int(there[0]), int(there[-1]) + 1) if len(there) else (0, 0)
        if run.starts is None:
            return _Part(run, low, high, low, high)
        start, stop = (int(run.starts[key]) if key < run.keys else run.count for key in (low, high))
        return _Part(run, low, high, start, stop)

    def _rank(self, key_hash: int) -> int:
        """Return what `hash_rank` does, of one hash."""
        return key_hash % self.base * self.quotients + key_hash // self.base

    def _rows(self, parts: Sequence[_Part]) -> Array:
        """Return the items of parts of runs, one behind the other."""
        items = np.empty(sum(part.stop - part.start for part in parts), self.schema.item)
        if not len(items):
            return items
        if (loops := compiled()) is not None:
            of_keys = [
                _joined(list(map(self._hashes, parts))),
                *unpacked(loops, ((part.run.bits, part.of_keys()) for part in parts))[1:],
            ]
            of_items = [*unpacked(loops, ((part.run.bits, part.of_items()) for part in parts))]
        else:
            columns = ([self._hashes(part), *part.run.bits.columns(*part.of_keys())[1:]] for part in parts)
            of_keys = [_joined(some) for some in zip(*columns, strict=True)]
            of_items = [
                _joined(some) for some in zip(*(part.run.bits.columns(*part.of_items()) for part in parts), strict=True)
            ]
        if any(part.run.starts is not None for part in parts):
            repeats = _joined([part.repeats() for part in parts])
            of_keys = [np.repeat(column, repeats) for column in of_keys]
        offsets, times = (column.view(np.int64) for column in of_items[-2:])
        of_items[-1] = (times + self.line.at(offsets)).view(np.uint64)
        words = items.view(self.words)
        for name, column in zip(self.order, (*of_keys, *of_items), strict=True):
            words[name] = column
        return items

    def _hashes(self, part: _Part) -> Int64:
        """Return the hashes of a part's keys."""
        hashes = part.run.codes[part.low : part.high]
        if part.run.is_ranked:
            slots, above = np.divmod(hashes, self.quotients)
            hashes = above * self.base + slots
        return hashes

    def _few(self, part: _Part) -> Array | None:
        """Return the same as `_rows` by plain numbers, which is faster for a few; None where one is too large."""
        run, of_keys, rows = part.run, [], []
        for key, repeats in zip(range(part.low, part.high), part.repeats().tolist(), strict=True):
            code, values = int(run.codes[key]), run.bits.row(run.keys_at, run.key_widths, key)
            if run.is_ranked:
                slot, above = divmod(code, self.quotients)
                code = above * self.base + slot
            of_keys += [(code, *map(operator.add, values[1:], run.least[1:]))] * repeats
        item_least = run.least[len(run.key_widths) :]
        for of_key, number in zip(of_keys, range(part.start, part.stop), strict=True):
            values = run.bits.row(run.items_at, run.item_widths, number)
            *values, offset, time = map(operator.add, values, item_least)
            rows.append((*of_key, *values, offset, time + self.line.at_one(offset)))
        try:
            return np.array(rows, self._ordered).view(self.schema.item)
        except OverflowError:
            return None


@dataclass(frozen=True, slots=True)
class _Run:
    """An open run: its keys, their ranks or hashes, and where their items start (None: each has one); where in its
    bits the rows of keys and of items begin, and how they are divided.
    """

    bits: BitReader
    is_ranked: bool
    keys: int
    count: int
    codes: Int64
    starts: Int64 | None
    key_widths: Sequence[int]
    item_widths: Sequence[int]
    least: Sequence[int]
    keys_at: int
    items_at: int


class _Part(NamedTuple):
    """The keys [low, high) of a run, which have the items [start, stop)."""

    run: _Run
    low: int
    high: int
    start: int
    stop: int

    def repeats(self) -> Int64:
        """Return how many items each key has."""
        if self.run.starts is None:
            return np.ones(self.high - self.low, np.int64)
        return np.diff(self.run.starts[self.low : self.high], append=self.stop)

    def of_keys(self) -> Place:
        """Return where the keys are, as `BitReader.columns` takes it: of the hashes the codes."""
        run = self.run
        return run.keys_at, run.key_widths, run.least[: len(run.key_widths)], self.low, self.high

    def of_items(self) -> Place:
        """Return where the items are, as `BitReader.columns` takes it."""
        run = self.run
        return run.items_at, run.item_widths, run.least[len(run.key_widths) :], self.start, self.stop


def _native(column: Array) -> Array:
    """Return a column's values as i64, or u64 where they are unsigned."""
    return column.astype(np.int64 if column.dtype.kind == "i" else np.uint64)


def _joined(columns: Sequence[Array]) -> Array:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _words_of(schema: Schema) -> np.dtype[Any]:
    """Return a dtype of the same bytes whose columns are numbers: floats by their bits, bytes 8 at a time and less."""
    names, formats, offsets = [], [], []
    for name, (dtype, at, *_) in (schema.item.fields or {}).items():
        if dtype.kind in "iu":
            sizes = [(name, dtype.str, at)]
        else:
            sizes, left = [], dtype.itemsize
            while left:
                size = min(8, 1 << left.bit_length() - 1)
                sizes.append((f"{name} {left}", f">u{size}", at + dtype.itemsize - left))
                left -= size
        for word, code, place in sizes:
            names.append(word)
            formats.append(code)
            offsets.append(place)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": schema.item.itemsize})
