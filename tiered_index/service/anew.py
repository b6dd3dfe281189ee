"""Sets up a root again after its storage or the root itself was restored to an earlier state: `tiered-index recover`.

```
root/*  ─set aside─> root/aside/  ─entries that the storage lacks, under new ids─> unsealed/  ─> aside/ is deleted
```
The root gets a new id and the storage's positions, so that sources send again the entries that the storage lacks. A
file whose entries the storage has, by count and checksum, is not sent. Entries that a merge has taken may be sent
twice: that is harmless, because entries of one identity are one answer. Rows of files whose offset no segment has are
not sent: a newer reading has replaced them, or the next run reads them again at other offsets. Erasures that the
storage lacks are recorded again before, if the root's copy of the log has them.

If the run is interrupted, the next run continues it, and no writer opens the root before that. If a file can't be read,
all files that were set aside are kept in `aside-NUMBER/`. One thread.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec import structs

from tiered_index.base.clock import Clock, SystemClock
from tiered_index.config import IndexConfig
from tiered_index.errors import ConfigError, CorruptFile, InvalidArgument, NotAnIndex, TieredIndexError
from tiered_index.format.names import COMPACTED, STATES, UPLOADED, linked_store
from tiered_index.service.index import IndexService
from tiered_index.service.jobs.erase import take_over
from tiered_index.service.life.same_file import check_same, is_in
from tiered_index.service.log.expired import Expired
from tiered_index.service.log.kept import LOG, KeptLog
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.replaced import RangeTable
from tiered_index.service.log.state import LogState
from tiered_index.service.read.export import Export, ExportRange
from tiered_index.service.read.files.compacted import CompactedFile, DamagedFile, open_local
from tiered_index.service.read.files.root_view import RootView, UnsealedView, own_documents
from tiered_index.service.read.files.snapshot import Handle
from tiered_index.service.read.segments.places import FILES_QUEUES
from tiered_index.service.read.segments.segments import Segments
from tiered_index.service.root import ASIDE, SENT, Root, RootLock, disk_error
from tiered_index.service.root.files import LIST, FileList
from tiered_index.service.root.seen import SeenFile
from tiered_index.storage.base import Storage
from tiered_index.storage.disk import Disk

_ALL = ExportRange()
# moved with the root's files: the log position that it had seen, the log, and the list of its files
_TOLD = ("seen", LOG, LIST)


@dataclass(frozen=True)
class BegunAnew:
    """The outcome of a recovery.

    - `sent`: the number of files whose entries were put into the index again, and `entries`: the number of entries.
    - `stored`: the number of files whose entries the storage has already.
    - `kept`: the reason for each file that could not be sent, by id.
    - `left`: the folder that still has these files.
    - `lacks_expiries`: the storage lacks a horizon that the root knows, and the erasures that this horizon replaced.
    """

    sent: int
    entries: int
    stored: int
    kept: dict[str, str]
    left: Path | None = None
    lacks_expiries: bool = False


def begin_anew(
    config: IndexConfig,
    *,
    clock: Clock | None = None,
    disk: Disk | None = None,
    storage: Storage | None = None,
    takes_over: bool = False,
) -> BegunAnew:
    """Set up the root of `config` again, and put the entries into it that the storage lacks.

    The entries are durable in the root when this returns. The life cycle uploads them later. `takes_over`: do so even
    if another writer has the lease. Raises the errors of `IndexService.open`. Call it again to continue an interrupted
    run.
    """
    if config.root is None:
        raise ConfigError("no root is given: pass --root DIR")
    clock, disk = clock or SystemClock(), disk or Disk()
    root = Root(config.root, disk)
    _set_aside(root)
    aside = Root(root.path / ASIDE, disk)
    with IndexService(
        config, clock=clock, disk=disk, storage=storage, begins_anew=True, takes_over=takes_over
    ) as index:
        known = KeptLog(aside).read()
        is_own = known is not None and known.genesis is not None and known.genesis.index_id == index.index_id
        if known is not None and is_own and (stones := known.expired.tombstones):
            # not the horizons: the storage may have been restored because of a wrong one, and a rule expires again
            take_over(index.storage, Expired(tombstones=stones), clock, checks=False)
        horizons = Expired(known.expired.horizons) if known is not None and is_own else Expired()
        lacks_expiries = index.expired.joined(horizons) is not index.expired
        done = _Sending(index, aside, clock, known if is_own else None).run()
        if known is None and (aside.path / LOG).exists():
            done.kept[LOG] = "it can't be read: repeat the erasures that the storage lacks"
        index.flush()
        left = root.path / f"{ASIDE if done.kept else SENT}-{secrets.token_hex(4)}"
        try:
            # this one rename completes the root
            disk.rename(aside.path, left)
            disk.sync_folder(root.path)
        except OSError as error:
            raise disk_error(error, f"moving {aside.path} to {left}") from error
        if not done.kept:
            shutil.rmtree(left, ignore_errors=True)
    return replace(done, left=left if done.kept else None, lacks_expiries=lacks_expiries)


def _set_aside(root: Root) -> None:
    """Move the files of the root to `aside/`, unless that is done, and write a marker with a new id."""
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
            # this marker states that everything has moved
            aside.write_file(aside.marker_path, [marker.encode()], f"writing {aside.marker_path}")
            disk.sync_folder(root.path)
        old = aside.read_marker()
        assert old is not None
        now = root.read_marker()
        if now is None or now.root_id == old.root_id:
            fresh = structs.replace(old, root_id=secrets.token_hex(8))
            root.write_file(root.marker_path, [fresh.encode()], f"writing {root.marker_path}")
    except OSError as error:
        raise disk_error(error, f"setting the files of {root.path} aside") from error
    finally:
        lock.release()


class _OneState(Root):
    """A root that shows only the files of one state: files of one id in two states may have different entries."""

    def __init__(self, root: Root, state: str) -> None:
        super().__init__(root.path, root.disk)
        self._state = state

    def names(self, state: str) -> list[str]:
        """Return the names of files of a state; none for other states."""
        return super().names(state) if state == self._state else []


class _Sending:
    """Puts the entries of files that were set aside into an index, if its storage lacks them."""

    def __init__(self, index: IndexService, aside: Root, clock: Clock, known: LogState | None) -> None:
        """`known`: the root's copy of the index's log; None: it has none."""
        self._index, self._aside = index, aside
        self._schema, self._rule = index.schema, index.hash_rule
        self._log = StorageLog(index.storage, clock)
        # the index may have started without its storage
        self._state = self._log.open(checks=False)
        self._was_published = self._has_seen()
        self._segments = Segments(self._state, index.storage)
        self._stores = {*self._state.listed_logs, *(known.listed_logs if known is not None else ())}
        # the segments of stores of files, which are read once
        self._spans: dict[str, RangeTable] = {}

    def run(self) -> BegunAnew:
        """Put the entries that the storage lacks. Return the outcome."""
        sent = entries = stored = 0
        reasons: dict[str, str] = {}
        later: dict[str, Path] = {}  # by id, files that were seen in a later state
        views = [RootView(_OneState(self._aside, state), checks_list=False) for state in reversed(STATES)]
        for handle in (handle for view in views for handle in view.look().handles):
            try:
                if isinstance(handle, CompactedFile | UnsealedView):
                    if handle.file_id in later and _is_in(handle, later[handle.file_id]):
                        continue
                    if isinstance(handle, CompactedFile):
                        later[handle.file_id] = self._aside.index_path(handle.place, handle.file_id)
                if self._is_stored(handle):
                    stored += 1
                    continue
                self._index.learn_documents(own_documents(handle))
                entries += self._send(handle)
                sent += 1
            except (CorruptFile, InvalidArgument) as error:
                reasons[handle.file_id] = str(error)
            finally:
                handle.let_go()
        lost = {lost_object.file_id for lost_object in self._state.lost.values()}
        try:
            gone = FileList(self._aside).gone()
        except CorruptFile as error:
            gone, reasons[LIST] = {}, error.problem
        for file_id in gone.keys() - self._state.files.keys() - lost:
            reasons[file_id] = "the root lists it, but none of its folders has it"
        return BegunAnew(sent, entries, stored, reasons)

    def _has_seen(self) -> bool:
        """Return whether the storage's log has the position that the root had seen.

        If so, records added the files in `uploaded`. The storage may have lost their objects.
        """
        seen = SeenFile(self._aside).read()
        if seen is None:
            return False
        try:
            self._log.identity.check_seen(self._log.state, seen)
        except CorruptFile:
            return False
        return True

    def _is_stored(self, handle: Handle) -> bool:
        """Return whether the storage has a file's entries. Raises `CorruptFile` if the file can't be read."""
        if isinstance(handle, DamagedFile):
            raise (
                handle.error
                if isinstance(handle.error, CorruptFile)
                else CorruptFile(handle.file_id, str(handle.error))
            )
        stored = self._state.object_of(handle.file_id)
        assert isinstance(handle, CompactedFile | UnsealedView)
        if stored is None:
            # a record has removed its object since, for example a merge
            return self._was_published and isinstance(handle, CompactedFile) and handle.folder == UPLOADED
        if stored.count != handle.count:
            return False
        alone = replace(self._state, objects={stored.name: stored})
        try:
            return self._sums(alone, []) == self._sums(self._nothing, [handle])
        except TieredIndexError:  # unreadable in the storage, so this copy may be the last one
            return False

    def _send(self, handle: Handle) -> int:
        if handle.hash != self._rule:
            raise CorruptFile(
                handle.file_id,
                "its hash rule differs from the index's: open the index with setting `hash`",
                expected=self._rule,
                found=handle.hash,
            )
        entries = 0
        with self._export(self._nothing, [handle]) as batches:
            for batch in batches:
                batch = self._with_segments(batch)
                columns: dict[str, Any] = dict(zip(batch.schema.names, batch.columns, strict=True))
                del columns["topic_id"]
                entries += self._index.put_source_batch(columns)
                self._index.flush()
        return entries

    def _with_segments(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return entries without the rows of files whose offset no segment has."""
        queues, offsets = (batch.column(name).to_numpy() for name in ("queue_id", "offset"))
        topics = np.asarray(batch.column("topic").to_pylist(), object)
        is_sent = np.ones(len(batch), np.bool_)
        for queue_id in FILES_QUEUES:
            places = np.flatnonzero(queues == queue_id)
            for topic in dict.fromkeys(topics[places].tolist()):
                store = linked_store(topic, queue_id)
                if store not in self._stores:
                    continue
                if store not in self._spans:
                    spans = [(segment.start, segment.end, 0, 0, 0) for segment in self._segments.of_log(store)]
                    self._spans[store] = RangeTable.of(spans)
                rows = places[topics[places] == topic]
                is_sent[rows] &= self._spans[store].holds(offsets[rows])
        return batch if is_sent.all() else batch.filter(pa.array(is_sent))

    @property
    def _nothing(self) -> LogState:
        return LogState(self._state.number, genesis=self._state.genesis)

    def _sums(self, state: LogState, handles: list[Handle]) -> tuple[int, int]:
        with self._export(state, handles) as batches:
            for _ in batches:
                pass
            return batches.entries, batches.checksum

    def _export(self, state: LogState, handles: list[Handle]) -> Export:
        held = contextlib.ExitStack()
        # an export leaves out a copy in `uploaded` that the log doesn't name, because it may have been merged
        handles = [
            replace(handle, folder=COMPACTED) if isinstance(handle, CompactedFile) else handle for handle in handles
        ]
        storage = self._index.storage
        return Export(_ALL, self._schema, state, handles, storage, lambda: None, lambda uri: self._state, held)


def _is_in(handle: CompactedFile | UnsealedView, later: Path) -> bool:
    """Return whether a later form of a file has all its entries. False if the later form can't be read."""
    try:
        file = open_local(later)
        assert file.local is not None
        try:
            if isinstance(handle, UnsealedView):
                return is_in(handle.path, handle.journal, file.local)
            check_same(handle, file.local)
        finally:
            file.let_go()
    except CorruptFile:
        return False
    return True
