"""Many lookups together: every key is hashed in one pass, and every file is read once.

A file answers a `LookupBatch` with (lookup, row) pairs. The pairs of all files are sorted into answer order and cut as
they arrive. Answers equal those of single lookups. Memory: about 100 bytes per answer and 60 per lookup. Threads: a
batch belongs to one call; results may be shared.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from tiered_index.base.kernels import compiled, compiled_views
from tiered_index.errors import TieredIndexError
from tiered_index.format.keys.bloom import filter_hash, filter_hashes
from tiered_index.format.keys.hashing import HashRule, code_units, java_hash_batch, key_hashes, normal_hashes
from tiered_index.format.metadata import Metadata
from tiered_index.format.schema import Schema, row_form
from tiered_index.service.log.hidden import HIDES_NOTHING, RETIRED, SHOWN, HiddenOf, HiddenTable
from tiered_index.service.read.answers.lookup_columns import LookupColumns
from tiered_index.service.read.answers.replaced_rows import PageEnds, ReplacedRows, on_pages
from tiered_index.service.read.answers.rows import (
    MOST_ROWS,
    Array,
    OrderKey,
    PreparedLookup,
    are_after,
    check_key,
    check_topic,
    concatenate,
    core_supports,
    decode_cursor,
    differing,
    in_answer_order,
    in_one_order,
    query_digest,
    stable_order,
    with_repeats,
)
from tiered_index.types import MAX_KEY_UNITS, Lookup

if TYPE_CHECKING:
    from tiered_index.base._views import View, ViewBatch

NEVER = -(2**63)
"""A second before all seconds of entries."""
PAIRS_AT_A_TIME = 1 << 16  # some 8 MiB
_HELD_ROWS = 1 << 14
# up to this number, the rows of one lookup are sorted with each file
_FEW_ROWS = 1 << 12
# fewest items of a hot key that are matched at a time
_FEWEST = 1 << 10
# the topic number of an only lookup
_ZERO = np.zeros(1, np.int64)


Damage = tuple[npt.NDArray[np.int64], TieredIndexError]
"""The numbers of the lookups that may lack entries, and the error of the part that could not be read."""


class Matches(NamedTuple):
    """The rows of one file for a batch: row i answers lookup `lookups[i]`.

    `damage` has the errors of parts that could not be read, if the batch may be partial. Otherwise such an error is
    raised.
    """

    lookups: npt.NDArray[np.int64]
    rows: Array
    damage: tuple[Damage, ...] = ()

    @classmethod
    def lacking(cls, *damage: Damage) -> Matches:
        """Return matches without rows, with `damage`."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.int64), damage)


def search_batch(file: Any, batch: LookupBatch, schema: Schema, second_min: int, second_max: int) -> Matches | None:
    """Search a local file with the compiled core, for all lookups of a batch.

    `second_min` and `second_max` are the inclusive seconds of the file. Return at least the first `max_count` + 1 rows
    of each lookup. Return None if the caller has to search the file.
    """
    core = compiled_views()
    if core is None or file is None:
        return None
    view = core.View(row_form(schema), [(file, second_min, second_max)], [file])
    if (search := in_core(view, batch, batch.key_hash)) is None:
        return None
    lookups, rows, left, _, lookups_of_retired, retired = search.find(0, len(batch))
    if left:
        return None
    batch.note_retired(lookups_of_retired, retired, schema)
    return Matches(np.frombuffer(lookups, np.int64), np.frombuffer(rows, schema.row))


