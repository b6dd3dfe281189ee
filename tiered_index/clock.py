"""Clocks, and the times of life-cycle steps (`StepTimes`).

Code that needs the time takes a `Clock`, so that tests can set the time. Any thread may read a clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """A clock with wall time and monotonic time."""

    def now_ms(self) -> int:
        """Return wall time in epoch milliseconds."""
        ...

    def monotonic_s(self) -> float:
        """Return monotonic time in seconds."""
        ...


class SystemClock:
    """The clocks of the operating system."""

    def now_ms(self) -> int:
        """Return wall time in epoch milliseconds."""
        return time.time_ns() // 1_000_000

    monotonic_s = staticmethod(time.monotonic)


class ManualClock:
    """A clock for tests that moves only when you call `advance`. Any thread."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._monotonic_s = 0.0
        self._lock = threading.Lock()

    def now_ms(self) -> int:
        """Return the set wall time in epoch milliseconds."""
        with self._lock:
            return self._now_ms

    def monotonic_s(self) -> float:
        """Return the seconds advanced so far."""
        with self._lock:
            return self._monotonic_s

    def advance(self, seconds: float) -> None:
        """Move wall time and monotonic time forward by `seconds`. Raises `ValueError` if it is negative."""
        if seconds < 0:
            raise ValueError("cannot advance a clock by a negative number of seconds")
        with self._lock:
            self._now_ms += round(seconds * 1000)
            self._monotonic_s += seconds


@dataclass
class StepTimes:
    """The runs, the failures and the total seconds of one life-cycle step. `is_running`: a run has not ended yet."""

    clock: Clock
    count: int = 0
    errors: int = 0
    seconds: float = 0.0
    is_running: bool = False

    def run(self, step: Callable[[], object]) -> None:
        """Run `step` and count it. Raises the error of the step."""
        began_s = self.clock.monotonic_s()
        self.count += 1
        self.is_running = True
        try:
            step()
        except BaseException:
            self.errors += 1
            raise
        finally:
            self.is_running = False
            self.seconds += self.clock.monotonic_s() - began_s

    def to_dict(self) -> dict[str, float]:
        """Return the counts as a JSON-ready dict."""
        return {"count": self.count, "errors": self.errors, "seconds": self.seconds}
