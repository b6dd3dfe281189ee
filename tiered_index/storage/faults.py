"""The typed errors for the answers of an object store, by status and code. All clients use them. Pure.

Messages name the storage, the object and the remedy, never a request's headers or credentials.
"""

from __future__ import annotations

import re

from msgspec import Struct

from tiered_index.errors import (
    InvalidArgument,
    ObjectArchived,
    ObjectExists,
    ObjectNotFound,
    ObjectRefused,
    StorageMisconfigured,
    StorageUnavailable,
    TieredIndexError,
)
from tiered_index.storage.retry import PassingFault

NO_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, name a profile (log in to one of SSO by `aws sso login`), or "
    "give the machine a role"
)
OWN_AUTHORITY = "CaUsedAsEndEntity"
# Words of Rust's TLS and of Python's about a certificate that is refused, and the remedy
_CERTIFICATES = (
    (
        OWN_AUTHORITY,
        "the server's certificate is its own authority, which obstore refuses: give the server one that an authority "
        "has signed (basicConstraints=CA:FALSE)",
    ),
    (
        "NotValidForName|subjectAltName|doesn't match|certificate is not valid for",
        "the server's certificate does not name this host: make one whose subjectAltName does, or use the name that it "
        "has",
    ),
    (
        r"InvalidCertificate\(\s*(Expired|NotValidYet)|certificate (has expired|is not yet valid)",
        "renew the server's certificate, or set this machine's clock",
    ),
    ("UnsupportedCertVersion", "make the server's certificate anew, as one of X.509 version 3"),
    ("InvalidCertificate|CERTIFICATE_VERIFY_FAILED", "{0.untrusted}"),
)
PROCESS = (
    "run the command that credential_process names in ~/.aws/config: it must print JSON such as "
    '{"Version": 1, "AccessKeyId": "ID", "SecretAccessKey": "KEY"}, with an ISO 8601 time as Expiration if they expire'
)
NO_TLS = "the endpoint does not speak TLS: try http://"
NO_S3 = "this is not an S3 service: correct the endpoint's URL"
ONLY_REDIRECTS = "the endpoint only redirects: use the address that it names"
OTHER_CLIENT = "add client=boto3 to the storage's URI: boto3 then reads it, and accepts this"
PROXIED = (
    "the environment names a proxy for the endpoint, through which obstore would follow redirects to any host: add "
    "client=boto3 to the storage's URI (or set s3.client), or the endpoint's host to NO_PROXY"
)
_NO_FRAMES = "set AWS_REQUEST_CHECKSUM_CALCULATION=when_required"
_EXPIRED = "the session's credentials have expired: renew them"
_REGION = "set the bucket's region"
_NO_BUCKETS = ("NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted", "AccountIsDisabled")
_ADVICE = {
    **dict.fromkeys(_NO_BUCKETS, "create the bucket or correct the storage's URI"),
    "AccessDenied": "grant s3:GetObject, PutObject, DeleteObject, ListBucket, AbortMultipartUpload and "
    "ListBucketMultipartUploads "
    "(without ListBucket a missing object is reported so, too); for a bucket whose requester pays, add "
    "request_payer=requester to the URI",
    "InvalidAccessKeyId": f"the service does not know this access key: {NO_CREDENTIALS}",
    "SignatureDoesNotMatch": "the secret key, the region or the endpoint does not fit the access key",
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "InvalidToken": "the session token is not valid: renew the credentials",
    "RequestTimeTooSkewed": "set this machine's clock",
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "NotImplemented": "the service lacks something the engine needs: `tiered-index doctor URI` checks each ability. "
    f"If it does not know checksums, {_NO_FRAMES}",
    "MissingContentLength": f"the service does not read bodies in frames (aws-chunked): {_NO_FRAMES}",
    "XAmzContentSHA256Mismatch": f"the service does not read bodies in frames (aws-chunked): {_NO_FRAMES}",
    "MethodNotAllowed": "is this the address of an S3 service?",
}
# Also those that botocore's standard mode repeats
_PASSING = (
    ".*(Throttl|LimitExceeded|ThroughputExceeded|RequestTimeout).*|BadDigest|InternalError|ServiceUnavailable|SlowDown"
    "|XAmzContentChecksumMismatch|PriorRequestNotComplete|TooManyRequestsException|TransactionInProgressException"
)
_ARCHIVED = {
    "InvalidObjectState": "restore it first (`aws s3api restore-object`)",
    "BlobArchived": "rehydrate it first",
}
_MISSING = {"NoSuchKey", "NoSuchUpload", "BlobNotFound", "ResourceNotFound"}
_EXISTS = {"PreconditionFailed", "BlobAlreadyExists", "ConditionNotMet"}
_FULL_CODES = {"InsufficientCapacity", "InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"}
_CALLERS = "EntityToo(Large|Small)|InvalidPart(Order)?|InvalidRange|KeyTooLongError|MalformedXML"
_REDIRECTS = {"PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed"}
_REDIRECTS |= {"IllegalLocationConstraintException"}
_INSUFFICIENT_STORAGE = 507
_NOT_IMPLEMENTED = 501
_THROTTLED = {429, 503}
_FORBIDDEN = 403
_REFUSED = {401, _FORBIDDEN}


