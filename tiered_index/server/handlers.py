"""Base of the request handlers: runs a call of the library in a thread, within bounds, and sends its answer.

A short answer is sent at once. A longer one is sent in pieces, and the service holds one page of it. If the client
takes a piece too slowly, the gate ends the connection. Threads: handlers run on the event loop, and never wait there
for a storage.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tiered_index.server.calls import Allowance, Calls
from tiered_index.server.metrics import Metrics
from tiered_index.server.parameters import Spending
from tiered_index.server.problems import Refused
from tiered_index.server.served import Served
from tiered_index.server.tokens import Caller

# Most bytes that are sent at once
_PIECE_BYTES = 256 << 10


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
            spending.narrow(allowance)
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
            piece: bytes | None = first
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
    caller: Caller = request.state.caller
    return caller


async def body_of(request: Request) -> bytes:
    """Return a request's body, which nothing else keeps, unlike that of `Request.body`."""
    return b"".join([piece async for piece in request.stream()])


def need_type(request: Request, *kinds: str) -> str:
    """Return the content type of a request's body. Raises `Refused` unless it is one of `kinds`."""
    if "content-length" not in request.headers and "transfer-encoding" not in request.headers:
        raise Refused(400, "send Content-Length: the end of the body is not known without it")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise Refused(415, f"send the body unencoded, not in the encoding {encoding!r:.80}")
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in kinds:
        raise Refused(415, f"the body's content type is {' or '.join(kinds)}, not {media_type or 'none'!r:.80}")
    return media_type
