"""Base of the request handlers: runs calls of the library in threads, within bounds, and sends their answers.

A request takes a place before its body is read, and keeps it until its answer is sent. So the places bound the memory
of all requests. Each request has its own usage. If the client disconnects, no further request to the storage is sent
for it, as with `AsyncIndexReader`.

A short answer is sent at once. A longer one is sent in pieces, and the service holds one page of it. If the client
takes a piece too slowly, the gate ends the connection. Threads: handlers and `Calls` belong to one event loop, and
never wait there for a storage. An `Allowance` is for one request: any thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tiered_index.base.call import Cancellation, active_context
from tiered_index.base.threads import DaemonPool
from tiered_index.server.http.metrics import Metrics
from tiered_index.server.http.parameters import Spending
from tiered_index.server.http.problems import Refused
from tiered_index.server.http.served import Caps, Served
from tiered_index.server.http.tokens import Caller
from tiered_index.service.read.answers.budget import LookupLimits
from tiered_index.storage.metering import Usage
from tiered_index.storage.prices import PriceTable

T = TypeVar("T")
# The client of a shorter call is not watched
_SOON_S = 0.05
_BUSY_RETRY_S = 1
# Longest wait for a place
_QUEUED_S = 5.0
# Places for each thread: other requests read a body or send an answer meanwhile
_PLACES = 4
# Most bytes that are sent at once
_PIECE_BYTES = 256 << 10


class Allowance:
    """The rest of one request's bounds, which all its calls share."""

    def __init__(self, caps: Caps, prices: PriceTable) -> None:
        self.usage = Usage(prices, max_cost_usd=caps.max_cost_usd)
        self.cancellation = Cancellation()
        """Set when the client has gone."""
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

    @property
    def deadline_s(self) -> float:
        """The end of the request's time, by `time.monotonic()`."""
        assert self.limits.timeout_s is not None
        return self._began_s + self.limits.timeout_s


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
        context = active_context().until(allowance.deadline_s).counting(allowance.usage)
        with context.cancelled_by(allowance.cancellation).active():
            future = self._pool.submit(call)
        self.running += 1
        awaited = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait([awaited], timeout=_SOON_S)
            if not done:
                await _while_there(request, awaited)
        except BaseException:
            allowance.cancellation.set()
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
    """Wait until `awaited` is done, with or without an error. Raises `ClientDisconnect` if the client goes first."""
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        both: list[asyncio.Future[Any]] = [awaited, gone]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
    if not awaited.done():
        raise ClientDisconnect


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Handlers:
    """Base of request handlers. A handler gets a request and its checked query."""

    def __init__(self, served: Served, calls: Calls, metrics: Metrics) -> None:
        self.served = served
        self.calls = calls
        self.counters = metrics
        self.prices = served.lookups.config.prices

    def close(self) -> None:
        """Close the threads of calls."""
        self.calls.close()

    def allowance(self, spending: Spending | None = None) -> Allowance:
        """Return the bounds of a request: the service's, or lower ones that it asks for."""
        allowance = Allowance(self.served.caps, self.prices)
        if spending is not None:
            allowance.narrow(spending.limits(), spending.max_cost_usd)
        return allowance

    async def answer(
        self, request: Request, allowance: Allowance, act: Callable[[], bytes | Iterator[bytes]], media_type: str
    ) -> Response:
        """Run `act` in a thread and return its result as a response.

        An iterator is asked for each piece in a thread, once the client has taken most of the earlier ones. Its first
        piece is made before the response begins: it may raise.
        """

        def begun() -> tuple[bytes, Iterator[bytes] | None]:
            made = act()
            return (made, None) if isinstance(made, bytes) else (next(made, b""), made)

        first, more = await self.calls.run(request, allowance, begun)
        if more is None and len(first) <= _PIECE_BYTES:
            return Response(first, media_type=media_type)

        async def body() -> AsyncIterator[bytes]:
            nonlocal first
            piece: bytes | None = first
            first = b""
            while piece is not None:
                began_s = time.monotonic()
                for at in range(0, len(piece), _PIECE_BYTES):
                    yield piece[at : at + _PIECE_BYTES]
                # free this page before the next one is made
                piece = None
                if more is not None:
                    allowance.leave_out(time.monotonic() - began_s)
                    piece = await self.calls.run(request, allowance, partial(next, more, None))

        headers = {"content-length": str(len(first))} if more is None else None
        return _PiecewiseResponse(body(), headers=headers, media_type=media_type)


class _PiecewiseResponse(StreamingResponse):
    """A response in pieces. Starlette's own has a task that waits until the client leaves: here the gate notes that."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        await self.stream_response(send)


def caller_of(request: Request) -> Caller:
    """Return the caller of a request."""
    # not by `request.state`, which is made anew for each request
    caller: Caller = request.scope["state"]["caller"]
    return caller


async def body_of(request: Request, *kinds: str) -> bytes:
    """Return a request's body, of one of the content types `kinds`. Raises `Refused` for another one."""
    if (kind := type_of(request)) not in kinds:
        raise Refused(415, f"the body's content type is {' or '.join(kinds)}, not {kind or 'none'!r:.80}")
    # Starlette's `body` would keep it until the answer is sent
    return b"".join([piece async for piece in request.stream()])


def type_of(request: Request) -> str:
    """Return the content type of a request's body, without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()
