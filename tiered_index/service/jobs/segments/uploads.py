"""Uploads archived segments: closed files of a source's log, each uploaded once, which outlive the source.

A log record adds each segment, or many columnar segments that were uploaded before it. Objects that no record names are
orphans. A known segment is recognised by its first MiB. It is compared as a whole only if its file changed after the
upload began. A columnar segment (a Parquet file of records) is never compared: its source continues after the last
archived record. Threads: a lock serialises the uploads of one process.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from msgspec import structs

from tiered_index.base.locks import Lock
from tiered_index.errors import (
    CorruptFile,
    IndexClosed,
    InvalidArgument,
    ObjectNotFound,
    RootBehind,
    StorageBehind,
    StorageUnavailable,
)
from tiered_index.format.names import COLUMNS_SUFFIX, SEGMENT_SUFFIX, segment_name
from tiered_index.format.segments.archived import HEAD_BYTES, SegmentSums, segment_object_bytes
from tiered_index.format.segments.segment import LinkedSegment, Times
from tiered_index.service.jobs.segments.catalogs import FULL_LEVEL, MOST_WAITING, merge_catalogs, send_catalog, waiting
from tiered_index.service.jobs.segments.linking import link
from tiered_index.service.jobs.segments.ranges import store_ranges
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.publication import Publication, Unpublished
from tiered_index.service.log.records import MOST_INLINE, ArchivedSegment, LogRecord, Replacement, StoredCatalog
from tiered_index.service.log.session import StorageSession
from tiered_index.service.log.state import LogState, overlapped
from tiered_index.service.read.segments.archive import SegmentArchive
from tiered_index.service.read.segments.segments import Segments, names_object
from tiered_index.storage.base import Writer

QueuesOf = Callable[[], bytes]
"""Returns the queue offsets of a segment (`format/segments/queue_offsets.py`); empty if they are unknown."""
MessagesOf = Callable[[], tuple[int | None, Times | None]]
"""Returns the number of a segment's messages and their times, as `rows` and `times` of `ArchivedSegment`."""
ReadSegment = Callable[[int, int], bytes]
"""Returns `length` bytes of a segment from `position` (from its beginning) on, or raises a typed error."""


# a segment is read in pieces of so many bytes: whole pieces of its table
_READ_BYTES = 8 * HEAD_BYTES
# the epoch in the name of a job's object, which has none: greater than any writer's
_NO_EPOCH = 10**20 - 1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SourceSegment:
    """A closed segment of a source's log. Fields as in `IndexService.archive`; `columns` as in `ArchivedSegment`."""

    store: str
    start: int
    size_bytes: int
    read: ReadSegment
    modified_ms: int | None = None
    rewritten_ms: int | None = None
    queues: QueuesOf | None = None
    columns: tuple[int, int] | None = None
    messages: MessagesOf | None = None

    @property
    def end(self) -> int:
        """The offset after the last byte, or the number after the last record."""
        return self.start + (self.size_bytes if self.columns is None else self.columns[0])

    @property
    def place(self) -> tuple[str, int]:
        """Store and start offset, which identify the segment."""
        return self.store, self.start

    def exactly(self, position: int, length: int) -> bytes:
        """Return `length` bytes from `position` on. Raises `StorageUnavailable` if the file has become shorter."""
        data = self.read(position, length)
        if len(data) != length:
            raise StorageUnavailable(
                f"a segment has {len(data):,} bytes at {position:,} instead of {length:,}: its file was cut meanwhile"
            )
        return data

    def pieces(self, length: int, begin: int = 0) -> Iterator[bytes]:
        """Yield the bytes from `begin` on, `length` at a time."""
        for position in range(begin, self.size_bytes, length):
            yield self.exactly(position, min(length, self.size_bytes - position))


