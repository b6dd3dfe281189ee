"""Merges files and shorter tables into window tables, or rewrites objects: the jobs, their report, and their cost.

You can repeat a merge: merged files are no longer inputs. A failure before a rewrite's record leaves the index
unchanged. Estimates assume that entries are spread evenly over tasks: small rewrites cost less, a hot key costs more.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from tiered_index.base.clock import Clock, SystemClock
from tiered_index.format.packed import packed_bytes
from tiered_index.service.jobs.rewriting.job import Job, TaskResult, Workers, in_threads
from tiered_index.service.jobs.rewriting.merge_plan import (
    MergeOptions,
    MergePlan,
    MergeRewrite,
    plan_merge,
    plan_rewrite,
    window_seconds,
)
from tiered_index.service.jobs.rewriting.rewrite import PIECE_ITEMS
from tiered_index.service.jobs.segments.catalogs import merge_catalogs
from tiered_index.service.jobs.segments.joining import join_segments
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.state import LogState
from tiered_index.storage.base import PART_BYTES, Storage, StorageOptions
from tiered_index.storage.opening import open_storage
from tiered_index.storage.prices import PriceTable
from tiered_index.storage.probe import probe_put_if_absent
from tiered_index.types import no_progress


@dataclass(frozen=True, slots=True)
class MergeReport:
    """The result of a merge, in objects, entries and bytes. It left out `expired` of the `entries` that it read.

    - `jobs`: published rewrites, which replaced `sources` objects by `tables` window tables with `shards` shards.
    - `read_bytes`, `written_bytes`: bytes of the sources, and of the shards.
    - `left`: objects that stay, as (name, reason) pairs.
    - `segments_joined`, `segments_made`: small archived segments, and the ones that have their messages now.
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
    segments_joined: int = 0
    segments_made: int = 0

    @classmethod
    def of(cls, rewrite: MergeRewrite, results: Sequence[TaskResult]) -> MergeReport:
        """Return the report of one published rewrite."""
        objects = [made.stored for result in results for made in result.objects]
        return cls(
            jobs=1,
            sources=len(rewrite.inputs),
            tables=len({stored.part.table for stored in objects}),
            shards=len(objects),
            entries=rewrite.entries,
            read_bytes=rewrite.size_bytes,
            written_bytes=sum(stored.size_bytes for stored in objects),
            expired=sum(result.expired for result in results),
        )

    def __add__(self, other: MergeReport) -> MergeReport:
        names = [member.name for member in fields(self) if member.name != "left"]
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
    workers: Workers[MergeRewrite] | None = None,
    progress: Callable[[int], None] = no_progress,
) -> MergeReport:
    """Run a merge by `workers` (None: `threads` threads, which call `progress` with numbers of entries).

    Then small columnar segments are joined in this process, and catalogs of segments are merged.

    Raises `CorruptFile` (also for a lost object), `SchemaMismatch`, errors of the storage. Published rewrites stay.
    """
    left: tuple[tuple[str, str], ...] = ()

    def planned(state: LogState, lost: Container[str]) -> Sequence[MergeRewrite]:
        nonlocal left
        merge_plan = plan_merge(state, options, now_s=clock.now_ms() // 1000, lost=lost)
        left = merge_plan.left
        return merge_plan.rewrites

    chosen = workers or in_threads(storage, clock, threads, progress)
    done = Job(log, planned, chosen, skips_lost=options.skip_lost).run()
    joined = join_segments(log)
    merge_catalogs(log)
    begun = MergeReport(left=left + joined.damaged, segments_joined=joined.segments, segments_made=joined.made)
    return sum((MergeReport.of(*outcome) for outcome in done), begun)


def rewrite_objects(
    storage: Storage,
    log: StorageLog,
    clock: Clock,
    names: Callable[[LogState], Container[str]],
    *,
    threads: int = 2,
    workers: Workers[MergeRewrite] | None = None,
    shard_bytes: int = 1 << 30,
    progress: Callable[[int, int], None] = no_progress,
) -> MergeReport:
    """Write objects again, without expired and erased entries, until `names` names none of a state that can be read.

    Their tables have the same windows. `progress` gets the numbers of entries that were read, and of all entries to
    read. Objects that the storage lacks are left. Raises as `merge`.
    """
    lock, done, total = threading.Lock(), 0, 0

    def planned(state: LogState, lost: Container[str]) -> Sequence[MergeRewrite]:
        nonlocal done, total
        rewrites = plan_rewrite(state, names(state), lost=lost, shard_bytes=shard_bytes)
        done, total = 0, sum(rewrite.entries for rewrite in rewrites)
        return rewrites

    def count(entries: int) -> None:
        nonlocal done
        with lock:
            done += entries
            progress(min(done, total), total)

    chosen = workers or in_threads(storage, clock, threads, count)
    published = Job(log, planned, chosen, skips_lost=True, repeats=True).run()
    return sum((MergeReport.of(*outcome) for outcome in published), MergeReport())


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
RECORD_REQUESTS: Mapping[str, int] = {"list": 1, "get": 1, "put_if_absent": 1, "put": 1}
"""Requests per log record: find the end, check the last record, append, checkpoint."""


@dataclass(frozen=True, slots=True)
class MergeCost:
    """Estimates. `requests` by operation; bytes are those of items, without directories and filters (about 5%)."""

    shards: int
    requests: dict[str, int]
    read_bytes: int
    written_bytes: int
    cost_usd: float


def estimate(rewrite: MergeRewrite, prices: PriceTable) -> MergeCost:
    """Return the estimated cost of a rewrite."""
    schema = rewrite.tasks[0].descriptor.layout.schema
    runs = len({task.base_low for task in rewrite.tasks})
    readers = Counter(stored.name for task in rewrite.tasks for stored in task.inputs)
    times = Counter(
        name for name, _ in {(stored.name, task.windows[0].begin_s) for task in rewrite.tasks for stored in task.inputs}
    )
    moved = sum(stored.count * times[stored.name] for stored in rewrite.of_entries)
    requests: Counter[str] = Counter(RECORD_REQUESTS)
    pieces = max(1, -(-moved // (len(rewrite.tasks) * PIECE_ITEMS)))
    # a task reads the directory of each of its inputs, and one range per piece
    spans = sum(
        max(pieces * readers[stored.name], -(-stored.items_bytes(schema) * times[stored.name] // _SPAN_BYTES))
        for stored in rewrite.of_entries
    )
    requests["get_range"] += readers.total() + spans
    shards = 0
    for window in rewrite.windows:
        # a window has at most as many shards as entries
        made = min(runs, window.entries)
        size = packed_bytes(schema, window.entries) // made
        shards += made
        requests += writing_requests(made, size)
    read = sum(stored.items_bytes(schema) * times[stored.name] for stored in rewrite.of_entries)
    return MergeCost(
        shards, dict(requests), read, packed_bytes(schema, rewrite.entries), prices.cost_usd(requests, read)
    )


def writing_requests(shards: int, size: int) -> Counter[str]:
    """Return the requests, by operation, that upload `shards` objects of `size` bytes each and check them."""
    if size <= PART_BYTES:
        return Counter(put=shards, head=shards)
    # one request begins the upload, one completes it
    return Counter(write=shards * (1 + -(-size // PART_BYTES)), put=shards, head=shards)
