"""The gate in front of all routes: request id, caller, bounds, time for each send, and errors as responses.

The gate is the outermost ASGI application. Without tokens it accepts only requests to the service's own address.
Otherwise a web page could call a service on the same host by a DNS name of its own. Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import time
import traceback
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote_to_bytes

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tiered_index.base.tracing import request_id as current_id
from tiered_index.base.tracing import request_span, tell_request
from tiered_index.errors import TieredIndexError
from tiered_index.server.http.bounds import bounded
from tiered_index.server.http.problems import PROTECTED, ProblemResponse, Redaction, Refused
from tiered_index.server.http.served import Served
from tiered_index.server.http.tokens import ANYONE, Caller

_logger = logging.getLogger(__name__)
_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
# Methods that metrics name; a client can send any text as its method
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# httptools refuses URLs of 64 KiB
_MOST_URL_BYTES = 60 << 10
# Time in which a client must take most of what was sent so far
SEND_S = 30.0
_PROTECTED = [(name.encode(), value.encode()) for name, value in PROTECTED.items()]
# the status in logs and metrics of a request whose client has left
CLIENT_GONE = 499
CONNECTION = "connection"
"""The key of the connection in the state of its requests."""
# The caller of a path that needs no token
_STRANGER = replace(ANYONE)
Observe = Callable[[str, str, int, float], None]
"""Called for each request with route, method, status and seconds."""


@dataclass(eq=False)
class Gate:
    """Checks requests and passes them to `app`. Without tokens it accepts only the host names `hosts` (None: any).

    The paths `unguarded` need no token. Requests that are forbidden (403) are written to the audit log.
    """

    app: ASGIApp
    served: Served
    observe: Observe
    hosts: frozenset[str] | None
    unguarded: Container[str]
    # Requests whose responses have not ended
    under_way: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        All of its ends are here: each kind of failure is answered, counted, logged and traced once.
        """
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began_s = time.perf_counter()
        headers: dict[bytes, bytes] = dict(scope["headers"])
        header = headers.get(b"x-request-id", b"")
        request_id = header.decode() if header and _ID.fullmatch(header) else f"{random.getrandbits(64):016x}"
        status = 0
        failed: Exception | None = None

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                named = {name for name, _ in message["headers"]}
                more = [pair for pair in _PROTECTED if pair[0] not in named]
                message["headers"] = [*message["headers"], *more, (b"x-request-id", request_id.encode())]
            if connection is not None and (connection.flow.write_paused or connection.transport.is_closing()):
                await _taken(connection)
            await send(message)

        state = scope.setdefault("state", {})
        connection = state.get(CONNECTION)
        state["request_id"] = request_id
        current_id.set(request_id)
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self.under_way += 1
        try:
            with request_span(method, headers) as traced:
                try:
                    _check_once(scope, headers)
                    caller = state["caller"] = self._caller(scope, headers)
                    if connection is not None and caller is not _STRANGER:
                        connection.is_known()
                    # With "app" set, Starlette raises for unknown paths and methods
                    scope["app"] = self
                    _check_url(scope)
                    if method == "POST":
                        receive = bounded(scope, receive, self.served.caps.body_bytes)
                    await self.app(scope, receive, answer)
                except ClientDisconnect:
                    status = CLIENT_GONE
                except asyncio.CancelledError:
                    # the time for requests under way is over, or a second signal ends the service now
                    _logger.warning("request %s was ended: the service stops", request_id)
                    status = status or 503
                    if connection is not None:
                        connection.transport.abort()
                except Exception as error:
                    failed = error
                    _free(error)
                    if not status:
                        with contextlib.suppress(ClientDisconnect):
                            await _problem(error, request_id, self.served.redaction)(scope, receive, answer)
                    else:
                        # the server ends the connection: a response without an end shows that it is incomplete
                        _logger.error("request %s broke off", request_id, exc_info=error)
                finally:
                    tell_request(traced, method, _route_of(scope), status or CLIENT_GONE, failed)
        finally:
            # otherwise the error and this frame hold each other until a collection
            failed = None
            self.under_way -= 1
            if connection is not None and connection.transport.is_closing():
                # Uvicorn notes this later, and for the newest of several requests only; it logs the others as errors
                getattr(send, "__self__", connection.cycle).disconnected = True
            await self._ended(scope, method, status or CLIENT_GONE, time.perf_counter() - began_s)

    async def _ended(self, scope: Scope, method: str, status: int, seconds: float) -> None:
        """Count and log a request, and write it to the audit log if it was forbidden."""
        route, state = _route_of(scope), scope["state"]
        caller: Caller | None = state.get("caller")
        who = caller.name if caller is not None else None
        self.observe(route, method, status, seconds)
        if _logger.isEnabledFor(logging.INFO):
            fields = {"method": method, "route": route, "status": status, "seconds": round(seconds, 6), "caller": who}
            _logger.info("%s %s %d %.6f s", method, route, status, seconds, extra={"fields": fields})
        if status == 403 and self.served.audit.is_on:
            query, method_and_path = scope["query_string"].decode("latin-1"), f"{method} {scope['path']}"
            # in a thread: writing may wait for a disk
            refused_request = state["request_id"], who, method_and_path, query, state.get("of_body", {})
            await asyncio.shield(asyncio.to_thread(self.served.audit.refused, *refused_request))

    def _caller(self, scope: Scope, headers: dict[bytes, bytes]) -> Caller:
        if scope["path"] in self.unguarded:
            return _STRANGER
        if (tokens := self.served.tokens) is None:
            host = headers.get(b"host", b"").decode("latin-1").rpartition(":")
            name = (host[0] if host[0] and host[2].isdigit() else "".join(host)).strip("[]").lower()
            if self.hosts is not None and name not in self.hosts:
                raise Refused(403, "this service has no tokens: call it by the address that it listens on")
            if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
                raise Refused(403, "this service has no tokens, and refuses requests from pages of other sites")
            return ANYONE
        kind, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        caller = tokens.find(token.strip()) if kind.lower() == "bearer" else None
        if caller is None:
            if kind.lower() == "bearer" and token.strip():
                raise Refused(401, "the token is not valid: it was revoked, or is of another service")
            raise Refused(401, "give a token: Authorization: Bearer TOKEN")
        return caller


