"""Begin a root again after its storage, or the root itself, went back in time: `tiered-index recover`.

```
root/*  ─set aside─> root/aside/  ─entries that the storage lacks, under new ids─> unsealed/  ─> aside/ is deleted
```
The root gets a new id and the storage's positions, so that sources send again what the storage lacks. A file whose
entries the storage has, by count and checksum, is not sent. What was sent before a merge took its file may be sent
again: entries of one identity are one answer. A broken-off run is continued by the next one, and no writer opens the
root before. Where a file can't be read, all that was set aside stays, in `aside-NUMBER/`. One thread.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from tiered_index.clock import Clock, SystemClock
from tiered_index.config import IndexConfig
from tiered_index.errors import ConfigError, CorruptFile, NotAnIndex, TieredIndexError
from tiered_index.format.names import COMPACTED, STATES, UPLOADED
from tiered_index.service.catalog.catalog import Handle
from tiered_index.service.files.compacted import CompactedFile, DamagedFile
from tiered_index.service.index import IndexService
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.state import LogState
from tiered_index.service.lookup.export import Export, ExportRange
from tiered_index.service.reading.root_view import RootView, UnsealedView
from tiered_index.service.root import ASIDE, Root, RootLock, disk_error
from tiered_index.service.root.files import LIST, FileList
from tiered_index.service.root.seen import SeenFile
from tiered_index.storage.base import Storage
from tiered_index.storage.disk import Disk

_ALL = ExportRange(None, -(2**62), 2**62)
# beside the root's files: what it had seen of the log, and what it had
_TOLD = ("seen", "log", "files")


@dataclass(frozen=True)
class BegunAnew:
    """The outcome of a recovery: counts of files, and of `entries`. `kept` names those that could not be sent, with the
    reason; `left` is the folder that still has them.
    """

    sent: int
    entries: int
    stored: int
    kept: dict[str, str]
    left: Path | None = None


def begin_anew(
    config: IndexConfig,
    *,
    clock: Clock | None = None,
    disk: Disk | None = None,
    storage: Storage | None = None,
    takes_over: bool = False,
) -> BegunAnew:
    """Begin the root of `config` again, and put into it again what the storage lacks. Durable in the root when it
    returns; the life cycle uploads it. `takes_over`: although another writer has the lease. Raises as
    `IndexService.open`; a repeated call continues.
    """
    if config.root is None:
        raise ConfigError("root is not set: give --root")
    clock, disk = clock or SystemClock(), disk or Disk()
    root = Root(config.root, disk)
    _set_aside(root)
    aside = Root(root.path / ASIDE, disk)
    with IndexService(
        config, clock=clock, disk=disk, storage=storage, begins_anew=True, takes_over=takes_over
    ) as index:
        done = _Sending(index, aside, clock).run()
        index.flush()
        left = root.path / f"{ASIDE}-{secrets.token_hex(4)}"
        try:
            # one step: from here on the root is whole
            disk.rename(aside.path, left)
            disk.sync_folder(root.path)
        except OSError as error:
            raise disk_error(error, f"moving {aside.path} to {left}") from error
        if not done.kept:
            shutil.rmtree(left, ignore_errors=True)
    return replace(done, left=left if done.kept else None)


def _set_aside(root: Root) -> None:
    """Move what the root holds to `aside/`, as far as not done, and write a marker with a new id."""
    if not root.path.is_dir():
        raise NotAnIndex(f"{root.path} holds no tiered index")
    lock = RootLock(root)
    try:
        root.check()
        disk, aside = root.disk, Root(root.path / ASIDE, root.disk)
        if not aside.marker_path.exists():
            marker = root.read_marker()
            if marker is None:
                raise NotAnIndex(f"{root.path} holds no tiered index")
            disk.make_folder(aside.path)
            disk.sync_folder(root.path)
            for name in (*STATES, *_TOLD):
                if (root.path / name).exists() and not (aside.path / name).exists():
                    disk.rename(root.path / name, aside.path / name)
            disk.sync_folder(aside.path)
            # this one says that everything has moved
            aside.write_file(aside.marker_path, [marker.encode()], f"writing {aside.marker_path}")
            disk.sync_folder(root.path)
        old = aside.read_marker()
        assert old is not None
        now = root.read_marker()
        if now is None or now.root_id == old.root_id:
            fresh = replace(old, root_id=secrets.token_hex(8))
            root.write_file(root.marker_path, [fresh.encode()], f"writing {root.marker_path}")
    except OSError as error:
        raise disk_error(error, f"setting the files of {root.path} aside") from error
    finally:
        lock.release()


class _OneState(Root):
    """A root in which only the files of one state are seen: a later one of the same id may have other entries."""

    def __init__(self, root: Root, state: str) -> None:
        super().__init__(root.path, root.disk)
        self._state = state

    def names(self, state: str) -> list[str]:
        """As the root's, of the one state."""
        return super().names(state) if state == self._state else []


