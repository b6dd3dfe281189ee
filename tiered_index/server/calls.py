"""Runs the library's synchronous calls for requests: in threads, within bounds, until the client disconnects.

A request takes a place before its body is read, and keeps it until its answer is sent. So the places bound the memory
of all requests. Each call has its own usage. If the client disconnects, the usage allows no further request to
the storage, as with `AsyncIndexReader`. Use `Calls` in one event loop. An `Allowance` is for one request: any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from tiered_index.errors import BudgetExceeded
from tiered_index.server.problems import Refused
from tiered_index.service.read.budget import LookupLimits
from tiered_index.storage.context import active_context
from tiered_index.storage.metering import Usage
from tiered_index.storage.pools import DaemonPool
from tiered_index.storage.prices import PriceTable

T = TypeVar("T")
# The client of a shorter call is not watched
_SOON_S = 0.05
_BUSY_RETRY_S = 1
# Longest wait for a place
_QUEUED_S = 5.0
# Places for each thread: other requests read a body or send an answer meanwhile
_PLACES = 4
CLIENT_GONE = 499


@dataclass(frozen=True, kw_only=True)
class Caps:
    """The greatest bounds of one request, and the defaults. `limits` has a `timeout_s`."""

    limits: LookupLimits = field(default_factory=partial(LookupLimits, 10_000, 1 << 30, 30.0))
    max_cost_usd: float = 0.05
    # Entries of a page, lookups of a batch, and entries of all its lookups
    max_count: int = 1_000
    max_lookups: int = 10_000
    max_entries: int = 100_000
    # Of the messages of a page
    message_bytes: int = 8 << 20
    body_bytes: int = 16 << 20


class Allowance:
    """The rest of one request's bounds, which all its calls share."""

    def __init__(self, caps: Caps, prices: PriceTable) -> None:
        self.usage = Usage(prices, max_cost_usd=caps.max_cost_usd)
        self._began_s = time.monotonic()
        self.limits = LookupLimits()
        self.narrow(caps.limits, None)

    def narrow(self, limits: LookupLimits, max_cost_usd: float | None) -> None:
        """Lower the bounds to the given ones; None and greater ones change nothing."""
        self.limits, usage = self.limits.least(limits), self.usage
        usage.max_requests, usage.max_bytes = self.limits.max_requests, self.limits.max_bytes
        if max_cost_usd is not None and usage.max_cost_usd is not None:
            usage.max_cost_usd = min(max_cost_usd, usage.max_cost_usd)

    def leave_out(self, seconds: float) -> None:
        """Do not count time in which the request waited for its client."""
        self._began_s += seconds

    def left_s(self, when: str = "before the lookup could begin") -> float:
        """Return the seconds that are left. Raises `BudgetExceeded` if there are none; `when` is for its message."""
        limit_s = self.limits.timeout_s
        assert limit_s is not None
        left_s = self._began_s + limit_s - time.monotonic()
        if left_s <= 0:
            raise BudgetExceeded(f"timeout_s={limit_s:g} was reached {when}")
        return left_s

    def end(self) -> None:
        """Allow no further request to the storage."""
        self.usage.cancel()


class Calls:
    """Runs up to `threads` calls at once, of requests that hold places. Up to `waiting` requests wait for a place."""

    def __init__(self, threads: int, waiting: int) -> None:
        self._pool = DaemonPool(threads, "tiered-index-http")
        self.threads = threads
        self._free = asyncio.Semaphore(_PLACES * threads)
        self._most_waiting = waiting
        # Requests that wait for a place, and calls that run in threads or wait for one
        self.waiting = self.running = 0

    async def __aenter__(self) -> None:
        """Take a place. Raises `Refused` if too many requests wait, or if none becomes free in time."""
        if self._free.locked():
            if self.waiting >= self._most_waiting:
                raise _busy()
            self.waiting += 1
            try:
                async with asyncio.timeout(_QUEUED_S):
                    await self._free.acquire()
            except TimeoutError:
                raise _busy() from None
            finally:
                self.waiting -= 1
        else:
            await self._free.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._free.release()

    async def run(self, request: Request, allowance: Allowance, call: Callable[[], T]) -> T:
        """Run `call` in a thread and return its result. Raises its errors, and `Refused` if the client disconnects."""
        with active_context().counting(allowance.usage).active():
            future = self._pool.submit(call)
        self.running += 1
        awaited = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait([awaited], timeout=_SOON_S)
            if not done:
                await _while_there(request, awaited)
        except BaseException:
            allowance.end()
            # its result or error is not needed any more
            awaited.cancel()
            future.cancel()
            raise
        finally:
            self.running -= 1
        return awaited.result()

    def close(self) -> None:
        """Accept no further calls; calls under way continue."""
        self._pool.close()


def _busy() -> Refused:
    return Refused(503, "too many requests are under way; try again", retry_after_s=_BUSY_RETRY_S)


async def _while_there(request: Request, awaited: asyncio.Future[Any]) -> None:
    """Wait until `awaited` is done, with or without an error. Raises `Refused` if the client disconnects first."""
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        both: list[asyncio.Future[Any]] = [awaited, gone]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
    if not awaited.done():
        raise Refused(CLIENT_GONE, "the client has gone")


async def _disconnected(request: Request) -> None:
    # a body that exceeds its bounds ends the request, too
    with contextlib.suppress(Refused):
        while (await request.receive())["type"] != "http.disconnect":
            pass
