"""Compaction on Spark: staged files of writers become compacted objects, a task a file, published by one log record.

Writers with ``compaction = "spark"`` ask for it by tickets. Meanwhile their local copies answer, and they compact a
file themselves after `compact_timeout_s`. `service/lifecycle/staged` does the work, by the same code as a writer, so
the bytes are the same. Spark takes one result of each task, whichever attempt was first; objects of others are left to
`orphans`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tiered_index.clock import Clock, SystemClock
from tiered_index.service.lifecycle.staged import StagedResult, Ticket, compact_staged, open_tickets, publish_staged
from tiered_index.service.log.log import StorageLog
from tiered_index.service.merge.run import writing_requests
from tiered_index.spark.executors import StorageAddress, between_tasks, typed_errors
from tiered_index.spark.metrics import Address, JobMeter, JobMetrics
from tiered_index.storage.metering import MeteredStorage, PriceTable
from tiered_index.storage.opening import probe_put_if_absent
from tiered_index.storage.s3.options import S3Options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["CompactReport", "compact", "plan_compaction"]

_DRIVEN = "plan and publish"
_RANGE_BYTES = 8 << 20
_PROBE = Counter(put_if_absent=2, get=1, delete=1)
# of one log record: look for the end, is the last one there, append, checkpoint
_RECORD = Counter(list=1, head=1, put_if_absent=1, put=1)


@dataclass(frozen=True, slots=True)
class CompactReport:
    """What was published; with `dry_run` what would be tried and written, and its estimated cost.

    `requests`, by operation, and `cost_usd` are those of tasks and driver; `read_bytes` and `written_bytes` are of the
    files alone. Files that were not published are listed as (file id, why): `left`, they may not come now; `damaged`,
    their staged object; `failed`, an error stopped them.
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
    spark: SparkSession,
    *,
    storage: str,
    s3: S3Options | None = None,
    dry_run: bool = False,
    clock: Clock | None = None,
    prices: PriceTable | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> CompactReport:
    """Compact and publish every file that writers have staged in `storage`.

    Return what was done; `progress` as in `merge`.

    Repeating it is harmless, and so are two at once. With `dry_run` nothing is changed. Raises `NotAnIndex`,
    `ConfigError`, what the storage raises to the driver: nothing is published then, unless the answer to the log record
    was lost. A damaged staged file, and one whose task met an error of storage or disk, are told, and stand in the way
    of no other one: later jobs try again, or their writer.
    """
    if dry_run:
        return plan_compaction(storage=storage, s3=s3, clock=clock, prices=prices)
    address, present, priced = (
        StorageAddress(storage, s3 or S3Options()),
        clock or SystemClock(),
        prices or PriceTable(),
    )
    opened = MeteredStorage(address.open(), priced)
    with contextlib.closing(opened):
        meter = JobMeter(spark, opened, priced, progress)
        log = StorageLog(opened, present)
        with meter.stage(_DRIVEN):
            log.open()
            tickets, left = open_tickets(opened, log)
            # a server that accepts two records of one number would let a file come twice
            probe_put_if_absent(opened)
        results: list[StagedResult] = []
        if tickets:
            with typed_errors("a task of the compaction"), meter.stage("compact", tasks=True) as stage:
                results = _run_on(spark, tickets, meter.address(address), present.now_ms())
                stage.entries = sum(ticket.count for ticket in tickets)
            with meter.stage(_DRIVEN):
                _, results = publish_staged(results, opened, log)
    done = [result for result in results if result.finished is not None]
    report = _report(
        [result.ticket for result in done], [*left, *(result for result in results if result.finished is None)]
    )
    written = sum(result.finished.stored.size_bytes for result in done if result.finished is not None)
    spent = meter.metrics
    return replace(
        report,
        written_bytes=written,
        requests=spent.requests,
        cost_usd=spent.cost_usd,
        log_number=log.state.number,
        metrics=spent,
    )


def plan_compaction(
    *, storage: str, s3: S3Options | None = None, clock: Clock | None = None, prices: PriceTable | None = None
) -> CompactReport:
    """Return what `compact` would do and cost now; needs no session.

    Raises `NotAnIndex`, `ConfigError`, what the storage raises.
    """
    priced = prices or PriceTable()
    opened = MeteredStorage(StorageAddress(storage, s3 or S3Options()).open(), priced)
    with contextlib.closing(opened):
        log = StorageLog(opened, clock or SystemClock())
        log.open()
        tickets, left = open_tickets(opened, log)
        spent, genesis = opened.total, log.state.genesis
        assert genesis is not None
        written = [ticket.count * genesis.layout.schema.item.itemsize for ticket in tickets]
        requests = dict(Counter(spent.requests_by_kind) + _requests(tickets, written))
        read = spent.bytes_read + sum(ticket.size_bytes for ticket in tickets)
        return replace(
            _report(tickets, left),
            written_bytes=sum(written),
            requests=requests,
            cost_usd=priced.cost_usd(requests, read),
            log_number=log.state.number,
            dry_run=True,
        )


def _requests(tickets: Sequence[Ticket], sizes: Sequence[int]) -> Counter[str]:
    """Return the requests of a job for `tickets` by operation, beside those of looking at them.

    They follow from how a task works: a range for the document and one for 8 MiB of entries, a put or the parts of an
    upload of `sizes` bytes, and a look at what is there. What the writer does about a file isn't in it.
    """
    requests = Counter(_PROBE)
    for ticket, size in zip(tickets, sizes, strict=True):
        requests["get_range"] += 1 + -(-ticket.entries_bytes // _RANGE_BYTES)
        requests += writing_requests(1, size)
    if tickets:
        requests += _RECORD
    return requests


def _report(tickets: Sequence[Ticket], left: Sequence[StagedResult]) -> CompactReport:
    return CompactReport(
        files=len(tickets),
        entries=sum(ticket.count for ticket in tickets),
        read_bytes=sum(ticket.size_bytes for ticket in tickets),
        left=tuple((result.ticket.file_id, result.left) for result in left if not (result.corrupt or result.failed)),
        damaged=tuple((result.ticket.file_id, result.left) for result in left if result.corrupt),
        failed=tuple((result.ticket.file_id, result.left) for result in left if result.failed),
    )


def _run_on(spark: SparkSession, tickets: Sequence[Ticket], address: Address, now_ms: int) -> list[StagedResult]:
    """Run a task a ticket; large files first, so that the last one to begin is short."""

    def run_one(ticket: Ticket) -> StagedResult:
        with between_tasks(), address.open() as storage:
            return compact_staged(ticket, storage, now_ms)

    ordered = sorted(tickets, key=lambda ticket: -ticket.size_bytes)
    return spark.sparkContext.parallelize(ordered, len(ordered)).map(run_one).collect()
