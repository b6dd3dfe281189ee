"""Reads of a bucket through obstore, and the bucket's address from environment variables alone.

If they give key, secret and region, and no other setting applies, a process that only reads does not load boto3.
Loading boto3 takes as long as the rest of a lookup. docs/decisions/0090. Threads: any number.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from contextlib import closing
from email.utils import parsedate_to_datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tiered_index.storage.base import PAGE
from tiered_index.storage.context import check_deadline, sending
from tiered_index.storage.obstores import NO_RETRIES, client_options, errors, obstore
from tiered_index.storage.s3.options import S3Options

# Variables that change how boto3 or obstore reads a bucket, and that this module does not support
_OTHERS = re.compile(
    r"AWS_((DEFAULT_)?PROFILE|SECURITY_TOKEN|CREDENTIAL_EXPIRATION|USE_(FIPS|DUALSTACK)_ENDPOINT"
    r"|IGNORE_CONFIGURED_ENDPOINT_URLS|DEFAULTS_MODE|AUTH_SCHEME_PREFERENCE|DATA_PATH|(S3|SIGV4A)_\w+"
    r"|TOKEN|UNSIGNED_PAYLOAD|CHECKSUM_ALGORITHM|ALLOW_\w+|PROXY_\w+|HTTP\w+|SSE_\w+|\w*TIMEOUT|USER_AGENT)"
)
_PROXIES = {"http_proxy", "https_proxy", "all_proxy"}
_FILES = {"AWS_CONFIG_FILE": "~/.aws/config", "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials"}
_AMAZON = re.compile(r".*\.(amazonaws\.com(\.cn)?|api\.aws)")
# In other regions Amazon's endpoints have other names
_REGION = re.compile(r"(af|ap|ca|eu|il|me|mx|sa|us)-[a-z]+-\d")
# Names of buckets that can begin a host's name; not those of directory buckets and access points
_BUCKET = re.compile(r"(?!.*--)[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
# Overrides variables that obstore reads and boto3 does not: they would change GETs
_NOT_OF_ENVIRONMENT: Any = {
    "skip_signature": False,
    "s3_express": False,
    # only affects writes; excludes a customer's key
    "server_side_encryption": "AES256",
}


class Light(NamedTuple):
    """A bucket that obstore reads: obstore's store, the bucket's address, and the file of trusted certificates."""

    store: Any
    base_url: str
    certificates: str | None

    def now_ms(self, timeout_s: float) -> int | None:
        """Return the service's time in whole seconds, from its response to an unsigned HEAD. None: unknown."""
        check_deadline("asking for the time")
        sending()
        # loading both takes a twentieth of the time of boto3
        client, ssl = importlib.import_module("http.client"), importlib.import_module("ssl")
        address = urlsplit(self.base_url)
        given: dict[str, Any] = {"timeout": timeout_s}
        try:
            if address.scheme == "https":
                given["context"] = ssl.create_default_context(cafile=self.certificates)
            kind = client.HTTPSConnection if address.scheme == "https" else client.HTTPConnection
            with closing(kind(address.netloc, **given)) as connection:
                connection.request("HEAD", address.path or "/")
                return round(parsedate_to_datetime(connection.getresponse().headers["Date"]).timestamp() * 1000)
        except (OSError, client.HTTPException, TypeError, ValueError):
            return None


def open_store(
    bucket: str,
    base_url: str,
    region: str,
    certificates: str | None,
    options: S3Options,
    connections: int,
    **credentials: Any,
) -> Any:
    """Return obstore's store for a bucket at `base_url`. Raises obstore's errors, `OSError`, `ValueError`."""
    host = urlsplit(base_url)
    client = client_options(
        [host.hostname or ""],
        connections,
        allow_http=host.scheme == "http",
        connect_timeout_s=options.connect_timeout_s,
        read_timeout_s=options.read_timeout_s,
    )
    if certificates is not None:
        client["root_certificate"] = Path(certificates).read_bytes()
    return obstore().store.S3Store(
        bucket,
        # The bucket's address in either style. AWS_ENDPOINT_URL_S3 would override any other option.
        aws_endpoint_url_s3=base_url,
        virtual_hosted_style_request=True,
        **_NOT_OF_ENVIRONMENT,
        request_payer=options.request_payer is not None,
        region=region,
        **credentials,
        client_options=client,
        retry_config=NO_RETRIES,
    )


