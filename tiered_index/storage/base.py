"""The storage contract (`Storage`: named objects of bytes) and the base class of wrappers.

Names are strings of `/`-separated segments of 1 to 200 characters from ``[A-Za-z0-9._=+@-]``, at most 512 bytes, no
segment ``.`` or ``..``. An object appears whole or not at all. Correctness depends on `put_if_absent` only; you may
repeat every other operation. Any number of threads. Errors: `ObjectNotFound`, `ObjectExists`, `StorageUnavailable`
(retry later), `StorageMisconfigured` (fix the set-up), `InvalidArgument` (fix the call). docs/embedding.md has the
steps for authors of storages.

Source of the shape: zarr-python's `abc/store.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Literal, Self, TypeAlias, TypeVar
from urllib.parse import SplitResult, urlsplit

from tiered_index.errors import ConfigError, IndexClosed, InvalidArgument, StorageMisconfigured

MAX_NAME_BYTES = 512
# Regular expressions of a segment and of an object's name
SEGMENT = r"(?!\.{1,2}(/|$))[A-Za-z0-9._=+@-]{1,200}"
NAME = f"{SEGMENT}(/{SEGMENT})*"
PART_BYTES = 8 << 20
"""Most bytes that a writer has in memory. A backend sends larger objects in parts of this size, as costs assume."""
PROBE_PREFIX = "probe/"
"""Prefix of objects that probe the storage and belong to no index. Any process may delete them."""

RANGES, START_AFTER, BULK_DELETES = "ranges", "lists after a name", "bulk deletes"
"""Abilities that a service may lack, and that a backend may work round (`Storage.shortfalls`)."""

_NAME = re.compile(NAME)
_PREFIX = re.compile(r"[A-Za-z0-9._=+@/-]*")

Bytes: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object's name, size and time of change.

    - `name`: the object's name.
    - `size_bytes`: its size in bytes.
    - `modified_ms`: time of change in epoch milliseconds, by the backend's clock.
    - `etag`: the backend's mark of the content, without quotes: while it stays the same, so do the bytes. None if the
      backend has none.
    """

    name: str
    size_bytes: int
    modified_ms: int
    etag: str | None = None


class Writer(ABC):
    """A stream of the bytes of one object, which exists whole once `close` returns; before, nothing is visible.

    Leaving a `with` block closes it, or aborts it after an exception. Garbage is aborted. A call that raises has
    aborted it: start again with another writer. As after `put`, the object may exist if `close` raised. Threads: one
    at a time. In a forked child a writer of the parent raises `IndexClosed`, and drops nothing: it is the parent's.

    A backend implements `_write`, `_finish` and `_drop`, which get valid calls only, in bounded memory.
    """

    _state: Literal["open", "closed", "aborted"] = "open"

    def __init__(self, name: str) -> None:
        self.name = check_name(name)
        # Bytes written so far
        self.size_bytes = 0
        self._pid = os.getpid()

    def write(self, data: Bytes) -> None:
        """Add the next bytes. The caller may change `data` afterwards. Raises `InvalidArgument` after the end."""
        if self._state != "open":
            raise InvalidArgument(f"the writer of {self.name!r} was {self._state}: open another one")
        self._check_process()
        view = memoryview(data).cast("B")
        with self._aborted_by_errors():
            self._write(view)
        self.size_bytes += view.nbytes

    def close(self) -> None:
        """Make the object exist whole, durably; replace an existing one. Idempotent. Raises after `abort`."""
        if self._state == "closed":
            return
        if self._state == "aborted":
            raise InvalidArgument(f"the writer of {self.name!r} was aborted: write the object with another one")
        self._check_process()
        with self._aborted_by_errors():
            self._finish()
        self._state = "closed"

    def abort(self) -> None:
        """Drop the bytes; nothing appears. Idempotent; does nothing after `close`. `Storage.purge` drops the rest."""
        if self._state == "open":
            self._state = "aborted"
            if self._pid == os.getpid():
                self._drop()

    @abstractmethod
    def _write(self, data: memoryview) -> None:
        """Take the next bytes. Don't keep `data`: the caller may change its buffer."""

    @abstractmethod
    def _finish(self) -> None:
        """Make the object exist whole and durably, or raise."""

    @abstractmethod
    def _drop(self) -> None:
        """Free the resources, and drop what was sent."""

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            problem = "belongs to the parent process, which forked this one: open another storage and writer"
            raise IndexClosed(f"the writer of {self.name!r} {problem}")

    @contextlib.contextmanager
    def _aborted_by_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # the first error tells the cause; `purge` drops the rest
                self.abort()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            if self._state != "aborted":
                self.close()
            return
        with contextlib.suppress(Exception):  # the error of the block is the cause
            self.abort()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.abort()


