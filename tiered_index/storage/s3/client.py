"""The boto3 client of a bucket, and the typed errors for its failures.

botocore's own repeats are off; it only follows redirects to a bucket's region. Messages name the storage, the object
and the remedy, never a request's headers or credentials. Threads: any number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import boto3
from botocore import exceptions as boto
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from tiered_index.errors import (
    InvalidArgument,
    ObjectArchived,
    ObjectExists,
    ObjectNotFound,
    StorageMisconfigured,
    StorageUnavailable,
    TieredIndexError,
)
from tiered_index.storage.buckets import FEWEST_CONNECTIONS
from tiered_index.storage.context import check_deadline, sending
from tiered_index.storage.retry import PassingFault, RequestFault
from tiered_index.storage.s3.options import NO_S3, S3Options

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


_AMAZON = (".amazonaws.com", ".amazonaws.com.cn", ".api.aws")
# The errors of botocore for a failed request
REQUEST_ERRORS = (BotoCoreError, ClientError, ResponseParserError, HTTPError, OSError, RecursionError)


_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, name a profile, or give the machine a role"
NO_FRAMES = "set AWS_REQUEST_CHECKSUM_CALCULATION=when_required"
_ADVICE = {
    "NoSuchBucket": "create the bucket or correct the storage's URI",
    "AccessDenied": "grant s3:GetObject, PutObject, DeleteObject, ListBucket, AbortMultipartUpload and "
    "ListBucketMultipartUploads "
    "(without ListBucket a missing object is reported so, too); for a bucket whose requester pays, add "
    "request_payer=requester to the URI",
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
    "NotImplemented": "the service lacks something the engine needs: `tiered-index doctor URI` checks each ability. "
    f"If it does not know checksums, {NO_FRAMES}",
    "MissingContentLength": f"the service does not read bodies in frames (aws-chunked): {NO_FRAMES}",
    "XAmzContentSHA256Mismatch": f"the service does not read bodies in frames (aws-chunked): {NO_FRAMES}",
    "MethodNotAllowed": "is this the address of an S3 service?",
}
_PASSING_CODES = {
    "BadDigest",
    "InternalError",
    "ServiceUnavailable",
    "SlowDown",
    "XAmzContentChecksumMismatch",
    # Those that botocore's standard mode repeats
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
    # botocore before 1.41 has no logins
    *([boto.LoginError] if hasattr(boto, "LoginError") else []),
    boto.UnknownCredentialError,
    boto.RefreshWithMFAUnsupportedError,
)
_UNREACHABLE = (
    boto.ConnectionError,
    boto.HTTPClientError,
    boto.IncompleteReadError,
    boto.FlexibleChecksumError,
    # an error page that is cut short or not S3's
    ResponseParserError,
)


def translate(error: Exception, *, doing: str, uri: str, name: str) -> TieredIndexError:
    """Return the typed error for `error`, raised while `doing` something to `name` (may be empty) in the storage."""
    if isinstance(error, ClientError):
        return _translate_answer(error, doing, uri, name)
    # from the body of an error response, which botocore reads itself
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
        return StorageMisconfigured(f"{text}: the endpoint does not speak TLS: try http://")
    # botocore follows redirects without a region until Python's recursion limit
    wrapped = error.kwargs.get("error") if isinstance(error, boto.HTTPClientError) else error
    if isinstance(wrapped, RecursionError):
        return StorageMisconfigured(f"{doing} in {uri}: {ONLY_REDIRECTS}")
    if isinstance(error, _UNREACHABLE) or (isinstance(error, OSError) and not isinstance(error, BotoCoreError)):
        return RequestFault(text)
    return StorageMisconfigured(text)


def is_elsewhere(error: ClientError) -> bool:
    """Return whether the service says that the bucket is in another region; botocore follows such redirects."""
    code, status = _code_and_status(error)
    return code in _REDIRECTS or status < _FIRST_REFUSAL


def may_pass(error: ClientError) -> bool:
    """Return whether a repeat of the request may succeed later."""
    code, status = _code_and_status(error)
    return code in _PASSING_CODES or status == 429 or status >= 500


def _code_and_status(error: ClientError) -> tuple[str, int]:
    response = error.response
    return response.get("Error", {}).get("Code", ""), response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)


def _foreign_type(error: ClientError, code: str, status: int) -> str | None:
    """Return the content type of an error's body if the body is not S3's; None: it is S3's, or there is none."""
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    # if the body has no code, botocore gives the status as the code
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
            gateway = f"{text}: either a gateway can't reach its service, or {NO_S3}"
            return RequestFault(gateway, is_throttled=status in _THROTTLED)
        return StorageMisconfigured(f"{text}: {NO_S3}")
    is_bare_404 = status == 404 and code in {"404", "NotFound", ""}
    if is_bare_404 and not name and error.operation_name not in _HAS_NO_BODY:
        # S3's 404 of a listing names the missing bucket
        return StorageMisconfigured(f"{doing} in {uri}: the answer is a bare 404: {NO_S3}")
    if code in {"NoSuchKey", "NoSuchUpload"} or is_bare_404:
        what = "the unfinished uploads of " if code == "NoSuchUpload" else ""
        return ObjectNotFound(name, what + uri)
    if code == "PreconditionFailed" or status == 412:
        return ObjectExists(name, uri)
    if status == 409:
        # A concurrent request: ConditionalRequestConflict, OperationAborted, Ceph's ConcurrentModification on a read
        return PassingFault(text)
    if code in _CALLER_CODES or status == 416:
        return InvalidArgument(text)
    if code in _FULL_CODES or status == _INSUFFICIENT_STORAGE:
        # Not StorageMisconfigured: a writer keeps its files and waits, and may start meanwhile
        return StorageUnavailable(f"{text}: make room in the storage, or raise its quota")
    if code == "InvalidObjectState":
        return ObjectArchived(f"{text}: the object is archived: restore it first (`aws s3api restore-object`)")
    if code in _ADVICE:
        return StorageMisconfigured(f"{text}: {_ADVICE[code]}")
    if may_pass(error):
        # the code of a response without a body is its status
        said = said.removeprefix(str(status)).strip()
        return RequestFault(f"{doing} in {uri}: {status} {said}".rstrip(), is_throttled=status in _THROTTLED)
    advice = _ADVICE["AccessDenied"] if status in {401, 403} else "the service refuses this request"
    return StorageMisconfigured(f"{text}: {advice}")