@dataclass(eq=False)
class SegmentUploads:
    """Uploads the segments of one index's sources."""

    session: StorageSession
    lock: Lock = field(default_factory=threading.RLock)
    _closed: bool = False
    # by place
    _unpublished: Unpublished[tuple[str, int], ArchivedSegment] = field(default_factory=Unpublished)
    _known: Segments | None = None

    def close(self, until_s: float) -> None:
        """Refuse new uploads, and wait for a running one until `until_s` (`time.monotonic()`)."""
        self._closed = True
        if self.lock.acquire(timeout=max(0.0, until_s - time.monotonic())):
            self.lock.release()

    def archive(self, source: SourceSegment) -> bool:
        """Upload a segment unless it is archived. Return whether it was uploaded. As `IndexService.archive`."""
        size_bytes, queues = source.size_bytes, source.queues
        with self._writing():
            state = self.session.refreshed()
            if self._is_expired(source, state):
                return False
            known = self._segments(state).at(*source.place)
            if known is not None:
                if (sent := self._unpublished.get(source.place)) is not None and sent[0].name == known.name:
                    # otherwise a replacement would be the same object
                    self._unpublished.forget(source.place)
                rewritten_ms, whole = source.rewritten_ms, replace(source, modified_ms=None)
                stale = (
                    rewritten_ms is not None and known.published_ms <= rewritten_ms and known.size_bytes == size_bytes
                )
                try:
                    _compare(known, whole if stale else source)
                except CorruptFile:
                    if not stale:
                        raise
                    # a later sweep deletes the old object, which readers may be using
                    return self._publish(whole, known.name)
                if queues is None or known.queues_bytes or not (section := queues()):
                    return False
                _compare(known, whole)
                return self._publish_queues(replace(whole, queues=lambda: section), known)
            _check_overlap(source, self._segments(state))
            return self._publish(source)

    def send(self, source: SourceSegment, copied: ArchivedSegment | None = None) -> bool:
        """Upload a columnar segment unless it is archived. Return whether it was uploaded: `name_sent` archives it.

        `copied`: the segment of another index with the same records.
        """
        with self._writing():
            state = self.session.log.state
            # an earlier try appended the record, but its outcome was unknown; a join may have moved the records since
            known = self._segments(state).holding(*source.place)
            is_there = known is not None and (known.start == source.start or known.end >= source.end)
            if self._is_expired(source, state) or is_there:
                self._unpublished.forget(source.place)
                return False
            _check_overlap(source, self._segments(state))
            self._upload(source, copied)
            return True

    def name_sent(self, places: Sequence[tuple[str, int]]) -> int:
        """Append one record for all segments at `places`, which were sent. Return how many of them are archived."""
        with self._writing():
            return self._name(places)

    def replace(self, source: SourceSegment, known: ArchivedSegment) -> bool:
        """Archive a columnar segment anew, in place of its copy. Return false if another record was first."""
        with self._writing():
            self._unpublished.forget(source.place)
            self._upload(source, known)
            return self._name([source.place], known.name) == 1

    def link(
        self,
        added: Sequence[LinkedSegment],
        finished: Sequence[LinkedSegment],
        gone: Sequence[tuple[str, int]],
        replaced: Sequence[Replacement],
    ) -> None:
        """Add, finish and remove linked segments by one record. As `IndexService.link`."""
        with self._writing():
            link(self.session.log, self.session.epoch, added, finished, gone, replaced)
            store_ranges(self.session.log, self.session.epoch)
            self._merge_catalogs(self.session.log.state)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Return a context manager that holds the lock. Raises if the index can't be written to."""
        with self.lock:
            if self._closed:
                raise IndexClosed("the index is closed: open it again")
            session = self.session
            if session.fenced is not None:
                raise session.fenced
            if not session.claimed:
                raise StorageUnavailable(
                    f"{session.storage.uri}: the storage was unavailable and the index is not claimed yet; try again"
                )
            yield

    def _merge_catalogs(self, state: LogState) -> None:
        """Make a catalog of those that records carry, if these have many segments, and merge small ones."""
        objects = len(state.catalogs) - len(state.inline)
        if waiting(state) >= MOST_WAITING or objects >= FULL_LEVEL:
            try:
                merge_catalogs(self.session.log, self.session.epoch, least=MOST_WAITING)
            except (StorageBehind, RootBehind):
                raise
            except CorruptFile as error:
                _log.warning("catalogs are not merged until `verify --deep --repair` restores one: %s", error)

    def _segments(self, state: LogState) -> Segments:
        # one for each state, which keeps the groups that were read
        if self._known is None or self._known.state is not state:
            self._known = Segments(state, self.session.storage)
        return self._known

    def _is_expired(self, source: SourceSegment, state: LogState) -> bool:
        """Return whether a segment has expired. Raises `InvalidArgument`."""
        if source.start < 0 or source.size_bytes <= 0:
            raise InvalidArgument(
                f"a segment must begin at 0 or later and have a byte, but start is {source.start} and size_bytes "
                f"{source.size_bytes}"
            )
        return source.end <= state.expired.segments.get(source.store, 0)

    def _publish_queues(self, source: SourceSegment, known: ArchivedSegment) -> bool:
        """Archive a segment again with its queue offsets. Return whether it was uploaded."""
        if known.source is None:
            return self._publish(source, known.name)
        # its archived bytes, because the source's file still has its erased messages, which keep their places in queues
        archive = SegmentArchive(self.session.storage, lambda: self.session.log.state, self.session.log.refresh)
        try:
            return self._publish(replace(source, read=partial(archive.verified, known)), known.name, known)
        except (StorageBehind, RootBehind):
            raise
        except (CorruptFile, ObjectNotFound) as error:
            _log.warning("%s gets no queue offsets until it is repaired: %s", known.name, error)
            return False

    def _publish(
        self, source: SourceSegment, instead_of: str | None = None, erased: ArchivedSegment | None = None
    ) -> bool:
        """Archive a segment by a record, which removes object `instead_of`. Return false if another one was first.

        `erased`: the segment with the same erased messages.
        """
        self._upload(source, erased)
        if self._name([source.place], instead_of):
            return True
        if (there := self._segments(self.session.log.state).at(*source.place)) is not None:
            # an earlier try's record, of unknown outcome, came first
            _compare(there, source)
        return False

    def _upload(self, source: SourceSegment, copied: ArchivedSegment | None = None) -> None:
        """Send a segment, unless the object of an earlier try can be used.

        `copied`: a segment with the same messages, of which some may be erased.
        """

        def send() -> tuple[ArchivedSegment, Publication]:
            section = b"" if source.queues is None else source.queues()
            messages = (None, None) if source.messages is None else source.messages()
            log, epoch, of_source = self.session.log, self.session.epoch, (source.size_bytes, source.pieces)
            sent, publication = send_segment(log, source.place, *of_source, section, epoch, source.columns, messages)
            if copied is not None:
                sent = structs.replace(sent, source=copied.source, published_ms=copied.published_ms)
            return sent, publication

        self._unpublished.sent(source.place, send, partial(_is_same, source=source))

    def _name(self, places: Sequence[tuple[str, int]], instead_of: str | None = None) -> int:
        """Append one record for the segments at `places` that were sent. Return how many of them are archived.

        It removes the segment of object `instead_of` if that is at one of the places.
        """
        # in the order of catalogs, so that each group of rows is read and decoded once
        sent = list(filter(None, map(self._unpublished.get, sorted(places))))
        segments, epoch, log = [segment for segment, _ in sent], self.session.epoch, self.session.log

        def at(state: LogState, places_of: Sequence[ArchivedSegment]) -> list[ArchivedSegment | None]:
            # a segment that was joined with others is within the new one
            return [self._segments(state).holding(*segment.place) for segment in places_of]

        def due(state: LogState) -> tuple[ArchivedSegment, ...]:
            left = [segment for segment in segments if segment.end > state.expired.segments.get(segment.store, 0)]
            known = zip(left, at(state, left), strict=True)
            return tuple(segment for segment, old in known if old is None or old.name == instead_of)

        objects, listed = [publication.sent for _, publication in sent], due(log.refresh())
        catalog: StoredCatalog | None = None
        if len(listed) > MOST_INLINE:
            catalog, of_catalog = send_catalog(log, listed, epoch)
            objects.append(of_catalog.sent)
        publication = Publication(log, objects, epoch, names_object(self.session.storage))

        def make(state: LogState) -> LogRecord | None:
            archive = due(state)
            if catalog is not None and archive == listed and overlapped(state.catalogs.values(), catalog) is None:
                return LogRecord(0, "archive", epoch, "", 0, catalogs=(catalog,))
            change = self._segments(state).change(archive, filter(None, at(state, archive)))
            return LogRecord(0, "archive", epoch, "", 0, **change) if archive else None

        # an earlier record of unknown outcome may name an object whose place is empty
        state = publication.record(
            "archived segments", make, lambda state: None if None in at(state, segments) else "all"
        )
        for place in places:
            self._unpublished.forget(place)
        self._merge_catalogs(state)
        return sum(map(self._segments(state).names_object, [segment.name for segment in segments]))


