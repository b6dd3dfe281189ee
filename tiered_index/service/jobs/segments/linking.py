"""Links files of someone else: adds their segments to the log before they are read, and finishes them afterwards.

One record adds a catalog of open segments, or replaces the catalogs that have them by catalogs of finished ones. So a
file has its offsets before its first entry, however often its reading is interrupted. A crash leaves an orphan.
Threads: one.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from functools import partial

from msgspec import structs

from tiered_index.errors import InvalidArgument, StorageUnavailable
from tiered_index.format.segments.segment import LinkedSegment, Segment, Times
from tiered_index.service.jobs.rewriting.job import Job, JobOvertaken, Rewrite, TaskResult, in_turn
from tiered_index.service.jobs.segments.catalogs import CatalogRewrite, CatalogTask, Rows, check_behind, part_of
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import LogRecord, Replacement, StoredCatalog
from tiered_index.service.log.state import LogState
from tiered_index.service.read.segments.segments import Segments
from tiered_index.storage.base import Storage


def link(
    log: StorageLog,
    epoch: int | None,
    added: Sequence[LinkedSegment],
    finished: Sequence[LinkedSegment],
    gone: Sequence[tuple[str, int]] = (),
    replaced: Sequence[Replacement] = (),
) -> None:
    """Append a record that adds segments, replaces those at the places of `finished`, and removes those at `gone`.

    It announces the new readings `replaced`.

    `added` are sorted, and behind all segments of their stores: `StorageUnavailable`, if another job added some there
    meanwhile. Raises the errors of `StorageLog.append`, of the storage, and `InvalidArgument` for a place without a
    segment.
    """
    changes: dict[tuple[str, int], LinkedSegment | None] = {segment.place: segment for segment in finished}
    changes |= dict.fromkeys(gone)
    seen = set[tuple[str, int]]()

    def changed(state: LogState, stored: StoredCatalog) -> Iterator[Segment]:
        for segment in Segments(part_of(state, [stored]), log.storage).all():
            if segment.place in changes:
                seen.add(segment.place)
            if (after := changes.get(segment.place, segment)) is not None:
                yield after

    def planned(state: LogState, lost: Container[str]) -> Iterator[CatalogRewrite]:
        seen.clear()
        check_behind(state, added)
        listed = _catalogs_of(state, [*changes])
        # a catalog for each, because another catalog may lie between two of them
        rows: list[Rows] = [partial(changed, state, stored) for stored in listed]
        rows += [lambda: iter(added)] if added else []
        tasks = [CatalogTask(number, log, epoch, of_task) for number, of_task in enumerate(rows)]
        announced = _timed(state, log.storage, replaced)
        yield CatalogRewrite("link", "linked files", tuple(listed), tasks, state.generation, added, announced)

    def announcing(state: LogState) -> LogRecord:
        return LogRecord(0, "link", epoch or 0, "", 0, replaced=_timed(state, log.storage, replaced))

    def run(rewrite: Rewrite) -> Iterator[TaskResult]:
        yield from in_turn(log)(rewrite)
        if missing := changes.keys() - seen:
            raise InvalidArgument(f"no segment begins at {min(missing)}")

    if not (added or changes):
        if replaced:
            log.append("replaced files", epoch, announcing)
        return
    try:
        Job(log, planned, run, epoch).run()
    except JobOvertaken as error:
        raise StorageUnavailable(str(error)) from error


def _timed(state: LogState, storage: Storage, replaced: Sequence[Replacement]) -> tuple[Replacement, ...]:
    """Return replacements with the times of the old rows, if finished segments of a state say the times of all."""
    segments = Segments(state, storage)
    timed = (
        reading if reading.times is not None else structs.replace(reading, times=_times(segments, reading))
        for reading in replaced
    )
    return tuple(timed)


def _times(segments: Segments, replacement: Replacement) -> Times | None:
    times, reached = None, replacement.start
    for segment in segments.of_log(replacement.store, replacement.start):
        if segment.start > reached or segment.times is None or (segment.kind == "linked" and segment.is_open):
            return None
        times = segment.times if times is None else (min(times[0], segment.times[0]), max(times[1], segment.times[1]))
        reached = segment.end
        if reached >= replacement.end:
            return times
    return None


def _catalogs_of(state: LogState, places: Sequence[tuple[str, int]]) -> list[StoredCatalog]:
    """Return the catalogs that have the segments at places."""
    named = {
        stored.name
        for store, start in places
        for stored, log in state.listed_logs.get(store, ())
        if log.start <= start < log.end
    }
    return [stored for name, stored in state.catalogs.items() if name in named]
