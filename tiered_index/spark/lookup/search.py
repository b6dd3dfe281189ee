"""The search of a bulk lookup: each task opens its objects once and searches them for all their lookups.

```
keys ─> lookups, packed ─> to tasks ─> objects searched ─> to partitions of lookups ─> in order, cut, joined
        packing            broadcast   search_asked        shuffle                       answers
        pack_lookups       shuffle     search_task
```

Answers are cut to `max_count` + 1 for each key. A row between stages is a block of many lookups or rows in binary
cells; a task's report is one of its rows, so Spark counts it once. Runs in tasks, with one thread and those of the cold
path. Memory: the task's lookups, 16 MiB of ranges, half a million rows.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.errors import CorruptFile, StorageError
from tiered_index.format.trailer import Run, Trailer
from tiered_index.service.answers.batch import Matches, first_rows
from tiered_index.service.cold.path import ColdPath, MissingObject, missing_error, spans_of
from tiered_index.service.files.compacted import StorageBytes
from tiered_index.service.files.search import scan_matches, search_file
from tiered_index.service.log.records import StoredObject
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.frames import arrow_schema, cells_of
from tiered_index.spark.lookup.plan import LookupPlan, PackedBatch, Target, distinct, records_of
from tiered_index.spark.workers import between_tasks
from tiered_index.storage.base import Storage
from tiered_index.storage.metering import MeteredStorage

_WINDOW_BYTES = 16 << 20
_HELD_ROWS = 1 << 19
# Lookups of one search.
_CHUNK = 1 << 20
# A filter is fetched if it costs at most 1/4 of the bytes that would be read without it.
_FILTER_SHARE = 4
_LEAST_REQUEST_BYTES = 16 << 10
# It is also fetched for so many lookups, and so many for each entry: excluding one is faster than searching for it.
_MANY, _MANY_PER_ENTRY = 1 << 15, 2
# Most lookups of a hot slot (one that is cut into blocks) that are searched one by one, newest blocks first.
_ALONE = 4
Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]


class HeldAnswers:
    """Answers for `lookups`, identified as in blocks; few are held, and cut with those of further objects."""

    def __init__(self, plan: LookupPlan, lookups: Array) -> None:
        self._plan, self._lookups = plan, lookups
        self._parts: list[Matches] = []
        self._count = 0

    def add(self, found: Matches) -> Iterator[tuple[Array, Array]]:
        """Add rows; yield (lookups, rows) if there are too many to hold."""
        self._parts.append(found)
        self._count += len(found.rows)
        if self._count > _HELD_ROWS:
            yield from self.rest(_HELD_ROWS // 2)

    def rest(self, keep: int = 0) -> Iterator[tuple[Array, Array]]:
        """Cut the held rows; yield them if there are more than `keep`."""
        if not self._count:
            return
        places, index = np.unique(np.concatenate([part.lookups for part in self._parts]), return_inverse=True)
        rows = np.concatenate([part.rows for part in self._parts])
        first, _ = first_rows(np.full(len(places), self._plan.max_count + 1), [Matches(index, rows)], self._plan.schema)
        settled = Matches(places[first.lookups], first.rows)
        if len(settled.rows) > keep:
            self._parts, self._count = [], 0
            yield self._lookups[settled.lookups], settled.rows
        else:
            self._parts, self._count = [settled], len(settled.rows)


def search_object(
    plan: LookupPlan, storage: Storage, stored: StoredObject, lookups: Array, places: Int64
) -> Iterator[Matches]:
    """Yield one object's matches of the distinct `lookups[places]` (i64, n), by place. Raises as a lookup."""
    settings = replace(plan.settings, block_cache_bytes=0, filter_after_probes=1, directory_cache_bytes=1 << 30)
    # a path for each object: its directory and filter are freed with it
    with closing(ColdPath(storage, keyed=plan.schema.keyed, settings=settings)) as cold:
        source = StorageBytes(cold, stored)
        trailer = source.trailer_of(plan.schema)
        if len(places) > _CHUNK:
            # each batch of lookups reads another range of the object
            places = places[np.argsort(plan.base_slots(lookups[places])[0][0], kind="stable")]
        for start in range(0, len(places), _CHUNK):
            part = places[start : start + _CHUNK]
            # often all: copies of records are slow
            chosen = lookups if len(part) == len(lookups) else lookups[part]
            given = chosen, plan.topics, plan.max_count, part
            asked = PackedBatch(*given, expired=plan.expired, allow_partial=plan.allow_partial)
            for batch in asked.under(stored.hash):
                yield from _search(plan, source, trailer, batch)


