"""The health of the service: metrics, problems, liveness and readiness.

A `StandIn` answers probes while the index opens and recovers. Threads: the event loop's; any thread may set its `app`.
"""

from __future__ import annotations

from secrets import token_hex

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tiered_index.server.http import wire
from tiered_index.server.http.answers import Health, PartProblem, Problems, Token
from tiered_index.server.http.calls import Allowance, Calls, Handlers, caller_of
from tiered_index.server.http.metrics import MEDIA_TYPE, Metrics
from tiered_index.server.http.operations import Operation
from tiered_index.server.http.parameters import Nothing, Spending
from tiered_index.server.http.problems import ProblemResponse, Redaction, Refused
from tiered_index.server.http.served import Caps, Served


class HealthHandlers(Handlers):
    """Metrics and probes."""

    def __init__(self, served: Served, _: Calls, metrics: Metrics) -> None:
        # Own threads: probes must answer even if every thread of lookups waits for the storage
        super().__init__(served, Calls(2, 62), metrics)

    def allowance(self, spending: Spending | None = None) -> Allowance:
        """Return bounds of their own: within those of lookups a sound storage might not answer."""
        return Allowance(Caps(), self.prices)

    @Operation("GET /metrics", forms=("text/plain",), is_light=True)
    async def metrics(self, request: Request, _: Nothing) -> Response:
        """Show metrics for Prometheus."""
        caller_of(request).need_every_topic("metrics are")
        body = await self.calls.run(request, self.allowance(), self.counters.page)
        return Response(body, headers={"content-type": MEDIA_TYPE})

    @Operation("GET /livez", answer=Health, is_open=True, is_light=True)
    async def livez(self, request: Request, _: None) -> Response:
        """Check that the process answers."""
        return _alive()

    @Operation(
        "GET /readyz",
        answer=Health,
        is_told_unready=True,
        problems={503: "Not ready, with the reasons."},
        is_open=True,
        is_light=True,
    )
    async def readyz(self, request: Request, _: None) -> Response:
        """Show whether this replica is ready for requests, and its problems."""

        def look() -> Response:
            return _ready(self._told(self.served.not_ready()), self._told(self.served.problems_by_part()))

        return await self.calls.run(request, self.allowance(), look)

    def _told(self, by_part: dict[str, list[str]]) -> list[str]:
        """Return the texts; if the service has tokens, only the parts: texts may have topics and addresses."""
        if self.served.tokens is not None:
            return [part for part, texts in by_part.items() if texts]
        return [text for texts in by_part.values() for text in texts]

    @Operation("GET /v1/health", answer=Problems, is_light=True)
    async def health(self, request: Request, _: Nothing) -> Response:
        """List the problems that the service has now."""
        caller_of(request).need_every_topic("the service's health is")

        def look() -> Response:
            parts = self.served.problems_by_part()
            problems = [PartProblem(part=part, reason=reason) for part, reasons in parts.items() for reason in reasons]
            is_ready = not self.served.not_ready()
            health = Problems(status="problems" if problems else "healthy", ready=is_ready, problems=problems)
            return Response(wire.encode(health), media_type=wire.JSON)

        return await self.calls.run(request, self.allowance(), look)

    @Operation("GET /v1/token", answer=Token, is_light=True)
    async def token(self, request: Request, _: Nothing) -> Response:
        """Show the role and topics of the caller's token."""
        caller = caller_of(request)
        token = Token(name=caller.name, role=caller.role, topics=caller.topics)
        return Response(wire.encode(token), media_type=wire.JSON)


class StandIn:
    """Passes requests to `app` once it is set. Until then it answers probes, and refuses other requests (503)."""

    app: ASGIApp | None = None
    reason = "recovering: the index is being opened"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        answer, path = self.app, scope.get("path")
        if answer is None and path == "/livez":
            answer = _alive()
        elif answer is None:
            refused = Refused(503, self.reason, retry_after_s=1)
            is_probe = path == "/readyz"
            answer = _ready([self.reason], []) if is_probe else ProblemResponse(refused, token_hex(8), Redaction())
        await answer(scope, receive, send)


def _alive() -> Response:
    return Response(wire.encode(Health(status="alive")), media_type=wire.JSON)


def _ready(reasons: list[str], problems: list[str]) -> Response:
    health = Health(status="not ready" if reasons else "ready", reasons=reasons, problems=problems)
    return Response(wire.encode(health), 503 if reasons else 200, {"retry-after": "1"} if reasons else None, wire.JSON)
