"""Merges on Spark: the driver plans and publishes, executors run the tasks of `service/jobs`, without a shuffle.

Spark takes one result of each task; `orphans` deletes the uploads of other attempts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, TypeVar

from tiered_index.base.clock import Clock, SystemClock
from tiered_index.service.jobs.merge_run import MergeReport
from tiered_index.service.jobs.merge_run import merge as merge_by
from tiered_index.service.jobs.rewriting.job import Rewrite, TaskResult, Workers
from tiered_index.service.jobs.rewriting.merge_plan import MergeOptions, window_seconds
from tiered_index.service.log.log import StorageLog
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.failures import typed_errors
from tiered_index.spark.frames import broadcast
from tiered_index.spark.metrics import JobMeter, JobMetrics, described
from tiered_index.spark.workers import between_tasks
from tiered_index.storage.base import Storage, StorageOptions
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.prices import PriceTable
from tiered_index.storage.probe import probe_put_if_absent

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_Part = TypeVar("_Part")
_Result = TypeVar("_Result")
_MERGE = "merge: merge files and tables into window tables"
_OVERWRITE = "overwrite: overwrite archived segments without erased messages"


@dataclass(frozen=True, slots=True)
class MergeResult(MergeReport):
    """A `MergeReport` with the number of the log's last record and the metrics of the job.

    - `log_number`: number of the log's last record.
    - `metrics`: the metrics of the job.
    """

    log_number: int = 0
    metrics: JobMetrics = field(default_factory=JobMetrics)


def merge(
    spark: SparkSession,
    *,
    storage: str,
    window: str | int = "1d",
    options: MergeOptions | None = None,
    s3: StorageOptions | None = None,
    clock: Clock | None = None,
    prices: PriceTable | None = None,
) -> MergeResult:
    """Merge uploaded files, and tables of shorter windows, into tables of `window` (``1h``, ``1d``, seconds).

    `options` are further options of the merge (their `window_s` is ignored). `s3` has the options of S3. `clock`
    replaces the clock in tests. `prices` is the price table of the reported cost. You may repeat the call. Raises
    `InvalidArgument`, `NotAnIndex`, `CorruptFile`, the storage's errors; jobs that were published before an error stay.
    """
    address, present = StorageAddress(storage, s3), clock or SystemClock()
    chosen = replace(options or MergeOptions(), window_s=window_seconds(window))
    with opened_by_driver(address, present, prices) as (opened, log):
        meter = JobMeter(spark, opened)
        log.open()
        # a server that accepts two records of one number would let two jobs merge the same files
        probe_put_if_absent(opened)
        report = merge_by(opened, log, present, chosen, workers=on_executors(spark, meter, address, present))
    known = {f.name: getattr(report, f.name) for f in fields(report)}
    return MergeResult(**known, log_number=log.state.number, metrics=meter.metrics)


def on_executors(spark: SparkSession, meter: JobMeter, address: StorageAddress, clock: Clock) -> Workers[Rewrite]:
    """Return workers on executors, with the storage at an address."""

    def run(rewrite: Rewrite) -> Sequence[TaskResult]:
        now_ms = clock.now_ms()
        # the rewrite names all inputs, so each executor gets it once
        with broadcast(spark, rewrite) as shared:

            def run_one(storage: Storage, number: int) -> TaskResult:
                done: TaskResult = shared.value.tasks[number].run(storage, now_ms)
                return done

            # archived segments are overwritten
            stage = _MERGE if rewrite.of_entries else _OVERWRITE
            return run_in_tasks(spark, meter.address(address), stage, run_one, range(len(rewrite.tasks)))

    return run


def run_in_tasks(
    spark: SparkSession,
    address: StorageAddress,
    step: str,
    act: Callable[[Storage, _Part], _Result],
    parts: Sequence[_Part],
) -> list[_Result]:
    """Run `act` for each part in a task of its own, with the storage at an address, and return the results."""
    if not parts:
        return []

    def run_one(part: _Part) -> _Result:
        with between_tasks(), address.open() as storage:
            return act(storage, part)

    with typed_errors(f"a task of step {step.partition(':')[0]!r}"), described(spark, step):
        return spark.sparkContext.parallelize(parts, len(parts)).map(run_one).collect()


@contextlib.contextmanager
def opened_by_driver(
    address: StorageAddress, clock: Clock, prices: PriceTable | None
) -> Iterator[tuple[MeteredStorage, StorageLog]]:
    """Yield the metered storage at an address and its log, which has not been read."""
    with contextlib.closing(MeteredStorage(address.open(), prices)) as opened:
        yield opened, StorageLog(opened, clock)
