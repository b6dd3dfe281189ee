"""Objects as files in a folder (`file:///dir`): the storage of one machine, or of a mounted file system.

An object is one file. When a call returns, its effect is durable; after a crash or an error the object is the old or
the new one. Other files in the folder (other spellings, symbolic links, pipes) are not listed and not touched; a call
with their name raises. The folder itself may be a symbolic link. A full disk or quota is `DiskFull`. Threads: any
number, in any number of processes.

A file appears under its final name whole and synced, or not at all. Half-made files are in one hidden folder, which no
listing shows. Every folder of a path is made, and its parent synced, before the file. A folder directly below the
storage's is never removed, so `LocalStorage` remembers that it is durable. One sync is enough for all that are there.
A deeper folder is removed with its last file.

The last segment of an object's name is a file. Every earlier one is a folder whose name ends in ``%``, a character that
object names can't hold: ``a`` and ``a/b`` are ``a`` and ``a%/b``. A path that is no object's is never listed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import SplitResult

from tiered_index.base.clock import Clock, SystemClock
from tiered_index.errors import ObjectExists, ObjectNotFound, StorageMisconfigured, StorageUnavailable, TieredIndexError
from tiered_index.storage.base import (
    PART_BYTES,
    SEGMENT,
    BufferedWriter,
    Bytes,
    ObjectInfo,
    OpenObject,
    SizedStorage,
    Writer,
    check_name,
    check_prefix,
)
from tiered_index.storage.disk import LOST_AND_FOUND, NOT_ALLOWED, TEMPORARY_PREFIX, Disk, local_path, typed_errors

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# Most paths of objects in memory
_WAYS = 1 << 14
_WORK_FOLDER = ".%work"
# the folder can't be opened, or its file system has no sync of folders
_NO_SYNC = {*NOT_ALLOWED, errno.EINVAL, errno.EOPNOTSUPP}
_SEGMENT = re.compile(SEGMENT)
_T = TypeVar("_T")


class LocalStorage(SizedStorage):
    """Objects below `folder`, which is made on the first write; a missing folder is an empty storage."""

    has_server = False

    def __init__(self, folder: Path, *, disk: Disk | None = None, clock: Clock | None = None) -> None:
        # Path.absolute() keeps "..", resolve() follows links
        self.folder = Path(os.path.abspath(folder))  # noqa: PTH100
        self.uri = self.folder.as_uri()
        self._disk = disk or Disk()
        # no lock: each add or test is atomic, and a lost race costs one more sync
        self._durable: set[Path] = set()
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
        with _LocalWriter(self, name, target, if_absent=True) as writer:
            writer.write(data)

    def settle(self, name: str) -> None:
        """Write the object again, with its time: a second sync does not repeat one that failed."""
        before = self.head(name)
        with self.open_writer(name) as writer:
            for at in range(0, before.size_bytes, PART_BYTES):
                writer.write(self.get_range(name, at, min(PART_BYTES, before.size_bytes - at)))
        # otherwise what a record has removed would be young again after each start
        with contextlib.suppress(OSError):
            os.utime(self._path(name), ns=(before.modified_ms * 1_000_000,) * 2)

    def head(self, name: str) -> ObjectInfo:
        """Return the object's size and the file's time of change."""
        path = self._path(name)
        with typed_errors(f"looking at {name!r}"):
            try:
                status = path.lstat()
            except FileNotFoundError as error:
                raise ObjectNotFound(name, str(self.folder)) from error
            _check_regular(path, status)
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
                self._sync_removed(parent)
                # and its empty parents, but none directly below the storage's folder
                with contextlib.suppress(OSError):
                    while self.folder not in (parent, parent.parent):
                        self._disk.remove_folder(parent)
                        parent = parent.parent

    def open_writer(self, name: str) -> Writer:
        """As `Storage.open_writer`; bytes beyond the first `PART_BYTES` are in a hidden file meanwhile."""
        return _LocalWriter(self, name, self._path(name))

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
        folder = self.folder / _WORK_FOLDER
        with typed_errors(f"sweeping {self.folder}"):
            _refuse_link(folder)
            for name in self._disk.names(folder):
                with contextlib.suppress(FileNotFoundError):
                    changed_ms = (folder / name).stat().st_mtime_ns // 1_000_000
                    if name.startswith(TEMPORARY_PREFIX) and changed_ms < older_than_ms:
                        self._disk.unlink(folder / name)
            return tuple(f"{_WORK_FOLDER}/{name}" for name in self._disk.names(folder))

    def _path(self, name: str) -> Path:
        """Return an object's path. Raises `StorageMisconfigured` if a folder on the way is a symbolic link."""
        path = self.folder / encode(check_name(name))
        with typed_errors(f"looking for {name!r}"):
            folder = path.parent
            while folder != self.folder:
                _refuse_link(folder)
                folder = folder.parent
        return path

    def _make_folder(self, folder: Path) -> None:
        """Make the storage's folder, or one below it, and its missing parents, durably."""
        if folder in self._durable:
            return
        if folder == self.folder:
            missing = [path for path in (folder, *folder.parents) if not path.exists()]
            for path in reversed(missing):
                self._disk.make_folder(path)
                self._disk.sync_folder(path.parent)
            if not missing:
                # as below; the parent of an existing folder may be one that nobody can sync
                try:
                    self._disk.sync_folder(folder.parent)
                except OSError as error:
                    if error.errno not in _NO_SYNC:
                        raise
            self._durable.add(folder)
            return
        _refuse_link(folder)
        self._make_folder(folder.parent)
        self._disk.make_folder(folder)
        beside: list[Path] = []
        if folder.parent == self.folder:
            with os.scandir(self.folder) as entries:
                beside += [self.folder / entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        # Also for an existing folder: another process may have made it without syncing its parent yet.
        self._disk.sync_folder(folder.parent)
        # one sync for all folders that were there before it
        self._durable.update(beside)

    def _sync_removed(self, folder: Path) -> None:
        """Make removals from `folder` durable, even if the folder itself was removed."""
        while folder != self.folder.parent:
            try:
                self._disk.sync_folder(folder)
                return
            except FileNotFoundError:
                folder = folder.parent

    def _in_folder(self, folder: Path, act: Callable[[], _T]) -> _T:
        """Make a folder, and return `act()`. Repeat both if another process removed one of the folders meanwhile."""
        try:
            self._make_folder(folder)
            return act()
        except FileNotFoundError:
            self._durable.clear()
            self._make_folder(folder)
            return act()

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
                _check_regular(path, status)
                return _read(name, descriptor, *extent(status.st_size)), status.st_size
            finally:
                os.close(descriptor)


class _LocalWriter(BufferedWriter):
    """Writes a temporary file, which gets its name at the end. With `if_absent`, the name must not exist then."""

    def __init__(self, storage: LocalStorage, name: str, target: Path, *, if_absent: bool = False) -> None:
        super().__init__(name)
        self._storage, self._disk, self._target, self._if_absent = storage, storage._disk, target, if_absent
        self._open: tuple[Path, int] | None = None

    def _send_part(self) -> None:
        """Write the part to the temporary file, and sync it: a sync at the end only would take long."""
        with typed_errors(f"writing {self.name!r}"):
            if self._open is None:
                work = self._storage.folder / _WORK_FOLDER
                path = work / f"{TEMPORARY_PREFIX}{os.getpid()}-{uuid.uuid4().hex}"
                self._open = path, self._storage._in_folder(work, lambda: self._disk.create(path))
            self._disk.pwrite(self._open[1], self._held, self._sent_bytes)
            self._disk.sync(self._open[1])

    def _finish(self) -> None:
        self._send()
        assert self._open is not None
        (temporary, descriptor), self._open = self._open, (self._open[0], -1)
        with typed_errors(f"writing {self.name!r}"):
            self._disk.close(descriptor)
            self._storage._in_folder(self._target.parent, lambda: self._name(temporary))
        self._drop()

    def _name(self, temporary: Path) -> None:
        """Give the synced file its name, durably; an error leaves the old or the new file."""
        if self._if_absent:
            # of racing processes one succeeds
            try:
                self._disk.link(temporary, self._target)
            except FileExistsError as error:
                raise ObjectExists(self.name, str(self._storage.folder)) from error
        else:
            self._disk.rename(temporary, self._target)
        self._disk.sync_folder(self._target.parent)

    def _drop(self) -> None:
        super()._drop()
        (temporary, descriptor), self._open = self._open or (None, -1), None
        with contextlib.suppress(OSError):  # a leftover is invisible and swept by age
            if descriptor >= 0:
                self._disk.close(descriptor)
            if temporary is not None:
                self._disk.unlink(temporary)


def _check_regular(path: Path, status: os.stat_result) -> None:
    """Raise `StorageMisconfigured` if the path of an object is a link, a pipe or the like."""
    if not stat.S_ISREG(status.st_mode):
        raise StorageMisconfigured(f"{path} is not a regular file, as every object must be: remove it")


def _refuse_link(folder: Path) -> None:
    if folder.is_symlink():
        raise StorageMisconfigured(f"{folder} is a symbolic link, which a storage does not follow: use a real folder")


def _read(name: str, descriptor: int, start: int, length: int) -> bytes:
    data = os.pread(descriptor, length, start)
    # Linux reads at most 2^31 - 4096 bytes a call
    while len(data) < length and (more := os.pread(descriptor, length - len(data), start + len(data))):
        data += more
    if len(data) != length:
        raise StorageUnavailable(f"{name!r} ended after {len(data)} of {length} bytes from {start}")
    return data


def encode(name: str) -> Path:
    """Return the relative path of object `name` (a valid name)."""
    return Path(name.replace("/", "%/"))


def walk(path: Path, prefix: str, start_after: str, stem: str = "") -> Iterator[ObjectInfo]:
    """Yield the objects under `path` in order of whole name, a folder at a time. Their names begin with `stem`.

    The sort key of an object is ``text``, of a folder ``text/``: then every name below a folder sorts between its
    neighbours.
    """
    entries_by_name: dict[str, os.DirEntry[str]] = {}
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                is_folder = entry.is_dir(follow_symlinks=False)
                if not is_folder and stem + entry.name <= start_after:
                    # most files of a listing that starts near the end
                    continue
                text = entry.name.removesuffix("%") if is_folder else entry.name
                if (is_folder and text == entry.name) or not _SEGMENT.fullmatch(text):
                    continue
                name = stem + text + "/" * is_folder
                is_listed = name.startswith(prefix) and name > start_after and entry.is_file(follow_symlinks=False)
                if is_listed or (is_folder and _may_hold(name, prefix, start_after)):
                    entries_by_name[name] = entry
    except FileNotFoundError:
        return  # removed since its parent was read
    for name, entry in sorted(entries_by_name.items()):
        if name.endswith("/"):
            yield from walk(Path(entry), prefix, start_after, name)
        else:
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                yield ObjectInfo(name, status.st_size, status.st_mtime_ns // 1_000_000)


def _may_hold(stem: str, prefix: str, start_after: str) -> bool:
    """Return whether a name that starts with `stem` can start with `prefix` and sort after `start_after`."""
    return (stem.startswith(prefix) or prefix.startswith(stem)) and (stem > start_after or start_after.startswith(stem))
