"""The deadline of a lookup, retries included, held in a context variable.

Work handed to another thread has it if it runs in a copy of the context, as with `metering`. It is checked before an
attempt and before a wait and never interrupts an attempt, so that at most the attempt in flight ends after it. Threads:
any number.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar

from tiered_index.errors import BudgetExceeded

__all__ = ["check_deadline", "deadline_at", "no_deadline", "remaining_s"]

_deadline_s: ContextVar[float | None] = ContextVar("tiered_index_deadline_s", default=None)


@contextlib.contextmanager
def deadline_at(monotonic_s: float | None) -> Iterator[None]:
    """Set a deadline, a reading of `time.monotonic()`, until the block ends; None sets none.

    Of nested deadlines the earliest holds.
    """
    outer = _deadline_s.get()
    nearest = min((at for at in (outer, monotonic_s) if at is not None), default=None)
    token = _deadline_s.set(nearest)
    try:
        yield
    finally:
        _deadline_s.reset(token)


@contextlib.contextmanager
def no_deadline() -> Iterator[None]:
    """Remove the deadline until the block ends, for work that may outlive the call that began it."""
    token = _deadline_s.set(None)
    try:
        yield
    finally:
        _deadline_s.reset(token)


def remaining_s() -> float | None:
    """Return the seconds left, negative past the deadline; None where there is none."""
    at = _deadline_s.get()
    return None if at is None else at - time.monotonic()


def check_deadline(doing: str) -> None:
    """Raise `BudgetExceeded` where the deadline is reached; `doing` is for the message."""
    left = remaining_s()
    if left is not None and left <= 0:
        raise BudgetExceeded(f"timeout_s was reached while {doing}")