def build_client(options: S3Options, uri: str, connections: int = FEWEST_CONNECTIONS) -> S3Client:
    """Return a client for `options`; raises `StorageMisconfigured` (unknown profile, unusable endpoint or region)."""
    try:
        session = boto3.Session(profile_name=options.profile, region_name=options.region)
        client = _client(
            session, options, options.addressing_style or ("path" if options.endpoint_url else None), connections
        )
        is_chosen = options.addressing_style is not None or options.endpoint_url is not None
        if not is_chosen and not (urlsplit(client.meta.endpoint_url).hostname or "").endswith(_AMAZON):
            # Environment or profile name another service. Few of them have a DNS name for each bucket.
            client.close()
            client = _client(session, options, "path", connections)
    except (BotoCoreError, ValueError) as error:
        raise translate(error, doing="opening the storage", uri=uri, name="") from error
    if "@" in urlsplit(client.meta.endpoint_url).netloc:
        # from the environment or the profile: botocore repeats the URL in every error
        client.close()
        raise StorageMisconfigured(
            f"opening {uri}: the endpoint URL must not hold credentials; use environment variables"
        )
    count_requests(client)
    if options.request_payer is not None:

        def pay(params: dict[str, Any], **_: Any) -> None:
            params["headers"]["x-amz-request-payer"] = options.request_payer

        client.meta.events.register("before-call.s3", pay, unique_id="tiered-index-payer")
    return client


def _client(session: boto3.Session, options: S3Options, addressing_style: str | None, connections: int) -> S3Client:
    style: Any = {"addressing_style": addressing_style} if addressing_style else None
    return session.client(
        "s3",
        endpoint_url=options.endpoint_url,
        config=Config(
            signature_version="s3v4",
            s3=style,
            connect_timeout=options.connect_timeout_s,
            read_timeout=options.read_timeout_s,
            max_pool_connections=connections,
            retries={"mode": "standard", "total_max_attempts": 1},
            tcp_keepalive=True,
        ),
    )


def count_requests(client: S3Client) -> None:
    """Have `client` count each request before it is sent, also redirected ones, and send none after the deadline."""

    def before_send(event_name: str, **_: Any) -> None:
        check_deadline(f"sending {event_name.rpartition('.')[2]}")
        sending()

    client.meta.events.register("before-send.s3", before_send, unique_id="tiered-index-requests")
