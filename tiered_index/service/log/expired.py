"""The hidden entries that the log of an index states: expired, erased and replaced ones (`Expired`). Pure.

As soon as a horizon is in the log, all readers leave out the same entries. Lookups, exports and rewrites search them in
a table by topic (`hidden`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Struct, UnsetType, structs

from tiered_index.base.documents import Milliseconds, Place
from tiered_index.base.retention import Horizon
from tiered_index.service.log.hidden import ALWAYS, HIDES_NOTHING, ErasedKey, HiddenOf, HiddenRanges, HiddenTable
from tiered_index.service.log.replaced import NOT_REPLACED, RangeTable, Replaced, StoredReplaced
from tiered_index.service.log.tombstones import Tombstone, Tombstones


class Expired(Struct, frozen=True, dict=True):
    """The hidden entries and archived segments of an index at a log position.

    - `horizons`: an entry has expired if any of them says so.
    - `segments`: for each store, the offset up to which its archived segments have expired.
    - `tombstones`: the erased entries.
    - `replaced`: the offsets of rows of files that newer readings replaced.
    """

    horizons: tuple[Horizon, ...] = ()
    segments: Mapping[str, Place] = msgspec.field(default_factory=dict)
    tombstones: tuple[Tombstone, ...] = ()
    replaced: Replaced = NOT_REPLACED

    @cached_property
    def hidden(self) -> HiddenTable | None:
        """The hidden entries by topic; None: no entry is hidden. Expired segments hide none."""
        return HiddenTable(self._hidden_of) if self.latest_ms or self.tombstones or self.replaced else None

    def hidden_of(self, topic: str) -> HiddenOf:
        """Return the hidden entries of a topic."""
        return HIDES_NOTHING if self.hidden is None else self.hidden[topic]

    @property
    def for_good(self) -> Expired:
        """This without the entries that a later record shows: those of readings that are not published."""
        return (
            self if self.replaced.for_good is self.replaced else structs.replace(self, replaced=self.replaced.for_good)
        )

    def before_ms(self, topic: str) -> int:
        """Return the time before which a topic's entries have expired; 0: none has."""
        return max([horizon.of_topic(topic) for horizon in self.horizons], default=0)

    def limits(self) -> dict[str | None, int]:
        """Return the time before which entries have expired, for each pattern of topics, and for others by None."""
        patterns = sorted({pattern for horizon in self.horizons for pattern, _ in horizon.topics})
        others = max([horizon.before_ms for horizon in self.horizons], default=0)
        return {**{pattern: self.before_ms(pattern) for pattern in patterns}, None: others}

    @property
    def of_all_ms(self) -> int:
        """The time before which the entries of every topic have expired; 0: none has."""
        return max([horizon.of_all for horizon in self.horizons], default=0)

    def is_over(self, second: int) -> bool:
        """Return whether the entries of every topic up to an epoch second, inclusive, have expired."""
        return second * 1000 < self.of_all_ms

    @property
    def latest_ms(self) -> int:
        """The time before which entries of some topic may have expired; 0: none has."""
        return max([horizon.latest for horizon in self.horizons], default=0)

    def keeps(
        self,
        items: Mapping[str, npt.NDArray[Any]] | npt.NDArray[Any],
        seconds: npt.NDArray[Any],
        topics: Mapping[int, str],
    ) -> npt.NDArray[np.bool_]:
        """Return which entries (bool, n) are neither expired nor erased nor replaced.

        `items` are stored items or their columns by name, `seconds` (n) their epoch seconds, `topics` the name of each
        topic id.
        """
        is_shown = np.ones(len(seconds), np.bool_)
        if self.hidden is None or not len(seconds):
            return is_shown
        ids = items["topic_id"]
        names, index = (ids[:1], None) if ids.min() == ids.max() else np.unique(ids, return_inverse=True)
        of_topics = self.hidden.of([topics.get(topic_id, "") for topic_id in names.tolist()])
        if index is None:
            return is_shown if of_topics[0] is HIDES_NOTHING else ~of_topics[0].hides(items, seconds)
        is_shown = seconds >= np.array([of_topic.begin_s for of_topic in of_topics])[index]
        some = [number for number, of_topic in enumerate(of_topics) if len(of_topic.hashes) or of_topic.by_row]
        # one sort, and not a pass over all entries for each topic: there may be tens of thousands
        order = np.argsort(index, kind="stable") if some else index
        ends = np.cumsum(np.bincount(index))
        for number in some:
            mine = order[ends[number - 1] if number else 0 : ends[number]]
            of_mine = {name: items[name][mine] for name in _names(items)}
            is_shown[mine] &= ~of_topics[number].hides(of_mine, seconds[mine])
        return is_shown

    def _hidden_of(self, topic: str) -> HiddenOf:
        begin_s, keys, queues = _begin_s(self.before_ms(topic)), list[ErasedKey](), dict[int, int]()
        for stone in self._stones.get(topic, ()):
            second = stone.before_ms // 1000
            keys += [ErasedKey(key_hash, stone.fingerprint, second) for key_hash in stone.hashes]
            if stone.queue_id is not None:
                queues[stone.queue_id] = max(second, queues.get(stone.queue_id, ALWAYS))
            elif not stone.hashes:
                begin_s = max(begin_s, second)
        ranges = [HiddenRanges(queue_id, *tables) for queue_id, tables in self.replaced.of_topic(topic).items()]
        if keys or queues or ranges:
            return HiddenOf(begin_s, keys, queues, ranges)
        # most of many topics have the same horizon
        if (known := self._horizons.get(begin_s)) is None:
            known = self._horizons[begin_s] = HiddenOf(begin_s)
        return known

    @cached_property
    def _stones(self) -> Mapping[str, list[Tombstone]]:
        """The tombstones of each topic."""
        topics: dict[str, list[Tombstone]] = {}
        for stone in self.tombstones:
            topics.setdefault(stone.topic, []).append(stone)
        return topics

    @cached_property
    def _horizons(self) -> dict[int, HiddenOf]:
        """What topics hide of which all entries before a second have expired, by the second."""
        return {ALWAYS: HIDES_NOTHING}

    def joined(self, other: Expired) -> Expired:
        """Return all that either of the two hides. If `other` adds nothing, this object itself is returned."""
        horizons = self.horizons
        for horizon in other.horizons:
            if horizon.latest and not any(known.has(horizon) for known in horizons):
                horizons = (*(known for known in horizons if not horizon.has(known)), horizon)
        segments = dict(self.segments)
        for store, end in other.segments.items():
            segments[store] = max(end, segments.get(store, 0))
        stones = self.tombstones
        if other.tombstones or (stones and horizons != self.horizons):
            met = Expired(horizons)
            stones = tuple(
                [
                    stone
                    for stone in Tombstones(self.tombstones).joined(other.tombstones)
                    if met.before_ms(stone.topic) < stone.before_ms
                ]
            )
        joined = Expired(horizons, segments, stones, self.replaced.joined(other.replaced))
        return self if joined == self else joined

    def to_json(self, stored: Mapping[str, RangeTable] = MappingProxyType({})) -> dict[str, Any]:
        """Return the fields as stored in a record. `stored` ranges, by store, are in objects."""
        horizons = [horizon.to_json() for horizon in self.horizons]
        stones = {"tombstones": [stone.to_json() for stone in self.tombstones]} if self.tombstones else {}
        members = {"horizons": horizons, "segments": dict(self.segments), **stones}
        return members if self.replaced == NOT_REPLACED else {**members, "replaced": self.replaced.to_json(stored)}


def _begin_s(before_ms: int) -> int:
    """Return the first second that has not expired. Entries may be older than the epoch."""
    return before_ms // 1000 if before_ms else ALWAYS


def _names(items: Mapping[str, npt.NDArray[Any]] | npt.NDArray[Any]) -> Iterable[str]:
    return items if isinstance(items, Mapping) else items.dtype.names or ()


NOTHING = Expired()


class _Horizon(Struct):
    before_ms: Milliseconds
    topics: dict[str, Milliseconds]


class StoredExpired(Struct):
    """Expired entries as stored in a record."""

    horizons: tuple[_Horizon, ...]
    segments: dict[str, Place]
    tombstones: tuple[Tombstone, ...] = ()
    replaced: StoredReplaced | UnsetType = UNSET

    def read(self) -> Expired:
        """Return the expired entries. Raises `ValueError` for tables of ranges that can't be some."""
        horizons = [Horizon(stored.before_ms, tuple(sorted(stored.topics.items()))) for stored in self.horizons]
        replaced = self.replaced.read() if self.replaced else NOT_REPLACED
        return Expired(tuple(horizons), self.segments, self.tombstones, replaced)
