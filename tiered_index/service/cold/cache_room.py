"""The room of a local cache: one folder with a bound in bytes over the entries of all indexes in it.

What was used longest ago goes first. A time of use is the file's own time, so that it is known to every process that shares the folder.
Each process counts what it adds; others add, too, so all is counted again after a small part of the bound.
Threads: any number.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tiered_index.format.names import DATA_PREFIX
from tiered_index.service.cold.held_room import HeldRoom
from tiered_index.storage.disk import TEMPORARY_PREFIX

__all__ = ["CacheRoom"]

_TOUCH_S = 60.0
# an entry's time of use is brought up to date this often
_LEFTOVER_S = 3600.0
# a temporary file this old is a crash's
_ENTRY = DATA_PREFIX.replace("/", ",")
# entries begin so; other files are somebody else's
_SLACK = 0.9
# a full cache is emptied down to this part of its bound, so that not every new entry looks at all of them
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_COUNTED_AFTER = 32
# one part in so many of the bound may be added before all is counted again
_log = logging.getLogger(__name__)


class CacheRoom:
    """A folder of `max_bytes`. `read_only`: another process keeps it below its root, nothing is changed."""

    def __init__(self, folder: Path, max_bytes: int, *, read_only: bool = False) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.read_only = read_only
        self._lock = threading.Lock()
        self._size_bytes = self._uncounted_bytes = 0
        self._counted_at: float | None = None
        self._held: HeldRoom[Path] = HeldRoom()
        self._ages: list[tuple[float, int]] = []
        # when the entries used last were: of this spell of `_TOUCH_S`, and of the one before it
        self._touched: dict[str, float] = {}
        self._touched_before: dict[str, float] = {}
        self._touched_since = -_TOUCH_S
        self._told: set[str] = set()
        self._trusted = {os.geteuid(), 0}
        if read_only:
            with contextlib.suppress(OSError):
                # who reads a root believes its owner anyhow
                self._trusted.add(folder.parent.stat().st_uid)

    def trusts(self, status: os.stat_result) -> bool:
        """Return whether a file or folder is no other user's, and for no other to write: ours, the superuser's, a read root's owner's."""
        return not stat.S_ISLNK(status.st_mode) and status.st_uid in self._trusted and not status.st_mode & _OTHERS_WRITE

    def takes(self, size_bytes: int) -> bool:
        """Return whether an entry of `size_bytes` may be written."""
        return not self.read_only and size_bytes <= self.max_bytes

    def touch(self, path: Path) -> None:
        """Note that an entry was used."""
        if self.read_only:
            return
        now = time.monotonic()
        if now - self._touched_since >= _TOUCH_S:
            # what is older says nothing any more
            self._touched_before = self._touched if now - self._touched_since < 2 * _TOUCH_S else {}
            self._touched, self._touched_since = {}, now
        key = str(path)
        if now - self._touched.get(key, self._touched_before.get(key, -_TOUCH_S)) < _TOUCH_S:
            return
        self._touched[key] = now
        with contextlib.suppress(OSError):
            os.utime(path)

    def added(self, size_bytes: int) -> None:
        """Count what an entry has added, and delete the entries that must go for it."""
        with self._lock:
            self._size_bytes += size_bytes
            self._uncounted_bytes += abs(size_bytes)
            known = self._counted_at is not None and self._uncounted_bytes * _COUNTED_AFTER <= self.max_bytes
            if known and self._size_bytes <= self.max_bytes:
                return
            entries = self._count()
            if self._size_bytes <= self.max_bytes:
                return
            for number, (_, size, path) in enumerate(entries):
                if self._size_bytes <= self.max_bytes * _SLACK:
                    self._ages = self._ages[number:]
                    break
                with contextlib.suppress(OSError):
                    os.unlink(path)
                    self._touched.pop(path, None)
                    self._touched_before.pop(path, None)
                    self._size_bytes -= size

    def reserve(self, path: Path, size_bytes: int, since_s: float) -> bool:
        """Hold room for an entry to come until `release`, if none must go for it that was used after `since_s` (epoch seconds).

        A tenth of the bound is left to entries that come without asking. A time of use may be `_TOUCH_S` behind.
        """
        with self._lock:
            if self._counted_at is None or time.monotonic() - self._counted_at > _TOUCH_S:
                self._count()
            free_bytes = self.max_bytes * _SLACK - self._size_bytes
            return self.takes(size_bytes) and self._held.hold(path, size_bytes, free_bytes, self._ages, since_s - _TOUCH_S)

    def release(self, path: Path) -> None:
        """Let go of what was reserved."""
        with self._lock:
            self._held.release(path)

    def _count(self) -> list[tuple[float, int, str]]:
        """Look at all entries; return them, the one used longest ago first."""
        entries = sorted(self._entries())
        self._size_bytes, self._uncounted_bytes, self._counted_at = sum(size for _, size, _ in entries), 0, time.monotonic()
        self._ages = [(used_s, size) for used_s, size, _ in entries]
        return entries

    def tell(self, what: str, error: OSError) -> None:
        """Say once of each kind that the folder is of no use; lookups go on without it."""
        text = f"{what}: {error.strerror}"
        with self._lock:
            new = text not in self._told
            self._told.add(text)
        if new:
            _log.warning("the cache %s is not used to %s (%s)", self.folder, what, error)

    def _entries(self) -> Iterator[tuple[float, int, str]]:
        """Yield (time of use, bytes, path) of every index's entries, and delete what crashes left."""
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