def send_segment(
    log: StorageLog,
    place: tuple[str, int],
    size_bytes: int,
    pieces: Callable[[int], Iterator[bytes]],
    queues: bytes,
    epoch: int | None = None,
    columns: tuple[int, int] | None = None,
    messages: tuple[int | None, Times | None] = (None, None),
) -> tuple[ArchivedSegment, Publication]:
    """Send a segment: its bytes, which `pieces` yields by a given length, its queue offsets, and their checksums.

    `epoch` is the writer's, None a job's; `columns` as in `ArchivedSegment`; `messages` are its `rows` and `times`.
    Raises as `Publication.send` and `pieces`.
    """
    sums = SegmentSums()
    footer_bytes = 0 if columns is None else columns[1]

    def fill(stream: Writer) -> None:
        footer = b""
        for data in pieces(_READ_BYTES):
            before = max(size_bytes - footer_bytes - sums.size_bytes, 0)
            sums.update(data)
            stream.write(data[:before])
            footer += data[before:]
        stream.write(queues + sums.table(place[1], len(queues), footer).encode() + footer)

    object_bytes = segment_object_bytes(size_bytes) + len(queues)
    name = segment_name(
        *place, _NO_EPOCH if epoch is None else epoch, SEGMENT_SUFFIX if columns is None else COLUMNS_SUFFIX
    )
    publication = Publication.send(log, name, fill, epoch, names_object(log.storage))
    began_ms = publication.sent.began_ms
    crcs = sums.crc32, sums.head_crc32
    sent = ArchivedSegment(name, *place, size_bytes, *crcs, object_bytes, began_ms, None, columns, *messages)
    return sent, publication


