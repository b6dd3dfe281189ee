"""Retention: the rule (`Retention`), and the hidden entries that the log states (`Expired`). Pure.

A rule depends on the clock; its horizons don't. As soon as a horizon is in the log, all readers leave out the same
entries. A horizon never moves back: entries that expired under one rule stay expired under the next. An entry of
second s has expired if s * 1000 < `before_ms` of its topic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Struct, UnsetType, structs

from tiered_index.errors import ConfigError
from tiered_index.replaced import NOT_REPLACED, RangeTable, Replaced, StoredReplaced
from tiered_index.stored import Milliseconds, Place
from tiered_index.tombstones import ALWAYS, Tombstone, Tombstones, TopicTombstones
from tiered_index.units import LONGEST_S, parse_bytes, parse_duration

TABLES_OF_TOPICS = ("topics", "segments_topics")
"""The settings of a `Retention` that are tables of ages by topic."""
_MOST_BYTES = 10**18
# a horizon moves in steps of a 24th of its age, at most an hour: each step needs a log record
_STEPS = 24
LONGEST_STEP_S = 3600
LEAST_GRACE_S = 3600.0


class Retention(Struct, frozen=True, kw_only=True):
    """The rule by which entries expire: ages, for all topics or by topic, and a limit of bytes.

    Ages are text with a unit, such as ``7d``, everywhere. As arguments of this class they can also be seconds. Bytes
    are a number, or for example ``100GiB``. Raises `ConfigError` for an impossible value.

    - `age_s`: age at which entries expire; None: never.
    - `topics`: table of ages by topic name or pattern (`debug-*`), in place of `age_s`. If several match, the longest
      age counts.
    - `max_bytes`: most bytes of files and window tables in the storage. Above it, the oldest entries expire. None: no
      bound.
    - `segments_age_s`: age at which archived segments expire, counted from their upload; None: never.
    - `segments_topics`: table of ages of archived segments by topic name or pattern, in place of `segments_age_s`. If
      several match, the longest age counts; for a segment with messages of many topics, the longest of all ages.
    - `grace_s`: time from the removal of an object to the deletion of its bytes, for readers that still use it; at
      least 1h.
    """

    age_s: float | None = None
    topics: Mapping[str, float] = msgspec.field(default_factory=dict)
    max_bytes: int | None = None
    segments_age_s: float | None = None
    segments_topics: Mapping[str, float] = msgspec.field(default_factory=dict)
    grace_s: float = 86400.0

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            age_s: float | str | None = None,
            topics: Mapping[str, float | str] = ...,
            max_bytes: int | str | None = None,
            segments_age_s: float | str | None = None,
            segments_topics: Mapping[str, float | str] = ...,
            grace_s: float | str = 86400.0,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in ("age_s", "segments_age_s", "grace_s"):
            structs.force_setattr(self, name, _number(name, getattr(self, name), parse_duration))
        structs.force_setattr(self, "max_bytes", _number("max_bytes", self.max_bytes, parse_bytes))
        for table in TABLES_OF_TOPICS:
            texts: Mapping[str, float | str] = getattr(self, table)
            ages_of_topics = {topic: _number(f"{table}.{topic}", age, parse_duration) for topic, age in texts.items()}
            structs.force_setattr(self, table, ages_of_topics)
        ages = {"age_s": self.age_s, "segments_age_s": self.segments_age_s}
        for table in TABLES_OF_TOPICS:
            ages_s: Mapping[str, float] = getattr(self, table)
            if "" in ages_s:
                raise ConfigError(f"{table} must not name an empty topic")
            ages |= {f"{table}.{pattern}": age_s for pattern, age_s in ages_s.items()}
        numbers = {**ages, "max_bytes": self.max_bytes, "grace_s": self.grace_s}
        for name, number in numbers.items():
            if number is None and name in ("age_s", "segments_age_s", "max_bytes"):
                continue
            if isinstance(number, bool) or not isinstance(number, Real):
                what = "number of bytes, or 100GiB" if name == "max_bytes" else "duration such as 7d, or seconds"
                raise ConfigError(f"{name} must be a {what}, not {number!r:.80}")
        for name, age_s in ages.items():
            if age_s is not None and not (math.isfinite(age_s) and 1 <= age_s <= LONGEST_S):
                raise ConfigError(f"{name} must be at least 1 second, not {age_s!r}")
        if self.max_bytes is not None and not 0 <= self.max_bytes <= _MOST_BYTES:
            raise ConfigError(f"max_bytes must be from 0 to {_MOST_BYTES:.15g}, not {self.max_bytes!r}")
        if not LEAST_GRACE_S <= self.grace_s <= LONGEST_S:
            raise ConfigError(
                f"grace_s must be {LEAST_GRACE_S:.0f} or more, not {self.grace_s!r}: readers may be at work"
            )

    @property
    def any(self) -> bool:
        """Whether anything can expire."""
        limits = (self.age_s, self.max_bytes, self.segments_age_s)
        return bool(self.topics or self.segments_topics) or any(limit is not None for limit in limits)

    def horizon(self, now_ms: int) -> Horizon:
        """Return the horizon at the time `now_ms`."""
        topics = sorted((pattern, _before_ms(age_s, now_ms)) for pattern, age_s in self.topics.items())
        return Horizon(_before_ms(self.age_s, now_ms), tuple(topics))

    def age_of_segments_s(self, topic: str | None) -> float | None:
        """Return the age at which archived segments of a topic expire; None: they never do.

        `topic` None: of a log with messages of many topics, so that the longest age counts.
        """
        ages_s = [age_s for pattern, age_s in self.segments_topics.items() if topic is None or _matches(topic, pattern)]
        if ages_s and topic is not None:
            return max(ages_s)
        return None if self.segments_age_s is None else max([self.segments_age_s, *ages_s])


def _number(name: str, value: Any, parsed: Callable[[str], int]) -> Any:
    try:
        return parsed(value.strip()) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error


def _matches(topic: str, pattern: str) -> bool:
    return topic == pattern or fnmatchcase(topic, pattern)


def _before_ms(age_s: float | None, now_ms: int) -> int:
    if age_s is None:
        return 0
    step_s = max(1, min(LONGEST_STEP_S, int(age_s) // _STEPS))
    return max(0, int(now_ms / 1000 - age_s) // step_s * step_s * 1000)


class Horizon(Struct, frozen=True):
    """The time before which entries have expired, for each topic.

    It is the earliest time of the patterns in `topics` that the topic matches, or `before_ms` if it matches none. Times
    are epoch milliseconds, in whole seconds; 0: nothing has expired.
    """

    before_ms: Milliseconds = 0
    topics: tuple[tuple[str, int], ...] = ()

    def of_topic(self, topic: str) -> int:
        """Return the time before which a topic's entries have expired."""
        return min([ms for pattern, ms in self.topics if _matches(topic, pattern)], default=self.before_ms)

    @property
    def of_all(self) -> int:
        """The time before which the entries of every topic have expired."""
        return min(self.before_ms, *(ms for _, ms in self.topics)) if self.topics else self.before_ms

    @property
    def latest(self) -> int:
        """The time before which entries of some topic may have expired."""
        return max(self.before_ms, *(ms for _, ms in self.topics)) if self.topics else self.before_ms

    def has(self, other: Horizon) -> bool:
        """Return whether this horizon expires all entries that `other` expires."""
        if self.of_all >= other.latest:
            return True
        return (
            [p for p, _ in self.topics] == [p for p, _ in other.topics]
            and all(mine >= its for (_, mine), (_, its) in zip(self.topics, other.topics, strict=True))
            and self.before_ms >= other.before_ms
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as stored in a record."""
        return {"before_ms": self.before_ms, "topics": dict(self.topics)}


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
