"""Assembles a service: its routes, each with a handler and the model of its query, behind the gate."""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from tiered_index._version import __version__
from tiered_index.metrics import Gauges
from tiered_index.server import parameters, wire
from tiered_index.server.calls import Calls
from tiered_index.server.console import Console
from tiered_index.server.entries import EntryHandlers
from tiered_index.server.gate import Gate, Rate
from tiered_index.server.health import HealthHandlers
from tiered_index.server.lookups import LookupHandlers
from tiered_index.server.memory import MemoryBudget
from tiered_index.server.metrics import Metrics
from tiered_index.server.parameters import Nothing, of_query
from tiered_index.server.served import Served
from tiered_index.server.stored import StoredHandlers
from tiered_index.server.verifying import VerificationHandlers

# The description of every route, with examples; tests compare it with the service
OPENAPI = Path(__file__).parent / "openapi.json"


class Service:
    """The ASGI application `app` of a service, with its gate, its `metrics` and its threads.

    Close it as a context.
    """

    def __init__(
        self,
        served: Served,
        *,
        threads: int = 16,
        waiting: int = 256,
        answer_bytes: int = 1 << 30,
        rate: float = 0.0,
        hosts: frozenset[str] | None = None,
        console: bool = True,
    ) -> None:
        """Assemble the service. See `Calls`, `MemoryBudget`, `Rate` and `Gate` for the arguments."""
        self._calls = Calls(threads, waiting)
        self._served = served
        # public: other protocols of the process count their requests there, too
        metrics = self.metrics = Metrics(served.lookups, self._gauges)
        of_index = served, self._calls, metrics
        lookups, stored, entries = LookupHandlers(*of_index), StoredHandlers(*of_index), EntryHandlers(*of_index)
        health = self._health = HealthHandlers(served, metrics)
        verification = self._verification = VerificationHandlers(*of_index)
        self.routes = [
            _route("GET", "/v1/query", lookups.typed(lookups.query), parameters.QueryParameters),
            _route("POST", "/v1/query:batch", lookups.typed(lookups.query_batch)),
            _route("GET", "/v1/messages", lookups.typed(lookups.messages), parameters.MessagesParameters),
            _route("GET", "/v1/messages/{id:path}", lookups.typed(lookups.message), parameters.MessageParameters),
            _route("GET", "/v1/browse", lookups.browse, parameters.BrowseParameters),
            _route("GET", "/v1/topics", lookups.topics, parameters.Range),
            _route("GET", "/v1/files", stored.files, Nothing),
            _route("GET", "/v1/files/{id}", stored.file, Nothing),
            _route("GET", "/v1/du", stored.du, parameters.DuParameters),
            _route("POST", "/v1/entries", entries.entries, parameters.EntriesParameters),
            _route("POST", "/v1/verify", verification.verify, Nothing),
            _route("GET", "/v1/verify/{id}", verification.verification, Nothing),
            _route("GET", "/v1/health", health.health, Nothing),
            _route("GET", "/v1/history", health.history, Nothing),
            _route("GET", "/v1/token", health.token, Nothing),
            _route("GET HEAD", "/metrics", health.metrics, Nothing),
            _route("GET HEAD", "/livez", health.livez),
            _route("GET HEAD", "/readyz", health.readyz),
        ]
        page = Console() if console else None
        further = [Route("/openapi.json", _describe), *(page.routes() if page is not None else ())]
        self.app = Gate(
            Router([*self.routes, *further], redirect_slashes=False),
            served,
            Rate(rate),
            MemoryBudget(answer_bytes),
            metrics.request,
            hosts,
            page.paths if page is not None else frozenset(),
        )
        self._health.past.start()

    def _gauges(self) -> Gauges:
        under_way, threads = self._calls.under_way, self._calls.threads
        return {
            "http_requests_in_flight": ("Requests that are being answered.", self.app.under_way),
            "calls_running": ("Lookups and other calls of the index that run now.", min(under_way, threads)),
            "calls_waiting": (
                "Lookups and other calls of the index that wait for a free thread.",
                max(0, under_way - threads),
            ),
            **self._served.metrics(),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._health.past.close()
        self._calls.close()
        self._health.calls.close()
        self._verification.close()


@dataclass(frozen=True)
class Endpoint:
    """An ASGI application that checks a request's query with `model` (None: any query) and calls `handle`."""

    handle: Callable[[Request, Any], Awaitable[Response]]
    model: type[Nothing] | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive, send)
        asked = of_query(self.model, request.query_params) if self.model is not None else None
        response = await self.handle(request, asked)
        await response(scope, receive, send)


def _route(
    methods: str, path: str, handle: Callable[[Request, Any], Awaitable[Response]], model: type[Nothing] | None = None
) -> Route:
    route = Route(path, Endpoint(handle, model), methods=methods.split())
    # Starlette adds HEAD to GET; a HEAD would cost a lookup
    route.methods = set(methods.split())
    return route


async def _describe(_: Request) -> Response:
    return Response(_description(), media_type=wire.JSON)


@functools.cache
def _description() -> bytes:
    document = json.loads(OPENAPI.read_bytes())
    document["info"]["version"] = __version__
    return json.dumps(document).encode()
