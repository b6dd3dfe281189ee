"""Threads that wait for a storage: a close and the interpreter's end don't wait for them longer than a moment.

A request under way can't be broken off, and one that hangs holds its thread until the storage's own time-out. The
threads of `concurrent.futures` would hold up whoever closes their pool, and the end of the process, for as long. These
are daemons: what they were about is of no use to anybody by then, and they only read.

`side_by_side` makes the parts of one piece of work in them. Whoever asks for the parts makes those that no thread has
begun: so it waits only for what runs, never for a free thread, and parts may have parts.

Threads: every function from any.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from tiered_index.errors import BudgetExceeded, InvalidArgument, StorageUnavailable
from tiered_index.storage.context import active_context, remaining_s

__all__ = ["DaemonPool", "NoThread", "close_until_s", "side_by_side"]

T = TypeVar("T")
_CLOSE_S = 1.0

_Item = tuple[Future[Any], Callable[[], Any]]


def close_until_s() -> float:
    """Return until when a close that begins now waits for what is under way, by `time.monotonic()`."""
    return time.monotonic() + _CLOSE_S


class NoThread(StorageUnavailable):
    """The process can't start the thread that would ask the storage, and there is none that could be waited for.

    Retry later.
    """


class _Work:
    """What a pool and its threads share: no reference to the pool, so that one that is forgotten ends."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []
        # those that were started
        self._lock = threading.Lock()
        self._left = 0
        # calls that were submitted and have not ended

    def count(self, more: int) -> int:
        """Count calls; return how many are left."""
        with self._lock:
            self._left += more
            return self._left

    def end(self) -> None:
        """Have each thread end behind what is queued."""
        for _ in self.threads:
            self.queue.put(None)

    def run(self) -> None:
        """Make calls until the end is met."""
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
    """Runs calls in up to `threads` threads, begun when they are needed.

    They end with the pool, closed or merely forgotten.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._most = threads
        self._name = name
        self._lock = threading.Lock()
        self._work = _Work()
        self._closed = False
        self._end = weakref.finalize(self, self._work.end)
        self._end.atexit = False

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Have `call(*arguments)` run.

        Where no further thread can be started the call waits for one that is there. Raises `InvalidArgument` where the
        pool is closed, `NoThread` where it has none and can't start one: nothing is left behind then, and the next call
        tries again.
        """
        future: Future[T] = Future()
        work = self._work
        with self._lock:
            if self._closed:
                raise InvalidArgument("it was closed meanwhile, and reads nothing more")
            if work.count(1) > len(work.threads) < self._most:
                try:
                    self._start()
                except RuntimeError as error:
                    if not work.threads:
                        work.count(-1)
                        raise NoThread(f"no thread for {self._name}: {error}") from error
            work.queue.put((future, lambda: call(*arguments)))
        return future

    def _start(self) -> None:
        work = self._work
        thread = threading.Thread(target=work.run, name=f"{self._name}_{len(work.threads)}", daemon=True)
        thread.start()
        work.threads.append(thread)  # only now: one that was not started is neither ended nor waited for

    def close(self, until_s: float | None = None) -> None:
        """Take nothing more and wait for what is under way until `until_s`, a reading of `time.monotonic()`, by default
        a moment; what was submitted still runs. Idempotent.
        """
        with self._lock:
            self._closed = True
            self._end()
        until_s = close_until_s() if until_s is None else until_s
        for thread in self._work.threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))


def side_by_side(parts: Sequence[Callable[[], T]]) -> list[T]:
    """Return what the parts return, in their order; raises the first one's error, and then begins no more of them.

    The caller's thread makes the first one and those that no thread of the active context has begun. Raises
    `BudgetExceeded` where the deadline comes while it waits.
    """
    submit = active_context().submit
    if submit is None or len(parts) < 2:
        return [part() for part in parts]
    futures: list[Future[T]] = []
    with contextlib.suppress(NoThread):
        # the parts that are left are made here
        futures += map(submit, parts[1:])
    try:
        found = [parts[0]()]
        for part, future in zip(parts[1:], futures, strict=False):
            found.append(part() if future.cancel() else _ended(future))
        found += [part() for part in parts[1 + len(futures) :]]
    finally:
        for future in futures:
            future.cancel()
    return found


def _ended(future: Future[T]) -> T:
    if wait([future], remaining_s()).not_done:
        raise BudgetExceeded("timeout_s was reached while waiting for parts of a file")
    return future.result()
