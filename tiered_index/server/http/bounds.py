"""Bounds the URL and the body of each request: their bytes, and the time in which a body arrives. Threads: the loop's.

With its `Content-Length`, or `Transfer-Encoding`, a body without an end can't be mistaken for a whole one.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tiered_index.server.http.problems import Refused

# httptools refuses URLs of 64 KiB
_MOST_URL_BYTES = 60 << 10
# Time for a body of any size, and the least rate of longer bodies
_BODY_S, _LEAST_BYTES_PER_S = 30.0, 16 << 10


@dataclass(frozen=True)
class BoundedRequests:
    """Passes requests to `app`, with bodies of at most `body_bytes`. Raises `Refused`, also while a body is read."""

    app: ASGIApp
    body_bytes: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path, query = scope.get("raw_path") or b"", scope["query_string"]
        if len(path) + len(query) > _MOST_URL_BYTES:
            raise Refused(414, "the URL has more than 60 KiB: send many keys by POST /v1/query:batch")
        try:
            unquote_to_bytes(query).decode()
            unquote_to_bytes(path).decode()
        except UnicodeDecodeError:
            # the lookup would be for another key
            raise Refused(400, "the decoded URL is not UTF-8") from None
        await self.app(scope, self._bounded(scope, receive) if scope["method"] == "POST" else receive, send)

    def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        size, until_s, is_whole = 0, 0.0, False

        async def bounded() -> Message:
            nonlocal size, until_s, is_whole
            if is_whole:
                return await receive()
            if not until_s:
                self._check(Headers(scope=scope))
                until_s = time.monotonic() + _BODY_S
            try:
                # not `wait_for`, which makes a task for each wait
                async with asyncio.timeout(until_s + size / _LEAST_BYTES_PER_S - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                raise Refused(408, "the body arrives too slowly") from None
            is_whole = not message.get("more_body", False)
            size += len(message.get("body", b""))
            self._check_size(size)
            return message

        return bounded

    def _check(self, headers: Headers) -> None:
        if "content-length" not in headers and "transfer-encoding" not in headers:
            raise Refused(400, "send Content-Length: the end of the body is not known without it")
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity":
            raise Refused(415, f"send the body unencoded, not in the encoding {encoding!r:.80}")
        self._check_size(int(headers.get("content-length", 0)))

    def _check_size(self, size: int) -> None:
        if size > self.body_bytes:
            raise Refused(413, f"the body has more than {self.body_bytes:,} bytes")
