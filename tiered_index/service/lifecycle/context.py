"""The shared state of the steps of the life cycle: one root's files, true source positions, and damaged copies.

A position in the log promises that the storage has everything of the source before it. A damaged copy is let go of once
the log has, or had, its file; its journal, where whole, is kept until the log has its positions. What was not published
stays, untouched. Threads: the life cycle's round; `refresh` and the functions from any.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from tiered_index._version import __version__
from tiered_index.clock import Clock
from tiered_index.config import IndexConfig
from tiered_index.errors import CorruptFile, SchemaMismatch
from tiered_index.format.compacted import SealedFile
from tiered_index.format.journal import Journal
from tiered_index.format.names import COMPACTED, STATES, UNSEALED, UPLOADED
from tiered_index.service.catalog.catalog import Catalog, Handle
from tiered_index.service.cold.path import ColdPath
from tiered_index.service.files.compacted import CompactedFile, DamagedFile, StorageBytes, open_stored
from tiered_index.service.files.unsealed import UnsealedFile
from tiered_index.service.files.window_table import WindowTable, apply_log_state
from tiered_index.service.log.records import StoredObject, max_positions
from tiered_index.service.log.session import StorageSession
from tiered_index.service.log.state import LogState
from tiered_index.service.root import Deletions, Root
from tiered_index.service.writing.appenders import QUARANTINE
from tiered_index.service.writing.flusher import Flusher
from tiered_index.storage.base import Storage


class LocalFiles:
    """A root's files as the catalog shows them, by their state, in order of sequence. What can be told of `kept` ones
    is answered without a look at each.
    """

    def __init__(self, handles: Iterable[Handle] = (), changes: int = -1) -> None:
        self.changes = changes  # of the catalog, when the files were looked at
        self.unsealed: list[UnsealedFile] = []
        self.compacted: list[CompactedFile] = []  # local alone
        self.kept: list[CompactedFile] = []  # local copies of what the storage has, or had
        self._others: list[Handle] = []
        for handle in sorted(handles, key=lambda handle: handle.sequence):
            if isinstance(handle, UnsealedFile):
                self.unsealed.append(handle)
            elif isinstance(handle, CompactedFile):
                if handle.local is not None:
                    (self.compacted if handle.folder == COMPACTED else self.kept).append(handle)
            elif not isinstance(handle, WindowTable):
                self._others.append(handle)

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes of `kept` files."""
        return sum(file.local.size_bytes for file in self.kept if file.local is not None)

    @cached_property
    def oldest_ms(self) -> float:
        """When the first one of `kept` files was published, infinite where none was."""
        return min((f.stored.stored.published_ms for f in self.kept if f.stored is not None), default=math.inf)

    @cached_property
    def _kept_positions(self) -> dict[str, int]:
        return _greatest(self.kept)

    def durable_positions(self, file: CompactedFile | UnsealedFile | Journal) -> dict[str, int]:
        """Return the source positions that are true once `file` is published: no entry before them waits in another
        one. A main file's are no promise for quarantine and damaged files, a quarantine file's none for main files.
        """
        waiting: list[Handle] = [one for one in self.unsealed if not one.published]
        waiting = [h for h in (*waiting, *self.compacted, *self._others) if h.file_id != file.file_id]
        if any(isinstance(h, DamagedFile) or h.lane == QUARANTINE or h.sequence < file.sequence for h in waiting):
            return {}
        if waiting:
            return own_positions(file) if file.lane != QUARANTINE else {}
        local: list[CompactedFile | UnsealedFile | Journal] = [file, *self.unsealed, *self.compacted]
        return max_positions(_greatest(local), self._kept_positions)

    def needed(self, logged: dict[str, int]) -> set[str]:
        """Return the ids of files that alone have a source's position: one that neither the log, which has `logged`,
        nor younger files reach.
        """
        files: list[CompactedFile | UnsealedFile] = [*self.unsealed, *self.compacted, *self.kept]
        needed, reached = set(), logged
        for file in sorted(files, key=lambda file: -file.sequence):
            before, reached = reached, max_positions(reached, own_positions(file))
            if reached != before:
                needed.add(file.file_id)
        return needed


