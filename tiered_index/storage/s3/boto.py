"""boto3's session and client, and the typed errors for their failures. `storage/s3` imports it on use.

botocore's own repeats are off; it only follows redirects to a bucket's region. Threads: any number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import boto3
from botocore import exceptions as boto
from botocore.config import Config
from botocore.credentials import ProcessProvider
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError
from botocore.session import Session
from botocore.utils import parse_timestamp
from msgspec.structs import replace
from urllib3.exceptions import HTTPError

from tiered_index.base.call import check_deadline, sending
from tiered_index.errors import StorageMisconfigured, TieredIndexError
from tiered_index.storage.faults import (
    NO_CREDENTIALS,
    NO_TLS,
    ONLY_REDIRECTS,
    PROCESS,
    S3,
    Refusal,
    of_certificate,
    of_refusal,
)
from tiered_index.storage.retry import PassingFault
from tiered_index.storage.s3.options import S3Options
from tiered_index.storage.s3.place import AMAZON, Place

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

# The errors of botocore for a failed request
REQUEST_ERRORS = (BotoCoreError, ClientError, ResponseParserError, HTTPError, OSError, RecursionError)
# an error of S3 is XML
_FOREIGN_TYPES = ("text/html", "text/plain", "application/json")
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
        return of_refusal(refusal_of(error), S3, doing=doing, uri=uri, name=name)
    # from the body of an error response, which botocore reads itself
    if isinstance(error, HTTPError):
        return PassingFault(f"{doing} in {uri}: the answer broke off: {error}")
    text = f"{doing} in {uri}: {error}"
    if isinstance(error, _NO_CREDENTIALS):
        is_process = isinstance(error, boto.CredentialRetrievalError) and _ProcessProvider.METHOD in str(error)
        return StorageMisconfigured(f"{text}: {PROCESS if is_process else NO_CREDENTIALS}")
    if isinstance(error, boto.ProfileNotFound):
        return StorageMisconfigured(f"{text}: correct the profile or add it to ~/.aws/config")
    if isinstance(error, boto.SSLError) and (remedy := of_certificate(str(error), S3)):
        return StorageMisconfigured(f"{text}: {remedy}")
    if isinstance(error, boto.SSLError) and "WRONG_VERSION_NUMBER" in str(error):
        return StorageMisconfigured(f"{text}: {NO_TLS}")
    # botocore follows redirects without a region until Python's recursion limit
    wrapped = error.kwargs.get("error") if isinstance(error, boto.HTTPClientError) else error
    if isinstance(wrapped, RecursionError):
        return StorageMisconfigured(f"{doing} in {uri}: {ONLY_REDIRECTS}")
    if isinstance(error, _UNREACHABLE) or (isinstance(error, OSError) and not isinstance(error, BotoCoreError)):
        return PassingFault(text)
    return StorageMisconfigured(text)


def refusal_of(error: ClientError) -> Refusal:
    """Return the answer that botocore raised."""
    fault, metadata = error.response.get("Error", {}), error.response.get("ResponseMetadata", {})
    status, headers = metadata.get("HTTPStatusCode", 0), metadata.get("HTTPHeaders", {})
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    # if the body has no code, botocore gives the status as the code, and its words as the message
    code = fault.get("Code", "")
    has_code = code not in {"", str(status)} and not (code == "NotFound" and status == 404)
    has_no_body = error.operation_name == "HeadObject"
    is_foreign = not (has_code or has_no_body or headers.get("content-length") == "0") and kind in _FOREIGN_TYPES
    return Refusal(
        status, code if has_code else "", fault.get("Message", ""), kind if is_foreign else None, has_no_body
    )


class _ProcessProvider(ProcessProvider):
    """Names the problem of a command that does not run, or prints no credentials: botocore raises any error then."""

    def _retrieve_credentials_using(self, credential_process: str) -> dict[str, Any]:
        try:
            known: dict[str, Any] = super()._retrieve_credentials_using(credential_process)  # type: ignore[misc]
            if known.get("expiry_time"):
                parse_timestamp(known["expiry_time"])
        except boto.CredentialRetrievalError as error:
            if not str(error).endswith(": "):
                raise
            problem: Exception = ValueError("the command failed without a message")
        except (ValueError, TypeError, AttributeError, OSError) as error:
            problem = error
        else:
            return known
        raise boto.CredentialRetrievalError(provider=self.METHOD, error_msg=str(problem)) from problem


def _session(profile: str | None) -> Session:
    """Return botocore's session of a profile. Raises `BotoCoreError`."""
    session = Session(profile=profile)
    chain = session.get_component("credential_provider")
    chain.insert_after(
        ProcessProvider.METHOD,
        _ProcessProvider(
            profile_name=session.get_config_variable("profile") or "default", load_config=lambda: session.full_config
        ),
    )
    chain.remove(ProcessProvider.METHOD)
    return session


