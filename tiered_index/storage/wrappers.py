"""Storages made of another storage: `LatencyStorage` delays its calls, `PrefixedStorage` shows one prefix of it.

Exports `MeteredStorage` and `WrapperStorage`, too. Threads: any number, as the inner storage's.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from tiered_index.errors import ObjectExists, ObjectNotFound
from tiered_index.storage.base import (
    ByteRange,
    Bytes,
    Call,
    ObjectInfo,
    PartInfo,
    Storage,
    UploadHandle,
    WrapperStorage,
    check_name,
    check_prefix,
)
from tiered_index.storage.metering import MeteredStorage, PriceTable, Usage

__all__ = ["Call", "LatencyStorage", "MeteredStorage", "PrefixedStorage", "PriceTable", "Usage", "WrapperStorage"]

_T = TypeVar("_T")


class LatencyStorage(WrapperStorage):
    """Waits before each call that sends a request: a lognormal time of median `median_ms` milliseconds.

    `sigma` is the standard deviation of its logarithm, `seed` decides the sequence of waits. `sleep` takes seconds and
    may be a recorder.
    """

    def __init__(
        self, inner: Storage, seed: int, median_ms: float, sigma: float, *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        super().__init__(inner)
        self._random = random.Random(seed)
        self._mu = math.log(median_ms / 1000)
        self._sigma = sigma
        self._sleep = sleep
        self._lock = threading.Lock()

    def _around(self, call: Call, act: Callable[[], _T]) -> _T:
        if call.requests:
            with self._lock:
                wait_s = self._random.lognormvariate(self._mu, self._sigma)
            self._sleep(wait_s)
        return act()


class PrefixedStorage(Storage):
    """The objects of `inner` under `prefix` (a name without closing slash), named by the rest of their names.

    Closing it leaves `inner` open, which other prefixes may share. `abort_uploads` aborts only uploads under the
    prefix.
    """

    def __init__(self, inner: Storage, prefix: str) -> None:
        self.inner = inner
        self._base = check_name(prefix) + "/"
        self.min_part_bytes = inner.min_part_bytes
        before, mark, query = inner.uri.partition("?")
        self.uri = f"{before.rstrip('/')}/{prefix}{mark}{query}"

    def __repr__(self) -> str:
        return f"PrefixedStorage({self.inner!r}, {self._base[:-1]!r})"

    def get(self, name: str) -> bytes:
        """As the inner storage's."""
        with self._named(name):
            return self.inner.get(self._full(name))

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """As the inner storage's."""
        with self._named(name):
            return self.inner.get_range(self._full(name), start, length)

    def get_ranges(self, name: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        """As the inner storage's."""
        with self._named(name):
            return self.inner.get_ranges(self._full(name), ranges)

    def get_suffix(self, name: str, length: int) -> tuple[bytes, int]:
        """As the inner storage's."""
        with self._named(name):
            return self.inner.get_suffix(self._full(name), length)

    def put(self, name: str, data: Bytes) -> None:
        """As the inner storage's."""
        self.inner.put(self._full(name), data)

    def put_if_absent(self, name: str, data: Bytes) -> None:
        """As the inner storage's."""
        with self._named(name):
            self.inner.put_if_absent(self._full(name), data)

    def head(self, name: str) -> ObjectInfo:
        """As the inner storage's."""
        with self._named(name):
            return replace(self.inner.head(self._full(name)), name=name)

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """As the inner storage's."""
        check_prefix(prefix)
        check_prefix(start_after)
        found = self.inner.list(self._base + prefix, start_after=self._base + start_after)
        return (replace(info, name=info.name[len(self._base) :]) for info in found)

    def delete(self, name: str) -> None:
        """As the inner storage's."""
        self.inner.delete(self._full(name))

    def delete_many(self, names: Iterable[str]) -> None:
        """As the inner storage's."""
        self.inner.delete_many([self._full(name) for name in names])

    def begin_upload(self, name: str) -> UploadHandle:
        """As the inner storage's."""
        return replace(self.inner.begin_upload(self._full(name)), name=name)

    def upload_part(self, handle: UploadHandle, number: int, data: Bytes) -> PartInfo:
        """As the inner storage's."""
        with self._named(handle.name):
            return self.inner.upload_part(self._full_handle(handle), number, data)

    def complete_upload(self, handle: UploadHandle, parts: Sequence[PartInfo]) -> None:
        """As the inner storage's."""
        with self._named(handle.name):
            self.inner.complete_upload(self._full_handle(handle), parts)

    def abort_upload(self, handle: UploadHandle) -> None:
        """As the inner storage's."""
        self.inner.abort_upload(self._full_handle(handle))

    def list_uploads(self, prefix: str = "", *, older_than_ms: int | None = None) -> Iterator[UploadHandle]:
        """As the inner storage's."""
        check_prefix(prefix)
        found = self.inner.list_uploads(self._base + prefix, older_than_ms=older_than_ms)
        return (replace(handle, name=handle.name[len(self._base) :]) for handle in found)

    def _full(self, name: str) -> str:
        # checked without the prefix, too: "../x" must be refused by itself
        check_name(name)
        return check_name(self._base + name)

    def _full_handle(self, handle: UploadHandle) -> UploadHandle:
        return replace(handle, name=self._full(handle.name))

    @contextlib.contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Raise the inner storage's `ObjectNotFound` and `ObjectExists` with the caller's name of the object."""
        try:
            yield
        except ObjectNotFound as error:
            raise ObjectNotFound(name, self.uri) from error
        except ObjectExists as error:
            raise ObjectExists(name, self.uri) from error
