"""The budget of one lookup, its use, and the best answers so far.

A `LookupBudget` is open while its lookup runs: it admits and counts every request made meanwhile, reads of the log
included, and refuses one that it can't afford by `BudgetExceeded`, before it is sent. Threads: one lookup's, in copies
of its context.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TypedDict

from tiered_index.errors import InvalidArgument
from tiered_index.format.schema import Schema
from tiered_index.service.answers.rows import Array, concatenate, first_answers
from tiered_index.storage.context import Activation, active_context
from tiered_index.storage.metering import Usage
from tiered_index.storage.prices import PriceTable
from tiered_index.types import Explain, FileReport

# no thread can wait longer; a longer bound is none
_LONGEST_S = threading.TIMEOUT_MAX / 2
# answers that are brought in order at once
_FEW_ANSWERS = 4096


class Limits(TypedDict, total=False):
    """The bounds of one call by name, as `LookupLimits`."""

    max_requests: int | None
    max_bytes: int | None
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class LookupLimits:
    """Inclusive bounds of one call; None: no bound. Raises `InvalidArgument` for an impossible bound."""

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

    def least(self, other: LookupLimits) -> LookupLimits:
        """Return the lesser of each bound."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return LookupLimits(*(min((bound for bound in pair if bound is not None), default=None) for pair in pairs))

    def deadline_s(self) -> float | None:
        """Return when `timeout_s` from now will be, by `time.monotonic()`; None: no bound."""
        bounded = self.timeout_s is not None and self.timeout_s < _LONGEST_S
        return time.monotonic() + self.timeout_s if bounded and self.timeout_s is not None else None


class LookupBudget:
    """The limits of one lookup and its usage of them; the time runs from its making."""

    def __init__(self, prices: PriceTable, limits: LookupLimits) -> None:
        self.limits = limits
        self.usage = Usage(prices, max_requests=limits.max_requests, max_bytes=limits.max_bytes)
        self.deadline_s = None if limits.timeout_s is None else limits.deadline_s()

    def open(self) -> Activation[LookupBudget]:
        """Count and bound the requests of this context, and of copies of it, to any storage until the block ends."""
        return Activation(active_context().until(self.deadline_s).counting(self.usage), self)

    def remaining_s(self) -> float | None:
        """Return how many seconds are left, at least 0; None: no bound."""
        return None if self.deadline_s is None else max(0.0, self.deadline_s - time.monotonic())


@dataclass(frozen=True, slots=True)
class RequestStats:
    """The cost of requests; a difference is at least 0."""

    requests: int
    bytes: int
    cost_usd: float

    @classmethod
    def of(cls, *parts: Explain | FileReport | RequestStats) -> RequestStats:
        """Return the sum of what lookups and single files cost."""
        return cls(
            sum([part.requests for part in parts]),
            sum([part.bytes for part in parts]),
            sum([part.cost_usd for part in parts], 0.0),
        )

    @classmethod
    def of_usage(cls, *usages: Usage) -> RequestStats:
        """Return the sum of usages; bytes asked for count, since a read that was given up may still deliver them."""
        used = [usage for usage in usages if usage.used]
        if not used:
            return NOTHING
        return cls(
            sum([usage.requests for usage in used]),
            sum([usage.bytes_asked for usage in used]),
            sum([usage.cost_usd for usage in used], 0.0),
        )

    def __sub__(self, other: RequestStats) -> RequestStats:
        if other is NOTHING:
            return self
        return RequestStats(
            max(0, self.requests - other.requests),
            max(0, self.bytes - other.bytes),
            max(0.0, self.cost_usd - other.cost_usd),
        )

    def of_log(self) -> FileReport:
        """Return the report of a log whose reading cost this."""
        return FileReport(
            file="log",
            place="storage",
            outcome="refreshed",
            begin_ms=0,
            end_ms=0,
            requests=self.requests,
            bytes=self.bytes,
            cost_usd=self.cost_usd,
        )


NOTHING = RequestStats(0, 0, 0.0)


def add_up(explains: Sequence[Explain], reports: Sequence[FileReport], elapsed_ms: float) -> Explain:
    """Return what several lookups did, and further `reports`, as one."""
    stats = RequestStats.of(*explains, *reports)
    return Explain(
        requests=stats.requests,
        bytes=stats.bytes,
        cost_usd=stats.cost_usd,
        elapsed_ms=elapsed_ms,
        files_read=sum([explain.files_read for explain in explains]),
        files_skipped=sum([explain.files_skipped for explain in explains]),
        folded_entries=sum([explain.folded_entries for explain in explains]),
        files=(*(report for explain in explains for report in explain.files), *reports),
    )


class TopK:
    """The answers found so far, best first, and which files they make needless. Safe under threads."""

    def __init__(self, schema: Schema, max_count: int) -> None:
        self._schema = schema
        self._max_count = max_count
        self._lock = threading.Lock()
        self._rows = schema.no_rows
        self._fresh: list[Array] = []
        self._fresh_count = 0
        self._cutoff: int | None = None
        self.skipped = False
        self.folded = 0

    def add(self, rows: Array) -> int:
        """Take in one file's rows; return how many those were."""
        count = len(rows)
        if not count:
            return 0
        with self._lock:
            self._fresh.append(rows)
            fresh = self._fresh_count = self._fresh_count + count
            # fewer than `max_count` spare no read; enough are ordered at once if few or first, else when doubled
            total = len(self._rows) + fresh
            enough = total >= self._max_count and (total <= _FEW_ANSWERS or self._cutoff is None)
            if enough or (fresh >= _FEW_ANSWERS and 2 * fresh >= total):
                self._merge()
        return count

    def _merge(self) -> None:
        # one more than `max_count` tells a full answer from a truncated one
        fresh = self._fresh
        rows = fresh[0] if len(fresh) == 1 and not len(self._rows) else concatenate([self._rows, *fresh], self._schema)
        self._rows = rows if len(rows) == 1 else first_answers(rows, self._schema, self._max_count + 1, self._fold)
        self._fresh, self._fresh_count = [], 0
        if len(self._rows) >= self._max_count:
            self._cutoff = int(self._rows["second"][self._max_count - 1])

    def _fold(self, count: int) -> None:
        self.folded += count

    def can_skip(self, second_max: int) -> bool:
        """Return whether files of this greatest second can't change the answer, which is truncated then."""
        # without the lock for the many lookups that never have enough; once set it stays set
        if self._cutoff is None:
            return False
        with self._lock:
            if second_max >= self._cutoff:
                return False
            self.skipped = True
            return True

    def missing(self) -> int:
        """Return how many of `max_count` answers are missing, at least 0; equal identities count each."""
        with self._lock:
            return max(0, self._max_count - len(self._rows) - self._fresh_count)

    def answers(self) -> tuple[Array, bool]:
        """Return the first `max_count` answers, and whether there may be more."""
        with self._lock:
            if self._fresh:
                self._merge()
            return self._rows[: self._max_count], self.skipped or len(self._rows) > self._max_count
