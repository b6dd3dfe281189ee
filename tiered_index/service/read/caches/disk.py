"""The disk cache of directories and filters, verified at each read: one folder for any number of indexes.

```
folder/<index id>/<object name, "/" written as ",">.trailer|.filter
entry := bytes of the object; their CRC32
```

Objects never change under one name, so an entry is never stale. A CRC32 starts from the CRC32 of index, object and
kind. So an entry that was copied does not match either. A damaged entry is deleted and
fetched again. If it can't be deleted, it is logged once and ignored until it is replaced. An entry is a copy, so an
error in this folder never fails a lookup.

A CRC32 is not a signature: a process that can write an entry could hide answers. So only a regular file that
`DiskCache.trusts` is read. Anything else counts as damaged.

Entries of objects that the log no longer names are deleted, so erased entries disappear from filters and directories,
too. The folder has a bound in bytes; the entries that were used longest ago are deleted first. The time of use is that
of the file, which all processes share. Each process counts the bytes that it adds, and counts the whole folder again
after a small part of the bound. Threads and processes: any number; a rename makes an entry visible as a whole.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
import time
import zlib
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Literal, get_args

from tiered_index.base.locks import call_lock
from tiered_index.format.names import DATA_PREFIX
from tiered_index.storage.disk import TEMPORARY_PREFIX, make_path

# shortest time between updates of an entry's time of use
_TOUCH_S = 60.0
# a temporary file of this age was left by a crash
_LEFTOVER_S = 3600.0
# begin of an entry's name; other files are ignored
_ENTRY = DATA_PREFIX.replace("/", ",")
# a full cache is emptied to this part of its bound, so that not every new entry needs a scan
_SLACK = 0.9
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# 1 / 32 of the bound may be added before the folder is counted again
_COUNTED_AFTER = 32


class DiskCache:
    """A folder with a bound of `max_bytes`. `read_only`: it belongs to another process's root, and is not changed."""

    def __init__(self, folder: Path, max_bytes: int, *, read_only: bool = False) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.read_only = read_only
        self._lock = call_lock()
        self._size_bytes = self._uncounted_bytes = 0
        self._counted = False
        self._warned: set[str] = set()
        self._trusted = {os.geteuid(), 0}
        if read_only:
            with contextlib.suppress(OSError):
                # a reader of a root trusts the root's owner
                self._trusted.add(folder.parent.stat().st_uid)

    def trusts(self, status: os.stat_result) -> bool:
        """Return whether only trusted users can write a file or folder: this user, root, a read root's owner."""
        return (
            not stat.S_ISLNK(status.st_mode) and status.st_uid in self._trusted and not status.st_mode & _OTHERS_WRITE
        )

    def takes(self, size_bytes: int) -> bool:
        """Return whether an entry of `size_bytes` may be written: at most half of the bound."""
        return not self.read_only and size_bytes * 2 <= self.max_bytes

    def has_room(self, size_bytes: int) -> bool:
        """Return whether `size_bytes` are free without eviction, and without the part reserved for directories."""
        with self._lock:
            if not self._counted:
                self._count()
            return self._size_bytes + size_bytes <= self.max_bytes * _SLACK

    def touch(self, path: Path, status: os.stat_result) -> None:
        """Update an entry's time of use, unless it is recent."""
        if not self.read_only and abs(time.time() - status.st_mtime) >= _TOUCH_S:
            with contextlib.suppress(OSError):
                os.utime(path)

    def added(self, size_bytes: int) -> None:
        """Count the bytes of a new entry, and delete old entries if the bound is exceeded."""
        with self._lock:
            self._size_bytes += size_bytes
            self._uncounted_bytes += abs(size_bytes)
            known = self._counted and self._uncounted_bytes * _COUNTED_AFTER <= self.max_bytes
            if known and self._size_bytes <= self.max_bytes:
                return
            entries = self._count()
            if self._size_bytes <= self.max_bytes:
                return
            for _, size, path in entries:
                if self._size_bytes <= self.max_bytes * _SLACK:
                    break
                with contextlib.suppress(OSError):
                    os.unlink(path)
                    self._size_bytes -= size

    def _count(self) -> list[tuple[float, int, str]]:
        """Count all entries. Return them, the one used longest ago first."""
        entries = sorted(self._entries())
        self._size_bytes, self._uncounted_bytes, self._counted = sum(size for _, size, _ in entries), 0, True
        return entries

    def warn(self, what: str, error: OSError) -> None:
        """Log an error of the folder, once for each kind. Lookups continue without it."""
        text = f"{what}: {error.strerror}"
        with self._lock:
            new = text not in self._warned
            self._warned.add(text)
        if new:
            _log.warning("cannot %s the cache %s, lookups continue without it: %s", what, self.folder, error)

    def _entries(self) -> Iterator[tuple[float, int, str]]:
        """Yield (time of use, bytes, path) of all indexes' entries, and delete old temporary files."""
        for index in _scan(self.folder):
            if not index.is_dir(follow_symlinks=False):
                continue
            for entry in _scan(Path(index.path)):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if entry.name.startswith(TEMPORARY_PREFIX):
                        if status.st_mtime < time.time() - _LEFTOVER_S:
                            os.unlink(entry.path)
                    elif entry.name.startswith(_ENTRY) and entry.name.endswith((".trailer", ".filter")):
                        yield status.st_mtime, status.st_size, entry.path


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


