"""The background life of files: seal by age, compact, upload, retire, and dispose of what no query needs any more.

`run_once` is one round; each step is idempotent, so a crash between any two calls costs time and nothing else. A file's predecessor goes
only after its successor serves reads. No lock is held during an upload: the round's own lock keeps rounds apart, not readers or writers.
Threads: rounds are serialised; everything may be called from any thread.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tiered_index._version import __version__
from tiered_index.clock import Clock
from tiered_index.config import IndexConfig
from tiered_index.errors import (
    BackPressure,
    CorruptFile,
    DiskFull,
    InvalidArgument,
    ObjectNotFound,
    StorageError,
    StorageUnavailable,
    TieredIndexError,
    WriterFenced,
)
from tiered_index.format.compacted import Compaction
from tiered_index.format.names import COMPACTED, DATA_PREFIX, STATES, UPLOADED, data_name, data_prefix
from tiered_index.service.catalog import Catalog, Handle
from tiered_index.service.chunks import later_positions
from tiered_index.service.cold.path import ColdPath
from tiered_index.service.compacted_file import CompactedFile, DamagedFile, StorageBytes, open_local, open_stored
from tiered_index.service.flusher import Flusher
from tiered_index.service.lanes import QUARANTINE
from tiered_index.service.local_checks import verify_runs, verify_tables
from tiered_index.service.log_records import LogState, StoredObject
from tiered_index.service.root import Root, disk_error
from tiered_index.service.session import StorageSession
from tiered_index.service.storage_log import fenced
from tiered_index.service.unsealed_file import UnsealedFile
from tiered_index.service.window_table import WindowTable
from tiered_index.storage.base import Storage

__all__ = ["Lifecycle", "Progress", "show_stored"]

_CLOCK_SLACK_MS = 86_400_000
# by which a writer's clock may have been put back
_log = logging.getLogger(__name__)


@dataclass
class Progress:
    """What one round did, in files."""

    compacted: int = 0
    uploaded: int = 0
    retired: int = 0

    def any(self) -> bool:
        """Whether anything was done."""
        return bool(self.compacted or self.uploaded or self.retired)


def show_stored(
    catalog: Catalog,
    handles: Iterable[Handle],
    state: LogState,
    cold: ColdPath,
    dispose: Callable[[str], Callable[[], None] | None],
    keeps: Callable[[CompactedFile], bool] = lambda _: False,
) -> None:
    """Make the catalog show exactly the objects of `state` beside the local files; `dispose` names what goes with a removed file.
    `keeps` says which local copies stay although their file was merged.

    `handles` must have been taken before `state`: what was published in between is not among them and stays.
    """
    # tables first: what they were merged out of goes after them, so that a lookup meets an entry at least once
    for table, shards in state.tables.items():
        if catalog.get(table) is None:
            catalog.put(WindowTable(cold, shards))
    for handle in handles:
        if isinstance(handle, CompactedFile) and handle.stored is not None and handle.file_id not in state.files:
            if keeps(handle):
                continue
            catalog.remove(handle.file_id, dispose(handle.file_id) if handle.local is not None else None)
        elif isinstance(handle, WindowTable) and handle.file_id not in state.tables:
            catalog.remove(handle.file_id)
    for file_id, stored in state.files.items():
        if catalog.get(file_id) is None:
            catalog.put(open_stored(cold, stored))


def _is_stored(handle: Handle) -> bool:
    """Return whether the storage has a file, or what it was merged into."""
    if isinstance(handle, CompactedFile):
        return handle.stored is not None or handle.folder == UPLOADED
    return isinstance(handle, WindowTable)


def _positions_of(handles: Iterable[Handle]) -> dict[str, int]:
    """Return the greatest position of each source that local files say."""
    positions: dict[str, int] = {}
    for handle in handles:
        if isinstance(handle, UnsealedFile):
            positions = later_positions(positions, handle.positions)
        elif isinstance(handle, CompactedFile) and handle.local is not None:
            positions = later_positions(positions, handle.metadata().source_positions)
    return positions


class Lifecycle:
    """The life cycle of one root's files. `errors` holds the last error of each file that could not go on, until it can."""

    def __init__(
        self,
        root: Root,
        catalog: Catalog,
        flusher: Flusher,
        session: StorageSession,
        cold: ColdPath,
        config: IndexConfig,
        clock: Clock,
        root_id: str,
        recovered: Iterable[str] = (),
    ) -> None:
        """`recovered` are the ids of files that an earlier process began: it may have published them unheard."""
        self._root = root
        self._catalog = catalog
        self._flusher = flusher
        self._session = session
        self._cold = cold
        self._config = config
        self._clock = clock
        self._root_id = root_id
        self._lock = threading.Lock()
        self._refresh_lock = threading.Lock()
        self._refreshed_s = clock.monotonic_s()
        self._recovered = set(recovered)
        self._sent: dict[str, str] = {}  # file id -> object that was uploaded whole and is not known to be in the log
        self._undeleted: list[list[Path]] = []
        self._failed: dict[str, TieredIndexError] = {}  # in this round
        self.errors: dict[str, TieredIndexError] = {}
        self._closed = False

    def run_once(self) -> Progress:
        """Seal what is old, then compact, upload and retire what can be. Raises the first error after every file had its turn.

        While the root is not what it was, no file has a turn: another folder may be in its place.
        """
        with self._lock:
            if self._closed:
                raise InvalidArgument("the index is closed")
            self._failed = {}
            progress = Progress()
            self._flusher.roll_older_than(self._clock.now_ms() - self._config.seal_after_s * 1000)
            has_root = self._step("root", self._root.check)
            for file in self._sealed() if has_root else ():
                progress.compacted += self._step(file.file_id, partial(self._compact, file))
            lacks_room = any(isinstance(error, BackPressure) for error in (self._flusher.error, *self._failed.values()))
            if self._step("storage", self._claim) and has_root:
                for ready in self._ready():
                    if not self._step(ready.file_id, partial(self._upload, ready)):
                        break  # in order of sequence, so that source positions in the log never run ahead of the entries
                    progress.uploaded += 1
                for old in self._retirable(lacks_room=lacks_room):
                    progress.retired += self._step(old.file_id, partial(self._retire, old))
            if has_root:
                self._delete_again()
                self._catalog.reclaim()
            self.errors = self._failed
            if self.errors:
                raise next(iter(self.errors.values()))
            return progress

    def end(self) -> None:
        """From here on `run_once` raises `InvalidArgument`: the root is somebody else's."""
        with self._lock:
            self._closed = True

    def close(self) -> None:
        """Dispose of what is waiting and release the lease; a storage that is down or full is no reason to fail."""
        with self._lock:
            self._closed = True
            try:
                self._root.check()
            except TieredIndexError as error:
                _log.warning("nothing is deleted, the next start will: %s", error)
            else:
                self._catalog.reclaim()
            try:
                self._session.release()
            except (StorageError, DiskFull) as error:
                _log.warning("the lease was not released and will expire by itself: %s", error)

    def local_bytes(self) -> int:
        """Bytes of the root's files."""
        total = 0
        for state in STATES:
            with contextlib.suppress(OSError):  # what can't be looked at is told by whoever needs it
                for name in self._root.disk.names(self._root.folder(state)):
                    with contextlib.suppress(FileNotFoundError):
                        total += (self._root.folder(state) / name).stat().st_size
        return total

    def refresh(self) -> LogState:
        """Read the log, show what it says, and return it."""
        with self._refresh_lock:
            return self._refresh()

    def _refresh(self) -> LogState:
        self._session.log.refresh()
        # The handles first: whatever is among them was published before, so the log's state taken after them knows it.
        handles = self._catalog.all()
        state = self._session.log.state
        for handle in handles:
            # recovered while the storage was down: now the log can tell
            stored = state.object_of(handle.file_id)
            if isinstance(handle, DamagedFile) and stored is not None:
                self._catalog.put(open_stored(self._cold, stored))
            elif isinstance(handle, CompactedFile) and handle.folder == UPLOADED and handle.stored is None:
                if stored is None and not self._says_more(handle):
                    self._catalog.remove(handle.file_id, self._dispose_local(handle.file_id))
                elif stored is not None:
                    self._catalog.put(replace(handle, stored=StorageBytes(self._cold, stored)))
        show_stored(self._catalog, self._catalog.all(), self._session.log.state, self._cold, self._dispose_local, self._says_more)
        return state

    def _says_more(self, file: CompactedFile) -> bool:
        """Return whether a local copy says a source's position that the log doesn't reach yet: it stays until the log does."""
        logged = self._session.log.state.positions
        return file.local is not None and later_positions(logged, file.metadata().source_positions) != logged

    def _step(self, name: str, step: Callable[[], None]) -> bool:
        try:
            step()
        except TieredIndexError as error:
            if isinstance(error, WriterFenced):
                self._session.fenced = error
            self._failed[name] = self.errors[name] = error
            return False
        self.errors.pop(name, None)
        return True

    def _claim(self) -> None:
        if self._session.fenced is not None:
            raise self._session.fenced
        if not self._session.claimed:
            self._session.join_again()
            self._session.claim(self._root_id)
            self._flusher.learn(self.refresh().positions)
            self._session.log_error = None
        if self._clock.monotonic_s() - self._refreshed_s >= self._config.refresh_interval_s:
            state = self.refresh()
            self._refreshed_s = self._clock.monotonic_s()
            if state.epoch > self._session.epoch:  # told also where it has nothing to publish
                raise fenced(self._session.storage.uri, state.epoch, self._session.epoch)
        self._session.renew()

    def _sealed(self) -> list[UnsealedFile]:
        files = [h for h in self._catalog.all() if isinstance(h, UnsealedFile) and h.sealed]
        return sorted(files, key=lambda file: file.sequence)

    def _ready(self) -> list[CompactedFile]:
        files = [h for h in self._catalog.all() if isinstance(h, CompactedFile) and h.folder == COMPACTED]
        return sorted(files, key=lambda file: (file.lane != QUARANTINE, file.sequence))

    def _durable_positions(self, file: CompactedFile) -> dict[str, int]:
        """Return the source positions that are true once `file` is published: those before which no entry waits in another file.

        A main file's positions say nothing of quarantine and of damaged files; a quarantine file's say nothing of main files.
        """
        handles = self._catalog.all()
        waiting = [h for h in handles if h.file_id != file.file_id and not _is_stored(h)]
        if any(isinstance(h, DamagedFile) or h.lane == QUARANTINE or h.sequence < file.sequence for h in waiting):
            return {}
        if waiting:
            return file.metadata().source_positions if file.lane != QUARANTINE else {}
        return _positions_of([file, *handles])

    def _retirable(self, *, lacks_room: bool) -> list[CompactedFile]:
        """Return local copies that have been kept long enough, and the oldest of those beyond the bound in bytes.

        Where a flush or a compaction found no room the oldest go early, as many as make room for one more file. A copy stays while it is
        the last to say a source's position: one that the log and the younger local files don't reach.
        """
        handles = self._catalog.all()
        known = self._session.log.state.files
        kept = [h for h in handles if isinstance(h, CompactedFile) and h.local is not None and h.stored is not None and h.file_id in known]
        kept.sort(key=lambda file: file.sequence)
        total = sum(file.local.size_bytes for file in kept if file.local is not None)
        bound = self._config.local_keep_bytes
        before_ms = self._clock.now_ms() - self._config.local_keep_s * 1000
        logged = self._session.log.state.positions
        wanted = kept[-1].metadata().layout.unsealed_size if kept and lacks_room else 0
        chosen = []
        for file in kept:
            assert file.local is not None and file.stored is not None
            if file.stored.stored.published_ms > before_ms and (bound is None or total <= bound) and wanted <= 0:
                continue
            said = later_positions(logged, _positions_of([h for h in handles if h.sequence > file.sequence]))
            own = file.metadata().source_positions
            if later_positions(said, own) == said:
                chosen.append(file)
                total -= file.local.size_bytes
                wanted -= file.local.size_bytes
        return chosen

    def _compact(self, file: UnsealedFile) -> None:
        disk, target = self._root.disk, self._root.index_path(COMPACTED, file.file_id)
        temporary = self._root.temporary(COMPACTED)
        compaction = Compaction(file.entries(), file.layout, file.table.begin_ms, file.table.end_ms)
        pieces = compaction.pieces(
            file_id=file.file_id,
            topics=tuple(sorted(file.topics.items())),
            source_positions=file.positions,
            lane=file.lane,
            offset_space=file.offset_space,
            writer=f"tiered_index {__version__}",
            more={"sequence": file.sequence, "predecessor": list(file.predecessor) if file.predecessor else None,
                  "created_ms": file.created_ms},
        )
        try:
            disk.write_file(temporary, pieces)
            disk.publish(temporary, target)
        except OSError as error:
            with contextlib.suppress(OSError):  # each round makes one anew
                disk.unlink(temporary)
            raise disk_error(error, f"compacting {file.path}") from error
        self._catalog.put(open_local(target), lambda: self._drop_unsealed(file))

    def _drop_unsealed(self, file: UnsealedFile) -> None:
        file.release()
        # the journal first: to a reader beside this writer a file without one is not there
        self._unlink([file.journal_path, file.path])

    def _upload(self, file: CompactedFile) -> None:
        assert file.local is not None
        storage, epoch = self._session.storage, self._session.epoch
        verify_tables(file)
        verify_runs(file)
        trailer = file.local.trailer()
        # an attempt that reached the storage but, as far as we heard, not the log is published under the name that it has
        sent = self._sent.get(file.file_id)
        name = sent or data_name(file.file_id, secrets.token_hex(8))
        stored = StoredObject(
            name=name,
            file_id=file.file_id,
            lane=trailer.metadata.lane,
            sequence=file.sequence,
            second_min=file.second_min,
            second_max=file.second_max,
            count=file.count,
            size_bytes=file.local.size_bytes,
            trailer_position=trailer.tail.position,
            filter_length=trailer.tail.filter_length,
            directory_length=trailer.tail.directory_length,
            metadata_length=trailer.tail.metadata_length,
            published_ms=self._clock.now_ms(),
        )
        state = self._session.log.refresh()
        if state.epoch > epoch:
            raise fenced(storage.uri, state.epoch, epoch)
        known = state.object_of(file.file_id)
        if known is None and (sent is not None or file.file_id in self._recovered) and self._was_merged(file):
            return
        if known is not None:
            stored = known  # an earlier try got as far as the log
        else:
            self._session.log.check_end()
            try:
                if sent is None:
                    self._send(storage, name, memoryview(file.local.data))
                size = storage.head(name).size_bytes
                if size != stored.size_bytes:
                    raise StorageUnavailable(f"{storage.uri}: {name} has {size:,} bytes after its upload, not {stored.size_bytes:,}")
            except TieredIndexError as error:
                if sent is None:
                    with contextlib.suppress(StorageError):  # the error that counts is the upload's; an orphan costs only space
                        storage.delete(name)
                elif isinstance(error, ObjectNotFound):
                    del self._sent[file.file_id]  # sent anew next time; never deleted, since its record may still arrive
                raise
            self._sent[file.file_id] = name
            try:
                self._session.log.publish(epoch, (stored,), positions=self._durable_positions(file))
            except WriterFenced:
                # decided: it never was published and never will be
                if self._session.log.state.object_of(file.file_id) is None:
                    with contextlib.suppress(StorageError):
                        storage.delete(name)
                raise
        source, target = self._root.index_path(COMPACTED, file.file_id), self._root.index_path(UPLOADED, file.file_id)
        try:
            if source.exists():
                self._root.disk.publish(source, target)
            else:  # an earlier try moved it, but could not make that durable
                self._root.disk.sync_folder(target.parent)
                self._root.disk.sync_folder(source.parent)
        except OSError as error:
            raise disk_error(error, f"moving {source} to {target}") from error
        self._sent.pop(file.file_id, None)
        self._cold.keep(stored, file.local.data)
        self._catalog.put(open_local(target, StorageBytes(self._cold, stored)))

    def _was_merged(self, file: CompactedFile) -> bool:
        """Return whether an earlier try got as far as the log and a later record has removed the file since; then let go of it."""
        created_ms = int(file.metadata().more.get("created_ms", 0))
        self._recovered.discard(file.file_id)
        if not self._session.log.was_removed(file.file_id, created_ms - _CLOCK_SLACK_MS):
            return False
        self._sent.pop(file.file_id, None)
        self.refresh()  # what it was merged into is shown before it goes
        path = self._root.index_path(COMPACTED, file.file_id)
        self._catalog.remove(file.file_id, lambda: self._unlink([path]))
        return True

    def _send(self, storage: Storage, name: str, data: memoryview) -> None:
        part = max(self._config.upload_part_bytes, storage.min_part_bytes)
        if len(data) <= part:
            storage.put(name, data)
            return
        handle = storage.begin_upload(name)
        try:
            starts = range(0, len(data), part)
            parts = [storage.upload_part(handle, i + 1, data[start : start + part]) for i, start in enumerate(starts)]
            storage.complete_upload(handle, parts)
        except TieredIndexError:
            with contextlib.suppress(StorageError):  # recovery and `orphans` abort what is left
                storage.abort_upload(handle)
            raise

    def _retire(self, file: CompactedFile) -> None:
        assert file.stored is not None
        stored = file.stored.stored
        size = self._session.storage.head(stored.name).size_bytes
        if size != stored.size_bytes:
            raise CorruptFile(stored.name, "object has another size than the log says; its local copy is kept",
                              expected=stored.size_bytes, found=size)  # fmt: skip
        self._catalog.put(open_stored(self._cold, stored), self._dispose_local(file.file_id))

    def _dispose_local(self, file_id: str) -> Callable[[], None]:
        return lambda: self._unlink([self._root.index_path(UPLOADED, file_id)])

    def _unlink(self, paths: list[Path]) -> None:
        """Delete files of one folder in this order, durably: a power cut must not bring back what the log has forgotten by then.

        What can't be deleted now is tried again in every round.
        """
        for number, path in enumerate(paths):
            try:
                self._root.disk.unlink(path)
                if path is paths[-1]:
                    self._root.disk.sync_folder(path.parent)
            except OSError as error:
                self._failed[path.name] = disk_error(error, f"deleting {path}")
                self._undeleted.append(paths[number:])
                return

    def _delete_again(self) -> None:
        undeleted, self._undeleted = self._undeleted, []
        for paths in undeleted:
            self._unlink(paths)

    def sweep_attempts(self, file_ids: set[str]) -> int:
        """Delete what unfinished uploads of this root's own files left in the storage; return how many objects and uploads that was."""
        storage = self._session.storage
        swept = 0
        named = set(self._session.log.refresh().objects)
        for file_id in sorted(file_ids):
            for info in list(storage.list(data_prefix(file_id))):
                if info.name not in named:
                    storage.delete(info.name)
                    swept += 1
        if file_ids:
            for handle in list(storage.list_uploads(DATA_PREFIX)):
                if handle.name.split("/")[1] in file_ids:
                    storage.abort_upload(handle)
                    swept += 1
        return swept

