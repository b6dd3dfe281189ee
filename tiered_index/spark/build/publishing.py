"""The end of a build or a write: uploads completed, then one log record with its tables. Driver only.

`mode` is decided again by the state that the record follows, so of two builds of one window with ``error`` only one is
published. Quarantine windows are shared by all builds: there a build is recognised by its entries (`repeated`). A
micro-batch is recognised by its record: (stream, number) as a source position, and a checksum of its entries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.errors import InvalidArgument
from tiered_index.format.shard import entry_checksum
from tiered_index.service.cold.path import ColdPath, ColdSettings
from tiered_index.service.lifecycle.publication import Publication, abandon
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import LogRecord, StoredObject, StreamBatch
from tiered_index.service.log.state import LogState
from tiered_index.service.merge.writing import FinishedShard
from tiered_index.spark.build.plan import QUARANTINE_S, BuildPlan
from tiered_index.storage.base import Storage
from tiered_index.types import format_time


def repeated(state: LogState, shards: Sequence[FinishedShard], mode: str, storage: Storage) -> tuple[str, ...]:
    """Return the objects with just a quarantine window's entries, for ``replace``; for ``error`` they are an error."""
    if mode == "append" or not (written := _by_build(shard.stored for shard in shards)):
        return ()
    checksums = {shard.stored.name: shard.checksum for shard in shards}
    names: list[str] = []
    earlier = _by_build(state.objects.values())
    assert state.genesis is not None
    keyed, settings = state.genesis.layout.schema.keyed, ColdSettings(query_threads=1, block_cache_bytes=0)
    with contextlib.closing(ColdPath(storage, keyed=keyed, settings=settings)) as cold:
        for (begin_s, _), mine in written.items():
            for (other_s, _), theirs in earlier.items():
                if other_s != begin_s or _outline(theirs) != _outline(mine):
                    continue
                stored = {o.name: int(cold.trailer(o).metadata.more["checksum"], 16) for o in theirs}
                if _sum(theirs, stored) != _sum(mine, checksums):
                    continue
                if mode == "error":
                    raise InvalidArgument(
                        f"the {_outline(mine)[0]:,} entries whose times can't be right, from "
                        f"{format_time(begin_s * 1000)} on, are in the index already, in {theirs[0].name}: "
                        "take mode append or replace"
                    )
                names += stored
    return tuple(names)


def _by_build(objects: Iterable[StoredObject]) -> dict[tuple[int, int], list[StoredObject]]:
    """Return the objects of quarantine windows by (begin, time of the build)."""
    found: dict[tuple[int, int], list[StoredObject]] = {}
    for stored in objects:
        if stored.shard is not None and stored.shard.window_s == QUARANTINE_S:
            found.setdefault((stored.shard.begin_s, stored.published_ms), []).append(stored)
    return found


def _outline(objects: Sequence[StoredObject]) -> tuple[int, int, int]:
    return sum(o.count for o in objects), min(o.second_min for o in objects), max(o.second_max for o in objects)


def _sum(objects: Sequence[StoredObject], checksums: Mapping[str, int]) -> int:
    return sum(checksums[stored.name] for stored in objects) % 2**64


@dataclass(frozen=True, slots=True)
class BatchContent:
    """How many entries, and the sum (u64) of a mix of each."""

    entries: int = 0
    checksum: int = 0

    @classmethod
    def of(cls, items: npt.NDArray[Any], seconds: npt.NDArray[np.int64]) -> BatchContent:
        """Return the content of items (n) of these seconds (n)."""
        # topic ids may differ by how tasks are cut, where two names have the same CRC; a hash is of topic and key
        told = [name for name in items.dtype.names or () if name != "topic_id"]
        return cls(len(items), entry_checksum(items[told], seconds))

    @classmethod
    def joined(cls, parts: Iterable[BatchContent]) -> BatchContent:
        """Return the content of all parts together."""
        known = list(parts)
        return cls(sum(part.entries for part in known), sum(part.checksum for part in known) % 2**64)