class StorageOptions:
    """Base of each backend's options, a dataclass or a `msgspec.Struct`, which are immutable.

    `uri_parameters` names the options that a URI may set.
    """

    __slots__ = ()
    uri_parameters: ClassVar[tuple[str, ...]] = ()


class OpenObject:
    """An object that is open for reading, by its file descriptor. Threads: one.

    `counters` are called when it is closed, with the number of reads and their bytes. A subclass calls `super()`.
    """

    __slots__ = "counters", "descriptor"

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.counters: tuple[Callable[[int, int], None], ...] = ()

    def close(self, reads: int, size_bytes: int) -> None:
        """Close the object after so many reads, of `size_bytes` together."""
        os.close(self.descriptor)
        if reads:
            for count in self.counters:
                count(reads, size_bytes)


class Storage(ABC):
    """One place that holds objects, which `uri` names.

    - With `any_names`, reads and lists of a bucket take all names, for the files of other tools.
    - `has_server`: a server decides `put_if_absent`, and may ignore the condition; writers and jobs probe it.
    """

    uri: str
    any_names: bool = False
    has_server: bool = True
    options_type: ClassVar[type[StorageOptions]] = StorageOptions

    @classmethod
    def from_uri(cls, uri: SplitResult, options: Any) -> Storage:
        """Return the storage that a URI names, without a request. `open_storage` calls it. Raises `ConfigError`.

        `options` is an instance of `options_type`, with the URI's parameters.
        """
        raise NotImplementedError

    @abstractmethod
    def get(self, name: str) -> bytes:
        """Return the whole object. Raises `ObjectNotFound`."""

    @abstractmethod
    def get_range(self, name: str, start: int, length: int) -> bytes:
        """Return exactly `length` bytes from `start`.

        Raises `InvalidArgument` for a range beyond the object's end or a negative number, `StorageUnavailable` if the
        backend returns another number of bytes, and `ObjectNotFound`. `length` 0 returns ``b""`` without a request.
        """

    def open_now(self, name: str, size_bytes: int) -> OpenObject | None:
        """Open an object of `size_bytes` on the local disk, or return None. The caller verifies what it reads.

        After None call `get_range`, which also raises the errors.
        """
        return None

    @abstractmethod
    def get_suffix(self, name: str, length: int) -> tuple[bytes, int]:
        """Return the last `length` bytes (of a shorter object: all) and the object's size in bytes."""

    @abstractmethod
    def put(self, name: str, data: Bytes) -> None:
        """Store `data` under `name` atomically and durably; replace an existing object."""

    @abstractmethod
    def put_if_absent(self, name: str, data: Bytes) -> None:
        """Store `data` if `name` does not exist; of racing callers exactly one succeeds. Raises `ObjectExists`.

        A backend that repeats requests may raise it although its own first request succeeded. A caller that must know
        puts an attempt id in `data` and reads it back.
        """

    def settle(self, name: str) -> None:  # noqa: B027 - most backends show only what is durable
        """Make an existing object durable. Raises `ObjectNotFound`.

        A put that raised, or one of another process, may leave an object that a power cut removes. Call this before you
        rely on such an object. If all visible objects of a backend are durable, it does nothing.
        """

    @abstractmethod
    def head(self, name: str) -> ObjectInfo:
        """Return the object's size and time. Raises `ObjectNotFound`."""

    @abstractmethod
    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names start with `prefix` and sort after `start_after` (exclusive).

        Ascending by name (UTF-8 bytes). Lazy: pages are fetched as they are consumed. Half-made objects are
        never listed.
        """

    @abstractmethod
    def delete_many(self, names: Iterable[str]) -> None:
        """Remove objects in as few requests as the backend allows; a missing object is not an error.

        Raises if any of them was not removed.
        """

    @abstractmethod
    def open_writer(self, name: str) -> Writer:
        """Return a stream for a large object, which appears when it is closed. Sends no request yet."""

    def now_ms(self) -> int:
        """Return the backend's time in epoch milliseconds. No object that is written later has an earlier time.

        The default writes a probe and deletes it. A backend whose responses have a time overrides it.
        """
        name = f"{PROBE_PREFIX}{uuid.uuid4().hex}"
        self.put(name, b"")
        try:
            return self.head(name).modified_ms
        finally:
            self.delete_many([name])

    @property
    def may_end_lists_early(self) -> bool:
        """Whether `list` may end before the last name, because its client can't see that a page has a successor.

        `list_whole` lists on then.
        """
        return False

    def shortfalls(self) -> Mapping[str, str]:
        """Return what the service was seen to lack, and the backend's way round, by ability (such as `RANGES`)."""
        return {}

    def purge(self, older_than_ms: int) -> tuple[str, ...]:
        """Drop half-made uploads that began before `older_than_ms` (epoch ms), and erase bytes of deleted objects.

        Return the names of the places that still hold such bytes: those of younger uploads, too.
        """
        return ()

    def close(self) -> None:  # noqa: B027 - most backends hold nothing
        """Release connections; the storage can't be used afterwards. Idempotent."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_name(name: str) -> str:
    """Return `name` if it is a valid object name, else raise `InvalidArgument`."""
    if len(name) > MAX_NAME_BYTES or not _NAME.fullmatch(name):
        raise InvalidArgument(f"not a valid object name: {name[:80]!r}")
    return name


def check_prefix(*prefixes: str) -> None:
    """Raise `InvalidArgument` unless object names can start with each of `prefixes`."""
    for prefix in prefixes:
        if len(prefix) > MAX_NAME_BYTES or not _PREFIX.fullmatch(prefix) or ".." in prefix.split("/"):
            raise InvalidArgument(f"not a valid prefix: {prefix[:80]!r}")


def list_whole(storage: Storage, prefix: str = "", *, start_after: str = "", known: str = "") -> Iterator[ObjectInfo]:
    """Yield the objects of `Storage.list`, all of them, also if a service ends a page early without a token.

    Where the client can't see that, objects are listed again after the greatest name until there are none: one more
    request. A listing that ends at a name that is `known`, or before it, has no news, and is believed. Raises
    `StorageMisconfigured` if the names don't grow.
    """
    last = start_after
    while True:
        before = last
        for info in storage.list(prefix, start_after=last):
            if info.name <= last:
                raise StorageMisconfigured(
                    f"{storage.uri}: a listing has {info.name!r} after {last!r}; the engine needs order of name"
                )
            last = info.name
            yield info
        if last == before or last <= known or not storage.may_end_lists_early:
            return


def check_range(*numbers: int) -> None:
    """Raise `InvalidArgument` if a number of a range (start, length) or of a suffix (length) is negative."""
    if min(numbers) < 0:
        raise InvalidArgument(f"a range has no negative numbers: {', '.join(map(str, numbers))}")


def check_endpoint(url: str, name: str = "endpoint_url") -> None:
    """Raise `ConfigError` if `url` is not a service's URL or holds credentials. The message has the `name` alone."""
    try:
        parts = urlsplit(url)
        plain = parts.scheme in {"http", "https"} and bool(parts.hostname) and not parts.query and not parts.fragment
        _ = parts.port  # raises ValueError if it is not a number
    except ValueError:
        plain = False
    else:
        if parts.username is not None or parts.password is not None:
            raise ConfigError(f"{name} must not hold credentials; use the environment or a profile")
    if not plain:
        raise ConfigError(f"{name} must look like https://host[:port]")


