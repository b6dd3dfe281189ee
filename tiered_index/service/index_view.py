"""One index as a reader sees it: the state of its storage's log, and the root beside its writer where there is one.

A view stands at one position of the log and moves on when it is refreshed. It never writes a byte to storage or root.

A lookup that is held to a time does not wait for the log longer than half of what is left of it, so that it can still be answered from
where the view stands. The reading goes on behind it, in a thread of its own and without a deadline: so the view moves on however short the
times are.
Threads: every method from any thread.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from tiered_index.clock import Clock
from tiered_index.config import IndexConfig
from tiered_index.errors import BudgetExceeded, CorruptFile, InvalidArgument, NotAnIndex, StorageError, TieredIndexError
from tiered_index.format.schema import Schema
from tiered_index.service.catalog import Catalog, Handle
from tiered_index.service.cold.cache_folder import CacheFolder
from tiered_index.service.cold.cache_room import CacheRoom
from tiered_index.service.cold.caches import Caches
from tiered_index.service.cold.path import ColdPath, ColdSettings
from tiered_index.service.compacted_file import CompactedFile, DamagedFile
from tiered_index.service.daemon_pool import DaemonPool
from tiered_index.service.limits import allow_many_files
from tiered_index.service.log_records import Genesis, LogState
from tiered_index.service.root import Marker, Root
from tiered_index.service.root_view import RootView
from tiered_index.service.session import check_genesis
from tiered_index.service.showing import show_stored
from tiered_index.service.storage_log import StorageLog
from tiered_index.storage.base import Storage
from tiered_index.storage.deadline import no_deadline, remaining_s
from tiered_index.storage.disk import Disk
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.opening import open_storage
from tiered_index.types import MAX_TIMESTAMP_MS

__all__ = ["IndexView", "ReaderParts"]

T = TypeVar("T")
_RETRY_S = 1.0
# a storage that did not answer is asked again after this time at the latest


@dataclass(frozen=True, slots=True)
class ReaderParts:
    """What the views of one reader share: the caches in memory, the one on disk if there is one, and the threads that read logs."""

    caches: Caches
    room: CacheRoom | None
    threads: DaemonPool

    def begin(self, read: Callable[[], T]) -> Future[T]:
        """Have a log read in another thread, without the lookup's deadline; its requests are counted to the lookup."""

        def act() -> T:
            with no_deadline():
                return read()

        try:
            return self.threads.submit(contextvars.copy_context().run, act)
        except RuntimeError as error:
            raise InvalidArgument("the reader is closed") from error


