"""Pools of threads that read storages, and shares of a pool.

A request may hang, and nothing can interrupt it. So the threads are daemon threads, other than those of
`concurrent.futures`: `close` and the end of the interpreter wait only briefly for them. `side_by_side` runs the parts
of a call in the pool. The caller runs the parts that no thread has begun, so it never waits for a free thread, and
parts may have parts. Threads: every function and method from any thread. A forked child needs pools of its own.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from tiered_index.errors import BudgetExceeded, IndexClosed, StorageUnavailable
from tiered_index.storage.context import active_context, remaining_s

T = TypeVar("T")
_CLOSE_S = 1.0
_Item = tuple[Future[Any], Callable[[], Any]]


def close_until_s() -> float:
    """Return the time (`time.monotonic()`) until which a close that begins now waits for running calls."""
    return time.monotonic() + _CLOSE_S


class NoThread(StorageUnavailable):
    """The process can't start a thread and the pool has none; retry later."""


class _Work:
    """The state that a pool shares with its threads, without a reference to the pool, so that it can be collected."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # submitted calls that have not ended
        self._left = 0

    def count(self, more: int) -> int:
        with self._lock:
            self._left += more
            return self._left

    def run(self) -> None:
        while (item := self.queue.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                self.count(-1)
            else:
                try:
                    result = call()
                except BaseException as error:  # noqa: BLE001 - the caller of `result` gets it
                    self.count(-1)
                    future.set_exception(error)
                else:
                    self.count(-1)
                    future.set_result(result)
                    del result
            del item, future, call
        # for the next thread
        self.queue.put(None)


class DaemonPool:
    """Runs calls in up to `threads` threads, started when needed. They end when the pool is closed or collected."""

    def __init__(self, threads: int, name: str) -> None:
        self._most, self._name = threads, name
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        # calls whose thread was replaced
        self._replaced: set[Future[Any]] = set()
        self._work = _Work()
        self._end = weakref.finalize(self, self._work.queue.put, None)
        self._end.atexit = False

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run `call(*arguments)` in a copy of the caller's context, so that its requests count for the lookup.

        If no more threads can be started, the call waits for an existing one. Raises `IndexClosed` if the pool is
        closed or a parent process made it, and `NoThread` if the pool has no thread and can't start one. An error
        queues nothing.
        """
        if self._pid != os.getpid():
            raise IndexClosed(IndexClosed.FORKED)
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise IndexClosed("the index was closed during the lookup")
            if self._work.count(1) > len(self._threads) < self._most:
                try:
                    self._start()
                except RuntimeError as error:
                    if not self._threads:
                        self._work.count(-1)
                        raise NoThread(f"no thread for {self._name}: {error}") from error
            self._work.queue.put((future, partial(copy_context().run, call, *arguments)))
        return future

    def replace_thread(self, hanging: Future[Any]) -> None:
        """Allow one more thread until the call `hanging` ends. Repeated calls for it change nothing."""
        with self._lock:
            if hanging in self._replaced:
                return
            self._replaced.add(hanging)
            self._most += 1
            if not self._closed and self._work.count(0) > len(self._threads) < self._most:
                with contextlib.suppress(RuntimeError):
                    self._start()
        hanging.add_done_callback(self._put_back)

    def _put_back(self, ended: Future[Any]) -> None:
        with self._lock:
            self._replaced.discard(ended)
            self._most -= 1

    def _start(self) -> None:
        name = f"{self._name}_{len(self._threads)}"
        self._threads.append(threading.Thread(target=self._work.run, name=name, daemon=True))
        try:
            self._threads[-1].start()
        except BaseException:
            del self._threads[-1]
            raise

    def close(self, until_s: float | None = None) -> None:
        """Refuse new calls and wait for running ones until `until_s` (`time.monotonic()`). Idempotent."""
        with self._lock:
            self._closed = True
            self._end()
        until_s = close_until_s() if until_s is None else until_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))


def side_by_side(parts: Sequence[Callable[[], T]]) -> list[T]:
    """Run parts in parallel; return their results in order. Raises the first error, `BudgetExceeded` at the deadline.

    The caller runs each part that no other thread has begun. It may be a thread of the pool itself, so to wait for a
    free thread could deadlock.
    """
    submit = active_context().submit
    if submit is None or len(parts) < 2:
        return [part() for part in parts]
    futures: list[Future[T]] = []
    with contextlib.suppress(NoThread):
        # the caller runs the rest
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


def each(parts: Sequence[T], act: Callable[[T], object], threads: int) -> None:
    """Call `act` for every part, several at once; requests count where the caller's do."""
    if len(parts) < 2:
        for part in parts:
            act(part)  # a thread costs more than one part
        return
    with contextlib.closing(DaemonPool(max(threads, 1), "tiered-index-messages")) as pool:
        for future in [pool.submit(act, part) for part in parts]:
            future.result()


def share_of(threads: int, indexes: int) -> int:
    """Return how many of the threads one of the indexes may use: a quarter, or an equal part of fewer indexes."""
    return max(1, threads // min(4, max(1, indexes)))


class Share:
    """Runs calls in `pool`, at most `most()` of them at the same time. Further calls wait in order.

    Calls of one index that hang thus leave threads for the others.
    """

    def __init__(self, pool: DaemonPool, most: Callable[[], int]) -> None:
        self._pool, self._most = pool, most
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
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
