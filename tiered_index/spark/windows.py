"""Windows of time: their length as text, the window of a second, and quarantine windows for wrong clocks. Pure.

Windows are aligned to the epoch, UTC. A second outside the plausible range lies in a *quarantine window* of 2**31
seconds (68 years), whose tables no merge touches: however wrong a clock is, up to the year 9999 there are at most 118
of these.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiered_index.errors import InvalidArgument

__all__ = ["QUARANTINE_S", "WindowScale", "window_seconds"]

# Length of a quarantine window: what a time difference of 32 bits can say.
QUARANTINE_S = 1 << 31
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LENGTH = re.compile(r"([0-9]{1,9})\s*([smhd]?)")
_LONGEST_S = 100 * 366 * 86400 // 2


def window_seconds(window: str | int) -> int:
    """Return the length of ``90s``, ``15m``, ``1h``, ``1d`` or of a number of seconds. Raises `InvalidArgument`."""
    found = _LENGTH.fullmatch(str(window).strip().lower())
    seconds = int(found[1]) * _UNITS[found[2] or "s"] if found else 0
    if not 1 <= seconds <= _LONGEST_S:
        raise InvalidArgument(f"a window is like 1h, 1d, 7d or a number of seconds up to 50 years, not {window!r}")
    return seconds


@dataclass(frozen=True, slots=True)
class WindowScale:
    """Windows of `window_s` for seconds within [`plausible_min`, `plausible_max`], quarantine windows for others."""

    window_s: int
    plausible_min: int
    plausible_max: int

    def begins(self, seconds: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return where each second's window begins (i64, n), and whether that is a quarantine window (bool, n)."""
        wrong = (seconds < self.plausible_min) | (seconds > self.plausible_max)
        length = np.where(wrong, QUARANTINE_S, self.window_s)
        return seconds // length * length, wrong
