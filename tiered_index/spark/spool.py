"""A piece that is too large to be sorted in memory, because it has a hot key: cut by time on local disk.

Items are appended to a file, then moved into another one by ranges of seconds, newest first, each of about so many items: two passes, and
one more to count. A single second is never divided. Memory: a few MiB and one range. Threads: one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import numpy.typing as npt

__all__ = ["Spool"]

_CHUNK = 1 << 17
_BINS = 1 << 16
Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]


class Spool:
    """Items (structured, with `time_diff_s`) of one piece."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.count = 0
        self._dtype = dtype
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="tiered-index-")  # noqa: SIM115 - `close` closes it
        self._low, self._high = 2**31 - 1, 0

    def add(self, items: Array) -> None:
        """Append items."""
        self._low = min(self._low, int(items["time_diff_s"].min()))
        self._high = max(self._high, int(items["time_diff_s"].max()))
        self._file.write(items.tobytes())
        self.count += len(items)

    def parts(self, most: int) -> Iterator[Array]:
        """Yield the items in ranges of seconds, newest first, each of about `most` items at most unless one second has more."""
        lows, counts = self._ranges(most)
        starts = np.cumsum(counts) - counts
        with tempfile.TemporaryFile(prefix="tiered-index-") as ordered:
            written = np.zeros(len(counts), np.int64)
            for items in self._chunks():
                # ranges are newest first: a range has the seconds from its low up to the low of the one before
                of = np.searchsorted(-lows, -items["time_diff_s"].astype(np.int64), "left")
                order = np.argsort(of, kind="stable")
                items, of = items[order], of[order]
                firsts = np.flatnonzero(np.diff(of, prepend=-1))
                for first, stop in zip(firsts.tolist(), [*firsts[1:].tolist(), len(of)], strict=True):
                    number = int(of[first])
                    ordered.seek(int(starts[number] + written[number]) * self._dtype.itemsize)
                    ordered.write(items[first:stop].tobytes())
                    written[number] += stop - first
            for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
                ordered.seek(start * self._dtype.itemsize)
                yield np.frombuffer(ordered.read(count * self._dtype.itemsize), self._dtype)

    def close(self) -> None:
        """Give the file back."""
        self._file.close()

    def _chunks(self) -> Iterator[Array]:
        self._file.seek(0)
        while data := self._file.read(_CHUNK * self._dtype.itemsize):
            yield np.frombuffer(data, self._dtype)

    def _ranges(self, most: int) -> tuple[Int64, Int64]:
        """Return the first second of each range (newest first) and its items."""
        lows: list[int] = []
        counts: list[int] = []
        bins = self._histogram(self._low, self._high)
        for low, high, count in reversed(bins):
            # a bin that is too large is looked at again by itself, second by second or by finer bins
            finer = [(low, high, count)]
            while any(c > most and h > lo for lo, h, c in finer):
                finer = [part for lo, h, c in finer for part in (self._histogram(lo, h) if c > most and h > lo else [(lo, h, c)])]
            for begin, _, number in reversed(finer):
                if counts and counts[-1] + number <= most:
                    lows[-1], counts[-1] = begin, counts[-1] + number
                else:
                    lows.append(begin)
                    counts.append(number)
        return np.array(lows, np.int64), np.array(counts, np.int64)

    def _histogram(self, low: int, high: int) -> list[tuple[int, int, int]]:
        """Return (first second, last second, items) of the ranges of equal length within [low, high] that have any, oldest first."""
        width = -(-(high - low + 1) // _BINS)
        counts = np.zeros(-(-(high - low + 1) // width), np.int64)
        for items in self._chunks():
            seconds = items["time_diff_s"].astype(np.int64)
            inside = seconds[(seconds >= low) & (seconds <= high)]
            counts += np.bincount((inside - low) // width, minlength=len(counts))
        used = np.flatnonzero(counts)
        begins = low + used * width
        return list(zip(begins.tolist(), np.minimum(begins + width - 1, high).tolist(), counts[used].tolist(), strict=True))