class IndexView:
    """An index that somebody else writes.

    `backend` stands in for the storage that `config` names; it is closed with the view, not where making the view fails.
    Raises as `IndexReader.open`.
    """

    def __init__(self, config: IndexConfig, clock: Clock, backend: Storage | None, parts: ReaderParts) -> None:
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._parts = parts
        self._refreshing = threading.Lock()
        # taken by whoever begins a refresh that is due, and released by the thread that ends it
        self._joining = threading.Lock()
        self._waiting: Future[LogState] | None = None
        # a reading of the log that has not begun
        self._closed = False
        self._root_view: RootView | None = None
        self._changes: object = None
        self.catalog = Catalog()
        marker: Marker | None = None
        if config.root is not None:
            allow_many_files()
            root = Root(config.root, Disk())
            marker = root.read_marker()
            if marker is None:
                raise NotAnIndex(f"{config.root} holds no tiered index" + ("" if config.root.exists() else " (it does not exist)"))
            self._root_view = RootView(root)
        opened = None
        if backend is None:
            uri = config.storage or (marker.storage if marker is not None else None)
            backend = opened = open_storage(str(uri), options=config.s3, parallel_reads=config.query_threads)
        named = opened is None or config.storage is not None
        self.storage = MeteredStorage(backend, config.prices)
        self._log = StorageLog(self.storage, clock)
        self._log_error: TieredIndexError | None = None
        try:
            self.genesis = self._open_log(marker, must_answer=named or marker is None)
            self.schema: Schema = self.genesis.layout.schema
            index_id = self.genesis.index_id
            self.cold = ColdPath(
                self.storage,
                keyed=self.schema.keyed,
                settings=ColdSettings.of(config),
                folder=CacheFolder(parts.room, index_id) if parts.room is not None else None,
                caches=parts.caches,
                index_id=index_id,
            )
            show_stored(self.catalog, [], self._log.state, self.cold, lambda _: None)
        except BaseException:
            if opened is not None:
                opened.close()
            raise
        self._refreshed_s = clock.monotonic_s()

    def _open_log(self, marker: Marker | None, *, must_answer: bool) -> Genesis:
        try:
            genesis = self._log.open().genesis
            assert genesis is not None
        except StorageError as error:
            if must_answer or marker is None:
                raise
            # the root alone was asked for: what lies only in the storage fails when a lookup needs it
            self._log_error = error
            return Genesis(marker.index_id, marker.layout, marker.offset_space)
        if marker is not None:
            check_genesis(genesis, Genesis(marker.index_id, marker.layout, marker.offset_space), self.storage.uri)
        if self._config.item_type is not None and Schema.of(self._config.item_type) != genesis.layout.schema:
            check_genesis(genesis, Genesis("", self._config.layout(), genesis.offset_space), self.storage.uri)
        return genesis

    @property
    def log_state(self) -> LogState:
        """The storage's log as far as it was read."""
        return self._log.state

    def refresh(self) -> LogState:
        """Read what the log has gained; return its state."""
        with self._lock:
            return self._read()

    def read_on(self) -> LogState:
        """Refresh for a lookup, beginning after this call. Raises `BudgetExceeded` where its time is too short; the reading goes on."""
        left_s = remaining_s()
        if left_s is None:
            return self.refresh()
        until_s = time.monotonic() + left_s / 2
        while True:
            with self._joining:
                reading = self._waiting
                mine = reading is None
                if reading is None:
                    reading = self._waiting = self._parts.begin(self._read_for_all)
            try:
                return reading.result(max(0.0, until_s - time.monotonic()))
            except BudgetExceeded:
                if mine:
                    raise
                # of the lookup that began it: this one has a budget of its own
            except TimeoutError as error:
                raise BudgetExceeded(f"timeout_s was reached while reading the log of {self.storage.uri}") from error

    def claim_refresh(self) -> Callable[[], None] | None:
        """Return what refreshes where `refresh_interval_s` has passed, to be called once; None where it hasn't, or somebody is at it.

        A storage that can't be asked is told by the lookups that need it. A lookup that can't afford it answers from where the view
        stands; the next one tries again.
        """
        if not self._is_due() or not self._refreshing.acquire(blocking=False):
            return None  # whoever refreshes does it for all
        if not self._is_due():
            self._refreshing.release()
            return None
        return self._refresh_as_claimed

    def _refresh_as_claimed(self) -> None:
        try:
            with contextlib.suppress(BudgetExceeded):
                self._try(self.refresh)
        finally:
            self._refreshing.release()

    def _is_due(self) -> bool:
        return self._clock.monotonic_s() - self._refreshed_s >= self._config.refresh_interval_s

    def _read_for_all(self) -> LogState:
        with self._lock:
            with self._joining:
                self._waiting = None  # who comes from here on needs a later reading
            return self._read()

    def _read(self) -> LogState:
        """Read the log, with the lock held."""
        state = self._log.refresh() if self._log.state.number else self._log.open()
        if self._closed:
            raise InvalidArgument("the index was closed while its log was read")
        self._log_error = None
        show_stored(self.catalog, self.catalog.all(), state, self.cold, lambda _: None)
        self._refreshed_s = self._clock.monotonic_s()
        return state

    def handles(self, second_min: int, second_max: int) -> Sequence[Handle]:
        """Return what may hold answers in an inclusive range of epoch seconds."""
        if self._root_view is None:
            return [*self.catalog.overlapping(second_min, second_max), *self._unread(self._log_error)]
        return [handle for handle in self.all_handles() if handle.second_min <= second_max and handle.second_max >= second_min]

    def _try(self, read: Callable[[], LogState]) -> None:
        """Read the log; where it can't be read, or not believed, lookups say so until one of the next tries succeeds."""
        try:
            read()
        except (StorageError, CorruptFile) as error:
            self._log_error = error
            self._refreshed_s = self._clock.monotonic_s() - max(0.0, self._config.refresh_interval_s - _RETRY_S)

    def all_handles(self) -> list[Handle]:
        """Return the handles of all files. Closing empties the catalog: whoever asks looks afterwards whether it was closed meanwhile."""
        if self._root_view is None:
            return self.catalog.all()
        # Local files first, then the log: a file that leaves the root in between is in at least one of them. Files leave the root only
        # by way of its folders, so where these, after the look, are as they were before the log was last read, it needn't be read again.
        local = {handle.file_id: handle for handle in self._root_view.look()}
        changes = self._root_view.changes()
        unread: TieredIndexError | None = self._log_error
        if (changes is None or changes != self._changes) and unread is None:
            try:
                self._try(self.read_on)
                unread = self._log_error
            except BudgetExceeded as error:
                unread = error  # of this lookup only
            self._changes = changes if unread is None else None
        stored = {handle.file_id: handle for handle in self.catalog.all()}
        handles = [_backed(handle, stored.pop(file_id, None)) for file_id, handle in local.items()]
        handles += stored.values()
        return handles + self._unread(unread)

    def _unread(self, error: TieredIndexError | None) -> list[Handle]:
        """Return a handle that fails for the log where it could not be read when it was due: no answer is complete then."""
        if error is None:
            return []
        file = error.file if isinstance(error, CorruptFile) else "log"
        return [DamagedFile(file, "storage", 0, MAX_TIMESTAMP_MS // 1000, error)]

    def close(self) -> None:
        """Release threads and connections. Idempotent."""
        self._closed = True
        self.cold.close()
        self.storage.close()
        self.catalog.clear()
        if self._root_view is not None:
            self._root_view.clear()


def _backed(local: Handle, stored: Handle | None) -> Handle:
    """Return a root's file with the storage behind it, so that a damaged local copy is passed over where the storage has the file too."""
    if isinstance(local, DamagedFile) and stored is not None:
        return stored
    if isinstance(local, CompactedFile) and isinstance(stored, CompactedFile) and local.stored is None:
        # the view keeps its handles from look to look, so this is done once a file
        local.stored = stored.stored
    return local
