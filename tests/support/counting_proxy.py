"""A reverse proxy before an S3 endpoint that counts requests and bytes, and injects faults into answers.

    with counting_proxy(server.endpoint_url) as proxy:
        storage = open_storage(f"s3://{bucket}?endpoint_url={proxy.endpoint_url}")
        ...
        assert proxy.counts() == {("GET", True, f"{bucket}/name"): Count(requests=1, bytes=4096)}
        proxy.fault = times(1, Action(answer=error(503, "SlowDown")))

It counts on the wire, not in the client. Method, path, query, headers and body pass as the client sent them, Host
included, so that signatures hold (hop-by-hop headers excepted). Clients' connections are kept; each request has its own
connection to the endpoint. A request is counted before its answer is sent, so that a client that has the answer finds
it counted. Bodies are held in memory: keep them small. Threads: any number of clients.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

__all__ = ["Action", "Count", "CountingProxy", "Exchange", "Request", "counting_proxy", "times"]

_HOP_BY_HOP = {"connection", "expect", "keep-alive", "transfer-encoding", "upgrade"}
_UPSTREAM_TIMEOUT_S = 60.0
# Pieces in which a slow answer (`drip_s`) is sent.
_PIECES = 20


@dataclass(frozen=True)
class Request:
    """What a client sent; `headers` are looked up in any case."""

    method: str
    path: str
    headers: Message
    body: bytes

    @property
    def key(self) -> str:
        """Return `bucket/key`, decoded (path-style addresses)."""
        return unquote(self.path.partition("?")[0]).strip("/")

    @property
    def ranged(self) -> bool:
        """Whether a range is asked for."""
        return "range" in self.headers


class Answer(Protocol):
    """What is sent in place of the endpoint's answer."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> dict[str, str]: ...

    @property
    def body(self) -> bytes: ...


@dataclass(frozen=True, kw_only=True)
class Action:
    """What to do to one exchange; the parts may be combined."""

    # Sent instead of asking the endpoint.
    answer: Answer | None = None
    # The Range that the endpoint is asked for instead, "" for none: the whole object, with 200. Breaks a signature.
    ask_range: str | None = None
    # Put in place of the answer's own.
    headers: dict[str, str] = field(default_factory=dict)
    # Position in the body of a byte whose lowest bit is flipped; negative from the end.
    flip_byte: int | None = None
    # Bytes of the body after which the connection is closed; all of them are announced.
    cut_at: int | None = None
    # With `cut_at`: the connection is reset, not closed.
    reset: bool = False
    # Seconds that sending the answer takes, piece by piece.
    drip_s: float = 0.0
    # The endpoint does its work, and the connection is closed without an answer.
    lose_answer: bool = False
    # Called when the endpoint has answered and that is counted, before the client is answered: a wait, or a change
    # meanwhile.
    hold: Callable[[], object] | None = None


class Exchange(NamedTuple):
    """One request and what was answered: `status` is None where nothing was.

    `bytes` counts the body's bytes that were sent.
    """

    method: str
    ranged: bool
    key: str
    status: int | None
    bytes: int


class Count(NamedTuple):
    """What requests of one kind to one key amount to."""

    requests: int
    bytes: int


@dataclass
class _Reply:
    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes


