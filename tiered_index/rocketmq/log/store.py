"""A store directory as RocketMQ lays it out: its parts, its name, how far its commit log is written. Read only.

Stateless: every call reads anew, and any thread may call. The checkpoint has 4,096 bytes: five i64, big-endian, then
zeros. They say up to which store timestamps commit log, consume queues and classic index were flushed
(`StoreCheckpoint`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.rocketmq.log.commitlog import CommitLogReader
from tiered_index.rocketmq.log.consumequeue import offsets_named
from tiered_index.rocketmq.log.layout import BLANK, BLANK_BYTES
from tiered_index.rocketmq.log.message import decode_message
from tiered_index.rocketmq.log.segments import Segment, candidates, pread
from tiered_index.storage.disk import absolute_path

CHECKPOINT_BYTES = 4_096
_FIELDS = struct.Struct(">5q")
_SAFETY_MS = 3_000


class Checkpoint(NamedTuple):
    """A checkpoint's fields in their order. Times are epoch milliseconds of store time, inclusive; 0: never flushed."""

    commit_log_ms: int = 0
    consume_queue_ms: int = 0
    # The end timestamp of the last classic index file that was full when it was flushed.
    index_ms: int = 0
    master_flushed_offset: int = 0
    confirmed_offset: int = 0

    def encode(self) -> bytes:
        """Return the file's bytes."""
        return _FIELDS.pack(*self).ljust(CHECKPOINT_BYTES, b"\0")

    @property
    def safe_ms(self) -> int:
        """Up to when commit log and consume queues are certainly flushed: the smaller less 3 s, at least 0."""
        return max(0, min(self.commit_log_ms, self.consume_queue_ms) - _SAFETY_MS)

    @property
    def safe_index_ms(self) -> int:
        """`safe_ms`, and not behind what the classic index has: from where a broker dispatches again after a crash."""
        return min(self.safe_ms, self.index_ms)


def decode_checkpoint(data: bytes, file: str = "checkpoint") -> Checkpoint:
    """Return what a checkpoint says; raises `CorruptFile` where it is cut short or holds a negative time."""
    if len(data) < _FIELDS.size:
        size, problem = len(data), "the checkpoint is cut short"
        raise CorruptFile(file, problem, offset=size, expected=CHECKPOINT_BYTES, found=size)
    checkpoint = Checkpoint(*_FIELDS.unpack_from(data))
    for place, value in enumerate(checkpoint[:3]):
        if value < 0:
            raise CorruptFile(file, "a negative time in the checkpoint", offset=8 * place, found=value)
    return checkpoint


# Source names of followed stores begin with it.
SOURCE_PREFIX = "rocketmq:"
_PARTS = ("commitlog", "consumequeue", "checkpoint", "abort", "config", "index", "lock")
_OF_A_BROKER = ("consumequeue", "checkpoint", "config")
_PAGE = 4_096
_BLANK = BLANK.to_bytes(4, "big")
# How far before the end of what is written the last message is looked for, in bytes.
_WINDOWS = (1 << 16, 1 << 20, 1 << 24)


class LogEnd(NamedTuple):
    """Where the log ends for now, and the store timestamp of its last message (None where that isn't known)."""

    offset: int
    store_ms: int | None


@dataclass(frozen=True, slots=True)
class StoreDirectory:
    """One store; `name` stands for it in the index."""

    folder: Path
    name: str

    @classmethod
    def open(cls, folder: Path, name: str | None = None) -> StoreDirectory:
        """Return the store in a folder, named by default by its resolved path. Raises `InvalidArgument` for none."""
        folder = absolute_path(folder).resolve()
        if name is not None and not name.strip():
            raise InvalidArgument("a store's name is not empty")
        if not folder.is_dir():
            raise InvalidArgument(f"{folder} is not a folder")
        if not any((folder / part).exists() for part in _PARTS):
            raise InvalidArgument(f"{folder} is no RocketMQ store: it has no commitlog/")
        return cls(folder, name or str(folder))

    @property
    def source(self) -> str:
        """The name under which the index keeps the store's position."""
        return SOURCE_PREFIX + self.name

    @property
    def commitlog(self) -> Path:
        """Folder of the segments."""
        return self.folder / "commitlog"

    @property
    def is_closed(self) -> bool:
        """Whether its broker has ended well: what it wrote is complete, and nobody writes.

        Brokers make `abort` when they start, before they take messages, and delete it last. A part of a store that was
        copied from a live one has none either, but no checkpoint.
        """
        try:
            return not (self.folder / "abort").exists() and (self.folder / "checkpoint").exists()
        except OSError:  # it may not be looked at
            return False

    @property
    def has_lost_log(self) -> bool:
        """Whether the folder of segments is missing though a broker was here: brokers never delete it."""
        try:
            return not self.commitlog.exists() and any((self.folder / part).exists() for part in _OF_A_BROKER)
        except OSError:  # it may not be looked at
            return False

    def checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint, None where there is none. Raises `CorruptFile`, `StorageMisconfigured`."""
        path = self.folder / "checkpoint"
        try:
            return decode_checkpoint(pread(path, CHECKPOINT_BYTES, 0), str(path))
        except FileNotFoundError:
            return None

    def checkpoint_offset(self) -> int | None:
        """Return where a broker dispatches again after a crash, None for the log's begin.

        That is the newest segment whose first message was stored no later than the checkpoint says that commit log,
        consume queues and classic index are flushed (RocketMQ's `CommitLog.isMappedFileMatchedRecover`).
        """
        checkpoint = self.checkpoint()
        reader = CommitLogReader(self.commitlog)
        for segment in reversed(reader.segments()) if checkpoint is not None else ():
            try:
                first = reader.read(segment.start)
            except CorruptFile:  # empty, only a blank, or deleted meanwhile: RocketMQ, too, looks at the one before
                continue
            assert checkpoint is not None
            if first.store_ms <= checkpoint.safe_index_ms:
                return segment.start
        return None

    def messages_named(self, begin: int, end: int) -> int | None:
        """Return how many messages in [begin, end) the consume queues name; None where they name none any more."""
        return len(offsets_named(self.folder / "consumequeue", begin, end)) or None

    def log_end(self) -> LogEnd | None:
        """Return where the log ends, None for an empty one, without reading it.

        It takes some 20 reads of a page and one of its last messages. An estimate: a body of zeros longer than a page
        can hide what lies behind it, and what a writer is just writing may be missed.
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
        for place in reversed(list(candidates(data, 0, offset, segment_bytes=segment.end - offset))):
            if data[place + 4 : place + 8] == _BLANK:
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