@dataclass(eq=False)
class LifecycleContext:
    """One root's files, storage and settings. `outcome_unknown` are ids of files that others may have published (an
    earlier process, a job, a try without an answer): they are looked up in the log's records before they are published.
    """

    root: Root
    root_id: str
    catalog: Catalog
    session: StorageSession
    cold: ColdPath
    config: IndexConfig
    clock: Clock
    flusher: Flusher
    deletions: Deletions
    outcome_unknown: set[str]
    _refresh_lock: threading.Lock = field(default_factory=threading.Lock)
    _files: LocalFiles = field(default_factory=LocalFiles)

    @property
    def files(self) -> LocalFiles:
        """The root's files, looked at again once the catalog has changed. For the life cycle's round alone."""
        changes = self.catalog.changes
        if self._files.changes != changes:
            self._files = LocalFiles(self.catalog.all(), changes)
        return self._files

    def forget_files(self) -> None:
        """Let go of files that the catalog has no more: what is mapped keeps its space on the disk."""
        if self._files.changes != self.catalog.changes:
            self._files = LocalFiles()

    def end(self) -> None:
        """Let go of all files."""
        self._files = LocalFiles()

    def refresh(self) -> LogState:
        """Read the log on, show its objects, and return its state."""
        with self._refresh_lock:
            self.session.log.refresh()
            # the handles first: what is among them was published before, so the later state knows it
            handles = self.catalog.all()
            state = self.session.log.state
            for handle in handles:
                # recovered while the storage was down: now it is known whether the log has it
                stored = state.object_of(handle.file_id)
                if isinstance(handle, DamagedFile) and stored is not None:
                    self.catalog.put(open_stored(self.cold, stored))
                elif isinstance(handle, CompactedFile) and handle.folder == UPLOADED and handle.stored is None:
                    if stored is None and not self._has_news(handle):
                        self.catalog.remove(handle.file_id, self.dispose(handle.file_id))
                    elif stored is not None:
                        self.catalog.put(replace(handle, stored=StorageBytes(self.cold, stored)))
            handles, known = self.catalog.all(), self.session.log.state  # in this order, as above
            apply_log_state(self.catalog, handles, known, self.cold, self.dispose, self._has_news)
            return state

    def dispose(self, file_id: str) -> Callable[[], None]:
        """Return what deletes the local copy of an uploaded file."""
        return lambda: self.deletions.unlink([self.root.index_path(UPLOADED, file_id)])

    def drop(self, file: UnsealedFile) -> None:
        """Delete the local copy of an unsealed file."""
        file.release()
        # the journal first: to a reader beside this writer a file without one is not there
        self.deletions.unlink([file.journal_path, file.path])

    def append_positions(self, file: CompactedFile | Journal) -> dict[str, int]:
        """Append the positions that are true once `file` is published; return the log's."""
        positions = self.files.durable_positions(file)
        return self.session.log.append_positions(self.session.epoch, positions).positions

    def _has_news(self, file: CompactedFile) -> bool:
        """Return whether a local copy has a source's position that the log doesn't reach yet."""
        return file.local is not None and has_newer_positions(file, self.session.log.state.positions)


def sealed_form(file: UnsealedFile) -> SealedFile:
    """Return what is known of a sealed file beside its entries."""
    return SealedFile(
        file_id=file.file_id,
        layout=file.layout,
        begin_ms=file.table.begin_ms,
        end_ms=file.table.end_ms,
        count=file.count,
        lane=file.lane,
        sequence=file.sequence,
        predecessor=file.predecessor,
        created_ms=file.created_ms,
        offset_space=file.offset_space,
        topics=tuple(sorted(file.topics.items())),
        positions=dict(file.positions),
        writer=f"tiered_index {__version__}",
        log_number=file.log_number,
        # RocketMQ reads files of its own preset, so they keep its layout
        packed=not file.layout.preset.newest_first,
    )


