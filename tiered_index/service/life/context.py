"""The shared state of the life cycle's steps: one root's files, true source positions, and damaged copies.

A position in the log promises that the storage has everything of the source before it. A damaged copy is dropped when
the log has, or had, its file. A whole journal is kept until the log has the journal's positions. A file that
was not published is never changed. Threads: the life cycle's round; `refresh` and the functions from any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce

from sortedcontainers import SortedDict, SortedList

from tiered_index.base.clock import Clock
from tiered_index.base.locks import Lock, call_lock
from tiered_index.base.version import __version__
from tiered_index.config import IndexConfig
from tiered_index.errors import CorruptFile, SchemaMismatch
from tiered_index.format.compacted import SealedFile
from tiered_index.format.journal import Journal
from tiered_index.format.names import COMPACTED, STATES, UNSEALED, UPLOADED
from tiered_index.service.log.identity import exceeds, other_file
from tiered_index.service.log.records import StoredObject, max_positions
from tiered_index.service.log.session import StorageSession
from tiered_index.service.log.state import LogState
from tiered_index.service.read.files.cold_path import ColdPath
from tiered_index.service.read.files.compacted import CompactedFile, DamagedFile, StorageBytes, open_stored
from tiered_index.service.read.files.snapshot import Catalog, Handle
from tiered_index.service.read.files.unsealed import UnsealedFile
from tiered_index.service.read.files.window_table import WindowTable, apply_log_state
from tiered_index.service.root import Deletions, Root
from tiered_index.service.write.appenders import QUARANTINE
from tiered_index.service.write.flusher import Flusher
from tiered_index.storage.base import Storage


class LocalFiles:
    """The files of a root in the catalog, by state. Only the life cycle's round uses it.

    It applies the catalog's changes. So it knows the sums over `copies` without a loop over them.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.forget()

    def forget(self) -> None:
        """Forget all files, until the next `follow`."""
        self._changes = -1  # the catalog's number of changes at the last `follow`.
        self._waiting: dict[str, Handle] = {}  # files that the storage does not have, and damaged ones.
        # local copies of stored or removed objects, by sequence, and the keys of that dictionary by file id
        self._copies: SortedDict[tuple[int, str], CompactedFile] = SortedDict()
        self._places: dict[str, tuple[int, str]] = {}
        self._published_ms: SortedList[int] = SortedList()  # of `copies`
        self._greatest: dict[str, int] | None = {}  # their greatest source positions; None: computed on use
        self.copies_bytes = 0
        """Bytes of `copies`."""

    def follow(self) -> None:
        """Apply the changes of the catalog since the last call."""
        changed = self._catalog.changed_since(self._changes)
        if changed.is_all:
            self.forget()
        for file_id, handle in changed.handles.items():
            self._remove(file_id)
            if handle is not None:
                self._add(handle)
        self._changes = changed.changes

    def _add(self, handle: Handle) -> None:
        if isinstance(handle, CompactedFile) and (handle.local is None or handle.folder != COMPACTED):
            if handle.local is not None:
                self._keep(handle)
        elif not isinstance(handle, WindowTable):
            self._waiting[handle.file_id] = handle

    def _keep(self, file: CompactedFile) -> None:
        self._places[file.file_id] = place = file.sequence, file.file_id
        self._copies[place] = file
        assert file.local is not None
        self.copies_bytes += file.local.size_bytes
        if file.stored is not None:
            self._published_ms.add(file.stored.stored.published_ms)
        if self._greatest is not None:
            self._greatest = max_positions(self._greatest, own_positions(file))

    def _remove(self, file_id: str) -> None:
        self._waiting.pop(file_id, None)
        if (place := self._places.pop(file_id, None)) is None:
            return
        file = self._copies.pop(place)
        self.copies_bytes -= file.local.size_bytes
        if file.stored is not None:
            self._published_ms.remove(file.stored.stored.published_ms)
        greatest = self._greatest or {}
        if any(greatest.get(source) == position for source, position in own_positions(file).items()):
            self._greatest = None

    @property
    def is_published(self) -> bool:
        """Whether the storage has every file."""
        return not self._waiting

    @property
    def unsealed(self) -> list[UnsealedFile]:
        """The unsealed files, in order of sequence."""
        unsealed = [file for file in self._waiting.values() if isinstance(file, UnsealedFile)]
        return sorted(unsealed, key=lambda file: file.sequence)

    @property
    def compacted(self) -> list[CompactedFile]:
        """The compacted files that the storage does not have, in order of sequence."""
        compacted = [file for file in self._waiting.values() if isinstance(file, CompactedFile)]
        return sorted(compacted, key=lambda file: file.sequence)

    @property
    def copies(self) -> Sequence[CompactedFile]:
        """The local copies of files that the storage has, or had, in order of sequence."""
        return self._copies.values()  # type: ignore[no-any-return]

    def copies_before(self, published_ms: float) -> int:
        """Return how many `copies` were published until then."""
        return int(self._published_ms.bisect_right(published_ms))

    def durable_positions(self, file: CompactedFile | UnsealedFile | Journal) -> dict[str, int]:
        """Return the source positions that are true when `file` is published: no other file has an entry before them.

        The result is empty if a damaged, quarantine or older file waits, or if `file` is in quarantine and others wait.
        """
        others = [h for h in self._waiting.values() if h.file_id != file.file_id]
        if any(isinstance(h, DamagedFile) or h.lane == QUARANTINE or h.sequence < file.sequence for h in others):
            return {}
        if others:
            return own_positions(file) if file.lane != QUARANTINE else {}
        local: list[CompactedFile | UnsealedFile | Journal] = [file, *self.unsealed, *self.compacted]
        if self._greatest is None:
            self._greatest = _greatest(self.copies)
        return max_positions(_greatest(local), self._greatest)

    def put_before_ms(self, file: CompactedFile | UnsealedFile, now_ms: int) -> int:
        """Return a time, epoch ms: each entry that was put before it is published with `file`, or was before.

        Entries of the quarantine do not count, because no answer is complete up to their times.
        """
        others: list[CompactedFile | UnsealedFile] = [*self.unsealed, *self.compacted]
        waiting = [other for other in others if other.file_id != file.file_id and other.lane != QUARANTINE]
        return min([now_ms, *filter(None, map(_created_ms, waiting))])

    def needed(self, logged: dict[str, int]) -> set[str]:
        """Return the ids of files with a source position that neither the log (`logged`) nor newer files have."""
        return _needed([*self.unsealed, *self.compacted, *self.copies], logged)


