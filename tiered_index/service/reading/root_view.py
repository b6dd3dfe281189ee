"""A root as another process sees it: its flushed entries, read without the writer's lock.

Folders are listed in the order in which files move through them, so each file is seen at least once. If a file vanishes
before it is opened, the folders are listed again, a bounded number of times. Unsealed entries count if the journal
confirms them and their CRC32 matches. A search scans their hash column. Threads: any.
"""

from __future__ import annotations

import time
from functools import reduce
from pathlib import Path
from typing import Any

import numpy.typing as npt

from tiered_index.errors import CorruptFile, StorageUnavailable, TieredIndexError
from tiered_index.format.journal import Journal, parse_journal
from tiered_index.format.names import COMPACTED, JOURNAL_SUFFIX, STATES, UNSEALED, UPLOADED, file_id_of
from tiered_index.service.catalog.catalog import Handle
from tiered_index.service.files.compacted import CompactedFile, DamagedFile, open_local
from tiered_index.service.files.unsealed import UnsealedEntries
from tiered_index.service.log.reads import reads_in
from tiered_index.service.log.records import max_positions
from tiered_index.service.root import ASIDE, Root, disk_error
from tiered_index.service.root.files import LIST, FileList, ListedFile
from tiered_index.storage.disk import map_file

_LOOKS = 20
# the coarsest resolution of file times in use
_STEP_NS = 2_000_000_000


class UnsealedView(UnsealedEntries):
    """The entries that another process writes. `state` is the journal's inode, size and time before it was read."""

    def __init__(self, path: Path, journal: Journal, state: tuple[int, int, int]) -> None:
        with path.open("rb") as handle:
            try:
                mapped = map_file(handle.fileno(), path.parent)
            except ValueError as error:
                raise CorruptFile(str(path), "empty file", offset=0) from error
        super().__init__(path, journal, mapped)
        self.state = state
        self._verified: npt.NDArray[Any] | None = None

    def entries(self) -> npt.NDArray[Any]:
        """As `UnsealedEntries.entries`, verified once."""
        if self._verified is None:
            self._verified = super().entries()
        return self._verified

    def let_go(self) -> None:
        self._verified = None
        super().let_go()


