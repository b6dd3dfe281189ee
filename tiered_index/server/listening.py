"""Listeners of one process: each serves one protocol on one address, all on one asyncio loop, until they are stopped.

HTTP is one of them; another protocol's is any other object with the same three members. Threads: `stop` from any.
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

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tiered_index.errors import SetupUnavailable
from tiered_index.server.gate import TARGET
from tiered_index.server.pacing import PACE, Pace
from tiered_index.server.problems import Problem, Redaction, Refused

_REFUSED = {
    400: "not an HTTP/1.1 request, or its URL has characters that must be percent-encoded",
    408: "the head of the request comes too slowly",
    414: "the URL has more than 64 KiB: send many keys by POST /v1/query:batch",
    431: "the head of the request has more than 64 KiB",
}
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
# connections that wait to be accepted
_BACKLOG = 2048
_MOST_CONNECTIONS = 4096
# that the kernel holds of an answer
_SENT_BYTES = 512 << 10
# for the head of a request to come whole, and for a client to take of what fills the buffer to it
_HEAD_S = _TAKE_S = 30.0
_LEAST_TAKEN_PER_S = 16 << 10
# How many times `_TAKE_S` the client of a stream has to take what was sent, and the last line.
_MORE_TIMES = 4
# of a TLS handshake, as of RocketMQ's protocol
_HANDSHAKE_S = 10.0
# of a URL, of a head and of a trailer; the parser bounds none of them
_MOST_HEAD_BYTES = 64 << 10
# For which a refused client is read on, to no use: a connection that is closed before everything was read is reset, and
# the refusal may be lost with it.
_LINGER_S = 5.0
# requests of one connection that wait until those before them are answered
_MOST_WAITING = 128


class Listener(Protocol):
    """Serves one protocol on one address."""

    @property
    def url(self) -> str:
        """Where it can be reached."""

    async def serve(self, ready: Callable[[], None]) -> None:
        """Serve until stopped, and call `ready` once it does; requests that are under way are ended first."""

    def stop(self) -> None:
        """Have `serve` end; in the loop's thread."""


@dataclass(frozen=True)
class Tls:
    """Files in PEM: certificate, its key, and the authority of clients' certificates, which are then needed."""

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
    """Serves an ASGI application. The address is taken when it is made, unless it is `bound`: port 0 is any free one.

    Raises `SetupUnavailable` if the address or the TLS files can't be used.
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
        """Return another one of the same application at the same address; connections go to the one that serves."""
        more: Any = {"tls": self._tls, "drain_s": self._drain_s, "bound": self._socket.dup()}
        return HttpListener(self._app, self._host, self.port, **more)

    def close(self) -> None:
        """Release the address of one that does not serve."""
        self._socket.close()

    @property
    def url(self) -> str:
        """Where it can be reached."""
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
        """Take no further connections; requests that are under way are ended first."""
        self._server.should_exit = True


class _Connection(HttpToolsProtocol):
    """A connection that ends where the head of a request is too long or late, where its client sends what is no request
    or too many requests at once, where it does not take an answer, or where there are too many others.
    """

    _late: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None
    # since a request or a piece of a body began
    _head_bytes = 0
    _field_bytes = 0
    # A head has begun, and has not ended.
    _in_head = False
    # The status of a request that is not answered otherwise.
    _refusal = 400
    _lingering: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._pace = Pace()
        # each request has a copy as its state
        self.app_state = {**self.app_state, PACE: self._pace}
        self._more_times = _MORE_TIMES
        if len(self.connections) > _MOST_CONNECTIONS:
            transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self._lingering is not None:
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if len(self.pipeline) > _MOST_WAITING:
            self.transport.abort()
        elif self._head_bytes > _MOST_HEAD_BYTES and self._lingering is None:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif self.cycle is None or self.cycle.response_complete:
            # empty lines, or the body of a request that was answered without it, end the wait for the next request
            self._watch()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal)

    def _refuse(self, status: int) -> None:
        """Answer a request that was not read to its end, and end the connection once its client has the answer."""
        if self.cycle is not None and not self.cycle.response_complete:
            # an answer is under way, and another one within it would be a part of it
            self.transport.abort()
            return
        # a head that is refused is late no more: a second refusal would follow the first
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
        super().on_headers_complete()
        self._in_head = False
        self._end_watch()
        if self.url[:1] not in (b"/", b"*"):
            self.scope["extensions"] = {TARGET: {"url": self.url}}

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._head_bytes = 0

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

    def _unsupported_upgrade_warning(self) -> None:
        # some clients offer HTTP/2 with each first request; they are answered as if they had not
        pass

    def _watch_taking(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._stuck = self.loop.call_later(_TAKE_S, self._go_on_or_end, left)

    def _go_on_or_end(self, left: int) -> None:
        """End the connection of a client that has taken next to nothing since `left` bytes were to be taken.

        A stream goes no further, and says so to a client that takes anything at all.
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
    """Uvicorn's server, which leaves signals to the process and tells when it listens."""

    ready: Callable[[], None]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # as Uvicorn's, which leaves the time of a handshake to asyncio: a minute
        loop, config = asyncio.get_running_loop(), self.config
        more: dict[str, Any] = {"ssl_handshake_timeout": _HANDSHAKE_S} if config.ssl is not None else {}
        connection = partial(_Connection, config=config, server_state=self.server_state, app_state={})
        self.servers = [
            await loop.create_server(connection, sock=one, ssl=config.ssl, backlog=_BACKLOG, **more)
            for one in sockets or ()
        ]
        self.started = True
        self.ready()


def is_local(host: str) -> bool:
    """Return whether only this host can reach an address."""
    return host in _LOCAL or host.startswith("127.")


def own_names(host: str) -> frozenset[str]:
    """Return by which names a service on `host` may be asked without tokens."""
    return _LOCAL | {host.lower()}


async def serve_all(
    listeners: Sequence[Listener], ready: Callable[[], None], stopping: threading.Event, ended: Callable[[], bool]
) -> None:
    """Serve until SIGTERM or SIGINT comes or `ended` says so; `stopping` is set first. `ready` is called once all do.

    Signals are heard in the main thread only. Raises what a listener raises; the others are stopped then.
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
    """Serve in a thread of its own until the block ends. Raises what the listener raises."""
    ready, stop = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(serve_all([listener], ready.set, threading.Event(), stop.is_set))
        except BaseException as error:  # noqa: BLE001 - whoever has opened the block gets it
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
    """Return a socket that has the address, and does not listen yet. Port 0 is any free one.

    Raises `SetupUnavailable`, which names the `option` of the port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # by its protocol asyncio knows that answers must not wait for acknowledgements (TCP_NODELAY)
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # connections have it, too: what a slow reader does not take is not made
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SENT_BYTES)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        instead = f"; choose another port by {option}" if error.errno == errno.EADDRINUSE else ""
        raise SetupUnavailable(f"can't listen on {host} port {port}: {error.strerror}{instead}") from error
    return bound
