"""The part of Google's XML API that obstore uses, for tests of `gs://`: no available emulator speaks it.

It follows the protocol's documentation. It proves nothing about Google's own service.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.storage.scripted_server import Answer, Request, answer_of, scripted_server
from tests.support.object_store import Reply, Store, error


class GoogleServer(Store):
    """Objects of `buckets`. `requests` has each request's method and path, `failures` the next error answers."""

    def __init__(self, folder: Path, endpoint_url: str) -> None:
        super().__init__(folder)
        self.endpoint_url = endpoint_url
        self.buckets: set[str] = set()
        self.requests: list[str] = []
        self.failures: list[int] = []

    def script(self, request: Request) -> Answer:
        self.requests.append(f"{request.method} {request.path}")
        if self.failures:
            return answer_of(error(self.failures.pop(), "ServiceUnavailable"))
        return answer_of(self.answer(request.method, request.path, request.lowered, request.body))

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
    with tempfile.TemporaryDirectory() as folder, scripted_server() as server:
        google = GoogleServer(Path(folder), server.endpoint_url)
        server.script = google.script
        yield google
