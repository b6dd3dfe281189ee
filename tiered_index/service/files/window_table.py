"""Window tables: the entries of one time window, merged from many files. Also updates a catalog from the log.

A lookup reads the shard of its slot. A giant slot has several shards of different times; only those that the page needs
are read. Threads: any.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.errors import CorruptFile, StorageUnavailable
from tiered_index.format.hashing import joint_rule
from tiered_index.format.metadata import NamedStats
from tiered_index.service.answers.batch import LookupBatch, Matches
from tiered_index.service.answers.rows import Array, PreparedLookup, concatenate, leading
from tiered_index.service.catalog.catalog import Catalog, Handle
from tiered_index.service.cold.path import ColdPath, MissingObject
from tiered_index.service.files.compacted import CompactedFile, StorageBytes, open_stored
from tiered_index.service.log.records import StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.storage.pools import side_by_side


class WindowTable:
    """The shards of one table, whose id is `file_id`. Raises `CorruptFile` for shards that contradict each other."""

    place = "storage"
    is_local = False
    asks_storage = True
    lane = "main"
    source: str | None = None

    def __init__(self, cold: ColdPath, shards: Sequence[StoredObject]) -> None:
        ordered = sorted(shards, key=lambda o: (o.part.slot_low, -o.second_max, o.name))
        first = ordered[0].part
        for stored in ordered:
            shard = stored.part
            if (shard.table, shard.slots, shard.begin_s, shard.window_s) != (
                first.table,
                first.slots,
                first.begin_s,
                first.window_s,
            ):
                raise CorruptFile(
                    stored.name, "shard belongs to another table than its neighbours", expected=first, found=shard
                )
        self.file_id = first.table
        self.shards = tuple(ordered)
        self.slots, self.begin_s, self.window_s = first.slots, first.begin_s, first.window_s
        self.second_min = min(stored.second_min for stored in ordered)
        self.second_max = max(stored.second_max for stored in ordered)
        self.sequence = max(stored.sequence for stored in ordered)
        self.count = sum(stored.count for stored in ordered)
        self.hash = joint_rule(stored.hash for stored in ordered)
        self.cold = cold
        # a number of shards, from the first, and their topics
        self._topics: tuple[int, frozenset[str]] = (0, frozenset())
        self._lows = [stored.part.slot_low for stored in ordered]

    def has_other_shards(self, shards: Sequence[StoredObject]) -> bool:
        """Return whether `shards` differ from the table's."""
        return len(shards) != len(self.shards) or {one.name for one in shards} != {one.name for one in self.shards}

    @property
    def known_topics(self) -> frozenset[str] | None:
        """See `Handle.known_topics`. None until the directories of all shards are in memory."""
        count, names = self._topics
        while count < len(self.shards):
            topics = StorageBytes(self.cold, self.shards[count]).known_topics
            if topics is None:
                return None
            count, names = count + 1, names | topics
            self._topics = count, names
        return names

    def let_go(self) -> None:
        """Do nothing, because there is no memory map."""

    def excludes(self, lookup: PreparedLookup) -> str | None:
        """See `Handle.excludes`."""
        held = self._holding(lookup)
        if all(self.cold.excludes(stored, lookup.key_hash, lookup.fingerprint) for stored in held):
            return "filter"
        return None

    def excludes_all(self, batch: LookupBatch) -> str | None:
        """See `Handle.excludes_all`."""
        if not len(batch.overlapping(self.second_min, self.second_max)):
            return "time"
        return None if self._excluded(batch) else "filter"

    def search(self, lookup: PreparedLookup) -> Array:
        """Return at least the first `max_count` + 1 rows that answer `lookup`, in any order."""
        rows: Array | None = None
        first: Any = ()
        for stored in sorted(self._holding(lookup), key=lambda o: -o.second_max):
            if len(first) > lookup.max_count and int(first[lookup.max_count]["second"]) > stored.second_max:
                break
            if self.cold.excludes(stored, lookup.key_hash, lookup.fingerprint):
                continue
            source = StorageBytes(self.cold, stored)
            found = source.search(lookup)
            schema = source.trailer().metadata.layout.schema
            rows = found if rows is None else concatenate([rows, found], schema)
            if len(rows) > lookup.max_count:
                first, rows = leading(rows, schema, lookup.max_count + 1)
        return rows if rows is not None else np.empty(0, "i8")

    def search_many(self, batch: LookupBatch) -> Matches:
        """Return the rows that answer each lookup, in any order. Shards are read in parallel, each slot group once."""
        read = [(StorageBytes(self.cold, stored), away) for stored, away in self._excluded(batch)]
        parts = side_by_side([partial(_search_shard, source, batch, away) for source, away in read])
        damage = tuple([one for part in parts for one in part.damage])
        found = [part for part in parts if len(part.rows)]
        if not found:
            return Matches.lacking(*damage)
        lookups, rows = (np.concatenate([getattr(part, name) for part in found]) for name in ("lookups", "rows"))
        return Matches(lookups, rows, sum(part.folded for part in found), damage)

    def topic_stats(self) -> NamedStats:
        """See `Handle.topic_stats`. The metadata of shards is read in parallel."""
        trailers = side_by_side([partial(self.cold.trailer, stored) for stored in self.shards])
        return [one for trailer in trailers for one in trailer.metadata.stats_by_topic()]

    def _holding(self, lookup: PreparedLookup) -> list[StoredObject]:
        """Return the shards that may have answers, by slot and time."""
        slot = self.slots.slot_of(lookup.key_hash)
        second_max = lookup.second_max if lookup.after is None else min(lookup.second_max, lookup.after[0])
        found = []
        for stored in reversed(self.shards[: bisect_right(self._lows, slot)]):
            if stored.part.slot_high <= slot:
                break
            if stored.second_min <= second_max and stored.second_max >= lookup.second_min:
                found.append(stored)
        return found

    def _excluded(self, batch: LookupBatch) -> list[tuple[StoredObject, Array]]:
        """Return each shard that may have answers, with the lookups (bool, n) for which it certainly has none."""
        slots = self.slots.slots_of(batch.key_hash)
        result = []
        for stored in self.shards:
            shard = stored.part
            away = StorageBytes(self.cold, stored).away(batch)
            away |= (slots < shard.slot_low) | (slots >= shard.slot_high)
            if not away.all():
                result.append((stored, away))
        return result