@dataclass
class Progress:
    """The result of one round, in files."""

    compacted: int = 0
    uploaded: int = 0
    retired: int = 0

    def any(self) -> bool:
        """Return whether the round did anything."""
        return bool(self.compacted or self.uploaded or self.retired)


@dataclass(eq=False)
class LifecycleContext:
    """One root's files, storage and settings.

    `outcome_unknown` has the ids of files that may have been published: by an earlier process, or by a try whose
    response was lost. They are looked up in the log before they are published.
    """

    root: Root
    catalog: Catalog
    session: StorageSession
    cold: ColdPath
    config: IndexConfig
    clock: Clock
    flusher: Flusher
    deletions: Deletions
    outcome_unknown: set[str]
    _refresh_lock: Lock = field(default_factory=call_lock)
    _files: LocalFiles = field(init=False)

    def __post_init__(self) -> None:
        self._files = LocalFiles(self.catalog)

    @property
    def files(self) -> LocalFiles:
        """The root's files, as the catalog shows them now. For the life cycle's round alone."""
        self._files.follow()
        return self._files

    def end(self) -> None:
        """Let go of all files."""
        self._files.forget()

    def refresh(self) -> LogState:
        """Read new log records, show their objects in the catalog, and return the log's state."""
        with self._refresh_lock:
            self.session.log.refresh()
            return self.show()

    def follow(self) -> None:
        """Make the snapshot of the log's newest state: one change for the state and its objects.

        A lookup never sees a state without its objects: it may hide what only they have in another form.
        """
        # in this order, so that a file that is published meanwhile is one of the state
        with self.catalog.lock:
            state, known = self.session.log.state, self.catalog.snapshot.state
            changed = state.changed_since(known)
            with self.catalog.changing(state, math.inf):
                files = self.catalog.all() if changed is None else filter(None, map(self.catalog.get, changed))
                self._apply(list(files), state, changed)

    def _apply(self, handles: Sequence[Handle], state: LogState, changed: Collection[str] | None = None) -> None:
        """As `apply_log_state`."""
        apply_log_state(self.catalog, handles, state, self.cold, self.dispose, self._keeps(), changed)

    def show(self) -> LogState:
        """Show the objects of the known log records in the catalog, and return the log's state."""
        with self._refresh_lock:
            # the handles first: their files were published before, so the later state knows them
            handles = self.catalog.all()
            state, keeps = self.session.log.state, self._keeps()
            merged: list[str] = []
            for handle in handles:
                # for handles that were recovered while the storage was unavailable
                stored = state.object_of(handle.file_id)
                if isinstance(handle, DamagedFile) and stored is not None:
                    self.catalog.put(open_stored(self.cold, stored))
                elif isinstance(handle, CompactedFile) and handle.folder == UPLOADED and handle.stored is None:
                    if stored is None and not keeps(handle):
                        merged.append(handle.file_id)
                    elif stored is not None:
                        self.catalog.put(replace(handle, stored=StorageBytes(self.cold, stored)))
            handles, known = self.catalog.all(), self.session.log.state  # in this order, as above
            self._apply(handles, known)
            # after the tables that have their entries
            for file_id in merged:
                self.catalog.remove(file_id, self.dispose(file_id))
            return state

    def moved_files(self, state: LogState, after: int) -> set[str]:
        """Return the ids of files whose objects records after number `after` removed, without those given up.

        A file that was given up is published again from its local copy. Raises the errors of the storage.
        """
        return self.session.log.removed_files(state, after) - {lost.file_id for lost in state.lost.values()}

    def check_moved(self, file: CompactedFile) -> None:
        """Raise `RootBehind` if a file that `moved_files` names was published without an entry of the local one."""
        published = self.session.log.published_file(file.file_id)
        if published is not None and exceeds(file, published):
            where = f"{file.place}/{file.file_id}"
            raise other_file(where, published.name, f"{published.count} entries", f"{file.count} others")

    def dispose(self, file_id: str) -> Callable[[], None]:
        """Return a function that deletes the local copy of an uploaded file."""
        return lambda: self.deletions.unlink([self.root.index_path(UPLOADED, file_id)])

    def drop(self, file: UnsealedFile) -> None:
        """Delete the local copy of an unsealed file."""
        file.release()
        # the journal first, because readers ignore a file without one
        self.deletions.unlink([file.journal_path, file.path])

    def append_positions(self, file: CompactedFile | Journal) -> dict[str, int]:
        """Append the positions that are true when `file` is published. Return the log's positions."""
        positions = self.files.durable_positions(file)
        return self.session.log.append_positions(self.session.epoch, positions).positions

    def _keeps(self) -> Callable[[CompactedFile], bool]:
        """Return a function that says whether a merged file's local copy is `needed`, of all present files."""
        logged = self.session.log.state.positions

        @cache  # on use, because few files have a position beyond the log's
        def needed() -> set[str]:
            files = [file for file in self.catalog.all() if isinstance(file, CompactedFile | UnsealedFile)]
            return _needed([file for file in files if isinstance(file, UnsealedFile) or file.local is not None], logged)

        return lambda file: file.local is not None and has_newer_positions(file, logged) and file.file_id in needed()


