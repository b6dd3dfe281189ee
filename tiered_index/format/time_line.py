"""The time line of a packed file: an estimate of an entry's time by its offset. SPEC.md section 11.

Offsets and times grow together in a log, so the difference between a time and the line needs only a few bits. Pure.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from tiered_index.base.documents import Int32

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
# most points of a line, and entries per point
_MOST_POINTS, _ENTRIES_A_POINT = 256, 2048
# a line is computed from less than 2 * this number of items
_SAMPLE = 1 << 15
_MOST_SHIFT = 62


class TimeLine(Struct, frozen=True, dict=True):
    """Estimates an entry's time from its offset, by straight lines between points.

    `seconds` has the `time_diff_s` at offset `base` and after each 2**`shift` bytes, at least two.
    """

    base: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    shift: Annotated[int, Meta(ge=0, le=_MOST_SHIFT)]
    seconds: Annotated[tuple[Int32, ...], Meta(min_length=2)]

    @classmethod
    def through(cls, items: Array) -> TimeLine:
        """Return a line through the times of items (n >= 1, in any order), or through a sample of them."""
        points = 1 + min(_MOST_POINTS, 1 + len(items) // _ENTRIES_A_POINT)
        items = items[:: max(1, len(items) // _SAMPLE)]
        # native numbers, because others are sorted ten times as slowly
        offsets, seconds = items["offset"].astype(np.int64), items["time_diff_s"].astype(np.int64)
        base, last = int(offsets.min()), int(offsets.max())
        order = np.argsort(offsets, kind="stable")
        offsets, seconds = offsets[order], seconds[order]
        shift = min(_MOST_SHIFT, ((last - base) // (points - 1)).bit_length())
        places = np.arange(2 + (last - base >> shift)) * 2.0**shift
        return cls(base, shift, tuple(np.rint(np.interp(places, offsets - base, seconds)).astype(np.int64).tolist()))

    @cached_property
    def _table(self) -> tuple[Int64, Int64]:
        """The seconds at the points, and their rise to the next point (i64 each)."""
        seconds = np.array(self.seconds, np.int64)
        return seconds[:-1], np.diff(seconds)

    def at(self, offsets: Int64) -> Int64:
        """Return the line's times (i64, n) at offsets (i64, n), modulo 2**64."""
        seconds, rises = self._table
        above = offsets - self.base
        points = (above >> self.shift).clip(0, len(rises) - 1)
        above -= points << self.shift
        above *= rises[points]
        above >>= self.shift
        above += seconds[points]
        return above

    def to_json(self) -> dict[str, Any]:
        """Return the line as stored."""
        return {"base": self.base, "shift": self.shift, "seconds": self.seconds}
