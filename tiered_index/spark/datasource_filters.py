"""Which entries a read of the data source is for: what options ask for, narrowed by the filters that Spark pushes. Pure.

A selection never leaves out an entry that passes all filters, and Spark evaluates each filter again. Only `key` is more than that: an
entry holds no key's text, so the column is null but where `key =` or `IN` says which texts to look for. A filter that needs the key
without saying it would silently find nothing; it is refused.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tiered_index.errors import InvalidArgument
from tiered_index.service.answers.validation import check_key, check_range, check_topic
from tiered_index.spark.datasource_options import Options

__all__ = ["EARLIEST", "LATEST", "Selection"]

EARLIEST, LATEST = -(2**62), 2**62
"""Seconds that no entry passes."""
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_SECOND = dt.timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class Selection:
    """Entries of any of `topics`, `keys` and `hashes` (None: of all), in the inclusive range of seconds."""

    topics: frozenset[str] | None = None
    keys: frozenset[str] | None = None
    hashes: frozenset[int] | None = None
    second_min: int = EARLIEST
    second_max: int = LATEST

    @classmethod
    def of_options(cls, options: Options) -> Selection:
        """Return what the options topic, key, beginMs and endMs (inclusive, epoch milliseconds) ask for, by the rules of `query`."""
        topic, key = options.text("topic"), options.text("key")
        begin, end = options.number("beginMs"), options.number("endMs")
        low, high, _ = check_range(begin, end, 1)
        return cls(
            None if topic is None else frozenset([check_topic(topic)]), None if key is None else frozenset([check_key(key)]), None,
            EARLIEST if begin is None else low, LATEST if end is None else high,
        )  # fmt: skip

    @property
    def is_empty(self) -> bool:
        """Whether nothing can be in it."""
        return self.second_min > self.second_max or any(some is not None and not some for some in (self.topics, self.keys, self.hashes))

    @property
    def is_lookup(self) -> bool:
        """Whether hashes say which slots to read."""
        return self.keys is not None or self.hashes is not None

    def narrowed(self, filters: Iterable[Any]) -> Selection:
        """Return the selection under further filters (`pyspark.sql.datasource.Filter`), all of which hold; others are left to Spark."""
        selection = self
        for pushed in filters:
            column, kind = _column_of(pushed), type(pushed).__name__
            values = _equal_values(pushed)
            if column == "topic" and values is not None:
                selection = replace(selection, topics=_both(selection.topics, _valid(values, check_topic)))
            elif column == "key" and values is not None:
                selection = replace(selection, keys=_both(selection.keys, _valid(values, check_key)))
            elif column == "key_hash" and values is not None:
                selection = replace(selection, hashes=_both(selection.hashes, frozenset(v for v in values if type(v) is int)))
            elif column == "timestamp":
                selection = _within(selection, kind, [pushed.value] if values is None and hasattr(pushed, "value") else values or [])
        return selection

    def check_keys_known(self, filters: Iterable[Any], advice: str) -> None:
        """Raise `InvalidArgument` where a filter needs the column `key` and no key is asked for; `advice` ends the error's text."""
        if self.keys is None and any(_column_of(pushed) == "key" and type(pushed).__name__ != "IsNull" for pushed in filters):
            raise InvalidArgument(
                f"entries have hashes of keys, not their texts: the column key is null here, and no filter on it holds; {advice}"
            )


def _column_of(pushed: Any) -> str:
    """Return the name of a filter's column; a schema of the user may have it in other letters."""
    while hasattr(pushed, "child"):
        pushed = pushed.child
    return ".".join(getattr(pushed, "attribute", ())).lower()


def _equal_values(pushed: Any) -> Sequence[Any] | None:
    """Return the values one of which the column must have, None for filters of other kinds."""
    kind = type(pushed).__name__
    if kind in ("EqualTo", "EqualNullSafe") and pushed.value is not None:
        return [pushed.value]
    return list(pushed.value) if kind == "In" else None


def _valid(values: Iterable[Any], check: Callable[[object], str]) -> frozenset[str]:
    """Return the values that an entry can have."""
    found = set()
    for value in values:
        try:
            found.add(check(value))
        except InvalidArgument:
            continue  # nothing was ever put under it
    return frozenset(found)


def _both(before: frozenset[Any] | None, values: frozenset[Any]) -> frozenset[Any]:
    return values if before is None else before & values


def _within(selection: Selection, kind: str, values: Sequence[Any]) -> Selection:
    """Narrow by a filter of the timestamp, whose literals are aware of their zone; a bound within a second takes all of it."""
    if not values or not all(isinstance(value, dt.datetime) and value.tzinfo is not None for value in values):
        return selection
    seconds = [(value - _EPOCH) // _SECOND for value in values]
    low, high = selection.second_min, selection.second_max
    if kind in ("GreaterThan", "GreaterThanOrEqual", "EqualTo", "EqualNullSafe", "In"):
        low = max(low, min(seconds))
    if kind in ("LessThan", "LessThanOrEqual", "EqualTo", "EqualNullSafe", "In"):
        high = min(high, max(seconds))
    return replace(selection, second_min=low, second_max=high)
