"""Multipart uploads as folders of part files: the part of `LocalStorage` that assembles.

An upload is the folder `.%uploads/<id>/` with `upload.json` (name, start) and one file a part, each published by a rename.
It exists exactly while that path does: abort and the end of completion first rename the folder away in one step, then empty
it, so a part that arrives late finds no folder and is refused. Completion verifies each part's SHA-256 (the `etag`) while it
concatenates. A crash between publishing and removing leaves the upload; completing it again publishes the same bytes.

Threads: any number, in any number of processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from tiered_index.clock import Clock
from tiered_index.documents import MILLISECONDS, checked, load, record, text
from tiered_index.errors import CorruptFile, InvalidArgument, ObjectNotFound
from tiered_index.storage.base import NAME, Bytes, PartInfo, UploadHandle
from tiered_index.storage.disk import TEMPORARY_PREFIX
from tiered_index.storage.local_files import DurableFiles
from tiered_index.storage.parts import check_part_number, check_parts

__all__ = ["UPLOADS_FOLDER", "LocalUploads"]

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
        """Remove dropped folders, and folders without a description that can be read, older than `older_than_ms` (epoch ms)."""
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
    return ObjectNotFound(handle.name, f"the unfinished uploads (upload {handle.upload_id[:32]} was aborted or completed)")
