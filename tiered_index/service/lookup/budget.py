"""The budget of one lookup, its use, and the best answers so far.

A `LookupBudget` is open while its lookup runs. It counts every request, also those of log reads. A request that exceeds
it raises `BudgetExceeded` before it is sent. Threads: those of one lookup, with copies of its context.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TypedDict, TypeVar

from tiered_index.errors import InvalidArgument
from tiered_index.format.schema import Schema
from tiered_index.service.answers.rows import Array, are_after, concatenate, first_answers, leading, order_key
from tiered_index.storage.context import Activation, active_context
from tiered_index.storage.metering import Usage
from tiered_index.storage.prices import PriceTable, rounded_usd
from tiered_index.types import Explain, FileReport

N = TypeVar("N", int, float)
# the longest time that a thread can wait; a longer bound counts as none
_LONGEST_S = threading.TIMEOUT_MAX / 2
# up to this number, answers are sorted immediately
_FEW_ANSWERS = 4096


class Limits(TypedDict, total=False):
    """The bounds of one call by name. See `LookupLimits`."""

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
        """Return the lesser bound of both, for each bound."""
        return LookupLimits(
            _least(self.max_requests, other.max_requests),
            _least(self.max_bytes, other.max_bytes),
            _least(self.timeout_s, other.timeout_s),
        )

    def deadline_s(self) -> float | None:
        """Return the end of `timeout_s` from now, by `time.monotonic()`; None: no bound."""
        bounded = self.timeout_s is not None and self.timeout_s < _LONGEST_S
        return time.monotonic() + self.timeout_s if bounded and self.timeout_s is not None else None


def _least(one: N | None, other: N | None) -> N | None:
    return other if one is None else one if other is None else min(one, other)


class LookupBudget:
    """The limits of one lookup and their use. Its time starts when it is made."""

    def __init__(self, prices: PriceTable, limits: LookupLimits) -> None:
        self.limits = limits
        self.usage = Usage(prices, max_requests=limits.max_requests, max_bytes=limits.max_bytes)
        self.deadline_s = None if limits.timeout_s is None else limits.deadline_s()

    def open(self) -> Activation[LookupBudget]:
        """Return a context manager that counts and bounds the requests of this context, and of its copies."""
        return Activation(active_context().until(self.deadline_s).counting(self.usage), self)

    def remaining_s(self) -> float | None:
        """Return the seconds left, at least 0; None: no bound."""
        return None if self.deadline_s is None else max(0.0, self.deadline_s - time.monotonic())


@dataclass(frozen=True, slots=True)
class RequestStats:
    """The cost of requests. A difference is at least 0. Only the cost of one file has `gap_bytes`."""

    requests: int
    bytes: int
    cost_usd: float
    gap_bytes: int = 0

    @classmethod
    def of(cls, *parts: Explain | FileReport | RequestStats) -> RequestStats:
        """Return the total cost of lookups and files."""
        return cls(
            sum([part.requests for part in parts]),
            sum([part.bytes for part in parts]),
            rounded_usd(sum([part.cost_usd for part in parts], 0.0)),
        )

    @classmethod
    def of_usage(cls, *usages: Usage) -> RequestStats:
        """Return the total of usages. It counts requested bytes, because an abandoned read may still transfer them."""
        used = [usage for usage in usages if usage.used]
        if not used:
            return NOTHING
        return cls(
            sum([usage.requests for usage in used]),
            sum([usage.bytes_asked for usage in used]),
            rounded_usd(sum([usage.cost_usd for usage in used], 0.0)),
            sum([usage.bytes_between for usage in used]),
        )

    def __sub__(self, other: RequestStats) -> RequestStats:
        if other is NOTHING:
            return self
        return RequestStats(
            max(0, self.requests - other.requests),
            max(0, self.bytes - other.bytes),
            rounded_usd(max(0.0, self.cost_usd - other.cost_usd)),
        )

    def of_log(self) -> FileReport:
        """Return a report that gives this cost as that of reading the log."""
        return FileReport(file="log", place="storage", outcome="refreshed", begin_ms=0, end_ms=0, **asdict(self))


NOTHING = RequestStats(0, 0, 0.0)


def add_up(explains: Sequence[Explain], reports: Sequence[FileReport], elapsed_ms: float) -> Explain:
    """Return the sum of several lookups and further `reports`."""
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
    """The best answers so far, which also decide the files that can be skipped. Any thread."""

    def __init__(self, schema: Schema, max_count: int) -> None:
        self._schema = schema
        self._max_count = max_count
        self._lock = threading.Lock()
        # the answers, and the rows that they were made of: with repeats, which are counted at the end
        self._first = self._rows = schema.no_rows
        self._fresh: list[Array] = []
        self._fresh_count = 0
        self._cutoff: int | None = None
        self.skipped = False
        self.folded = 0

    def add(self, rows: Array) -> int:
        """Add the rows of one file. Return their number."""
        count = len(rows)
        if not count:
            return 0
        with self._lock:
            self._fresh.append(rows)
            fresh = self._fresh_count = self._fresh_count + count
            # sort only if there are enough rows to skip files: immediately if few or first, else when they have doubled
            total = len(self._rows) + fresh
            enough = total >= self._max_count and (total <= _FEW_ANSWERS or self._cutoff is None)
            if enough or (fresh >= _FEW_ANSWERS and 2 * fresh >= total):
                self._merge()
        return count

    def _merge(self) -> None:
        # one more than `max_count` shows that the answer is truncated
        fresh = self._fresh
        rows = fresh[0] if len(fresh) == 1 and not len(self._rows) else concatenate([self._rows, *fresh], self._schema)
        self._first, self._rows = (rows, rows) if len(rows) == 1 else leading(rows, self._schema, self._max_count + 1)
        self._fresh, self._fresh_count = [], 0
        if len(self._first) >= self._max_count:
            self._cutoff = int(self._first["second"][self._max_count - 1])

    def can_skip(self, second_max: int) -> bool:
        """Return whether a file with this greatest second can't change the answer. Then the answer is truncated."""
        # without the lock, because most lookups never have a cutoff; it is never unset
        if self._cutoff is None:
            return False
        with self._lock:
            if second_max >= self._cutoff:
                return False
            self.skipped = True
            return True

    def missing(self) -> int:
        """Return the number of missing answers, at least 0. Rows of equal identity are counted separately."""
        with self._lock:
            return max(0, self._max_count - len(self._first) - self._fresh_count)

    def answers(self) -> tuple[Array, bool]:
        """Return the first `max_count` answers, and whether there may be more."""
        with self._lock:
            if self._fresh:
                self._merge()
            page, more = self._first[: self._max_count], self.skipped or len(self._first) > self._max_count
            if self._rows is not self._first:
                rows = self._rows
                if more:
                    rows = rows[~are_after(rows, order_key(page[-1], self._schema), self._schema)]
                first_answers(rows, self._schema, len(rows), self._fold)
            return page, more

    def _fold(self, count: int) -> None:
        # those of this page alone: another page counts its own
        self.folded = count