MODES = ("error", "append", "replace")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Batch `number` of a stream; numbers rise, and a batch is repeated only while no later one was begun."""

    stream: str
    number: int
    content: BatchContent

    @property
    def told(self) -> StreamBatch:
        """What the log's record says of it."""
        return StreamBatch(self.number, self.content.entries, self.content.checksum)

    def is_in(self, state: LogState) -> bool:
        """Return whether the batch has been published; by its number alone where a record says no content.

        Raises `InvalidArgument` where a later one has, or one of this number with other entries: this one would be
        lost.
        """
        last = state.positions.get(self.stream, -1)
        if last > self.number:
            raise InvalidArgument(
                f"the index has micro-batch {last} of this query already, and {self.number} comes now: its checkpoint "
                "is older than the index, or another driver goes on with it; begin with a new checkpoint"
            )
        told = state.batches.get(self.stream)
        if last == self.number and told is not None and told.number == last and told != self.told:
            raise InvalidArgument(
                f"the index has micro-batch {last} of this query already, of {told.entries:,} entries, and the "
                f"{self.content.entries:,} that come now under its number are others: its checkpoint is older than the "
                "index, or the query was changed, or makes other rows each time; begin with a new checkpoint"
            )
        return last == self.number


def check_windows(state: LogState, plan: BuildPlan, mode: str) -> tuple[str, ...]:
    """Return the names of the objects that a build in `mode` replaces. Raises `InvalidArgument` where it must not."""
    times = [(table.window.begin_s, table.window.window_s) for table in plan.tables if not table.quarantined]
    return _replaced(state, sorted((begin, begin + length) for begin, length in times), mode)


def publish_batch(shards: Sequence[FinishedShard], batch: MicroBatch, storage: Storage, log: StorageLog) -> bool:
    """Publish a micro-batch, or return False and take its uploads back if it was before. Raises as `publish_tables`."""
    state = log.refresh()
    names = {shard.stored.name for shard in shards}
    if not names <= state.objects.keys() and not batch.is_in(state):
        state, _ = publish_tables(shards, "append", storage, log, batch)
    if names <= state.objects.keys():
        return True
    abandon(shards, storage)
    return False


def _replaced(state: LogState, windows: list[tuple[int, int]], mode: str) -> tuple[str, ...]:
    """Return the names of the objects that tables of `windows` replace in `mode`. Raises `InvalidArgument`."""
    if mode == "append":
        return ()
    replaced: list[str] = []
    for shards in state.tables.values():
        shard = shards[0].shard
        assert shard is not None
        begin, end = shard.begin_s, shard.begin_s + shard.window_s
        if shard.window_s == QUARANTINE_S or not (met := [w for w in windows if w[0] < end and begin < w[1]]):
            continue
        if mode == "error":
            where = f"the window from {format_time(met[0][0] * 1000)}"
            raise InvalidArgument(f"{where} has a table already, {shard.table}: take mode append or replace")
        if begin < met[0][0] or end > met[0][1]:
            raise InvalidArgument(
                f"table {shard.table} has {shard.window_s:,} s from {format_time(begin * 1000)} on, more than the "
                f"window of {met[0][1] - met[0][0]:,} s that would replace it: build windows that are as long"
            )
        replaced += [stored.name for stored in shards]
    return tuple(replaced)


def publish_tables(
    shards: Sequence[FinishedShard], mode: str, storage: Storage, log: StorageLog, batch: MicroBatch | None = None
) -> tuple[LogState, int]:
    """Complete the uploads and append one record; return the state with it and how many objects it removed.

    Raises as `check_windows`, `CorruptFile`, `JobOverdue`: not published then. After what the storage raises the
    outcome may be unknown.
    """
    tables = [one.stored.shard for one in shards if one.stored.shard is not None]
    windows = sorted({(t.begin_s, t.begin_s + t.window_s) for t in tables if t.window_s != QUARANTINE_S})
    publication = Publication(storage, log, [shard.sent for shard in shards])
    publication.complete()
    added = {shard.stored.name for shard in shards}
    removed: tuple[str, ...] = ()

    def make(state: LogState) -> LogRecord | None:
        nonlocal removed
        if added <= state.objects.keys():
            return None  # an earlier try got as far as the log
        if batch is not None and batch.is_in(state):
            return None
        removed = _replaced(state, windows, mode) + repeated(state, shards, mode, storage)
        positions = {} if batch is None else {batch.stream: batch.number}
        told = {} if batch is None else {batch.stream: batch.told}
        stored = tuple(shard.stored for shard in shards)
        return LogRecord(0, "build", 0, "", 0, stored, removed, positions, batches=told)

    return publication.record("a build", make), len(removed)
