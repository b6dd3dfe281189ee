"""Links the files of a topic: indexes their rows, and leaves the rows where they are.

The files of a topic are one log. Files whose rows have their topic in a field are one log, too, for all topics. A
record of the storage's log gives each file a range of offsets before its first entry. An entry's offset is the first
offset of its file's segment and the position of its row, its size the bytes of the row. The source's position is an
offset of this log, so it says for all files at once what is indexed. Segments are read in the order of their offsets;
one that ends behind the position is read on from there. A killed run loses and doubles nothing. Positions do not grow
with the number of files. One thread.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import structs

from tiered_index.errors import CorruptFile, InvalidArgument, ObjectNotFound
from tiered_index.follow import FIRST, PatientPut
from tiered_index.format.names import TOPICS_QUEUE, linked_store, points_store
from tiered_index.format.segment import LinkedSegment, Times
from tiered_index.service.index import IndexService
from tiered_index.service.jobs.row_places import FILES_QUEUE, files_topic
from tiered_index.service.read.rows import check_topic
from tiered_index.sources.added_keys import NO_ENTRIES, AddedKeys, KeyCounts
from tiered_index.sources.chains import FileChains, end_of, has_changed, has_grown, has_text, is_torn, may_grow, of_file
from tiered_index.sources.listing import HEAD_BYTES, FileMoved, SourceFile, reopened
from tiered_index.sources.places import LocalFile
from tiered_index.sources.restart import encode_points, taken_points
from tiered_index.sources.row_archive import SEGMENT_BYTES, RowArchiver
from tiered_index.sources.rows.batch import RowBatch, RowFile, RowReading
from tiered_index.sources.rows.forms import rows_of_form
from tiered_index.sources.rows.mapping import TOPIC_FIELD, RowMapping, Unit
from tiered_index.sources.rows.small import SmallText, gathered, read_together
from tiered_index.sources.rows.zone import TimeZone
from tiered_index.systems import time_unit_of, time_unit_position, time_zone_of, time_zone_position

# files whose offsets one record reserves, about the bytes that are read before a record finishes them, and the bytes of
# small files, which are in memory meanwhile
_AT_ONCE, _AT_ONCE_BYTES, _HELD_BYTES = 4096, 4 << 30, 32 << 20
# lines that tell new files of a folder apart, at least as long as no run has indexed one
_FIRST_LINES = 3


MOST_POINTS = 1000
"""Restart points of a file that are kept in memory, some 14 KiB each."""
_ONE_PIECE_BYTES = 16 << 20
"""Text of a packed file without restart points of which the user is told."""
# most topics of files whose topic is a field: each is a position
_MOST_TOPICS = 1000


# fields of a segment that say what its text has
_OF_TEXT = ("rows", "times", "blocks", "lines")

_Outcome = tuple[LinkedSegment | None, int | None]
"""A finished segment, and the position of the file at which a further one begins. None: it has no row; there is none.
"""

_Reserved: TypeAlias = tuple[SourceFile, RowFile, LinkedSegment]
"""A file, its rows, and the open segment for those that are new."""


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
    changed_while_read: list[str] = field(default_factory=list)
    held_back: list[str] = field(default_factory=list)
    in_one_piece: list[str] = field(default_factory=list)
    keys: KeyCounts = field(default_factory=KeyCounts)


@dataclass
class FileLinker:
    """Indexes the files of one topic, or those whose rows have their topic in a field of the mapping (`topic` None).

    `progress` gets the bytes of files that were read. With `skip_bad` rows that are no entries are counted only.
    `archive`: copy the rows into the archive. New rows are indexed by all keys of the topic, less `dropped_keys`.
    A new file that has the text of another one of its folder waits `copies_wait_s`, because that one may be truncated.
    """

    index: IndexService
    topic: str | None
    mapping: RowMapping
    patient: PatientPut
    skip_bad: bool = False
    progress: Callable[[int], object] = lambda size: None
    counts: FileCounts = field(default_factory=FileCounts)
    copies_wait_s: float = 0.0
    archive: bool = False
    dropped_keys: Sequence[str] = ()
    clock_s: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        assert (self.topic is None) == (self.mapping.topic is not None), "the topic is a name or a field"
        self._queue_id = TOPICS_QUEUE if self.topic is None else FILES_QUEUE
        self._store = linked_store("" if self.topic is None else check_topic(self.topic), self._queue_id)
        self._topics = set[str]()
        self._archiver = RowArchiver(self.index, self._store) if self.archive else None
        # the offset before which restart points are archived, and the places of objects without a name in the log
        self._points_end, self._points_sent = 0, list[tuple[str, int]]()
        # columns and positions whose rows are not archived yet
        self._waiting: list[tuple[dict[str, Any], int]] = []
        self._chains = FileChains(self._store)
        # copies of files that are still there, and the time at which they were listed first
        self._copies: dict[str, float] = {}
        self._is_begun = False
        self._given, self._keys = self.mapping, AddedKeys(self.index, self._store, self.patient, self._columns)
        self.counts.keys = self._keys.counts
        self.unit_before: str | None = None
        """The unit of times that are numbers by earlier runs; None: there was no such time."""
        self._unit: str | None = None
        self.zone_before: str | None = None
        """The zone of times without one by earlier runs; None: they are UTC."""
        self._zone: str | None = None

    @property
    def position(self) -> int:
        """The offset before which all rows are durable."""
        # a job may have published rows since the index was opened
        published = self.index.log_state.positions.get(self._store, 0)
        return max(self.index.durable_position(self._store) or 0, published)

    def begin_again(self) -> None:
        """Forget the state of the log: the next `run` reads it again, and continues after an error."""
        self._is_begun = False

    def run(self, files: Sequence[SourceFile]) -> FileCounts:
        """Index the rows of `files` that are not indexed yet, and all that an earlier run has not finished.

        Raises `InvalidArgument` for a row that is no entry, and a file of another form; `CorruptFile`; the errors of
        the index and of the storages.
        """
        if not self._is_begun:
            self._go_on_from_log(files)
            self._is_begun = True
        waiting = deque[tuple[SourceFile, int]]()
        places, new = set[str](), list[SourceFile]()
        moved: list[LinkedSegment] = []
        begun: dict[tuple[str, bytes], list[bytes]] = {}
        for listed in files:
            chain = self._chains.by_place.get(listed.place)
            if listed.place in places or (chain and listed.is_same(chain[-1].size_bytes, chain[-1].etag)):
                self.counts.known += 1
            elif chain is None:
                new.append(listed)
            else:
                waiting.append((listed, self._begin(listed, chain)))
                if not waiting[-1][1]:
                    self._has_begun(listed, begun)
            is_known = (
                chain is not None and chain is self._chains.by_place.get(listed.place) and listed.place not in places
            )
            if is_known and chain and listed.uri != chain[-1].uri:
                moved += [structs.replace(segment, uri=listed.uri) for segment in chain]
            places.add(listed.place)
        chains = self._chains.by_place if new else {}
        replaced = {chain[-1].uri for place, chain in chains.items() if place not in places}
        for listed in new:
            if (chain := self._copied(listed)) is not None:
                moved += [of_file(segment, listed) for segment in chain]
                if (end := end_of(chain)) < listed.size_bytes:
                    waiting.append((listed, end))
                else:
                    self.counts.known += 1
            elif not self._may_be_copy(listed, begun):
                waiting.append((listed, 0))
                self.counts.changed += [listed.uri] if listed.uri in replaced else []
        if moved:
            # the same rows, at another place
            self.index.link([], moved)
            for segment in moved:
                self._chains.note(segment)
        while waiting:
            chunk, size_bytes, held_bytes = list[_Reserved](), 0, 0
            while waiting and len(chunk) < _AT_ONCE and size_bytes < _AT_ONCE_BYTES and held_bytes < _HELD_BYTES:
                listed, position = waiting.popleft()
                size_bytes += listed.size_bytes
                held_bytes += min(listed.size_bytes, HEAD_BYTES)
                chunk += self._reserved(listed, position)
            if chunk:
                self.index.link([segment for _, _, segment in chunk])
                segments = [segment for _, _, segment in chunk]
                self._go_on(self._record(segments, self._all(self._outcomes(chunk))))
        self._keys.run(self.mapping)
        return self.counts

    def _go_on_from_log(self, files: Sequence[SourceFile]) -> None:
        """Learn the segments of the log, and read those that an earlier run has not finished."""
        position, self._waiting = self.position, []
        segments = self.index.segment_archive.segments()
        pending = self._chains.learn(segments, position)
        self._points_end, self._points_sent = segments.end(points_store(self._store)), []
        if self._archiver is not None:
            self._archiver.begin_again()
        if not self._chains.end and self.topic is not None:
            with self.index.export(self.topic, allow_partial=True) as batches:
                check_queue(self.topic, batches)
        self.mapping = self._given
        self._learn_times()
        try:
            # an earlier run has begun these files, with the keys of that time
            for keys, of_keys in groupby(self._moved(pending, files), lambda segment: self._keys.at(segment.start)):
                self.mapping = self.mapping.with_keys(keys or self._given.keys)
                self._go_on([*of_keys], position)
        except FileMoved:
            # a follower tries again
            raise
        except InvalidArgument as error:
            raise InvalidArgument(
                f"{error}. An earlier run has begun this file, so this one must read it first"
            ) from error
        if pending:
            self.index.flush()
        end = max(self.position, self._chains.end)
        self.mapping = self.mapping.with_keys(self._keys.settle(self._given.keys, self.dropped_keys, end))

    def _moved(self, pending: Sequence[LinkedSegment], files: Sequence[SourceFile]) -> list[LinkedSegment]:
        """Return segments that are not read, with the files that have their texts now, which the log then names.

        Their files were renamed, or were copied and truncated, since the run that has begun them.
        """
        moved = dict[tuple[str, int], LinkedSegment]()
        starts = {segment.start for segment in pending}
        for chain in list(self._chains.by_place.values()):
            if starts.isdisjoint(segment.start for segment in chain) or not may_grow(chain[0]) or self._is_there(chain):
                continue
            texts = (listed for listed in files if listed.uri.startswith("file:"))
            listed = next((listed for listed in texts if has_text(listed, chain, listed.head())), None)
            if listed is not None:
                self._chains.drop(chain)
                moved |= {segment.place: of_file(segment, listed) for segment in chain}
        if moved:
            self.index.link([], list(moved.values()))
            for segment in moved.values():
                self._chains.note(segment)
        return [moved.get(segment.place, segment) for segment in pending]

    def _copied(self, listed: SourceFile) -> list[LinkedSegment] | None:
        """Return the segments of a text that a new file has now, and forget them; None: its text is new."""
        head = None
        for chain in [*self._chains.lost, *self._chains.by_place.values()]:
            if listed.size_bytes < end_of(chain) or not may_grow(chain[0]) or not listed.uri.startswith("file:"):
                continue
            head = listed.head() if head is None else head
            if not has_text(listed, chain, head):
                continue
            if chain in self._chains.lost:
                self._chains.lost.remove(chain)
                return chain
            if not self._is_there(chain):
                self._chains.drop(chain)
                return chain
        return None

    def _may_be_copy(self, listed: SourceFile, begun: dict[tuple[str, bytes], list[bytes]]) -> bool:
        """Return whether a new file may be a copy of one that will be truncated soon: then it waits.

        `begun` has the first lines of the new files of this run, by folder and first line.
        """
        if not self.copies_wait_s or not listed.uri.startswith("file:"):
            return False
        since_s = self._copies.setdefault(listed.place, self.clock_s())
        if self.clock_s() - since_s >= self.copies_wait_s:
            return False
        if self._has_begun(listed, begun):
            # one of the two is indexed first
            return True
        folder, head = listed.uri.rpartition("/")[0], listed.head()
        return any(
            chain[0].uri.rpartition("/")[0] == folder
            and may_grow(chain[0])
            and listed.size_bytes >= end_of(chain)
            and has_text(listed, chain, head)
            for chain in self._chains.by_place.values()
        )

    def _has_begun(self, listed: SourceFile, begun: dict[tuple[str, bytes], list[bytes]]) -> bool:
        """Return whether a file of the same folder in `begun` begins like this one, and add this one otherwise."""
        first, *_ = lines = listed.head().split(b"\n", _FIRST_LINES)[:_FIRST_LINES]
        text, others = b"\n".join(lines), begun.setdefault((listed.uri.rpartition("/")[0], first), [])
        if any(text.startswith(other) or other.startswith(text) for other in others):
            return True
        others.append(text)
        return False

    def _is_there(self, chain: Sequence[LinkedSegment]) -> bool:
        """Return whether the file of segments still has their text."""
        last = chain[-1]
        try:
            with reopened(last.uri, self.index.config) as now:
                is_place = not last.uri.startswith("file:") or now.place == last.etag.rsplit("-", 2)[0]
                is_same = now.is_same(last.size_bytes, last.etag)
                return is_place and (is_same or has_text(now, chain, now.head()))
        except (InvalidArgument, ObjectNotFound):
            return False

    def _positions(self) -> dict[str, int]:
        return {**self.index.log_state.positions, **self.index.durable_positions()}

    def _learn_times(self) -> None:
        """Read times that are numbers, and those without a zone, as earlier runs did, unless unit or zone are given."""
        mapping, of_times = self.mapping, (self._positions(), self._store, self.mapping.time)
        self._unit, self._zone = time_unit_of(*of_times), time_zone_of(*of_times)
        if not mapping.has_numbers:
            self.unit_before = self._unit
        if not mapping.has_zoneless:
            self.zone_before = self._zone
        if mapping.unit is None and self._unit is not None:
            mapping.unit, mapping.is_guessed = cast(Unit, self._unit), True
        if mapping.zone is None and self._zone is not None:
            mapping.zone = TimeZone(self._zone)

    def _keep_times(self) -> None:
        """Put the unit of times that are numbers, and the zone of those that have none, before their first entry."""
        mapping, of_times = self.mapping, (self._store, self.mapping.time)
        if mapping.has_numbers and (unit := mapping.unit) is not None and unit != self._unit:
            self._put_position(*time_unit_position(self._positions(), *of_times, unit))
            self._unit = unit
        if mapping.has_zoneless and mapping.zone is not None and (zone := mapping.zone.name) != self._zone:
            self._put_position(*time_zone_position(self._positions(), *of_times, zone))
            self._zone = zone

    def _put_name(self, name: str) -> None:
        """Put a position whose name says something of the files, unless the index has it."""
        if self.index.durable_position(name) is None:
            self._put_position(name, 1)

    def _topics_of(self, batch: RowBatch) -> pa.DictionaryArray | npt.NDArray[np.object_]:
        """Return the topic of each row. A topic is named before its first entry."""
        if batch.topics is None:
            return np.broadcast_to(np.array(self.topic, np.object_), len(batch.positions))
        topics = batch.topics.cast(pa.string()).dictionary_encode()
        for topic in topics.dictionary.to_pylist():
            if topic not in self._topics:
                if len(self._topics) == _MOST_TOPICS:
                    raise InvalidArgument(
                        f"{self.mapping.topic} has more than {_MOST_TOPICS:,} values, the last one {topic!r:.80}: "
                        "choose another field for --topic, and make this one a --key"
                    )
                self._put_name(files_topic(topic))
                self._topics.add(topic)
        return topics

    def _put_position(self, source: str, position: int) -> None:
        self.patient(NO_ENTRIES, source, position)

    def _put_at(self, columns: dict[str, Any], position: int) -> None:
        """Put entries and the position of the log. If rows are archived, they wait for that."""
        if self._archiver is None:
            self.patient(columns, self._store, position)
            return
        self._waiting.append((columns, position))
        if self._archiver.size_bytes >= SEGMENT_BYTES:
            self._put_waiting()

    def _begin(self, listed: SourceFile, chain: list[LinkedSegment]) -> int:
        """Return the position from which on a known file is to be indexed."""
        uri, position = chain[-1].uri, self._chains.new_from(listed, chain)
        if position is None:
            self.counts.changed.append(uri)
        return position or 0

    def _reserved(self, listed: SourceFile, position: int) -> list[_Reserved]:
        """Return the file with an open segment at the end of the log; nothing if it has no bytes behind `position`."""
        head = listed.head()
        if is_torn(listed, head, position):
            self.counts.held_back.append(listed.uri)
            return []
        reserved = self._chains.reserved(listed, head, position, self.mapping.dialect, self.mapping.topic)
        return [] if reserved is None else [(listed, *reserved)]

    def _go_on(self, pending: Sequence[LinkedSegment], position: int = 0) -> None:
        """Read the segments that are not read, or not finished, from an offset on."""
        while pending:
            outcomes = self._all(self._read_again(segment, max(position, segment.start)) for segment in pending)
            pending = self._record(pending, outcomes)

    def _all(self, outcomes: Iterator[_Outcome]) -> list[_Outcome]:
        """Return all outcomes, once their rows are put. The rows before one that raises an error are put, too."""
        try:
            read = list(outcomes)
        except (CorruptFile, InvalidArgument, ObjectNotFound):
            self._put_waiting()
            raise
        self._put_waiting()
        return read

    def _put_waiting(self) -> None:
        """Archive the rows that wait, and then put their entries."""
        if self._archiver is not None:
            self._archiver.send()
        waiting, self._waiting = self._waiting, []
        for columns, position in waiting:
            self.patient(columns, self._store, position)

    def _read_again(self, segment: LinkedSegment, offset: int) -> _Outcome:
        """As `_read`, for a file that must be opened. One that is gone, or was changed, is finished at the offset."""
        with contextlib.ExitStack() as stack:
            try:
                listed = stack.enter_context(reopened(segment.uri, self.index.config))
            except (InvalidArgument, ObjectNotFound):
                listed = None
            head = b"" if listed is None else listed.head()
            if listed is not None and (
                listed.is_same(segment.size_bytes, segment.etag) or has_grown(listed, segment, head)
            ):
                if segment.topic_field != self.mapping.topic:
                    raise InvalidArgument(
                        f"{segment.uri} is indexed in part by --topic {TOPIC_FIELD}{segment.topic_field}: "
                        "pass that topic once"
                    )
                rows = rows_of_form(listed.file, segment.format, listed.size_bytes)
                return self._read(listed, rows, segment, offset)
        # its rows before the offset are indexed
        self.counts.changed.append(segment.uri)
        length = min(offset - segment.start, segment.length)
        finished = structs.replace(segment, is_open=False)
        if length < segment.length:
            # what was noted of the whole text is not so of its begin
            finished = structs.replace(finished, length=max(length, 1), **dict.fromkeys(_OF_TEXT))
        # before later rows move the position: it would say that the text behind the offset is indexed, too
        self._record([segment], [(finished if length else None, None)])
        return segment, None

    def _record(self, before: Sequence[LinkedSegment], after: Sequence[_Outcome]) -> list[LinkedSegment]:
        """Replace segments in the log by finished ones. Return the further ones, which the same record adds."""
        finished, gone, further = list[LinkedSegment](), list[tuple[str, int]](), list[LinkedSegment]()
        for segment, (other, position) in zip(before, after, strict=True):
            if other is None:
                gone.append(segment.place)
                self._chains.forget(segment)
            elif other != segment:
                finished.append(other)
                self._chains.note(other)
            if position is not None:
                # the text is longer than its bound. Its next line may be, too, and a packed text is read from its begin
                # for each segment
                length = 2 * segment.length
                further.append(structs.replace(segment, start=self._chains.end, position=position, length=length))
                self._chains.end = further[-1].end
        if self._points_sent:
            self.index.name_columns(self._points_sent)
            self._points_sent = []
        if finished or gone:
            self.index.link(further, finished, gone)
        return further

    def _outcomes(self, chunk: Sequence[_Reserved]) -> Iterator[_Outcome]:
        """Put the rows of files, small texts together, and yield the outcome of each file."""
        # an archive has the rows of one file after the other
        files = ((each, each[1], 0 if self.archive or each[2].position else each[2].length) for each in chunk)
        for group, texts in gathered(files):
            yield from self._read_together(group, texts)

    def _read_together(self, group: Sequence[_Reserved], texts: Sequence[SmallText]) -> Iterator[_Outcome]:
        """As `_outcomes`, of files whose `texts` are small and of one form."""
        if len(group) == 1:
            yield self._read(*group[0])
            return
        starts = np.array([segment.start for _, _, segment in group], np.int64)
        found = read_together(texts, starts, self.mapping)
        if found is None:
            # some file has a row that must be read by itself
            half = len(group) // 2
            yield from self._read_together(group[:half], texts[:half])
            yield from self._read_together(group[half:], texts[half:])
            return
        batch, readings = found
        self._put(group[0][0], replace(batch, end=group[-1][2].end), 0, 0)
        for (listed, _, segment), reading in zip(group, readings, strict=True):
            self.counts.read_files += 1
            self.counts.read_bytes += listed.size_bytes
            # an object that one request has read needs no further one
            if isinstance(listed.file, LocalFile) and has_changed(listed, segment):
                self.counts.changed_while_read.append(listed.uri)
            finished = structs.replace(
                segment,
                length=reading.end,
                rows=reading.rows,
                times=reading.times,
                blocks=reading.blocks,
                is_open=False,
                lines=reading.lines,
            )
            yield finished, None
        self.progress(self.counts.read_bytes)

    def _read(self, listed: SourceFile, rows: RowFile, segment: LinkedSegment, offset: int = 0) -> _Outcome:
        """Put the rows of a segment from an offset on."""
        shift, begun_bytes = segment.start - segment.position, self.counts.read_bytes
        reading = rows.reading(self.mapping, segment.position, segment.position + segment.length, whole=self.archive)
        if rows.is_text and reading.lines_before is None:
            reading.lines_before = self._chains.lines_before(listed, segment)
        count, times = 0, None
        for batch in reading.batches(max(offset, segment.start) - shift):
            self._put(listed, batch, shift, max(offset, segment.start))
            count, times = count + batch.rows + len(batch.bad), joined_times(times, batch.times)
            if len(reading.points) >= MOST_POINTS:
                self._send_points(segment, reading, batch.end + shift)
            self.progress(begun_bytes + min(batch.end - segment.position, listed.size_bytes))
        self._send_points(segment, reading, reading.end + shift)
        # the position must not pass what the file may get within the segment, before a record has made that shorter
        may_get_more = reading.is_whole and reading.end + shift < segment.end and segment.is_open and may_grow(segment)
        if not may_get_more:
            self._put_at(NO_ENTRIES, segment.end)
        self.counts.read_files += 1
        self.counts.read_bytes = begun_bytes + listed.size_bytes
        self.progress(self.counts.read_bytes)
        if reading.held_back_bytes:
            self.counts.held_back.append(listed.uri)
        is_large = reading.end - segment.position > _ONE_PIECE_BYTES
        if is_large and segment.format.endswith(("+xz", "+zstd")) and not reading.points:
            self.counts.in_one_piece.append(listed.uri)
        if has_changed(listed, segment):
            # the next run indexes it again as a whole. Checksums prevent that other bytes pass for its rows
            self.counts.changed_while_read.append(listed.uri)
        if not segment.is_open:
            return segment, None
        length, further = reading.end - segment.position, None if reading.is_whole else reading.end
        finished: LinkedSegment | None = None
        if length:
            is_counted = offset <= segment.start
            finished = structs.replace(
                segment,
                length=length,
                rows=count if is_counted else None,
                times=times if is_counted else None,
                blocks=reading.blocks,
                is_open=False,
                lines=reading.lines,
            )
        if may_get_more:
            self._record([segment], [(finished, None)])
            self._put_at(NO_ENTRIES, segment.end)
            return segment, None
        return finished, further

    def _send_points(self, segment: LinkedSegment, reading: RowReading, end: int) -> None:
        """Archive the restart points of a segment before an offset. The last one stays: it is for later offsets, too.

        A run that is killed may lose them. Then a row costs the decompression from the begin of its file.
        """
        begin, shift = max(segment.start, self._points_end), segment.start - segment.position
        if points := taken_points(reading.points, begin, end, shift):
            place = points_store(self._store), begin
            if self.index.send_columns(*place, end - begin, encode_points(points)):
                self._points_sent.append(place)
            self._points_end = end

    def _columns(self, batch: RowBatch, shift: int) -> dict[str, Any]:
        """Return the columns of the entries of rows; their offsets are their positions and `shift`."""
        return {
            "topic": self._topics_of(batch),
            "queue_id": np.broadcast_to(np.int64(self._queue_id), len(batch.positions)),
            "key": batch.keys,
            "offset": batch.positions + shift,
            "size": batch.sizes,
            "timestamp_ms": batch.times_ms,
        }

    def _put(self, listed: SourceFile, batch: RowBatch, shift: int, first: int) -> None:
        if batch.bad and not self.skip_bad:
            bad = batch.bad[0]
            raise InvalidArgument(f"{listed.uri}, {bad.where}: {bad.problem}; --skip-bad leaves such rows out")
        self._keep_times()
        entries, columns = batch.entries, self._columns(batch, shift)
        if self._archiver is not None:
            topics = columns["topic"]
            of_rows = topics if batch.topics is not None else pa.array(topics)
            self._archiver.add(of_rows, listed.uri, batch, shift, first)
        self._put_at(columns, batch.end + shift)
        counts = self.counts
        counts.rows, counts.entries = counts.rows + batch.rows, counts.entries + entries
        counts.keyless, counts.skipped = counts.keyless + batch.keyless, counts.skipped + len(batch.bad)
        for bad in batch.bad[: max(0, FIRST - len(counts.skipped_first))]:
            counts.skipped_first.append({"where": f"{listed.uri}, {bad.where}", "problem": bad.problem})


def check_queue(topic: str, batches: Iterable[pa.RecordBatch]) -> None:
    """Raise `InvalidArgument` if a topic's entries have the queue of files before any file: they may hide rows."""
    if any(np.any(entries["queue_id"].to_numpy() == FILES_QUEUE) for entries in batches):
        raise InvalidArgument(
            f"queue {FILES_QUEUE} of topic {topic!r} has entries that are not rows of files: choose another --topic, "
            "so that offsets of one do not hide those of the other"
        )


def joined_times(times: Times | None, more: Times | None) -> Times | None:
    """Return the least and the greatest of the times of two parts."""
    if times is None or more is None:
        return times or more
    return min(times[0], more[0]), max(times[1], more[1])
