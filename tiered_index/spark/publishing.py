"""The end of a build: uploads completed, then one log record with its tables. Driver only.

`mode` is decided again by the state that the record follows, so of two builds of one window with ``error`` only one is published, whatever
their order. Quarantine windows, which all builds share, are appended to under every mode.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiered_index.errors import InvalidArgument
from tiered_index.service.log_records import LogRecord, LogState
from tiered_index.service.merge.publish import complete
from tiered_index.service.merge.writing import FinishedShard
from tiered_index.service.storage_log import StorageLog
from tiered_index.spark.build_plan import BuildPlan
from tiered_index.spark.windows import QUARANTINE_S
from tiered_index.storage.base import Storage

__all__ = ["MODES", "check_windows", "publish_tables"]

MODES = ("error", "append", "replace")


def check_windows(state: LogState, plan: BuildPlan, mode: str) -> tuple[str, ...]:
    """Return the names of the objects that a build in `mode` replaces. Raises `InvalidArgument` where it must not be published."""
    if mode == "append":
        return ()
    windows = sorted((t.window.begin_s, t.window.begin_s + t.window.window_s) for t in plan.tables if not t.quarantined)
    replaced: list[str] = []
    for shards in state.tables.values():
        shard = shards[0].shard
        assert shard is not None
        begin, end = shard.begin_s, shard.begin_s + shard.window_s
        if shard.window_s == QUARANTINE_S or not (met := [w for w in windows if w[0] < end and begin < w[1]]):
            continue
        if mode == "error":
            raise InvalidArgument(
                f"the window from {met[0][0]} (epoch seconds) has a table already, {shard.table}: take mode append or replace"
            )
        if begin < met[0][0] or end > met[0][1]:
            raise InvalidArgument(
                f"table {shard.table} has {shard.window_s:,} s from {begin} on, more than the window of {met[0][1] - met[0][0]:,} s that "
                "would replace it: build windows that are as long"
            )
        replaced += [stored.name for stored in shards]
    return tuple(replaced)


def publish_tables(
    plan: BuildPlan, shards: Sequence[FinishedShard], mode: str, storage: Storage, log: StorageLog
) -> tuple[LogState, int]:
    """Complete the uploads and append the record; return the state with it and how many objects it removed.

    Raises as `check_windows`, `CorruptFile`, what the storage raises.
    """
    complete(shards, storage)
    added = {shard.stored.name for shard in shards}
    removed: tuple[str, ...] = ()

    def make(state: LogState) -> LogRecord | None:
        nonlocal removed
        if added <= state.objects.keys():
            return None  # an earlier try got as far as the log
        removed = check_windows(state, plan, mode)
        return LogRecord(0, "build", 0, "", 0, tuple(shard.stored for shard in shards), removed)

    return log.append("a build", None, make), len(removed)
