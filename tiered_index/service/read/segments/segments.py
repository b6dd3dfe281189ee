"""The segments of an index's logs: everything that asks where a log's messages are stored asks this.

A log has the segments of one store, sorted by their first offset. They never overlap. Catalogs list them, whose
directories are in the log's state. At most one catalog that is an object has the range of an offset; the bytes of all
others are in the state, too. So a segment is found by at most one ranged read, and by none if its group is cached.
Threads: any.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from tiered_index.base.threads import side_by_side
from tiered_index.errors import CorruptFile, InvalidArgument, ObjectNotFound
from tiered_index.format.names import SEGMENTS_PREFIX, catalog_name, store_prefix, topic_of_store
from tiered_index.format.segments.catalog import CatalogRows, CatalogWriter, Group, LogRows, decode_group
from tiered_index.format.segments.segment import ArchivedSegment, LinkedSegment, Segment
from tiered_index.service.log.records import MOST_INLINE, LostRange, RetiredSegment, StoredCatalog
from tiered_index.service.log.state import LogState
from tiered_index.service.read.caches.store import Catalogs, ReadCache
from tiered_index.storage.base import Storage

# bytes of one read of successive groups
_READ_BYTES = 4 << 20
# of a cache that nobody else uses
_OWN_BYTES = 1 << 20
# groups that are read at the same time
_AT_ONCE = 16


def _place(segment: Segment) -> tuple[str, int]:
    return segment.place


def _is_object(stored: StoredCatalog) -> bool:
    return stored.data is None


def _end_of(group: Group) -> int:
    return group.position + group.length


@dataclass(frozen=True)
class Segments:
    """The segments in one state of an index's log. `storage` has its catalogs, `cache` keeps groups of rows.

    `reads` has the bytes of each read of a catalog so far.
    Methods raise the errors of the storage, and `CorruptFile` for a catalog that is damaged or missing.
    """

    state: LogState
    storage: Storage | None = None
    cache: Catalogs = field(default_factory=lambda: ReadCache(_OWN_BYTES).catalogs, compare=False)
    reads: list[int] = field(default_factory=list, compare=False, repr=False)
    # the last decoded group of each catalog
    _last: dict[str, tuple[int, CatalogRows]] = field(default_factory=dict, compare=False, repr=False)

    def __iter__(self) -> Iterator[ArchivedSegment]:
        """Yield all archived segments, by store and first offset."""
        return (segment for segment in self.all() if isinstance(segment, ArchivedSegment))

    def all(self) -> Iterator[Segment]:
        """Yield all segments, archived and linked ones, by store and first offset. Memory: a few groups of rows."""
        listed = [self._shown(catalog, self.rows(catalog)) for catalog in self.state.catalogs.values()]
        return heapq.merge(*listed, key=_place)

    @property
    def have_links(self) -> bool:
        """Whether a segment is linked."""
        return any(log.linked for _, log in self._logs())

    def linked(self) -> Iterator[LinkedSegment]:
        """Yield all linked segments, by store and first offset."""
        if self.have_links:
            yield from (segment for segment in self.all() if isinstance(segment, LinkedSegment))

    def __len__(self) -> int:
        """Return the number of archived segments. Those that expired or are retired count until a merge of catalogs."""
        return sum(log.count - log.linked for _, log in self._logs())

    @property
    def object_bytes(self) -> int:
        """The bytes of all objects with segments. Those that expired or are retired count until a merge of catalogs."""
        return sum(log.object_bytes for _, log in self._logs())

    @cached_property
    def stores(self) -> tuple[str, ...]:
        """The stores that have segments, sorted."""
        retired = self.state.retired
        return tuple(
            sorted(
                store
                for store, parts in self.state.listed_logs.items()
                if max(log.end for _, log in parts) > self._expired(store)
                and (store not in retired or any(self.of_log(store)))
            )
        )

    @cached_property
    def byte_stores(self) -> tuple[str, ...]:
        """Those of `stores` whose segments are bytes of a log, not columnar or linked."""
        return tuple(store for store in self.stores if not self._parts(store)[0][1].is_columnar)

    @property
    def have_queues(self) -> bool:
        """Whether a segment was archived with queue offsets."""
        return any(log.queues for _, log in self._logs())

    @property
    def latest_ms(self) -> int:
        """The last time at which the archiving of a segment began, epoch ms; 0: there is none."""
        return max((log.last_ms for _, log in self._logs()), default=0)

    @property
    def topics(self) -> frozenset[str]:
        """The topics of the stores with one topic."""
        return frozenset(topic for store in self.stores if (topic := self.topic_of(store)) is not None)

    def topic_of(self, store: str) -> str | None:
        """Return the topic of all messages of a store; None: it may have messages of many topics."""
        parts = self._parts(store)
        return topic_of_store(store) if parts and parts[0][1].is_columnar else None

    def of(self, store: str, begin: int = 0) -> Iterator[ArchivedSegment]:
        """Yield the archived segments of `store` that end behind offset `begin`, by their first offset."""
        return (segment for segment in self.of_log(store, begin) if isinstance(segment, ArchivedSegment))

    def of_log(self, store: str, begin: int = 0) -> Iterator[Segment]:
        """Yield the segments of `store` that end behind offset `begin`, archived and linked, by their first offset."""
        parts = [self._part(catalog, log, begin) for catalog, log in self._parts(store) if log.end > begin]
        return heapq.merge(*parts, key=_place)

    def first(self, store: str) -> ArchivedSegment | None:
        """Return the first archived segment of `store`; None: it has none."""
        return next(self.of(store), None)

    def last(self, store: str) -> ArchivedSegment | None:
        """Return the last archived segment of `store`; None: it has none."""
        end = self.end(store)
        newest = self.holding(store, end - 1) if end else None
        return newest if newest is None or isinstance(newest, ArchivedSegment) else None

    def end(self, store: str) -> int:
        """Return the offset after the last segment of `store`, and after its replaced offsets; 0: it has none."""
        return max(self._end(store), self.state.expired.replaced.end(store))

    def _end(self, store: str) -> int:
        end = max([log.end for _, log in self._parts(store)], default=0)
        if end <= self._expired(store) or (store in self.state.retired and self.segment(store, end - 1) is None):
            # the last row is retired
            return max((segment.end for segment in self.of_log(store)), default=0)
        return end

    def bytes_an_offset(self, store: str) -> float | None:
        """Return the mean bytes of an offset in the segments of `store`; None: it has none."""
        return next((log.object_bytes / (log.end - log.start) for _, log in self._parts(store)[-1:]), None)

    def first_ms(self, store: str) -> int | None:
        """Return a time before which no archiving of a segment of `store` began, epoch ms; None: it has none."""
        return min((log.first_ms for _, log in self._parts(store)), default=None)

    def holding(self, store: str, offset: int) -> ArchivedSegment | None:
        """Return the archived segment of `store` that has `offset` of its log; None: there is none."""
        segment = self.segment(store, offset)
        return segment if isinstance(segment, ArchivedSegment) else None

    def segment(self, store: str, offset: int) -> Segment | None:
        """Return the segment of `store`, archived or linked, that has `offset` of its log; None: there is none.

        At most one ranged read.
        """
        return self._listed(store, offset, self._expired(store))

    def at(self, store: str, start: int) -> ArchivedSegment | None:
        """Return the archived segment of `store` that begins at offset `start`; None: there is none."""
        segment = self.holding(store, start)
        return segment if segment is not None and segment.start == start else None

    def overlapping(self, store: str, start: int, end: int) -> ArchivedSegment | None:
        """Return the last archived segment of `store` with an offset from `start` to before `end`; None: none."""
        last = None
        for segment in self.of(store, start):
            if segment.start >= end:
                break
            last = segment
        return last

    def after(self, store: str, offset: int) -> ArchivedSegment | None:
        """Return the first archived segment of `store` that begins after `offset`; None: there is none."""
        return next((segment for segment in self.of(store, offset) if segment.start > offset), None)

    def named(self, names: Iterable[str]) -> list[ArchivedSegment]:
        """Return the archived segments whose objects have one of `names`, in the order of `names`."""
        segments = [self._named(name) for name in dict.fromkeys(names)]
        return [segment for segment in segments if segment is not None and segment.end > self._expired(segment.store)]

    def names_object(self, name: str) -> bool:
        """Return whether the log names an object: a catalog, or that of a segment.

        A segment that expired counts until its catalog is merged, because the object is deleted some time after that.
        """
        return name in self.state.catalogs or self._named(name) is not None

    def given_up(self, store: str, offset: int) -> LostRange | None:
        """Return the last range of a lost catalog that may have had the segment with `offset` of `store`; None: none.

        Another segment may have the offset, archived again since then.
        """
        ranges = self.state.given_up.get(store, ())
        is_kept = offset >= self._expired(store)
        return next((lost for lost in reversed(ranges) if is_kept and lost.begin <= offset < lost.end), None)

    def retired(self) -> Iterator[Segment]:
        """Yield the segments in catalogs that are retired: a read for each group with one."""
        for stored in self.state.catalogs.values():
            for store, start in self.state.retired_in(stored):
                row = self._row_at(stored, store, start)
                if row.start == start:
                    yield row

    def change(self, added: Sequence[ArchivedSegment], removed: Iterable[ArchivedSegment] = ()) -> dict[str, Any]:
        """Return the fields of a record that adds segments and retires others, which `at` has returned.

        The added ones are in catalogs in the record. One of these replaces the newest such catalog if there is room, so
        that there are only few. No request for that.
        """
        retire = tuple(RetiredSegment(segment.name, *segment.place) for segment in removed)
        if not added:
            return {"retire": retire}
        rows, gone, taken = list[Segment](added), {segment.place for segment in retire}, list[str]()
        newest = next(reversed(self.state.inline), None)
        if newest is not None and len(rows) + newest.rows.count <= MOST_INLINE:
            rows += [row for row in self._unretired(newest, self.rows(newest)) if row.place not in gone]
            taken.append(newest.name)
        rows.sort(key=_place)
        catalogs = [inline_catalog(rows[at : at + MOST_INLINE]) for at in range(0, len(rows), MOST_INLINE)]
        return {"retire": retire, "catalogs": tuple(catalogs), "remove": tuple(taken)}

    def has_expired(self, catalog: StoredCatalog) -> bool:
        """Return whether a segment of a catalog has expired.

        At most one ranged read for each log with a segment on both sides of its horizon.
        """
        logs = [log for log in catalog.rows.logs if log.start < self._expired(log.store)]
        return any(log.end <= self._expired(log.store) for log in logs) or any(
            self._row_at(catalog, log.store, log.start).end <= self._expired(log.store) for log in logs
        )

    def prefetch(self, places: Iterable[tuple[str, int]]) -> None:
        """Read the groups for `places` (store and offset) that are in no cache, several at the same time."""
        wanted: dict[tuple[str, int], tuple[StoredCatalog, Group]] = {}
        for store, offset in places:
            for stored, log in self._parts(store):
                if log.start <= offset < log.end and stored.data is None:
                    number = stored.rows.group_of(store, offset)
                    group = stored.rows.groups[number]
                    if self.cache.peek(self._key(stored, group)) is None:
                        wanted[stored.name, number] = stored, group
        reads = [partial(self._data, *place) for place in wanted.values()]
        for at in range(0, len(reads) if len(reads) > 1 else 0, _AT_ONCE):
            side_by_side(reads[at : at + _AT_ONCE])

    # Catalogs

    def _logs(self) -> Iterator[tuple[StoredCatalog, LogRows]]:
        return ((catalog, log) for catalog in self.state.catalogs.values() for log in catalog.rows.logs)

    def _parts(self, store: str) -> Sequence[tuple[StoredCatalog, LogRows]]:
        return self.state.listed_logs.get(store, ())

    def _expired(self, store: str) -> int:
        return self.state.expired.segments.get(store, 0)

    @cached_property
    def _prefixes(self) -> dict[str, str]:
        return {store_prefix(store): store for store in self.state.listed_logs}

    def _named(self, name: str) -> ArchivedSegment | None:
        parts = name.removeprefix(SEGMENTS_PREFIX).split("/")
        store = self._prefixes.get(f"{SEGMENTS_PREFIX}{parts[0]}/")
        if store is None or len(parts) != 3 or not parts[1].isdecimal():
            return None
        listed = self._listed(store, int(parts[1]), 0)
        return listed if isinstance(listed, ArchivedSegment) and listed.name == name else None

    def _listed(self, store: str, offset: int, expired: int) -> Segment | None:
        parts = [stored for stored, log in self._parts(store) if log.start <= offset < log.end]
        # first those that need no read
        for stored in sorted(parts, key=_is_object):
            row = self._row_at(stored, store, offset)
            if offset < row.end > expired and self._is_unretired(stored, row):
                return row
        return None

    def _row_at(self, stored: StoredCatalog, store: str, offset: int) -> Segment:
        """Return the last segment of `store` in a catalog that begins at `offset` or before.

        Raises `CorruptFile` if there is none: the log of the directory begins with one.
        """
        rows = self._group(stored, stored.rows.group_of(store, offset))
        at = rows.before(stored.rows.numbers[store], offset) - 1
        if at < 0 or rows.places[at][0] != stored.rows.numbers[store]:
            raise CorruptFile(stored.name, "a group of a catalog lacks a segment that its directory has")
        return rows.row(at)

    def _part(self, stored: StoredCatalog, log: LogRows, begin: int) -> Iterator[Segment]:
        """Yield the shown segments of one log in one catalog that end behind `begin`."""
        first, last = stored.rows.group_of(log.store, begin), stored.rows.group_of(log.store, log.end)
        number = stored.rows.numbers[log.store]
        for rows in self._groups(stored, first, last + 1):
            shown = self._shown(stored, rows.of_log(number, begin))
            yield from (segment for segment in shown if segment.end > begin)

    def _shown(self, stored: StoredCatalog, segments: Iterable[Segment]) -> Iterator[Segment]:
        expired = self.state.expired.segments
        unretired = self._unretired(stored, segments)
        return (segment for segment in unretired if segment.end > expired.get(segment.store, 0))

    def _unretired(self, stored: StoredCatalog, segments: Iterable[Segment]) -> Iterator[Segment]:
        return (segment for segment in segments if self._is_unretired(stored, segment))

    def _is_unretired(self, stored: StoredCatalog, segment: Segment) -> bool:
        of_store = self.state.retired.get(segment.store)
        return of_store is None or not stored.is_before(of_store.get(segment.start, 0))

    def rows(self, stored: StoredCatalog) -> Iterator[Segment]:
        """Yield all segments that a catalog lists, also retired and expired ones."""
        for rows in self._groups(stored, 0, len(stored.rows.groups)):
            yield from rows.segments()

    def _groups(self, stored: StoredCatalog, first: int, end: int) -> Iterator[CatalogRows]:
        """Yield the rows of groups [`first`, `end`). The last one is kept. One that is read alone is cached, too."""
        groups = stored.rows.groups
        while first < end:
            if end - first == 1 or self._last.get(stored.name, (-1,))[0] == first:
                yield self._group(stored, first)
                first += 1
                continue
            begin = groups[first].position
            behind = bisect_right(groups, begin + _READ_BYTES, first + 1, end, key=_end_of)
            length = groups[behind - 1].position + groups[behind - 1].length - begin
            data = self._read(stored, begin, length)
            for number in range(first, behind):
                at = groups[number].position - begin
                rows = self._decoded(stored, groups[number], data[at : at + groups[number].length])
                self._last[stored.name] = number, rows
                yield rows
            first = behind

    def _group(self, stored: StoredCatalog, number: int) -> CatalogRows:
        known = self._last.get(stored.name)
        if known is not None and known[0] == number:
            return known[1]
        group = stored.rows.groups[number]
        rows = self._decoded(stored, group, self._data(stored, group))
        self._last[stored.name] = number, rows
        return rows

    def _data(self, stored: StoredCatalog, group: Group) -> bytes:
        if stored.data is not None:
            return stored.data[group.position : group.position + group.length]
        key = self._key(stored, group)
        if (data := self.cache.get(key)) is None:
            data = self._read(stored, group.position, group.length)
            # only sound bytes are cached
            self._decoded(stored, group, data)
            self.cache.put(key, data, len(data))
        return data

    def _key(self, stored: StoredCatalog, group: Group) -> tuple[str, str, int]:
        assert self.storage is not None
        return self.storage.uri, stored.name, group.position

    def _decoded(self, stored: StoredCatalog, group: Group, data: bytes) -> CatalogRows:
        return decode_group(data, group, stored.rows.logs, stored.name)

    def _read(self, stored: StoredCatalog, position: int, length: int) -> bytes:
        if stored.data is not None:
            return stored.data[position : position + length]
        assert self.storage is not None, "a state with catalogs needs its storage"
        try:
            data = self.storage.get_range(stored.name, position, length)
        except ObjectNotFound as error:
            problem = "the log names this catalog, but the storage does not have it"
            raise MissingCatalog(stored.name, problem) from error
        except InvalidArgument as error:
            problem = f"is shorter than the log says ({error})"
            raise CorruptFile(stored.name, problem, expected=stored.size_bytes) from error
        self.reads.append(len(data))
        return data


class MissingCatalog(CorruptFile):
    """A catalog is not in the storage. A merge may have removed it since the state was read."""


def inline_catalog(segments: Sequence[Segment]) -> StoredCatalog:
    """Return a catalog of 1 to `MOST_INLINE` sorted segments, which is no object."""
    pieces: list[bytes] = []
    writer = CatalogWriter(pieces.append)
    for segment in segments:
        writer.add(segment)
    writer.finish()
    data = b"".join(pieces)
    return StoredCatalog(catalog_name(), len(data), max(s.published_ms for s in segments), data=data)


def names_object(storage: Storage) -> Callable[[LogState, str], bool]:
    """Return a function that says whether a state names an object itself, or by a catalog in `storage`. One thread."""
    known = Segments(LogState(), storage)

    def is_named(state: LogState, name: str) -> bool:
        nonlocal known
        # one for each state, which keeps the groups that were read
        known = known if known.state is state else Segments(state, storage)
        return state.names(name) or known.names_object(name)

    return is_named
