"""Runs the listeners of one process on one asyncio loop; each serves one protocol on one address. Has that of HTTP.

Threads: the loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import secrets
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tiered_index.errors import SetupUnavailable
from tiered_index.server.gate import TARGET
from tiered_index.server.joined import REST_S, JoinedTransport
from tiered_index.server.pacing import PACE, Pace
from tiered_index.server.problems import Problem, Redaction, Refused

_REFUSED = {
    400: "not an HTTP/1.1 request, or its URL has characters that must be percent-encoded",
    408: "the head of the request arrives too slowly",
    414: "the URL has more than 64 KiB: send many keys by POST /v1/query:batch",
    431: "the head of the request has more than 64 KiB",
}
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
# Most connections that wait to be accepted
_BACKLOG = 2048
_MOST_CONNECTIONS = 4096
# Size of the kernel's send buffer of a connection
_SENT_BYTES = 512 << 10
# Time for the complete head of a request, and between two checks that a client reads a response
_HEAD_S = _TAKE_S = 30.0
_LEAST_TAKEN_PER_S = 16 << 10
# Checks after which a slow client of a stream is disconnected: it may still read the sent bytes and the last line
_MORE_TIMES = 4
# Time for a TLS handshake, as for RocketMQ's protocol
_HANDSHAKE_S = 10.0
# Most bytes of a URL, a head and a trailer; the parser has no bounds
_MOST_HEAD_BYTES = 64 << 10
# Time to read on from a refused client: closing a connection with unread data resets it, and the refusal may be lost
_LINGER_S = 5.0
# Most requests of one connection that wait for earlier ones
_MOST_WAITING = 128


class Listener(Protocol):
    """Serves one protocol on one address."""

    @property
    def url(self) -> str:
        """The URL of the address."""

    async def serve(self, ready: Callable[[], None]) -> None:
        """Serve until `stop` is called; call `ready` once the listener accepts connections. Ends requests under way."""

    def stop(self) -> None:
        """Make `serve` end. Call it in the loop's thread."""


@dataclass(frozen=True)
class Tls:
    """PEM files: the certificate, its key, and the CA for client certificates, which are mandatory with a CA."""

    certificate: Path
    key: Path
    clients: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Return the context of a server's connections. Raises `SetupUnavailable` if the files can't be used."""
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
    """Serves an ASGI application over HTTP.

    The constructor binds the address, unless `bound` is a bound socket. Port 0 is any free port. `drain_s` is the time
    for requests under way at the end. Raises `SetupUnavailable` if the address or the TLS files can't be used.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        tls: Tls | None = None,
        drain_s: float = 30.0,
        bound: socket.socket | None = None,
    ) -> None:
        context = tls.context() if tls is not None else None
        self._socket = bound or bind(host, port)
        self._socket.listen(_BACKLOG)
        self._app, self._tls, self._host, self._drain_s = app, tls, host, drain_s
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=_Connection,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=int(drain_s),
        )
        config.load()
        config.ssl = context
        self._server = _Server(config)

    def twin(self) -> HttpListener:
        """Return a second listener of the same application and address. Only call `serve` of one of them."""
        more: Any = {"tls": self._tls, "drain_s": self._drain_s, "bound": self._socket.dup()}
        return HttpListener(self._app, self._host, self.port, **more)

    def close(self) -> None:
        """Release the address, if `serve` was not called."""
        self._socket.close()

    @property
    def url(self) -> str:
        """The URL of the address."""
        name = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'https' if self._tls else 'http'}://{name}:{self.port}"

    async def serve(self, ready: Callable[[], None]) -> None:
        """Serve until stopped."""
        self._server.ready = ready
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """Accept no further connections, and let requests under way end."""
        self._server.should_exit = True


