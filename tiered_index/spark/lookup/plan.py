"""The plan of a bulk lookup: at one position of the log, which stored objects are searched by which task.

Made by the driver. Pure. Every object belongs to one task, so each is opened once. Shards are assigned to tasks by slot
range and single files by time, so that a lookup is sent to few tasks: to those with an object of its base slot and
its time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.format.schema import Schema
from tiered_index.service.cold.path import ColdSettings
from tiered_index.service.log.records import IndexDescriptor, StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.storage.metering import PriceTable

__all__ = ["LookupPlan", "Target", "plan_lookup"]

_TASKS_A_CORE = 3
_LOOKUPS_A_PARTITION, _LEAST_A_PARTITION = 8_000, 100
# Entries of a partition, if each lookup has as many as are asked for.
_ROWS_A_PARTITION = 1 << 19
_MOST_PARTITIONS = 10_000
_ROWS_AN_ANSWERER = 1_000_000
_ANSWERERS_A_CORE = 2
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Target:
    """A stored object, and the half-open range of base slots that it holds."""

    stored: StoredObject
    base_low: int
    base_high: int

    @classmethod
    def of(cls, stored: StoredObject, base: int) -> Target:
        """Return the target that an object is."""
        if stored.shard is None:
            return cls(stored, 0, base)
        slots, low, high = stored.shard.slots, stored.shard.slot_low, stored.shard.slot_high
        if slots.join > 1:
            return cls(stored, low * slots.join, min(base, high * slots.join))
        return cls(stored, low // slots.split, -(-high // slots.split))

    def holds(self, base_slots: Array, lookups: Array) -> npt.NDArray[np.bool_]:
        """Return which lookups (bool, n), whose base slots are given, the object may have answers for."""
        stored = self.stored
        inside = (lookups["second_min"] <= stored.second_max) & (lookups["second_max"] >= stored.second_min)
        if stored.shard is not None:
            inside &= (base_slots >= self.base_low) & (base_slots < self.base_high)
        return inside


@dataclass(frozen=True)
class LookupPlan:
    """What every task knows. `lost` are objects that the log names and the storage doesn't have.

    Lookups are answered a partition (of `partitions`) at a time, which bounds memory, by `answerers` tasks, each of
    which sees to many: a task of Spark that runs Python costs some 60 ms of a core before it does anything.
    `max_requests` and `max_bytes` are of all tasks; `limits` are the shares (requests, bytes) of one each.
    """

    number: int
    genesis: IndexDescriptor
    topics: tuple[str, ...]
    tasks: tuple[tuple[Target, ...], ...]
    partitions: int
    answerers: int
    max_count: int
    allow_partial: bool
    settings: ColdSettings
    prices: PriceTable
    max_requests: int | None = None
    max_bytes: int | None = None
    limits: tuple[tuple[int | None, int | None], ...] = ()
    lost: frozenset[str] = field(default_factory=frozenset)

    @property
    def schema(self) -> Schema:
        """The schema of the index's entries."""
        return self.genesis.layout.schema

    @property
    def objects(self) -> int:
        """How many objects there are to search."""
        return sum(map(len, self.tasks))

    @cached_property
    def places(self) -> Mapping[str, int]:
        """The place of each topic."""
        return {topic: place for place, topic in enumerate(self.topics)}

    def base_slots(self, lookups: Array) -> npt.NDArray[np.int64]:
        """Return the base slot of each lookup (i64, n)."""
        return lookups["key_hash"].astype(np.int64) % self.genesis.layout.slots

    def wanted(self, task: int, lookups: Array, base_slots: Array) -> npt.NDArray[np.bool_]:
        """Return which lookups (bool, n) a task may have answers for."""
        mask = np.zeros(len(lookups), bool)
        for target in self.tasks[task]:
            mask |= target.holds(base_slots, lookups)
        return mask


def plan_lookup(
    state: LogState,
    topics: Sequence[str],
    seconds: tuple[int, int],
    rows: int,
    *,
    parallelism: int,
    max_count: int,
    allow_partial: bool,
    settings: ColdSettings,
    prices: PriceTable,
    lost: frozenset[str] = frozenset(),
) -> LookupPlan:
    """Return the plan for `rows` rows whose ranges lie within `seconds` (inclusive), without bounds."""
    genesis = state.genesis
    assert genesis is not None
    found = [
        Target.of(stored, genesis.layout.slots)
        for stored in state.objects.values()
        if stored.second_min <= seconds[1] and stored.second_max >= seconds[0]
    ]
    shards = sorted(
        (t for t in found if t.stored.shard is not None), key=lambda t: (t.base_low, t.stored.second_min, t.stored.name)
    )
    files = sorted((t for t in found if t.stored.shard is None), key=lambda t: (t.stored.second_min, t.stored.name))
    total = sum(target.stored.size_bytes for target in found)
    share = max(1, -(-total // (_TASKS_A_CORE * max(1, parallelism))))
    tasks = (*_dealt(shards, share), *_dealt(files, share)) or ((),)
    lookups = max(_LEAST_A_PARTITION, min(_LOOKUPS_A_PARTITION, _ROWS_A_PARTITION // max_count))
    partitions = max(1, min(_MOST_PARTITIONS, -(-rows // lookups), rows))
    answerers = min(partitions, max(_ANSWERERS_A_CORE * max(1, parallelism), -(-rows // _ROWS_AN_ANSWERER)))
    return LookupPlan(
        number=state.number,
        genesis=genesis,
        topics=tuple(topics),
        tasks=tasks,
        partitions=partitions,
        answerers=answerers,
        max_count=max_count,
        allow_partial=allow_partial,
        settings=settings,
        prices=prices,
        lost=lost,
    )


def _dealt(targets: Sequence[Target], share: int) -> list[tuple[Target, ...]]:
    """Return neighbours together, in lists of about `share` bytes."""
    tasks: list[tuple[Target, ...]] = []
    task: list[Target] = []
    size = 0
    for target in targets:
        if task and size + target.stored.size_bytes // 2 >= share:
            tasks.append(tuple(task))
            task, size = [], 0
        task.append(target)
        size += target.stored.size_bytes
    return [*tasks, tuple(task)] if task else tasks
