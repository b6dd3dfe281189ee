"""Reads of a bucket through obstore.

obstore follows redirects, and would send the session token to another host: client options let requests reach only the
endpoint's host and the sources of credentials (`StoreReads.send` looks at ports). A proxy would reach any host: it is
refused (`Place.is_proxied`). obstore shows no headers, neither the service's time nor a bucket's region: an unsigned
HEAD has both. Threads: any number.
"""

from __future__ import annotations

import os
import pkgutil
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tiered_index.errors import StorageMisconfigured
from tiered_index.storage.faults import NO_CREDENTIALS, S3
from tiered_index.storage.obstores import NO_RETRIES, NOWHERE, StoreReads, client_options, obstore
from tiered_index.storage.retry import RetryLoop
from tiered_index.storage.s3.place import Place, trusted

# Overrides variables that obstore reads and boto3 does not: they would change GETs
_NOT_OF_ENVIRONMENT: Any = {
    "skip_signature": False,
    "s3_express": False,
    # only affects writes; excludes a customer's key
    "server_side_encryption": "AES256",
}
# Variables of credentials other than those of an instance role
_OTHER_SOURCES = {
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
}
# Hosts of roles: EC2, ECS, EKS
_METADATA = ("169.254.169.254", "169.254.170.2", "169.254.170.23", "fd00:ec2::254", "fd00:ec2::23")
# Variables that name another one
_SOURCES = ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_EC2_METADATA_SERVICE_ENDPOINT")
# Validity of a session's credentials. obstore renews them five minutes before its end, so after a minute. botocore
# renews credentials ten minutes before they expire: obstore never uses expired ones.
CREDENTIALS_HOLD = timedelta(minutes=6)
_NO_KEYS = r"Missing (Access|Secret)|None from session"


class S3Reads(StoreReads):
    """Reads one bucket."""

    _lists_anew, sees_ends, service = True, False, S3
    # obstore sends no such requests for reads; or boto3's session has no credentials
    _of_roles = r"performing (PUT|POST) |GET http\S*(latest/meta-data|169\.254\.170\.)|External \w+ credential provider"

    def __init__(self, place: Place, bucket: str, uri: str, loop: Callable[..., RetryLoop]) -> None:
        """Open the bucket without a request. Raises `StorageMisconfigured`."""
        super().__init__(uri, loop, place.base_url, trusted(place), place.options.connect_timeout_s)
        self._is_trusted = place.options.endpoint_url is None
        has_keys = place.session is None and os.environ.get("AWS_ACCESS_KEY_ID")
        self._shows_secrets = not has_keys or bool(os.environ.get("AWS_SESSION_TOKEN"))
        try:
            self._store = _opened(place, bucket)
        except self.errors as error:
            # obstore's text may contain the value of a variable, which may be a secret
            problem = "unset AWS_CHECKSUM_ALGORITHM and the like, and look at the file of certificates"
            if re.search(_NO_KEYS, str(error)):
                problem = f"no credentials: {NO_CREDENTIALS}"
            raise StorageMisconfigured(f"opening {uri}: obstore refuses the settings: {problem}") from error

    def is_elsewhere(self, error: Exception) -> bool:
        refusal = self._refusal_of(str(error))
        is_redirect = re.search(f"redirect without LOCATION|{NOWHERE}", str(error)) is not None
        return is_redirect or (refusal is not None and refusal.is_elsewhere)

    def bucket_headers(self, prefix: str) -> Any:
        """Return the headers of the bucket's answer to an unsigned HEAD. Follows no redirect. Raises `OSError`."""
        return self._unsigned_headers()


def _opened(place: Place, bucket: str) -> Any:
    """Return obstore's store. Raises its errors, `OSError`, `ValueError`."""
    options, url = place.options, urlsplit(place.base_url)
    host = url.hostname or ""
    sts = f"sts.{options.region}.amazonaws.com"
    sources = [source for name in _SOURCES if (source := urlsplit(os.environ.get(name, "")).hostname)]
    client = client_options(
        [host, sts, "sts.amazonaws.com", *_METADATA, *sources],
        options.max_pool_connections,
        allow_http=url.scheme == "http",
        connect_timeout_s=options.connect_timeout_s,
        read_timeout_s=options.read_timeout_s,
    )
    if url.scheme == "https" and (certificates := trusted(place)):
        client["root_certificate"] = Path(certificates).read_bytes()
    settings = dict(_NOT_OF_ENVIRONMENT)
    if place.session is not None:
        provider = pkgutil.resolve_name("obstore.auth.boto3:Boto3CredentialProvider")
        settings["credential_provider"] = provider(place.session, ttl=CREDENTIALS_HOLD)
    elif os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true" and not _OTHER_SOURCES & os.environ.keys():
        raise ValueError("Missing AccessKeyId")
    elif metadata := os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT"):
        settings["metadata_endpoint"] = metadata
    return obstore().store.S3Store(
        bucket,
        # The bucket's address in either style. AWS_ENDPOINT_URL_S3 would override any other option.
        aws_endpoint_url_s3=place.base_url,
        virtual_hosted_style_request=True,
        request_payer=options.request_payer is not None,
        region=options.region,
        **settings,
        client_options=client,
        retry_config=NO_RETRIES,
    )
