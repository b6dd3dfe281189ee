"""Clocks, and the times of life-cycle steps (`StepTimes`).

Code that needs the time takes a `Clock`, so that tests can set the time. Any thread may read a clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypedDict


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
        return self._now_ms

    def monotonic_s(self) -> float:
        """Return the seconds advanced so far."""
        return self._monotonic_s

    def advance(self, seconds: float) -> None:
        """Move wall time and monotonic time forward by `seconds`. Raises `ValueError` if it is negative."""
        if seconds < 0:
            raise ValueError("cannot advance a clock by a negative number of seconds")
        with self._lock:
            self._now_ms += round(seconds * 1000)
            self._monotonic_s += seconds


class SteadyClock:
    """A clock whose wall time can't jump: beyond a minute, a change of the wall clock is not followed.

    Then `now_ms` continues at the pace of the monotonic clock until `trust` is called. Any thread.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # wall and monotonic time when they last agreed
        self._agreed = clock.now_ms(), clock.monotonic_s()
        self.monotonic_s = clock.monotonic_s

    def now_ms(self) -> int:
        """Return the trusted wall time in epoch milliseconds."""
        wall_ms, now_s = self._clock.now_ms(), self._clock.monotonic_s()
        steady_ms = self._steady_ms(now_s)
        if abs(wall_ms - steady_ms) > MOST_SKEW_MS:
            return steady_ms
        self._agreed = wall_ms, now_s
        return wall_ms

    def jump_ms(self) -> int:
        """Return how far the wall clock is ahead of the trusted time; negative: behind it; 0: at most a minute."""
        ahead_ms = self._clock.now_ms() - self._steady_ms(self._clock.monotonic_s())
        return ahead_ms if abs(ahead_ms) > MOST_SKEW_MS else 0

    def _steady_ms(self, now_s: float) -> int:
        agreed_ms, agreed_s = self._agreed
        return agreed_ms + round((now_s - agreed_s) * 1000)

    def wall_ms(self) -> int:
        """Return the wall time that the machine says, in epoch milliseconds."""
        return self._clock.now_ms()

    def trust(self) -> None:
        """Follow the wall clock again, whatever it says."""
        self._agreed = self._clock.now_ms(), self._clock.monotonic_s()


MOST_SKEW_MS = 60_000
"""The most milliseconds by which two clocks that agree may differ."""


class StepHealth(TypedDict):
    """The runs of a step, those that failed, and their time."""

    count: int
    errors: int
    seconds: float


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

    def to_dict(self) -> StepHealth:
        """Return the counts as a JSON-ready dict."""
        return {"count": self.count, "errors": self.errors, "seconds": self.seconds}
