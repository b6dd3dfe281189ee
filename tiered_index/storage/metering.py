"""What a storage's requests amount to: how many, how many bytes, what they would cost.

`MeteredStorage.total` counts everything; `measure()` counts one piece of work on its own, however many threads work at the same
time. The scope travels in a context variable: work handed to another thread counts if it runs in a copy of the context
(`executor.submit(contextvars.copy_context().run, work)`; one copy a task).

Counts are of calls as an object store would see them (a listing: one a page of 1,000; a range of length 0: none), made when the
call is made, so failed ones count. Repeats inside a backend are not seen. Bytes are payload that was delivered.
Threads: any number.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from tiered_index.storage.base import Storage
from tiered_index.storage.delegation import Call, WrapperStorage

__all__ = ["MeteredStorage", "PriceTable", "Usage"]

_T = TypeVar("_T")
_READS = frozenset({"get", "get_range", "get_ranges", "get_suffix", "head"})
_FREE = frozenset({"delete", "delete_many", "abort_upload"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTable:
    """US dollars a request and a byte. Defaults: Amazon S3 Standard, us-east-1, list prices as of `as_of`."""

    put_per_1000_usd: float = 0.005
    """PUT, COPY, POST, LIST, and each call of a multipart upload."""
    get_per_1000_usd: float = 0.0004
    """GET and HEAD."""
    delete_per_1000_usd: float = 0.0
    """DELETE and aborting an upload."""
    egress_per_gib_usd: float = 0.0
    """Bytes read; 0 within the region."""
    as_of: str = "2026-11"

    def cost_usd(self, requests: Mapping[str, int], bytes_read: int) -> float:
        """Return the price of `requests` (operation -> count) and `bytes_read`."""
        total = bytes_read / 2**30 * self.egress_per_gib_usd
        for operation, count in requests.items():
            if operation in _FREE:
                price = self.delete_per_1000_usd
            else:
                price = self.get_per_1000_usd if operation in _READS else self.put_per_1000_usd
            total += count * price / 1000
        return total


class Usage:
    """A running count; every property is a consistent reading at one moment."""

    def __init__(self, prices: PriceTable | None = None) -> None:
        self.prices = prices or PriceTable()
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._bytes_read = 0
        self._bytes_written = 0

    def __repr__(self) -> str:
        return f"Usage(requests={self.requests_by_kind}, bytes_read={self.bytes_read}, bytes_written={self.bytes_written})"

    @property
    def requests(self) -> int:
        """How many requests were made."""
        with self._lock:
            return self._requests.total()

    @property
    def requests_by_kind(self) -> dict[str, int]:
        """How many by operation (the names of `Storage`'s methods); only those that happened."""
        with self._lock:
            return dict(self._requests)

    @property
    def bytes_read(self) -> int:
        """Payload bytes delivered by reads."""
        with self._lock:
            return self._bytes_read

    @property
    def bytes_written(self) -> int:
        """Payload bytes accepted by writes."""
        with self._lock:
            return self._bytes_written

    @property
    def cost_usd(self) -> float:
        """The estimated price of it all, in US dollars."""
        with self._lock:
            return self.prices.cost_usd(self._requests, self._bytes_read)

    def count_requests(self, operation: str, requests: int) -> None:
        """Add `requests` of one kind."""
        if requests:
            with self._lock:
                self._requests[operation] += requests

    def count_bytes(self, *, read: int = 0, written: int = 0) -> None:
        """Add payload bytes."""
        if read or written:
            with self._lock:
                self._bytes_read += read
                self._bytes_written += written


_scopes: ContextVar[tuple[tuple[MeteredStorage, Usage], ...]] = ContextVar("tiered_index_metering_scopes", default=())


class MeteredStorage(WrapperStorage):
    """Counts what passes; `total` since it was made, `measure()` within a scope."""

    def __init__(self, inner: Storage, prices: PriceTable | None = None) -> None:
        super().__init__(inner)
        self.prices = prices or PriceTable()
        self.total = Usage(self.prices)

    @contextlib.contextmanager
    def measure(self, into: Usage | None = None) -> Iterator[Usage]:
        """Count this storage's calls made in this context until the block ends; scopes may nest, and each counts.

        Pass `into` to add up several storages in one `Usage`. Work still running in other threads goes on counting after the
        block, so wait for it inside.
        """
        usage = into if into is not None else Usage(self.prices)
        token = _scopes.set((*_scopes.get(), (self, usage)))
        try:
            yield usage
        finally:
            _scopes.reset(token)

    def _around(self, call: Call, act: Callable[[], _T]) -> _T:
        usages = [self.total, *(usage for owner, usage in _scopes.get() if owner is self)]
        for usage in usages:
            usage.count_requests(call.operation, call.requests)
        result = act()
        read = _payload_bytes(call, result)
        for usage in usages:
            usage.count_bytes(read=read, written=call.sent_bytes)
        return result


def _payload_bytes(call: Call, result: object) -> int:
    if isinstance(result, bytes):
        return len(result)
    if call.operation == "get_suffix" and isinstance(result, tuple):
        return len(result[0])
    if call.operation == "get_ranges" and isinstance(result, list):
        return sum(map(len, result))
    return 0
