"""Maps object names to paths, lists a folder tree in order of name, and publishes whole files durably.

Used by `LocalStorage`. Threads: any number, in any processes.

On disk the last segment of a name is a file. Every earlier one is a folder whose name ends in ``%``, a character that
object names can't hold: ``a`` and ``a/b`` are ``a`` and ``a%/b``. A path that is no object's is never listed.

A file appears under its final name whole and synced, or not at all. Half-made files are in one hidden folder, which no
listing shows. Every folder of a path is made, and its parent synced, before the file. A folder directly below the root
is never removed, so `DurableFiles` remembers that it is durable. One sync of the root is enough for all that are there.
A deeper folder is removed with its last file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from tiered_index.errors import ObjectExists, StorageMisconfigured
from tiered_index.storage.base import SEGMENT, ObjectInfo
from tiered_index.storage.disk import NOT_ALLOWED, TEMPORARY_PREFIX, Disk

WORK_FOLDER = ".%work"
_SEGMENT = re.compile(SEGMENT)

_T = TypeVar("_T")
# the folder can't be opened, or its file system has no sync of folders
_NO_SYNC = {*NOT_ALLOWED, errno.EINVAL, errno.EOPNOTSUPP}


def check_regular(path: Path, status: os.stat_result) -> None:
    """Raise `StorageMisconfigured` if the path of an object is a link, a pipe or the like."""
    if not stat.S_ISREG(status.st_mode):
        raise StorageMisconfigured(f"{path} is not a regular file, as every object must be: remove it")


def _refuse_link(folder: Path) -> None:
    if folder.is_symlink():
        raise StorageMisconfigured(f"{folder} is a symbolic link, which a storage does not follow: use a real folder")


class DurableFiles:
    """Files under `root`, published whole through `disk`."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self.root = root
        self.disk = disk
        self._durable: set[Path] = set()  # no lock: each add or test is atomic, and a lost race costs one more sync

    def make_folder(self, folder: Path) -> None:
        """Make `folder` (`root` or below it) and its missing parents, durably."""
        if folder in self._durable:
            return
        if folder == self.root:
            missing = [path for path in (folder, *folder.parents) if not path.exists()]
            for path in reversed(missing):
                self.disk.make_folder(path)
                self.disk.sync_folder(path.parent)
            if not missing:
                # as below; the parent of an existing root may be one that nobody can sync
                try:
                    self.disk.sync_folder(folder.parent)
                except OSError as error:
                    if error.errno not in _NO_SYNC:
                        raise
        else:
            _refuse_link(folder)
            self.make_folder(folder.parent)
            self.disk.make_folder(folder)
            if folder.parent == self.root:
                with os.scandir(self.root) as entries:
                    beside = [self.root / entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
            # Also for an existing folder: another process may have made it without syncing its parent yet.
            self.disk.sync_folder(folder.parent)
            if folder.parent == self.root:
                # one sync for all folders that were there before it
                self._durable.update(beside)
        if folder == self.root:
            self._durable.add(folder)

    def sync_removed(self, folder: Path) -> None:
        """Make removals from `folder` durable, even if the folder itself was removed."""
        while folder != self.root.parent:
            try:
                self.disk.sync_folder(folder)
                return
            except FileNotFoundError:
                folder = folder.parent

    def drop_empty(self, folder: Path) -> None:
        """Remove `folder` if it is empty, then its empty parents, but none directly below the root."""
        with contextlib.suppress(OSError):
            while self.root not in (folder, folder.parent):
                self.disk.remove_folder(folder)
                folder = folder.parent

    def check_way(self, path: Path) -> None:
        """Raise `StorageMisconfigured` if a folder between the root and `path` is a symbolic link."""
        folder = path.parent
        while folder != self.root:
            _refuse_link(folder)
            folder = folder.parent

    def _twice(self, act: Callable[[], _T]) -> _T:
        """Return `act()`, which makes folders. Repeat it once if another process removed one of them meanwhile."""
        try:
            return act()
        except FileNotFoundError:
            self._durable.clear()
            return act()

    def sweep(self, older_than_ms: int) -> None:
        """Remove temporary files last written before `older_than_ms` (epoch ms)."""
        folder = self.root / WORK_FOLDER
        _refuse_link(folder)
        for entry in self.disk.names(folder):
            path = folder / entry
            with contextlib.suppress(FileNotFoundError):
                if entry.startswith(TEMPORARY_PREFIX) and path.stat().st_mtime_ns // 1_000_000 < older_than_ms:
                    self.disk.unlink(path)

    def create(self) -> tuple[Path, int]:
        """Create a temporary file. Return its path and descriptor."""

        def create() -> tuple[Path, int]:
            work = self.root / WORK_FOLDER
            self.make_folder(work)
            path = work / f"{TEMPORARY_PREFIX}{os.getpid()}-{uuid.uuid4().hex}"
            return path, self.disk.create(path)

        return self._twice(create)

    def name_durably(self, temporary: Path, target: Path, absent: str | None) -> None:
        """Give a finished, synced temporary file its final name; an error leaves the old or the new file.

        With `absent`, the object's name, the file gets a second name. Raises `ObjectExists` if `target` exists; of
        racing processes one succeeds.
        """

        def name() -> None:
            self.make_folder(target.parent)
            if absent is None:
                self.disk.rename(temporary, target)
            else:
                self._link(temporary, target, absent)
            self.disk.sync_folder(target.parent)

        self._twice(name)

    def _link(self, temporary: Path, target: Path, name: str) -> None:
        try:
            self.disk.link(temporary, target)
        except FileExistsError as error:
            raise ObjectExists(name, str(self.root)) from error


def encode(name: str) -> Path:
    """Return the relative path of object `name` (a valid name)."""
    return Path(name.replace("/", "%/"))


def walk(path: Path, prefix: str, start_after: str, stem: str = "") -> Iterator[ObjectInfo]:
    """Yield the objects under `path` in order of whole name, a folder at a time. Their names begin with `stem`.

    The sort key of an object is ``text``, of a folder ``text/``: then every name below a folder sorts between its
    neighbours.
    """
    found: dict[str, os.DirEntry[str]] = {}
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
                    found[name] = entry
    except FileNotFoundError:
        return  # removed since its parent was read
    for name, entry in sorted(found.items()):
        if name.endswith("/"):
            yield from walk(Path(entry), prefix, start_after, name)
        else:
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                yield ObjectInfo(name, status.st_size, status.st_mtime_ns // 1_000_000)


def _may_hold(stem: str, prefix: str, start_after: str) -> bool:
    """Return whether a name that starts with `stem` can start with `prefix` and sort after `start_after`."""
    return (stem.startswith(prefix) or prefix.startswith(stem)) and (stem > start_after or start_after.startswith(stem))
