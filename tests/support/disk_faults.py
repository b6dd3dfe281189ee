"""A disk with scripted faults and crashes: the local half of the fault layer.

    disk = FaultDisk()
    disk.fail("sync", nth=2, error=errno.EIO)     # the second sync from now on raises EIO
    disk.crash(nth=17, torn=True)                 # the 17th call of any kind crashes; a write is half done
    disk.lose_unsynced()                          # after a crash: a power cut, which loses unsynced bytes
    disk.copy(folder, other)                      # the files after a crash at this moment, in another folder

Operations are the names in `PRIMITIVES`, or ``*`` for any; `nth` counts matching calls from now on (1: the next). After
a crash every call but `close` raises `SimulatedCrash`, because a dead process does nothing more.

Only changes by this object are counted and lost; files that existed before are durable. Nothing is really synced: this
object keeps the durable bytes in memory, so files should have some MiB at most. A failed sync behaves as on Linux: its
bytes count as written, and reads return them until a power cut. No later sync writes them, unless they are written
again. Threads: any number.
"""

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

from tests.support.storage_faults import Faults, FaultTrigger
from tiered_index.storage.base import Bytes
from tiered_index.storage.disk import Disk

_ANY = (errno.EIO, errno.ENOSPC, errno.EROFS)
_NO_ROOM_NEEDED = (errno.EIO, errno.EROFS)
# The errors of each call on a disk that breaks, is full, or was made read-only by the system.
ERRORS = {
    "create": _ANY,
    "open_rw": _NO_ROOM_NEEDED,
    "allocate": (errno.EIO, errno.ENOSPC),
    "pwrite": _ANY,
    "truncate": _ANY,
    "sync": _ANY,
    "sync_folder": _ANY,
    "rename": _ANY,
    "link": _ANY,
    "unlink": _NO_ROOM_NEEDED,
    "make_folder": _ANY,
    "remove_folder": _NO_ROOM_NEEDED,
}
# The calls that are counted and can fail.
PRIMITIVES = tuple(ERRORS)
# The unsynced changes that remain after a power cut: none; those before one of them, which is torn; all changes of
# names and none of bytes, or the reverse; each change by chance; each name and each sector of 512 bytes by chance.
Kept = Literal["nothing", "prefix", "names", "bytes", "changes", "sectors"]
KEPT: tuple[Kept, ...] = get_args(Kept)
_SECTOR_BYTES = 512


class SimulatedCrash(BaseException):
    """The process died here. It is no `Exception`, so no handler of the tested code continues."""


# An error number, or a function of the operation: None lets the call succeed.
Error = int | Callable[[str], int | BaseException | None]


@dataclass(slots=True)
class _Script(FaultTrigger):
    error: Error | None
    after: bool
    torn: bool


@dataclass(frozen=True, slots=True)
class _Write:
    """Bytes of a file that no sync has confirmed yet. Without `data`, the file's length was set to `position`."""

    number: int
    position: int
    data: bytes | None

    def apply(self, content: bytearray) -> None:
        end = self.position + len(self.data or b"")
        content.extend(bytes(max(0, end - len(content))))
        if self.data is None:
            del content[end:]
        else:
            content[self.position : end] = self.data

    def sectors(self) -> list["_Write"]:
        """Return the write in pieces that a disk writes atomically."""
        if self.data is None:
            return [self]
        at, end = self.position, self.position + len(self.data)
        second = at // _SECTOR_BYTES * _SECTOR_BYTES + _SECTOR_BYTES
        cuts = [at, *range(second, end, _SECTOR_BYTES), end]
        return [_Write(self.number, a, self.data[a - at : b - at]) for a, b in pairwise(cuts)]


@dataclass(frozen=True, slots=True)
class _NameChange:
    """A change of names that no folder sync has confirmed yet."""

    removed: Path | None
    added: Path | None
    number: int | None

    def touches(self, folder: Path) -> bool:
        return any(path is not None and path.parent == folder for path in (self.removed, self.added))

    def apply(self, names: dict[Path, int]) -> None:
        if self.removed is not None:
            names.pop(self.removed, None)
        if self.added is not None and self.number is not None:
            names[self.added] = self.number


