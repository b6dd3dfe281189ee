"""One task of a merge: its run of base slots and its windows of every source, sorted and written as shards, uploaded but not published.

The shards' names are unique to the attempt, and nothing refers to them until the job's log record does: a task may be repeated, run twice
at once or die at any moment. Memory: one piece of the sources, its sort, and for each window of the task two parts of an upload and 8 bytes
an entry; `cuts` bounds these. Threads: one task is run by one thread; any number of tasks by as many threads or processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from tiered_index.format.shard import entry_checksum
from tiered_index.service.cold.path import ColdPath, ColdSettings
from tiered_index.service.merge.pieces import SourceReader
from tiered_index.service.merge.plan import MergeTask
from tiered_index.service.merge.writing import FinishedShard, TableRun
from tiered_index.storage.base import Storage

__all__ = ["FinishedShard", "TaskResult", "run_task"]

PIECE_ITEMS = 1 << 20
"""Entries of all sources held at a time."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What a task read, by source, and wrote; both sides' checksums are sums of `entry_checksum`."""

    number: int
    read_counts: dict[str, int]
    read_checksum: int
    shards: tuple[FinishedShard, ...]


def run_task(task: MergeTask, storage: Storage, now_ms: int, progress: Callable[[int], None] = lambda entries: None) -> TaskResult:
    """Read, sort and write one task; `progress` is told of entries done. What was uploaded before an error is aborted or deleted."""
    schema = task.genesis.layout.schema
    cold = ColdPath(storage, keyed=schema.keyed, settings=ColdSettings(query_threads=8, block_cache_bytes=0, coalesce_gap_bytes=0))
    with contextlib.closing(cold):
        return _run(task, cold, storage, now_ms, progress)


def _run(task: MergeTask, cold: ColdPath, storage: Storage, now_ms: int, progress: Callable[[int], None]) -> TaskResult:
    if not task.sources:
        return TaskResult(task.number, {}, 0, ())
    schema = task.genesis.layout.schema
    step = max(window.slots.join for window in task.windows)
    reader = SourceReader(cold, task.sources, schema, task.genesis.layout.slots, task.base_low, task.base_high, step, task.seconds)
    most = sum(source.count for source in task.sources)
    tables = [
        TableRun(
            task.genesis, window, (task.base_low, task.base_high), reader.topics, task.sequence, most, storage, now_ms, len(task.windows)
        )
        for window in task.windows
    ]
    checksum = 0
    try:
        for piece in reader.pieces(PIECE_ITEMS):
            checksum += entry_checksum(piece.items, piece.seconds)
            for table in tables:
                table.add(piece)
            progress(len(piece.items))
        for table in tables:
            table.finish()
    except BaseException:
        for table in tables:
            table.abandon()
        raise
    shards = tuple(shard for table in tables for shard in table.finished)
    return TaskResult(task.number, reader.read_counts, checksum % 2**64, shards)
