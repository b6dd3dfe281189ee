"""Bounded repeats with jitter, for what botocore does not repeat by itself. Thread-safe; holds no state of a call."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tiered_index.errors import StorageUnavailable
from tiered_index.storage.s3_errors import PassingFault

__all__ = ["RetryPolicy"]

_LONGEST_WAIT_S = 5.0
_T = TypeVar("_T")


@dataclass(frozen=True)
class RetryPolicy:
    """At most `attempts`; before repeat n a wait drawn evenly from 0 to `backoff_s * 2**n` ("full jitter"), at most 5 s."""

    attempts: int
    backoff_s: float
    sleep: Callable[[float], None] = time.sleep
    uniform: Callable[[float, float], float] = random.uniform

    def run(self, action: Callable[[], _T]) -> _T:
        """Return what `action` returns; repeat it while it raises `PassingFault`, then raise `StorageUnavailable`."""
        attempt = 1
        while True:
            try:
                return action()
            except PassingFault as fault:
                if attempt >= self.attempts:
                    raise StorageUnavailable(f"{fault} ({attempt} attempts)") from fault
            self.sleep(self.uniform(0, min(_LONGEST_WAIT_S, self.backoff_s * 2**attempt)))
            attempt += 1
