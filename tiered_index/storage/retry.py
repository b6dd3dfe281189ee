"""Repeats failed requests to an object store, within bounds on attempts and the caller's deadline.

The repeats of the backend's own library are off. Threads: any number.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tiered_index.base.call import check_deadline, remaining_s, wasted
from tiered_index.errors import BudgetExceeded, StorageUnavailable, TieredIndexError


class PassingFault(StorageUnavailable):
    """A fault after which a repeat may succeed. At most `wasted_bytes` bytes were delivered and can't be used."""

    def __init__(self, message: str, *, wasted_bytes: int = 0, is_throttled: bool = False) -> None:
        super().__init__(message)
        self.wasted_bytes, self.is_throttled = wasted_bytes, is_throttled


_log = logging.getLogger(__name__)
LONGEST_WAIT_S = 5.0
# Least backoff after throttling
_THROTTLED_BACKOFF_S = 0.5
_T = TypeVar("_T")


@dataclass(frozen=True)
class RetryLoop:
    """Sends requests to the storage `uri`, and repeats them after faults.

    A call fails after `max_attempts` attempts. The wait after fault n is random, from 0 to `backoff_s * 2**n` ("full
    jitter"), at most 5 s. Each fault is logged (INFO).
    """

    uri: str
    max_attempts: int = 5
    backoff_s: float = 0.1
    sleep: Callable[[float], None] = time.sleep
    uniform: Callable[[float, float], float] = random.uniform
    # The errors of a backend's library, and the function that returns the typed error: (error, doing=, uri=, name=)
    errors: tuple[type[Exception], ...] = ()
    translate: Callable[..., TieredIndexError] = StorageUnavailable

    def run(self, doing: str, name: str, attempt: Callable[[], _T]) -> _T:
        """Return `attempt()`, repeated after a `PassingFault`. `doing` and `name` are for messages.

        Turns the library's errors into typed ones. Raises `StorageUnavailable` after the last attempt, and
        `BudgetExceeded` in place of an attempt or a wait that would exceed the deadline.
        """
        what = f"{doing} in {self.uri}"
        count = 0
        while True:
            count += 1
            check_deadline(what)
            try:
                return attempt()
            except BudgetExceeded as error:
                raise BudgetExceeded(f"{what}: {error}") from error
            except PassingFault as error:
                self._repeat(error, count, error)
            except TieredIndexError:
                # some are ValueErrors or OSErrors, as are errors of libraries
                raise
            except self.errors as error:
                fault = self.translate(error, doing=doing, uri=self.uri, name=name)
                try:
                    if not isinstance(fault, PassingFault):
                        raise fault from error
                    self._repeat(fault, count, error)
                finally:
                    # Break the cycle of this frame and the error's traceback: it would keep the request's bytes
                    del fault

    def _repeat(self, fault: PassingFault, count: int, cause: Exception) -> None:
        """Wait after fault `count`, or raise the error that ends the call."""
        if fault.wasted_bytes:
            wasted(fault.wasted_bytes)
        if count >= self.max_attempts:
            raise StorageUnavailable(f"{fault} ({count} attempts)") from cause
        backoff_s = max(self.backoff_s, _THROTTLED_BACKOFF_S) if fault.is_throttled else self.backoff_s
        wait_s = self.uniform(0, min(LONGEST_WAIT_S, backoff_s * 2**count))
        left_s = remaining_s()
        if left_s is not None and wait_s >= left_s:
            raise BudgetExceeded(f"timeout_s leaves no time for a retry: {fault}") from cause
        # Log only the text: a handler may keep the error, whose traceback holds the request's bytes
        _log.info("attempt %d of %d failed, the next one in %.1f s: %s", count, self.max_attempts, wait_s, str(fault))
        self.sleep(wait_s)
