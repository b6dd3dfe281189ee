"""Threads of the service: workers, which change state while the caller waits, and pools, which read.

Python runs signal handlers in the main thread, between any two instructions, and a handler may raise
(`KeyboardInterrupt`). So a change of several steps never runs in the caller's thread: a `Worker` runs it, and completes
it even if the caller's wait is interrupted. A background worker also calls its `run_once` at an interval. It logs an
error of a round once and keeps it in `error`; the next rounds wait longer, up to a bound.

A `DaemonPool` reads a storage: `close` and the end of the interpreter wait only briefly for a hanging request. In a
forked child it starts with no threads and a new lock. `side_by_side` runs the parts of a call in the pool. The caller
runs the parts that no thread has begun, so it never waits for a free thread, and parts may have parts.
Threads: every function and method from any thread.
Imports no other folder of the service.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextvars import copy_context
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from tiered_index.errors import BudgetExceeded, IndexClosed, StorageUnavailable, TieredIndexError
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
        # the started threads; an interrupted start may have begun one more
        self.threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        # submitted calls that have not ended
        self._left = 0

    def count(self, more: int) -> int:
        with self._lock:
            self._left += more
            return self._left

    def end(self) -> None:
        """Let each thread end after the queued calls, also one that `threads` lacks."""
        self.queue.put(None)

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
        self._threads = threads
        self._name = name
        self._closed = False
        self._begin()
        _pools.add(self)

    def _begin_anew(self) -> None:
        """Reset the pool in a forked child, which has no copy of the threads; one may have held the lock."""
        self._end.detach()
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._most = self._threads
        # calls whose thread was replaced
        self._replaced: set[Future[Any]] = set()
        self._work = _Work()
        self._end = weakref.finalize(self, self._work.end)
        self._end.atexit = False

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run `call(*arguments)` in a copy of the caller's context, so that its requests count for the lookup.

        If no more threads can be started, the call waits for an existing one. Raises `IndexClosed` if the pool is
        closed, and `NoThread` if the pool has no thread and can't start one. An error queues nothing.
        """
        future: Future[T] = Future()
        work = self._work
        with self._lock:
            if self._closed:
                raise IndexClosed("the index was closed during the lookup")
            if work.count(1) > len(work.threads) < self._most:
                try:
                    self._start()
                except RuntimeError as error:
                    if not work.threads:
                        work.count(-1)
                        raise NoThread(f"no thread for {self._name}: {error}") from error
                except BaseException:  # an interrupt
                    work.count(-1)
                    raise
            work.queue.put((future, partial(copy_context().run, call, *arguments)))
        return future

    def replace_thread(self, hanging: Future[Any]) -> None:
        """Allow one more thread until the call `hanging` ends. Repeated calls for it change nothing."""
        with self._lock:
            if hanging in self._replaced:
                return
            self._replaced.add(hanging)
            self._most += 1
            if not self._closed and self._work.count(0) > len(self._work.threads) < self._most:
                with contextlib.suppress(RuntimeError):
                    self._start()
        hanging.add_done_callback(self._put_back)

    def _put_back(self, ended: Future[Any]) -> None:
        with self._lock:
            self._replaced.discard(ended)
            self._most -= 1

    def _start(self) -> None:
        work = self._work
        thread = threading.Thread(target=work.run, name=f"{self._name}_{len(work.threads)}", daemon=True)
        thread.start()
        work.threads.append(thread)  # after the start: `close` must not join a thread that did not start

    def close(self, until_s: float | None = None) -> None:
        """Refuse new calls and wait for running ones until `until_s` (`time.monotonic()`). Idempotent."""
        with self._lock:
            self._closed = True
            self._end()
        until_s = close_until_s() if until_s is None else until_s
        for thread in self._work.threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))


_pools: weakref.WeakSet[DaemonPool] = weakref.WeakSet()


def _begin_anew() -> None:
    for pool in list(_pools):
        pool._begin_anew()


os.register_at_fork(after_in_child=_begin_anew)


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


P = ParamSpec("P")
S = TypeVar("S")
_MAX_BACKOFF_S = 30.0
# the longest wait that every system supports; a round follows it
_LONGEST_S = 86_400.0
_log = logging.getLogger(__name__)


