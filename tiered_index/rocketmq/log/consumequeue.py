"""Consume queues: for each queue of a topic, where its messages lie in the commit log. Read only; stateless.

An entry is 20 bytes, big-endian: i64 commit log offset, i32 size of the message, i64 tags code. Files hold 300,000
entries unless the broker is set otherwise, are named by the offset of their first byte within the queue, and end in
zeros where nothing is written yet (RocketMQ's `ConsumeQueue`).
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass
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


def offsets_named(folder: Path, begin: int, end: int) -> npt.NDArray[np.int64]:
    """Return the commit log offsets (i64, n) in [begin, end) that the queues in a folder name, ascending, each once.

    A queue that can't be read names none.
    """
    found = [np.zeros(0, np.int64)]
    for queue in list_queues(folder):
        with suppress(CorruptFile, StorageError):
            first = queue.seek(begin)
            _, entries = queue.read(first, max(queue.seek(end) - first, 1))
            offsets = entries["offset"].astype(np.int64)
            found.append(offsets[(offsets >= begin) & (offsets < end)])
    return np.unique(np.concatenate(found))
