"""The local root: its folders, its marker, and the lock of its single writer.

```
root/tiered_index.json   the index's id, its layout, its storage
root/seen                the newest record of the storage's log that the root knows
root/files               the unpublished files with entries, which the root must still have
root/log                 the storage's log as its writer knew it before the last deletion (`log.kept`)
root/lock                locked by the writer (flock); names its pid and host
root/unsealed|compacted|uploaded/   the files; the folder is the file's state
root/aside/              files that `recover` set aside, until their entries are put again
root/sent-NUMBER/        such files afterwards, if `recover` was killed; the next writer deletes them
root/cache/              directories and filters of stored files (`cold.disk_cache`); may be deleted at any time
root/followers/          state of adapters that follow logs
```
The root and its cache may be symbolic links, but nothing else below the root: a writer refuses such folders and never
writes through a link. Threads: any. Imports no other folder of the service.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import resource
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from tiered_index.base.documents import FileId, decoded, encoded
from tiered_index.errors import (
    CorruptFile,
    DiskFull,
    LockHeld,
    NotAnIndex,
    StorageMisconfigured,
    StorageUnavailable,
    TieredIndexError,
    UnsupportedVersion,
)
from tiered_index.format.layout import Layout
from tiered_index.format.names import INDEX_SUFFIX, JOURNAL_SUFFIX, STATES, UNSEALED, file_id_of
from tiered_index.format.schema import read_schema
from tiered_index.storage.base import Bytes
from tiered_index.storage.disk import (
    LOST_AND_FOUND,
    TEMPORARY_PREFIX,
    Disk,
    LacksAbility,
    lock_file,
    make_path,
    map_file,
)

CACHE = "cache"
"""Folder of the local cache of directories and filters; created when needed."""
ASIDE = "aside"
"""Folder of the files that `recover` set aside, until their entries are put again."""
SENT = "sent"
"""Begin of the name of that folder afterwards. If `recover` is killed, the next writer deletes the folder."""
FOLLOWERS = "followers"
"""Folder of the state of adapters that follow logs; created when needed."""

MARKER_VERSION = 2
_FULL = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EPERM, errno.EACCES, errno.EROFS}
_HELD = ": end that writer, or use another root"
_log = logging.getLogger(__name__)


def disk_error(error: OSError, what: str) -> TieredIndexError:
    """Return the typed error for a failed call on a local file; `what` names the action, as "reading PATH"."""
    if isinstance(error, LacksAbility):
        return StorageMisconfigured.lacking(f"{what}: {error.strerror}")
    message = f"{what}: {error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
    if error.errno in _FULL:
        return DiskFull(message)
    if error.errno in _DENIED:
        return StorageMisconfigured(message)
    return StorageUnavailable(message)


@contextlib.contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Return a context manager that raises `disk_error` for an `OSError`."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, what) from error


class Marker(Struct, frozen=True):
    """The content of `tiered_index.json`. `storage` is the given URI, without credentials."""

    index_id: FileId
    root_id: FileId
    layout: Layout
    offset_space: str
    storage: str

    def encode(self) -> bytes:
        """Return the marker's bytes (JSON)."""
        document = {"tiered_index": MARKER_VERSION, **asdict(self), "layout": self.layout.to_json()}
        return msgspec.json.format(encoded(document), indent=2) + b"\n"

    @classmethod
    def decode(cls, data: bytes, file: str) -> Marker:
        """Return the marker in `data`. Raises `NotAnIndex` if it isn't one, and `UnsupportedVersion`."""
        try:
            version = decoded(data, _MarkerVersion, file, "marker").tiered_index
            UnsupportedVersion.unless_read(file, "root", MARKER_VERSION, version)
            return decoded(data, cls, file, "marker", hook=read_schema)
        except UnsupportedVersion:
            raise
        except CorruptFile as error:
            raise NotAnIndex(f"{error}; it is not the marker of a tiered index") from error


class _MarkerVersion(Struct):
    tiered_index: Annotated[int, Meta(ge=0, le=2**31)]


