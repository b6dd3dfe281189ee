"""The part of Google's XML API that obstore uses, in memory: for tests of `gs://`, as no emulator on hand speaks it.

It stands for the protocol as its documentation has it, and proves nothing of Google's own service.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE = 1000


class GoogleServer:
    """Objects by bucket and key: bytes, generation and time; `requests` are method and path of what came."""

    def __init__(self) -> None:
        self.endpoint_url = ""
        self.buckets: dict[str, dict[str, tuple[bytes, int, float]]] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.requests: list[str] = []
        self.failures: list[int] = []
        self.lock = threading.Lock()
        self.generation = 0

    def answer(
        self, method: str, bucket: str, key: str, query: dict[str, str], headers: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        objects = self.buckets.get(bucket)
        if objects is None:
            return error(404, "NoSuchBucket")
        if not key:
            return 200, self.listing(objects, query), {}
        if method == "POST" and "uploads" in query:
            upload_id = f"upload-{len(self.uploads)}"
            self.uploads[upload_id] = {}
            document = (
                f"<InitiateMultipartUploadResult><UploadId>{upload_id}</UploadId></InitiateMultipartUploadResult>"
            )
            return 200, document.encode(), {}
        if "uploadId" in query and method == "PUT":
            self.uploads[query["uploadId"]][int(query["partNumber"])] = body
            return 200, b"", {"ETag": f'"{query["partNumber"]}"'}
        if "uploadId" in query:
            parts = self.uploads.pop(query["uploadId"])
            tag = self.stored(objects, key, b"".join(parts[number] for number in sorted(parts)))
            document = f"<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>"
            return 200, document.encode(), {"ETag": tag}
        if method == "PUT":
            if headers.get("x-goog-if-generation-match") == "0" and key in objects:
                return error(412, "PreconditionFailed")
            return 200, b"", {"ETag": self.stored(objects, key, body)}
        if key not in objects:
            return error(404, "NoSuchKey")
        if method == "DELETE":
            del objects[key]
            return 204, b"", {}
        data, generation, stored_s = objects[key]
        told = {"ETag": f'"{generation}"', "Last-Modified": formatdate(stored_s, usegmt=True)}
        if headers.get("if-match", told["ETag"]) != told["ETag"]:
            return error(412, "PreconditionFailed")
        if "range" not in headers:
            return 200, data, told
        first, _, last = headers["range"].removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last), len(data) - 1)
        if start >= len(data):
            return error(416, "InvalidRange")
        return 206, data[start : end + 1], told | {"Content-Range": f"bytes {start}-{end}/{len(data)}"}

    def stored(self, objects: dict[str, tuple[bytes, int, float]], key: str, body: bytes) -> str:
        self.generation += 1
        objects[key] = body, self.generation, time.time()
        return f'"{self.generation}"'

    def listing(self, objects: dict[str, tuple[bytes, int, float]], query: dict[str, str]) -> bytes:
        after = query.get("continuation-token") or query.get("start-after", "")
        found = [key for key in sorted(objects) if key.startswith(query.get("prefix", "")) and key > after]
        items = ""
        for key in found[:PAGE]:
            data, generation, stored_s = objects[key]
            modified = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(stored_s))
            items += (
                f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><ETag>&quot;{generation}&quot;</ETag>"
                f"<LastModified>{modified}</LastModified></Contents>"
            )
        if len(found) > PAGE:
            items += f"<NextContinuationToken>{escape(found[PAGE - 1])}</NextContinuationToken>"
        return f"<ListBucketResult>{items}</ListBucketResult>".encode()


def error(status: int, code: str) -> tuple[int, bytes, dict[str, str]]:
    return status, f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode(), {}


@contextlib.contextmanager
def google_server() -> Iterator[GoogleServer]:
    """Serve on a loopback port until the block ends."""
    google = GoogleServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = urlsplit(self.path)
            bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
            query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
            headers = {name.lower(): value for name, value in self.headers.items()}
            with google.lock:
                google.requests.append(f"{self.command} {self.path}")
                status, data, told = (
                    error(google.failures.pop(), "ServiceUnavailable")
                    if google.failures
                    else google.answer(self.command, bucket, key, query, headers, body)
                )
            self.send_response(status)
            for name, value in told.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer  # noqa: N815 - the base class looks for these names

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

    with Server(("127.0.0.1", 0), Handler) as server:
        google.endpoint_url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield google
        finally:
            server.shutdown()
            thread.join()
