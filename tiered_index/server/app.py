"""A service put together: routes of lookups, lists, entries, checks and health, and the gate before them.

Handlers run on the event loop and never wait there for index or storage; errors become problems here and in the gate.
"""

from __future__ import annotations

import io
import time
from dataclasses import asdict
from typing import Self

import pyarrow as pa
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tiered_index._version import __version__
from tiered_index.errors import TieredIndexError
from tiered_index.server import openapi, parameters, wire
from tiered_index.server.calls import Allowance, Calls
from tiered_index.server.console import Console
from tiered_index.server.entries import Intake, need_topics, parsed
from tiered_index.server.gate import Gate, Rate
from tiered_index.server.health import caller_of
from tiered_index.server.lookups import LookupRoutes, need_type
from tiered_index.server.metrics import Metrics
from tiered_index.server.parameters import of_body, of_query
from tiered_index.server.problems import Problem, Refused
from tiered_index.server.room import Room, parsed_bytes
from tiered_index.server.served import Served, shown_topics
from tiered_index.server.verifying import Verification, Verifications
from tiered_index.service.lookup.inventory import describe_handle, du_document, du_groups, files_document
from tiered_index.storage.metering import deadline_at


class Routes(LookupRoutes):
    """All routes. Entries are taken only beside a writer."""

    def __init__(self, served: Served, calls: Calls, metrics: Metrics) -> None:
        super().__init__(served, calls, metrics)
        self._intake = Intake(served.writer) if served.writer is not None else None
        self.verifications = Verifications(served.lookups.config, served.redaction)

    async def files(self, request: Request) -> Response:
        """List every file and window table of the one index, and what is archived."""
        of_query(parameters.Nothing, request.query_params)
        caller_of(request).need_every_topic("files hold entries")
        lookups, ndjson = self.served.lookups, wire.form_of(request.headers.get("accept")) == wire.NDJSON

        def act() -> bytes:
            index_id = self.served.index_id
            document = files_document(index_id, lookups.log_state.number, lookups.files(), lookups.archived())
            document = self.served.redaction.document(document)
            if ndjson:
                files = document.pop("files")
                return b"".join(map(wire.encode, [*files, document]))
            return wire.encode(document)

        form = wire.NDJSON if ndjson else wire.JSON
        return await self.answer(request, Allowance(self.served.caps, self.prices), act, form)

    async def file(self, request: Request) -> Response:
        """Show what is known of one file without reading its entries."""
        of_query(parameters.Nothing, request.query_params)
        caller_of(request).need_every_topic("files hold entries")
        file_id = str(request.path_params["id"])

        def act() -> bytes:
            found = [handle for handle in self.served.lookups.files() if handle.file_id == file_id]
            if not found:
                raise Refused(404, f"no file has the id {file_id!r:.80}")
            topics = found[0].known_topics
            document = describe_handle(found[0]) | {"topics": None if topics is None else sorted(topics)}
            return wire.encode(self.served.redaction.document(document))

        return await self.answer(request, Allowance(self.served.caps, self.prices), act, wire.JSON)

    async def du(self, request: Request) -> Response:
        """Show what is stored and what it costs: entries, bytes and dollars a month by topic, day and state."""
        asked = of_query(parameters.DuParameters, request.query_params)
        caller, lookups = caller_of(request), self.served.lookups
        allowance = Allowance(self.served.caps, self.prices)

        def act() -> bytes:
            by = du_groups(asked.by)
            with deadline_at(time.monotonic() + allowance.left_s()):
                table = lookups.du()
            if caller.topics is not None:
                # rows without a topic are of all of them
                seen = [topic is not None and caller.sees(topic) for topic in table["topic"].to_pylist()]
                table = table.filter(pa.array(seen, pa.bool_()))
            return wire.encode(du_document(table, by, self.served.index_id, lookups.log_state.number, self.prices))

        return await self.answer(request, allowance, act, wire.JSON)

    # Entries

    async def entries(self, request: Request) -> Response:
        """Put entries: NDJSON as `ingest` takes it, or an Arrow stream. A body is taken whole or refused whole."""
        asked = of_query(parameters.EntriesParameters, request.query_params)
        caller = caller_of(request)
        caller.need("write")
        if asked.source is not None:
            caller.need_source(asked.source)
        form = need_type(request, wire.NDJSON, wire.ARROW)
        if (intake := self._intake) is None:
            raise Refused(409, "this service only reads: the one beside the index's writer takes entries")
        body = await request.body()

        def act() -> bytes:
            if form == wire.NDJSON:
                # one after the other is read
                request.state.held.hold(parsed_bytes(max(io.BytesIO(body), key=len, default=b"")))
            batch = parsed(body, form, self.served.caps.body_bytes)
            request.state.asked = {"topics": shown_topics(batch.topics)}
            need_topics(batch.topics, caller.need_topic)
            if batch.gives_topic_ids:
                caller.need_topic_ids()
            return wire.encode(intake.take(batch, asked))

        allowance = Allowance(self.served.caps, self.prices)
        return Response(await self.made(request, allowance, act, 0), media_type=wire.JSON)

    # Checks

    async def verify(self, request: Request) -> Response:
        """Begin to check every checksum of the one index; the answer says where its progress is."""
        of_query(parameters.Nothing, request.query_params)
        caller = caller_of(request)
        caller.need("admin")
        caller.need_every_topic("files hold entries")
        need_type(request, wire.JSON)
        body = await request.body()

        def act() -> Verification:
            asked = of_body(parameters.VerifyBody, body)
            # of several indexes each is checked by itself
            assert self.served.index_id
            return self.verifications.begin(request.state.request_id, deep=asked.deep)

        job = await self.made(request, Allowance(self.served.caps, self.prices), act, parsed_bytes(body))
        return Response(wire.encode(asdict(job)), 202, {"location": f"/v1/verify/{job.id}"}, wire.JSON)

    async def verification(self, request: Request) -> Response:
        """Show a verification: its progress, and once it is done its report."""
        of_query(parameters.Nothing, request.query_params)
        caller = caller_of(request)
        caller.need("admin")
        caller.need_every_topic("files hold entries")
        job = self.verifications.find(str(request.path_params["id"]))
        return Response(wire.encode(asdict(job)), media_type=wire.JSON)


