"""Migration: files and window tables of another layout are rewritten, each in place by one log record, as a merge is.

A table becomes a table of the same window, a file a file of the same entries, under new ids: to writers and readers the
old ones are merged. Proven before it is published by counts and checksums of entries, overtaken and repeated as a
merge. Files of preset ``rocketmq`` stay as they are, since RocketMQ reads them. Memory: of a file all entries. Threads:
as a merge's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tiered_index.clock import Clock, SystemClock
from tiered_index.errors import ObjectNotFound
from tiered_index.format.compacted import SealedFile
from tiered_index.format.names import new_file_id
from tiered_index.format.shard import entry_checksum
from tiered_index.service.cold.path import ColdPath, ColdSettings
from tiered_index.service.lifecycle.publication import send_compacted
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.service.merge.plan import MergeJob, MergePlan, MergeTask, table_job
from tiered_index.service.merge.run import MergeOptions, MergeReport, merge
from tiered_index.service.merge.task import PIECE_ITEMS, FinishedShard, InputReader, TaskResult, run_task
from tiered_index.storage.base import Storage
from tiered_index.storage.opening import open_storage, probe_put_if_absent
from tiered_index.storage.s3.options import S3Options

FileLayout = Literal["packed", "plain"]
_READERS = 8
_SHARD_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """The `jobs` of what has another layout, one a file or table, and how many objects are `right` as they are."""

    jobs: tuple[MergeJob, ...]
    right: int

    @property
    def objects(self) -> tuple[StoredObject, ...]:
        """What would be rewritten."""
        return tuple(stored for job in self.jobs for stored in job.inputs)


def plan_migration(storage: Storage, state: LogState, layout: FileLayout, lost: Container[str] = ()) -> MigrationPlan:
    """Return what to rewrite: a request an object, for its directory. What the storage has lost is left alone. Raises
    `CorruptFile` (`UnsupportedVersion` names what is of a newer version), as the storage.
    """
    assert state.genesis is not None
    descriptor, packed = state.genesis, layout == "packed"
    schema, stays_plain = descriptor.layout.schema, descriptor.layout.preset.newest_first
    with contextlib.closing(ColdPath(storage, keyed=schema.keyed)) as cold:

        def is_wrong(stored: StoredObject) -> bool:
            with contextlib.suppress(ObjectNotFound):
                is_packed = cold.trailer(stored).metadata.packing is not None
                return is_packed != (packed and not (stays_plain and stored.shard is None))
            return False

        with ThreadPoolExecutor(_READERS) as pool:
            objects = [stored for stored in state.objects.values() if stored.name not in lost]
            wrong = {o.name for o, is_one in zip(objects, pool.map(is_wrong, objects), strict=True) if is_one}
    jobs = []
    for stored in state.files.values():
        if stored.name in wrong:
            task = MergeTask(0, 0, descriptor.layout.slots, stored.sequence, (stored,), (), descriptor, state.expired)
            jobs.append(MergeJob((stored,), (), (replace(task, packed=packed),), "migrate"))
    for shards in state.tables.values():
        if any(stored.name in wrong for stored in shards) and not any(stored.name in lost for stored in shards):
            jobs.append(table_job(shards, descriptor, _SHARD_BYTES, expired=state.expired, packed=packed))
    ordered = sorted(jobs, key=lambda job: min(stored.second_min for stored in job.inputs))
    return MigrationPlan(tuple(ordered), len(objects) - sum(len(job.inputs) for job in jobs))


def migrate(
    storage: Storage,
    log: StorageLog,
    clock: Clock,
    layout: FileLayout,
    *,
    threads: int = 2,
    progress: Callable[[int], None] = lambda entries: None,
) -> MergeReport:
    """Rewrite what has another layout; raises as `merge`, and what was rewritten before stays."""

    def make_plan(lost: Container[str]) -> MergePlan:
        return MergePlan(plan_migration(storage, log.refresh(), layout, lost).jobs)

    return merge(storage, log, clock, MergeOptions(), threads=threads, progress=progress, make_plan=make_plan, run=_run)


def _run(task: MergeTask, storage: Storage, now_ms: int, progress: Callable[[int], None]) -> TaskResult:
    return run_task(task, storage, now_ms, progress) if task.windows else rewrite_file(task, storage, now_ms, progress)


def rewrite_file(task: MergeTask, storage: Storage, now_ms: int, progress: Callable[[int], None]) -> TaskResult:
    """Read one file and send it in the other layout, unpublished. What was sent before an error is taken back."""
    (stored,), schema = task.inputs, task.descriptor.layout.schema
    settings = ColdSettings(query_threads=_READERS, block_cache_bytes=0)
    with contextlib.closing(ColdPath(storage, keyed=schema.keyed, settings=settings)) as cold:
        metadata = cold.trailer(stored).metadata
        reader = InputReader(cold, task.inputs, schema, task.descriptor.layout.slots, 0, task.base_high, 1)
        entries = np.zeros(stored.count, schema.entry)
        names = list(schema.item.names or ())
        at = read_checksum = 0
        for piece in reader.pieces(PIECE_ITEMS):
            # more than the log says is told by `check_results`; the rest is not written
            part = entries[at : at + len(piece.items)]
            for name in names:
                part[name] = piece.items[name][: len(part)]
            part["time_diff_s"] = piece.seconds[: len(part)] - metadata.begin_ms // 1000
            at += len(piece.items)
            read_checksum += entry_checksum(piece.items, piece.seconds)
            progress(len(piece.items))
    # newest first as they were stored; a compaction takes entries in the order in which they came
    entries = entries[:at][::-1].copy()
    seconds = entries["time_diff_s"].astype(np.int64) + metadata.begin_ms // 1000
    checksum = entry_checksum(entries[names], seconds)
    sealed = replace(
        SealedFile.of(metadata, count=len(entries), sequence=stored.sequence, created_ms=0),
        file_id=new_file_id(metadata.begin_ms),
        predecessor=None,
        log_number=0,
        packed=task.packed,
    )
    sent = send_compacted(storage, sealed, entries, now_ms)
    finished = FinishedShard(sent.stored, sent.upload, sent.parts, checksum)
    return TaskResult(task.number, reader.read_counts, read_checksum, (finished,))


def migrate_index(
    storage: str,
    layout: FileLayout = "packed",
    *,
    yes: bool = False,
    threads: int = 2,
    s3: S3Options | None = None,
    clock: Clock | None = None,
) -> MigrationPlan:
    """Return what of the index at a storage URI has another layout than `layout`; rewrite it only with `yes`.

    ``packed`` is what this version writes by default, ``plain`` what versions before it read, too. Writers, readers and
    merges may be at work. Repeating it is harmless. Raises `NotAnIndex`, `CorruptFile`, `StorageUnavailable`,
    `StorageMisconfigured`; what was rewritten before stays.
    """
    present = clock or SystemClock()
    with contextlib.closing(open_storage(storage, options=s3 or S3Options())) as opened:
        log = StorageLog(opened, present)
        planned = plan_migration(opened, log.open(), layout)
        if yes:
            probe_put_if_absent(opened)
            migrate(opened, log, present, layout, threads=threads)
        return planned
