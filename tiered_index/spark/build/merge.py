"""Merge and compaction on Spark: the driver plans and publishes, executors run the tasks, without a shuffle.

A task is one of `service/merge`, or compacts one staged file (`service/lifecycle/staged`) to the same bytes as its
writer would. Spark takes one result of each task; `orphans` deletes the uploads of other attempts.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from tiered_index.clock import Clock, SystemClock
from tiered_index.format.layout import ROCKETMQ
from tiered_index.format.packed import packed_bytes
from tiered_index.service.lifecycle.staged import StagedResult, Ticket, compact_staged, open_tickets, publish_staged
from tiered_index.service.log.log import StorageLog
from tiered_index.service.merge.plan import MergeJob, MergeOptions, window_seconds
from tiered_index.service.merge.run import MergeReport, RunTasks, writing_requests
from tiered_index.service.merge.run import merge as merge_by
from tiered_index.service.merge.task import TaskResult, run_task
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.failures import typed_errors
from tiered_index.spark.frames import broadcast
from tiered_index.spark.metrics import JobMeter, JobMetrics, Progress
from tiered_index.spark.workers import between_tasks
from tiered_index.storage.base import StorageOptions
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.prices import PriceTable
from tiered_index.storage.probe import probe_put_if_absent
from tiered_index.types import no_progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DRIVEN = "plan and publish"


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
    progress: Progress = no_progress,
) -> MergeResult:
    """Merge uploaded files, and tables of shorter windows, into tables of `window` (``1h``, ``1d``, seconds).

    `options` are further options of the merge (their `window_s` is ignored); `progress` is called with (stage, tasks
    done, tasks). `s3` has the options of S3. `clock` replaces the clock in tests. `prices` is the price table of
    the reported cost. You may repeat the call. Raises `InvalidArgument`, `NotAnIndex`, `CorruptFile`, the storage's
    errors; jobs that were published before an error stay.
    """
    address, present = StorageAddress(storage, s3), clock or SystemClock()
    chosen = replace(options or MergeOptions(), window_s=window_seconds(window))
    with opened_by_driver(address, present, prices) as (opened, log):
        meter = JobMeter(spark, opened, progress)
        with meter.stage(DRIVEN) as driven:
            log.open()
            # a server that accepts two records of one number would let two jobs merge the same files
            probe_put_if_absent(opened)
            run_tasks = tasks_on(spark, meter, address, present)
            report = merge_by(opened, log, present, chosen, run_tasks=run_tasks)
            driven.entries = report.entries
    known = {f.name: getattr(report, f.name) for f in fields(report)}
    return MergeResult(**known, log_number=log.state.number, metrics=meter.metrics)


def tasks_on(spark: SparkSession, meter: JobMeter, address: StorageAddress, clock: Clock) -> RunTasks:
    """Return a function that runs the tasks of a merge on executors, with the storage at an address."""

    def run_tasks(job: MergeJob) -> Sequence[TaskResult]:
        # the job names all sources, so each executor gets it once
        counted, now_ms = meter.address(address), clock.now_ms()
        with (
            typed_errors("a task of the merge"),
            meter.stage("merge", tasks=True) as stage,
            broadcast(spark, job) as shared,
        ):

            def run_one(number: int) -> TaskResult:
                with between_tasks(), counted.open() as storage:
                    return run_task(shared.value.tasks[number], storage, now_ms)

            work = spark.sparkContext.parallelize(range(len(job.tasks)), len(job.tasks))
            results = work.map(run_one).collect()
            stage.entries += job.entries
            return results

    return run_tasks


@contextlib.contextmanager
def opened_by_driver(
    address: StorageAddress, clock: Clock, prices: PriceTable | None
) -> Iterator[tuple[MeteredStorage, StorageLog]]:
    """Yield the metered storage at an address and its log, which has not been read."""
    with contextlib.closing(MeteredStorage(address.open(), prices)) as opened:
        yield opened, StorageLog(opened, clock)


_RANGE_BYTES = 8 << 20
_PROBE = Counter(put_if_absent=2, get=1, delete=1)
# of one log record: find the end, check that the last one exists, append, checkpoint
_RECORD = Counter(list=1, get=1, put_if_absent=1, put=1)


@dataclass(frozen=True, slots=True)
class CompactReport:
    """The result of a compaction; with `dry_run` the files to compact and the estimated cost.

    `requests` (by operation) and `cost_usd` are of tasks and driver, `read_bytes` and `written_bytes` of the files
    only. `files` and `entries` were published. Other files are (file id, reason): `left` are for later, `damaged` have
    a damaged staged object, `failed` had an error. `log_number` is the log's last record, `metrics` are those of the
    job.
    """

    files: int = 0
    entries: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    left: tuple[tuple[str, str], ...] = ()
    damaged: tuple[tuple[str, str], ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    requests: Mapping[str, int] = field(default_factory=dict)
    cost_usd: float = 0.0
    log_number: int = 0
    dry_run: bool = False
    metrics: JobMetrics = field(default_factory=JobMetrics)


def compact(
    spark: SparkSession | None,
    *,
    storage: str,
    s3: StorageOptions | None = None,
    dry_run: bool = False,
    clock: Clock | None = None,
    prices: PriceTable | None = None,
    progress: Progress = no_progress,
) -> CompactReport:
    """Compact and publish every file that writers have staged in `storage`; `progress` as in `merge`.

    It may be repeated, and run twice at once. With `dry_run` nothing is changed, and `spark` may be None. Raises
    `NotAnIndex`, `ConfigError`, the driver's storage errors: nothing is published then, unless the response to the log
    record was lost. A damaged staged file, or one whose task met an error of storage or disk, is reported and the
    others are published; later jobs or its writer try again. `s3` has the options of S3. `clock` replaces the clock in
    tests. `prices` is the price table of the reported cost.
    """
    address, present = StorageAddress(storage, s3), clock or SystemClock()
    with opened_by_driver(address, present, prices) as (opened, log):
        if dry_run:
            return _planned(opened, log)
        assert spark is not None
        meter = JobMeter(spark, opened, progress)
        with meter.stage(DRIVEN):
            log.open()
            tickets, left = open_tickets(opened, log)
            # a server that accepts two records of one number would let a file be published twice
            probe_put_if_absent(opened)
        counted, now_ms = meter.address(address), present.now_ms()

        def run_one(ticket: Ticket) -> StagedResult:
            with between_tasks(), counted.open() as storage:
                return compact_staged(ticket, storage, now_ms)

        results: list[StagedResult] = []
        if tickets:
            with typed_errors("a task of the compaction"), meter.stage("compact", tasks=True) as stage:
                # the last task to begin is short
                largest_first = sorted(tickets, key=lambda ticket: -ticket.size_bytes)
                results = spark.sparkContext.parallelize(largest_first, len(tickets)).map(run_one).collect()
                stage.entries = sum(ticket.count for ticket in tickets)
            with meter.stage(DRIVEN):
                _, results = publish_staged(results, opened, log)
    done = [result for result in results if result.finished is not None]
    undone = [*left, *(result for result in results if result.finished is None)]
    report = _report([result.ticket for result in done], undone, log.state.number)
    written = sum(result.finished.stored.size_bytes for result in done if result.finished is not None)
    spent = meter.metrics
    return replace(report, written_bytes=written, requests=spent.requests, cost_usd=spent.cost_usd, metrics=spent)


def _planned(opened: MeteredStorage, log: StorageLog) -> CompactReport:
    """Return the plan and the cost of a compaction now. Raises `NotAnIndex`, `ConfigError`."""
    log.open()
    tickets, left = open_tickets(opened, log)
    spent, genesis = opened.total, log.state.genesis
    assert genesis is not None
    # an estimate: a ticket does not record whether its file becomes plain
    schema, is_rocketmq = genesis.layout.schema, genesis.layout.preset is ROCKETMQ
    written = [t.count * schema.item.itemsize if is_rocketmq else packed_bytes(schema, t.count) for t in tickets]
    requests = Counter(spent.requests_by_kind) + _PROBE
    for ticket, size in zip(tickets, written, strict=True):
        # a task reads a range for the document and one for 8 MiB of entries
        requests["get_range"] += 1 + -(-ticket.entries_bytes // _RANGE_BYTES)
        requests += writing_requests(1, size)
    if tickets:
        requests += _RECORD
    read = spent.bytes_read + sum(ticket.size_bytes for ticket in tickets)
    cost = opened.prices.cost_usd(requests, read)
    report = _report(tickets, left, log.state.number)
    return replace(report, written_bytes=sum(written), requests=dict(requests), cost_usd=cost, dry_run=True)


def _report(tickets: Sequence[Ticket], left: Sequence[StagedResult], log_number: int) -> CompactReport:
    return CompactReport(
        files=len(tickets),
        entries=sum(ticket.count for ticket in tickets),
        read_bytes=sum(ticket.size_bytes for ticket in tickets),
        left=tuple((result.ticket.file_id, result.left) for result in left if not (result.corrupt or result.failed)),
        damaged=tuple((result.ticket.file_id, result.left) for result in left if result.corrupt),
        failed=tuple((result.ticket.file_id, result.left) for result in left if result.failed),
        log_number=log_number,
    )
