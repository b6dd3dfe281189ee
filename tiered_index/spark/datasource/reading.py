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
import numpy.typing as npt
import pyarrow as pa

from tiered_index.clock import SystemClock
from tiered_index.errors import InvalidArgument, StorageUnavailable
from tiered_index.format.arrow import array_of, topic_names
from tiered_index.format.hashing import normal_hashes
from tiered_index.format.metadata import Metadata
from tiered_index.format.schema import Schema
from tiered_index.format.trailer import Run, Trailer
from tiered_index.retention import Expired
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.service.read.cold_path import ColdPath, ColdSettings, MissingObject, missing_error
from tiered_index.service.read.compacted import StorageBytes
from tiered_index.service.read.file_search import scan_runs
from tiered_index.service.read.rows import check_range, check_topic
from tiered_index.spark.datasource.options import DataSourceOptions
from tiered_index.storage.base import Storage

# Bounds of seconds beyond those of all entries.
EARLIEST, LATEST = -(2**62), 2**62


@dataclass(frozen=True, slots=True)
class EntrySelection:
    """Entries with `topic` and of `queues` (None: any), in the inclusive range of seconds."""

    topic: str | None = None
    queues: tuple[int, ...] | None = None
    second_min: int = EARLIEST
    second_max: int = LATEST

    @classmethod
    def of_options(cls, options: DataSourceOptions) -> EntrySelection:
        """Return the selection of the options topic, queues, beginMs and endMs (inclusive), by the rules of `query`."""
        topic = options.text("topic")
        begin, end = options.number("beginMs"), options.number("endMs")
        low, high, _ = check_range(begin, end, 1)
        return cls(
            None if topic is None else check_topic(topic),
            options.numbers("queues"),
            EARLIEST if begin is None else low,
            LATEST if end is None else high,
        )


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
    selection: EntrySelection
    schema: Schema
    log_number: int
    expired: Expired


def plan_tasks(state: LogState, selection: EntrySelection, partition_bytes: int) -> list[TaskPlan]:
    """Return the tasks of a read at `state`, none if no object can have selected entries."""
    assert state.genesis is not None
    low, high = selection.second_min, selection.second_max
    objects = [o for o in state.objects.values() if o.count and o.second_min <= high and o.second_max >= low]
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
Array = npt.NDArray[Any]


def read_task(plan: TaskPlan, storage: Storage, wanted: Any) -> Iterator[pa.RecordBatch]:
    """Yield a task's entries as batches of the Arrow schema `wanted`.

    Raises `StorageUnavailable` if an object was removed since, `CorruptFile`, `SchemaMismatch`, the storage's errors.
    """
    # no block cache: all bytes are read once
    settings = ColdSettings(query_threads=8, block_cache_bytes=0)
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
    metadata = trailer.metadata
    names = {name for _, name in metadata.topics}
    if metadata.topics and selection.topic is not None and selection.topic not in names:
        return
    if not metadata.topics and selection.topic is not None:
        raise InvalidArgument(f"{part.stored.name} doesn't name its topics: read without the option topic")
    for _, items in scan_runs(source, _share(trailer, part, selection), _WINDOW_BYTES):
        for start in range(0, len(items), _BATCH_ROWS):
            columns = _scanned(items[start : start + _BATCH_ROWS], metadata, selection, plan.expired)
            if len(columns["offset"]):
                yield _arrow(columns, metadata, wanted)


def _share(trailer: Trailer, part: ObjectPart, selection: EntrySelection) -> Sequence[Run]:
    """Return the runs that begin in this part's share of the bytes, so that each run is in one part."""
    runs = trailer.directory.all_runs()
    ends = np.cumsum([run.length for run in runs], dtype=np.int64)
    total = int(ends[-1]) if len(runs) else 0
    begins = ends - [run.length for run in runs]
    low, high = total * part.number // part.parts, total * (part.number + 1) // part.parts
    first, last = np.searchsorted(begins, [low, high]).tolist()
    low_s, high_s = selection.second_min, selection.second_max
    return [run for run in runs[first:last] if run.second_min <= high_s and run.second_max >= low_s]


def _scanned(items: Array, metadata: Metadata, selection: EntrySelection, expired: Expired) -> dict[str, Any]:
    """Return the columns, in native byte order, of the items that have not expired and that a selection has."""
    seconds = items["time_diff_s"].astype(np.int64) + metadata.begin_ms // 1000
    hashes = normal_hashes(items["key_hash"])
    is_wanted = expired.keeps(items, seconds, dict(metadata.topics))
    if selection.second_min > EARLIEST or selection.second_max < LATEST:
        is_wanted &= (seconds >= selection.second_min) & (seconds <= selection.second_max)
    if selection.topic is not None:
        is_wanted &= np.isin(
            items["topic_id"], [topic_id for topic_id, name in metadata.topics if name == selection.topic]
        )
    if selection.queues is not None:
        is_wanted &= np.isin(items["queue_id"], selection.queues)
    columns = {name: items[name][is_wanted] for name in items.dtype.names or ()}
    return {**columns, "key_hash": hashes[is_wanted], "second": seconds[is_wanted]}


def _arrow(columns: dict[str, Any], metadata: Metadata, wanted: Any) -> pa.RecordBatch:
    arrays = [_array(columns, metadata, field.name, field.type) for field in wanted]
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def _array(columns: dict[str, Any], metadata: Metadata, name: str, kind: Any) -> Any:
    if name == "timestamp":
        return pa.array(columns["second"] * 1_000_000).cast(kind)
    if name == "topic":
        return topic_names(columns["topic_id"], dict(metadata.topics)).cast(kind)
    return array_of(columns[name], kind)
