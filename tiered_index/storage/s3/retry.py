"""The one loop that repeats requests to S3: bounded in attempts, by the caller's deadline, and counted.

botocore's own repeats are off in a client of ours; only its redirects to a bucket's region remain. Threads: any number.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tiered_index.errors import BudgetExceeded, StorageMisconfigured, StorageUnavailable
from tiered_index.storage.context import check_deadline, remaining_s, sending, wasted
from tiered_index.storage.s3.failures import REQUEST_ERRORS, PassingFault, RequestFault, translate

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_log = logging.getLogger(__name__)
_LONGEST_WAIT_S = 5.0
# a service that throttles is given more time
_THROTTLED_BACKOFF_S = 0.5
_T = TypeVar("_T")


@dataclass(frozen=True)
class RetryLoop:
    """Requests to the storage `uri`: at most `max_attempts` of one call may end in a `RequestFault`, and at most
    `transfer_attempts` in another `PassingFault`, so that a call makes at most the sum of both less one.

    The wait after fault n of a kind is drawn evenly from 0 to `backoff_s * 2**n` ("full jitter"), at most 5 s. Each is
    logged (INFO).
    """

    uri: str
    max_attempts: int
    transfer_attempts: int
    backoff_s: float
    sleep: Callable[[float], None] = time.sleep
    uniform: Callable[[float, float], float] = random.uniform

    def run(self, doing: str, name: str, attempt: Callable[[], _T]) -> _T:
        """Return what `attempt` returns; repeat it after a passing fault. `doing` and `name` are for messages.

        What botocore raises becomes a typed error: `StorageUnavailable` after the last attempt, and `BudgetExceeded`
        instead of an attempt or a wait that would pass the deadline.
        """
        what = f"{doing} in {self.uri}"
        faults: Counter[type[PassingFault]] = Counter()
        while True:
            check_deadline(what)
            try:
                return attempt()
            except BudgetExceeded as error:
                raise BudgetExceeded(f"{what}: {error}") from error
            # botocore follows a redirect without a region by a request that is redirected, and so on
            except RecursionError as error:
                raise StorageMisconfigured(
                    f"{what}: the endpoint only redirects: use the address that it names"
                ) from error
            except PassingFault as error:
                self._repeat(error, faults, error)
            except REQUEST_ERRORS as error:
                fault = translate(error, doing=doing, uri=self.uri, name=name)
                try:
                    if not isinstance(fault, PassingFault):
                        raise fault from error
                    self._repeat(fault, faults, error)
                finally:
                    # else this frame and the error's trace would keep each other, and the bytes that were to be sent
                    del fault

    def _repeat(self, fault: PassingFault, faults: Counter[type[PassingFault]], cause: Exception) -> None:
        """Count a fault and wait after it, or raise what ends the call."""
        if fault.wasted_bytes:
            wasted(fault.wasted_bytes)
        faults[type(fault)] += 1
        count = faults[type(fault)]
        is_request = isinstance(fault, RequestFault)
        most = self.max_attempts if is_request else self.transfer_attempts
        if count >= most:
            raise StorageUnavailable(f"{fault} ({count} attempts)") from cause
        backoff_s = max(self.backoff_s, _THROTTLED_BACKOFF_S) if fault.is_throttled else self.backoff_s
        wait_s = self.uniform(0, min(_LONGEST_WAIT_S, backoff_s * 2**count))
        left_s = remaining_s()
        if left_s is not None and wait_s >= left_s:
            raise BudgetExceeded(f"timeout_s leaves no time to repeat what failed: {fault}") from cause
        # the text alone: a handler may keep what it is given, and the error's trace holds what was to be sent
        _log.info("attempt %d of %d failed, the next one in %.1f s: %s", count, most, wait_s, str(fault))
        self.sleep(wait_s)


class S3Calls:
    """One bucket behind one client: requests in, typed errors out."""

    def __init__(self, client: S3Client, bucket: str, loop: RetryLoop) -> None:
        self._client = client
        self._bucket = bucket
        self.uri = loop.uri
        self.run = loop.run

    def __call__(self, operation: str, doing: str, name: str = "", **parameters: Any) -> dict[str, Any]:
        """Send a request, repeated as `RetryLoop` says, and return the parsed answer."""
        return self.run(doing, name, lambda: self.once(operation, **parameters))

    def once(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """Make one attempt, within `run`: raises what botocore raises."""
        answer: dict[str, Any] = getattr(self._client, operation)(Bucket=self._bucket, **parameters)
        return answer


def count_requests(client: S3Client) -> None:
    """Count each request that `client` is about to send, redirected ones included, and send none past the deadline."""

    def before_send(event_name: str, **_: Any) -> None:
        check_deadline(f"sending {event_name.rpartition('.')[2]}")
        sending()

    client.meta.events.register("before-send.s3", before_send, unique_id="tiered-index-requests")
