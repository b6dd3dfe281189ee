"""A merge in this process: plan, tasks in threads, publish. Small installations need nothing else; Spark runs the same tasks elsewhere.

Repeating it is harmless: what was merged is no source any more. A job that another merge has overtaken is planned anew, a bounded number of
times. Threads: one merge at a time is the caller's business; several are safe, the log decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from tiered_index.clock import Clock
from tiered_index.service.merge.plan import MergeJob, MergePlan, plan_merge
from tiered_index.service.merge.publish import MergeOvertaken, abandon, publish
from tiered_index.service.merge.task import TaskResult, run_task
from tiered_index.service.storage_log import StorageLog
from tiered_index.storage.base import Storage

__all__ = ["MergeOptions", "MergeReport", "merge", "plan"]

_TRIES = 10
_NUMBERS = ("jobs", "sources", "tables", "shards", "entries", "read_bytes", "written_bytes")

RunTasks = Callable[[MergeJob], Sequence[TaskResult]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
    """What to merge: see `plan_merge`."""

    window_s: int = 86400
    min_age_s: int = 3600
    shard_bytes: int = 1 << 30
    begin_s: int = 0
    end_s: int = 1 << 62


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What was done. Counts are of objects, entries and bytes."""

    jobs: int = 0
    sources: int = 0
    tables: int = 0
    shards: int = 0
    entries: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    left: tuple[tuple[str, str], ...] = ()

    def __add__(self, other: MergeReport) -> MergeReport:
        numbers: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in _NUMBERS}
        return replace(self, **numbers)


def plan(log: StorageLog, clock: Clock, options: MergeOptions) -> MergePlan:
    """Return what a merge would do now."""
    return plan_merge(
        log.refresh(),
        window_s=options.window_s,
        now_s=clock.now_ms() // 1000,
        min_age_s=options.min_age_s,
        shard_bytes=options.shard_bytes,
        begin_s=options.begin_s,
        end_s=options.end_s,
    )


def merge(
    storage: Storage,
    log: StorageLog,
    clock: Clock,
    options: MergeOptions,
    *,
    threads: int = 2,
    run_tasks: RunTasks | None = None,
    progress: Callable[[int], None] = lambda entries: None,
) -> MergeReport:
    """Merge what there is to merge. `run_tasks` runs a job's tasks elsewhere; `progress` is told of entries done.

    Raises `CorruptFile`, `SchemaMismatch`, what the storage raises; jobs that were published before stay.
    """

    def run_here(job: MergeJob) -> Sequence[TaskResult]:
        results: list[TaskResult] = []
        futures: list[Future[TaskResult]] = []
        try:
            with ThreadPoolExecutor(threads, "tiered-index-merge") as pool:
                try:
                    for task in job.tasks:  # there may be no thread for one, and those before it have begun
                        futures.append(pool.submit(run_task, task, storage, clock.now_ms(), progress))
                    results += [future.result() for future in futures]
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
        except BaseException:
            # the pool has ended: whatever finished is known
            done = [future for future in futures if not future.cancelled() and future.exception() is None]
            abandon([shard for future in done for shard in future.result().shards], storage)
            raise
        return results

    report = MergeReport()
    for _ in range(_TRIES):
        made = plan(log, clock, options)
        report = replace(report, left=made.left)
        overtaken = False
        for job in made.jobs:
            results = (run_tasks or run_here)(job)
            shards = [shard for result in results for shard in result.shards]
            try:
                publish(job, results, storage, log)
            except MergeOvertaken:
                abandon(shards, storage)
                overtaken = True
                continue
            written = sum(shard.stored.size_bytes for shard in shards)
            tables = len({shard.stored.shard.table for shard in shards if shard.stored.shard is not None})
            report += MergeReport(1, len(job.sources), tables, len(shards), job.entries, job.size_bytes, written)
        if not overtaken:
            return report
    raise MergeOvertaken(f"{storage.uri}: other merges were faster {_TRIES} times in a row")
