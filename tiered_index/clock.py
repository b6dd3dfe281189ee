"""The clock as a dependency: code that needs the time takes a `Clock`, so that tests set the time; and counts of steps.
Both clocks may be read from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Source of wall time and of monotonic time."""

    def now_ms(self) -> int:
        """Return wall time in epoch milliseconds."""
        ...

    def monotonic_s(self) -> float:
        """Return seconds of a clock that never goes backwards."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> int:
        """Return wall time in epoch milliseconds."""
        return time.time_ns() // 1_000_000

    monotonic_s = staticmethod(time.monotonic)


class ManualClock:
    """A clock that moves only by `advance`, which moves both readings. Any thread."""

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
        """Move both clocks forward by `seconds` (not negative)."""
        if seconds < 0:
            raise ValueError("a clock is advanced by a non-negative number of seconds")
        with self._lock:
            self._now_ms += round(seconds * 1000)
            self._monotonic_s += seconds


@dataclass
class StepTimes:
    """Counts of one step of the life cycle: its runs, its failures, and its seconds in all."""

    clock: Clock
    count: int = 0
    errors: int = 0
    seconds: float = 0.0

    def run(self, step: Callable[[], object]) -> None:
        """Take the step. Raises as it does."""
        began_s = self.clock.monotonic_s()
        self.count += 1
        try:
            step()
        except BaseException:
            self.errors += 1
            raise
        finally:
            self.seconds += self.clock.monotonic_s() - began_s

    def to_dict(self) -> dict[str, float]:
        """Return it JSON-ready."""
        return {"count": self.count, "errors": self.errors, "seconds": self.seconds}