def sealed_form(file: UnsealedFile) -> SealedFile:
    """Return the `SealedFile` of a sealed unsealed file: everything except its entries."""
    return SealedFile(
        file_id=file.file_id,
        layout=file.layout,
        begin_ms=file.table.begin_ms,
        end_ms=file.table.end_ms,
        lane=file.lane,
        sequence=file.sequence,
        predecessor=file.journal.predecessor,
        created_ms=file.journal.created_ms,
        offset_space=file.journal.offset_space,
        topics=tuple(sorted(file.journal.topics.items())),
        positions=dict(file.journal.positions),
        writer=f"tiered_index {__version__}",
        log_number=file.journal.log_number,
        documents=file.journal.documents,
    )


def _created_ms(file: CompactedFile | UnsealedFile) -> int:
    """Return the time at which a file was begun, epoch ms; 0: not known."""
    if isinstance(file, CompactedFile):
        return int(file.metadata().more.get("created_ms", 0))
    return file.journal.created_ms


def _greatest(files: Iterable[CompactedFile | UnsealedFile | Journal]) -> dict[str, int]:
    """Return the greatest position of each source in files."""
    return reduce(max_positions, map(own_positions, files), {})


def _needed(files: Iterable[CompactedFile | UnsealedFile], logged: dict[str, int]) -> set[str]:
    """Return the ids of files with a source position that neither the log (`logged`) nor newer ones of `files` have."""
    needed, reached = set(), logged
    for file in sorted(files, key=lambda file: -file.sequence):
        before, reached = reached, max_positions(reached, own_positions(file))
        if reached != before:
            needed.add(file.file_id)
    return needed


