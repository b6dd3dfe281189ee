"""Reads queues: their begins and ends, and messages from a queue offset. Has the reader of a store's consume queues.

Codes, statuses and bounds are those of RocketMQ's `DefaultMessageStore.getMessage` and `PullMessageProcessor`. A queue
begins at the first message that the log, or the archive, still has. One object serves one request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from tiered_index.base.call import check_deadline
from tiered_index.connectors.rocketmq.follow.tail import TruncatedTail
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader, MissingOffsets
from tiered_index.connectors.rocketmq.log.message import Message
from tiered_index.connectors.rocketmq.log.store import ConsumeQueue, queues_in
from tiered_index.connectors.rocketmq.remoting.frames import ResponseCode
from tiered_index.errors import CorruptFile, StorageUnavailable
from tiered_index.format.keys.hashing import java_string_hash

# A broker's bounds on one pull of messages in memory: messages, bytes, and entries that it reads
_MOST_MESSAGES, _MOST_BYTES, _MOST_ENTRIES = 32, 256 << 10, 800
_LEAST_BYTES = 100
# A smaller tags code is not a hash but an address in the queue's extension, which is not read
_LEAST_HASH = -(2**31)
EVERY_TAG = "*"
# Most damaged messages that are skipped in the search for a moment
_MOST_DAMAGED = 8
# The code of an entry without a tags code: the message itself is checked
NO_CODE = -(2**63)


class Ends(NamedTuple):
    """Queue offsets: of the first message that the log has, and of the next one that will be written."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """The answer to a pull: `status` names RocketMQ's `GetMessageStatus`, the next pull begins at `next`."""

    code: ResponseCode
    status: str
    next: int
    ends: Ends
    body: bytes = b""


class PlaceInQueue(NamedTuple):
    """The place of a message: its queue offset, that of a batch's first message, commit log offset, and size."""

    queue_offset: int
    offset: int
    size: int


class UnreadMessage(NamedTuple):
    """A message of a queue. `read()` returns it, or None if it was deleted, expired or erased; raises `CorruptFile`."""

    queue_offset: int
    size: int
    read: Callable[[], Message | None]
    # The queue offset behind it: a batch has several
    following: int


def hashes_of_tags(subscription: str) -> frozenset[int] | None:
    """Return the hashes of the tags of a subscription such as ``paid || sent``; None: every message.

    Empty if the subscription has no tag.
    """
    if subscription in ("", EVERY_TAG):
        return None
    return frozenset(java_string_hash(tag.strip()) for tag in subscription.split("||") if tag.strip())


class UnknownOffsets(CorruptFile):
    """The messages of a queue are unknown. `problem` has the reason, without names of objects."""


class PulledQueue(Protocol):
    """A queue of a topic."""

    @property
    def topic(self) -> str:
        """The queue's topic."""

    @property
    def queue_id(self) -> int:
        """The queue's number within the topic."""


Q = TypeVar("Q", bound=PulledQueue)