def get(store: Any, key: str, asked: Mapping[str, Any], length: int | None = None) -> tuple[bytes, int]:
    """Return the bytes of an object that one GET with the options `asked` delivers, and the object's size.

    Reads one byte more than `length` (None: the object's size): it shows a body that is too long. Raises obstore's
    errors.
    """
    check_deadline("sending GetObject")
    sending()
    answer = obstore().get(store, key, options=asked)
    size = int(answer.meta["size"])
    return next(iter(answer.stream((size if length is None else length) + 1)), b""), size


def listed(store: Any, folder: str, start: str | None) -> list[tuple[str, dict[str, Any]]] | None:
    """Return key and description of the objects of a folder after the key `start`, by one request.

    None if the listing may be incomplete. obstore takes a page without a token for the last one; a listing with fewer
    than the 1,000 keys of a page is complete. Raises obstore's errors.
    """
    check_deadline("sending ListObjectsV2")
    sending()
    page = next(obstore().list(store, folder.rstrip("/"), offset=start, chunk_size=PAGE), ())
    found = [(str(one["path"]), one) for one in page]
    keys = [start or folder, *(key for key, _ in found)]
    is_whole = len(found) < PAGE and all(one < other for one, other in pairwise(keys)) and keys[-1].startswith(folder)
    return found if is_whole or not found else None


def of_environment(bucket: str, options: S3Options, connections: int) -> Light | None:
    """Return a bucket that environment variables alone describe; None: use boto3."""
    environment = {name: value for name, value in os.environ.items() if value}
    amazons = {name for name in environment if name.startswith("AWS_")}
    region = options.region or environment.get("AWS_DEFAULT_REGION", "")
    if (
        # boto3 is loaded, and may be mocked
        "botocore" in sys.modules
        or not options.lean_gets
        or options.profile is not None
        or options.addressing_style not in (None, "path")
        or not {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= amazons
        or not region
        or any(map(_OTHERS.fullmatch, amazons))
        or any(name.lower() in _PROXIES for name in environment)
        or any(_has_text(environment.get(name, place)) for name, place in _FILES.items())
        or obstore() is None
    ):
        return None
    named = (options.endpoint_url, environment.get("AWS_ENDPOINT_URL_S3"), environment.get("AWS_ENDPOINT_URL"))
    try:
        endpoint = urlsplit(next(filter(None, named), f"https://s3.{region}.amazonaws.com"))
    except ValueError:
        return None
    host = endpoint.hostname or ""
    if endpoint.scheme not in {"http", "https"} or not host or "@" in endpoint.netloc or endpoint.path.strip("/"):
        return None
    base_url = f"{endpoint.scheme}://{endpoint.netloc}/{bucket}"
    if _AMAZON.fullmatch(host):
        if any(named) or options.addressing_style or not (_REGION.fullmatch(region) and _BUCKET.fullmatch(bucket)):
            return None
        base_url = f"https://{bucket}.{host}"
    credentials = {
        "access_key_id": environment["AWS_ACCESS_KEY_ID"],
        "secret_access_key": environment["AWS_SECRET_ACCESS_KEY"],
    }
    if token := environment.get("AWS_SESSION_TOKEN"):
        credentials["session_token"] = token
    certificates = None
    if endpoint.scheme == "https":
        certificates = environment.get("AWS_CA_BUNDLE") or environment.get("REQUESTS_CA_BUNDLE") or _certificates()
    try:
        store = open_store(bucket, base_url, region, certificates, options, connections, **credentials)
    except errors():
        # boto3 reports the error
        return None
    return Light(store, base_url, certificates)


def _has_text(place: str) -> bool:
    """Return whether a file exists and is not empty; False for one that can't be read, as in boto3."""
    try:
        path = Path(place).expanduser()
        return path.is_file() and path.stat().st_size > 0
    except (OSError, RuntimeError):
        # no access, or no home folder
        return False


def _certificates() -> str | None:
    """Return the file of certificates that boto3 trusts."""
    try:
        return str(importlib.import_module("certifi").where())
    except ImportError:
        found = importlib.util.find_spec("botocore")
        return str(Path(found.origin).parent / "cacert.pem") if found is not None and found.origin else None