def _greatest(files: Iterable[CompactedFile | UnsealedFile | Journal]) -> dict[str, int]:
    """Return the greatest position of each source in files."""
    positions: dict[str, int] = {}
    for file in files:
        for source, position in own_positions(file).items():
            if positions.get(source, position) <= position:
                positions[source] = position
    return positions


def own_positions(file: CompactedFile | UnsealedFile | Journal) -> dict[str, int]:
    """Return the source positions that a file has."""
    return file.metadata().source_positions if isinstance(file, CompactedFile) else file.positions


def has_newer_positions(file: CompactedFile | UnsealedFile | Journal, reached: dict[str, int]) -> bool:
    """Return whether a file, or the journal that is left of one, has a source's position beyond `reached`."""
    return max_positions(reached, own_positions(file)) != reached


def check_size(storage: Storage, stored: StoredObject, kept: str) -> None:
    """Raise `CorruptFile` where an object has another size than in the log; `kept` names the local file."""
    problem = f"object has another size than the log says; {kept} is kept"
    CorruptFile.unless_equal(stored.name, problem, stored.size_bytes, storage.head(stored.name).size_bytes)


# a start looks back through so many, a request each: a file that was merged away before stays, as damage
_MAX_RECORDS = 1000


class DamagedCopies:
    """The damaged files of one root when it was opened, and those of their journals that are whole."""

    def __init__(
        self, context: LifecycleContext, damaged: Iterable[DamagedFile], journals: Mapping[str, Journal]
    ) -> None:
        self._context = context
        # those that nobody is known to have published; what is of another index never was, here
        self.waiting = {
            file.file_id: file
            for file in damaged
            if file.place in STATES and not isinstance(file.error, SchemaMismatch)
        }
        self._published: dict[str, DamagedFile] = {}
        self._journals = journals
        self._looked_from: int | None = None

    def staged(self, file_id: str) -> None:
        """The storage has the entries of a file, whole: their source need not send them again."""
        if (journal := self._journals.get(file_id)) is not None:
            self._context.flusher.learn(journal.positions)

    def tend(self) -> None:
        """Let go of what was published. Raises what the storage raises; it may be repeated."""
        context = self._context
        given_up = {one.file_id for one in context.session.log.state.lost.values()}
        for file_id in list(self.waiting):
            state = context.session.log.state
            stored = state.object_of(file_id)
            if stored is None:
                if file_id not in given_up and file_id not in context.session.log.removed_files(
                    state, self._before(state)
                ):
                    continue
                context.refresh()  # what it was merged into is shown before it goes
                context.catalog.remove(file_id)
            else:
                context.catalog.put(open_stored(context.cold, stored))
            self.staged(file_id)
            self._published[file_id] = self.waiting.pop(file_id)
        for file_id, file in list(self._published.items()):
            journal = self._journals.get(file_id)
            if (
                journal is not None
                and has_newer_positions(journal, context.session.log.state.positions)
                and has_newer_positions(journal, context.append_positions(journal))
            ):
                continue  # an older file waits: it is tried again in each round, and after a restart
            # the journal first: without it an unsealed file is not there
            paths = [context.root.journal_path(file_id)] if file.place == UNSEALED else []
            context.deletions.unlink(
                [*paths, context.root.index_path(file.place, file_id)] if file.place in STATES else []
            )
            del self._published[file_id]

    def _before(self, state: LogState) -> int:
        """Return a record's number before any that removed a waiting file, as far as journals and the bound allow."""
        if self._looked_from is None:
            begun = [journal.log_number if (journal := self._journals.get(file_id)) else 0 for file_id in self.waiting]
            self._looked_from = max(min(begun), state.number - _MAX_RECORDS)
        return self._looked_from