class Root:
    """Paths and checks of one root. Any thread may use it."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path = path
        self.disk = disk
        self.marker_path = path / "tiered_index.json"
        # made once, because each flush looks at them
        self._no_links = [path / name for name in (*STATES, FOLLOWERS)]
        self._identity: tuple[int, int] | None = None

    def remember(self) -> None:
        """Note the folder's identity, for `check`."""
        self._identity = self._look()

    def check(self) -> None:
        """Raise a typed error if the folder is missing, was replaced, or is now read-only."""
        if self._identity is None:
            return
        if self._look() != self._identity:
            raise StorageUnavailable(
                f"{self.path} is not the folder that was opened: it was moved, or something is mounted over it"
            )
        with disk_errors(f"looking at {self.path}"):
            read_only = os.statvfs(self.path).f_flag & os.ST_RDONLY
        if read_only:
            raise StorageMisconfigured(f"{self.path} is on a file system that is read-only now")
        self.refuse_links()

    def refuse_links(self) -> None:
        """Raise `StorageMisconfigured` if a folder of the root is a symbolic link."""
        for folder in self._no_links:
            if folder.is_symlink():
                raise StorageMisconfigured(
                    f"{folder} is a symbolic link, which may lead anywhere: put the folder itself there"
                )

    def names(self, state: str) -> list[str]:
        """Return the names of a state's files.

        Raises `StorageMisconfigured` if a file is a symbolic link, since answers would miss its entries.
        Raises `OSError`.
        """
        names = self.disk.names(self.folder(state))
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder(state)) as entries:
            for entry in entries:
                if entry.is_symlink() and file_id_of(entry.name) is not None:
                    raise StorageMisconfigured(
                        f"{entry.path} is a symbolic link, which may lead anywhere: put the file itself there"
                    )
        return names

    def _look(self) -> tuple[int, int]:
        with disk_errors(f"looking at {self.path}"):
            status = self.path.stat()
        return status.st_dev, status.st_ino

    def folder(self, state: str) -> Path:
        """Return the folder of a state, or of the followers."""
        return self.path / state

    def index_path(self, state: str, file_id: str) -> Path:
        """Return the path of a file in a state."""
        return self.path / state / (file_id + INDEX_SUFFIX)

    def journal_path(self, file_id: str) -> Path:
        """Return the path of an unsealed file's journal."""
        return self.path / UNSEALED / (file_id + JOURNAL_SUFFIX)

    def temporary(self) -> Path:
        """Return a new temporary path in the folder of unsealed files."""
        return self.path / UNSEALED / (TEMPORARY_PREFIX + secrets.token_hex(8))

    def read_marker(self) -> Marker | None:
        """Return the marker; None: the root is empty or missing. Raises `NotAnIndex` for a folder with other files."""
        try:
            return Marker.decode(self.marker_path.read_bytes(), str(self.marker_path))
        except FileNotFoundError:
            pass
        except NotADirectoryError as error:
            raise NotAnIndex(f"{self.path} is not a folder: give a folder as root") from error
        except OSError as error:
            raise disk_error(error, f"reading {self.marker_path}") from error
        with disk_errors(f"looking at {self.path}"), contextlib.suppress(FileNotFoundError):
            names = sorted(os.listdir(self.path))
            strangers = [name for name in names if name != "lock" and not name.startswith(TEMPORARY_PREFIX)]
            strangers = [name for name in strangers if name not in (*STATES, FOLLOWERS) or os.listdir(self.path / name)]
            if strangers == [LOST_AND_FOUND]:
                raise NotAnIndex(
                    f"{self.path} is the top folder of a disk, and has {LOST_AND_FOUND!r}: nothing was changed. Give a "
                    f"subfolder as root, such as {self.path / 'index'}"
                )
            if strangers:
                raise NotAnIndex(
                    f"{self.path} has no tiered_index.json but has {strangers[0]!r}: nothing was changed. Choose an "
                    "empty folder"
                )
        return None

    def name_storage(self, uri: str) -> None:
        """Write a storage's URI to the marker, if that names another one. Raises typed errors of the disk."""
        marker = self.read_marker()
        if marker is not None and marker.storage != uri:
            named = replace(marker, storage=uri).encode()
            self.write_file(self.marker_path, [named], f"writing {self.marker_path}")

    def make_folders(self) -> None:
        """Create the root and its state folders, durably."""
        self.refuse_links()
        with disk_errors(f"creating {self.path}"):
            missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            for state in STATES:
                make_path(self.folder(state))
            for folder in (self.path, *(made.parent for made in missing)):
                self.disk.sync_folder(folder)

    def write_file(self, path: Path, pieces: Iterable[Bytes], what: str) -> None:
        """Create or replace a file durably: a crash leaves the old or the new file. `what` is for the error's text."""
        temporary = path.parent / (TEMPORARY_PREFIX + secrets.token_hex(8))
        try:
            self.disk.write_file(temporary, pieces)
            self.disk.publish(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):  # the next try creates another one
                self.disk.unlink(temporary)
            raise disk_error(error, what) from error

    def temporaries(self) -> list[Path]:
        """Return the temporary files. Only the lock's holder may delete them."""
        folders = (self.path, *(self.folder(name) for name in (*STATES, FOLLOWERS)))
        return [
            folder / name for folder in folders for name in self.disk.names(folder) if name.startswith(TEMPORARY_PREFIX)
        ]


