"""Merge on Spark: planned and published by the driver, its tasks run by executors.

DESIGN section 6; `service/merge` does the work.

There is no shuffle: a task reads its run of slots from every source in bounded pieces. Spark takes one result of each
task, whichever attempt was first; what others uploaded is for `orphans`. Driver and executors share nothing but the
storage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from tiered_index.clock import Clock, SystemClock
from tiered_index.service.log.log import StorageLog
from tiered_index.service.merge.plan import MergeJob
from tiered_index.service.merge.run import MergeOptions, MergeReport
from tiered_index.service.merge.run import merge as merge_by
from tiered_index.service.merge.writing import TaskResult, run_task
from tiered_index.spark.executors import StorageAddress, between_tasks, typed_errors
from tiered_index.spark.metrics import Address, JobMeter, JobMetrics
from tiered_index.spark.windows import window_seconds
from tiered_index.storage.metering import MeteredStorage, PriceTable
from tiered_index.storage.opening import probe_put_if_absent
from tiered_index.storage.s3.options import S3Options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["MergeResult", "merge"]

_DRIVEN = "plan and publish"


@dataclass(frozen=True, slots=True)
class MergeResult(MergeReport):
    """A `MergeReport`, the log's last record afterwards, and what the job did and cost."""

    log_number: int = 0
    metrics: JobMetrics = field(default_factory=JobMetrics)


def merge(
    spark: SparkSession,
    *,
    storage: str,
    window: str | int = "1d",
    options: MergeOptions | None = None,
    s3: S3Options | None = None,
    clock: Clock | None = None,
    prices: PriceTable | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> MergeResult:
    """Merge uploaded files, and tables of shorter windows, into tables of `window` (``1h``, ``1d``, seconds).

    Return what was done.

    `options` are the rest of what `plan_merge` takes (their `window_s` is not looked at); `progress` is told (stage,
    tasks done, tasks). Repeating it is harmless. Raises `InvalidArgument`, `NotAnIndex`, `CorruptFile`, what the
    storage raises; jobs published before stay.
    """
    address = StorageAddress(storage, s3 or S3Options())
    chosen = replace(options or MergeOptions(), window_s=window_seconds(window))
    present = clock or SystemClock()
    priced = prices or PriceTable()
    opened = MeteredStorage(address.open(), priced)
    with contextlib.closing(opened):
        meter = JobMeter(spark, opened, priced, progress)
        log = StorageLog(opened, present)
        with meter.stage(_DRIVEN):
            log.open()
            # a server that accepts two records of one number would let two jobs merge the same files
            probe_put_if_absent(opened)

        def run_tasks(job: MergeJob) -> Sequence[TaskResult]:
            with typed_errors("a task of the merge"), meter.stage("merge", tasks=True) as stage:
                results = _run_on(spark, job, meter.address(address), present.now_ms())
                stage.entries += job.entries
                return results

        with meter.stage(_DRIVEN) as driven:
            report = merge_by(opened, log, present, chosen, run_tasks=run_tasks)
            driven.entries = report.entries
    return MergeResult(
        **{f.name: getattr(report, f.name) for f in fields(report)}, log_number=log.state.number, metrics=meter.metrics
    )


def _run_on(spark: SparkSession, job: MergeJob, address: Address, now_ms: int) -> Sequence[TaskResult]:
    """Run a job's tasks, a Spark task each; the job itself, which names every source, is sent to each executor once."""
    context = spark.sparkContext
    shared = context.broadcast(job)

    def run_one(number: int) -> TaskResult:
        with between_tasks(), address.open() as storage:
            return run_task(shared.value.tasks[number], storage, now_ms)

    count = len(job.tasks)
    try:
        return context.parallelize(range(count), count).map(run_one).collect()
    finally:
        shared.destroy()
