"""Times as the command line takes and prints them: epoch milliseconds or ISO 8601 (UTC without a zone), and durations such as ``1d``."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import typer

from tiered_index.types import MAX_TIMESTAMP_MS

__all__ = ["duration_option", "format_time", "human_duration", "parse_duration", "parse_time", "time_option"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS_S = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_MAX_DURATION_S = MAX_TIMESTAMP_MS // 1000


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
    return _option(text, parse_time)


def format_time(time_ms: int | None) -> str:
    """Return an ISO 8601 time in UTC, with milliseconds only where there are any; empty for None."""
    if time_ms is None:
        return ""
    moment = _EPOCH + timedelta(milliseconds=time_ms)
    return moment.isoformat(timespec="milliseconds" if time_ms % 1000 else "seconds").replace("+00:00", "Z")


def parse_duration(text: str) -> int:
    """Return the seconds of ``1d``, ``12h``, ``30m``, ``90s`` or ``90``. Raises `ValueError` naming the text."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS_S else (text, "s")
    if not (number.isascii() and number.isdigit()):
        raise ValueError(f"{text!r} is no duration: give a whole number and d, h, m or s, such as 1d or 12h")
    if (seconds := int(number) * _UNITS_S[unit]) > _MAX_DURATION_S:
        raise ValueError(f"{text!r} is longer than all time there is")
    return seconds


def duration_option(text: str | int) -> int:
    """Return `parse_duration(text)`, an error as bad usage; what is parsed already passes."""
    return _option(text, parse_duration)


def human_duration(seconds: int) -> str:
    """Return a duration in the largest unit that divides it: ``30d``, ``90m``."""
    unit = next(unit for unit, size in _UNITS_S.items() if not seconds % size)
    return f"{seconds // _UNITS_S[unit]}{unit}"


def _option(text: str | int, parse: Callable[[str], int]) -> int:
    if isinstance(text, int):
        return text
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
