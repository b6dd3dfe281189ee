"""What one command may spend: its options, what is left of them after each page, and the answers until it is spent.

The bounds are of the whole command: those of requests and bytes begin with the first lookup, the time with opening the index.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import typer

from tiered_index.cli.output import error_document
from tiered_index.errors import BudgetExceeded
from tiered_index.service.lookup.budget import LookupLimits
from tiered_index.service.lookup.messages import MessagesResult
from tiered_index.storage.deadline import deadline_at
from tiered_index.types import Explain, QueryResult

__all__ = ["Allowance", "CacheDir", "MaxBytes", "MaxRequests", "Pages", "Timeout"]

_PANEL = "Limits"
_MOMENT_S = 1e-6
# what is given to a page whose time is up: it names what it would have read

MaxRequests = Annotated[
    int | None,
    typer.Option("--max-requests", metavar="N", help="Requests to the storage at most.", show_default=False, rich_help_panel=_PANEL),
]
MaxBytes = Annotated[
    int | None,
    typer.Option("--max-bytes", metavar="BYTES", help="Bytes read from the storage at most.", show_default=False, rich_help_panel=_PANEL),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        help="No request is begun after this time, opening the index included.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
CacheDir = Annotated[
    Path | None,
    typer.Option("--cache-dir", metavar="DIR", help="Local cache of directories and filters, for later commands, too.", show_default=False),
]
R = TypeVar("R", QueryResult, MessagesResult)


class Allowance:
    """What is left to a command; its time runs from the making. Raises `InvalidArgument` for a bound that can't be one."""

    def __init__(self, max_requests: int | None, max_bytes: int | None, timeout_s: float | None) -> None:
        limits = LookupLimits(max_requests, max_bytes, timeout_s)
        self._requests = limits.max_requests
        self._bytes = limits.max_bytes
        self._deadline_s = limits.deadline_s()

    def left(self) -> dict[str, Any]:
        """Return the bounds of the next lookup, by their names."""
        left_s = max(_MOMENT_S, self._deadline_s - time.monotonic()) if self._deadline_s is not None else None
        return {"max_requests": self._requests, "max_bytes": self._bytes, "timeout_s": left_s}

    def spend(self, explain: Explain) -> None:
        """Take off what a lookup cost."""
        self._requests = max(0, self._requests - explain.requests) if self._requests is not None else None
        self._bytes = max(0, self._bytes - explain.bytes) if self._bytes is not None else None

    def clock(self) -> contextlib.AbstractContextManager[None]:
        """Bound what is done within by the command's time."""
        return deadline_at(self._deadline_s)


class Pages(Generic[R]):
    """The answers of a command, page by page; with `every` up to the end.

    `open_ask` opens the index and returns what answers one page, by ``cursor`` and the bounds. Where the allowance doesn't reach, what was
    found is the last page, and `exceeded` is the error, to be raised when the pages are shown. `nothing` is an answer without any.
    """

    def __init__(
        self, open_ask: Callable[[], Callable[..., R]], nothing: R, cursor: str | None, allowance: Allowance, *, every: bool
    ) -> None:
        self._open_ask: Callable[[], Callable[..., R]] = open_ask
        self._nothing: R = nothing
        self._cursor = cursor
        self._allowance = allowance
        self.every = every
        self.exceeded: BudgetExceeded | None = None

    def __iter__(self) -> Iterator[R]:
        cursor = self._cursor
        ask: Callable[..., R] | None = None
        while True:
            try:
                if ask is None:
                    with self._allowance.clock():
                        ask = self._open_ask()
                answer = ask(cursor=cursor, **self._allowance.left())
            except BudgetExceeded as error:
                self.exceeded = error
                yield error.result if isinstance(error.result, type(self._nothing)) else self._nothing
                return
            self._allowance.spend(answer.explain)
            yield answer
            cursor = answer.cursor
            if not self.every or cursor is None:
                return

    def error(self) -> dict[str, Any]:
        """Return the field that tells of a spent allowance, nothing where there is none."""
        return error_document(self.exceeded) if self.exceeded is not None else {}

    def settle(self, *, partial: bool) -> int:
        """Return the exit code of an answer that was shown. Raises `BudgetExceeded` where the allowance didn't reach."""
        if self.exceeded is not None:
            raise self.exceeded
        return BudgetExceeded.exit_code if partial else 0
