"""Storages made of another storage: `LatencyStorage` delays its calls, `PrefixedStorage` shows one prefix of it.

Threads: any number, as the inner storage's.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from tiered_index.errors import ObjectExists, ObjectNotFound
from tiered_index.storage.base import Call, ObjectInfo, Storage, UploadHandle, WrapperStorage, check_name, check_prefix

_T = TypeVar("_T")


class LatencyStorage(WrapperStorage):
    """Waits before each call that sends a request: a lognormal time of median `median_ms` milliseconds.

    `sigma` is the standard deviation of its logarithm, `seed` decides the sequence of waits; `sleep` takes seconds.
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


class PrefixedStorage(WrapperStorage):
    """The objects of `inner` under `prefix` (a name without closing slash), named by the rest of their names.

    Closing it leaves `inner` open, which other prefixes may share.
    """

    def __init__(self, inner: Storage, prefix: str) -> None:
        super().__init__(inner)
        self._base = check_name(prefix) + "/"
        before, mark, query = inner.uri.partition("?")
        self.uri = f"{before.rstrip('/')}/{prefix}{mark}{query}"

    def __repr__(self) -> str:
        return f"PrefixedStorage({self.inner!r}, {self._base[:-1]!r})"

    def head(self, name: str) -> ObjectInfo:
        """As the inner storage's."""
        return replace(super().head(name), name=name)

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """As the inner storage's."""
        check_prefix(prefix, start_after)
        found = self.inner.list(self._base + prefix, start_after=self._base + start_after)
        return (replace(info, name=info.name[len(self._base) :]) for info in found)

    def foreign_keys(self) -> Iterator[str]:
        """As the inner storage's."""
        return (key[len(self._base) :] for key in self.inner.foreign_keys() if key.startswith(self._base))

    def begin_upload(self, name: str) -> UploadHandle:
        """As the inner storage's."""
        return replace(super().begin_upload(name), name=name)

    def list_uploads(self, prefix: str = "", *, older_than_ms: int | None = None) -> Iterator[UploadHandle]:
        """As the inner storage's."""
        check_prefix(prefix)
        found = self.inner.list_uploads(self._base + prefix, older_than_ms=older_than_ms)
        return (replace(handle, name=handle.name[len(self._base) :]) for handle in found)

    def abort_uploads(self, prefix: str = "", *, older_than_ms: int | None = None) -> int:
        """Abort what `list_uploads` yields; return how many."""
        return Storage.abort_uploads(self, prefix, older_than_ms=older_than_ms)

    def close(self) -> None:
        """Leave `inner` open."""

    def _full(self, name: str) -> str:
        # checked without the prefix, too: "../x" must be refused by itself
        check_name(name)
        return check_name(self._base + name)

    def _full_handle(self, handle: UploadHandle) -> UploadHandle:
        return replace(handle, name=self._full(handle.name))

    def _around(self, call: Call, act: Callable[[], _T]) -> _T:
        """Raise the inner storage's `ObjectNotFound` and `ObjectExists` with the caller's name of the object."""
        try:
            return act()
        except ObjectNotFound as error:
            raise ObjectNotFound(call.name, self.uri) from error
        except ObjectExists as error:
            raise ObjectExists(call.name, self.uri) from error
