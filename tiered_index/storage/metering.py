"""Counts the requests of storages, and holds them to limits.

Requests are counted as an object store sees them (a listing: one per page of 1,000; a range of length 0: none) when the
call is made, so failed ones count. Bytes are payload that was delivered. Threads: any number.

A call that would exceed a limit of a `Usage` in scope, or that follows a `Cancellation` in scope, raises
`BudgetExceeded`; it is not sent, and no usage counts it. Checking and counting are one atomic step. The bytes that
calls under way have asked for count as reserved.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeVar, cast

from tiered_index.base.call import Call, active_context
from tiered_index.base.locks import shared_lock
from tiered_index.base.tracing import span
from tiered_index.errors import BudgetExceeded, IndexClosed, StorageUnavailable
from tiered_index.storage.base import OpenObject, Storage, StorageRequest, WrapperStorage
from tiered_index.storage.prices import PriceTable

_T = TypeVar("_T")
# A response is not late as long as it may come at this rate
_LEAST_BYTES_PER_S = 1 << 20
# Guards all counts: all usages in scope admit a call, or none does
_lock = shared_lock(__name__)


def _renew_lock() -> None:
    """Replace the lock in a forked child: a thread of the parent may have held it."""
    global _lock
    _lock = shared_lock(__name__)


os.register_at_fork(after_in_child=_renew_lock)


class Usage:
    """A running count of requests and bytes, with optional limits. Threads: any number.

    Limits are inclusive; None: no limit. `max_bytes` limits bytes read. The size of a whole object is unknown before it
    is read: such a call is admitted below the limit and may exceed it once. The next call is refused. `max_cost_usd`
    limits the estimated price in the same way.
    """

    def __init__(
        self,
        prices: PriceTable | None = None,
        *,
        max_requests: int | None = None,
        max_bytes: int | None = None,
        max_cost_usd: float | None = None,
    ) -> None:
        self.prices = prices or PriceTable()
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.max_cost_usd = max_cost_usd
        self._requests: dict[str, int] = {}
        # Payload bytes that reads delivered, and that writes sent
        self.bytes_read = self.bytes_written = 0
        # Those of the read ones that nobody needs: they are between two needed ranges of one request
        self.bytes_between = 0
        # Calls under way; the time at which they became more than none, and that of the last response
        self.under_way = 0
        self.since_s = self.heard_s = 0.0
        self._bytes_held = 0

    @property
    def requests(self) -> int:
        """The number of requests that were made."""
        with _lock:
            return sum(self._requests.values())

    @property
    def requests_left(self) -> int | None:
        """The number of further requests that `max_requests` allows; None: no limit."""
        with _lock:
            return None if self.max_requests is None else max(0, self.max_requests - sum(self._requests.values()))

    @property
    def requests_by_kind(self) -> dict[str, int]:
        """The number of requests by operation (the name of a method of `Storage`)."""
        with _lock:
            return dict(self._requests)

    @property
    def bytes_asked(self) -> int:
        """Payload bytes that reads have delivered or that reads under way have asked for."""
        with _lock:
            return self.bytes_read + self._bytes_held

    @property
    def bytes_left(self) -> int | None:
        """The number of further bytes that `max_bytes` allows, less those of reads under way; None: no limit."""
        with _lock:
            return None if self.max_bytes is None else max(0, self.max_bytes - self.bytes_read - self._bytes_held)

    @property
    def cost_usd(self) -> float:
        """The estimated price of all requests and bytes, in US dollars."""
        with _lock:
            return self.prices.cost_usd(self._requests, self.bytes_read)

    def totals(self) -> tuple[int, int, float, int]:
        """Return `requests`, `bytes_asked`, `cost_usd` and `bytes_between` at one moment."""
        with _lock:
            cost_usd = self.prices.cost_usd(self._requests, self.bytes_read)
            return sum(self._requests.values()), self.bytes_read + self._bytes_held, cost_usd, self.bytes_between

    @property
    def used(self) -> bool:
        """Whether any request was counted."""
        return bool(self._requests or self.bytes_read or self._bytes_held)

    def is_silent(self, patience_s: float) -> bool:
        """Return whether calls are under way, and none of this usage had a response for `patience_s`.

        Each MiB that was asked for gets a second more.
        """
        with _lock:
            if not self.under_way:
                return False
            silent_s = time.monotonic() - max(self.since_s, self.heard_s)
            return silent_s >= patience_s + self._bytes_held / _LEAST_BYTES_PER_S

    @property
    def limited(self) -> bool:
        """Whether there is a limit."""
        return any(bound is not None for bound in (self.max_requests, self.max_bytes, self.max_cost_usd))

    def end(self, request: StorageRequest, *, read: int = 0, written: int = 0) -> None:
        """Count the payload of `request` (0 if it failed) and release the bytes that were reserved for it."""
        with _lock:
            self._end(request, read, written)

    def count_ranges(self, requests: int, size_bytes: int) -> None:
        """Count ended reads of ranges."""
        with _lock:
            self._requests["get_range"] = self._requests.get("get_range", 0) + requests
            self.bytes_read += size_bytes

    def count_between(self, size_bytes: int) -> None:
        """Note that `size_bytes` of the bytes that were read only joined two ranges."""
        with _lock:
            self.bytes_between += size_bytes

    def _end(self, request: StorageRequest, read: int, written: int) -> None:
        self._bytes_held -= request.asked_bytes or 0
        self.bytes_read += read
        self.bytes_written += written

    def _count(self, request: StorageRequest) -> None:
        if request.requests:
            self._requests[request.operation] = self._requests.get(request.operation, 0) + request.requests
        self._bytes_held += request.asked_bytes or 0

    def _take_back(self, request: StorageRequest) -> None:
        """Undo `_count` for one that another usage refused."""
        self._requests[request.operation] -= request.requests
        if not self._requests[request.operation]:
            del self._requests[request.operation]
        self._bytes_held -= request.asked_bytes or 0

    def _admit(self, request: StorageRequest) -> None:
        """Raise `BudgetExceeded` for one that would exceed a limit."""
        before = _before(request)
        requests = self._requests | {request.operation: self._requests.get(request.operation, 0) + request.requests}
        known = self.bytes_read + self._bytes_held
        # at the limit, an object of unknown size is refused
        asked_bytes = 1 if request.asked_bytes is None else request.asked_bytes
        if self.max_requests is not None and (total := sum(requests.values())) > self.max_requests:
            bound = f"max_requests={self.max_requests} reached {before} (request {total})"
            raise BudgetExceeded(f"{bound}: raise the bound")
        # at the limit, an object of unknown size is refused
        if self.max_bytes is not None and known + asked_bytes > self.max_bytes:
            asks = "an unknown number of" if request.asked_bytes is None else request.asked_bytes
            bound = f"max_bytes={self.max_bytes} reached {before} ({asks} bytes after {known})"
            raise BudgetExceeded(f"{bound}: raise the bound")
        if self.max_cost_usd is not None:
            cost_usd = self.prices.cost_usd(requests, known + (request.asked_bytes or 0))
            if cost_usd > self.max_cost_usd:
                bound = f"max_cost_usd={self.max_cost_usd:g} reached {before} (the cost would be {cost_usd:g})"
                raise BudgetExceeded(f"{bound}: raise the bound")


class MeteredStorage(WrapperStorage):
    """A wrapper that counts every call: in `total`, and in the usages of the caller's `Call`."""

    def __init__(self, inner: Storage, prices: PriceTable | None = None) -> None:
        super().__init__(inner)
        self.has_server = inner.has_server
        self.prices = prices or PriceTable()
        self.total = Usage(self.prices)
        # Whether the backend reports its requests through `sending`
        self._tells = False
        self._pid = os.getpid()
        self._counters = (self.total.count_ranges,)
        # those under way, and when each began, monotonic seconds. Those of two threads may be equal
        self._requests_begun: dict[int, tuple[float, StorageRequest]] = {}
        self._is_away = False
        self.is_back: Callable[[], None] = lambda: None
        """Called when a call succeeds after one that found the storage unavailable."""

    def late(self, patience_s: float) -> list[tuple[float, StorageRequest]]:
        """Return the calls that have been under way for longer than `patience_s`, with their ages in seconds.

        Each MiB that a call asked for or sends gets a second more. The oldest call is the first.
        """
        now_s = time.monotonic()
        # `list` of a dictionary's values is one step for other threads
        ages = [(now_s - begun_s, request) for begun_s, request in list(self._requests_begun.values())]
        late = [
            (age_s, request)
            for age_s, request in ages
            if age_s > patience_s + ((request.asked_bytes or 0) + request.sent_bytes) / _LEAST_BYTES_PER_S
        ]
        return sorted(late, key=lambda item: -item[0])

    def open_now(self, name: str, size_bytes: int) -> OpenObject | None:
        """As `Storage.open_now`; the reads are counted only in `total`, when the object is closed."""
        opened = None if self._pid != os.getpid() else self.inner.open_now(name, size_bytes)
        if opened is not None:
            opened.counters += self._counters
        return opened

    def bound(self, call: Call) -> Storage:
        """Return this storage for the requests of `call`: its bounds are checked before, and its usages count them."""
        return _BoundStorage(self, call)

    def _around(self, request: StorageRequest, act: Callable[[], _T]) -> _T:
        return self._perform(active_context(), request, act)

    def _perform(self, context: Call, request: StorageRequest, act: Callable[[], _T]) -> _T:
        """Count a request for a call, and send it by `act`, in whose context a backend finds the deadline."""
        if self._pid != os.getpid():
            # Parent and child share its connections: each could read the other's responses
            raise IndexClosed(IndexClosed.FORKED)
        context = context._replace(usages=(self.total, *context.usages))
        usages = _usages(context)
        _begin(context, request)
        repeats = RepeatCounter(context, request)
        _enter(usages)
        self._requests_begun[id(request)] = time.monotonic(), request
        is_heard, read, written = True, 0, 0
        try:
            # A metered storage further in counts its own calls. Listeners of all outer ones get every repeat.
            with Call(context.deadline_s, (), (*context.listeners, repeats)).active():
                with span(f"storage.{request.operation}", object=request.name, asked_bytes=request.asked_bytes or 0):
                    result = act()
            self._tells |= repeats.told
            # A further page is counted when its request is sent. If the backend does not report its requests, a page
            # that has objects counts as one.
            if request.is_further and result and not self._tells:
                _begin(context, repeats.again)
            read, written = _payload_bytes(request, result), request.sent_bytes
            if self._is_away:
                self._is_away = False
                self.is_back()
            return result
        except BaseException as error:
            is_heard = not isinstance(error, StorageUnavailable)
            self._is_away |= not is_heard
            raise
        finally:
            self._requests_begun.pop(id(request), None)
            _leave(usages, request, is_heard, read, written)


