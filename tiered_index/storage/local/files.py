"""Publishing whole files durably: the part of `LocalStorage` that writes.

Invariants: a file appears under its final name whole and synced, or not at all; half-made files live in one hidden
folder (`.%work`) under names that start with `TEMPORARY_PREFIX`, so that no listing shows them and one sweep finds
them. Every folder on the way to a file is made and its parent synced before the file is. Folders are never removed:
that is what lets this class remember which ones are durable.

Threads: any number, in any number of processes; temporary names are unique.

Multipart uploads as folders of part files: the part of `LocalStorage` that assembles.

An upload is the folder `.%uploads/<id>/` with `upload.json` (name, start) and one file a part, each published by a
rename. It exists exactly while that path does: abort and the end of completion first rename the folder away in one
step, then empty it, so a part that arrives late finds no folder and is refused. Completion verifies each part's SHA-256
(the `etag`) while it concatenates. A crash between publishing and removing leaves the upload; completing it again
publishes the same bytes.

Threads: any number, in any number of processes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from tiered_index.clock import Clock
from tiered_index.documents import MILLISECONDS, checked, load, record, text
from tiered_index.errors import (
    CorruptFile,
    DiskFull,
    InvalidArgument,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    StorageMisconfigured,
    StorageUnavailable,
)
from tiered_index.storage.base import NAME, Bytes, PartInfo, UploadHandle, check_part_number, check_parts
from tiered_index.storage.disk import TEMPORARY_PREFIX, Disk

__all__ = ["UPLOADS_FOLDER", "WORK_FOLDER", "DurableFiles", "LocalUploads", "check_regular", "typed_errors"]

WORK_FOLDER = ".%work"

_FULL = {errno.ENOSPC, errno.EDQUOT}
_SET_UP = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EFBIG,
    errno.EISDIR,
}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def typed(error: OSError, doing: str) -> StorageError | DiskFull:
    """Return the error that tells the caller what to do about `error`."""
    text = f"{doing}: {error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
    if error.errno in _FULL:
        return DiskFull(f"{text}: make room or move the storage")
    if error.errno in _SET_UP:
        return StorageMisconfigured(f"{text}: check the folder and its permissions")
    return StorageUnavailable(text)


@contextlib.contextmanager
def typed_errors(doing: str) -> Iterator[None]:
    """Turn an `OSError` in the body into a typed error; where "not there" is an answer, the body catches it first."""
    try:
        yield
    except OSError as error:
        raise typed(error, doing) from error


def check_regular(path: Path, status: os.stat_result) -> None:
    """Raise `StorageMisconfigured` where what stands in an object's place is a link, a pipe or the like."""
    if not stat.S_ISREG(status.st_mode):
        raise StorageMisconfigured(f"{path} is not a regular file: nothing else is an object")


def _refuse_link(folder: Path) -> None:
    if folder.is_symlink():
        raise StorageMisconfigured(f"{folder} is a symbolic link, which may lead anywhere: put the folder itself there")


