"""Many lookups at once: every key is hashed in one pass, every file is read once.

A file answers a `LookupBatch` with (lookup, row) pairs; those of all files are brought into answer order and cut while
they come in. Answers equal those of single lookups. Memory: some 100 bytes an answer and 60 a lookup.
Threads: a batch belongs to one call; results may be shared.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from tiered_index.errors import TieredIndexError
from tiered_index.format.bloom import filter_hashes
from tiered_index.format.hashing import HashRule, code_units, java_hash_batch, key_hashes, normal_hashes
from tiered_index.format.metadata import Metadata
from tiered_index.format.schema import Schema, row_form
from tiered_index.kernels import compiled, compiled_views
from tiered_index.retention import Expired
from tiered_index.service.answers.asked import LookupColumns
from tiered_index.service.answers.rows import (
    Array,
    answer_order,
    check_key,
    check_topic,
    concatenate,
    in_answer_order,
    stable_order,
)
from tiered_index.types import MAX_KEY_UNITS, Lookup

if TYPE_CHECKING:
    from tiered_index._views import View, ViewBatch

NEVER = -(2**63)
"""A second before all others."""
PAIRS_AT_A_TIME = 1 << 16  # some 8 MiB
_HELD_ROWS = 1 << 14
# items of a hot key that are matched at a time, at least
_FEWEST = 1 << 10


Damage = tuple[npt.NDArray[np.int64], TieredIndexError]
"""Lookups that lack what could not be read, and why."""


@dataclass(frozen=True, slots=True)
class Matches:
    """The entries of one file for a batch, beside those that it has `folded`: row i answers lookup `lookups[i]`,
    unchecked.

    `damage` has the errors of parts that could not be read, if the batch may be partial. Otherwise such an error is
    raised.
    """

    lookups: npt.NDArray[np.int64]
    rows: Array
    folded: int = 0
    damage: tuple[Damage, ...] = ()

    @classmethod
    def lacking(cls, *damage: Damage) -> Self:
        """Return no rows, and what could not be read."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.int64), 0, damage)


def search_batch(file: Any, batch: LookupBatch, schema: Schema, second_min: int, second_max: int) -> Matches | None:
    """Return the first `max_count` + 1 rows, or all, that the compiled core has of a local file with entries of the
    inclusive seconds for each lookup; None: it has no such file, or leaves it to the caller.
    """
    if file is None or batch.queues:
        return None
    core = compiled_views()
    assert core is not None
    view = core.View(row_form(schema), [(file, second_min, second_max)], [file])
    lookups, rows, left, _ = in_core(view, batch, batch.key_hash).find(0, len(batch))
    return None if left else Matches(np.frombuffer(lookups, np.int64), np.frombuffer(rows, schema.row))


def in_core(view: View, batch: LookupBatch, masked_hash: npt.NDArray[np.int32]) -> ViewBatch:
    """Return a batch as the compiled core looks it up in the files of a view. `masked_hash` (i32, n) is looked for in
    files of hash rule ``mask``.
    """
    core = compiled_views()
    assert core is not None
    bounds = batch.second_min, batch.second_max, batch.max_count
    asked = batch.topic_index, batch.key_hash, masked_hash, batch.fingerprint, *bounds
    return core.ViewBatch(view, batch.topics, *map(np.ascontiguousarray, asked))  # type: ignore[no-any-return]


