"""The steps by which Spark makes tables, in this process: count, plan, pack, gather by partition, write.

They work on any storage, and on one with faults.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tests.spark.entries import BEGIN_MS, DAY_MS
from tests.support.changes import replace
from tests.support.later import Later
from tiered_index.base.clock import Clock, SystemClock
from tiered_index.config import IndexConfig
from tiered_index.service.jobs.orphans import delete_orphans, find_orphans
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.publication import FinishedObject
from tiered_index.service.log.records import IndexDescriptor, Origin
from tiered_index.spark.writing.build import publish_tables
from tiered_index.spark.writing.census import CENSUS_COLUMNS, HAS_KEY, WindowScale, census_of
from tiered_index.spark.writing.plan import BuildPlan, plan_build
from tiered_index.spark.writing.shards import PartitionResult, pack_batches, write_partition
from tiered_index.storage.base import Storage
from tiered_index.storage.opening import open_storage

GENESIS = IndexDescriptor("an-index", IndexConfig(slots=64, items=100_000).geometry(), "custom")
SCALE = WindowScale(86_400, 10**9, 3 * 10**9)


@dataclass
class Address:
    """A `StorageAddress` that gives the same storage to every task; tasks do not close it."""

    storage: Storage

    def open(self) -> Any:
        """Return a context of the storage."""
        return self

    def __enter__(self) -> Storage:
        return self.storage

    def __exit__(self, *exc: object) -> None:
        pass


def planned(
    table: pa.Table, *, shards: int | str = 2, parallelism: int = 2, piece_items: int = 200, origin: Origin = "build"
) -> BuildPlan:
    """Return the plan of a build of `table`. A piece may have at most `piece_items` * 2 entries."""
    names = [name for name in CENSUS_COLUMNS if name in table.column_names]
    looked_at = table.select(names).append_column(HAS_KEY, pa.compute.is_valid(table["key"]))
    census = census_of(looked_at.to_batches(), SCALE, 1_000)
    more: dict[str, Any] = {"sequence": 3, "max_windows": 1_000, "origin": origin}
    plan = plan_build(census, GENESIS, SCALE, shards=shards, parallelism=parallelism, **more)
    return replace(plan, piece_items=piece_items)


def gathered(table: pa.Table, plan: BuildPlan) -> dict[int, pa.Table]:
    """Return the blocks of each partition as the shuffle would, sorted by piece."""
    blocks = pa.Table.from_batches([block for batch in table.to_batches(500) for block in pack_batches([batch], plan)])
    partitions = blocks["partition"].to_numpy()
    return {int(p): blocks.filter(pa.array(partitions == p)).sort_by("piece") for p in np.unique(partitions)}


def written(
    table: pa.Table, plan: BuildPlan, storage: Storage, *, now_ms: int = BEGIN_MS + 10 * DAY_MS
) -> list[PartitionResult]:
    """Return the results of the tasks of all partitions."""
    results = []
    for blocks in gathered(table, plan).values():
        for batch in write_partition(blocks.to_batches(7), plan, Address(storage), now_ms):  # type: ignore[arg-type]
            results.append(pickle.loads(batch.column(0)[0].as_py()))
    return results


def shards_of(results: Sequence[PartitionResult]) -> list[FinishedObject]:
    """Return all shards."""
    return [shard for result in results for shard in result.shards]


def build_here(uri: str, *tables: pa.Table, **options: Any) -> None:
    """Publish a build of each table, one after another, to an index; make the index if there is none."""
    with open_storage(uri) as storage:
        log = StorageLog(storage, SystemClock())
        genesis = log.create(GENESIS).genesis
        assert genesis is not None
        for table in tables:
            plan = replace(planned(table, **options), genesis=genesis)
            shards = shards_of(written(table, plan, storage, now_ms=SystemClock().now_ms()))
            publish_tables(shards, "error", log)


def opened(storage: Storage, clock: Clock) -> StorageLog:
    """Make an index, and return its log."""
    log = StorageLog(storage, clock)
    log.create(GENESIS)
    return log


def count(storage: Storage, clock: Clock) -> int:
    """Return the number of entries that the log states."""
    return sum(stored.count for stored in StorageLog(storage, clock).open().objects.values())


def left_over(storage: Storage, clock: Clock) -> int:
    """Delete the objects that no record names, as if much time had passed; return their number. The storage then has
    only named objects.
    """
    log = StorageLog(storage, clock)
    log.open()
    orphans = find_orphans(Later(storage, 300 * 365 * DAY_MS / 1000), log)
    delete_orphans(storage, orphans)
    assert {info.name for info in storage.list("data/")} == set(log.state.objects)
    return len(orphans.objects)