def _search(plan: LookupPlan, source: StorageBytes, trailer: Trailer, batch: PackedBatch) -> Iterator[Matches]:
    batch = batch.part(batch.within(trailer.metadata))
    if not len(batch):
        return
    batch = _filtered(plan, source, trailer, batch)
    cut = trailer.directory.cut_groups(trailer.metadata.slot_map.slots_of(batch.key_hash))
    few = np.bincount(cut[cut >= 0], minlength=len(trailer.directory.groups)) <= _ALONE
    alone = (cut >= 0) & few[cut]
    for place in np.flatnonzero(alone).tolist():
        one = batch.places[place : place + 1]
        try:
            rows = search_file(source, batch.prepared(place))
        except CorruptFile as error:
            if not batch.allow_partial:
                raise
            yield Matches.lacking((one, error))
        else:
            yield Matches(np.repeat(one, len(rows)), rows)
    batch = batch.part(~alone)
    gap = plan.settings.coalesce_gap_bytes
    for found in scan_matches(source, _runs_of(trailer, batch), batch, _WINDOW_BYTES, gap_bytes=gap):
        damage = tuple([(batch.places[lookups], error) for lookups, error in found.damage])
        yield Matches(batch.places[found.lookups], found.rows, 0, damage)


def _runs_of(trailer: Trailer, batch: PackedBatch) -> Sequence[Run]:
    if not len(batch):
        return []
    slots = trailer.metadata.slot_map.slots_of(batch.key_hash)
    return trailer.directory.runs_of(slots, int(batch.second_min.min()), int(batch.second_max.max()))


def _filtered(plan: LookupPlan, source: StorageBytes, trailer: Trailer, batch: PackedBatch) -> PackedBatch:
    """Return the lookups that the object's filter does not exclude, all if it is not worth fetching."""
    stored, cold = source.stored, source.cold
    # a request costs as much as the gap that is read to save one, and at least a slot group
    request = max(plan.settings.coalesce_gap_bytes, _LEAST_REQUEST_BYTES)
    spans = spans_of(_runs_of(trailer, batch), source.gap_bytes, stored.size_bytes)
    wanted = sum(span.length + request for span in spans)
    is_small = (stored.filter_length + request) * _FILTER_SHARE <= wanted
    are_many = len(batch) >= max(_MANY, _MANY_PER_ENTRY * stored.count)
    if not stored.filter_length or not (is_small or are_many):
        return batch
    hashes = batch.filter_hashes(keyed=cold.keyed)
    cold.filters.record_miss(stored, int(hashes[0]))
    if not cold.maybe_fetch_filter(stored):
        return batch
    return batch.part(~cold.filters.excludes_many(stored, hashes))


# `lookups` has records, or places in the plan's `asked` (i64).
FOUND_SCHEMA = "kind int, partition int, lookups binary, rows binary, more binary"
_FOUND = arrow_schema(FOUND_SCHEMA)
# Kinds of blocks: all lookups, lookups of an unreadable object, answers, a task's report, lookups of a missing object.
ASKED, FAILED, FOUND, REPORT, MISSING = 0, 1, 2, 3, 4
_BLOCK_LOOKUPS = 1 << 20


@dataclass
class TaskReport:
    """The report of a task; `found` counts rows, `failed` are (object, error), `missing` is a removed object."""

    requests: dict[str, int] = field(default_factory=dict)
    bytes_read: int = 0
    opened: int = 0
    found: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    missing: str | None = None


def search_task(
    batches: Iterable[pa.RecordBatch], plan: LookupPlan, address: StorageAddress
) -> Iterator[pa.RecordBatch]:
    """Yield the blocks of one task (rows of `TASK_SCHEMA`). Raises as a lookup, unless it may be partial."""
    task, asked, wanted = -1, [], []
    for batch in batches:
        if len(batch):
            task = batch.column(0)[0].as_py()
            asked.append(records_of(batch.column(1)))
            wanted.append(records_of(batch.column(2)))
    if task < 0:
        return
    yield from _blocks(ASKED, np.concatenate(asked), None, plan)
    lookups = distinct(np.concatenate(wanted))
    yield from _searched(plan, address, task, lookups, lookups)


