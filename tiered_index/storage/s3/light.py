"""Reads of a bucket without boto3, which takes as long to load as the rest of a lookup: a light start of a process.

Where the environment gives key, secret and region, and nothing else says how to reach the bucket, whole objects, ranges
and listings go through obstore. The first call that obstore does not answer as expected, and each call that it does not
make, goes to `S3Storage`, which is loaded then and used from then on. docs/decisions/0090. Threads: any number.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from tiered_index.errors import InvalidArgument, ObjectNotFound
from tiered_index.storage.base import PAGE, ObjectInfo, Storage, WrapperStorage, check_name, check_prefix, check_range
from tiered_index.storage.context import check_deadline, sending, wasted
from tiered_index.storage.disk import Disk
from tiered_index.storage.obstores import NO_RETRIES, answered, client_options, obstore
from tiered_index.storage.s3.options import FEWEST_CONNECTIONS, S3Options, place_of, uri_of

# what changes how boto3 or obstore reads a bucket, and is not read here
_OTHERS = re.compile(
    r"AWS_((DEFAULT_)?PROFILE|SECURITY_TOKEN|CREDENTIAL_EXPIRATION|USE_(FIPS|DUALSTACK)_ENDPOINT"
    r"|IGNORE_CONFIGURED_ENDPOINT_URLS|DEFAULTS_MODE|AUTH_SCHEME_PREFERENCE|DATA_PATH|(S3|SIGV4A)_\w+"
    r"|TOKEN|UNSIGNED_PAYLOAD|CHECKSUM_ALGORITHM|ALLOW_\w+|PROXY_\w+|HTTP\w+|SSE_\w+|\w*TIMEOUT|USER_AGENT)"
)
_PROXIES = {"http_proxy", "https_proxy", "all_proxy"}
_FILES = {"AWS_CONFIG_FILE": "~/.aws/config", "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials"}
_AMAZON = re.compile(r".*\.(amazonaws\.com(\.cn)?|api\.aws)")
# elsewhere Amazon's endpoints are called otherwise
_REGION = re.compile(r"(af|ap|ca|eu|il|me|mx|sa|us)-[a-z]+-\d")
# which a host's name may begin with; not those of directory buckets and access points
_BUCKET = re.compile(r"(?!.*--)[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
# obstore reads variables that boto3 does not, which would change its GETs
_NOT_OF_ENVIRONMENT: Any = {
    "skip_signature": False,
    "request_payer": False,
    "s3_express": False,
    # of writes, and instead of a customer's key
    "server_side_encryption": "AES256",
}


class _Way(NamedTuple):
    """The access to a bucket: its address, the region to sign for, the credentials, a file of certificates."""

    base_url: str
    region: str
    credentials: dict[str, str]
    certificates: str | None


def bucket_store(
    bucket: str, base_url: str, region: str, options: S3Options, certificates: str | None, **credentials: Any
) -> Any:
    """Return obstore's store for a bucket at `base_url`. Raises obstore's errors, `OSError`, `ValueError`."""
    host = urlsplit(base_url)
    client = client_options(
        [host.hostname or ""],
        allow_http=host.scheme == "http",
        connect_timeout_s=options.connect_timeout_s,
        read_timeout_s=options.read_timeout_s,
        connections=options.max_pool_connections or FEWEST_CONNECTIONS,
    )
    if certificates is not None:
        client["root_certificate"] = Path(certificates).read_bytes()
    return obstore().store.S3Store(
        bucket,
        # the bucket's address, whatever its style; any other key of this would lose to AWS_ENDPOINT_URL_S3
        aws_endpoint_url_s3=base_url,
        virtual_hosted_style_request=True,
        **_NOT_OF_ENVIRONMENT,
        region=region,
        **credentials,
        client_options=client,
        retry_config=NO_RETRIES,
    )


def _way(bucket: str, options: S3Options) -> _Way | None:
    """Return how the environment alone says to reach a bucket; None: boto3 has to find out."""
    environment = {name: value for name, value in os.environ.items() if value}
    amazons = {name for name in environment if name.startswith("AWS_")}
    region = options.region or environment.get("AWS_DEFAULT_REGION", "")
    if (
        # it is loaded, and may be mocked
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
    certificates = environment.get("AWS_CA_BUNDLE") or environment.get("REQUESTS_CA_BUNDLE") or _certificates()
    return _Way(base_url, region, credentials, certificates if endpoint.scheme == "https" else None)


def _has_text(place: str) -> bool:
    """Return whether a file has bytes. One that can't be seen has none, as for boto3."""
    try:
        path = Path(place).expanduser()
        return path.is_file() and path.stat().st_size > 0
    except (OSError, RuntimeError):
        # no access, or no home folder
        return False


def _certificates() -> str | None:
    """Return the file of certificates that boto3 takes."""
    try:
        return str(importlib.import_module("certifi").where())
    except ImportError:
        found = importlib.util.find_spec("botocore")
        return str(Path(found.origin).parent / "cacert.pem") if found is not None and found.origin else None


