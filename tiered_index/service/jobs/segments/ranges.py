"""Tends the replaced ranges of stores: moves many into an object, and drops those of which no file has an entry.

An object has all retired ranges of a store after a record, so that checkpoints have only later ones. A range is dropped
if the position of its store has passed it, and no object of the state, and no file of the writer's root, may have one
of its entries. Only the writer knows the files of its root, so only a writer drops. A crash leaves an orphan. One
thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from tiered_index.errors import StorageUnavailable
from tiered_index.format.names import ranges_name
from tiered_index.format.segments.ranges import encode_ranges, ranges_crc32
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.publication import Publication
from tiered_index.service.log.records import LogRecord, StoredObject, StoredRanges
from tiered_index.service.log.replaced import NO_RANGES, Range, RangeTable
from tiered_index.service.log.state import LogState

MOST_RANGES = 4096
"""Most retired ranges of a store, besides those in its object, before all are in a new object."""
_TRIES = 5
File = tuple[int, int, int]
"""The generation, and the first and the last second, inclusive, of a file's entries."""


def file_of(stored: StoredObject) -> File:
    """Return what says whether an object may have entries of a range."""
    return stored.generation, stored.second_min, stored.second_max


def droppable(state: LogState, more: Iterable[File] = ()) -> dict[str, tuple[Range, ...]]:
    """Return the retired ranges, by store, of which no object of a state and none of `more` can have an entry."""
    chosen: dict[str, tuple[Range, ...]] = {}
    stores = {store: ranges.retired for store, ranges in state.expired.replaced.stores.items() if len(ranges.retired)}
    if not stores:
        return chosen
    files = np.array([*map(file_of, state.objects.values()), *more], np.int64).reshape(-1, 3)
    for store, table in stores.items():
        is_gone = ~table.are_held(files) & (table.rows[:, 1] <= state.positions.get(store, 0))
        if is_gone.any():
            chosen[store] = tuple(RangeTable(table.rows[is_gone]))
    return chosen


def drop_ranges(log: StorageLog, epoch: int, local: Collection[File]) -> bool:
    """Append a record that drops the ranges of which no file has an entry. Return whether there were some.

    `local` are the files of the writer's root. Raises the errors of `StorageLog.append`.
    """

    def make(state: LogState) -> LogRecord | None:
        if not (dropped := droppable(state, local)):
            return None
        outdated = tuple(name for name, stored in state.range_objects.items() if stored.store in dropped)
        return LogRecord(0, "drop", epoch, "", 0, remove=outdated, dropped=dropped)

    if make(log.state) is None:
        return False
    before = log.state.number
    return log.append("dropped ranges of replaced rows", epoch, make).number > before


def store_ranges(log: StorageLog, epoch: int | None = None, names: Collection[str] = ()) -> int:
    """Write the retired ranges of stores with many into objects, and the objects `names` again. Return their number.

    `epoch` is the writer's; None: a job. Raises the errors of `StorageLog.append`, and of the storage.
    """
    stored = 0
    for store in _due(log.state, names):
        for _ in range(_TRIES):
            if store not in _due(log.state, names) or _store(log, epoch, store):
                stored += 1
                break
        else:
            raise StorageUnavailable(f"{log.storage.uri}: the replaced ranges of {store} changed meanwhile: try again")
    return stored


def _due(state: LogState, names: Collection[str]) -> list[str]:
    bad = {state.range_objects[name].store for name in names if name in state.range_objects}
    return [
        store
        for store, ranges in state.expired.replaced.stores.items()
        if store in bad or len(ranges.retired.rows_beyond(state.range_tables.get(store, NO_RANGES))) > MOST_RANGES
    ]


def _store(log: StorageLog, epoch: int | None, store: str) -> bool:
    """Write the retired ranges of a store into an object. Return false if they changed meanwhile."""
    table = log.state.expired.replaced.retired(store)
    publication = Publication.send(log, ranges_name(), lambda stream: stream.write(encode_ranges(table.rows)), epoch)
    sent = publication.sent
    description = StoredRanges(sent.name, store, len(table), ranges_crc32(table.rows), sent.size_bytes, sent.began_ms)

    def make(state: LogState) -> LogRecord | None:
        if sent.name in state.range_objects or state.expired.replaced.retired(store) != table:
            return None
        outdated = tuple(name for name, stored in state.range_objects.items() if stored.store == store)
        return LogRecord(0, "ranges", epoch or 0, "", 0, remove=outdated, ranges=(description,))

    return sent.name in publication.record("replaced ranges", make).range_objects
