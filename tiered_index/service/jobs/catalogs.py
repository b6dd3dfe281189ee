"""Catalogs of segments: writes them, and merges small ones with the segments that records name line by line.

One record replaces catalogs and lines by the merged catalog. Segments that expired or are hidden are left out; their
objects are then orphans. Segments that are hidden during a merge stay hidden in the merged catalog. A crash leaves an
orphan. Memory: some groups of rows for each catalog. Threads: any.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from msgspec import structs

from tiered_index.errors import ObjectNotFound
from tiered_index.format.catalog import CatalogDirectory, CatalogWriter, decode_end, end_bytes
from tiered_index.format.names import CATALOG_PREFIX, catalog_name, store_prefix
from tiered_index.format.segment import Segment
from tiered_index.service.log.log import StorageLog, own_objects
from tiered_index.service.log.publication import Publication
from tiered_index.service.log.records import HiddenSegment, LogRecord, SourceRange, StoredCatalog
from tiered_index.service.log.state import LogState, overlapped
from tiered_index.service.read.segments import MissingCatalog, Segments, hidden_in
from tiered_index.storage.base import Storage, Writer

LINES_OF_RECORD = 16
"""Most segments that a record names line by line: more are in a catalog."""
MOST_LINES = 256
"""Most segments in a state line by line, and most hidden ones, before the writer makes a catalog of them."""
MOST_CATALOGS = 8
"""Most catalogs in a state before small ones are merged, even without lines."""
# a catalog is merged with smaller ones that together have at least 1 / so many of its segments
_RATIO = 2
_TRIES = 5
# of a catalog's end: enough for most directories
_END_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CatalogPlan:
    """The catalogs and lines to merge, of one state."""

    state: LogState
    catalogs: tuple[StoredCatalog, ...]
    lines: frozenset[str]


def plan_catalogs(state: LogState, storage: Storage, *, least: int = 1) -> CatalogPlan | None:
    """Return the catalogs to merge, with all lines. None: fewer than `least` lines and hidden rows, and all merged.

    A catalog is included if one of its segments expired or is hidden, or if it has segments between others that are
    merged. It is also included if smaller catalogs together have a good part of its segments. Raises the errors of
    `Segments`.
    """
    by_count = sorted(state.catalogs.values(), key=lambda stored: stored.rows.count)
    lines = frozenset(state.archive) if len(state.archive) >= least else frozenset[str]()
    hiding = {hidden.catalog for hidden in state.hidden.values()} if len(state.hidden) >= least else set()
    segments = Segments(state, storage)
    due = {stored.name for stored in by_count if stored.name in hiding or segments.has_expired(stored)}
    if due or lines:
        return _plan(state, lines, _grown(state, lines, due, by_count))
    for at, smallest in enumerate(by_count if len(by_count) >= MOST_CATALOGS else ()):
        names = _grown(state, lines, {smallest.name}, by_count[at + 1 :])
        if len(names) > 1:
            return _plan(state, lines, names)
    return None


def _plan(state: LogState, lines: frozenset[str], names: set[str]) -> CatalogPlan:
    return CatalogPlan(state, tuple(stored for name, stored in state.catalogs.items() if name in names), lines)


def _grown(state: LogState, lines: frozenset[str], names: set[str], others: Sequence[StoredCatalog]) -> set[str]:
    """Return catalogs `names`, those between them, and those of `others` (the smallest first) that are small beside
    them.
    """
    grown = _joined(state, lines, names)
    total = len(lines) + sum(state.catalogs[name].rows.count for name in grown)
    for stored in others:
        if stored.rows.count > _RATIO * total:
            break
        if stored.name not in grown:
            more = _joined(state, lines, {*grown, stored.name})
            count = sum(state.catalogs[name].rows.count for name in more - grown)
            if count <= _RATIO * total:
                grown, total = more, total + count
    return grown


def _joined(state: LogState, lines: frozenset[str], names: set[str]) -> set[str]:
    """Return catalogs `names` with all that have segments between theirs, or between theirs and the lines.

    One catalog can't have the segments on both sides of another one's.
    """
    ranges: dict[str, tuple[int, int]] = {}
    if lines:
        ranges |= {store: (of[0].start, of[-1].end) for store in state.stores for of in [state.segments_of(store)]}
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
            and any(
                log.store in ranges and log.start < ranges[log.store][1] and ranges[log.store][0] < log.end
                for log in stored.rows.logs
            )
        }
        if not fresh:
            return joined


def merge_catalogs(log: StorageLog, epoch: int | None = None, *, least: int = 1) -> int:
    """Merge catalogs and lines of segments that are due (see `plan_catalogs`). Return the number of records appended.

    `epoch` is the writer's; None: a job. Raises the errors of `StorageLog.append`, and of the storage.
    """
    for _ in range(_TRIES):
        try:
            if plan_catalogs(log.state, log.storage, least=least) is None:
                return 0
            plan = plan_catalogs(log.refresh(), log.storage, least=least)
            return 0 if plan is None else int(_run(log, plan, epoch))
        except MissingCatalog as error:
            # another merge was faster, or the catalog is lost
            if error.file in log.refresh().catalogs:
                raise
    return 0


def _run(log: StorageLog, plan: CatalogPlan, epoch: int | None) -> bool:
    state = plan.state
    shown = Segments(_part(plan), log.storage).all()
    first = next(shown, None)
    catalog, publication = None, None
    if first is not None:
        catalog, publication = send_catalog(log, itertools.chain([first], shown), epoch)
    before = sum(merged.rows.count for merged in plan.catalogs) + len(plan.lines)

    def make(now: LogState) -> LogRecord | None:
        names = {merged.name for merged in plan.catalogs}
        if not names <= now.catalogs.keys():
            return None
        # what was replaced or given up meanwhile
        gone = [plan.state.archive[name] for name in sorted(plan.lines) if name not in now.archive]
        fresh = [hidden for name, hidden in now.hidden.items() if hidden.catalog in names and name not in state.hidden]
        hide: tuple[HiddenSegment, ...] = ()
        left_out = before - len(gone)
        if catalog is None:
            pass
        elif overlapped([other for other in now.catalogs.values() if other.name not in names], catalog) is not None:
            return None
        else:
            of_lines = [hidden_in(catalog, segment) for segment in gone]
            hide = (*of_lines, *(structs.replace(hidden, catalog=catalog.name) for hidden in fresh))
            left_out = before - catalog.rows.count
        remove = (*sorted(names), *sorted(plan.lines & now.archive.keys()))
        added = () if catalog is None else (catalog,)
        return LogRecord(
            0, "catalogs", epoch or 0, "", 0, remove=remove, catalogs=added, hide=hide, left_out=max(left_out, 0)
        )

    if publication is None:
        return log.append("a merge of catalogs", epoch, make).number > state.number
    after = publication.record("a merge of catalogs", make)
    return catalog is not None and catalog.name in after.catalogs


def replace_catalog(log: StorageLog, stored: StoredCatalog, segments: Iterable[Segment]) -> str | None:
    """Send a catalog again, with the same `segments`. Return its name; None: a record has removed the old one."""
    fresh, publication = send_catalog(log, segments)

    def make(state: LogState) -> LogRecord | None:
        if stored.name not in state.catalogs:
            return None
        hide = [
            structs.replace(hidden, catalog=fresh.name)
            for hidden in state.hidden.values()
            if hidden.catalog == stored.name
        ]
        return LogRecord(0, "repair", 0, "", 0, remove=(stored.name,), catalogs=(fresh,), hide=tuple(hide))

    state = publication.record("a catalog in the place of another", make)
    return fresh.name if fresh.name in state.catalogs else None


def _part(plan: CatalogPlan) -> LogState:
    """Return a state with only the segments of a plan."""
    state = plan.state
    return LogState(
        archive={name: segment for name, segment in state.archive.items() if name in plan.lines},
        catalogs={merged.name: merged for merged in plan.catalogs},
        hidden=state.hidden,
        expired=state.expired,
    )


def send_catalog(
    log: StorageLog, segments: Iterable[Segment], epoch: int | None = None
) -> tuple[StoredCatalog, Publication]:
    """Send a catalog of sorted segments, at least one. Return it with its publication. Raises as `Publication.send`."""
    made: list[CatalogDirectory] = []

    def fill(stream: Writer) -> None:
        writer = CatalogWriter(stream.write)
        for segment in segments:
            writer.add(segment)
        made.append(writer.finish())

    publication = Publication.send(log, catalog_name(), fill, epoch)
    sent = publication.sent
    return StoredCatalog(sent.name, sent.size_bytes, sent.began_ms, made[-1].encode()), publication


def removed_names(log: StorageLog, since_ms: int) -> set[str]:
    """Return the names of objects that records of the log's state removed since a time of the storage's clock.

    Those of segments that the merge of catalogs left out are among them.
    """
    numbers = log.numbers_since(log.state.number, since_ms)
    return {name for number in numbers for name in names_removed_by(log, log.record(number))}


def names_removed_by(log: StorageLog, record: LogRecord) -> tuple[str, ...]:
    """Return the names that a record removed or hid, with the segments that the merge of catalogs left out.

    The merged catalogs are read for that. If a sweep deleted one, its segments were left out long ago. The record of a
    copy has the merges of its source. For a catalog that a record gave up, the objects in its ranges are listed.
    """
    names = [*record.remove, *(hidden.name for hidden in record.hide)]
    if ranges := [lost.range for lost in record.lost if lost.range is not None and lost.is_of_catalog]:
        segments = Segments(log.state, log.storage)
        names += [name for lost in ranges for name in _objects_in(log, lost) if not segments.names_object(name)]
    if record.kind == "copy" or (record.kind in ("catalogs", "link") and record.left_out):
        segments = Segments(log.state, log.storage)
        for name in record.remove:
            if name.startswith(CATALOG_PREFIX):
                with contextlib.suppress(ObjectNotFound):
                    left_out = (
                        segment.name for segment in read_catalog(log.storage, name) if segment.kind == "archived"
                    )
                    names += [segment_name for segment_name in left_out if not segments.names_object(segment_name)]
    return tuple(names)


def _objects_in(log: StorageLog, lost: SourceRange) -> Iterator[str]:
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
