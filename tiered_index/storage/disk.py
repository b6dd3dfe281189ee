"""All operations that change local files (`Disk`), locks and maps of files, and the check of local paths.

Tests replace `Disk` to fail, tear or stop at any single call. Any thread; one writer at a time uses a descriptor.
Raises the system's `OSError`, which callers turn into typed errors. It is a `LacksAbility` if the file system has no
such operation, as SMB, FUSE and folders shared with a virtual machine often have not.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, unquote

from tiered_index.errors import ConfigError, DiskFull, StorageError, StorageMisconfigured, StorageUnavailable
from tiered_index.storage.base import Bytes

DELETED_FOLDER = "the working directory was deleted: change to another one, or give absolute paths"
LOST_AND_FOUND = "lost+found"
"""Folder at the top of an ext4 disk, in which only root may look."""
# Prefix of unfinished files: recovery deletes them, listings never show them.
TEMPORARY_PREFIX = ".tmp-"
# Errors of an operation that a file system does not have
_ABSENT = {errno.EINVAL, errno.ENODEV, errno.ENOLCK, errno.ENOSYS, errno.ENOTTY, errno.EOPNOTSUPP}
_NO_LINKS = _ABSENT | {errno.EPERM, errno.EMLINK}
_FULL = {errno.ENOSPC, errno.EDQUOT}
NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS}
_NOT_POSSIBLE = {errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EFBIG, errno.EISDIR}
# No write permission for others, whatever the umask
_FOLDER_MODE, _FILE_MODE = 0o755, 0o644

_log = logging.getLogger(__name__)


class LacksAbility(OSError):
    """The file system has no such operation. `strerror` names the place and the ability."""


def _typed(error: OSError, doing: str, absent: set[int]) -> StorageError | DiskFull:
    """Return the typed error for `error`."""
    if isinstance(error, LacksAbility):
        return StorageMisconfigured.lacking(f"{doing}: {error.strerror}")
    text = f"{doing}: {error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
    if error.errno in _FULL:
        return DiskFull(f"{text}: make room or move the storage")
    if error.errno in NOT_ALLOWED | _NOT_POSSIBLE | absent:
        return StorageMisconfigured(f"{text}: check the folder and its permissions")
    return StorageUnavailable(text)


@contextlib.contextmanager
def typed_errors(doing: str, *, needs_folder: bool = False) -> Iterator[None]:
    """Turn an `OSError` in the block into a typed error. `doing` begins its message.

    With `needs_folder` a missing folder is misconfigured, since nothing here makes it.
    """
    try:
        yield
    except OSError as error:
        raise _typed(error, doing, {errno.ENOENT} if needs_folder else set()) from error


def blocks(file: Any, size_bytes: int, block_bytes: int, doing: str) -> Iterator[bytes]:
    """Yield the bytes of a file in blocks, the last one shorter. Raises `StorageError`, also for a read cut short."""
    with typed_errors(doing):
        file.seek(0)
        for left in range(size_bytes, 0, -block_bytes):
            block = file.read(expected := min(left, block_bytes))
            if len(block) != expected:
                raise OSError(errno.EIO, f"a read of the temporary file gave {len(block)} of {expected} bytes")
            yield block


@contextlib.contextmanager
def _needed(ability: str, path: object, absent: set[int] = _ABSENT) -> Iterator[None]:
    """Raise `LacksAbility` if the block fails because the file system of `path` lacks an ability."""
    try:
        yield
    except OSError as error:
        if error.errno not in absent:
            raise
        problem = f"the file system of {path} has no {ability} ({error.strerror}): use a folder of another one"
        raise LacksAbility(error.errno, problem) from error


def lock_file(descriptor: int, path: object) -> None:
    """Lock a file for this open descriptor alone (`flock`). Raises `BlockingIOError` if another has it."""
    with _needed("file locks (flock), which keep a second writer away", path):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def map_file(descriptor: int, path: object, size_bytes: int = 0) -> mmap.mmap:
    """Return a shared map of a file's first bytes (0: all) for reading."""
    with _needed("shared maps of files (mmap), through which lookups read local files", path):
        return mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_READ)


def taken_bytes(status: os.stat_result) -> int:
    """Return the smaller of a file's size and the bytes that the file system has allocated for it."""
    return min(status.st_size, status.st_blocks * 512)


def make_path(folder: Path) -> None:
    """Make a folder and its missing parents; others may not write to them."""
    for path in (*reversed(folder.parents), folder):
        if not path.is_dir():
            path.mkdir(_FOLDER_MODE, exist_ok=True)


