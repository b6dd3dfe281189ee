"""Builds tables of the rows of files that stay where they are, and links the files: `spark build --topic`.

The driver lists the files, and plans what is new in each by the segments of the log, as `ingest` does. Tasks read the
files twice by the readers of `sources`: once for lengths, times and checksums, and once for entries, whose offsets are
known by then. The first reading sends the restart points of packed text, too. One record publishes the tables, the
segments of the files, their points, and the source's position. So offsets, segments and answers are those of `ingest`,
and each file is indexed once, however often tasks are repeated. Memory of a task: some blocks of a file, and some
restart points.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa
from msgspec import structs

from tiered_index.base.clock import Clock, SystemClock
from tiered_index.base.kernels import crc32
from tiered_index.config import IndexConfig
from tiered_index.connectors.documents import document_of, key_rules, of_store, times_in, with_times
from tiered_index.connectors.files.damaged import DamageCounts, DamagedFiles
from tiered_index.connectors.files.first_rows import FieldSearch, first_problem
from tiered_index.connectors.files.identity import OldOffsets
from tiered_index.connectors.files.known_files import TORN, KnownFiles, Plan, offsets_end
from tiered_index.connectors.files.linked import MOST_POINTS, check_queue, joined_times
from tiered_index.connectors.files.listing import LinkedFiles, SourceFile, as_it_is, listed_files
from tiered_index.connectors.files.row_archive import CopiedOffsets, check_reread
from tiered_index.connectors.files.rows.batch import Damage, RowBatch, RowFile, RowReading
from tiered_index.connectors.files.rows.forms import rows_of_form
from tiered_index.connectors.files.rows.mapping import Dialect, RowMapping, RowRule
from tiered_index.connectors.files.rows.parquet import ParquetTable
from tiered_index.connectors.files.rows.places import local_path
from tiered_index.connectors.files.rows.restart import RestartPoint, send_points, taken_points
from tiered_index.connectors.files.rows.table import TABLES, ColumnsFile, ColumnsReading
from tiered_index.connectors.files.rows.zone import TimeZone, UnclearTimes
from tiered_index.connectors.registry import FILES
from tiered_index.errors import CorruptFile, InvalidArgument, ObjectNotFound
from tiered_index.errors import listed as listed_names
from tiered_index.format.names import TOPICS_QUEUE, linked_store, rows_store
from tiered_index.format.schema import Schema
from tiered_index.format.segments.segment import LinkedSegment, Segment
from tiered_index.format.topic_documents import Documents, TopicDocument, new_revisions
from tiered_index.service.jobs.segments.catalogs import check_behind, send_catalog
from tiered_index.service.jobs.segments.linking import link
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.publication import FinishedObject, Publication, SentObject
from tiered_index.service.log.records import ArchivedSegment, LogRecord, Replacement, latest_ms
from tiered_index.service.log.state import LogState
from tiered_index.service.log.topic_keys import added_positions, rules_of
from tiered_index.service.read.answers.rows import check_topic
from tiered_index.service.read.segments.places import FILES_QUEUE
from tiered_index.service.read.segments.segments import Segments, names_object
from tiered_index.service.reader import IndexReader
from tiered_index.spark.addresses import AddressOf, StorageAddress
from tiered_index.spark.failures import typed_errors
from tiered_index.spark.metrics import described
from tiered_index.spark.versions import DRIVER_VERSION, DriverVersion
from tiered_index.spark.workers import between_tasks
from tiered_index.spark.writing.build import BuildResult, BuiltIndex, expected_result
from tiered_index.spark.writing.census import HAS_KEY, Census, WindowScale
from tiered_index.spark.writing.files import check_stored_folder, row_ends
from tiered_index.spark.writing.sources import Entries, take_census
from tiered_index.storage.base import Storage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# about the bytes of files that a task reads, most files of one, and about the rows of a part of a Parquet file
_TASK_BYTES, _TASK_FILES, _PART_ROWS = 256 << 20, 512, 1 << 20
# bad rows that are named
_NAMED = 10
_NAMES = ("topic", "queue_id", "key", "offset", "size", "timestamp_ms")


@dataclass(frozen=True, slots=True)
class RowsOfFiles:
    """The fields of rows of files.

    - `keys`: the paths of the keys: JMESPaths, or names of columns. Each may have a name, as in ``order=order_id``.
    - `time`: the path of the time: ISO 8601, a date, or a number.
    - `unit`: the unit of times that are numbers, ``s``, ``ms``, ``us`` or ``ns``; None: the first one decides.
    - `topic`: the topic of all rows; None: it is at the path `topic_path`.
    - `topic_path`: the path of the topic.
    - `dialect`: the characters of CSV; None: the header of a file decides.
    - `is_guessed`: whether the first number decided `unit` (see `RowMapping`).
    - `zone`: the zone of times that have none, such as ``Europe/Berlin``; None: that of earlier runs, or UTC.
    """

    keys: tuple[str, ...]
    time: str
    unit: Any
    topic: str | None
    topic_path: str | None = None
    dialect: Dialect | None = None
    is_guessed: bool = False
    zone: str | None = None

    def mapping(self) -> RowMapping:
        """Return the mapping, which may decide the unit of times. Raises `InvalidArgument`."""
        zone = None if self.zone is None else TimeZone(self.zone)
        return RowMapping(self.keys, self.time, self.unit, self.topic_path, self.dialect, self.is_guessed, zone)

    def document_in(self, state: LogState) -> TopicDocument | None:
        """Return the document of the topics of earlier runs, or None."""
        return of_store((revision.document for revision in state.documents.values()), self.store)

    def with_times_of(self, state: LogState) -> RowsOfFiles:
        """Return them with unit and zone of earlier runs, by the state of an index, unless they have them."""
        known = times_in(self.document_in(state)).get(self.time, {})
        unit = known.get("unit") if self.unit is None else None
        rows = replace(self, zone=self.zone or known.get("zone"))
        return rows if unit is None else replace(rows, unit=unit, is_guessed=True)

    def documents_after(self, state: LogState, topics: Collection[str]) -> Documents:
        """Return the new documents of the topics of the log, for the record that adds rows of `topics`.

        Raises as `new_revisions`.
        """
        known = self.document_in(state)
        keys = {*key_rules(() if known is None else (known,)), *self.keys}
        facts: dict[str, Any] = {"store": self.store, "keys": sorted(keys)}
        if times := with_times(known, self.time, self.unit, self.zone):
            facts["times"] = times
        document = document_of(FILES, facts)
        of_log = (topic for topic, revision in state.documents.items() if revision.document == known)
        return new_revisions(state.documents, dict.fromkeys([*of_log, *topics], document))

    def with_times_read(self, units: Collection[str | None], *, has_zoneless: bool) -> RowsOfFiles:
        """Return them with the unit that tasks found, and without a zone that no time needed.

        Raises `InvalidArgument` for different units.
        """
        numeric_units = sorted(unit for unit in units if unit is not None)
        if len(numeric_units) > 1:
            told = " and ".join(numeric_units)
            raise InvalidArgument(f"times have the units {told} in different files: give their unit")
        return replace(self, unit=numeric_units[0] if numeric_units else None, zone=self.zone if has_zoneless else None)

    def with_keys_of(self, positions: Mapping[str, int]) -> RowsOfFiles:
        """Return them with all keys of the topic, by the positions of an index.

        Raises `InvalidArgument` for a key that is new.
        """
        known = rules_of(positions, self.store)
        if known and (new := [key for key in self.keys if key not in known]):
            raise InvalidArgument(
                f"{new[0]} is no key of this topic, which has {listed_names(known)}: "
                f"`tiered-index ingest ... --key {new[0]}` adds it, also for the rows that are known"
            )
        return replace(self, keys=tuple(dict.fromkeys((*self.keys, *known))))

    @property
    def queue_id(self) -> int:
        """The queue of the rows."""
        return TOPICS_QUEUE if self.topic is None else FILES_QUEUE

    @property
    def store(self) -> str:
        """The store of the segments. Raises `InvalidArgument` for a bad topic."""
        return linked_store("" if self.topic is None else check_topic(self.topic), self.queue_id)

    def columns(self, batch: RowBatch, shift: int) -> dict[str, Any]:
        """Return the entries of rows; their offsets are their positions and `shift`."""
        rows, keys = batch.by_entry()
        count, topics = len(rows), None if batch.topics is None else batch.topics.take(pa.array(rows))
        if topics is None:
            indices = pa.array(np.zeros(count, np.int32))
            topics = pa.DictionaryArray.from_arrays(indices, pa.array([self.topic], pa.string()))
        return {
            "topic": topics,
            "queue_id": pa.array(np.full(count, self.queue_id, np.int64)),
            "key": keys.combine_chunks(),
            "offset": pa.array(batch.positions[rows] + shift),
            "size": pa.array(batch.sizes[rows]),
            "timestamp_ms": pa.array(batch.times_ms[rows]),
        }


SentPoints: TypeAlias = tuple[ArchivedSegment, SentObject]
"""Restart points that a task sent."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """The rows of a segment at positions [`begin`, `end`) of its file, the `number`-th of a build.

    `end` None: to the file's end. `lines_before` is the number of lines before the part, None: not known.
    """

    number: int
    segment: LinkedSegment
    begin: int
    end: int | None
    lines_before: int | None = None


@dataclass(frozen=True, slots=True)
class PartFacts:
    """What a task learned of a part of a file: its number, and the part's rows as a segment that is finished.

    `unit` is that of times that are numbers, if the rows have some. `has_zoneless`: some times have no zone; `unclear`
    counts those that its clocks show twice, or not at all. `bad` names the first bad rows. `sent_points` are
    the restart points of the first part of a packed text. Those of a further part, whose offsets the driver decides,
    are its `points`.
    """

    number: int
    segment: LinkedSegment
    held_back: bool
    unit: str | None
    skipped: int
    bad: tuple[tuple[str, str], ...]
    sent_points: tuple[SentPoints, ...] = ()
    points: tuple[RestartPoint, ...] = ()
    damage: Damage | None = None
    has_zoneless: bool = False
    unclear: UnclearTimes = field(default_factory=UnclearTimes)


@dataclass(frozen=True)
class LinkedPartsReader:
    """Reads groups of parts of files in tasks. Restart points are sent to the storage of `index`; None: nowhere."""

    rows: RowsOfFiles
    config: IndexConfig
    address_of: AddressOf
    skip_bad: bool
    index: StorageAddress | None = None
    is_strict: bool = True
    version: DriverVersion = DRIVER_VERSION

    def __call__(self, groups: Iterable[Sequence[FilePart]], names: Sequence[str]) -> Iterator[pa.RecordBatch | Census]:
        """Yield the fields `names` of the entries; with `HAS_KEY` also the `PartFacts` of each part in a `Census`.

        Raises `InvalidArgument` for a row that is no entry, and for a file that changed before or meanwhile.
        """
        mapping, read = self.rows.mapping(), self._counted if HAS_KEY in names else self._entries
        with between_tasks(), contextlib.closing(LinkedFiles(self.config, self._storage)) as files:
            for part in itertools.chain.from_iterable(groups):
                segment = part.segment
                self._check_same(files, segment)
                file = files.file(segment.uri, segment.size_bytes)
                try:
                    opened = rows_of_form(file, segment.format, segment.size_bytes)
                    opened.reading(mapping, part.begin, part.begin)
                except (CorruptFile, InvalidArgument) as error:
                    if self.is_strict:
                        raise
                    if read == self._counted:
                        yield Census(parts=[_nothing_of(part, Damage(error, part.begin, ""))])
                    continue
                for made in read(part, opened, mapping):
                    yield made if isinstance(made, Census) else made.select(list(names))
                self._check_same(files, segment)

    def _counted(self, part: FilePart, file: RowFile, mapping: RowMapping) -> Iterator[pa.RecordBatch | Census]:
        segment, begin, lines_before = part.segment, part.begin, part.lines_before
        length = segment.length
        while True:
            bound = begin + length if part.end is None else part.end
            reading = file.reading(mapping, begin, bound)
            if isinstance(reading, ColumnsReading):
                reading.sum_up()
            if file.is_text and reading.lines_before is None:
                reading.lines_before = lines_before
            count, keyless, skipped, times = 0, 0, 0, None
            bad, sent, unclear = list[tuple[str, str]](), list[SentPoints](), mapping.unclear_times
            is_first, points_begin = begin == segment.position, segment.start
            for batch in reading.batches(begin):
                if is_first and len(reading.points) >= MOST_POINTS:
                    points_begin = self._send_points(segment, reading, points_begin, batch.end, sent)
                self._check_bad(segment, batch)
                count, keyless = count + batch.rows + batch.bad_rows, keyless + batch.keyless
                times, skipped = joined_times(times, batch.times), skipped + batch.bad_rows
                bad += [(f"{segment.uri}, {row.where}", row.problem) for row in batch.bad[: _NAMED - len(bad)]]
                yield self._batch(batch, 0)
            self._check_damage(reading)
            lines = reading.lines
            behind = bound if isinstance(file, ColumnsFile) else reading.end
            if is_first:
                self._send_points(segment, reading, points_begin, behind, sent)
            unit = mapping.unit if mapping.has_numbers else None
            blocks = reading.blocks or segment.blocks
            facts: dict[str, Any] = {"rows": count, "times": times, "blocks": blocks, "lines": lines}
            facts["time_rule"] = mapping.time_rule()
            mine = structs.replace(segment, position=begin, length=behind - begin, is_open=False, **facts)
            points = tuple(sent), () if is_first else tuple(reading.points)
            unclear = UnclearTimes(*np.subtract(mapping.unclear_times, unclear).tolist())
            of_times: dict[str, Any] = {"has_zoneless": mapping.has_zoneless, "unclear": unclear}
            is_cut = reading.held_back_bytes > 0 and reading.damage is None
            of_file = *points, reading.damage
            learned = PartFacts(part.number, mine, is_cut, unit, skipped, tuple(bad), *of_file, **of_times)
            yield Census(without_key=keyless, parts=[learned])
            if reading.is_whole or part.end is not None:
                return
            # a compressed text that is longer than its bound has a further segment, with twice the bound
            length *= 2
            begin, lines_before = reading.end, None if lines is None else lines[0] + sum(lines[1])

    def _entries(self, part: FilePart, file: RowFile, mapping: RowMapping) -> Iterator[pa.RecordBatch]:
        assert part.end is not None
        reading = file.reading(mapping, part.begin, part.end)
        for batch in reading.batches(part.begin):
            yield self._batch(batch, part.segment.start - part.segment.position)
        self._check_damage(reading)

    def _check_damage(self, reading: RowReading) -> None:
        damage = reading.damage
        if damage is not None and (self.is_strict or not isinstance(damage.error, CorruptFile | InvalidArgument)):
            raise damage.error

    def _batch(self, batch: RowBatch, shift: int) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict(self.rows.columns(batch, shift) | {HAS_KEY: pa.repeat(True, batch.entries)})

    def _send_points(
        self, segment: LinkedSegment, reading: RowReading, begin: int, end: int, sent: list[SentPoints]
    ) -> int:
        """Send the restart points from offset `begin` to position `end`. Return the offset of the next ones."""
        shift = segment.start - segment.position
        if self.index is None or not (points := taken_points(reading.points, begin, end + shift, shift)):
            return begin
        with self.index.open() as storage:
            log = StorageLog(storage, SystemClock())
            sent.append(send_points(log, self.rows.store, begin, end + shift, points))
        return end + shift

    def _check_bad(self, segment: LinkedSegment, batch: RowBatch) -> None:
        if batch.bad and self.is_strict and not self.skip_bad:
            bad = batch.bad[0]
            raise InvalidArgument(f"{segment.uri}, {bad.where}: {bad.problem}; --skip-bad leaves such rows out")

    def _storage(self, uri: str) -> Storage:
        return self.address_of(uri).open(any_names=True)

    def _check_same(self, files: LinkedFiles, segment: LinkedSegment) -> None:
        try:
            now = as_it_is(files.file(segment.uri, segment.size_bytes))
            is_same = now.is_same(segment.size_bytes, segment.etag) or _has_first_rows(now, segment)
        except ObjectNotFound as error:
            raise InvalidArgument(f"{segment.uri} was deleted while it was indexed: build again") from error
        if not is_same:
            raise InvalidArgument(f"{segment.uri} was changed while it was indexed: build again")


def _has_first_rows(now: SourceFile, segment: LinkedSegment) -> bool:
    """Return whether a file that was written to has the first rows of a segment, perhaps with more after them.

    Its other rows are compared by checksums when they are read again.
    """
    if segment.blocks is None or now.size_bytes < segment.size_bytes:
        return False
    length, (first, *_) = segment.blocks
    is_plain = segment.format not in TABLES and "+" not in segment.format
    return is_plain and crc32(now.part(segment.position, min(length, segment.length))) == first


@dataclass(frozen=True, kw_only=True)
class LinkedResult(BuildResult):
    """The result of a build of files: a `BuildResult`, and what was read.

    `rows` rows of `files` files with `read_bytes` bytes were read. `known` files were indexed before.

    `changed` are the URIs of files with another text than before, whose earlier rows can't be read any more;
    `rewritten` those whose rows from some place on were read again, in place of the earlier rows; `copies` those of
    files that are copies of others; and `held_back` those whose last line may not be whole. `skipped_rows` counts rows
    that are no entries, and `skipped_first` has place and problem of the first ones. `unit` is that of times that are
    numbers, `time_zone` that of times without one. `doubled_times` counts those that its clocks show twice, and
    `missing_times` those that they leave out.

    `damaged` counts files that could be read in part or not at all, and `damaged_first` names the first ones.
    `known_damaged` and `known_damaged_first` are those that an earlier run has found damaged.
    """

    files: int = 0
    known: int = 0
    rows: int = 0
    read_bytes: int = 0
    changed: tuple[str, ...] = ()
    rewritten: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    held_back: tuple[str, ...] = ()
    skipped_rows: int = 0
    skipped_first: tuple[tuple[str, str], ...] = ()
    damaged: int = 0
    damaged_first: tuple[dict[str, Any], ...] = ()
    known_damaged: int = 0
    known_damaged_first: tuple[dict[str, Any], ...] = ()
    unit: str | None = None
    time_zone: str | None = None
    doubled_times: int = 0
    missing_times: int = 0


@dataclass
class FilePlan:
    """What a build adds to the log of files: for each new file the rows and its open segment."""

    files: KnownFiles
    known: Plan
    """What the log must state of files that it knows."""
    new: list[tuple[SourceFile, RowFile, LinkedSegment]] = field(default_factory=list)
    old: dict[int, tuple[OldOffsets, ...]] = field(default_factory=dict)
    """The offsets that new segments replace, by the first offset of each."""
    held_back: list[str] = field(default_factory=list)
    damaged: DamagedFiles | None = None
    """The files that can't be read, or not as a whole; None: one ends the build."""
    unread: list[LinkedSegment] = field(default_factory=list)
    """The segments of those of which no row can be read."""
    # the end of all offsets before this build
    begin: int = 0
    # restart points of further segments: begin, end, and each with its offset
    points: list[tuple[int, int, list[tuple[int, RestartPoint]]]] = field(default_factory=list)

    @classmethod
    def of(
        cls, rows: RowsOfFiles, segments: Segments, files: Sequence[SourceFile], config: IndexConfig,
        damaged: DamagedFiles | None = None, wanted: RowRule | None = None,
    ) -> FilePlan:  # fmt: skip
        """Plan the segments of files. `wanted`: how times are to be read, if not as those of `rows`.

        Raises `InvalidArgument` if an `ingest` has not finished its own, for a file with other rows than before whose
        topic has archived copies, and as `check_reread`.
        """
        known, position = KnownFiles(rows.store), segments.state.positions.get(rows.store, 0)
        known.learn(segments, position)
        if unfinished := known.unfinished:
            raise InvalidArgument(
                f"{unfinished[0].uri} is being indexed by `ingest`, or its entries are not uploaded yet: "
                "let it end with --wait, then build again"
            )
        begin, mapping = known.end, rows.mapping()
        with contextlib.closing(LinkedFiles(config)) as opened:
            tried: tuple[Any, ...] = () if damaged is None else (damaged.is_known,)
            wanted = wanted or mapping.given
            of_known = known.plan(files, lambda uri: as_it_is(opened.file(uri, 0)), wanted, *tried)
            copied = CopiedOffsets(segments, rows.store)
            check_reread(copied, of_known)
            of_known.retired = [*copied.without(of_known.retired)]
            plan = cls(known, of_known, begin=begin, damaged=damaged)
        damages = list[tuple[SourceFile, Damage]]()
        for unread in plan.known.unread:
            listed, reserved, of_file = unread.listed, None, list[Damage]()
            if unread.is_reread and (problem := first_problem(listed, mapping)) is not None:
                raise InvalidArgument(f"{listed.uri}, {problem}. Its rows have other times: build without it")
            with contextlib.nullcontext() if damaged is None else damaged.passed_over(listed, of_file.append):
                reserved = known.reserved(unread, mapping)
            damages += [(listed, damage) for damage in of_file]
            if reserved == TORN:
                plan.held_back.append(listed.uri)
            elif reserved is not None:
                if unread.old and segments.end(rows_store(rows.store)):
                    raise InvalidArgument(
                        f"{listed.uri} has other rows than before, and rows of this topic have archived copies, which "
                        "stay answers: index it by `tiered-index ingest ... --archive`, which leaves out these rows"
                    )
                plan.new.append((listed, *reserved))
                if unread.old:
                    plan.old[reserved[1].start] = unread.old
        for listed, damage in damages:
            assert damaged is not None, "otherwise it is raised"
            plan.unread.append(damaged.unread(known.of_unknown_form(listed, rows.topic_path), damage))
        return plan

    def state_known(self, log: StorageLog) -> None:
        """Let the log state what is new of known files, before their new rows are published."""
        known, end = self.known, self.begin
        if known.changed or known.gone or known.retired:
            retired = [_replacement(self.files.store, old, (end, end)) for old in known.retired]
            link(log, None, [], known.changed, known.gone, retired)

    def replaced(self, segments: Iterable[LinkedSegment]) -> list[Replacement]:
        """Return what the new segments of files replace: those of `segments`, with their true ends."""
        ends = {segment.start: segment.end for segment in segments}
        return [
            _replacement(self.files.store, old, (segment.start, ends.get(segment.start, segment.start)))
            for _, _, segment in self.new
            for old in self.old.get(segment.start, ())
        ]

    def parts(self) -> Iterator[tuple[FilePart, int]]:
        """Yield the parts of all files for their first reading, and the bytes of each."""
        for number, (listed, rows, segment) in enumerate(self.new):
            ends: list[int | None] = [None]
            if isinstance(rows, ColumnsFile) and isinstance(rows.table, ParquetTable):
                ends = [*row_ends(rows.table.group_rows, _PART_ROWS)]
            begin, lines_before = segment.position, self.files.lines_before(segment)
            for end in ends:
                yield FilePart(number, segment, begin, end, lines_before), listed.size_bytes // len(ends)
                begin = end or begin

    def finished(self, learned: Sequence[PartFacts]) -> list[tuple[LinkedSegment, list[PartFacts]]]:
        """Return the segments of the files with their parts, by what tasks learned.

        Reserves offsets for the segments of files that need more than one.
        """
        of_file: dict[int, list[PartFacts]] = {}
        for part in sorted(learned, key=lambda part: (part.number, part.segment.position)):
            of_file.setdefault(part.number, []).append(part)
        made, further = list[tuple[LinkedSegment, list[PartFacts]]](), list[tuple[PartFacts, int]]()
        for number, (_, rows, _) in enumerate(self.new):
            parts = of_file[number]
            if not isinstance(rows, ColumnsFile):
                bound = self.new[number][2].length
                further += [(part, bound << later) for later, part in enumerate(parts[1:], 1)]
                del parts[1:]
            made.append((self._noted(_joined(parts), parts), parts))
        for part, bound in further:
            begin = self.files.end
            segment = self._noted(structs.replace(part.segment, start=begin), [part])
            made.append((segment, [part]))
            if points := taken_points(list(part.points), begin, segment.end, begin - segment.position):
                self.points.append((begin, segment.end, points))
            self.files.end += bound
        return sorted(((segment, parts) for segment, parts in made if segment.length), key=lambda of: of[0].start)

    def _noted(self, segment: LinkedSegment, parts: Sequence[PartFacts]) -> LinkedSegment:
        """Return a segment with the damage of its file, which is counted."""
        damages = [part.damage for part in parts if part.damage is not None]
        listed = self.new[parts[0].number][0]
        if self.damaged is None or not damages or not self.damaged.is_damaged(listed, damages[0]):
            return segment
        if segment.length and segment.rows:
            return self.damaged.noted(segment, damages[0])
        return self.damaged.unread(segment, damages[0])

    def parts_of(self, finished: Sequence[tuple[LinkedSegment, Sequence[PartFacts]]]) -> Iterator[tuple[FilePart, int]]:
        """Yield the parts of finished segments for their second reading, and the bytes of each."""
        counts = Counter(part.number for _, parts in finished for part in parts)
        for segment, parts in finished:
            without_sums = structs.replace(segment, blocks=None, lines=None)
            for part in parts:
                size, begin = self.new[part.number][0].size_bytes, part.segment.position
                if part.segment.length:
                    end = begin + part.segment.length
                    yield FilePart(part.number, without_sums, begin, end), size // counts[part.number]

    @property
    def offsets(self) -> tuple[int, int]:
        """The offsets [begin, end) of the new segments."""
        return self.begin, self.files.end