def in_core(
    view: View,
    batch: LookupBatch,
    masked_hash: npt.NDArray[np.int32],
    *,
    stored: bool = False,
    hidden: Sequence[HiddenOf] | None = None,
) -> ViewBatch | None:
    """Return the `ViewBatch` of a batch for the compiled core; None: the core does not support one of its cursors.

    `masked_hash` (i32, n): for files of rule ``mask``. `stored`: also search files in a storage. `hidden`: what each
    topic hides; None: as `LookupBatch.hidden`.
    """
    if not all(map(core_supports, batch.after.values())):
        return None
    core = compiled_views()
    assert core is not None
    bounds = batch.second_min, batch.second_max, batch.max_count
    columns: Iterable[Array] = (batch.topic_index, batch.key_hash, masked_hash, batch.fingerprint, *bounds)
    if not batch.is_one:
        columns = map(np.ascontiguousarray, columns)
    left_out = [of_topic.core for of_topic in (batch.hidden if hidden is None else hidden)]
    after = batch.after_rows
    return core.ViewBatch(view, batch.topics, *columns, stored, after, left_out)  # type: ignore[no-any-return]


class _Matched(NamedTuple):
    """The stored hashes that match lookups.

    `items` are their numbers. The lookups of each are `counts` numbers in `by_hash`, from place `first` on.
    """

    by_hash: npt.NDArray[np.int64]
    items: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]

    @property
    def items_a_hash(self) -> int:
        """The most items that match one hash."""
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

    - `key_hash` (i32, n): the hashes to search, by hash rule ``abs``, or by the rule given to `under`.
    - `hidden`: the hidden entries of each topic, by its number; empty: none is hidden.
    - `replaced_rows` gets the matching rows that were left out because a newer reading replaced them.
    - `after`: the end of the page before, by the number of each lookup that continues an answer.
    - `range_ends` (i64, n): the last second of each range; `second_max` is at most that of the end of the page before.
    - `allow_partial`: a slot group that can't be read is damage of the lookups that need it. Others are answered.
    """

    hidden: Sequence[HiddenOf] = ()
    replaced_rows: ReplacedRows | None = None
    after: Mapping[int, OrderKey] = MappingProxyType({})
    allow_partial = False
    is_one = False
    """Whether `of_one` made it: then Python's numbers are many times as fast as arrays."""
    passed: set[str]
    """For the only lookup, the stored objects whose filters were tested and did not exclude it."""

    def __init__(self, lookups: Sequence[Lookup], *, allow_partial: bool = False, order_columns: int = 3) -> None:
        """`order_columns`: the number of columns of an order key. Raises `InvalidCursor`, too."""
        self.allow_partial = allow_partial
        columns = lookups if isinstance(lookups, LookupColumns) else LookupColumns.of(lookups)
        self.lookups: Sequence[Lookup | PreparedLookup] = lookups
        for topic in columns.topics if not set(map(type, columns.topics)) <= {str} else ():
            check_topic(topic)
        topics_checked = {topic: check_topic(topic) for topic in dict.fromkeys(columns.topics)}
        self.topics = list(dict.fromkeys(topics_checked.values()))
        if len(self.topics) > 1:
            places = {topic: self._topic_places[checked] for topic, checked in topics_checked.items()}
            self.topic_index = np.fromiter(map(places.__getitem__, columns.topics), np.int64, len(lookups))
        else:
            self.topic_index = np.zeros(len(lookups), np.int64)
        self.second_min, self.second_max, self.max_count = columns.ranges()
        self.range_ends = self.second_max
        try:
            units = code_units(columns.keys)
        except (TypeError, ValueError):  # also Arrow's errors; `check_key` raises one that names the key
            for key in columns.keys:
                check_key(key)
            raise
        for number in np.flatnonzero((units.lengths == 0) | (units.lengths > MAX_KEY_UNITS))[:1]:
            check_key(columns.keys[number])
        # a character beyond 16 bits has two of these units, and so has no valid text another one
        if units.units.itemsize > 1 and (units.units & 0xF800 == 0xD800).any():
            for key in columns.keys:
                check_key(key)
        self.java_hash, self.fingerprint = java_hash_batch(self.topics or ["-"], self.topic_index, units)
        self.key_hash = key_hashes(self.java_hash, "abs")
        if columns.cursors.count(None) < len(lookups):
            self._continue(columns, order_columns)

    def _continue(self, columns: LookupColumns, order_columns: int) -> None:
        """Set where the lookups with a cursor begin. Raises `InvalidCursor`."""
        topics = map(self.topics.__getitem__, self.topic_index.tolist())
        ranges = zip(self.second_min.tolist(), self.range_ends.tolist(), strict=True)
        lookups = zip(columns.cursors, topics, columns.keys, ranges, strict=True)
        self.after = {
            number: decode_cursor(cursor, query_digest(topic, key, *within), order_columns)
            for number, (cursor, topic, key, within) in enumerate(lookups)
            if cursor is not None
        }
        self.second_max = self.range_ends.copy()
        for number, (second, *_) in self.after.items():
            self.second_max[number] = max(NEVER, min(int(self.range_ends[number]), second))

    @classmethod
    def of_one(cls, lookup: PreparedLookup) -> LookupBatch:
        """Return a batch of one lookup, up to the end of the page before if it continues an answer."""
        made = cls.__new__(cls)
        made.lookups = (lookup,)
        made.topics, made.topic_index = [lookup.topic], _ZERO
        # both hashes differ exactly if the Java hash is negative
        java_hash = lookup.masked_hash - (0 if lookup.key_hash == lookup.masked_hash else 2**31)
        second_max = lookup.second_max if lookup.after is None else min(lookup.second_max, lookup.after[0])
        # slices of one array, which takes as long as one column
        numbers = np.array([lookup.second_min, second_max, min(lookup.max_count, MOST_ROWS), lookup.second_max])
        made.second_min, made.second_max, made.max_count = numbers[:1], numbers[1:2], numbers[2:3]
        made.range_ends = numbers[3:]
        hashes = np.array([java_hash, lookup.key_hash], np.int32)
        made.java_hash, made.key_hash = hashes[:1], hashes[1:]
        made.fingerprint = np.array([lookup.fingerprint], np.uint32)
        made.first = lookup.key_hash, lookup.fingerprint, lookup.second_min, second_max
        made.is_one, made.passed = True, set()
        if lookup.after is not None:
            made.after = {0: lookup.after}
        return made

    @cached_property
    def after_rows(self) -> npt.NDArray[np.int64] | None:
        """The ends of the pages before (i64, n x 3) for the compiled core; None: no lookup continues an answer."""
        if not self.after:
            return None
        ends = np.full((len(self), 3), -NEVER - 1)
        ends[list(self.after)] = list(self.after.values())
        return ends

    def __len__(self) -> int:
        return len(self.lookups)

    def under(self, rule: HashRule) -> tuple[Self, ...]:
        """Return one or two batches of the same lookups, which together find all keys in a file of a hash rule.

        A second batch has only the keys whose hash differs. Its other lookups have an empty range.
        """
        if rule == "abs" or not len(self._two_hashes):
            return (self,)
        return (self._masked,) if rule == "mask" else (self, self._masked.only(self._two_hashes))

    def only(self, numbers: npt.NDArray[np.int64]) -> Self:
        """Return a batch in which only some lookups, by number, have a range. The range of the others is empty."""
        made = self._copy()
        made.second_min, made.second_max = np.full(len(self), -NEVER - 1), np.full(len(self), NEVER)
        made.second_min[numbers], made.second_max[numbers] = self.second_min[numbers], self.second_max[numbers]
        return made

    def hiding(self, table: HiddenTable | None, replaced_rows: ReplacedRows | None = None) -> Self:
        """Return a batch that leaves out hidden entries, by its present `key_hash`. `table` None: none is hidden."""
        if table is None:
            return self
        made = self._copy()
        made.hidden, made.replaced_rows = table.of(self.topics), replaced_rows
        made.second_min = self.second_min.copy()
        for number, of_topic in enumerate(made.hidden):
            if of_topic is not HIDES_NOTHING:
                mine = np.flatnonzero(self.topic_index == number) if len(self.topics) > 1 else slice(None)
                begins = of_topic.begins_of(self.key_hash[mine], self.fingerprint[mine])
                made.second_min[mine] = np.maximum(made.second_min[mine], begins)
        return made

    def note_retired(self, lookups: bytearray, rows: bytearray, schema: Schema) -> None:
        """Add the rows that the core has left out because they are retired."""
        if rows and self.replaced_rows is not None:
            self.replaced_rows.add(np.frombuffer(lookups, np.int64), np.frombuffer(rows, schema.row))

    def after_keys(self, key_of: Callable[[OrderKey], OrderKey]) -> Self:
        """Return a batch whose pages begin after the keys that `key_of` returns for the present ones."""
        if not self.after:
            return self
        made = self._copy()
        made.after = {number: key_of(after) for number, after in self.after.items()}
        return made

    @cached_property
    def _two_hashes(self) -> npt.NDArray[np.int64]:
        """The numbers of the lookups whose hashes by the two rules differ."""
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
        # the copy may have another hash
        made.passed = set()
        return made

    @cached_property
    def _by_hash(self) -> npt.NDArray[np.int64]:
        return stable_order(self.key_hash)

    def filter_hashes(
        self, *, keyed: bool, numbers: npt.NDArray[np.int64] | slice = slice(None)
    ) -> npt.NDArray[np.uint64]:
        """Return the hashes (u64) of lookups, by default of all, for filters of files with fingerprints (`keyed`) or
        without.
        """
        if self.is_one:
            return np.array([filter_hash(self.first[0], self.first[1] if keyed else 0)], np.uint64)
        return filter_hashes(self.key_hash[numbers], self.fingerprint[numbers] if keyed else None)

    @cached_property
    def _sorted_hashes(self) -> npt.NDArray[np.int32]:
        return self.key_hash[self._by_hash]

    @cached_property
    def _hash_starts(self) -> npt.NDArray[np.int64]:
        """The place in the sorted hashes at which each value of the first bits begins, and the end; 16 to 32 bytes per
        lookup.
        """
        bits = min(31, max(8, len(self).bit_length() + 1))
        return np.searchsorted(self._sorted_hashes, np.arange((1 << bits) + 1) << 31 - bits)

    def matched(self, hashes: Array, among: npt.NDArray[np.int64] | None = None) -> _Matched:
        """Return which of n stored hashes match lookups; with `among`, only these lookups."""
        stored = normal_hashes(hashes)
        if len(self) == 1:
            (items,) = (stored == self.key_hash[0]).nonzero() if among is None or len(among) else (_ZERO[:0],)
            return _Matched(_ZERO, items, np.zeros(len(items), np.int64), np.ones(len(items), np.int64))
        if among is None and (loops := compiled()) is not None:
            pairs = np.empty((3, len(stored)), np.int64)
            count = loops.match(stored, self._sorted_hashes, self._hash_starts, *pairs)
            return _Matched(self._by_hash, *pairs[:, :count])
        by_hash = self._by_hash if among is None else among[stable_order(self.key_hash[among])]
        sorted_hashes = self.key_hash[by_hash]
        first = np.searchsorted(sorted_hashes, stored, "left")
        counts = np.searchsorted(sorted_hashes, stored, "right") - first
        items = np.flatnonzero(counts)
        return _Matched(by_hash, items, first[items], counts[items])

    def select(
        self,
        items: Array | Mapping[str, Array],
        lookups: npt.NDArray[np.int64],
        seconds: npt.NDArray[np.int64],
        topic_pairs: Iterable[tuple[int, str]],
        schema: Schema,
    ) -> Matches:
        """Return the rows of `items` (m) whose hash matches `lookups` (m) and that answer them.

        `topic_pairs` are the (id, name) pairs of the file.
        """
        keep = (seconds >= self.second_min[lookups]) & (seconds <= self.second_max[lookups])
        if schema.keyed:
            keep &= items["fingerprint"] == self.fingerprint[lookups]
        place = self._topic_places
        allowed = np.array([place[name] << 32 | topic_id for topic_id, name in topic_pairs if name in place], np.int64)
        topics = self.topic_index[lookups] << 32 | items["topic_id"].astype(np.int64)
        keep &= topics == allowed[0] if len(allowed) == 1 else np.isin(topics, allowed)
        retired = self._leave_hidden(keep, items, lookups, seconds)
        if len(retired) and self.replaced_rows is not None:
            left_out = self._matches(retired, items, lookups, seconds, schema)
            self.replaced_rows.add(left_out.lookups, left_out.rows)
        return self._matches(np.flatnonzero(keep), items, lookups, seconds, schema)

    def _leave_hidden(
        self,
        keep: npt.NDArray[np.bool_],
        items: Array | Mapping[str, Array],
        lookups: npt.NDArray[np.int64],
        seconds: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        """Set `keep` to false for items of hidden queues and offsets. Return the places of those that are retired."""
        retired = [_ZERO[:0]]
        for number, of_topic in enumerate(self.hidden):
            if of_topic.by_row:
                mine = np.flatnonzero(keep & (self.topic_index[lookups] == number))
                states = of_topic.states(items["queue_id"][mine], items["offset"][mine], seconds[mine])
                keep[mine] = states == SHOWN
                retired.append(mine[states == RETIRED])
        return np.concatenate(retired)

    def _matches(
        self,
        places: npt.NDArray[np.int64],
        items: Array | Mapping[str, Array],
        lookups: npt.NDArray[np.int64],
        seconds: npt.NDArray[np.int64],
        schema: Schema,
    ) -> Matches:
        """Return the rows of the items at `places` that come after the page before."""
        rows = np.empty(len(places), schema.row)
        rows["second"] = seconds[places]
        rows["key_hash"] = self.key_hash[lookups[places]]
        for name in rows.dtype.names or ():
            if name not in ("second", "key_hash"):
                rows[name] = items[name][places]
        if self.after and len(places):
            later = self._are_after(lookups[places], rows, schema)
            places, rows = places[later], rows[later]
        return Matches(lookups[places], rows)

    def _are_after(self, owners: npt.NDArray[np.int64], rows: Array, schema: Schema) -> npt.NDArray[np.bool_]:
        """Return which rows (bool, m) come after the end of the page before of their lookup (`owners`, m)."""
        if self.is_one:
            return are_after(rows, self.after[0], schema)
        later = np.ones(len(rows), bool)
        order = stable_order(owners)
        ordered = owners[order]
        for number in self.after.keys() & set(owners.tolist()):
            own = order[np.searchsorted(ordered, number) : np.searchsorted(ordered, number, "right")]
            later[own] = are_after(rows[own], self.after[number], schema)
        return later

    @cached_property
    def _topic_places(self) -> dict[str, int]:
        return {topic: place for place, topic in enumerate(self.topics)}

    def within(self, metadata: Metadata) -> npt.NDArray[np.bool_]:
        """Return which lookups (bool, n) a file may answer, by its topics and the interval of its entries."""
        within = (self.second_min <= metadata.second_max) & (self.second_max >= metadata.second_min)
        names = metadata.topic_names
        within &= np.array([topic in names for topic in self.topics], bool)[self.topic_index]
        return within

    def topic_pairs(self, metadata: Metadata) -> list[tuple[int, str]]:
        """Return the (id, name) pairs of a file for the topics of the batch."""
        return [pair for pair in metadata.topics if pair[1] in self._topic_places]

    @cached_property
    def first(self) -> tuple[int, int, int, int]:
        """The hash, the fingerprint and the inclusive seconds of the first lookup."""
        first = self.key_hash[0], self.fingerprint[0], self.second_min[0], self.second_max[0]
        key_hash, fingerprint, second_min, second_max = map(int, first)
        return key_hash, fingerprint, second_min, second_max

    def overlaps(self, second_min: int, second_max: int) -> bool:
        """Return whether the range of a lookup overlaps the inclusive seconds."""
        if self.is_one:
            return self.first[2] <= second_max and self.first[3] >= second_min
        return bool(len(self.overlapping(second_min, second_max)))

    def overlapping(self, second_min: int, second_max: int) -> npt.NDArray[np.int64]:
        """Return the numbers of the lookups whose range overlaps the inclusive seconds."""
        return np.flatnonzero((self.second_min <= second_max) & (self.second_max >= second_min))

    def page_ends(self, lookups: npt.NDArray[np.int64], matches: Matches) -> npt.NDArray[np.int64]:
        """Return the second of the first row after each lookup's page (n), or `NEVER`. `matches`: by `OrderedRows`."""
        most = self.max_count[lookups]
        starts = np.searchsorted(matches.lookups, lookups)
        enough = np.searchsorted(matches.lookups, lookups, "right") - starts > most
        ends = np.full(len(lookups), NEVER)
        ends[enough] = matches.rows["second"][starts[enough] + most[enough]]
        return ends


class OrderedRows:
    """The rows of many parts, by lookup and in answer order, with repeats: rows whose identity a row before has.

    - `lookups` (n) has the lookup of each of the `rows` (n).
    - `counts` is the number of distinct rows of each lookup (i64, `count`).
    """

    def __init__(self, count: int, parts: Sequence[Matches], schema: Schema) -> None:
        self._schema = schema
        lookups = np.concatenate([part.lookups for part in parts]) if parts else np.zeros(0, np.int64)
        rows = concatenate([part.rows for part in parts], schema)
        # the rows of one file are mostly by lookup
        if (lookups[1:] < lookups[:-1]).any():
            order = stable_order(lookups)
            # `take` copies records as bytes, an index in brackets column by column, which takes 20 times as long
            lookups, rows = lookups[order], rows.take(order)
        self.lookups, self.rows = lookups, rows
        self.counts = np.bincount(lookups, minlength=count)
        # the places of repeats (m), and of the first row of the identity of each (m)
        self._repeats = self._firsts = np.zeros(0, np.int64)
        if not in_answer_order(rows, lookups):
            # other lookups have one row, which needs no sorting
            shared = np.flatnonzero(self.counts[lookups] > 1)
            order, repeated, firsts = with_repeats(rows.take(shared), schema, [lookups[shared]])
            places = np.arange(len(rows))
            # the sorted rows of a lookup are at the places of its rows
            places[shared] = shared[order]
            self.rows = rows.take(places)
            self._repeats, self._firsts = shared[repeated], shared[firsts]
            self.counts -= np.bincount(lookups[self._repeats], minlength=count)

    @cached_property
    def _rank(self) -> npt.NDArray[np.int64]:
        """The number of distinct rows of the lookup before each row (n)."""
        is_first = np.ones(len(self.rows), np.int64)
        is_first[self._repeats] = 0
        rank: npt.NDArray[np.int64] = np.cumsum(is_first) - is_first
        rank -= (np.cumsum(self.counts) - self.counts)[self.lookups]
        return rank

    def first(self, limits: npt.NDArray[np.int64], *, keeps_repeats: bool = False) -> Matches:
        """Return the first distinct rows of each lookup, at most `limits`; with `keeps_repeats` those too."""
        is_wanted = np.ones(len(self.rows), bool)
        if (self.counts > limits).any():
            is_wanted = self._rank < limits[self.lookups]
        if not keeps_repeats:
            is_wanted[self._repeats] = False
        if is_wanted.all():
            return Matches(self.lookups, self.rows)
        places = np.flatnonzero(is_wanted)
        return Matches(self.lookups[places], self.rows.take(places))

    def folded(self, page_ends: PageEnds) -> int:
        """Return the number of repeats that differ from the row of their identity.

        Only repeats up to the end of a page count if the lookup has more pages, which count theirs.
        """
        if not len(self._repeats):
            return 0
        seconds = self.rows["second"]
        # a repeat of the same second has the place of its first row, so no later page finds it
        is_beside = seconds[self._repeats] == seconds[self._firsts]
        at = self.rows.take(np.where(is_beside, self._firsts, self._repeats))
        on_page = on_pages(self.lookups[self._repeats], at, page_ends, self._schema)
        repeats, firsts = self.rows[self._repeats[on_page]], self.rows[self._firsts[on_page]]
        return differing(repeats, firsts, self._schema)


class Answers(NamedTuple):
    """The answers of n lookups: rows by lookup, in answer order; each lookup's start (i64, n + 1).

    `more` (bool, n) says which lookups have further rows. `folded` counts entries that answers fold though they differ.
    """

    rows: Array
    starts: npt.NDArray[np.int64]
    more: npt.NDArray[np.bool_]
    folded: int

    @property
    def page_ends(self) -> PageEnds:
        """The ends of the pages."""
        last = self.rows.take(self.starts[1:] - 1, mode="clip") if self.more.any() else self.rows[:0]
        return PageEnds(self.more, last)


def best_answers(
    limits: npt.NDArray[np.int64], parts: Sequence[Matches], schema: Schema, *, has_more: bool = False
) -> Answers:
    """Return the first distinct rows of each lookup, at most `limits` (n). `has_more`: further rows were not read."""
    if len(limits) == 1 and in_one_order(rows := concatenate([part.rows for part in parts], schema)):
        # the common case of one lookup, in a tenth of the time
        page = rows[: limits[0]]
        return Answers(page, np.array([0, len(page)]), np.array([has_more or len(rows) > len(page)]), 0)
    ordered = OrderedRows(len(limits), parts, schema)
    more = (ordered.counts > limits) | has_more
    starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(np.minimum(ordered.counts, limits))))
    answers = Answers(ordered.first(limits).rows, starts, more, 0)
    return answers._replace(folded=ordered.folded(answers.page_ends))


