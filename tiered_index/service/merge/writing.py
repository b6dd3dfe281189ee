"""One task of a merge: its slots and windows of every input, written as shards, not published.

Names are unique to the attempt, so a task may be repeated, run twice at once or die at any moment. Memory: one piece of
the inputs, its sort, and for each window two parts of an upload and 8 bytes an entry. Threads: one a task and run.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index._version import __version__
from tiered_index.format.names import data_name, new_file_id
from tiered_index.format.shard import ShardWriter, answer_sorted, entry_checksum
from tiered_index.format.time_line import TimeLine
from tiered_index.format.trailer import parse_trailer
from tiered_index.service.cold.path import ColdPath, ColdSettings
from tiered_index.service.lifecycle.publication import FinishedObject, Upload, stored_file
from tiered_index.service.log.records import IndexDescriptor, TableShard
from tiered_index.service.merge.pieces import InputReader, Piece
from tiered_index.service.merge.plan import FULL_WINDOWS, MergeTask, Window
from tiered_index.storage.base import Storage

_PART_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class FinishedShard(FinishedObject):
    """A shard as it will stand in the log, and the checksum of its entries."""

    checksum: int


@dataclass
class _OpenShard:
    writer: ShardWriter
    upload: Upload
    file_id: str
    used_topics: set[int] = field(default_factory=set)


@dataclass(eq=False)
class TableRun:
    """One window's run of base slots: the shard that is being written, and those that are finished. Pieces come in
    order of base slots, a giant's parts newest first. `topics` are names of ids, `most` bounds the entries to come. The
    more runs are written at once (`beside`), the smaller are the parts of their uploads.
    """

    descriptor: IndexDescriptor
    window: Window
    base_slots: tuple[int, int]
    topics: Mapping[int, str]
    sequence: int
    most: int
    storage: Storage
    now_ms: int
    beside: int = 1
    packed: bool = True
    finished: list[FinishedShard] = field(default_factory=list)
    _open: _OpenShard | None = None
    _uploads: list[Upload] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._part_bytes = _PART_BYTES * FULL_WINDOWS // max(FULL_WINDOWS, self.beside)
        # where the next shard's slots begin, and where the run ends, in base slots
        self._low, self._high = self.base_slots

    def add(self, piece: Piece) -> None:
        """Write those of the piece's items that lie in the window."""
        window = self.window
        mine = (piece.seconds >= window.begin_s) & (piece.seconds < window.begin_s + window.window_s)
        if piece.part is not None:
            # a giant's pieces are shards of their own: closed before, closed after
            self._close(piece.low)
        if not mine.any():
            if piece.part is not None:
                self._low = piece.high
            return
        items, seconds = piece.items, piece.seconds
        if not mine.all():
            items, seconds = items.compress(mine), seconds[mine]
        order = answer_sorted(items, seconds, window.slots, self.descriptor.layout.schema)
        # `take` moves records whole: a tenth of the time of an index, which goes field by field
        items, seconds = items.take(order), seconds[order]
        items["time_diff_s"] = seconds - window.begin_s
        if piece.part is not None:
            self._open = self._begin(piece.low, piece.high, len(items), items)
            self._write(items)
            self._close(piece.high)
            return
        if self._open is None:
            share = window.entries * (self._high - self._low) // window.slots.base
            self._open = self._begin(self._low, self._high, min(self.most, share + len(items)), items)
        self._write(items)

    def finish(self) -> None:
        """End the shard that is being written."""
        self._close(self._high)

    def abandon(self) -> None:
        """Take back every upload."""
        for upload in self._uploads:
            upload.abandon()

    def _begin(self, low: int, high: int, capacity: int, sample: npt.NDArray[Any]) -> _OpenShard:
        window, layout = self.window, self.descriptor.layout
        begin_ms = window.begin_s * 1000
        file_id = new_file_id(begin_ms)
        upload = Upload(self.storage, data_name(file_id, secrets.token_hex(8)), self._part_bytes)
        self._uploads.append(upload)
        end_ms = (window.begin_s + window.window_s) * 1000 - 1
        slot_range, line = window.slots.slots_of_base(low, high), TimeLine.through(sample) if self.packed else None
        writer = ShardWriter(layout, window.slots, slot_range, begin_ms, end_ms, capacity, line)
        upload.write(writer.begin())
        return _OpenShard(writer, upload, file_id)

    def _write(self, items: npt.NDArray[Any]) -> None:
        assert self._open is not None
        self._open.used_topics.update(np.unique(items["topic_id"]).tolist())
        self._open.upload.write(self._open.writer.add(items))

    def _close(self, high: int) -> None:
        """End the open shard, whose slots end at base slot `high`."""
        shard, self._open = self._open, None
        low, self._low = self._low, high
        if shard is None:
            return
        window = self.window
        writer, upload = shard.writer, shard.upload
        writer.slot_range = window.slots.slots_of_base(low, high)
        topics = {topic_id: name for topic_id, name in self.topics.items() if topic_id in shard.used_topics}
        more = {"table": window.table, "window_s": window.window_s, "sequence": self.sequence}
        trailer = writer.finish(
            shard.file_id, f"tiered_index {__version__}", self.descriptor.offset_space, topics, more
        )
        parsed = parse_trailer(trailer, upload.name, upload.size_bytes + len(trailer))
        upload.write(trailer)
        upload.finish()
        shard_of = TableShard(window.table, window.begin_s, window.window_s, window.slots, *writer.slot_range)
        stored = replace(stored_file(upload.name, parsed, upload.size_bytes, self.now_ms), shard=shard_of)
        self.finished.append(FinishedShard(stored, upload.handle, tuple(upload.parts), writer.checksum))


