"""Objects as files in a folder (`file:///dir`): the storage of one machine, or of a mounted file system.

An object is one file. When a call returns, its effect is durable; after a crash or an error the object is the old or
the new one. Other files in the folder (other spellings, symbolic links, pipes) are not listed and not touched; a call
with their name raises. The folder itself may be a symbolic link. A full disk or quota is `DiskFull`. Threads: any
number, in any number of processes.

An upload is the folder `.%uploads/<id>/` with `upload.json` (name, start) and one file a part. Abort and completion
first rename the folder, so that a part that arrives later is refused. A crash between publishing and removing leaves
the upload; completing it again publishes the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import SplitResult

from tiered_index.clock import Clock, SystemClock
from tiered_index.documents import MILLISECONDS, checked, load, record, text
from tiered_index.errors import (
    CorruptFile,
    InvalidArgument,
    ObjectExists,
    ObjectNotFound,
    StorageUnavailable,
    TieredIndexError,
)
from tiered_index.storage.base import (
    NAME,
    Bytes,
    ObjectInfo,
    OpenObject,
    PartInfo,
    SizedStorage,
    UploadHandle,
    check_name,
    check_part,
    check_parts,
    check_prefix,
    chosen_uploads,
)
from tiered_index.storage.disk import LOST_AND_FOUND, TEMPORARY_PREFIX, Disk, local_path
from tiered_index.storage.local.files import WORK_FOLDER, DurableFiles, check_regular, encode, typed_errors, walk

_DESCRIPTION = "upload.json"
_BLOCK_BYTES = 4 << 20
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# Most paths of objects in memory
_WAYS = 1 << 14
_UPLOAD_ID = re.compile(r"[0-9a-f]{32}")
_UPLOAD = record(lambda name, started_ms: (name, started_ms), name=text(NAME), started_ms=MILLISECONDS)
_log = logging.getLogger(__name__)


class LocalStorage(SizedStorage):
    """Objects below `folder`, which is made on the first write; a missing folder is an empty storage."""

    def __init__(self, folder: Path, *, disk: Disk | None = None, clock: Clock | None = None) -> None:
        # Path.absolute() keeps "..", resolve() follows links
        self.folder = Path(os.path.abspath(folder))  # noqa: PTH100
        self.uri = self.folder.as_uri()
        self._disk = disk or Disk()
        self._files = DurableFiles(self.folder, self._disk)
        self._clock = clock  # in tests, in place of the file system's
        self._uploads = self.folder / ".%uploads"
        self._ways: dict[str, str] = {}

    @classmethod
    def from_uri(cls, uri: SplitResult, options: Any, disk: Disk | None, parallel_reads: int | None) -> Self:
        """Return the storage of a folder."""
        return cls(local_path(uri, "file:///dir"), disk=disk)

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
        target = self._path(name)
        with typed_errors(f"writing {name!r}"):
            self._files.publish(target, lambda: [data])

    def put_if_absent(self, name: str, data: Bytes) -> None:
        """Store `data` if `name` does not exist; a hard link decides between processes. Raises `ObjectExists`."""
        target = self._path(name)
        if os.path.lexists(target):
            raise ObjectExists(name, str(self.folder))  # only saves a write; the link decides
        with typed_errors(f"writing {name!r}"):
            self._files.publish(target, lambda: [data], name)

    def settle(self, name: str) -> None:
        """Write the object again: a second sync does not repeat one that failed."""
        size = self.head(name).size_bytes

        def blocks() -> Iterator[bytes]:
            return (self.get_range(name, at, min(_BLOCK_BYTES, size - at)) for at in range(0, size, _BLOCK_BYTES))

        with typed_errors(f"writing {name!r}"):
            self._files.publish(self._path(name), blocks)

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

    def delete(self, name: str) -> None:
        """Remove the object durably."""
        self.delete_many([name])

    def delete_many(self, names: Iterable[str]) -> None:
        """Remove many objects; sync each of their folders once, and remove it if it is empty."""
        paths = [self._path(name) for name in names]
        with typed_errors(f"deleting from {self.folder}"):
            for path in paths:
                self._disk.unlink(path)
            for parent in sorted({path.parent for path in paths}):
                self._files.sync_removed(parent)
                self._files.drop_empty(parent)

    def begin_upload(self, name: str) -> UploadHandle:
        """Start a multipart upload in a hidden folder."""
        handle = UploadHandle(check_name(name), uuid.uuid4().hex, self.now_ms())
        document = json.dumps({"name": name, "started_ms": handle.started_ms}).encode()
        folder = self._uploads / handle.upload_id
        with typed_errors(f"starting an upload of {name!r}"):
            self._files.publish(folder / _DESCRIPTION, lambda: [document])
        return handle

    def upload_part(self, handle: UploadHandle, number: int, data: Bytes) -> PartInfo:
        """Store one part, replacing an earlier one of that number; its `etag` is the SHA-256 of the bytes."""
        with typed_errors(f"writing part {number} of {handle.name!r}"):
            folder = self._existing(handle)
            view = memoryview(data).cast("B")
            part = folder / _part_file(check_part(number))
            try:
                self._files.place(part, [view])
            except FileNotFoundError as error:
                if not folder.exists():
                    raise _gone(handle) from error
                # another process removed the folder of half-made files
                self._files.publish(part, lambda: [view])
        return PartInfo(number, hashlib.sha256(view).hexdigest(), view.nbytes)

    def complete_upload(self, handle: UploadHandle, parts: Sequence[PartInfo]) -> None:
        """Verify and concatenate the parts, publish the object, drop the upload. Needs the object's space twice."""
        target = self._path(handle.name)
        with typed_errors(f"completing {handle.name!r}"):
            folder = self._existing(handle)
            ordered = check_parts(handle.name, parts, self.min_part_bytes)
            self._files.publish(target, lambda: self._read_parts(handle, folder, ordered))
            self._drop(handle)

    def abort_upload(self, handle: UploadHandle) -> None:
        with typed_errors(f"aborting an upload of {handle.name!r}"), contextlib.suppress(ObjectNotFound):
            self._existing(handle)
            self._drop(handle)

    def list_uploads(self, prefix: str = "", *, older_than_ms: int | None = None) -> Iterator[UploadHandle]:
        """Yield unfinished uploads, ordered by name and start."""
        check_prefix(prefix)
        with typed_errors("listing uploads"):
            found = [self._describe(entry) for entry in self._upload_folders() if _UPLOAD_ID.fullmatch(entry)]
        return chosen_uploads(filter(None, found), prefix, older_than_ms)

    def now_ms(self) -> int:
        """Return the file system's time, which may be a file server's; this machine's if the folder is read-only."""
        if self._clock is not None:
            return self._clock.now_ms()
        with contextlib.suppress(OSError):
            os.utime(self.folder)
            return self.folder.stat().st_mtime_ns // 1_000_000
        return SystemClock().now_ms()

    def purge(self, older_than_ms: int) -> tuple[str, ...]:
        """Remove old half-made files and the folders of dropped uploads; return those that are too new to remove."""
        with typed_errors(f"sweeping {self.folder}"):
            self._files.sweep(older_than_ms)
            self._sweep_uploads(older_than_ms)
            half_made = [f"{WORK_FOLDER}/{name}" for name in self._disk.names(self.folder / WORK_FOLDER)]
            dropped = [entry for entry in self._upload_folders() if self._describe(entry) is None]
        return (*half_made, *(f"{self._uploads.name}/{entry}" for entry in dropped))

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

    def _sweep_uploads(self, older_than_ms: int) -> None:
        """Remove dropped uploads, and old ones whose description can't be read."""
        for entry in self._upload_folders():
            folder = self._uploads / entry
            with contextlib.suppress(FileNotFoundError):
                old = folder.stat().st_mtime_ns // 1_000_000 < older_than_ms
                if entry.startswith(TEMPORARY_PREFIX) or (old and self._describe(entry) is None):
                    self._empty(folder)

    def _existing(self, handle: UploadHandle) -> Path:
        # Check the id, which becomes a path: handles come from other processes
        self._files.check_way(self._uploads / _DESCRIPTION)
        found = self._describe(handle.upload_id) if _UPLOAD_ID.fullmatch(handle.upload_id) else None
        if found is None or found.name != handle.name:
            raise _gone(handle)
        return self._uploads / handle.upload_id

    def _describe(self, upload_id: str) -> UploadHandle | None:
        if (self._uploads / upload_id).is_symlink():
            return None  # not made here
        path = self._uploads / upload_id / _DESCRIPTION
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            name, started_ms = checked(_UPLOAD, load(data, str(path), "upload"), str(path), "upload")
        except CorruptFile as error:
            _log.warning("ignoring an upload whose description is damaged; it is removed by age: %s", error)
            return None
        return UploadHandle(name, upload_id, started_ms)

    def _read_parts(self, handle: UploadHandle, folder: Path, parts: Sequence[PartInfo]) -> Iterator[bytes]:
        for part in parts:
            digest = hashlib.sha256()
            try:
                file = (folder / _part_file(part.number)).open("rb")
            except FileNotFoundError as error:
                self._existing(handle)  # raises ObjectNotFound if the upload was dropped meanwhile
                raise InvalidArgument(f"part {part.number} of {handle.name!r} was not uploaded") from error
            with file:
                while block := file.read(_BLOCK_BYTES):
                    digest.update(block)
                    yield block
            if digest.hexdigest() != part.etag:
                raise InvalidArgument(f"part {part.number} of {handle.name!r} was not uploaded with that etag")

    def _drop(self, handle: UploadHandle) -> None:
        dropped = self._uploads / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        try:
            self._disk.rename(self._uploads / handle.upload_id, dropped)
        except FileNotFoundError:
            return  # a racing abort or completion dropped it
        self._disk.sync_folder(self._uploads)
        # The upload is dropped already; files that can't be removed now are invisible and swept later
        with contextlib.suppress(OSError):
            self._empty(dropped)

    def _empty(self, folder: Path) -> None:
        if folder.is_symlink():
            self._disk.unlink(folder)  # the link only, not its target
            return
        for file_name in self._disk.names(folder):
            self._disk.unlink(folder / file_name)
        self._disk.remove_folder(folder)

    def _upload_folders(self) -> tuple[str, ...]:
        self._files.check_way(self._uploads / _DESCRIPTION)
        try:
            return tuple(sorted(entry.name for entry in self._uploads.iterdir()))
        except FileNotFoundError:
            return ()


def _part_file(number: int) -> str:
    return f"part-{number:05d}"


def _gone(handle: UploadHandle) -> ObjectNotFound:
    return ObjectNotFound(
        handle.name, f"the unfinished uploads (upload {handle.upload_id[:32]} was aborted or completed)"
    )


def _read(name: str, descriptor: int, start: int, length: int) -> bytes:
    data = os.pread(descriptor, length, start)
    # Linux reads at most 2^31 - 4096 bytes a call
    while len(data) < length and (more := os.pread(descriptor, length - len(data), start + len(data))):
        data += more
    if len(data) != length:
        raise StorageUnavailable(f"{name!r} ended after {len(data)} of {length} bytes from {start}")
    return data
