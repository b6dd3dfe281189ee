"""The hidden entries that the log of an index states: expired, erased and replaced ones (`Expired`). Pure.

As soon as a horizon is in the log, all readers leave out the same entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Struct, UnsetType, structs

from tiered_index.base.documents import Milliseconds, Place
from tiered_index.base.retention import Horizon
from tiered_index.service.log.replaced import NOT_REPLACED, RangeTable, Replaced, StoredReplaced
from tiered_index.service.log.tombstones import ALWAYS, Tombstone, Tombstones, TopicTombstones


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
    def erased(self) -> Tombstones:
        """The tombstones, prepared for queries."""
        return Tombstones(self.tombstones)

    @property
    def for_good(self) -> Expired:
        """This without the entries that a later record shows: those of readings that are not published."""
        return (
            self if self.replaced.for_good is self.replaced else structs.replace(self, replaced=self.replaced.for_good)
        )

    def erased_of(self, topic: str) -> TopicTombstones | None:
        """Return the tombstones of a topic; None: it has none."""
        return self.erased.topics.get(topic) if self.tombstones else None

    def before_ms(self, topic: str) -> int:
        """Return the time before which a topic's entries have expired; 0: none has."""
        return max([horizon.of_topic(topic) for horizon in self.horizons], default=0)

    def limits(self) -> dict[str | None, int]:
        """Return the time before which entries have expired, for each pattern of topics, and for others by None."""
        patterns = sorted({pattern for horizon in self.horizons for pattern, _ in horizon.topics})
        others = max([horizon.before_ms for horizon in self.horizons], default=0)
        return {**{pattern: self.before_ms(pattern) for pattern in patterns}, None: others}

    def begin_of(self, topic: str) -> int:
        """Return the epoch second before which all entries of a topic have expired or were erased."""
        erased = self.erased_of(topic)
        return max(_begin_s(self.before_ms(topic)), ALWAYS if erased is None else erased.begin)

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
        is_shown = self._unexpired(seconds, items["topic_id"], topics)
        if self.tombstones and len(seconds):
            is_shown &= ~self.erased.hides(items, seconds, topics)
        if self.replaced and len(seconds):
            is_shown &= ~self.replaced.hides(items, topics)
        return is_shown

    def _unexpired(
        self, seconds: npt.NDArray[Any], topic_ids: npt.NDArray[Any], topics: Mapping[int, str]
    ) -> npt.NDArray[np.bool_]:
        if not self.latest_ms or not len(seconds) or int(seconds.min()) * 1000 >= self.latest_ms:
            return np.ones(len(seconds), np.bool_)
        # not a pass over all entries for each topic: there may be tens of thousands
        is_one = topic_ids.min() == topic_ids.max()
        ids, index = (topic_ids[:1], 0) if is_one else np.unique(topic_ids, return_inverse=True)
        horizons = [self.before_ms(topics.get(topic_id, "")) for topic_id in ids.tolist()]
        return np.asarray(seconds >= np.array(list(map(_begin_s, horizons)))[index])

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
                    for stone in self.erased.joined(other.tombstones)
                    if met.before_ms(stone.topic) < stone.before_ms
                ]
            )
        joined = Expired(horizons, segments, stones, self.replaced.joined(other.replaced))
        return self if joined == self else joined

    def __bool__(self) -> bool:
        return bool(self.horizons or self.segments or self.tombstones or self.replaced)

    def to_json(self, stored: Mapping[str, RangeTable] = MappingProxyType({})) -> dict[str, Any]:
        """Return the fields as stored in a record. `stored` ranges, by store, are in objects."""
        horizons = [horizon.to_json() for horizon in self.horizons]
        stones = {"tombstones": [stone.to_json() for stone in self.tombstones]} if self.tombstones else {}
        members = {"horizons": horizons, "segments": dict(self.segments), **stones}
        return members if self.replaced == NOT_REPLACED else {**members, "replaced": self.replaced.to_json(stored)}


def _begin_s(before_ms: int) -> int:
    """Return the first second that has not expired. Entries may be older than the epoch."""
    return before_ms // 1000 if before_ms else ALWAYS


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
