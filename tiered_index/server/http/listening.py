"""The listener of HTTP, and the event loop on which the listeners of one process run.

Uvicorn serves HTTP, with its own protocol on httptools and its own limits. Its connections end here if a client sends
no whole head for five seconds, or does not take the rest of an answer. Threads: the loop's.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import socket
import ssl
import sys
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Self, cast

import uvicorn
from anyio.from_thread import BlockingPortal, start_blocking_portal
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tiered_index.base.strangers import FIRST_S, Strangers
from tiered_index.connectors.repeated_lines import OnceAMinute
from tiered_index.errors import SetupUnavailable
from tiered_index.server.http.gate import CONNECTION, SEND_S

_log = logging.getLogger(__name__)
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_MOST_CONNECTIONS = 4096
# Most bytes of a head, of chunk sizes and of trailers, headers, and requests that wait: the parser has no bounds
_MOST_HEAD_BYTES, _MOST_HEADERS, _MOST_WAITING = 128 << 10, 256, 16
_TOO_MUCH = (
    f"A head has at most {_MOST_HEAD_BYTES >> 10} KiB and {_MOST_HEADERS} headers, and at most {_MOST_WAITING} "
    "requests wait for the answer to another one."
)
# Bytes that are parsed before the next look at these bounds
_PARSED_BYTES = 8 << 10
_REQUEST_LINE = re.compile(rb"[A-Z]{3,7} /\S* HTTP/1\.[01]\r\n")
_OFFER = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
_OF_BODIES = frozenset({b"content-length", b"transfer-encoding"})
# One line about requests that break the protocol, of a flood of them
_spared = OnceAMinute()
logging.getLogger("uvicorn.error").addFilter(lambda record: record.levelno != logging.WARNING or _spared.filter(record))
# Size of the kernel's send buffer of a connection: most answers fit
_SENT_BYTES = 512 << 10


@dataclass
class Tls:
    """PEM files: the certificate, its key, and the CA for client certificates, which are mandatory with a CA.

    `look` reads changed files again, for later connections: a renewed certificate needs no restart. Threads: one.
    """

    certificate: Path
    key: Path
    clients: Path | None = None
    _context: ssl.SSLContext | None = field(default=None, init=False)
    _seen: list[tuple[int, int, int] | None] = field(default_factory=list, init=False)

    def context(self) -> ssl.SSLContext:
        """Return the context of a server's connections. Raises `SetupUnavailable` if the files can't be used."""
        if self._context is None:
            self._seen = self._states()
            self._context = self._loaded()
        return self._context

    def look(self) -> None:
        """Read the files again if they have changed. Files that can't be used are only logged."""
        if self._context is None or (states := self._states()) == self._seen:
            return
        self._seen = states
        try:
            renewed = self._loaded()
        except SetupUnavailable as error:
            _log.warning("%s; new connections have the former certificate", error)
        else:
            # a context would keep the former certificate beside one of another kind of key, and a removed CA
            self._context.sni_callback = lambda connection, *_: setattr(connection, "context", renewed)
            _log.info("the TLS files have changed, and were read again")

    def _states(self) -> list[tuple[int, int, int] | None]:
        """Return what changes with each file; None: it is missing."""
        states: list[tuple[int, int, int] | None] = []
        for path in (self.certificate, self.key, self.clients):
            try:
                status = None if path is None else path.stat()
            except OSError:
                status = None
            states.append(None if status is None else (status.st_ino, status.st_mtime_ns, status.st_size))
        return states

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key)
            if self.clients is not None:
                context.load_verify_locations(self.clients)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:
            raise SetupUnavailable(f"the TLS files can't be used: {error}") from error
        return context


class HttpListener:
    """Serves an ASGI application over HTTP within an ``async with``.

    The constructor binds the address. Port 0 is any free port. `drain_s` is the time for requests under way at the end.
    `has_ended` is set once the listener has ended, also by a failure. Raises `SetupUnavailable` if the address or the
    TLS files can't be used.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, *, tls: Tls | None = None, drain_s: float = 30.0) -> None:
        context = tls.context() if tls is not None else None
        self._socket = bind(host, port)
        # early connections wait
        self._socket.listen()
        self._tls, self._host, self._strangers = tls, host, Strangers()
        self.port: int = self._socket.getsockname()[1]
        self.has_ended = threading.Event()
        config = uvicorn.Config(
            app,
            http=partial(_HttpConnection, self._strangers),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            # nobody asks for the client's address
            proxy_headers=False,
            limit_concurrency=_MOST_CONNECTIONS,
            timeout_keep_alive=int(FIRST_S),
            timeout_graceful_shutdown=int(drain_s),
            callback_notify=self._end_idle,
            # at each look, once a second: Uvicorn compares times of a clock that may be set back
            timeout_notify=-sys.maxsize,
        )
        config.load()
        config.ssl = context
        self._server = uvicorn.Server(config)

    @property
    def url(self) -> str:
        """The URL of the address."""
        name = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'https' if self._tls else 'http'}://{name}:{self.port}"

    async def __aenter__(self) -> Self:
        # as Uvicorn's `startup`, but with bounds of the number and time of TLS handshakes
        server, config, made = self._server, self._server.config, cast(Any, self._server.config.http_protocol_class)
        server.lifespan = config.lifespan_class(config)
        connection = partial(made, config=config, server_state=server.server_state, app_state={})
        server.servers = []
        self._end_accepting = await self._strangers.serve(self._socket, connection, config.ssl)
        self._serving = asyncio.create_task(server.main_loop())
        self._serving.add_done_callback(lambda _: self.has_ended.set())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Accept no further connections, and let requests under way end."""
        self._server.should_exit = True
        self._end_accepting()
        try:
            await self._serving
        finally:
            await self._server.shutdown([self._socket])

    async def _end_idle(self) -> None:
        if self._tls is not None:
            self._tls.look()
        now_s = time.monotonic()
        for connection in list(self._server.server_state.connections):
            connection.end_if_idle(now_s)  # type: ignore[union-attr]


