"""What one lookup may spend, and what it has spent: requests, bytes, time.

An `LookupBudget` is open while its lookup runs; every request made meanwhile, reads of the log included, is admitted
and counted by it. What it can't afford raises `BudgetExceeded` before it is sent. Threads: one lookup's, in copies of
its context.

The one thread-safe budget of a lookup's answers: what was found so far, best first, and which files that makes
needless.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tiered_index.errors import InvalidArgument
from tiered_index.format.schema import Schema
from tiered_index.service.answers.rows import Array, concatenate, first_answers
from tiered_index.storage.context import active_context
from tiered_index.storage.metering import PriceTable, Usage

__all__ = ["LookupBudget", "LookupLimits", "TopK"]

_LONGEST_S = threading.TIMEOUT_MAX / 2
# no thread can wait longer; such a bound is none


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
        """Return when `timeout_s` from now will be, by `time.monotonic()`; None: no bound, or one so far away that it
        is none.
        """
        bounded = self.timeout_s is not None and self.timeout_s < _LONGEST_S
        return time.monotonic() + self.timeout_s if bounded and self.timeout_s is not None else None

    @property
    def any(self) -> bool:
        """Whether there is a bound at all."""
        return self.max_requests is not None or self.max_bytes is not None or self.timeout_s is not None


class LookupBudget:
    """The spending of one lookup; the time runs from its making."""

    def __init__(self, prices: PriceTable, limits: LookupLimits) -> None:
        self.limits = limits
        self.usage = Usage(prices, max_requests=limits.max_requests, max_bytes=limits.max_bytes)
        self.deadline_s = limits.deadline_s()

    @contextlib.contextmanager
    def open(self) -> Iterator[LookupBudget]:
        """Count and bound what this context, and copies of it, ask of any storage until the block ends."""
        with active_context().until(self.deadline_s).counting(self.usage).active():
            yield self

    def remaining_s(self) -> float | None:
        """Return how many seconds are left, at least 0; None: no bound."""
        return None if self.deadline_s is None else max(0.0, self.deadline_s - time.monotonic())


_FEW_ANSWERS = 4096


class TopK:
    """The answers found so far, best first, and what they make needless. Safe under threads."""

    def __init__(self, schema: Schema, max_count: int) -> None:
        self._schema = schema
        self._max_count = max_count
        self._lock = threading.Lock()
        self._rows = concatenate([], schema)
        self._fresh: list[Array] = []
        self._fresh_count = 0
        self._cutoff: int | None = None
        self.skipped = False

    def add(self, rows: Array) -> int:
        """Take in one file's rows; return how many those were."""
        if not len(rows):
            return 0
        with self._lock:
            self._fresh.append(rows)
            self._fresh_count += len(rows)
            # fewer than asked spare no read; enough are brought in order at once where they are few or the first, many
            # when they doubled
            total = len(self._rows) + self._fresh_count
            enough = total >= self._max_count and (total <= _FEW_ANSWERS or self._cutoff is None)
            if enough or self._fresh_count >= max(len(self._rows), _FEW_ANSWERS):
                self._settle()
        return len(rows)

    def _settle(self) -> None:
        # one more than asked tells a full answer from a truncated one
        rows = concatenate([self._rows, *self._fresh], self._schema)
        self._rows = first_answers(rows, self._schema, self._max_count + 1)
        self._fresh, self._fresh_count = [], 0
        if len(self._rows) >= self._max_count:
            self._cutoff = int(self._rows["second"][self._max_count - 1])

    def can_skip(self, second_max: int) -> bool:
        """Return whether a file with this greatest second can't change the answer any more; if so the answer counts as
        truncated.
        """
        with self._lock:
            if self._cutoff is None or second_max >= self._cutoff:
                return False
            self.skipped = True
            return True

    def missing(self) -> int:
        """Return how many more answers are asked for than were found, at least 0; equal identities count as often as
        they were found.
        """
        with self._lock:
            return max(0, self._max_count - len(self._rows) - self._fresh_count)

    def answers(self) -> tuple[Array, bool]:
        """Return the first `max_count` answers, and whether there may be more."""
        with self._lock:
            if self._fresh:
                self._settle()
            return self._rows[: self._max_count], self.skipped or len(self._rows) > self._max_count
