"""Counts the requests of storages, and holds them to limits.

Requests are counted as an object store sees them (a listing: one per page of 1,000; a range of length 0: none) when the
call is made, so failed ones count. Bytes are payload that was delivered. Threads: any number.

A call that would exceed a limit of a `Usage` in scope raises `BudgetExceeded`; it is not sent, and no usage counts it.
Checking and counting are one atomic step. The bytes that calls under way have asked for count as reserved.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeVar, cast

from tiered_index.base.call import RequestContext, active_context
from tiered_index.base.locks import shared_lock
from tiered_index.base.tracing import span
from tiered_index.errors import BudgetExceeded, IndexClosed, StorageUnavailable
from tiered_index.storage.base import Call, OpenObject, Storage, WrapperStorage
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
        self._is_cancelled = False
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
        """The number of further requests that `max_requests` allows, 0 after `cancel`; None: no limit."""
        with _lock:
            if self._is_cancelled:
                return 0
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
        """Whether there is a limit, or the work was cancelled."""
        bounds = self.max_requests, self.max_bytes, self.max_cost_usd
        return self._is_cancelled or any(bound is not None for bound in bounds)

    def cancel(self) -> None:
        """Refuse all further requests, because nobody needs their results. Requests under way continue. Idempotent."""
        self._is_cancelled = True

    def begin(self, call: Call) -> None:
        """Count the requests of a call and reserve its bytes. Raises `BudgetExceeded`, and then counts nothing."""
        _begin((self,), call)

    def end(self, call: Call, *, read: int = 0, written: int = 0) -> None:
        """Count the payload of a call (0 if it failed) and release the bytes that `begin` reserved for it."""
        with _lock:
            self._end(call, read, written)

    def count_ranges(self, requests: int, size_bytes: int) -> None:
        """Count ended reads of ranges."""
        with _lock:
            self._requests["get_range"] = self._requests.get("get_range", 0) + requests
            self.bytes_read += size_bytes

    def count_between(self, size_bytes: int) -> None:
        """Note that `size_bytes` of the bytes that were read only joined two ranges."""
        with _lock:
            self.bytes_between += size_bytes

    def _end(self, call: Call, read: int, written: int) -> None:
        self._bytes_held -= call.asked_bytes or 0
        self.bytes_read += read
        self.bytes_written += written

    def _count(self, call: Call) -> None:
        if call.requests:
            self._requests[call.operation] = self._requests.get(call.operation, 0) + call.requests
        self._bytes_held += call.asked_bytes or 0

    def _take_back(self, call: Call) -> None:
        """Undo `_count` for a call that another usage refused."""
        self._requests[call.operation] -= call.requests
        if not self._requests[call.operation]:
            del self._requests[call.operation]
        self._bytes_held -= call.asked_bytes or 0

    def _admit(self, call: Call) -> None:
        """Raise `BudgetExceeded` for a call that would exceed a limit, or that follows `cancel`."""
        before = f"before {call.operation} of {call.name!r}"
        if self._is_cancelled:
            raise BudgetExceeded(f"the call was cancelled {before}: call again")
        requests = self._requests | {call.operation: self._requests.get(call.operation, 0) + call.requests}
        known = self.bytes_read + self._bytes_held
        # at the limit, an object of unknown size is refused
        asked_bytes = 1 if call.asked_bytes is None else call.asked_bytes
        if self.max_requests is not None and (total := sum(requests.values())) > self.max_requests:
            bound = f"max_requests={self.max_requests} reached {before} (request {total})"
            raise BudgetExceeded(f"{bound}: raise the bound")
        # at the limit, an object of unknown size is refused
        if self.max_bytes is not None and known + asked_bytes > self.max_bytes:
            asks = "an unknown number of" if call.asked_bytes is None else call.asked_bytes
            bound = f"max_bytes={self.max_bytes} reached {before} ({asks} bytes after {known})"
            raise BudgetExceeded(f"{bound}: raise the bound")
        if self.max_cost_usd is not None:
            cost_usd = self.prices.cost_usd(requests, known + (call.asked_bytes or 0))
            if cost_usd > self.max_cost_usd:
                bound = f"max_cost_usd={self.max_cost_usd:g} reached {before} (the cost would be {cost_usd:g})"
                raise BudgetExceeded(f"{bound}: raise the bound")


class MeteredStorage(WrapperStorage):
    """A wrapper that counts every call: in `total`, and in the usages of the caller's `RequestContext`."""

    def __init__(self, inner: Storage, prices: PriceTable | None = None) -> None:
        super().__init__(inner)
        self.has_server = inner.has_server
        self.prices = prices or PriceTable()
        self.total = Usage(self.prices)
        # Whether the backend reports its requests through `sending`
        self._tells = False
        self._pid = os.getpid()
        self._counters = (self.total.count_ranges,)
        # calls under way, and when each began, monotonic seconds. Calls of two threads may be equal
        self._calls: dict[int, tuple[float, Call]] = {}
        self._is_away = False
        self.is_back: Callable[[], None] = lambda: None
        """Called when a call succeeds after one that found the storage unavailable."""

    def late(self, patience_s: float) -> list[tuple[float, Call]]:
        """Return the calls that have been under way for longer than `patience_s`, with their ages in seconds.

        Each MiB that a call asked for or sends gets a second more. The oldest call is the first.
        """
        now_s = time.monotonic()
        # `list` of a dictionary's values is one step for other threads
        ages = [(now_s - begun_s, call) for begun_s, call in list(self._calls.values())]
        late = [
            (age_s, call)
            for age_s, call in ages
            if age_s > patience_s + ((call.asked_bytes or 0) + call.sent_bytes) / _LEAST_BYTES_PER_S
        ]
        return sorted(late, key=lambda item: -item[0])

    def open_now(self, name: str, size_bytes: int) -> OpenObject | None:
        """As `Storage.open_now`; the reads are counted only in `total`, when the object is closed."""
        opened = None if self._pid != os.getpid() else self.inner.open_now(name, size_bytes)
        if opened is not None:
            opened.counters += self._counters
        return opened

    def _around(self, call: Call, act: Callable[[], _T]) -> _T:
        if self._pid != os.getpid():
            # Parent and child share its connections: each could read the other's responses
            raise IndexClosed(IndexClosed.FORKED)
        context = active_context()
        # contexts count only in usages of this module
        usages = [self.total, *cast("tuple[Usage, ...]", context.usages)]
        _begin(usages, call)
        repeats = RepeatCounter(usages, call)
        _enter(usages)
        self._calls[id(call)] = time.monotonic(), call
        is_heard, read, written = True, 0, 0
        try:
            # A metered storage further in counts its own calls. Listeners of all outer ones get every repeat.
            with RequestContext(context.deadline_s, (), (*context.listeners, repeats)).active():
                with span(f"storage.{call.operation}", object=call.name, asked_bytes=call.asked_bytes or 0):
                    result = act()
            self._tells |= repeats.told
            # A further page is counted when its request is sent. If the backend does not report its requests, a page
            # that has objects counts as one.
            if call.is_further and result and not self._tells:
                _begin(usages, repeats.again)
            read, written = _payload_bytes(call, result), call.sent_bytes
            if self._is_away:
                self._is_away = False
                self.is_back()
            return result
        except BaseException as error:
            is_heard = not isinstance(error, StorageUnavailable)
            self._is_away |= not is_heard
            raise
        finally:
            self._calls.pop(id(call), None)
            _leave(usages, call, is_heard, read, written)


