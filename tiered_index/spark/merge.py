"""Merge on Spark: planned and published by the driver, its tasks run by executors. DESIGN section 6; `service/merge` does the work.

There is no shuffle: a task reads its run of slots from every source in bounded pieces. Spark takes one result of each task, whichever
attempt was first; what others uploaded is for `orphans`. Driver and executors share nothing but the storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tiered_index.clock import Clock, SystemClock
from tiered_index.service.merge.plan import MergeJob
from tiered_index.service.merge.run import MergeOptions, MergeReport
from tiered_index.service.merge.run import merge as merge_by
from tiered_index.service.merge.task import TaskResult, run_task
from tiered_index.service.storage_log import StorageLog
from tiered_index.spark.executors import StorageAddress, typed_errors
from tiered_index.spark.watching import watched
from tiered_index.spark.windows import window_seconds
from tiered_index.storage.probe import probe_put_if_absent
from tiered_index.storage.s3_options import S3Options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["merge"]


def merge(
    spark: SparkSession,
    *,
    storage: str,
    window: str | int = "1d",
    options: MergeOptions | None = None,
    s3: S3Options | None = None,
    clock: Clock | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> MergeReport:
    """Merge uploaded files, and tables of shorter windows, into tables of `window` (``1h``, ``1d``, seconds). Return what was done.

    `options` are the rest of what `plan_merge` takes (their `window_s` is not looked at); `progress` is told (stage, tasks done, tasks).
    Repeating it is harmless. Raises `InvalidArgument`, `NotAnIndex`, `CorruptFile`, what the storage raises; jobs published before stay.
    """
    address = StorageAddress(storage, s3 or S3Options())
    chosen = replace(options or MergeOptions(), window_s=window_seconds(window))
    present = clock or SystemClock()
    with address.open() as opened:
        log = StorageLog(opened, present)
        log.open()
        # a server that accepts two records of one number would let two jobs merge the same files
        probe_put_if_absent(opened, "probe/put-if-absent")

        def run_tasks(job: MergeJob) -> Sequence[TaskResult]:
            return _run_on(spark, job, address, present.now_ms(), progress)

        return merge_by(opened, log, present, chosen, run_tasks=run_tasks)


def _run_on(
    spark: SparkSession, job: MergeJob, address: StorageAddress, now_ms: int, progress: Callable[[str, int, int], None]
) -> Sequence[TaskResult]:
    """Run a job's tasks, a Spark task each; the job itself, which names every source, is sent to each executor once."""
    context = spark.sparkContext
    shared = context.broadcast(job)

    def run_one(number: int) -> TaskResult:
        with address.open() as storage:
            return run_task(shared.value.tasks[number], storage, now_ms)

    count = len(job.tasks)
    try:
        with typed_errors("a task of the merge"), watched(spark, "merge", progress):
            return context.parallelize(range(count), count).map(run_one).collect()
    finally:
        shared.destroy()
