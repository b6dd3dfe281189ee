"""What each failure of an S3 request means for the caller, and the one loop that repeats requests: bounded in attempts,
by the caller's deadline, and counted.

botocore's own repeats are off in a client of ours; only its redirects to a bucket's region remain. Messages say what to
do and name the storage and the object, never a request's headers or credentials. Threads: any number.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from botocore import exceptions as boto
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from tiered_index.errors import (
    BudgetExceeded,
    InvalidArgument,
    ObjectArchived,
    ObjectExists,
    ObjectNotFound,
    StorageMisconfigured,
    StorageUnavailable,
    TieredIndexError,
)
from tiered_index.storage.context import check_deadline, remaining_s, sending, wasted

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


# what botocore raises for a request that failed
REQUEST_ERRORS = (BotoCoreError, ClientError, ResponseParserError, HTTPError, OSError)


class PassingFault(StorageUnavailable):
    """A fault that a repeat may not meet. `wasted_bytes` bytes at most were delivered for nothing."""

    is_throttled = False

    def __init__(self, message: str, *, wasted_bytes: int = 0) -> None:
        super().__init__(message)
        self.wasted_bytes = wasted_bytes


class RequestFault(PassingFault):
    """A request that was not served: no answer, or one that says to ask again."""

    def __init__(self, message: str, *, is_throttled: bool = False) -> None:
        super().__init__(message)
        self.is_throttled = is_throttled


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
    # those that botocore's standard mode repeats, of whatever service
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
_THROTTLED = {429, 503}
_REDIRECTS = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_FIRST_REFUSAL = 400
_NOT_IMPLEMENTED = 501
# an error of S3 is XML
_FOREIGN_TYPES = ("text/html", "text/plain", "application/json")
_HAS_NO_BODY = {"HeadObject", "HeadBucket"}
NO_S3 = "this is not an S3 service: correct the endpoint's URL"
ONLY_REDIRECTS = "the endpoint only redirects: use the address that it names"
_CALLER_CODES = {
    "EntityTooLarge",
    "EntityTooSmall",
    "InvalidPart",
    "InvalidPartOrder",
    "InvalidRange",
    "KeyTooLongError",
    "MalformedXML",
}
_NO_CREDENTIALS = (
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
    # an error page cut short, or one that is not S3's
    ResponseParserError,
)


def translate(error: Exception, *, doing: str, uri: str, name: str) -> TieredIndexError:
    """Return the typed error for `error`, raised while `doing` something to `name` (may be empty) in the storage."""
    if isinstance(error, ClientError):
        return _translate_answer(error, doing, uri, name)
    # in the body of an error, which botocore reads by itself
    if isinstance(error, HTTPError):
        return PassingFault(f"{doing} in {uri}: the answer broke off: {error}")
    text = f"{doing} in {uri}: {error}"
    if isinstance(error, _NO_CREDENTIALS):
        return StorageMisconfigured(f"{text}: {_CREDENTIALS}")
    if isinstance(error, boto.ProfileNotFound):
        return StorageMisconfigured(f"{text}: correct the profile or add it to ~/.aws/config")
    if isinstance(error, boto.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        return StorageMisconfigured(f"{text}: set AWS_CA_BUNDLE to the certificate authority of this endpoint")
    if isinstance(error, boto.SSLError) and "WRONG_VERSION_NUMBER" in str(error):
        return StorageMisconfigured(f"{text}: the endpoint does not speak TLS: is it http:// that is meant?")
    # what `RetryLoop.run` meets bare, where it came up within a request
    if isinstance(error, boto.HTTPClientError) and isinstance(error.kwargs.get("error"), RecursionError):
        return StorageMisconfigured(f"{doing} in {uri}: {ONLY_REDIRECTS}")
    if isinstance(error, _UNREACHABLE) or (isinstance(error, OSError) and not isinstance(error, BotoCoreError)):
        return RequestFault(text)
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


def _foreign_type(error: ClientError, code: str, status: int) -> str | None:
    """Return the type of an error's body that is not S3's; None: it is S3's, or has no body."""
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    # without a code in the body botocore takes the status for one
    has_code = code not in {"", str(status)}
    if has_code or error.operation_name in _HAS_NO_BODY or headers.get("content-length") == "0":
        return None
    return kind if kind in _FOREIGN_TYPES else None


def _translate_answer(error: ClientError, doing: str, uri: str, name: str) -> TieredIndexError:
    code, status = _code_and_status(error)
    said = f"{code} {error.response.get('Error', {}).get('Message', '')}".rstrip()
    text = f"{doing} in {uri}: {said}"
    if foreign := _foreign_type(error, code, status):
        text = f"{doing} in {uri}: the answer ({status}) is {foreign}"
        if status in _THROTTLED or (status >= 500 and status != _NOT_IMPLEMENTED):
            gateway = f"{text}, of a gateway whose service is away, or {NO_S3}"
            return RequestFault(gateway, is_throttled=status in _THROTTLED)
        return StorageMisconfigured(f"{text}: {NO_S3}")
    is_bare_404 = status == 404 and code in {"404", "NotFound", ""}
    if is_bare_404 and not name and error.operation_name not in _HAS_NO_BODY:
        # S3 says which bucket it misses, and a listing misses nothing else
        return StorageMisconfigured(f"{doing} in {uri}: the answer is a bare 404: {NO_S3}")
    if code in {"NoSuchKey", "NoSuchUpload"} or is_bare_404:
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
    if code == "InvalidObjectState":
        return ObjectArchived(f"{text}: the object is archived: restore it first (`aws s3api restore-object`)")
    if code in _ADVICE:
        return StorageMisconfigured(f"{text}: {_ADVICE[code]}")
    if may_pass(error):
        # the code of an answer without a body is its status
        said = said.removeprefix(str(status)).strip()
        return RequestFault(f"{doing} in {uri}: {status} {said}".rstrip(), is_throttled=status in _THROTTLED)
    advice = _ADVICE["AccessDenied"] if status in {401, 403} else "the service refuses this request"
    return StorageMisconfigured(f"{text}: {advice}")


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
                raise StorageMisconfigured(f"{what}: {ONLY_REDIRECTS}") from error
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
            raise BudgetExceeded(f"timeout_s leaves no time for a retry: {fault}") from cause
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
