"""Recovery: makes a working root from folder names and journals. Every step may be interrupted and repeated.

1. Files with temporary names are unfinished work. They are deleted.
2. If an id is in two folders, the later state wins if it verifies and its name is durable.
3. An unsealed file has the entries that its journal confirms. Chains and slots are rebuilt. A file without confirmed
   entries is deleted, because its name may not be durable.
4. A damaged file is kept unchanged, and each lookup that needs it reports it. The same holds for a file that is in the
   root's list but in no folder. A file that can't be deleted is left to the life cycle.
5. A file that the disk refuses to read or write may be whole, so recovery ends with an error.

One thread, under the root's lock, before anything else runs.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tiered_index.errors import (
    CorruptFile,
    RootBehind,
    SchemaMismatch,
    StorageError,
    StorageMisconfigured,
    StorageUnavailable,
    TieredIndexError,
)
from tiered_index.format.journal import Journal, parse_journal
from tiered_index.format.layout import HEADER_SIZE, Layout
from tiered_index.format.names import COMPACTED, STATES, UNSEALED, UPLOADED, file_id_of
from tiered_index.format.topic_documents import Documents, newest_documents
from tiered_index.service.life.context import has_newer_positions, own_positions
from tiered_index.service.life.same_file import check_same, is_in
from tiered_index.service.log.records import StoredObject, max_positions
from tiered_index.service.log.state import LogState
from tiered_index.service.read.files.cold_path import ColdPath
from tiered_index.service.read.files.compacted import (
    CompactedFile,
    DamagedFile,
    StorageBytes,
    open_local,
    verify_runs,
    verify_tables,
)
from tiered_index.service.read.files.root_view import has_whole_unsealed, own_documents
from tiered_index.service.read.files.snapshot import Handle
from tiered_index.service.read.files.unsealed import UnsealedFile, drop_unbegun
from tiered_index.service.root import Deletions, Root, disk_errors
from tiered_index.service.root.files import LIST, FileList, ListedFile

_READ_BYTES = 1 << 20
_log = logging.getLogger(__name__)


@dataclass
class Recovered:
    """The result of a recovery.

    - `deletions` has files that could not be deleted.
    - `unsealed` files are in order of sequence.
    - `journals` are whole journals of `damaged` files that were sealed.
    - `notes` name each file that was dropped.
    """

    deletions: Deletions
    unsealed: list[UnsealedFile] = field(default_factory=list)
    compacted: list[CompactedFile] = field(default_factory=list)
    uploaded: list[CompactedFile] = field(default_factory=list)
    damaged: list[DamagedFile] = field(default_factory=list)
    journals: dict[str, Journal] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    topics: list[tuple[int, str]] = field(default_factory=list)
    documents: Documents = field(default_factory=dict)
    next_sequence: int = 1
    notes: list[str] = field(default_factory=list)

    def drop(self, paths: list[Path], note: str) -> None:
        """Delete files durably, in this order, and add a note."""
        self.deletions.unlink(paths)
        self.notes.append(note)

    def let_go(self) -> None:
        """Close all files, after an error."""
        handles: list[Handle] = [*self.unsealed, *self.compacted, *self.uploaded]
        for handle in handles:
            handle.let_go()


def recover_root(
    root: Root,
    cold: ColdPath,
    state: LogState | None,
    layout: Layout,
    files: FileList,
    beat: Callable[[], object] = lambda: None,
) -> Recovered:
    """Recover a root and return its files. `state` is that of the log; None: unknown.

    Files of another layout count as damaged, and so do files that `files` lists but no folder has. `beat` is called
    before each file.
    """
    recovery = _Recovery(root, cold, state, Recovered(Deletions(root.disk)), beat)
    with contextlib.ExitStack() as undo:
        undo.callback(recovery.recovered.let_go)
        recovery.run(layout, files)
        undo.pop_all()
    for note in recovery.recovered.notes:
        _log.info("recovery: %s", note)
    return recovery.recovered


class _ReadJournal(NamedTuple):
    """A journal's bytes, and its content or error. Neither: it has no whole record."""

    data: bytes
    journal: Journal | None = None
    error: TieredIndexError | None = None