class DurableFiles:
    """Files under `root`, published whole through `disk`."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self.root = root
        self.disk = disk
        self._durable: set[Path] = set()  # one add or test at a time is atomic; losing a race costs one more sync

    def make_folder(self, folder: Path) -> None:
        """Make `folder` (`root` or below it) and what is missing above it, durably."""
        if folder in self._durable:
            return
        if folder != self.root:
            _refuse_link(folder)
        if folder == self.root:
            missing = [path for path in (folder, *folder.parents) if not path.exists()]
            for path in reversed(missing):
                self.disk.make_folder(path)
                self.disk.sync_folder(path.parent)
        else:
            self.make_folder(folder.parent)
            self.disk.make_folder(folder)
            # Also where the folder was there: another process may have made it and not yet synced its parent.
            self.disk.sync_folder(folder.parent)
        self._durable.add(folder)

    def check_way(self, path: Path) -> None:
        """Raise `StorageMisconfigured` where a folder between the root and `path` is a symbolic link."""
        folder = path.parent
        while folder != self.root:
            _refuse_link(folder)
            folder = folder.parent

    def publish(self, target: Path, chunks: Callable[[], Iterable[Bytes]]) -> None:
        """Make `target` hold the bytes of `chunks()`, replacing what was there.

        `chunks` is called again where somebody removed the folders meanwhile. After an error the old file or the new
        one is there.
        """
        self._in_folders(target, chunks, lambda temporary: self.disk.rename(temporary, target))

    def publish_if_absent(self, target: Path, chunks: Callable[[], Iterable[Bytes]], name: str) -> None:
        """As `publish`, but raise `ObjectExists` (naming `name`) where `target` exists; of racing processes one
        wins.
        """
        self._in_folders(target, chunks, lambda temporary: self._link(temporary, target, name))

    def sweep(self, older_than_ms: int) -> int:
        """Remove temporary files last written before `older_than_ms` (epoch ms); return how many."""
        folder = self.root / WORK_FOLDER
        _refuse_link(folder)
        swept = 0
        for entry in self.disk.names(folder):
            path = folder / entry
            with contextlib.suppress(FileNotFoundError):
                if entry.startswith(TEMPORARY_PREFIX) and path.stat().st_mtime_ns // 1_000_000 < older_than_ms:
                    self.disk.unlink(path)
                    swept += 1
        return swept

    def _in_folders(self, target: Path, chunks: Callable[[], Iterable[Bytes]], place: Callable[[Path], None]) -> None:
        for last_try in (False, True):
            try:
                self._write_and_place(target, chunks(), place)
                return
            except FileNotFoundError as error:
                # Our folders or our temporary file went: somebody cleared the root. Forget what we know and make them
                # again, once.
                if last_try:
                    raise StorageUnavailable(f"{target} can't be written: its folder keeps vanishing") from error
                self._durable.clear()

    def _write_and_place(self, target: Path, chunks: Iterable[Bytes], place: Callable[[Path], None]) -> None:
        work = self.root / WORK_FOLDER
        self.make_folder(work)
        self.make_folder(target.parent)
        temporary = work / f"{TEMPORARY_PREFIX}{os.getpid()}-{uuid.uuid4().hex}"
        try:
            self.disk.write_file(temporary, chunks)
            place(temporary)
            self.disk.sync_folder(target.parent)
        finally:
            # A leftover is invisible and swept by age, so failing to remove it must not hide what happened.
            with contextlib.suppress(OSError):
                self.disk.unlink(temporary)

    def _link(self, temporary: Path, target: Path, name: str) -> None:
        try:
            self.disk.link(temporary, target)
        except FileExistsError as error:
            raise ObjectExists(name, str(self.root)) from error
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise StorageMisconfigured(
                    f"{self.root}: the file system makes no hard links, which put-if-absent needs; use another one"
                ) from error
            raise


UPLOADS_FOLDER = ".%uploads"
_DESCRIPTION = "upload.json"
_BLOCK_BYTES = 4 << 20
_UPLOAD_ID = re.compile(r"[0-9a-f]{32}")


class LocalUploads:
    """The unfinished uploads of one root. Raises `OSError` as the system does; the storage types it."""

    def __init__(self, files: DurableFiles, clock: Clock, min_part_bytes: int) -> None:
        self._files = files
        self._disk = files.disk
        self._clock = clock
        self._min_part_bytes = min_part_bytes
        self._folder = files.root / UPLOADS_FOLDER

    def begin(self, name: str) -> UploadHandle:
        """Make the upload's folder and return its handle."""
        handle = UploadHandle(name, uuid.uuid4().hex, self._clock.now_ms())
        document = json.dumps({"name": name, "started_ms": handle.started_ms}).encode()
        self._files.make_folder(self._folder)
        folder = self._folder / handle.upload_id
        self._disk.make_folder(folder)
        self._write(folder, _DESCRIPTION, document)
        self._disk.sync_folder(self._folder)
        return handle

    def put_part(self, handle: UploadHandle, number: int, data: Bytes) -> PartInfo:
        """Store one part, replacing an earlier one of that number."""
        folder = self._existing(handle)
        view = memoryview(data).cast("B")
        try:
            self._write(folder, _part_file(check_part_number(number)), view)
        except FileNotFoundError as error:
            raise _gone(handle) from error
        return PartInfo(number, hashlib.sha256(view).hexdigest(), view.nbytes)

    def complete(self, handle: UploadHandle, parts: Sequence[PartInfo], target: Path) -> None:
        """Publish the concatenated parts as `target`, then drop the upload."""
        folder = self._existing(handle)
        ordered = check_parts(handle.name, parts, self._min_part_bytes)
        self._files.publish(target, lambda: self._read_parts(handle, folder, ordered))
        self._drop(handle)

    def abort(self, handle: UploadHandle) -> None:
        """Drop the upload; one that is gone is not an error."""
        with contextlib.suppress(ObjectNotFound):
            self._existing(handle)
            self._drop(handle)

    def list(self, prefix: str, older_than_ms: int | None) -> Iterator[UploadHandle]:
        """Yield the unfinished uploads, ordered by name and start."""
        handles: list[UploadHandle] = []
        for upload_id in self._folder_names():
            if not _UPLOAD_ID.fullmatch(upload_id):
                continue
            found = self._describe(upload_id)
            if found and found.name.startswith(prefix) and (older_than_ms is None or found.started_ms < older_than_ms):
                handles.append(found)
        yield from sorted(handles, key=lambda handle: (handle.name, handle.started_ms, handle.upload_id))

    def sweep(self, older_than_ms: int) -> None:
        """Remove dropped folders, and folders without a description that can be read, older than `older_than_ms` (epoch
        ms).
        """
        for entry in self._folder_names():
            folder = self._folder / entry
            with contextlib.suppress(FileNotFoundError):
                old = folder.stat().st_mtime_ns // 1_000_000 < older_than_ms
                if entry.startswith(TEMPORARY_PREFIX) or (old and self._describe(entry) is None):
                    self._empty(folder)

    def _write(self, folder: Path, file_name: str, data: Bytes) -> None:
        temporary = folder / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        try:
            self._disk.write_file(temporary, [data])
            self._disk.rename(temporary, folder / file_name)
            self._disk.sync_folder(folder)
        except OSError:
            with contextlib.suppress(OSError):
                self._disk.unlink(temporary)
            raise

    def _existing(self, handle: UploadHandle) -> Path:
        # The id becomes a path, and handles come from other processes: only what we could have made is looked up.
        self._files.check_way(self._folder / _DESCRIPTION)
        found = self._describe(handle.upload_id) if _UPLOAD_ID.fullmatch(handle.upload_id) else None
        if found is None or found.name != handle.name:
            raise _gone(handle)
        return self._folder / handle.upload_id

    def _describe(self, upload_id: str) -> UploadHandle | None:
        if (self._folder / upload_id).is_symlink():
            return None  # not made here
        path = self._folder / upload_id / _DESCRIPTION
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            name, started_ms = checked(_UPLOAD, load(data, str(path), "upload"), str(path), "upload")
        except CorruptFile as error:
            _log.warning("an upload without description: %s", error)
            return None
        return UploadHandle(name, upload_id, started_ms)

    def _read_parts(self, handle: UploadHandle, folder: Path, parts: Sequence[PartInfo]) -> Iterator[bytes]:
        for part in parts:
            digest = hashlib.sha256()
            try:
                file = (folder / _part_file(part.number)).open("rb")
            except FileNotFoundError as error:
                self._existing(handle)  # an upload that went meanwhile is reported as that
                raise InvalidArgument(f"part {part.number} of {handle.name!r} was not uploaded") from error
            with file:
                while block := file.read(_BLOCK_BYTES):
                    digest.update(block)
                    yield block
            if digest.hexdigest() != part.etag:
                raise InvalidArgument(f"part {part.number} of {handle.name!r} is not the one that etag was given for")

    def _drop(self, handle: UploadHandle) -> None:
        dropped = self._folder / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        try:
            self._disk.rename(self._folder / handle.upload_id, dropped)
        except FileNotFoundError:
            return  # a racing abort or completion dropped it
        self._disk.sync_folder(self._folder)
        # The upload is gone already; what can't be removed now is invisible and swept later.
        with contextlib.suppress(OSError):
            self._empty(dropped)

    def _empty(self, folder: Path) -> None:
        if folder.is_symlink():
            self._disk.unlink(folder)  # the link, and nothing of what it leads to
            return
        for file_name in self._disk.names(folder):
            self._disk.unlink(folder / file_name)
        self._disk.remove_folder(folder)

    def _folder_names(self) -> tuple[str, ...]:
        self._files.check_way(self._folder / _DESCRIPTION)
        try:
            return tuple(sorted(entry.name for entry in self._folder.iterdir()))
        except FileNotFoundError:
            return ()


_log = logging.getLogger(__name__)
_UPLOAD = record(lambda name, started_ms: (name, started_ms), name=text(NAME), started_ms=MILLISECONDS)


def _part_file(number: int) -> str:
    return f"part-{number:05d}"


def _gone(handle: UploadHandle) -> ObjectNotFound:
    return ObjectNotFound(
        handle.name, f"the unfinished uploads (upload {handle.upload_id[:32]} was aborted or completed)"
    )
