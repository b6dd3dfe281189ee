"""`IndexReader`: answers lookups over a storage, a root beside its writer, both, or several indexes. It never writes.

It answers as of one position of each storage's log. It reads new log records after `refresh_interval_s`, and when an
object that the log names is missing. In that case it repeats the lookup, a bounded number of times. Several indexes are
opened and refreshed in parallel.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack, cast

from tiered_index.clock import Clock, SystemClock
from tiered_index.config import IndexConfig, checked_config
from tiered_index.errors import (
    BudgetExceeded,
    ConfigError,
    CorruptFile,
    InvalidArgument,
    NotAnIndex,
    SchemaMismatch,
    StorageError,
    TieredIndexError,
)
from tiered_index.format.schema import Schema
from tiered_index.kernels import compiled_views
from tiered_index.service.catalog.catalog import Catalog, Handle
from tiered_index.service.cold.caches import Caches
from tiered_index.service.cold.disk_cache import DiskCache
from tiered_index.service.cold.path import RangeReadPool
from tiered_index.service.files.compacted import CompactedFile
from tiered_index.service.files.view import Viewed, WholeView
from tiered_index.service.lifecycle.segment_archive import SegmentArchive
from tiered_index.service.log.records import IndexDescriptor, max_positions
from tiered_index.service.log.session import Writer
from tiered_index.service.log.state import LogState
from tiered_index.service.lookup.budget import LookupLimits
from tiered_index.service.lookup.lookups import Lookups, config_of, opened_ones
from tiered_index.service.lookup.query import Logs, QueryEngine
from tiered_index.service.lookup.scan import Files, Indexes
from tiered_index.service.reading.parts import ReaderParts, SourcedFile, hand_over, sourced_schema
from tiered_index.service.reading.prefix import Children
from tiered_index.service.reading.refreshed import Reading, Refreshed, wait_for
from tiered_index.service.reading.root_view import UnsealedView
from tiered_index.service.reading.unopened import Openings, Unopened, close_view
from tiered_index.service.reading.views import IndexView
from tiered_index.service.root import CACHE, Root
from tiered_index.storage.base import Storage
from tiered_index.storage.context import UNBOUNDED, deadline_at, remaining_s, request_context
from tiered_index.storage.disk import Disk
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.pools import DaemonPool, NoThread, close_until_s
from tiered_index.types import ItemT, OpenedT, shortened

if TYPE_CHECKING:
    from tiered_index.config import IndexSettings


class _Indexes(Indexes):
    """The indexes that a reader of several has at the time of each access."""

    def __init__(self, views: Callable[[], Sequence[IndexView]], patience_s: float) -> None:
        self._views, self._patience_s = views, patience_s

    @property
    def patience_s(self) -> float:
        """As `Indexes.patience_s`."""
        return self._patience_s

    def __len__(self) -> int:
        return len(self._views())

    def away(self, source: str) -> TieredIndexError | None:
        """As `Indexes.away`."""
        return next((view.away for view in self._views() if view.storage.uri == source), None)

    def leave(self, source: str, are_over: Callable[[], bool]) -> None:
        """As `Indexes.leave`."""
        next(view for view in self._views() if view.storage.uri == source).leave(are_over)


class _Archives(Mapping[str | None, SegmentArchive]):
    """The segment archives of the indexes that the reader has at the time of each access."""

    def __init__(self, now: Callable[[], dict[str | None, SegmentArchive]]) -> None:
        self._now = now

    def __getitem__(self, source: str | None) -> SegmentArchive:
        return self._now()[source]

    def __iter__(self) -> Iterator[str | None]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


class IndexReader(Lookups[ItemT]):
    """Answers lookups over one or more indexes that other processes write. Open it with `IndexReader.open`.

    Several indexes must have the same schema. Their entries have one answer order, and the `source` of an entry is the
    URI of its index. Any thread may call its methods. In a forked child they raise `IndexClosed`: open a reader there.
    """

    _called = "reader"

    def __init__(
        self,
        config: IndexConfig,
        *,
        clock: Clock | None = None,
        storage: Storage | None = None,
        storages: Sequence[str] | None = None,
        with_writers: bool = False,
    ) -> None:
        """Open for reading; prefer `IndexReader.open`. `with_writers`: also read the data for `writers`."""
        config = checked_config(config)
        if config.root is None and config.storage is None and storage is None and storages is None:
            raise ConfigError("neither storage nor root is set: give a storage URI, a root, or both")
        if storages is not None and (config.root is not None or storage is not None):
            raise InvalidArgument("leave the root out: several storages are read without one")
        self.config = config
        self._clock = clock or SystemClock()
        self._storages = storages
        self._with_writers = with_writers
        self._shared: Storage | None = None
        self._unopened: Unopened | None = None
        self._growing = threading.Lock()
        self._parts = ReaderParts(
            Caches(config.block_cache_bytes, config.directory_cache_bytes),
            _disk_cache(config),
            RangeReadPool(config.query_threads),
            DaemonPool(config.query_threads, "tiered-index-log"),
        )
        with contextlib.ExitStack() as undo:
            undo.callback(self._parts.close)
            if storages is None:
                self._views = self._open_views(storage, undo)
            else:
                patience_s = config.source_timeout_s
                opening = [
                    (uri, partial(self._open_view, config.changed(storage=uri), None, patience_s)) for uri in storages
                ]
                self._views = self._open_several(f"the list of {len(opening)} indexes", lambda: opening, undo)
            self._schema = _common_schema(self._views)
            names = {view.number: view.storage.uri for view in self._views}
            if len(names) < len(self._views):
                raise InvalidArgument(
                    "the same index is given twice, give it once: "
                    + ", ".join(view.storage.uri for view in self._views)
                )
            item_type = config.item_type or self._schema.item_type()
            self._several = storages is not None or self._shared is not None
            self._sourced = sourced_schema(self._schema)
            self._prices = config.prices
            self._catalogs: Sequence[Catalog] = tuple(view.catalog for view in self._views)
            self._cold_paths = tuple(view.cold for view in self._views)
            self._engine = QueryEngine(
                self._sourced if self._several else self._schema,
                item_type,
                config.query_threads,
                self._prices,
                names if self._several else None,
                _Indexes(lambda: self._views, config.source_timeout_s) if self._several else None,
                self._logs,
            )
            opened_ones.add(self)
            undo.pop_all()

    @classmethod
    def open(
        cls,
        storage: str | Sequence[str] | None = None,
        *,
        root: str | Path | None = None,
        config: IndexConfig | None = None,
        clock: Clock | None = None,
        storage_backend: Storage | None = None,
        timeout_s: float | None = None,
        item_type: type[OpenedT] | None = None,
        environment: bool = True,
        **settings: Unpack[IndexSettings],
    ) -> IndexReader[OpenedT]:
        """Open an index by its storage URI, by a writer's root, or by both.

        A list of URIs, or a prefix above several indexes, is read as one index. A prefix is listed one level deep, at
        opening and at each refresh. The bounds of the caches apply to all indexes together. If one index answers, the
        reader opens. Lookups report the others in `failed`, and each refresh tries to open them again.

        `timeout_s` bounds the opening in seconds; without it the time-outs of the storages apply. `item_type` is the
        class of the entries. `settings` are fields of `IndexConfig` by name, such as `cache_dir="/data/cache"`;
        docs/settings.md lists all. The environment supplies settings that you do not give, unless `environment` is
        false.

        Raises `NotAnIndex`, `StorageUnavailable`, `StorageMisconfigured`, `CorruptFile`, `SchemaMismatch`,
        `ConfigError`, `InvalidArgument`, and `BudgetExceeded` after `timeout_s`.
        """
        limits = LookupLimits(timeout_s=timeout_s)
        several = None
        if isinstance(storage, str | Path) and Root(Path(storage), Disk()).marker_path.exists():
            raise ConfigError(
                f"storage must be a URI, but {str(storage)!r:.80} is the root of an index: give it as root="
            )
        for kind, name in ((IndexConfig, "config"), (Storage, "storage_backend")):
            if isinstance(storage, kind):
                raise ConfigError(
                    f"storage is a URI or a list of URIs, not {type(storage).__name__}; did you mean {name}=?"
                )
        if storage is not None and not isinstance(storage, str):
            several = list(storage) if isinstance(storage, Sequence) else []
            if not several or not all(isinstance(uri, str) and uri for uri in several):
                near = f"; did you mean {storage.absolute().as_uri()}?" if isinstance(storage, Path) else ""
                raise InvalidArgument(f"storage is a URI or a list of URIs, not {storage!r:.80}{near}")
            storage = None
        loaded = config_of(config, environment, settings, storage=storage, root=root, item_type=item_type)

        made = cast(type[IndexReader[OpenedT]], cls)

        def make() -> IndexReader[OpenedT]:
            with deadline_at(limits.deadline_s()):
                return made(loaded, clock=clock, storage=storage_backend, storages=several)

        # in a copy: an interrupted opening can't leave its deadline to later calls
        return copy_context().run(make)

    def refresh(self) -> LogState:
        """Read new log records. Return the state of the log; for several indexes that of the first.

        All indexes are read even if one fails. Raises `StorageUnavailable`, `CorruptFile`, `IndexClosed`, and
        `BudgetExceeded` at a deadline of the caller's context. Any thread.
        """
        self._check_open()
        if not self._several:
            return self._views[0].read_on(1.0)
        left_s = remaining_s()
        until_s = None if left_s is None else time.monotonic() + left_s
        readings = [(one, one.new_refresh(self._parts.begin_or_run)) for one in self._refreshed()]
        # all are read, even if one fails
        late = wait_for(readings, until_s, self._parts.threads, raises=False)
        for one, reading in readings:
            if one in late:
                raise one.away or BudgetExceeded(f"timeout_s was reached while reading {one.name}")
            reading.ends.result()
        return self._views[0].log_state

    def files(self) -> list[Handle]:
        """Return the handles of all files, local files in their current state."""
        self._check_process()
        handles = [] if self._unopened is None else self._unopened.problems(self._clock.monotonic_s())
        handles += [handle for view in self._views for handle in view.all_handles()]
        self._check_open()
        return sorted(handles, key=lambda handle: (handle.sequence, handle.file_id))

    def durable_positions(self) -> dict[str, int]:
        """Return the position of every source before which all of its entries are in files; the greatest of indexes."""
        files = self.files()
        positions: dict[str, int] = {}
        for state in self._log_states():
            positions = max_positions(positions, state.positions)
        # positions of entries that are not uploaded are only in the root's files
        for file in files:
            if isinstance(file, UnsealedView):
                positions = max_positions(positions, file.journal.positions)
            elif isinstance(file, CompactedFile) and file.is_local:
                positions = max_positions(positions, dict(file.metadata().source_positions))
        return positions

    @property
    def sources(self) -> tuple[str, ...]:
        """The URIs of the indexes that are open. More may appear later: below a prefix, or that did not answer."""
        return tuple([view.storage.uri for view in self._views])

    def writers(self) -> dict[str, Writer | None]:
        """Return the current or last writer of each index, by URI; None: no writer, or no response from the storage.

        The call costs at least two requests per index.
        """
        self._check_open()

        def look(view: IndexView) -> Writer | None:
            with contextlib.suppress(StorageError):
                return view.writer()
            return None

        views = self._views
        calls = [(f"reading the lease of {view.storage.uri}", partial(look, view)) for view in views]
        found = self._parts.in_time(calls)
        return {view.storage.uri: writer for view, writer in zip(views, found, strict=True)}

    @property
    def genesis(self) -> IndexDescriptor:
        """The id, layout and offset space with which the index was created. Only for one index."""
        return self._only.genesis

    @property
    def storage(self) -> MeteredStorage:
        """The storage, metered. Only for one index."""
        return self._only.storage

    @property
    def storages(self) -> list[MeteredStorage]:
        """The storage of each index, metered, in the order of `sources`."""
        self._check_process()
        return [view.storage for view in self._views]

    @property
    def segment_archive(self) -> SegmentArchive:
        """The archived segments, for reading. Only for one index."""
        return self._archive_of(self._only)

    @property
    def segment_archives(self) -> Mapping[str | None, SegmentArchive]:
        """The archived segments of each index, by the `source` of its entries: its URI, or None for one index.

        Indexes that appear below a prefix later are included.
        """
        self._check_process()
        return _Archives(lambda: {self._source_of(view): self._archive_of(view) for view in self._views})

    def _source_of(self, view: IndexView) -> str | None:
        return view.storage.uri if self._several else None

    def _archive_of(self, view: IndexView) -> SegmentArchive:
        refresh = partial(self._read_log, view.storage.uri)
        return SegmentArchive(view.storage, lambda: view.log_state, refresh, tables=view.cold.caches.segments)

    def __repr__(self) -> str:
        places = [*(self._storages or ()), *([self.config.root, self.config.storage] if self._storages is None else [])]
        told = ", ".join(str(place) for place in places if place is not None)
        return shortened(f"<{type(self).__name__} {'open' if self._refused is None else 'closed'}: {told}>")

    def close(self) -> None:
        """Release threads and connections. Idempotent."""
        if not self._refuse_as_closed():
            return
        until_s = close_until_s()
        with contextlib.ExitStack() as each:
            if self._shared is not None:
                each.callback(self._shared.close)
            if self._unopened is not None:
                each.callback(self._unopened.close, until_s)
            for view in self._views:
                each.callback(view.close)
            each.callback(self._parts.close, until_s)
            self._engine.close(until_s)

    @property
    def _only(self) -> IndexView:
        self._check_process()
        self._check_one_index()
        return self._views[0]

    def _check_one_index(self) -> None:
        if self._several:
            among = self._views[0].storage.uri if len(self._views) == 1 else f"{len(self._views)} indexes"
            raise InvalidArgument(
                f"this needs a reader of one index, but it was opened for several ({among}): open the index by its URI"
            )

    def _open_views(self, backend: Storage | None, undo: contextlib.ExitStack) -> tuple[IndexView, ...]:
        """Return the view of the index. If the storage itself has no index, return the views of its children."""
        config = self.config
        if config.root is not None:
            if backend is not None:
                undo.callback(backend.close)
            view = self._open_view(config, backend)
            undo.callback(view.close)
            return (view,)
        shared = backend or config.open_storage()
        undo.callback(shared.close)
        opening = (f"opening {shared.uri}: its log was not read by then", partial(self._open_view, config, shared))
        try:
            [view] = self._parts.in_time([opening], close_view)
            undo.callback(view.close)
            return (view,)
        except NotAnIndex as error:
            self._shared = shared
            open_view = partial(self._open_view, config, patience_s=config.source_timeout_s)
            views = self._open_several(shared.uri, Children(shared, config.prices, open_view), undo)
            if not views:
                raise NotAnIndex(f"{error}, and no index is directly below it: check the URI") from None
            return views

    def _open_view(self, config: IndexConfig, backend: Storage | None, patience_s: float = math.inf) -> IndexView:
        return IndexView(
            config, self._clock, backend, self._parts, with_writer=self._with_writers, patience_s=patience_s
        )

    def _open_several(self, name: str, openings: Openings, undo: contextlib.ExitStack) -> tuple[IndexView, ...]:
        """Open indexes in parallel. If one of them answers, those that do not are opened later.

        Raises the first error if none can be opened, and any error that another try can't mend.
        """
        [found] = self._parts.in_time([(f"listing the objects below {name}", lambda: list(openings()))])
        if twice := [uri for uri, count in Counter(uri for uri, _ in found).items() if count > 1]:
            raise InvalidArgument("the same index is given twice: " + ", ".join(twice))
        readings = [Reading(self._parts.begin_or_run, open_view) for _, open_view in found]
        begun = [reading.ends for reading in readings]
        late: dict[str, Future[IndexView | None]] = {}
        errors: dict[str, TieredIndexError] = {}
        views: list[tuple[str, IndexView]] = []
        try:
            self._wait_for_first(readings)
            for (uri, _), opening in zip(found, begun, strict=True):
                try:
                    if not opening.done():
                        late[uri] = opening
                    elif (view := opening.result()) is not None:
                        views.append((uri, view))
                except (StorageError, CorruptFile) as error:
                    errors[uri] = error
            if not views:
                for first in errors.values():
                    raise first
                for uri in late:
                    raise BudgetExceeded(f"timeout_s was reached while opening {uri}: its log was not read by then")
        except BaseException:  # also an interrupted wait
            for opening in begun:
                if not opening.cancel():
                    opening.add_done_callback(partial(hand_over, close_view))
            raise
        for _, view in views:
            undo.callback(view.close)
        if late or errors or self._storages is None:
            uris = {uri for uri, _ in views}
            self._unopened = Unopened(name, self.config, self._clock, openings, self._adopt, uris, late, errors)
            undo.callback(self._unopened.close)
        return tuple([view for _, view in views])

    def _wait_for_first(self, readings: Sequence[Reading[IndexView | None]]) -> None:
        """Wait for all openings that get responses, for half of the time left; then until one is open."""
        left_s, patience_s = remaining_s(), self.config.source_timeout_s
        half_s, end_s = (math.inf if left_s is None else time.monotonic() + left_s * share for share in (0.5, 1))
        openings = [one.ends for one in readings]
        waiting, silent = set(openings), set[Future[IndexView | None]]()
        while waiting and (now_s := time.monotonic()) < end_s:
            is_patient = now_s < half_s and not waiting <= silent
            if not is_patient and any(one.done() and one.exception() is None and one.result() for one in openings):
                return
            until_s = half_s if now_s < half_s else end_s
            waiting = wait(waiting, min(patience_s / 4, until_s - now_s), FIRST_COMPLETED).not_done
            for one in readings:
                if one.ends in waiting - silent and one.is_silent(patience_s):
                    # those that wait for a thread get one
                    self._parts.threads.replace_thread(one.ends)
                    silent.add(one.ends)

    def _adopt(self, view: IndexView) -> None:
        """Include an index from now on. Raises `SchemaMismatch`, `ConfigError`."""
        try:
            _common_schema((*self._views, view))
            with self._growing:
                self._check_open()
                if any(view.number == other.number for other in self._views):
                    raise ConfigError(
                        f"{view.storage.uri} has the same id as an index beside it, so it is a copy: remove one"
                    )
                views = (*self._views, view)
                # before lookups see its files
                self._engine.read_of({one.number: one.storage.uri for one in views})
                self._catalogs = tuple(one.catalog for one in views)
                self._cold_paths = tuple(one.cold for one in views)
                self._views = views
                self._check_open()
        except BaseException:
            view.close()
            raise

    def _log_states(self) -> Sequence[LogState]:
        return [view.log_state for view in self._views]

    def _has_unopened(self) -> bool:
        return self._unopened is not None and self._unopened.is_waiting

    def _logs(self) -> Logs:
        states = [(self._source_of(view), view.log_state) for view in self._views]
        return Logs.of([(source, state.lost, state.expired) for source, state in states])

    def _read_log(self, uri: str) -> LogState:
        self._check_open()
        return next(view for view in self._views if view.storage.uri == uri).read_on()

    def _whole_view(self, topic: str, key: str) -> WholeView | None:
        # a context that counts or bounds requests needs a search file by file
        if self._several or compiled_views() is None or request_context.get() is not UNBOUNDED:
            return None
        if self._refused is not None:
            return None
        whole = self._views[0].whole(self._clock.monotonic_s())
        return None if self._refused is not None else whole

    def _ready(self) -> Files | None:
        begun_s = self._clock.monotonic_s()
        for one in self._refreshed():
            if one.asks_before(begun_s):
                return None
        return self._files(begun_s)

    def _refreshed(self) -> Sequence[Refreshed]:
        return self._views if self._unopened is None else (*self._views, self._unopened)

    def _begin(self) -> Files:
        """Run due refreshes in parallel.

        A lookup with a deadline waits for half of its time. The refreshes then continue in the background.
        """
        begun_s = self._clock.monotonic_s()
        left_s = remaining_s()
        until_s = None if left_s is None else time.monotonic() + left_s / 2
        own: set[Refreshed] = set()
        # twice, because a refresh of another thread may have begun before this lookup
        for _ in range(2):
            waited: list[tuple[Refreshed, Reading[object]]] = []
            for one in self._refreshed():
                try:
                    found = None if one in own else one.due_refresh(begun_s, self._parts.begin)
                except NoThread:
                    own.add(one)
                    # a lookup with a deadline uses the present state, and the next lookup tries again
                    if until_s is None:
                        one.refresh_due()
                    continue
                if found is None:
                    continue
                refresh, is_own = found
                if one.away is not None:
                    # it continues in the background, and takes no thread from the others
                    self._parts.threads.replace_thread(refresh.ends)
                    continue
                if is_own:
                    own.add(one)
                if is_own or until_s is None or one.fails(begun_s):
                    waited.append((one, refresh))
            wait_for(waited, until_s, self._parts.threads)
        return self._files(begun_s)

    def _files(self, begun_s: float) -> Files:
        # before the views, so that an index is in at least one of both
        unopened = [] if self._unopened is None else self._unopened.problems(begun_s)
        views = self._views
        # before the handles, which may then be of a later state of the log, never of an earlier one
        freshness = tuple([seen for view in views if (seen := view.seen()) is not None])
        return Files(
            partial(self._handles, views, unopened, begun_s), freshness, partial(self._viewed, views[0], begun_s)
        )

    def _viewed(self, view: IndexView, begun_s: float, second_min: int, second_max: int, stored: bool) -> Viewed:
        """Return the files of a log that can't be read, and a view of the others (None: there is none)."""
        if not stored or self._several or compiled_views() is None:
            return (), None
        found = view.viewed(begun_s)
        return found if self._refused is None else ((), None)

    def _handles(
        self, views: Sequence[IndexView], unopened: list[Handle], begun_s: float, second_min: int, second_max: int
    ) -> Sequence[Handle]:
        if not self._several:
            found = views[0].handles(second_min, second_max, begun_s)
        else:
            found = [
                SourcedFile(handle, view, view.number, self._schema, self._sourced)
                for view in views
                for handle in view.handles(second_min, second_max, begun_s)
            ]
            found += unopened
        # closing empties the catalogs, so `found` may be incomplete
        self._check_open()
        return found


def _disk_cache(config: IndexConfig) -> DiskCache | None:
    """Return the disk cache in `cache_dir` if that is set, else the root's, read-only, else None."""
    if config.cache_dir is not None:
        return DiskCache(config.cache_dir, config.cache_max_bytes)
    if config.root is not None:
        return DiskCache(config.root / CACHE, config.cache_max_bytes, read_only=True)
    return None


def _common_schema(views: Sequence[IndexView]) -> Schema:
    first = views[0]
    for view in views[1:]:
        if view.schema != first.schema:
            raise SchemaMismatch(
                f"{view.storage.uri} stores {view.schema.name} entries, {first.storage.uri} {first.schema.name}"
            )
    return first.schema
