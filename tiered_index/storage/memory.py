"""Objects in this process's memory (`memory://name`): for tests, demonstrations, and caches that may be lost.

Storages of the same name share one table of objects. Every method takes the lock of all tables once and works on
immutable `bytes`, so no reader sees half of a change. Threads: any number.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Self
from urllib.parse import SplitResult, unquote

from sortedcontainers import SortedDict

from tiered_index.base.clock import Clock, SystemClock
from tiered_index.base.locks import Lock, shared_lock
from tiered_index.errors import ConfigError, InvalidArgument, ObjectExists, ObjectNotFound
from tiered_index.storage.base import Bytes, ObjectInfo, SizedStorage, Writer, check_name, check_prefix


class _Shelf:
    """The objects that all storages of one name share."""

    def __init__(self) -> None:
        # name -> (bytes, modified_ms, etag)
        self.objects: SortedDict = SortedDict()


class MemoryStorage(SizedStorage):
    """The storage called `name` of this process; without a name, a storage that can't be opened again."""

    has_server = False

    _shelves: ClassVar[dict[str, _Shelf]] = {}
    _lock: ClassVar[Lock] = shared_lock(__name__)
    # of the process: a storage of a forgotten name has new etags
    _puts: ClassVar[Iterator[int]] = itertools.count(1)

    def __init__(self, name: str | None = None, *, clock: Clock | None = None) -> None:
        self.uri = f"memory://{check_name(name) if name is not None else f'unnamed-{uuid.uuid4().hex}'}"
        self._clock = clock or SystemClock()
        if name is None:
            self._shelf = _Shelf()
        else:
            with self._lock:
                self._shelf = self._shelves.setdefault(name, _Shelf())

    @classmethod
    def from_uri(cls, uri: SplitResult, options: Any) -> Self:
        """As `Storage.from_uri`."""
        try:
            return cls(unquote(uri.netloc + uri.path).rstrip("/"))
        except InvalidArgument as error:
            raise ConfigError("a memory URI has a name of letters, digits and ._=+@-: memory://name") from error

    @classmethod
    def forget(cls, name: str) -> None:
        """Forget the objects of `name`: the next storage of that name is empty. Open storages keep their objects."""
        with cls._lock:
            cls._shelves.pop(name, None)

    def children(self) -> list[MemoryStorage]:
        """Return the storages of this process one step below this one, in order of name."""
        below = self.uri.removeprefix("memory://") + "/"
        with self._lock:
            names = {name[len(below) :].partition("/")[0] for name in self._shelves if name.startswith(below)}
        return [MemoryStorage(below + name, clock=self._clock) for name in sorted(names)]

    @classmethod
    def _renew_lock(cls) -> None:
        """Replace the lock in a forked child: a thread of the parent may have held it."""
        cls._lock = shared_lock(__name__)

    def put(self, name: str, data: Bytes) -> None:
        """Store a copy of `data`."""
        check_name(name)
        value = (bytes(data), self._clock.now_ms(), f"{next(self._puts)}")
        with self._lock:
            self._shelf.objects[name] = value

    def put_if_absent(self, name: str, data: Bytes) -> None:
        """Store a copy of `data` if `name` does not exist. Raises `ObjectExists`."""
        check_name(name)
        value = (bytes(data), self._clock.now_ms(), f"{next(self._puts)}")
        with self._lock:
            if self._shelf.objects.setdefault(name, value) is not value:
                raise ObjectExists(name, self.uri)

    def head(self, name: str) -> ObjectInfo:
        data, modified_ms, etag = self._find(name)
        return ObjectInfo(name, len(data), modified_ms, etag)

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield objects in order of name, as they are when the listing begins."""
        check_prefix(prefix, start_after)
        with self._lock:
            # DEL sorts after every character of a name
            names = self._shelf.objects.irange(max(prefix, start_after), f"{prefix}\x7f")
            objects = [(name, *self._shelf.objects[name]) for name in names if name != start_after]
        for name, data, modified_ms, etag in objects:
            yield ObjectInfo(name, len(data), modified_ms, etag)

    def delete_many(self, names: Iterable[str]) -> None:
        """Remove the objects, one after the other."""
        for name in names:
            check_name(name)
            with self._lock:
                self._shelf.objects.pop(name, None)

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def open_writer(self, name: str) -> Writer:
        return _MemoryWriter(self, name)

    def _read(self, name: str, extent: Callable[[int], tuple[int, int]]) -> tuple[bytes, int]:
        data, *_ = self._find(name)
        start, length = extent(len(data))
        return data[start : start + length], len(data)

    def _find(self, name: str) -> tuple[bytes, int, str]:
        check_name(name)
        with self._lock:
            object_there: tuple[bytes, int, str] | None = self._shelf.objects.get(name)
        if object_there is None:
            raise ObjectNotFound(name, self.uri)
        return object_there


class _MemoryWriter(Writer):
    def __init__(self, storage: MemoryStorage, name: str) -> None:
        super().__init__(name)
        self._storage = storage
        self._held = bytearray()

    def _write(self, data: memoryview) -> None:
        self._held += data

    def _finish(self) -> None:
        self._storage.put(self.name, self._held)
        self._held = bytearray()

    def _drop(self) -> None:
        self._held = bytearray()


os.register_at_fork(after_in_child=MemoryStorage._renew_lock)
