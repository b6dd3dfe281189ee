"""Assembles a service: its routes, each with a handler and the model of its query, behind the gate."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from tiered_index.base.documents import decoder_of
from tiered_index.server import console as page
from tiered_index.server.entries import EntryHandlers
from tiered_index.server.health import HealthHandlers
from tiered_index.server.http.calls import Calls, Handlers
from tiered_index.server.http.gate import Gate
from tiered_index.server.http.metrics import Metrics
from tiered_index.server.http.operations import Operation, described, operations_of
from tiered_index.server.http.parameters import Nothing, of_query
from tiered_index.server.http.served import Served
from tiered_index.server.lookups import LookupHandlers
from tiered_index.server.stored import StoredHandlers
from tiered_index.service.metrics import Gauges

HANDLERS = (LookupHandlers, StoredHandlers, EntryHandlers, HealthHandlers)
OPERATIONS: tuple[Operation, ...] = tuple(operation for kind in HANDLERS for operation in operations_of(kind))
"""The operations of the service."""
_DESCRIPTION = "/openapi.json"


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
        self._handlers = [kind(served, self._calls, metrics) for kind in HANDLERS]
        self.routes = [_route(of, operation) for of in self._handlers for operation in operations_of(type(of))]
        further = [Route(_DESCRIPTION, _describe), *(page.routes() if console else ())]
        unguarded = {_DESCRIPTION, *(operation.place.split()[1] for operation in OPERATIONS if operation.is_open)}
        self.app = Gate(
            _Router([*self.routes, *further], redirect_slashes=False),
            served,
            metrics.request,
            hosts,
            unguarded | page.PATHS if console else unguarded,
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
        for handlers in self._handlers:
            handlers.close()


class _Router(Router):
    """Starlette's router, which tries the patterns of all paths. A path without parameters is found by its name."""

    def __init__(self, routes: list[Route], *, redirect_slashes: bool) -> None:
        super().__init__(routes, redirect_slashes=redirect_slashes)
        self._plain = {(method, route.path): route for route in routes for method in route.methods or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        route = self._plain.get((scope["method"], scope["path"]))
        if route is None or route.param_convertors:
            await super().__call__(scope, receive, send)
            return
        scope["route"] = route
        await route.app(scope, receive, send)


@dataclass(frozen=True)
class Endpoint:
    """An ASGI application that checks a request's query with `model` (None: any query) and calls `handle`.

    From then until its answer is sent, a request has a place of `calls` (None: it needs none).
    """

    handle: Callable[[Request, Any], Awaitable[Response]]
    model: type[Nothing] | None
    calls: Calls | None

    def __post_init__(self) -> None:
        if self.model is not None:
            # teaches msgspec the model before several threads use it
            decoder_of(self.model)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive, send)
        params = of_query(self.model, scope["query_string"]) if self.model is not None else None
        async with self.calls or contextlib.nullcontext():
            response = await self.handle(request, params)
            await response(scope, receive, send)


def _route(handlers: Handlers, operation: Operation) -> Route:
    """Return the route of an operation."""
    method, path = operation.place.split()
    # an id of messages may have slashes
    path = path.replace("messages/{id}", "messages/{id:path}")
    handle, calls = partial(operation.handler, handlers), None if operation.is_light else handlers.calls
    route = Route(path, Endpoint(handle, operation.query, calls))
    # Starlette adds HEAD to GET; a HEAD would cost a lookup
    route.methods = {method, "HEAD"} if operation.is_light else {method}
    return route


async def _describe(_: Request) -> Response:
    return _description()


@functools.cache
def _description() -> Response:
    # made once: it takes some tenths of a second, and needs no token
    return JSONResponse(described(OPERATIONS))
