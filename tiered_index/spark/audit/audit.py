"""Audits a whole index on executors, and compares it with its source.

The driver checks the log and its tables as `tiered-index verify` does; tasks check every byte of objects and archived
segments. With a source, one shuffle of digests finds *missing*, *extra* and *wrong* entries; duplicates are no
difference. An audit changes nothing. One thread drives it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from tiered_index.base.clock import SystemClock
from tiered_index.config import IndexConfig
from tiered_index.errors import (
    CorruptFile,
    InvalidArgument,
    NotAnIndex,
    StorageError,
    StorageMisconfigured,
    StorageUnavailable,
    TieredIndexError,
)
from tiered_index.service.jobs.verify import check_object, check_storage, segments_in_order
from tiered_index.service.jobs.verify_report import Report
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import ArchivedSegment, StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.service.read.answers.rows import check_integer
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.audit.differences import Differences, compare
from tiered_index.spark.audit.entries import ALL_TIME, Sides, groups_of
from tiered_index.spark.failures import typed_errors
from tiered_index.spark.metrics import JobMeter, JobMetrics, described
from tiered_index.spark.writing.merge import run_in_tasks
from tiered_index.spark.writing.sources import SourceLike, check_source, entries_of
from tiered_index.storage.base import Storage
from tiered_index.storage.metering import MeteredStorage

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

_SEGMENTS_AT_ONCE = 10_000
_CHECK = "objects: check every byte"


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The result of an audit.

    `report` is a report of `verify`. `differences` are those of index and source, None without a source. `entries` and
    `objects` are the log's counts at its position `log_number`. `metrics` are those of the job.
    """

    report: Report
    differences: Differences | None = None
    entries: int = 0
    objects: int = 0
    log_number: int = 0
    metrics: JobMetrics = field(default_factory=JobMetrics)

    @property
    def status(self) -> str:
        """``ok``, ``findings``, or ``incomplete``: no findings, but not everything could be read or proven."""
        if self.differences is not None and self.differences.findings:
            return "findings"
        if self.report.status == "ok" and self.differences is not None and self.differences.unproven:
            return "incomplete"
        return self.report.status


def check_audit(source: SourceLike | None, *, storage: str, fields: Mapping[str, object], config: IndexConfig) -> None:
    """Raise the errors of `audit` that need no Spark, for an index and a source; `fields` are its `columns`."""
    with StorageAddress(storage, config.s3).open() as opened:
        try:
            genesis = StorageLog(opened, SystemClock()).open().genesis
        except NotAnIndex:
            raise
        except TieredIndexError:
            return  # an audit reports other errors of a log
    assert genesis is not None
    if source is not None:
        check_source(source, fields, genesis.layout.schema, config.changed(storage=storage))


def audit(
    spark: SparkSession,
    source: SourceLike | None = None,
    *,
    storage: str,
    columns: Mapping[str, str | Column] | None = None,
    begin_ms: int | None = None,
    end_ms: int | None = None,
    most_listed: int = 1000,
    config: IndexConfig | None = None,
) -> AuditResult:
    """Check the index in `storage`, and compare it with `source` if one is given.

    For `source` and its `columns` see `build`. `begin_ms` and `end_ms` (inclusive, to the second) bound the comparison,
    not the checks. Give them if the source has only a part of the index, or the reverse. At most `most_listed`
    differences of each kind are listed; all are counted. Raises `NotAnIndex`, `InvalidArgument` (the source), and the
    storage's errors on the driver. The report lists an object that can't be read; the comparison raises the storage's
    errors. `config` has the options of S3 and the price table.
    """
    settings = config or IndexConfig()
    begin_s = ALL_TIME[0] if begin_ms is None else check_integer("begin_ms", begin_ms) // 1000
    end_s = ALL_TIME[1] if end_ms is None else check_integer("end_ms", end_ms) // 1000
    if begin_s > end_s:
        raise InvalidArgument(f"begin_ms {begin_ms} is after end_ms {end_ms}")
    # Spark and NumPy know 64 bits
    seconds = max(begin_s, ALL_TIME[0]), min(end_s, ALL_TIME[1])
    if check_integer("most_listed", most_listed) < 0:
        raise InvalidArgument(f"most_listed must be 0 or more, not {most_listed}")
    address = StorageAddress(storage, settings.s3)
    with contextlib.closing(MeteredStorage(address.open(), settings.prices)) as opened:
        meter = JobMeter(spark, opened)
        report, seen = Report(), LogState()

        def check_objects(state: LogState) -> None:
            nonlocal seen
            seen = state
            _check_on(spark, state, opened, meter.address(address), report)

        state = check_storage(opened, {}, report, lambda *_: None, deep=True, threads=1, check_objects=check_objects)
        differences = None
        if source is not None and state is not None:
            compared = described(spark, "compare: compare the index's entries with its source's")
            with typed_errors("comparing with the source"), compared:
                assert seen.genesis is not None
                schema = seen.genesis.layout.schema
                of_source = settings.changed(storage=storage), meter.sources(settings.s3, storage)
                entries = entries_of(spark, source, columns or {}, schema, *of_source)
                bad = {defect.file for defect in report.findings if defect.part != "filter"}  # which hides no entry
                sides = Sides(entries, meter.address(address), schema, seen.expired)
                differences, unread = compare(sides, [*seen.objects.values()], seconds, bad, most_listed)
                told = {what for what, _ in report.unchecked}
                for name in sorted(unread - bad - told):  # sound when they were checked
                    gone = f"{name} could not be read any more when it was compared (a merge may have removed it)"
                    report.unchecked.append((name, StorageUnavailable(f"{gone}: run it again")))
        if state is None:
            also = ", and the index was not compared with its source" if source is not None else ""
            damaged = CorruptFile("log", f"it is damaged, so no object was checked{also}")
            report.unchecked.append(("objects", damaged))
    entries_seen = sum(stored.count for stored in seen.objects.values())
    return AuditResult(report, differences, entries_seen, len(seen.objects), seen.number, meter.metrics)


def _check_on(spark: SparkSession, state: LogState, storage: Storage, address: StorageAddress, report: Report) -> None:
    """Check objects and archived segments in tasks, and add their findings. Memory: some thousand segments."""
    segments = segments_in_order(storage, state, report)
    work: list[Any] = [*state.objects.values(), *islice(segments, _SEGMENTS_AT_ONCE)]
    while work:
        groups = groups_of(work, spark.sparkContext.defaultParallelism)
        for part_report in run_in_tasks(spark, address, _CHECK, _checked, groups):
            report.add_report(part_report)
        work = list(islice(segments, _SEGMENTS_AT_ONCE))


def _checked(storage: Storage, work: Iterable[StoredObject | ArchivedSegment]) -> Report:
    report = Report()
    for stored in work:
        _check_one(stored, storage, report)
    return report


def _check_one(stored: StoredObject | ArchivedSegment, storage: Storage, report: Report) -> None:
    try:
        check_object(storage, stored, None, report, deep=True)
    except StorageError as error:
        # a class that can be pickled
        kind = StorageMisconfigured if isinstance(error, StorageMisconfigured) else StorageUnavailable
        report.unchecked.append((stored.name, kind(str(error))))
