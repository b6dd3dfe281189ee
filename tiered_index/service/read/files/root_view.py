"""A root as another process sees it: its flushed entries, read without the writer's lock.

A look is made anew only if a folder, the list of files or a journal has changed. Folders are listed in the order in
which files move through them, so each file is seen at least once. A file that has moved before it is opened is opened
in its next folder. One that has left the last folder is in the storage: the log, read after the look, names it. So one
look is enough beside any writer. Unsealed entries count if the journal confirms them and their CRC32 matches. A search
follows chains that the reader makes of them. Threads: any.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import time
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from tiered_index.base.call import Call
from tiered_index.base.kernels import compiled
from tiered_index.base.locks import call_lock
from tiered_index.errors import CorruptFile, TieredIndexError
from tiered_index.format.journal import Journal, parse_journal, read_on
from tiered_index.format.metadata import NamedStats
from tiered_index.format.names import COMPACTED, JOURNAL_SUFFIX, STATES, UNSEALED, UPLOADED, file_id_of
from tiered_index.format.topic_documents import NO_DOCUMENTS, Documents
from tiered_index.format.unsealed import UnsealedTable
from tiered_index.service.log.identity import exceeds, other_file
from tiered_index.service.log.reads import reads_in
from tiered_index.service.log.records import max_positions
from tiered_index.service.read.answers.batch import LookupBatch, Matches
from tiered_index.service.read.files.compacted import CompactedFile, DamagedFile, open_local
from tiered_index.service.read.files.snapshot import Handle
from tiered_index.service.read.files.unsealed import UnsealedEntries, UnsealedFile, verified_entries
from tiered_index.service.root import ASIDE, Root, disk_error, disk_errors
from tiered_index.service.root.files import LIST, FileList, ListedFile
from tiered_index.storage.disk import map_file

# the coarsest resolution of file times in use
STEP_NS = 2_000_000_000


class UnsealedView(UnsealedEntries):
    """The entries that another process writes. A look reads on in the journal; a search verifies what came since.

    `state` is the journal's inode, size and time before it was read last.
    """

    def __init__(self, path: Path, journal: Journal, state: tuple[int, int, int]) -> None:
        with path.open("rb") as handle:
            try:
                mapped = map_file(handle.fileno(), path.parent)
            except ValueError as error:
                raise CorruptFile(str(path), "empty file", offset=0) from error
        super().__init__(path, journal, UnsealedTable(journal.layout, journal.begin_ms), mapped)
        self.state = state
        # how much of topics was read
        self.reads = reads_in(journal.positions)
        # of the journal's batches, how many are in the table
        self._loaded = 0
        self._lock = call_lock()

    def read_on(self, journal_path: Path) -> bool:
        """Apply what was appended to the journal. Return False, changing nothing, if something else changed it.

        Raises `FileNotFoundError`, and `CorruptFile` for a damaged record: a new view says the same.
        """
        with self._lock, journal_path.open("rb") as file:
            status = os.fstat(file.fileno())
            state = state_of(status)
            if state == self.state:
                return True
            known = self.journal
            # an append makes it longer; damage does not
            if status.st_ino != self.state[0] or status.st_size <= self.state[1]:
                return False
            # a copy, since other threads read the journal meanwhile
            journal = replace(known, topics={**known.topics}, batches=[*known.batches], positions={**known.positions})
            file.seek(journal.last_record[0])
            if not read_on(journal, file.read(), str(journal_path)):
                return False
            for topic_id in journal.topics.keys() - known.topics.keys():
                self._name(topic_id, journal.topics[topic_id])
            for batch in journal.batches[len(known.batches) :]:
                if batch.count:
                    self.second_min = min(self.second_min, batch.second_min)
                    self.second_max = max(self.second_max, batch.second_max)
            self.journal, self.sealed, self.reads = journal, journal.sealed, reads_in(journal.positions)
            self.state = state
            return True

    @property
    def is_loaded(self) -> bool:
        """Whether all entries of the journal were verified, and are in the table."""
        return self._loaded == len(self.journal.batches)

    def in_core(self) -> Any:
        """As `UnsealedEntries.in_core`; None also before a search has verified the entries."""
        return super().in_core() if self.is_loaded else None

    def search(self, batch: LookupBatch, call: Call) -> Matches:
        """As `UnsealedEntries.search`. Raises `CorruptFile` if entries do not match the journal."""
        self._load()
        return super().search(batch, call)

    def topic_stats(self, call: Call) -> NamedStats:
        """See `Handle.topic_stats`."""
        self._load()
        return super().topic_stats(call)

    def check_length(self) -> None:
        """Raise `CorruptFile` if the file is shorter than its layout: searches and the writer need all of it."""
        whole = self.layout.unsealed_size
        if len(self._map) < whole:
            raise CorruptFile(str(self.path), "shorter than its layout", expected=whole, found=len(self._map))

    def _load(self) -> None:
        """Verify the entries that are not in the table yet, and add them."""
        if self.is_loaded:
            return
        with self._lock:
            batches = len(self.journal.batches)
            entries = verified_entries(self._map, self.journal, str(self.path), first_batch=self._loaded)
            if self._in_core is None:
                self.check_length()
                self._put_in_core()
            fresh = entries[self.table.count :]
            self._append_in_core(self.table.count + 1, self.seconds_of(fresh))
            self.table.load(fresh, 0)
            self._loaded = batches


def state_of(status: os.stat_result) -> tuple[int, int, int]:
    """Return a value that changes with each append to a file, and with its replacement."""
    return status.st_ino, status.st_size, status.st_mtime_ns


# inode, size, and the times of modification and change in nanoseconds
_STATE = struct.Struct("=4Q")


def states_of(paths: tuple[bytes, ...], folders: int) -> bytes:
    """Return the states of a root, its folders (`folders` in all), and files that may be missing.

    The root itself may be a symbolic link, but its folders may not. The compiled core does the same.
    """
    states = []
    for number, path in enumerate(paths):
        try:
            # a copy sets the time of modification back, and some file systems have no time of change
            status = os.stat(path, follow_symlinks=not 0 < number < folders)  # noqa: PTH116 - the core needs bytes
        except FileNotFoundError:
            if number < folders:
                raise
            states.append(_STATE.pack(0, 0, 0, 0))
        else:
            states.append(_STATE.pack(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return b"".join(states)


def has_whole_unsealed(root: Root, file_id: str) -> bool:
    """Return whether a sealed file has its unsealed form, whose entries all verify: it can be compacted again.

    Raises the errors of the disk.
    """
    journal_path = root.journal_path(file_id)
    with contextlib.ExitStack() as closing, disk_errors(f"reading {journal_path}"):
        try:
            journal = parse_journal(journal_path.read_bytes(), str(journal_path), file_id)
            if journal is None or not journal.sealed:
                return False
            view = UnsealedView(root.index_path(UNSEALED, file_id), journal, (0, 0, 0))
            closing.callback(view.let_go)
            view.check_length()
            return len(view.entries()) > 0
        except (FileNotFoundError, CorruptFile):
            return False


class RootLook(NamedTuple):
    """The files of a root at one look, and the positions that say how much of topics was read, by the same files."""

    handles: list[Handle]
    reads: dict[str, int]


class _FilesSoFar(NamedTuple):
    """The files of one look so far.

    `counts` has the number of durable entries by journal. `reads` has how much of topics was read, by file.
    """

    handles: dict[str, Handle]
    unsealed: dict[str, UnsealedView]
    opened: dict[tuple[str, str], CompactedFile]
    counts: dict[str, int]
    reads: dict[str, dict[str, int]]

    def is_short(self, file_id: str, claimed: int) -> bool:
        """Return whether the newest state of a file is a journal with fewer entries than `claimed`."""
        is_newest = self.handles.get(file_id) in (None, self.unsealed.get(file_id))
        return is_newest and self.counts.get(file_id, claimed) < claimed


class RootView:
    """Reads a root. It keeps files open until they change."""

    def __init__(self, root: Root, *, checks_list: bool = True) -> None:
        self._root = root
        self._folders = [*map(os.fsencode, (root.path, *map(root.folder, STATES)))]
        self._list_path = os.fsencode(root.path / LIST)
        self._files = FileList(root) if checks_list else None
        self._opened: dict[tuple[str, str], CompactedFile] = {}
        self._unsealed: dict[str, UnsealedView] = {}
        # the newest compacted file of the last look, and how much of topics its metadata say
        self._newest: tuple[CompactedFile, dict[str, int]] | None = None
        # the journals of the last look, and the look with the states of files before it; None: it must be made anew
        self._journals: list[Path] = []
        self._last: tuple[tuple[bytes, ...], bytes, RootLook] | None = None

    def changes(self) -> tuple[int, ...] | None:
        """Return a value that changes with each file that enters or leaves a folder; None: too recent to be sure."""
        try:
            times = tuple(self._root.folder(state).stat().st_mtime_ns for state in STATES)
        except OSError as error:
            raise disk_error(error, f"reading {self._root.path}") from error
        return times if max(times) < time.time_ns() - STEP_NS else None

    def give_up(self) -> list[Handle]:
        """Forget the open files and return them; the caller must close their mappings."""
        handles: list[Handle] = [*self._opened.values(), *self._unsealed.values()]
        self._opened, self._unsealed, self._newest, self._last = {}, {}, None, None
        return handles

    def unchanged(self) -> RootLook | None:
        """Return the last look if nothing has changed since; None: it has, or `look` has to say it."""
        if self._last is None:
            return None
        paths, states, look = self._last
        try:
            return look if self._states(paths) == states else None
        except OSError:
            return None

    def look(self) -> RootLook:
        """Return a handle for every file with durable entries, in its latest state; the last look if nothing changed.

        Unreadable files, and files that are in the root's list but in no folder, have handles that fail.
        """
        try:
            # raises for a missing folder, which is not an empty one
            journals = self._journals
            paths = *self._folders, self._list_path, *map(os.fsencode, journals)
            states = self._states(paths)
            if self._last is not None and self._last[:2] == (paths, states):
                return self._last[2]
            self._root.refuse_links()
            look, listed_journals = self._look()
        except OSError as error:
            raise disk_error(error, f"reading {self._root.path}") from error
        is_whole = not any(isinstance(handle, DamagedFile) for handle in look.handles)
        is_whole = is_whole and self._is_settled(states)
        # the states must be those of the journals of this look
        self._last = (paths, states, look) if is_whole and listed_journals == journals else None
        self._journals = listed_journals
        return look

    def _states(self, paths: tuple[bytes, ...]) -> bytes:
        """Return a value that changes with the folders, the list and journals."""
        core = compiled()
        states = None if core is None else core.file_states(paths, len(self._folders))
        return states_of(paths, len(self._folders)) if states is None else states

    def _is_settled(self, states: bytes) -> bool:
        """Return whether each later change to a folder changes its state: its time can be as coarse as 2 s."""
        folders = [*_STATE.iter_unpack(states)][: len(self._folders)]
        newest: int = max(max(of_folder[2:]) for of_folder in folders)
        return newest < time.time_ns() - STEP_NS

    def _look(self) -> tuple[RootLook, list[Path]]:
        """Return a look, and the journals that it found."""
        files = _FilesSoFar({}, {}, {}, {}, {})
        handles, unsealed, opened = files.handles, files.unsealed, files.opened
        # read before the folders: a file leaves the list before it is deleted
        listed = self._listed(handles)
        unsealed_names = [name for name in self._root.names(UNSEALED) if name.endswith(JOURNAL_SUFFIX)]
        journals = [file_id for name in unsealed_names if (file_id := file_id_of(name)) is not None]
        moved = [file_id for file_id in journals if not self._find_unsealed(files, file_id)]
        for state in (COMPACTED, UPLOADED):
            for name in self._root.names(state):
                if (file_id := file_id_of(name)) is not None and (state, file_id) not in opened:
                    self._find_compacted(files, file_id, state)
        for file_id in moved:
            # otherwise it was found in its next folder: a writer crashed or could not delete the rest
            if file_id not in handles:
                self._find_moved(files, file_id)
        self._check_forms(files)
        self._check_claims(files)
        absent = listed.keys() - handles.keys() - files.counts.keys()
        if absent and self._files is not None:
            # read again after the folders: a file that is in both lists must be in a folder
            for file_id in absent & self._listed(handles, again=True).keys():
                seconds = listed[file_id].seconds or ()
                handles[file_id] = DamagedFile(
                    file_id, UNSEALED, self._files.missing(file_id, listed[file_id]), *seconds
                )
        if (self._root.path / ASIDE).exists():
            problem = "`tiered-index recover` was interrupted after files were set aside: run it again"
            handles[ASIDE] = _damaged(ASIDE, ASIDE, CorruptFile(str(self._root.path / ASIDE), problem))
        self._note_newest(files)
        self._opened, self._unsealed = opened, unsealed
        all_reads: dict[str, int] = reduce(max_positions, files.reads.values(), {})
        return RootLook(list(handles.values()), all_reads), [*map(self._root.journal_path, journals)]

    def _check_forms(self, files: _FilesSoFar) -> None:
        """Let a file fail whose later form lacks entries of an earlier one: another copy of the root wrote one."""
        earlier: list[UnsealedView | CompactedFile] = [*files.unsealed.values(), *files.opened.values()]
        for view in earlier:
            file_id, later = view.file_id, files.handles.get(view.file_id)
            if isinstance(later, CompactedFile) and exceeds(view, later):
                where, counts = f"{self._root.folder(view.place)}/{file_id}", (later.count, f"{view.count} others")
                error = other_file(where, f"{later.place}/{file_id}", *counts)
                files.handles[file_id] = _damaged(file_id, view.place, error)

    def _check_claims(self, files: _FilesSoFar) -> None:
        """Let a file fail that has fewer entries than the next file says; look again at one that grew meanwhile."""
        claims = [view.journal.predecessor for view in files.unsealed.values()]
        claims += [file.metadata().more.get("predecessor") for file in files.opened.values()]
        for file_id, claimed in (claim for claim in claims if claim):
            if not files.is_short(file_id, claimed):
                continue
            # it grew after it was read, and before the next file began: its entries are durable now
            if not self._find_unsealed(files, file_id):
                self._find_moved(files, file_id)
            elif files.is_short(file_id, claimed):
                short = CorruptFile(
                    str(self._root.journal_path(file_id)),
                    "ends before entries that were durable when the next file began",
                    expected=claimed,
                    found=files.counts[file_id],
                )
                files.handles[file_id] = _damaged(file_id, UNSEALED, short)

    def _note_newest(self, files: _FilesSoFar) -> None:
        """Add what the newest compacted file says about how much of topics was read."""
        if not files.opened:
            # it would keep the disk space of a file that has left the root
            self._newest = None
            return
        # each file begins with the positions of the one before
        newest = max(files.opened.values(), key=lambda file: file.sequence)
        if self._newest is None or self._newest[0] is not newest:
            self._newest = newest, reads_in(newest.metadata().source_positions)
        files.reads[newest.file_id] = self._newest[1]

    def _find_unsealed(self, files: _FilesSoFar, file_id: str) -> bool:
        """Read a journal. Return False if the file has moved to its next state, or lacks a part."""
        try:
            view = self._view(file_id, files.reads)
        except FileNotFoundError:
            return False
        except (TieredIndexError, ValueError) as error:
            # a traceback would keep this frame, and every mapping in it, alive
            files.handles[file_id] = _damaged(file_id, UNSEALED, error.with_traceback(None))
            return True
        files.counts[file_id] = view.count if view is not None else 0
        if view is not None:
            files.handles[file_id] = files.unsealed[file_id] = view
        return True

    def _find_compacted(self, files: _FilesSoFar, file_id: str, state: str) -> bool:
        """Open a file in `state`, or in the state after it. Return False if it has left the root."""
        for place in (COMPACTED, UPLOADED)[state == UPLOADED :]:
            try:
                file = self._opened.get((place, file_id)) or open_local(self._root.index_path(place, file_id))
            except FileNotFoundError:
                continue
            except TieredIndexError as error:
                files.handles[file_id] = _damaged(file_id, place, error.with_traceback(None))
            else:
                files.handles[file_id] = files.opened[place, file_id] = file
            return True
        return False

    def _find_moved(self, files: _FilesSoFar, file_id: str) -> None:
        """Find a file that has left `unsealed`. One whose journal is still there lacks its entries."""
        if self._find_compacted(files, file_id, COMPACTED):
            return
        for seen in (files.handles, files.unsealed, files.counts):
            seen.pop(file_id, None)
        # again, because a file without entries that count loses them before its journal
        if not self._find_unsealed(files, file_id) and self._root.journal_path(file_id).exists():
            path = str(self._root.index_path(UNSEALED, file_id))
            missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            # a copy in the storage replaces it
            files.handles[file_id] = _damaged(file_id, UNSEALED, missing)

    def _listed(self, handles: dict[str, Handle], *, again: bool = False) -> dict[str, ListedFile]:
        try:
            return self._files.read(again=again) if self._files is not None else {}
        except CorruptFile as error:
            handles[LIST] = _damaged(LIST, LIST, error.with_traceback(None))
            return {}

    def _view(self, file_id: str, reads: dict[str, dict[str, int]]) -> UnsealedView | None:
        """Return the entries of a file; None: it has none. Add how much of topics was read to `reads`."""
        journal_path = self._root.journal_path(file_id)
        state = state_of(journal_path.stat())  # before the read: later appends are seen at the next look
        known = self._unsealed.get(file_id)
        if known is not None and (known.state == state or known.read_on(journal_path)):
            reads[file_id] = known.reads
            return known
        journal = parse_journal(journal_path.read_bytes(), str(journal_path), file_id)
        if journal is not None:
            reads[file_id] = reads_in(journal.positions)
        if journal is None or not journal.count:
            return None
        return UnsealedView(self._root.index_path(UNSEALED, file_id), journal, state)


def _damaged(file_id: str, place: str, error: Exception) -> DamagedFile:
    typed = error if isinstance(error, TieredIndexError) else CorruptFile(file_id, f"can't be read: {error}")
    return DamagedFile(file_id, place, typed)


def own_documents(file: Handle | UnsealedFile) -> Documents:
    """Return the documents of topics that a file of a root has; a damaged one has none."""
    if isinstance(file, CompactedFile):
        return file.metadata().documents
    return file.journal.documents if isinstance(file, UnsealedFile | UnsealedView) else NO_DOCUMENTS
