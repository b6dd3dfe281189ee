"""One index as a reader sees it: the state of its storage's log, and its root if the reader was given one.

A lookup with a deadline waits for the log at most half of its remaining time. Then the state read before answers it,
while the read continues in its own thread. A lookup without a deadline waits for the read. If the log's state is too
old, the lookup fails as if a file exceeded its budget. While the storage doesn't answer, the view uses the root and the
log that the writer keeps in the root. Files in the root are read. Files that are only in the storage fail if a lookup
needs them, and the answer reports it. Threads: every method from any thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from tiered_index.clock import Clock
from tiered_index.config import IndexConfig
from tiered_index.errors import (
    BudgetExceeded,
    IndexClosed,
    NotAnIndex,
    StorageBehind,
    StorageError,
    StorageUnavailable,
    TieredIndexError,
)
from tiered_index.format.schema import Schema
from tiered_index.retention import NOTHING
from tiered_index.service.catalog.catalog import Catalog, Handle, RootOnly
from tiered_index.service.cold.disk_cache import CacheFolder
from tiered_index.service.cold.path import ColdPath, ColdSettings
from tiered_index.service.files.compacted import CompactedFile, DamagedFile
from tiered_index.service.files.view import LocalView, Viewed, WholeView
from tiered_index.service.files.window_table import apply_changes
from tiered_index.service.log.kept import KeptLog
from tiered_index.service.log.log import LIST_EVERY_S, StorageLog
from tiered_index.service.log.reads import bounds_of_root
from tiered_index.service.log.records import IndexDescriptor, max_positions
from tiered_index.service.log.session import Writer, check_descriptor, writer_of
from tiered_index.service.log.state import LogState
from tiered_index.service.reading.parts import ReaderParts, source_number
from tiered_index.service.reading.refreshed import Reading, Refreshed, unread
from tiered_index.service.reading.root_view import RootView
from tiered_index.service.root import ASIDE, Marker, Root, allow_many_files
from tiered_index.service.root.seen import Seen, SeenFile
from tiered_index.storage.base import Storage
from tiered_index.storage.context import active_context, deadline_at, remaining_s
from tiered_index.storage.disk import Disk
from tiered_index.storage.metering import MeteredStorage
from tiered_index.types import Freshness

_log = logging.getLogger(__name__)


class _Away(NamedTuple):
    """The error of the storage, and the freshness of the log that the root keeps."""

    error: StorageError
    freshness: Freshness


class IndexView(Refreshed):
    """An index that another process writes. `close` closes a given `backend`. Raises as `IndexReader.open`.

    `with_writer`: read the lease together with the log, for the first call of `writer`. `patience_s`: as `Refreshed`.
    """

    def __init__(
        self,
        config: IndexConfig,
        clock: Clock,
        backend: Storage | None,
        parts: ReaderParts,
        *,
        with_writer: bool = False,
        patience_s: float = math.inf,
    ) -> None:
        super().__init__("", clock, config.refresh_interval_s, config.prices, patience_s)
        self._config = config
        self._lock = threading.Lock()
        self._parts = parts
        # the state that the catalog shows; after a failed read, the log's own state may be newer
        self._shown = LogState()
        self._joining = threading.Lock()
        # a read of the log that has not begun
        self._waiting: Reading[LogState] | None = None
        self._closed = False
        self._root: Root | None = None
        self._root_view: RootView | None = None
        self._kept_log: KeptLog | None = None
        self._recalled: LogState | None = None  # out of it
        self._changes: object = None
        self.catalog = Catalog()
        marker: Marker | None = None
        if config.root is not None:
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
        self._root_index = marker.index_id if marker is not None else None
        opened = None
        if backend is None:
            uri = config.storage or (marker.storage if marker is not None else None)
            backend = opened = config.open_storage(uri)
        # if only the root's marker names the storage, the root is readable without the storage
        self._must_answer = opened is None or config.storage is not None or marker is None
        self.storage = MeteredStorage(backend, config.prices)
        self.name = self.storage.uri
        self._log = StorageLog(self.storage, clock)
        # when the log was last listed
        self._listed_s = clock.monotonic_s()
        self._is_another = False  # whether the log has another history and must be opened again
        # of the storage's state in the catalog; None: the root is also read, which has unpublished entries
        self.freshness: Freshness | None = None
        with contextlib.ExitStack() as undo:
            if opened is not None:
                undo.callback(opened.close)
            ask = partial(writer_of, self.storage)
            self._lease = parts.begin_all(parts.begin, [ask] if with_writer else [])
            self.genesis = self._open_log(marker)
            self.schema: Schema = self.genesis.layout.schema
            index_id = self.genesis.index_id
            # the index's number in rows and cursors
            self.number = source_number(index_id)
            self.cold = ColdPath(
                self.storage,
                keyed=self.schema.keyed,
                settings=ColdSettings.of(config),
                folder=CacheFolder(parts.disk_cache, index_id) if parts.disk_cache is not None else None,
                caches=parts.caches,
                range_reads=parts.range_reads.share(),
                index_id=index_id,
            )
            undo.callback(self.cold.close)
            self._use_summary()
            self._show(self._log.state)
            undo.pop_all()

    def writer(self) -> Writer | None:
        """Return the current or last writer, None if there was none. Raises `StorageError`."""
        try:
            read = self._lease.pop()
        except IndexError:  # an earlier call took it
            return writer_of(self.storage)
        try:
            return read.result(remaining_s())
        except TimeoutError as error:
            raise BudgetExceeded(f"timeout_s was reached while reading the lease of {self.storage.uri}") from error

    def _use_summary(self) -> None:
        """Use the summary that was read with the log; a larger one is read when needed."""
        log = self._log
        if log.summary is None:
            return
        if log.summary_data is not None:
            self.cold.adopt(log.summary_data, log.summary.name, log.state.objects)
            log.summary_data = None
        else:
            self.cold.use_summary(log.summary.name, lambda: self._log.state.objects)

    def _open_log(self, marker: Marker | None) -> IndexDescriptor:
        try:
            stored = self._read_in_time(marker).genesis
            assert stored is not None
        except StorageError as error:
            if self._must_answer or marker is None:
                raise
            # the caller named only the root: files that are only in the storage fail when a lookup needs them
            self._failed(error, self._clock.monotonic_s())
            self._recall(marker.index_id)
            return IndexDescriptor(marker.index_id, marker.layout, marker.offset_space)
        if marker is not None:
            check_descriptor(
                stored, IndexDescriptor(marker.index_id, marker.layout, marker.offset_space), self.storage.uri
            )
        if self._config.item_type is not None and Schema.of(self._config.item_type) != stored.layout.schema:
            check_descriptor(
                stored, IndexDescriptor("", self._config.geometry(), stored.offset_space), self.storage.uri
            )
        return stored

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
        seen = self._seen()
        is_first = self._is_another or not self._log.state.number
        try:
            on = self._log.read_next if by_number else self._log.refresh
            state = self._open_anew() if is_first else on()
        except StorageBehind:
            self._is_another = True
            raise
        # a storage of another index raises another error
        if self._root is not None and state.genesis is not None and state.genesis.index_id == self._root_index:
            if seen is not None:
                self._log.check_seen(seen, deep=is_first)
            # An older copy of the root may have fewer entries of files that the storage also has. If `recover` set
            # files aside, the root's view reports that instead.
            if (marker := self._root.read_marker()) is not None and not (self._root.path / ASIDE).exists():
                self._log.check_own(marker.root_id, self._seen())
        return state

    def _seen(self) -> Seen | None:
        return SeenFile(self._root).read() if self._root is not None else None

    def _open_anew(self) -> LogState:
        log = StorageLog(self.storage, self._clock) if self._is_another else self._log
        try:
            # for a root, `check_seen` compares the history instead
            with active_context().with_threads(self._parts.threads.submit).active():
                state = log.open(checks=self._root is None, with_summary=self._root is None)
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
        return self._shown

    def refresh(self) -> LogState:
        """Read the log's new records and return its state."""
        with self._lock:
            return self._read()

    def _read_due(self) -> LogState:
        """As `Refreshed`. With a short interval, a GET of the next record replaces most listings, which cost more."""
        with self._lock:
            is_listed = self._clock.monotonic_s() - self._listed_s < LIST_EVERY_S and 0 < self._interval_s < 1
            return self._read(by_number=is_listed and self._root is None and self._error is None)

    def read_on(self, part: float = 0.5) -> LogState:
        """Refresh by a read that begins after this call. Raises `BudgetExceeded` after a `part` of the time left."""
        left_s = remaining_s()
        if left_s is None and math.isinf(self.patience_s):
            return self.refresh()
        until_s = math.inf if left_s is None else time.monotonic() + left_s * part
        while True:
            with self._joining:
                reading = self._waiting
                mine = reading is None
                if reading is None:
                    reading = self._waiting = Reading(self._parts.begin, self._read_for_all, self._readings)
            while True:
                pause_s = min(self.patience_s / 4, until_s - time.monotonic())
                if wait([reading.ends], max(0.0, pause_s)).done:
                    break
                if reading.is_silent(self.patience_s):
                    self._parts.threads.replace_thread(reading.ends)
                    raise self.leave()
                if time.monotonic() >= until_s:
                    raise BudgetExceeded(f"timeout_s was reached while reading the log of {self.storage.uri}")
            try:
                return reading.ends.result()
            except BudgetExceeded:
                if mine:
                    raise
                # the budget of the lookup that began the read: this one has its own

    def leave(self, are_over: Callable[[], bool] | None = None) -> TieredIndexError:
        """As `Refreshed`. Reads under way leave their threads and places to the other indexes."""
        self.cold.replace_hanging()
        return super().leave(are_over)

    def asks_before(self, begun_s: float) -> bool:
        """As `Refreshed`; always for a root, since its folders may have changed."""
        return self._root_view is not None or super().asks_before(begun_s)

    def fails(self, begun_s: float) -> bool:
        """As `Refreshed`; an error of the storage does not count for a root."""
        away = self._root_view is not None and isinstance(self._error, StorageError)
        return self._is_too_old(begun_s) or (self._error is not None and not away)

    def _read_for_all(self) -> LogState:
        with self._lock:
            with self._joining:
                self._waiting = None  # later callers need a later read
            return self._read()

    def _read(self, *, by_number: bool = False) -> LogState:
        """Read the log, with the lock held."""
        begun_s = self._clock.monotonic_s()
        state = self._read_log(by_number=by_number)
        if not by_number:
            self._listed_s = begun_s
        if self._closed:
            raise IndexClosed("the index was closed while its log was read")
        self._show(state)
        self._refreshed_from(begun_s)
        # after the files: else another lookup would take the earlier files for new ones
        self._error = None
        return state

    def _show(self, state: LogState) -> None:
        """Update the catalog to `state`; only this method changes it."""
        before = self._shown
        if state is before:
            return
        # before the files, so that no answer has entries that expired in between
        self._shown = state
        try:
            apply_changes(self.catalog, before, state, self.cold)
        except BaseException:
            self._shown = before
            raise
        if self._root_view is None:
            self.freshness = self._published(state)

    def _published(self, state: LogState, away: StorageError | None = None) -> Freshness:
        """Return the storage's freshness at `state`; `away` is the error that prevented a later state."""
        not_asked = None if away is None else str(away)
        uri, as_of_ms = self.storage.uri, state.as_of_ms
        return Freshness(
            source=uri, as_of_ms=as_of_ms, positions=state.positions, not_asked=not_asked, bounds=state.bounds
        )

    def _behind(self, root_view: RootView) -> Freshness | None:
        """Return the freshness of topics whose source was behind at the root's last look; None: no source was."""
        state = self._log.state
        bounds = bounds_of_root(max_positions(state.reads, root_view.reads))
        if bounds is None:
            return None
        return Freshness(source=self.storage.uri, as_of_ms=state.as_of_ms, positions=state.positions, bounds=bounds)

    def seen(self) -> Freshness | None:
        """Return the freshness of an answer that begins now; None: it reads a root, or the index is away."""
        return self.freshness if self.away is None else None

    def handles(self, second_min: int, second_max: int, begun_s: float) -> Sequence[Handle]:
        """Return the files that may have entries in [`second_min`, `second_max`], for a lookup begun at `begun_s`."""
        if (away := self.away) is not None:
            return unread(away)
        if self._root_view is None:
            # before the files: a refresh that ends in between is for later files
            error, refreshed_s = self._error, self._refreshed_s
            found = self.catalog.overlapping(second_min, second_max)
        else:
            stored = partial(self.catalog.overlapping, second_min, second_max)
            handles, error, own = self._local_and_stored(self._root_view, stored)
            found = [
                handle for handle in handles if handle.second_min <= second_max and handle.second_max >= second_min
            ]
            if own is not None:
                return RootOnly(found, own.freshness)
            found += self._problem(begun_s, self._refreshed_s, error, f"the log of {self.storage.uri}")
            behind = self._behind(self._root_view)
            return found if behind is None else RootOnly(found, behind)
        return found + self._problem(begun_s, refreshed_s, error, f"the log of {self.storage.uri}")

    def viewed(self, begun_s: float) -> Viewed:
        """Return the files of a log that can't be read, and a view of all others. None: there is no view."""
        if self.away is not None or self._root_view is not None:
            return (), None
        # before the files, as in `handles`
        error, refreshed_s = self._error, self._refreshed_s
        view = self._view()
        return self._problem(begun_s, refreshed_s, error, f"the log of {self.storage.uri}"), view

    def _view(self) -> LocalView:
        return self.catalog.present_view or self.catalog.view(partial(LocalView, self.schema, stored=True))

    def whole(self, begun_s: float) -> WholeView | None:
        """Return a view of all files for a lookup that began at `begun_s`, and the facts for its answers.

        None if a refresh is due, the log could not be read, entries have expired, or there is a root.
        """
        freshness = self.freshness
        if freshness is None or self._error is not None or begun_s - self._refreshed_s >= self._interval_s:
            return None
        view = self._view()
        # after the files
        state = self._log.state
        if state.expired is not NOTHING or self._closed:
            return None
        return view, ((freshness,), [(None, one) for one in state.lost.values()] if state.lost else ()), True

    def all_handles(self) -> list[Handle]:
        """Return the handles of all files; the caller must then check that the view is still open."""
        if self._root_view is None:
            return self.catalog.all()
        found, error, away = self._local_and_stored(self._root_view, self.catalog.all)
        return found + unread(error or (away.error if away is not None else None))

    def _local_and_stored(
        self, root_view: RootView, in_storage: Callable[[], list[Handle]]
    ) -> tuple[list[Handle], TieredIndexError | None, _Away | None]:
        """Return the files of the root and of `in_storage`, an error of the log, and the use of the root's own log.

        The error is None if the log was read or not needed. The last is None unless the root's own log replaced it.
        """
        # Local files first, then the log: a file that leaves the root in between is in at least one of them. If the
        # folders have not changed since the log was last read, it need not be read again.
        local = {handle.file_id: handle for handle in root_view.look()}
        changes = root_view.changes()
        unread: TieredIndexError | None = self._error
        if (changes is None or changes != self._changes) and unread is None:
            try:
                self._try(self.read_on)
                unread = self._error
            except BudgetExceeded as error:
                unread = error  # only for this lookup
            self._changes = changes if unread is None else None
        away: _Away | None = None
        # after the look: the log that is kept now names each file that left the root before
        if isinstance(unread, StorageError) and self._recall(self.genesis.index_id, show=True):
            # before the files: they may belong to a later state, never to an earlier one
            away = _Away(unread, self._published(self._shown, unread))
            unread = None
        given_up = {one.file_id for one in self._log.state.lost.values()}
        local = {i: one for i, one in local.items() if not (isinstance(one, DamagedFile) and i in given_up)}
        stored = [handle for handle in in_storage() if handle.file_id not in local]
        handles = [_backed(handle, self.catalog.get(file_id)) for file_id, handle in local.items()]
        return handles + stored, unread, away

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
                self._show(self._log.state)
        self._recalled = state
        return True

    def close(self) -> None:
        """Release threads and connections. Idempotent."""
        self._closed = True
        self.cold.close()
        self.storage.close()
        self.catalog.clear(self._root_view.give_up() if self._root_view is not None else ())


def _backed(local: Handle, stored: Handle | None) -> Handle:
    """Return a local file with its stored copy; if the local file is damaged, return the stored copy."""
    if isinstance(local, DamagedFile) and stored is not None:
        return stored
    if isinstance(local, CompactedFile) and isinstance(stored, CompactedFile):
        # the root view keeps its handles, and a repair may have replaced the stored object
        local.stored = stored.stored
    elif isinstance(local, CompactedFile) and local.stored is not None:
        # a record has removed the object; a copy, because other lookups may use the handle
        return replace(local, stored=None)
    return local