def place_of_session(uri: str, options: S3Options) -> Place:
    """Return the place that boto3's session says; its `base_url` is the service's. Raises `StorageMisconfigured`."""
    try:
        base = _session(options.profile)
        session = boto3.Session(botocore_session=base, region_name=options.region)
        client = build_client(session, options)
        endpoint = client.meta.endpoint_url
        is_amazons = bool(AMAZON.fullmatch(urlsplit(endpoint).hostname or ""))
        # Few services other than Amazon's have a DNS name for each bucket.
        style = (client.meta.config.s3 or {}).get("addressing_style") or (None if is_amazons else "path")  # type: ignore[attr-defined]
        client.close()
    except (BotoCoreError, ValueError) as error:
        raise translate(error, doing="opening the storage", uri=uri, name="") from error
    if "@" in urlsplit(endpoint).netloc:
        # from the environment or the profile: botocore repeats the URL in every error
        raise StorageMisconfigured(
            f"opening {uri}: the endpoint URL must not hold credentials; use environment variables"
        )
    # without a region, Amazon's is "aws-global"
    known = client.meta.region_name if client.meta.region_name not in (None, "aws-global") else "us-east-1"
    place_options = replace(options, region=known, addressing_style=style)
    bundle = base.get_config_variable("ca_bundle")
    return Place(place_options, endpoint, str(bundle) if bundle else None, session)


def client_of(place: Place, uri: str) -> S3Client:
    """Return a client for the place. Raises `StorageMisconfigured`."""
    try:
        return build_client(place.session or boto3.Session(), place.options)
    except (BotoCoreError, ValueError) as error:
        raise translate(error, doing="opening the storage", uri=uri, name="") from error


def build_client(session: boto3.Session, options: S3Options) -> S3Client:
    """Return a client that counts its requests. Raises botocore's errors and `ValueError`."""
    chosen = options.addressing_style or ("path" if options.endpoint_url else None)
    style: Any = {"addressing_style": chosen} if chosen else None
    client = session.client(
        "s3",
        endpoint_url=options.endpoint_url,
        region_name=options.region,
        config=Config(
            signature_version="s3v4",
            s3=style,
            connect_timeout=options.connect_timeout_s,
            read_timeout=options.read_timeout_s,
            max_pool_connections=options.max_pool_connections,
            retries={"mode": "standard", "total_max_attempts": 1},
            tcp_keepalive=True,
        ),
    )

    def before_send(event_name: str, **_: Any) -> None:
        # also before redirected requests
        check_deadline(f"sending {event_name.rpartition('.')[2]}")
        sending()

    def pay(params: dict[str, Any], **_: Any) -> None:
        params["headers"]["x-amz-request-payer"] = options.request_payer

    client.meta.events.register("before-send.s3", before_send, unique_id="tiered-index-requests")
    if options.request_payer is not None:
        client.meta.events.register("before-call.s3", pay, unique_id="tiered-index-payer")
    return client
