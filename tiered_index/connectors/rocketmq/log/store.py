"""Reads a store directory of RocketMQ: its name, the end of its commit log, and its consume queues.

A consume queue has the places of a queue's messages in the commit log. Stateless: every call reads the files again, and
any thread may call. An entry of a consume queue has 20 bytes, big-endian: i64 commit log offset, i32 size of the
message, i64 tags code. Files have 300,000 entries by default. Their name is the offset of their first byte within the
queue. Zeros follow the last written entry (`ConsumeQueue`).

The queues of a topic with the attribute ``queue.type=BatchCQ`` are in ``batchconsumequeue/``. An entry has 46 bytes
(`BatchConsumeQueue`): those 20, then i64 store timestamp, i64 queue offset of the batch's first message, i16 number of
its messages. Its last 8 bytes are not read. A batch is one message of the commit log, at its first queue offset.

With ``storeType=defaultRocksDB`` the folder ``consumequeue/`` is a database of RocksDB, which is not read. Files of
queues beside it may be of the time before the broker used RocksDB.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt

from tiered_index.config import IndexConfig
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader
from tiered_index.connectors.rocketmq.log.layout import BLANK_BYTES, BLANK_MAGIC
from tiered_index.connectors.rocketmq.log.message import decode_message
from tiered_index.connectors.rocketmq.log.segments import (
    LogFolder,
    Segment,
    candidates,
    list_segments,
    local_errors,
    pread,
    segment_at,
)
from tiered_index.errors import ConfigError, CorruptFile, InvalidArgument, StorageError
from tiered_index.format.keys.distinct import distinct_numbers
from tiered_index.storage.disk import absolute_path

# One entry; packed, big-endian.
ENTRY = np.dtype([("offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
ENTRY_BYTES = ENTRY.itemsize
# One entry of a queue of batches: `first` is the queue offset of the batch's first message, of `count`
BATCH_ENTRY = np.dtype([*ENTRY.descr, ("store_ms", ">i8"), ("first", ">i8"), ("count", ">i2"), ("unread", "V8")])
_READ_ENTRIES = 1 << 18
# Longest name of a folder
_NAME_BYTES = 255
_ZEROS = bytes(1 << 18)

Entries = npt.NDArray[np.void]


def decode_entries(data: bytes, entry: np.dtype[np.void] = ENTRY) -> Entries:
    """Return the entries (n, dtype `entry`) before the first unwritten one; half an entry is left out."""
    entries = np.frombuffer(data, entry, len(data) // entry.itemsize)
    written = entries["size"] > 0
    return entries if written.all() else entries[: int(written.argmin())]


# A store's parts that may be links to other disks.
_LINKS = ("commitlog", "consumequeue", "index")


def check_apart(config: IndexConfig, *folders: Path) -> None:
    """Raise `ConfigError` if the root or a local storage is within a broker's folder, or the folder in the root."""
    theirs = {place.resolve() for folder in folders for place in (folder, *(folder / part for part in _LINKS))}
    if config.root is not None:
        root = config.root.resolve()
        for folder in theirs:
            if root.is_relative_to(folder) or folder.is_relative_to(root):
                raise ConfigError(
                    f"the root {root} contains the broker's folder {folder}, or is in it: choose a root beside it"
                )
    scheme, _, _ = (config.storage or "").partition("://")
    if scheme.lower() in ("file", "sqlite"):
        storage = Path(unquote(urlsplit(str(config.storage)).path)).resolve()
        for folder in theirs:
            if storage.is_relative_to(folder):
                raise ConfigError(f"the storage {storage} is inside the broker's folder {folder}: choose another place")