class _HttpConnection(HttpToolsProtocol):
    """Uvicorn's connection. It is a stranger's until a request has shown a token."""

    def __init__(self, strangers: Strangers, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._strangers = strangers
        # each request gets a copy as its state
        self.app_state = {**self.app_state, CONNECTION: self}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._seen: tuple[object, int] = (None, 0)
        # requests whose answers have not ended: of a pipeline, `cycle` is the last one
        self._cycles: list[RequestResponseCycle] = []
        self._since_s = time.monotonic()
        # received since the last whole head or piece of a body
        self._unparsed_bytes = 0
        self._is_known = False
        self._strangers.enter(self, self.client[0] if self.client else "", transport.abort, self._is_working)

    def data_received(self, data: bytes) -> None:
        if self.scope is None:
            self._parse(data)
            return
        # a head may follow the rest of a body. What only looks like one is part of that body, and the parser knows
        lines = islice(_REQUEST_LINE.finditer(data), _MOST_WAITING)
        for begin, end in pairwise([0, *(line.start() for line in lines if line.start()), len(data)]):
            self._parse(data[begin:end])
            if self.transport.is_closing():
                return

    def _parse(self, data: bytes) -> None:
        # Java's client offers HTTP/2 in each request, and the parser would skip the body
        if self.scope is None and (end := data.find(b"\r\n\r\n")) >= 0:
            data = _OFFER.sub(b"", data[:end]) + data[end:]
        for at in range(0, len(data), _PARSED_BYTES):
            heads = self.cycle, len(self.pipeline)
            self._unparsed_bytes += min(len(data) - at, _PARSED_BYTES)
            super().data_received(data[at : at + _PARSED_BYTES])
            if self.transport.is_closing():
                return
            if heads != (self.cycle, len(self.pipeline)):
                self._unparsed_bytes = 0
            is_long = self._unparsed_bytes > _MOST_HEAD_BYTES or len(self.headers or ()) > _MOST_HEADERS
            if is_long or len(self.pipeline) > _MOST_WAITING:
                self.send_400_response(_TOO_MUCH)
                return

    def send_400_response(self, msg: str) -> None:
        """Refuse what has arrived, if this can't be taken for a part of the answer under way."""
        if any(cycle.response_started and not cycle.response_complete for cycle in self._cycles):
            self.transport.abort()
        else:
            super().send_400_response(msg)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and any(name in _OF_BODIES for name, _ in self.headers):
            # as by `data_received`, but its head came in parts, or behind another request: Uvicorn answers 400
            raise ValueError("the body would be skipped")
        super().on_headers_complete()
        self._cycles = [*(cycle for cycle in self._cycles if not cycle.response_complete), self.cycle]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        # until the next request begins
        self.scope = None  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        # also of a body that nobody reads: its request was refused
        self._unparsed_bytes = 0
        super().on_body(body)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._strangers.leave(self)

    def is_known(self) -> None:
        """Note that a request has shown a token."""
        if not self._is_known:
            self._is_known = True
            self._strangers.leave(self)

    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _is_working(self) -> bool:
        """Return whether the service has to do something: a client that does not take its answer must not be spared."""
        return self._is_busy() and not self.flow.write_paused

    def end_if_idle(self, now_s: float) -> None:
        """End the connection if it has waited too long for a whole head, or for a client that takes nothing."""
        seen: tuple[object, int] = self.cycle, self.transport.get_write_buffer_size()
        # the gate bounds the time of a request under way
        if seen != self._seen or self._is_busy():
            self._seen, self._since_s = seen, now_s
        elif now_s - self._since_s >= (SEND_S if seen[1] else FIRST_S):
            self.transport.abort()


def is_local(host: str) -> bool:
    """Return whether `host` is a loopback address."""
    return host in _LOCAL or host.startswith("127.")


def own_names(host: str) -> frozenset[str]:
    """Return the host names that requests to a service on `host` may use if it has no tokens."""
    return _LOCAL | {host.lower()}


def loop_in_thread() -> AbstractContextManager[BlockingPortal]:
    """Return the context of an event loop in its own thread, where `wrap_async_context_manager` runs listeners."""
    return start_blocking_portal(backend_options={"use_uvloop": True}, name="tiered-index-listener")


def bind(host: str, port: int, option: str = "--port") -> socket.socket:
    """Return a socket that is bound to the address and does not listen yet. Port 0 is any free port.

    Raises `SetupUnavailable`; if the port is in use, the message names the `option` that sets it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # with this protocol asyncio sets TCP_NODELAY: responses must not wait for acknowledgements
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # connections inherit it: a slow reader must slow down the making of its response
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SENT_BYTES)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        instead = f"; choose another port by {option}" if error.errno == errno.EADDRINUSE else ""
        raise SetupUnavailable(f"can't listen on {host} port {port}: {error.strerror}{instead}") from error
    return bound
