"""The files of one root, as the steps of their life cycle share them: what the log says of them, which source positions
are true once one is published, and what becomes of copies that can't be read.

A position in the log promises that the storage has everything of the source before it. A damaged copy is let go of once
the log says that its entries were published: it may have the object still, or a merge has taken it since. The journal,
where it is whole, says source positions that nothing else may say: it is kept until the log does. What was not
published stays, untouched. Threads: the life cycle's round; `refresh` and the functions from any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tiered_index._version import __version__
from tiered_index.clock import Clock
from tiered_index.config import IndexConfig
from tiered_index.errors import SchemaMismatch
from tiered_index.format.compacted import SealedFile
from tiered_index.format.journal import Journal
from tiered_index.format.names import STATES, UNSEALED, UPLOADED
from tiered_index.service.catalog.catalog import Catalog, Handle
from tiered_index.service.cold.path import ColdPath
from tiered_index.service.files.compacted import CompactedFile, DamagedFile, StorageBytes, open_stored
from tiered_index.service.files.unsealed import UnsealedFile
from tiered_index.service.files.window_table import WindowTable, apply_log_state
from tiered_index.service.lifecycle.publication import Removals
from tiered_index.service.log.records import max_positions
from tiered_index.service.log.session import StorageSession
from tiered_index.service.log.state import LogState
from tiered_index.service.root.root import Deletions, Root
from tiered_index.service.writing.lanes import QUARANTINE

__all__ = [
    "DamagedCopies",
    "RootFiles",
    "durable_positions",
    "has_newer_positions",
    "own_positions",
    "positions_of",
    "sealed_form",
]


@dataclass(frozen=True)
class RootFiles:
    """What every step of the life cycle works with.

    `outcome_unknown` are the ids of files that others may have published: an earlier process, a job that was asked for
    by a ticket, or a try whose record nobody heard of. They are looked up in `removals` before they are published.
    """

    root: Root
    catalog: Catalog
    session: StorageSession
    cold: ColdPath
    config: IndexConfig
    clock: Clock
    deletions: Deletions
    outcome_unknown: set[str]
    removals: Removals
    _refresh_lock: threading.Lock = field(default_factory=threading.Lock)

    def refresh(self) -> LogState:
        """Read the log, show what it says, and return it."""
        with self._refresh_lock:
            self.session.log.refresh()
            # The handles first: whatever is among them was published before, so the log's state taken after them knows
            # it.
            handles = self.catalog.all()
            state = self.session.log.state
            for handle in handles:
                # recovered while the storage was down: now the log can tell
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
        """Say in the log what is true once `file` is published; return the log's positions."""
        positions = durable_positions(file, self.catalog.all())
        return self.session.log.append_positions(self.session.epoch, positions).positions

    def _has_news(self, file: CompactedFile) -> bool:
        """Return whether a local copy says a source's position that the log doesn't reach yet: it stays until the log
        does.
        """
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
    )


def durable_positions(file: CompactedFile | UnsealedFile | Journal, handles: Sequence[Handle]) -> dict[str, int]:
    """Return the source positions that are true once `file` is published: no entry before them waits in another of
    `handles`. A main file's are no promise for quarantine and damaged files, a quarantine file's none for main files.
    """
    waiting = [h for h in handles if h.file_id != file.file_id and not _is_stored(h)]
    if any(isinstance(h, DamagedFile) or h.lane == QUARANTINE or h.sequence < file.sequence for h in waiting):
        return {}
    if waiting:
        return own_positions(file) if file.lane != QUARANTINE else {}
    return max_positions(own_positions(file), positions_of(handles))


def positions_of(handles: Iterable[Handle]) -> dict[str, int]:
    """Return the greatest position of each source that local files say."""
    positions: dict[str, int] = {}
    for handle in handles:
        if isinstance(handle, UnsealedFile) or (isinstance(handle, CompactedFile) and handle.local is not None):
            positions = max_positions(positions, own_positions(handle))
    return positions


def own_positions(file: CompactedFile | UnsealedFile | Journal) -> dict[str, int]:
    """Return the positions that a file says, or the journal that is left of one."""
    return file.metadata().source_positions if isinstance(file, CompactedFile) else file.positions


def has_newer_positions(file: CompactedFile | UnsealedFile | Journal, said: dict[str, int]) -> bool:
    """Return whether a file says a source's position that `said` doesn't reach."""
    return max_positions(said, own_positions(file)) != said


def _is_stored(handle: Handle) -> bool:
    """Return whether the storage has a file, or what it was merged into."""
    if isinstance(handle, UnsealedFile):
        return handle.published
    if isinstance(handle, CompactedFile):
        return handle.stored is not None or handle.folder == UPLOADED
    return isinstance(handle, WindowTable)


_MAX_RECORDS = 1000
# that a start looks back through, a request each: a file that was merged away before stays, as damage


class DamagedCopies:
    """The damaged files of one root, as they were found when it was opened; `journals` are those of their journals that
    are whole.

    `learn` is told of source positions that need not come again.
    """

    def __init__(
        self,
        files: RootFiles,
        damaged: Iterable[DamagedFile],
        journals: Mapping[str, Journal],
        learn: Callable[[dict[str, int]], None],
    ) -> None:
        self._files = files
        # what is of another index was never published here
        self._waiting = {file.file_id: file for file in damaged if not isinstance(file.error, SchemaMismatch)}
        self._published: dict[str, DamagedFile] = {}
        self._journals = journals
        self._learn = learn
        self._looked_from: int | None = None

    @property
    def waiting(self) -> list[str]:
        """Ids of files that nobody is known to have published."""
        return list(self._waiting)

    def staged(self, file_id: str) -> None:
        """Take note that the storage has the entries of a file, whole: their source need not send them again."""
        if (journal := self._journals.get(file_id)) is not None:
            self._learn(journal.positions)

    def tend(self) -> None:
        """Let go of what was published. Raises what the storage raises; it may be repeated."""
        files = self._files
        for file_id in self.waiting:
            state = files.session.log.state
            stored = state.object_of(file_id)
            if stored is None:
                if file_id not in files.removals.files(state, self._before(state)):
                    continue
                files.refresh()  # what it was merged into is shown before it goes
                files.catalog.remove(file_id)
            else:
                files.catalog.put(open_stored(files.cold, stored))
            self.staged(file_id)
            self._published[file_id] = self._waiting.pop(file_id)
        for file_id, file in list(self._published.items()):
            journal = self._journals.get(file_id)
            if journal is not None and has_newer_positions(journal, files.session.log.state.positions):
                said = files.append_positions(journal)
                if has_newer_positions(journal, said):
                    continue  # an older file waits: it is tried again in each round, and after a restart
            # the journal first: without it an unsealed file is not there
            paths = [files.root.journal_path(file_id)] if file.place == UNSEALED else []
            files.deletions.unlink([*paths, files.root.index_path(file.place, file_id)] if file.place in STATES else [])
            del self._published[file_id]

    def _before(self, state: LogState) -> int:
        """Return a record's number before any that removed a waiting file, as far as journals and the bound allow."""
        if self._looked_from is None:
            begun = [journal.log_number if (journal := self._journals.get(file_id)) else 0 for file_id in self._waiting]
            self._looked_from = max(min(begun), state.number - _MAX_RECORDS)
        return self._looked_from