class _BoundStorage(WrapperStorage):
    """See `MeteredStorage.bound`."""

    def __init__(self, metered: MeteredStorage, call: Call) -> None:
        super().__init__(metered.inner)
        self._metered, self._call = metered, call

    def bound(self, call: Call) -> Storage:
        """As `MeteredStorage.bound`."""
        return _BoundStorage(self._metered, call)

    def open_now(self, name: str, size_bytes: int) -> OpenObject | None:
        """As `MeteredStorage.open_now`."""
        return self._metered.open_now(name, size_bytes)

    def _around(self, request: StorageRequest, act: Callable[[], _T]) -> _T:
        self._call.check(f"calling {request.operation} of {request.name}")
        return self._metered._perform(self._call, request, act)


def bound(storage: Storage, call: Call) -> Storage:
    """Return a storage for the requests of `call`. Only a metered one counts and bounds them."""
    return storage.bound(call) if isinstance(storage, MeteredStorage | _BoundStorage) else storage


class RepeatCounter:
    """Counts a call's further requests (repeats, pages) and wasted bytes, and holds them to the limits."""

    def __init__(self, context: Call, request: StorageRequest) -> None:
        self._context, self._request = context, request
        self._counted = request.requests
        self.told = False

    @cached_property
    def again(self) -> StorageRequest:
        """One more request of the call."""
        return replace(self._request, requests=1, sent_bytes=0, asked_bytes=0)

    def sending(self) -> None:
        """Count a request that is about to be sent. Raises `BudgetExceeded`: then do not send it."""
        with _lock:
            self.told = True
            if self._counted:
                self._counted -= 1
                return
        _begin(self._context, self.again)

    def wasted(self, size_bytes: int) -> None:
        """Count `size_bytes` bytes that were delivered and must be requested again."""
        for usage in _usages(self._context):
            usage.end(self.again, read=size_bytes)


