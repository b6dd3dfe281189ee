"""The rule of retention (`Retention`), and the horizon that it has at a time (`Horizon`). Pure.

A rule depends on the clock; its horizons don't. A horizon never moves back: entries that expired under one rule stay
expired under the next. An entry of second s has expired if s * 1000 < `before_ms` of its topic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from numbers import Real
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct, structs

from tiered_index.base.documents import Milliseconds
from tiered_index.base.units import LONGEST_S, parse_bytes, parse_duration
from tiered_index.errors import ConfigError

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