def _replacement(store: str, old: OldOffsets, new: tuple[int, int]) -> Replacement:
    return Replacement(store, old.start, old.end, *new, old.times)


def _nothing_of(part: FilePart, damage: Damage) -> PartFacts:
    """Return the facts of a part of a file of which no row can be read."""
    nothing = structs.replace(part.segment, position=part.begin, length=0, rows=0, is_open=False)
    return PartFacts(part.number, nothing, False, None, 0, (), damage=damage)


def _joined(parts: Sequence[PartFacts]) -> LinkedSegment:
    """Return the segment of neighbouring parts, which only Parquet has. Each has the sums of some blocks."""
    first, times = parts[0].segment, None
    of_parts = [part.segment.blocks for part in parts if part.segment.blocks is not None]
    sums = tuple(crc for _, of_part in of_parts for crc in of_part)
    blocks = (of_parts[0][0], sums) if len(of_parts) == len(parts) else None
    for part in parts:
        times = joined_times(times, part.segment.times)
    length, rows = (sum(getattr(part.segment, name) for part in parts) for name in ("length", "rows"))
    return structs.replace(first, length=length, rows=rows, times=times, blocks=blocks)


def _groups(parts: Iterable[tuple[FilePart, int]]) -> list[list[FilePart]]:
    """Return parts in groups, one for each task."""
    groups: list[list[FilePart]] = [[]]
    held = 0
    for part, size in parts:
        if groups[-1] and (held + size > _TASK_BYTES or len(groups[-1]) == _TASK_FILES):
            groups.append([])
            held = 0
        groups[-1].append(part)
        held += size
    return [group for group in groups if group]


