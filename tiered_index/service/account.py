"""What one lookup may spend, and what it has spent: requests, bytes, time.

An `Account` is open while its lookup runs; every request made meanwhile, reads of the log included, is admitted and counted by it. What it
can't afford raises `BudgetExceeded` before it is sent. Threads: one lookup's, in copies of its context.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tiered_index.errors import InvalidArgument
from tiered_index.storage.deadline import deadline_at
from tiered_index.storage.metering import MeteredStorage, Usage

__all__ = ["Account", "LookupLimits", "measured"]

_LONGEST_S = threading.TIMEOUT_MAX / 2
# no thread can wait longer; such a bound is none


@contextlib.contextmanager
def measured(storages: Sequence[MeteredStorage], usage: Usage) -> Iterator[None]:
    """Count what this context, and copies of it, ask of any of `storages` in `usage` until the block ends."""
    with contextlib.ExitStack() as scopes:
        for storage in storages:
            scopes.enter_context(storage.measure(usage))
        yield


@dataclass(frozen=True, slots=True)
class LookupLimits:
    """Inclusive bounds of one call; None: no bound. Raises `InvalidArgument` for what can't be one."""

    max_requests: int | None = None
    max_bytes: int | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_bytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise InvalidArgument(f"{name} must be a whole number, 0 or more, not {value!r}")
        limit = self.timeout_s
        if limit is None:
            return
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf:
            raise InvalidArgument(f"timeout_s must be a positive number of seconds, not {limit!r}")

    def deadline_s(self) -> float | None:
        """Return when `timeout_s` from now will be, by `time.monotonic()`; None: no bound, or one so far away that it is none."""
        bounded = self.timeout_s is not None and self.timeout_s < _LONGEST_S
        return time.monotonic() + self.timeout_s if bounded and self.timeout_s is not None else None

    @property
    def any(self) -> bool:
        """Whether there is a bound at all."""
        return self.max_requests is not None or self.max_bytes is not None or self.timeout_s is not None


class Account:
    """The spending of one lookup over one or several storages; the time runs from its making."""

    def __init__(self, storages: Sequence[MeteredStorage], limits: LookupLimits) -> None:
        self._storages = storages
        self.limits = limits
        self.usage = Usage(storages[0].prices, max_requests=limits.max_requests, max_bytes=limits.max_bytes)
        self.deadline_s = limits.deadline_s()

    @contextlib.contextmanager
    def open(self) -> Iterator[Account]:
        """Count and bound what this context, and copies of it, ask of the storage until the block ends."""
        with measured(self._storages, self.usage), deadline_at(self.deadline_s):
            yield self

    def remaining_s(self) -> float | None:
        """Return how many seconds are left, at least 0; None: no bound."""
        return None if self.deadline_s is None else max(0.0, self.deadline_s - time.monotonic())