class _Sending:
    """Puts the entries of files that were set aside into an index, as far as its storage lacks them."""

    def __init__(self, index: IndexService, aside: Root, clock: Clock) -> None:
        self._index, self._aside = index, aside
        self._state = index.log_state
        self._schema, self._rule = index.schema, index.hash_rule
        self._log = StorageLog(index.storage, clock)
        self._was_published = self._has_seen()

    def run(self) -> BegunAnew:
        """Put what is lacking; return what was done."""
        sent = entries = stored = 0
        kept: dict[str, str] = {}
        later: dict[str, int] = {}  # entries of files of a later state
        views = [RootView(_OneState(self._aside, state), checks_list=False) for state in reversed(STATES)]
        for handle in (one for view in views for one in view.look()):
            try:
                if isinstance(handle, CompactedFile | UnsealedView):
                    if handle.count <= later.get(handle.file_id, 0):
                        continue
                    later[handle.file_id] = handle.count
                if self._is_stored(handle):
                    stored += 1
                    continue
                entries += self._send(handle)
                sent += 1
            except CorruptFile as error:
                kept[handle.file_id] = str(error)
            finally:
                handle.let_go()
        lost = {one.file_id for one in self._state.lost.values()}
        try:
            gone = FileList(self._aside).gone()
        except CorruptFile as error:
            gone, kept[LIST] = {}, error.problem
        for file_id in gone.keys() - self._state.files.keys() - lost:
            kept[file_id] = "the root lists it, but none of its folders has it"
        return BegunAnew(sent, entries, stored, kept)

    def _has_seen(self) -> bool:
        """Return whether the storage has what the root had seen: then it has, or had, what is in `uploaded`."""
        seen = SeenFile(self._aside).read()
        if seen is None:
            return False
        try:
            self._log.open(checks=False)
            self._log.check_seen(seen)
        except CorruptFile:
            return False
        return True

    def _is_stored(self, handle: Handle) -> bool:
        """Return whether the storage has a file's entries. Raises `CorruptFile` for one that can't be read."""
        if isinstance(handle, DamagedFile):
            raise (
                handle.error
                if isinstance(handle.error, CorruptFile)
                else CorruptFile(handle.file_id, str(handle.error))
            )
        if self._was_published and isinstance(handle, CompactedFile) and handle.folder == UPLOADED:
            return True
        stored = self._state.object_of(handle.file_id)
        assert isinstance(handle, CompactedFile | UnsealedView)
        if stored is None or stored.count != handle.count:
            return False
        alone = replace(self._state, objects={stored.name: stored})
        try:
            return self._sums(alone, []) == self._sums(self._nothing, [handle])
        except TieredIndexError:  # unreadable there, so that this copy may be the last one
            return False

    def _send(self, handle: Handle) -> int:
        if handle.hash != self._rule:
            raise CorruptFile(
                handle.file_id,
                "its keys are hashed by another rule than the index's: open the index with that `hash`",
                expected=self._rule,
                found=handle.hash,
            )
        entries = 0
        with self._export(self._nothing, [handle]) as batches:
            for batch in batches:
                columns = batch.drop_columns(["topic_id"]) if not batch.column("topic").null_count else batch
                entries += self._index.put_batch(columns)
                self._index.flush()
        return entries

    @property
    def _nothing(self) -> LogState:
        return LogState(self._state.number, genesis=self._state.genesis)

    def _sums(self, state: LogState, found: list[Handle]) -> tuple[int, int]:
        with self._export(state, found) as batches:
            for _ in batches:
                pass
            return batches.entries, batches.checksum

    def _export(self, state: LogState, found: list[Handle]) -> Export:
        held = contextlib.ExitStack()
        # an export leaves out a local copy in `uploaded` that the log doesn't name: it takes it for merged
        found = [replace(one, folder=COMPACTED) if isinstance(one, CompactedFile) else one for one in found]
        storage = self._index.storage
        return Export(_ALL, self._schema, state, found, storage, lambda: None, lambda uri: self._state, held)