class Service(Struct, frozen=True):
    """The remedies that differ between kinds of services.

    - `wrong`: the answer is not that of such a service.
    - `denied`: the service refuses a permission.
    - `redirected`: it redirects to a host that is not allowed.
    - `odd`: obstore does not accept its answer.
    - `no_credentials`: there are none.
    - `untrusted`: no known authority has signed the server's certificate.
    """

    wrong: str
    denied: str
    redirected: str
    odd: str
    no_credentials: str
    untrusted: str


S3 = Service(
    wrong=NO_S3,
    denied=_ADVICE["AccessDenied"],
    redirected=f"{ONLY_REDIRECTS}, or {_REGION}",
    odd=OTHER_CLIENT,
    no_credentials=NO_CREDENTIALS,
    untrusted="set AWS_CA_BUNDLE to a file with the certificate authority of this endpoint",
)


class Refusal(Struct, frozen=True):
    """An answer that is an error.

    - `code`, `message`: of S3's document; the code is empty if there is none.
    - `foreign_type`: the content type of a body that is not the service's; None: it is, or there is none.
    - `has_no_body`: the request was a HEAD, whose answers have no body.
    """

    status: int
    code: str
    message: str
    foreign_type: str | None
    has_no_body: bool

    @property
    def is_elsewhere(self) -> bool:
        """Whether the service says that the bucket is in another region."""
        # the answer to a HEAD has no code
        return self.code in _REDIRECTS or self.status < 400 or (self.has_no_body and self.status == 400)

    @property
    def may_pass(self) -> bool:
        """Whether a repeat of the request may succeed later."""
        return re.fullmatch(_PASSING, self.code) is not None or self.status == 429 or self.status >= 500


def of_certificate(text: str, service: Service) -> str | None:
    """Return the remedy if a client's error is that it refuses the server's certificate."""
    return next((remedy.format(service) for words, remedy in _CERTIFICATES if re.search(words, text)), None)


def of_refusal(refusal: Refusal, service: Service, *, doing: str, uri: str, name: str) -> TieredIndexError:
    """Return the typed error for a refusal of `doing` something to `name` (may be empty) in the storage."""
    status, code = refusal.status, refusal.code
    said = f"{code} {refusal.message}".strip() or str(status)
    text = f"{doing} in {uri}: {said}"
    if refusal.foreign_type:
        text = f"{doing} in {uri}: the answer ({status}) is {refusal.foreign_type}"
        if status in _THROTTLED or (status >= 500 and status != _NOT_IMPLEMENTED):
            gateway = f"{text}: either a gateway can't reach its service, or {service.wrong}"
            return PassingFault(gateway, is_throttled=status in _THROTTLED)
        if status in _REFUSED:
            text += ": either a gateway or firewall on the way refuses the request"
            return StorageMisconfigured(f"{text} (allow it there), or {service.wrong}")
        return StorageMisconfigured(f"{text}: {service.wrong}")
    is_bare_404 = status == 404 and not code
    if is_bare_404 and not name and not refusal.has_no_body:
        # S3's 404 of a listing names the missing bucket
        return StorageMisconfigured(f"{doing} in {uri}: the answer is a bare 404: {service.wrong}")
    if code in _MISSING or is_bare_404:
        what = "the unfinished uploads of " if code == "NoSuchUpload" else ""
        return ObjectNotFound(name, what + uri)
    if code.startswith("Lease"):
        return StorageMisconfigured(f"{text}: the blob or container has a lease: break the lease")
    if code in _EXISTS or status == 412:
        return ObjectExists(name, uri)
    if status == 409:
        # A concurrent request: ConditionalRequestConflict, OperationAborted, Ceph's ConcurrentModification on a read
        return PassingFault(text)
    if re.fullmatch(_CALLERS, code) or status == 416:
        return InvalidArgument(text)
    if code in _FULL_CODES or status == _INSUFFICIENT_STORAGE:
        # Not StorageMisconfigured: a writer keeps its files and waits, and may start meanwhile
        return StorageUnavailable(f"{text}: make room in the storage, or raise its quota")
    if code in _ARCHIVED:
        return ObjectArchived(f"{text}: the object is archived: {_ARCHIVED[code]}")
    if code in _ADVICE:
        # other codes refuse all requests
        kind = ObjectRefused if name and code == "AccessDenied" else StorageMisconfigured
        return kind(f"{text}: {_ADVICE[code]}")
    if refusal.may_pass:
        said = f"{status} {code} {refusal.message}".strip()
        return PassingFault(f"{doing} in {uri}: {said}", is_throttled=status in _THROTTLED)
    advice = service.redirected if status < 400 else "the service refuses this request"
    if status in _REFUSED:
        advice = service.denied
    kind = ObjectRefused if name and status == _FORBIDDEN else StorageMisconfigured
    return kind(f"{text}: {advice}")
