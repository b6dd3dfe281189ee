"""`root/files`: the unpublished files with entries, which the root must still have.

The folders decide what a root holds, and this list is a check of them: without it a file that somebody deletes would
never be missed. A file enters the list once its first entries are durable, and leaves it before it is deleted. So after
a crash a file may be there that is not listed, but a listed file is never gone without a reason. The file has the list
twice. Where both copies are damaged, nobody knows which files are missing: lookups fail until `recover` forgets it. A
list that can't be written is no list. Threads: any, by a lock; only the holder of the root's lock may call `note` and
`forget`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass

from tiered_index.documents import COUNT, CRC32, SECONDS, checked, load, map_of, nullable, record, text, tuple_of
from tiered_index.errors import CorruptFile, TieredIndexError
from tiered_index.format.names import STATES, UNSEALED, file_id_of
from tiered_index.service.root import Root, disk_error

_log = logging.getLogger(__name__)

LIST = "files"


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file as it was when the list was written. `seconds` are its first and its last, inclusive; None: it may have
    taken more entries since.
    """

    lane: str
    count: int
    seconds: tuple[int, int] | None = None


_FILES = record(
    lambda files, crc32: (files, crc32),
    files=map_of(record(ListedFile, lane=text(), count=COUNT, seconds=nullable(tuple_of(SECONDS, SECONDS)))),
    crc32=CRC32,
)


class FileList:
    """The list of one root."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self.path = root.path / LIST
        self._lock = threading.Lock()
        self._last: dict[str, ListedFile] | None = {}  # None: both copies are damaged
        self._state: tuple[int, int, int] | None = None  # inode, size and time of what was read last
        self._damage: CorruptFile | None = None  # of a copy, or of both

    def read(self, *, again: bool = False) -> dict[str, ListedFile]:
        """Return the list, by file id; `again`: even where it looks as it did. Raises `CorruptFile` where both copies
        are damaged, and typed errors of the disk.
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
        """Raise `CorruptFile` where a copy of the list is damaged, and typed errors of the disk."""
        self.read(again=True)
        if self._damage is not None:
            raise self._damage.with_traceback(None)

    def forget(self) -> CorruptFile | None:
        """Delete a list if both copies are damaged; return the damage. Raises typed errors of the disk."""
        try:
            self.read(again=True)
        except CorruptFile as error:
            try:
                self._root.disk.unlink(self.path)
            except OSError as failed:
                raise disk_error(failed, f"deleting {self.path}") from failed
            return error
        return None

    def _decode(self, data: bytes) -> None:
        half = len(data) // 2
        self._last = self._damage = None
        # earlier versions wrote one copy
        for copy in (data, data[:half], data[half:]):
            with contextlib.suppress(CorruptFile):
                self._last = _parsed(copy, str(self.path))
                break
        if self._last is None:
            self._damage = CorruptFile(
                str(self.path),
                "the list of the root's files is damaged: nobody knows whether one of them was deleted. Put it back, "
                f"or do without it: `tiered-index recover --root {self._root.path}`",
            )
        elif data not in (line := _encoded(self._last), line * 2):
            problem = "one of two copies of the list of the root's files is damaged: the writer's next start repairs it"
            self._damage = CorruptFile(str(self.path), problem)

    def note(self, listed: Callable[[], dict[str, ListedFile]]) -> None:
        """Make the list what `listed` returns, durably, where other files are among them; leave a list that can't be
        read as it is. Call it before a file is deleted. Raises typed errors of the disk where a file that is no longer
        listed would stay in the list.
        """
        with self._lock:
            # under the lock: a list that was made before another one must not replace it
            wanted = listed()
            if self._last is None or (wanted.keys() == self._last.keys() and self._damage is None):
                return
            try:
                self._root.write_file(self.path, [_encoded(wanted) * 2], f"writing {self.path}")
                self._last, self._damage = wanted, None
            except TieredIndexError as error:
                _log.warning("a file that somebody deletes may go unnoticed: %s", error)
                if self._last.keys() <= wanted.keys():
                    return  # what is listed is there
                try:
                    self._root.disk.unlink(self.path)
                except OSError as failed:
                    raise disk_error(failed, f"deleting {self.path}") from failed
                self._last = {}

    def gone(self) -> dict[str, ListedFile]:
        """Return the listed files that no folder of the root has. Raises typed errors of the disk."""
        listed = self.read()
        try:
            there = {file_id_of(name) for state in STATES for name in self._root.names(state)}
        except OSError as error:
            raise disk_error(error, f"reading {self._root.path}") from error
        # again, behind the folders: a file leaves the list before it is deleted
        return {file_id: listed[file_id] for file_id in (listed.keys() - there) & self.read(again=True).keys()}

    def last(self, file_id: str) -> ListedFile | None:
        """Return a file of the list as it was read or written last. For `listed` of `note`, which holds the lock."""
        return (self._last or {}).get(file_id)

    def missing(self, file_id: str, listed: ListedFile) -> CorruptFile:
        """Return the error of a listed file that is in none of the root's folders."""
        return CorruptFile(
            str(self._root.index_path(UNSEALED, file_id)),
            f"{self.path} lists this file, of {listed.count} entries or more, and the root has it no more: it, or its "
            f"journal, was deleted by hand, or the root was copied in part. Put it back, or give it up: "
            f"`tiered-index recover --root {self._root.path} --lost {file_id}`",
        )


def _encoded(files: dict[str, ListedFile]) -> bytes:
    listed = {file_id: asdict(files[file_id]) for file_id in sorted(files)}
    return json.dumps({"files": listed, "crc32": _crc32(files)}).encode() + b"\n"


def _crc32(files: dict[str, ListedFile]) -> int:
    return zlib.crc32(json.dumps([[file_id, asdict(files[file_id])] for file_id in sorted(files)]).encode())


def _parsed(data: bytes, file: str) -> dict[str, ListedFile]:
    files, crc32 = checked(_FILES, load(data, file, "the list of files"), file, "the list of files")
    CorruptFile.unless_equal(file, "does not match its CRC32", crc32, _crc32(files))
    return dict(files)