class Service:
    """The ASGI application `app` of what is served, its gate before it, and its threads; close it as a context."""

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
        """Take what is served; `Calls`, `Room`, `Rate` and `Gate` say what the rest means."""
        self._calls = Calls(threads, waiting)
        metrics = Metrics(served.lookups, served.metrics)
        # lookups of other protocols of the process are counted, too
        self.count = metrics.lookup
        self._routes = Routes(served, self._calls, metrics)
        app = create_app(self._routes)
        page = Console() if console else None
        if page is not None:
            page.add_routes(app)
        self.app = Gate(
            _Dispatch(app),
            served.tokens,
            Rate(rate),
            Room(answer_bytes),
            served.caps.body_bytes,
            served.redaction,
            metrics.request,
            served.audit.refused,
            hosts,
            page.paths if page is not None else frozenset(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.close()
        self._routes.probes.close()
        self._routes.verifications.close()


class _Dispatch:
    """Has requests for paths without parameters handled at once, others by FastAPI: its layers take several times as
    long as a lookup, and what they are for, errors and bounds, the gate does.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        found = [route for route in app.routes if isinstance(route, APIRoute) and not route.param_convertors]
        self._routes = {(method, route.path): route for route in found for method in route.methods or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        response: Response = await route.endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


def create_app(routes: Routes) -> FastAPI:
    """Return the application without the gate that stands before it."""
    app = FastAPI(
        title="tiered_index",
        version=__version__,
        description=openapi.DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
        # the gate makes the span of a request, without its query, which has the key
        telemetry={"tracing": False},
    )

    async def tell(request: Request, error: Exception) -> Response:
        more: dict[str, str] = {}
        if isinstance(error, HTTPException):
            # such as which methods a path has
            more |= error.headers or {}
            # what Starlette itself refuses, such as an unknown path
            error = Refused(error.status_code, error.detail)
        problem = Problem.of(error, request.state.request_id, routes.served.redaction)
        headers = {name.decode(): value.decode() for name, value in problem.headers()} | more
        return Response(problem.body(), problem.status, headers)

    for kind in (HTTPException, TieredIndexError, Exception):
        app.add_exception_handler(kind, tell)
    openapi.add_routes(app, routes)
    return app