def _called(store: str, start: int) -> str:
    return f"segment {start:020d} of {store}"


def _check_overlap(source: SourceSegment, segments: Segments) -> None:
    """Raise `CorruptFile` if another archived segment has a byte or record of a segment."""
    if (other := segments.overlapping(*source.place, source.end)) is not None:
        raise CorruptFile(
            _called(*source.place),
            f"overlaps {other.name}, which is archived already: the log was recreated",
            expected=(other.start, other.end),
            found=(source.start, source.end),
        )


def _is_same(sent: ArchivedSegment, source: SourceSegment) -> bool:
    """Return whether a segment is as it was sent: its source may have rewritten it since."""
    if source.columns is not None or sent.columns is not None:
        return (sent.size_bytes, sent.columns) == (source.size_bytes, source.columns)
    try:
        # as an old one, so that all of it is compared: a clock may have gone back since
        _compare(structs.replace(sent, published_ms=0, source=None), source)
    except CorruptFile:
        return False
    return True


def _compare(known: ArchivedSegment, source: SourceSegment) -> None:
    """Raise `CorruptFile` if a segment differs from its archived copy. Only the head is read if it is older."""
    where = _called(*known.place)
    problem = f"has another size than its archived copy {known.name}: it was rewritten"
    CorruptFile.unless_equal(where, problem, known.size_bytes, source.size_bytes)
    head = source.exactly(0, min(HEAD_BYTES, source.size_bytes))
    computed = zlib.crc32(head)
    whole, expected = known.source or (known.crc32, known.head_crc32)
    if computed == expected and (source.modified_ms is None or source.modified_ms >= known.published_ms):
        for piece in source.pieces(HEAD_BYTES, len(head)):
            computed = zlib.crc32(piece, computed)
        expected = whole
    CorruptFile.unless_equal(
        where, f"differs from its archived copy {known.name}: it was rewritten", expected, computed
    )
