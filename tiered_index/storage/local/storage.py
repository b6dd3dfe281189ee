"""Objects as files in a folder (`file:///dir`): the storage of one machine, or of a mounted file system.

Invariants: an object is one file, published by a rename (or, for put-if-absent, a hard link) after it was synced, so it
is old or new after a crash and never half; when a call returns, its effect is durable. After a call that raised, the
old object or the new one is there. How names become paths is `names`; any name may be a prefix of another (`a`
and `a/b`). Files in the folder that are not objects of ours (other spellings, symbolic links, pipes) are not listed and
not touched: asked for by name they are refused, as is whatever lies behind a link. The folder itself may be one.

Errors: a full disk or quota is `DiskFull`, refused permission `StorageMisconfigured`, any other trouble
`StorageUnavailable`. Threads: any number, in any number of processes. The storage keeps no descriptor open.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tiered_index.clock import Clock, SystemClock
from tiered_index.errors import InvalidArgument, ObjectExists, ObjectNotFound, StorageUnavailable
from tiered_index.storage.base import (
    Bytes,
    ObjectInfo,
    PartInfo,
    Storage,
    UploadHandle,
    check_name,
    check_prefix,
    check_range,
    check_suffix,
)
from tiered_index.storage.disk import Disk
from tiered_index.storage.local.files import DurableFiles, LocalUploads, check_regular, typed_errors
from tiered_index.storage.local.names import encode, walk

__all__ = ["LocalStorage"]


class LocalStorage(Storage):
    """Objects below `folder`, which is made on the first write; a folder that is not there holds nothing."""

    def __init__(self, folder: Path, *, disk: Disk | None = None, clock: Clock | None = None) -> None:
        # Path.absolute() keeps "..", resolve() follows links
        self.folder = Path(os.path.abspath(folder))  # noqa: PTH100
        self.uri = self.folder.as_uri()
        self._disk = disk or Disk()
        self._files = DurableFiles(self.folder, self._disk)
        self._uploads = LocalUploads(self._files, clock or SystemClock(), self.min_part_bytes)

    def __repr__(self) -> str:
        return f"LocalStorage({self.uri!r})"

    def children(self) -> Iterator[LocalStorage]:
        """Yield the storages in folders of this one, in order of name; what may hold objects of this one is none."""
        with typed_errors(f"listing {self.folder}"):
            try:
                names = sorted(entry.name for entry in os.scandir(self.folder) if entry.is_dir())
            except FileNotFoundError:
                return
        for name in names:
            if not name.endswith("%") and not name.startswith("."):
                yield LocalStorage(self.folder / name, disk=self._disk)

    def get(self, name: str) -> bytes:
        """Return the whole object; the file is one snapshot, so a racing put can't tear it."""
        with typed_errors(f"reading {name!r}"):
            descriptor = self._open(name)
            try:
                return self._read(name, descriptor, 0, os.fstat(descriptor).st_size)
            finally:
                os.close(descriptor)

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """Return exactly `length` bytes from `start`."""
        check_name(name)
        check_range(start, length)
        if length == 0:
            return b""
        with typed_errors(f"reading {name!r}"):
            descriptor = self._open(name)
            try:
                size = os.fstat(descriptor).st_size
                if start + length > size:
                    raise InvalidArgument(f"{name!r} has {size} bytes, not {start + length}")
                return self._read(name, descriptor, start, length)
            finally:
                os.close(descriptor)

    def get_suffix(self, name: str, length: int) -> tuple[bytes, int]:
        """Return the last `length` bytes and the object's size."""
        check_name(name)
        check_suffix(length)
        with typed_errors(f"reading {name!r}"):
            descriptor = self._open(name)
            try:
                size = os.fstat(descriptor).st_size
                length = min(length, size)
                return self._read(name, descriptor, size - length, length), size
            finally:
                os.close(descriptor)

    def put(self, name: str, data: Bytes) -> None:
        """Store `data` under `name`: written aside, synced, renamed, folder synced."""
        target = self._path(name)
        with typed_errors(f"writing {name!r}"):
            self._files.publish(target, lambda: [data])

    def put_if_absent(self, name: str, data: Bytes) -> None:
        """Store `data` where `name` does not exist; the link decides between processes. Raises `ObjectExists`."""
        target = self._path(name)
        if os.path.lexists(target):
            raise ObjectExists(name, str(self.folder))  # spares a loser the writing; the link is what decides
        with typed_errors(f"writing {name!r}"):
            self._files.publish_if_absent(target, lambda: [data], name)

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
        """Yield objects in order of name; each folder is read when the listing reaches it, and only if it can hold a
        match.
        """
        check_prefix(prefix)
        check_prefix(start_after)
        return self._list(prefix, start_after)

    def delete(self, name: str) -> None:
        """Remove the object durably; its folder stays."""
        self.delete_many([name])

    def delete_many(self, names: Iterable[str]) -> None:
        """Remove many objects; each folder that lost one is synced once."""
        paths = [self._path(name) for name in names]
        with typed_errors(f"deleting from {self.folder}"):
            for path in paths:
                self._disk.unlink(path)
            for parent in sorted({path.parent for path in paths}):
                if parent.exists():
                    self._disk.sync_folder(parent)

    def begin_upload(self, name: str) -> UploadHandle:
        """Start a multipart upload in a hidden folder."""
        check_name(name)
        with typed_errors(f"starting an upload of {name!r}"):
            return self._uploads.begin(name)

    def upload_part(self, handle: UploadHandle, number: int, data: Bytes) -> PartInfo:
        """Store one part; its `etag` is the SHA-256 of the bytes."""
        with typed_errors(f"writing part {number} of {handle.name!r}"):
            return self._uploads.put_part(handle, number, data)

    def complete_upload(self, handle: UploadHandle, parts: Sequence[PartInfo]) -> None:
        """Verify and concatenate the parts, publish the object, drop the upload.

        Needs room for the object once more.
        """
        target = self._path(handle.name)
        with typed_errors(f"completing {handle.name!r}"):
            self._uploads.complete(handle, parts, target)

    def abort_upload(self, handle: UploadHandle) -> None:
        """Drop the upload and its parts."""
        with typed_errors(f"aborting an upload of {handle.name!r}"):
            self._uploads.abort(handle)

    def list_uploads(self, prefix: str = "", *, older_than_ms: int | None = None) -> Iterator[UploadHandle]:
        """Yield unfinished uploads, ordered by name."""
        check_prefix(prefix)
        with typed_errors("listing uploads"):
            return iter(tuple(self._uploads.list(prefix, older_than_ms)))

    def abort_uploads(self, prefix: str = "", *, older_than_ms: int | None = None) -> int:
        """Abort what `list_uploads` yields; return how many.

        With an age and no prefix it also removes half-made files that old, which a killed writer left. Choose an age
        above the longest single put: a younger temporary file may still be somebody's work.
        """
        aborted = super().abort_uploads(prefix, older_than_ms=older_than_ms)
        if older_than_ms is not None and not prefix:
            with typed_errors("sweeping temporary files"):
                self._files.sweep(older_than_ms)
                self._uploads.sweep(older_than_ms)
        return aborted

    def _path(self, name: str) -> Path:
        path = self.folder / encode(check_name(name))
        self._files.check_way(path)
        return path

    def _open(self, name: str) -> int:
        path = self._path(name)
        try:
            # a pipe in an object's place would be waited for
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise ObjectNotFound(name, str(self.folder)) from error
        try:
            check_regular(path, os.fstat(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _read(self, name: str, descriptor: int, start: int, length: int) -> bytes:
        data = os.pread(descriptor, length, start)
        if len(data) == length:
            return data
        # Linux reads at most 2^31 - 4096 bytes a call; anything shorter than that means the file shrank under us.
        pieces: list[bytes] = [data]
        while data and (missing := length - sum(map(len, pieces))):
            data = os.pread(descriptor, missing, start + length - missing)
            pieces.append(data)
        whole = b"".join(pieces)
        if len(whole) != length:
            raise StorageUnavailable(f"{name!r} ended after {len(whole)} of {length} bytes from {start}")
        return whole

    def _list(self, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        with typed_errors(f"listing {self.folder}"):
            yield from walk(self.folder, prefix, start_after)