PIECE_ITEMS = 1 << 20
"""Entries of all inputs held at a time."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What a task read, by input, left out since it has expired, and wrote; checksums are sums of `entry_checksum`."""

    number: int
    read_counts: dict[str, int]
    read_checksum: int
    shards: tuple[FinishedShard, ...]
    expired: int = 0
    expired_checksum: int = 0


def run_task(
    task: MergeTask, storage: Storage, now_ms: int, progress: Callable[[int], None] = lambda entries: None
) -> TaskResult:
    """Read, sort and write one task; `progress` gets entries done. What was sent before an error is taken back."""
    if not task.inputs:
        return TaskResult(task.number, {}, 0, ())
    schema = task.descriptor.layout.schema
    cold = ColdPath(
        storage, keyed=schema.keyed, settings=ColdSettings(query_threads=8, block_cache_bytes=0, coalesce_gap_bytes=0)
    )
    with contextlib.closing(cold):
        step = max(window.slots.join for window in task.windows)
        reader = InputReader(
            cold, task.inputs, schema, task.descriptor.layout.slots, task.base_low, task.base_high, step, task.seconds
        )
        most = sum(stored.count for stored in task.inputs)
        slots, more = (task.base_low, task.base_high), (most, storage, now_ms, len(task.windows), task.packed)
        tables = [TableRun(task.descriptor, w, slots, reader.topics, task.sequence, *more) for w in task.windows]
        checksum = expired = expired_checksum = 0
        with contextlib.ExitStack() as undo:
            for table in tables:
                undo.callback(table.abandon)
            for piece in reader.pieces(PIECE_ITEMS):
                of_piece = entry_checksum(piece.items, piece.seconds)
                checksum += of_piece
                kept = piece.without(task.expired, reader.topics)
                if kept is not piece:
                    expired += len(piece.items) - len(kept.items)
                    expired_checksum += of_piece - entry_checksum(kept.items, kept.seconds)
                for table in tables:
                    table.add(kept)
                progress(len(piece.items))
            for table in tables:
                table.finish()
            undo.pop_all()
        shards = tuple(shard for table in tables for shard in table.finished)
        sums = checksum % 2**64, shards, expired, expired_checksum % 2**64
        return TaskResult(task.number, reader.read_counts, *sums)
