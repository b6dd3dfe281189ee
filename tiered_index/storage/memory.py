"""Objects in this process's memory (`memory://name`): for tests, demonstrations, and caches that may be lost.

Storages of the same name share one table of objects. Every method takes the table's lock once and works on immutable
`bytes`, so no reader sees half of a change. Threads: any number.
"""

from __future__ import annotations

import hashlib
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar, Self
from urllib.parse import SplitResult, unquote

from sortedcontainers import SortedDict

from tiered_index.clock import Clock, SystemClock
from tiered_index.errors import ConfigError, InvalidArgument, ObjectExists, ObjectNotFound
from tiered_index.storage.base import (
    PAGE,
    Bytes,
    ObjectInfo,
    PartInfo,
    SizedStorage,
    UploadHandle,
    check_name,
    check_part,
    check_parts,
    check_prefix,
    chosen_uploads,
)
from tiered_index.storage.disk import Disk


class _Shelf:
    """The objects and unfinished uploads that all storages of one name share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # name -> (bytes, modified_ms)
        self.objects: SortedDict = SortedDict()
        # id -> handle, and bytes of the parts by number and etag
        self.uploads: dict[str, tuple[UploadHandle, dict[int, tuple[str, bytes]]]] = {}


class MemoryStorage(SizedStorage):
    """The storage called `name` of this process; without a name, a storage that can't be opened again."""

    _shelves: ClassVar[dict[str, _Shelf]] = {}
    _registry_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, name: str | None = None, *, clock: Clock | None = None) -> None:
        self.uri = f"memory://{check_name(name) if name is not None else f'unnamed-{uuid.uuid4().hex}'}"
        self._clock = clock or SystemClock()
        if name is None:
            self._shelf = _Shelf()
        else:
            with self._registry_lock:
                self._shelf = self._shelves.setdefault(name, _Shelf())

    @classmethod
    def from_uri(cls, uri: SplitResult, options: Any, disk: Disk | None, parallel_reads: int | None) -> Self:
        """As `Storage.from_uri`."""
        try:
            return cls(unquote(uri.netloc + uri.path).rstrip("/"))
        except InvalidArgument as error:
            raise ConfigError("a memory URI has a name of letters, digits and ._=+@-: memory://name") from error

    @classmethod
    def forget(cls, name: str) -> None:
        """Forget the objects of `name`: the next storage of that name is empty. Open storages keep their objects."""
        with cls._registry_lock:
            cls._shelves.pop(name, None)

    def children(self) -> list[MemoryStorage]:
        """Return the storages of this process one step below this one, in order of name."""
        below = self.uri.removeprefix("memory://") + "/"
        with self._registry_lock:
            names = {name[len(below) :].partition("/")[0] for name in self._shelves if name.startswith(below)}
        return [MemoryStorage(below + name, clock=self._clock) for name in sorted(names)]

    @classmethod
    def _renew_locks(cls) -> None:
        """Replace the locks in a forked child: a thread of the parent may have held them."""
        cls._registry_lock = threading.Lock()
        for shelf in cls._shelves.values():
            shelf.lock = threading.Lock()

    def put(self, name: str, data: Bytes) -> None:
        """Store a copy of `data`."""
        check_name(name)
        value = (bytes(data), self._clock.now_ms())
        with self._shelf.lock:
            self._shelf.objects[name] = value

    def put_if_absent(self, name: str, data: Bytes) -> None:
        """Store a copy of `data` if `name` does not exist. Raises `ObjectExists`."""
        check_name(name)
        value = (bytes(data), self._clock.now_ms())
        with self._shelf.lock:
            if self._shelf.objects.setdefault(name, value) is not value:
                raise ObjectExists(name, self.uri)

    def head(self, name: str) -> ObjectInfo:
        data, modified_ms = self._find(name)
        return ObjectInfo(name, len(data), modified_ms)

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield objects in order of name, a page at a time."""
        check_prefix(prefix, start_after)
        after = start_after
        while True:
            from_name = max(prefix, after)
            with self._shelf.lock:
                names = self._shelf.objects.irange(minimum=from_name, inclusive=(after < from_name or not after, True))
                page = [(name, *self._shelf.objects[name]) for name in islice(names, PAGE)]
            for name, data, modified_ms in page:
                if not name.startswith(prefix):
                    return
                yield ObjectInfo(name, len(data), modified_ms)
            if len(page) < PAGE:
                return
            after = page[-1][0]

    def delete(self, name: str) -> None:
        check_name(name)
        with self._shelf.lock:
            self._shelf.objects.pop(name, None)

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def begin_upload(self, name: str) -> UploadHandle:
        handle = UploadHandle(check_name(name), uuid.uuid4().hex, self._clock.now_ms())
        with self._shelf.lock:
            self._shelf.uploads[handle.upload_id] = (handle, {})
        return handle

    def upload_part(self, handle: UploadHandle, number: int, data: Bytes) -> PartInfo:
        """Store one part; its `etag` is the SHA-256 of the bytes."""
        value = bytes(data)
        part = PartInfo(check_part(number), hashlib.sha256(value).hexdigest(), len(value))
        with self._shelf.lock:
            self._parts(handle)[number] = (part.etag, value)
        return part

    def complete_upload(self, handle: UploadHandle, parts: Sequence[PartInfo]) -> None:
        """Publish the object and forget the upload."""
        with self._shelf.lock:
            stored = self._parts(handle)
            pieces: list[bytes] = []
            for part in check_parts(handle.name, parts, self.min_part_bytes):
                etag, data = stored.get(part.number, (None, b""))
                if etag != part.etag:
                    raise InvalidArgument(f"part {part.number} of {handle.name!r} was not uploaded with that etag")
                pieces.append(data)
            self._shelf.objects[handle.name] = (b"".join(pieces), self._clock.now_ms())
            del self._shelf.uploads[handle.upload_id]

    def abort_upload(self, handle: UploadHandle) -> None:
        with self._shelf.lock:
            self._shelf.uploads.pop(handle.upload_id, None)

    def list_uploads(self, prefix: str = "", *, older_than_ms: int | None = None) -> Iterator[UploadHandle]:
        """Yield unfinished uploads, ordered by name and start."""
        check_prefix(prefix)
        with self._shelf.lock:
            handles = [handle for handle, _ in self._shelf.uploads.values()]
        return chosen_uploads(handles, prefix, older_than_ms)

    def _read(self, name: str, extent: Callable[[int], tuple[int, int]]) -> tuple[bytes, int]:
        data, _ = self._find(name)
        start, length = extent(len(data))
        return data[start : start + length], len(data)

    def _find(self, name: str) -> tuple[bytes, int]:
        check_name(name)
        with self._shelf.lock:
            found: tuple[bytes, int] | None = self._shelf.objects.get(name)
        if found is None:
            raise ObjectNotFound(name, self.uri)
        return found

    def _parts(self, handle: UploadHandle) -> dict[int, tuple[str, bytes]]:
        begun, parts = self._shelf.uploads.get(handle.upload_id, (None, {}))
        if begun is None or begun.name != handle.name:
            raise ObjectNotFound(handle.name, f"the unfinished uploads of {self.uri}")
        return parts


os.register_at_fork(after_in_child=MemoryStorage._renew_locks)
