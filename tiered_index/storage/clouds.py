"""Objects in Google's and Azure's stores (`gs://bucket/prefix`, `az://container/prefix`), through obstore.

Put-if-absent is a put at generation 0 (Google) or with `If-None-Match: *` (Azure). Credentials come from obstore's own
chains: `GOOGLE_*` and `AZURE_*` variables, Google's default credentials, the machine's identity. No proxy is used.
obstore has no multipart upload whose parts different processes send. A part is therefore an object below
`prefix/~uploads/`, where no valid name is. `complete_upload` reads the parts and writes them as one object, atomically.

Threads: any number. A process that was forked after obstore was loaded can't use these storages: every call raises.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

from msgspec import Struct

from tiered_index.errors import (
    ConfigError,
    InvalidArgument,
    ObjectArchived,
    ObjectExists,
    ObjectNotFound,
    StorageMisconfigured,
    TieredIndexError,
)
from tiered_index.storage.base import (
    PAGE,
    RANGES,
    Bytes,
    ObjectInfo,
    PartInfo,
    StorageOptions,
    UploadHandle,
    check_name,
    check_part,
    check_parts,
    check_prefix,
    check_range,
    chosen_uploads,
)
from tiered_index.storage.buckets import FEWEST_CONNECTIONS, BucketStorage
from tiered_index.storage.context import sending, wasted
from tiered_index.storage.obstores import NO_RETRIES, answered, client_options, errors, obstore, went_elsewhere
from tiered_index.storage.retry import PassingFault, RequestFault, RetryLoop

_UPLOADS = "~uploads/"
_UPLOAD_ID = re.compile(r"[0-9a-f]{32}")
_CHUNK_BYTES = 8 << 20
# Seconds to wait for the next bytes of a response
_READ_TIMEOUT_S = 30.0
# The same for bodies from this size on. obstore counts the time in which it sends the body, too
_LONG_BYTES = 1 << 20
_WRITE_TIMEOUT_S = 600.0
_CODE = re.compile(r"<Code>(\w+)</Code>")
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted", "AccountIsDisabled"}
_EXISTS = {"BlobAlreadyExists", "PreconditionFailed", "ConditionNotMet"}
_THROTTLED = {429, 503}
_AUTHORITIES = ("AZURE_AUTHORITY_HOST", "AZURE_STORAGE_AUTHORITY_HOST")
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class GoogleOptions(StorageOptions, Struct, frozen=True, kw_only=True):
    """`endpoint_url` is the address of the service; None: Google's."""

    uri_parameters: ClassVar[tuple[str, ...]] = ("endpoint_url",)
    endpoint_url: str | None = None


class AzureOptions(StorageOptions, Struct, frozen=True, kw_only=True):
    """The storage account (None: `AZURE_STORAGE_ACCOUNT_NAME`) and its address (None: Azure's for the account)."""

    uri_parameters: ClassVar[tuple[str, ...]] = ("account", "endpoint_url")
    account: str | None = None
    endpoint_url: str | None = None


