"""The lookups of a batch as columns, and the checks of their arguments. Pure; any thread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Self, overload

import numpy as np
import numpy.typing as npt

from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.errors import InvalidArgument
from tiered_index.service.read.answers.rows import check_range
from tiered_index.types import Lookup

# most answers of one lookup, so that one more does not overflow
_MOST = 2**62
_FIELDS = [field.name for field in fields(Lookup)]


@dataclass(frozen=True, slots=True)
class LookupColumns(Sequence[Lookup]):
    """n unchecked lookups, as a list of n values for each field of a `Lookup`, which is made on access."""

    topics: list[str]
    keys: list[str]
    begins_ms: list[int | None]
    ends_ms: list[int | None]
    max_counts: list[int]
    cursors: list[str | None]

    @classmethod
    def of(cls, lookups: Sequence[Lookup]) -> Self:
        """Return the columns of lookups."""
        return cls(*(list(map(attrgetter(name), lookups)) for name in _FIELDS))

    def __len__(self) -> int:
        return len(self.topics)

    @overload
    def __getitem__(self, index: int) -> Lookup: ...
    @overload
    def __getitem__(self, index: slice) -> list[Lookup]: ...
    def __getitem__(self, index: int | slice) -> Lookup | list[Lookup]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        columns: list[list[Any]] = [getattr(self, field.name) for field in fields(self)]
        return Lookup(*(column[index] for column in columns))

    def counts_of_topics(self) -> dict[str, int]:
        """Return the sum of `max_count` for each topic."""
        counts = dict.fromkeys(self.topics, 0)
        if len(counts) == 1:
            # the common case takes a tenth of the time
            return dict.fromkeys(counts, sum(self.max_counts))
        for topic, count in zip(self.topics, self.max_counts, strict=True):
            counts[topic] += count
        return counts

    def ranges(self) -> tuple[npt.NDArray[np.int64], ...]:
        """Return the first second, last second and count of each lookup (i64, n each), as `check_range` does."""
        low, high = _numbers(self.begins_ms, 0), _numbers(self.ends_ms, MAX_TIMESTAMP_MS)
        count = _numbers(self.max_counts)
        if low is not None and high is not None and count is not None and (low <= high).all() and (count >= 1).all():
            return low // 1000, high // 1000, np.minimum(count, _MOST)
        ranges = zip(self.begins_ms, self.ends_ms, self.max_counts, strict=True)
        checked = [check_range(*bounds, f"lookup {number}: ") for number, bounds in enumerate(ranges)]
        table = np.array([(low, high, min(count, _MOST)) for low, high, count in checked], np.int64).reshape(-1, 3)
        return table[:, 0], table[:, 1], table[:, 2]


def _numbers(values: Sequence[int | None], absent: int | None = None) -> npt.NDArray[np.int64] | None:
    """Return values (i64, n), with `absent` in place of None. Return None if they need a check one by one."""
    if absent is not None:
        if values.count(None) == len(values):
            return np.full(len(values), absent, np.int64)
        values = [absent if value is None else value for value in values]
    if not set(map(type, values)) <= {int}:
        return None
    try:
        if values and values.count(values[0]) == len(values):
            return np.full(len(values), values[0], np.int64)
        return np.array(values, np.int64)
    except OverflowError:
        return None


def check_lookups(lookups: Iterable[Lookup | tuple[str, str]], max_count: int = 64) -> Sequence[Lookup]:
    """Return the lookups of a batch. A (topic, key) pair becomes a lookup of `max_count`. Raises `InvalidArgument`."""
    if isinstance(lookups, LookupColumns):
        return lookups
    try:
        listed = list(lookups)
    except TypeError as error:
        raise InvalidArgument(f"lookups must be an iterable of Lookup or (topic, key), not {lookups!r:.80}") from error
    if listed and set(map(type, listed)) == {tuple} and set(map(len, listed)) == {2}:  # type: ignore[arg-type]
        # the common case, without an object per pair: a batch has thousands
        pairs: list[tuple[Any, Any]] = listed  # type: ignore[assignment]
        topics, keys = [topic for topic, _ in pairs], [key for _, key in pairs]
        if set(map(type, topics)) == set(map(type, keys)) == {str}:
            nothing: list[Any] = [None] * len(listed)
            return LookupColumns(topics, keys, nothing, nothing, [max_count] * len(listed), nothing)
    return [
        lookup if isinstance(lookup, Lookup) else _lookup(number, lookup, max_count)
        for number, lookup in enumerate(listed)
    ]


def _lookup(number: int, pair: object, max_count: int) -> Lookup:
    match pair:
        case (str(topic), str(key)):
            return Lookup(topic, key, max_count=max_count)
    raise InvalidArgument(f"lookup {number} must be a Lookup or (topic, key), not {pair!r:.80}")
