"""Times, durations and sizes as people write them: ``2026-11-29T14:05Z``, ``1d``, ``30m``, ``100GiB``. Pure."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise

UNITS_S = {"d": 86400, "h": 3600, "m": 60, "s": 1}
"""The seconds of each unit of a duration, the longest first."""
_UNITS_BYTES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
LONGEST_S = 253_402_300_799
"""The longest duration: to the end of the year 9999."""


def parse_duration(text: str) -> int:
    """Return the seconds of ``1d``, ``12h``, ``30m`` or ``90s``. Only ``0`` needs no unit.

    Raises `ValueError` naming the text.
    """
    number, unit = (text[:-1], text[-1]) if text[-1:] in UNITS_S else (text, "s")
    if number == text and text != "0" and text.isascii() and text.isdigit():
        # the caller may mean days: as seconds, an age of 7 would delete almost everything
        raise ValueError(f"{text!r} has no unit: give {text}d, {text}h, {text}m or {text}s")
    if not (number.isascii() and number.isdigit()):
        raise ValueError(f"{text!r} is not a duration: give a whole number and d, h, m or s, such as 1d or 12h")
    if (seconds := int(number) * UNITS_S[unit]) > LONGEST_S:
        raise ValueError(f"{text!r} is too long")
    return seconds


def human_duration(seconds: int) -> str:
    """Return a duration in the largest unit that divides it: ``30d``, ``90m``."""
    unit = next(unit for unit, size in UNITS_S.items() if not seconds % size)
    return f"{seconds // UNITS_S[unit]}{unit}"


def parse_tiers(text: str) -> list[int]:
    """Return the seconds of windows such as ``1d,30d``, the shortest first.

    Raises `ValueError` unless each is a multiple of the one before.
    """
    windows = sorted({parse_duration(part.strip()) for part in text.split(",")})
    if not windows[0]:
        raise ValueError("0 is no length of a window: give a whole number and d, h, m or s, such as 1d")
    for shorter, longer in pairwise(windows):
        if longer % shorter:
            raise ValueError(
                f"{human_duration(longer)} is not a multiple of {human_duration(shorter)}: windows overlap"
            )
    return windows


def parse_bytes(text: str) -> int:
    """Return the bytes of ``100GiB`` (or KiB, MiB, TiB) or of a number. Raises `ValueError` naming the text."""
    number, unit = (text[:-3], text[-3:]) if text[-3:] in _UNITS_BYTES else (text, "")
    if not (number.isascii() and number.isdigit() and len(number) <= 18):
        raise ValueError(f"{text!r} is not a size: give a whole number of bytes, or of KiB, MiB, GiB or TiB")
    return int(number) * _UNITS_BYTES.get(unit, 1)


# Greatest timestamp: the last millisecond of the year 9999, UTC; the smallest is 0
MAX_TIMESTAMP_MS = 253_402_300_799_999
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAY_MS = 86_400_000


def format_time(time_ms: int | None) -> str:
    """Return an ISO 8601 time in UTC, with milliseconds unless they are 0; an empty text for None."""
    if time_ms is None:
        return ""
    moment = EPOCH + timedelta(milliseconds=time_ms)
    return moment.isoformat(timespec="milliseconds" if time_ms % 1000 else "seconds").replace("+00:00", "Z")


def parse_time(text: str, *, end: bool = False) -> int:
    """Return the epoch milliseconds of a bound of a range, given as text that `exact_time` accepts.

    A date alone is its midnight; as the inclusive `end` of a range it is the day's last millisecond. A time outside
    1970 to 9999 becomes the nearest time within. Raises `ValueError` naming the text.
    """
    time_ms = exact_time(text) + (_DAY_MS - 1 if end and _is_date(text.strip()) else 0)
    return min(max(time_ms, 0), MAX_TIMESTAMP_MS)


LIKELY_SECONDS = 631_152_000, 4_102_444_800
"""The seconds since 1970 of the years 1990 to 2100, from and before: numbers in them have one likely unit."""


# The second of a time, if it is a leap second
_LEAP_SECOND = re.compile(r"(?<=[0-9]{2}:[0-9]{2}:)60(?![0-9])")
# A zone with 60 minutes or seconds or more, which Python reads as further hours or minutes
_WRONG_ZONE = re.compile(r"[+-]\d\d:?(?:[6-9]\d|\d\d:?[6-9]\d)(?:[:.]\d+)?$", re.ASCII)
# A blank before a zone: Python reads none after a fraction of a second
_BLANK_BEFORE_ZONE = re.compile(r"(:\d\d|[.,]\d+) (?=(?:Z|[+-]\d[\d:.]*)$)", re.ASCII)


def exact_time(text: str) -> int:
    """Return the epoch milliseconds of a text: a number of epoch milliseconds, or an ISO 8601 time.

    Examples: ``1700000000000``, ``2023-11-14T22:13:20.123456789Z``, ``2023-11-14 22:13:20+08:00``, ``2023-11-14``.
    Without a zone the time is UTC. A blank may stand before the zone. Digits of a second after the third are cut. A
    leap second (``23:59:60``) is the second after it. Raises `ValueError` naming the text.
    """
    return time_with_zone(text)[0]


def time_with_zone(text: str) -> tuple[int, bool]:
    """Return a time as `exact_time`, and whether it is one of UTC or of a zone in the text."""
    text = text.strip()
    if text.isascii() and text.removeprefix("-").isdigit():
        return int(text), True
    try:
        if _WRONG_ZONE.search(text):
            raise ValueError("a zone has at most 59 minutes")
        text_in_capitals = text.removesuffix("z") + "Z" if text.endswith("z") else text
        text_without_leap, leaps = _LEAP_SECOND.subn("59", _BLANK_BEFORE_ZONE.sub(r"\1", text_in_capitals))
        moment = datetime.fromisoformat(text_without_leap)
        has_zone = moment.tzinfo is not None
        if not has_zone:
            moment = moment.replace(tzinfo=UTC)
        time_ms = (moment - EPOCH) // timedelta(milliseconds=1) + leaps * 1000
        # only the last second of a month can be one
        if leaps and (EPOCH + timedelta(seconds=time_ms // 1000)).strftime("%d%H%M%S") != "01000000":
            raise ValueError("no leap second")
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f"{text!r} is neither epoch milliseconds nor an ISO 8601 time such as 2023-11-14T22:13:20Z"
        ) from error
    return time_ms, has_zone


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True