class RepeatCounter:
    """Counts a call's further requests (repeats, pages) and wasted bytes, and holds them to the limits."""

    def __init__(self, usages: Sequence[Usage], call: Call) -> None:
        self._usages, self._call = usages, call
        self._counted = call.requests
        self.told = False

    @cached_property
    def again(self) -> Call:
        """One more request of the call."""
        return replace(self._call, requests=1, sent_bytes=0, asked_bytes=0)

    def sending(self) -> None:
        """Count a request that is about to be sent. Raises `BudgetExceeded`: then do not send it."""
        with _lock:
            self.told = True
            if self._counted:
                self._counted -= 1
                return
        _begin(self._usages, self.again)

    def wasted(self, size_bytes: int) -> None:
        """Count `size_bytes` bytes that were delivered and must be requested again."""
        for usage in self._usages:
            usage.end(self.again, read=size_bytes)


def _begin(usages: Sequence[Usage], call: Call) -> None:
    """Begin `call` in all of `usages`, or in none if one refuses it."""
    with _lock:
        for place, usage in enumerate(usages):
            if call.requests:
                try:
                    usage._admit(call)
                except BudgetExceeded:
                    for begun in usages[:place]:
                        begun._take_back(call)
                    raise
            usage._count(call)


def _enter(usages: Sequence[Usage]) -> None:
    """Note that a call is under way."""
    now_s = time.monotonic()
    with _lock:
        for usage in usages:
            if not usage.under_way:
                usage.since_s = now_s
            usage.under_way += 1


def _leave(usages: Sequence[Usage], call: Call, is_heard: bool, read: int, written: int) -> None:
    """Note the end of a call, its payload, and whether the storage has responded."""
    now_s = time.monotonic()
    with _lock:
        for usage in usages:
            usage._end(call, read, written)
            usage.under_way -= 1
            if is_heard:
                usage.heard_s = now_s


def _payload_bytes(call: Call, result: object) -> int:
    if isinstance(result, bytes):
        return len(result)
    if call.operation == "get_suffix" and isinstance(result, tuple):
        return len(result[0])
    return 0