@dataclass(frozen=True, slots=True)
class ConsumeQueue:
    """The queue whose files are in `folder`, `consumequeue/TOPIC/QUEUE_ID/`. It has an entry at each queue offset."""

    topic: str
    queue_id: int
    folder: Path

    @property
    def entry(self) -> np.dtype[np.void]:
        """The layout of an entry."""
        return ENTRY

    def offsets(self, first: int, entries: Entries) -> npt.NDArray[np.int64]:
        """Return the queue offset (i64, n + 1) at which each of `entries` begins, and that behind the last one.

        `first` is that of the first one.
        """
        return np.arange(first, first + len(entries) + 1)

    def read(self, begin: int | None = None, max_entries: int = _READ_ENTRIES) -> tuple[int, Entries]:
        """Return up to `max_entries` entries from queue offset `begin` (None: the oldest), and the first one's offset.

        If `begin` is deleted, they begin with the oldest entry. There are none if nothing is written from there. Raises
        `CorruptFile` for an invalid entry, `StorageMisconfigured` if access to a file is denied.
        """
        if (begin is not None and begin < 0) or max_entries < 1:
            raise InvalidArgument(f"begin must be 0 or more and max_entries at least 1, not {begin} and {max_entries}")
        return self._numbered(begin, max_entries)

    def _numbered(self, begin: int | None, max_entries: int) -> tuple[int, Entries]:
        """Return entries from the one with a number on, and the first one's number."""
        files, entry_bytes = list_segments(self.folder), self.entry.itemsize
        if not files:
            return begin or 0, np.zeros(0, self.entry)
        first = -(-files[0].start // entry_bytes)
        start = wanted = first if begin is None else max(begin, first)
        parts: list[Entries] = []
        while (left := start + max_entries - wanted) and (file := segment_at(files, wanted * entry_bytes)):
            low = wanted * entry_bytes - file.start
            try:
                data = file.read(left * entry_bytes, low)
            except FileNotFoundError:
                break  # deleted meanwhile: the next call begins with the oldest entry left
            entries = decode_entries(data, self.entry)
            if (bad := entries["offset"] < 0).any():
                at = low + int(bad.argmax()) * entry_bytes
                raise CorruptFile(str(file.path), "a consume queue entry with a negative offset", offset=at)
            parts.append(entries)
            wanted += len(entries)
            if not len(entries) or wanted * entry_bytes < file.start + file.file_size:
                break
        return start, np.concatenate(parts) if parts else np.zeros(0, self.entry)

    def seek(self, offset: int) -> int:
        """Return the queue offset of the first entry with a commit log offset >= `offset`.

        If there is none, return the offset of the next entry to be written. It takes about 30 small reads, a binary
        search. Raises as `read`.
        """
        return self._seek("offset", offset)

    def _seek(self, field: str, least: int) -> int:
        """Return the number of the first entry whose `field` is at least `least`, or of the next one to be written."""
        files, entry_bytes = list_segments(self.folder), self.entry.itemsize
        if not files:
            return 0
        low, high = -(-files[0].start // entry_bytes), (files[-1].start + files[-1].file_size) // entry_bytes
        starts = [file.start for file in files]
        while low < high:
            middle = (low + high) // 2
            file = files[bisect_right(starts, middle * entry_bytes) - 1]
            try:
                entries = decode_entries(pread(file.path, entry_bytes, middle * entry_bytes - file.start), self.entry)
            except FileNotFoundError:  # deleted meanwhile, so older than all that is left
                low = middle + 1
                continue
            if len(entries) and int(entries[field][0]) < least:
                low = middle + 1
            else:
                high = middle
        return low

    def end(self) -> int:
        """Return the offset of the next entry to be written.

        Raises as `read`, and `CorruptFile` if a file is missing between others or entries follow that offset.
        """
        return self._end()

    def _end(self) -> int:
        """Return the number of the next entry to be written. Raises as `end`."""
        # check twice: a broker may write and delete meanwhile
        for is_last_look in (False, True):
            files, end = list_segments(self.folder), self._seek("offset", 2**63 - 1)
            if any(file.start + file.file_size != following.start for file, following in pairwise(files)):
                problem = "a file of the queue between others is missing"
            elif self._has_hole(files, end):
                problem = f"no entry at queue offset {end}, and entries after it"
            else:
                break
            if is_last_look:
                raise CorruptFile(str(self.folder), problem)
        return end

    def _has_hole(self, files: tuple[Segment, ...], end: int) -> bool:
        """Return whether entries follow a number without entry."""
        entry_bytes = self.entry.itemsize
        behind = [file for file in files if end * entry_bytes < file.start + file.file_size]
        with suppress(FileNotFoundError):  # deleted since, so older than the end
            for file in behind[:1]:
                begin = max(end * entry_bytes - file.start, 0)
                if len(decode_entries(pread(file.path, entry_bytes, begin), self.entry)):
                    return False  # written since
                for low in range(begin, file.file_size, len(_ZEROS)):
                    data = pread(file.path, len(_ZEROS), low)
                    if data != _ZEROS[: len(data)]:
                        return True
            return any(len(decode_entries(pread(file.path, entry_bytes, 0), self.entry)) for file in behind[1:])
        return False


@dataclass(frozen=True, slots=True)
class BatchConsumeQueue(ConsumeQueue):
    """A queue with one entry for each batch (`batchconsumequeue/TOPIC/QUEUE_ID/`).

    Each message of a batch has its own queue offset. The place of all of them is the batch.
    """

    @property
    def entry(self) -> np.dtype[np.void]:
        """The layout of an entry."""
        return BATCH_ENTRY

    def offsets(self, first: int, entries: Entries) -> npt.NDArray[np.int64]:
        """Return the queue offset (i64, n + 1) at which each batch begins, and that behind the last one."""
        behind = entries["first"][-1:].astype(np.int64) + entries["count"][-1:]
        return np.append(entries["first"].astype(np.int64), behind if len(entries) else [first])

    def read(self, begin: int | None = None, max_entries: int = _READ_ENTRIES) -> tuple[int, Entries]:
        """Return entries as `ConsumeQueue.read`; the first one is of the batch that has `begin`."""
        number = None
        if begin is not None:
            # the first batch that begins behind `begin`: the one before it has `begin`, unless its end is before
            number = self._seek("first", begin + 1)
            start, before = self._numbered(max(number - 1, 0), 1)
            if start == number - 1 and len(before) and int(self.offsets(0, before)[-1]) > begin:
                number = start
        _, entries = ConsumeQueue._numbered(self, number, max_entries)
        return (int(entries["first"][0]) if len(entries) else begin or 0), entries

    def seek(self, offset: int) -> int:
        """Return the first queue offset of the first batch with a commit log offset >= `offset`, or the end."""
        number = self._seek("offset", offset)
        _, entries = self._numbered(number, 1)
        return int(entries["first"][0]) if len(entries) else self._behind(number)

    def end(self) -> int:
        """Return the offset behind the last batch. Raises as `ConsumeQueue.end`."""
        return self._behind(self._end())

    def _behind(self, number: int) -> int:
        """Return the queue offset behind the last batch before the entry with a number."""
        start, last = self._numbered(max(number - 1, 0), 1)
        return int(self.offsets(0, last)[-1]) if start == number - 1 and len(last) else 0


CONSUME_QUEUES, BATCH_QUEUES = "consumequeue", "batchconsumequeue"


def queues_in(store: Path, topic: str) -> list[ConsumeQueue]:
    """Return the queues of a topic that have a folder in a store, by queue id."""
    queues = {queue.queue_id: queue for queue in queues_of(store / CONSUME_QUEUES, topic)}
    for queue in queues_of(store / BATCH_QUEUES, topic):
        queues[queue.queue_id] = BatchConsumeQueue(queue.topic, queue.queue_id, queue.folder)
    return [queues[queue_id] for queue_id in sorted(queues)]


def unreadable_queues(store: Path) -> str | None:
    """Return why the consume queues of a store can't be read; None: its files have all queues."""
    with local_errors(store):
        if (store / CONSUME_QUEUES / "CURRENT").exists():
            return "its consume queues are in RocksDB"
        if not any((store / part).exists() for part in (CONSUME_QUEUES, BATCH_QUEUES)):
            return "it has no consumequeue/"
    return None


def counted_queues(store: Path) -> dict[str, int]:
    """Return the number of queues of each topic, by the broker's configuration and by the queues that have a folder.

    The broker's file may lag behind or be unreadable, so numbers may be too small.
    """
    counts: dict[str, int] = {}
    with suppress(OSError, ValueError, TypeError, AttributeError):
        table = json.loads((store / "config" / "topics.json").read_bytes())["topicConfigTable"]
        counts = {str(topic): int(of_topic["readQueueNums"]) for topic, of_topic in table.items()}
    for part in (CONSUME_QUEUES, BATCH_QUEUES):
        for queue in list_queues(store / part):
            counts[queue.topic] = max(counts.get(queue.topic, 0), queue.queue_id + 1)
    return counts


def list_queues(folder: Path) -> list[ConsumeQueue]:
    """Return the queues in a `consumequeue/` folder, by topic and queue id; names that are no queue's are left out."""
    with local_errors(folder):
        try:
            topics = sorted(topic.name for topic in os.scandir(folder) if topic.is_dir())
        except FileNotFoundError:  # no queues yet
            return []
    return [queue for topic in topics for queue in queues_of(folder, topic)]


def queues_of(folder: Path, topic: str) -> list[ConsumeQueue]:
    """Return the queues of one topic in a `consumequeue/` folder, by queue id; none for a name that is no folder's."""
    if topic in ("", ".", "..") or "/" in topic or "\0" in topic or len(os.fsencode(topic)) > _NAME_BYTES:
        return []
    place = folder / topic
    with local_errors(place):
        try:
            ids = sorted(int(name) for name in os.listdir(place) if name.isascii() and name.isdecimal())
        except FileNotFoundError:
            return []
    return [ConsumeQueue(topic, queue_id, place / str(queue_id)) for queue_id in ids]


def offsets_named(folder: Path, begin: int, end: int) -> npt.NDArray[np.int64]:
    """Return the distinct commit log offsets (i64, n) in [begin, end) of the queues in a folder, ascending.

    A queue that can't be read is skipped.
    """
    parts = [np.zeros(0, np.int64)]
    for queue in list_queues(folder):
        with suppress(CorruptFile, StorageError):
            first = queue.seek(begin)
            _, entries = queue.read(first, max(queue.seek(end) - first, 1))
            offsets = entries["offset"].astype(np.int64)
            parts.append(offsets[(offsets >= begin) & (offsets < end)])
    return distinct_numbers(np.concatenate(parts))


# Prefix of the source names of followed stores
SOURCE_PREFIX = "rocketmq:"
_PARTS = ("commitlog", "consumequeue", "checkpoint", "abort", "config", "index", "lock")
_OF_A_BROKER = ("consumequeue", "checkpoint", "config")
_PAGE = 4_096
# Bytes before the end of the written part in which the last message is searched, in turn
_WINDOWS = (1 << 16, 1 << 20, 1 << 24)


class LogEnd(NamedTuple):
    """The present end of the log, and the store timestamp of its last message (None: unknown)."""

    offset: int
    store_ms: int | None


@dataclass(frozen=True, slots=True)
class StoreDirectory:
    """One store; `name` is its source's name in the index."""

    folder: Path
    name: str
    # Further folders of its segments, on other disks
    more_logs: tuple[Path, ...] = ()

    @classmethod
    def open(cls, folder: Path, name: str | None = None, more_logs: Iterable[Path] = ()) -> StoreDirectory:
        """Return the store in a folder; its default name is the resolved path. Raises `InvalidArgument` for another.

        `more_logs` are further folders of its segments.
        """
        more_logs = tuple([absolute_path(log).resolve() for log in more_logs])
        for log in more_logs:
            if not log.is_dir():
                raise InvalidArgument(f"--commitlog {log} is not a folder")
        folder = absolute_path(folder).resolve()
        if name is not None and not name.strip():
            raise InvalidArgument("a store's name must not be empty")
        if not folder.is_dir():
            raise InvalidArgument(f"{folder} is not a folder")
        if not any((folder / part).exists() for part in _PARTS):
            raise InvalidArgument(f"{folder} is not a RocketMQ store: it has no commitlog/")
        return cls(folder, name or str(folder), tuple([log for log in more_logs if log != folder / "commitlog"]))

    @property
    def source(self) -> str:
        """The name under which the index keeps the store's position."""
        return SOURCE_PREFIX + self.name

    @property
    def commitlog(self) -> Path:
        """Folder of the segments, or all their folders."""
        folder = LogFolder(self.folder / "commitlog")
        folder.others = self.more_logs
        return folder

    @property
    def is_closed(self) -> bool:
        """Whether the broker ended normally: the log is complete, and has no writer.

        Brokers make `abort` when they start and delete it last. A partial copy of a live store may lack it, too, but it
        has no checkpoint.
        """
        try:
            return not (self.folder / "abort").exists() and (self.folder / "checkpoint").exists()
        except OSError:  # it may not be looked at
            return False

    @property
    def has_lost_log(self) -> bool:
        """Whether the folder of segments is missing although other files of a broker exist: brokers never delete it."""
        try:
            if any(log.exists() for log in (self.commitlog, *self.more_logs)):
                return False
            return any((self.folder / part).exists() for part in _OF_A_BROKER)
        except OSError:  # it may not be looked at
            return False

    def messages_named(self, begin: int, end: int) -> int | None:
        """Return the number of messages in [begin, end) by the consume queues; None if they have none of them."""
        return len(offsets_named(self.folder / "consumequeue", begin, end)) or None

    def log_end(self) -> LogEnd | None:
        """Return an estimate of the log's end, None for an empty log, without reading the log.

        It takes about 20 reads of a page and one of the last messages. A body of zeros longer than a page can hide
        later messages, and a message that is just being written may be missed.
        """
        segments = CommitLogReader(self.commitlog).segments()
        for segment in reversed(segments):
            try:
                if any(pread(segment.path, BLANK_BYTES, 0)):
                    return _end_within(segment)
            except FileNotFoundError:
                continue
        return LogEnd(segments[0].start, None) if segments else None


def _end_within(segment: Segment) -> LogEnd:
    low, high = 0, -(-segment.file_size // _PAGE)
    while high - low > 1:  # page `low` is written, page `high` isn't
        middle = (low + high) // 2
        low, high = (middle, high) if any(pread(segment.path, _PAGE, middle * _PAGE)) else (low, middle)
    written = min(high * _PAGE, segment.file_size)
    for window in _WINDOWS:
        begin = max(0, written - window)
        data = pread(segment.path, written - begin, begin)
        offset = segment.start + begin
        end: int | None = None
        for place in reversed(list(candidates(data, offset, segment_bytes=segment.end - offset))):
            if data[place + 4 : place + 8] == BLANK_MAGIC:
                end = segment.end
                continue
            try:
                message = decode_message(
                    data, place, file=str(segment.path), physical_offset=offset + place, check_crc=False
                )
            except CorruptFile:  # torn, or being written
                continue
            if message.raw_properties.endswith(b"\0"):  # cut within its properties
                continue
            return LogEnd(offset + place + message.size if end is None else end, message.store_ms)
        if end is not None or begin == 0:
            return LogEnd(segment.start if end is None else end, None)
    return LogEnd(segment.start + written, None)
