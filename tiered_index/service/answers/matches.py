"""Rows found for a batch, cut while they come in: of each lookup its page, and one row that says that more follows.

Memory: twice the answers, or `_HELD_ROWS` where that is more, and some 64 Ki pairs of items and lookups.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.format.hashing import normal_hashes
from tiered_index.format.schema import Schema
from tiered_index.service.answers.batch import PAIRS_AT_A_TIME, LookupBatch, Matches, first_rows
from tiered_index.service.answers.rows import Array, concatenate

_HELD_ROWS = 1 << 14
# items of a hot key that are matched at a time, at least
_FEWEST = 1 << 10


class MatchAccumulator:
    """The rows found for a batch so far, as far as they can be in an answer. Safe under threads."""

    def __init__(self, batch: LookupBatch, schema: Schema) -> None:
        self._batch = batch
        self._schema = schema
        self._lock = threading.Lock()
        self._parts: list[Matches] = []
        self._count = 0
        self._most = _HELD_ROWS

    def add(self, found: Matches) -> None:
        if not len(found.rows):
            return
        with self._lock:
            self._parts.append(found)
            self._count += len(found.rows)
            if self._count > self._most:
                self._cut()
                self._most = max(_HELD_ROWS, 2 * self._count)

    def first(self) -> Matches:
        """Return the first rows of each lookup, by lookup and in answer order."""
        with self._lock:
            return self._cut()

    def found(self) -> Matches:
        """Return what is held, in no order, at most one row more than `max_count` of each lookup."""
        with self._lock:
            if not self._parts:
                return Matches(np.zeros(0, np.int64), concatenate([], self._schema))
            lookups = np.concatenate([part.lookups for part in self._parts])
            if (np.bincount(lookups, minlength=len(self._batch)) > self._batch.max_count + 1).any():
                return self._cut()
            return Matches(lookups, np.concatenate([part.rows for part in self._parts]))

    def _cut(self) -> Matches:
        left, _ = first_rows(self._batch.max_count + 1, self._parts, self._schema)
        self._parts, self._count = [left], len(left.rows)
        return left


def matching(
    batch: LookupBatch,
    items: Array | Mapping[str, Array],
    seconds_of: Callable[[Any], npt.NDArray[np.int64]],
    topic_pairs: Sequence[tuple[int, str]] | None,
    schema: Schema,
    among: npt.NDArray[np.int64] | None = None,
) -> Matches:
    """Return the rows of `items` (as stored, or columns of that names) that answer lookups (only `among`), unordered.
    At most one more than `max_count` of each lookup: the first ones. `seconds_of` returns the epoch seconds of items;
    `topic_pairs` as `LookupBatch.select`.
    """
    gathered = MatchAccumulator(batch, schema)

    def pick(places: npt.NDArray[np.int64]) -> Any:
        return {name: values[places] for name, values in items.items()} if isinstance(items, Mapping) else items[places]

    def look(picked: Any, lookups: npt.NDArray[np.int64]) -> None:
        gathered.add(batch.select(picked, lookups, seconds_of(picked), topic_pairs, schema))

    matched, pairs = batch.matched(items["key_hash"], among)
    if pairs <= PAIRS_AT_A_TIME:
        for places, lookups in batch.pairs(items["key_hash"], among):
            look(pick(places), lookups)
        return gathered.found()
    # a hot key of many lookups: newest items first, and no more of them for a lookup that has its page
    seconds = seconds_of(pick(matched))
    order = np.argsort(-seconds, kind="stable")
    matched, seconds = matched[order], seconds[order]
    hashes = items["key_hash"][matched]
    open_ = np.arange(len(batch)) if among is None else among
    open_ = open_[np.isin(batch.key_hash[open_], normal_hashes(hashes))]
    start, size = 0, max(_FEWEST, PAIRS_AT_A_TIME // len(open_))
    while start < len(matched) and len(open_):
        stop = min(start + size, len(matched))
        here = open_[(batch.second_min[open_] <= seconds[start]) & (batch.second_max[open_] >= seconds[stop - 1])]
        for places, lookups in batch.pairs(hashes[start:stop], here):
            look(pick(matched[start + places]), lookups)
        if stop < len(matched):
            newest = int(seconds[stop])
            open_ = open_[(batch.second_min[open_] <= newest) & (batch.page_ends(open_, gathered.first()) <= newest)]
        start, size = stop, 2 * size
    return gathered.found()
