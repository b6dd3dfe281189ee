"""The budget of one lookup, and its use.

A `LookupBudget` is open while its lookup runs. It counts every request, also those of log reads. A request that exceeds
it raises `BudgetExceeded` before it is sent. Threads: those of one lookup, with copies of its context.
"""

from __future__ import annotations

import inspect
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self, TypedDict, TypeVar

import msgspec

from tiered_index.base.call import Activation, Cancellation, active_context
from tiered_index.errors import InvalidArgument, did_you_mean
from tiered_index.storage.metering import Usage
from tiered_index.storage.prices import PriceTable, rounded_usd
from tiered_index.types import Explain, FileReport

N = TypeVar("N", int, float)
# the longest time that a thread can wait; a longer bound counts as none
_LONGEST_S = threading.TIMEOUT_MAX / 2
# a union of types takes longer to check
_NUMBERS = int, float


class Limits(TypedDict, total=False):
    """The bounds of one call by name. See `LookupLimits`."""

    max_requests: int | None
    max_bytes: int | None
    timeout_s: float | None


class LookupLimits(msgspec.Struct, frozen=True):
    """Inclusive bounds of one call; None: no bound. Raises `InvalidArgument` for an impossible bound."""

    max_requests: int | None = None
    max_bytes: int | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        # not in a loop over names, because a warm lookup takes a few microseconds
        if self.max_requests is not None:
            _check_count("max_requests", self.max_requests)
        if self.max_bytes is not None:
            _check_count("max_bytes", self.max_bytes)
        limit = self.timeout_s
        if limit is not None and (not isinstance(limit, _NUMBERS) or limit is True or not 0 < limit < math.inf):
            raise InvalidArgument(f"timeout_s must be a positive number of seconds, not {limit!r}")

    @classmethod
    def of(cls, call: Callable[..., Any], arguments: Mapping[str, Any]) -> Self:
        """Return the bounds in keyword arguments of a call. Raises `TypeError` for others, which names the call."""
        try:
            return cls(**arguments)
        except TypeError:
            name = next(name for name in arguments if name not in Limits.__annotations__)
            near = did_you_mean(name, [*inspect.signature(call).parameters, *Limits.__annotations__])
            raise TypeError(f"{call.__name__}() got an unexpected keyword argument {name!r}{near}") from None

    @property
    def is_bounded(self) -> bool:
        """Whether there is a bound."""
        return self.max_requests is not None or self.max_bytes is not None or self.timeout_s is not None

    def least(self, other: LookupLimits) -> LookupLimits:
        """Return the lesser bound of both, for each bound."""
        return LookupLimits(
            _least(self.max_requests, other.max_requests),
            _least(self.max_bytes, other.max_bytes),
            _least(self.timeout_s, other.timeout_s),
        )

    def less(self, requests: int, size_bytes: int) -> LookupLimits:
        """Return the bounds that are left after so many requests and bytes, at least 0."""
        return LookupLimits(_left(self.max_requests, requests), _left(self.max_bytes, size_bytes), self.timeout_s)

    def deadline_s(self) -> float | None:
        """Return the end of `timeout_s` from now, by `time.monotonic()`; None: no bound."""
        bounded = self.timeout_s is not None and self.timeout_s < _LONGEST_S
        return time.monotonic() + self.timeout_s if bounded and self.timeout_s is not None else None


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidArgument(f"{name} must be a whole number, 0 or more, not {value!r}")


def _left(most: int | None, spent: int) -> int | None:
    return None if most is None else max(0, most - spent)


def _least(first: N | None, second: N | None) -> N | None:
    return second if first is None else first if second is None else min(first, second)


class LookupBudget:
    """The limits of one lookup and their use. Its time starts when it is made: `begun`, by `time.perf_counter()`.

    `is_free`: nobody bounds the lookup or counts its requests, so the compiled core may read files in a storage.
    """

    def __init__(self, prices: PriceTable, limits: LookupLimits) -> None:
        self.limits, self.begun = limits, time.perf_counter()
        self.usage = Usage(prices, max_requests=limits.max_requests, max_bytes=limits.max_bytes)
        self.cancellation = Cancellation()
        """Set it when nobody needs the result any more."""
        context = active_context()
        self.is_free = not limits.is_bounded and context.deadline_s is None and not context.usages
        bounded = context if limits.timeout_s is None else context.until(limits.deadline_s())
        # that of the caller's context, if it is earlier
        self.deadline_s = bounded.deadline_s
        self.call = bounded.counting(self.usage).cancelled_by(self.cancellation)

    def open(self) -> Activation[LookupBudget]:
        """Return a context manager that counts and bounds the requests of this context, and of its copies."""
        return Activation(self.call, self)

    @property
    def is_timed(self) -> bool:
        """Whether there is a deadline."""
        return self.deadline_s is not None

    def spent(self) -> RequestStats:
        """Return the cost so far."""
        return RequestStats.of_usage(self.usage)

    def affords(self, requests: int, size_bytes: int) -> bool:
        """Return whether so many further requests and bytes are within the limits."""
        requests_left, bytes_left = self.usage.requests_left, self.usage.bytes_left
        return (requests_left is None or requests_left >= requests) and (bytes_left is None or bytes_left >= size_bytes)

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
    def of_usage(cls, usage: Usage) -> RequestStats:
        """Return the cost of a usage. It counts requested bytes, because an abandoned read may still transfer them."""
        return cls(*usage.totals()) if usage.used else NOTHING

    def __sub__(self, other: RequestStats) -> RequestStats:
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
        files_cached=sum([explain.files_cached for explain in explains]),
        files_skipped=sum([explain.files_skipped for explain in explains]),
        folded_entries=sum([explain.folded_entries for explain in explains]),
        files=(*(report for explain in explains for report in explain.files), *reports),
    )