@dataclass(eq=False)
class MatchAccumulator:
    """The rows found for a batch so far. It drops rows that can't be in an answer.

    It keeps a page and one more row for each lookup, with repeats, which are counted at the end. Memory: twice the
    answers, or `_HELD_ROWS` rows if that is more. Any thread.

    `skips`: it is for one lookup, and its rows decide which files can be skipped.
    """

    batch: LookupBatch
    schema: Schema
    skips: bool = False
    skipped: bool = False
    """Whether a file was skipped: then there may be more answers."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _parts: list[Matches] = field(default_factory=list)
    _count: int = 0
    # the second of the last answer of a full page
    _cutoff: int | None = None

    def __post_init__(self) -> None:
        # the most rows that are held without a cut
        self._most = int(self.batch.max_count[0]) - 1 if self.skips else _HELD_ROWS

    def add(self, matches: Matches) -> None:
        """Add rows."""
        if not len(matches.rows):
            return
        with self._lock:
            self._parts.append(matches)
            self._count += len(matches.rows)
            if self._count > self._most:
                # sorting takes longest, so it waits for the end unless a lookup has too many rows
                if self.skips or self._has_more():
                    self._cut()
                # a few rows are sorted with each file, because they may skip the next one
                few = self.skips and self._count <= _FEW_ROWS
                self._most = self._count if few else max(0 if self.skips else _HELD_ROWS, 2 * self._count)

    def can_skip(self, second_max: int) -> bool:
        """Return whether a file with this greatest second can't change the answer. Then the answer is truncated."""
        # without the lock, because most lookups never have a cutoff; it is never unset
        if self._cutoff is None:
            return False
        with self._lock:
            if second_max >= self._cutoff:
                return False
            self.skipped = True
            return True

    @property
    def has_rows(self) -> bool:
        """Whether there is a row."""
        return self._count > 0

    def missing(self) -> int:
        """Return the number of answers that are missing before files can be skipped; 0: files are never skipped."""
        if not self.skips or self._cutoff is not None:
            return 0
        # at least one: while another thread sorts the last of them, no file can be skipped yet
        return max(1, int(self.batch.max_count[0]) - self._count)

    def first(self) -> Matches:
        """Return the first rows of each lookup, by lookup, in answer order, without repeats: one more than a page."""
        with self._lock:
            return self._ordered().first(self.batch.max_count + 1)

    def page_ends(self) -> PageEnds:
        """Return the ends of the pages by the rows so far."""
        first = self.first()
        ends = np.searchsorted(first.lookups, np.arange(len(self.batch))) + self.batch.max_count
        more = ends < np.searchsorted(first.lookups, np.arange(len(self.batch)), "right")
        last = first.rows.take(np.where(more, ends - 1, 0), mode="clip") if more.any() else self.schema.no_rows
        return PageEnds(more, last)

    def matches(self) -> Matches:
        """Return the rows in any order, at most `max_count` + 1 distinct ones of each lookup."""
        with self._lock:
            if self._has_more():
                self._cut()
            self._parts = [_joined(self._newest_first(), self.schema)]
            return self._parts[0]

    def ordered(self) -> OrderedRows:
        """Return the rows in order: at least the first `max_count` + 1 distinct ones of each lookup."""
        with self._lock:
            return self._ordered()

    def answers(self) -> Answers:
        """Return the answers of the batch."""
        with self._lock:
            return best_answers(self.batch.max_count, self._newest_first(), self.schema, has_more=self.skipped)

    def _has_more(self) -> bool:
        """Return whether a lookup has more than `max_count` + 1 rows."""
        if not self._parts:
            return False
        lookups = np.concatenate([part.lookups for part in self._parts])
        return bool((np.bincount(lookups, minlength=len(self.batch)) > self.batch.max_count + 1).any())

    def _newest_first(self) -> list[Matches]:
        """Return the parts, which then are mostly in answer order."""
        if len(self._parts) < 2:
            return self._parts
        return sorted(self._parts, key=lambda part: -int(part.rows["second"].max(initial=NEVER)))

    def _ordered(self) -> OrderedRows:
        return OrderedRows(len(self.batch), self._newest_first(), self.schema)

    def _cut(self) -> None:
        ordered = self._ordered()
        left = ordered.first(self.batch.max_count + 1, keeps_repeats=True)
        self._parts, self._count = [left], len(left.rows)
        if self.skips and ordered.counts[0] >= (most := int(self.batch.max_count[0])):
            self._cutoff = int(ordered.first(self.batch.max_count).rows["second"][most - 1])


