"""Joins small columnar segments that follow each other in a store, such as a follower archives every few minutes.

A join is a rewrite (`job.py`): one record adds a segment with all their records, and retires them. The new object has
the columns and the notes of their files, so no connector is needed. Only segments whose records all have a time are
joined, because the time of other records is that of their upload. Segments with erased messages are joined only with
such. At most a day lies between the uploads, so that segments expire at most a day later. A damaged segment stays as it
is, and those beside it are joined without it. Memory: a few times the records of one joined segment. Threads: any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from msgspec import structs

from tiered_index.base.clock import SystemClock
from tiered_index.errors import CorruptFile, RootBehind, StorageBehind
from tiered_index.format.names import LINKED, POINTS
from tiered_index.format.segments.archived import footer_bytes_of, segment_object_bytes
from tiered_index.format.segments.columnar import NUMBER, decode_columns, encode_joined
from tiered_index.format.segments.segment import Times
from tiered_index.service.jobs.rewriting.job import Job, JobOvertaken, Rewrite, TaskResult, in_turn
from tiered_index.service.jobs.rewriting.whole import Named
from tiered_index.service.jobs.segments.catalogs import MOST_WAITING, merge_catalogs, waiting
from tiered_index.service.jobs.segments.erase_segments import send_again
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import ArchivedSegment, LogRecord
from tiered_index.service.log.state import LogState
from tiered_index.service.read.segments.archive import SegmentArchive
from tiered_index.service.read.segments.segments import Segments
from tiered_index.storage.base import Storage
from tiered_index.types import no_progress

LEAST, MOST = 8, 256
"""At least and at most so many segments are joined at once."""
JOINED_BYTES = 8 << 20
"""The most bytes of a joined segment, about. Segments of an eighth of that are small."""
_SMALL_BYTES = JOINED_BYTES // LEAST
# the most bytes of its records in memory, which are those of a segment that a writer sends
_RECORD_BYTES = 32 << 20
# between the uploads of the first and any other segment
_SPAN_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Joined:
    """The result of a join: `made` segments are in the place of `segments`; those that are `damaged`, with reasons."""

    segments: int = 0
    made: int = 0
    damaged: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class JoinResult(TaskResult):
    """The segments that the new one has `joined`, none if there is none; those that are `damaged`, with reasons."""

    joined: tuple[ArchivedSegment, ...] = ()
    damaged: tuple[tuple[str, str], ...] = ()


def small_neighbours(segments: Segments, since_ms: int = 0) -> Iterator[tuple[ArchivedSegment, ...]]:
    """Yield segments to join: at least `LEAST` small ones each, which follow each other in their store.

    Catalogs with no segment that was archived after `since_ms` are not read.
    """
    byte_stores = set(segments.byte_stores)
    for store in segments.stores:
        if store in byte_stores or store.startswith((LINKED, POINTS)):
            continue
        logs = (log for _, log in segments.state.listed_logs[store])
        if (begin := min((log.start for log in logs if log.last_ms >= since_ms), default=None)) is None:
            continue
        group, size_bytes = list[ArchivedSegment](), 0
        for segment in segments.of(store, begin):
            if group and not (_continues(group, segment) and size_bytes + segment.size_bytes <= JOINED_BYTES):
                if len(group) >= LEAST:
                    yield tuple(group)
                group, size_bytes = [], 0
            if _is_small(segment):
                group.append(segment)
                size_bytes += segment.size_bytes
        if len(group) >= LEAST:
            yield tuple(group)


def joins_due(segments: Segments, now_ms: int) -> Iterator[JoinRewrite]:
    """Yield the joins that a writer makes beside its other work.

    More segments may soon follow the last ones of a store. These wait until half of a joined segment is there, or for
    a day, so that a message is written again once.
    """
    for group in small_neighbours(segments, now_ms - 2 * _SPAN_MS):
        is_full = len(group) == MOST or sum(segment.size_bytes for segment in group) >= JOINED_BYTES // 2
        is_last = group[-1].end >= segments.end(group[-1].store)
        if is_full or not is_last or now_ms - group[0].published_ms >= _SPAN_MS:
            yield _join_of(group)


def _join_of(group: tuple[ArchivedSegment, ...]) -> JoinRewrite:
    return JoinRewrite("join", "a join of segments", group, (JoinTask(group),))


def _is_small(segment: ArchivedSegment) -> bool:
    has_times = segment.times is not None or segment.rows == 0
    return segment.columns is not None and segment.size_bytes < _SMALL_BYTES and has_times


def _continues(group: Sequence[ArchivedSegment], segment: ArchivedSegment) -> bool:
    first, last = group[0], group[-1]
    is_alike = (first.source is None) == (segment.source is None) and _is_small(segment)
    is_near = abs(segment.published_ms - first.published_ms) <= _SPAN_MS
    return is_alike and is_near and last.end == segment.start and len(group) < MOST


@dataclass(frozen=True)
class JoinTask:
    """Sends a segment with the records of the first `LEAST` or more of `segments` that have equal columns and notes."""

    segments: tuple[ArchivedSegment, ...]
    number: int = 0

    def run(self, storage: Storage, now_ms: int, progress: Callable[[int], None] = no_progress) -> JoinResult:
        """Send the segment. Raises storage errors. Without such segments there is no object.

        `progress` is called after each segment that is read.
        """
        log, damaged = StorageLog(storage, SystemClock()), list[tuple[str, str]]()
        archive = SegmentArchive(storage, lambda: log.state, log.open)
        joined, files, tables = list[ArchivedSegment](), list[bytes](), list[pa.Table]()
        for segment in self.segments:
            try:
                file = archive.verified(segment, 0, segment.size_bytes)
                table = _records_of(segment, file)
            except (StorageBehind, RootBehind):
                raise
            except CorruptFile as error:
                damaged.append((segment.name, error.problem))
                table = None
            progress(0 if table is None else len(table))
            if tables and (table is None or not _fits(tables, table)):
                if len(joined) >= LEAST:
                    break
                joined, files, tables = [], [], []
            if table is not None and not _lacks_times(table):
                joined.append(segment)
                files.append(file)
                tables.append(table)
        result = JoinResult(self.number, {}, 0, (), damaged=tuple(damaged))
        if len(joined) < LEAST:
            return result
        records = pa.concat_tables(tables)
        file = encode_joined(records, files)
        if not records.equals(decode_columns(file), check_metadata=True):
            damaged.append((joined[0].name, "its records would change if they were joined with the next ones"))
            return replace(result, damaged=tuple(damaged))
        first, last, times = joined[0], joined[-1], [segment.times for segment in joined if segment.times]
        whole = structs.replace(
            first,
            size_bytes=len(file),
            object_bytes=segment_object_bytes(len(file)),
            columns=(last.end - first.start, footer_bytes_of(file)),
            published_ms=max(segment.published_ms for segment in joined),
            rows=len(records),
            times=_union(times),
        )
        fresh, publication = send_again(
            log, whole, lambda length: (file[at : at + length] for at in range(0, len(file), length))
        )
        # the age of the object counts by the clock of the process that publishes it
        sent = replace(publication.sent, began_ms=now_ms)
        return replace(result, segments=((fresh, sent),), joined=tuple(joined))


def _records_of(segment: ArchivedSegment, file: bytes) -> pa.Table:
    """Return the records of a segment's file. Raises `CorruptFile` unless they are those that the log says."""
    records = decode_columns(file)
    if segment.rows is not None:
        CorruptFile.unless_equal(segment.name, "has another number of records", segment.rows, len(records))
    places = np.concatenate([[segment.start - 1], records[NUMBER].to_numpy(), [segment.end]])
    if (np.diff(places) <= 0).any():
        raise CorruptFile(segment.name, "has records beyond its offsets, or not in their order")
    return records


