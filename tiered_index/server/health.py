"""How the service is: its metrics, whether it lives, and whether it can do what it is for.

`HealthRoutes` are the handlers; a `StandIn` answers for the application while the index is opened and recovers, so that
a probe hears of it instead of finding nobody. Threads: the event loop's; a `StandIn` is set by any.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tiered_index.server import parameters, wire
from tiered_index.server.calls import Allowance, Calls, while_there
from tiered_index.server.metrics import MEDIA_TYPE, Metrics
from tiered_index.server.parameters import of_query
from tiered_index.server.room import Held, HeldResponse, NoRoomNow
from tiered_index.server.served import Served
from tiered_index.server.tokens import Caller

T = TypeVar("T")


class HealthRoutes:
    """The handlers, and what all handlers share."""

    def __init__(self, served: Served, calls: Calls, metrics: Metrics) -> None:
        self.served = served
        self.calls = calls
        self.counters = metrics
        # how the service is can be asked while all threads of lookups wait for the storage, above all then
        self.probes = Calls(2, 62)
        self.prices = served.lookups.config.prices

    async def answer(
        self, request: Request, allowance: Allowance, act: Callable[[], bytes], media_type: str, *, claim: int = 0
    ) -> Response:
        """Return what `act` makes in a thread as an answer; `claim` is what it may take of the room meanwhile."""
        body = await self.made(request, allowance, act, claim)
        held: Held = request.state.held
        held.settle(len(body))
        return HeldResponse(body, media_type=media_type)

    async def made(self, request: Request, allowance: Allowance, act: Callable[[], T], claim: int) -> T:
        """Return what `act` returns in a thread, which holds `claim` bytes of the room once it has begun. Where there
        is no room for them, or for what `act` holds, it is called again once there is.
        """
        held: Held = request.state.held

        def hold_and_act() -> T:
            held.hold(claim)
            return act()

        while True:
            try:
                return await self.calls.run(request, allowance, partial(held.making, hold_and_act))
            except NoRoomNow as full:
                claiming = asyncio.ensure_future(held.claim(full.size, allowance.left_s()))
                try:
                    await while_there(request, claiming)
                finally:
                    claiming.cancel()
                # raises where there was no room
                claiming.result()

    async def metrics(self, request: Request) -> Response:
        """Metrics for Prometheus."""
        of_query(parameters.Nothing, request.query_params)
        caller_of(request).need_every_topic("metrics are")
        body = await self.probes.run(request, Allowance(self.served.caps, self.prices), self.counters.page)
        return Response(body, headers={"content-type": MEDIA_TYPE})

    async def livez(self, request: Request) -> Response:
        """Say that the process answers."""
        return _alive()

    async def readyz(self, request: Request) -> Response:
        """Say whether the service can do what it is for, and why not."""
        return _ready(await self.probes.run(request, Allowance(self.served.caps, self.prices), self.served.not_ready))


class StandIn:
    """Answers as `app` does while that is set, and else that the process lives and why it is not ready."""

    app: ASGIApp | None = None
    reason = "recovering: the index is being opened"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take one request."""
        answer: ASGIApp = _alive() if scope.get("path") == "/livez" else _ready([self.reason])
        await (self.app or answer)(scope, receive, send)


def caller_of(request: Request) -> Caller:
    """Return who sent a request."""
    caller: Caller = request.state.caller
    return caller


def _alive() -> Response:
    return Response(wire.encode({"status": "alive"}), media_type=wire.JSON)


def _ready(reasons: list[str]) -> Response:
    body = wire.encode({"status": "not ready" if reasons else "ready", "reasons": reasons})
    return Response(body, 503 if reasons else 200, {"retry-after": "1"} if reasons else None, wire.JSON)