class _Matched(NamedTuple):
    """Which stored hashes match lookups: `items` are their numbers, `first` and `counts` where in `by_hash`, the
    lookups by hash, theirs are.
    """

    by_hash: npt.NDArray[np.int64]
    items: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]

    @property
    def items_a_hash(self) -> int:
        """How many items match a hash that lookups have, at most."""
        return int(np.bincount(self.first).max(initial=0))

    def pairs(self) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Yield the (item, lookup) pairs, a bounded number at a time."""
        ends = np.cumsum(self.counts)
        start = 0
        while start < len(self.items):
            most = int(ends[start] - self.counts[start]) + PAIRS_AT_A_TIME
            stop = max(start + 1, int(np.searchsorted(ends, most, "right")))
            part = self.counts[start:stop]
            within = np.arange(int(part.sum())) - np.repeat(np.cumsum(part) - part, part)
            yield (
                np.repeat(self.items[start:stop], part),
                self.by_hash[np.repeat(self.first[start:stop], part) + within],
            )
            start = stop


class LookupBatch:
    """n validated lookups. Raises `InvalidArgument` naming the first bad one.

    `key_hash` (i32, n) is what a search looks for, by hash rule ``abs`` until `under` says otherwise. Of `queues`,
    (place of the topic, queue), entries before an epoch second each were erased. With `allow_partial` a slot group that
    can't be read counts as damage of the lookups that need it, and the others are answered.
    """

    def __init__(self, lookups: Sequence[Lookup], *, allow_partial: bool = False) -> None:
        self.allow_partial = allow_partial
        asked = lookups if isinstance(lookups, LookupColumns) else LookupColumns.of(lookups)
        self.lookups = lookups
        self.queues: Mapping[tuple[int, int], int] = {}
        for topic in asked.topics if not set(map(type, asked.topics)) <= {str} else ():
            check_topic(topic)
        self.topics = list(map(check_topic, dict.fromkeys(asked.topics)))
        self.topic_index = np.fromiter(map(self._topic_places.__getitem__, asked.topics), np.int64, len(lookups))
        self.second_min, self.second_max, self.max_count = asked.ranges()
        # the lookups that continue an answer
        self.continued = [number for number, cursor in enumerate(asked.cursors) if cursor is not None]
        try:
            units = code_units(asked.keys)
        except (TypeError, ValueError):  # Arrow's errors are among them; ours names the key
            for key in asked.keys:
                check_key(key)
            raise
        for number in np.flatnonzero((units.lengths == 0) | (units.lengths > MAX_KEY_UNITS))[:1]:
            check_key(asked.keys[number])
        self.java_hash, self.fingerprint = java_hash_batch(self.topics or ["-"], self.topic_index, units)
        self.key_hash = key_hashes(self.java_hash, "abs")

    def __len__(self) -> int:
        return len(self.lookups)

    def under(self, rule: HashRule) -> tuple[Self, ...]:
        """Return the batches, one or two, of the same lookups that find their keys in a file of a hash rule.

        Of two, the second looks only for keys whose hash differs; the other lookups have a range without a second.
        """
        if rule == "abs" or not len(self._two_hashes):
            return (self,)
        return (self._masked,) if rule == "mask" else (self, self._masked_where_different)

    def only(self, numbers: npt.NDArray[np.int64]) -> Self:
        """Return the batch of some lookups, by number; the others have a range without a second."""
        made = self._copy()
        made.second_min, made.second_max = np.full(len(self), -NEVER - 1), np.full(len(self), NEVER)
        made.second_min[numbers], made.second_max[numbers] = self.second_min[numbers], self.second_max[numbers]
        return made

    def without(self, expired: Expired) -> Self:
        """Return the batch of what has neither expired nor was erased, by the hashes that are looked for."""
        if not expired:
            return self
        made = self._copy()
        begins = np.array([expired.begin_of(topic) for topic in self.topics], np.int64)
        made.second_min = np.maximum(self.second_min, begins[self.topic_index])
        found = {at: erased for at, topic in enumerate(self.topics) if (erased := expired.erased_of(topic)) is not None}
        for place in np.flatnonzero(np.isin(self.key_hash, expired.erased.hashes)).tolist() if found else ():
            if (erased := found.get(int(self.topic_index[place]))) is not None:
                begin = erased.begin_of(int(self.key_hash[place]), int(self.fingerprint[place]))
                made.second_min[place] = max(made.second_min[place], begin)
        made.queues = {(at, queue): begin for at, one in found.items() for queue, begin in one.queues.items()}
        return made

    @cached_property
    def _two_hashes(self) -> npt.NDArray[np.int64]:
        """The lookups whose hash is another one by each rule: Java's is negative, and has an absolute value."""
        return np.flatnonzero(self.key_hash != key_hashes(self.java_hash, "mask"))

    @cached_property
    def _masked(self) -> Self:
        made = self._copy()
        made.key_hash = key_hashes(self.java_hash, "mask")
        return made

    def _copy(self) -> Self:
        made = copy.copy(self)
        for name in [name for name in vars(made) if isinstance(getattr(type(made), name, None), cached_property)]:
            del vars(made)[name]
        return made

    @cached_property
    def _masked_where_different(self) -> Self:
        return self._masked.only(self._two_hashes)

    @cached_property
    def _by_hash(self) -> npt.NDArray[np.int64]:
        return stable_order(self.key_hash)

    @cached_property
    def keyed_filter_hashes(self) -> npt.NDArray[np.uint64]:
        """Hashes (u64, n) for filters of files with fingerprints."""
        return filter_hashes(self.key_hash, self.fingerprint)

    @cached_property
    def plain_filter_hashes(self) -> npt.NDArray[np.uint64]:
        """Hashes (u64, n) for filters of files without fingerprints."""
        return filter_hashes(self.key_hash, None)

    @cached_property
    def _sorted_hashes(self) -> npt.NDArray[np.int32]:
        return self.key_hash[self._by_hash]

    @cached_property
    def _hash_bits(self) -> npt.NDArray[np.bool_]:
        """Which values of the hashes' lower bits occur; 16 to 32 bytes a lookup."""
        bits = np.zeros(1 << max(16, len(self).bit_length() + 4), bool)
        bits[self.key_hash & (len(bits) - 1)] = True
        return bits

    @cached_property
    def _hash_starts(self) -> npt.NDArray[np.int64]:
        """Where in the sorted hashes those of each first bits begin, and the end; 16 to 32 bytes a lookup."""
        bits = min(31, max(8, len(self).bit_length() + 1))
        return np.searchsorted(self._sorted_hashes, np.arange((1 << bits) + 1) << 31 - bits)

    def matched(self, hashes: Array, among: npt.NDArray[np.int64] | None = None) -> _Matched:
        """Return which stored hashes (of n) match lookups (only `among` those)."""
        if among is None:
            return _Matched(self._by_hash, *self._matches(hashes, self._sorted_hashes, few=False))
        by_hash = among[stable_order(self.key_hash[among])]
        return _Matched(by_hash, *self._matches(hashes, self.key_hash[by_hash], few=True))

    def _matches(
        self, hashes: Array, sorted_hashes: npt.NDArray[np.int32], *, few: bool
    ) -> tuple[npt.NDArray[np.int64], ...]:
        """Return items (of n) whose hash matches, and of each its first place in `sorted_hashes` and the count."""
        stored = normal_hashes(hashes)
        if not few and (loops := compiled()) is not None:
            found = np.empty((3, len(stored)), np.int64)
            count = loops.match(stored, sorted_hashes, self._hash_starts, *found)
            return found[0, :count], found[1, :count], found[2, :count]
        items = np.arange(len(stored)) if few else np.flatnonzero(self._hash_bits[stored & (len(self._hash_bits) - 1)])
        stored = stored[items]
        first = np.searchsorted(sorted_hashes, stored, "left")
        counts = np.searchsorted(sorted_hashes, stored, "right") - first
        equal = np.flatnonzero(counts)
        return items[equal], first[equal], counts[equal]

    def select(
        self,
        items: Array | Mapping[str, Array],
        lookups: npt.NDArray[np.int64],
        seconds: npt.NDArray[np.int64],
        topic_pairs: Iterable[tuple[int, str]] | None,
        schema: Schema,
    ) -> Matches:
        """Return what of matching `items` (m) answers `lookups` (m); `topic_pairs`: the file's, None: no table."""
        keep = (seconds >= self.second_min[lookups]) & (seconds <= self.second_max[lookups])
        if schema.keyed:
            keep &= items["fingerprint"] == self.fingerprint[lookups]
        if topic_pairs is not None:
            place = self._topic_places
            allowed = np.array(
                [place[name] << 32 | topic_id for topic_id, name in topic_pairs if name in place], np.int64
            )
            topics = self.topic_index[lookups] << 32 | items["topic_id"].astype(np.int64)
            keep &= topics == allowed[0] if len(allowed) == 1 else np.isin(topics, allowed)
        for (at, queue_id), begin in self.queues.items():
            keep &= (self.topic_index[lookups] != at) | (items["queue_id"] != queue_id) | (seconds >= begin)
        kept = np.flatnonzero(keep)
        rows = np.empty(len(kept), schema.row)
        rows["second"] = seconds[kept]
        rows["key_hash"] = self.key_hash[lookups[kept]]
        for name in rows.dtype.names or ():
            if name not in ("second", "key_hash"):
                rows[name] = items[name][kept]
        return Matches(lookups[kept], rows)

    @cached_property
    def _topic_places(self) -> dict[str, int]:
        return {topic: place for place, topic in enumerate(self.topics)}

    def within(self, metadata: Metadata) -> npt.NDArray[np.bool_]:
        """Return which lookups (bool, n) a file may answer: it has their topic, and entries of their range."""
        within = (self.second_min <= metadata.second_max) & (self.second_max >= metadata.second_min)
        if metadata.topics:
            names = {name for _, name in metadata.topics}
            within &= np.array([topic in names for topic in self.topics], bool)[self.topic_index]
        return within

    def topic_pairs(self, metadata: Metadata) -> list[tuple[int, str]] | None:
        """Return the (id, name) pairs of a file's topics that the batch has; None where the file has no table."""
        return [pair for pair in metadata.topics if pair[1] in self._topic_places] if metadata.topics else None

    def overlapping(self, second_min: int, second_max: int) -> npt.NDArray[np.int64]:
        """Return the lookups whose range overlaps a file's."""
        return np.flatnonzero((self.second_min <= second_max) & (self.second_max >= second_min))

    def page_ends(self, lookups: npt.NDArray[np.int64], found: Matches) -> npt.NDArray[np.int64]:
        """Return the second behind each lookup's page (n), or `NEVER`; `found` as `first_rows` returns it."""
        most = self.max_count[lookups]
        starts = np.searchsorted(found.lookups, lookups)
        enough = np.searchsorted(found.lookups, lookups, "right") - starts > most
        ends = np.full(len(lookups), NEVER)
        ends[enough] = found.rows["second"][starts[enough] + most[enough]]
        return ends


