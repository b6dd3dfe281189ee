"""The pace of a connection and of the answer on it: whether the client reads too slowly.

An answer that can end early ends with a line that has `error`. What came before that line is no JSON document, so
that it can't pass for a whole one. Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tiered_index.server import wire
from tiered_index.server.problems import Problem, Redaction, Refused

PACE = "pace"
"""The part of a scope's state that has the `Pace` of its connection."""
# An answer is handed over in pieces of this size, each once the client has taken most of the one before it.
_PIECE_BYTES = 256 << 10


@dataclass
class Pace:
    """The pace of one connection: whether the client reads too slowly, and whether the answer is a stream, whose last
    line can say so.
    """

    is_slow: bool = False
    is_stream: bool = False


class PacedResponse(Response):
    """An answer that is handed over as its client takes it, so that what is held of it is what is counted.

    A large one has no length: if its client takes it too slowly, it ends with a line that says so.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.get("state", {})
        pace: Pace = state.get(PACE, Pace())
        can_end = len(self.body) > _PIECE_BYTES and self.media_type in (wire.JSON, wire.NDJSON)
        headers = [pair for pair in self.raw_headers if not can_end or pair[0] != b"content-length"]
        pace.is_slow, pace.is_stream, ends_a_line = False, can_end, True
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
            for piece, goes_on in self._pieces():
                if can_end and pace.is_slow:
                    error = Refused(408, "the answer was taken too slowly; ask for less at once")
                    problem = Problem.of(error, state.get("request_id", ""), Redaction())
                    # a document lacks its end, and no further line can be that
                    line = b"\n" * (not ends_a_line) + wire.encode({"error": problem.document})
                    await send({"type": "http.response.body", "body": line, "more_body": False})
                    return
                await send({"type": "http.response.body", "body": piece, "more_body": goes_on})
                ends_a_line = bytes(piece[-1:]) == b"\n"
                if goes_on:
                    # the loop's turn, in which it notes that a connection is lost: each piece sent on it is a warning
                    await asyncio.sleep(0)
        finally:
            pace.is_stream = False

    def _pieces(self) -> Iterator[tuple[bytes | memoryview, bool]]:
        """Yield the pieces, and whether another one follows; lines stay whole if one fits."""
        whole = bytes(self.body)
        body, at, end = memoryview(whole), 0, len(whole)
        if end <= _PIECE_BYTES:
            yield whole, False
        while end > _PIECE_BYTES and at < end:
            until = min(at + _PIECE_BYTES, end)
            if until < end and self.media_type == wire.NDJSON:
                until = whole.rfind(b"\n", at, until) + 1 or until
            yield body[at:until], until < end
            at = until
