"""Erases messages of archived segments: sends the segment again with their bytes overwritten, and replaces the old one.
A columnar segment is sent again without them.

Sizes and offsets are unchanged, so entries of other messages stay valid. The log keeps the CRC32s of the source's bytes
beside those of the object. A follower compares the source's file with these, so it does not archive the file again.
Copied bytes are compared with the old object's table, so damage is never copied. Repairs replace segments in the same
way. One process may send the object and another append the record. Memory: one or two parts of an upload, and 16 bytes
for each segment of the index. Threads: one for each rewriting; several may run.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from tiered_index.clock import Clock
from tiered_index.errors import CorruptFile, ObjectNotFound
from tiered_index.format.archived import footer_bytes_of, segment_object_bytes
from tiered_index.format.queue_offsets import check_queues
from tiered_index.format.segment import Times
from tiered_index.service.jobs.catalogs import MOST_LINES, merge_catalogs
from tiered_index.service.jobs.segment_archive import SegmentArchive, send_segment
from tiered_index.service.jobs.whole import defects_of
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.publication import Publication, SentObject
from tiered_index.service.log.records import ArchivedSegment, LogRecord
from tiered_index.service.log.state import LogState
from tiered_index.service.read.segments import MissingCatalog, Segments, names_object
from tiered_index.storage.base import Storage

_ROUNDS = 5
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
class RewrittenSegment:
    """The outcome for one segment. `found` describes its messages to erase, without patches.

    `fresh` and `sent` describe the new object. It verifies, but no record names it yet. None: nothing had to be sent,
    or the segment is damaged. `remains` says that messages to erase are left in the new object, or in the segment if
    nothing could be sent.
    """

    segment: ArchivedSegment
    found: FoundMessages
    fresh: ArchivedSegment | None = None
    sent: SentObject | None = None
    remains: bool = False


RewriteSegments = Callable[[Iterable[ArchivedSegment], FindMessages], Iterable[RewrittenSegment]]
"""A function that returns the result of `rewrite_segment` for each segment. It may use other processes."""


def erase_messages(
    storage: Storage,
    log: StorageLog,
    clock: Clock,
    find: FindMessages,
    rewrite: RewriteSegments | None,
    progress: Callable[[str, int, int], None],
    *,
    keys: bool,
) -> dict[str, Any]:
    """Overwrite messages in all archived segments of an index. Return the fields of the certificate about segments.

    `rewrite` does it in other processes; None: here. `progress`: see `Progress`. `keys`: whether the request has keys.
    """

    def rewrite_here(segments: Iterable[ArchivedSegment], find: FindMessages) -> Iterator[RewrittenSegment]:
        for segment in segments:
            yield rewrite_segment(storage, clock, segment, find)

    rewritten, erased, objects_read, segments_read = 0, 0, 0, 0
    # the objects and the places that were read, and the objects that may still have a message to erase
    names_read, places_read, left = _Digests(), _Digests(), set[str]()
    problems: dict[str, str] = {}
    collisions: dict[tuple[str, int], int] = {}
    for _ in range(_ROUNDS):
        before = objects_read
        count = len(Segments(log.refresh(), storage))
        most_lines = max(MOST_LINES, count // _SHARE)
        # a segment that another process has replaced meanwhile is read, too
        for outcome in (rewrite or rewrite_here)(_unread(log, names_read), find):
            objects_read += 1
            segments_read += places_read.add(repr(outcome.segment.place))
            collisions.pop(outcome.segment.place, None)
            if outcome.found.collisions:
                collisions[outcome.segment.place] = outcome.found.collisions
            names = {outcome.segment.name}
            if outcome.fresh is not None and outcome.sent is not None:
                state = record_instead(
                    Publication(log, [outcome.sent], named=names_object(storage)),
                    outcome.segment,
                    outcome.fresh,
                    "erase",
                )
                if Segments(state, storage).names_object(outcome.fresh.name):
                    rewritten, erased = rewritten + 1, erased + outcome.found.messages
                    names.add(outcome.fresh.name)
                if max(len(state.archive), len(state.hidden)) >= most_lines:
                    merge_catalogs(log, least=most_lines)
            if outcome.found.problem is not None:
                problems |= dict.fromkeys(names, outcome.found.problem)
            if outcome.remains or outcome.found.problem is not None:
                left |= names
            for name in names:
                names_read.add(name)
            progress("archived segments read", objects_read, max(objects_read, count))
        names_read.sort()
        places_read.sort()
        if objects_read == before:
            break
    if rewritten:
        merge_catalogs(log, least=MOST_LINES)
    now = Segments(log.state, storage)
    return {
        "segments_read": segments_read,
        "collisions": sum(collisions.values()) if keys and segments_read else None,
        "segments_rewritten": rewritten,
        "messages_erased": erased,
        "segments_remaining": tuple([s.name for s in now if s.name in left or s.name not in names_read]),
        "segment_problems": tuple([said for name, said in problems.items() if now.names_object(name)]),
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

    def add(self, text: str) -> bool:
        """Add a text. Return whether it is new since the last `sort`."""
        is_new = text not in self
        self._added.append(_digest(text))
        return is_new

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


def rewrite_segment(storage: Storage, clock: Clock, segment: ArchivedSegment, find: FindMessages) -> RewrittenSegment:
    """Find the messages to erase in a segment, and send the segment again without them. Raises storage errors."""
    log = StorageLog(storage, clock)
    archive = SegmentArchive(storage, lambda: log.state, log.open)
    found = find(archive, segment)
    told, file = replace(found, patches=(), file=None), found.file
    if not found.patches and file is None:
        return RewrittenSegment(segment, told)
    erased = structs.replace(segment, source=segment.source or (segment.crc32, segment.head_crc32))
    if segment.columns is not None and file is not None:
        columns, object_bytes = (segment.columns[0], footer_bytes_of(file)), segment_object_bytes(len(file))
        more: dict[str, Any] = {"rows": found.rows, "times": found.times}
        erased = structs.replace(erased, size_bytes=len(file), object_bytes=object_bytes, columns=columns, **more)

    def pieces(length: int) -> Iterator[bytes]:
        if file is None:
            return patched(_checked(archive, segment, length), found.patches)
        return (file[at : at + length] for at in range(0, len(file), length))

    try:
        fresh, publication = _send(log, erased, pieces)
    except CorruptFile as error:
        return RewrittenSegment(segment, replace(told, problem=str(error)), remains=True)
    with publication.undone():
        again = find(archive, fresh)
        remains = bool(again.patches) or again.file is not None
    return RewrittenSegment(segment, told, fresh, publication.sent, remains)


def put_in_place(
    log: StorageLog, segment: ArchivedSegment, pieces: Callable[[int], Iterator[bytes]], kind: str
) -> LogState:
    """Send a segment again and read it back. Then append a record of `kind` that replaces the old object, if it exists.

    `pieces` yields the bytes in pieces of a given length. Raises `CorruptFile`, and the errors of storage and `pieces`.
    """
    fresh, publication = _send(log, segment, pieces)
    return record_instead(publication, segment, fresh, kind)


def record_instead(publication: Publication, segment: ArchivedSegment, fresh: ArchivedSegment, kind: str) -> LogState:
    """Append a record of `kind` that replaces a segment by `fresh`, unless another process has replaced it."""

    def make(state: LogState) -> LogRecord | None:
        segments = Segments(state, publication.log.storage)
        there = segments.at(*segment.place)
        if there is None or there.name != segment.name:
            return None
        return LogRecord(0, kind, 0, "", 0, archive=(fresh,), **segments.removal(there))

    return publication.record("an archived segment in the place of another", make)


def _send(
    log: StorageLog, segment: ArchivedSegment, pieces: Callable[[int], Iterator[bytes]]
) -> tuple[ArchivedSegment, Publication]:
    """Send a segment again and read it back, without queue offsets that don't verify. Raises as `put_in_place`."""
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
