"""`IndexReader`: answers lookups over a storage, a root beside its writer, both, or several indexes. It never writes.

It answers as of one position of each storage's log. It reads new log records after `refresh_interval_s`, and when an
object that the log names is missing. In that case it repeats the lookup, a bounded number of times. Several indexes are
opened and refreshed in parallel.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import copy_context
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Unpack, cast

from tiered_index.base.call import Call, active_context, deadline_at, remaining_s
from tiered_index.base.clock import Clock, SystemClock
from tiered_index.base.locks import collecting
from tiered_index.base.threads import DaemonPool, close_until_s, have_ended
from tiered_index.config import IndexConfig, checked_config
from tiered_index.errors import (
    BudgetExceeded,
    ConfigError,
    FolderDenied,
    InvalidArgument,
    NotAnIndex,
    StorageError,
    TieredIndexError,
)
from tiered_index.format.topic_documents import TopicDocument, newest_documents, newest_of, revised
from tiered_index.service.log.records import IndexDescriptor, max_positions
from tiered_index.service.log.session import WriterStatus
from tiered_index.service.log.state import LogState
from tiered_index.service.read.answers.budget import LookupBudget, LookupLimits
from tiered_index.service.read.caches.disk import DiskCache
from tiered_index.service.read.caches.store import ReadCache
from tiered_index.service.read.files.cold_path import RangeReadPool
from tiered_index.service.read.files.compacted import CompactedFile
from tiered_index.service.read.files.root_view import UnsealedView
from tiered_index.service.read.files.snapshot import Handle
from tiered_index.service.read.index_view import IndexView
from tiered_index.service.read.lookups import Lookups, config_of, opened_ones
from tiered_index.service.read.parts import ReaderParts
from tiered_index.service.read.poller import PolledState
from tiered_index.service.read.prefix import Child, children_of
from tiered_index.service.read.query import QueryEngine
from tiered_index.service.read.scan import Begun, LookupFiles, LookupRun, Pass, ScanT
from tiered_index.service.read.segments.archive import SegmentArchive
from tiered_index.service.read.segments.places import RowPlaces, alive
from tiered_index.service.read.several import Listed, Several
from tiered_index.service.read.several_query import SeveralEngine
from tiered_index.service.root import CACHE, Root
from tiered_index.storage.base import Storage
from tiered_index.storage.disk import Disk
from tiered_index.storage.metering import MeteredStorage
from tiered_index.types import ItemT, OpenedT, shortened

if TYPE_CHECKING:
    from tiered_index.config import IndexSettings


class _Archives(Mapping[str | None, "SegmentArchive"]):
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
        # also here: CPython finds an attribute of the object faster than the default of the class
        self._refused, self._locks = None, []
        self._clock = clock or SystemClock()
        self._storages = storages
        self._with_writers = with_writers
        self._shared: Storage | None = None
        self._several: Several | None = None
        with collecting(self._locks):
            self._parts = ReaderParts(
                ReadCache(config.read_cache_bytes),
                _disk_cache(config),
                RangeReadPool(config.query_threads),
                DaemonPool(config.query_threads, "tiered-index-log"),
            )
        with collecting(self._locks), contextlib.ExitStack() as undo:
            undo.callback(self._parts.close)
            if storages is None:
                views = self._open_views(storage, undo)
            else:
                uris = [
                    (uri, partial(self._view, IndexView, config.changed(storage=uri), None, uri)) for uri in storages
                ]
                views = self._open_several(f"the list of {len(uris)} indexes", lambda: uris, undo)
            self._schema = views[0].schema
            self._prices = config.prices
            this = weakref.ref(self)
            self._engine = (QueryEngine if self._several is None else SeveralEngine)(
                self._schema,
                config.item_type or self._schema.item_type(),
                config.query_threads,
                self._prices,
                RowPlaces(
                    lambda: [view.log_state for view in alive(this)._views],
                    lambda: alive(this).segment_archives,
                    lambda topic: alive(this).topic_document(topic),
                ),
            )
            if self._several is None:
                self._read(views)
            else:
                self._several.start()
            opened_ones.add(self)
            undo.pop_all()

    def _read(self, views: Sequence[IndexView]) -> None:
        """Read the indexes of `views` from now on."""
        if self._several is not None:
            assert isinstance(self._engine, SeveralEngine)
            # before lookups see the files of a new one
            self._engine.read_of({view.storage.uri: view.index_id for view in views})
        self._cold_paths = tuple(view.cold for view in views)
        self._views = tuple(views)

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
        class of the entries: give `IndexItem` for files of RocketMQ, so that type checkers expect no `fingerprint`.
        `settings` are fields of `IndexConfig` by name, such as `cache_dir="/data/cache"`; docs/reference.md lists all.
        The environment supplies settings that you do not give, unless `environment` is false.

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

        All indexes are read even if one fails. A folder below a prefix that this user may not read is left out. Raises
        `StorageUnavailable`, `CorruptFile`, `IndexClosed`, and `BudgetExceeded` at a deadline of the caller's context.
        Any thread.
        """
        self._check_open()
        # in a copy, as in `IndexService._write`
        return copy_context().run(self._refresh)

    def _refresh(self) -> LogState:
        if self._several is None:
            state: LogState = self._views[0].read_anew(active_context(), 1.0)
            return state
        # the list of a prefix first, because it may have new indexes
        listing = self._several.listing
        errors = [] if listing is None else self._read_all([listing])
        # all are read, even if one fails
        errors = self._read_all(self._several.indexes) + errors
        for error in errors:
            if not isinstance(error, FolderDenied):
                raise error
        return self._views[0].log_state

    def _read_all(self, states: Sequence[PolledState]) -> list[BaseException]:
        """Read states again, in parallel, and return their errors."""
        readings = [(state, state.begin_requested(active_context())[0]) for state in states]
        have_ended([reading for _, reading in readings], remaining_s())
        errors = [
            reading.exception()
            if reading.done()
            else BudgetExceeded(f"timeout_s was reached while reading {state.name}")
            for state, reading in readings
        ]
        return [error for error in errors if error is not None]

    def files(self) -> list[Handle]:
        """Return the handles of all files, local files in their current state."""
        self._check_process()
        handles = [] if self._several is None else self._several.problems(self._clock.monotonic_s())
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

    def topic_documents(self) -> dict[str, TopicDocument]:
        """Return the document of each topic that has one: it says which connector wrote the topic's entries.

        Of several indexes the first one that has a document of a topic counts. No request. Any thread.
        """
        indexes = reversed(self.documents_of_indexes().values())
        return {topic: document for known in indexes for topic, document in known.items()}

    def documents_of_indexes(self) -> dict[str | None, dict[str, TopicDocument]]:
        """Return the documents of the topics of each index, by the `source` of its entries. No request. Any thread."""
        self._check_open()
        return {self._source_of(view): revised(reduce(newest_documents, view.documents())) for view in self._views}

    def topic_document(self, topic: str) -> TopicDocument | None:
        """Return the document of a topic, as `topic_documents`; None: a program put its entries, or there are none."""
        return next(iter(self.documents_of_topic(topic).values()), None)

    def documents_of_topic(self, topic: str) -> dict[str | None, TopicDocument]:
        """Return the document of a topic in each index that has one, by the `source` of its entries. No request."""
        self._check_open()
        newest = {self._source_of(view): newest_of(topic, view.documents()) for view in self._views}
        return {source: document for source, document in newest.items() if document is not None}

    @property
    def sources(self) -> tuple[str, ...]:
        """The URIs of the indexes that are open. More may appear later: below a prefix, or that did not answer."""
        return tuple([view.storage.uri for view in self._views])

    def writers(self) -> dict[str, WriterStatus | None]:
        """Return the current or last writer of each index, by URI; None: no writer, or no response from the storage.

        The call costs at least two requests per index.
        """
        self._check_open()

        def look(view: IndexView) -> WriterStatus | None:
            with contextlib.suppress(StorageError):
                return view.writer()
            return None

        views = self._views
        calls = [(f"reading the lease of {view.storage.uri}", partial(look, view)) for view in views]
        holders = self._parts.in_time(calls)
        return {view.storage.uri: writer for view, writer in zip(views, holders, strict=True)}

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
        return None if self._several is None else view.storage.uri

    def _archive_of(self, view: IndexView) -> SegmentArchive:
        uri = view.storage.uri
        return SegmentArchive(
            view.storage,
            lambda: view.log_state,
            lambda: self._read_log(uri, active_context()),
            tables=view.cold.caches.segments,
            blocks=view.cold.caches.catalogs,
        )

    def __repr__(self) -> str:
        places = [*(self._storages or ()), *([self.config.root, self.config.storage] if self._storages is None else [])]
        shown = ", ".join(str(place) for place in places if place is not None)
        return shortened(f"<{type(self).__name__} {'open' if self._refused is None else 'closed'}: {shown}>")

    def close(self) -> None:
        """Release threads and connections. Idempotent."""
        if not self._refuse_as_closed():
            return
        until_s = close_until_s()
        with contextlib.ExitStack() as closing:
            if self._shared is not None:
                closing.callback(self._shared.close)
            for view in self._views if self._several is None else self._several.close(until_s):
                closing.callback(view.close, until_s)
            closing.callback(self._parts.close, until_s)
            self._engine.close(until_s)

    @property
    def _only(self) -> IndexView:
        self._check_process()
        self._check_one_index()
        return self._views[0]

    def _check_one_index(self) -> None:
        if self._several is not None:
            among = self._views[0].storage.uri if len(self._views) == 1 else f"{len(self._views)} indexes"
            raise InvalidArgument(
                f"this needs a reader of one index, but it was opened for several ({among}): open the index by its URI"
            )

    def _open_views(self, backend: Storage | None, undo: contextlib.ExitStack) -> Sequence[IndexView]:
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
            [view] = self._parts.in_time([opening], IndexView.close)
            undo.callback(view.close)
            return (view,)
        except NotAnIndex as error:
            self._shared = shared
            make = partial(Child, shared.uri)

            def listed() -> Listed:
                children = children_of(shared, config.prices)
                return [(child.uri, partial(self._view, make, config, child, child.uri)) for child in children]

            views = self._open_several(shared.uri, listed, undo)
            if not views:
                raise NotAnIndex(f"{error}, and no index is directly below it: check the URI") from None
            return views

    def _open_view(self, config: IndexConfig, backend: Storage | None) -> IndexView:
        view = IndexView(config, self._clock, self._parts, backend, with_writer=self._with_writers)
        view.open()
        return view

    def _view(
        self,
        make: Callable[..., IndexView],
        config: IndexConfig,
        backend: Storage | None,
        uri: str,
        adopt: Callable[[IndexView], None],
    ) -> IndexView:
        """Return the view of one of several indexes, which is not open yet."""
        return make(
            *(config, self._clock, self._parts, backend),
            name=uri,
            with_writer=self._with_writers,
            responds_within_s=config.source_timeout_s,
            adopt=adopt,
        )

    def _open_several(self, name: str, listed: Callable[[], Listed], undo: contextlib.ExitStack) -> Sequence[IndexView]:
        """Open indexes in parallel, and return the views of those that answer. Raises as `Several.open`."""
        arguments = name, self.config, self._clock, self._parts, listed
        self._several = several = Several(*arguments, self._read, is_prefix=self._storages is None)

        def close() -> None:
            for view in several.close():
                view.close()

        undo.callback(close)
        several.open()
        return several.views

    def _log_states(self) -> Sequence[LogState]:
        return [view.log_state for view in self._views]

    def _unopened_problem(self) -> TieredIndexError | None:
        return None if self._several is None else self._several.problem()

    def _read_log(self, uri: str, call: Call) -> LogState:
        self._check_open()
        state: LogState = next(view for view in self._views if view.storage.uri == uri).read_anew(call)
        return state

    def _files_now(self, topic: str, key: str) -> LookupFiles | Mapping[str, LookupFiles] | None:
        among = self._views[0] if self._several is None else self._several
        files = among.files_now(self._clock.monotonic_s())
        # after the snapshot, because closing empties the catalog
        return None if self._refused is not None else files

    def _begin(self, call: Call) -> float:
        """Read the log of the only index if that is due, by the rule of `poller`."""
        begun_s = self._clock.monotonic_s()
        self._views[0].newest(begun_s, call)
        return begun_s

    def _taking(self, begun_s: float, call: Call) -> contextlib.AbstractContextManager[LookupFiles]:
        return self._taking_of(self._views[0], begun_s, call)

    def _taking_of(self, view: IndexView, begun_s: float, call: Call) -> contextlib.AbstractContextManager[LookupFiles]:
        return view.taking(begun_s, call, self._source_of(view), self._check_open)

    def _search_all(
        self, budget: LookupBudget, allow_partial: bool, begun: Begun | None, search: Callable[[LookupRun], Pass[ScanT]]
    ) -> Sequence[Pass[ScanT]]:
        if self._several is None:
            return super()._search_all(budget, allow_partial, begun, search)
        make_run = partial(
            LookupRun, allow_partial=allow_partial, budget=budget, prices=self._prices, read_log=self._read_log
        )
        return self._several.search_all(self._clock.monotonic_s(), budget, self._taking_of, make_run, search)


def _disk_cache(config: IndexConfig) -> DiskCache | None:
    """Return the disk cache in `cache_dir` if that is set, else the root's, read-only, else None."""
    if config.cache_dir is not None:
        return DiskCache(config.cache_dir, config.cache_max_bytes)
    if config.root is not None:
        return DiskCache(config.root / CACHE, config.cache_max_bytes, read_only=True)
    return None
