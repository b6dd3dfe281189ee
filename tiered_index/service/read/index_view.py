"""One index as a reader sees it: the snapshots of its log, and its root if the reader was given one.

`poller` has the rule by which lookups wait for a read of the log. While the storage doesn't answer, a reader of a root
uses the log that the writer keeps in the root. Files in the root are read. Files that are only in the storage fail if a
lookup needs them, and the answer reports it. Threads: every method from any thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from tiered_index.base.call import UNBOUNDED, Call, active_context, deadline_at, remaining_s
from tiered_index.base.clock import Clock
from tiered_index.base.kernels import compiled_views
from tiered_index.config import IndexConfig
from tiered_index.errors import (
    BudgetExceeded,
    ConfigError,
    FolderDenied,
    IndexClosed,
    NotAnIndex,
    RootBehind,
    StorageBehind,
    StorageError,
    StorageUnavailable,
    TieredIndexError,
)
from tiered_index.format.schema import Schema
from tiered_index.format.topic_documents import NO_DOCUMENTS, Documents
from tiered_index.service.log.identity import RootBeside, exceeds, other_file
from tiered_index.service.log.kept import KeptLog
from tiered_index.service.log.log import LIST_EVERY_S, StorageLog
from tiered_index.service.log.reads import bounds_of_root
from tiered_index.service.log.records import IndexDescriptor, max_positions
from tiered_index.service.log.session import WriterStatus, check_descriptor, writer_of
from tiered_index.service.log.state import LogState
from tiered_index.service.read.answers.logs import Logs
from tiered_index.service.read.caches.disk import CacheFolder
from tiered_index.service.read.files.cold_path import ColdPath, ColdSettings
from tiered_index.service.read.files.compacted import CompactedFile, DamagedFile
from tiered_index.service.read.files.file_view import LocalView
from tiered_index.service.read.files.root_view import RootLook, RootView, UnsealedView, own_documents
from tiered_index.service.read.files.snapshot import ALWAYS, Catalog, Handle, Snapshot
from tiered_index.service.read.files.window_table import apply_changes
from tiered_index.service.read.parts import ReaderParts, begun
from tiered_index.service.read.poller import PolledState, unread
from tiered_index.service.read.scan import FileReader, LookupFiles
from tiered_index.service.root import Marker, Root, allow_many_files
from tiered_index.storage.base import Storage
from tiered_index.storage.disk import Disk
from tiered_index.storage.metering import MeteredStorage
from tiered_index.types import Freshness

_log = logging.getLogger(__name__)


class _Local(NamedTuple):
    """The files of a root at one look, by id, and its `reads` (see `RootLook`).

    `error`: why the log could not be read; `not_asked`: as `error`, if the root's own log is used instead.
    """

    files: dict[str, Handle]
    reads: dict[str, int]
    error: TieredIndexError | None = None
    not_asked: StorageError | None = None

    @classmethod
    def of(cls, look: RootLook, error: TieredIndexError | None = None, not_asked: StorageError | None = None) -> _Local:
        """Return the files of a look."""
        return cls({handle.file_id: handle for handle in look.handles}, look.reads, error, not_asked)


class _ViewOfRoot(NamedTuple):
    """A view of the files of a root and a snapshot, as of a look; None: there is a damaged file.

    `unread`: unsealed files whose entries no search had verified, so that the view lacks them.
    """

    look: RootLook
    unread: list[UnsealedView]
    view: LocalView | None


class IndexView(PolledState):
    """An index that another process writes. It is not open before `open`, or before a read of it as one of several.

    `name`: its URI until it is open. `close` closes a given `backend`. `with_writer`: read the lease together with the
    log, for the first call of `writer`. `responds_within_s`: as `PolledState`. `adopt` is called before lookups may see
    the files of an index that a read has opened, and its errors leave the index closed.
    """

    genesis: IndexDescriptor
    schema: Schema
    storage: MeteredStorage
    cold: ColdPath

    def __init__(
        self,
        config: IndexConfig,
        clock: Clock,
        parts: ReaderParts,
        backend: Storage | None = None,
        *,
        name: str = "",
        with_writer: bool = False,
        responds_within_s: float = math.inf,
        adopt: Callable[[IndexView], None] = lambda _: None,
    ) -> None:
        super().__init__(name, config, clock, parts, responds_within_s)
        self._config, self._backend, self._with_writer, self._adopt = config, backend, with_writer, adopt
        self.is_open = self._closed = False
        self._refreshed_s = self._next_s = -math.inf
        self._root: Root | None = None
        self._root_view: RootView | None = None
        self._kept_log: KeptLog | None = None
        self._recalled: LogState | None = None  # out of it
        self._changes: object = None
        # the look after which the log was last read
        self._looked: RootLook | None = None
        self.catalog = Catalog()
        self.searches = FileReader(config.query_threads, config.prices)
        # the next try to open it is without the bounds of the lookup that begins it
        self._is_unbounded = False
        self._freshness: tuple[LogState, Freshness] | None = None  # of a state

    @property
    def index_id(self) -> str:
        """The id of the index, which is open."""
        return self.genesis.index_id

    def open(self) -> bool:
        """Open the index, and return whether there is one. Raises as `IndexReader.open`."""
        config, clock, parts, begun_s = self._config, self._clock, self._parts, self._clock.monotonic_s()
        marker = self._open_root()
        self._root_index = marker.index_id if marker is not None else None
        backend, opened = self._backend, None
        if backend is None:
            uri = config.storage or (marker.storage if marker is not None else None)
            backend = opened = config.open_storage(uri)
        # if only the root's marker names the storage, the root is readable without the storage
        self._must_answer = opened is None or config.storage is not None or marker is None
        self.storage = MeteredStorage(backend, config.prices)
        self._log = StorageLog(self.storage, clock)
        # when the log was last listed
        self._listed_s = clock.monotonic_s()
        # whether the log has another history and must be opened again
        self._is_another = False
        with contextlib.ExitStack() as undo:
            if opened is not None:
                undo.callback(opened.close)
            ask = partial(writer_of, self.storage, clock)
            # for the first call of `writer`
            self._lease = begun(parts.begin, ask) if self._with_writer else None
            self.name = self.name or self.storage.uri
            self.genesis, unread = self._open_log(marker)
            self.schema = self.genesis.layout.schema
            index_id = self.index_id
            self.cold = ColdPath(
                self.storage,
                keyed=self.schema.keyed,
                settings=ColdSettings.of(config),
                folder=CacheFolder(parts.disk_cache, index_id) if parts.disk_cache is not None else None,
                caches=parts.caches,
                range_reads=parts.range_reads,
                index_id=index_id,
            )
            undo.callback(self.cold.close)
            self._adopt(self)
            self.name = self.storage.uri
            if unread is not None:
                self._failed(unread, clock.monotonic_s())
            self._show(self._log.state, begun_s)
            # in this order: others first look for an error, then whether it is open
            self._is_unbounded, self.is_open = False, True
            if unread is None:
                self._refreshed_from(begun_s)
            if self._closed:
                raise IndexClosed("the reader was closed while an index was opened")
            undo.pop_all()
        return True

    def _open_root(self) -> Marker | None:
        """Return the marker of the root; None: the reader was given no root. Raises `NotAnIndex`."""
        config = self._config
        if config.root is None:
            return None
        if config.raise_file_limit:
            allow_many_files()
        self._root = root = Root(config.root, Disk())
        marker = root.read_marker()
        if marker is None:
            raise NotAnIndex(
                f"{config.root} holds no tiered index"
                + (": check the path" if config.root.exists() else " (it does not exist): check the path")
            )
        self._root_view, self._kept_log = RootView(root), KeptLog(root)
        return marker

    def writer(self) -> WriterStatus | None:
        """Return the current or last writer, None if there was none. Raises `StorageError`."""
        read, self._lease = self._lease, None
        if read is None:
            return writer_of(self.storage, self._clock)
        try:
            return read.result(remaining_s())
        except TimeoutError as error:
            raise BudgetExceeded(f"timeout_s was reached while reading the lease of {self.storage.uri}") from error

    def _open_log(self, marker: Marker | None) -> tuple[IndexDescriptor, StorageError | None]:
        """Return the descriptor of the index, and why the log of a root could not be read."""
        try:
            stored = self._read_in_time(marker).genesis
            assert stored is not None
        except StorageError as error:
            if self._must_answer or marker is None:
                raise
            # the caller named only the root: files that are only in the storage fail when a lookup needs them
            self._recall(marker.index_id)
            return IndexDescriptor(marker.index_id, marker.layout, marker.offset_space), error
        if marker is not None:
            check_descriptor(
                stored, IndexDescriptor(marker.index_id, marker.layout, marker.offset_space), self.storage.uri
            )
        if self._config.item_type is not None and Schema.of(self._config.item_type) != stored.layout.schema:
            check_descriptor(
                stored, IndexDescriptor("", self._config.geometry(), stored.offset_space), self.storage.uri
            )
        return stored, None

    def _read_in_time(self, marker: Marker | None) -> LogState:
        """Read the log for the first time; if the root is readable without it, within half of the remaining time."""
        left_s = remaining_s()
        if marker is None or left_s is None:
            return self._read_log()
        try:
            with deadline_at(time.monotonic() + (left_s if self._must_answer else left_s / 2)):
                doing = f"opening {self._config.root}: its log was not read by then"
                return self._parts.in_time([(doing, self._read_log)])[0]
        except BudgetExceeded as error:
            if self._must_answer:
                raise
            raise StorageUnavailable(f"{self.storage.uri} did not answer within half of timeout_s") from error

    def _read_log(self, *, by_number: bool = False) -> LogState:
        """Read the log's new records; read the whole log if it is the first time or the log has another history."""
        # read before the log: the writer notes a record after the storage has it
        beside = RootBeside(self._root) if self._root is not None else None
        is_first = self._is_another or not self._log.state.number
        try:
            state = self._open_anew() if is_first else self._log.refresh(by_number=by_number)
        except StorageBehind:
            self._is_another = True
            raise
        # a storage of another index raises another error
        if beside is not None and state.genesis is not None and state.genesis.index_id == self._root_index:
            # an older copy of the root may have fewer entries of files that the storage also has
            beside.check(self._log.identity, self._log.state, deep=is_first)
            if is_first:
                self._log.mixed()
        return state

    def _open_anew(self) -> LogState:
        log = StorageLog(self.storage, self._clock) if self._is_another else self._log
        try:
            # for a root, `check_seen` compares the history instead
            with active_context().with_threads(self._parts.threads.submit).active():
                state = log.open(checks=self._root is None)
        except NotAnIndex as error:
            if self._must_answer:
                raise
            raise StorageUnavailable(f"{error}, but {self._config.root} names it: is it mounted?") from error
        if self._is_another:
            assert state.genesis is not None
            check_descriptor(state.genesis, self.genesis, self.storage.uri)
            _log.warning("%s was restored, or has another history of the index: opened it again", self.storage.uri)
        self._log, self._is_another = log, False
        return state

    @property
    def log_state(self) -> LogState:
        """The state of the storage's log that lookups see; a spent budget may leave out newer records."""
        return self.catalog.snapshot.state

    def give_up(self) -> None:
        """As `PolledState`. Range reads under way leave their places to the other indexes."""
        if self.is_open:
            self.cold.replace_hanging()
        else:
            self._is_unbounded = True
        super().give_up()

    def _call_of_read(self, call: Call) -> Call:
        return UNBOUNDED if self._is_unbounded else call

    def _try(self, read: Callable[[], object]) -> None:
        begun_s = self._clock.monotonic_s()
        try:
            super()._try(read)
        except (ConfigError, BudgetExceeded) as error:
            if self.is_open:
                raise
            self._is_unbounded = isinstance(error, BudgetExceeded)
            self._failed(error, begun_s)

    def fails(self, begun_s: float) -> bool:
        """As `PolledState`. For a root no error of the storage counts, nor does a folder that the user may not read."""
        if not self.is_open:
            return self.unopened is not None and not isinstance(self._error, FolderDenied)
        away = self._root_view is not None and isinstance(self._error, StorageError)
        return not away and super().fails(begun_s)

    @property
    def unopened(self) -> TieredIndexError | None:
        """The error of an index that is not open; None: it is open, or the folder has no index."""
        if self.is_open:
            return None
        return self._error or (self._late() if math.isinf(self._refreshed_s) else None)

    def _read(self, *, is_due: bool) -> LogState:
        """Open the index, or read the log's new records. Return the state of the log.

        With a short interval, a GET of the next record replaces most listings, which cost more.
        """
        if not self.is_open:
            begun_s = self._clock.monotonic_s()
            if not self.open():
                self._refreshed_from(begun_s)
            return self.log_state
        begun_s = self._clock.monotonic_s()
        by_number = is_due and begun_s - self._listed_s < LIST_EVERY_S and 0 < self._interval_s < 1
        by_number = by_number and self._root is None and self._error is None
        state = self._read_log(by_number=by_number)
        if not by_number:
            self._listed_s = begun_s
        if self._closed:
            raise IndexClosed("the index was closed while its log was read")
        self._show(state, begun_s)
        # after the files: else another lookup would take the earlier files for new ones
        self._refreshed_from(begun_s)
        return state

    def _show(self, state: LogState, as_of_s: float) -> None:
        """Make the snapshot of `state` as of the beginning of its read, with its view, unless that depends on a root.

        Only this method changes the catalog.
        """
        if state is self.log_state:
            self.catalog.show(state, as_of_s)
        else:
            apply_changes(self.catalog, state, self.cold, as_of_s)
        if self._root_view is None:
            with self.catalog.reading() as snapshot:
                self._files_of(snapshot)

    def _published(self, state: LogState) -> Freshness:
        """Return the storage's freshness at `state`."""
        known = self._freshness
        if known is None or known[0] is not state:
            of_all = Freshness(
                source=self.storage.uri, as_of_ms=state.as_of_ms, positions=state.positions, bounds=state.bounds
            )
            known = self._freshness = state, of_all
        return known[1]

    def _bounded(self, reads: dict[str, int], state: LogState) -> Freshness | None:
        """Return the freshness of topics that a source has read up to some time, by a look at the root; None: none."""
        bounds = bounds_of_root(max_positions(state.reads, reads))
        return None if bounds is None else replace(self._published(state), bounds=bounds)

    @contextlib.contextmanager
    def taking(
        self, begun_s: float, call: Call, source: str | None = None, check_open: Callable[[], None] = lambda: None
    ) -> Iterator[LookupFiles]:
        """Yield the files of the index, as of its present snapshot, for the `call` of a lookup that began at `begun_s`.

        Inside the block, they stay readable. `source`: the URI of the index if it is one of several. `check_open` is
        called after the snapshot was taken, because closing empties the catalog.
        """
        # before the snapshot: a read that ends in between is for later files
        error = self._error
        with self._files(call) as (local, snapshot):
            error = error if local is None else local.error
            check_open()
            state = snapshot.state
            problem = self._problem(begun_s, snapshot.as_of_s, error, f"the log of {self.storage.uri}")
            if local is None:
                files = self._files_of(snapshot, source)
                yield replace(files, beside=problem) if problem else files
                return
            not_asked = None if local.not_asked is None else str(local.not_asked)
            bounded = self._bounded(local.reads, state)
            freshness = () if bounded is None else (bounded,)
            if not_asked is not None:
                freshness, problem = (replace(self._published(state), not_asked=not_asked),), []
            logs = Logs.of([(source, state.lacking_with(local.reads), state.expired)])
            listed, states = partial(self._local_and_stored, local, snapshot), [state]
            yield LookupFiles(listed, problem, freshness=freshness, logs=logs, states=states, not_asked=not_asked)

    @contextlib.contextmanager
    def _files(self, call: Call) -> Iterator[tuple[_Local | None, Snapshot]]:
        """Yield a look at the root, if there is one, and then the present snapshot, whose files stay readable."""
        while True:
            replaced = self.log_state.expired.replaced
            # before the snapshot, which then names each file that left the root before
            local = None if self._root_view is None else self._look(self._root_view, call)
            with self.catalog.reading() as snapshot:
                # otherwise ranges may be dropped of which only the files of this look have entries
                if local is None or snapshot.state.expired.replaced.retires_as(replaced):
                    yield local, snapshot
                    return

    def without_files(self, error: TieredIndexError) -> LookupFiles:
        """Return one file that fails with `error`, in place of the files of the index."""
        state = self.log_state
        logs = Logs.of([(self.name, state.lacking, state.expired)])
        return LookupFiles(lambda *_: unread(error), logs=logs, states=[state])

    def _files_of(self, snapshot: Snapshot, source: str | None = None) -> LookupFiles:
        """Return the files of a snapshot, made once. `source`: as in `taking`."""
        files: LookupFiles | None = snapshot.whole
        if files is None or source is not None:
            state = snapshot.state
            view = None if compiled_views() is None else snapshot.view(partial(LocalView, self.schema))
            logs = Logs.of([(source, state.lacking, state.expired)])
            facts: dict[str, Any] = {"freshness": (self._published(state),), "logs": logs, "states": [state]}
            files = LookupFiles(snapshot.overlapping, (), view, catalog=self.catalog, mark=snapshot.mark, **facts)
            if view is not None and source is None:
                snapshot.whole = files
        return files

    def files_now(self, begun_s: float) -> LookupFiles | None:
        """Return the present files, with a view, for a lookup that began at `begun_s`.

        None if a read is due, the log could not be read, or a root has changed since the last look.
        """
        snapshot = self.catalog.snapshot
        if self._error is not None or begun_s - snapshot.as_of_s >= self._interval_s:
            return None
        self._asked = True
        if self._root_view is not None:
            return self._files_of_root(self._root_view, snapshot)
        files: LookupFiles | None = snapshot.whole
        if files is None:
            with self.catalog.reading() as snapshot:
                files = None if self._closed else self._files_of(snapshot)
        return files

    def _files_of_root(self, root_view: RootView, snapshot: Snapshot) -> LookupFiles | None:
        """As `files_now`; None also if the root has changed since the last look after which the log was read."""
        look = root_view.unchanged()
        if look is None or look is not self._looked or self._changes is None:
            return None
        known: _ViewOfRoot | None = snapshot.present_view
        if known is None or known.look is not look or (known.unread and any(file.is_loaded for file in known.unread)):
            with self.catalog.reading():
                known = snapshot.present_view = self._view_of_root(look, snapshot)
        made: tuple[_ViewOfRoot, LookupFiles | None] | None = snapshot.whole
        if made is None or made[0] is not known:
            # for each snapshot, because a later one may have another state of the log for the same files
            files = None if known.view is None else self._files_beside(known.look, known.view, snapshot)
            made = snapshot.whole = known, files
        # files that leave the root are in the snapshots after the look
        return made[1] if self.catalog.snapshot is snapshot and not self._closed else None

    def _view_of_root(self, look: RootLook, snapshot: Snapshot) -> _ViewOfRoot:
        handles = self._local_and_stored(_Local.of(look), snapshot, *ALWAYS)
        unread = [file for file in handles if isinstance(file, UnsealedView) and not file.is_loaded]
        # which of the others a damaged file needs depends on the times of a lookup
        is_damaged = any(isinstance(file, DamagedFile) for file in handles)
        return _ViewOfRoot(look, unread, None if is_damaged else LocalView(self.schema, handles))

    def _files_beside(self, look: RootLook, view: LocalView, snapshot: Snapshot) -> LookupFiles:
        """Return the files of a root and a snapshot, which a view has."""
        state, bounded = snapshot.state, self._bounded(look.reads, snapshot.state)
        facts: dict[str, Any] = {
            "freshness": () if bounded is None else (bounded,),
            "logs": Logs.of([(None, state.lacking_with(look.reads), state.expired)]),
            "states": [state],
        }
        # without the snapshot, which refers to them
        listed = partial(_within, view.handles)
        return LookupFiles(listed, (), view, catalog=self.catalog, mark=snapshot.mark, **facts)

    def all_handles(self) -> list[Handle]:
        """Return the handles of all files; the caller must then check that the view is still open."""
        if self._root_view is None:
            return self.catalog.all()
        with self._files(active_context()) as (local, snapshot):
            assert local is not None, "there is a root"
            return self._local_and_stored(local, snapshot, *ALWAYS) + unread(local.error or local.not_asked)

    def documents(self) -> list[Documents]:
        """Return the documents of topics in the log and in the root's files. The caller must check as above."""
        known = [documents for handle in self.all_handles() if (documents := _documents_of(handle))]
        return [self.log_state.documents, *known]

    def _look(self, root_view: RootView, call: Call) -> _Local:
        """Look at the root, then read the log if the folders have changed since it was last read."""
        # In this order, because a file that leaves the root in between is in at least one of them.
        look = root_view.look()
        unread: TieredIndexError | None = self._error
        if (look is not self._looked or self._changes is None) and unread is None:
            changes = root_view.changes()
            if changes is None or changes != self._changes:
                try:
                    self._try(partial(self.read_anew, call))
                    unread = self._error
                except BudgetExceeded as error:
                    unread = error  # only for this lookup
                self._changes = changes if unread is None else None
        if look is not self._looked:
            # a view would keep the disk space of files that have left the root
            self.catalog.snapshot.forget_view()
        # a read that clears an error may have begun before the look
        self._looked = look if unread is None else None
        # after the look: the log that is kept now names each file that left the root before
        if isinstance(unread, StorageError) and self._recall(self.genesis.index_id, show=True):
            return _Local.of(look, not_asked=unread)
        return _Local.of(look, unread)

    def _local_and_stored(self, look: _Local, snapshot: Snapshot, second_min: int, second_max: int) -> list[Handle]:
        """Return the files of the root and of a snapshot that overlap the inclusive seconds."""
        given_up = {handle.file_id for handle in snapshot.state.lost.values()}
        local = {
            i: handle for i, handle in look.files.items() if not (isinstance(handle, DamagedFile) and i in given_up)
        }
        # a damaged file may have any times, and those of its copy in the storage say whether it is needed
        is_damaged = any(isinstance(handle, DamagedFile) for handle in local.values())
        stored = {
            handle.file_id: handle
            for handle in snapshot.overlapping(*(ALWAYS if is_damaged else (second_min, second_max)))
        }
        backed = [_backed(handle, stored.pop(file_id, None)) for file_id, handle in local.items()]
        backed += stored.values()
        return _within(backed, second_min, second_max)

    def _recall(self, index_id: str, *, show: bool = False) -> bool:
        """Use the log that the writer keeps in the root, if it is newer; return whether there is one."""
        assert self._kept_log is not None
        state = self._kept_log.read()
        if state is None or state is self._recalled:
            return state is not None
        if state.genesis is None or state.genesis.index_id != index_id:
            return False
        self._log.advance(state)
        if show:
            with self._lock:
                self._show(self._log.state, self.catalog.snapshot.as_of_s)
        self._recalled = state
        return True

    def close(self, until_s: float | None = None) -> None:
        """Release threads and connections. `until_s`: see `DaemonPool.close`. Idempotent."""
        self._closed = True
        self.stop()
        self.searches.close(until_s)
        if not self.is_open:
            return
        self.cold.close()
        self.storage.close()
        self.catalog.clear(self._root_view.give_up() if self._root_view is not None else ())


