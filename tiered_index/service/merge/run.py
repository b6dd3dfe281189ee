"""Runs a merge in this process: plan, tasks in threads, check of the results, one log record. Estimates its cost.

You can repeat a merge: merged files are no longer inputs. If another merge was faster with an input, the job is planned
again, a bounded number of times. A failure before a job's record leaves the index unchanged. Estimates assume that
entries are spread evenly over tasks: small jobs cost less, a hot key costs more. Threads: several merges at once are
safe, because the log accepts only one of them for an input.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

from tiered_index.clock import Clock, SystemClock
from tiered_index.errors import CorruptFile, ObjectNotFound, TieredIndexError
from tiered_index.format.packed import packed_bytes
from tiered_index.heap import give_back
from tiered_index.service.lifecycle.orphans import not_there
from tiered_index.service.lifecycle.publication import Publication, abandon
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import LogRecord
from tiered_index.service.log.state import LogState
from tiered_index.service.merge.plan import MergeJob, MergeOptions, MergePlan, plan_merge, window_seconds
from tiered_index.service.merge.task import PIECE_ITEMS, TaskResult, run_task
from tiered_index.storage.base import Storage, StorageOptions
from tiered_index.storage.opening import open_storage
from tiered_index.storage.prices import PriceTable
from tiered_index.storage.probe import probe_put_if_absent
from tiered_index.types import no_progress

_log = logging.getLogger(__name__)


class MergeOvertaken(TieredIndexError):
    """Another job has merged or removed an input; this job changed nothing. Plan again."""

    exit_code = 3


def publish(job: MergeJob, results: Sequence[TaskResult], storage: Storage, log: StorageLog) -> LogState:
    """Check, complete and publish a job. Raises `CorruptFile` (wrong results), `MergeOvertaken`, `JobOverdue`."""
    check_results(job, results)
    shards = [shard for result in results for shard in result.shards]
    publication = Publication(log, [shard.sent for shard in shards])
    publication.complete()
    names = tuple(stored.name for stored in job.inputs)
    added = {shard.stored.name for shard in shards}

    def make(state: LogState) -> LogRecord | None:
        gone = [name for name in names if name not in state.objects]
        if added <= state.objects.keys() and (added or len(gone) == len(names)):
            return None  # an earlier try appended the record
        if gone:
            raise MergeOvertaken(
                f"{storage.uri}: {len(gone)} of {len(names)} sources were removed from the log, {gone[0]} first"
            )
        stored = tuple(shard.stored for shard in shards)
        return LogRecord(0, "merge", 0, "", 0, stored, names, left_out=sum(result.expired for result in results))

    state = publication.record("a merge", make)
    tables = ", ".join(sorted({window.table for window in job.windows}))
    _log.info("merge of %d objects with %d entries into tables: %s", len(names), job.entries, tables)
    return state


def check_results(job: MergeJob, results: Sequence[TaskResult]) -> None:
    """Raise `CorruptFile` unless each task has one result, and the inputs' entries were all written or had expired."""
    numbers = sorted(result.number for result in results)
    if numbers != [task.number for task in job.tasks]:
        raise CorruptFile("merge", "not one result of each task", expected=len(job.tasks), found=numbers)
    for stored in job.inputs:
        read = sum(result.read_counts.get(stored.name, 0) for result in results)
        problem = "the merge read another number of entries than the log says"
        CorruptFile.unless_equal(stored.name, problem, stored.count, read)
    shards = [shard for result in results for shard in result.shards]
    written = sum(shard.stored.count for shard in shards) + sum(result.expired for result in results)
    CorruptFile.unless_equal("merge", "wrote another number of entries than it read", job.entries, written)
    read_sum, written_sum = sum(result.read_checksum for result in results), sum(shard.checksum for shard in shards)
    written_sum += sum(result.expired_checksum for result in results)
    CorruptFile.unless_equal("merge", "wrote other entries than it read", read_sum % 2**64, written_sum % 2**64)


