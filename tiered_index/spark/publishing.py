"""The end of a build or a write: uploads completed, then one log record with its tables. Driver only.

`mode` is decided again by the state that the record follows, so of two builds of one window with ``error`` only one is published, whatever
their order. Quarantine windows are all builds': there only what has just the same entries counts (`quarantine`).
So is decided whether a micro-batch was published before: the record carries (stream, number of the batch) as a source position, which the
log keeps for good, and beside it what the batch holds. Another content under the last number is not a batch that comes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiered_index.errors import InvalidArgument
from tiered_index.service.lifecycle.pending_uploads import append_in_time
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import LogRecord, LogState, StreamBatch
from tiered_index.service.merge.run import abandon, complete
from tiered_index.service.merge.writing import FinishedShard
from tiered_index.spark.batch_content import BatchContent
from tiered_index.spark.build_plan import BuildPlan
from tiered_index.spark.quarantine import repeated
from tiered_index.spark.windows import QUARANTINE_S
from tiered_index.storage.base import Storage

__all__ = ["MODES", "MicroBatch", "check_windows", "publish_batch", "publish_shards", "publish_tables"]

MODES = ("error", "append", "replace")
_Windows = list[tuple[int, int]]
# begin and end of each, in order, without quarantine windows


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Batch `number` of a stream; numbers rise, and a batch is repeated only while no later one was begun."""

    stream: str
    number: int
    content: BatchContent

    @property
    def told(self) -> StreamBatch:
        """What the log's record says of it."""
        return StreamBatch(self.number, self.content.entries, self.content.checksum)

    def is_in(self, state: LogState) -> bool:
        """Return whether the batch has been published.

        Raises `InvalidArgument` where a later one has, or one of this number with other entries: this one's would be lost. Records of
        earlier versions don't say what a batch held; there the number alone counts.
        """
        last = state.positions.get(self.stream, -1)
        if last > self.number:
            raise InvalidArgument(
                f"the index has micro-batch {last} of this query already, and {self.number} comes now: its checkpoint is older than the "
                "index, or another driver goes on with it; begin with a new checkpoint"
            )
        told = state.batches.get(self.stream)
        if last == self.number and told is not None and told.number == last and told != self.told:
            raise InvalidArgument(
                f"the index has micro-batch {last} of this query already, of {told.entries:,} entries, and the {self.content.entries:,} "
                "that come now under its number are others: its checkpoint is older than the index, or the query was changed, or makes "
                "other rows each time; begin with a new checkpoint"
            )
        return last == self.number


def check_windows(state: LogState, plan: BuildPlan, mode: str) -> tuple[str, ...]:
    """Return the names of the objects that a build in `mode` replaces. Raises `InvalidArgument` where it must not be published."""
    return _replaced(state, _planned(plan), mode)


def publish_tables(plan: BuildPlan, shards: Sequence[FinishedShard], mode: str, storage: Storage, log: StorageLog) -> tuple[LogState, int]:
    """Complete the uploads and append the record; return the state with it and how many objects it removed.

    Raises as `check_windows`, `CorruptFile`, `JobOverdue`: not published then. After what the storage raises the outcome may be unknown.
    """
    return _published(_planned(plan), shards, mode, storage, log, None)


def publish_shards(shards: Sequence[FinishedShard], mode: str, storage: Storage, log: StorageLog) -> LogState:
    """Publish what tasks wrote without a plan in common: the windows are those that the shards have. As `publish_tables`."""
    return _published(_written(shards), shards, mode, storage, log, None)[0]


def publish_batch(shards: Sequence[FinishedShard], batch: MicroBatch, storage: Storage, log: StorageLog) -> bool:
    """Publish a micro-batch unless it was before; return False and take the uploads back then.

    Raises as `publish_tables`, and `InvalidArgument` where a later batch was published, or other entries under its number.
    """
    state = log.refresh()
    names = {shard.stored.name for shard in shards}
    if not names <= state.objects.keys() and not batch.is_in(state):
        state, _ = _published(_written(shards), shards, "append", storage, log, batch)
    if names <= state.objects.keys():
        return True
    abandon(shards, storage)
    return False


def _planned(plan: BuildPlan) -> _Windows:
    return sorted((t.window.begin_s, t.window.begin_s + t.window.window_s) for t in plan.tables if not t.quarantined)


def _written(shards: Sequence[FinishedShard]) -> _Windows:
    tables = [one.stored.shard for one in shards if one.stored.shard is not None]
    return sorted({(table.begin_s, table.begin_s + table.window_s) for table in tables if table.window_s != QUARANTINE_S})


def _replaced(state: LogState, windows: _Windows, mode: str) -> tuple[str, ...]:
    """Return the names of the objects that tables of `windows` replace in `mode`. Raises `InvalidArgument`."""
    if mode == "append":
        return ()
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


def _published(
    windows: _Windows, shards: Sequence[FinishedShard], mode: str, storage: Storage, log: StorageLog, batch: MicroBatch | None
) -> tuple[LogState, int]:
    complete(shards, storage)
    added = {shard.stored.name for shard in shards}
    removed: tuple[str, ...] = ()

    def make(state: LogState) -> LogRecord | None:
        nonlocal removed
        if added <= state.objects.keys():
            return None  # an earlier try got as far as the log
        if batch is not None and batch.is_in(state):
            return None
        removed = _replaced(state, windows, mode) + repeated(state, shards, mode, storage)
        positions = {} if batch is None else {batch.stream: batch.number}
        told = {} if batch is None else {batch.stream: batch.told}
        return LogRecord(0, "build", 0, "", 0, tuple(shard.stored for shard in shards), removed, positions, batches=told)

    return append_in_time("a build", shards, make, storage, log), len(removed)