def link_files(
    spark: SparkSession,
    sources: Sequence[str],
    rows: RowsOfFiles,
    *,
    storage: str,
    window: str | int = "1d",
    shards: int | str = "auto",
    config: IndexConfig | None = None,
    max_windows: int = 10_000,
    skip_bad: bool = False,
    strict: bool = False,
    dry_run: bool = False,
    clock: Clock | None = None,
) -> LinkedResult:
    """Index the rows of files of any form where they are. `sources` are files, folders, globs and prefixes.

    Offsets, segments and answers are those of `ingest` with the same files. Files that are indexed already are left
    out, and lines that were appended to a text are added. The tables are added to those that the windows have. Other
    arguments: see `build`.

    A file is indexed as far as it can be read, and rows that are no entries are skipped; the result names them.
    With `strict`, the first damaged file ends the build, and without `skip_bad` the first such row.

    Raises `InvalidArgument` for a file that changes meanwhile, and if an `ingest` of the same topic is not finished;
    `SchemaMismatch`, `JobOverdue`; the error of a file if none can be read: then nothing is published. After the
    storage's errors the outcome may be unknown; build again then.

    The function is long, because its steps share one plan.
    """
    settings, present = config or IndexConfig(), clock or SystemClock()
    # it is checked before the index is opened
    rows.mapping()
    scale = WindowScale.of(window, settings, present.now_ms())
    name = " and ".join([*sources[:2], *(["others"] if len(sources) > 2 else [])])
    with contextlib.ExitStack() as stack:
        index = stack.enter_context(BuiltIndex.opening(spark, storage, settings, present, {}))
        log, of_source = index.log, settings.changed(storage=storage, root=None)
        check_own_columns(index.genesis.layout.schema)
        wanted = rows.mapping().given
        rows = rows.with_keys_of(log.state.positions).with_times_of(log.state)
        if rows.topic is not None:
            rows.documents_after(log.state, [rows.topic])
        mapping = rows.mapping()
        damage_counts = DamageCounts()
        damaged = DamagedFiles(damage_counts, mapping, is_strict=strict)
        files = _listed(sources, of_source, stack)
        plan = FilePlan.of(rows, Segments(log.state, index.opened), files, of_source, damaged, wanted)
        if not plan.begin and rows.topic is not None and log.state.genesis is not None:
            with IndexReader.open(config=of_source, environment=False) as stored, stored.export(rows.topic) as batches:
                check_queue(rows.topic, batches)
        _decide(plan, mapping, rules_of(log.state.positions, rows.store))
        rows = replace(rows, unit=mapping.unit, is_guessed=rows.is_guessed or rows.unit is None)
        points_to = None if dry_run else index.meter.address(index.address)
        addresses = index.meter.sources(settings.s3, storage)
        reader = LinkedPartsReader(rows, of_source, addresses, skip_bad, points_to, strict)
        if not dry_run:
            plan.state_known(log)
        if not plan.new:
            if plan.unread and not dry_run:
                link(log, None, plan.unread, ())
            about_files, number = _about_files(plan, (), rows, damage_counts), log.state.number
            return LinkedResult(**about_files, dry_run=dry_run, log_number=number, metrics=index.meter.metrics)
        with typed_errors(f"reading {name}"), described(spark, "build: read files for lengths and windows"):
            entries = Entries.of_parts(spark, _groups(plan.parts()), _NAMES, reader)
            census = take_census(entries, scale, max_windows)
        parts = census.parts
        rows = rows.with_times_read(
            {part.unit for part in parts}, has_zoneless=any(part.has_zoneless for part in parts)
        )
        finished = plan.finished(parts)
        about_files = _about_files(plan, parts, rows, damage_counts)
        if not census.entries:
            if not about_files["rows"] and (damages := [part.damage for part in parts if part.damage is not None]):
                raise damages[0].error
            raise InvalidArgument(f"none of {about_files['rows']:,} rows of {name} has a key")
        topics = {topic for _, topic in census.topics}
        # before the tables are written
        rows.documents_after(log.state, topics)
        built = index.plan(census, scale, shards, max_windows)
        result = expected_result(built, census, settings, LinkedResult, **about_files)
        if dry_run:
            return replace(result, metrics=index.meter.metrics)
        of_points = [each for part in parts for each in part.sent_points]

        def publish(tables: list[FinishedObject], sent: list[SentObject]) -> tuple[LogState, int]:
            of_driver = [send_points(log, rows.store, *each) for each in plan.points]
            sent += [each for _, each in of_driver]
            segments = [*(segment for segment, _ in finished), *plan.unread]
            every: list[Segment] = [*segments, *(archived for archived, _ in (*of_points, *of_driver))]
            replaced = plan.replaced(segments)
            return publish_files(tables, sent, every, rows, topics, plan.offsets, log, replaced), 0

        second = _groups(plan.parts_of(finished))
        entries = Entries.of_parts(spark, second, _NAMES, replace(reader, rows=rows))
        return index.write(result, entries, built, name, publish, [each for _, each in of_points])


