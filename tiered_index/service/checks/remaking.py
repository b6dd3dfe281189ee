"""Objects made anew of their source's messages: a file, or a shard of a window table, whose bytes are gone.

What the messages have in the object's seconds (and slots) and no other file has must be as many entries as the record
says, of the same first and last second, with or without what has expired or was erased by now, or had when the object
was made: of what the log has stated one after the other, each hides all that the one before does, so that no two that
hide other entries leave as many. Else nothing is made. Files of
one root are runs of one log, in its order, so that several that are gone are told apart by their counts. Memory: some
100 bytes an entry of the messages within the object's seconds. Threads: any.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index._version import __version__
from tiered_index.errors import CorruptFile, InvalidArgument, ObjectNotFound
from tiered_index.format.compacted import SealedFile
from tiered_index.format.names import DATA_PREFIX
from tiered_index.format.shard import ShardWriter, answer_sorted, entry_hashes
from tiered_index.format.time_line import TimeLine
from tiered_index.retention import Expired
from tiered_index.service.answers.validation import TopicTable, batch_columns
from tiered_index.service.catalog.catalog import Handle
from tiered_index.service.cold.path import ColdPath, ColdSettings
from tiered_index.service.files.compacted import CompactedFile, StorageBytes
from tiered_index.service.files.search import FileBytes, scan_runs
from tiered_index.service.log.records import IndexDescriptor, StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.service.reading.root_view import RootView, UnsealedView
from tiered_index.service.root import Root
from tiered_index.storage.base import Storage

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
Entries = Callable[[int, int], Iterator[Any]]
"""Yields batches as `put_batch` takes them: the messages of an inclusive range of epoch seconds, and others, each once,
in the order of their log.
"""
Pieces = Iterable[bytes | memoryview]
_WINDOW_BYTES = 8 << 20
# entries within the seconds of what is made anew
_MOST_ENTRIES = 1 << 26
# how many horizons before a merge are tried: one that it was planned by is not far behind its record
_MOST_HORIZONS = 256


@dataclass(frozen=True)
class Remaking:
    """Makes objects of one index anew, as they were at `state`; `root` has files that were not published yet. `copies`
    are good ones of objects that can't be read, by their names: another object, or the root's file. `stated` returns
    what had expired or was erased when a window table came to be, and before, the latest first.
    """

    storage: Storage
    state: LogState
    root: Root | None
    entries: Entries
    copies: Mapping[str, str]
    stated: Callable[[str], Iterable[Expired]] = lambda table: ()

    def pieces(self, group: Sequence[StoredObject], bad: Collection[str]) -> dict[str, Callable[[], Pieces]]:
        """Return how each of `group` is made anew, as far as its messages are there; the `bad` can't be read."""
        if self._genesis.layout.schema.caller_columns or any(o.hash == "both" for o in group):
            return {}
        topics = TopicTable()
        try:
            items, seconds = self._candidates(group, topics)
            hashes = entry_hashes(items, seconds)
            kept = _without(hashes, self._held_elsewhere(group, bad, topics))
        except (CorruptFile, InvalidArgument, ObjectNotFound):
            return {}  # what the messages or another file have is not known: nothing can be told of the difference
        items, seconds = items[kept], seconds[kept]
        names = {topic_id: topics.name(topic_id) for topic_id in np.unique(items["topic_id"]).tolist()}
        # a merge has left out what had expired or was erased before it: the record's count tells
        made = self._made(group, items, seconds, topics)
        stated = self.stated(group[0].part.table) if group[0].shard is not None and len(made) < len(group) else ()
        for expired in (self.state.expired, *itertools.islice(stated, _MOST_HORIZONS)):
            if not (left := [stored for stored in group if stored.name not in made]):
                break
            shown = expired.keeps(items, seconds, names)
            made |= self._made(left, items[shown], seconds[shown], topics)
        return made

    def _made(
        self, group: Sequence[StoredObject], items: Array, seconds: Int64, topics: TopicTable
    ) -> dict[str, Callable[[], Pieces]]:
        """Return how each of `group` is made of entries, where these are as many as the record says."""
        made: dict[str, Callable[[], Pieces]] = {}
        if group[0].shard is None:
            # a follower's files are runs of its log, in their order
            if len(items) != sum(stored.count for stored in group):
                return {}
            begin = 0
            for stored in sorted(group, key=lambda one: one.sequence):
                part = slice(begin, begin := begin + stored.count)
                if _has(stored, seconds[part]):
                    made[stored.name] = partial(self._file, stored, items[part], seconds[part], topics)
            return made
        for stored in group:
            mine = _in_slots(stored, items) & (seconds >= stored.second_min) & (seconds <= stored.second_max)
            if np.count_nonzero(mine) == stored.count and _has(stored, seconds[mine]):
                made[stored.name] = partial(self._shard, stored, items[mine], seconds[mine], topics)
        return made

    @property
    def _genesis(self) -> IndexDescriptor:
        assert self.state.genesis is not None
        return self.state.genesis

    def _candidates(self, group: Sequence[StoredObject], topics: TopicTable) -> tuple[Array, Int64]:
        """Return the messages' entries (structured, n) and seconds that may be the group's, in the order of their log.
        Raises `InvalidArgument` for too many.
        """
        schema, (low, high) = self._genesis.layout.schema, _interval(group)
        parts, of_seconds, total = [np.zeros(0, schema.item)], [np.zeros(0, np.int64)], 0
        for batch in self.entries(low, high):
            columns, _ = batch_columns(batch, schema, topics, group[0].hash)
            seconds = columns["second"]
            items = np.zeros(len(seconds), schema.item)
            for name in schema.item.names or ():
                if name != "time_diff_s":
                    items[name] = columns[name]
            mine = (seconds >= low) & (seconds <= high)
            if group[0].shard is not None:
                mine &= np.logical_or.reduce([_in_slots(stored, items) for stored in group])
            parts.append(items[mine])
            of_seconds.append(seconds[mine])
            total += len(parts[-1])
            if total > _MOST_ENTRIES:
                raise InvalidArgument(f"more than {_MOST_ENTRIES:,} entries to be made anew at a time")
        # by itself NumPy joins records in native byte order
        return np.concatenate(parts, dtype=schema.item), np.concatenate(of_seconds)

    def _held_elsewhere(
        self, group: Sequence[StoredObject], bad: Collection[str], topics: TopicTable
    ) -> Iterator[Array]:
        """Yield the hashes (u64, n) of entries of the group's seconds that other files hold, local ones, too."""
        state, (low, high) = self.state, _interval(group)
        keyed = self._genesis.layout.schema.keyed
        settings = ColdSettings(query_threads=4, block_cache_bytes=0, coalesce_gap_bytes=0)
        with contextlib.closing(ColdPath(self.storage, keyed=keyed, settings=settings)) as cold:
            sources: list[FileBytes] = [
                StorageBytes(cold, stored)
                for stored in state.objects.values()
                if stored.name not in bad and stored.second_min <= high and stored.second_max >= low
            ]
            for name, copy in self.copies.items():
                if copy.startswith(DATA_PREFIX):  # another upload of it
                    sources.append(StorageBytes(cold, replace(state.objects[name], name=copy)))
            restored = {state.objects[name].file_id for name in self.copies}
            handles: list[Handle] = RootView(self.root).look() if self.root is not None else []
            for handle in handles:
                if handle.second_min > high or handle.second_max < low:
                    continue
                if isinstance(handle, CompactedFile) and handle.local is not None:
                    # what was published counts as an object, unless the copy is all that there is
                    if handle.file_id in (restored if handle.file_id in state.files else {handle.file_id}):
                        sources.append(handle.local)
                elif isinstance(handle, UnsealedView) and handle.file_id not in state.files:
                    yield self._hashes(*handle.snapshot(), topics, (low, high))
            for source in sources:
                trailer = source.trailer()
                runs = [r for r in trailer.directory.all_runs() if r.second_min <= high and r.second_max >= low]
                names, begin_s = dict(trailer.metadata.topics), trailer.metadata.begin_ms // 1000
                for _, items in scan_runs(source, runs, _WINDOW_BYTES):
                    yield self._hashes(items, begin_s, names, topics, (low, high))

    def _hashes(
        self, items: Array, begin_s: int, names: Mapping[int, str], topics: TopicTable, within: tuple[int, int]
    ) -> npt.NDArray[np.uint64]:
        """Return the hashes of entries within inclusive seconds, by the ids that `topics` gives to their names."""
        seconds = items["time_diff_s"].astype(np.int64) + begin_s
        mine = (seconds >= within[0]) & (seconds <= within[1])
        items, seconds = items[mine], seconds[mine]
        # entries of unsealed files have a column more
        plain = np.zeros(len(items), self._genesis.layout.schema.item)
        for name in plain.dtype.names or ():
            plain[name] = items[name]
        used, places = np.unique(items["topic_id"], return_inverse=True)
        ids = [topics.assign(names[topic_id]) if topic_id in names else topic_id for topic_id in used.tolist()]
        if ids:
            plain["topic_id"] = np.array(ids, np.int64)[places]
        return entry_hashes(plain, seconds)

    def _file(self, stored: StoredObject, items: Array, seconds: Int64, topics: TopicTable) -> Pieces:
        genesis = self._genesis
        layout = replace(genesis.layout, hash=stored.hash)
        entries = np.zeros(len(items), layout.schema.entry)
        for name in items.dtype.names or ():
            entries[name] = items[name]
        entries["time_diff_s"] = seconds - stored.second_min
        return SealedFile(
            file_id=stored.file_id,
            layout=layout,
            begin_ms=stored.second_min * 1000,
            end_ms=stored.second_max * 1000,
            count=stored.count,
            lane=stored.lane,
            sequence=stored.sequence,
            predecessor=None,
            created_ms=stored.published_ms,
            offset_space=genesis.offset_space,
            topics=tuple((topic_id, topics.name(topic_id)) for topic_id in np.unique(items["topic_id"]).tolist()),
            positions={},
            writer=f"tiered_index {__version__}",
            packed=not layout.preset.newest_first,
        ).compacted(entries)

    def _shard(self, stored: StoredObject, items: Array, seconds: Int64, topics: TopicTable) -> Pieces:
        genesis, shard = self._genesis, stored.part
        layout = replace(genesis.layout, hash=stored.hash)
        order = answer_sorted(items, seconds, shard.slots, layout.schema)
        items = items[order].copy()
        items["time_diff_s"] = seconds[order] - shard.begin_s
        begin_ms, end_ms = shard.begin_s * 1000, (shard.begin_s + shard.window_s) * 1000 - 1
        slots = shard.slot_low, shard.slot_high
        writer = ShardWriter(layout, shard.slots, slots, begin_ms, end_ms, len(items), TimeLine.through(items))
        yield writer.begin()
        yield writer.add(items)
        names = {topic_id: topics.name(topic_id) for topic_id in np.unique(items["topic_id"]).tolist()}
        more = {"table": shard.table, "window_s": shard.window_s, "sequence": stored.sequence}
        yield writer.finish(stored.file_id, f"tiered_index {__version__}", genesis.offset_space, names, more)