def best_answers(
    batch: LookupBatch, parts: list[Matches], schema: Schema, folded: Callable[[int], None] | None = None
) -> tuple[Array, npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the answers of all lookups in order, each lookup's start (n + 1), and which lookups have more answers."""
    found, counts = first_rows(batch.max_count, parts, schema, folded)
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(np.minimum(counts, batch.max_count))))
    return found.rows, ends, counts > batch.max_count


def first_rows(
    limits: npt.NDArray[np.int64], parts: Sequence[Matches], schema: Schema, folded: Callable[[int], None] | None = None
) -> tuple[Matches, npt.NDArray[np.int64]]:
    """Return the first rows of each lookup in answer order, at most `limits` (n), and all rows' number; `folded` as
    that of `first_answers`.
    """
    lookups = np.concatenate([part.lookups for part in parts]) if parts else np.zeros(0, np.int64)
    rows = concatenate([part.rows for part in parts], schema)
    order = stable_order(lookups)
    lookups, rows = lookups[order], rows[order]
    counts = np.bincount(lookups, minlength=len(limits))
    # a lookup with one row needs neither order nor identity, and most have one
    shared = np.flatnonzero(counts[lookups] > 1)
    if len(shared) and not in_answer_order(rows, lookups):
        ordered = shared[answer_order(rows[shared], schema, folded, [lookups[shared]])]
        kept = np.concatenate([np.flatnonzero(counts[lookups] == 1), ordered])
        kept = kept[stable_order(lookups[kept])]
        lookups, rows = lookups[kept], rows[kept]
        counts = np.bincount(lookups, minlength=len(limits))
    if (counts > limits).any():
        rank = np.arange(len(rows)) - (np.cumsum(counts) - counts)[lookups]
        kept = rank < limits[lookups]
        lookups, rows = lookups[kept], rows[kept]
    return Matches(lookups, rows), counts


