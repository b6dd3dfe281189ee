"""Asked keys in many packed runs at once: of each run the keys' hashes are unpacked, and what is asked for of the rest.

Runs lie side by side, and a column of all of them is read by one gather whose places and widths differ from run to run.
A batch of lookups asks for few of a run's items, so most of its bits are never looked at. Memory: some 100 bytes a key
of 64 runs, and 60 an item that is found. Pure; safe under threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tiered_index.format.hashing import normal_hashes
from tiered_index.format.packed import Packing
from tiered_index.format.packed_runs import Runs
from tiered_index.format.slots import hash_rank
from tiered_index.kernels import compiled

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

# runs that are searched together: the keys' hashes fit the cache
_TOGETHER = 64
# ... where the compiled core copies nothing: it has room for all items, of which those not found take no memory
_MAPPED_TOGETHER = 1 << 12
_ONE, _LAST_BIT = np.uint64(1), np.uint64(63)


def asked_ranks(packing: Packing, hashes: npt.NDArray[np.int32]) -> Int64:
    """Return normal hashes (n), in any order, as `find_asked` takes them: ranks (m), rising, each once."""
    ranks: Int64 = hash_rank(hashes, packing.base).astype(np.int64)
    ranks.sort()
    new = np.ones(len(ranks), bool)
    np.not_equal(ranks[1:], ranks[:-1], out=new[1:])
    return ranks[new]


def find_asked(
    packing: Packing,
    pieces: Sequence[bytes | memoryview],
    counts: Int64,
    ranks: Int64,
    file: str,
    mapped: tuple[UInt64, Int64] | None = None,
) -> tuple[Array, Int64]:
    """Return the items (structured, n) of runs, each given by its data and count, whose hash is asked for by `ranks`;
    and how many each run has (m). They stand as in the runs. `mapped`: a file's words, and where in its bytes the runs
    are, so that they needn't be copied. Raises `CorruptFile` as `Packing.unpack` does.
    """
    found, start = [], 0
    while start < len(pieces):
        loops = compiled()
        some = slice(start, start + (_TOGETHER if loops is None or mapped is None else _MAPPED_TOGETHER))
        place = None if mapped is None else (mapped[0], mapped[1][some])
        by_loops = None if loops is None else packing.find(loops, pieces[some], counts[some], ranks, place)
        if by_loops is None:
            given = list(zip(pieces[some], counts[some].tolist(), strict=True))
            by_loops = (_some if loops is None else _one_by_one)(packing, given, ranks, file)
        found.append(by_loops)
        start = some.stop
    if len(found) == 1:
        return found[0]
    items = np.empty(sum(len(part) for part, _ in found), packing.schema.item)
    if len(items):
        # as bytes, since NumPy copies records column by column
        np.concatenate([part.view(np.void) for part, _ in found], out=items.view(np.void))
    return items, np.concatenate([np.zeros(0, np.int64), *(counts for _, counts in found)])


def _some(
    packing: Packing, given: Sequence[tuple[bytes | memoryview, int]], ranks: Int64, file: str
) -> tuple[Array, Int64]:
    runs = Runs.parse(packing, given)
    found = None if runs is None else _keys(packing, runs, ranks)
    if runs is None or found is None:
        return _one_by_one(packing, given, ranks, file)
    spans = _spans(runs, found)
    if spans is None:
        return _one_by_one(packing, given, ranks, file)
    starts, counts = spans
    items = _items(packing, runs, found, starts, counts)
    return items, np.bincount(found.runs, counts, len(given)).astype(np.int64)


def _one_by_one(
    packing: Packing, given: Sequence[tuple[bytes | memoryview, int]], ranks: Int64, file: str
) -> tuple[Array, Int64]:
    """Do the same by unpacking each run, which says what is wrong with one; and takes hashes that aren't by rank."""
    parts = []
    for data, count in given:
        items = packing.unpack(data, count, file)
        of_items = hash_rank(normal_hashes(items["key_hash"]), packing.base).astype(np.int64)
        parts.append(items[np.isin(of_items, ranks)])
    joined = np.frombuffer(b"".join(part.tobytes() for part in parts), packing.schema.item)
    return joined, np.array([len(part) for part in parts], np.int64)


class _Keys(NamedTuple):
    """Keys that are asked for: which run (n) each is of, its place among the run's keys (n), its rank (n)."""

    runs: Int64
    places: Int64
    ranks: Int64