class FaultDisk(Faults[_Script], Disk):
    """The real file system, with scripted faults. `chance` decides the bytes that a failed sync writes (None: none).

    `watch` is called with each call's name before it acts, and with ``torn`` when half of a write is done.
    """

    def __init__(self, *, chance: random.Random | None = None, watch: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self.chance = chance
        self.watch = watch
        # Number of calls that have failed so far.
        self.struck = 0
        # Whether a crash has occurred.
        self.crashed = False
        self._synced: list[bytearray] = []  # Durable bytes by a unique number, because inode numbers are reused.
        self._numbers: dict[int, int] = {}  # Inode number -> unique number of the newest file with it.
        self._durable: dict[Path, int] = {}  # Durable names and their unique numbers.
        self._pending: list[_Write | _NameChange] = []  # In order.
        self._dropped = False  # Whether a failed sync has left bytes that no later sync writes.

    # Scripts

    def fail(
        self, operation: str = "*", *, nth: int = 1, times: int | None = 1, error: Error = errno.EIO, torn: bool = False
    ) -> None:
        """Raise `OSError(error)`, or the error itself, before the call acts, `times` calls in a row (None: all).

        `torn`: a pwrite writes half first.
        """
        self._add(_Script(operation, nth - 1, times, error, False, torn))

    def crash(self, operation: str = "*", *, nth: int = 1, after: bool = False, torn: bool = False) -> None:
        """Raise `SimulatedCrash` before the call acts, or `after`, and from then on.

        `torn`: a pwrite writes half first.
        """
        self._add(_Script(operation, nth - 1, 1, None, after, torn))

    @property
    def has_unsynced(self) -> bool:
        """Whether a power cut can lose anything."""
        return bool(self._pending) or self._dropped

    # Crashes

    def revive(self) -> None:
        """Let the next process work after a crash or a kill, without scripts. Call it when no file is open."""
        with self._lock:
            self._scripts.clear()
            self.crashed = False

    def copy(self, folder: Path, target: Path) -> "FaultDisk":
        """Copy all files below `folder` to the new folder `target`. Return a disk for the copy.

        It has the same unsynced changes. The copy has the files after a kill; `lose_unsynced` of the new disk makes
        them the files after a power cut.
        """
        with self._lock:
            shutil.copytree(folder, target)
            other = FaultDisk()

            def moved(path: Path | None) -> Path | None:
                return target / path.relative_to(folder) if path is not None else None

            other._synced = [bytearray(content) for content in self._synced]
            other._dropped = self._dropped
            other._durable = {target / path.relative_to(folder): number for path, number in self._durable.items()}
            other._pending = [
                change
                if isinstance(change, _Write)
                else _NameChange(moved(change.removed), moved(change.added), change.number)
                for change in self._pending
            ]
            for path in folder.rglob("*"):
                if (number := self._numbers.get(path.lstat().st_ino)) is not None:
                    other._numbers[(target / path.relative_to(folder)).lstat().st_ino] = number
            return other

    def lose_unsynced(self, rng: random.Random | None = None, unit: Kept = "sectors") -> None:
        """Bring the files into a state after a power cut. All of it is durable. Call it when no file is open.

        Without `rng` all unsynced changes are lost: bytes since a file's last sync, names since their folder's.
        With `rng`, `unit` decides which.
        """
        with self._lock:
            names = dict(self._durable)
            changes = [change for change in self._pending if isinstance(change, _NameChange)]
            seen = {path for change in changes for path in (change.removed, change.added) if path}
            for change in _left(self._pending, rng, unit) if rng is not None else ():
                if isinstance(change, _Write):
                    change.apply(self._synced[change.number])
                else:
                    change.apply(names)
            for path in sorted(seen | set(names)):
                if path.exists():
                    self._numbers.pop(path.stat().st_ino, None)
                    path.unlink()
            self._pending, self._dropped = [], False
            self._durable = names
            for path, number in sorted(names.items()):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self._synced[number])
                self._numbers[path.stat().st_ino] = number

    # Primitives

    def create(self, path: Path) -> int:
        with self._strike("create"):
            descriptor = super().create(path)
            number = self._remember(os.fstat(descriptor).st_ino, b"")
            self._pending.append(_NameChange(None, path, number))
            return descriptor

    def open_rw(self, path: Path) -> int:
        with self._strike("open_rw"):
            self._known(path)
            return super().open_rw(path)

    def allocate(self, descriptor: int, size_bytes: int, start: int = 0) -> None:
        with self._strike("allocate"):
            super().allocate(descriptor, size_bytes, start)
            self._pending.append(_Write(self._number(descriptor), os.fstat(descriptor).st_size, None))

    def pwrite(self, descriptor: int, data: Bytes, position: int) -> None:
        """Do as the disk does, but write only half of the bytes if a script has `torn`."""
        view = memoryview(data).cast("B")

        def write(part: memoryview) -> None:
            super(FaultDisk, self).pwrite(descriptor, part, position)
            self._pending.append(_Write(self._number(descriptor), position, bytes(part)))

        with self._strike("pwrite", torn=lambda: write(view[: len(view) // 2])):
            write(view)

    def truncate(self, descriptor: int, size_bytes: int) -> None:
        with self._strike("truncate"):
            super().truncate(descriptor, size_bytes)
            self._pending.append(_Write(self._number(descriptor), size_bytes, None))

    def sync(self, descriptor: int) -> None:
        """Record the file's present bytes as durable, except those of a failed sync."""
        with self._strike("sync", failed=lambda: self._write_back(descriptor, failed=True)):
            self._write_back(descriptor)

    def sync_folder(self, folder: Path) -> None:
        """Record the changes of names in `folder` as durable."""
        with self._strike("sync_folder"):
            for change in self._take(lambda c: isinstance(c, _NameChange) and c.touches(folder)):
                assert isinstance(change, _NameChange)
                change.apply(self._durable)

    def rename(self, source: Path, target: Path) -> None:
        with self._strike("rename"):
            number = self._known(source)
            if target.exists():
                self._known(target)
            super().rename(source, target)
            self._pending.append(_NameChange(source, target, number))

    def link(self, source: Path, target: Path) -> None:
        with self._strike("link"):
            number = self._known(source)
            super().link(source, target)
            self._pending.append(_NameChange(None, target, number))

    def unlink(self, path: Path) -> None:
        with self._strike("unlink"):
            if path.exists():
                self._known(path)
                super().unlink(path)
                self._pending.append(_NameChange(path, None, None))

    def make_folder(self, folder: Path) -> None:
        """Do as the disk does. New folders count as durable."""
        with self._strike("make_folder"):
            super().make_folder(folder)

    def remove_folder(self, folder: Path) -> None:
        with self._strike("remove_folder"):
            super().remove_folder(folder)

    # Internal

    def _add(self, script: _Script) -> None:
        if script.operation not in {"*", *PRIMITIVES}:
            raise ValueError(f"no such fault: {script}")
        super()._add(script)

    @contextmanager
    def _strike(
        self, operation: str, *, torn: Callable[[], None] | None = None, failed: Callable[[], None] | None = None
    ) -> Iterator[None]:
        with self._lock:
            if self.crashed:
                raise SimulatedCrash(f"{operation} after the crash")
            if self.watch is not None:
                self.watch(operation)
                if torn is not None:
                    torn()
                    self.watch("torn")
            self._calls[operation] += 1
            struck = [script for script in self._scripts if script.strikes(operation)]
            for script in struck:
                error = script.error(operation) if callable(script.error) else script.error
                if script.error is not None and error is None:
                    continue
                if script.torn and torn is not None:
                    torn()
                if error is not None:
                    if failed is not None:
                        failed()
                    self.struck += 1
                    raise OSError(error, os.strerror(error)) if isinstance(error, int) else error
                if not script.after:
                    self._die(operation)
            yield
            if any(script.after for script in struck):
                self._die(operation)

    def _die(self, operation: str) -> None:
        self.crashed = True
        raise SimulatedCrash(f"scripted crash at {operation}, call {self._calls.total()}")

    def _remember(self, inode_number: int, content: bytes) -> int:
        self._synced.append(bytearray(content))
        self._numbers[inode_number] = len(self._synced) - 1
        return len(self._synced) - 1

    def _known(self, path: Path) -> int:
        """Return the unique number of a file. If the file is older than this disk, its bytes are durable."""
        inode_number = path.stat().st_ino
        if inode_number not in self._numbers:
            self._durable[path] = self._remember(inode_number, path.read_bytes())
        return self._numbers[inode_number]

    def _number(self, descriptor: int) -> int:
        return self._numbers[os.fstat(descriptor).st_ino]

    def _take(self, wanted: Callable[[_Write | _NameChange], bool]) -> list[_Write | _NameChange]:
        """Remove and return the pending changes that are `wanted`."""
        taken = [change for change in self._pending if wanted(change)]
        self._pending = [change for change in self._pending if not wanted(change)]
        return taken

    def _write_back(self, descriptor: int, *, failed: bool = False) -> None:
        """Make a file's unsynced bytes durable. If `failed`, only lengths and the bytes that `chance` chooses."""
        number = self._number(descriptor)
        self._dropped = self._dropped or failed
        for change in self._take(lambda c: isinstance(c, _Write) and c.number == number):
            assert isinstance(change, _Write)
            for piece in change.sectors() if failed else [change]:
                if not failed or piece.data is None or (self.chance is not None and self.chance.random() < 0.5):
                    piece.apply(self._synced[number])


def _left(pending: list[_Write | _NameChange], rng: random.Random, unit: Kept) -> list[_Write | _NameChange]:
    """Return the changes of `pending` that a power cut leaves, in order."""
    if unit == "names":
        return [change for change in pending if isinstance(change, _NameChange)]
    if unit == "bytes":
        return [change for change in pending if isinstance(change, _Write)]
    if unit == "changes":
        return [change for change in pending if rng.random() < 0.5]
    pieces = [piece for change in pending for piece in (change.sectors() if isinstance(change, _Write) else [change])]
    if unit == "sectors":
        return [piece for piece in pieces if rng.random() < 0.5]
    if unit == "prefix" and pieces:
        return pieces[: rng.randrange(len(pieces) + 1)]
    return []
