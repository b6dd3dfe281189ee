"""Sends answers at the client's pace, and ends the answer of a client that reads too slowly.

A document of rows becomes a shorter document with a cursor. Any other answer ends with a line that has `error`. The
text before that line is not a complete JSON document, so that it can't be mistaken for the whole answer.
Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tiered_index.server import wire
from tiered_index.server.problems import Problem, Redaction, Refused

PACE = "pace"
"""The key of a connection's `Pace` in the state of its scopes."""
# Size of the pieces of an answer; a piece is sent when the client has read most of the previous one
_PIECE_BYTES = 256 << 10


@dataclass
class Pace:
    """The pace of one connection: whether the client reads too slowly, and whether its last answer can end early."""

    is_slow: bool = False
    is_stream: bool = False


@dataclass(frozen=True)
class Document:
    """A JSON document that can end early, after some of its rows.

    `cuts` are positions after rows, each with the bytes that end the list of rows there, with status and cursor. `rest`
    is the position after these bytes in the whole document.
    """

    body: bytes
    cuts: Sequence[tuple[int, bytes]] = ()
    rest: int = 0


def document_of_rows(
    body: bytes, ends: Iterable[int], status: str, cursor: str | None, cursor_after: Callable[[int], str]
) -> Document:
    """Return a document whose rows are followed by `status` and `cursor`.

    `ends` are the positions after its rows. `cursor_after` returns the cursor after the row with a number.
    """
    cut = "partial" if status == "partial" else "truncated"
    whole = {"status": status, "cursor": cursor}
    return document_with_ends(body, ends, whole, lambda number: {"status": cut, "cursor": cursor_after(number)})


def document_with_ends(
    body: bytes, ends: Iterable[int], whole: dict[str, Any], after: Callable[[int], dict[str, Any]]
) -> Document:
    """Return a document whose rows are followed by the fields of `whole`.

    `ends` are the positions after its rows. `after` returns the fields in place of `whole` if the document ends after
    the row with a number.
    """
    if len(body) <= _PIECE_BYTES:
        return Document(body)
    cuts, last = list[tuple[int, bytes]](), 0
    for number, last in enumerate(ends):
        # one cut for each piece: an answer ends early only between pieces
        if last >= (cuts[-1][0] if cuts else 0) + _PIECE_BYTES:
            cuts.append((last, _end_of_rows(after(number))))
    return Document(body, cuts, last + len(_end_of_rows(whole)))


def _end_of_rows(fields: dict[str, Any]) -> bytes:
    return b"]," + wire.encode(fields).strip()[1:-1]


class PacedResponse(Response):
    """A response that is sent in pieces at the client's pace, so that buffers do not hold a second copy.

    A large response has no Content-Length: it ends early if its client reads too slowly.
    """

    def __init__(self, content: bytes | Document, media_type: str | None = None) -> None:
        self._document = content if isinstance(content, Document) else Document(content)
        super().__init__(self._document.body, media_type=media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.get("state", {})
        pace: Pace = state.get(PACE, Pace())
        can_end = len(self.body) > _PIECE_BYTES and self.media_type in (wire.JSON, wire.NDJSON)
        headers = [pair for pair in self.raw_headers if not can_end or pair[0] != b"content-length"]
        pace.is_slow, pace.is_stream = False, can_end
        whole = bytes(self.body)
        at, end, last = 0, len(whole), b""
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        while True:
            if can_end and pace.is_slow and not last:
                end, last = self._early_end(at, state.get("request_id", ""))
            until = self._until(whole, at, end)
            goes_on = until < end or bool(last)
            if at < until or not goes_on:
                piece = whole[at:until] if until == len(whole) else memoryview(whole)[at:until]
                await send({"type": "http.response.body", "body": piece, "more_body": goes_on})
            at = until
            if not goes_on:
                return
            if at == end:
                await send({"type": "http.response.body", "body": last, "more_body": False})
                return
            # let the event loop note a lost connection: each later piece would log a warning
            await asyncio.sleep(0)

    def _until(self, whole: bytes, at: int, end: int) -> int:
        """Return the end of the piece that begins at `at`. NDJSON is cut between lines if a line fits."""
        until = min(at + _PIECE_BYTES, end)
        if until < end and self.media_type == wire.NDJSON:
            until = whole.rfind(b"\n", at, until) + 1 or until
        return until

    def _early_end(self, at: int, request_id: str) -> tuple[int, bytes]:
        """Return the position at which an answer ends early after `at` sent bytes, and the bytes of its end.

        Without a cut after `at`, a document of rows is sent whole.
        """
        document = self._document
        for place, end in document.cuts:
            if place >= at:
                return place, end + document.body[document.rest :]
        if document.cuts:
            return len(document.body), b""
        error = Refused(408, "the client read the answer too slowly: ask for less at once")
        # the error's line makes an incomplete document invalid
        line = b"\n" * (document.body[at - 1 : at] != b"\n")
        return at, line + wire.encode({"error": Problem.of(error, request_id, Redaction()).document})