def synchronized(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Run a method under the object's `_lock`, safely if the caller is interrupted at any line."""

    @functools.wraps(method)
    def locked(self: S, *arguments: P.args, **named: P.kwargs) -> T:
        # on one line: else a signal handler that raises just before the release would leave the lock locked
        with self._lock: return method(self, *arguments, **named)  # type: ignore[attr-defined]  # noqa: E701  # fmt: skip

    return cast(Callable[Concatenate[S, P], T], locked)


class _Task(Generic[T]):
    """A call for a worker."""

    def __init__(self, action: Callable[[], T]) -> None:
        self._action = action
        self._context = copy_context()
        self._result: T | None = None
        self._error: BaseException | None = None
        # a bare lock: an interrupted wait changes no state
        self._ended = threading.Lock()
        self._ended.acquire()

    def run(self) -> None:
        try:
            self._result = self._context.run(self._action)
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            self._error = error
        self._ended.release()

    def fail(self, error: BaseException) -> None:
        """End the task with an error, without running it."""
        self._error = error
        self._ended.release()

    def wait(self, patience_s: float = -1.0) -> T | None:
        if not self._ended.acquire(timeout=patience_s):
            return None
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # the error's traceback refers to this frame: avoid a cycle
        return self._result


FORKED = "a parent process opened the index and forked this process: open the index again in this process"
"""The message of the error in a forked child that uses its parent's index."""


class Worker:
    """One thread that runs calls in order, and `run_once` every `interval_s` seconds. A forked child can't use it."""

    def __init__(
        self, name: str, run_once: Callable[[], object] | None = None, interval_s: float | None = None
    ) -> None:
        self.error: BaseException | None = None
        self.failed_rounds = 0
        self.name = name
        self._run_once = run_once
        self._interval_s = interval_s
        self._tasks: queue.SimpleQueue[_Task[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running = threading.Lock()  # held by the thread that runs the calls
        self._thread: threading.Thread | None = None  # this thread
        self._pid = os.getpid()
        self._started = False
        self._stopping = False
        self._stopped = False

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a fork of the worker's process, without its thread."""
        return os.getpid() != self._pid

    @synchronized
    def start(self) -> None:
        """Start the thread if it is not started. Raises `NoThread` if the process can't start another one."""
        if not self._started:
            thread = threading.Thread(target=self._run, name=f"tiered-index-{self.name}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if "start new thread" not in str(error):
                    raise
                raise NoThread(f"no thread for {self.name}: {error}") from error
            self._started = True

    def call(self, action: Callable[[], T]) -> T:
        """Run `action` in the worker, even if the wait is interrupted. Raises as it, `IndexClosed`, `NoThread`."""
        if self._thread is threading.current_thread():
            return action()
        return cast(T, self._ask(action).wait())

    def finish(self, action: Callable[[], object], patience_s: float) -> bool:
        """As `call`, but wait at most `patience_s` seconds; the worker continues. Return whether the call has ended."""
        return self._ask(lambda: (action(),)).wait(patience_s) is not None

    def _ask(self, action: Callable[[], T]) -> _Task[T]:
        if self.is_foreign:
            raise IndexClosed(FORKED)
        if sys.is_finalizing():
            raise IndexClosed("the interpreter is exiting and its threads have stopped: close the index before that")
        if not self._started:
            self.start()
        task = _Task(action)
        self._tasks.put(task)
        if self._stopped:
            self._refuse_rest()
        return task

    def stop(self, patience_s: float | None = None) -> None:
        """Stop after the running call; wait at most `patience_s` seconds. Later calls are refused. Idempotent."""
        if self.is_foreign:
            return
        self._stopping = True
        self._tasks.put(None)
        thread = self._thread
        if thread is threading.current_thread():
            return
        if not self._started:
            self._stopped = True
        elif thread is not None:
            thread.join(patience_s)

    def _run(self) -> None:
        if not self._running.acquire(blocking=False):
            return  # an interrupted start has already started a thread
        try:
            self._thread = threading.current_thread()
            self._make_calls()
        finally:
            self._stopped = True
            self._refuse_rest()
            self._running.release()

    def _make_calls(self) -> None:
        failures = 0
        next_s = self._next_s(failures)
        while not self._stopping:
            task = None
            with contextlib.suppress(queue.Empty):
                task = self._tasks.get(timeout=None if next_s is None else max(0.0, next_s - time.monotonic()))
            if task is not None:
                try:
                    task.run()
                except MemoryError as error:  # too little memory even for a frame
                    task.fail(error)
                del task
            elif self._run_once is not None and not self._stopping:
                failures = min(failures + 1, 16) if self._round_failed(self._run_once) else 0
                next_s = self._next_s(failures)

    def _next_s(self, failures: int) -> float | None:
        if self._interval_s is None or self._run_once is None:
            return None
        pause_s: float = min(self._interval_s * 2**failures, max(_MAX_BACKOFF_S, self._interval_s), _LONGEST_S)
        return time.monotonic() + pause_s

    def _refuse_rest(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                task = self._tasks.get_nowait()
                if task is not None:
                    task.fail(IndexClosed("the index is closed: open it again"))

    def _round_failed(self, run_once: Callable[[], object]) -> bool:
        try:
            run_once()
        except TieredIndexError as error:
            if str(error) != str(self.error):
                _log.warning("%s: %s", self.name, error)
            self.error = error
        except BaseException as error:  # noqa: BLE001 - the worker must continue; health shows the error
            _log.exception("%s failed unexpectedly", self.name)
            self.error = error
        else:
            self.error = None
        self.failed_rounds += self.error is not None
        return self.error is not None
