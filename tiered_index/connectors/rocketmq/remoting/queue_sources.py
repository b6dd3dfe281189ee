"""Chooses where the queues of a topic are read: a store's consume queues, its messages, or archived segments.

The sources are asked one after the other, and the first that has the topic answers. A store's consume queues may be
unreadable: RocksDB has them, or they were not copied. Then the queue offsets are read from the messages of the log: of
each closed segment once, of the last segment as far as it is written. A store that was changed over to RocksDB still
has the files of its old queues, which lack every later message. So they are not read, whichever of the two is newer:
the log has all messages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tiered_index.connectors.contract import BrowsedMessages
from tiered_index.connectors.rocketmq.archive.archive import QueueScan
from tiered_index.connectors.rocketmq.archive.messages import RocketmqMessages
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader
from tiered_index.connectors.rocketmq.log.layout import BLANK_BYTES
from tiered_index.connectors.rocketmq.log.message import Message
from tiered_index.connectors.rocketmq.log.segments import Segment, segment_at, stored_bytes
from tiered_index.connectors.rocketmq.log.store import counted_queues, unreadable_queues
from tiered_index.connectors.rocketmq.remoting.archived_queues import (
    ArchivedQueues,
    Directories,
    SegmentOfQueues,
    SegmentsOfQueues,
    StoreAndArchive,
    archived_segments,
)
from tiered_index.connectors.rocketmq.remoting.browsing import Browser
from tiered_index.connectors.rocketmq.remoting.pulling import Queues, StoreQueues, UnknownOffsets
from tiered_index.connectors.rocketmq.spec import SPEC
from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.format.segments.queue_offsets import decode_directory
from tiered_index.service.log.expired import NOTHING
from tiered_index.service.read.answers.messages import Fetched
from tiered_index.service.read.caches.store import CachedKind, ReadCache
from tiered_index.service.read.segments.archive import SegmentArchive

# Memory of directories, and of queue offsets that were read from messages
_DIRECTORIES_BYTES, _SCANS_BYTES = 64 << 20, 256 << 20


class QueueCaches:
    """The queue offsets that a process keeps between requests. Threads: any."""

    def __init__(self) -> None:
        self.directories: Directories = CachedKind(ReadCache(_DIRECTORIES_BYTES), "directories of queues")
        self._lock = threading.Lock()
        # encoded queue offsets by path, size and time of the file
        self._closed: CachedKind[tuple[str, int, int], bytes] = CachedKind(ReadCache(_SCANS_BYTES), "queue offsets")
        # the scan of the last segment of each log, by the log's folder
        self._open: dict[Path, QueueScan] = {}

    def scanned(self, segment: Segment, *, is_last: bool) -> tuple[int, bytes]:
        """Return the end and the encoded queue offsets of a store's segment; empty: it is damaged."""
        with self._lock:
            if is_last:
                return self._of_last(segment)
            try:
                stamp = (str(segment.path), segment.file_size, segment.path.stat().st_mtime_ns)
            except OSError:
                return segment.end, b""  # deleted since the folder was read
            if (known := self._closed.get(stamp)) is None:
                scan = QueueScan(segment.start)
                try:
                    scan.read_on(segment)
                    known = scan.encoded() if scan.end == segment.end else b""
                except CorruptFile:
                    known = b""
                self._closed.put(stamp, known, len(known))
            return segment.end, known

    def _of_last(self, segment: Segment) -> tuple[int, bytes]:
        scan = self._open.get(segment.path.parent)
        if scan is None or scan.begin != segment.start or not scan.is_of(segment):
            scan = self._open[segment.path.parent] = QueueScan(segment.start)
        try:
            scan.read_on(segment)
        except CorruptFile:
            return segment.end, b""
        return scan.end, scan.encoded()