class Queues(ABC, Generic[Q]):
    """Reads the queues of one broker.

    Every method raises `CorruptFile` for damage, and `StorageError` and `BudgetExceeded` as reading does.
    """

    @abstractmethod
    def of_topic(self, topic: str, *, whole: bool = False) -> list[Q]:
        """Return the known queues of a topic, by number. With `whole` return all, or raise `UnknownOffsets`."""

    @abstractmethod
    def find(self, topic: str, queue_id: int) -> Q | None:
        """Return a queue; None if there is none."""

    @abstractmethod
    def ends(self, queue: Q) -> Ends:
        """Return the begin and end of a queue, without reading its messages."""

    @abstractmethod
    def last_store_ms(self, queue: Q, ends: Ends) -> int:
        """Return the store timestamp of a queue's last message, or 0 if it has none."""

    @abstractmethod
    def _entries(self, queue: Q, offset: int, most: int) -> tuple[int, npt.NDArray[np.void]]:
        """Return up to `most` entries (`log.store.ENTRY`) of a queue, and the offset of the first one.

        They begin at a queue offset or, if it has no entry, at the next one that has.
        """

    def _offsets(self, queue: Q, first: int, entries: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
        """Return the queue offset of each of `entries` (i64, n + 1), and that behind the last one."""
        return np.arange(first, first + len(entries) + 1)

    @abstractmethod
    def _reader(
        self, queue: Q, offsets: npt.NDArray[np.int64], entries: npt.NDArray[np.void], rows: Sequence[int]
    ) -> Callable[[int], Message | None]:
        """Return a function that returns the message of a row of `entries`, as `UnreadMessage.read`.

        `offsets` are their queue offsets. The function is called for `rows`, in this order.
        """

    @abstractmethod
    def seek_ms(self, queue: Q, ends: Ends, at_ms: int) -> int:
        """Return the queue offset of the first message stored at `at_ms` or later; the queue's end if there is none."""

    def _within(self, queue: Q, begin: int, end: int) -> tuple[int, int]:
        """Return the last part of [begin, end) without missing offsets."""
        return begin, end

    def place(self, queue: Q, offset: int) -> PlaceInQueue | None:
        """Return the place of the message at a queue offset before the queue's end; None: there is none."""
        first, entries = self._entries(queue, offset, 1)
        if first > offset or not len(entries):
            return None
        return PlaceInQueue(first, int(entries["offset"][0]), int(entries["size"][0]))

    def messages(
        self, queue: Q, begin: int, end: int, step: int, *, backwards: bool = False
    ) -> Iterator[UnreadMessage]:
        """Yield the messages at the queue offsets [begin, end), or backwards, reading `step` entries at once.

        Offsets without a message are skipped.
        """
        while begin < end:
            if backwards:
                low, end = self._within(queue, begin, end)
                low = max(low, end - step)
                first, entries = self._entries(queue, low, end - low)
            else:
                first, entries = self._entries(queue, begin, min(step, end - begin))
            offsets = self._offsets(queue, first, entries)
            count = int((offsets[:-1] < end).sum())
            if backwards:
                end = min(low, int(offsets[0])) if count else low
            elif count:
                begin = int(offsets[count])
            rows = range(count)[:: -1 if backwards else 1]
            read = self._reader(queue, offsets, entries[:count], rows)
            for row in rows:
                size, behind = int(entries["size"][row]), int(offsets[row + 1])
                yield UnreadMessage(int(offsets[row]), size, partial(read, row), behind)
            if not (count or backwards):
                return

    def pull(
        self, topic: str, queue_id: int, offset: int, most: int, most_bytes: int, tags: frozenset[int] | None
    ) -> Pulled:
        """Return messages of a queue from an offset: at least one, and no more than `most` and `most_bytes` allow.

        Only messages whose tags have one of the hashes `tags` (None: all) are returned; other tags may have the same
        hash. A pull ends before the first damaged message; a pull that begins there raises.
        """
        moved = ResponseCode.PULL_OFFSET_MOVED
        nothing = moved if offset else ResponseCode.PULL_NOT_FOUND
        if (queue := self.find(topic, queue_id)) is None:
            return Pulled(nothing, "NO_MATCHED_LOGIC_QUEUE", 0, Ends(0, 0))
        ends = self.ends(queue)
        if ends.end == 0:
            return Pulled(nothing, "NO_MESSAGE_IN_QUEUE", 0, ends)
        if offset < ends.begin:
            return Pulled(moved, "OFFSET_TOO_SMALL", ends.begin, ends)
        if offset > ends.end:
            return Pulled(moved, "OFFSET_OVERFLOW_BADLY", ends.end, ends)
        if offset == ends.end:
            return Pulled(ResponseCode.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE", offset, ends)
        first, entries = self._entries(queue, offset, min(_MOST_ENTRIES, ends.end - offset))
        if first > offset:  # deleted meanwhile, or never written
            return Pulled(moved, "OFFSET_TOO_SMALL", first, self.ends(queue))
        if not len(entries):
            raise CorruptFile(topic, f"no entry at queue offset {offset}, and the queue ends at {ends.end}")
        most = max(1, min(most, _MOST_MESSAGES))
        most_bytes = max(_LEAST_BYTES, min(most_bytes, _MOST_BYTES))
        frames: list[bytes] = []
        offsets = self._offsets(queue, first, entries)
        found_bytes, status, following = 0, "NO_MATCHED_MESSAGE", int(offsets[-1])
        codes = entries["tags_code"]
        rows = _matching(codes, tags).tolist()
        read = self._reader(queue, offsets, entries, rows)
        for row in rows:
            check_deadline(f"reading messages of {topic}")
            if frames and (len(frames) == most or found_bytes + int(entries["size"][row]) > most_bytes):
                following = int(offsets[row])
                break
            try:
                message = read(row)
            except CorruptFile:
                if not frames:
                    raise
                following = int(offsets[row])
                break
            if message is None:
                status = "MESSAGE_WAS_REMOVING"
            elif (
                tags is None
                or int(entries["tags_code"][row]) >= _LEAST_HASH
                or java_string_hash(message.tags or "") in tags
            ):
                frames.append(message.encode())
                found_bytes += message.size
        if not frames:
            return Pulled(ResponseCode.PULL_RETRY_IMMEDIATELY, status, following, ends)
        return Pulled(ResponseCode.SUCCESS, "FOUND", following, ends, b"".join(frames))


def checked_message(message: Message, queue: PulledQueue, offset: int, file: str) -> Message:
    """Return `message`. Raises `CorruptFile` unless it is the one at an offset of the queue."""
    if (message.topic, message.queue_id, message.queue_offset) != (queue.topic, queue.queue_id, offset):
        problem = f"queue offset {offset} names commit log offset {message.physical_offset}, where another message is"
        raise CorruptFile(file, problem)
    return message


class StoreQueues(Queues[ConsumeQueue]):
    """Reads the queues of the store in `folder`. `root` is the root of an index that follows the store, or None."""

    def __init__(self, folder: Path, root: Path | None) -> None:
        self._store = folder
        self._log = CommitLogReader(folder / "commitlog")
        self._truncated = TruncatedTail(self._log.folder, root)

    def of_topic(self, topic: str, *, whole: bool = False) -> list[ConsumeQueue]:
        """Return the queues of a topic that have a folder."""
        return queues_in(self._store, topic)

    def find(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """Return a queue, or None if it has no folder."""
        return next((queue for queue in self.of_topic(topic) if queue.queue_id == queue_id), None)

    def ends(self, queue: ConsumeQueue) -> Ends:
        """Return the begin and end of a queue by its entries, without reading its messages."""
        check_deadline(f"reading the queues of {queue.topic}")
        end, log_begin = queue.end(), self._log.begin_offset()
        if log_begin is None and end:
            # brokers always keep a segment
            raise StorageUnavailable(f"{self._log.folder} has no segment: it was moved or is not mounted")
        begin = min(queue.seek(log_begin or 0), end)
        if begin < end and (entries := queue.read(end - 1, 1)[1]).size:
            log_end = self._truncated.end_before(int(entries["offset"][0]))
            if log_end is not None:
                # the broker cut its log; old entries of the queue stay until they are overwritten
                end = max(begin, min(end, queue.seek(log_end)))
        return Ends(begin, end)

    def last_store_ms(self, queue: ConsumeQueue, ends: Ends) -> int:
        """Return the store timestamp of a queue's last message; 0 if it has none."""
        if ends.begin == ends.end:
            return 0
        return self._message(queue, *queue.read(ends.end - 1, 1)).store_ms

    def seek_ms(self, queue: ConsumeQueue, ends: Ends, at_ms: int) -> int:
        """Return the offset of the first message stored at a time or later. Takes some 20 reads of the log."""
        low, high = ends
        while low < high:
            middle = (low + high) // 2
            check_deadline(f"reading the queues of {queue.topic}")
            # use the time of the next message in place of a damaged one's
            for offset in range(middle, min(middle + _MOST_DAMAGED, high)):
                if (store_ms := self._store_ms(queue, offset)) is not None:
                    break
            if store_ms is None or store_ms >= at_ms:
                high = middle
            else:
                low = offset + 1
        return low

    def _store_ms(self, queue: ConsumeQueue, offset: int) -> int | None:
        """Return the store timestamp of a message; -1: deleted, None: damaged."""
        try:
            return self._message(queue, *queue.read(offset, 1)).store_ms
        except CorruptFile as error:
            # a deleted message is older than all others
            return -1 if self._is_deleted(error) else None

    def _entries(self, queue: ConsumeQueue, offset: int, most: int) -> tuple[int, npt.NDArray[np.void]]:
        return queue.read(offset, most)

    def _offsets(self, queue: ConsumeQueue, first: int, entries: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
        return queue.offsets(first, entries)

    def _reader(
        self, queue: ConsumeQueue, offsets: npt.NDArray[np.int64], entries: npt.NDArray[np.void], rows: Sequence[int]
    ) -> Callable[[int], Message | None]:
        def read(row: int) -> Message | None:
            try:
                return self._message(queue, int(offsets[row]), entries[row : row + 1])
            except CorruptFile as error:
                if self._is_deleted(error):
                    return None
                raise

        return read

    def _message(self, queue: ConsumeQueue, offset: int, entries: npt.NDArray[np.void]) -> Message:
        """Return the message of the first of `entries`, which is at a queue offset."""
        if not len(entries):
            raise CorruptFile(str(queue.folder), f"no entry at queue offset {offset}, which is before the queue's end")
        message = self._log.read(int(entries["offset"][0]), int(entries["size"][0]))
        return checked_message(message, queue, offset, str(queue.folder))

    def _is_deleted(self, error: CorruptFile) -> bool:
        """Return whether the broker has deleted the place since the queue's begin was read."""
        begin = self._log.begin_offset() if isinstance(error, MissingOffsets) else None
        return isinstance(error, MissingOffsets) and begin is not None and error.end <= begin


def _matching(codes: npt.NDArray[np.int64], tags: frozenset[int] | None) -> npt.NDArray[np.intp]:
    """Return the rows whose tags code is one of `tags`, or is not a hash."""
    if tags is None:
        return np.arange(len(codes))
    codes = codes.astype(np.int64)
    # the hash is 32 bits wide, as Java compares it
    return np.flatnonzero(np.isin(codes.astype(np.int32), list(tags)) | (codes < _LEAST_HASH))