def groups_of(bad: Sequence[StoredObject]) -> Iterator[list[StoredObject]]:
    """Yield groups that are made anew together: files whose seconds overlap, and shards of one table."""
    tables: dict[str, list[StoredObject]] = {}
    files: list[StoredObject] = []
    for stored in bad:
        (files if stored.shard is None else tables.setdefault(stored.part.table, [])).append(stored)
    group: list[StoredObject] = []
    for stored in sorted(files, key=lambda one: (one.second_min, one.second_max)):
        if group and stored.second_min > max(one.second_max for one in group):
            yield group
            group = []
        group.append(stored)
    if group:
        yield group
    yield from tables.values()


def _interval(group: Sequence[StoredObject]) -> tuple[int, int]:
    return min(stored.second_min for stored in group), max(stored.second_max for stored in group)


def _has(stored: StoredObject, seconds: Int64) -> bool:
    return (int(seconds.min()), int(seconds.max())) == (stored.second_min, stored.second_max)


def _in_slots(stored: StoredObject, items: Array) -> npt.NDArray[np.bool_]:
    slots = stored.part.slots.slots_of(items["key_hash"])
    return (slots >= stored.part.slot_low) & (slots < stored.part.slot_high)


def _without(hashes: npt.NDArray[np.uint64], others: Iterable[Array]) -> npt.NDArray[np.bool_]:
    """Return which entries (bool, n) are left once each of `others` has taken one of its hash away, the first ones."""
    known, places = np.unique(hashes, return_inverse=True)
    taken = np.zeros(len(known), np.int64)
    for part in others:
        at = np.searchsorted(known, part)
        at[at == len(known)] = 0
        if len(known):
            np.add.at(taken, at[known[at] == part], 1)
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    # the number of each entry among those of its hash
    rank = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
    kept: npt.NDArray[np.bool_] = np.empty(len(hashes), np.bool_)
    kept[order] = rank >= taken[ordered]
    return kept
