"""Base of the request handlers: runs a call of the library in a thread, within bounds, and returns the answer as bytes.

Threads: handlers run on the event loop, and never wait there for a storage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from tiered_index.server.calls import Allowance, Calls, while_there
from tiered_index.server.memory import MemoryInUse, Reservation
from tiered_index.server.metrics import Metrics
from tiered_index.server.pacing import Document, PacedResponse
from tiered_index.server.parameters import Spending
from tiered_index.server.problems import Refused
from tiered_index.server.served import Served
from tiered_index.server.tokens import Caller

T = TypeVar("T")


class Handlers:
    """Base of request handlers. A handler gets a request and its checked query."""

    def __init__(self, served: Served, calls: Calls, metrics: Metrics) -> None:
        self.served = served
        self.calls = calls
        self.counters = metrics
        self.prices = served.lookups.config.prices

    def allowance(self, asked: Spending | None = None) -> Allowance:
        """Return the bounds of a request: the service's, or lower ones that it asks for."""
        allowance = Allowance(self.served.caps, self.prices)
        if asked is not None:
            asked.narrow(allowance)
        return allowance

    async def answer(
        self,
        request: Request,
        allowance: Allowance,
        act: Callable[[], bytes | Document],
        media_type: str,
        *,
        claim: int = 0,
    ) -> Response:
        """Run `act` in a thread and return its result as a response. `claim` is the memory that it may need (bytes)."""
        made = await self.made(request, allowance, act, claim)
        reservation: Reservation = request.state.reservation
        reservation.settle(len(made if isinstance(made, bytes) else made.body))
        return PacedResponse(made, media_type)

    async def made(self, request: Request, allowance: Allowance, act: Callable[[], T], claim: int) -> T:
        """Run `act` in a thread, which first reserves `claim` bytes of memory, and return its result.

        If the memory budget lacks bytes that it or `act` reserves, `act` is called again when the budget has them.
        """
        reservation: Reservation = request.state.reservation

        def hold_and_act() -> T:
            reservation.hold(claim)
            return act()

        while True:
            try:
                return await self.calls.run(request, allowance, partial(reservation.making, hold_and_act))
            except MemoryInUse as full:
                claiming = asyncio.ensure_future(reservation.claim(full.size, allowance.left_s()))
                try:
                    await while_there(request, claiming)
                finally:
                    claiming.cancel()
                # raises if the budget did not have them in time
                claiming.result()


def caller_of(request: Request) -> Caller:
    """Return the caller of a request."""
    caller: Caller = request.state.caller
    return caller


def need_type(request: Request, *kinds: str) -> str:
    """Return the content type of a request's body. Raises `Refused` unless it is one of `kinds`."""
    if "content-length" not in request.headers and "transfer-encoding" not in request.headers:
        raise Refused(400, "send Content-Length: the end of the body is not known without it")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise Refused(415, f"send the body unencoded, not in the encoding {encoding!r:.80}")
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given not in kinds:
        raise Refused(415, f"the body's content type is {' or '.join(kinds)}, not {given or 'none'!r:.80}")
    return given
