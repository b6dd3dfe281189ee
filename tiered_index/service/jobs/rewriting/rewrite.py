"""Rewrites entries: a task reads its slots and windows of every input in bounded pieces, and sends them as shards.

It leaves out expired, erased and replaced entries. Merges and erasures do this (`service/jobs/rewriting/job.py`). A
piece is a run of base slots of all inputs; directories give its size before items are read. A base slot with too many
entries (one hot key) is split by time into several pieces, newest first. Memory: the directories, and about 100 bytes
per entry of one piece with its sort. Each window adds the stream of a shard (8 MiB) and 8 bytes per entry. Threads:
one per task.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import structs

from tiered_index.base.version import __version__
from tiered_index.errors import DiskFull, SchemaMismatch, StorageError
from tiered_index.format.keys.hashing import normal_hashes
from tiered_index.format.layout import SlotMap, divided
from tiered_index.format.names import data_name, new_file_id
from tiered_index.format.packed import PackingOptions
from tiered_index.format.packed_numpy import UnlistedTopic
from tiered_index.format.schema import Schema
from tiered_index.format.shard import ShardWriter, answer_sorted, entry_checksum
from tiered_index.format.trailer import Trailer, parse_trailer
from tiered_index.service.jobs.rewriting.job import TaskResult
from tiered_index.service.log.expired import Expired
from tiered_index.service.log.publication import FinishedObject, SentObject, abandon, stored_file
from tiered_index.service.log.records import IndexDescriptor, Origin, StoredObject
from tiered_index.service.read.files.cold_path import ColdPath, ColdSettings
from tiered_index.service.read.files.compacted import StorageBytes
from tiered_index.service.read.files.file_search import read_items
from tiered_index.storage.base import Storage, Writer
from tiered_index.types import no_progress

T = TypeVar("T")
R = TypeVar("R")
Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
READERS = 8
"""Inputs that a task reads at the same time."""
_ALWAYS = (-(2**62), 2**62)


@dataclass(frozen=True, slots=True)
class Window:
    """A table to write, for epoch seconds [`begin_s`, `begin_s` + `window_s`).

    `entries` is an estimate. `origin` is the origin of all its inputs.
    """

    table: str
    begin_s: int
    window_s: int
    slots: SlotMap
    entries: int
    origin: Origin


@dataclass(frozen=True, slots=True)
class Piece:
    """Items (structured, n) of base slots [`low`, `high`) with their epoch seconds (i64, n), in no order.

    If a base slot has several pieces, `part` numbers them from 0. None: the piece has all entries of its base slots.
    """

    low: int
    high: int
    items: Array
    seconds: Int64
    part: int | None

    def without(self, expired: Expired, topics: Mapping[int, str]) -> Piece:
        """Return the piece without expired, erased and replaced entries; `topics` has the names of topic ids."""
        shown = expired.keeps(self.items, self.seconds, topics)
        return self if shown.all() else replace(self, items=self.items[shown], seconds=self.seconds[shown])


@dataclass(eq=False)
class InputReader:
    """Reads base slots [`low`, `high`) of every input, within `seconds` (inclusive). Raises `SchemaMismatch`."""

    cold: ColdPath
    inputs: Sequence[StoredObject]
    schema: Schema
    base: int
    low: int
    high: int
    step: int
    seconds: tuple[int, int] = _ALWAYS
    readers: int = READERS

    def __post_init__(self) -> None:
        self._inputs = [StorageBytes(self.cold, stored) for stored in self.inputs]
        self._trailers: list[Trailer] = self._each(lambda source: source.trailer_of(self.schema), self._inputs)
        for stored, trailer in zip(self.inputs, self._trailers, strict=True):
            if trailer.metadata.slot_map.base != self.base:
                raise SchemaMismatch(
                    f"{stored.name} has {trailer.metadata.slot_map.base:,} base slots, the index {self.base:,}"
                )
        self.topics, self._changed_ids = _common_topics(self._trailers)
        self.read_counts = dict.fromkeys((stored.name for stored in self.inputs), 0)

    def pieces(self, most: int) -> Iterator[Piece]:
        """Yield all items in pieces of about `most` entries, in order of base slots."""
        first, last = self.low // self.step, -(-self.high // self.step)
        # the steps of each group; a group of one slot has one step
        groups = [np.concatenate(column) for column in zip(*map(self._spread, self._trailers), strict=True)]
        for begin, end, count in _even_cuts(*groups, first=first, last=last, most=most):
            low, high = begin * self.step, min(self.high, end * self.step)
            if count <= 2 * most:
                parts = self._side_by_side(low, high, self.seconds)
                yield self._piece(low, high, parts, None)
            else:
                yield from self._giant(low, high, most)

    def _spread(self, trailer: Trailer) -> tuple[Int64, Int64, Int64]:
        """Return the begin, the end (in steps) and the number of entries of each group."""
        slots = trailer.metadata.slot_map
        firsts = np.append(trailer.directory.groups["first_slot"].astype(np.int64), trailer.metadata.slot_range[1])
        begins = firsts[:-1] * slots.join if slots.join > 1 else firsts[:-1] // slots.split
        ends = firsts[1:] * slots.join if slots.join > 1 else -(-firsts[1:] // slots.split)
        begins, counts = begins // self.step, trailer.directory.groups["count"].astype(np.int64)
        return begins, np.maximum(begins + 1, -(-ends // self.step)), counts

    def _side_by_side(self, low: int, high: int, seconds: tuple[int, int]) -> list[tuple[Array, Int64]]:
        """Return the result of `_read` for each input, read in parallel: each needs a few requests."""
        return self._each(lambda index: self._read(index, low, high, seconds), range(len(self._inputs)))

    def _each(self, read: Callable[[T], R], inputs: Iterable[T]) -> list[R]:
        """Return the results of `read` in order, `readers` at once."""
        if self.readers == 1:
            return [read(source) for source in inputs]
        with ThreadPoolExecutor(self.readers) as pool:
            return list(pool.map(read, inputs))

    def _read(self, index: int, low: int, high: int, seconds: tuple[int, int]) -> tuple[Array, Int64]:
        """Return one input's items of base slots [low, high) in an inclusive range of seconds, and their seconds."""
        trailer = self._trailers[index]
        metadata = trailer.metadata
        first, last = metadata.slot_map.slots_of_base(low, high)
        runs = trailer.directory.runs_between(first, last, *seconds)
        items = read_items(self._inputs[index], runs)
        _, base_slots = divided(normal_hashes(items["key_hash"]), self.base)
        times = items["time_diff_s"].astype(np.int64) + metadata.begin_ms // 1000
        inside = (base_slots >= low) & (base_slots < high) & (times >= seconds[0]) & (times <= seconds[1])
        if not inside.all():
            items, times = items[inside], times[inside]
        self.read_counts[self._inputs[index].file] += len(items)
        return self._with_common_topics(index, items), times

    def _with_common_topics(self, index: int, items: Array) -> Array:
        changed = self._changed_ids[index]
        if not changed:
            return items
        items = items.copy()
        ids = items["topic_id"].copy()
        for old, new in changed.items():
            items["topic_id"][ids == old] = new
        return items

    def _piece(self, low: int, high: int, parts: Sequence[tuple[Array, Int64]], part: int | None) -> Piece:
        items = np.concatenate([items.view(np.void) for items, _ in parts]).view(self.schema.item)
        return Piece(low, high, items, np.concatenate([seconds for _, seconds in parts]), part)

    def _giant(self, low: int, high: int, most: int) -> Iterator[Piece]:
        """Yield a step with too many entries, split by time, newest first."""
        runs = [
            run
            for trailer in self._trailers
            for run in trailer.directory.runs_between(
                *trailer.metadata.slot_map.slots_of_base(low, high), *self.seconds
            )
        ]
        oldest = max(self.seconds[0], min(trailer.metadata.second_min for trailer in self._trailers))
        newest = min(self.seconds[1], max(trailer.metadata.second_max for trailer in self._trailers))
        # negated seconds, since the newest come first. The times of a run may be unknown
        begins = np.array([-min(run.second_max, newest) for run in runs], np.int64)
        ends = np.array([1 - max(run.second_min, oldest) for run in runs], np.int64)
        counts = np.array([run.count for run in runs], np.int64)
        edges = _even_cuts(begins, ends, counts, first=-newest, last=1 - oldest, most=most)
        for part, (begin, end, _) in enumerate(edges):
            parts = self._side_by_side(low, high, (1 - end, -begin))
            if any(len(items) for items, _ in parts):
                yield self._piece(low, high, parts, part)


