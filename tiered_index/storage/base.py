"""The storage contract (`Storage`: named objects of bytes) and the base class of wrappers.

Names are non-empty strings of `/`-separated segments from ``[A-Za-z0-9._=+@-]``, at most 512 bytes, no segment ``.`` or
``..``. An object appears whole or not at all. Correctness depends on `put_if_absent` only; you may repeat every other
operation. Any number of threads. Errors: `ObjectNotFound`, `ObjectExists`, `StorageUnavailable` (retry later),
`StorageMisconfigured` (fix the set-up), `InvalidArgument` (fix the call). docs/embedding.md has the steps for authors
of storages.

Source of the shape: zarr-python's `abc/store.py`; the multipart calls follow Amazon S3's.
"""

from __future__ import annotations

import os
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar
from urllib.parse import SplitResult

from tiered_index.errors import InvalidArgument

if TYPE_CHECKING:
    from tiered_index.storage.disk import Disk

MAX_NAME_BYTES = 512
# Regular expression of an object's name
NAME = r"(?!\.{1,2}(/|$))[A-Za-z0-9._=+@-]+(/(?!\.{1,2}(/|$))[A-Za-z0-9._=+@-]+)*"
# Greatest part number. All backends have Amazon S3's bound, so that code works with each of them.
MAX_PARTS = 10_000
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
    """

    name: str
    size_bytes: int
    modified_ms: int


@dataclass(frozen=True, slots=True)
class PartInfo:
    """Receipt of one uploaded part: `number` counts from 1, `etag` is the storage's, `size_bytes` is in bytes."""

    number: int
    etag: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class UploadHandle:
    """An unfinished multipart upload; valid in any process that opens the same storage (`to_json`, `from_json`).

    - `name`: name of the object.
    - `upload_id`: the storage's id of the upload.
    - `started_ms`: time of the begin in epoch milliseconds, by the backend's clock.
    """

    name: str
    upload_id: str
    started_ms: int

    def to_json(self) -> dict[str, str | int]:
        """Return a dict for JSON, which `from_json` accepts."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, str | int]) -> UploadHandle:
        """Return the handle that `to_json` described."""
        return cls(str(document["name"]), str(document["upload_id"]), int(document["started_ms"]))


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
    """One place that holds objects. `uri` names it; `min_part_bytes` bounds every part but the last.

    With `any_names`, reads and lists of a bucket take all names, for the files of other tools.
    """

    uri: str
    any_names: bool = False
    min_part_bytes: int = 1
    options_type: ClassVar[type[StorageOptions]] = StorageOptions

    @classmethod
    def from_uri(cls, uri: SplitResult, options: Any, disk: Disk | None, parallel_reads: int | None) -> Storage:
        """Return the storage that a URI names, without a request. `open_storage` calls it. Raises `ConfigError`.

        `options` is an instance of `options_type`, with the URI's parameters. `disk` and `parallel_reads` are those of
        `open_storage`.
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

        Ascending by name (UTF-8 bytes). Lazy: pages are fetched as they are consumed. Unfinished uploads are never
        listed.
        """

    def foreign_keys(self) -> Iterator[str]:
        """Yield the keys in this storage that are not valid object names; `list` leaves them out."""
        return iter(())

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove the object; a missing object is not an error."""

    def delete_many(self, names: Iterable[str]) -> None:
        """Remove many objects in as few requests as the backend allows. Raises if any of them was not removed."""
        for name in names:
            self.delete(name)

    @abstractmethod
    def begin_upload(self, name: str) -> UploadHandle:
        """Start a multipart upload; nothing is visible under `name` until `complete_upload`."""

    @abstractmethod
    def upload_part(self, handle: UploadHandle, number: int, data: Bytes) -> PartInfo:
        """Store part `number` (1 to 10,000); repeating a number replaces that part.

        You may send parts in any order, from any thread or process. Raises `ObjectNotFound` if the upload was aborted
        or completed.
        """

    @abstractmethod
    def complete_upload(self, handle: UploadHandle, parts: Sequence[PartInfo]) -> None:
        """Publish the object: the parts in order of number. Name every part: Ceph refuses the call otherwise.

        Raises `InvalidArgument` for no parts, repeated numbers, a part that was not uploaded with that etag, or a part
        other than the last below `min_part_bytes`; `ObjectNotFound` if the upload was aborted or completed.
        """

    @abstractmethod
    def abort_upload(self, handle: UploadHandle) -> None:
        """Drop the upload and its parts; one that was aborted or completed is not an error."""

    @abstractmethod
    def list_uploads(self, prefix: str = "", *, older_than_ms: int | None = None) -> Iterator[UploadHandle]:
        """Yield unfinished uploads under `prefix`; with `older_than_ms` (epoch ms) only those started before it."""

    def abort_uploads(self, prefix: str = "", *, older_than_ms: int | None = None) -> int:
        """Abort the uploads that `list_uploads` yields; return how many there were."""
        handles = list(self.list_uploads(prefix, older_than_ms=older_than_ms))
        for handle in handles:
            self.abort_upload(handle)
        return len(handles)

    def now_ms(self) -> int:
        """Return the backend's time in epoch milliseconds. No object that is written later has an earlier time.

        The default writes a probe and deletes it. A backend whose responses have a time overrides it.
        """
        name = f"{PROBE_PREFIX}{uuid.uuid4().hex}"
        self.put(name, b"")
        try:
            return self.head(name).modified_ms
        finally:
            self.delete(name)

    def shortfalls(self) -> Mapping[str, str]:
        """Return what the service was seen to lack, and the backend's way round, by ability (such as `RANGES`)."""
        return {}

    def purge(self, older_than_ms: int) -> tuple[str, ...]:
        """Erase the bytes of deleted objects and of half-made work last written before `older_than_ms` (epoch ms).

        Return the names of the places that still hold such bytes.
        """
        return ()

    def close(self) -> None:  # noqa: B027 - most backends hold nothing
        """Release connections; the storage can't be used afterwards. Idempotent."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"

    def __enter__(self) -> Storage:
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


def check_part(number: int) -> int:
    """Return `number` if it is a valid part number, else raise `InvalidArgument`."""
    if not 1 <= number <= MAX_PARTS:
        raise InvalidArgument(f"a part's number is from 1 to {MAX_PARTS:,}, not {number}")
    return number


def check_parts(name: str, parts: Sequence[PartInfo], min_part_bytes: int) -> list[PartInfo]:
    """Return `parts` in order of number; raise `InvalidArgument` for no part, a repeated number or a part too small."""
    if not parts:
        raise InvalidArgument(f"an upload of {name!r} can't be completed with no parts")
    ordered = sorted(parts, key=lambda part: part.number)
    for part, following in pairwise(ordered):
        if part.number == following.number:
            raise InvalidArgument(f"part {part.number} of {name!r} is named twice")
        if part.size_bytes < min_part_bytes:
            raise InvalidArgument(
                f"part {part.number} of {name!r} has {part.size_bytes} bytes; all but the last need {min_part_bytes}"
            )
    for part in ordered:
        check_part(part.number)
    return ordered


def check_range(*numbers: int) -> None:
    """Raise `InvalidArgument` if a number of a range (start, length) or of a suffix (length) is negative."""
    if min(numbers) < 0:
        raise InvalidArgument(f"a range has no negative numbers: {', '.join(map(str, numbers))}")


def chosen_uploads(handles: Iterable[UploadHandle], prefix: str, older_than_ms: int | None) -> Iterator[UploadHandle]:
    """Return the uploads under `prefix` that were started before `older_than_ms`, ordered by name and start."""
    old = (one for one in handles if older_than_ms is None or one.started_ms < older_than_ms)
    chosen = (one for one in old if one.name.startswith(prefix))
    return iter(sorted(chosen, key=lambda one: (one.name, one.started_ms, one.upload_id)))


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
class Call:
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
        self.min_part_bytes = inner.min_part_bytes

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def _around(self, call: Call, act: Callable[[], _T]) -> _T:
        """Perform `call` by calling `act`. Override it to add work before or after, or to replace the call."""
        return act()

    def _full(self, name: str) -> str:
        """Return the inner storage's name of the object `name`."""
        return name

    def _full_handle(self, handle: UploadHandle) -> UploadHandle:
        return replace(handle, name=self._full(handle.name))

    def get(self, name: str) -> bytes:
        return self._around(Call("get", name, asked_bytes=None), lambda: self.inner.get(self._full(name)))

    def get_range(self, name: str, start: int, length: int) -> bytes:
        call = Call("get_range", name, requests=int(length > 0), asked_bytes=max(length, 0))
        return self._around(call, lambda: self.inner.get_range(self._full(name), start, length))

    def get_suffix(self, name: str, length: int) -> tuple[bytes, int]:
        call = Call("get_suffix", name, asked_bytes=max(length, 0))
        return self._around(call, lambda: self.inner.get_suffix(self._full(name), length))

    def put(self, name: str, data: Bytes) -> None:
        call = Call("put", name, sent_bytes=memoryview(data).nbytes)
        self._around(call, lambda: self.inner.put(self._full(name), data))

    def put_if_absent(self, name: str, data: Bytes) -> None:
        call = Call("put_if_absent", name, sent_bytes=memoryview(data).nbytes)
        self._around(call, lambda: self.inner.put_if_absent(self._full(name), data))

    def settle(self, name: str) -> None:
        """As `Storage.settle`; not passed through `_around`."""
        self.inner.settle(self._full(name))

    def head(self, name: str) -> ObjectInfo:
        return self._around(Call("head", name), lambda: self.inner.head(self._full(name)))

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """As `Storage.list`; one call of `_around` for each page, when the page is reached."""
        return self._pages(prefix, self.inner.list(prefix, start_after=start_after))

    def foreign_keys(self) -> Iterator[str]:
        """As `Storage.foreign_keys`; not passed through `_around`."""
        return self.inner.foreign_keys()

    def delete(self, name: str) -> None:
        self._around(Call("delete", name), lambda: self.inner.delete(self._full(name)))

    def delete_many(self, names: Iterable[str]) -> None:
        """As `Storage.delete_many`; one call of `_around`."""
        doomed = tuple(names)
        call = Call("delete_many", doomed[0] if doomed else "", requests=-(-len(doomed) // PAGE))
        self._around(call, lambda: self.inner.delete_many([self._full(name) for name in doomed]))

    def begin_upload(self, name: str) -> UploadHandle:
        return self._around(Call("begin_upload", name), lambda: self.inner.begin_upload(self._full(name)))

    def upload_part(self, handle: UploadHandle, number: int, data: Bytes) -> PartInfo:
        call = Call("upload_part", handle.name, sent_bytes=memoryview(data).nbytes)
        return self._around(call, lambda: self.inner.upload_part(self._full_handle(handle), number, data))

    def complete_upload(self, handle: UploadHandle, parts: Sequence[PartInfo]) -> None:
        self._around(
            Call("complete_upload", handle.name), lambda: self.inner.complete_upload(self._full_handle(handle), parts)
        )

    def abort_upload(self, handle: UploadHandle) -> None:
        self._around(Call("abort_upload", handle.name), lambda: self.inner.abort_upload(self._full_handle(handle)))

    def list_uploads(self, prefix: str = "", *, older_than_ms: int | None = None) -> Iterator[UploadHandle]:
        """As `Storage.list_uploads`; one call of `_around`."""
        # all pages within the call: a lazy listing would send them later
        return iter(
            self._around(
                Call("list_uploads", prefix), lambda: [*self.inner.list_uploads(prefix, older_than_ms=older_than_ms)]
            )
        )

    def now_ms(self) -> int:
        return self._around(Call("now_ms", ""), self.inner.now_ms)

    def shortfalls(self) -> Mapping[str, str]:
        return self.inner.shortfalls()

    def purge(self, older_than_ms: int) -> tuple[str, ...]:
        """As `Storage.purge`; not passed through `_around`."""
        return self.inner.purge(older_than_ms)

    def close(self) -> None:
        """Close the inner storage."""
        self.inner.close()

    def _pages(self, prefix: str, infos: Iterator[ObjectInfo]) -> Iterator[ObjectInfo]:
        page = self._around(Call("list", prefix), lambda: tuple(islice(infos, PAGE)))
        yield from page
        while len(page) == PAGE:
            page = self._around(Call("list", prefix, requests=0, is_further=True), lambda: tuple(islice(infos, PAGE)))
            yield from page