class Disk:
    """The real file system."""

    def create(self, path: Path) -> int:
        """Create a new file for reading and writing and return its descriptor; an existing file is an error."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)

    def open_rw(self, path: Path) -> int:
        """Open an existing file for reading and writing."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def allocate(self, descriptor: int, size_bytes: int, start: int = 0) -> None:
        """Reserve `size_bytes` from `start` by `posix_fallocate`: later writes there can't find the disk full."""
        if size_bytes:
            os.posix_fallocate(descriptor, start, size_bytes)

    def pwrite(self, descriptor: int, data: Bytes, position: int) -> None:
        """Write all of `data` at `position`."""
        view = memoryview(data).cast("B")
        while len(view):
            written = os.pwrite(descriptor, view, position)
            if written <= 0:
                raise OSError(errno.EIO, "a write made no progress")
            view = view[written:]
            position += written

    def truncate(self, descriptor: int, size_bytes: int) -> None:
        """Set the file's length."""
        os.ftruncate(descriptor, size_bytes)

    def sync(self, descriptor: int) -> None:
        """Make the file's data durable (fdatasync)."""
        os.fdatasync(descriptor)

    def sync_folder(self, folder: Path) -> None:
        """Make names created in or removed from `folder` durable."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with _needed("sync of folders (fsync), without which a crash loses new files", folder):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Move a file atomically, replacing `target`."""
        os.replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name. Raises `FileExistsError` if `target` exists (the local put-if-absent)."""
        with _needed("hard links, which put-if-absent needs", target.parent, _NO_LINKS):
            os.link(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file; a missing file is not an error."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def make_folder(self, folder: Path) -> None:
        """Make a folder; an existing one is not an error, a missing parent is."""
        with contextlib.suppress(FileExistsError):
            folder.mkdir(_FOLDER_MODE)

    def remove_folder(self, folder: Path) -> None:
        """Remove an empty folder; a missing folder is not an error."""
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    # The methods below call those above, so that a test can fail each step.

    def publish(self, temporary: Path, target: Path) -> None:
        """Rename a finished, synced temporary file to its final name and make both folders durable."""
        self.rename(temporary, target)
        self.sync_folder(target.parent)
        if temporary.parent != target.parent:
            self.sync_folder(temporary.parent)

    def write_file(self, temporary: Path, chunks: Iterable[Bytes]) -> int:
        """Write `chunks` to a new file, sync it, and return its size; on an error the file is removed."""
        descriptor, position = self.create(temporary), 0
        try:
            try:
                for chunk in chunks:
                    self.pwrite(descriptor, chunk, position)
                    position += memoryview(chunk).nbytes
                self.sync(descriptor)
            finally:
                self.close(descriptor)
        except Exception:
            with contextlib.suppress(OSError):
                self.unlink(temporary)
            raise
        return position

    def names(self, folder: Path) -> list[str]:
        """Return the names of the files in `folder`, sorted; none for a missing folder."""
        try:
            return sorted(entry.name for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False))
        except FileNotFoundError:
            return []


_UNUSABLE = {errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}


def absolute_path(written: str | Path) -> Path:
    """Return the absolute path of `written`; `~` and `~name` are expanded.

    Raises `ConfigError` if no file can have that path, `StorageMisconfigured` if a parent folder denies access. It does
    not check that the file exists.
    """
    shown = f"{str(written)[:100]!r}" + ("..." if len(str(written)) > 100 else "")
    try:
        path = Path(written).expanduser().absolute()
    except FileNotFoundError as error:
        raise ConfigError(f"{shown}: {DELETED_FOLDER}") from error
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"not a path of this system: {shown}: {error}") from error
    try:
        path.stat()
    except PermissionError as error:
        raise StorageMisconfigured(f"{shown}: {error.strerror}: check the permissions of its folders") from error
    except OSError as error:
        if error.errno not in _UNUSABLE:
            # reported by the caller that uses the path
            return path
        raise ConfigError(f"not a path of this system: {shown}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"not a path of this system: {shown}: {error}") from error
    return path


def local_path(uri: SplitResult, example: str) -> Path:
    """Return the absolute path that a storage's URI names. Raises `ConfigError`, which shows an `example`."""
    if uri.netloc not in {"", "localhost"}:
        rest = f"{uri.netloc}{uri.path}"
        # with a colon it is perhaps a port, a drive, or SQLite's name of a database in memory
        near = "" if ":" in rest else f"; did you mean {uri.scheme}://{quote(str(absolute_path(unquote(rest))))}?"
        raise ConfigError(f"{uri.scheme}://{rest} is not absolute: write {example}{near}")
    path = unquote(uri.path)
    if not path.startswith("/") or "\0" in path or (path.endswith("/") and uri.scheme == "sqlite"):
        names = "is" if uri.scheme == "file" else "names a file,"
        raise ConfigError(f"a {uri.scheme} URI {names} absolute: {example}")
    if uri.scheme != "sqlite":
        return absolute_path(path)
    place = absolute_path("/" + path.lstrip("/"))
    # SQLAlchemy and others read three slashes as a relative path, and four as an absolute one
    other = Path(uri.path.removeprefix("/"))
    is_ambiguous = not uri.netloc and not uri.path.startswith("//") and other.parent.is_dir()
    if is_ambiguous and not place.exists() and other.absolute() != place:
        text = "sqlite://%s is the file %s. Other tools take it for %s: write four slashes for an absolute path"
        _log.warning(text, uri.path, place, other.absolute())
    return place