class BufferedWriter(Writer):
    """Base of writers that send a small object whole, and a larger one in parts.

    `_held` has the bytes that were not sent: at the end the last part, or the whole object if `_sent_bytes` is 0.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._held = bytearray()
        # Bytes of the parts that were sent
        self._sent_bytes = 0

    @abstractmethod
    def _send_part(self) -> None:
        """Send the next part, which is `_held`."""

    def _send(self) -> None:
        self._send_part()
        self._sent_bytes += len(self._held)
        self._held = bytearray()

    def _write(self, data: memoryview) -> None:
        while data:
            if len(self._held) == PART_BYTES:
                self._send()
            room = PART_BYTES - len(self._held)
            self._held += data[:room]
            data = data[room:]

    def _drop(self) -> None:
        self._held = bytearray()


class SizedStorage(Storage):
    """Base of storages that know an object's size when they read a part of it."""

    @abstractmethod
    def _read(self, name: str, extent: Callable[[int], tuple[int, int]]) -> tuple[bytes, int]:
        """Return the bytes in the range `extent(size)` (start, length) of an object, and its size, of one version.

        Raises `InvalidArgument` for a wrong name, `ObjectNotFound`, and what `extent` raises.
        """

    def get(self, name: str) -> bytes:
        """Return the whole object, all bytes of the same version."""
        return self._read(name, lambda size: (0, size))[0]

    def get_range(self, name: str, start: int, length: int) -> bytes:
        check_name(name)
        check_range(start, length)

        def within(size: int) -> tuple[int, int]:
            if start + length > size:
                raise InvalidArgument(f"{name!r} has {size} bytes, not {start + length}")
            return start, length

        return self._read(name, within)[0] if length else b""

    def get_suffix(self, name: str, length: int) -> tuple[bytes, int]:
        check_range(length)
        return self._read(name, lambda size: (max(0, size - length), min(length, size)))


