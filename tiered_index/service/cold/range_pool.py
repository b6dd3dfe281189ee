"""How many ranges travel at once: one bound and one set of threads, of an index or of all indexes that are read as one.

Threads: any number.

Few ranges instead of many: runs that lie close together are fetched by one request.

A request costs as much time as some hundred KiB, so a gap below `gap_bytes` is read and thrown away rather than paid
for by a request. Pure.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeVar

from tiered_index.errors import BudgetExceeded
from tiered_index.format.trailer import Run
from tiered_index.service.threads.pool import DaemonPool
from tiered_index.storage.context import remaining_s

__all__ = ["RangeReadPool", "Span", "spans_of"]

T = TypeVar("T")


class RangeReadPool:
    """Lets up to `ranges` travel at once, whoever asks, and has as many threads for those that travel side by side."""

    def __init__(self, ranges: int) -> None:
        self._travelling = threading.BoundedSemaphore(ranges)
        self._pool = DaemonPool(ranges, "tiered-index-ranges")

    @contextlib.contextmanager
    def place(self, name: str) -> Iterator[None]:
        """Hold one of the places until the block ends.

        Raises `BudgetExceeded` where none is free before the deadline.
        """
        if not self._travelling.acquire(timeout=remaining_s()):
            raise BudgetExceeded(f"timeout_s was reached while waiting to read {name}")
        try:
            yield
        finally:
            self._travelling.release()

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Have a task run in one of the threads, in a copy of the caller's context. Raises as `DaemonPool.submit`."""
        return self._pool.submit(contextvars.copy_context().run, task)  # so that requests are counted to their look-up

    def close(self, until_s: float | None = None) -> None:
        """Let go of the threads; `until_s` as of `DaemonPool.close`. Idempotent."""
        self._pool.close(until_s)


@dataclass
class Span:
    """One range to fetch, and the runs that lie in it, in order of offset."""

    start: int
    length: int
    runs: list[Run] = field(default_factory=list)

    def pieces(self, data: bytes | memoryview) -> Iterator[tuple[Run, memoryview]]:
        """Yield each run with its bytes out of the span's `data`."""
        view = memoryview(data)
        for run in self.runs:
            at = run.offset - self.start
            yield run, view[at : at + run.length]


def spans_of(runs: Iterable[Run], gap_bytes: int, max_bytes: int) -> list[Span]:
    """Return spans that cover `runs` (each once, not overlapping), in order of offset.

    Runs at most `gap_bytes` apart share a span unless it would pass `max_bytes`; only a run longer than that makes a
    longer one.
    """
    spans: list[Span] = []
    for run in sorted(runs, key=attrgetter("offset")):
        end = run.offset + run.length
        if spans:
            last = spans[-1]
            if run.offset - (last.start + last.length) <= gap_bytes and end - last.start <= max_bytes:
                last.length = end - last.start
                last.runs.append(run)
                continue
        spans.append(Span(run.offset, run.length, [run]))
    return spans
