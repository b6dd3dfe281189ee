"""Background workers: a `run_once()` and a thin thread that calls it.

An error of one round is logged once and kept in `error`; the next rounds wait longer, up to a bound, and go on trying. Threads: `stop`,
`wake` and `error` from any.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tiered_index.errors import TieredIndexError

__all__ = ["Worker"]

_MAX_BACKOFF_S = 30.0
_log = logging.getLogger(__name__)


class Worker:
    """Calls `run_once` every `interval_s` seconds until `stop`."""

    def __init__(self, name: str, run_once: Callable[[], object], interval_s: float) -> None:
        self.error: Exception | None = None
        self.name = name
        self._run_once = run_once
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tiered-index-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Have the next round begin now."""
        self._woken.set()

    def stop(self) -> None:
        """Stop after the round under way, and wait for it. Idempotent."""
        self._stopping.set()
        self._woken.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        failures = 0
        while True:
            pause = min(self._interval_s * 2**failures, max(_MAX_BACKOFF_S, self._interval_s))
            self._woken.wait(pause)
            self._woken.clear()
            if self._stopping.is_set():
                return
            try:
                self._run_once()
            except TieredIndexError as error:
                failures = min(failures + 1, 16)
                if str(error) != str(self.error):
                    _log.warning("%s: %s", self.name, error)
                self.error = error
            except Exception as error:  # noqa: BLE001 - a worker must outlive a defect, and health shows it
                failures = min(failures + 1, 16)
                _log.exception("%s failed unexpectedly", self.name)
                self.error = error
            else:
                failures = 0
                self.error = None
