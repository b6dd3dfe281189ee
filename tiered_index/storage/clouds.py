"""Objects in Google's and Azure's stores (`gs://bucket/prefix`, `az://container/prefix`), through obstore.

Put-if-absent is a put at generation 0 (Google) or with `If-None-Match: *` (Azure). A large object is sent in parts,
each byte once. `cloud_settings` finds endpoint and credentials. No proxy is used.

Threads: any number. A process that was forked after its parent used obstore can't use these storages: every call
raises `StorageMisconfigured`.
"""

from __future__ import annotations

import contextlib
import os
import queue
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar
from urllib.parse import urlsplit

from msgspec import Struct

from tiered_index.base.call import check_deadline, sending
from tiered_index.base.threads import DaemonPool
from tiered_index.errors import InvalidArgument, ObjectNotFound, StorageMisconfigured
from tiered_index.storage.base import (
    PART_BYTES,
    BufferedWriter,
    Bytes,
    ObjectInfo,
    StorageOptions,
    Writer,
    check_endpoint,
)
from tiered_index.storage.buckets import BucketStorage, Extent
from tiered_index.storage.cloud_settings import SETTINGS, CloudSettings, azure_settings, google_settings
from tiered_index.storage.faults import Service
from tiered_index.storage.obstores import NO_RETRIES, NOT_NAMED, StoreReads, client_options, obstore
from tiered_index.storage.retry import LONGEST_WAIT_S, RetryLoop

# The policy of `RetryLoop`. Only obstore can repeat a part: it sends several at once, and `RetryLoop` whole calls
_RETRIES = {
    "max_retries": RetryLoop.max_attempts - 1,
    "backoff": {
        "init_backoff": timedelta(seconds=2 * RetryLoop.backoff_s),
        "max_backoff": timedelta(seconds=LONGEST_WAIT_S),
        "base": 2,
    },
    "retry_timeout": timedelta(hours=1),
}
# Most idle connections that stay open
_CONNECTIONS = 64
# Seconds between two looks whether an upload has failed while its parts wait
_LOOK_S = 0.1
# Seconds to wait for the next bytes of a response
READ_TIMEOUT_S = 30.0
# The same for bodies from this size on. obstore counts the time in which it sends the body, too
_LONG_BYTES = 1 << 20
_WRITE_TIMEOUT_S = 600.0
_AUTHORITIES = ("AZURE_AUTHORITY_HOST", "AZURE_STORAGE_AUTHORITY_HOST")


class GoogleOptions(StorageOptions, Struct, frozen=True, kw_only=True):
    """`endpoint_url` is the address of the service; None: that of the environment (docs/clouds.md)."""

    uri_parameters: ClassVar[tuple[str, ...]] = ("endpoint_url",)
    endpoint_url: str | None = None

    def __post_init__(self) -> None:
        if self.endpoint_url is not None:
            check_endpoint(self.endpoint_url)


class AzureOptions(StorageOptions, Struct, frozen=True, kw_only=True):
    """The storage account and its address; None: those of the environment (docs/clouds.md)."""

    uri_parameters: ClassVar[tuple[str, ...]] = ("account", "endpoint_url")
    account: str | None = None
    endpoint_url: str | None = None

    def __post_init__(self) -> None:
        if self.endpoint_url is not None:
            check_endpoint(self.endpoint_url)


def _lacking(interface: str, credentials: str) -> Service:
    """Return the remedies for a service that should have an interface."""
    return Service(
        wrong=f"the server lacks {interface}: correct the endpoint, or use another server",
        denied="grant it to the identity of these credentials",
        redirected="the service redirects to a host that is neither the endpoint nor a source of credentials: "
        "correct the endpoint",
        odd="the service leaves out a header that reads need, or does not honour ranges",
        no_credentials=f"no credentials are set, and this machine has no identity: set {credentials}; {SETTINGS}",
        untrusted="set SSL_CERT_FILE to a file with the certificate authority of this endpoint",
    )


