"""Links the files of a topic: indexes their rows, and leaves the rows where they are.

The files of a topic are one log. Files whose rows have their topic in a field are one log, too, for all topics. A
record of the storage's log gives each file a range of offsets before its first entry. An entry's offset is the first
offset of its file's segment and the position of its row, its size the bytes of the row. The source's position is an
offset of this log, so it says for all files at once what is indexed. Segments are read in the order of their offsets;
one that ends behind the position is read on from there. A killed run loses and doubles nothing. Positions do not grow
with the number of files.

Which listed file has the rows of which segments is decided before anything is read (`known_files.py`). Rows that are
read anew get new offsets. The record that reserves them says which old ones they replace. One thread.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import structs

from tiered_index.connectors.documents import document_of, of_store, times_in, with_times
from tiered_index.connectors.files.added_keys import NO_ENTRIES, AddedKeys, KeyCounts
from tiered_index.connectors.files.damaged import DamageCounts, DamagedFiles, WrittenFiles
from tiered_index.connectors.files.first_rows import first_problem
from tiered_index.connectors.files.identity import Cut, OldOffsets, Other, what_is
from tiered_index.connectors.files.known_files import (
    TORN,
    UNKNOWN_FORM,
    KnownFiles,
    Plan,
    UnreadFile,
    may_grow,
    unread_stamp,
)
from tiered_index.connectors.files.listing import HEAD_BYTES, FileMoved, LinkedFiles, SourceFile, as_it_is
from tiered_index.connectors.files.row_archive import (
    SEGMENT_BYTES,
    CopiedOffsets,
    CopiedTexts,
    RowArchiver,
    check_reread,
    copied_from,
)
from tiered_index.connectors.files.rows import restart
from tiered_index.connectors.files.rows.batch import UNREADABLE, Damage, RowBatch, RowFile, RowReading
from tiered_index.connectors.files.rows.forms import rows_of_form
from tiered_index.connectors.files.rows.mapping import TOPIC_FIELD, RowMapping, Unit
from tiered_index.connectors.files.rows.places import HeldFile, StoredFile
from tiered_index.connectors.files.rows.restart import RESTARTED, PointedText, RestartPoint, encode_points, taken_points
from tiered_index.connectors.files.rows.small import SmallText, gathered, read_together
from tiered_index.connectors.files.rows.table import ColumnsReading
from tiered_index.connectors.files.rows.text import BLOCK_BYTES, decompressed, text_before_damage
from tiered_index.connectors.files.rows.zone import TimeZone
from tiered_index.connectors.registry import FILES
from tiered_index.connectors.source import FIRST, Put, ReadTime
from tiered_index.errors import BackPressure, CorruptFile, InvalidArgument, ObjectNotFound, StorageUnavailable
from tiered_index.format.names import TOPICS_QUEUE, linked_store, points_store
from tiered_index.format.segments.segment import LinkedSegment, Times
from tiered_index.format.topic_documents import TopicDocument
from tiered_index.service.index import IndexService
from tiered_index.service.log.records import Replacement
from tiered_index.service.read.answers.rows import check_topic
from tiered_index.service.read.segments.places import FILES_QUEUE

# files whose offsets one record reserves, about the bytes that are read before a record finishes them, and the bytes of
# small files, which are in memory meanwhile
_AT_ONCE, _AT_ONCE_BYTES, _HELD_BYTES = 4096, 4 << 30, 32 << 20
MOST_POINTS = 1000
"""Restart points of a file that are kept in memory, some 14 KiB each."""
_ONE_PIECE_BYTES = 16 << 20
"""Text of a packed file without restart points of which the user is told."""
# most topics of files whose topic is a field: each is a position
_MOST_TOPICS = 1000


_Reading = tuple[SourceFile, RowFile | Damage | None, LinkedSegment]
"""A segment that is to be read, with its file and the rows of that, or why they can't be read; None: they are gone."""
_Reserved = tuple[list[_Reading], list[Replacement]]
"""Segments that are to be read, and what they replace."""
_Outcome = tuple[LinkedSegment | None, int | None]
"""A finished segment, and the position of the file at which a further one begins. None: it has no row; there is none.
"""


