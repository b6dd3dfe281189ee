"""Rewrites archived segments: without messages that are erased, or from a copy in the place of a damaged object.

Erased messages of a log's bytes are overwritten; a columnar segment is sent again without them. Sizes and offsets of
bytes are unchanged, so entries of other messages stay valid. The log keeps the CRC32s of the source's bytes beside
those of the object. A follower compares the source's file with these, so it does not archive the file again. Copied
bytes are compared with the old object's table, so damage is never copied. Each new object is read back. Memory: one or
two parts of an upload for each segment that is rewritten at once, and up to 16 bytes for each segment of the index.
Threads: one for each task.
"""

from __future__ import annotations

import contextlib
import itertools
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from tiered_index.base.clock import SystemClock
from tiered_index.errors import CorruptFile, ObjectNotFound
from tiered_index.format.segments.archived import footer_bytes_of, segment_object_bytes
from tiered_index.format.segments.queue_offsets import check_queues
from tiered_index.format.segments.segment import Times
from tiered_index.service.jobs.rewriting.job import Job, JobOvertaken, Rewrite, TaskResult, Workers
from tiered_index.service.jobs.rewriting.whole import Named, defects_of
from tiered_index.service.jobs.segments.catalogs import MOST_WAITING, merge_catalogs, waiting
from tiered_index.service.jobs.segments.uploads import send_segment
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.publication import Publication
from tiered_index.service.log.records import ArchivedSegment, LogRecord
from tiered_index.service.log.state import LogState
from tiered_index.service.read.segments.archive import SegmentArchive
from tiered_index.service.read.segments.segments import MissingCatalog, Segments
from tiered_index.storage.base import Storage
from tiered_index.types import no_progress

# each time that so large a part of all segments was rewritten, they become a catalog, like those of a writer
_SHARE = 64


class Patch(NamedTuple):
    """Bytes to overwrite from `at` on (from the beginning of the segment): `unit`, repeated `times` times."""

    at: int
    unit: bytes
    times: int = 1

    @property
    def end(self) -> int:
        """The place after the last byte."""
        return self.at + len(self.unit) * self.times


@dataclass(frozen=True, slots=True)
class FoundMessages:
    """The messages to erase in one segment: their number, and the patches that erase them, ascending and disjoint; or
    of a columnar segment the `file` without them (None: it has none).

    `problem` describes a part of the segment that could not be searched. `collisions` counts entries of other keys that
    are erased, too.
    """

    messages: int = 0
    # They can be iterated several times; false if there are none
    patches: Iterable[Patch] = ()
    problem: str | None = None
    collisions: int = 0
    file: bytes | None = None
    # `rows` and `times` of the segment that the file will be
    rows: int | None = None
    times: Times | None = None


FindMessages = Callable[[SegmentArchive, ArchivedSegment], FoundMessages]
"""Reads a segment and returns the messages to erase: each source decodes its own messages."""


@dataclass(frozen=True, slots=True)
class SegmentResult(TaskResult):
    """The outcome for one segment: no object if nothing had to be sent, or if the segment is damaged.

    `found` describes its messages to erase, without patches. `remains` says that such messages are left in the new
    object, or in the segment if nothing could be sent.
    """

    found: FoundMessages = FoundMessages()
    remains: bool = False


@dataclass(frozen=True)
class EraseTask:
    """Finds the messages to erase in a segment, and sends the segment again without them."""

    number: int
    segment: ArchivedSegment
    find: FindMessages

    def run(self, storage: Storage, now_ms: int, progress: Callable[[int], None] = no_progress) -> SegmentResult:
        """Send the segment, if it has such messages. Raises storage errors. After an error there is no object."""
        segment = self.segment
        log = StorageLog(storage, SystemClock())
        archive = SegmentArchive(storage, lambda: log.state, log.open)
        erased_part = self.find(archive, segment)
        report, file = replace(erased_part, patches=(), file=None), erased_part.file
        result = SegmentResult(self.number, {}, 0, (), found=report)
        if not erased_part.patches and file is None:
            return result
        erased = structs.replace(segment, source=segment.source or (segment.crc32, segment.head_crc32))
        if segment.columns is not None and file is not None:
            columns, object_bytes = (segment.columns[0], footer_bytes_of(file)), segment_object_bytes(len(file))
            more: dict[str, Any] = {"rows": erased_part.rows, "times": erased_part.times}
            erased = structs.replace(erased, size_bytes=len(file), object_bytes=object_bytes, columns=columns, **more)

        def pieces(length: int) -> Iterator[bytes]:
            if file is None:
                return patched(_checked(archive, segment, length), erased_part.patches)
            return (file[at : at + length] for at in range(0, len(file), length))

        try:
            fresh, publication = send_again(log, erased, pieces)
        except CorruptFile as error:
            return replace(result, found=replace(report, problem=str(error)), remains=True)
        with publication.undone():
            again = self.find(archive, fresh)
        remains = bool(again.patches) or again.file is not None
        # the age of the object counts by the clock of the process that publishes it
        return replace(result, segments=((fresh, replace(publication.sent, began_ms=now_ms)),), remains=remains)


