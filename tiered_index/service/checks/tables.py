"""Checks of window tables by the log's word: shards that fit each other, come and go together, and hold what they were merged out of.

No request is made. One thread.
"""

from __future__ import annotations

from tiered_index.format.names import log_name
from tiered_index.format.trailer import Metadata
from tiered_index.service.checks.report import Report
from tiered_index.service.log_records import LogRecord, LogState, StoredObject, TableShard

__all__ = ["RecordCheck", "check_shard_record", "check_tables"]


class RecordCheck:
    """Checks each record of the log, from the first on: tables come and go whole, and a merge adds as many entries as it removes."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._seen: set[str] = set()

    def check(self, record: LogRecord, before: LogState) -> None:
        """Check the next record; `before` is the state that it changes."""
        name = log_name(record.number)
        added = {stored.shard.table for stored in record.add if stored.shard is not None}
        for table in sorted(added & self._seen):
            self._report.add(name, "table", f"adds shards to table {table}, which an earlier record added")
        self._seen |= added
        gone = set(record.remove)
        removed = [before.objects[old] for old in record.remove if old in before.objects]
        for table in sorted({stored.shard.table for stored in removed if stored.shard is not None}):
            left = [stored.name for stored in before.tables[table] if stored.name not in gone]
            if left:
                self._report.add(name, "table", f"removes a part of table {table}: {len(left)} of its shards stay, {left[0]} first")
        if record.kind == "merge":
            lost, gained = sum(stored.count for stored in removed), sum(stored.count for stored in record.add)
            if lost != gained:
                self._report.add(name, "merge", f"its sources held {lost:,} entries, the tables that it adds hold {gained:,}")


def check_tables(state: LogState, report: Report) -> None:
    """Check that the shards of each table are of one window and slot map, and that their slots don't overlap."""
    for table, shards in state.tables.items():
        report.count("tables")
        ordered = sorted(shards, key=lambda stored: (*_range(stored), -stored.second_max))
        first = _shard(ordered[0])
        for stored in ordered:
            shard = _shard(stored)
            if (shard.slots, shard.begin_s, shard.window_s) != (first.slots, first.begin_s, first.window_s):
                report.add(stored.name, "table", f"it is of another window or slot map than {ordered[0].name} of table {table}")
            if not 0 <= shard.slot_low < shard.slot_high <= shard.slots.slots:
                report.add(stored.name, "table", f"slots {_range(stored)} are not among the {shard.slots.slots} of its map")
            if not shard.begin_s <= stored.second_min <= stored.second_max < shard.begin_s + shard.window_s:
                report.add(stored.name, "table", f"its seconds {stored.second_min}..{stored.second_max} are not those of its window")
        reached = ordered[0]
        for stored in ordered[1:]:
            low, high = _range(reached)
            # a giant slot's parts have one range, and each a time of its own
            parts = _range(stored) == (low, high) and stored.second_max < reached.second_min
            if _shard(stored).slot_low < high and not parts:
                report.add(stored.name, "table", f"its slots overlap those of {reached.name} of table {table}")
            reached = max(reached, stored, key=lambda one: (_shard(one).slot_high, -one.second_max))


def check_shard_record(stored: StoredObject, meta: Metadata, report: Report) -> None:
    """Check what a shard says of itself against the log's word of it."""
    shard = _shard(stored)
    if "slot_map" not in meta.more:
        report.add(stored.name, "object", f"it is no shard, the log says it is one of table {shard.table}")
        return
    found = (meta.more.get("table"), meta.begin_ms, meta.more.get("window_s"), meta.slot_map, *meta.slot_range, meta.count, meta.file_id)
    said = (
        shard.table, shard.begin_s * 1000, shard.window_s, shard.slots, shard.slot_low, shard.slot_high, stored.count, stored.file_id,
    )  # fmt: skip
    if found != said:
        report.add(stored.name, "object", f"its metadata says {found}, the log says {said}")


def _shard(stored: StoredObject) -> TableShard:
    assert stored.shard is not None
    return stored.shard


def _range(stored: StoredObject) -> tuple[int, int]:
    shard = _shard(stored)
    return shard.slot_low, shard.slot_high
