"""Maps object names to paths, lists a folder tree in order of name, and publishes whole files durably.

Used by `LocalStorage`. Threads: any number, in any processes.

On disk the last segment of a name is a file. Every earlier one is a folder whose name ends in ``%``, a character that
object names can't hold: ``a`` and ``a/b`` are ``a`` and ``a%/b``. A segment longer than `CHUNK` characters is cut,
because file systems allow 255 bytes. Each full chunk is a folder ending in ``%%``, and names inside it start with
``%``. So a rest of ``.`` or ``..`` is harmless. A path that does not decode is not an object and is never listed.

A file appears under its final name whole and synced, or not at all. Half-made files are in one hidden folder, which no
listing shows. Every folder of a path is made, and its parent synced, before the file. A folder directly below the root
is never removed, so `DurableFiles` remembers that it is durable. A deeper one is removed with its last file.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
import re
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, TypeAlias

from tiered_index.errors import DiskFull, ObjectExists, StorageError, StorageMisconfigured, StorageUnavailable
from tiered_index.storage.base import Bytes, ObjectInfo
from tiered_index.storage.disk import TEMPORARY_PREFIX, Disk, LacksAbility

WORK_FOLDER = ".%work"
CHUNK = 200
_SEGMENT = re.compile(r"[A-Za-z0-9._=+@-]+")
# Kinds of directory entries
Kind: TypeAlias = Literal["object", "folder", "chunk"]

_FULL = {errno.ENOSPC, errno.EDQUOT}
_NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS}
_NOT_POSSIBLE = {errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EFBIG, errno.EISDIR}
# the folder can't be opened, or its file system has no sync of folders
_NO_SYNC = {*_NOT_ALLOWED, errno.EINVAL, errno.EOPNOTSUPP}


def _typed(error: OSError, doing: str) -> StorageError | DiskFull:
    """Return the typed error for `error`."""
    if isinstance(error, LacksAbility):
        return StorageMisconfigured.lacking(f"{doing}: {error.strerror}")
    text = f"{doing}: {error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
    if error.errno in _FULL:
        return DiskFull(f"{text}: make room or move the storage")
    if error.errno in _NOT_ALLOWED | _NOT_POSSIBLE:
        return StorageMisconfigured(f"{text}: check the folder and its permissions")
    return StorageUnavailable(text)


@contextlib.contextmanager
def typed_errors(doing: str) -> Iterator[None]:
    """Turn an `OSError` in the block into a typed error. `doing` begins its message."""
    try:
        yield
    except OSError as error:
        raise _typed(error, doing) from error


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
            # Also for an existing folder: another process may have made it without syncing its parent yet.
            self.disk.sync_folder(folder.parent)
        if folder == self.root or folder.parent == self.root:
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

    def publish(self, target: Path, chunks: Callable[[], Iterable[Bytes]], absent: str | None = None) -> None:
        """Write the bytes of `chunks()`, which may be called twice, to `target`; an error leaves the old or new file.

        With `absent`, the object's name, raise `ObjectExists` if `target` exists; of racing processes one succeeds.
        """
        for last_try in (False, True):
            try:
                self.make_folder(target.parent)
                self.place(target, chunks(), absent)
                return
            except FileNotFoundError as error:
                # Another process removed our folders or temporary file. Make them again, once.
                if last_try:
                    raise StorageUnavailable(f"{target} can't be written: its folder was removed twice") from error
                self._durable.clear()

    def sweep(self, older_than_ms: int) -> None:
        """Remove temporary files last written before `older_than_ms` (epoch ms)."""
        folder = self.root / WORK_FOLDER
        _refuse_link(folder)
        for entry in self.disk.names(folder):
            path = folder / entry
            with contextlib.suppress(FileNotFoundError):
                if entry.startswith(TEMPORARY_PREFIX) and path.stat().st_mtime_ns // 1_000_000 < older_than_ms:
                    self.disk.unlink(path)

    def place(self, target: Path, chunks: Iterable[Bytes], absent: str | None = None) -> None:
        """As `publish`, in an existing folder. Raises `FileNotFoundError` if the folder was removed."""
        work = self.root / WORK_FOLDER
        self.make_folder(work)
        temporary = work / f"{TEMPORARY_PREFIX}{os.getpid()}-{uuid.uuid4().hex}"
        try:
            self.disk.write_file(temporary, chunks)
            if absent is None:
                self.disk.rename(temporary, target)
            else:
                self._link(temporary, target, absent)
            self.disk.sync_folder(target.parent)
        finally:
            # A leftover is invisible and swept by age: a failed removal must not hide the first error
            with contextlib.suppress(OSError):
                self.disk.unlink(temporary)

    def _link(self, temporary: Path, target: Path, name: str) -> None:
        try:
            self.disk.link(temporary, target)
        except FileExistsError as error:
            raise ObjectExists(name, str(self.root)) from error


def encode(name: str) -> Path:
    """Return the relative path of object `name` (a valid name)."""
    pieces: list[str] = []
    segments = name.split("/")
    for index, segment in enumerate(segments):
        mark, rest = "", segment
        while len(rest) > CHUNK:
            pieces.append(f"{mark}{rest[:CHUNK]}%%")
            mark, rest = "%", rest[CHUNK:]
        pieces.append(mark + rest + ("" if index == len(segments) - 1 else "%"))
    return Path(*pieces)


def decode(entry: str, *, is_folder: bool, in_chunk: bool) -> tuple[Kind, str] | None:
    """Return the kind of a directory entry and its text, or None if the entry is not part of the storage."""
    text = entry
    if in_chunk:
        if not text.startswith("%"):
            return None
        text = text[1:]
    kind: Kind = "object"
    if is_folder:
        if text.endswith("%%"):
            kind, text = "chunk", text[:-2]
        elif text.endswith("%"):
            kind, text = "folder", text[:-1]
        else:
            return None
    if not _SEGMENT.fullmatch(text) or len(text) > CHUNK or (kind == "chunk" and len(text) != CHUNK):
        return None
    if not in_chunk and kind != "chunk" and text in {".", ".."}:
        return None
    return kind, text


def walk(path: Path, prefix: str, start_after: str, stem: str = "", in_chunk: bool = False) -> Iterator[ObjectInfo]:
    """Yield the objects under `path` in order of whole name, a folder at a time. Their names begin with `stem`.

    The sort key of an object is ``text``, of a folder ``text/``: then every name below a folder sorts between its
    neighbours. Only a chunk and the folder of the same text interleave (``K/...`` and ``K0...``), so those two are
    merged.
    """
    found: dict[Kind, dict[str, os.DirEntry[str]]] = {"object": {}, "folder": {}, "chunk": {}}
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                is_folder = entry.is_dir(follow_symlinks=False)
                if not is_folder and not in_chunk and stem + entry.name <= start_after:
                    # most files of a listing that starts near the end
                    continue
                decoded = decode(entry.name, is_folder=is_folder, in_chunk=in_chunk)
                if decoded is None or not (is_folder or entry.is_file(follow_symlinks=False)):
                    continue
                kind, text = decoded
                name = stem + text + "/" * (kind == "folder")
                is_listed = name.startswith(prefix) and name > start_after
                if is_listed or (is_folder and _may_hold(name, prefix, start_after)):
                    found[kind][text] = entry
    except FileNotFoundError:
        return  # removed since its parent was read
    objects, folders, chunks = found.values()
    keys = [(text, 0, text) for text in objects] + [(text, 1, text) for text in chunks]
    keys += [(text + "/", 2, text) for text in folders if text not in chunks]
    for _, order, text in sorted(keys):
        if order == 0:
            try:
                status = objects[text].stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield ObjectInfo(stem + text, status.st_size, status.st_mtime_ns // 1_000_000)
            continue
        below: list[Iterator[ObjectInfo]] = []
        if order == 1:
            below.append(walk(Path(chunks[text]), prefix, start_after, stem + text, True))
        if text in folders:
            below.append(walk(Path(folders[text]), prefix, start_after, stem + text + "/"))
        yield from heapq.merge(*below, key=lambda info: info.name) if len(below) > 1 else below[0]


def _may_hold(stem: str, prefix: str, start_after: str) -> bool:
    """Return whether a name that starts with `stem` can start with `prefix` and sort after `start_after`."""
    return (stem.startswith(prefix) or prefix.startswith(stem)) and (stem > start_after or start_after.startswith(stem))
