"""What each failure of an S3 request means for the caller. Pure, any thread.

Messages say what to do and name the storage and the object; they hold the service's code and message, never a request's
headers or credentials. `PassingFault` marks what botocore did not repeat and `RetryPolicy` may.

Bounded repeats with jitter, and no wait that would pass the caller's deadline. Thread-safe; holds no state of a call.

`RetryPolicy` repeats what botocore does not; `bound_repeats` puts botocore's own repeats under the deadline, too, and
tells of every request that is sent, repeats included (`metering`).
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from botocore import exceptions as boto
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError
from botocore.retries import standard
from urllib3.exceptions import HTTPError

from tiered_index.errors import (
    BudgetExceeded,
    InvalidArgument,
    ObjectExists,
    ObjectNotFound,
    StorageMisconfigured,
    StorageUnavailable,
    TieredIndexError,
)
from tiered_index.storage.context import check_deadline, remaining_s, sending

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

__all__ = [
    "NO_CREDENTIALS",
    "PassingFault",
    "RetryPolicy",
    "attempts_spent",
    "bound_repeats",
    "is_elsewhere",
    "may_pass",
    "translate",
]


class PassingFault(StorageUnavailable):
    """A fault worth one more attempt at once."""


_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, name a profile, or give the machine a role"
_ADVICE = {
    "NoSuchBucket": "create the bucket or correct the storage's URI",
    "AccessDenied": "grant s3:GetObject, PutObject, DeleteObject, ListBucket, AbortMultipartUpload and "
    "ListBucketMultipartUploads "
    "(without ListBucket a missing object is reported so, too)",
    "InvalidAccessKeyId": f"the service does not know this access key: {_CREDENTIALS}",
    "SignatureDoesNotMatch": "the secret key, the region or the endpoint does not fit the access key",
    "ExpiredToken": "the session's credentials have expired: renew them",
    "ExpiredTokenException": "the session's credentials have expired: renew them",
    "TokenRefreshRequired": "the session's credentials have expired: renew them",
    "InvalidToken": "the session token is not valid: renew the credentials",
    "RequestTimeTooSkewed": "set this machine's clock",
    "PermanentRedirect": "set the bucket's region",
    "AuthorizationHeaderMalformed": "set the bucket's region",
    "IllegalLocationConstraintException": "set the bucket's region",
    "NotImplemented": "the service lacks something the engine needs (put-if-absent, multipart uploads or checksums)",
    "MethodNotAllowed": "is this the address of an S3 service?",
}
_PASSING_CODES = {
    "BadDigest",
    "InternalError",
    "ServiceUnavailable",
    "SlowDown",
    "XAmzContentChecksumMismatch",
    # those that botocore repeats, of whatever service
    "BandwidthLimitExceeded",
    "EC2ThrottledException",
    "LimitExceededException",
    "PriorRequestNotComplete",
    "ProvisionedThroughputExceededException",
    "RequestLimitExceeded",
    "RequestThrottled",
    "RequestThrottledException",
    "RequestTimeout",
    "RequestTimeoutException",
    "ThrottledException",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
    "TransactionInProgressException",
}
_FULL_CODES = {"InsufficientCapacity", "InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"}
_INSUFFICIENT_STORAGE = 507
_REDIRECTS = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_FIRST_REFUSAL = 400
_CALLER_CODES = {
    "EntityTooLarge",
    "EntityTooSmall",
    "InvalidPart",
    "InvalidPartOrder",
    "InvalidRange",
    "KeyTooLongError",
    "MalformedXML",
}
NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.TokenRetrievalError,
    boto.NoAuthTokenError,
    boto.SSOError,
    boto.LoginError,
    boto.UnknownCredentialError,
    boto.RefreshWithMFAUnsupportedError,
)
_UNREACHABLE = (
    boto.ConnectionError,
    boto.HTTPClientError,
    boto.IncompleteReadError,
    boto.FlexibleChecksumError,
    ResponseParserError,  # an error page cut short, or one that is not S3's
    HTTPError,  # one that broke off
)


def translate(error: Exception, *, doing: str, uri: str, name: str) -> TieredIndexError:
    """Return the typed error for `error`, raised while `doing` something to `name` (may be empty) in the storage
    `uri`.
    """
    if isinstance(error, ClientError):
        return _translate_answer(error, doing, uri, name)
    text = f"{doing} in {uri}: {error}"
    if isinstance(error, NO_CREDENTIALS):
        return StorageMisconfigured(f"{text}: {_CREDENTIALS}")
    if isinstance(error, boto.ProfileNotFound):
        return StorageMisconfigured(f"{text}: correct the profile or add it to ~/.aws/config")
    if isinstance(error, boto.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        return StorageMisconfigured(f"{text}: set AWS_CA_BUNDLE to the certificate authority of this endpoint")
    if isinstance(error, _UNREACHABLE) or (isinstance(error, OSError) and not isinstance(error, BotoCoreError)):
        return StorageUnavailable(text)
    return StorageMisconfigured(text)


def is_elsewhere(error: ClientError) -> bool:
    """Return whether the service says that the bucket is in another region, which botocore knows how to follow."""
    code, status = _code_and_status(error)
    return code in _REDIRECTS or status < _FIRST_REFUSAL


def may_pass(error: ClientError) -> bool:
    """Return whether the same request may be answered differently after a while."""
    code, status = _code_and_status(error)
    return code in _PASSING_CODES or status == 429 or status >= 500


def _code_and_status(error: ClientError) -> tuple[str, int]:
    response = error.response
    return response.get("Error", {}).get("Code", ""), response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)


def _translate_answer(error: ClientError, doing: str, uri: str, name: str) -> TieredIndexError:
    code, status = _code_and_status(error)
    text = f"{doing} in {uri}: {code} {error.response.get('Error', {}).get('Message', '')}".rstrip()
    if code in {"NoSuchKey", "NoSuchUpload"} or (status == 404 and code in {"404", "NotFound", ""}):
        what = "the unfinished uploads of " if code == "NoSuchUpload" else ""
        return ObjectNotFound(name, what + uri)
    if code == "PreconditionFailed" or status == 412:
        return ObjectExists(name, uri)
    if status == 409:
        # Another request got in between: ConditionalRequestConflict, OperationAborted, Ceph's ConcurrentModification on
        # a read.
        return PassingFault(text)
    if code in _CALLER_CODES or status == 416:
        return InvalidArgument(text)
    if code in _FULL_CODES or status == _INSUFFICIENT_STORAGE:
        # it passes without a change of ours: a writer waits with its files, and may start meanwhile
        return StorageUnavailable(f"{text}: make room in the storage, or raise its quota")
    if code in _ADVICE:
        return StorageMisconfigured(f"{text}: {_ADVICE[code]}")
    if may_pass(error):
        return StorageUnavailable(text)
    advice = _ADVICE["AccessDenied"] if status in {401, 403} else "the service refuses this request as it stands"
    return StorageMisconfigured(f"{text}: {advice}")


_LONGEST_WAIT_S = 5.0
_STANDARD = "retry-config-s3"
# the name under which botocore registers its repeats
_T = TypeVar("_T")
_spent: ContextVar[int] = ContextVar("tiered_index_attempts_spent", default=0)


@dataclass(frozen=True)
class RetryPolicy:
    """At most `attempts`; before repeat n a wait drawn evenly from 0 to `backoff_s * 2**n` ("full jitter"), at most 5
    s.
    """

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
        """Wait before repeat `repeat` (from 1).

        Raises `BudgetExceeded`, naming the fault, where that would pass the deadline.
        """
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
    """Let `client` begin no attempt, and no wait before one, that would pass the deadline: then `BudgetExceeded` is
    raised.

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
