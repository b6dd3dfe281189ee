"""Assembles a service: its routes, each with a handler and the model of its query, behind the gate."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from tiered_index.metrics import Gauges
from tiered_index.server import wire
from tiered_index.server.calls import Calls
from tiered_index.server.console import Console
from tiered_index.server.description import description
from tiered_index.server.entries import EntryHandlers
from tiered_index.server.gate import Gate
from tiered_index.server.health import HealthHandlers
from tiered_index.server.lookups import LookupHandlers
from tiered_index.server.metrics import Metrics
from tiered_index.server.operations import OPERATIONS
from tiered_index.server.parameters import Nothing, of_query
from tiered_index.server.served import Served
from tiered_index.server.stored import StoredHandlers
from tiered_index.server.verifying import VerificationHandlers

Handle = Callable[[Request, Any], Awaitable[Response]]
# Operations that answer HEAD, too: probes and monitors send it
_WITH_HEAD = frozenset({"metrics", "livez", "readyz"})


class HttpService:
    """The ASGI application `app` of a service, with its gate, its `metrics` and its threads.

    Close it as a context.
    """

    def __init__(
        self,
        served: Served,
        *,
        threads: int = 16,
        waiting: int = 256,
        hosts: frozenset[str] | None = None,
        console: bool = True,
    ) -> None:
        """Assemble the service. See `Calls` and `Gate` for the arguments."""
        self._calls = Calls(threads, waiting)
        self._served = served
        # public: other protocols of the process count their requests there, too
        metrics = self.metrics = Metrics(served.lookups, self._gauges)
        of_index = served, self._calls, metrics
        calls = self._calls
        lookups, stored, entries = LookupHandlers(*of_index), StoredHandlers(*of_index), EntryHandlers(*of_index)
        health = self._health = HealthHandlers(served, metrics)
        verification = self._verification = VerificationHandlers(*of_index)
        of_lookups = (lookups.query, lookups.query_batch, lookups.messages, lookups.message, lookups.browse)
        of_state = (lookups.topics, stored.files, stored.file, stored.du, entries.entries, verification.verify)
        # without a place of `calls`: they answer also if none is free
        of_health = (
            verification.verification,
            health.health,
            health.token,
            health.metrics,
            health.livez,
            health.readyz,
        )
        self.routes = [
            *(_route(handle, calls) for handle in (*of_lookups, *of_state)),
            *(_route(handle, None) for handle in (verification.verification, *of_health)),
        ]
        page = Console() if console else None
        further = [Route("/openapi.json", _describe), *(page.routes() if page is not None else ())]
        self.app = Gate(
            Router([*self.routes, *further], redirect_slashes=False),
            served,
            metrics.request,
            hosts,
            page.paths if page is not None else frozenset(),
        )

    def _gauges(self) -> Gauges:
        calls = self._calls
        return {
            "http_requests_in_flight": ("Requests that are being answered.", self.app.under_way),
            "calls_running": ("Lookups and other calls of the index that run now.", min(calls.running, calls.threads)),
            "calls_waiting": (
                "Lookups and other calls of the index that wait for a free thread, or until fewer are under way.",
                calls.waiting + max(0, calls.running - calls.threads),
            ),
            **self._served.metrics(),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.close()
        self._health.calls.close()
        self._verification.close()


@dataclass(frozen=True)
class Endpoint:
    """An ASGI application that checks a request's query with `model` (None: any query) and calls `handle`.

    From then until its answer is sent, a request has a place of `calls` (None: it needs none).
    """

    handle: Handle
    model: type[Nothing] | None
    calls: Calls | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive, send)
        params = of_query(self.model, request.query_params) if self.model is not None else None
        async with self.calls or contextlib.nullcontext():
            response = await self.handle(request, params)
            await response(scope, receive, send)


def _route(handle: Handle, calls: Calls | None) -> Route:
    """Return the route of a handler, which has the name of its operation."""
    operation = OPERATIONS[handle.__name__]
    method, path = operation.place.split()
    # an id of messages may have slashes
    path = path.replace("messages/{id}", "messages/{id:path}")
    route = Route(path, Endpoint(handle, operation.query, calls), methods=[method])
    # Starlette adds HEAD to GET; a HEAD would cost a lookup
    route.methods = {method, "HEAD"} if handle.__name__ in _WITH_HEAD else {method}
    return route


async def _describe(_: Request) -> Response:
    return Response(description(), media_type=wire.JSON)
