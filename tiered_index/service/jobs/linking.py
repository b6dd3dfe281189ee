"""Links files of someone else: adds their segments to the log before they are read, and finishes them afterwards.

One record adds a catalog of open segments, or replaces the catalogs that have them by catalogs of finished ones. So a
file has its offsets before its first entry, however often its reading is interrupted. A crash leaves an orphan.
Threads: one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tiered_index.errors import InvalidArgument, StorageUnavailable
from tiered_index.format.segment import LinkedSegment, Segment
from tiered_index.service.jobs.catalogs import send_catalog
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.publication import Publication
from tiered_index.service.log.records import LogRecord, StoredCatalog
from tiered_index.service.log.state import LogState
from tiered_index.service.read.segments import MissingCatalog, Segments, names_object

_TRIES = 5


def link(
    log: StorageLog,
    epoch: int,
    added: Sequence[LinkedSegment],
    finished: Sequence[LinkedSegment],
    gone: Sequence[tuple[str, int]] = (),
) -> None:
    """Append a record that adds segments, replaces those at the places of `finished`, and removes those at `gone`.

    `added` are sorted, and behind all segments of their stores: `StorageUnavailable`, if another job added some there
    meanwhile. Raises the errors of `StorageLog.append`, of the storage, and `InvalidArgument` for a place without a
    segment.
    """
    for left in reversed(range(_TRIES)):
        try:
            if _linked(log, epoch, added, {segment.place: segment for segment in finished}, {*gone}):
                return
        except MissingCatalog:
            # a merge was faster, or the catalog is lost
            if not left:
                raise
    raise StorageUnavailable(f"{log.storage.uri}: other jobs changed the catalogs {_TRIES} times; try again")


def _linked(
    log: StorageLog,
    epoch: int,
    added: Sequence[LinkedSegment],
    finished: dict[tuple[str, int], LinkedSegment],
    gone: set[tuple[str, int]],
) -> bool:
    state = log.refresh()
    check_behind(state, added)
    replaced = _catalogs_of(state, [*finished, *gone])
    catalogs, seen = list[tuple[StoredCatalog, Publication]](), set[tuple[str, int]]()
    before = sum(stored.rows.count for stored in replaced)
    after_count = 0
    for stored in replaced:
        # one for each, because another catalog may lie between two of them
        if rest := list(_changed(log, state, [stored], finished, gone, seen)):
            catalogs.append(send_catalog(log, rest, epoch))
            after_count += len(rest)
    if missing := {*finished, *gone} - seen:
        raise InvalidArgument(f"no segment begins at {min(missing)}")
    if added:
        catalogs.append(send_catalog(log, added, epoch))
    objects = [publication.sent for _, publication in catalogs]
    names = tuple(stored.name for stored in replaced)

    def make(now: LogState) -> LogRecord | None:
        if not now.catalogs.keys() >= {*names} or now.hidden != state.hidden:
            return None
        if any(catalog.name in now.catalogs for catalog, _ in catalogs):
            # an earlier attempt has appended the record
            return None
        check_behind(now, added)
        left_out = max(before - after_count, 0)
        listed = tuple(catalog for catalog, _ in catalogs)
        return LogRecord(0, "link", epoch, "", 0, remove=names, catalogs=listed, left_out=left_out)

    publication = Publication(log, objects, epoch, names_object(log.storage))
    after = publication.record("linked files", make)
    return all(catalog.name in after.catalogs for catalog, _ in catalogs) and after.catalogs.keys().isdisjoint(names)


def check_behind(state: LogState, added: Sequence[LinkedSegment]) -> None:
    """Raise `StorageUnavailable` unless segments begin behind all segments that catalogs list for their stores."""
    for segment in added:
        ends = [log.end for _, log in state.listed_logs.get(segment.store, ())]
        if segment.start < max(ends, default=0):
            raise StorageUnavailable(f"another job has added files of the log {segment.store} meanwhile: try again")


def _catalogs_of(state: LogState, places: Sequence[tuple[str, int]]) -> list[StoredCatalog]:
    """Return the catalogs that have the segments at places."""
    named = {
        stored.name
        for store, start in places
        for stored, log in state.listed_logs.get(store, ())
        if log.start <= start < log.end
    }
    return [stored for name, stored in state.catalogs.items() if name in named]


def _changed(
    log: StorageLog,
    state: LogState,
    catalogs: Sequence[StoredCatalog],
    finished: dict[tuple[str, int], LinkedSegment],
    gone: set[tuple[str, int]],
    seen: set[tuple[str, int]],
) -> Iterator[Segment]:
    """Yield the segments of catalogs with the changes. Places that changed are added to `seen`."""
    part = LogState(catalogs={stored.name: stored for stored in catalogs}, hidden=state.hidden, expired=state.expired)
    for segment in Segments(part, log.storage).all() if catalogs else ():
        place = segment.place
        if place in gone:
            seen.add(place)
            continue
        if place in finished:
            seen.add(place)
            yield finished[place]
        else:
            yield segment
