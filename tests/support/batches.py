"""Columns for `put_batch`."""

from __future__ import annotations

from typing import Any


def batch(count: int, **columns: Any) -> dict[str, Any]:
    """Return `count` entries, of topic t and key k unless `columns` says others; a plain value is that of all."""
    plain = {
        "topic": "t",
        "queue_id": 0,
        "key": "k",
        "offset": range(count),
        "size": 1,
        "timestamp_ms": 1_700_000_000_000,
    }
    given = plain | columns
    return {name: [value] * count if isinstance(value, str | int) else value for name, value in given.items()}
