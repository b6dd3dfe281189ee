"""A disk that fails or crashes when told to: the local half of the fault layer.

    disk = FaultDisk()
    disk.fail("sync", nth=2, error=errno.EIO)     # the second sync from now on raises EIO
    disk.crash(nth=17, torn=True)                 # the 17th call of any kind never returns; a write is left half done
    disk.lose_unsynced()                          # after a crash: the power was cut, what was not synced is gone

Operations are the names in `PRIMITIVES`, or ``*`` for any; `nth` counts matching calls from now on (1: the next). After a crash every call
but `close` raises `SimulatedCrash`, as a dead process does nothing more. Only what went through this object is counted and lost; files that
were there before are durable. Nothing is really synced: durable is what this object remembers, and each sync copies the file, so files
should have some MiB at most. Threads: any number.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tiered_index.storage.base import Bytes
from tiered_index.storage.disk import Disk
from tiered_index.testing.turns import Turns

__all__ = ["PRIMITIVES", "FaultDisk", "SimulatedCrash"]

PRIMITIVES = (
    "create", "open_rw", "allocate", "pwrite", "truncate", "sync", "sync_folder", "rename", "link", "unlink", "make_folder",
    "remove_folder",
)  # fmt: skip
"""The calls that are counted and can be struck."""
_SECTOR_BYTES = 512


class SimulatedCrash(BaseException):
    """The process died here. Not an `Exception`, so that no handler of the code under test goes on working."""


@dataclass(slots=True)
class _Script:
    operation: str
    turns: Turns
    error: int | None
    after: bool
    torn: bool

    def matches(self, operation: str) -> bool:
        return self.operation in {"*", operation}


@dataclass(slots=True)
class _Inode:
    """A file that was created here. `path` is one present name, `synced` its durable bytes (None: never synced)."""

    path: Path
    synced: bytes | None = None


@dataclass(frozen=True, slots=True)
class _NameChange:
    """A change of names that no folder sync has confirmed yet."""

    removed: Path | None
    added: Path | None
    inode: int | None

    def touches(self, folder: Path) -> bool:
        return any(path is not None and path.parent == folder for path in (self.removed, self.added))


class FaultDisk(Disk):
    """The real file system, with scripted faults."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._scripts: list[_Script] = []
        self._calls: Counter[str] = Counter()
        self._crashed = False
        self._inodes: dict[int, _Inode] = {}  # by a number of our own: the system uses inode numbers again
        self._numbers: dict[int, int] = {}  # inode number -> ours, of the newest file with it
        self._durable: dict[Path, int] = {}  # durable names, of our numbers
        self._pending: list[_NameChange] = []

    # Scripts

    def fail(
        self, operation: str = "*", *, nth: int = 1, times: int | None = 1, error: int = errno.EIO, torn: bool = False
    ) -> None:
        """Raise `OSError(error)` before acting; `times` calls in a row (None: all from then on). `torn`: a pwrite writes half first."""
        self._add(_Script(operation, Turns(nth - 1, times), error, False, torn))

    def crash(self, operation: str = "*", *, nth: int = 1, after: bool = False, torn: bool = False) -> None:
        """Raise `SimulatedCrash` before acting, or `after`; `torn`: a pwrite writes half first. Every later call raises it too."""
        self._add(_Script(operation, Turns(nth - 1, 1), None, after, torn))

    def clear(self) -> None:
        """Forget every script; a crashed disk stays crashed."""
        with self._lock:
            self._scripts.clear()

    @property
    def crashed(self) -> bool:
        """Whether a crash has struck."""
        return self._crashed

    def calls(self, operation: str = "*") -> int:
        """Return how many calls of `operation` arrived so far, struck or not."""
        with self._lock:
            return self._calls.total() if operation == "*" else self._calls[operation]

    def lose_unsynced(self, rng: random.Random | None = None) -> None:
        """Bring the files to a state that a power cut could leave; call it when nobody has them open.

        Without `rng` everything unsynced is lost: bytes since a file's last sync, names since their folder's. With `rng` each sector of 512
        bytes and each name is kept or lost by chance.
        """
        with self._lock:
            durable = dict(self._durable)
            for change in self._pending:
                if rng is not None and rng.random() < 0.5:
                    _apply(change, durable)
            contents = {number: self._after_power_cut(number, rng) for number in self._inodes}
            names = {path for change in self._pending for path in (change.removed, change.added) if path is not None} | set(durable)
            for path in sorted(names):
                path.unlink(missing_ok=True)
                if path in durable:
                    path.write_bytes(contents[durable[path]])

    # Primitives

    def create(self, path: Path) -> int:
        """As the disk's."""
        with self._strike("create"):
            descriptor = super().create(path)
            number = self._remember(os.fstat(descriptor).st_ino, _Inode(path))
            self._pending.append(_NameChange(None, path, number))
            return descriptor

    def open_rw(self, path: Path) -> int:
        """As the disk's."""
        with self._strike("open_rw"):
            self._known(path)
            return super().open_rw(path)

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        """As the disk's."""
        with self._strike("allocate"):
            super().allocate(descriptor, size_bytes)

    def pwrite(self, descriptor: int, data: Bytes, position: int) -> None:
        """As the disk's; half of it where a script says `torn`."""
        half = memoryview(data).cast("B")[: memoryview(data).nbytes // 2]
        with self._strike("pwrite", torn=lambda: super(FaultDisk, self).pwrite(descriptor, half, position)):
            super().pwrite(descriptor, data, position)

    def truncate(self, descriptor: int, size_bytes: int) -> None:
        """As the disk's."""
        with self._strike("truncate"):
            super().truncate(descriptor, size_bytes)

    def sync(self, descriptor: int) -> None:
        """From here on the file's present bytes are durable."""
        with self._strike("sync"):
            status = os.fstat(descriptor)
            self._inodes[self._numbers[status.st_ino]].synced = os.pread(descriptor, status.st_size, 0)

    def sync_folder(self, folder: Path) -> None:
        """From here on the changes of names in `folder` are durable."""
        with self._strike("sync_folder"):
            for change in [change for change in self._pending if change.touches(folder)]:
                _apply(change, self._durable)
                self._pending.remove(change)

    def rename(self, source: Path, target: Path) -> None:
        """As the disk's."""
        with self._strike("rename"):
            number = self._known(source)
            if target.exists():
                self._known(target)
            super().rename(source, target)
            self._inodes[number].path = target
            self._pending.append(_NameChange(source, target, number))

    def link(self, source: Path, target: Path) -> None:
        """As the disk's."""
        with self._strike("link"):
            number = self._known(source)
            super().link(source, target)
            self._inodes[number].path = target
            self._pending.append(_NameChange(None, target, number))

    def unlink(self, path: Path) -> None:
        """As the disk's."""
        with self._strike("unlink"):
            if path.exists():
                self._known(path)
                super().unlink(path)
                self._pending.append(_NameChange(path, None, None))

    def make_folder(self, folder: Path) -> None:
        """As the disk's; folders are taken as durable at once."""
        with self._strike("make_folder"):
            super().make_folder(folder)

    def remove_folder(self, folder: Path) -> None:
        """As the disk's."""
        with self._strike("remove_folder"):
            super().remove_folder(folder)

    # Inside

    def _add(self, script: _Script) -> None:
        if script.turns.skip < 0 or script.operation not in {"*", *PRIMITIVES}:
            raise ValueError(f"no such fault: {script}")
        with self._lock:
            self._scripts.append(script)

    @contextmanager
    def _strike(self, operation: str, torn: object = None) -> Iterator[None]:
        with self._lock:
            if self._crashed:
                raise SimulatedCrash(f"{operation} after the crash")
            self._calls[operation] += 1
            struck = [script for script in self._scripts if script.matches(operation) and script.turns.strikes()]
            for script in struck:
                if script.torn and callable(torn):
                    torn()
                if script.error is not None:
                    raise OSError(script.error, os.strerror(script.error))
                if not script.after:
                    self._die(operation)
            yield
            if struck:
                self._die(operation)

    def _die(self, operation: str) -> None:
        self._crashed = True
        raise SimulatedCrash(f"scripted crash at {operation}, call {self._calls.total()}")

    def _remember(self, inode_number: int, inode: _Inode) -> int:
        number = len(self._inodes)
        self._inodes[number] = inode
        self._numbers[inode_number] = number
        return number

    def _known(self, path: Path) -> int:
        """Return our number of a file, remembering its bytes as durable where it was there before this disk was."""
        inode_number = path.stat().st_ino
        if inode_number not in self._numbers:
            self._durable[path] = self._remember(inode_number, _Inode(path, path.read_bytes()))
        return self._numbers[inode_number]

    def _after_power_cut(self, number: int, rng: random.Random | None) -> bytes:
        inode = self._inodes[number]
        synced = inode.synced or b""
        if rng is None or not inode.path.exists() or self._numbers.get(inode.path.stat().st_ino) != number:
            return synced
        present = inode.path.read_bytes()
        if present == synced:
            return synced
        length = len(present) if rng.random() < 0.5 else len(synced)
        old, new = synced.ljust(length, b"\0"), present.ljust(length, b"\0")
        sectors = range(0, length, _SECTOR_BYTES)
        return b"".join((new if rng.random() < 0.5 else old)[at : min(at + _SECTOR_BYTES, length)] for at in sectors)


def _apply(change: _NameChange, names: dict[Path, int]) -> None:
    if change.removed is not None:
        names.pop(change.removed, None)
    if change.added is not None and change.inode is not None:
        names[change.added] = change.inode
