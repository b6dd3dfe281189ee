"""Pools of threads that read storages.

A request may hang, and nothing can interrupt it. So the threads are daemon threads, other than those of
`concurrent.futures`: `close` and the end of the interpreter wait only briefly for them. `side_by_side` runs the parts
of a call in the pool. The caller runs the parts that no thread has begun, so it never waits for a free thread, and
parts may have parts. An interrupt of the caller leaves no lock held for which a thread of the pool would wait.
Threads: every function and method from any thread. A forked child needs pools of its own.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextvars import copy_context
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from tiered_index.base.call import Call, active_context
from tiered_index.base.locks import Lock, call_lock
from tiered_index.errors import BudgetExceeded, IndexClosed, NestedCall, StorageUnavailable

T = TypeVar("T")
_CLOSE_S = 1.0
_Item = tuple["PoolFuture[Any]", Callable[[], Any]]


def close_until_s() -> float:
    """Return the time (`time.monotonic()`) until which a close that begins now waits for running calls."""
    return time.monotonic() + _CLOSE_S


class _Here(threading.local):
    """Whether this thread is one of a pool that has not begun its next call, or has counted the last one as ended."""

    between_calls = False


_here = _Here()


class NoThread(StorageUnavailable):
    """The process can't start a thread and the pool has none; retry later."""


class Condition(threading.Condition):
    """A condition whose lock an interrupt can't leave held: `with` takes and frees it without Python code.

    Give it the `call_lock` of calls that wait for it, so that no call inside them takes it: such a call could miss the
    end that the outer one waits for.
    """

    def __init__(self, lock: Lock | None = None) -> None:
        self.lock = threading.RLock() if lock is None else lock
        super().__init__(self.lock)

    __enter__ = property(attrgetter("lock.__enter__"))
    __exit__ = property(attrgetter("lock.__exit__"))


class PoolFuture(Future[T]):
    """A future whose caller may be interrupted. Wait for it by `have_ended`. `lock` as in `Condition`."""

    def __init__(self, lock: Lock | None = None) -> None:
        super().__init__()
        # `Future` has no other way to give it a condition. It is `with self._condition` in each of its methods
        self._condition = Condition(lock)
        self.thread_id: int | None = None
        """The thread that runs the call; None: no thread has begun it."""
        self.runner: Future[Any] | None = None
        """The pool's future of the thread that calls `run`; None: this is the pool's future."""
        self.is_given_up = False
        """Whether it ended before the call, which may hang."""

    @property
    def runs_here(self) -> bool:
        """Whether the call runs in this thread, so that a wait for it would not end."""
        # the pool's thread may be about to call `run`
        begun = self.runner if isinstance(self.runner, PoolFuture) else self
        return begun.thread_id == threading.get_ident() and not self.done()

    def run(self, call: Callable[[], T]) -> None:
        """Run its call, in a thread that counts as busy until this future has ended. Drop the result if given up."""
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - the caller of `result` gets it
            with contextlib.suppress(InvalidStateError):
                self.set_exception(error)
        else:
            with contextlib.suppress(InvalidStateError):
                self.set_result(result)

    def give_up(self, error: BaseException) -> None:
        """End with an error, unless it has ended."""
        with contextlib.suppress(InvalidStateError):
            self.set_exception(error)
            self.is_given_up = True


def have_ended(futures: Iterable[Future[Any]], wait_s: float | None) -> bool:
    """Wait at most `wait_s` seconds for all futures (None: no bound), and return whether they have ended.

    `concurrent.futures.wait` would hold the locks of the futures after an interrupt. Raises `NestedCall` if this thread
    runs one of them, or if it is one of a pool between two calls: then a finalizer waits, and the pool may have no
    other thread for it.
    """
    until_s = None if wait_s is None else time.monotonic() + wait_s
    for future in futures:
        if not future.done() and (_here.between_calls or (isinstance(future, PoolFuture) and future.runs_here)):
            raise NestedCall(NestedCall.TEXT)
        try:
            future.exception(None if until_s is None else max(0.0, until_s - time.monotonic()))
        except TimeoutError:
            return False
        except CancelledError:
            pass
    return True


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. Raises `NoThread` if the process can't start another one."""
    handled = sys.exception()
    try:
        thread.start()
    except (RuntimeError, KeyError) as error:
        interrupt = error.__context__
        if interrupt is None or interrupt is handled:
            raise NoThread(f"no thread for {thread.name}: {error}") from error
        # `Thread.start` fails to clean up after an interrupt
        raise interrupt from None


