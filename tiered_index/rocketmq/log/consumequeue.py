"""Consume queues: for each queue of a topic, where its messages lie in the commit log.

Read beside the broker, never written here.

An entry is 20 bytes, big-endian: i64 commit log offset, i32 size of the message, i64 tags code. Files hold 300,000
entries unless the broker is set otherwise, are named by the offset of their first byte within the queue, and end in
zeros where nothing is written yet (RocketMQ's `ConsumeQueue`). Stateless but for `QueuePositions`, which one thread
uses at a time.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tiered_index.errors import CorruptFile, InvalidArgument, StorageError
from tiered_index.rocketmq.log.segments import list_segments, local_errors, pread

# One entry; packed, big-endian.
ENTRY = np.dtype([("offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
ENTRY_BYTES = ENTRY.itemsize
ENTRIES_PER_FILE = 300_000
_READ_ENTRIES = 1 << 18
_READ_AHEAD = 1 << 13
_BYTES_BETWEEN_LISTINGS = 1 << 28

Entries = npt.NDArray[np.void]


# One entry's bytes, of commit log offset, size and tags code.
pack_entry = struct.Struct(">qiq").pack


def decode_entries(data: bytes) -> Entries:
    """Return the entries (n, dtype `ENTRY`) before the first that is not written yet, half an entry left out."""
    entries = np.frombuffer(data, ENTRY, len(data) // ENTRY_BYTES)
    written = entries["size"] > 0
    return entries if written.all() else entries[: int(written.argmin())]


@dataclass(frozen=True, slots=True)
class ConsumeQueue:
    """The queue whose files are in `folder`, `consumequeue/TOPIC/QUEUE_ID/`."""

    topic: str
    queue_id: int
    folder: Path

    def read(self, begin: int | None = None, max_entries: int = _READ_ENTRIES) -> tuple[int, Entries]:
        """Return the queue offset of the first entry, and the entries from queue offset `begin` on (None: the oldest).

        At most `max_entries`; none where nothing is written from there on. Where `begin` is deleted, they begin with
        the oldest there is, which the returned offset says. Raises `CorruptFile` where an entry is no entry,
        `StorageMisconfigured` where files may not be read.
        """
        if (begin is not None and begin < 0) or max_entries < 1:
            raise InvalidArgument(
                f"a queue is read from an offset >= 0 and for at least one entry, not {begin} and {max_entries}"
            )
        files = list_segments(self.folder)
        if not files:
            return begin or 0, np.zeros(0, ENTRY)
        first = -(-files[0].start // ENTRY_BYTES)
        start = first if begin is None else max(begin, first)
        parts: list[Entries] = []
        wanted = start
        for file in files:
            low = wanted * ENTRY_BYTES - file.start
            left = max_entries - (wanted - start)
            if left <= 0 or low < 0:
                break
            if low >= file.file_size:
                continue
            try:
                data = pread(file.path, min(left * ENTRY_BYTES, file.file_size - low), low)
            except FileNotFoundError:
                break  # deleted since: the next call begins with what is left
            entries = decode_entries(data)
            if (bad := entries["offset"] < 0).any():
                at = int(bad.argmax())
                problem, found = "a consume queue entry with a negative offset", int(entries["offset"][at])
                raise CorruptFile(str(file.path), problem, offset=low + at * ENTRY_BYTES, found=found)
            parts.append(entries)
            wanted += len(entries)
            if wanted * ENTRY_BYTES < file.start + file.file_size:
                break
        return start, np.concatenate(parts) if parts else np.zeros(0, ENTRY)

    def seek(self, offset: int) -> int:
        """Return the queue offset of the first entry that names a commit log offset >= `offset`.

        Where there is none, the offset at which the next entry will be written. Offsets ascend within a queue, so this
        takes about 30 small reads. Raises as `read`.
        """
        files = list_segments(self.folder)
        if not files:
            return 0
        low, high = -(-files[0].start // ENTRY_BYTES), (files[-1].start + files[-1].file_size) // ENTRY_BYTES
        starts = [file.start for file in files]
        while low < high:
            middle = (low + high) // 2
            file = files[bisect_right(starts, middle * ENTRY_BYTES) - 1]
            try:
                entries = decode_entries(pread(file.path, ENTRY_BYTES, middle * ENTRY_BYTES - file.start))
            except FileNotFoundError:  # deleted meanwhile, so older than all that is left
                low = middle + 1
                continue
            if len(entries) and int(entries["offset"][0]) < offset:
                low = middle + 1
            else:
                high = middle
        return low


def list_queues(folder: Path) -> list[ConsumeQueue]:
    """Return the queues in a `consumequeue/` folder, by topic and queue id; names that are no queue's are left out."""
    queues = []
    with local_errors(folder):
        try:
            for topic in sorted(os.scandir(folder), key=lambda entry: entry.name):
                if topic.is_dir():
                    ids = [int(name) for name in os.listdir(topic.path) if name.isascii() and name.isdecimal()]
                    queues += [
                        ConsumeQueue(topic.name, queue_id, Path(topic.path) / str(queue_id)) for queue_id in sorted(ids)
                    ]
        except FileNotFoundError:  # no queues yet, or a topic that goes just now
            pass
    return queues