class CloudStorage(BucketStorage):
    """A bucket or container."""

    # Requests with which obstore begins an upload in parts
    _starts: ClassVar[int]
    _service: ClassVar[Service]
    # Whether the marker that obstore follows is the service's only sign of a further page
    _sees_ends: ClassVar[bool]

    def __init__(self, bucket: str, prefix: str = "", options: Any = None) -> None:
        """Open the storage without a request. Raises `ConfigError`, for example if obstore is not installed."""
        super().__init__(bucket, prefix, options or self.options_type())
        module, settings = self._module(), self._settings(os.environ)
        host = urlsplit(settings.endpoint).hostname if settings.endpoint else None

        def opened(read_timeout_s: float, retries: dict[str, Any]) -> Any:
            client = client_options(
                [*([host] if host else []), *self._hosts(settings)],
                _CONNECTIONS,
                allow_http=settings.endpoint is not None and settings.endpoint.startswith("http://"),
                read_timeout_s=read_timeout_s,
            )
            return self._opened(module, settings, {"client_options": client, "retry_config": retries})

        try:
            self._store, self._writes = opened(READ_TIMEOUT_S, NO_RETRIES), opened(_WRITE_TIMEOUT_S, NO_RETRIES)
            self._uploads = opened(_WRITE_TIMEOUT_S, _RETRIES)
        except (module.exceptions.BaseError, ValueError) as error:
            # obstore's text may contain the value of a variable, which may be a secret
            raise StorageMisconfigured(
                f"opening {self.uri}: obstore refuses the credentials of the environment: {SETTINGS}"
            ) from error
        bucket_url = f"{settings.endpoint}/{self.bucket}" if settings.endpoint else None
        self.client = _CloudReads(self._store, self.uri, self._service, bucket_url, sees_ends=self._sees_ends)

    def _key(self, name: str) -> str:
        """As `BucketStorage._key`. Raises `InvalidArgument` for a key that obstore takes for another one."""
        if NOT_NAMED.search(key := super()._key(name)):
            raise InvalidArgument(
                f"{self.uri}: object {name!r} can't be read: its name has an empty part, `.`, `..`, a slash at its "
                "start or end, or a control character. Rename it"
            )
        return key

    @abstractmethod
    def _settings(self, environment: Mapping[str, str]) -> CloudSettings:
        """Return endpoint and credentials. Raises `ConfigError`, `StorageMisconfigured`."""

    @abstractmethod
    def _hosts(self, settings: CloudSettings) -> Iterable[str]:
        """Return the hosts that may receive requests and credentials, in addition to the endpoint."""

    @abstractmethod
    def _opened(self, module: Any, settings: CloudSettings, common: dict[str, Any]) -> Any:
        """Return obstore's store."""

    @property
    def _reads(self) -> _CloudReads:
        self._module()
        return self.client

    def put(self, name: str, data: Bytes) -> None:
        self._put(name, data, "overwrite")

    def put_if_absent(self, name: str, data: Bytes) -> None:
        """Store `data` if `name` does not exist. Raises `ObjectExists`, also if the response to an own successful
        request was lost and its repeat finds the object.
        """
        self._put(name, data, "create")

    def _put(self, name: str, data: Bytes, mode: str) -> None:
        key, doing, body = self._key(name), f"writing {name!r}", data if isinstance(data, bytes) else bytes(data)
        # a lease or a log record must not wait for long
        store = self._writes if len(body) >= _LONG_BYTES else self._store
        options = {"mode": mode, "use_multipart": False}
        try:
            self._read(doing, name, lambda client: client.send("put", store, key, body, **options))
        except ObjectNotFound as error:
            # a service with this API names the reason, such as a missing bucket
            raise StorageMisconfigured.lacking(
                f"{doing} in {self.uri}: 404 without a reason: {self.client.service.wrong}"
            ) from error

    def delete_many(self, names: Iterable[str]) -> None:
        """Remove the objects, a request each."""
        for name in names:
            key = self._key(name)

            def delete(client: _CloudReads, key: str = key) -> None:
                client.send("delete", self._store, key)

            with contextlib.suppress(ObjectNotFound):
                self._read(f"deleting {name!r}", name, delete)

    def open_writer(self, name: str) -> Writer:
        return _CloudWriter(self, name)

    def upload(self, key: str, parts: Iterator[Bytes]) -> tuple[Future[Any], int]:
        """Start a thread that sends a large object. Return its end, and the requests with which it begins."""
        self._reads.check_port()
        send = partial(self._module().put, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=4)
        return DaemonPool(1, "tiered-index-upload").submit(send, self._uploads, key, parts), self._starts

    def _module(self) -> Any:
        """Return obstore. Raises `StorageMisconfigured` in a process that was forked after its parent used obstore."""
        module = obstore()
        if module is None:
            raise StorageMisconfigured(
                f"{self.uri} can't be used in this process, which was forked after obstore was used: start it by spawn "
                "(multiprocessing), load the application in each worker (gunicorn without --preload), or fork before "
                "the first use"
            )
        return module


class _CloudReads(StoreReads):
    """Reads one bucket."""

    _lists_anew = False
    # for the identity of the machine; others are POST
    _of_roles = r"token request: Error performing GET "
    # errors of services for tokens are JSON
    _bodies = StoreReads._bodies + r"|\s*\{"

    def __init__(self, store: Any, uri: str, service: Service, bucket_url: str | None, *, sees_ends: bool) -> None:
        super().__init__(uri, partial(RetryLoop, uri), bucket_url or "")
        self.sees_ends, self._is_trusted = sees_ends, bucket_url is None
        self._store, self.service = store, service

    def get(self, key: str, extent: Extent, what: str) -> tuple[bytes, int]:
        try:
            return super().get(key, extent, what)
        except self.errors as error:
            refused = self.translate(error, doing=what, uri=self._uri, name=key)
            # services have different errors for a range that begins at the object's end
            may_be_short = isinstance(refused, InvalidArgument | StorageMisconfigured)
            if extent and may_be_short and (headers := self.head(key)) and extent[1] > headers[0]:
                return b"", headers[0]
            raise

    def pages(self, prefix: str, after: str) -> Iterator[Sequence[ObjectInfo]]:
        # no name has two slashes in a row, which obstore takes for one
        return iter(()) if "//" in prefix else super().pages(prefix, after)


