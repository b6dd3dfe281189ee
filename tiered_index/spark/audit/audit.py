"""Audit: the whole index proved by executors, and compared with the source that it was made of.

- Log records and checkpoints, and the tables that the log names: on the driver, as `tiered-index verify` does.
- Every object, byte by byte: counts, checksums, order, filters; every archived segment. A task checks some objects.
- With a source, every entry of it against those in the objects: *missing*, *extra* (the source has no such entry) and
  *wrong* ones (queue and offset of a key's entry agree, something else does not). One shuffle of both sides.

Nothing is changed. Duplicate entries are no difference: an index keeps what was put twice, and answers it once. What
damaged objects held can't be known, nor what objects held that were removed between check and comparison: entries of
the source that may have lain there are counted as *unproven*, and only the damage is a finding. One thread drives an
audit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tiered_index.clock import Clock, SystemClock
from tiered_index.config import IndexConfig
from tiered_index.errors import CorruptFile, InvalidArgument, StorageError, StorageMisconfigured, StorageUnavailable
from tiered_index.service.answers.validation import check_integer
from tiered_index.service.checks.checks import check_object, check_segments, check_storage
from tiered_index.service.checks.report import Report
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import ArchivedSegment, StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.spark.audit.differences import Differences, Sides, compare
from tiered_index.spark.audit.entries import ALL_TIME
from tiered_index.spark.build.columns import entry_frame
from tiered_index.spark.build.log_sources import SKIPPED
from tiered_index.spark.build.sources import SourceLike, frame_of
from tiered_index.spark.executors import StorageAddress, typed_errors
from tiered_index.spark.lookup.plan import Target
from tiered_index.spark.metrics import Address, JobMeter, JobMetrics
from tiered_index.storage.base import Storage
from tiered_index.storage.metering import MeteredStorage

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

__all__ = ["AuditResult", "audit"]

_TASKS_A_CORE = 4


@dataclass(frozen=True, slots=True)
class AuditResult:
    """What an audit found.

    `report` is as `verify`'s; `differences` are those of index and source, None where no source was given.

    `entries` and `objects` are the log's counts, `log_number` is the position of the log that was audited.
    """

    report: Report
    differences: Differences | None = None
    entries: int = 0
    objects: int = 0
    log_number: int = 0
    metrics: JobMetrics = field(default_factory=JobMetrics)

    @property
    def status(self) -> str:
        """``ok``, ``findings``, or ``incomplete``: nothing wrong so far, but not all could be read or proven."""
        if self.differences is not None and self.differences.findings:
            return "findings"
        if self.report.status == "ok" and self.differences is not None and self.differences.unproven:
            return "incomplete"
        return self.report.status


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
    clock: Clock | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> AuditResult:
    """Check the index in `storage`, and compare it with `source` where one is given.

    `source` and its `columns` are as `build` takes them. `begin_ms` and `end_ms` (inclusive, to the second) bound what
    is compared, not what is checked: for a source that is a part of the index, or the other way round. At most
    `most_listed` differences of each kind are kept, all are counted. `progress` is called with (stage, tasks done,
    tasks).

    Raises `NotAnIndex`, `InvalidArgument` (the source), what the storage raises on the driver. An object that can't be
    read is listed in the report; the comparison fails with what the storage raises.
    """
    settings = config or IndexConfig()
    present = clock or SystemClock()
    seconds = _seconds(begin_ms, end_ms)
    if check_integer("most_listed", most_listed) < 0:
        raise InvalidArgument(f"most_listed must not be negative, as {most_listed} is")
    address = StorageAddress(storage, settings.s3)
    opened = MeteredStorage(address.open(), settings.prices)
    with contextlib.closing(opened):
        meter = JobMeter(spark, opened, settings.prices, progress)
        report, seen = Report(), LogState()

        def check_objects(state: LogState) -> None:
            nonlocal seen
            seen = state
            with typed_errors("checking objects"), meter.stage("objects", tasks=True):
                _check_on(spark, state, meter.address(address), report)

        def quiet(number: int, what: str) -> None:
            pass

        with meter.stage("log"):
            state = check_storage(opened, {}, report, quiet, deep=True, threads=1, check_objects=check_objects)
        differences = None
        if source is not None and state is not None:
            with typed_errors("comparing with the source"):
                with meter.stage("plan"):
                    assert seen.genesis is not None
                    schema = seen.genesis.layout.schema
                    entries = entry_frame(frame_of(spark, source, meter.sources(settings.s3)), columns or {}, schema)
                    entries = entries.drop(SKIPPED) if SKIPPED in entries.columns else entries
                with meter.stage("compare", tasks=True):
                    bad = {defect.file for defect in report.findings if defect.part != "filter"}  # which hides no entry
                    sides, objects = (
                        Sides(entries, meter.address(address), schema, seen.genesis.layout.slots),
                        [*seen.objects.values()],
                    )
                    with compare(sides, objects, seconds) as compared:
                        damaged = [Target.of(o, sides.base) for o in objects if o.name in bad | compared.unread]
                        differences, unread = compared.told(damaged, most_listed)
                    _tell_what_was_unread((compared.unread | unread) - bad, report)
        if state is not None:
            _tell_what_went_meanwhile(opened, present, seen, report)
        else:
            also = ", and the index was not compared with its source" if source is not None else ""
            report.unchecked.append(
                ("objects", CorruptFile("log", f"it is damaged, so that no object was checked{also}"))
            )
    return AuditResult(
        report=report,
        differences=differences,
        entries=sum(stored.count for stored in seen.objects.values()),
        objects=len(seen.objects),
        log_number=seen.number,
        metrics=meter.metrics,
    )


def _seconds(begin_ms: int | None, end_ms: int | None) -> tuple[int, int]:
    begin_s = ALL_TIME[0] if begin_ms is None else check_integer("begin_ms", begin_ms) // 1000
    end_s = ALL_TIME[1] if end_ms is None else check_integer("end_ms", end_ms) // 1000
    if begin_s > end_s:
        raise InvalidArgument(f"begin_ms {begin_ms} lies after end_ms {end_ms}")
    # Spark and NumPy know 64 bits
    return max(begin_s, ALL_TIME[0]), min(end_s, ALL_TIME[1])


def _check_on(spark: SparkSession, state: LogState, address: Address, report: Report) -> None:
    """Check objects and archived segments in tasks, the largest first, and add what they found."""
    context = spark.sparkContext
    everything: list[StoredObject | ArchivedSegment] = [*state.objects.values(), *state.archive.values()]
    work = sorted(everything, key=lambda one: -one.size_bytes)
    if not work:
        return
    count = min(len(work), context.defaultParallelism * _TASKS_A_CORE)
    shared = context.broadcast(work)

    def check(numbers: Iterable[int]) -> Iterator[Report]:
        found = Report()
        with contextlib.closing(address.open()) as storage:
            for number in numbers:
                for place in range(number, len(shared.value), count):
                    _check_one(shared.value[place], storage, found)
        yield found

    try:
        for found in context.parallelize(range(count), count).mapPartitions(check).collect():
            report.add_report(found)
    finally:
        shared.destroy()


def _check_one(one: StoredObject | ArchivedSegment, storage: Storage, found: Report) -> None:
    try:
        if isinstance(one, StoredObject):
            check_object(storage, one, None, found, deep=True)
        else:
            check_segments(storage, [one], found, lambda number, what: None, deep=True)
    except StorageMisconfigured as error:
        found.unchecked.append((one.name, StorageMisconfigured(str(error))))
    except StorageError as error:
        # of a class that can be sent
        found.unchecked.append((one.name, StorageUnavailable(str(error))))


def _tell_what_was_unread(names: Iterable[str], report: Report) -> None:
    """Tell of objects that were sound when they were checked, and could not be read whole when they were compared."""
    for name in sorted(names):
        gone = StorageUnavailable(
            f"{name} could not be read any more when it was compared (a merge may have removed it): run it again"
        )
        report.unchecked.append((name, gone))


def _tell_what_went_meanwhile(storage: Storage, clock: Clock, seen: LogState, report: Report) -> None:
    """Take back what was found of objects that a merge has removed while they were checked: they may be deleted."""
    log = StorageLog(storage, clock)
    try:
        now = log.open()
    except CorruptFile:
        return  # reported already, or damaged since: the next audit reports it
    gone = {name for name in (*seen.objects, *seen.archive) if name not in now.objects and name not in now.archive}
    taken_back = {defect.file for defect in report.findings if defect.file in gone}
    report.findings[:] = [defect for defect in report.findings if defect.file not in gone]
    for name in sorted(taken_back):
        report.unchecked.append(
            (name, StorageUnavailable(f"{name} was removed from the log during the audit: run it again"))
        )
