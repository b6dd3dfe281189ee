"""How many ranges travel at once: one bound and one set of threads, of an index or of all indexes that are read as one.

Threads: any number.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from tiered_index.errors import BudgetExceeded
from tiered_index.service.daemon_pool import DaemonPool
from tiered_index.storage.deadline import remaining_s

__all__ = ["Travel"]

T = TypeVar("T")


class Travel:
    """Lets up to `ranges` travel at once, whoever asks, and has as many threads for those that travel side by side."""

    def __init__(self, ranges: int) -> None:
        self._travelling = threading.BoundedSemaphore(ranges)
        self._pool = DaemonPool(ranges, "tiered-index-ranges")

    @contextlib.contextmanager
    def place(self, name: str) -> Iterator[None]:
        """Hold one of the places until the block ends. Raises `BudgetExceeded` where none is free before the deadline."""
        if not self._travelling.acquire(timeout=remaining_s()):
            raise BudgetExceeded(f"timeout_s was reached while waiting to read {name}")
        try:
            yield
        finally:
            self._travelling.release()

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Have a task run in one of the threads, in a copy of the caller's context. Raises as `DaemonPool.submit`."""
        return self._pool.submit(contextvars.copy_context().run, task)  # so that requests are counted to their look-up

    def close(self) -> None:
        """Let go of the threads. Idempotent."""
        self._pool.close()
