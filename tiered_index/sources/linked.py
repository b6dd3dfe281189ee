"""Links the files of a topic: indexes their rows, and leaves the rows where they are.

The files of a topic are one log. A record of the storage's log gives each file a range of offsets before its first
entry. An entry's offset is the first offset of its file's segment and the position of its row, its size the bytes of
the row. The source's position is an offset of this log, so it says for all files at once what is indexed. Segments are
read in the order of their offsets; one that ends behind the position is read on from there. A killed run loses and
doubles nothing. Positions do not grow with the number of files. One thread.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from msgspec import structs

from tiered_index.clock import SystemClock
from tiered_index.errors import InvalidArgument, ObjectNotFound
from tiered_index.follow import FIRST, PatientPut
from tiered_index.format.names import linked_store
from tiered_index.format.segment import LinkedSegment, Times
from tiered_index.kernels import crc32
from tiered_index.service.index import IndexService
from tiered_index.service.read.rows import check_topic
from tiered_index.sources.listing import HEAD_BYTES, SourceFile, reopened
from tiered_index.sources.rows import RowBatch, RowFile, RowMapping, open_rows
from tiered_index.systems import FILES_QUEUE as QUEUE
from tiered_index.systems import files_key

# files whose offsets one record reserves, and about the bytes that are read before a record finishes them
_AT_ONCE, _AT_ONCE_BYTES = 512, 4 << 30


def keys_name(topic: str, path: str) -> str:
    """Return the name of the position that says that rows of a topic have keys at a path."""
    return files_key(topic) + path


_Outcome = tuple[LinkedSegment | None, int | None]
"""A finished segment, and the position of the file at which a further one begins. None: it has no row; there is none.
"""


@dataclass
class FileCounts:
    """The counts of one run. Lists have texts for people."""

    read_files: int = 0
    known: int = 0
    rows: int = 0
    entries: int = 0
    keyless: int = 0
    skipped: int = 0
    read_bytes: int = 0
    skipped_first: list[dict[str, str]] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    held_back: list[str] = field(default_factory=list)


@dataclass
class FileLinker:
    """Indexes the files of one topic.

    `progress` gets the bytes of files that were read. With `skip_bad` rows that are no entries are counted only.
    """

    index: IndexService
    topic: str
    mapping: RowMapping
    patient: PatientPut
    skip_bad: bool = False
    progress: Callable[[int], object] = lambda size: None
    counts: FileCounts = field(default_factory=FileCounts)

    def __post_init__(self) -> None:
        check_topic(self.topic)
        self._store = linked_store(self.topic, QUEUE)
        # the last segment of each file, by its place
        self._last: dict[str, LinkedSegment] = {}
        # the end of all offsets that were ever reserved
        self._end = 0

    @property
    def position(self) -> int:
        """The offset before which all rows are durable."""
        return self.index.durable_position(self._store) or 0

    def run(self, files: Sequence[SourceFile]) -> FileCounts:
        """Index the rows of `files` that are not indexed yet, and all that an earlier run has not finished.

        Raises `InvalidArgument` for a row that is no entry, and a file of another form; `CorruptFile`; the errors of
        the index and of the storages.
        """
        position, pending = self.position, list[LinkedSegment]()
        for segment in self.index.segment_archive.segments().of_log(self._store):
            if isinstance(segment, LinkedSegment):
                self._note(segment)
                if segment.is_open or segment.end > position:
                    pending.append(segment)
        self._end = max(self._end, position)
        if not self._end:
            self._check_queue()
        for path in self.mapping.keys:
            if self.index.durable_position(keys_name(self.topic, path)) is None:
                self._put_position(keys_name(self.topic, path), 1)
        self._go_on(pending, position)
        waiting = deque[tuple[SourceFile, int]]()
        places = set[str]()
        for listed in files:
            last = self._last.get(listed.place)
            if listed.place in places or (last is not None and listed.is_same(last.size_bytes, last.etag)):
                self.counts.known += 1
            else:
                waiting.append((listed, self._begin(listed, last)))
            places.add(listed.place)
        while waiting:
            chunk: list[tuple[SourceFile, RowFile, LinkedSegment]] = []
            while (
                waiting and len(chunk) < _AT_ONCE and sum(listed.size_bytes for listed, _, _ in chunk) < _AT_ONCE_BYTES
            ):
                chunk += self._reserved(*waiting.popleft())
            if chunk:
                self.index.link([segment for _, _, segment in chunk])
                segments = [segment for _, _, segment in chunk]
                self._go_on(self._record(segments, [self._read(*reserved) for reserved in chunk]))
        return self.counts

    def _note(self, segment: LinkedSegment) -> None:
        is_local = segment.uri.startswith("file:")
        self._last[segment.etag.rsplit("-", 2)[0] if is_local else segment.uri] = segment
        self._end = max(self._end, segment.end)

    def _check_queue(self) -> None:
        """Raise `InvalidArgument` if the topic's queue has entries that are of no file: they may hide rows."""
        with self.index.export(self.topic, allow_partial=True) as batches:
            if any(np.any(entries["queue_id"].to_numpy() == QUEUE) for entries in batches):
                raise InvalidArgument(
                    f"queue {QUEUE} of topic {self.topic!r} has entries that are not rows of files: choose another "
                    "--topic, so that offsets of one do not hide those of the other"
                )

    def _put_position(self, source: str, position: int) -> None:
        texts, numbers = pa.array([], pa.string()), np.zeros(0, np.int64)
        columns = {
            "topic": texts,
            "key": texts,
            **dict.fromkeys(("queue_id", "offset", "size", "timestamp_ms"), numbers),
        }
        self.patient(columns, source, position)

    def _begin(self, listed: SourceFile, last: LinkedSegment | None) -> int:
        """Return the position from which on a file is to be indexed: behind `last`, if it has only grown since."""
        if last is None:
            return 0
        if _has_grown(listed, last, listed.head()) and (last.blocks is None or _has_last_block(listed, last)):
            return last.position + last.length
        self.counts.changed.append(listed.uri)
        return 0

    def _reserved(self, listed: SourceFile, position: int) -> list[tuple[SourceFile, RowFile, LinkedSegment]]:
        """Return the file with an open segment at the end of the log; nothing if it has no bytes behind `position`."""
        published_ms, head = SystemClock().now_ms(), listed.head()
        rows = open_rows(listed.file, listed.size_bytes, head)
        if (length := rows.length_bound(position)) <= 0:
            return []
        of_file = listed.uri, self._store, self._end, length, rows.format, listed.size_bytes, listed.etag(head)
        segment = LinkedSegment(*of_file, published_ms, position, is_open=True)
        self._end = segment.end
        return [(listed, rows, segment)]

    def _go_on(self, pending: Sequence[LinkedSegment], position: int = 0) -> None:
        """Read the segments that are not read, or not finished, from an offset on."""
        while pending:
            pending = self._record(
                pending, [self._read_again(segment, max(position, segment.start)) for segment in pending]
            )

    def _read_again(self, segment: LinkedSegment, offset: int) -> _Outcome:
        """As `_read`, for a file that must be opened. One that is gone, or was changed, is finished at the offset."""
        with contextlib.ExitStack() as stack:
            try:
                listed = stack.enter_context(reopened(segment.uri, self.index.config))
            except (InvalidArgument, ObjectNotFound):
                listed = None
            head = b"" if listed is None else listed.head()
            if listed is not None and (
                listed.is_same(segment.size_bytes, segment.etag) or _has_grown(listed, segment, head)
            ):
                return self._read(listed, open_rows(listed.file, listed.size_bytes, head), segment, offset)
        # its rows before the offset are indexed
        self.counts.changed.append(segment.uri)
        length = min(offset - segment.start, segment.length)
        return (structs.replace(segment, length=length, is_open=False) if length else None), None

    def _record(self, before: Sequence[LinkedSegment], after: Sequence[_Outcome]) -> list[LinkedSegment]:
        """Replace segments in the log by finished ones. Return the further ones, which the same record adds."""
        finished, gone, further = list[LinkedSegment](), list[tuple[str, int]](), list[LinkedSegment]()
        for segment, (other, position) in zip(before, after, strict=True):
            if other is None:
                gone.append(segment.place)
            elif other != segment:
                finished.append(other)
                self._note(other)
            if position is not None:
                # the text is longer than its bound
                further.append(structs.replace(segment, start=self._end, position=position))
                self._end = further[-1].end
        if finished or gone:
            self.index.link(further, finished, gone)
        return further

    def _read(self, listed: SourceFile, rows: RowFile, segment: LinkedSegment, offset: int = 0) -> _Outcome:
        """Put the rows of a segment from an offset on."""
        shift, begun_bytes = segment.start - segment.position, self.counts.read_bytes
        reading = rows.reading(self.mapping, segment.position, segment.position + segment.length)
        count, times = 0, None
        for batch in reading.batches(max(offset, segment.start) - shift):
            self._put(listed, batch, shift)
            count, times = count + batch.rows + len(batch.bad), _joined(times, batch.times)
            self.progress(begun_bytes + min(batch.end - segment.position, listed.size_bytes))
        self._put_position(self._store, segment.end)
        self.counts.read_files += 1
        self.counts.read_bytes = begun_bytes + listed.size_bytes
        self.progress(self.counts.read_bytes)
        if reading.held_back_bytes:
            self.counts.held_back.append(listed.uri)
        if not segment.is_open:
            return segment, None
        length, further = reading.end - segment.position, None if reading.is_whole else reading.end
        if not length:
            return None, further
        is_counted = offset <= segment.start
        finished = structs.replace(
            segment,
            length=length,
            rows=count if is_counted else None,
            times=times if is_counted else None,
            blocks=reading.blocks,
            is_open=False,
        )
        return finished, further

    def _put(self, listed: SourceFile, batch: RowBatch, shift: int) -> None:
        if batch.bad and not self.skip_bad:
            bad = batch.bad[0]
            raise InvalidArgument(f"{listed.uri}, {bad.where}: {bad.problem}; --skip-bad leaves such rows out")
        entries = len(batch.keys)
        topics = pa.DictionaryArray.from_arrays(pa.array(np.zeros(entries, np.int32)), pa.array([self.topic]))
        columns = {
            "topic": topics,
            "queue_id": np.full(entries, QUEUE, np.int64),
            "key": batch.keys,
            "offset": batch.positions + shift,
            "size": batch.sizes,
            "timestamp_ms": batch.times_ms,
        }
        self.patient(columns, self._store, batch.end + shift)
        counts = self.counts
        counts.rows, counts.entries = counts.rows + batch.rows, counts.entries + entries
        counts.keyless, counts.skipped = counts.keyless + batch.keyless, counts.skipped + len(batch.bad)
        for bad in batch.bad[: max(0, FIRST - len(counts.skipped_first))]:
            counts.skipped_first.append({"where": f"{listed.uri}, {bad.where}", "problem": bad.problem})


def _joined(times: Times | None, more: Times | None) -> Times | None:
    if times is None or more is None:
        return times or more
    return min(times[0], more[0]), max(times[1], more[1])


def _has_grown(listed: SourceFile, segment: LinkedSegment, head: bytes) -> bool:
    """Return whether a file is the text of a segment, perhaps with more behind it, by its size and first bytes."""
    if segment.format not in ("ndjson", "csv") or listed.size_bytes < segment.size_bytes:
        return False
    known = head[: min(HEAD_BYTES, segment.size_bytes)]
    return f"{crc32(known):08x}" == segment.etag.rpartition("-")[2]


def _has_last_block(listed: SourceFile, segment: LinkedSegment) -> bool:
    """Return whether a file still has the last block of a segment."""
    assert segment.blocks is not None
    size_bytes, sums = segment.blocks
    begin = (len(sums) - 1) * size_bytes
    return crc32(listed.part(segment.position + begin, segment.length - begin)) == sums[-1]