def _listed(sources: Sequence[str], config: IndexConfig, stack: contextlib.ExitStack) -> Sequence[SourceFile]:
    """Return the files of sources, which `stack` closes. Raises `InvalidArgument`."""
    files = stack.enter_context(listed_files(sources, config))
    for source in sources:
        if local_path(source) is None:
            check_stored_folder(source, files, config)
    return files


def check_own_columns(schema: Schema) -> None:
    """Raise `InvalidArgument` if entries of a schema need columns that rows of files lack."""
    if own := schema.caller_columns:
        raise InvalidArgument(f"entries of this index need column {own[0].name!r}, which rows of files lack")


def _decide(plan: FilePlan, mapping: RowMapping, known_keys: Collection[str]) -> None:
    """Let the first rows decide the unit of times that are numbers. Raises `InvalidArgument` for missing fields.

    Keys that the topic has already may be in earlier files only.
    """
    files, search = [listed for listed, _, _ in plan.new], FieldSearch(mapping)
    search.look_at_heads(files)
    if files and search.misses(known_keys, keys_may_come=False):
        search.look_at_all(files)
        if search.misses(known_keys, keys_may_come=False):
            raise search.failure(len(files))
    for _, rows, segment in plan.new[:1]:
        if mapping.unit is None:
            next(rows.reading(mapping, segment.position, segment.end).batches(segment.position), None)


