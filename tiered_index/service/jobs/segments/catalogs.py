"""Catalogs of segments: writes them, and merges small ones.

A merge, a repair and a link of files are rewrites of catalogs (`job.py`): one record replaces catalogs by new ones.
Segments that expired or are retired are left out; their objects are then orphans. A new catalog has the generation of
the plan, so segments that are retired during a rewrite stay so. A crash leaves an orphan. Memory: some groups of rows
for each catalog. Threads: any.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from tiered_index.errors import ObjectNotFound
from tiered_index.format.names import CATALOG_PREFIX, catalog_name, store_prefix
from tiered_index.format.segments.catalog import CatalogDirectory, CatalogWriter, decode_end, end_bytes
from tiered_index.format.segments.segment import Segment
from tiered_index.service.jobs.rewriting.job import Job, JobOvertaken, Rewrite, TaskResult, in_turn
from tiered_index.service.log.log import StorageLog, own_objects
from tiered_index.service.log.publication import Publication
from tiered_index.service.log.records import LogRecord, LostRange, Replacement, RetiredSegment, StoredCatalog
from tiered_index.service.log.state import LogState, overlapped
from tiered_index.service.read.segments.segments import MissingCatalog, Segments
from tiered_index.storage.base import Storage, Writer
from tiered_index.types import no_progress

MOST_WAITING = 256
"""Most segments of catalogs in records, and most retired ones, before the writer makes a catalog of them."""
FULL_LEVEL = 8
"""So many catalogs of one level are merged into one of the next level, see `level_of`."""
# of a catalog's end: enough for most directories
_END_BYTES = 1 << 20


Rows = Callable[[], Iterable[Segment]]
"""Returns the sorted segments of a new catalog, maybe none."""


@dataclass(frozen=True)
class CatalogTask:
    """Sends a catalog of `rows`; without rows it sends none. It runs in the process of its log."""

    number: int
    log: StorageLog
    epoch: int | None
    rows: Rows

    def run(self, storage: Storage, now_ms: int, progress: Callable[[int], None] = no_progress) -> TaskResult:
        """Send the catalog."""
        rows = iter(self.rows())
        if (first := next(rows, None)) is None:
            return TaskResult(self.number, {}, 0, ())
        catalog, publication = send_catalog(self.log, itertools.chain([first], rows), self.epoch)
        return TaskResult(self.number, {}, 0, (), catalogs=((catalog, publication.sent),))


@dataclass(frozen=True, slots=True)
class CatalogRewrite(Rewrite):
    """Replaces catalogs. The new ones have the `generation` of the state that the rows are of.

    `added` are rows of the new catalogs that no input has, behind all others of their stores. The record announces the
    new readings `announced`.
    """

    generation: int
    added: Sequence[Segment] = ()
    announced: tuple[Replacement, ...] = ()

    def record(self, segments: Segments, results: Sequence[TaskResult]) -> LogRecord:
        """Return the record. It names the segments that only catalogs in records listed, and that are left out.

        Raises `JobOvertaken` if another record changed the catalogs, or as `check_behind`.
        """
        check_behind(segments.state, self.added)
        now, names = segments.state, {named.name for named in self.inputs}
        made = tuple(
            structs.replace(catalog, generation=self.generation) for result in results for catalog, _ in result.catalogs
        )
        others = [other for name, other in now.catalogs.items() if name not in names]
        overlap = any(overlapped(others, catalog) is not None for catalog in made)
        if overlap or not names <= now.catalogs.keys():
            raise JobOvertaken("another record changed the catalogs")
        expired = now.expired.segments
        # an orphan stays for a while after it: nothing else says later that it was there
        retire = tuple(
            RetiredSegment(row.name, *row.place)
            for stored in now.inline
            if stored.name in names
            for row in segments.rows(stored)
            if row.kind == "archived" and row.end <= expired.get(row.store, 0)
        )
        before = sum(now.catalogs[name].rows.count for name in names)
        left_out = before + len(self.added) - sum(catalog.rows.count for catalog in made)
        record = LogRecord(0, self.kind, 0, "", 0, remove=tuple(sorted(names)), catalogs=made, left_out=left_out)
        return replace(record, retire=retire, replaced=self.announced)


def check_behind(state: LogState, added: Sequence[Segment]) -> None:
    """Raise `JobOvertaken` unless segments begin behind all segments and replaced offsets of their stores."""
    for segment in added:
        ends = [log.end for _, log in state.listed_logs.get(segment.store, ())]
        if segment.start < max([*ends, state.expired.replaced.end(segment.store)]):
            raise JobOvertaken(f"another job has added files of the log {segment.store} meanwhile: try again")


def waiting(state: LogState) -> int:
    """Return the number of segments in catalogs of records, or of retired ones, whichever is greater."""
    return max(sum(stored.rows.count for stored in state.inline), sum(map(len, state.retired.values())))


def level_of(count: int) -> int:
    """Return the level of a catalog of `count` segments (1 or more): the logarithm to base `FULL_LEVEL`, cut."""
    level = 0
    while (count := count // FULL_LEVEL) > 0:
        level += 1
    return level


def plan_catalogs(state: LogState, storage: Storage, *, least: int = 1) -> list[StoredCatalog]:
    """Return the catalogs to merge; none: fewer than `least` segments are `waiting`, and no level is full.

    A catalog is included if one of its segments expired or is retired, if it has segments between others that are
    merged, or if its level is full. So there are O(log n) catalogs of n segments, and each segment is written O(log n)
    times. Raises the errors of `Segments`.
    """
    segments = Segments(state, storage)
    due = {stored.name for stored in state.catalogs.values() if segments.has_expired(stored)}
    if sum(stored.rows.count for stored in state.inline) >= least:
        due |= {stored.name for stored in state.inline}
    if sum(map(len, state.retired.values())) >= least:
        due |= {stored.name for stored in state.catalogs.values() if any(state.retired_in(stored))}
    names = _with_full_levels(state, due)
    return [stored for name, stored in state.catalogs.items() if name in names]


def _with_full_levels(state: LogState, due: set[str]) -> set[str]:
    """Return catalogs `due`, those between them, and objects of full levels, in which the catalog to make counts."""
    names = _joined(state, due)
    while True:
        of_level = defaultdict[int, set[str]](set)
        for name, stored in state.catalogs.items():
            if stored.data is None and name not in names:
                of_level[level_of(stored.rows.count)].add(name)
        made = level_of(sum(state.catalogs[name].rows.count for name in names)) if names else -1
        counts = ((level, len(of) + (level == made)) for level, of in sorted(of_level.items()))
        full = next((level for level, count in counts if count >= FULL_LEVEL), None)
        if full is None:
            return names
        names = _joined(state, names | of_level[full])


def _joined(state: LogState, names: set[str]) -> set[str]:
    """Return catalogs `names` with all objects that have segments between theirs.

    One object can't have the segments on both sides of another one's.
    """
    ranges: dict[str, tuple[int, int]] = {}
    joined, fresh = set[str](), set(names)
    while True:
        for name in fresh:
            for log in state.catalogs[name].rows.logs:
                start, end = ranges.get(log.store, (log.start, log.end))
                ranges[log.store] = min(start, log.start), max(end, log.end)
        joined |= fresh
        fresh = {
            name
            for name, stored in state.catalogs.items()
            if name not in joined
            and stored.data is None
            and any(
                log.store in ranges and log.start < ranges[log.store][1] and ranges[log.store][0] < log.end
                for log in stored.rows.logs
            )
        }
        if not fresh:
            return joined


def merge_catalogs(log: StorageLog, epoch: int | None = None, *, least: int = 1) -> int:
    """Merge the catalogs that are due (see `plan_catalogs`). Return the number of records appended.

    `epoch` is the writer's; None: a job. Raises the errors of `StorageLog.append`, and of the storage.
    """

    def planned(state: LogState, lost: Container[str]) -> Iterator[CatalogRewrite]:
        if due := plan_catalogs(state, log.storage, least=least):
            task = CatalogTask(0, log, epoch, Segments(part_of(state, due), log.storage).all)
            yield CatalogRewrite("catalogs", "a merge of catalogs", tuple(due), (task,), state.generation)

    # mostly nothing is due in the known state: then there is no request
    with contextlib.suppress(MissingCatalog):
        if not plan_catalogs(log.state, log.storage, least=least):
            return 0
    try:
        return len(Job(log, planned, in_turn(log), epoch).run())
    except JobOvertaken:
        # others have merged them
        return 0


def part_of(state: LogState, listed: Iterable[StoredCatalog]) -> LogState:
    """Return a state with only the segments of some catalogs of `state`."""
    return LogState(catalogs={stored.name: stored for stored in listed}, retired=state.retired, expired=state.expired)


def send_catalog(
    log: StorageLog, segments: Iterable[Segment], epoch: int | None = None
) -> tuple[StoredCatalog, Publication]:
    """Send a catalog of sorted segments, at least one. Return it with its publication. Raises as `Publication.send`."""
    directory: CatalogDirectory | None = None

    def fill(stream: Writer) -> None:
        nonlocal directory
        writer = CatalogWriter(stream.write)
        for segment in segments:
            writer.add(segment)
        directory = writer.finish()

    publication = Publication.send(log, catalog_name(), fill, epoch)
    sent = publication.sent
    assert directory is not None
    return StoredCatalog(sent.name, sent.size_bytes, sent.began_ms, directory.encode()), publication


def names_removed_by(log: StorageLog, record: LogRecord) -> tuple[str, ...]:
    """Return the names that a record removed or retired, with the segments that the merge of catalogs left out.

    The merged catalogs are read for that, and for a copy those with retired segments. If a sweep deleted one, its
    segments were left out long ago. The record of a copy has the merges of its source. For a catalog that a record gave
    up, the objects in its ranges are listed.
    """
    names = [*record.remove, *(segment.name for segment in record.retire)]
    if ranges := [lost.range for lost in record.lost if lost.range is not None and lost.is_of_catalog]:
        segments = Segments(log.state, log.storage)
        names += [name for lost in ranges for name in _objects_in(log, lost) if not segments.names_object(name)]
    if record.copied:
        names += [segment.name for segment in Segments(log.state, log.storage).retired()]
    if record.copied or (record.kind in ("catalogs", "link") and record.left_out):
        segments = Segments(log.state, log.storage)
        for name in record.remove:
            if name.startswith(CATALOG_PREFIX):
                with contextlib.suppress(ObjectNotFound):
                    left_out = (
                        segment.name for segment in read_catalog(log.storage, name) if segment.kind == "archived"
                    )
                    names += [segment_name for segment_name in left_out if not segments.names_object(segment_name)]
    return tuple(names)


def _objects_in(log: StorageLog, lost: LostRange) -> Iterator[str]:
    """Yield the names of the objects of segments that begin in a range of a store."""
    prefix = store_prefix(lost.source)
    for info in own_objects(log.storage, prefix):
        start = info.name.removeprefix(prefix).partition("/")[0]
        if start.isdecimal() and lost.begin <= int(start) < lost.end:
            yield info.name


def read_catalog(storage: Storage, name: str) -> Iterator[Segment]:
    """Yield all segments of a catalog by its object alone. Raises `ObjectNotFound` and `CorruptFile`."""
    data, size_bytes = storage.get_suffix(name, _END_BYTES)
    if (length := end_bytes(data, name)) > len(data):
        data, _ = storage.get_suffix(name, length)
    directory = decode_end(data, name)
    stored = StoredCatalog(name, size_bytes, 0, directory.encode())
    return Segments(LogState(catalogs={name: stored}), storage).all()
