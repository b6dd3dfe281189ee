"""`root/files`: the list of unpublished files with entries, which the root must still have.

The folders have the root's files. The list detects a file that someone deleted. A file is added after its first entries
are durable, and removed before it is deleted. So after a crash the root may have a file that is not in the list, but
never lacks a file that is. The list is stored twice. If both copies are damaged, missing files are unknown: lookups
fail until `recover` deletes the list. If the list can't be written, the root has none. Threads: any; a lock protects
it. Only the holder of the root's lock may call `note` and `forget`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import zlib
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import asdict

from tiered_index.base.documents import Count, Crc32, Seconds, decoded, encoded
from tiered_index.errors import CorruptFile, TieredIndexError
from tiered_index.format.names import STATES, UNSEALED, file_id_of
from tiered_index.service.root import Root, disk_error, disk_errors

_log = logging.getLogger(__name__)

LIST = "files"


class ListedFile(Struct, frozen=True):
    """A file when the list was written.

    `seconds` are those of its first and last entry, inclusive. None: it may have more entries since.
    """

    lane: str
    count: Count
    seconds: tuple[Seconds, Seconds] | None = None


class _Files(Struct):
    files: dict[str, ListedFile]
    crc32: Crc32


class FileList:
    """The list of one root."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self.path = root.path / LIST
        self._lock = threading.RLock()
        self._last: dict[str, ListedFile] | None = {}  # None: both copies damaged
        self._state: tuple[int, int, int] | None = None  # the file's inode, size and time at the last read
        self._damage: CorruptFile | None = None  # of one copy or both

    def read(self, *, again: bool = False) -> dict[str, ListedFile]:
        """Return the list, by file id; `again`: read the file even if it looks unchanged.

        Raises `CorruptFile` if both copies are damaged, and typed errors of the disk.
        """
        try:
            status = self.path.stat()
            state = status.st_ino, status.st_size, status.st_mtime_ns
            with self._lock:
                if again or state != self._state:
                    self._decode(self.path.read_bytes())
                    self._state = state
                if self._last is None and self._damage is not None:
                    raise self._damage.with_traceback(None)
                return self._last or {}
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise disk_error(error, f"reading {self.path}") from error

    def check(self) -> None:
        """Raise `CorruptFile` if a copy of the list is damaged, and typed errors of the disk."""
        self.read(again=True)
        if self._damage is not None:
            raise self._damage.with_traceback(None)

    def forget(self) -> CorruptFile | None:
        """Delete the list if both copies are damaged, and return the damage. Raises typed errors of the disk."""
        try:
            self.read(again=True)
        except CorruptFile as error:
            with disk_errors(f"deleting {self.path}"):
                self._root.disk.unlink(self.path)
            return error
        return None

    def _decode(self, data: bytes) -> None:
        half = len(data) // 2
        self._last = self._damage = None
        for copy in (data[:half], data[half:]):
            with contextlib.suppress(CorruptFile):
                self._last = _parsed(copy, str(self.path))
                break
        if self._last is None:
            self._damage = CorruptFile(
                str(self.path),
                "the list of the root's files is damaged, so a deleted file would go unnoticed. Restore the list, "
                f"or do without it: `tiered-index recover --root {self._root.path}`",
            )
        elif data != _encoded(self._last) * 2:
            problem = "one of two copies of the list of the root's files is damaged: the writer's next start repairs it"
            self._damage = CorruptFile(str(self.path), problem)

    def note(self, listed: Callable[[], dict[str, ListedFile]]) -> None:
        """Write the files that `listed` returns as the list, durably, if it has other files.

        An unreadable list stays unchanged. Call this before you delete a file. Raises typed errors of the disk if the
        list would keep a file that `listed` no longer has.
        """
        with self._lock:
            # under the lock, so that an older list never replaces a newer one
            wanted = listed()
            if self._last is None or (wanted.keys() == self._last.keys() and self._damage is None):
                return
            try:
                self._root.write_file(self.path, [_encoded(wanted) * 2], f"writing {self.path}")
                self._last, self._damage = wanted, None
            except TieredIndexError as error:
                _log.warning("cannot write the list of files; a deleted file may go unnoticed: %s", error)
                if self._last.keys() <= wanted.keys():
                    return  # the root has all listed files
                with disk_errors(f"deleting {self.path}"):
                    self._root.disk.unlink(self.path)
                    self._root.disk.sync_folder(self._root.path)
                self._last = {}

    def gone(self) -> dict[str, ListedFile]:
        """Return the listed files that are in no folder of the root. Raises typed errors of the disk."""
        listed = self.read()
        with disk_errors(f"reading {self._root.path}"):
            there = {file_id_of(name) for state in STATES for name in self._root.names(state)}
        # read again after the folders: a file leaves the list before it is deleted
        return {file_id: listed[file_id] for file_id in (listed.keys() - there) & self.read(again=True).keys()}

    def damaged(self, file_id: str, place: str, lane: str) -> ListedFile | None:
        """Return what to list of a damaged file. For `listed` of `note`, which has the lock.

        None: it is the rest of a deletion, without its journal, and readers ignore it.
        """
        if (known := (self._last or {}).get(file_id)) is not None:
            return known
        is_rest = place == UNSEALED and not self._root.journal_path(file_id).exists()
        return None if is_rest else ListedFile(lane, 0)

    def missing(self, file_id: str, listed: ListedFile) -> CorruptFile:
        """Return the error for a listed file that is in no folder of the root."""
        return CorruptFile(
            str(self._root.index_path(UNSEALED, file_id)),
            f"{self.path} lists this file, with {listed.count} entries or more, but the root no longer has it. Someone "
            f"deleted it or its journal, or copied only a part of the root. Restore it, or give it up: "
            f"`tiered-index recover --root {self._root.path} --lost {file_id}`",
        )


def _encoded(files: dict[str, ListedFile]) -> bytes:
    listed = {file_id: asdict(files[file_id]) for file_id in sorted(files)}
    return encoded({"files": listed, "crc32": _crc32(files)}) + b"\n"


def _crc32(files: dict[str, ListedFile]) -> int:
    return zlib.crc32(encoded([[file_id, asdict(files[file_id])] for file_id in sorted(files)]))


def _parsed(data: bytes, file: str) -> dict[str, ListedFile]:
    listed = decoded(data, _Files, file, "the list of files")
    CorruptFile.unless_equal(file, "does not match its CRC32", listed.crc32, _crc32(listed.files))
    return listed.files
