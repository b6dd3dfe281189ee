"""An HTTP server with scripted answers, for answers to an S3 client that good servers never give."""

import contextlib
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.support.http_server import Handler, served
from tests.support.object_store import Reply
from tiered_index.storage.obstores import PROVEN

_LONGEST_WAIT_S = 60


@dataclass
class Answer:
    """One response. `announced` is the Content-Length if it differs from the body's.

    A response with a header Transfer-Encoding has no Content-Length. The body is sent unchanged, and the connection
    closed. The server waits for `held` before the response, and for `stalled` after the body's last byte, with the
    connection left open. Each wait lasts at most a minute.
    """

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    announced: int | None = None
    held: threading.Event | None = None
    stalled: threading.Event | None = None


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def lowered(self) -> dict[str, str]:
        """The headers by their names in lower case, since clients may use any case."""
        return {name.lower(): value for name, value in self.headers.items()}


def error(status: int, code: str, message: str = "scripted") -> Answer:
    """Return an S3 error document."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    return Answer(status, body, {"Content-Type": "application/xml"})


def part(data: bytes, start: int, end: int, *, total: int | None = None) -> Answer:
    """Return the right answer to a range GET of `data[start:end]`."""
    total = len(data) if total is None else total
    return Answer(206, data[start:end], {"Content-Range": f"bytes {start}-{end - 1}/{total}"})


def answer_of(reply: Reply) -> Answer:
    """Return the answer of a store, whose HEAD has the length of a body that it does not send."""
    headers = dict(reply.headers)
    return Answer(reply.status, reply.body, headers, announced=int(headers.pop("Content-Length", len(reply.body))))


class ScriptedServer:
    """Answers with the queued `answers` in turn, and repeats the last one. `requests` has the received requests."""

    def __init__(self, endpoint_url: str) -> None:
        self.endpoint_url = endpoint_url
        self.requests: list[Request] = []
        self.connections = 0
        self.script: Callable[[Request], Answer]
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Clear the requests, and answer 500 until the next script."""
        self.requests.clear()
        self.connections = 0
        self.answers(error(500, "InternalError", "nothing scripted"))

    def answers(self, *answers: Answer) -> None:
        queue = list(answers)
        self.script = lambda request: queue.pop(0) if len(queue) > 1 else queue[0]

    def answer(self, request: Request) -> Answer:
        with self._lock:
            self.requests.append(request)
            return self.script(request)

    def paths(self) -> list[str]:
        return [f"{request.method} {request.path.partition('?')[0]}" for request in self.requests]


@contextlib.contextmanager
def scripted_server(
    host: str = "127.0.0.1", tls: ssl.SSLContext | None = None, *, is_new: bool = False
) -> Iterator[ScriptedServer]:
    """Serve until the block ends. Clients know that the server does not redirect, unless it `is_new`."""

    class Answering(Handler):
        def setup(self) -> None:
            scripted.connections += 1
            super().setup()

        def answer(self) -> None:
            answer = scripted.answer(Request(self.command, self.path, dict(self.headers.items()), self.body()))
            if answer.held is not None:
                answer.held.wait(_LONGEST_WAIT_S)
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            if "Transfer-Encoding" in answer.headers:
                self.close_connection = True
                self.send_header("Connection", "close")  # else the client may send its next request here
            else:
                self.send_header(
                    "Content-Length", str(len(answer.body) if answer.announced is None else answer.announced)
                )
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)
                self.wfile.flush()
                self.close_connection |= answer.announced not in {None, len(answer.body)}
            if answer.stalled is not None:
                answer.stalled.wait(_LONGEST_WAIT_S)

    with served(Answering, host, tls) as url:
        scripted = ScriptedServer(url)
        # the port may have been another server's
        (PROVEN.discard if is_new else PROVEN.add)(urlsplit(url).netloc)
        yield scripted
