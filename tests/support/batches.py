"""Columns for `put_batch`."""

from collections.abc import Iterable
from typing import Any


def batch(count: int, **columns: Any) -> dict[str, Any]:
    """Return `count` entries of topic t and key k. `columns` replaces columns; a single value is for all entries."""
    plain = {
        "topic": "t",
        "queue_id": 0,
        "key": "k",
        "offset": range(count),
        "size": 1,
        "timestamp_ms": 1_700_000_000_000,
    }
    all_columns = plain | columns
    return {name: [value] * count if isinstance(value, str | int) else value for name, value in all_columns.items()}


def columns_of(rows: Iterable[tuple[Any, ...]]) -> dict[str, list[Any]]:
    """Return rows of topic, queue, key, offset, size and time (ms) as columns."""
    names = ("topic", "queue_id", "key", "offset", "size", "timestamp_ms")
    rows = list(rows)
    return {name: [row[at] for row in rows] for at, name in enumerate(names)}
