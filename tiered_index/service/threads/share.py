"""A share of a pool's threads, so that calls of one index that hang leave threads for the others.

Threads: every method from any thread. A forked child needs a new share.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from tiered_index.service.threads import DaemonPool

T = TypeVar("T")


def share_of(threads: int, indexes: int) -> int:
    """Return how many of the threads one of the indexes may use: a quarter, or an equal part of fewer indexes."""
    return max(1, threads // min(4, max(1, indexes)))


class Share:
    """Runs calls in `pool`, at most `most()` of them at the same time. Further calls wait in order."""

    def __init__(self, pool: DaemonPool, most: Callable[[], int]) -> None:
        self._pool, self._most = pool, most
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        # a set, so that an interrupt at any line loses no place
        self._running: set[Future[Any]] = set()

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """As `DaemonPool.submit`. A call that had to wait gets the errors of `DaemonPool.submit` as its result."""
        bound = partial(copy_context().run, call, *arguments)
        future: Future[T] = Future()
        try:
            with self._lock:
                if len(self._running) >= self._most():
                    self._waiting.append((future, bound))
                    return future
                self._running.add(future)
            self._pool.submit(self._run, future, bound)
        except BaseException:
            self._end(future)
            raise
        return future

    def replace_threads(self) -> None:
        """Give the pool one more thread for each running call of this share, until the call ends."""
        with self._lock:
            running = [one for one in self._running if one.running()]
        for one in running:
            self._pool.replace_thread(one)

    def _run(self, future: Future[Any], call: Callable[[], Any]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - the caller of `result` gets it
                self._end(future)
                future.set_exception(error)
            else:
                self._end(future)
                future.set_result(result)
        else:
            self._end(future)

    def _end(self, ended: Future[Any]) -> None:
        """Free a place, and begin the next calls that wait."""
        with self._lock:
            self._running.discard(ended)
        while True:
            with self._lock:
                if not self._waiting or len(self._running) >= self._most():
                    return
                future, call = self._waiting.popleft()
                self._running.add(future)
            try:
                self._pool.submit(self._run, future, call)
            except BaseException as error:  # noqa: BLE001 - the caller of `result` gets it
                with self._lock:
                    self._running.discard(future)
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
            else:
                return