def _about_files(plan: FilePlan, parts: Sequence[PartFacts], rows: RowsOfFiles, damage: DamageCounts) -> dict[str, Any]:
    """Return the fields that a `LinkedResult` has beside those of a build."""
    cut = [plan.new[part.number][0].uri for part in parts if part.held_back]
    return {
        "files": len(plan.new),
        "known": plan.known.known,
        "rows": sum((part.segment.rows or 0) - part.skipped for part in parts),
        "read_bytes": sum(listed.size_bytes for listed, _, _ in plan.new),
        "changed": tuple(plan.known.lost),
        "rewritten": tuple(plan.known.rewritten),
        "copies": tuple(plan.known.copies),
        "held_back": (*plan.held_back, *cut),
        "skipped_rows": sum(part.skipped for part in parts),
        "skipped_first": tuple([bad for part in parts for bad in part.bad][:_NAMED]),
        "damaged": damage.damaged,
        "damaged_first": tuple(damage.damaged_first),
        "known_damaged": damage.known_damaged,
        "known_damaged_first": tuple(damage.known_damaged_first),
        "unit": rows.unit if parts else None,
        "time_zone": rows.zone,
        "doubled_times": sum(part.unclear.doubled for part in parts),
        "missing_times": sum(part.unclear.missing for part in parts),
    }


