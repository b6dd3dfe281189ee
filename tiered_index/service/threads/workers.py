"""Worker threads, which run whatever changes state; the caller waits for them.

Python runs signal handlers in the main thread, between any two instructions, and a handler may raise
(`KeyboardInterrupt`). So nothing of more than one step runs in a caller's thread: a `Worker` runs it, and finishes it
where the caller's wait is interrupted. A background worker also calls its `run_once` every so often. An error of a
round is logged once and kept in `error`; the next rounds wait longer, up to a bound. Threads: every method from any.
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
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from tiered_index.errors import InvalidArgument, TieredIndexError
from tiered_index.service.threads.pool import NoThread

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
_MAX_BACKOFF_S = 30.0
# a wait that every system can make; after it comes a round
_LONGEST_S = 86_400.0
_log = logging.getLogger(__name__)


class Stopped(InvalidArgument):
    """The worker makes no more calls."""


def synchronized(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Run a method under its object's `_lock`, for callers that may be interrupted at any line."""

    @functools.wraps(method)
    def locked(self: S, *arguments: P.args, **named: P.kwargs) -> T:
        # on one line: a handler that ran between the end of a longer block and the lock's release would leave it locked
        with self._lock: return method(self, *arguments, **named)  # type: ignore[attr-defined]  # noqa: E701  # fmt: skip

    return cast(Callable[Concatenate[S, P], T], locked)


class _Task(Generic[T]):
    """A call that a worker is asked for."""

    def __init__(self, action: Callable[[], T]) -> None:
        self._action = action
        self._context = copy_context()
        self._result: T | None = None
        self._error: BaseException | None = None
        # a bare lock: waiting for it is one call, which an interrupt leaves without a trace
        self._ended = threading.Lock()
        self._ended.acquire()

    def run(self) -> None:
        try:
            self._result = self._context.run(self._action)
        except BaseException as error:  # noqa: BLE001 - whoever asked for it gets it
            self._error = error
        self._ended.release()

    def fail(self, error: BaseException) -> None:
        """End it without having run it."""
        self._error = error
        self._ended.release()

    def wait(self, patience_s: float = -1.0) -> T | None:
        if not self._ended.acquire(timeout=patience_s):
            return None
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # the error's traceback holds this frame: no cycle
        return self._result


class Worker:
    """One thread that makes calls in order, and `run_once` every `interval_s` seconds; a fork can't use it."""

    def __init__(
        self, name: str, run_once: Callable[[], object] | None = None, interval_s: float | None = None
    ) -> None:
        self.error: BaseException | None = None
        self.name = name
        self._run_once = run_once
        self._interval_s = interval_s
        self._tasks: queue.SimpleQueue[_Task[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running = threading.Lock()  # held by the one thread that makes the calls
        self._thread: threading.Thread | None = None  # that one
        self._pid = os.getpid()
        self._started = False
        self._stopping = False
        self._stopped = False

    @property
    def is_foreign(self) -> bool:
        """Whether this is a fork of the process that made the worker: its thread isn't here."""
        return os.getpid() != self._pid

    @synchronized
    def start(self) -> None:
        """Start the thread, unless it was. Raises `NoThread` where the process can't have another one."""
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
        """Have the worker run `action`, even where the wait is interrupted. Raises as it, `Stopped`, `NoThread`."""
        if self._thread is threading.current_thread():
            return action()
        return cast(T, self._ask(action).wait())

    def finish(self, action: Callable[[], object], patience_s: float) -> None:
        """As `call`, but wait no longer than that: it goes on by itself."""
        self._ask(action).wait(patience_s)

    def _ask(self, action: Callable[[], T]) -> _Task[T]:
        if self.is_foreign:
            raise Stopped("the index was opened by another process, of which this one is a fork: open it anew")
        if sys.is_finalizing():
            raise Stopped("the interpreter is ending, its threads have stopped: close the index before")
        if not self._started:
            self.start()
        task = _Task(action)
        self._tasks.put(task)
        if self._stopped:
            self._refuse_rest()
        return task

    def stop(self, patience_s: float | None = None) -> None:
        """Stop after the running call, waiting at most `patience_s` for it; later calls are refused. Idempotent."""
        self._stopping = True
        self._tasks.put(None)
        thread = self._thread
        if self.is_foreign or thread is threading.current_thread():
            return
        if not self._started:
            self._stopped = True
        elif thread is not None:
            thread.join(patience_s)

    def _run(self) -> None:
        if not self._running.acquire(blocking=False):
            return  # a start that was interrupted has begun another thread
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
                except MemoryError as error:  # not even for a frame
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
                    task.fail(Stopped("the index is closed"))

    def _round_failed(self, run_once: Callable[[], object]) -> bool:
        try:
            run_once()
        except TieredIndexError as error:
            if str(error) != str(self.error):
                _log.warning("%s: %s", self.name, error)
            self.error = error
        except BaseException as error:  # noqa: BLE001 - a worker must outlive a defect, and health shows it
            _log.exception("%s failed unexpectedly", self.name)
            self.error = error
        else:
            self.error = None
        return self.error is not None
