"""Objects as files in a folder (`file:///dir`): the storage of one machine, or of a mounted file system.

An object is one file. When a call returns, its effect is durable; after a crash or an error the object is the old or
the new one. Other files in the folder (other spellings, symbolic links, pipes) are not listed and not touched; a call
with their name raises. The folder itself may be a symbolic link. A full disk or quota is `DiskFull`. Threads: any
number, in any number of processes.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self
from urllib.parse import SplitResult

from tiered_index.clock import Clock, SystemClock
from tiered_index.errors import ObjectExists, ObjectNotFound, StorageUnavailable, TieredIndexError
from tiered_index.storage.base import (
    PART_BYTES,
    BufferedWriter,
    Bytes,
    ObjectInfo,
    OpenObject,
    SizedStorage,
    Writer,
    check_name,
    check_prefix,
)
from tiered_index.storage.disk import LOST_AND_FOUND, Disk, local_path, typed_errors
from tiered_index.storage.local.files import WORK_FOLDER, DurableFiles, check_regular, encode, walk

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# Most paths of objects in memory
_WAYS = 1 << 14


class LocalStorage(SizedStorage):
    """Objects below `folder`, which is made on the first write; a missing folder is an empty storage."""

    has_server = False

    def __init__(self, folder: Path, *, disk: Disk | None = None, clock: Clock | None = None) -> None:
        # Path.absolute() keeps "..", resolve() follows links
        self.folder = Path(os.path.abspath(folder))  # noqa: PTH100
        self.uri = self.folder.as_uri()
        self._disk = disk or Disk()
        self._files = DurableFiles(self.folder, self._disk)
        self._clock = clock  # in tests, in place of the file system's
        self._ways: dict[str, str] = {}

    @classmethod
    def from_uri(cls, uri: SplitResult, options: Any) -> Self:
        """Return the storage of a folder."""
        return cls(local_path(uri, "file:///dir"))

    def children(self) -> Iterator[LocalStorage]:
        """Yield the storages in folders of this one, in order of name; not the folders of its own objects."""
        with typed_errors(f"listing {self.folder}"):
            try:
                names = sorted(entry.name for entry in os.scandir(self.folder) if entry.is_dir())
            except FileNotFoundError:
                return
        for name in names:
            if not (name.endswith("%") or name.startswith(".") or name == LOST_AND_FOUND):
                yield LocalStorage(self.folder / name, disk=self._disk)

    def open_now(self, name: str, size_bytes: int) -> OpenObject | None:
        """As `Storage.open_now`, by a few system calls. The path is checked for links only once."""
        if type(self).get_range is not LocalStorage.get_range:
            return None
        try:
            if (path := self._ways.get(name)) is None:
                if len(self._ways) >= _WAYS:
                    self._ways.clear()
                path = self._ways[name] = str(self._path(name))
            descriptor = os.open(path, _FLAGS)
        except (OSError, ValueError, TieredIndexError):
            return None
        try:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_size == size_bytes:
                return OpenObject(descriptor)
        except OSError:
            pass
        os.close(descriptor)
        return None

    def put(self, name: str, data: Bytes) -> None:
        """Store `data` under `name`: write a temporary file, sync it, rename it, sync the folder."""
        with self.open_writer(name) as writer:
            writer.write(data)

    def put_if_absent(self, name: str, data: Bytes) -> None:
        """Store `data` if `name` does not exist; a hard link decides between processes. Raises `ObjectExists`."""
        target = self._path(name)
        if os.path.lexists(target):
            raise ObjectExists(name, str(self.folder))  # only saves a write; the link decides
        with _LocalWriter(name, target, self._files, absent=name) as writer:
            writer.write(data)

    def settle(self, name: str) -> None:
        """Write the object again: a second sync does not repeat one that failed."""
        size = self.head(name).size_bytes
        with self.open_writer(name) as writer:
            for at in range(0, size, PART_BYTES):
                writer.write(self.get_range(name, at, min(PART_BYTES, size - at)))

    def head(self, name: str) -> ObjectInfo:
        """Return the object's size and the file's time of change."""
        path = self._path(name)
        with typed_errors(f"looking at {name!r}"):
            try:
                status = path.lstat()
            except FileNotFoundError as error:
                raise ObjectNotFound(name, str(self.folder)) from error
            check_regular(path, status)
        return ObjectInfo(name, status.st_size, status.st_mtime_ns // 1_000_000)

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield objects in order of name. A folder is read when the listing reaches it."""
        check_prefix(prefix, start_after)
        with typed_errors(f"listing {self.folder}"):
            yield from walk(self.folder, prefix, start_after)

    def delete_many(self, names: Iterable[str]) -> None:
        """Remove objects durably; sync each of their folders once, and remove it if it is empty."""
        paths = [self._path(name) for name in names]
        with typed_errors(f"deleting from {self.folder}"):
            for path in paths:
                self._disk.unlink(path)
            for parent in sorted({path.parent for path in paths}):
                self._files.sync_removed(parent)
                self._files.drop_empty(parent)

    def open_writer(self, name: str) -> Writer:
        """As `Storage.open_writer`; bytes beyond the first `PART_BYTES` are in a hidden file meanwhile."""
        return _LocalWriter(name, self._path(name), self._files)

    def now_ms(self) -> int:
        """Return the file system's time, which may be a file server's; this machine's if the folder is read-only."""
        if self._clock is not None:
            return self._clock.now_ms()
        with contextlib.suppress(OSError):
            os.utime(self.folder)
            return self.folder.stat().st_mtime_ns // 1_000_000
        return SystemClock().now_ms()

    def purge(self, older_than_ms: int) -> tuple[str, ...]:
        """Remove old half-made files; return those that are too new to remove."""
        with typed_errors(f"sweeping {self.folder}"):
            self._files.sweep(older_than_ms)
            return tuple(f"{WORK_FOLDER}/{name}" for name in self._disk.names(self.folder / WORK_FOLDER))

    def _path(self, name: str) -> Path:
        path = self.folder / encode(check_name(name))
        with typed_errors(f"looking for {name!r}"):
            self._files.check_way(path)
        return path

    def _read(self, name: str, extent: Callable[[int], tuple[int, int]]) -> tuple[bytes, int]:
        with typed_errors(f"reading {name!r}"):
            path = self._path(name)
            try:
                # `_FLAGS` has O_NONBLOCK: opening a pipe must not wait
                descriptor = os.open(path, _FLAGS)
            except FileNotFoundError as error:
                raise ObjectNotFound(name, str(self.folder)) from error
            try:
                status = os.fstat(descriptor)
                check_regular(path, status)
                return _read(name, descriptor, *extent(status.st_size)), status.st_size
            finally:
                os.close(descriptor)