@dataclass
class FileCounts(DamageCounts):
    """The counts of one run. Lists have texts for people.

    - `changed`: URIs of files with other rows, so that their earlier ones can't be read any more.
    - `rewritten`: URIs of files whose rows from some place on are read anew, in place of the earlier ones.
    - `continued`: the number of files of which an earlier run has read rows, and this one the rest.
    - `reread`: URIs of files whose rows are read anew, because they were read in another way. `otherwise`:
      those of known files that were, too, and are not read, because they are not listed.
    - `copies`: URIs of files that are not read, because they are copies of others.
    - `lacking`: the number of files that were read and have no row with a key, by the key's path.
    """

    read_files: int = 0
    known: int = 0
    continued: int = 0
    rows: int = 0
    entries: int = 0
    keyless: int = 0
    skipped: int = 0
    read_bytes: int = 0
    lacking: dict[str, int] = field(default_factory=dict)
    skipped_first: list[dict[str, str]] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    rewritten: list[str] = field(default_factory=list)
    reread: list[str] = field(default_factory=list)
    otherwise: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)
    changed_while_read: list[str] = field(default_factory=list)
    held_back: list[str] = field(default_factory=list)
    in_one_piece: list[str] = field(default_factory=list)
    keys: KeyCounts = field(default_factory=KeyCounts)

    @property
    def is_none_read(self) -> bool:
        """Whether no row of any file could be read, because all are damaged."""
        has_known = self.known > self.known_damaged or self.continued > 0
        return self.damaged + self.skipped > 0 and not self.rows and not has_known