def _search_shard(source: StorageBytes, batch: LookupBatch, away: npt.NDArray[np.bool_]) -> Matches:
    here = np.flatnonzero(~away)
    try:
        return source.search_many(batch, away)
    except (CorruptFile, MissingObject, StorageUnavailable) as error:
        if not batch.allow_partial:
            raise
        # lookups in other shards keep their answers
        return Matches.lacking((here, error))


def apply_log_state(
    catalog: Catalog,
    handles: Sequence[Handle],
    state: LogState,
    cold: ColdPath,
    dispose: Callable[[str], Callable[[], None] | None] = lambda _: None,
    keeps: Callable[[CompactedFile], bool] = lambda _: False,
    changed: Iterable[str] | None = None,
) -> None:
    """Update the catalog: besides local files it shows exactly the objects of `state`.

    - `handles` must be read before `state`, so that files published in between are kept.
    - `dispose` returns a function that disposes of a removed file.
    - `keeps` says which local copies are kept although their file was merged.
    - `changed`: only these files and tables differ; None: any may.

    The cold path forgets its notes about removed objects.
    """
    tables: Iterable[tuple[str, list[StoredObject]]] = state.tables.items()
    files: Iterable[tuple[str, StoredObject]] = state.files.items()
    if changed is not None:
        tables = [(file, state.tables[file]) for file in changed if file in state.tables]
        files = [(file, state.files[file]) for file in changed if file in state.files]
    # tables before the removal of their source files, so that a lookup sees each entry at least once
    for table, shards in tables:
        known = catalog.get(table)
        # a record may remove lost shards of a table, or replace shards
        if known is None or (isinstance(known, WindowTable) and known.has_other_shards(shards)):
            catalog.put(WindowTable(cold, shards))
    for handle in handles:
        if isinstance(handle, CompactedFile) and handle.stored is not None and handle.file_id not in state.files:
            if keeps(handle):
                continue
            catalog.remove(handle.file_id, dispose(handle.file_id) if handle.local is not None else None)
        elif isinstance(handle, WindowTable) and handle.file_id not in state.tables:
            catalog.remove(handle.file_id)
    for file_id, stored in files:
        shown = catalog.get(file_id)
        if shown is None:
            catalog.put(open_stored(cold, stored))
        elif isinstance(shown, CompactedFile) and shown.stored is not None and shown.stored.stored != stored:
            # a record has replaced the object
            catalog.put(replace(shown, stored=StorageBytes(cold, stored)))
    if handles or changed is None:
        cold.forget_unnamed(state.objects)


def apply_changes(catalog: Catalog, shown: LogState, state: LogState, cold: ColdPath) -> None:
    """Update a catalog without local files from the earlier state `shown` to `state`.

    If the changes between both are known, only changed files and tables are updated.
    """
    changed = state.changed_since(shown)
    found = catalog.all() if changed is None else [file for file in map(catalog.get, changed) if file is not None]
    apply_log_state(catalog, found, state, cold, changed=changed)
