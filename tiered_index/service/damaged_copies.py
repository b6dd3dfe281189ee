"""Local files that could not be read, and the storage behind them: one is let go of once the log says that its entries were published.

The log may have its object still, or a merge has taken it since. The journal, where it is whole, says source positions that nothing else
may say: it is kept until the log does. What was not published stays, untouched. Threads: the life cycle's round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from tiered_index.errors import SchemaMismatch
from tiered_index.format.journal import Journal
from tiered_index.format.names import STATES, UNSEALED
from tiered_index.service.catalog import Catalog
from tiered_index.service.cold.path import ColdPath
from tiered_index.service.compacted_file import DamagedFile, open_stored
from tiered_index.service.deletions import Deletions
from tiered_index.service.log_records import LogState
from tiered_index.service.positions import durable_positions, says_more
from tiered_index.service.removals import Removals
from tiered_index.service.root import Root
from tiered_index.service.session import StorageSession

__all__ = ["DamagedCopies"]

_MAX_RECORDS = 1000
# that a start looks back through, a request each: a file that was merged away before stays, as damage


class DamagedCopies:
    """The damaged files of one root, as they were found when it was opened; `journals` are those of their journals that are whole.

    `refresh` reads the log and shows what it says, `learn` is told of source positions that need not come again.
    """

    def __init__(
        self, root: Root, catalog: Catalog, session: StorageSession, cold: ColdPath, deletions: Deletions, *,
        damaged: Iterable[DamagedFile], journals: Mapping[str, Journal], refresh: Callable[[], object],
        learn: Callable[[dict[str, int]], None],
    ) -> None:  # fmt: skip
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
            if journal is not None and says_more(journal, log.state.positions):
                said = log.say(self._session.epoch, durable_positions(journal, self._catalog.all())).positions
                if says_more(journal, said):
                    continue  # an older file waits: it is tried again in each round, and after a restart
            # the journal first: without it an unsealed file is not there
            paths = [self._root.journal_path(file_id)] if file.place == UNSEALED else []
            self._deletions.unlink([*paths, self._root.index_path(file.place, file_id)] if file.place in STATES else [])
            del self._published[file_id]

    def _before(self, state: LogState) -> int:
        """Return the number of a log record before any that removed a waiting file, as far as journals say it and the bound allows."""
        if self._looked_from is None:
            begun = [journal.log_number if (journal := self._journals.get(file_id)) else 0 for file_id in self._waiting]
            self._looked_from = max(min(begun), state.number - _MAX_RECORDS)
        return self._looked_from
