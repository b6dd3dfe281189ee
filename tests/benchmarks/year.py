"""A simulated year of small hourly files, merged to days and to windows of 30 days; GETs per lookup before and after.

The format's own code writes the files, and log records publish them, a week's in each. The clock is at the year's end,
so the newest window of 30 days may not be over. Everything is in memory. One thread uses this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from tests.benchmarks.machine.figures import Table
from tests.benchmarks.machine.setting import require
from tiered_index._version import __version__
from tiered_index.clock import ManualClock
from tiered_index.config import IndexConfig
from tiered_index.format.compacted import Compaction
from tiered_index.format.hashing import code_units, hash_batch
from tiered_index.format.layout import PRESETS, Layout
from tiered_index.format.names import data_name, new_file_id
from tiered_index.format.trailer import parse_trailer
from tiered_index.service.jobs.merge_run import MergeOptions, merge
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.publication import stored_file
from tiered_index.service.log.records import IndexDescriptor, LogRecord, StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.service.reader import IndexReader
from tiered_index.storage.memory import MemoryStorage

HOUR_S, DAY_S, MONTH_S = 3600, 86_400, 30 * 86_400
_BEGIN_S = 1_700_000_000 // MONTH_S * MONTH_S
_TOPIC, _TOPIC_ID = "orders", 1
_IN_ALL, _ABSENT = "in-every-hour", "nobody's"
_ENTRIES = 8
# per hour: one of the common key, the others of keys that only this hour has
_RANGES = {"1 day": 1, "7 days": 7, "30 days": 30, "90 days": 90, "180 days": 180, "all": 0}


class YearOfFiles:
    """`hours` files in a storage of their own. `merge` merges the windows that are over."""

    def __init__(self, hours: int) -> None:
        self.hours = hours
        # two hours after the last file, so that its day is old enough to merge
        self.clock = ManualClock((self.end_s + 2 * HOUR_S) * 1000)
        self.storage = MemoryStorage(clock=self.clock)
        self.log = StorageLog(self.storage, self.clock)
        preset = PRESETS["native"]
        self._layout = Layout(preset, preset.schema, 16, 64)
        self.log.create(IndexDescriptor("a-simulated-year", self._layout, "custom"))
        for first in range(0, self.hours, 7 * 24):
            added = tuple(self._file(hour) for hour in range(first, min(self.hours, first + 7 * 24)))
            self.log.append("a week of files", None, partial(_adding, added))

    @property
    def end_s(self) -> int:
        """The end of the newest file's hour, in epoch seconds."""
        return _BEGIN_S + self.hours * HOUR_S

    def merge(self, window_s: int) -> None:
        """Merge the windows that are over."""
        merge(self.storage, self.log, self.clock, MergeOptions(window_s=window_s, min_age_s=HOUR_S), threads=1)

    def range_ms(self, hours: int) -> tuple[int, int]:
        """Return the inclusive range of the newest `hours`, in epoch milliseconds."""
        return (self.end_s - hours * HOUR_S) * 1000, self.end_s * 1000 - 1

    def in_range(self, hours: int) -> int:
        """Return how many windows overlap the newest `hours`, by the log. A window is a table, or a file that is in no
        table.
        """
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
        """Return GETs of a lookup in the newest hours, by hours: of the key that every file has, and of an absent one.

        Directories are known, filters and blocks are not.
        """
        config = IndexConfig.load(
            block_cache_bytes=0, filter_after_probes=10**9, directory_cache_bytes=1 << 30, refresh_interval_s=1e9
        )
        found = {}
        with IndexReader.open(config=config, storage_backend=self.storage, clock=self.clock) as reader:
            # reads the directories, and no filters: a lookup would read small filters with them
            reader.topics()
            for span_h in hours:
                begin_ms, end_ms = self.range_ms(span_h)
                held = reader.query(_TOPIC, _IN_ALL, begin_ms, end_ms, max_count=self.hours)
                require(len(held), span_h, f"answers of the newest {span_h} hours")
                absent = reader.query(_TOPIC, _ABSENT, begin_ms, end_ms)
                require(len(absent), 0, "answers of an absent key")
                found[span_h] = held.explain.requests, absent.explain.requests
        return found

    def _file(self, hour: int) -> StoredObject:
        """Store one hour's file."""
        begin_s = _BEGIN_S + hour * HOUR_S
        keys = [_IN_ALL, *(f"hour-{hour}-{number}" for number in range(1, _ENTRIES))]
        hashes, marks = hash_batch([_TOPIC], np.zeros(_ENTRIES, np.int64), code_units(keys))
        entries = np.zeros(_ENTRIES, self._layout.schema.entry)
        entries["key_hash"], entries["fingerprint"], entries["topic_id"] = hashes, marks, _TOPIC_ID
        entries["offset"] = hour * _ENTRIES + np.arange(_ENTRIES)
        entries["size"] = 512
        entries["time_diff_s"] = np.arange(_ENTRIES) * (HOUR_S // _ENTRIES)
        made = Compaction(entries, self._layout, begin_s * 1000, (begin_s + HOUR_S - 1) * 1000)
        file_id = new_file_id(begin_s * 1000)
        name = data_name(file_id, f"{hour:016x}")
        data = b"".join(
            made.pieces(
                file_id=file_id,
                topics=((_TOPIC_ID, _TOPIC),),
                source_positions={},
                lane="main",
                offset_space="custom",
                writer=f"tiered_index {__version__}",
                more={"sequence": hour + 1, "predecessor": None, "created_ms": begin_s * 1000},
            )
        )
        self.storage.put(name, data)
        return stored_file(name, parse_trailer(data, name, len(data)), len(data), self.clock.now_ms())


def _adding(added: tuple[StoredObject, ...], state: LogState) -> LogRecord | None:
    return LogRecord(0, "publish", 0, "", 0, added) if added[0].name not in state.objects else None


def year_table(weeks: int) -> tuple[Table, bool]:
    """Return GETs of a lookup by range and by merges, and whether they equal the windows in range throughout."""
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