def _keys(packing: Packing, runs: Runs, ranks: Int64) -> _Keys | None:
    """Return the keys whose rank is asked for; None where a run has a rank that no hash has."""
    total = int(runs.keys.sum())
    ends = np.cumsum(runs.keys)
    starts = ends - runs.keys
    bits = np.repeat(runs.keys_at - starts * runs.key_bits, runs.keys)
    bits += np.arange(total) * np.repeat(runs.key_bits, runs.keys)
    codes = np.cumsum(_bits(runs.words, bits, np.repeat(_mask(runs.widths[:, 0]), runs.keys)).view(np.int64))
    # the running sum goes on over all runs: of each, what was before its first key is taken off
    codes += np.repeat(runs.least[:, 0].view(np.int64) - np.append(0, codes[ends[:-1] - 1]), runs.keys)
    if (codes[ends - 1] >= packing.ranks).any():
        return None
    if (codes[1:] < codes[:-1]).any():
        # parts of one slot, whose hashes begin anew
        places = np.flatnonzero(np.isin(codes, ranks))
    else:
        asked = ranks[np.searchsorted(ranks, codes[0]) : np.searchsorted(ranks, codes[-1], "right")]
        low = np.searchsorted(codes, asked)
        times = np.searchsorted(codes, asked, "right") - low
        places = np.repeat(low - np.cumsum(times) + times, times) + np.arange(int(times.sum()))
    of = np.searchsorted(ends, places, "right")
    return _Keys(of, places - starts[of], codes[places])


def _spans(runs: Runs, found: _Keys) -> tuple[Int64, Int64] | None:
    """Return each key's first item among the run's, and how many it has; None where a run's marks are not its keys',
    whether or not it has one of the keys.
    """
    starts, stops = found.places.copy(), found.places + 1
    shared = runs.keys < runs.counts
    marked = np.flatnonzero(shared)
    if len(marked):
        sizes = runs.counts[marked] + 7 >> 3
        ends = np.cumsum(sizes)
        begins = ends - sizes
        places = np.repeat((runs.marks_at[marked] >> 3) - begins, sizes) + np.arange(int(ends[-1]))
        first = np.flatnonzero(np.unpackbits(runs.data[places], bitorder="little"))
        # of the marks of all these runs: which are each run's, and where in its items they stand
        low = np.searchsorted(first, 8 * begins)
        high = np.searchsorted(first, 8 * begins + runs.counts[marked])
        last = np.append(low[1:], len(first))
        if (high != last).any() or (high - low != runs.keys[marked]).any() or (first[low] != 8 * begins).any():
            return None
        several = np.flatnonzero(shared[found.runs])
        at = np.searchsorted(marked, found.runs[several])
        mark = low[at] + found.places[several]
        starts[several] = first[mark] - 8 * begins[at]
        following = np.append(first, 0)[mark + 1] - 8 * begins[at]
        stops[several] = np.where(mark + 1 < high[at], following, runs.counts[found.runs[several]])
    return starts, stops - starts


def _items(packing: Packing, runs: Runs, found: _Keys, starts: Int64, counts: Int64) -> Array:
    """Return the items of keys, each given by its first one and their number."""
    items = np.empty(int(counts.sum()), packing.schema.item)
    if not len(items):
        return items
    above, slots = found.ranks % packing.quotients, found.ranks // packing.quotients
    columns = [(above * packing.base + slots).view(np.uint64)]
    of_keys = 1 + len(packing.of_keys)
    bits = runs.keys_at[found.runs] + found.places * runs.key_bits[found.runs] + runs.widths[found.runs, 0]
    for column in range(1, of_keys):
        columns.append(_column(runs, column, found.runs, bits))
        bits += runs.widths[found.runs, column]
    run = found.runs
    if len(items) > len(run):
        columns = [np.repeat(column, counts) for column in columns]
        run = np.repeat(run, counts)
        starts = np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(len(items))
    bits = runs.items_at[run] + starts * runs.item_bits[run]
    for column in range(of_keys, len(packing.order)):
        columns.append(_column(runs, column, run, bits))
        bits += runs.widths[run, column]
    offsets, times = (column.view(np.int64) for column in columns[-2:])
    columns[-1] = (times + packing.line.at(offsets)).view(np.uint64)
    words = items.view(packing.words)
    for name, values in zip(packing.order, columns, strict=True):
        words[name] = values
    return items


def _column(runs: Runs, column: int, run: Int64, bits: Int64) -> UInt64:
    """Return values (u64, n) of a column at `bits` (n), each of a run (n)."""
    values = _bits(runs.words, bits, _mask(runs.widths[:, column])[run])
    values += runs.least[run, column]
    return values


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


def _mask(widths: Int64) -> UInt64:
    """Return as many ones (u64, n) as widths (n; 0 to 64) say."""
    wide = widths.astype(np.uint64)
    masks: UInt64 = (_ONE << np.minimum(wide, _LAST_BIT)) - _ONE
    masks[wide > _LAST_BIT] = ~np.uint64(0)
    return masks