class ThreadedCall:
    """A call in a thread, because it may hang. If the process can't start one, as while it ends, the caller runs it."""

    def __init__(self, act: Callable[[], object], name: str) -> None:
        self._act = act
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            start_thread(self._thread)
        except NoThread:
            self._run()

    @property
    def is_running(self) -> bool:
        """Whether the call has not ended."""
        return self._thread.is_alive()

    def join(self, until_s: float) -> None:
        """Wait for the end until `until_s` (`time.monotonic()`), also after an interrupt. Raise the call's error."""
        try:
            self._wait(until_s)
        except BaseException:
            self._wait(until_s)
            raise
        if self._error is not None and not self.is_running:
            error, self._error = self._error, None
            raise error

    def _wait(self, until_s: float) -> None:
        if self.is_running:
            self._thread.join(min(max(0.0, until_s - time.monotonic()), threading.TIMEOUT_MAX))

    def _run(self) -> None:
        try:
            self._act()
        except BaseException as error:  # noqa: BLE001 - `join` raises it
            self._error = error


def _complete(future: Future[T], call: Callable[[], T], end: Callable[[], object]) -> None:
    """Run `call` unless its future was cancelled. Call `end` before the waiting caller continues."""
    if not future.set_running_or_notify_cancel():
        end()
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - the caller of `result` gets it
        end()
        future.set_exception(error)
    else:
        end()
        future.set_result(result)


