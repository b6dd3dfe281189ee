"""Bounded repeats with jitter, and no wait that would pass the caller's deadline. Thread-safe; holds no state of a call.

`RetryPolicy` repeats what botocore does not; `bound_repeats` puts botocore's own repeats under the deadline, too, and tells of every
request that is sent, repeats included (`attempts`).
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from botocore.retries import standard

from tiered_index.errors import BudgetExceeded, StorageUnavailable
from tiered_index.storage.attempts import sending
from tiered_index.storage.deadline import check_deadline, remaining_s
from tiered_index.storage.s3_errors import PassingFault

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

__all__ = ["RetryPolicy", "attempts_spent", "bound_repeats"]

_LONGEST_WAIT_S = 5.0
_STANDARD = "retry-config-s3"
# the name under which botocore registers its repeats
_T = TypeVar("_T")
_spent: ContextVar[int] = ContextVar("tiered_index_attempts_spent", default=0)


@dataclass(frozen=True)
class RetryPolicy:
    """At most `attempts`; before repeat n a wait drawn evenly from 0 to `backoff_s * 2**n` ("full jitter"), at most 5 s."""

    attempts: int
    backoff_s: float
    sleep: Callable[[float], None] = time.sleep
    uniform: Callable[[float, float], float] = random.uniform

    def run(self, action: Callable[[], _T]) -> _T:
        """Return what `action` returns; repeat it while it raises `PassingFault`, then raise `StorageUnavailable`.

        Raises `BudgetExceeded`, naming the fault, instead of a wait that would pass the deadline.
        """
        attempt = 1
        while True:
            try:
                return action()
            except PassingFault as fault:
                if attempt >= self.attempts:
                    raise StorageUnavailable(f"{fault} ({attempt} attempts)") from fault
                self.wait(attempt, fault)
            attempt += 1

    def wait(self, repeat: int, fault: Exception) -> None:
        """Wait before repeat `repeat` (from 1). Raises `BudgetExceeded`, naming the fault, where that would pass the deadline."""
        wait_s = self.uniform(0, min(_LONGEST_WAIT_S, self.backoff_s * 2**repeat))
        _check_wait(wait_s, str(fault), fault)
        self.sleep(wait_s)


@contextlib.contextmanager
def attempts_spent(count: int) -> Iterator[None]:
    """Let botocore's repeats of this context's requests be fewer by `count` until the block ends."""
    token = _spent.set(count)
    try:
        yield
    finally:
        _spent.reset(token)


def bound_repeats(client: S3Client, attempts: int) -> None:
    """Let `client` begin no attempt, and no wait before one, that would pass the deadline: then `BudgetExceeded` is raised.

    botocore's standard repeats are registered afresh, since what decides on them tells nobody how long it will wait.
    """
    events = client.meta.events
    events.unregister("needs-retry.s3", unique_id=_STANDARD)
    decide = standard.register_retry_handler(client, attempts).needs_retry
    events.unregister("needs-retry.s3", unique_id=_STANDARD)

    def needs_retry(**answered: Any) -> float | None:
        wait_s = decide(**{**answered, "attempts": answered["attempts"] + _spent.get()})
        if wait_s is not None:
            fault = answered.get("caught_exception")
            _check_wait(wait_s, _told(fault, answered.get("response")), fault)
        return wait_s

    def before_send(**about: Any) -> None:
        check_deadline(f"sending {about['event_name'].rpartition('.')[2]}")
        sending()

    events.register("needs-retry.s3", cast("Callable[..., None]", needs_retry), unique_id=_STANDARD)
    events.register("before-send.s3", before_send, unique_id="tiered-index-deadline")


def _check_wait(wait_s: float, fault: str, cause: Exception | None) -> None:
    left = remaining_s()
    if left is not None and wait_s >= left:
        raise BudgetExceeded(f"timeout_s leaves no time to repeat what failed: {fault}") from cause


def _told(fault: Exception | None, response: Any) -> str:
    """Return what went wrong in an attempt that botocore repeats."""
    if fault is not None or response is None:
        return str(fault)
    http, parsed = response
    details = parsed.get("Error", {})
    return f"{http.status_code} {details.get('Code', '')} {details.get('Message', '')}".rstrip()