@dataclass(frozen=True)
class RestoreTask:
    """Sends a segment again from `pieces`, which yields the bytes of a copy in pieces of a given length."""

    segment: ArchivedSegment
    pieces: Callable[[int], Iterator[bytes]]
    number: int = 0

    def run(self, storage: Storage, now_ms: int, progress: Callable[[int], None] = no_progress) -> TaskResult:
        """Send the object. Raises `CorruptFile` if it does not verify, and the errors of `pieces`: there is none."""
        fresh, publication = send_again(StorageLog(storage, SystemClock()), self.segment, self.pieces)
        return TaskResult(self.number, {}, 0, (), segments=((fresh, replace(publication.sent, began_ms=now_ms)),))


@dataclass(frozen=True, slots=True)
class SegmentRewrite(Rewrite):
    """Replaces the segments whose tasks sent an object. A segment that another record replaced first stays as it is."""

    def replaced(self, results: Sequence[TaskResult]) -> Sequence[Named]:
        """Return the segments that have a new object."""
        return [self.inputs[result.number] for result in results if result.segments]

    def check_proof(self, results: Sequence[TaskResult]) -> None:
        """Raise `CorruptFile` unless each task has a result, and each new segment has all records that were kept."""
        numbers = sorted(result.number for result in results)
        CorruptFile.unless_equal(self.title, "not one result of each task", [*range(len(self.tasks))], numbers)
        for result in results:
            before = self.inputs[result.number]
            assert isinstance(before, ArchivedSegment)
            for fresh, _ in result.segments:
                problem = f"was sent in the place of {before.name}, but begins or ends elsewhere"
                CorruptFile.unless_equal(fresh.name, problem, (before.place, before.end), (fresh.place, fresh.end))
                if before.rows is not None:
                    # overwritten messages stay in their places, records of a columnar segment go
                    is_shorter = before.columns is not None
                    gone = result.found.messages if is_shorter and isinstance(result, SegmentResult) else 0
                    problem = f"has another number of messages than are left of {before.name}"
                    CorruptFile.unless_equal(fresh.name, problem, before.rows - gone, fresh.rows)

    def record(self, segments: Segments, results: Sequence[TaskResult]) -> LogRecord:
        """Return the record. Raises `JobOvertaken` if other records replaced all the segments."""
        names = {named.name for named in self.inputs}
        there = {fresh: segments.at(*fresh.place) for result in results for fresh, _ in result.segments}
        placed = {fresh: old for fresh, old in there.items() if old is not None and old.name in names}
        if not placed:
            raise JobOvertaken(f"{', '.join(sorted(names))}: replaced by another record")
        return LogRecord(0, self.kind, 0, "", 0, **segments.change([*placed], placed.values()))


