"""Bounds the body of each request: its bytes, and the time in which it arrives. Threads: the loop's.

With its `Content-Length`, or `Transfer-Encoding`, a body without an end can't be mistaken for a whole one.
"""

from __future__ import annotations

import asyncio
import time

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope

from tiered_index.server.http.problems import Refused

# Time for a body of any size, and the least rate of longer bodies
_BODY_S, _LEAST_BYTES_PER_S = 30.0, 16 << 10


def bounded(scope: Scope, receive: Receive, body_bytes: int) -> Receive:
    """Return `receive` for a body of at most `body_bytes`. It raises `Refused`, also while the body is read."""
    size, until_s, is_whole = 0, 0.0, False

    async def bounded_receive() -> Message:
        nonlocal size, until_s, is_whole
        if is_whole:
            return await receive()
        if not until_s:
            _check(Headers(scope=scope), body_bytes)
            until_s = time.monotonic() + _BODY_S
        try:
            # not `wait_for`, which makes a task for each wait
            async with asyncio.timeout(until_s + size / _LEAST_BYTES_PER_S - time.monotonic()):
                message = await receive()
        except TimeoutError:
            raise Refused(408, "the body arrives too slowly") from None
        is_whole = not message.get("more_body", False)
        size += len(message.get("body", b""))
        _check_size(size, body_bytes)
        return message

    return bounded_receive


def _check(headers: Headers, body_bytes: int) -> None:
    if "content-length" not in headers and "transfer-encoding" not in headers:
        raise Refused(400, "send Content-Length: the end of the body is not known without it")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise Refused(415, f"send the body unencoded, not in the encoding {encoding!r:.80}")
    _check_size(int(headers.get("content-length", 0)), body_bytes)


def _check_size(size: int, body_bytes: int) -> None:
    if size > body_bytes:
        raise Refused(413, f"the body has more than {body_bytes:,} bytes")
