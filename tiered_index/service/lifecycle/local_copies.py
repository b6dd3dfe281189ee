"""Local files that could not be read, and the storage behind them: one is let go of once the log says that its entries
were published.

The log may have its object still, or a merge has taken it since. The journal, where it is whole, says source positions
that nothing else may say: it is kept until the log does. What was not published stays, untouched. Threads: the life
cycle's round.

Source positions: which of them the log may say once a file is published.

A position in the log promises that the storage has everything of the source before it. Pure. Threads: any.

Which files the log has removed: what its state, which names only what exists, doesn't say. Threads: one.

Where to look is told by numbers of the log, never by times: clocks of different hosts differ, and are put right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from tiered_index.errors import SchemaMismatch
from tiered_index.format.journal import Journal
from tiered_index.format.names import DATA_PREFIX, STATES, UNSEALED, UPLOADED
from tiered_index.service.catalog.catalog import Catalog, Handle
from tiered_index.service.cold.path import ColdPath
from tiered_index.service.files.compacted import CompactedFile, DamagedFile, open_stored
from tiered_index.service.files.unsealed import UnsealedFile
from tiered_index.service.files.window_table import WindowTable
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import max_positions
from tiered_index.service.log.session import StorageSession
from tiered_index.service.log.state import LogState
from tiered_index.service.root.root import Deletions, Root
from tiered_index.service.writing.lanes import QUARANTINE

__all__ = ["DamagedCopies", "Removals", "durable_positions", "has_newer_positions", "own_positions", "positions_of"]


def durable_positions(file: CompactedFile | UnsealedFile | Journal, handles: Sequence[Handle]) -> dict[str, int]:
    """Return the source positions that are true once `file` is published: those before which no entry waits in another
    of `handles`.

    A main file's positions say nothing of quarantine and of damaged files; a quarantine file's say nothing of main
    files.
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


class Removals:
    """The files of which a record has removed an object. Each record is read once, at a request each."""

    def __init__(self, log: StorageLog) -> None:
        self._log = log
        self._first = self._last = 0  # records behind `_first` up to `_last` have been read
        self._files: set[str] = set()

    def files(self, state: LogState, after: int = 0) -> set[str]:
        """Return the ids of the files that records behind number `after`, up to `state`'s, have removed, and maybe
        older ones'.

        Raises what the storage raises; what was read before is not read again.
        """
        if after >= self._last:
            self._files = set()
            self._first = self._last = max(state.number, after)
        while self._last < state.number:
            self._read(self._last + 1)
            self._last += 1
        while self._first > after:
            self._read(self._first)
            self._first -= 1
        return self._files

    def _read(self, number: int) -> None:
        removed = self._log.record(number).remove
        self._files.update(name.split("/")[1] for name in removed if name.startswith(DATA_PREFIX))


_MAX_RECORDS = 1000
# that a start looks back through, a request each: a file that was merged away before stays, as damage


class DamagedCopies:
    """The damaged files of one root, as they were found when it was opened; `journals` are those of their journals that
    are whole.

    `refresh` reads the log and shows what it says, `learn` is told of source positions that need not come again.
    """

    def __init__(
        self,
        root: Root,
        catalog: Catalog,
        session: StorageSession,
        cold: ColdPath,
        deletions: Deletions,
        *,
        damaged: Iterable[DamagedFile],
        journals: Mapping[str, Journal],
        refresh: Callable[[], object],
        learn: Callable[[dict[str, int]], None],
    ) -> None:
        self._root = root
        self._catalog = catalog
        self._session = session
        self._cold = cold
        self._deletions = deletions
        # what is of another index was never published here
        self._waiting = {file.file_id: file for file in damaged if not isinstance(file.error, SchemaMismatch)}
        self._published: dict[str, DamagedFile] = {}
        self._journals = journals
        self._refresh, self._learn = refresh, learn
        self._removals = Removals(session.log)
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
        for file_id in self.waiting:
            state = self._session.log.state
            stored = state.object_of(file_id)
            if stored is None:
                if file_id not in self._removals.files(state, self._before(state)):
                    continue
                self._refresh()  # what it was merged into is shown before it goes
                self._catalog.remove(file_id)
            else:
                self._catalog.put(open_stored(self._cold, stored))
            self.staged(file_id)
            self._published[file_id] = self._waiting.pop(file_id)
        for file_id, file in list(self._published.items()):
            journal, log = self._journals.get(file_id), self._session.log
            if journal is not None and has_newer_positions(journal, log.state.positions):
                said = log.append_positions(
                    self._session.epoch, durable_positions(journal, self._catalog.all())
                ).positions
                if has_newer_positions(journal, said):
                    continue  # an older file waits: it is tried again in each round, and after a restart
            # the journal first: without it an unsealed file is not there
            paths = [self._root.journal_path(file_id)] if file.place == UNSEALED else []
            self._deletions.unlink([*paths, self._root.index_path(file.place, file_id)] if file.place in STATES else [])
            del self._published[file_id]

    def _before(self, state: LogState) -> int:
        """Return the number of a log record before any that removed a waiting file, as far as journals say it and the
        bound allows.
        """
        if self._looked_from is None:
            begun = [journal.log_number if (journal := self._journals.get(file_id)) else 0 for file_id in self._waiting]
            self._looked_from = max(min(begun), state.number - _MAX_RECORDS)
        return self._looked_from