class _Connection(HttpToolsProtocol):
    """An HTTP connection with bounds.

    The connection ends

    - if a request's head is invalid, too long or late
    - if a client sends too many requests at once, or does not read a response
    - if there are too many connections
    """

    _late: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None
    # Bytes since the start of a request or a piece of a body
    _head_bytes = 0
    _field_bytes = 0
    # A head has begun and has not ended
    _in_head = False
    # Status of the refusal if parsing fails
    _refusal = 400
    _lingering: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._joined = JoinedTransport(transport, self.loop)
        self.transport = self._joined  # type: ignore[assignment]
        self._pace = Pace()
        # each request gets a copy as its state
        self.app_state = {**self.app_state, PACE: self._pace}
        self._more_times = _MORE_TIMES
        if len(self.connections) > _MOST_CONNECTIONS:
            transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self._lingering is not None:
            return
        self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if len(self.pipeline) > _MOST_WAITING:
            self.transport.abort()
        elif self._head_bytes > _MOST_HEAD_BYTES and self._lingering is None:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif self.cycle is None or self.cycle.response_complete:
            # Empty lines, or the body of a request that is answered already, stop Uvicorn's timer for the next request
            self._watch()

    def eof_received(self) -> None:
        super().eof_received()
        # as the loop does now
        self._joined.close()

    def _parse(self, data: bytes) -> None:
        while len(self.pipeline) <= _MOST_WAITING:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserError:
                self._refuse(self._refusal)
            except httptools.HttpParserUpgrade as offered:
                if self._is_offer():
                    # The parser skips the body of a request that offers another protocol. Parse it without the offer.
                    lines = [b"%s: %s" % pair for pair in self.headers if pair[0] != b"upgrade"]
                    version = self.parser.get_http_version().encode()
                    first = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)
                    data = b"\r\n".join([first, *lines, b"", data[offered.args[0] :]])
                    # the earlier parser may have ended with that head
                    self.parser = httptools.HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                    continue
            return

    def _is_offer(self) -> bool:
        # some clients offer HTTP/2 in each first request
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _refuse(self, status: int) -> None:
        """Refuse a request that was not read to its end, and close the connection after the response."""
        if self.cycle is not None and not self.cycle.response_complete:
            # a response is under way; the refusal would become a part of it
            self.transport.abort()
            return
        # without this a late head would be refused a second time
        self._end_watch()
        error = Refused(status, _REFUSED[status])
        problem = Problem.of(error, secrets.token_hex(8), Redaction())
        body = problem.body()
        headers = [*problem.headers(), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        first = b"HTTP/1.1 %d %s" % (status, HTTPStatus(status).phrase.encode())
        self.transport.write(b"\r\n".join([first, *(b"%s: %s" % pair for pair in headers), b"", body]))
        self._lingering = self.loop.call_later(_LINGER_S, self.transport.abort)
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _bound(self, size: int, status: int) -> None:
        if size > _MOST_HEAD_BYTES:
            self._refusal = status
            raise ValueError(_REFUSED[status])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = self._field_bytes = 0
        self._in_head = True
        self._watch()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._bound(len(self.url), HTTPStatus.REQUEST_URI_TOO_LONG)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._field_bytes += len(name) + len(value)
        self._bound(self._field_bytes, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_headers_complete(self) -> None:
        if self._is_offer():
            return
        super().on_headers_complete()
        self._in_head = False
        self._end_watch()
        if self.url[:1] not in (b"/", b"*"):
            self.scope["extensions"] = {TARGET: {"url": self.url}}

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._head_bytes = 0

    def on_message_complete(self) -> None:
        if not self._is_offer():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._more_times = _MORE_TIMES

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._lingering is not None:
            self._lingering.cancel()
        self._end_watch()
        self._taken()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_taking()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._taken()

    def _watch_taking(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._stuck = self.loop.call_later(_TAKE_S, self._go_on_or_end, left)

    def _go_on_or_end(self, left: int) -> None:
        """Close the connection if its client reads too slowly; `left` is the unread size at the last check.

        If the client of a stream reads slowly but reads, mark the stream as slow: it then ends with an error line.
        """
        taken = left - self.transport.get_write_buffer_size()
        if taken < _TAKE_S * _LEAST_TAKEN_PER_S:
            if taken <= 0 or not self._pace.is_stream or not self._more_times:
                self.transport.abort()
                return
            self._pace.is_slow = True
            self._more_times -= 1
        self._watch_taking()

    def _taken(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _watch(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(_HEAD_S, self._end_late)

    def _end_late(self) -> None:
        if self._in_head:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT)
        else:
            self.transport.abort()

    def _end_watch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class _Server(uvicorn.Server):
    """Uvicorn's server without signal handlers; it calls `ready` when it listens."""

    ready: Callable[[], None]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # as Uvicorn's, but with a shorter time for TLS handshakes than asyncio's minute, and a longer one for the end
        loop, config = asyncio.get_running_loop(), self.config
        more: dict[str, Any] = {"ssl_handshake_timeout": _HANDSHAKE_S, "ssl_shutdown_timeout": REST_S}
        more = more if config.ssl is not None else {}
        connection = partial(_Connection, config=config, server_state=self.server_state, app_state={})
        self.servers = [
            await loop.create_server(connection, sock=one, ssl=config.ssl, backlog=_BACKLOG, **more)
            for one in sockets or ()
        ]
        self.started = True
        self.ready()


def is_local(host: str) -> bool:
    """Return whether `host` is a loopback address."""
    return host in _LOCAL or host.startswith("127.")


def own_names(host: str) -> frozenset[str]:
    """Return the host names that requests to a service on `host` may use if it has no tokens."""
    return _LOCAL | {host.lower()}


async def serve_all(
    listeners: Sequence[Listener], ready: Callable[[], None], stopping: threading.Event, ended: Callable[[], bool]
) -> None:
    """Serve until SIGTERM or SIGINT arrives or `ended()` is True; then set `stopping` and stop all listeners.

    `ready` is called once all listeners serve. Signals are handled only in the main thread. If a listener raises, the
    others are stopped and its error is raised.
    """
    loop, left = asyncio.get_running_loop(), len(listeners)

    def one_is_ready() -> None:
        nonlocal left
        left -= 1
        if not left:
            ready()

    def stop() -> None:
        stopping.set()
        for listener in listeners:
            listener.stop()

    heard = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    for number in heard:
        loop.add_signal_handler(number, stop)
    watch = asyncio.ensure_future(_watch(ended, stop))
    serving = [asyncio.ensure_future(listener.serve(one_is_ready)) for listener in listeners]
    try:
        await asyncio.wait(serving, return_when=asyncio.FIRST_EXCEPTION)
        stop()
        await asyncio.wait(serving)
        for one in serving:
            one.result()
    finally:
        watch.cancel()
        for number in heard:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def in_background(listener: Listener) -> Iterator[None]:
    """Serve in a background thread until the block ends. Raises the listener's errors at the end."""
    ready, stop = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(serve_all([listener], ready.set, threading.Event(), stop.is_set))
        except BaseException as error:  # noqa: BLE001 - raised at the end of the block
            errors.append(error)
        ready.set()

    thread = threading.Thread(target=run, name="tiered-index-listener", daemon=True)
    thread.start()
    ready.wait()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]


async def _watch(ended: Callable[[], bool], stop: Callable[[], None]) -> None:
    while not ended():
        await asyncio.sleep(0.1)
    stop()


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
