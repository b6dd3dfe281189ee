"""What the tasks of one read of the data source do: parts of the objects of one log position. Driver only, pure but for hashing.

A scan cuts large objects into runs of slot groups and puts small ones together; a lookup leaves out shards that don't hold its slots, and
gives each task a few objects.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiered_index.format.schema import Schema
from tiered_index.service.answers.batch import QuestionBatch
from tiered_index.service.log.records import LogState, StoredObject
from tiered_index.spark.datasource_filters import Selection
from tiered_index.types import MAX_TIMESTAMP_MS, Lookup

__all__ = ["ObjectPart", "TaskPlan", "hashes_of", "plan_tasks", "questions_for"]

_OPENING_BYTES = 4 << 20
# what opening an object is taken to cost, as bytes
_LOOKUP_OBJECTS = 16
_HASHED = 1 << 16
# pairs of topic and key that the driver hashes to leave out shards


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """Part `number` of `parts` of an object's slot groups, by their bytes."""

    stored: StoredObject
    number: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """One task's parts of objects that exist at log position `log_number`, and which of their entries to give."""

    parts: tuple[ObjectPart, ...]
    selection: Selection
    schema: Schema
    log_number: int


def plan_tasks(state: LogState, selection: Selection, partition_bytes: int) -> list[TaskPlan]:
    """Return the tasks of a read at `state`; no task where nothing can be found."""
    assert state.genesis is not None
    if selection.is_empty:
        return []
    low, high = selection.second_min, selection.second_max
    objects = [o for o in state.objects.values() if o.count and o.second_min <= high and o.second_max >= low]
    objects.sort(key=lambda o: (o.second_min, o.name))
    if selection.is_lookup:
        wanted = list(_with_slots(objects, selection))
        tasks = [tuple(map(ObjectPart, wanted[at : at + _LOOKUP_OBJECTS])) for at in range(0, len(wanted), _LOOKUP_OBJECTS)]
    else:
        tasks = list(_runs(objects, partition_bytes))
    return [TaskPlan(parts, selection, state.genesis.layout.schema, state.number) for parts in tasks]


def questions_for(selection: Selection, topics: Iterable[str]) -> QuestionBatch:
    """Return the lookups of each key in each of `topics`, without those whose hash isn't asked for."""
    begin_ms, end_ms = max(0, selection.second_min) * 1000, min(selection.second_max * 1000 + 999, MAX_TIMESTAMP_MS)
    if begin_ms > end_ms:
        return QuestionBatch([])
    lookups = [
        Lookup(topic=topic, key=key, begin_ms=begin_ms, end_ms=end_ms) for topic in sorted(topics) for key in sorted(selection.keys or ())
    ]
    batch = QuestionBatch(lookups)
    if selection.hashes is None or not lookups:
        return batch
    asked = np.isin(batch.key_hash, hashes_of(selection))
    return QuestionBatch([lookup for lookup, kept in zip(lookups, asked.tolist(), strict=True) if kept])


def hashes_of(selection: Selection) -> npt.NDArray[np.int32]:
    """Return the hashes asked for that an entry can have."""
    return np.array(sorted(h for h in selection.hashes or () if 0 <= h < 2**31), np.int32)


def _with_slots(objects: Iterable[StoredObject], selection: Selection) -> Iterator[StoredObject]:
    """Yield the objects that have a slot of a hash asked for, as far as the hashes are known before topics are."""
    if selection.keys is None:
        hashes: npt.NDArray[np.int32] | None = hashes_of(selection)
    elif selection.topics is not None and len(selection.topics) * len(selection.keys) <= _HASHED:
        hashes = questions_for(selection, selection.topics).key_hash
    else:
        hashes = None
    for stored in objects:
        shard = stored.shard
        if shard is not None and hashes is not None:
            slots = shard.slots.slots_of(hashes)
            if not ((slots >= shard.slot_low) & (slots < shard.slot_high)).any():
                continue
        yield stored


def _runs(objects: Iterable[StoredObject], partition_bytes: int) -> Iterator[tuple[ObjectPart, ...]]:
    parts = []
    for stored in objects:
        number = -(-stored.size_bytes // partition_bytes)
        parts += [(ObjectPart(stored, part, number), stored.size_bytes // number + _OPENING_BYTES) for part in range(number)]
    reached = itertools.accumulate(size for _, size in parts)
    # a task takes the parts that end within its stretch of `partition_bytes` of all
    for _, task in itertools.groupby(zip(parts, reached, strict=True), lambda one: (one[1] - 1) // partition_bytes):
        yield tuple(part for (part, _), _ in task)
