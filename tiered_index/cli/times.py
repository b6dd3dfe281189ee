"""Times (epoch milliseconds or ISO 8601, UTC without a zone) and durations such as ``1d`` on the command line."""

from __future__ import annotations

from collections.abc import Callable

import typer

from tiered_index.types import MAX_TIMESTAMP_MS, parse_time
from tiered_index.types import format_time as format_time  # of this module, too: commands show and parse times

_UNITS_S = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_MAX_DURATION_S = MAX_TIMESTAMP_MS // 1000


def parse_duration(text: str) -> int:
    """Return the seconds of ``1d``, ``12h``, ``30m``, ``90s`` or ``90``. Raises `ValueError` naming the text."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS_S else (text, "s")
    if not (number.isascii() and number.isdigit()):
        raise ValueError(f"{text!r} is no duration: give a whole number and d, h, m or s, such as 1d or 12h")
    if (seconds := int(number) * _UNITS_S[unit]) > _MAX_DURATION_S:
        raise ValueError(f"{text!r} is longer than all time there is")
    return seconds


def human_duration(seconds: int) -> str:
    """Return a duration in the largest unit that divides it: ``30d``, ``90m``."""
    unit = next(unit for unit, size in _UNITS_S.items() if not seconds % size)
    return f"{seconds // _UNITS_S[unit]}{unit}"


def _option(parse: Callable[[str], int]) -> Callable[[str | int], int]:
    """Return `parse` for an option: its error is bad usage; a default, parsed already, passes."""

    def option(text: str | int) -> int:
        try:
            return text if isinstance(text, int) else parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return option


time_option, duration_option = _option(parse_time), _option(parse_duration)