def _within(handles: Sequence[Handle], second_min: int, second_max: int) -> list[Handle]:
    """Return the files that overlap inclusive seconds."""
    return [handle for handle in handles if handle.second_min <= second_max and handle.second_max >= second_min]


def _backed(local: Handle, stored: Handle | None) -> Handle:
    """Return a local file with its stored copy; the stored copy alone if the local file is damaged or lacks entries.

    If their numbers or times contradict each other, the local file is of another copy of the root: it fails, as one
    whose forms contradict each other.
    """
    if not isinstance(stored, CompactedFile) or not isinstance(local, CompactedFile | UnsealedView | DamagedFile):
        return local
    if isinstance(local, DamagedFile):
        return local if isinstance(local.error, RootBehind) else stored
    if exceeds(local, stored):
        where, published = f"{local.place}/{local.file_id}", stored.stored.file if stored.stored is not None else ""
        other = other_file(where, published, f"{stored.count} entries", f"{local.count} others")
        return DamagedFile(local.file_id, local.place, other)
    if isinstance(local, CompactedFile):
        # a copy, because other lookups may use the handle
        return replace(local, stored=stored.stored)
    # the root has an earlier state of the file, or its writer has published more meanwhile
    return stored if local.count < stored.count else local


def _documents_of(handle: Handle) -> Documents:
    """Return the documents in a file of a root, which the log may lack."""
    return NO_DOCUMENTS if isinstance(handle, CompactedFile) and not handle.is_local else own_documents(handle)