class CountingProxy:
    """A running proxy; `fault` decides on each request, called by one thread at a time."""

    def __init__(self, endpoint_url: str, upstream: str) -> None:
        self.endpoint_url = endpoint_url
        self.fault: Callable[[Request], Action | None] | None = None
        self.connections = 0
        self._upstream = upstream
        self._lock = threading.Lock()
        self._exchanges: list[Exchange] = []

    @property
    def exchanges(self) -> list[Exchange]:
        """Return what was counted since the last `reset`."""
        with self._lock:
            return list(self._exchanges)

    def reset(self) -> list[Exchange]:
        """Forget what was counted, and return it; end the faults."""
        with self._lock:
            exchanges, self._exchanges = self._exchanges, []
            self.fault = None
            return exchanges

    def counts(self) -> dict[tuple[str, bool, str], Count]:
        """Return requests and bytes answered, by method, whether a range was asked for, and `bucket/key`."""
        requests: Counter[tuple[str, bool, str]] = Counter()
        answered: Counter[tuple[str, bool, str]] = Counter()
        for exchange in self.exchanges:
            requests[exchange[:3]] += 1
            answered[exchange[:3]] += exchange.bytes
        return {kind: Count(number, answered[kind]) for kind, number in requests.items()}

    def action(self, request: Request) -> Action:
        """Return what is done with a request."""
        with self._lock:
            return (self.fault(request) if self.fault is not None else None) or Action()

    def connected(self) -> None:
        """Count a connection."""
        with self._lock:
            self.connections += 1

    def count(self, request: Request, status: int | None, sent: int) -> None:
        """Write down what a request was answered with."""
        with self._lock:
            self._exchanges.append(Exchange(request.method, request.ranged, request.key, status, sent))

    def ask(self, request: Request, action: Action) -> _Reply:
        """Return the endpoint's reply, or the one that the action holds."""
        if action.answer is not None:
            scripted = action.answer
            return _Reply(scripted.status, "", list(scripted.headers.items()), scripted.body)
        connection = http.client.HTTPConnection(self._upstream, timeout=_UPSTREAM_TIMEOUT_S)
        try:
            connection.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                if name.lower() == "range" and action.ask_range is not None:
                    if action.ask_range:
                        connection.putheader(name, action.ask_range)
                elif name.lower() not in _HOP_BY_HOP:
                    connection.putheader(name, value)
            connection.endheaders(request.body or None)
            answer = connection.getresponse()
            headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOP_BY_HOP]
            return _Reply(answer.status, answer.reason, headers, answer.read())
        finally:
            connection.close()


def times(
    number: int, action: Action, when: Callable[[Request], bool] = lambda request: True
) -> Callable[[Request], Action | None]:
    """Return a fault that strikes the first `number` requests that `when` picks."""
    left = number

    def fault(request: Request) -> Action | None:
        nonlocal left
        if not left or not when(request):
            return None
        left -= 1
        return action

    return fault


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    proxy: CountingProxy

    def setup(self) -> None:
        self.proxy.connected()
        super().setup()

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # a client that refuses an answer hangs up
            super().handle()

    def relay(self) -> None:
        if "transfer-encoding" in self.headers:
            self.send_error(501, "chunked requests are not relayed")
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, self.path, self.headers, body)
        action = self.proxy.action(request)
        try:
            reply = self.proxy.ask(request, action)
        except (OSError, http.client.HTTPException) as error:
            reply = _Reply(502, "Bad Gateway", [], f"the endpoint did not answer: {error!r}".encode())
        if action.flip_byte is not None:
            changed = bytearray(reply.body)
            changed[action.flip_byte] ^= 1
            reply.body = bytes(changed)
        sent = b"" if self.command == "HEAD" else reply.body[: action.cut_at]
        if action.lose_answer:
            self.proxy.count(request, None, 0)
        else:
            self.proxy.count(request, reply.status, len(sent))
        if action.hold is not None:
            action.hold()
        if action.lose_answer:
            self.close_connection = True
            return
        answer = _head(self.command, reply, action) + sent
        if action.drip_s:
            piece = len(answer) // _PIECES + 1
            for start in range(0, len(answer), piece):
                self.wfile.write(answer[start : start + piece])
                time.sleep(action.drip_s / _PIECES)
        else:
            self.wfile.write(answer)
        if action.cut_at is not None:
            self.close_connection = True
            if action.reset:
                self._reset()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = relay  # noqa: N815 - the base class looks for these names

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.rfile.close()  # which holds the socket open
        self.connection.close()

    def log_message(self, format: str, *args: object) -> None:
        pass


def _head(method: str, reply: _Reply, action: Action) -> bytes:
    """Return the status line and the headers."""
    replaced = {name.lower() for name in action.headers}
    headers = [(name, value) for name, value in reply.headers if name.lower() not in replaced]
    headers += action.headers.items()
    if method != "HEAD" and reply.status != 204 and "content-length" not in replaced:
        headers = [(name, value) for name, value in headers if name.lower() != "content-length"]
        headers.append(("Content-Length", str(len(reply.body))))
    lines = [f"HTTP/1.1 {reply.status} {reply.reason}", *(f"{name}: {value}" for name, value in headers)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        pass


@contextlib.contextmanager
def counting_proxy(upstream_url: str) -> Iterator[CountingProxy]:
    """Start a proxy before the endpoint `upstream_url` (http://host:port), yield it, stop it."""
    handler = type("Handler", (_Handler,), {})
    server = _Server(("127.0.0.1", 0), handler)
    proxy = CountingProxy(f"http://127.0.0.1:{server.server_address[1]}", urlsplit(upstream_url).netloc)
    handler.proxy = proxy  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