_TRIES = 10

RunTasks = Callable[[MergeJob], Sequence[TaskResult]]


@dataclass(frozen=True, slots=True)
class MergeReport:
    """The result of a merge, in objects, entries and bytes. It left out `expired` of the `entries` that it read.

    - `jobs`: published jobs, which replaced `sources` objects by `tables` window tables with `shards` shards.
    - `read_bytes`, `written_bytes`: bytes of the sources, and of the shards.
    - `left`: objects that stay, as (name, reason) pairs.
    """

    jobs: int = 0
    sources: int = 0
    tables: int = 0
    shards: int = 0
    entries: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    left: tuple[tuple[str, str], ...] = ()
    expired: int = 0

    def __add__(self, other: MergeReport) -> MergeReport:
        names = [one.name for one in fields(self) if one.name != "left"]
        numbers: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in names}
        return replace(self, **numbers)


def plan(log: StorageLog, clock: Clock, options: MergeOptions, lost: Container[str] = ()) -> MergePlan:
    """Return the plan of a merge now; `lost` are names of objects that the storage is known to lack."""
    return plan_merge(log.refresh(), options, now_s=clock.now_ms() // 1000, lost=lost)


def merge(
    storage: Storage,
    log: StorageLog,
    clock: Clock,
    options: MergeOptions,
    *,
    threads: int = 2,
    run_tasks: RunTasks | None = None,
    progress: Callable[[int], None] = no_progress,
    make_plan: Callable[[Container[str]], MergePlan] | None = None,
) -> MergeReport:
    """Run a merge, planned by `make_plan` if given: it is called with the names of lost objects.

    Raises `CorruptFile` (also for a lost object), `SchemaMismatch`, errors of the storage. Published jobs stay.
    """

    def run_here(job: MergeJob) -> Sequence[TaskResult]:
        futures: list[Future[TaskResult]] = []
        with ThreadPoolExecutor(threads, "tiered-index-merge") as pool:
            try:
                for task in job.tasks:  # not a comprehension: a submit may fail after earlier ones
                    futures.append(pool.submit(run_task, task, storage, clock.now_ms(), progress))
                results = [future.result() for future in futures]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                done = [future for future in futures if not future.cancelled() and future.exception() is None]
                abandon([shard.sent for future in done for shard in future.result().shards], storage)
                raise
        give_back()
        return results

    report = MergeReport()
    lost: set[str] = set()
    for _ in range(_TRIES):
        made = make_plan(lost) if make_plan is not None else plan(log, clock, options, lost)
        report = replace(report, left=made.left)
        overtaken = False
        for job in made.jobs:
            try:
                results = (run_tasks or run_here)(job)
            except ObjectNotFound:
                missing = not_there(storage, job.inputs)
                if not missing:
                    raise
                gone = {stored.name for stored in missing} & log.refresh().objects.keys()
                if gone and not options.skip_lost:
                    more = f", nor {len(gone) - 1} more of this merge" if len(gone) > 1 else ""
                    raise CorruptFile(
                        min(gone),
                        f"the log names this object, but the storage does not have it{more}: --skip-lost "
                        f"(skip_lost=True) merges the rest, `recover --lost` gives it up",
                    ) from None
                lost |= gone
                overtaken = True
                continue
            shards = [shard for result in results for shard in result.shards]
            try:
                publish(job, results, storage, log)
            except MergeOvertaken:
                overtaken = True
                continue
            written = sum(shard.stored.size_bytes for shard in shards)
            tables = len({shard.stored.shard.table for shard in shards if shard.stored.shard is not None})
            expired = sum(result.expired for result in results)
            done = MergeReport(1, len(job.inputs), tables, len(shards), job.entries, job.size_bytes, written)
            report += replace(done, expired=expired)
        if not overtaken:
            return report
    raise MergeOvertaken(f"{storage.uri}: another merge published first, {_TRIES} times in a row; try again later")


def merge_index(
    storage: str,
    *,
    window: str | int = "1d",
    options: MergeOptions | None = None,
    threads: int = 2,
    s3: StorageOptions | None = None,
    clock: Clock | None = None,
    progress: Callable[[int], None] = no_progress,
) -> MergeReport:
    """Merge uploaded files and shorter tables of the index at a storage URI into tables of the length `window`.

    `window` is ``1h``, ``1d`` or a number of seconds. `options` has the other options; its `window_s` is ignored.
    `threads` tasks run at once; each calls `progress` with the number of entries read since its last call. You can
    repeat the call, and run it at the same time as other merges, writers and readers. `s3` has the options of S3.
    `clock` replaces the clock in tests. Raises `InvalidArgument`, `NotAnIndex`, `CorruptFile`, `StorageUnavailable`,
    `StorageMisconfigured`; jobs that were published stay.
    """
    chosen = replace(options or MergeOptions(), window_s=window_seconds(window))
    present = clock or SystemClock()
    with contextlib.closing(open_storage(storage, options=s3)) as opened:
        log = StorageLog(opened, present)
        log.open()
        # with a server that accepts two records of one number, two jobs could merge the same files
        probe_put_if_absent(opened)
        return merge(opened, log, present, chosen, threads=threads, progress=progress)


_SPAN_BYTES = 8 << 20
_PART_BYTES = 16 << 20
RECORD_REQUESTS: Mapping[str, int] = {"get": 3, "put_if_absent": 1, "put": 2, "list": 1}
"""Requests per log record: find the end, check the last record, append, checkpoint, summary of directories."""


@dataclass(frozen=True, slots=True)
class MergeCost:
    """Estimates. `requests` by operation; bytes are those of items, without directories and filters (about 5%)."""

    shards: int
    requests: dict[str, int]
    read_bytes: int
    written_bytes: int
    cost_usd: float


def estimate(job: MergeJob, prices: PriceTable) -> MergeCost:
    """Return the estimated cost of a job."""
    schema = job.tasks[0].descriptor.layout.schema
    runs = len({task.base_low for task in job.tasks})
    readers = Counter(stored.name for task in job.tasks for stored in task.inputs)
    times = Counter(
        name for name, _ in {(stored.name, task.windows[0].begin_s) for task in job.tasks for stored in task.inputs}
    )
    moved = sum(stored.count * times[stored.name] for stored in job.inputs)
    requests: Counter[str] = Counter(RECORD_REQUESTS)
    pieces = max(1, -(-moved // (len(job.tasks) * PIECE_ITEMS)))
    # a task reads the directory of each of its inputs, and one range per piece
    spans = sum(
        max(pieces * readers[stored.name], -(-stored.items_bytes(schema) * times[stored.name] // _SPAN_BYTES))
        for stored in job.inputs
    )
    requests["get_range"] += readers.total() + spans
    shards = 0
    for window in job.windows:
        # a window has at most as many shards as entries
        made = min(runs, window.entries)
        size = packed_bytes(schema, window.entries) // made
        shards += made
        requests += writing_requests(made, size)
    # the summary needs each shard's directory
    requests["get_range"] += shards
    read = sum(stored.items_bytes(schema) * times[stored.name] for stored in job.inputs)
    return MergeCost(shards, dict(requests), read, packed_bytes(schema, job.entries), prices.cost_usd(requests, read))


def writing_requests(shards: int, size: int) -> Counter[str]:
    """Return the requests, by operation, that upload `shards` objects of `size` bytes each and check them."""
    if size < 2 * _PART_BYTES:
        return Counter(put=shards, head=shards)
    # the last part has the rest: less than two parts
    return Counter(begin_upload=shards, upload_part=shards * (size // _PART_BYTES), complete_upload=shards, head=shards)