class RootLock:
    """The exclusive lock of a root, held by open descriptors: it ends with the process.

    The folder itself is also locked, because someone may delete the lock file, and another process could lock a new
    one. A forked child closes its copies of the descriptors, else the root would stay locked while the child runs.
    """

    def __init__(self, root: Root) -> None:
        self._path = root.path / "lock"
        root.remember()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._folder: int | None = None
        with disk_errors(f"opening {self._path}"):
            # a file object, since it may be closed twice
            self._file = open(  # noqa: SIM115 - it is held until `release`
                self._path, "rb+", buffering=0, opener=lambda path, _: os.open(path, flags, 0o644)
            )
            _locks.add(self)
        try:
            self._take(self._file.fileno())
            self._take_folder()
            self._name_holder(self._file.fileno())
            self._check_maps(self._file.fileno())
        except BaseException:
            self.release()  # else the root would stay locked while the error is referenced
            raise

    def _take(self, descriptor: int) -> None:
        try:
            lock_file(descriptor, self._path.parent)
        except BlockingIOError as error:
            pid, host, file = None, None, str(self._path)
            with contextlib.suppress(CorruptFile):
                holder = decoded(os.pread(descriptor, 4096, 0), _Holder, file, "lock")
                pid, host = holder.pid, holder.host
            raise LockHeld.by(str(self._path.parent), pid, host, _HELD) from error
        except OSError as error:
            raise disk_error(error, f"locking {self._path}") from error

    def _take_folder(self) -> None:
        """Lock the folder, if its file system can: network file systems often can't."""
        try:
            self._folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LockHeld.by(str(self._path.parent), None, None, _HELD) from error
        except OSError as error:
            _log.debug("%s can't be locked itself: %s", self._path.parent, error)

    def _name_holder(self, descriptor: int) -> None:
        """Write the holder's pid and host to the lock file. The lock also holds if the disk is full."""
        holder = encoded({"pid": os.getpid(), "host": socket.gethostname()})
        try:
            # truncate after the write: a full disk can still replace existing bytes
            os.pwrite(descriptor, holder, 0)
            os.ftruncate(descriptor, len(holder))
        except OSError as error:
            _log.warning("cannot write the lock's holder to %s: %s", self._path, error)
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)

    def _check_maps(self, descriptor: int) -> None:
        """Raise `StorageMisconfigured` if files can't be mapped: before an index is created, not at its first file."""
        with disk_errors(f"mapping {self._path}"):
            # an empty file, of a full disk, can't be mapped anywhere
            if os.fstat(descriptor).st_size:
                map_file(descriptor, self._path.parent).close()

    @property
    def place(self) -> str:
        """A text that differs for copies of the root and for other hosts: host, boot id, and the folder's identity."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            boot = ""
        with disk_errors(f"looking at {self._path.parent}"):
            folder = self._path.parent.stat()
        return f"{socket.gethostname()}/{boot}/{folder.st_dev}:{folder.st_ino}"

    def release(self) -> None:
        """Release the lock. Idempotent."""
        # unlock first: a new forked child may not have closed its copies yet
        if not self._file.closed:
            _unlock(self._file.fileno())
        if self._folder is not None:
            _unlock(self._folder)
        self.close()

    def __del__(self) -> None:
        # an interrupt may drop the lock before its owner has it; `_file` is missing if it could not be opened
        if hasattr(self, "_file"):
            self.close()

    def close(self) -> None:
        """Close the descriptors without unlocking, as in a forked child, since the parent has the lock."""
        self._file.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            os.close(folder)


def _unlock(descriptor: int) -> None:
    # if this fails, closing the descriptor ends the lock
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)


_locks: weakref.WeakSet[RootLock] = weakref.WeakSet()


def _close_all() -> None:
    for lock in list(_locks):
        lock.close()


os.register_at_fork(after_in_child=_close_all)


class _Holder(Struct):
    pid: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    host: str


class Deletions:
    """Deletes files of one root, and retries failed deletions.

    The names of these files must never be used again. Each deletion first calls `before`.
    """

    def __init__(self, disk: Disk) -> None:
        self.before: Callable[[], None] = lambda: None
        self._disk = disk
        self._lock = threading.RLock()
        self._undeleted: list[tuple[list[Path], TieredIndexError]] = []

    def unlink(self, paths: list[Path]) -> None:
        """Delete files in order, each durably before the next. After a failure, `again` retries the rest."""
        if not paths:
            return
        try:
            self.before()
        except TieredIndexError as error:
            with self._lock:
                self._undeleted.append((paths, error))
            return
        for number, path in enumerate(paths):
            try:
                self._disk.unlink(path)
                self._disk.sync_folder(path.parent)
            except OSError as error:
                with self._lock:
                    self._undeleted.append((paths[number:], disk_error(error, f"deleting {path}")))
                return

    def again(self) -> None:
        """Retry the failed deletions."""
        with self._lock:
            undeleted, self._undeleted = self._undeleted, []
        for paths, _ in undeleted:
            self.unlink(paths)

    def errors(self) -> dict[str, TieredIndexError]:
        """Return the errors of failed deletions, by file name."""
        with self._lock:
            return {paths[0].name: error for paths, error in self._undeleted}


# Linux allows this many mappings per process; each open file needs a descriptor, and the usual limit is 1,024
_WANTED = 1 << 16


def allow_many_files() -> None:
    """Raise the soft limit of open files to 65,536 or the hard limit, if that is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            _log.debug("soft limit of open files raised from %d to %d", soft, wanted)