class RootView:
    """Reads a root. It keeps files open until they change."""

    def __init__(self, root: Root, *, checks_list: bool = True) -> None:
        self._root = root
        self._files = FileList(root) if checks_list else None
        self._opened: dict[tuple[str, str], CompactedFile] = {}
        self._unsealed: dict[str, UnsealedView] = {}
        # how much of topics was read, by the journals and the newest file of the last look
        self._reads: dict[str, dict[str, int]] = {}

    @property
    def reads(self) -> dict[str, int]:
        """The positions that say how much of topics was read, at the last look."""
        return reduce(max_positions, self._reads.values(), {})

    def changes(self) -> tuple[int, ...] | None:
        """Return a value that changes with each file that enters or leaves a folder; None: too recent to be sure."""
        try:
            times = tuple(self._root.folder(state).stat().st_mtime_ns for state in STATES)
        except OSError as error:
            raise disk_error(error, f"reading {self._root.path}") from error
        return times if max(times) < time.time_ns() - _STEP_NS else None

    def give_up(self) -> list[Handle]:
        """Forget the open files and return them; the caller must close their mappings."""
        handles: list[Handle] = [*self._opened.values(), *self._unsealed.values()]
        self._opened, self._unsealed = {}, {}
        return handles

    def look(self) -> list[Handle]:
        """Return a handle for every file with durable entries, in its latest state.

        Unreadable files, and files that are in the root's list but in no folder, have handles that fail.
        """
        for left in reversed(range(_LOOKS)):
            self._root.refuse_links()
            self.changes()  # raises for a missing folder, which is not an empty one
            try:
                return self._look(last=not left)
            except FileNotFoundError:
                continue  # the file moved to its next state
            except OSError as error:
                raise disk_error(error, f"reading {self._root.path}") from error
        raise StorageUnavailable(f"{self._root.path}: files kept changing their state during {_LOOKS} looks; try again")

    def _look(self, *, last: bool) -> list[Handle]:
        handles: dict[str, Handle] = {}
        gone: dict[str, FileNotFoundError] = {}
        unsealed: dict[str, UnsealedView] = {}
        counts: dict[str, int] = {}
        reads: dict[str, dict[str, int]] = {}
        # read before the folders: a file leaves the list before it is deleted
        listed = self._listed(handles)
        for name in self._root.names(UNSEALED):
            file_id = file_id_of(name)
            if file_id is None or not name.endswith(JOURNAL_SUFFIX):
                continue
            try:
                view = self._view(file_id, reads)
            except FileNotFoundError as error:
                # a traceback would keep this frame, and every mapping in it, alive
                gone[file_id] = error.with_traceback(None)
                continue
            except (TieredIndexError, ValueError) as error:
                handles[file_id] = _damaged(file_id, UNSEALED, error.with_traceback(None))
                continue
            counts[file_id] = view.count if view is not None else 0
            if view is not None:
                handles[file_id] = unsealed[file_id] = view
        opened: dict[tuple[str, str], CompactedFile] = {}
        for state in (COMPACTED, UPLOADED):
            for name in self._root.names(state):
                file_id = file_id_of(name)
                if file_id is None:
                    continue
                try:
                    file = self._opened.get((state, file_id)) or open_local(self._root.index_path(state, file_id))
                except TieredIndexError as error:
                    handles[file_id] = _damaged(file_id, state, error.with_traceback(None))
                    continue
                handles[file_id] = opened[state, file_id] = file
        for file_id, missing in gone.items():
            if file_id in handles:
                continue  # the rest of a file that has moved: a writer crashed or could not delete it
            if not last:
                raise FileNotFoundError(str(missing))
            handles[file_id] = _damaged(file_id, UNSEALED, missing)  # a copy in the storage replaces it
        claims = [view.journal.predecessor for view in unsealed.values()]
        claims += [file.metadata().more.get("predecessor") for file in opened.values()]
        for file_id, claimed in (claim for claim in claims if claim):
            if counts.get(file_id, claimed) >= claimed or handles.get(file_id) not in (None, unsealed.get(file_id)):
                continue
            if not last:
                raise FileNotFoundError(f"{file_id} has more entries than when it was read")
            journal_path = self._root.journal_path(file_id)
            short = CorruptFile(
                str(journal_path),
                "ends before entries that were durable when the next file began",
                expected=claimed,
                found=counts[file_id],
            )
            handles[file_id] = _damaged(file_id, UNSEALED, short)
        absent = listed.keys() - handles.keys() - counts.keys()
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
        if opened:
            # each file begins with the positions of the one before
            newest = max(opened.values(), key=lambda file: file.sequence)
            told = self._reads.get(newest.file_id)
            reads[newest.file_id] = reads_in(newest.metadata().source_positions) if told is None else told
        self._opened, self._unsealed, self._reads = opened, unsealed, reads
        return list(handles.values())

    def _listed(self, handles: dict[str, Handle], *, again: bool = False) -> dict[str, ListedFile]:
        try:
            return self._files.read(again=again) if self._files is not None else {}
        except CorruptFile as error:
            handles[LIST] = _damaged(LIST, LIST, error.with_traceback(None))
            return {}

    def _view(self, file_id: str, reads: dict[str, dict[str, int]]) -> UnsealedView | None:
        """Return the entries of a file; None: it has none. Add how much of topics was read to `reads`."""
        journal_path = self._root.journal_path(file_id)
        status = journal_path.stat()  # before the read: later appends are seen at the next look
        state = status.st_ino, status.st_size, status.st_mtime_ns
        known = self._unsealed.get(file_id)
        if known is not None and known.state == state:
            reads[file_id] = self._reads.get(file_id, {})
            return known
        journal = parse_journal(journal_path.read_bytes(), str(journal_path), file_id)
        if journal is not None:
            reads[file_id] = reads_in(journal.positions)
        if journal is None or not journal.count:
            return None
        if known is not None and known.count == journal.count:
            known.state, known.sealed = state, journal.sealed  # the same entries
            return known
        return UnsealedView(self._root.index_path(UNSEALED, file_id), journal, state)


def _damaged(file_id: str, place: str, error: Exception) -> DamagedFile:
    typed = error if isinstance(error, TieredIndexError) else CorruptFile(file_id, f"can't be read: {error}")
    return DamagedFile(file_id, place, typed)