@dataclass(eq=False)
class MatchAccumulator:
    """The rows found for a batch so far, as far as they can be in an answer: of each lookup its page, and one row more.
    Memory: twice the answers, with repeats that pages have room for, or `_HELD_ROWS` if that is more. Thread-safe.
    """

    batch: LookupBatch
    schema: Schema
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _parts: list[Matches] = field(default_factory=list)
    _count: int = 0
    folded: int = 0  # as `first_answers` tells it
    _most: int = field(default_factory=lambda: _HELD_ROWS)

    def add(self, found: Matches) -> None:
        """Take in rows."""
        if not len(found.rows):
            return
        with self._lock:
            self._parts.append(found)
            self._count += len(found.rows)
            self.folded += found.folded
            if self._count > self._most:
                # sorting takes longest: where nobody has too many, it is left to the end
                if self._has_more(np.concatenate([part.lookups for part in self._parts])):
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
                return Matches(np.zeros(0, np.int64), self.schema.no_rows)
            # newest files first: mostly that is answer order
            self._parts.sort(key=lambda part: -int(part.rows["second"].max()))
            lookups = np.concatenate([part.lookups for part in self._parts])
            if self._has_more(lookups):
                return replace(self._cut(), folded=self.folded)
            return Matches(lookups, concatenate([part.rows for part in self._parts], self.schema), self.folded)

    def _has_more(self, lookups: npt.NDArray[np.int64]) -> bool:
        """Return whether a lookup has more rows than its page and one more, given the lookup of each row (n)."""
        return bool((np.bincount(lookups, minlength=len(self.batch)) > self.batch.max_count + 1).any())

    def fold(self, count: int) -> None:
        """Count entries that were folded."""
        self.folded += count

    def _cut(self) -> Matches:
        left, _ = first_rows(self.batch.max_count + 1, self._parts, self.schema, self.fold)
        # `found` asks each part for its newest row
        self._parts, self._count = [left] if len(left.rows) else [], len(left.rows)
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

    found = batch.matched(items["key_hash"], among)
    if int(found.counts.sum()) <= PAIRS_AT_A_TIME or found.items_a_hash <= batch.max_count.min():
        for places, lookups in found.pairs():
            look(pick(places), lookups)
        return gathered.found()
    # a hot key of many lookups: newest items first, and no more of them for a lookup that has its page
    matched = found.items
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
        for places, lookups in batch.matched(hashes[start:stop], here).pairs():
            look(pick(matched[start + places]), lookups)
        if stop < len(matched):
            newest = int(seconds[stop])
            open_ = open_[(batch.second_min[open_] <= newest) & (batch.page_ends(open_, gathered.first()) <= newest)]
        start, size = stop, 2 * size
    return gathered.found()
