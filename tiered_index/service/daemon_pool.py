"""Threads that wait for a storage: a close and the interpreter's end don't wait for them longer than a moment.

A request under way can't be broken off, and one that hangs holds its thread until the storage's own time-out. The threads of
`concurrent.futures` would hold up whoever closes their pool, and the end of the process, for as long. These are daemons: what they were
about is of no use to anybody by then, and they only read.

Threads: `submit` and `close` from any.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["DaemonPool"]

T = TypeVar("T")
_CLOSE_S = 1.0
# that a close waits for what is under way

_Work = tuple[Future[Any], Callable[[], Any]]


class DaemonPool:
    """Runs calls in up to `threads` threads, begun when they are needed. They end with the pool, closed or merely forgotten."""

    def __init__(self, threads: int, name: str) -> None:
        self._most = threads
        self._name = name
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._closed = False
        self._end = weakref.finalize(self, _end, self._queue, self._threads)
        self._end.atexit = False

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Have `call(*arguments)` run. Raises `RuntimeError` where the pool is closed."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._queue.put((future, lambda: call(*arguments)))
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._most:
                thread = threading.Thread(
                    target=_work, args=(self._queue, self._idle), name=f"{self._name}_{len(self._threads)}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
        return future

    def close(self) -> None:
        """Take nothing more and wait a moment for what is under way; what was submitted still runs. Idempotent."""
        with self._lock:
            self._closed = True
            self._end()
        until_s = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))


def _end(work: queue.SimpleQueue[_Work | None], threads: list[threading.Thread]) -> None:
    for _ in threads:
        work.put(None)


def _work(work: queue.SimpleQueue[_Work | None], idle: threading.Semaphore) -> None:
    # it holds no reference to the pool, so that one that is forgotten ends
    while True:
        try:
            item = work.get_nowait()
        except queue.Empty:
            idle.release()
            item = work.get()
        if item is None:
            return
        future, call = item
        if future.set_running_or_notify_cancel():
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
                future.set_exception(error)
            else:
                future.set_result(result)
        del item, future, call
