"""A background worker of a writer: a thread that calls `run_once` at an interval.

It logs errors of one kind in a row once, and `error` is the last one. After an error the next rounds wait longer, up to
a bound. The thread is a daemon thread, so that a process that does not close its index can end. Threads: any.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import re
import threading
import time
from collections.abc import Callable

from tiered_index.base.threads import start_thread
from tiered_index.errors import TieredIndexError

# the longest wait that every system supports; a round follows it
_LONGEST_S = 86_400.0
# numbers, times and names, which differ in errors of one kind
_VARYING = re.compile(r"\S*\d\S*")
_log = logging.getLogger(__name__)


class Rounds:
    """Calls `run_once` every `interval_s` seconds, once it is started. `failed_rounds` counts errors.

    After errors the pauses double, up to `longest_pause_s`. `hasten` ends a long one.
    """

    def __init__(
        self, name: str, run_once: Callable[[], object], interval_s: float, *, longest_pause_s: float = 30.0
    ) -> None:
        self.name = name
        self.error: BaseException | None = None
        self.failed_rounds = 0
        self._run_once, self._interval_s, self._longest_pause_s = run_once, interval_s, longest_pause_s
        self._is_stopping = False
        # the longest pause before the next round
        self._bound_s = math.inf
        # ends a wait. An interrupt can leave an event locked, and its thread would wait
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. Raises `NoThread` if the process can't start another one."""
        self._thread = threading.Thread(target=self._run, name=f"tiered-index-{self.name}", daemon=True)
        start_thread(self._thread)

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is this thread."""
        return threading.current_thread() is self._thread

    def stop(self, patience_s: float | None = None) -> None:
        """Begin no further round, and wait for the running one, at most `patience_s` seconds. Idempotent."""
        self._is_stopping = True
        self._wake.put(None)
        if self._thread is not None and not self.is_own_thread:
            # the thread was not started, or an interrupt came before it was, and it makes no round
            with contextlib.suppress(RuntimeError):
                self._thread.join(patience_s)

    def hasten(self, pause_s: float) -> None:
        """Pause at most `pause_s` before the next round, because what stopped the last one may be over."""
        if self.error is not None:
            self._bound_s = pause_s
            self._wake.put(None)

    def _run(self) -> None:
        failures = 0
        while self._has_paused(self._interval_s * 2**failures):
            self._bound_s = math.inf
            failures = min(failures + 1, 16) if self._failed() else 0

    def _has_paused(self, pause_s: float) -> bool:
        """Wait before the next round. Return false if there is none."""
        pause_s, begun_s = min(pause_s, max(self._longest_pause_s, self._interval_s), _LONGEST_S), time.monotonic()
        while not self._is_stopping:
            left_s = begun_s + min(pause_s, self._bound_s) - time.monotonic()
            if left_s <= 0:
                return True
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=left_s)
        return False

    def _failed(self) -> bool:
        try:
            self._run_once()
        except TieredIndexError as error:
            # while the index is being closed, a last round may find it closed
            if _kind(error) != _kind(self.error) and not self._is_stopping:
                _log.warning("%s: %.200s", self.name, error)
            self.error = error
        except BaseException as error:  # noqa: BLE001 - the worker must continue; health shows the error
            _log.exception("%s failed unexpectedly", self.name)
            self.error = error
        else:
            self.error = None
        self.failed_rounds += self.error is not None
        return self.error is not None


def _kind(error: BaseException | None) -> tuple[type, str]:
    """Return what errors of one kind have in common."""
    return type(error), _VARYING.sub("", str(error))