def _stored(path: Path, start: int, end: int, encoded: bytes) -> SegmentOfQueues:
    """Return a segment of a store, up to the offset `end`; `encoded` are its queue offsets."""
    name, size = str(path), len(encoded)
    directory = partial(decode_directory, encoded, size, name)
    return SegmentOfQueues(
        name, start, end, (name, str(end)), size, directory, lambda begin, length: encoded[begin : begin + length]
    )


def _nothing_at(start: int) -> SegmentOfQueues:
    raise AssertionError(f"no segment begins at {start}")


def _of_messages(
    store: Path, root: Path | None, archived: tuple[SegmentArchive, str] | None, caches: QueueCaches
) -> ArchivedQueues:
    """Return the queues of a store and its archive by the messages of the log, and by archived queue offsets."""
    log = CommitLogReader(store / "commitlog")
    known = SegmentsOfQueues(lambda: (), _nothing_at) if archived is None else archived_segments(*archived)
    listed = log.segments()
    # the broker makes the next file in advance
    written = [segment for segment in listed if any(stored_bytes(listed, segment.start, BLANK_BYTES) or b"")]
    begin = listed[0].start if listed else None
    own: dict[int, SegmentOfQueues] = {}
    twins = {
        known_segment.start: known_segment
        for known_segment in known.all()
        if begin is not None and known_segment.end > begin and known_segment.queues_bytes
    }
    for segment in written:
        twin = twins.get(segment.start)
        if twin is not None and twin.end == segment.end and segment is not written[-1]:
            own[segment.start] = twin
        else:
            end, encoded = caches.scanned(segment, is_last=segment is written[-1])
            own[segment.start] = _stored(segment.path, segment.start, end, encoded)

    def segments() -> Iterator[SegmentOfQueues]:
        yield from (segment for segment in known.all() if begin is None or segment.end <= begin)
        yield from own.values()

    archive, name = archived if archived is not None else (None, None)
    return ArchivedQueues(
        SegmentsOfQueues(segments, lambda start: own.get(start) or known.at(start), known.lost),
        RocketmqMessages(store, archive, store_name=name, root=root),
        NOTHING if archive is None else archive.state().expired,
        lambda offset: (
            segment_at(log.segments(), offset) is not None
            or (archive is not None and bool(archive.holding(offset, name)))
        ),
        caches.directories,
    )


def have_queues(archives: Iterable[SegmentArchive]) -> bool:
    """Return whether a segment was archived with queue offsets."""
    return any(archive.segments().have_queues for archive in archives)


def _archived_log(archives: list[SegmentArchive], store: Path | None) -> tuple[SegmentArchive, str] | None:
    """Return the only archived log and its archive; None: no segment has queue offsets, or they are not the store's."""
    if not have_queues(archives):
        return None
    places = [(archive, name) for archive in archives for name in archive.segments().byte_stores]
    if len(places) > 1 and store is None:
        text = f"the logs of {len(places)} brokers are archived, and each has queues of its own: serve one of them"
        raise UnknownOffsets("the archive", text)
    return places[0] if len(places) == 1 else None


def queues_at_hand(
    topic: str, store: Path | None, root: Path | None, archives: Iterable[SegmentArchive], caches: QueueCaches
) -> Queues[Any] | None:
    """Return the queues of the first source that has the topic; None if neither store nor archive has queue offsets.

    If none has the topic, the first source is returned. Raises `UnknownOffsets` if no
    source has the topic and one may have it, and without a store if several logs are archived.
    """
    archived = _archived_log(list(archives), store)
    of_archive = None if archived is None else ArchivedQueues.of_archive(*archived, caches.directories)
    if store is None:
        return of_archive
    if unreadable_queues(store) is not None:
        return _of_messages(store, root, archived, caches)
    of_store = StoreQueues(store, root) if of_archive is None else StoreAndArchive(store, root, of_archive)
    if of_store.of_topic(topic):
        return of_store
    return of_store if of_archive is None or not of_archive.of_topic(topic) else of_archive


