"""The address of a bucket and the source of its credentials, read once for both clients.

Environment variables alone say it if they name no profile and Amazon's files are missing or empty: then a process that
only reads loads no boto3, and obstore's own chain has the credentials (variables, web identity, container, instance
role). Otherwise boto3's session says it, and gives obstore its credentials. docs/decisions/0085. Threads: any number.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace

from tiered_index.errors import ConfigError, StorageMisconfigured
from tiered_index.storage.base import check_endpoint
from tiered_index.storage.s3.options import S3Options

if TYPE_CHECKING:
    import boto3

AMAZON = re.compile(r".*\.(amazonaws\.com(\.cn)?|api\.aws)")
# Variables that only boto3's session understands
_OF_SESSIONS = re.compile(
    r"AWS_((DEFAULT_)?PROFILE|SECURITY_TOKEN|TOKEN|CREDENTIAL_EXPIRATION|CONTAINER_AUTHORIZATION_TOKEN"
    r"|USE_(FIPS|DUALSTACK)_ENDPOINT|IGNORE_CONFIGURED_ENDPOINT_URLS|ENDPOINT_URL_STS"
    r"|EC2_METADATA_SERVICE_ENDPOINT_MODE)"
)
_FILES = {"AWS_CONFIG_FILE": "~/.aws/config", "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials"}
# In other regions Amazon's endpoints have other names
_REGION = re.compile(r"(af|ap|ca|eu|il|me|mx|sa|us)-[a-z]+-\d|us-gov-(east|west)-1")
# Names of buckets that can begin a host's name; a dot would not fit the certificate
_LABEL = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
_ADDRESS = re.compile(r"[\d.]+|.*:.*")


class Place(Struct, frozen=True):
    """A bucket's address, and the source of its credentials.

    - `options`: with the endpoint (None: Amazon's), the region and the addressing style that apply.
    - `base_url`: the bucket's URL, in path style or virtual-hosted style.
    - `certificates`: the file of trusted certificates; None: those of certifi, which boto3 trusts.
    - `session`: boto3's, if it says where the bucket is.
    """

    options: S3Options
    base_url: str
    certificates: str | None
    session: boto3.Session | None = None

    @property
    def is_proxied(self) -> bool:
        """Whether the environment names a proxy for the bucket's host, by the rules that boto3 has, too."""
        scheme, netloc = urlsplit(self.base_url)[:2]
        if not any(name.lower() == f"{scheme}_proxy" for name in os.environ):
            return False
        # takes longer to load than the rest of this module
        request = importlib.import_module("urllib.request")
        return scheme in request.getproxies() and not request.proxy_bypass(netloc)


def find_place(bucket: str, uri: str, options: S3Options) -> Place:
    """Return the place of a bucket, without a request. Raises `ConfigError`."""
    if bucket.endswith("--x-s3"):
        raise ConfigError(f"{bucket!r} is a directory bucket, whose lists have no order: use a general purpose bucket")
    environment = {name: value for name, value in os.environ.items() if value}
    region = options.region or environment.get("AWS_DEFAULT_REGION") or environment.get("AWS_REGION", "us-east-1")
    names = (options.endpoint_url, environment.get("AWS_ENDPOINT_URL_S3"), environment.get("AWS_ENDPOINT_URL"))
    named = next(filter(None, names), None)
    certificates = environment.get("AWS_CA_BUNDLE") or environment.get("REQUESTS_CA_BUNDLE")
    if (
        options.profile is not None
        or any(map(_OF_SESSIONS.fullmatch, environment))
        or _needs_session(environment)
        or any(_has_text(environment.get(name, place)) for name, place in _FILES.items())
        or not (named or _REGION.fullmatch(region))
    ):
        place = pkgutil.resolve_name("tiered_index.storage.s3.boto:place_of_session")(uri, options)
        options, endpoint, certificates = place.options, place.base_url, place.certificates or certificates
        return Place(options, _base_url(bucket, endpoint, options), certificates, place.session)
    if named and named != options.endpoint_url:
        try:
            check_endpoint(named, "AWS_ENDPOINT_URL")
        except ConfigError as error:
            raise StorageMisconfigured(f"opening {uri}: {error}") from error
    options = replace(options, endpoint_url=named, region=region)
    return Place(options, _base_url(bucket, named or f"https://s3.{region}.amazonaws.com", options), certificates)


def _base_url(bucket: str, endpoint: str, options: S3Options) -> str:
    parts = urlsplit(endpoint)
    host, style = parts.hostname or "", options.addressing_style
    if style is None:
        style = "auto" if AMAZON.fullmatch(host) else "path"
    if style == "path" or not _LABEL.fullmatch(bucket) or _ADDRESS.fullmatch(host):
        return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}/{bucket}"
    return f"{parts.scheme}://{bucket}.{parts.netloc}{parts.path.rstrip('/')}"


def trusted(place: Place) -> str | None:
    """Return the file of trusted certificates: those that boto3 trusts unless another is named."""
    if place.certificates is not None:
        return place.certificates
    try:
        return str(importlib.import_module("certifi").where())
    except ImportError:
        botocore = importlib.util.find_spec("botocore")
        return str(Path(botocore.origin).parent / "cacert.pem") if botocore is not None and botocore.origin else None


def _needs_session(environment: Mapping[str, str]) -> bool:
    """Return whether obstore would not find or not reach the source of credentials that boto3 would use."""
    uri, token_file = "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"
    # the service for tokens may be reached only through the proxy, the bucket without it
    is_proxied = any(name.lower() == "https_proxy" for name in environment)
    return (uri in environment and token_file not in environment) or (
        is_proxied and "AWS_WEB_IDENTITY_TOKEN_FILE" in environment
    )


def _has_text(place: str) -> bool:
    """Return whether a file exists and is not empty; False for one that can't be read, as in boto3."""
    try:
        path = Path(place).expanduser()
        return path.is_file() and path.stat().st_size > 0
    except (OSError, RuntimeError):
        # no access, or no home folder
        return False