@dataclass(slots=True)
class QueuePositions:
    """Where messages begin, out of all queues of a store: what `CommitLogReader` needs to save its walk.

    Keeps a cursor for each queue, so that a pass from front to back reads each entry once. Queues that name nothing
    more, and new ones, are looked at again only when the log has gone on by `_BYTES_BETWEEN_LISTINGS`: at the end of a
    live log the walk is cheaper than a look at every queue. What isn't named, or not readably, is walked to. Memory: 8
    bytes for each entry read ahead.
    """

    folder: Path
    _cursors: dict[ConsumeQueue, _Cursor] = field(default_factory=dict, init=False)
    _last_begin: int = field(default=0, init=False)
    # Where the pass was when the queues were listed.
    _listed: int | None = field(default=None, init=False)

    def between(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Return the commit log offsets (i64, n) within [begin, end) that queues name, ascending, each once."""
        if begin < self._last_begin:
            self._cursors.clear()
            self._listed = None
        self._last_begin = begin
        if self._listed is None or begin - self._listed >= _BYTES_BETWEEN_LISTINGS:
            self._cursors = {queue: self._cursors.get(queue) or _Cursor(queue) for queue in list_queues(self.folder)}
            for cursor in self._cursors.values():
                cursor.is_at_end = False
            self._listed = begin
        found = [part for cursor in self._cursors.values() if len(part := cursor.between(begin, end))]
        if not found:
            return np.zeros(0, np.int64)
        # sorted runs, which a stable sort merges: far faster here than what np.unique does
        known = np.sort(np.concatenate(found), kind="stable")
        distinct: npt.NDArray[np.int64] = known[np.append(True, known[1:] != known[:-1])]
        return distinct


@dataclass(slots=True)
class _Cursor:
    """How far one queue was read. `ahead`: the commit log offsets of entries that were read and not passed yet."""

    queue: ConsumeQueue
    # The queue offset at which it is read on; None: not looked up yet.
    next: int | None = None
    ahead: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    # Whether it had nothing more, or nothing readable.
    is_at_end: bool = False

    def between(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Return the offsets (i64, n) within [begin, end) that the queue names; later calls have no smaller `begin`."""
        while not self.is_at_end and (not len(self.ahead) or self.ahead[-1] < end):
            try:
                if self.next is None:
                    self.next = self.queue.seek(begin)
                start, entries = self.queue.read(self.next, _READ_AHEAD)
            except (CorruptFile, StorageError):
                entries = np.zeros(0, ENTRY)
            if not len(entries):
                self.is_at_end = True
                break
            self.next = start + len(entries)
            self.ahead = np.concatenate(
                [self.ahead[np.searchsorted(self.ahead, begin) :], entries["offset"].astype(np.int64)]
            )
        if not len(self.ahead) or self.ahead[0] >= end:
            return self.ahead[:0]
        self.ahead = self.ahead[np.searchsorted(self.ahead, begin) :]
        part = self.ahead[: np.searchsorted(self.ahead, end)]
        # offsets of a queue that is damaged may be in any order
        return part[(part >= begin) & (part < end)]