def _lacks_times(records: pa.Table) -> bool:
    return "timestamp" not in records.column_names or records["timestamp"].null_count > 0


def _fits(tables: Sequence[pa.Table], table: pa.Table) -> bool:
    size_bytes = sum(before.nbytes for before in tables) + table.nbytes
    is_alike = table.schema.equals(tables[0].schema, check_metadata=True)
    return is_alike and not _lacks_times(table) and size_bytes <= _RECORD_BYTES


def _union(times: Sequence[Times]) -> Times | None:
    return (min(first for first, _ in times), max(last for _, last in times)) if times else None


@dataclass(frozen=True, slots=True)
class JoinRewrite(Rewrite):
    """Puts one segment in the place of several. Nothing happens if another record replaced one of them first."""

    def replaced(self, results: Sequence[TaskResult]) -> Sequence[Named]:
        """Return the segments that the new one has."""
        return [segment for result in results if isinstance(result, JoinResult) for segment in result.joined]

    def check_proof(self, results: Sequence[TaskResult]) -> None:
        """Raise `CorruptFile` unless the new segment has all offsets and records of those that it joins."""
        CorruptFile.unless_equal(self.title, "not one result of each task", len(self.tasks), len(results))
        for result in results:
            assert isinstance(result, JoinResult)
            for fresh, _ in result.segments:
                first, last, rows = result.joined[0], result.joined[-1], [segment.rows for segment in result.joined]
                expected = *first.place, last.end, fresh.rows if None in rows else sum(filter(None, rows))
                made = *fresh.place, fresh.end, fresh.rows
                CorruptFile.unless_equal(fresh.name, "has other offsets than the segments it joins", expected, made)

    def record(self, segments: Segments, results: Sequence[TaskResult]) -> LogRecord:
        """Return the record. Raises `JobOvertaken` if another record replaced one of the segments."""
        joined = [named for named in self.replaced(results) if isinstance(named, ArchivedSegment)]
        for segment in joined:
            if segments.at(*segment.place) != segment:
                raise JobOvertaken(f"{segment.name}: replaced by another record")
        added = [fresh for result in results for fresh, _ in result.segments]
        return LogRecord(0, self.kind, 0, "", 0, **segments.change(added, joined))


def join_segments(log: StorageLog) -> Joined:
    """Join the small segments of all stores, one group after the other. Raises the errors of the log and the storage.

    Joins that others overtake again and again are left to the next call.
    """
    passed, joined, made, damaged = set[tuple[str, str]](), 0, 0, dict[str, str]()

    def planned(state: LogState, lost: Container[str]) -> Iterator[JoinRewrite]:
        for group in small_neighbours(Segments(state, log.storage)):
            if (group[0].name, group[-1].name) not in passed:
                yield _join_of(group)

    with contextlib.suppress(JobOvertaken):
        for rewrite, results in Job(log, planned, in_turn(log), repeats=True).outcomes():
            names = [named.name for named in rewrite.inputs]
            for result in results:
                assert isinstance(result, JoinResult)
                damaged |= dict(result.damaged)
                joined, made = joined + len(result.joined), made + len(result.segments)
                if not result.segments:
                    passed.add((names[0], names[-1]))
            if waiting(log.state) >= MOST_WAITING:
                merge_catalogs(log, least=MOST_WAITING)
    return Joined(joined, made, tuple(damaged.items()))