def _even_cuts(
    begins: Int64, ends: Int64, counts: Int64, *, first: int, last: int, most: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, estimated entries) of consecutive ranges of [`first`, `last`) with about `most` entries each.

    A range of length 1 may have more. The `counts` entries of each interval [`begins`, `ends`) count as spread evenly.
    """
    densities = counts / (ends - begins)
    begins, ends = begins.clip(first, last), ends.clip(first, last)
    edges, places = np.unique(np.concatenate(([first, last], begins, ends)), return_inverse=True)
    steepness = np.zeros(len(edges))
    np.add.at(steepness, places[2:], np.concatenate((densities, -densities)))
    total = np.append(0.0, np.maximum.accumulate(np.cumsum(np.cumsum(steepness)[:-1] * np.diff(edges))))
    begin, taken = first, 0.0
    while begin < last:
        # the range's greatest end, at least one step away
        reach = last if total[-1] <= taken + most else math.floor(np.interp(taken + most, total, edges))
        end = min(last, max(begin + 1, reach))
        reached = float(np.interp(end, edges, total))
        yield begin, end, round(reached - taken)
        begin, taken = end, reached


def _common_topics(trailers: Sequence[Trailer]) -> tuple[dict[int, str], list[dict[int, int]]]:
    """Return the result's topic table and the changed ids of each input."""
    names: dict[int, str] = {}
    ids: dict[str, int] = {}
    changed = []
    for trailer in trailers:
        mine = {}
        for topic_id, name in trailer.metadata.topics:
            new = ids.get(name)
            if new is None:
                new = topic_id
                while new in names:
                    new = (new + 1) % 2**31
                names[new], ids[name] = name, new
            if new != topic_id:
                mine[topic_id] = new
        changed.append(mine)
    return names, changed