class CloudStorage(BucketStorage):
    """A bucket or container."""

    # The folder of uploads, an upload id (32), a part number (5) and the slashes
    _further_bytes = len(_UPLOADS) + 40
    # Requests with which obstore begins an upload in chunks
    _starts: ClassVar[int]

    def __init__(
        self, bucket: str, prefix: str = "", options: Any = None, *, connections: int = FEWEST_CONNECTIONS
    ) -> None:
        """Open the storage without a request. Raises `ConfigError`, for example if obstore is not installed."""
        super().__init__(bucket, prefix, options or self.options_type(), connections=connections)
        module = obstore()
        if module is None:
            raise ConfigError(
                f"{self.scheme}:// needs obstore (pip install 'tiered_index[object]'), and a process that was not "
                "forked after obstore was loaded"
            )
        endpoint = self.options.endpoint_url
        host = urlsplit(endpoint).hostname if endpoint else None

        def opened(read_timeout_s: float) -> Any:
            client = client_options(
                [*([host] if host else []), *self._hosts()],
                connections,
                allow_http=endpoint is not None and endpoint.startswith("http://"),
                read_timeout_s=read_timeout_s,
            )
            return self._opened(module, {"client_options": client, "retry_config": NO_RETRIES})

        try:
            self._store, self._writes = opened(_READ_TIMEOUT_S), opened(_WRITE_TIMEOUT_S)
        except (module.exceptions.BaseError, ValueError) as error:
            # obstore's text may contain the value of a variable, which may be a secret
            raise StorageMisconfigured(
                f"opening {self.uri}: obstore refuses the settings of the environment"
            ) from error
        self._shortfalls: dict[str, str] = {}
        self._loop = RetryLoop(self.uri, 5, 4, 0.1, errors=errors(), translate=_translate)

    def _hosts(self) -> Iterable[str]:
        """Return the hosts that may receive requests and credentials, in addition to the endpoint."""
        raise NotImplementedError

    def _opened(self, module: Any, common: dict[str, Any]) -> Any:
        """Return obstore's store."""
        raise NotImplementedError

    def get(self, name: str) -> bytes:
        return self._read(f"reading {name!r}", name, self._key(name), None)[0]

    def get_range(self, name: str, start: int, length: int) -> bytes:
        key = self._key(name)
        check_range(start, length)
        if not length:
            return b""
        what = f"reading bytes {start}-{start + length - 1} of {name!r}"
        try:
            data, size = self._read(what, name, key, (start, start + length))
        except (InvalidArgument, StorageMisconfigured) as error:
            # Services have different errors for a range that begins at the object's end
            size = self.head(name).size_bytes
            if start + length <= size:
                raise
            raise InvalidArgument(f"{what} in {self.uri}: the object has {size} bytes") from error
        if start + length > size:
            raise InvalidArgument(f"{what} in {self.uri}: the object has {size} bytes")
        return data

    def get_suffix(self, name: str, length: int) -> tuple[bytes, int]:
        """Return the last `length` bytes and the object's size, by a HEAD and a GET: Azure can't read from the end."""
        key = self._key(name)
        check_range(length)
        what = f"reading the last {length} bytes of {name!r}"

        def act(module: Any) -> tuple[bytes, int]:
            found = module.head(self._store, key)
            size = int(found["size"])
            if not min(length, size):
                return b"", size
            sending()
            asked = max(0, size - length), size
            try:
                return self._range(module, what, key, asked, if_match=found["e_tag"])
            except module.exceptions.PreconditionError as error:
                raise PassingFault(f"{what} in {self.uri}: the object was replaced between two requests") from error

        return self._call(what, name, act)

    def put(self, name: str, data: Bytes) -> None:
        self._put(f"writing {name!r}", name, self._key(name), data, "overwrite")

    def put_if_absent(self, name: str, data: Bytes) -> None:
        """Store `data` if `name` does not exist. Raises `ObjectExists`, also if the response to an own successful
        request was lost and its repeat finds the object.
        """
        self._put(f"writing {name!r}", name, self._key(name), data, "create")

    def head(self, name: str) -> ObjectInfo:
        found = self._head(name, self._key(name))
        return ObjectInfo(name, int(found["size"]), _epoch_ms(found))

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix, start_after)
        start = self._base + start_after if start_after else ""
        for key, found in self._listed(f"listing {prefix!r}", self._base + prefix, start):
            if name := self._name(key):
                yield ObjectInfo(name, int(found["size"]), _epoch_ms(found))

    def foreign_keys(self) -> Iterator[str]:
        for key, _ in self._listed("listing all keys", self._base, ""):
            if self._name(key) is None and not key.startswith(self._base + _UPLOADS):
                yield key.removeprefix(self._base)

    def delete(self, name: str) -> None:
        self._delete(name, self._key(name))

    def begin_upload(self, name: str) -> UploadHandle:
        upload_id = uuid.uuid4().hex
        key = self._part_key(UploadHandle(name, upload_id, 0), 0)
        # not "create": a repeat after a lost response would find the object of the first request
        self._put(f"starting an upload of {name!r}", name, key, b"", "overwrite")
        return UploadHandle(name, upload_id, _epoch_ms(self._head(name, key)))

    def upload_part(self, handle: UploadHandle, number: int, data: Bytes) -> PartInfo:
        check_part(number)
        self._head(handle.name, self._part_key(handle, 0))
        key = self._part_key(handle, number)
        tag = self._put(f"uploading part {number} of {handle.name!r}", handle.name, key, data, "overwrite")
        return PartInfo(number, tag, memoryview(data).nbytes)

    def complete_upload(self, handle: UploadHandle, parts: Sequence[PartInfo]) -> None:
        """Publish the object: read the parts and write them as one object. Drop parts that are not named."""
        ordered = check_parts(handle.name, parts, self.min_part_bytes)
        self._head(handle.name, self._part_key(handle, 0))
        for part in ordered:
            try:
                found = self._head(handle.name, self._part_key(handle, part.number))
            except ObjectNotFound:
                found = {"size": -1, "e_tag": ""}
            if (int(found["size"]), found["e_tag"]) != (part.size_bytes, part.etag):
                raise InvalidArgument(f"part {part.number} of {handle.name!r} was not uploaded with that tag")
        doing, key = f"completing {handle.name!r}", self._key(handle.name)
        # `_call` counts one request. If the object is longer than a chunk, obstore sends one per chunk and a last one.
        size = sum(part.size_bytes for part in ordered)
        further = self._starts + -(-size // _CHUNK_BYTES) if size >= _CHUNK_BYTES else 0

        def write(module: Any) -> None:
            for _ in range(further):
                sending()
            writer = module.open_writer(self._writes, key, buffer_size=_CHUNK_BYTES, max_concurrency=4)
            for part in ordered:
                what = f"reading part {part.number} of {handle.name!r}"
                writer.write(self._read(what, handle.name, self._part_key(handle, part.number), None)[0])
            # publishes the object
            writer.close()

        self._call(doing, handle.name, write)
        self.abort_upload(handle)

    def abort_upload(self, handle: UploadHandle) -> None:
        folder = f"{self._base}{_UPLOADS}{handle.upload_id}/"
        if _UPLOAD_ID.fullmatch(handle.upload_id):
            # Delete part 0, the mark of the start, last: an upload with parts stays in listings
            for key, _ in reversed([*self._listed(f"aborting an upload of {handle.name!r}", folder, "")]):
                self._delete(handle.name, key)

    def list_uploads(self, prefix: str = "", *, older_than_ms: int | None = None) -> Iterator[UploadHandle]:
        check_prefix(prefix)
        folder = self._base + _UPLOADS
        begun: dict[str, UploadHandle] = {}
        for key, found in self._listed("listing unfinished uploads", folder, ""):
            upload_id, _, rest = key.removeprefix(folder).partition("/")
            begun.setdefault(upload_id, UploadHandle(rest.partition("/")[2], upload_id, _epoch_ms(found)))
        return chosen_uploads(begun.values(), prefix, older_than_ms)

    def _part_key(self, handle: UploadHandle, number: int) -> str:
        if not _UPLOAD_ID.fullmatch(handle.upload_id):
            raise ObjectNotFound(handle.name, f"the unfinished uploads of {self.uri}")
        return f"{self._base}{_UPLOADS}{handle.upload_id}/{number:05}/{check_name(handle.name)}"

    def _call(self, doing: str, name: str, act: Callable[[Any], _T], *, is_further: bool = False) -> _T:
        """Return `act(obstore)`, repeated as `RetryLoop` says, and count it as one request.

        `is_further`: `act` gets the page after a full one. That is a request only if there is such a page.
        """

        def attempt() -> _T:
            module = obstore()
            if module is None:
                raise StorageMisconfigured(
                    f"{self.uri} can't be used in this process, which was forked after obstore was loaded: start a "
                    "new process"
                )
            if not is_further:
                sending()
            result: _T = act(module)
            if is_further and result:
                sending()
            return result

        return self._loop.run(doing, name, attempt)

    def _read(self, what: str, name: str, key: str, asked: tuple[int, int] | None) -> tuple[bytes, int]:
        """Return the object's bytes in the range `asked` (start, end), or all for None; and the object's size.

        A range beyond the object's end gives fewer bytes.
        """

        def act(module: Any) -> tuple[bytes, int]:
            if asked is not None:
                return self._range(module, what, key, asked)
            answer = module.get(self._store, key)
            size = int(answer.meta["size"])
            return self._body(what, answer, size), size

        return self._call(what, name, act)

    def _range(self, module: Any, what: str, key: str, asked: tuple[int, int], **condition: str) -> tuple[bytes, int]:
        """Send a request for the range `asked` (start, end). Return its bytes within the object, and the object's size.

        If the service answers with the whole object, drop the bytes before the range.
        """
        start, end = asked
        if RANGES not in self._shortfalls:
            try:
                answer = module.get(self._store, key, options={"range": asked, **condition})
                size = int(answer.meta["size"])
                return self._body(what, answer, min(end, size) - start), size
            except module.exceptions.BaseError as error:
                if "non-partial response" not in str(error):
                    raise
                instead = "answers ranges with whole objects: each read takes all bytes of the object before its range"
                self._shortfalls[RANGES] = instead
                _log.warning("%s: the service %s", self.uri, instead)
            sending()
        answer, position, pieces = module.get(self._store, key, options=condition), 0, []
        size = int(answer.meta["size"])
        for block in answer.stream(_CHUNK_BYTES):
            pieces.append(bytes(block)[max(0, start - position) : max(0, end - position)])
            position += len(block)
            if position >= end:
                break
        if position < min(end, size):
            problem = f"{what} in {self.uri}: a body of {position} bytes instead of {size}"
            raise PassingFault(problem, wasted_bytes=position)
        wasted(min(start, size))
        return b"".join(pieces), size

    def shortfalls(self) -> Mapping[str, str]:
        return dict(self._shortfalls)

    def _body(self, what: str, answer: Any, length: int) -> bytes:
        # Ask for one byte more: it shows a body that is too long without reading the rest
        data: bytes = next(iter(answer.stream(length + 1)), b"")
        if len(data) != length:
            problem = f"{what} in {self.uri}: a body of {len(data)} bytes instead of {length}"
            raise PassingFault(problem, wasted_bytes=length)
        return data

    def _put(self, doing: str, name: str, key: str, data: Bytes, mode: str) -> str:
        """Store an object and return its tag."""
        body = data if isinstance(data, bytes) else bytes(data)
        # a lease or a log record must not wait for long
        store = self._writes if len(body) >= _LONG_BYTES else self._store
        put = self._call(doing, name, lambda module: module.put(store, key, body, mode=mode, use_multipart=False))
        return str(put["e_tag"])

    def _head(self, name: str, key: str) -> dict[str, Any]:
        found: dict[str, Any] = self._call(f"looking at {name!r}", name, lambda module: module.head(self._store, key))
        return found

    def _delete(self, name: str, key: str) -> None:
        try:
            self._call(f"deleting {name!r}", name, lambda module: module.delete(self._store, key))
        except ObjectNotFound:
            pass

    def _listed(self, doing: str, prefix: str, start: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield key and description of each key that begins with `prefix` and sorts after `start`, in order of key."""
        # obstore lists whole folders
        folder = prefix.rpartition("/")[0] or None
        last, pages = start, None

        def page(module: Any) -> Sequence[dict[str, Any]]:
            nonlocal pages
            found, pages = pages, None
            if found is None:
                offset = last.rstrip("/") if "//" not in last else ""
                found = module.list(self._store, folder, offset=offset or None, chunk_size=PAGE)
            items: Sequence[dict[str, Any]] = next(found, ())
            pages = found
            return items

        if "//" in prefix:
            return
        is_further = False
        while items := self._call(doing, "", page, is_further=is_further):
            is_further = True
            for item in items:
                key = str(item["path"])
                if key <= last:
                    if key > start:
                        raise StorageMisconfigured(f"{self.uri}: the service lists {key!r} after {last!r}")
                    continue
                last = key
                if key.startswith(prefix):
                    yield key, item
            if len(items) < PAGE or (not last.startswith(prefix) and last > prefix):
                return


class GoogleStorage(CloudStorage):
    """A bucket of Google Cloud Storage."""

    scheme = "gs"
    _starts = 1
    options_type = GoogleOptions

    def _hosts(self) -> Iterable[str]:
        # accounts.google.com renews a user's own default credentials (`gcloud auth application-default login`)
        return ("googleapis.com", "accounts.google.com", "metadata.google.internal", "metadata", "169.254.169.254")

    def _opened(self, module: Any, common: dict[str, Any]) -> Any:
        if self.options.endpoint_url:
            common["base_url"] = self.options.endpoint_url
        return module.store.GCSStore(self.bucket, **common)


class AzureStorage(CloudStorage):
    """A container of an account of Azure Blob Storage."""

    scheme = "az"
    _starts = 0
    options_type = AzureOptions

    @functools.cached_property
    def _account(self) -> str:
        account = self.options.account or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
        if not account:
            raise ConfigError("az:// needs the storage account: az://container/prefix?account=NAME")
        return str(account)

    def _hosts(self) -> Iterable[str]:
        # obstore requests tokens from these hosts; AKS sets the variables for workload identities
        authorities = (os.environ.get(name, "") for name in _AUTHORITIES)
        return (
            f"{self._account}.blob.core.windows.net",
            "login.microsoftonline.com",
            *(host for authority in authorities if (host := urlsplit(authority).hostname)),
            "169.254.169.254",
            "localhost",
            "127.0.0.1",
        )

    def _opened(self, module: Any, common: dict[str, Any]) -> Any:
        if self.options.endpoint_url:
            common["endpoint"] = self.options.endpoint_url
        return module.store.AzureStore(self.bucket, account_name=self._account, **common)


def _epoch_ms(found: dict[str, Any]) -> int:
    seconds: float = found["last_modified"].timestamp()
    return round(seconds * 1000)


def _translate(error: Exception, *, doing: str, uri: str, name: str) -> TieredIndexError:
    """Return the typed error for an error of obstore."""
    text = str(error)
    code = found[1] if (found := _CODE.search(text)) else ""
    told = answered(text)
    status = told[0] if told else 0
    said = f"{doing} in {uri}: {status or ''} {code or text.partition(chr(10))[0]}"
    if code in _NO_BUCKET:
        return StorageMisconfigured(f"{said}: create the bucket or correct the storage's URI")
    if isinstance(error, FileNotFoundError):
        return ObjectNotFound(name, uri)
    if went_elsewhere(text):
        return StorageMisconfigured(
            f"{said}: the service redirects to a host that is neither the endpoint nor a source of credentials: "
            "correct the endpoint"
        )
    if "missing from response" in text:
        return StorageMisconfigured.lacking(f"{said}: the service leaves out a header that reads need")
    if code == "BlobArchived":
        return ObjectArchived(f"{said}: the object is archived: rehydrate it first")
    if code.startswith("Lease"):
        return StorageMisconfigured(f"{said}: the blob or container has a lease: break the lease")
    if status in {409, 412} and (code in _EXISTS or status == 412):
        return ObjectExists(name, uri)
    if status == 416:
        return InvalidArgument(said)
    if status == 409 or "Requested " in text or "body error" in text:
        return PassingFault(said)
    if status >= 500 or status in _THROTTLED or "error sending request" in text:
        return RequestFault(said, is_throttled=status in _THROTTLED)
    advice = "grant it to the identity of these credentials" if status in {401, 403} else "correct the set-up"
    return StorageMisconfigured(f"{said}: {advice}")
