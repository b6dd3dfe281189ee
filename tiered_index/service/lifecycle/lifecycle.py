"""The background life of files: seal by age, compact or stage, upload, retire, and dispose of what no query needs any
more.

`run_once` is one round; each step is idempotent, so a crash between any two calls costs time and nothing else. A file's
predecessor goes only after its successor serves reads. No lock is held during an upload: the round's own lock keeps
rounds apart, not readers or writers. Threads: rounds are serialised; everything may be called from any thread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from tiered_index.errors import (
    BackPressure,
    CorruptFile,
    DiskFull,
    InvalidArgument,
    StorageError,
    TieredIndexError,
    WriterFenced,
    without_frames,
)
from tiered_index.format.journal import Journal
from tiered_index.format.names import COMPACTED, STATES
from tiered_index.service.files.compacted import CompactedFile, DamagedFile, open_local, open_stored
from tiered_index.service.files.unsealed import UnsealedFile
from tiered_index.service.lifecycle.root_files import DamagedCopies, RootFiles, positions_of, sealed_form
from tiered_index.service.lifecycle.staging import Staging
from tiered_index.service.lifecycle.uploads import Uploads
from tiered_index.service.log.log import fenced
from tiered_index.service.log.records import max_positions
from tiered_index.service.root.root import disk_error
from tiered_index.service.writing.flusher import Flusher
from tiered_index.service.writing.lanes import QUARANTINE

__all__ = ["Lifecycle", "Progress"]

_log = logging.getLogger(__name__)


@dataclass
class Progress:
    """What one round did, in files."""

    compacted: int = 0
    uploaded: int = 0
    retired: int = 0
    staged: int = 0
    adopted: int = 0

    def any(self) -> bool:
        """Whether anything was done."""
        return bool(self.compacted or self.uploaded or self.retired or self.staged or self.adopted)


class Lifecycle:
    """The life cycle of one root's files; `errors` has the last error of each file that could not go on, until it can."""

    def __init__(
        self,
        files: RootFiles,
        flusher: Flusher,
        root_id: str,
        damaged: Iterable[DamagedFile] = (),
        journals: Mapping[str, Journal] | None = None,
    ) -> None:
        """`damaged`, `journals`: as in `Recovered`."""
        self._files = files
        self._root, self._catalog, self._session = files.root, files.catalog, files.session
        self._config, self._clock = files.config, files.clock
        self._flusher = flusher
        self._root_id = root_id
        self._lock = threading.Lock()
        self._refreshed_s = files.clock.monotonic_s()
        self._uploads = Uploads(files)
        self._staging = Staging(files)
        self._damaged = DamagedCopies(files, damaged, journals or {}, flusher.learn)
        self.refresh, self.sweep_attempts = files.refresh, self._uploads.sweep_attempts
        self._failed: dict[str, TieredIndexError] = {}  # in this round
        self.errors: dict[str, TieredIndexError] = {}
        self._closed = False

    def run_once(self) -> Progress:
        """Seal what is old, then compact, upload and retire what can be; raise the first error once every file had its
        turn. While the root is not the folder that was opened no file has one.
        """
        progress, errors = self._round()
        if errors:
            raise errors[0]  # here, where its trace names no file: it is kept until the next round
        return progress

    def _round(self) -> tuple[Progress, list[TieredIndexError]]:
        with self._lock:
            if self._closed:
                raise InvalidArgument("the index is closed")
            self._failed = {}
            progress = Progress()
            self._flusher.roll_older_than(self._clock.now_ms() - self._config.seal_after_s * 1000)
            has_root = self._step("root", self._root.check)
            sealed = self._sealed()
            self._staging.begin_clocks(sealed)
            for file in [file for file in sealed if not self._staging.waits(file)] if has_root else ():
                progress.compacted += self._step(file.file_id, partial(self._compact, file))
            lacks_room = any(isinstance(error, BackPressure) for error in (self._flusher.error, *self._failed.values()))
            if self._step("storage", self._claim) and has_root:
                self._step("damaged", self._tend_damaged)
                self._tend(progress)
                for ready in self._ready():
                    if not self._step(ready.file_id, partial(self._uploads.upload, ready)):
                        # in order of sequence, so that source positions in the log never run ahead of the entries
                        break
                    progress.uploaded += 1
                self._step("staging", self._staging.settle)
                for old in self._retirable(lacks_room=lacks_room):
                    progress.retired += self._step(old.file_id, partial(self._retire, old))
            if has_root:
                self._files.deletions.again()
                self._catalog.reclaim()
            self._failed |= self._files.deletions.errors()
            self.errors = self._failed
            return progress, list(self.errors.values())

    def tend_damaged(self) -> None:
        """Let go of damaged files that were published, ask for staged ones; the rounds repeat what fails."""
        with self._lock:
            self._step("damaged", self._tend_damaged)

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

    def _step(self, name: str, step: Callable[[], None]) -> bool:
        try:
            step()
        except TieredIndexError as error:
            if isinstance(error, WriterFenced):
                self._session.fenced = error
            self._failed[name] = self.errors[name] = without_frames(error)
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

    def _tend_damaged(self) -> None:
        self._damaged.tend()
        for file_id in self._staging.ask_for(self._damaged.waiting):
            self._damaged.staged(file_id)

    def _tend(self, progress: Progress) -> None:
        """Stage what is sealed, adopt what jobs have published; after an error of the storage no more in this round."""
        staged, adopted = self._staging.staged, self._staging.adopted
        for file in self._sealed():
            if not self._step(file.file_id, partial(self._staging.tend, file)) and isinstance(
                self._failed[file.file_id], StorageError
            ):
                break
        progress.staged, progress.adopted = self._staging.staged - staged, self._staging.adopted - adopted

    def _sealed(self) -> list[UnsealedFile]:
        files = [h for h in self._catalog.all() if isinstance(h, UnsealedFile) and h.sealed]
        return sorted(files, key=lambda file: file.sequence)

    def _ready(self) -> list[CompactedFile]:
        files = [h for h in self._catalog.all() if isinstance(h, CompactedFile) and h.folder == COMPACTED]
        return sorted(files, key=lambda file: (file.lane != QUARANTINE, file.sequence))

    def _retirable(self, *, lacks_room: bool) -> list[CompactedFile]:
        """Return local copies kept long enough, and the oldest of those beyond the bound in bytes. Where a flush or a
        compaction found no room the oldest go early, to make room for one file. A copy stays while it alone has a
        source's position: one that the log and younger local files don't reach.
        """
        handles = self._catalog.all()
        known = self._session.log.state.files
        kept = [
            h
            for h in handles
            if isinstance(h, CompactedFile) and h.local is not None and h.stored is not None and h.file_id in known
        ]
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
            said = max_positions(logged, positions_of([h for h in handles if h.sequence > file.sequence]))
            own = file.metadata().source_positions
            if max_positions(said, own) == said:
                chosen.append(file)
                total -= file.local.size_bytes
                wanted -= file.local.size_bytes
        return chosen

    def _compact(self, file: UnsealedFile) -> None:
        disk, target = self._root.disk, self._root.index_path(COMPACTED, file.file_id)
        temporary = self._root.temporary(COMPACTED)
        pieces = sealed_form(file).compacted(file.entries())
        try:
            disk.write_file(temporary, pieces)
            disk.publish(temporary, target)
        except OSError as error:
            with contextlib.suppress(OSError):  # each round makes one anew
                disk.unlink(temporary)
            raise disk_error(error, f"compacting {file.path}") from error
        self._catalog.put(open_local(target), lambda: self._files.drop(file))

    def _retire(self, file: CompactedFile) -> None:
        assert file.stored is not None
        stored = file.stored.stored
        size = self._session.storage.head(stored.name).size_bytes
        if size != stored.size_bytes:
            raise CorruptFile(
                stored.name,
                "object has another size than the log says; its local copy is kept",
                expected=stored.size_bytes,
                found=size,
            )
        self._catalog.put(open_stored(self._files.cold, stored), self._files.dispose(file.file_id))
