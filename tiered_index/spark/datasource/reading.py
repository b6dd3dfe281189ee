"""Reads of the entries data source: the selection, the plan of the tasks, and the reading in tasks.

An entry has no key text, so only a read with option key has a column `key`. Each stored entry is one row; unlike in
`query`, duplicates of an identity are not removed. Memory of a task: one object's directory, 8 MiB of items and their
Arrow batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tiered_index.base.clock import SystemClock
from tiered_index.errors import InvalidArgument, StorageUnavailable
from tiered_index.format.schema import Schema
from tiered_index.format.trailer import Run, Trailer
from tiered_index.service.log.expired import Expired
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.service.read.answers.rows import check_range, check_topic
from tiered_index.service.read.export import ExportRange, entry_batch
from tiered_index.service.read.files.cold_path import ColdPath, ColdSettings, MissingObject, missing_error
from tiered_index.service.read.files.compacted import StorageBytes
from tiered_index.service.read.files.file_search import scan_runs
from tiered_index.spark.datasource.options import DataSourceOptions
from tiered_index.storage.base import Storage


def selection_of(options: DataSourceOptions) -> ExportRange:
    """Return the selection of the options topic, queues, beginMs and endMs (inclusive), by the rules of `query`."""
    topic, begin, end = options.text("topic"), options.number("beginMs"), options.number("endMs")
    low, high, _ = check_range(begin, end, 1)
    bounds = {"second_min": low} if begin is not None else {}
    bounds |= {"second_max": high} if end is not None else {}
    topics = None if topic is None else frozenset([check_topic(topic)])
    return ExportRange(topics, queues=options.numbers("queues"), **bounds)


# Cost of opening an object, in bytes read.
_OPENING_BYTES = 4 << 20
# Most tasks of a scan, about: the driver holds their plans
_MOST_TASKS = 1_000_000


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """Part `number` of `parts` of an object's slot groups, by their bytes."""

    stored: StoredObject
    number: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """One task's parts of the objects at log position `log_number`, and the selection of their entries."""

    parts: tuple[ObjectPart, ...]
    selection: ExportRange
    schema: Schema
    log_number: int
    expired: Expired


def plan_tasks(state: LogState, selection: ExportRange, partition_bytes: int) -> list[TaskPlan]:
    """Return the tasks of a read at `state`, none if no object can have selected entries."""
    assert state.genesis is not None
    objects = [o for o in state.objects.values() if o.count and selection.overlaps(o.second_min, o.second_max)]
    objects.sort(key=lambda o: (o.second_min, o.name))
    schema = state.genesis.layout.schema
    tasks = _runs(objects, partition_bytes)
    return [TaskPlan(parts, selection, schema, state.number, state.expired) for parts in tasks]


def _runs(objects: Sequence[StoredObject], partition_bytes: int) -> Iterator[tuple[ObjectPart, ...]]:
    total = sum(stored.size_bytes for stored in objects)
    if total // partition_bytes > _MOST_TASKS:
        raise InvalidArgument(
            f"maxPartitionBytes is {partition_bytes:,} bytes, which makes more than {_MOST_TASKS:,} tasks for an index "
            f"of {total:,} bytes: give a unit, such as 64m"
        )
    parts = []
    for stored in objects:
        number = -(-stored.size_bytes // partition_bytes)
        size = stored.size_bytes // number + _OPENING_BYTES
        parts += [(ObjectPart(stored, part, number), size) for part in range(number)]
    reached = itertools.accumulate(size for _, size in parts)
    # task n has the parts whose bytes, accumulated, end in the nth range of `partition_bytes`
    for _, task in itertools.groupby(
        zip(parts, reached, strict=True), lambda part_end: (part_end[1] - 1) // partition_bytes
    ):
        yield tuple(part for (part, _), _ in task)


_WINDOW_BYTES = 8 << 20
_BATCH_ROWS = 1 << 16


def read_task(plan: TaskPlan, storage: Storage, wanted: Any) -> Iterator[pa.RecordBatch]:
    """Yield a task's entries as batches of the Arrow schema `wanted`.

    Raises `StorageUnavailable` if an object was removed since, `CorruptFile`, `SchemaMismatch`, the storage's errors.
    """
    # no block cache: all bytes are read once
    settings = ColdSettings(query_threads=8, cache_slot_groups=False)
    with closing(ColdPath(storage, keyed=plan.schema.keyed, settings=settings)) as cold:
        for part in plan.parts:
            try:
                yield from _read_part(cold, part, plan, wanted)
            except MissingObject as error:
                if error.name in StorageLog(storage, SystemClock()).open().objects:
                    raise missing_error(error.name) from error
                raise StorageUnavailable(
                    f"{error.uri}: {error.name} was removed (merged, replaced or expired) after this read was planned "
                    f"at log position {plan.log_number}; load the index again and run it again"
                ) from error


def _read_part(cold: ColdPath, part: ObjectPart, plan: TaskPlan, wanted: Any) -> Iterator[pa.RecordBatch]:
    source, selection = StorageBytes(cold, part.stored), plan.selection
    trailer = source.trailer_of(plan.schema)
    metadata, names = trailer.metadata, dict(trailer.metadata.topics)
    if selection.topics is not None and selection.topics.isdisjoint(names.values()):
        return
    for _, items in scan_runs(source, _share(trailer, part, selection), _WINDOW_BYTES):
        for start in range(0, len(items), _BATCH_ROWS):
            some = items[start : start + _BATCH_ROWS]
            some, seconds = selection.selected(some, metadata.begin_ms // 1000, names, plan.expired)
            if len(some):
                yield entry_batch(some, seconds, names, wanted)


def _share(trailer: Trailer, part: ObjectPart, selection: ExportRange) -> Sequence[Run]:
    """Return the runs that start in this part's share of the bytes, so that each run is in one part."""
    runs = trailer.directory.all_runs()
    ends = np.cumsum([run.length for run in runs], dtype=np.int64)
    total = int(ends[-1]) if len(runs) else 0
    begins = ends - [run.length for run in runs]
    low, high = total * part.number // part.parts, total * (part.number + 1) // part.parts
    first, last = np.searchsorted(begins, [low, high]).tolist()
    return [run for run in runs[first:last] if selection.overlaps(run.second_min, run.second_max)]
