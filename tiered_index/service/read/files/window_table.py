"""Window tables: the entries of one time window, merged from many files. Also updates a catalog from the log.

A lookup reads the shard of its slot. A giant slot has several shards of different times; only those that the page needs
are read. Threads: any.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from tiered_index.base.call import Call
from tiered_index.base.threads import side_by_side
from tiered_index.errors import CorruptFile, StorageUnavailable
from tiered_index.format.keys.hashing import joint_rule
from tiered_index.format.metadata import NamedStats
from tiered_index.service.log.records import StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.service.read.answers.batch import LookupBatch, MatchAccumulator, Matches
from tiered_index.service.read.files.cold_path import ColdPath, MissingObject
from tiered_index.service.read.files.compacted import CompactedFile, StorageBytes, open_stored
from tiered_index.service.read.files.file_search import collected
from tiered_index.service.read.files.snapshot import Catalog, Handle


class WindowTable:
    """The shards of one table, whose id is `file_id`. Raises `CorruptFile` for shards that contradict each other."""

    place = "storage"
    is_local = False
    fallback: Handle | None = None
    lane = "main"

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
        # for each shard the number of newer ones of the same giant slot
        self._newer: list[int] = []
        for number, stored in enumerate(ordered):
            is_giant = number > 0 and ordered[number - 1].part.slot_high > stored.part.slot_low
            self._newer.append(self._newer[-1] + 1 if is_giant else 0)
        self._has_giants = any(self._newer)

    def has_other_shards(self, shards: Sequence[StoredObject]) -> bool:
        """Return whether `shards` differ from the table's."""
        return len(shards) != len(self.shards) or {shard.name for shard in shards} != {
            shard.name for shard in self.shards
        }

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

    def excludes(self, batch: LookupBatch) -> str | None:
        """See `Handle.excludes`."""
        if not batch.overlaps(self.second_min, self.second_max):
            return "time"
        return None if self._shards_for(batch) else "filter"

    def search(self, batch: LookupBatch, call: Call) -> Matches:
        """Return the rows that answer each lookup, in any order. Shards are read in parallel.

        Of a giant slot's shards, the newest ones come first, until each lookup has its page.
        """
        needed_shards, cold = self._shards_for(batch), self.cold.bound(call)
        if len(needed_shards) == 1:
            [(_, stored, away)] = needed_shards
            return _search_shard(StorageBytes(cold, stored), batch, away)
        parts: list[Matches] = []
        gathered: MatchAccumulator | None = None
        for newer, shards in itertools.groupby(needed_shards, itemgetter(0)):
            reads = []
            for _, stored, away in shards:
                if newer and gathered is not None:
                    # those whose page ends before this shard begins
                    is_past = batch.page_ends(np.arange(len(batch)), gathered.first()) > stored.second_max
                    away = is_past if away is None else away | is_past
                if away is None or not away.all():
                    reads.append(partial(_search_shard, StorageBytes(cold, stored), batch, away))
            parts += side_by_side(reads, call)
            filled = [part for part in parts if len(part.rows)]
            if self._has_giants and filled:
                schema = cold.trailer(self.shards[0]).metadata.layout.schema
                gathered = MatchAccumulator(batch, schema)
                for part in filled:
                    gathered.add(part)
        return collected(parts)

    def topic_stats(self, call: Call) -> NamedStats:
        """See `Handle.topic_stats`. The metadata of shards is read in parallel."""
        cold = self.cold.bound(call)
        trailers = side_by_side([partial(cold.trailer, stored) for stored in self.shards], call)
        return [topic_stats for trailer in trailers for topic_stats in trailer.metadata.stats_by_topic()]

    def _shards_for(self, batch: LookupBatch) -> list[tuple[int, StoredObject, npt.NDArray[np.bool_] | None]]:
        """Return each shard that may have answers, with the number of newer shards of its slots, these shards last.

        The third part are the lookups (bool, n) for which a shard certainly has no answer; None: it may have one for
        each.
        """
        if batch.is_one:
            low, high = self._places_of(self.slots.slot_of(batch.first[0]))
            shards = zip(self._newer[low:high], self.shards[low:high], strict=True)
            return [
                (newer, stored, None)
                for newer, stored in (sorted(shards, key=itemgetter(0)) if self._has_giants else shards)
                if not StorageBytes(self.cold, stored).lacks(batch)
            ]
        slots = self.slots.slots_of(batch.key_hash)
        needed_shards: list[tuple[int, StoredObject, npt.NDArray[np.bool_] | None]] = []
        for newer, stored in zip(self._newer, self.shards, strict=True):
            shard = stored.part
            away = (slots < shard.slot_low) | (slots >= shard.slot_high)
            if not away.all():
                away |= StorageBytes(self.cold, stored).away(batch)
            if not away.all():
                needed_shards.append((newer, stored, away))
        return sorted(needed_shards, key=itemgetter(0)) if self._has_giants else needed_shards

    def _places_of(self, slot: int) -> tuple[int, int]:
        """Return the first place of a shard that may have a slot, and the end."""
        high = low = bisect_right(self._lows, slot)
        while low and self.shards[low - 1].part.slot_high > slot:
            low -= 1
        return low, high


def _search_shard(source: StorageBytes, batch: LookupBatch, away: npt.NDArray[np.bool_] | None) -> Matches:
    try:
        return source.search(batch, away)
    except (CorruptFile, MissingObject, StorageUnavailable) as error:
        if not batch.allow_partial:
            raise
        # lookups in other shards keep their answers
        here = np.arange(len(batch)) if away is None else np.flatnonzero(~away)
        return Matches.lacking((here, error))


def apply_log_state(
    catalog: Catalog,
    handles: Sequence[Handle],
    state: LogState,
    cold: ColdPath,
    dispose: Callable[[str], Callable[[], None] | None] = lambda _: None,
    keeps: Callable[[CompactedFile], bool] = lambda _: False,
    changed: Collection[str] | None = None,
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


def apply_changes(catalog: Catalog, state: LogState, cold: ColdPath, as_of_s: float) -> None:
    """Make the snapshot of `state`, read at `as_of_s`, in a catalog without local files that shows an earlier state.

    If the changes between both are known, only changed files and tables are updated.
    """
    changed = state.changed_since(catalog.snapshot.state)
    with catalog.changing(state, as_of_s):
        handles = catalog.all() if changed is None else [file for file in map(catalog.get, changed) if file is not None]
        apply_log_state(catalog, handles, state, cold, changed=changed)