class _LocalWriter(BufferedWriter):
    """Writes a temporary file, which gets its name at the end. With `absent`, the name must not exist then."""

    def __init__(self, name: str, target: Path, files: DurableFiles, *, absent: str | None = None) -> None:
        super().__init__(name)
        self._target, self._files, self._disk, self._absent = target, files, files.disk, absent
        self._open: tuple[Path, int] | None = None

    def _send_part(self) -> None:
        """Write the part to the temporary file, and sync it: a sync at the end only would take long."""
        with typed_errors(f"writing {self.name!r}"):
            if self._open is None:
                self._open = self._files.create()
            self._disk.pwrite(self._open[1], self._held, self._sent_bytes)
            self._disk.sync(self._open[1])

    def _finish(self) -> None:
        self._send()
        assert self._open is not None
        (temporary, descriptor), self._open = self._open, (self._open[0], -1)
        with typed_errors(f"writing {self.name!r}"):
            self._disk.close(descriptor)
            self._files.name_durably(temporary, self._target, self._absent)
        self._drop()

    def _drop(self) -> None:
        super()._drop()
        (temporary, descriptor), self._open = self._open or (None, -1), None
        with contextlib.suppress(OSError):  # a leftover is invisible and swept by age
            if descriptor >= 0:
                self._disk.close(descriptor)
            if temporary is not None:
                self._disk.unlink(temporary)


def _read(name: str, descriptor: int, start: int, length: int) -> bytes:
    data = os.pread(descriptor, length, start)
    # Linux reads at most 2^31 - 4096 bytes a call
    while len(data) < length and (more := os.pread(descriptor, length - len(data), start + len(data))):
        data += more
    if len(data) != length:
        raise StorageUnavailable(f"{name!r} ended after {len(data)} of {length} bytes from {start}")
    return data