@dataclass
class FileLinker:
    """Indexes the files of one topic, or those whose rows have their topic in a field of the mapping (`topic` None).

    `progress` gets the bytes of files that were read. A file is indexed as far as it can be read, and rows that are no
    entries are passed over; all are counted. If the run `is_strict`, the first damaged file ends it, and without
    `skip_bad` the first such row.
    `archive`: copy the rows into the archive. New rows are indexed by all keys of the topic, less `dropped_keys`.
    A `run` reads known rows again for new keys for about `reread_s`, and the next one goes on. A file that has no end
    yet waits until it has stood still for `still_s`.
    """

    index: IndexService
    topic: str | None
    mapping: RowMapping
    patient: Put
    skip_bad: bool = False
    is_strict: bool = False
    progress: Callable[[int], object] = lambda size: None
    counts: FileCounts = field(default_factory=FileCounts)
    archive: bool = False
    dropped_keys: Sequence[str] = ()
    reread_s: float = math.inf
    still_s: float = 0.0
    clock_s: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        assert (self.topic is None) == (self.mapping.topic is not None), "the topic is a name or a field"
        self._queue_id = TOPICS_QUEUE if self.topic is None else FILES_QUEUE
        self._store = linked_store("" if self.topic is None else check_topic(self.topic), self._queue_id)
        # the time before which all rows are put, of a run that follows the files
        self._read_time: ReadTime | None = None
        self._told_rows = 0
        self._topics = set[str]()
        self._document = document_of(FILES, {"store": self._store})
        self._archiver = RowArchiver(self.index, self._store) if self.archive else None
        # the offset before which restart points are archived, and the places of objects without a name in the log
        self._points_end, self._points_sent = 0, list[tuple[str, int]]()
        # columns and positions whose rows are not archived yet
        self._waiting: list[tuple[dict[str, Any], int]] = []
        self._known = KnownFiles(self._store)
        self._damaged = DamagedFiles(self.counts, self.mapping, is_strict=self.is_strict)
        self._written: WrittenFiles | None = None
        # whether files of the last plan are still being written
        self._waits = False
        # the offsets that wait for a new reading, by the first offset of its open segment
        self._replaced: dict[int, tuple[OldOffsets, ...]] = {}
        # the rows with archived copies that a new reading leaves out, and the names of its file, by the same
        self._copied: dict[int, tuple[CopiedTexts, list[str]]] = {}
        self._is_begun = False
        self._wanted = self.mapping.given
        self._given, self._keys = self.mapping, AddedKeys(self.index, self._store, self.patient, self._columns)
        self.counts.keys = self._keys.counts
        self.unit_before: str | None = None
        """The unit of times that are numbers by earlier runs; None: there was no such time."""
        self._unit: str | None = None
        self.zone_before: str | None = None
        """The zone of times without one by earlier runs; None: they are UTC."""
        self._zone: str | None = None
        self.is_whole = False
        """Whether the last run has read all that its files had."""

    @property
    def store(self) -> str:
        """The name under which the index keeps the position."""
        return self._store

    @property
    def position(self) -> int:
        """The offset before which all rows are durable."""
        # a job may have published rows since the index was opened
        published = self.index.log_state.positions.get(self._store, 0)
        return max(self.index.durable_position(self._store) or 0, published)

    def begin_again(self) -> None:
        """Forget the state of the log: the next `run` reads it again, and continues after an error."""
        self._is_begun = False

    def run(self, files: Sequence[SourceFile], read_ms: int | None = None) -> FileCounts:
        """Index the rows of `files` that are not indexed yet, and all that an earlier run has not finished.

        Of a follower, `read_ms` is the time before these files were listed, in epoch milliseconds; 0: some could not
        be listed. The index says that all rows before it are put, if all of these files could be read. Rows that have
        no end yet don't count.

        Raises the errors of the index and of the storages; if it `is_strict`, `InvalidArgument` for a row that is no
        entry, and the errors of damaged files.
        """
        is_first, self._is_begun = not self._is_begun, True
        if is_first:
            self._learn()
        if self._read_time is None and read_ms is not None:
            source = "files-topics:-" if self.topic is None else "files:-"
            self._read_time = ReadTime(self.index, source, self.topic or "", put=self.patient)
        moved, self._damaged.are_read_later = len(self.counts.changed_while_read), False
        self.is_whole = False
        with contextlib.closing(LinkedFiles(self.index.config)) as opened:
            if self._run_plan(files, opened, is_first=is_first).is_first_part:
                self._run_plan(files, opened)
        has_moved = len(self.counts.changed_while_read) > moved
        self.is_whole = not (has_moved or self._damaged.are_read_later or self._waits)
        if self.is_whole:
            self._tell(read_ms or 0, is_due=self.counts.rows > self._told_rows)
        if self._has_unpublished:
            # the new rows are answers once they are in the storage, also those of a run that was killed
            self.index.seal()
            with contextlib.suppress(StorageUnavailable, BackPressure):
                self.index.run_lifecycle()
        until_s = self.clock_s() + self.reread_s
        if not self._has_unpublished:
            # otherwise the old rows are answers still, and would lack the keys
            self._keys.run(self.mapping, files, lambda: self.clock_s() < until_s)
        return self.counts

    def end(self) -> None:
        """Put the time before which all rows are put, for a follower that ends."""
        self._tell(is_due=True)

    def _tell(self, read_ms: int = 0, *, is_due: bool) -> None:
        for told in () if self._read_time is None else self._read_time.told(read_ms, is_due=is_due):
            self.patient(told.columns, told.source, told.position)
            self._told_rows = self.counts.rows

    @property
    def _has_unpublished(self) -> bool:
        """Whether old rows are answers until the storage has those of a newer reading."""
        replaced = self.index.log_state.expired.replaced.stores.get(self._store)
        return replaced is not None and bool(replaced.readings)

    def _run_plan(self, files: Sequence[SourceFile], opened: LinkedFiles, *, is_first: bool = False) -> Plan:
        """Plan what is to be read, and read it. `is_first`: the keys are settled, too."""
        self.counts.known = self.counts.known_damaged = 0
        self.counts.known_damaged_first.clear()
        plan = self._known.plan(
            self._without_written(files),
            lambda uri: as_it_is(opened.file(uri, 0)),
            self._wanted,
            self._damaged.is_known,
        )
        check_reread(self._copied_offsets(), plan)
        self._count(plan)
        self._replaced, rests, of_rests = {}, list[_Reading](), list[Replacement]()
        for _, (readings, replaced) in self._reserved_by_keys([unread for unread in plan.unread if unread.is_rest]):
            rests, of_rests = rests + readings, of_rests + replaced
        self._state(plan, rests, of_rests)
        for packed in plan.packed:
            self._point(*packed)
        # rows of a run that was killed before it put any have the keys of this one
        is_new = is_first and not self._keys.known()
        if is_new:
            self._settle(self.position)
        self._resume(plan, rests)
        if is_first and not is_new:
            self._settle(max(self.position, self._known.end))
        keys, others = self.mapping.keys, [unread for unread in plan.unread if not unread.is_rest]
        for dropped, (readings, replaced) in self._reserved_by_keys(others):
            if readings or replaced:
                self.index.link([segment for _, _, segment in readings], [], [], replaced)
            self.mapping = self.mapping.with_keys([*keys, *dropped])
            self._index(readings)
        self.mapping = self.mapping.with_keys(keys)
        return plan

    def _reserved_by_keys(self, unread: Sequence[UnreadFile]) -> Iterator[tuple[list[str], _Reserved]]:
        """Yield results of `_reserved`, with the dropped keys of the rows.

        Rows that are read anew keep the keys that they had.
        """

        def dropped_keys(unread: UnreadFile) -> list[str]:
            return self._keys.dropped_in([(start, end) for start, end, _ in unread.old]) if unread.old else []

        for dropped, alike in groupby(sorted(unread, key=dropped_keys), dropped_keys):
            waiting = deque(alike)
            while waiting:
                yield dropped, self._reserved(waiting, dropped)

    def _settle(self, end: int) -> None:
        """Settle the keys of the log. Rows before offset `end` are read again for new ones."""
        # before the first entry by a new one
        # a run that was killed before its first entry has put its keys only
        self._describe(keys=sorted({*self._document.key_rules, *self._keys.ever(), *self._given.keys}))
        if self.topic is not None:
            # before offsets are reserved for rows of a topic of another connector
            self._name_topics([self.topic])
        self.mapping = self.mapping.with_keys(self._keys.settle(self._given.keys, self.dropped_keys, end))

    def _without_written(self, files: Sequence[SourceFile]) -> Sequence[SourceFile]:
        """Return the files without those that are still being written, unless these are read at once."""
        self._waits = False
        if not self.still_s:
            return files
        self._written = self._written or WrittenFiles(self.still_s, self.clock_s)
        others = list[SourceFile]()
        for listed in files:
            with self._damaged.passed_over(listed), contextlib.suppress(FileMoved):
                if self._known.is_as_it_was(listed) or not self._written.has(listed):
                    others.append(listed)
        self._waits = len(others) < len(files)
        return others

    def _learn(self) -> None:
        """Learn the segments of the log."""
        self._waiting = []
        documents = self.index.topic_documents()
        self._document = of_store(documents.values(), self._store) or self._document
        if self.topic is None:
            of_others = {topic for topic, document in documents.items() if document.connector != FILES}
            self._given = replace(self._given, of_others=frozenset(of_others))
        self.index.flush()
        self._put_copied()
        segments = self.index.segment_archive.segments()
        self._known.learn(segments, self.position)
        self._known.end = max(self._known.end, self._keys.end())
        self._points_end, self._points_sent = segments.end(points_store(self._store)), []
        if self._archiver is not None:
            self._archiver.begin_again()
        if not self._known.end and self.topic is not None:
            with self.index.export(self.topic, allow_partial=True) as batches:
                check_queue(self.topic, batches)
        self.mapping = self._given
        self._learn_times()

    def _put_copied(self) -> None:
        """Put the entries of copied rows whose entries a killed run has not put: from then on the copies are the rows.

        So copies and entries agree, whatever this run is told, and whatever has become of the files.
        """
        for copied in copied_from(self.index.segment_archive, self._store, self.position):
            self._name_topics(copied.rows["topic"].unique().to_pylist())
            self.patient(copied.columns, self._store, copied.end)
            self.counts.rows += len(copied.rows)
            self.counts.entries += len(copied.columns)
            self.index.flush()

    def _count(self, plan: Plan) -> None:
        counts = self.counts
        counts.known += plan.known
        counts.changed += plan.lost
        counts.rewritten += plan.rewritten
        counts.otherwise += plan.otherwise
        counts.copies += plan.copies

    def _state(self, plan: Plan, rests: Sequence[_Reading], replaced: Sequence[Replacement]) -> None:
        """Let the log state what a plan says of known files, and the reserved `rests` with what these replace."""
        if plan.changed or plan.gone or plan.retired or plan.ended or rests or replaced:
            nothing = self._known.end, self._known.end
            retired = self._copied_offsets().without(plan.retired)
            ended = [each for old, new in plan.ended for each in self._replacements([old], new)]
            ended += [*self._replacements(retired, nothing), *replaced]
            self.index.link([segment for _, _, segment in rests], plan.changed, plan.gone, ended)

    def _copied_offsets(self) -> CopiedOffsets:
        return CopiedOffsets(self.index.segment_archive.segments(), self._store)

    def _replacements(self, old: Iterable[OldOffsets], new: tuple[int, int]) -> list[Replacement]:
        return [Replacement(self._store, each.start, each.end, *new, each.times) for each in old]

    def _resume(self, plan: Plan, rests: Sequence[_Reading]) -> None:
        """Read the segments that an earlier run has not finished, and the `rests` of such ones."""
        self._replaced |= {segment.start: self._known.waiting(segment) for _, segment in plan.resumed}
        # the log does not say which of them are read again, if all of their old rows have copies
        self._leave_out((segment, self._replaced[segment.start]) for _, segment in plan.resumed)
        rows_of_rests = {segment.start: rows for _, rows, segment in rests}
        of_rests = [(listed, segment) for listed, _, segment in rests]
        resumed = sorted([*plan.resumed, *of_rests], key=lambda of: of[1].start)
        try:
            # with the keys of that time, and by its rule for times
            mapping = self.mapping
            for (keys, rule), alike in groupby(resumed, lambda of: (self._keys.at(of[1].start), of[1].time_rule)):
                of_rule = mapping.with_times(rule)
                self.mapping = of_rule.with_keys(keys or self._given.keys)
                self._learn_times()
                readings = [
                    (listed, rows_of_rests.get(segment.start) or self._rows(listed, segment), segment)
                    for listed, segment in alike
                ]
                self._index(readings, self.position)
                if of_rule is mapping:
                    mapping = self.mapping.with_keys(mapping.keys)
            self.mapping = mapping
            self._learn_times()
        except InvalidArgument as error:
            raise InvalidArgument(
                f"{error}. An earlier run has begun this file, so this one must read it first"
            ) from error
        if resumed:
            self.index.flush()

    def _rows(self, listed: SourceFile, segment: LinkedSegment) -> RowFile | Damage | None:
        """Return the rows of a segment that an earlier run has begun, or why they can't be read."""
        if segment.format == UNKNOWN_FORM:
            # the next run looks at it
            return None
        if segment.topic_field != self.mapping.topic:
            raise InvalidArgument(
                f"{segment.uri} is indexed in part by --topic {TOPIC_FIELD}{segment.topic_field}: pass that topic once"
            )
        damages = list[Damage]()
        try:
            with self._damaged.passed_over(listed, damages.append):
                return rows_of_form(listed.file, segment.format, listed.size_bytes)
        except FileMoved:
            self.counts.changed_while_read.append(listed.uri)
        return damages[0] if damages else None

    def document(self, topic: str) -> TopicDocument:
        """Return the document of a topic of the rows. As `Source`."""
        return self._document

    def _describe(self, **facts: Any) -> None:
        """Note facts about the rows of the log in the documents of its topics, also of those that will come."""
        if facts.items() <= self._document.facts.items():
            return
        self._document = document_of(FILES, self._document.facts | facts)
        documents = self.index.topic_documents().items()
        self.index.describe_topics(
            [topic for topic, known in documents if known.facts.get("store") == self._store], self._document
        )

    def _learn_times(self) -> None:
        """Read times that are numbers, and those without a zone, as earlier runs did, unless unit or zone are given."""
        mapping, known = self.mapping, times_in(self._document).get(self.mapping.time, {})
        self._unit, self._zone = known.get("unit"), known.get("zone")
        if not mapping.has_numbers:
            self.unit_before = self._unit
        if not mapping.has_zoneless:
            self.zone_before = self._zone
        if mapping.unit is None and self._unit is not None:
            mapping.unit, mapping.is_guessed = cast(Unit, self._unit), True
        if mapping.zone is None and self._zone is not None:
            mapping.zone = TimeZone(self._zone)

    def _keep_times(self) -> None:
        """Note the unit of times that are numbers, and the zone of those that have none, before their first entry."""
        mapping = self.mapping
        if mapping.has_numbers and mapping.unit is not None:
            self._unit = mapping.unit
        if mapping.has_zoneless and mapping.zone is not None:
            self._zone = mapping.zone.name
        if times := with_times(self._document, mapping.time, self._unit, self._zone):
            self._describe(times=times)

    def _topics_of(self, batch: RowBatch) -> pa.DictionaryArray | npt.NDArray[np.object_]:
        """Return the topic of each row. A topic is named before its first entry."""
        if batch.topics is None:
            return np.broadcast_to(np.array(self.topic, np.object_), len(batch.positions))
        topics = batch.topics.cast(pa.string()).dictionary_encode()
        self._name_topics(topics.dictionary.to_pylist())
        return topics

    def _name_topics(self, topics: Iterable[str]) -> None:
        """Give topics their document, before their first entry."""
        new = [topic for topic in topics if topic not in self._topics]
        if len(self._topics) + len(new) > _MOST_TOPICS:
            raise InvalidArgument(
                f"{self.mapping.topic} has more than {_MOST_TOPICS:,} values, the last one {new[-1]!r:.80}: "
                "choose another field for --topic, and make this one a --key"
            )
        if new:
            # a topic that also has files of its own is described by their log, which has no other topic
            known = {topic: self.index.topic_document(topic) if self.topic is None else None for topic in new}
            here = [topic for topic, of in known.items() if of is None or of.facts.get("store") == self._store]
            self.index.describe_topics(here, self._document)
            self._topics |= {*new}

    def _put_at(self, columns: dict[str, Any], position: int) -> None:
        """Put entries and the position of the log. If rows are archived, they wait for that."""
        if self._archiver is None:
            self.patient(columns, self._store, position)
            return
        self._waiting.append((columns, position))
        if self._archiver.size_bytes >= SEGMENT_BYTES:
            self._put_waiting()

    def _reserved(self, waiting: deque[UnreadFile], dropped: Sequence[str]) -> _Reserved:
        """Return the next files with their open segments, and what these replace. One record must state both.

        Their rows have their keys by `dropped`, too.
        """
        readings, replaced, size_bytes, held_bytes = list[_Reading](), list[Replacement](), 0, 0
        again, copied = list[tuple[LinkedSegment, Sequence[OldOffsets]]](), self._copied_offsets()
        begin = self._known.end
        while waiting and len(readings) < _AT_ONCE and size_bytes < _AT_ONCE_BYTES and held_bytes < _HELD_BYTES:
            unread = waiting.popleft()
            listed = unread.listed
            reserved, damages, is_read = None, list[Damage](), False
            try:
                with self._damaged.passed_over(listed, damages.append):
                    if unread.is_reread and (problem := first_problem(listed, self.mapping)) is not None:
                        # what it had before is replaced by rows only
                        self._keep_times_of(listed, problem)
                        continue
                    self.counts.reread += [listed.uri] if unread.is_reread else []
                    reserved, is_read = self._known.reserved(unread, self.mapping), True
            except FileMoved:
                self.counts.changed_while_read.append(listed.uri)
            # what a file had before is replaced by rows only
            readings += [
                (listed, damage, self._known.of_unknown_form(listed, self.mapping.topic)) for damage in damages
            ]
            if not is_read:
                continue
            self.counts.continued += unread.position > 0
            old = copied.without(unread.old)
            if reserved is None:
                # the file ends where it was cut
                replaced += self._replacements(old, (self._known.end, self._known.end))
                continue
            if reserved == TORN:
                self.counts.held_back.append(listed.uri)
                continue
            readings.append((listed, *reserved))
            size_bytes += listed.size_bytes
            held_bytes += min(listed.size_bytes, HEAD_BYTES)
            segment = reserved[1]
            replaced += self._replacements(old, (segment.start, segment.end))
            if old:
                self._replaced[segment.start] = old
            if unread.old:
                again.append((segment, unread.old))
        for segment, _ in again[-1:]:
            # the copies of earlier rows of these files stayed answers, and the files may have the rows again
            old = copied.erased(self._known.offsets_without_file())
            self._replaced[segment.start] = (*self._replaced.get(segment.start, ()), *old)
            replaced += self._replacements(old, (segment.start, segment.end))
        self._leave_out(again)
        self._keys.keep(dropped, begin, self._known.end)
        return readings, replaced

    def _leave_out(self, again: Iterable[tuple[LinkedSegment, Sequence[OldOffsets]]]) -> None:
        """Let segments that are read in place of old offsets leave out the rows that stay answers by their copies."""
        copied: CopiedTexts | None = None
        for segment, old in again:
            if copied is None:
                copied = CopiedTexts(self.index.segment_archive, self._store, self._known.offsets_without_file())
            if copied:
                ranges = [(start, end) for start, end, _ in old]
                names = copied.names(segment.uri, ranges + self._known.offsets_before(segment)[:1])
                self._copied[segment.start] = copied, names

    def _keep_times_of(self, listed: SourceFile, problem: str) -> None:
        """Count a known file as one bad row, because it has no time where it was to be read anew."""
        told = f"{problem}; no row at its start is an entry, so all keep their times"
        if self.is_strict and not self.skip_bad:
            raise InvalidArgument(f"{listed.uri}, {told}")
        self.counts.skipped += 1
        if len(self.counts.skipped_first) < FIRST:
            self.counts.skipped_first.append({"where": listed.uri, "problem": told})

    def _index(self, readings: Sequence[_Reading], offset: int = 0) -> None:
        """Read segments to their ends, from an offset on."""
        while readings:
            readings = self._record(readings, self._all(self._outcomes(readings, offset)))

    def _outcomes(self, readings: Sequence[_Reading], offset: int) -> Iterator[_Outcome]:
        """Put the rows of segments from an offset on, those of small texts together, and yield the outcome of each."""

        def most_bytes(segment: LinkedSegment) -> int:
            # an archive has the rows of one file after the other
            is_new = segment.is_open and not segment.position and offset <= segment.start
            is_new = is_new and segment.start not in self._copied
            return segment.length if is_new and not self.archive else 0

        for group, texts in gathered((reading, reading[1], most_bytes(reading[2])) for reading in readings):
            yield from self._read_together(group, texts, offset)

    def _read_together(self, group: Sequence[_Reading], texts: Sequence[SmallText], offset: int) -> Iterator[_Outcome]:
        """As `_outcomes`, of files whose `texts` are small and of one form."""
        if len(group) == 1:
            yield self._read(*group[0], offset)
            return
        starts = np.array([segment.start for _, _, segment in group], np.int64)
        together = read_together(texts, starts, self.mapping)
        if together is None:
            # some file has a row that must be read by itself
            half = len(group) // 2
            yield from self._read_together(group[:half], texts[:half], offset)
            yield from self._read_together(group[half:], texts[half:], offset)
            return
        batch, small_readings = together
        self._put(group[0][0], replace(batch, end=group[-1][2].end), 0, 0)
        for (listed, _, segment), reading in zip(group, small_readings, strict=True):
            self.counts.read_files += 1
            self.counts.read_bytes += listed.size_bytes
            self._note_lacking(reading.has_keys if reading.rows else [])
            finished = structs.replace(
                segment,
                length=reading.end,
                rows=reading.rows,
                times=reading.times,
                blocks=reading.blocks,
                is_open=False,
                lines=reading.lines,
                time_rule=self.mapping.time_rule(),
            )
            yield finished, None
        self.progress(self.counts.read_bytes)

    def _all(self, outcomes: Iterator[_Outcome]) -> list[_Outcome]:
        """Return all outcomes, once their rows are put. The rows before one that raises an error are put, too."""
        try:
            read = list(outcomes)
        except UNREADABLE:
            self._put_waiting()
            raise
        self._put_waiting()
        return read

    def _put_waiting(self) -> None:
        """Archive the rows that wait, and then put their entries."""
        if self._archiver is not None:
            if self._archiver.size_bytes:
                self._keys.publish()
            self._archiver.archive()
        waiting, self._waiting = self._waiting, []
        for columns, position in waiting:
            self.patient(columns, self._store, position)

    def _record(self, before: Sequence[_Reading], after: Sequence[_Outcome]) -> list[_Reading]:
        """Replace segments in the log by finished ones. Return the further ones, which the same record adds."""
        finished, gone, further = list[LinkedSegment](), list[tuple[str, int]](), list[_Reading]()
        replaced = list[Replacement]()
        for (listed, rows, segment), (other, position) in zip(before, after, strict=True):
            if other is None:
                gone.append(segment.place)
            elif other != segment:
                finished.append(other)
            self._known.finish(segment, other)
            old = self._replaced.pop(segment.start, ())
            if other is None or other.end != segment.end:
                replaced += self._replacements(old[:1], (segment.start, segment.start if other is None else other.end))
            if position is not None:
                # the text is longer than its bound. Its next line may be, too, and a packed text is read from its begin
                # for each segment
                more = self._known.reserved_further(segment, position, 2 * segment.length)
                self._keys.keep(self.mapping.keys, more.start, more.end)
                further.append((listed, rows, more))
                replaced += self._replacements(old, (more.start, more.end))
                if old:
                    self._replaced[more.start] = old
                if (copied := self._copied.pop(segment.start, None)) is not None:
                    self._copied[more.start] = copied
            elif isinstance(rows, RowFile) and not _is_at_once(rows) and self._has_changed(listed, segment):
                # checksums prevent that other bytes pass for its rows, and the next run reads it again
                self.counts.changed_while_read.append(listed.uri)
        if self._points_sent:
            self.index.name_columns(self._points_sent)
            self._points_sent = []
        if finished or gone:
            self.index.link([segment for _, _, segment in further], finished, gone, replaced)
        return further

    def _has_changed(self, listed: SourceFile, segment: LinkedSegment) -> bool:
        """Return whether a file was written to since it was listed, other than to append to a text."""
        with contextlib.suppress(InvalidArgument, ObjectNotFound, CorruptFile):
            now, known = as_it_is(listed.file), self._known.at(segment.uri)
            if now.is_same(listed.size_bytes, listed.stamp) or known is None:
                return False
            return now.place != listed.place or isinstance(what_is(now, known), Cut | Other)
        # it is gone, which its rows say
        return False

    def _read(
        self, listed: SourceFile, rows: RowFile | Damage | None, segment: LinkedSegment, offset: int = 0
    ) -> _Outcome:
        """Put the rows of a segment from an offset on, as far as they can be read."""
        shift, begun_bytes = segment.start - segment.position, self.counts.read_bytes
        copied = self._copied.get(segment.start)
        damages, reading = [rows] if isinstance(rows, Damage) else list[Damage](), None
        with self._damaged.passed_over(listed, damages.append):
            if isinstance(rows, RowFile):
                end = segment.position + segment.length
                reading = rows.reading(self.mapping, segment.position, end, whole=self.archive or copied is not None)
                if isinstance(reading, ColumnsReading):
                    reading.sum_up()
        if not isinstance(rows, RowFile) or reading is None:
            self._put_at(NO_ENTRIES, segment.end)
            return self._finished(segment, offset - segment.start, 0, damages), None
        if rows.is_text and reading.lines_before is None:
            reading.lines_before = self._known.lines_before(segment)
        count, bad, times, has_keys = 0, 0, None, [False] * len(self.mapping.keys)
        for of_file in reading.batches(max(offset, segment.start) - shift):
            batch = of_file if copied is None else copied[0].left_out(of_file, copied[1])
            self._put(listed, batch, shift, max(offset, segment.start))
            count, bad = count + batch.rows + batch.bad_rows, bad + batch.bad_rows
            times = joined_times(times, batch.times)
            has_keys = [has or has_now for has, has_now in zip(has_keys, batch.has_keys or has_keys, strict=True)]
            if len(reading.points) >= MOST_POINTS:
                self._send_points(segment, reading, batch.end + shift)
            self.progress(begun_bytes + min(batch.end, listed.size_bytes))
        # a follower looks again at a quote that is not closed
        is_waiting = self.still_s > 0 and reading.held_back_bytes > 0
        # the rows before its end are those of the file that was listed
        has_moved = reading.damage is not None and isinstance(reading.damage.error, FileMoved)
        if has_moved:
            self.counts.changed_while_read.append(listed.uri)
        elif reading.damage is not None and not is_waiting:
            is_of_bytes = self._damaged.is_damaged(listed, reading.damage)
            # of a file that was read in part the rest is not looked for again as long as it is as it was
            damages += [reading.damage] if is_of_bytes or reading.end > segment.position else []
        self._send_points(segment, reading, reading.end + shift)
        # the position must not pass what the file may get within the segment, before a record has made that shorter
        has_rest = reading.is_whole and reading.end + shift < segment.end
        may_get_more = has_rest and segment.is_open and may_grow(segment.format)
        if not may_get_more:
            self._put_at(NO_ENTRIES, segment.end)
        if not segment.is_open or reading.is_whole or has_moved:
            # otherwise the file goes on in a further segment
            self.counts.read_files += 1
            self.counts.read_bytes = begun_bytes + listed.size_bytes
            self.progress(self.counts.read_bytes)
        self._note_lacking(has_keys if count > bad else [])
        if reading.held_back_bytes and (is_waiting or reading.damage is None):
            self.counts.held_back.append(listed.uri)
        is_large, compression = reading.end - segment.position > _ONE_PIECE_BYTES, segment.format.partition("+")[2]
        if is_large and compression and not (reading.points or compression == "gzip" or self.archive):
            self.counts.in_one_piece.append(listed.uri)
        if not segment.is_open:
            return segment, None
        is_counted = offset <= segment.start
        # the checksums are those of the rows that an earlier run has put, if the file was not written to meanwhile
        has_changed = not is_counted and self._has_changed(listed, segment)
        learned = structs.replace(
            segment,
            rows=count if is_counted else None,
            times=times if is_counted else None,
            blocks=None if has_changed else reading.blocks or segment.blocks,
            lines=None if has_changed else reading.lines,
            etag=unread_stamp(listed.uri, listed.place) if has_moved or has_changed else segment.etag,
            time_rule=self.mapping.time_rule(is_whole=is_counted),
        )
        # a position at its end says only that all of it was read, and what that was is not known of a file that is gone
        put = offset - segment.start if offset < segment.end or has_moved else 0
        finished = self._finished(learned, put, reading.end - segment.position, damages)
        if may_get_more:
            self._record([(listed, rows, segment)], [(finished, None)])
            self._put_at(NO_ENTRIES, segment.end)
            return segment, None
        return finished, None if reading.is_whole or has_moved else reading.end

    def _finished(
        self, segment: LinkedSegment, put: int, length: int, damages: Sequence[Damage] = ()
    ) -> LinkedSegment | None:
        """Return a segment as it is finished, of which `length` positions were read; None: it has no row.

        Rows of its first `put` positions have entries of an earlier run.
        """
        if (put := min(put, segment.length)) > length:
            # what was noted of other positions is not so of these
            segment, length = structs.replace(segment, rows=None, times=None, blocks=None, lines=None), put
        finished = structs.replace(segment, length=length, is_open=False) if length else None
        for damage in damages[:1]:
            return self._damaged.unread(segment, damage) if finished is None else self._damaged.noted(finished, damage)
        return finished

    def _note_lacking(self, has_keys: Sequence[bool]) -> None:
        """Count a file for the keys that none of its rows has."""
        for key in [key for key, has in zip(self.mapping.keys, has_keys, strict=False) if not has]:
            self.counts.lacking[key] = self.counts.lacking.get(key, 0) + 1

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

    def _point(self, listed: SourceFile, segments: Sequence[LinkedSegment]) -> None:
        """Archive the restart points of a text that was packed after it was indexed. It is read once for them."""
        compression, last = segments[-1].format.rpartition("+")[2], segments[-1]
        if compression not in RESTARTED or last.position + last.length <= restart.SPACING_BYTES:
            return
        points, sent = list[RestartPoint](), list[tuple[str, int]]()
        # of a file that can't be read a row costs the decompression from its begin
        with contextlib.suppress(*UNREADABLE), decompressed(listed.file, compression, noting=True) as handle:
            while text_before_damage(listed.file, handle, compression, BLOCK_BYTES)[0]:
                points = cast(PointedText, handle).points
        for segment in segments:
            shift, place = segment.start - segment.position, (points_store(self._store), segment.start)
            taken = taken_points([*points], segment.start, segment.end, shift)
            if taken and self.index.send_columns(*place, segment.end - segment.start, encode_points(taken)):
                sent.append(place)
        if sent:
            self.index.name_columns(sent)

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
        if batch.bad and self.is_strict and not self.skip_bad:
            bad = batch.bad[0]
            raise InvalidArgument(f"{listed.uri}, {bad.where}: {bad.problem}; --skip-bad leaves such rows out")
        self._keep_times()
        entries, columns = batch.entries, self._columns(batch, shift)
        if self._archiver is not None:
            topics = columns["topic"]
            of_rows = topics if batch.topics is not None else pa.array(topics)
            self._archiver.add_rows(of_rows, listed.uri, batch, shift, first)
        self._put_at(columns, batch.end + shift)
        counts = self.counts
        counts.rows, counts.entries = counts.rows + batch.rows, counts.entries + entries
        counts.keyless, counts.skipped = counts.keyless + batch.keyless, counts.skipped + batch.bad_rows
        for bad in batch.bad[: max(0, FIRST - len(counts.skipped_first))]:
            counts.skipped_first.append({"where": f"{listed.uri}, {bad.where}", "problem": bad.problem})


def _is_at_once(rows: RowFile) -> bool:
    """Return whether one request has read all of an object."""
    return isinstance(rows.file, HeldFile) and isinstance(rows.file.file, StoredFile)


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
