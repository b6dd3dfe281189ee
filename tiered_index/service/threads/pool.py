"""Daemon threads that read a storage: neither a close nor the interpreter's end waits long for a request that hangs.

`side_by_side` runs the parts of one piece of work in them. The caller runs the parts that no thread has begun, so it
never waits for a free thread, and parts may have parts. Threads: every function from any.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from tiered_index.errors import BudgetExceeded, InvalidArgument, StorageUnavailable
from tiered_index.storage.context import active_context, remaining_s

T = TypeVar("T")
_CLOSE_S = 1.0

_Item = tuple[Future[Any], Callable[[], Any]]


def close_until_s() -> float:
    """Return until when a close that begins now waits for what is under way, by `time.monotonic()`."""
    return time.monotonic() + _CLOSE_S


class NoThread(StorageUnavailable):
    """The process can't start a thread for a request, and the pool has none; retry later."""


class _Work:
    """What a pool and its threads share; without a reference to the pool, so that a forgotten pool ends."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        # those that were started
        self.threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        # calls that were submitted and have not ended
        self._left = 0

    def count(self, more: int) -> int:
        with self._lock:
            self._left += more
            return self._left

    def end(self) -> None:
        """Have each thread end after what is queued."""
        for _ in self.threads:
            self.queue.put(None)

    def run(self) -> None:
        while (item := self.queue.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                self.count(-1)
            else:
                try:
                    result = call()
                except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
                    self.count(-1)
                    future.set_exception(error)
                else:
                    self.count(-1)
                    future.set_result(result)
                    del result
            del item, future, call


class DaemonPool:
    """Runs calls in up to `threads` threads, started when needed; they end with the pool, closed or forgotten."""

    def __init__(self, threads: int, name: str) -> None:
        self._most = threads
        self._name = name
        self._lock = threading.Lock()
        self._work = _Work()
        self._closed = False
        self._end = weakref.finalize(self, self._work.end)
        self._end.atexit = False

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Have `call(*arguments)` run in a copy of the caller's context, so that its requests count to the lookup.
        Where no further thread can be started the call waits for an existing one. Raises `InvalidArgument` where the
        pool is closed, `NoThread` where it has no thread and can't start one; then nothing was queued.
        """
        future: Future[T] = Future()
        work = self._work
        with self._lock:
            if self._closed:
                raise InvalidArgument("the index was closed during the lookup")
            if work.count(1) > len(work.threads) < self._most:
                try:
                    self._start()
                except RuntimeError as error:
                    if not work.threads:
                        work.count(-1)
                        raise NoThread(f"no thread for {self._name}: {error}") from error
            work.queue.put((future, partial(contextvars.copy_context().run, call, *arguments)))
        return future

    def _start(self) -> None:
        work = self._work
        thread = threading.Thread(target=work.run, name=f"{self._name}_{len(work.threads)}", daemon=True)
        thread.start()
        work.threads.append(thread)  # only now: one that was not started is neither ended nor waited for

    def close(self, until_s: float | None = None) -> None:
        """Refuse further calls and wait for running ones until `until_s` (`time.monotonic()`). Idempotent."""
        with self._lock:
            self._closed = True
            self._end()
        until_s = close_until_s() if until_s is None else until_s
        for thread in self._work.threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))


def side_by_side(parts: Sequence[Callable[[], T]]) -> list[T]:
    """Return what the parts return, in order; raises the first error, and `BudgetExceeded` at the deadline."""
    submit = active_context().submit
    if submit is None or len(parts) < 2:
        return [part() for part in parts]
    futures: list[Future[T]] = []
    with contextlib.suppress(NoThread):
        # the parts that are left are run here
        futures += map(submit, parts[1:])
    try:
        found = [parts[0]()]
        for part, future in zip(parts[1:], futures, strict=False):
            if future.cancel():
                found.append(part())
            elif wait([future], remaining_s()).not_done:
                raise BudgetExceeded("timeout_s was reached while waiting for parts of a file")
            else:
                found.append(future.result())
        found += [part() for part in parts[1 + len(futures) :]]
    finally:
        for future in futures:
            future.cancel()
    return found