async def _taken(connection: Any) -> None:
    """Wait until a client has taken most of what was sent. Raises `ClientDisconnect`, also if it takes too long."""
    try:
        async with asyncio.timeout(SEND_S):
            await connection.flow.drain()
        if not connection.transport.is_closing():
            return
    except TimeoutError:
        pass
    connection.transport.abort()
    raise ClientDisconnect


def _route_of(scope: Scope) -> str:
    # the path without the parameters' converters
    route: Route | None = scope.get("route")
    return "other" if route is None else route.path_format


def _check_url(scope: Scope) -> None:
    """Raise `Refused` for a URL that is too long, or is not UTF-8."""
    path, query = scope.get("raw_path") or b"", scope["query_string"]
    url = path + query
    if len(url) > _MOST_URL_BYTES:
        raise Refused(414, "the URL has more than 60 KiB: send many keys by POST /v1/query:batch")
    if b"%" in url or not url.isascii():
        try:
            unquote_to_bytes(query).decode()
            unquote_to_bytes(path).decode()
        except UnicodeDecodeError:
            # the lookup would be for another key
            raise Refused(400, "the decoded URL is not UTF-8") from None


def _check_once(scope: Scope, headers: dict[bytes, bytes]) -> None:
    """Raise `Refused` for two hosts or two tokens: a proxy and this service could use different ones (RFC 9112)."""
    if len(headers) < len(scope["headers"]):
        names = [name for name, _ in scope["headers"]]
        for name in (b"host", b"authorization"):
            if names.count(name) > 1:
                raise Refused(400, f"the header {name.decode().capitalize()} is given more than once")


def _free(error: BaseException) -> None:
    """Free what the calls that raised an error hold, such as a body: the answer to the error may take a while."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


def _problem(error: Exception, request_id: str, redaction: Redaction) -> ProblemResponse:
    """Return the response for an error of a request, and log an unexpected one."""
    if isinstance(error, HTTPException):
        # Starlette refuses unknown paths and methods, and sends the allowed methods
        response = ProblemResponse(Refused(error.status_code, error.detail), request_id, redaction)
        response.headers.update(error.headers or {})
        return response
    if not isinstance(error, TieredIndexError):
        _logger.error("request %s failed", request_id, exc_info=error)
    return ProblemResponse(error, request_id, redaction)