def own_positions(file: CompactedFile | UnsealedFile | Journal) -> dict[str, int]:
    """Return the source positions of a file."""
    if isinstance(file, CompactedFile):
        return file.metadata().source_positions
    return (file.journal if isinstance(file, UnsealedFile) else file).positions


def has_newer_positions(file: CompactedFile | UnsealedFile | Journal, reached: dict[str, int]) -> bool:
    """Return whether a file, or the journal of one, has a source position beyond `reached`."""
    return max_positions(reached, own_positions(file)) != reached


def check_size(storage: Storage, stored: StoredObject, local_file: str) -> None:
    """Raise `CorruptFile` if an object has another size than in the log. `local_file` names the local file."""
    problem = f"object has another size than the log says; {local_file} is kept"
    CorruptFile.unless_equal(stored.name, problem, stored.size_bytes, storage.head(stored.name).size_bytes)


MAX_RECORDS = 1000
"""Most records that a start reads back, with a request each. A damaged file that was merged before is kept."""


class DamagedCopies:
    """The damaged files of one root when it was opened, and their journals that are whole."""

    def __init__(
        self, context: LifecycleContext, damaged: Iterable[DamagedFile], journals: Mapping[str, Journal]
    ) -> None:
        self._context = context
        # files that are not known to be published; files of another index never were
        self.waiting = {
            file.file_id: file
            for file in damaged
            if file.place in STATES and not isinstance(file.error, SchemaMismatch)
        }
        self._published: dict[str, DamagedFile] = {}
        self._journals = journals
        self._looked_from: int | None = None

    def _learn(self, file_id: str) -> None:
        """Note that the storage has all entries of a file, so that their source need not send them again."""
        if (journal := self._journals.get(file_id)) is not None:
            self._context.flusher.learn(journal.positions)

    def tend(self) -> None:
        """Drop the files that were published. Raises the errors of the storage. Idempotent."""
        context = self._context
        given_up = {lost.file_id for lost in context.session.log.state.lost.values()}
        for file_id in list(self.waiting):
            state = context.session.log.state
            stored = state.object_of(file_id)
            if stored is None:
                if file_id not in given_up and file_id not in context.session.log.removed_files(
                    state, self._before(state)
                ):
                    continue
                context.refresh()  # shows the table into which it was merged
                context.catalog.remove(file_id)
            else:
                context.catalog.put(open_stored(context.cold, stored))
            self._learn(file_id)
            self._published[file_id] = self.waiting.pop(file_id)
        for file_id, file in list(self._published.items()):
            journal = self._journals.get(file_id)
            if (
                journal is not None
                and has_newer_positions(journal, context.session.log.state.positions)
                and has_newer_positions(journal, context.append_positions(journal))
            ):
                continue  # an older file waits: tried again in each round, and after a restart
            # the journal first, because an unsealed file without one is ignored
            paths = [context.root.journal_path(file_id)] if file.place == UNSEALED else []
            context.deletions.unlink(
                [*paths, context.root.index_path(file.place, file_id)] if file.place in STATES else []
            )
            del self._published[file_id]

    def _before(self, state: LogState) -> int:
        """Return the number of a record before all that removed a waiting file, within `MAX_RECORDS`."""
        if self._looked_from is None:
            begun = [journal.log_number if (journal := self._journals.get(file_id)) else 0 for file_id in self.waiting]
            self._looked_from = max(min(begun), state.number - MAX_RECORDS)
        return self._looked_from