@dataclass
class _OpenShard:
    writer: ShardWriter
    stream: Writer
    file_id: str


@dataclass(eq=False)
class TableRun:
    """Writes one window's run of base slots, as one shard or several.

    Add pieces in order of base slots, the parts of a split slot newest first. `topics` has the name of each topic id,
    `most` bounds the entries to come. `generation`: that of the replaced ranges which the items lack.
    """

    descriptor: IndexDescriptor
    window: Window
    base_slots: tuple[int, int]
    topics: Mapping[int, str]
    sequence: int
    most: int
    storage: Storage
    now_ms: int
    generation: int = 0
    finished: list[FinishedObject] = field(default_factory=list)
    _open: _OpenShard | None = None

    def __post_init__(self) -> None:
        # begin of the next shard, end of the run, in base slots
        self._low, self._high = self.base_slots

    def add(self, piece: Piece) -> None:
        """Write the piece's items of this window."""
        window = self.window
        mine = (piece.seconds >= window.begin_s) & (piece.seconds < window.begin_s + window.window_s)
        # each piece of a split slot is a shard of its own
        is_giant = piece.part is not None
        if is_giant:
            self._close(piece.low)
        if not mine.any():
            if is_giant:
                self._low = piece.high
            return
        items, seconds = piece.items, piece.seconds
        if not mine.all():
            items, seconds = items.compress(mine), seconds[mine]
        order = answer_sorted(items, seconds, window.slots, self.descriptor.layout.schema)
        # `take` moves whole records, in a tenth of the time of an index, which moves field by field
        items, seconds = items.take(order), seconds[order]
        items["time_diff_s"] = seconds - window.begin_s
        if self._open is None:
            share = window.entries * (self._high - self._low) // window.slots.base
            room = len(items) if is_giant else min(self.most, share + len(items))
            self._open = self._begin(*((piece.low, piece.high) if is_giant else (self._low, self._high)), room, items)
        self._open.stream.write(self._open.writer.add(items))
        if is_giant:
            self._close(piece.high)

    def finish(self) -> None:
        """Finish the open shard."""
        self._close(self._high)

    def abandon(self) -> None:
        """Drop the open shard, and delete the finished ones."""
        if self._open is not None:
            with contextlib.suppress(StorageError, DiskFull):  # `purge` drops the rest
                self._open.stream.abort()
        abandon([shard.sent for shard in self.finished], self.storage)

    def _begin(self, low: int, high: int, capacity: int, sample: npt.NDArray[Any]) -> _OpenShard:
        window, layout = self.window, self.descriptor.layout
        begin_ms = window.begin_s * 1000
        file_id = new_file_id(begin_ms)
        end_ms = (window.begin_s + window.window_s) * 1000 - 1
        slot_range, packing = window.slots.slots_of_base(low, high), PackingOptions.of(sample, self.topics, capacity)
        writer = ShardWriter(layout, window.slots, slot_range, begin_ms, end_ms, capacity, packing)
        stream = self.storage.open_writer(data_name(file_id, secrets.token_hex(8)))
        stream.write(writer.begin())
        return _OpenShard(writer, stream, file_id)

    def _close(self, high: int) -> None:
        """Finish the open shard, whose slots end at base slot `high`."""
        shard, self._open = self._open, None
        low, self._low = self._low, high
        if shard is None:
            return
        window = self.window
        writer, stream = shard.writer, shard.stream
        writer.slot_range = window.slots.slots_of_base(low, high)
        more = {"table": window.table, "window_s": window.window_s, "sequence": self.sequence}
        with stream:
            if not writer.topic_ids <= self.topics.keys():
                raise UnlistedTopic
            topics = {topic_id: self.topics[topic_id] for topic_id in writer.topic_ids}
            about = f"tiered_index {__version__}", self.descriptor.offset_space, topics, more
            trailer = writer.finish(shard.file_id, *about)
            stream.write(trailer)
            parsed = parse_trailer(trailer, stream.name, stream.size_bytes)
        sent = SentObject(stream.name, stream.size_bytes, self.now_ms)
        stored = stored_file(sent.name, parsed, sent.size_bytes, self.now_ms, window.origin)
        stored = structs.replace(stored, generation=self.generation)
        self.finished.append(FinishedObject(stored, sent, writer.checksum))


