"""Times that are written without a zone, by the clocks of a place such as Europe/Berlin. One thread a `TimeZone`."""

from __future__ import annotations

import zoneinfo
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.errors import InvalidArgument

_DAY_S = 86_400
# the 400 years after which the calendar repeats itself, days of the week included, and times that Python may not have
_CYCLE_MS, _FAR_MS = 146_097 * _DAY_S * 1000, 250_000_000_000_000
# years between two times that are few enough to learn all of them
_FEW_YEARS = 10


class UnclearTimes(NamedTuple):
    """The numbers of times that clocks show twice, when they are put back, and of those that they leave out."""

    doubled: int = 0
    missing: int = 0

    def texts(self, zone: str) -> list[str]:
        """Return for people which times of the clocks of a zone were read, and how; nothing, if there were none."""
        told = {
            f"that the clocks of {zone} show twice, when they are put back: the first one counts": self.doubled,
            f"that the clocks of {zone} leave out: read as if they had not been put forward yet": self.missing,
        }
        return [f"{count:,} {'time' if count == 1 else 'times'} {text}" for text, count in told.items() if count]

    def plus(self, other: UnclearTimes) -> UnclearTimes:
        """Return the sums of both."""
        return UnclearTimes(self.doubled + other.doubled, self.missing + other.missing)


class _Change(NamedTuple):
    """A change of the clocks, in seconds: `offset` is theirs to UTC until they show `until`.

    From `unclear_from` on they show times that they show again, if `is_back`, or that they leave out.
    """

    until: int
    offset: int
    unclear_from: int
    is_back: bool


class _Table(NamedTuple):
    """Changes of the clocks by time, as arrays; milliseconds."""

    until_ms: npt.NDArray[np.int64]
    offsets_ms: npt.NDArray[np.int64]
    unclear_from_ms: npt.NDArray[np.int64]
    is_back: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, changes: Sequence[_Change]) -> _Table:
        seconds = np.array([change[:3] for change in changes], np.int64) * 1000
        is_back = np.array([change.is_back for change in changes])
        return cls(np.maximum.accumulate(seconds[:, 0]), seconds[:, 1], seconds[:, 2], is_back)


def _year_of(at_ms: Any) -> Any:
    """Return the year of a time, or of each of some (n), in milliseconds."""
    return at_ms.astype("datetime64[ms]").astype("datetime64[Y]").astype(np.int64) + 1970


class TimeZone:
    """A time zone of the IANA database, which converts times of its clocks. `unclear` counts what it has converted.

    Of a time that the clocks show twice, the first one counts. One that they leave out is read as if they had not been
    put forward yet: in Berlin 02:30 is 03:30 then. Python's `zoneinfo` does the same, with `fold` 0. Raises
    `InvalidArgument` for an unknown zone.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            self._zone = zoneinfo.ZoneInfo(name)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise InvalidArgument(
                f"{name!r:.80} is no time zone that this system knows: give a name such as Europe/Berlin, or install "
                "the package tzdata if no zone is known"
            ) from error
        self.unclear = UnclearTimes()
        self._changes: dict[int, list[_Change]] = {}

    def epoch_ms(self, local_ms: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the epoch milliseconds (n) of times of the clocks (n), which are milliseconds as if they were UTC."""
        if not len(local_ms):
            return local_ms
        # a time that is out of range stays so
        near_ms = np.clip(local_ms, 0, MAX_TIMESTAMP_MS)
        near_ms = np.where(near_ms < _FAR_MS, near_ms, near_ms - _CYCLE_MS)
        first, last = (_year_of(at_ms) for at_ms in (near_ms.min(), near_ms.max()))
        years = range(first, last + 1) if last - first < _FEW_YEARS else np.unique(_year_of(near_ms)).tolist()
        if new := {each for year in years for each in (year - 1, year)} - self._changes.keys():
            self._changes |= {year: list(self._changes_of(year)) for year in new}
            self._table = _Table.of([change for year in sorted(self._changes) for change in self._changes[year]])
        table = self._table
        # the next change of the clocks, and whether they show the time twice, or not at all, because of it
        change = np.minimum(np.searchsorted(table.until_ms, near_ms, side="right"), len(table.until_ms) - 1)
        is_unclear = (near_ms >= table.unclear_from_ms[change]) & (near_ms < table.until_ms[change])
        if is_unclear.any():
            doubled = int((is_unclear & table.is_back[change]).sum())
            self.unclear = self.unclear.plus(UnclearTimes(doubled, int(is_unclear.sum()) - doubled))
        return local_ms - table.offsets_ms[change]

    def _changes_of(self, year: int) -> Iterator[_Change]:
        """Yield the changes of the clocks from 16 January of a year on, and one that is none at the end of 12 months.

        A zone rarely changes its clocks in January. A year costs some hundred calls.
        """
        begin, end = (int(datetime(each, 1, 16, tzinfo=UTC).timestamp()) for each in (year, year + 1))
        before_s = self._offset_s(begin)
        for day in range(begin, end, _DAY_S):
            if (after_s := self._offset_s(min(day + _DAY_S, end))) == before_s:
                continue
            low, high = day, min(day + _DAY_S, end)
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self._offset_s(middle) == before_s else (low, middle)
            yield _Change(high + max(before_s, after_s), before_s, high + min(before_s, after_s), after_s < before_s)
            before_s = after_s
        yield _Change(end + before_s, before_s, end + before_s, False)

    def _offset_s(self, at_s: int) -> int:
        offset = datetime.fromtimestamp(at_s, self._zone).utcoffset()
        assert offset is not None, "a zone has an offset"
        return int(offset.total_seconds())