def search_asked(
    batches: Iterable[pa.RecordBatch], plan: LookupPlan, address: StorageAddress
) -> Iterator[pa.RecordBatch]:
    """As `search_task` for a plan that has all lookups; batches have the numbers of tasks."""
    assert plan.asked is not None
    for batch in batches:
        for task in batch.column(0).to_pylist():
            places = np.flatnonzero(plan.wanted(task, plan.asked, plan.base_slots(plan.asked)))
            if len(places):
                yield from _searched(plan, address, task, plan.asked[places], places)


def _searched(
    plan: LookupPlan, address: StorageAddress, task: int, lookups: Array, names: Array
) -> Iterator[pa.RecordBatch]:
    """Yield the blocks and the report of a task for its lookups (n), which blocks identify by `names` (n)."""
    report = TaskReport()
    if len(lookups):
        with between_tasks(), address.open() as opened:
            metered = MeteredStorage(opened, plan.prices)
            yield from _search_all(plan, metered, task, lookups, names, report)
            report.requests, report.bytes_read = metered.total.requests_by_kind, metered.total.bytes_read
    empty = pa.array([None], pa.binary())
    yield _batch(REPORT, [0], empty, empty, pa.array([pickle.dumps(report)], pa.binary()))


def _search_all(
    plan: LookupPlan, storage: MeteredStorage, task: int, lookups: Array, names: Array, report: TaskReport
) -> Iterator[pa.RecordBatch]:
    held = HeldAnswers(plan, names)
    base_slots = plan.base_slots(lookups)
    for target in plan.tasks[task]:
        here = np.flatnonzero(target.holds(base_slots, lookups))
        if not len(here):
            continue
        try:
            for found in search_object(plan, storage, target.stored, lookups, here):
                for lacking, error in found.damage:
                    yield from _failed(plan, target, error, names[lacking], report)
                for names_out, rows in held.add(found) if len(found.rows) else ():
                    report.found += len(rows)
                    yield from _blocks(FOUND, names_out, rows, plan)
        except MissingObject as error:
            if target.stored.name not in plan.lost:
                # also as a block: if Spark repeats a task for lost blocks, nobody reads its report
                yield from _blocks(MISSING, names, None, plan, error.name.encode())
                report.missing = error.name
                return
            yield from _failed(plan, target, missing_error(error.name), names[here], report)
        except (StorageError, CorruptFile) as error:
            if not plan.allow_partial:
                raise
            yield from _failed(plan, target, error, names[here], report)
        else:
            report.opened += 1
    for names_out, rows in held.rest():
        report.found += len(rows)
        yield from _blocks(FOUND, names_out, rows, plan)


def _failed(
    plan: LookupPlan, target: Target, error: Exception, names: Array, report: TaskReport
) -> Iterator[pa.RecordBatch]:
    shard = target.stored.shard
    file = target.stored.file_id if shard is None else target.stored.name
    if (file, str(error)) not in report.failed:
        report.failed.append((file, str(error)))
    yield from _blocks(FAILED, names, None, plan, pickle.dumps((file, str(error))))


def _blocks(
    kind: int, names: Array, rows: Array | None, plan: LookupPlan, more: bytes | None = None
) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(names), _BLOCK_LOOKUPS):
        part = slice(start, start + _BLOCK_LOOKUPS)
        partitions = plan.partitions_of(names[part])
        # NumPy sorts 16-bit numbers by counting; a plan has at most 10,000 partitions
        order = np.argsort(partitions.astype(np.uint16), kind="stable")
        partitions = partitions[order]
        starts = np.flatnonzero(np.diff(partitions, prepend=-1))
        cells = pa.array([None] * len(starts), pa.binary()) if rows is None else cells_of(rows[part][order], starts)
        asked = cells_of(names[part][order], starts)
        yield _batch(kind, partitions[starts].tolist(), asked, cells, pa.array([more] * len(starts), pa.binary()))


def _batch(kind: int, partitions: list[int], lookups: pa.Array, rows: pa.Array, more: pa.Array) -> pa.RecordBatch:
    numbers = [pa.array([kind] * len(partitions), pa.int32()), pa.array(partitions, pa.int32())]
    return pa.RecordBatch.from_arrays([*numbers, lookups, rows, more], schema=_FOUND)