PIECE_ITEMS = 1 << 20
"""The number of entries, about, that a task has in memory at a time."""


@dataclass(frozen=True, slots=True)
class RewriteTask:
    """One part of a rewrite: base slots [`base_low`, `base_high`) of a group of windows.

    `inputs` are the objects that may have such entries. The task writes one shard for each window with entries that
    have not `expired`. `sequence` is the greatest of the rewrite's inputs. `piece_items`: about so many entries are in
    memory at a time (None: `PIECE_ITEMS`). `readers`: inputs read at once.
    """

    number: int
    base_low: int
    base_high: int
    sequence: int
    inputs: tuple[StoredObject, ...]
    windows: tuple[Window, ...]
    descriptor: IndexDescriptor
    expired: Expired
    piece_items: int | None = None
    readers: int = READERS

    @property
    def seconds(self) -> tuple[int, int]:
        """The first and the last second of the windows."""
        return self.windows[0].begin_s, self.windows[-1].begin_s + self.windows[-1].window_s - 1

    def run(self, storage: Storage, now_ms: int, progress: Callable[[int], None] = no_progress) -> TaskResult:
        """Read, sort and write. `progress` gets numbers of entries. After an error the objects are deleted."""
        if not self.inputs:
            return TaskResult(self.number, {}, 0, ())
        layout = self.descriptor.layout
        settings = ColdSettings(query_threads=self.readers, cache_slot_groups=False, coalesce_gap_bytes=0)
        with contextlib.closing(ColdPath(storage, keyed=layout.schema.keyed, settings=settings)) as cold:
            step, slots = max(window.slots.join for window in self.windows), (self.base_low, self.base_high)
            of_index = self.inputs, layout.schema, layout.slots
            reader = InputReader(cold, *of_index, *slots, step, self.seconds, self.readers)
            most = sum(stored.count for stored in self.inputs)
            generation = self.expired.replaced.generation
            more = slots, reader.topics, self.sequence, most, storage, now_ms, generation
            tables = [TableRun(self.descriptor, window, *more) for window in self.windows]
            checksum = expired = expired_checksum = 0
            with contextlib.ExitStack() as undo:
                for table in tables:
                    undo.callback(table.abandon)
                for piece in reader.pieces(self.piece_items or PIECE_ITEMS):
                    of_piece = entry_checksum(piece.items, piece.seconds)
                    checksum += of_piece
                    shown = piece.without(self.expired, reader.topics)
                    if shown is not piece:
                        expired += len(piece.items) - len(shown.items)
                        expired_checksum += of_piece - entry_checksum(shown.items, shown.seconds)
                    for table in tables:
                        table.add(shown)
                    progress(len(piece.items))
                for table in tables:
                    table.finish()
                undo.pop_all()
            shards = tuple(shard for table in tables for shard in table.finished)
            sums = checksum % 2**64, shards, expired, expired_checksum % 2**64
            return TaskResult(self.number, reader.read_counts, *sums)
