"""Points in time as people write them: epoch milliseconds or ISO 8601, UTC where no zone is given. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from tiered_index.types import MAX_TIMESTAMP_MS

__all__ = ["EPOCH", "parse_time"]

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def parse_time(text: str) -> int:
    """Return epoch milliseconds of ``1700000000000``, ``2023-11-14T22:13:20Z``, ``2023-11-14 22:13:20+08:00`` or ``2023-11-14``.

    A date alone is its midnight. Raises `ValueError` naming the text.
    """
    text = text.strip()
    if text.isascii() and text.isdigit():
        time_ms = int(text)
    else:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError as error:
            raise ValueError(f"{text!r} is neither epoch milliseconds nor an ISO 8601 time such as 2023-11-14T22:13:20Z") from error
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        time_ms = (moment - EPOCH) // timedelta(milliseconds=1)
    if not 0 <= time_ms <= MAX_TIMESTAMP_MS:
        raise ValueError(f"{text!r} lies outside 1970 to 9999")
    return time_ms