def erase_messages(
    log: StorageLog,
    find: FindMessages,
    workers: Workers[Rewrite],
    at_once: int,
    progress: Callable[[str, int, int], None],
    *,
    keys: bool,
) -> dict[str, Any]:
    """Overwrite messages in all archived segments of an index. Return the fields of the certificate about segments.

    `workers` get `at_once` segments at a time. `progress`: see `Progress`. `keys`: whether the request has keys.
    """
    tally, count, most_waiting = _Tally(), 0, MOST_WAITING

    def planned(state: LogState, lost: Container[str]) -> Iterator[SegmentRewrite]:
        """Plan also the segments that came meanwhile, and those that another process has replaced."""
        nonlocal count, most_waiting
        count = len(Segments(state, log.storage))
        most_waiting = max(MOST_WAITING, count // _SHARE)
        tally.names_read.sort()
        segments = _unread(log, tally.names_read)
        while group := tuple(itertools.islice(segments, at_once)):
            tasks = [EraseTask(number, segment, find) for number, segment in enumerate(group)]
            yield SegmentRewrite("erase", "an erasure of messages", group, tasks)

    for rewrite, results in Job(log, planned, workers, repeats=True).outcomes():
        now = Segments(log.state, log.storage)
        for result in results:
            segment = rewrite.inputs[result.number]
            assert isinstance(segment, ArchivedSegment) and isinstance(result, SegmentResult)
            tally.add(segment, result, now)
            progress("archived segments read", tally.objects_read, max(tally.objects_read, count))
        if waiting(log.state) >= most_waiting:
            merge_catalogs(log, least=most_waiting)
    tally.names_read.sort()
    if tally.rewritten:
        merge_catalogs(log, least=MOST_WAITING)
    return tally.fields(Segments(log.state, log.storage), keys=keys)


class _Tally:
    """The results of an erasure of messages so far."""

    def __init__(self) -> None:
        self.rewritten = self.objects_read = self._erased = 0
        # the objects that were read, and those that may still have a message to erase
        self.names_read, self._left = _Digests(), set[str]()
        self._problems: dict[str, str] = {}
        self._collisions: dict[tuple[str, int], int] = {}

    def add(self, segment: ArchivedSegment, result: SegmentResult, now: Segments) -> None:
        """Add the result for a segment. `now` has the segments after its record."""
        self.objects_read += 1
        self._collisions.pop(segment.place, None)
        if result.found.collisions:
            self._collisions[segment.place] = result.found.collisions
        names = {segment.name}
        for fresh, _ in result.segments:
            if now.names_object(fresh.name):
                self.rewritten, self._erased = self.rewritten + 1, self._erased + result.found.messages
                names.add(fresh.name)
        if result.found.problem is not None:
            self._problems |= dict.fromkeys(names, result.found.problem)
        if result.remains or result.found.problem is not None:
            self._left |= names
        for name in names:
            self.names_read.add(name)

    def fields(self, now: Segments, *, keys: bool) -> dict[str, Any]:
        """Return the fields of the certificate about the segments that there are `now`."""
        remaining = [s.name for s in now if s.name in self._left or s.name not in self.names_read]
        return {
            "segments_read": self.objects_read,
            "collisions": sum(self._collisions.values()) if keys and self.objects_read else None,
            "segments_rewritten": self.rewritten,
            "messages_erased": self._erased,
            "segments_remaining": tuple(remaining),
            "segment_problems": tuple([said for name, said in self._problems.items() if now.names_object(name)]),
        }


def _unread(log: StorageLog, names_read: _Digests) -> Iterator[ArchivedSegment]:
    """Yield the archived segments of the log's state whose names were not read.

    It ends early if a catalog was merged and deleted meanwhile: the merged one has the segments that are left.
    """
    state = log.state
    try:
        yield from (segment for segment in Segments(state, log.storage) if segment.name not in names_read)
    except MissingCatalog:
        if log.refresh().number == state.number:
            raise


class _Digests:
    """A set of texts, of 8 bytes each. A text that was added is in it after the next `sort`.

    A text that was never added is in it by chance, once in 2**64 / n times.
    """

    def __init__(self) -> None:
        self._sorted = np.zeros(0, np.uint64)
        self._added = array("Q")

    def add(self, text: str) -> None:
        """Add a text."""
        self._added.append(_digest(text))

    def sort(self) -> None:
        """Take the added texts into the set."""
        self._sorted = np.unique(np.concatenate([self._sorted, np.array(self._added, np.uint64)]))
        self._added = array("Q")

    def __contains__(self, text: str) -> bool:
        digest = np.uint64(_digest(text))
        at = int(np.searchsorted(self._sorted, digest))
        return at < len(self._sorted) and bool(self._sorted[at] == digest)


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def send_again(
    log: StorageLog, segment: ArchivedSegment, pieces: Callable[[int], Iterator[bytes]]
) -> tuple[ArchivedSegment, Publication]:
    """Send a segment again and read it back, without queue offsets that don't verify. Raises as `RestoreTask.run`."""
    archive, section = SegmentArchive(log.storage, lambda: log.state, log.refresh), b""
    with contextlib.suppress(CorruptFile, ObjectNotFound):
        # an erased message keeps its place in its queue
        if data := archive.queue_offsets(segment):
            check_queues(data, segment.start, segment.size_bytes, segment.name)
            section = data
    size_bytes, columns = segment.size_bytes, segment.columns
    messages = segment.rows, segment.times
    sent, publication = send_segment(
        log, segment.place, size_bytes, pieces, section, columns=columns, messages=messages
    )
    fresh = structs.replace(sent, published_ms=segment.published_ms, source=segment.source)
    with publication.undone():
        for defect in defects_of(log.storage, fresh):
            raise CorruptFile(fresh.name, f"sent to replace {segment.name}, but it does not verify: {defect.problem}")
    return fresh, publication


def _checked(archive: SegmentArchive, segment: ArchivedSegment, part_bytes: int) -> Iterator[bytes]:
    """Yield the segment's checked bytes, a part at a time."""
    table = archive.table(segment)
    for position in range(0, segment.size_bytes, part_bytes):
        end = min(position + part_bytes, segment.size_bytes)
        data = archive.read(segment, position, end - position)
        for damage in table.damage(segment.name, position, data):
            raise damage
        yield data


def patched(pieces: Iterable[bytes], patches: Iterable[Patch]) -> Iterator[bytes]:
    """Yield the successive pieces of a segment with the patches applied."""
    waiting, position = iter(patches), 0
    patch = next(waiting, None)
    for piece in pieces:
        data, end = bytearray(piece), position + len(piece)
        while patch is not None and patch.at < end:
            begin, stop = max(patch.at, position), min(patch.end, end)
            data[begin - position : stop - position] = _bytes_of(patch, begin - patch.at, stop - patch.at)
            if patch.end > end:
                break
            patch = next(waiting, None)
        yield bytes(data)
        position = end


def _bytes_of(patch: Patch, begin: int, end: int) -> bytes:
    length = len(patch.unit)
    first = begin // length
    made = patch.unit * (-(-end // length) - first)
    return made[begin - first * length : end - first * length]