def _usages(context: Call) -> tuple[Usage, ...]:
    """Return the usages of a context, which are of this module."""
    return cast("tuple[Usage, ...]", context.usages)


def _before(request: StorageRequest) -> str:
    return f"before {request.operation} of {request.name!r}"


def _begin(context: Call, request: StorageRequest) -> None:
    """Begin `request` in all usages of its context, or in none if one refuses it or nobody needs the result."""
    with _lock:
        usages = _usages(context)
        # with the lock, so that all requests before a cancellation are counted for one who then asks for their number
        if request.requests and context.is_cancelled:
            raise BudgetExceeded(f"the call was cancelled {_before(request)}: call again")
        for place, usage in enumerate(usages):
            if request.requests:
                try:
                    usage._admit(request)
                except BudgetExceeded:
                    for begun in usages[:place]:
                        begun._take_back(request)
                    raise
            usage._count(request)


def _enter(usages: Sequence[Usage]) -> None:
    """Note that a call is under way."""
    now_s = time.monotonic()
    with _lock:
        for usage in usages:
            if not usage.under_way:
                usage.since_s = now_s
            usage.under_way += 1


def _leave(usages: Sequence[Usage], request: StorageRequest, is_heard: bool, read: int, written: int) -> None:
    """Note the end of a call, its payload, and whether the storage has responded."""
    now_s = time.monotonic()
    with _lock:
        for usage in usages:
            usage._end(request, read, written)
            usage.under_way -= 1
            if is_heard:
                usage.heard_s = now_s


def _payload_bytes(request: StorageRequest, result: object) -> int:
    if isinstance(result, bytes):
        return len(result)
    if request.operation == "get_suffix" and isinstance(result, tuple):
        return len(result[0])
    return 0
