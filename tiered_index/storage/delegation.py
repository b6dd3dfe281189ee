"""A storage that passes every call on to another: the base of wrappers.

Every request goes through one method, `_around`, with a `Call` that says what it is; a wrapper overrides that method to count,
delay or break calls, and single operations where it must. A listing is one call a page of 1,000.
Threads: as the inner storage's; a wrapper guards its own state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from tiered_index.storage.base import ByteRange, Bytes, ObjectInfo, PartInfo, Storage, UploadHandle

__all__ = ["PAGE", "Call", "WrapperStorage"]

PAGE = 1000
"""Objects a request may list or delete; Amazon S3's."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a storage: the operation (the method's name), the object or prefix, and what it sends.

    `requests` is how many requests it would be on an object store; `sent_bytes` counts the payload. `asked_bytes` is the most payload
    that the answer may hold: the sum of the ranges, 0 for what reads no object, None where nobody knows (a whole object). `is_further` says
    that it asks for what follows a full page of a listing: no request where that page was the last.
    """

    operation: str
    name: str
    requests: int = 1
    sent_bytes: int = 0
    asked_bytes: int | None = 0
    is_further: bool = False


class WrapperStorage(Storage):
    """Delegates everything to `inner`."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.uri = inner.uri
        self.min_part_bytes = inner.min_part_bytes

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def _around(self, call: Call, act: Callable[[], _T]) -> _T:
        """Perform `call` by `act`; override to do something before, after or instead."""
        return act()

    def get(self, name: str) -> bytes:
        """As the inner storage's."""
        return self._around(Call("get", name, asked_bytes=None), lambda: self.inner.get(name))

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """As the inner storage's."""
        call = Call("get_range", name, requests=int(length > 0), asked_bytes=max(length, 0))
        return self._around(call, lambda: self.inner.get_range(name, start, length))

    def get_ranges(self, name: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        """As the inner storage's; one call."""
        lengths = [r.length for r in ranges if r.length > 0]
        call = Call("get_ranges", name, requests=len(lengths), asked_bytes=sum(lengths))
        return self._around(call, lambda: self.inner.get_ranges(name, ranges))

    def get_suffix(self, name: str, length: int) -> tuple[bytes, int]:
        """As the inner storage's."""
        call = Call("get_suffix", name, asked_bytes=max(length, 0))
        return self._around(call, lambda: self.inner.get_suffix(name, length))

    def put(self, name: str, data: Bytes) -> None:
        """As the inner storage's."""
        call = Call("put", name, sent_bytes=memoryview(data).nbytes)
        self._around(call, lambda: self.inner.put(name, data))

    def put_if_absent(self, name: str, data: Bytes) -> None:
        """As the inner storage's."""
        call = Call("put_if_absent", name, sent_bytes=memoryview(data).nbytes)
        self._around(call, lambda: self.inner.put_if_absent(name, data))

    def head(self, name: str) -> ObjectInfo:
        """As the inner storage's."""
        return self._around(Call("head", name), lambda: self.inner.head(name))

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """As the inner storage's; one call a page, made when the page is reached."""
        return self._pages(prefix, self.inner.list(prefix, start_after=start_after))

    def delete(self, name: str) -> None:
        """As the inner storage's."""
        self._around(Call("delete", name), lambda: self.inner.delete(name))

    def delete_many(self, names: Iterable[str]) -> None:
        """As the inner storage's; one call."""
        doomed = tuple(names)
        call = Call("delete_many", doomed[0] if doomed else "", requests=-(-len(doomed) // PAGE))
        self._around(call, lambda: self.inner.delete_many(doomed))

    def begin_upload(self, name: str) -> UploadHandle:
        """As the inner storage's."""
        return self._around(Call("begin_upload", name), lambda: self.inner.begin_upload(name))

    def upload_part(self, handle: UploadHandle, number: int, data: Bytes) -> PartInfo:
        """As the inner storage's."""
        call = Call("upload_part", handle.name, sent_bytes=memoryview(data).nbytes)
        return self._around(call, lambda: self.inner.upload_part(handle, number, data))

    def complete_upload(self, handle: UploadHandle, parts: Sequence[PartInfo]) -> None:
        """As the inner storage's."""
        self._around(Call("complete_upload", handle.name), lambda: self.inner.complete_upload(handle, parts))

    def abort_upload(self, handle: UploadHandle) -> None:
        """As the inner storage's."""
        self._around(Call("abort_upload", handle.name), lambda: self.inner.abort_upload(handle))

    def list_uploads(self, prefix: str = "", *, older_than_ms: int | None = None) -> Iterator[UploadHandle]:
        """As the inner storage's; one call."""
        return self._around(
            Call("list_uploads", prefix), lambda: self.inner.list_uploads(prefix, older_than_ms=older_than_ms)
        )

    def abort_uploads(self, prefix: str = "", *, older_than_ms: int | None = None) -> int:
        """As the inner storage's, which may also clear half-made work; one call."""
        return self._around(
            Call("abort_uploads", prefix), lambda: self.inner.abort_uploads(prefix, older_than_ms=older_than_ms)
        )

    def close(self) -> None:
        """Close the inner storage."""
        self.inner.close()

    def _pages(self, prefix: str, infos: Iterator[ObjectInfo]) -> Iterator[ObjectInfo]:
        page = self._around(Call("list", prefix), lambda: tuple(islice(infos, PAGE)))
        yield from page
        while len(page) == PAGE:
            page = self._around(Call("list", prefix, is_further=True), lambda: tuple(islice(infos, PAGE)))
            yield from page