class _CloudWriter(BufferedWriter):
    """Sends an object by one put, or more than `PART_BYTES` in parts, four at once, by a thread of its own.

    obstore takes the parts from an iterator, and repeats failed ones. It drops the upload if a part fails in the end,
    or if the iterator raises: it has no other way to drop one.
    """

    def __init__(self, storage: CloudStorage, name: str) -> None:
        super().__init__(name)
        self._storage, self._key = storage, storage._key(name)
        # the next part; empty: there are no more; None: drop the upload
        self._parts: queue.Queue[Bytes | None] = queue.Queue(1)
        self._upload: Future[Any] | None = None

    def _send_part(self) -> None:
        with self._translated("writing"):
            if self._upload is None:
                self._upload, requests = self._storage.upload(self._key, _taken(self._parts))
                for _ in range(requests):
                    sending()
            sending()
            self._hand(self._upload, self._held)
            if self._upload.done():
                self._upload.result()

    def _finish(self) -> None:
        if self._upload is None:
            self._storage.put(self.name, self._held)
            return
        self._send()
        with self._translated("completing"):
            sending()
            self._hand(self._upload, b"")
            self._upload.result()

    def _hand(self, upload: Future[Any], part: Bytes | None) -> None:
        """Give the thread the next part, unless an error has ended the upload."""
        while not upload.done():
            with contextlib.suppress(queue.Full):
                self._parts.put(part, timeout=_LOOK_S)
                break

    def _drop(self) -> None:
        super()._drop()
        upload, self._upload = self._upload, None
        if upload is not None:
            self._hand(upload, None)
            upload.exception()

    @contextlib.contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        check_deadline(f"{doing} {self.name!r} in {self._storage.uri}")
        try:
            yield
        except self._storage.client.errors as error:
            context = {"doing": f"{doing} {self.name!r}", "uri": self._storage.uri, "name": self.name}
            raise self._storage.client.translate(error, **context) from error


def _taken(parts: queue.Queue[Bytes | None]) -> Iterator[Bytes]:
    """Yield the parts of an upload, without a reference to its writer, so that a forgotten writer is collected."""
    while part := parts.get():
        yield part
    if part is None:
        raise InvalidArgument("the upload is dropped")


class GoogleStorage(CloudStorage):
    """A bucket of Google Cloud Storage."""

    scheme, _service = "gs", _lacking("Google's XML API, as fake-gcs-server does", "GOOGLE_APPLICATION_CREDENTIALS")
    _starts, _sees_ends = 1, False
    options_type = GoogleOptions

    def _settings(self, environment: Mapping[str, str]) -> CloudSettings:
        return google_settings(self.options.endpoint_url, environment)

    def _hosts(self, settings: CloudSettings) -> Iterable[str]:
        # accounts.google.com renews a user's own default credentials (`gcloud auth application-default login`)
        return ("googleapis.com", "accounts.google.com", "metadata.google.internal", "metadata", "169.254.169.254")

    def _opened(self, module: Any, settings: CloudSettings, common: dict[str, Any]) -> Any:
        if settings.endpoint:
            common["base_url"] = settings.endpoint
        return module.store.GCSStore(self.bucket, **settings.arguments, **common)


class AzureStorage(CloudStorage):
    """A container of an account of Azure Blob Storage."""

    scheme, _service = "az", _lacking("Azure's REST API of blobs", "AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN")
    _starts, _sees_ends = 0, True
    _kind = "container"
    options_type = AzureOptions

    def _settings(self, environment: Mapping[str, str]) -> CloudSettings:
        return azure_settings(self.options.account, self.options.endpoint_url, environment)

    def _hosts(self, settings: CloudSettings) -> Iterable[str]:
        # obstore requests tokens from these hosts; AKS sets the variables for workload identities
        authorities = (os.environ.get(name, "") for name in _AUTHORITIES)
        return (
            f"{settings.arguments['account_name']}.blob.core.windows.net",
            "login.microsoftonline.com",
            *(host for authority in authorities if (host := urlsplit(authority).hostname)),
            "169.254.169.254",
            "localhost",
            "127.0.0.1",
        )

    def _opened(self, module: Any, settings: CloudSettings, common: dict[str, Any]) -> Any:
        if settings.endpoint:
            common["endpoint"] = settings.endpoint
        return module.store.AzureStore(self.bucket, **settings.arguments, **common)