# Most objects that one request may list or delete; Amazon S3's bound
PAGE = 1000

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class StorageRequest:
    """One call of a storage: the method's name, the object or prefix, and its bytes.

    `operation` is the method's name, `name` that of the object or prefix.
    `requests` is the number of requests on an object store; `sent_bytes` is the size of the payload sent. `asked_bytes`
    is the greatest size of the answer: the range's length, 0 for a call that reads no object, None if unknown (a whole
    object). `is_further` marks the call for a listing's next page. It has no request if there is no such page, so
    `requests` is 0.
    """

    operation: str
    name: str
    requests: int = 1
    sent_bytes: int = 0
    asked_bytes: int | None = 0
    is_further: bool = False


class WrapperStorage(Storage):
    """Base of wrappers: passes every call to `inner`. Threads: as the inner storage; a wrapper guards its own state."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.uri = inner.uri

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def _around(self, request: StorageRequest, act: Callable[[], _T]) -> _T:
        """Perform `request` by calling `act`. Override it to add work before or after, or to replace the call."""
        return act()

    def _full(self, name: str) -> str:
        """Return the inner storage's name of the object `name`."""
        return name

    def get(self, name: str) -> bytes:
        return self._around(StorageRequest("get", name, asked_bytes=None), lambda: self.inner.get(self._full(name)))

    def get_range(self, name: str, start: int, length: int) -> bytes:
        request = StorageRequest("get_range", name, requests=int(length > 0), asked_bytes=max(length, 0))
        return self._around(request, lambda: self.inner.get_range(self._full(name), start, length))

    def get_suffix(self, name: str, length: int) -> tuple[bytes, int]:
        request = StorageRequest("get_suffix", name, asked_bytes=max(length, 0))
        return self._around(request, lambda: self.inner.get_suffix(self._full(name), length))

    def put(self, name: str, data: Bytes) -> None:
        request = StorageRequest("put", name, sent_bytes=memoryview(data).nbytes)
        self._around(request, lambda: self.inner.put(self._full(name), data))

    def put_if_absent(self, name: str, data: Bytes) -> None:
        request = StorageRequest("put_if_absent", name, sent_bytes=memoryview(data).nbytes)
        self._around(request, lambda: self.inner.put_if_absent(self._full(name), data))

    def settle(self, name: str) -> None:
        """As `Storage.settle`; not passed through `_around`."""
        self.inner.settle(self._full(name))

    def head(self, name: str) -> ObjectInfo:
        return self._around(StorageRequest("head", name), lambda: self.inner.head(self._full(name)))

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """As `Storage.list`; one call of `_around` for each page, when the page is reached."""
        return self._pages(prefix, self.inner.list(prefix, start_after=start_after))

    def delete_many(self, names: Iterable[str]) -> None:
        """As `Storage.delete_many`; one call of `_around`."""
        doomed = tuple(names)
        request = StorageRequest("delete_many", doomed[0] if doomed else "", requests=-(-len(doomed) // PAGE))
        self._around(request, lambda: self.inner.delete_many([self._full(name) for name in doomed]))

    def open_writer(self, name: str) -> Writer:
        """As `Storage.open_writer`; a call of `_around` for each `write`, and one for the end: a `put`."""
        return _WrapperWriter(self, name)

    def now_ms(self) -> int:
        return self._around(StorageRequest("now_ms", ""), self.inner.now_ms)

    @property
    def may_end_lists_early(self) -> bool:
        return self.inner.may_end_lists_early

    def shortfalls(self) -> Mapping[str, str]:
        return self.inner.shortfalls()

    def purge(self, older_than_ms: int) -> tuple[str, ...]:
        """As `Storage.purge`; not passed through `_around`."""
        return self.inner.purge(older_than_ms)

    def close(self) -> None:
        """Close the inner storage."""
        self.inner.close()

    def _pages(self, prefix: str, infos: Iterator[ObjectInfo]) -> Iterator[ObjectInfo]:
        page = self._around(StorageRequest("list", prefix), lambda: tuple(islice(infos, PAGE)))
        yield from page
        while len(page) == PAGE:
            page = self._around(
                StorageRequest("list", prefix, requests=0, is_further=True), lambda: tuple(islice(infos, PAGE))
            )
            yield from page


class _WrapperWriter(Writer):
    def __init__(self, storage: WrapperStorage, name: str) -> None:
        super().__init__(name)
        self._storage = storage
        self._inner = storage.inner.open_writer(storage._full(name))

    def _write(self, data: memoryview) -> None:
        # the backend tells of requests that it sends for parts
        request = StorageRequest("write", self.name, requests=0, sent_bytes=data.nbytes)
        self._storage._around(request, lambda: self._inner.write(data))

    def _finish(self) -> None:
        self._storage._around(StorageRequest("put", self.name), self._inner.close)

    def _drop(self) -> None:
        self._inner.abort()
