"""A simulated year: an hourly file of few entries each, merged to days and to windows of 30 days; GETs a lookup before
and after.

A writer makes the files. The clock stands at the year's end, so the newest window of 30 days may not be over. Objects
lie in memory. One thread.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.benchmarks.machine.figures import Table
from tests.benchmarks.machine.setting import require
from tests.support.batches import batch
from tests.support.cold_index import without_summary
from tests.support.log_records import open_log
from tests.support.unsynced_disk import UnsyncedDisk
from tiered_index.clock import ManualClock
from tiered_index.config import IndexConfig
from tiered_index.service.index import IndexService
from tiered_index.service.merge.run import MergeOptions, merge
from tiered_index.service.reader import IndexReader
from tiered_index.storage.memory import MemoryStorage

HOUR_S, DAY_S, MONTH_S = 3600, 86_400, 30 * 86_400
_BEGIN_S = 1_700_000_000 // MONTH_S * MONTH_S
_TOPIC = "orders"
_IN_ALL, _ABSENT = "in-every-hour", "nobody's"
_ENTRIES = 8
# files that are uploaded at once: each holds two descriptors until then
_AT_ONCE = 48
_RANGES = {"1 day": 1, "7 days": 7, "30 days": 30, "90 days": 90, "180 days": 180, "all": 0}


class YearOfFiles:
    """`hours` files in a storage of their own; `merge` merges what is over."""

    def __init__(self, hours: int) -> None:
        self.hours = hours
        # two hours after the last file, so that its day is old enough to be merged
        self.clock = ManualClock((self.end_s + 2 * HOUR_S) * 1000)
        self.storage = MemoryStorage(clock=self.clock)
        settings: dict[str, Any] = {"slots": 16, "items": _ENTRIES + 1, "background": False, "local_keep_s": 0}
        settings |= {"storage_backend": self.storage, "clock": self.clock, "disk": UnsyncedDisk(), "max_late_s": 1e10}
        with tempfile.TemporaryDirectory() as root, IndexService.open(root=root, **settings) as index:
            for hour in range(self.hours):
                index.put_batch(_entries(hour))
                index.flush()
                if (hour + 1) % _AT_ONCE == 0 or hour + 1 == self.hours:
                    index.run_lifecycle()
        self.log = open_log(self.storage, self.clock)

    @property
    def end_s(self) -> int:
        """Where the newest file's hour ends, in epoch seconds."""
        return _BEGIN_S + self.hours * HOUR_S

    def merge(self, window_s: int) -> None:
        """Merge what is over into windows."""
        merge(self.storage, self.log, self.clock, MergeOptions(window_s=window_s, min_age_s=HOUR_S), threads=1)

    def range_ms(self, hours: int) -> tuple[int, int]:
        """Return the inclusive range of the newest `hours`, in epoch milliseconds."""
        return (self.end_s - hours * HOUR_S) * 1000, self.end_s * 1000 - 1

    def in_range(self, hours: int) -> int:
        """Return how many windows (tables, and files that are in none) overlap the newest `hours`, by the log."""
        begin, end = (value // 1000 for value in self.range_ms(hours))
        state = self.log.refresh()
        return len(
            {
                o.shard.table if o.shard else o.name
                for o in state.objects.values()
                if o.second_min <= end and o.second_max >= begin
            }
        )

    def gets(self, hours: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Return GETs of a lookup in the newest hours, by hours: of the key that every file holds, and of one that none
        does.

        Directories are known, filters and blocks are not.
        """
        config = IndexConfig.load(
            block_cache_bytes=0, filter_after_probes=10**9, directory_cache_bytes=1 << 30, refresh_interval_s=1e9
        )
        found = {}
        # it would bring filters
        without_summary(self.storage)
        with IndexReader.open(config=config, storage_backend=self.storage, clock=self.clock) as reader:
            reader.query(_TOPIC, _IN_ALL, max_count=self.hours)
            for span_h in hours:
                begin_ms, end_ms = self.range_ms(span_h)
                held = reader.query(_TOPIC, _IN_ALL, begin_ms, end_ms, max_count=self.hours)
                require(len(held), span_h, f"answers of the newest {span_h} hours")
                absent = reader.query(_TOPIC, _ABSENT, begin_ms, end_ms)
                require(len(absent), 0, "answers of an absent key")
                found[span_h] = held.explain.requests, absent.explain.requests
        return found


def _entries(hour: int) -> dict[str, Any]:
    """Return the entries of an hour, which fill a file: one of the common key, the others of the hour's own."""
    numbers = np.arange(_ENTRIES)
    return batch(
        _ENTRIES,
        topic=_TOPIC,
        key=[_IN_ALL, *(f"hour-{hour}-{number}" for number in range(1, _ENTRIES))],
        offset=hour * _ENTRIES + numbers,
        timestamp_ms=(_BEGIN_S + hour * HOUR_S + numbers * (HOUR_S // _ENTRIES)) * 1000,
    )


def year_table(weeks: int) -> tuple[Table, bool]:
    """Return GETs a lookup by range and by what was merged, and whether they are the windows in range throughout."""
    year = YearOfFiles(weeks * 7 * 24)
    ranges = {name: days * 24 or year.hours for name, days in _RANGES.items() if days * 24 <= year.hours}
    columns = ["range", "hourly files: GETs"]
    measured = [year.gets(list(ranges.values()))]
    counted = [{hours: year.in_range(hours) for hours in ranges.values()}]
    for name, window_s in (("days", DAY_S), ("30 days", MONTH_S)):
        year.merge(window_s)
        measured.append(year.gets(list(ranges.values())))
        counted.append({hours: year.in_range(hours) for hours in ranges.values()})
        columns += [f"merged to {name}: windows in range", "GETs, key in all", "GETs, absent key"]
    rows = []
    for name, hours in ranges.items():
        row: list[object] = [name, measured[0][hours][0]]
        for gets, windows in zip(measured[1:], counted[1:], strict=True):
            row += [windows[hours], *gets[hours]]
        rows.append(tuple(row))
    exact = all(
        gets[hours] == (windows[hours],) * 2 for gets, windows in zip(measured, counted, strict=True) for hours in gets
    )
    files = f"{year.hours:,} hourly files ({weeks} weeks)"
    return Table(f"GETs per lookup in the newest part of {files}", tuple(columns), tuple(rows)), exact