def publish_files(
    shards: Sequence[FinishedObject],
    sent: list[SentObject],
    segments: Sequence[Segment],
    rows: RowsOfFiles,
    topics: Iterable[str],
    offsets: tuple[int, int],
    log: StorageLog,
    replaced: Sequence[Replacement] = (),
) -> LogState:
    """Append the record of tables, of the catalog of their files' segments, and of positions; return the new state.

    `sent` are the objects of the job, and then also the catalog; `offsets` [begin, end) are those of the segments,
    which replace `replaced`.
    Raises `InvalidArgument` if another run has added files meanwhile, and as `Publication.record`.
    """
    catalog, of_catalog = send_catalog(log, sorted(segments, key=lambda segment: segment.place))
    sent.append(of_catalog.sent)
    known, positions = log.state.positions, {rows.store: offsets[1]}
    if not rules_of(known, rows.store):
        positions |= {n: at for key in rows.keys for n, at in added_positions(known, rows.store, key, {}).items()}
    topics = {*topics} if rows.topic is None else {rows.topic}
    publication = Publication(log, sent, named=names_object(log.storage))
    publication.check()
    stored = tuple(shard.stored for shard in shards)

    def make(state: LogState) -> LogRecord | None:
        if catalog.name in state.catalogs:
            # an earlier attempt has appended the record
            return None
        if offsets_end(Segments(state, log.storage), rows.store) != offsets[0]:
            raise InvalidArgument("another run has indexed files of this log meanwhile: build again")
        if rules_of(state.positions, rows.store) not in ([], sorted(rows.keys)):
            raise InvalidArgument("another run has changed the keys of this topic meanwhile: build again")
        check_behind(state, [segment for segment in segments if isinstance(segment, LinkedSegment)])
        more: dict[str, Any] = {"put_before_ms": latest_ms(stored), "documents": rows.documents_after(state, topics)}
        record = LogRecord(0, "build", 0, "", 0, stored, (), positions, **more)
        return replace(record, catalogs=(catalog,), replaced=tuple(replaced))

    return publication.record("a build", make)
