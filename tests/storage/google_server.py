"""The part of Google's XML API that obstore uses, for tests of `gs://`: no available emulator speaks it.

It follows the protocol's documentation. It proves nothing about Google's own service.
"""

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.support.http_server import Handler, served
from tests.support.object_store import Reply, Store, error


class GoogleServer(Store):
    """Objects of `buckets`. `requests` has each request's method and path, `failures` the next error answers."""

    def __init__(self, folder: Path, endpoint_url: str) -> None:
        super().__init__(folder)
        self.endpoint_url = endpoint_url
        self.buckets: set[str] = set()
        self.requests: list[str] = []
        self.failures: list[int] = []
        self.lock = threading.Lock()

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Reply:
        """Answer as the store does, in an existing bucket. An absent object has generation 0."""
        name = unquote(urlsplit(target).path).strip("/")
        if name.partition("/")[0] not in self.buckets:
            return error(404, "NoSuchBucket")
        if method == "DELETE" and name not in self.objects and "uploadId=" not in target:
            return error(404, "NoSuchKey")
        if headers.get("x-goog-if-generation-match") == "0":
            headers |= {"if-none-match": "*"}
        return super().answer(method, target, headers, body)


@contextlib.contextmanager
def google_server() -> Iterator[GoogleServer]:
    """Serve on a loopback port until the block ends."""

    class Answering(Handler):
        def answer(self) -> None:
            body = self.body()
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

    with tempfile.TemporaryDirectory() as folder, served(Answering) as url:
        google = GoogleServer(Path(folder), url)
        yield google
