"""What the engine asks of a local file system, in one injectable object.

`Disk` is the only code that writes local files. It is an object so that `testing/faults.py` can stand in for it and
crash, fail or tear any single call. Every method may be called from any thread; a descriptor is used by one writer at a
time. Raises `OSError` as the system does (callers turn it into typed errors); `pwrite` never returns short.

Writing a large file while its next pieces are being made: one thread writes, in order, and the file system works
meanwhile.

Threads: one caller; the writing thread is this module's own and has ended when the context is left.

From what somebody gave as a local path to an absolute one, looked at once: what no file system takes is told here, and
by its name.

Everything else (nothing there, a file in the place of a folder) is for whoever uses the path. Threads: any.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType

from tiered_index.errors import ConfigError, StorageMisconfigured
from tiered_index.storage.base import Bytes

__all__ = ["TEMPORARY_PREFIX", "Disk", "WriteBehind", "absolute_path", "make_path"]

# Pieces made ahead of the writes: bounds the memory, which holds them until they are written
_PENDING = 4
# Durable in steps, so that the last sync doesn't find everything left to do
_SYNC_BYTES = 64 << 20


class WriteBehind:
    """Hands pieces to `pwrite` and, now and then, `sync`.

    An error of theirs is raised by a later `write` or by `finish`.
    """

    def __init__(self, pwrite: Callable[[Bytes, int], None], sync: Callable[[], None]) -> None:
        self._pwrite, self._sync = pwrite, sync
        self._thread = ThreadPoolExecutor(1, "tiered-index-write")
        self._pending: deque[Future[None]] = deque()
        self._unsynced = 0

    def write(self, data: Bytes, position: int) -> None:
        """Have `data`, which nobody may change any more, written at `position`."""
        self._pending.append(self._thread.submit(self._step, data, position))
        while len(self._pending) > _PENDING:
            self._pending.popleft().result()

    def finish(self) -> None:
        """Return when everything is written."""
        while self._pending:
            self._pending.popleft().result()

    def _step(self, data: Bytes, position: int) -> None:
        self._pwrite(data, position)
        self._unsynced += memoryview(data).nbytes
        if self._unsynced >= _SYNC_BYTES:
            self._sync()
            self._unsynced = 0

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


# Names that start so are half-made work: recovery deletes them, listings never show them.
TEMPORARY_PREFIX = ".tmp-"


# A file this large is worth a thread
_LARGE_BYTES = 16 << 20
# Whatever the umask lets through, others never write what is ours
_FOLDER_MODE, _FILE_MODE = 0o755, 0o644


def make_path(folder: Path) -> None:
    """Make a folder and what is missing above it, none of them for others to write."""
    for path in (*reversed(folder.parents), folder):
        if not path.is_dir():
            path.mkdir(_FOLDER_MODE, exist_ok=True)


class Disk:
    """The real file system."""

    def create(self, path: Path) -> int:
        """Create a new file for reading and writing and return its descriptor; an existing one is an error."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)

    def open_rw(self, path: Path) -> int:
        """Open an existing file for reading and writing."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        """Really reserve `size_bytes` of the file, so that later writes below it can't find the disk full."""
        if size_bytes:
            os.posix_fallocate(descriptor, 0, size_bytes)

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
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Move a file atomically, replacing `target`."""
        os.replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name; raises `FileExistsError` where `target` exists (the local put-if-absent)."""
        os.link(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file; one that is not there is not an error."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def make_folder(self, folder: Path) -> None:
        """Make a folder; one that is there already is not an error, a missing parent is."""
        with contextlib.suppress(FileExistsError):
            folder.mkdir(_FOLDER_MODE)

    def remove_folder(self, folder: Path) -> None:
        """Remove an empty folder; one that is not there is not an error."""
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    # Composed of the calls above, so a fault can strike at each step.

    def publish(self, temporary: Path, target: Path) -> None:
        """Rename a finished, synced temporary file to its final name and make both folders durable."""
        self.rename(temporary, target)
        self.sync_folder(target.parent)
        if temporary.parent != target.parent:
            self.sync_folder(temporary.parent)

    def write_file(self, temporary: Path, chunks: Iterable[Bytes]) -> int:
        """Write `chunks` to a new file, sync it, and return its size; on an error the file is removed.

        Of a large file the writes, and syncs of what is written, go on in a thread of their own beside the making of
        the next chunks.
        """
        descriptor = self.create(temporary)
        position = 0
        try:
            try:
                with contextlib.ExitStack() as large:
                    behind: WriteBehind | None = None
                    for chunk in chunks:
                        if behind is not None:
                            behind.write(chunk, position)
                        else:
                            self.pwrite(descriptor, chunk, position)
                        position += memoryview(chunk).nbytes
                        if behind is None and position >= _LARGE_BYTES:
                            behind = large.enter_context(
                                WriteBehind(partial(self.pwrite, descriptor), partial(self.sync, descriptor))
                            )
                    if behind is not None:
                        behind.finish()
                self.sync(descriptor)
            finally:
                self.close(descriptor)
        except Exception:
            with contextlib.suppress(OSError):
                self.unlink(temporary)
            raise
        return position

    def names(self, folder: Path) -> Iterator[str]:
        """Yield the names of the files in `folder`, sorted; a folder that is not there is empty."""
        try:
            entries = sorted(entry.name for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False))
        except FileNotFoundError:
            return
        yield from entries


_UNUSABLE = {errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}


def absolute_path(given: str | Path) -> Path:
    """Return the absolute path of `given`, with the home that `~` or `~name` stands for.

    Raises `ConfigError` where no file can be called so: a name or path too long, symbolic links that lead to each
    other, a character that names don't have, the home of nobody; `StorageMisconfigured` where a folder on the way may
    not be entered.
    """
    shown = f"{str(given)[:100]!r}" + ("..." if len(str(given)) > 100 else "")
    try:
        path = Path(given).expanduser().absolute()
        path.stat()
    except PermissionError as error:
        raise StorageMisconfigured(f"{shown}: {error.strerror}: check the permissions of its folders") from error
    except OSError as error:
        if error.errno not in _UNUSABLE:
            return path  # told by whoever uses it
        raise ConfigError(f"not a path of this system: {shown}: {error.strerror}") from error
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"not a path of this system: {shown}: {error}") from error
    return path