def _joined(parts: list[Matches], schema: Schema) -> Matches:
    lookups = np.concatenate([part.lookups for part in parts]) if parts else np.zeros(0, np.int64)
    return Matches(lookups, concatenate([part.rows for part in parts], schema))


def matching(
    batch: LookupBatch,
    items: Array | Mapping[str, Array],
    seconds_of: Callable[[Any], npt.NDArray[np.int64]],
    topic_pairs: Sequence[tuple[int, str]],
    schema: Schema,
    among: npt.NDArray[np.int64] | None = None,
) -> Matches:
    """Return the rows of `items` that answer lookups, in any order: at least the first `max_count` + 1 of each lookup.

    `items` are stored items or their columns by name. `seconds_of` returns the epoch seconds of items. `topic_pairs`:
    see `LookupBatch.select`. `among`: only these lookups.
    """
    gathered = MatchAccumulator(batch, schema)

    def pick(places: npt.NDArray[np.int64]) -> Any:
        return {name: values[places] for name, values in items.items()} if isinstance(items, Mapping) else items[places]

    def look(picked: Any, lookups: npt.NDArray[np.int64]) -> None:
        gathered.add(batch.select(picked, lookups, seconds_of(picked), topic_pairs, schema))

    pairs = batch.matched(items["key_hash"], among)
    if len(batch) == 1:
        picked = pick(pairs.items)
        return batch.select(picked, pairs.first, seconds_of(picked), topic_pairs, schema)
    if int(pairs.counts.sum()) <= PAIRS_AT_A_TIME or pairs.items_a_hash <= batch.max_count.min():
        for places, lookups in pairs.pairs():
            look(pick(places), lookups)
        return gathered.matches()
    # a hot key with many lookups: newest items first, until each lookup has its page
    matched = pairs.items
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
    return gathered.matches()