Kind = Literal["trailer", "filter"]
_CRC_BYTES = 4
_log = logging.getLogger(__name__)


class CacheFolder:
    """The entries of the index `index_id` in a disk cache."""

    def __init__(self, cache: DiskCache, index_id: str) -> None:
        self._cache = cache
        self._mine = cache.folder / "".join(c if c.isalnum() or c in "-_" else "_" for c in index_id)
        self._index_id = index_id
        self._lock = call_lock()
        # damaged entries that could not be deleted, and were logged
        self._passed_over: set[Path] = set()

    def read(self, name: str, kind: Kind, length: int) -> bytes | None:
        """Return an object's verified entry of `length` bytes; None: there is none."""
        path = self._path(name, kind)
        try:
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode) or stat.S_ISFIFO(status.st_mode):
                self._damaged(path, "not a regular file")
                return None
            with path.open("rb", buffering=0) as handle:
                status = os.fstat(handle.fileno())
                if not self._cache.trusts(status):
                    self._damaged(path, "owned by another user, or writable by others")
                    return None
                if status.st_size != length + _CRC_BYTES:
                    self._damaged(path, "another length than the log says")
                    return None
                data = os.pread(handle.fileno(), length, 0)
                crc32 = os.pread(handle.fileno(), _CRC_BYTES, length)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._cache.warn("read", error)
            return None
        if self._crc32(name, kind, data) != crc32:
            self._damaged(path, "it does not match its CRC32")
            return None
        self._cache.touch(path, status)
        return data

    def write(self, name: str, kind: Kind, data: bytes | memoryview) -> bool:
        """Write an entry. Return whether it was written: an error of the disk is only logged."""
        size = len(data) + _CRC_BYTES
        if not len(data) or not self._cache.takes(size):
            return False
        path = self._path(name, kind)
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
        try:
            make_path(self._mine)
            if not self._cache.trusts(self._mine.lstat()):
                raise PermissionError(
                    errno.EPERM, "a folder of another user, a link, or writable by others", str(self._mine)
                )
            temporary.touch(0o644, exist_ok=False)
            with temporary.open("wb") as handle:
                handle.write(data)
                handle.write(self._crc32(name, kind, data))
            replaced = path.stat().st_size if path.exists() else 0
            with self._lock:
                # with the lock, because `forget_unnamed` could look for it in between in vain
                temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            self._cache.warn("write", error)
            return False
        self._cache.added(size - replaced)
        return True

    def takes(self, length: int) -> bool:
        """Return whether an entry of `length` bytes may be written."""
        return self._cache.takes(length + _CRC_BYTES)

    def has_room(self, length: int) -> bool:
        """Return whether an entry of `length` bytes would evict no other entry."""
        return self._cache.has_room(length + _CRC_BYTES)

    def forget_unnamed(self, named: Container[str]) -> None:
        """Delete the entries of objects that are not in `named`, of all processes, and forget notes about them."""
        with self._lock:
            self._passed_over = {path for path in self._passed_over if path.stem.replace(",", "/") in named}
            stems = {entry.name.rpartition(".")[0] for entry in _scan(self._mine)}
        gone = [name for stem in stems if stem.startswith(_ENTRY) and (name := stem.replace(",", "/")) not in named]
        for path in [self._path(name, kind) for name in gone for kind in get_args(Kind)]:
            with contextlib.suppress(OSError):
                if not self._cache.read_only:
                    size_bytes = path.lstat().st_size
                    path.unlink()
                    self._cache.added(-size_bytes)

    def _path(self, name: str, kind: Kind) -> Path:
        return self._mine / f"{name.replace('/', ',')}.{kind}"  # no object's name has a comma

    def _crc32(self, name: str, kind: Kind, data: bytes | memoryview) -> bytes:
        seed = zlib.crc32(f"{self._index_id}\n{name}\n{kind}".encode())
        return zlib.crc32(data, seed).to_bytes(_CRC_BYTES, "big")

    def _damaged(self, path: Path, problem: str) -> None:
        gone = False
        if not self._cache.read_only:
            with contextlib.suppress(OSError):
                path.unlink()
                gone = True
        with self._lock:
            known = path in self._passed_over
            (self._passed_over.discard if gone else self._passed_over.add)(path)
        if gone or not known:
            _log.warning("ignoring the cache entry %s: %s", path, problem)