def message_at(messages: RocketmqMessages, topic: str, queue_id: int, queue_offset: int) -> Fetched:
    """Return the message at an offset of a queue (RocketMQ's `queryMsgByOffset`), from the first source that knows it.

    Raises as `RocketmqMessages.at`, `CorruptFile` for a damaged queue, and `InvalidArgument` without any queue offsets.
    """
    queues = queues_at_hand(topic, messages.store, messages.root, messages.archives, QueueCaches())
    if queues is None:
        raise InvalidArgument(messages.words(topic).no_queues)
    try:
        queue = queues.find(topic, queue_id)
        if queue is None:
            where = "the archive" if messages.store is None else messages.store
            return Fetched(item=None, state="missing", problem=f"{where} has no queue {queue_id} of {topic}")
        ends, name = queues.ends(queue), f"queue {queue_id} of {topic}"
        if queue_offset >= ends.end:
            return Fetched(item=None, state="missing", problem=f"{name} ends before offset {ends.end}")
        place = None
        if queue_offset >= ends.begin or isinstance(queues, StoreQueues):
            # a consume queue may still name the place of a message that the broker deleted and the archive has
            place = queues.place(queue, queue_offset)
        if place is None and queue_offset < ends.begin:
            problem = f"{name} begins at offset {ends.begin}: the messages before were deleted, or have expired"
            return Fetched(item=None, state="expired", problem=problem)
    except UnknownOffsets as error:
        return Fetched(item=None, state="missing", problem=error.problem)
    if place is None:
        return Fetched(item=None, state="missing", problem=f"{name} has no message at offset {queue_offset}")
    fetched = messages.at(place.offset, place.size)
    message = fetched.message
    wanted = topic, queue_id, place.queue_offset
    if isinstance(message, Message) and (message.topic, message.queue_id, message.queue_offset) != wanted:
        problem = f"commit log offset {place.offset} has another message than {name} says"
        return replace(fetched, state="missing", message=None, problem=problem)
    return fetched


class LogQueues:
    """The queues of the topics of a log, read beside its messages: a `TopicQueues`."""

    def __init__(self, messages: RocketmqMessages) -> None:
        self._messages, self._caches = messages, QueueCaches()

    def page(
        self,
        topic: str,
        queue_id: int | None,
        at_ms: int | None,
        cursor: str | None,
        max_count: int,
        claim: Callable[[int, bool], bool],
    ) -> BrowsedMessages | str:
        """As `TopicQueues.page`. Raises as `Browser.page`."""
        messages = self._messages
        archives = messages.archives
        expired = archives[0].state().expired if len(archives) == 1 else NOTHING
        try:
            queues = queues_at_hand(topic, messages.store, messages.root, archives, self._caches)
            if queues is None:
                return messages.words(topic).no_queues
            page = Browser(queues, expired, claim).page(topic, queue_id, at_ms, cursor, max_count)
        except UnknownOffsets as error:
            return f"{error.problem}; {SPEC.words.no_queues}"
        number = "" if queue_id is None else f" {queue_id}"
        return page if page is not None else f"topic {topic!r:.80} has no queue{number} here"

    def at(self, topic: str, queue_id: int, queue_offset: int) -> Fetched:
        """As `message_at`."""
        return message_at(self._messages, topic, queue_id, queue_offset)


def numbers_of_queues(
    store: Path | None, root: Path | None, archives: Iterable[SegmentArchive], caches: QueueCaches
) -> dict[str, int]:
    """Return the number of queues of each topic: the greatest that a source knows."""
    archived = _archived_log(list(archives), store)
    counts = {} if store is None else counted_queues(store)
    if store is not None and unreadable_queues(store) is not None:
        further = _of_messages(store, root, archived, caches).counts()
    elif archived is not None:
        further = ArchivedQueues.of_archive(*archived, caches.directories).counts()
    else:
        further = {}
    return {topic: max(counts.get(topic, 0), further.get(topic, 0)) for topic in {*counts, *further}}
