"""Durations and sizes as people write them: ``1d``, ``30m``, ``100GiB``. Pure."""

from __future__ import annotations

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
