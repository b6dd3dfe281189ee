"""A reverse proxy for an S3 endpoint. It counts requests and bytes, and injects faults into responses.

    with counting_proxy(server.endpoint_url) as proxy:
        storage = open_storage(f"s3://{bucket}?endpoint_url={proxy.endpoint_url}")
        ...
        assert proxy.counts() == {("GET", True, f"{bucket}/name"): Count(requests=1, bytes=4096)}
        proxy.fault = lambda request: Action(answer=error(503, "SlowDown"))

It counts on the wire, not in the client. It passes method, path, query, headers and body unchanged, except hop-by-hop
headers, so signatures stay valid. Connections of clients are kept open. Each request has its own connection to the
endpoint. A request is counted before its response is sent, so a client with the response finds it counted. Bodies are
in memory: keep them small. Threads: any number of clients.
"""

import contextlib
import http.client
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.message import Message
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from tests.support.http_server import Handler, served

_HOP_BY_HOP = {"connection", "expect", "keep-alive", "transfer-encoding", "upgrade"}
_UPSTREAM_TIMEOUT_S = 60.0
# Number of pieces of a slow response (`drip_s`).
_PIECES = 20


@dataclass(frozen=True)
class Request:
    """The request of a client. The case of names in `headers` does not count."""

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
        """Whether the request is for a range."""
        return "range" in self.headers


@dataclass(frozen=True, kw_only=True)
class Action:
    """The faults of one exchange. They may be combined."""

    # This response, with status, headers and body, is sent without a request to the endpoint.
    answer: Any = None
    # Position of a byte in the body whose lowest bit is flipped. Negative: from the end.
    flip_byte: int | None = None
    # Number of bytes of the body before the connection is closed. The header has the full length.
    cut_at: int | None = None
    # With `cut_at`: reset the connection instead of closing it.
    reset: bool = False
    # Seconds to send the response, piece by piece.
    drip_s: float = 0.0
    # The endpoint processes the request. Then the connection is closed without a response.
    lose_answer: bool = False
    # Called before the endpoint gets the request: a wait.
    before: Callable[[], object] | None = None
    # Called after the endpoint's response was counted, and before it is sent: a wait, or a change.
    hold: Callable[[], object] | None = None


class Exchange(NamedTuple):
    """One request and its response. `status` None: there was no response.

    `bytes` counts the bytes of the body that were sent.
    """

    method: str
    ranged: bool
    key: str
    status: int | None
    bytes: int


class Count(NamedTuple):
    """Number and bytes of the requests of one kind to one key."""

    requests: int
    bytes: int


@dataclass
class _Reply:
    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes


class CountingProxy:
    """A running proxy. It calls `fault` for each request, in one thread at a time."""

    def __init__(self, endpoint_url: str, upstream: str) -> None:
        self.endpoint_url = endpoint_url
        self.fault: Callable[[Request], Action | None] | None = None
        self._upstream = upstream
        self._lock = threading.Lock()
        self._exchanges: list[Exchange] = []

    @property
    def exchanges(self) -> list[Exchange]:
        """Return the exchanges since the last `reset`."""
        with self._lock:
            return list(self._exchanges)

    def reset(self) -> list[Exchange]:
        """Clear and return the exchanges, and end the faults."""
        with self._lock:
            exchanges, self._exchanges = self._exchanges, []
            self.fault = None
            return exchanges

    def counts(self) -> dict[tuple[str, bool, str], Count]:
        """Return requests and bytes of responses by method, whether it is for a range, and `bucket/key`."""
        requests: Counter[tuple[str, bool, str]] = Counter()
        answered: Counter[tuple[str, bool, str]] = Counter()
        for exchange in self.exchanges:
            requests[exchange[:3]] += 1
            answered[exchange[:3]] += exchange.bytes
        return {kind: Count(number, answered[kind]) for kind, number in requests.items()}

    def action(self, request: Request) -> Action:
        with self._lock:
            return (self.fault(request) if self.fault is not None else None) or Action()

    def count(self, request: Request, status: int | None, sent: int) -> None:
        """Record the response to a request."""
        with self._lock:
            self._exchanges.append(Exchange(request.method, request.ranged, request.key, status, sent))

    def ask(self, request: Request, action: Action) -> _Reply:
        """Return the endpoint's response, or that of the action."""
        if action.answer is not None:
            scripted = action.answer
            return _Reply(scripted.status, "", list(scripted.headers.items()), scripted.body)
        connection = http.client.HTTPConnection(self._upstream, timeout=_UPSTREAM_TIMEOUT_S)
        try:
            connection.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                if name.lower() not in _HOP_BY_HOP:
                    connection.putheader(name, value)
            connection.endheaders(request.body or None)
            answer = connection.getresponse()
            headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOP_BY_HOP]
            return _Reply(answer.status, answer.reason, headers, answer.read())
        finally:
            connection.close()


class _Handler(Handler):
    proxy: CountingProxy

    def answer(self) -> None:
        if "transfer-encoding" in self.headers:
            self.send_error(501, "chunked requests are not relayed")
            return
        request = Request(self.command, self.path, self.headers, self.body())
        action = self.proxy.action(request)
        if action.before is not None:
            action.before()
        try:
            reply = self.proxy.ask(request, action)
        except (OSError, http.client.HTTPException) as error:
            reply = _Reply(502, "Bad Gateway", [], f"the endpoint did not answer: {error!r}".encode())
        if action.flip_byte is not None:
            changed = bytearray(reply.body)
            changed[action.flip_byte] ^= 1
            reply.body = bytes(changed)
        sent = b"" if self.command == "HEAD" else reply.body[: action.cut_at]
        self.proxy.count(request, *((None, 0) if action.lose_answer else (reply.status, len(sent))))
        if action.hold is not None:
            action.hold()
        if action.lose_answer:
            self.close_connection = True
            return
        answer = _head(self.command, reply) + sent
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

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.rfile.close()  # it keeps the socket open
        self.connection.close()


def _head(method: str, reply: _Reply) -> bytes:
    """Return the status line and the headers."""
    headers = reply.headers
    if method != "HEAD" and reply.status != 204:
        headers = [(name, value) for name, value in headers if name.lower() != "content-length"]
        headers.append(("Content-Length", str(len(reply.body))))
    lines = [f"HTTP/1.1 {reply.status} {reply.reason}", *(f"{name}: {value}" for name, value in headers)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


@contextlib.contextmanager
def counting_proxy(upstream_url: str) -> Iterator[CountingProxy]:
    """Yield a running proxy for the endpoint `upstream_url` (http://host:port)."""
    handler: type[_Handler] = type("Handler", (_Handler,), {})
    with served(handler) as url:
        handler.proxy = CountingProxy(url, urlsplit(upstream_url).netloc)
        yield handler.proxy
