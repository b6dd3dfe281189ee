"""Replaced ranges: offsets of files whose rows a newer reading of the file has at other offsets. Pure.

A store (`linked_store`) is a log of offsets. A `Replacement` announces a new reading: the old offsets, and those that
the new rows get. Until the position of the store has reached the end of the new offsets, their entries are hidden, and
the old ones are answers. The log record that moves the position there makes the old offsets *retired*. So a lookup
finds each row once at each position of the log.

Rewrites leave retired entries out. `generation` counts the records that retired offsets. Each retired range has that of
its record, and an object that a rewrite made has that of the state from which the rewrite worked. So an object has no
entry of ranges up to its generation. A range is dropped when no file can have an entry of it any more.

A newer reading of a file that is still being read takes over: the old offsets wait for it instead. Offsets that are
hidden as new and are replaced themselves are retired at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from tiered_index.base.documents import Count, Place, Seconds
from tiered_index.format.names import queue_of_store
from tiered_index.format.segments.ranges import COLUMNS
from tiered_index.format.segments.segment import Stored, Times

ALWAYS_S = (-(2**42), 2**42)
"""The seconds of rows whose times are not known."""
_START, _END, _GENERATION, _FIRST, _LAST = range(COLUMNS)
# ranges that are compared with all files at a time
_AT_ONCE = 256
# the rest of a row of new offsets
_NEW = (0, *ALWAYS_S)
Range = tuple[int, int]
"""Offsets [start, end)."""


class Replacement(Stored, frozen=True):
    """A new reading of a file has the rows of the old offsets [`start`, `end`) of `store` at [`new_start`, `new_end`).

    If `new_end` is `new_start`, there are no new rows, and the old ones are retired at once. A later replacement with
    the same `new_start` sets `new_end` anew, for example when the true length of the segment is known. Several
    replacements with one `new_start` wait for the same rows. If one old range has several new ones, it waits for all.
    `times` are those of the old rows; None: not known.
    """

    store: str
    start: Place
    end: Place
    new_start: Place
    new_end: Place
    times: Times | None = None

    @property
    def row(self) -> tuple[int, int, int, int, int]:
        """The row of the old offsets in a `RangeTable`."""
        seconds = ALWAYS_S if self.times is None else (self.times[0] // 1000, self.times[1] // 1000)
        return (self.start, self.end, 0, *seconds)

    def __post_init__(self) -> None:
        queue_of_store(self.store)
        if self.start >= self.end or self.new_start > self.new_end:
            raise ValueError(f"A replacement of {self.store} has an end that is not behind its start")
        if self.start < self.new_end and self.new_start < self.end:
            raise ValueError(f"A replacement of {self.store} has old offsets that are new ones, too")


@dataclass(frozen=True, eq=False)
class RangeTable:
    """Sorted ranges of offsets of one store, which neither overlap nor touch each other.

    `rows` (i64, n x 5): start, end, the generation in which the range was retired, and the first and the last epoch
    second of its entries, inclusive. Ranges that are joined get the greater generation and the seconds of both.
    """

    rows: npt.NDArray[np.int64]

    @classmethod
    def of(cls, rows: Any) -> RangeTable:
        """Make it of rows in any order, joined where they touch or overlap, without empty ones."""
        table = np.asarray(rows, np.int64).reshape(-1, COLUMNS)
        table = table[table[:, _START] < table[:, _END]]
        if not len(table):
            return NO_RANGES
        table = table[np.argsort(table[:, _START], kind="stable")]
        # a row begins a range if all rows before it end before its start; memory: 8 bytes a row
        reached = np.maximum.accumulate(table[:, _END])
        begins = np.flatnonzero(np.concatenate(([True], table[1:, _START] > reached[:-1])))
        lows = np.minimum.reduceat(table[:, [_START, _FIRST]], begins)
        highs = np.maximum.reduceat(table[:, [_END, _GENERATION, _LAST]], begins)
        return cls(np.column_stack((lows[:, 0], highs[:, 0], highs[:, 1], lows[:, 1], highs[:, 2])))

    @classmethod
    def checked(cls, rows: npt.NDArray[np.int64]) -> RangeTable:
        """Make it of stored rows. Raises `ValueError` unless they are such a table."""
        starts, ends, generations, firsts, lasts = rows.T
        bad = (starts < 0) | (starts >= ends) | (generations < 0) | (firsts > lasts)
        if bad.any() or (ends[:-1] >= starts[1:]).any():
            raise ValueError("A table of ranges is not sorted and joined")
        return cls(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RangeTable) and np.array_equal(self.rows, other.rows)

    def __iter__(self) -> Iterator[Range]:
        return map(tuple, self.rows[:, :_GENERATION].tolist())

    @property
    def end(self) -> int:
        """The offset after the last range; 0: there is none."""
        return int(self.rows[-1, _END]) if len(self) else 0

    def joined(self, other: RangeTable) -> RangeTable:
        """Return the ranges of both; this table itself if the other one is empty."""
        if not len(other):
            return self
        return RangeTable.of(np.concatenate((self.rows, other.rows)))

    def of_generation(self, generation: int) -> RangeTable:
        """Return the ranges as retired in a generation."""
        rows = self.rows.copy()
        rows[:, _GENERATION] = generation
        return RangeTable(rows)

    def rows_beyond(self, other: RangeTable) -> RangeTable:
        """Return the ranges that `other` does not have in exactly the same way."""
        if not (len(self) and len(other)):
            return self
        at = np.minimum(np.searchsorted(other._starts, self._starts), len(other) - 1)
        return RangeTable(self.rows[(other.rows[at] != self.rows).any(axis=1)])

    def are_held(self, files: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which ranges (bool, n) may have entries in files.

        `files` (i64, m x 3): the generation, and the first and the last second, inclusive, of each.
        """
        held = np.zeros(len(self), np.bool_)
        generations, firsts, lasts = files.T
        # each range against each file; memory: `_AT_ONCE` bytes a file
        for at in range(0, len(self), _AT_ONCE):
            rows = self.rows[at : at + _AT_ONCE, :, None]
            may = (generations < rows[:, _GENERATION]) & (firsts <= rows[:, _LAST]) & (lasts >= rows[:, _FIRST])
            held[at : at + _AT_ONCE] = may.any(axis=1)
        return held

    def holds(self, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which of n offsets are in a range (bool, n)."""
        if not len(self):
            return np.zeros(len(offsets), np.bool_)
        at = np.searchsorted(self._starts, offsets, "right") - 1
        held: npt.NDArray[np.bool_] = (at >= 0) & (offsets < self._ends[at])
        return held

    def within(self, other: RangeTable) -> RangeTable:
        """Return the parts of the ranges that are also in ranges of `other`."""
        return self._parts(other, inside=True)

    def without(self, other: RangeTable) -> RangeTable:
        """Return the parts of the ranges that are in no range of `other`."""
        return self._parts(other, inside=False)

    def _parts(self, other: RangeTable, *, inside: bool) -> RangeTable:
        if not (len(self) and len(other)):
            return NO_RANGES if inside else self
        # between two neighbouring edges no range of either table begins or ends; memory: 16 bytes a range
        edges = np.unique(np.concatenate((self._starts, self._ends, other._starts, other._ends)))
        chosen = np.flatnonzero(self.holds(edges[:-1]) & (other.holds(edges[:-1]) == inside))
        rows = self.rows[np.searchsorted(self._starts, edges[chosen], "right") - 1]
        rows[:, _START], rows[:, _END] = edges[chosen], edges[chosen + 1]
        return RangeTable.of(rows)

    @property
    def bounds(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The starts and the ends of the ranges (i64, n each)."""
        return self._starts, self._ends

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        return np.ascontiguousarray(self.rows[:, _START])

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        return np.ascontiguousarray(self.rows[:, _END])

    def to_json(self) -> list[list[int]]:
        """Return the columns as stored in a checkpoint."""
        return self.rows.T.tolist()  # type: ignore[no-any-return]


NO_RANGES = RangeTable(np.zeros((0, COLUMNS), np.int64))


class NewReading(Struct, frozen=True):
    """A new reading that is not published: offsets `old` wait for the offsets `new`, whose entries are hidden.

    `new` has for each `new_start` of a replacement those of its new offsets that are not replaced themselves.
    """

    old: RangeTable
    new: tuple[tuple[int, RangeTable], ...]

    @property
    def end(self) -> int:
        """The position of the store from which on the new rows are answers."""
        return max([table.end for _, table in self.new], default=0)


class ReplacedRanges(Struct, frozen=True, dict=True):
    """The replaced offsets of one store: the `retired` ones, and the `readings` that are not published."""

    retired: RangeTable = NO_RANGES
    readings: tuple[NewReading, ...] = ()

    def __bool__(self) -> bool:
        return bool(len(self.retired) or self.readings)

    @cached_property
    def hidden(self) -> RangeTable:
        """The ranges whose entries are no answers: the retired ones, and those of unpublished readings."""
        tables = [self.retired, *(table for reading in self.readings for _, table in reading.new)]
        return RangeTable.of(np.concatenate([table.rows for table in tables]))

    @property
    def end(self) -> int:
        """The offset after the last replaced or new one; 0: there is none. No offset before it may be used again."""
        return max(self.retired.end, *(max(reading.old.end, reading.end) for reading in self.readings), 0)

    def announced(self, replacements: Iterable[Replacement], generation: int) -> ReplacedRanges:
        """Return the ranges after the replacements of a record, before `published`, which retires in `generation`."""
        by_new: dict[int, list[Replacement]] = {}
        for replacement in replacements:
            by_new.setdefault(replacement.new_start, []).append(replacement)
        ends = {new_start: together[-1].new_end for new_start, together in by_new.items()}
        announced = [
            NewReading(
                _ranges(*(replacement.row for replacement in together)),
                ((start, _ranges((start, ends[start], *_NEW))),),
            )
            for start, together in by_new.items()
        ]
        retired, readings = self.retired, list[NewReading]()
        for known, fresh in _connected(self.readings, announced):
            if not fresh:
                readings += known
                continue
            old = _all_of(reading.old for reading in fresh)
            before = [(start, table) for reading in (*known, *fresh) for start, table in reading.new]
            # rows of an unfinished reading were never shown, and the newer reading has them, too
            hidden = old.within(_all_of(table for _, table in before))
            retired = retired.joined(hidden.of_generation(generation))
            waiting = _all_of([old.without(hidden), *(reading.old for reading in known)])
            stated = {start: ends[start] for reading in fresh for start, _ in reading.new}
            new = {start: table.without(old) for start, table in before if start not in stated}
            new |= {start: _ranges((start, end, *_NEW)).without(retired) for start, end in stated.items()}
            readings.append(NewReading(waiting, tuple((start, new[start]) for start in sorted(new) if len(new[start]))))
        return ReplacedRanges(retired, tuple(readings))

    def published(self, position: int, generation: int) -> ReplacedRanges:
        """Return the ranges after a record with the `position` of the store, which retires in `generation`."""
        done = [reading for reading in self.readings if reading.end <= position]
        if not done:
            return self
        retired = self.retired
        for reading in done:
            retired = retired.joined(reading.old.of_generation(generation))
        return ReplacedRanges(retired, tuple(reading for reading in self.readings if reading.end > position))

    def dropped(self, ranges: Sequence[Range]) -> ReplacedRanges:
        """Return this without retired ranges. Raises `ValueError` if one of them is not one."""
        gone = np.isin(self.retired.rows[:, _START], [start for start, _ in ranges])
        if sorted(ranges) != [*RangeTable(self.retired.rows[gone])]:
            raise ValueError("Dropped ranges are not those of the table")
        return ReplacedRanges(RangeTable(self.retired.rows[~gone]), self.readings)

    def to_json(self, stored: RangeTable = NO_RANGES) -> dict[str, Any]:
        """Return the fields as stored in a record or checkpoint. `stored` ranges are in an object."""
        readings = [
            {"old": reading.old.to_json(), "new": [[start, table.to_json()] for start, table in reading.new]}
            for reading in self.readings
        ]
        retired = self.retired.rows_beyond(stored).to_json()
        return {"retired": retired, **({"readings": readings} if readings else {})}


def _ranges(*rows: tuple[int, ...]) -> RangeTable:
    return RangeTable.of(rows)


def _all_of(tables: Iterable[RangeTable]) -> RangeTable:
    return RangeTable.of(np.concatenate([NO_RANGES.rows, *(table.rows for table in tables)]))


def _connected(
    known: Sequence[NewReading], fresh: Sequence[NewReading]
) -> Iterator[tuple[list[NewReading], list[NewReading]]]:
    """Yield the readings in groups that have common offsets, old or new: those of `known`, and those of `fresh`."""
    readings = [*known, *fresh]
    # with the first new offset, although it may be replaced itself: it tells readings apart
    tables = [
        [reading.old, *(_ranges((start, start + 1, *_NEW)).joined(table) for start, table in reading.new)]
        for reading in readings
    ]
    spans = np.concatenate([NO_RANGES.rows, *(table.rows for of in tables for table in of)])[:, :_GENERATION]
    owners = np.repeat(np.arange(len(readings)), [sum(map(len, of)) for of in tables])
    order = np.argsort(spans[:, _START], kind="stable")
    spans, owners = spans[order], owners[order]
    # a range that overlaps none before begins a cluster; memory: 8 bytes a range
    reached = np.maximum.accumulate(spans[:, _END])
    clusters = np.cumsum(np.concatenate(([0], spans[1:, _START] >= reached[:-1])))
    roots = list(range(len(readings)))

    def root(number: int) -> int:
        while roots[number] != number:
            number = roots[number] = roots[roots[number]]
        return number

    first: dict[int, int] = {}
    for cluster, owner in sorted(set(zip(clusters.tolist(), owners.tolist(), strict=True))):
        roots[root(owner)] = root(first.setdefault(cluster, owner))
    groups: dict[int, tuple[list[NewReading], list[NewReading]]] = {}
    for number, reading in enumerate(readings):
        groups.setdefault(root(number), ([], []))[number >= len(known)].append(reading)
    yield from groups.values()


class Replaced(Struct, frozen=True, dict=True):
    """The replaced offsets of an index at a log position, by store. Only stores with some are there."""

    # no proxy, because executors of Spark get it pickled
    stores: Mapping[str, ReplacedRanges] = field(default_factory=dict)
    generation: Count = 0

    def __bool__(self) -> bool:
        return bool(self.stores)

    def end(self, store: str) -> int:
        """Return the offset after the last replaced or new one of a store: no offset before it may be used again."""
        return self.stores[store].end if store in self.stores else 0

    def retired(self, store: str) -> RangeTable:
        """Return the retired ranges of a store."""
        return self.stores[store].retired if store in self.stores else NO_RANGES

    def retires_as(self, earlier: Replaced) -> bool:
        """Return whether no offset was retired, and no range dropped, since an earlier state of the index."""
        if self is earlier:
            return True
        stores = {*self.stores, *earlier.stores}
        return self.generation == earlier.generation and all(self.retired(s) == earlier.retired(s) for s in stores)

    def completed(self, tables: Mapping[str, RangeTable]) -> Replaced:
        """Return this with the ranges of `tables`, by store, which were left out of its document."""
        whole = {
            store: ReplacedRanges(ranges.retired.joined(tables[store]), ranges.readings) if store in tables else ranges
            for store, ranges in self.stores.items()
        }
        return Replaced(whole, self.generation)

    @cached_property
    def for_good(self) -> Replaced:
        """The retired offsets alone: a later record shows those of readings that are not published."""
        if not any(ranges.readings for ranges in self.stores.values()):
            return self
        retired = {store: ReplacedRanges(ranges.retired) for store, ranges in self.stores.items()}
        return Replaced(_filled(retired), self.generation)

    def replayed(self, replacements: Sequence[Replacement], positions: Mapping[str, int]) -> Replaced:
        """Return the replaced offsets after a record with `replacements`. `positions` are those after it."""
        by_store: dict[str, list[Replacement]] = {}
        for replacement in replacements:
            by_store.setdefault(replacement.store, []).append(replacement)
        stores, generation = dict(self.stores), self.generation
        for store in [*by_store, *(s for s, ranges in self.stores.items() if ranges.readings and s not in by_store)]:
            before = stores.get(store, ReplacedRanges())
            after = before.announced(by_store[store], self.generation + 1) if store in by_store else before
            after = after.published(positions.get(store, 0), self.generation + 1)
            if after.retired is not before.retired:
                generation = self.generation + 1
            if after is not before:
                stores[store] = after
        changed = by_store or any(stores[store] is not ranges for store, ranges in self.stores.items())
        return Replaced(_filled(stores), generation) if changed else self

    def dropped(self, dropped: Mapping[str, Sequence[Range]]) -> Replaced:
        """Return this without retired ranges, by store. Raises `ValueError` if one of them is not one."""
        gone = {store: self.stores.get(store, ReplacedRanges()).dropped(ranges) for store, ranges in dropped.items()}
        return Replaced(_filled({**self.stores, **gone}), self.generation)

    def joined(self, other: Replaced) -> Replaced:
        """Return this with the stores of `other`, of which this has none."""
        return Replaced({**other.stores, **self.stores}, max(self.generation, other.generation))

    @cached_property
    def _by_topic(self) -> dict[str | None, list[tuple[int, ReplacedRanges]]]:
        """The queues of each topic (None: of all topics) and their replaced offsets."""
        topics: dict[str | None, list[tuple[int, ReplacedRanges]]] = {}
        for store, ranges in self.stores.items():
            topic, queue_id = queue_of_store(store)
            topics.setdefault(topic, []).append((queue_id, ranges))
        return topics

    def of_topic(self, topic: str) -> dict[int, tuple[RangeTable, RangeTable]]:
        """Return the hidden and the retired offsets of a topic, by queue, with those of all topics."""
        tables: dict[int, tuple[RangeTable, RangeTable]] = {}
        for queue_id, ranges in (*self._by_topic.get(topic, ()), *self._by_topic.get(None, ())):
            hidden, retired = tables.get(queue_id, (NO_RANGES, NO_RANGES))
            # a topic's queue is mostly in one store, whose arrays are then those of all states
            tables[queue_id] = (
                hidden.joined(ranges.hidden) if len(hidden) else ranges.hidden,
                retired.joined(ranges.retired) if len(retired) else ranges.retired,
            )
        return tables

    def to_json(self, stored: Mapping[str, RangeTable] = MappingProxyType({})) -> dict[str, Any]:
        """Return the fields as stored in a record or checkpoint. `stored` ranges, by store, are in objects."""
        stores = {store: ranges.to_json(stored.get(store, NO_RANGES)) for store, ranges in self.stores.items()}
        return {"stores": stores, "generation": self.generation}


def _filled(stores: Mapping[str, ReplacedRanges]) -> dict[str, ReplacedRanges]:
    return {store: ranges for store, ranges in stores.items() if ranges}


class RangeColumns(Struct, array_like=True):
    """The columns of a table of ranges as stored."""

    start: tuple[Place, ...]
    end: tuple[Place, ...]
    generation: tuple[Count, ...]
    first_s: tuple[Seconds, ...]
    last_s: tuple[Seconds, ...]

    def read(self) -> RangeTable:
        """Return the table. Raises `ValueError` if it can't be one."""
        columns = [getattr(self, name) for name in RangeColumns.__struct_fields__]
        if len({len(column) for column in columns}) > 1:
            raise ValueError("A table of ranges has columns of different lengths")
        return RangeTable.checked(np.array(columns, np.int64).T.reshape(-1, COLUMNS))


class StoredReading(Struct):
    """A reading as stored in a checkpoint."""

    old: RangeColumns
    new: tuple[tuple[Place, RangeColumns], ...]


class StoredReplacedRanges(Struct):
    """The replaced ranges of a store as stored."""

    retired: RangeColumns
    readings: tuple[StoredReading, ...] = ()

    def read(self) -> ReplacedRanges:
        """Return the ranges. Raises `ValueError` if they can't be some."""
        readings = tuple(
            NewReading(reading.old.read(), tuple((start, table.read()) for start, table in reading.new))
            for reading in self.readings
        )
        return ReplacedRanges(self.retired.read(), readings)


class StoredReplaced(Struct):
    """The replaced ranges of an index as stored."""

    stores: dict[str, StoredReplacedRanges]
    generation: Count

    def read(self) -> Replaced:
        """Return the ranges. Raises `ValueError` if they can't be some."""
        for store in self.stores:
            queue_of_store(store)
        # also stores without a range of their own: all may be in an object
        return Replaced({store: ranges.read() for store, ranges in self.stores.items()}, self.generation)


NOT_REPLACED = Replaced()