class _PoolState:
    """The state that a pool shares with its threads, without a reference to the pool, so that it can be collected."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._lock = call_lock()
        # submitted calls that have not ended
        self._left = 0
        # whose callback ends the threads; they keep this state, and so the reference
        self.collected: weakref.ref[DaemonPool] | None = None

    def count(self, more: int) -> int:
        with self._lock:
            self._left += more
            return self._left

    def _end_here(self) -> None:
        # before another call counts on this thread
        _here.between_calls = True
        self.count(-1)

    def refuse(self, error: BaseException) -> None:
        """End all queued calls with an error."""

        def fail() -> None:
            raise error

        with contextlib.suppress(queue.Empty):
            while (item := self.queue.get_nowait()) is not None:
                _complete(item[0], fail, partial(self.count, -1))

    def run(self) -> None:
        _here.between_calls = True
        while (item := self.queue.get()) is not None:
            item[0].thread_id = threading.get_ident()
            _here.between_calls = False
            _complete(*item, self._end_here)
            # an argument's finalizer may run
            del item
        # for the next thread
        self.queue.put(None)


class DaemonPool:
    """Runs calls in up to `threads` threads, started when needed. They end when the pool is closed or collected."""

    def __init__(self, threads: int, name: str) -> None:
        self._most, self._name = threads, name
        self._pid = os.getpid()
        self._closed = False
        self._lock = call_lock()
        self._threads: list[threading.Thread] = []
        # calls whose thread was replaced
        self._replaced: set[Future[Any]] = set()
        work = self._work = _PoolState()
        # it is called without Python code, which an interrupt could end before the threads are told
        work.collected = weakref.ref(self, partial(work.queue.put, None))

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run `call(*arguments)` in a copy of the caller's context, so that its requests count for the lookup.

        If no more threads can be started, the call waits for an existing one. Raises `IndexClosed` if the pool is
        closed or a parent process made it, and `NoThread` if the pool has no thread and can't start one. An error
        queues nothing.
        """
        if self._pid != os.getpid():
            raise IndexClosed(IndexClosed.FORKED)
        future = PoolFuture[T](self._lock)
        item = future, partial(copy_context().run, call, *arguments)
        thread: threading.Thread | None = None
        try:
            with self._lock:
                if self._closed:
                    raise IndexClosed("the index was closed during the lookup")
                if self._work.count(1) > len(self._threads) < self._most:
                    thread = self._new_thread()
                    self._threads.append(thread)
                self._work.queue.put(item)
            self._start(thread)
        except BaseException as error:
            if self._is_served_without(thread, error) and isinstance(error, NoThread):
                return future
            future.cancel()
            raise
        return future

    def replace_thread(self, hanging: Future[Any]) -> None:
        """Allow one more thread until the call `hanging` ends. Repeated calls for it change nothing."""
        thread: threading.Thread | None = None
        try:
            with self._lock:
                if hanging in self._replaced:
                    return
                self._replaced.add(hanging)
                self._most += 1
                if not self._closed and self._work.count(0) > len(self._threads) < self._most:
                    thread = self._new_thread()
                    self._threads.append(thread)
            self._start(thread)
        except BaseException as error:
            self._is_served_without(thread, error)
            if not isinstance(error, NoThread):
                raise
        hanging.add_done_callback(self._put_back)

    def _put_back(self, ended: Future[Any]) -> None:
        with self._lock:
            self._replaced.discard(ended)
            self._most -= 1

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._work.run, name=f"{self._name}_{len(self._threads)}", daemon=True)

    def _start(self, thread: threading.Thread | None) -> None:
        """Start a thread, without the lock: before it is started, it may run a finalizer that uses the pool."""
        if thread is not None:
            start_thread(thread)

    def _is_served_without(self, thread: threading.Thread | None, error: BaseException) -> bool:
        """Forget a thread that could not be started. Return whether another one runs the queued calls, or end them."""
        with self._lock:
            if thread in self._threads and thread.ident is None:
                self._threads.remove(thread)
            if not self._threads:
                self._work.refuse(error if isinstance(error, NoThread) else NoThread(f"no thread for {self._name}"))
            return bool(self._threads)

    def close(self, until_s: float | None = None) -> None:
        """Refuse new calls and wait for running ones until `until_s` (`time.monotonic()`). Idempotent."""
        with self._lock:
            self._closed = True
            self._work.queue.put(None)
        until_s = close_until_s() if until_s is None else until_s
        for thread in self._threads:
            # one that is about to be started ends at once
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(max(0.0, until_s - time.monotonic()))


def side_by_side(parts: Sequence[Callable[[], T]], call: Call | None = None) -> list[T]:
    """Run parts of `call` (None: that of the context) in parallel, and return their results in order.

    Raises the first error, `BudgetExceeded` at the deadline.

    The caller runs each part that no other thread has begun. It may be a thread of the pool itself, so to wait for a
    free thread could deadlock.
    """
    call = call or active_context()
    submit = call.submit
    if submit is None or len(parts) < 2:
        return [part() for part in parts]
    futures: list[Future[T]] = []
    with contextlib.suppress(NoThread):
        # the caller runs the rest
        futures += map(submit, parts[1:])
    try:
        results = [parts[0]()]
        for part, future in zip(parts[1:], futures, strict=False):
            if future.cancel():
                results.append(part())
            elif not have_ended([future], call.remaining_s()):
                raise BudgetExceeded("timeout_s was reached while waiting for parts of a file")
            else:
                results.append(future.result())
        results += [part() for part in parts[1 + len(futures) :]]
    finally:
        for future in futures:
            future.cancel()
    return results


def each(parts: Sequence[T], act: Callable[[T], object], threads: int) -> None:
    """Call `act` for every part, several at once; requests count where the caller's do."""
    if len(parts) < 2:
        for part in parts:
            act(part)  # a thread costs more than one part
        return
    with contextlib.closing(DaemonPool(max(threads, 1), "tiered-index-messages")) as pool:
        for future in [pool.submit(act, part) for part in parts]:
            future.result()
