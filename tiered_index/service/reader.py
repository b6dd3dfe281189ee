"""`IndexReader`: read-only and stateless. It reads a storage, a root beside its writer, or both, and never writes a byte to either.

A reader works at one position of the storage's log and moves on by `refresh_interval_s`, or when an object that the log named is gone:
then it reads the log again and starts that lookup again, a bounded number of times.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiered_index.clock import Clock, SystemClock
from tiered_index.config import IndexConfig
from tiered_index.errors import ConfigError, InvalidArgument, NotAnIndex, StorageError
from tiered_index.format.schema import Schema
from tiered_index.service.catalog import Catalog, Handle
from tiered_index.service.cold.cache_folder import CacheFolder
from tiered_index.service.cold.path import ColdPath, ColdSettings
from tiered_index.service.compacted_file import CompactedFile, DamagedFile
from tiered_index.service.lifecycle import show_stored
from tiered_index.service.limits import allow_many_files
from tiered_index.service.log_records import ArchivedSegment, Genesis, LogState
from tiered_index.service.lookups import Lookups
from tiered_index.service.query import QueryEngine
from tiered_index.service.root import CACHE, Marker, Root
from tiered_index.service.root_view import RootView
from tiered_index.service.segment_archive import SegmentArchive
from tiered_index.service.session import check_genesis
from tiered_index.service.storage_log import StorageLog
from tiered_index.storage.base import Storage
from tiered_index.storage.disk import Disk
from tiered_index.storage.opening import open_storage
from tiered_index.storage.wrappers import MeteredStorage
from tiered_index.types import MAX_TIMESTAMP_MS

__all__ = ["IndexReader"]

_RETRY_S = 1.0
# a storage that did not answer is asked again after this time at the latest


class IndexReader(Lookups):
    """Answers lookups over an index somebody else writes. Threads: every method from any thread."""

    def __init__(self, config: IndexConfig, *, clock: Clock | None = None, storage: Storage | None = None) -> None:
        """Open an index for reading; prefer `IndexReader.open`."""
        if config.root is None and config.storage is None and storage is None:
            raise ConfigError("neither storage nor root is set: give a storage URI, a root, or both")
        self.config = config
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._catalog = Catalog()
        self._view: RootView | None = None
        self._changes: object = None
        marker: Marker | None = None
        if config.root is not None:
            allow_many_files()
            root = Root(config.root, Disk())
            marker = root.read_marker()
            if marker is None:
                raise NotAnIndex(f"{config.root} holds no tiered index" + ("" if config.root.exists() else " (it does not exist)"))
            self._view = RootView(root)
        uri = config.storage or (marker.storage if marker is not None else None)
        backend = storage if storage is not None else open_storage(str(uri), options=config.s3, parallel_reads=config.query_threads)
        self._storage = MeteredStorage(backend, config.prices)
        self._log = StorageLog(self._storage, self._clock)
        self._log_error: StorageError | None = None
        try:
            state = self._log.open()
            assert state.genesis is not None
            self._genesis = state.genesis
        except StorageError as error:
            if marker is None or config.storage is not None or storage is not None:
                self._storage.close()
                raise
            # the root alone was asked for: what lies only in the storage fails when a lookup needs it
            self._log_error = error
            self._genesis = Genesis(marker.index_id, marker.layout, marker.offset_space)
        except BaseException:
            self._storage.close()
            raise
        if marker is not None and self._log_error is None:
            check_genesis(self._genesis, Genesis(marker.index_id, marker.layout, marker.offset_space), self._storage.uri)
        self._schema: Schema = self._genesis.layout.schema
        item_type = config.item_type
        if item_type is not None and Schema.of(item_type) != self._schema:
            self._storage.close()
            check_genesis(self._genesis, Genesis("", config.layout(), self._genesis.offset_space), self._storage.uri)
        folder = _cache_folder(config, self._genesis.index_id)
        self._cold = ColdPath(self._storage, keyed=self._schema.keyed, settings=ColdSettings.of(config), folder=folder)
        show_stored(self._catalog, [], self._log.state, self._cold, lambda _: None)
        self._refreshed_s = self._clock.monotonic_s()
        self._engine = QueryEngine(self._schema, item_type or self._schema.item_type(), config.query_threads, self._storage)
        self._closed = False

    @classmethod
    def open(
        cls,
        storage: str | None = None,
        *,
        root: str | Path | None = None,
        config: IndexConfig | None = None,
        clock: Clock | None = None,
        storage_backend: Storage | None = None,
        **settings: Any,
    ) -> IndexReader:
        """Open an index by its storage URI, by a root (whose marker names its storage), or by both.

        Raises `NotAnIndex`, `StorageUnavailable`, `StorageMisconfigured`, `CorruptFile`, `ConfigError`.
        """
        if config is None:
            config = IndexConfig.load(storage=storage, root=root, **settings)
        elif storage is not None or root is not None or settings:
            raise InvalidArgument("give a config or settings by name, not both")
        return cls(config, clock=clock, storage=storage_backend)

    def refresh(self) -> LogState:
        """Read what the log has gained; return its state."""
        self._check_open()
        with self._lock:
            state = self._log.refresh() if self._log.state.number else self._log.open()
            self._log_error = None
            show_stored(self._catalog, self._catalog.all(), state, self._cold, lambda _: None)
            self._refreshed_s = self._clock.monotonic_s()
            return state

    def files(self) -> list[Handle]:
        """Return the handles of all files, local ones in their present state."""
        return sorted(self._all_handles(), key=lambda handle: (handle.sequence, handle.file_id))

    @property
    def genesis(self) -> Genesis:
        """What the index was created as: id, layout, offset space."""
        return self._genesis

    @property
    def log_state(self) -> LogState:
        """The storage's log as far as it was read."""
        return self._log.state

    @property
    def storage(self) -> MeteredStorage:
        """The storage, metered."""
        return self._storage

    def archived(self, store: str | None = None) -> tuple[ArchivedSegment, ...]:
        """Return the archived segments of a store, or of all, by store and start."""
        state = self._log.state
        return tuple(segment for name in (state.stores if store is None else (store,)) for segment in state.segments_of(name))

    @property
    def segment_archive(self) -> SegmentArchive:
        """The archived segments, for reading."""
        return SegmentArchive(self._storage, lambda: self._log.state, self.refresh)

    def close(self) -> None:
        """Release threads and connections. Idempotent."""
        self._closed = True
        self._engine.close()
        self._cold.close()
        self._storage.close()
        self._catalog.clear()
        if self._view is not None:
            self._view.clear()

    def __enter__(self) -> IndexReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgument("the reader is closed")

    def _read_log(self) -> LogState:
        return self.refresh()

    def _prepare(self) -> None:
        if self._clock.monotonic_s() - self._refreshed_s >= self.config.refresh_interval_s:
            self._try_to_refresh()

    def _try_to_refresh(self) -> None:
        """Refresh; where the storage can't be asked, lookups say so until one of the next tries succeeds."""
        try:
            self.refresh()
        except StorageError as error:
            self._log_error = error
            self._refreshed_s = self._clock.monotonic_s() - max(0.0, self.config.refresh_interval_s - _RETRY_S)

    def _handles(self, second_min: int, second_max: int) -> Sequence[Handle]:
        return [handle for handle in self._all_handles() if handle.second_min <= second_max and handle.second_max >= second_min]

    def _all_handles(self) -> list[Handle]:
        if self._view is None:
            handles = self._catalog.all()
            self._check_open()  # closing empties the catalog: what it held is no complete answer
            return handles
        # Local files first, then the log: a file that leaves the root in between is in at least one of them. Files leave the root only
        # by way of its folders, so where these, after the look, are as they were before the log was last read, it needn't be read again.
        local = {handle.file_id: handle for handle in self._view.look()}
        changes = self._view.changes()
        if (changes is None or changes != self._changes) and self._log_error is None:
            self._try_to_refresh()
            self._changes = changes if self._log_error is None else None
        stored = {handle.file_id: handle for handle in self._catalog.all()}
        handles = [_backed(handle, stored.pop(file_id, None)) for file_id, handle in local.items()]
        handles += stored.values()
        if self._log_error is not None:
            handles.append(DamagedFile("log", "storage", 0, MAX_TIMESTAMP_MS // 1000, self._log_error))
        self._check_open()
        return handles


def _cache_folder(config: IndexConfig, index_id: str) -> CacheFolder | None:
    """Return the reader's own cache where it was given one, else the writer's beside it, which it never changes."""
    if config.cache_dir is not None:
        return CacheFolder(config.cache_dir, index_id, config.cache_max_bytes)
    if config.root is not None:
        return CacheFolder(config.root / CACHE, index_id, config.cache_max_bytes, read_only=True)
    return None


def _backed(local: Handle, stored: Handle | None) -> Handle:
    """Return a root's file with the storage behind it, so that a damaged local copy is passed over where the storage has the file too."""
    if isinstance(local, DamagedFile) and stored is not None:
        return stored
    if isinstance(local, CompactedFile) and isinstance(stored, CompactedFile) and local.stored is None:
        # the view keeps its handles from look to look, so this is done once a file
        local.stored = stored.stored
    return local