class LightS3(WrapperStorage):
    """A bucket that is read through obstore until something else is asked for, then an `S3Storage`."""

    options_type = S3Options

    @classmethod
    def from_uri(cls, uri: SplitResult, options: Any, disk: Disk | None, parallel_reads: int | None) -> Storage:
        """Return the storage in a bucket: a light one if the environment says how to reach it, else an `S3Storage`."""
        bucket, prefix = place_of(uri)
        sized = options.sized_for(parallel_reads)
        way = _way(bucket, sized)
        if way is not None:
            try:
                store = bucket_store(bucket, way.base_url, way.region, sized, way.certificates, **way.credentials)
                return cls(bucket, prefix, sized, way, store)
            except (obstore().exceptions.BaseError, OSError, ValueError):
                # boto3 says it in its words
                pass
        return _heavy(bucket, prefix, sized)

    def __init__(self, bucket: str, prefix: str, options: S3Options, way: _Way, store: Any) -> None:
        self._place = bucket, prefix, options
        self._base = f"{prefix}/" if prefix else ""
        self._way = way
        self.uri = uri_of(bucket, prefix, options)
        self.min_part_bytes = 5 << 20
        # None: `S3Storage` is used
        self._store: Any = store
        self._inner: Storage | None = None
        self._loading = threading.Lock()

    @property
    def inner(self) -> Storage:  # type: ignore[override]
        """The storage by boto3, opened by the first call that needs it."""
        with self._loading:
            if self._inner is None:
                self._store, self._inner = None, _heavy(*self._place)
            return self._inner

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"

    def get(self, name: str) -> bytes:
        """Return the whole object. Its checksum is for the caller to check, as those of ranges."""
        if (answer := self._answer("GetObject", name, {})) is None:
            return self.inner.get(name)
        return answer[0]

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """Return exactly `length` bytes from `start`, by one verified range GET."""
        check_name(name)
        check_range(start, length)
        if not length:
            return b""
        answer = self._answer("GetObject", name, {"range": (start, start + length)}, length)
        if answer is None:
            return self.inner.get_range(name, start, length)
        if start + length > answer[1]:
            what = f"reading bytes {start}-{start + length - 1} of {name!r}"
            raise InvalidArgument(f"{what} in {self.uri}: the object has {answer[1]} bytes")
        return answer[0]

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield objects in order of name; one request for each 1,000."""
        check_prefix(prefix, start_after)
        return self._listed(prefix, start_after)

    def now_ms(self) -> int:
        """Return the service's time (whole seconds): the date of its answer to an unsigned HEAD, or else as boto3's."""
        if self._store is None:
            return self.inner.now_ms()
        check_deadline("asking for the time")
        sending()
        # together a twentieth of boto3
        client, ssl = importlib.import_module("http.client"), importlib.import_module("ssl")
        address = urlsplit(self._way.base_url)
        given: dict[str, Any] = {"timeout": self._place[2].connect_timeout_s}
        try:
            if address.scheme == "https":
                secure = ssl.create_default_context(cafile=self._way.certificates)
                connection = client.HTTPSConnection(address.netloc, context=secure, **given)
            else:
                connection = client.HTTPConnection(address.netloc, **given)
            with closing(connection):
                connection.request("HEAD", address.path or "/")
                return round(parsedate_to_datetime(connection.getresponse().headers["Date"]).timestamp() * 1000)
        except (OSError, client.HTTPException, TypeError, ValueError):
            return self.inner.now_ms()

    def close(self) -> None:
        """Close the connections."""
        with self._loading:
            if self._inner is not None:
                self._inner.close()

    def _answer(self, doing: str, name: str, options: Any, length: int | None = None) -> tuple[bytes, int] | None:
        """Return bytes and size of an object, `length` of its bytes if given; None: boto3 has to ask."""
        store, key = self._store, self._base + check_name(name)
        module = obstore()
        if store is None or module is None:
            return None
        check_deadline(f"sending {doing}")
        sending()
        try:
            answer = module.get(store, key, options=options)
            size = int(answer.meta["size"])
            expected = size if length is None else length
            # one byte more than asked would show a body that is too long, whose rest is not read
            data: bytes = next(iter(answer.stream(expected + 1)), b"")
            if len(data) == expected or (length is not None and options["range"][1] > size):
                return data, size
            wasted(len(data))
        except (module.exceptions.BaseError, OSError, ValueError) as error:
            told = answered(str(error))
            if told is not None and told[0] == HTTPStatus.NOT_FOUND and "<Code>NoSuchKey</Code>" in told[1]:
                raise ObjectNotFound(name, self.uri) from error
        self._store = None
        return None

    def _listed(self, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        found = self._page(prefix, start_after)
        yield from found if found is not None else self.inner.list(prefix, start_after=start_after)

    def _page(self, prefix: str, start_after: str) -> Sequence[ObjectInfo] | None:
        """Return a listing of less than a page; None: boto3 has to ask.

        obstore takes a page that lacks the token of the next one for the last. A page of S3 has 1,000 keys, so a
        shorter listing is whole.
        """
        store, module = self._store, obstore()
        # obstore lists folders
        if store is None or module is None or not prefix.endswith("/"):
            return None
        check_deadline("sending ListObjectsV2")
        sending()
        folder, start = self._base + prefix, self._base + start_after if start_after else None
        try:
            page = next(module.list(store, folder.rstrip("/"), offset=start, chunk_size=PAGE), ())
            keys = [str(one["path"]) for one in page]
            is_in_order = all(one < other for one, other in pairwise([start or folder, *keys]))
            if len(keys) < PAGE and is_in_order and all(key.startswith(folder) for key in keys[-1:]):
                found = zip(keys, page, strict=True)
                return [_info(name, one) for key, one in found if (name := self._name(key)) is not None]
        except (module.exceptions.BaseError, OSError, ValueError):
            pass
        self._store = None
        return None

    def _name(self, key: str) -> str | None:
        """Return the object name of `key`; None for a key that is no object of ours."""
        try:
            return check_name(key.removeprefix(self._base))
        except InvalidArgument:
            return None


def _info(name: str, found: dict[str, Any]) -> ObjectInfo:
    return ObjectInfo(name, int(found["size"]), round(found["last_modified"].timestamp() * 1000))


def _heavy(bucket: str, prefix: str, options: S3Options) -> Storage:
    storage: Storage = pkgutil.resolve_name("tiered_index.storage.s3.storage:S3Storage")(bucket, prefix, options)
    return storage