@contextlib.contextmanager
def _way_out() -> Iterator[None]:
    """Add advice to an error of the disk, unless it is about something else than an index file or a journal."""
    try:
        yield
    except (StorageMisconfigured, StorageUnavailable) as error:
        cause = error.__cause__
        # an error of a read names no path
        if not isinstance(cause, OSError) or (cause.filename and file_id_of(Path(cause.filename).name) is None):
            raise
        raise type(error)(
            f"{error}; give this user access to it, or repair the disk. If you can't, move the file, and its .journal "
            f"if it has one, out of the root. If the root's list `{LIST}` has the file, the next start reports it, "
            f"unless the storage has it"
        ) from error


class _Recovery:
    """One recovery. `_ids` has the ids of the files in each folder, without dropped files."""

    def __init__(
        self, root: Root, cold: ColdPath, state: LogState | None, recovered: Recovered, beat: Callable[[], object]
    ) -> None:
        self._root, self._cold, self._state, self.recovered, self._beat = root, cold, state, recovered, beat
        self._ids: dict[str, set[str]] = {}
        self._journals: dict[str, _ReadJournal] = {}

    def run(self, layout: Layout, listed: FileList) -> None:
        """Recover the files into `recovered`."""
        root, recovered, state = self._root, self.recovered, self._state
        try:
            gone = listed.gone()
        except CorruptFile as error:
            _log.error("recovery: %s", error)
            gone = {}
            recovered.damaged.append(DamagedFile(LIST, LIST, error))
        with _way_out(), disk_errors(f"recovering {root.path}"):
            if temporaries := root.temporaries():
                for path in temporaries:
                    recovered.deletions.unlink([path])
                recovered.notes.append(f"{len(temporaries)} temporary files dropped")
            self._ids = {s: {i for name in root.names(s) if (i := file_id_of(name)) is not None} for s in STATES}
            # until there is a catalog, from which the list is made
            recovered.deletions.before = lambda: listed.note(lambda: gone)
            self._miss(gone, listed)
            self._recover_uploaded()
            self._recover_compacted()
            self._recover_unsealed()
        self._set_strangers_aside(layout)
        files: list[CompactedFile | UnsealedFile] = [*recovered.compacted, *recovered.uploaded, *recovered.unsealed]
        for file in files:
            recovered.positions = max_positions(recovered.positions, own_positions(file))
            recovered.documents = newest_documents(recovered.documents, own_documents(file))
            recovered.topics += (
                file.journal.topics.items() if isinstance(file, UnsealedFile) else file.metadata().topics
            )
            recovered.next_sequence = max(recovered.next_sequence, file.sequence + 1)
        if state is not None:
            recovered.positions = max_positions(recovered.positions, state.positions)
            recovered.documents = newest_documents(state.documents, recovered.documents)
            recovered.next_sequence = max([recovered.next_sequence, *(o.sequence + 1 for o in state.objects.values())])

    def _set_strangers_aside(self, wanted: Layout) -> None:
        kinds: tuple[list[Any], ...] = (self.recovered.compacted, self.recovered.uploaded, self.recovered.unsealed)
        for files in kinds:
            for file in list(files):
                stored = file.metadata().layout if isinstance(file, CompactedFile) else file.layout
                if (stored.preset, stored.schema, stored.slots) == (wanted.preset, wanted.schema, wanted.slots):
                    continue
                files.remove(file)
                if isinstance(file, UnsealedFile):
                    file.release()
                problem = (
                    f"{file.place}/{file.file_id} has {stored.schema.name} ({stored.preset.name}, {stored.slots:,} "
                    f"slots), but the index has {wanted.schema.name} ({wanted.preset.name}, {wanted.slots:,}): it "
                    f"belongs to another index"
                )
                seconds = file.second_min, file.second_max
                self._add_damaged(file.file_id, file.place, SchemaMismatch(problem), seconds)

    def _stored(self, file_id: str) -> StoredObject | None:
        """Return the object of a file by the log; None: there is none, or the log is unknown."""
        return self._state.object_of(file_id) if self._state is not None else None

    def _miss(self, gone: dict[str, ListedFile], listed: FileList) -> None:
        """Add listed files that no folder has as damaged, unless the log has them or they were given up."""
        given_up = {lost.file_id for lost in self._state.lost.values()} if self._state is not None else set()
        for file_id, file in gone.items():
            if file_id not in given_up and self._stored(file_id) is None:
                self._add_damaged(file_id, UNSEALED, listed.missing(file_id, file), file.seconds)

    def _add_damaged(
        self, file_id: str, place: str, error: TieredIndexError, seconds: tuple[int, int] | None = None
    ) -> None:
        _log.error("recovery: %s", error)
        self.recovered.damaged.append(DamagedFile(file_id, place, error, *(seconds or ())))

    def _recover_uploaded(self) -> None:
        recovered, state = self.recovered, self._state
        for file_id in sorted(self._ids[UPLOADED]):
            self._beat()
            path, stored = self._root.index_path(UPLOADED, file_id), self._stored(file_id)
            if state is not None and stored is None:
                # merged or expired since: dropped, unless it has a source position beyond the log's
                try:
                    file = open_local(path)
                    self._check_earlier(file)
                    if has_newer_positions(file, state.positions):
                        recovered.uploaded.append(file)
                        continue
                except RootBehind:
                    raise
                except CorruptFile:
                    pass
                recovered.drop([path], f"{path.name}: its object was removed from the log, local copy dropped")
                self._ids[UPLOADED].discard(file_id)
                continue
            try:
                bytes_there = StorageBytes(self._cold, stored) if stored is not None else None
                recovered.uploaded.append(open_local(path, bytes_there))
            except CorruptFile as error:
                if stored is None:
                    self._add_damaged(file_id, UPLOADED, error)
                    continue
                recovered.drop([path], f"{path.name}: damaged local copy dropped, the storage has the file ({error})")
                self._ids[UPLOADED].discard(file_id)

    def _recover_compacted(self) -> None:
        """Open the compacted files. The life cycle moves those that the log has."""
        recovered = self.recovered
        uploaded = {file.file_id: file for file in recovered.uploaded}
        for file_id in sorted(self._ids[COMPACTED]):
            self._beat()
            path, stored = self._root.index_path(COMPACTED, file_id), self._stored(file_id)
            if file_id in self._ids[UPLOADED]:
                self._check_copy(path, uploaded.get(file_id))
                recovered.drop([path], f"{path.name}: in uploaded/ too, the earlier copy dropped")
                continue
            try:
                file = open_local(path)
                if file_id in self._ids[UNSEALED]:
                    verify_tables(file)
                    verify_runs(file)
            except CorruptFile as error:
                if stored is not None:
                    recovered.drop(
                        [path], f"{path.name}: damaged local copy dropped, the storage has the file ({error})"
                    )
                elif file_id in self._ids[UNSEALED] and has_whole_unsealed(self._root, file_id):
                    with contextlib.suppress(OSError):  # after an error the compaction replaces it
                        self._root.disk.unlink(path)
                    recovered.notes.append(
                        f"{path.name}: compacted copy does not verify, dropped; compacted again from unsealed/ "
                        f"({error})"
                    )
                else:
                    self._add_damaged(file_id, COMPACTED, error)
                    # each form may have entries that the other one lacks: none of them is deleted
                    self._ids[UNSEALED].discard(file_id)
                continue
            recovered.compacted.append(file)
            if stored is None:
                continue
            try:
                check_same(file, StorageBytes(self._cold, stored))
            except RootBehind:
                raise
            except (CorruptFile, StorageError) as error:
                recovered.notes.append(
                    f"{path.name}: is in the log, and could not be compared with its object ({error})"
                )

    def _recover_unsealed(self) -> None:
        root, recovered, state = self._root, self.recovered, self._state
        for file_id in sorted(self._ids[UNSEALED]):
            self._journals[file_id] = self._read_journal(file_id)
        # also by the log, because a deletion that was not durable may have brought back a retired file
        local = {file.file_id: file for file in (*recovered.compacted, *recovered.uploaded)}
        later = local.keys() | {o.file_id for o in (state.objects.values() if state else ())}
        claims = self._claims()
        if local.keys() & self._ids[UNSEALED]:
            # make the name of the compacted file durable before its unsealed form is deleted
            root.disk.sync_folder(root.folder(COMPACTED))
            root.disk.sync_folder(root.folder(UPLOADED))
        for file_id, (data, journal, unread) in self._journals.items():
            self._beat()
            path, journal_path = root.index_path(UNSEALED, file_id), root.journal_path(file_id)
            alone = state is not None and file_id not in local and self._has_newer_journal(file_id, state)
            if file_id in later and not alone:
                if self._may_go(file_id, local.get(file_id)):
                    recovered.drop([journal_path, path], f"{file_id}: is compacted, its unsealed form dropped")
                    continue
                alone = True
            try:
                if unread is not None:
                    raise unread
                if (count := journal.count if journal is not None else 0) < claims.get(file_id, 0):
                    raise CorruptFile(
                        str(journal_path),
                        "ends before entries that were durable when the next file began",
                        expected=claims[file_id],
                        found=count,
                    )
                if journal is None and (not path.exists() or _never_written(path)):
                    recovered.drop([path, journal_path], f"{file_id}: an unfinished new file was deleted")
                    continue
                if journal is not None and not journal.batches:
                    drop_unbegun(root, file_id, data[: journal.valid_length], recovered.deletions)
                    recovered.notes.append(f"{file_id}: an empty file was deleted")
                    continue
                if journal is None or not path.exists():
                    lost = journal_path if journal is None else path
                    raise CorruptFile(
                        str(lost),
                        "an unsealed file needs both its entries and its journal, and this one is missing or empty",
                    )
                recovered.unsealed.append(UnsealedFile.recover(root, journal, data))
            except (CorruptFile, StorageUnavailable, ValueError) as error:
                if file_id in later and not alone:
                    note = f"{file_id}: damaged local copy dropped, the storage has the file ({error})"
                    recovered.drop([journal_path, path], note)
                    continue
                typed = (
                    error
                    if isinstance(error, TieredIndexError)
                    else CorruptFile(str(path), f"can't be mapped: {error}")
                )
                self._add_damaged(file_id, UNSEALED, typed, journal.seconds if journal is not None else None)
                if journal is not None and journal.sealed:
                    recovered.journals[file_id] = journal
        recovered.unsealed.sort(key=lambda file: file.sequence)

    def _read_journal(self, file_id: str) -> _ReadJournal:
        path = self._root.journal_path(file_id)
        data = path.read_bytes() if path.exists() else b""
        try:
            return _ReadJournal(data, parse_journal(data, str(path), file_id))
        except CorruptFile as error:
            return _ReadJournal(data, error=error)

    def _may_go(self, file_id: str, later: CompactedFile | None) -> bool:
        """Return whether an unsealed file may be dropped, because a `later` form of it or its object exists.

        Raises `RootBehind` if these lack an entry.
        """
        stored, journal = self._stored(file_id), self._journals[file_id].journal
        if journal is None:
            return True
        if stored is not None:
            return is_in(self._root.index_path(UNSEALED, file_id), journal, StorageBytes(self._cold, stored))
        if later is not None:
            self._check_earlier(later)
        return True

    def _check_copy(self, path: Path, later: CompactedFile | None) -> None:
        """Raise `RootBehind` if a compacted file, unless it is damaged, has other entries than its uploaded copy."""
        try:
            file = open_local(path)
            try:
                if later is not None and later.local is not None:
                    check_same(file, later.local)
            finally:
                file.let_go()
        except RootBehind:
            raise
        except CorruptFile as error:
            _log.debug("%s can't be compared with its uploaded copy: %s", path, error)

    def _check_earlier(self, later: CompactedFile) -> None:
        """Raise `RootBehind` if a later form lacks an entry of a file's unsealed form."""
        assert later.local is not None
        if later.file_id in self._ids[UNSEALED]:
            journal = self._read_journal(later.file_id).journal
            if journal is not None:
                is_in(self._root.index_path(UNSEALED, later.file_id), journal, later.local)

    def _has_newer_journal(self, file_id: str, state: LogState) -> bool:
        """Return whether a sealed file's journal has a source position beyond the log's. The life cycle appends it."""
        journal = self._journals[file_id].journal
        if journal is None or not (journal.sealed and journal.count):
            return False
        return self._root.index_path(UNSEALED, file_id).exists() and has_newer_positions(journal, state.positions)

    def _claims(self) -> dict[str, int]:
        """Return the number of durable entries of files by id, as their successors state it."""
        pairs = [
            file.metadata().more.get("predecessor") for file in (*self.recovered.compacted, *self.recovered.uploaded)
        ]
        pairs += [read.journal.predecessor for read in self._journals.values() if read.journal is not None]
        return {str(pair[0]): int(pair[1]) for pair in pairs if pair}


def _never_written(path: Path) -> bool:
    """Return whether only zeros follow the header. Entries are written only after the journal's name is durable."""
    with path.open("rb") as handle:
        handle.seek(HEADER_SIZE)
        while piece := handle.read(_READ_BYTES):
            if piece.count(0) != len(piece):
                return False
    return True
