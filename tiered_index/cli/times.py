"""Times as the command line takes and prints them: epoch milliseconds or ISO 8601; without a zone it is UTC."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import typer

from tiered_index.types import MAX_TIMESTAMP_MS

__all__ = ["format_time", "parse_time", "time_option"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


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
        time_ms = (moment - _EPOCH) // timedelta(milliseconds=1)
    if not 0 <= time_ms <= MAX_TIMESTAMP_MS:
        raise ValueError(f"{text!r} lies outside 1970 to 9999")
    return time_ms


def time_option(text: str | int) -> int:
    """Return `parse_time(text)`, an error as bad usage; what is parsed already passes."""
    if isinstance(text, int):
        return text
    try:
        return parse_time(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def format_time(time_ms: int | None) -> str:
    """Return an ISO 8601 time in UTC, with milliseconds only where there are any; empty for None."""
    if time_ms is None:
        return ""
    moment = _EPOCH + timedelta(milliseconds=time_ms)
    return moment.isoformat(timespec="milliseconds" if time_ms % 1000 else "seconds").replace("+00:00", "Z")
