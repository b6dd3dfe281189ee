"""The part of Google's XML API that obstore uses: for tests of `gs://`, as no emulator on hand speaks it.

It stands for the protocol as its documentation has it, and proves nothing of Google's own service.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.support.object_store import Reply, Store, error


class GoogleServer(Store):
    """Objects of `buckets`; `requests` are method and path of what came, `failures` how the next ones are answered."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.endpoint_url = ""
        self.buckets: set[str] = set()
        self.requests: list[str] = []
        self.failures: list[int] = []
        self.lock = threading.Lock()

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Reply:
        """As the store's, in a bucket that is there. Generation 0 is that of no object."""
        name = unquote(urlsplit(target).path).strip("/")
        if name.partition("/")[0] not in self.buckets:
            return error(404, "NoSuchBucket")
        if method == "DELETE" and name not in self.objects:
            return error(404, "NoSuchKey")
        if headers.get("x-goog-if-generation-match") == "0":
            headers |= {"if-none-match": "*"}
        return super().answer(method, target, headers, body)


@contextlib.contextmanager
def google_server() -> Iterator[GoogleServer]:
    """Serve on a loopback port until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            with google.lock:
                google.requests.append(f"{self.command} {self.path}")
                if google.failures:
                    reply = error(google.failures.pop(), "ServiceUnavailable")
                else:
                    reply = google.answer(self.command, self.path, headers, body)
            self.send_response(reply.status)
            for name, value in ({"Content-Length": f"{len(reply.body)}"} | dict(reply.headers)).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(reply.body)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer  # noqa: N815 - the base class looks for these names

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

    with tempfile.TemporaryDirectory() as folder, Server(("127.0.0.1", 0), Handler) as server:
        google = GoogleServer(Path(folder))
        google.endpoint_url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield google
        finally:
            server.shutdown()
            thread.join()
