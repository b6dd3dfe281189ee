"""Objects in an S3 bucket (`s3://bucket/prefix`): Amazon's or any service that speaks its API.

The service must have put-if-absent (`If-None-Match: *`), reads that see earlier writes, and listings in order of UTF-8
bytes. The backend works round a service that ignores ranges or `start-after`, or refuses bulk deletes. Threads: any
number; after a fork, open a new storage (readers do so themselves). `PartInfo.etag` is the service's tag and, after a
space, the part's CRC32 if the service returned one. An upload that was begun with a checksum algorithm is completed
with the checksum of each part.
"""

from __future__ import annotations

import contextlib
import pkgutil
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from itertools import islice
from typing import TYPE_CHECKING, Any

from tiered_index.errors import InvalidArgument, ObjectNotFound, StorageMisconfigured, StorageUnavailable
from tiered_index.storage.base import (
    BULK_DELETES,
    PAGE,
    START_AFTER,
    Bytes,
    ObjectInfo,
    PartInfo,
    UploadHandle,
    check_part,
    check_parts,
    check_prefix,
    check_range,
)
from tiered_index.storage.buckets import FEWEST_CONNECTIONS, BucketStorage
from tiered_index.storage.context import wasted
from tiered_index.storage.obstores import answered, errors, obstore
from tiered_index.storage.s3 import light
from tiered_index.storage.s3.options import NO_S3, S3Options

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

    from tiered_index.storage.s3.reads import Reads

_NAMES_SHOWN = 3
# Codes of a service that does not accept bulk deletes as they are sent
_NO_BULK = {"MissingContentMD5", "NotImplemented", "MethodNotAllowed"}
_OF_COMPLETION = {"Bucket", "Key", "Location", "ETag"}
_IN_LISTINGS = {"IsTruncated", "Name", "Bucket", "Contents", "Uploads"}


class S3Storage(BucketStorage):
    """A bucket, through boto3; ranges are read through obstore.

    If environment variables alone describe the bucket, all reads use obstore at first. boto3 is loaded by the first
    call that obstore can't make or whose response is not as expected.
    """

    scheme = "s3"
    min_part_bytes = 5 << 20
    options_type = S3Options

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        options: S3Options | None = None,
        *,
        connections: int = FEWEST_CONNECTIONS,
        sleep: Callable[[float], None] = time.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """Open the storage without a request. `sleep` and `uniform` make the waits before repeats."""
        options = options or S3Options()
        super().__init__(bucket, prefix, options, connections=options.max_pool_connections or connections)
        self._waits = sleep, uniform
        # None: boto3 is used
        self._light = light.of_environment(bucket, options, self.connections)
        self._loaded: Reads | None = None
        self._loading = threading.Lock()
        encryption = {"ServerSideEncryption": options.sse, "SSEKMSKeyId": options.sse_kms_key_id}
        self._encryption = {name: value for name, value in encryption.items() if value is not None}
        self._bucket_seen = False
        # Once the service has refused a bulk delete
        self._deletes_singly = False
        if self._light is None:
            # reports a wrong set-up now
            _ = self._reads

    @property
    def _reads(self) -> Reads:
        """The requests through boto3. The first call loads it; from then on all requests use it."""
        with self._loading:
            if self._loaded is None:
                self._light = None
                opened = pkgutil.resolve_name("tiered_index.storage.s3.reads:Reads")
                self._loaded = opened(self.uri, self.bucket, self.options, self.connections, *self._waits)
            return self._loaded

    @property
    def client(self) -> S3Client:
        """The boto3 client that sends the requests."""
        return self._reads.client

    def get(self, name: str) -> bytes:
        """Return the whole object. boto3 compares it with the service's checksum; obstore does not."""
        key = self._key(name)
        if (found := self._get_light(name, key, {})) is not None:
            return found[0]
        return self._reads.whole(name, key)

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """Return exactly `length` bytes from `start`, by one verified range GET."""
        key = self._key(name)
        check_range(start, length)
        if not length:
            return b""
        what, asked = f"reading bytes {start}-{start + length - 1} of {name!r}", (start, start + length)
        found = self._get_light(name, key, {"range": asked}, length) or self._reads.range(what, name, key, asked)
        if asked[1] > found[1]:
            raise InvalidArgument(f"{what} in {self.uri}: the object has {found[1]} bytes")
        return found[0]

    def get_suffix(self, name: str, length: int) -> tuple[bytes, int]:
        """Return the last `length` bytes and the object's size, by one GET (two requests for an empty object)."""
        key = self._key(name)
        check_range(length)
        if length == 0:
            return b"", self.head(name).size_bytes
        return self._reads.suffix(name, key, length, lambda: self.head(name).size_bytes)

    def _get_light(
        self, name: str, key: str, asked: Mapping[str, Any], length: int | None = None
    ) -> tuple[bytes, int] | None:
        """Return bytes of an object (`length`, or all) and its size, through obstore; None: use boto3."""
        if (way := self._light) is None or obstore() is None:
            return None
        try:
            data, size = light.get(way.store, key, asked, length)
            if len(data) == (size if length is None else length) or (length is not None and asked["range"][1] > size):
                return data, size
            wasted(len(data))
        except errors() as error:
            told = answered(str(error))
            if told is not None and told[0] == HTTPStatus.NOT_FOUND and "<Code>NoSuchKey</Code>" in told[1]:
                raise ObjectNotFound(name, self.uri) from error
        return None

    def put(self, name: str, data: Bytes) -> None:
        """Store `data` in one request, with a CRC32 that the service checks; at most 5 GiB."""
        self._put(name, data)

    def put_if_absent(self, name: str, data: Bytes) -> None:
        """Store `data` if `name` does not exist. Raises `ObjectExists`, also if the response to an own successful
        request was lost and its repeat finds the object.
        """
        self._put(name, data, IfNoneMatch="*")

    def head(self, name: str) -> ObjectInfo:
        key = self._key(name)
        try:
            answer = self._reads.send("head_object", f"looking at {name!r}", name, Key=key)
        except ObjectNotFound:
            self._check_bucket()
            raise
        self._bucket_seen = True
        if "ContentLength" in answer and "LastModified" in answer:
            return ObjectInfo(name, int(answer["ContentLength"]), _epoch_ms(answer["LastModified"]))
        # some gateways leave these headers out: a listing has them, too
        key = self._key(name)
        listed = self._reads.send("list_objects_v2", f"looking at {name!r}", name, Prefix=key, MaxKeys=1)
        for item in listed.get("Contents", ()):
            if item.get("Key") == key:
                return self._info(name, item)
        raise ObjectNotFound(name, self.uri)

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield objects in order of name; one request for each 1,000."""
        check_prefix(prefix, start_after)
        if (found := self._list_light(prefix, start_after)) is not None:
            yield from (ObjectInfo(name, one["size"], _epoch_ms(one["last_modified"])) for name, one in found)
            return
        start = self._base + start_after
        asked = {"StartAfter": start} if start_after else {}
        tokens = {"ContinuationToken": "NextContinuationToken"}
        last = ""
        for key, item in self._listed("list_objects_v2", f"listing {prefix!r}", prefix, "Contents", tokens, **asked):
            if key <= last:
                raise StorageMisconfigured(
                    f"{self.uri}: the service lists {key!r} after {last!r}; the engine needs order of name"
                )
            last = key
            if start_after and key <= start:
                self._reads.fell_short(
                    START_AFTER, "ignores start-after: each listing takes a request for every 1,000 earlier objects"
                )
            elif name := self._name(key):
                yield self._info(name, item)

    def _info(self, name: str, item: Mapping[str, Any]) -> ObjectInfo:
        """Return the description of a listed object."""
        listing = "each object of a listing"
        size, modified = self._needed(item, "Size", listing), self._needed(item, "LastModified", listing)
        return ObjectInfo(name, int(size), _epoch_ms(modified))

    def _needed(self, answer: Mapping[str, Any], field: str, what: str) -> Any:
        """Return a field of a response. Raises `StorageMisconfigured` if the response lacks it."""
        if field not in answer:
            raise StorageMisconfigured.lacking(f"{self.uri}: the service leaves out {field} of {what}")
        return answer[field]

    def _list_light(self, prefix: str, start_after: str) -> Sequence[tuple[str, dict[str, Any]]] | None:
        """Return name and description of the listed objects, through obstore; None: use boto3."""
        # obstore lists whole folders
        if (way := self._light) is None or obstore() is None or not prefix.endswith("/"):
            return None
        with contextlib.suppress(*errors()):
            found = light.listed(way.store, self._base + prefix, self._base + start_after if start_after else None)
            return found and [(name, one) for key, one in found if (name := self._name(key))]
        return None

    def delete(self, name: str) -> None:
        self._reads.send("delete_object", f"deleting {name!r}", name, Key=self._key(name))

    def delete_many(self, names: Iterable[str]) -> None:
        """Remove many objects, 1,000 a request. The first request with failures ends the call and names them.

        Once the service has refused such a request as unknown or without MD5, each object is a request.
        """
        keys = iter([self._key(name) for name in names])
        while batch := list(islice(keys, PAGE)):
            doing = f"deleting {len(batch)} objects"
            answer = self._delete_at_once(batch, doing)
            if failures := answer.get("Errors", []):
                codes = sorted({failure.get("Code", "?") for failure in failures})
                shown = ", ".join(repr(failure.get("Key", "?")) for failure in failures[:_NAMES_SHOWN])
                text = f"{doing} in {self.uri}: {len(failures)} failed ({', '.join(codes)}): {shown}"
                if "AccessDenied" in codes:
                    raise StorageMisconfigured(f"{text}: grant s3:DeleteObject")
                raise StorageUnavailable(text)

    def _delete_at_once(self, keys: Sequence[str], doing: str) -> Mapping[str, Any]:
        """Delete objects by one request, or one by one if the service does not accept it. Return the failures."""
        if not self._deletes_singly:
            objects = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
            try:
                return self._reads.send("delete_objects", doing, Delete=objects)
            except (StorageMisconfigured, StorageUnavailable) as error:
                told = getattr(error.__cause__, "response", None) or {}
                refusal = told.get("Error", {})
                if refusal.get("Code") not in _NO_BULK and "Content-MD5" not in refusal.get("Message", ""):
                    raise
            self._deletes_singly = True
            self._reads.fell_short(BULK_DELETES, "refuses bulk deletes: each object is deleted by its own request")
        for key in keys:
            self._reads.send("delete_object", f"deleting {key!r}", key, Key=key)
        return {}

    def begin_upload(self, name: str) -> UploadHandle:
        """Start a multipart upload; `started_ms` is the service's time in whole seconds."""
        checked = {"ChecksumAlgorithm": "CRC32"} if self._reads.sends_crc32 else {}
        asked = {"Key": self._key(name), **checked, **self._encryption}
        answer = self._reads.send("create_multipart_upload", f"starting an upload of {name!r}", name, **asked)
        answered_ms = _answered_ms(answer)
        upload_id = str(self._needed(answer, "UploadId", "an upload that it started"))
        return UploadHandle(name, upload_id, self.now_ms() if answered_ms is None else answered_ms)

    def upload_part(self, handle: UploadHandle, number: int, data: Bytes) -> PartInfo:
        """Store one part, with a CRC32 that the service checks; at most 5 GiB."""
        body = _request_body(data)
        sent = {"PartNumber": check_part(number), "Body": body, **self._reads.checksum(body)}
        answer = self._of_upload("upload_part", f"uploading part {number} of {handle.name!r}", handle, **sent)
        etag = f"{self._needed(answer, 'ETag', 'an uploaded part')} {answer.get('ChecksumCRC32', '')}".rstrip()
        return PartInfo(number, etag, memoryview(data).nbytes)

    def complete_upload(self, handle: UploadHandle, parts: Sequence[PartInfo]) -> None:
        """Publish the object. Raises `ObjectNotFound`, also if the response to an own successful request was lost.

        After a success without content the object is looked up. Raises `StorageUnavailable` if it is not there. A
        caller that must know uses a unique name and then calls `head`. Name every part: Amazon drops others, Ceph's
        gateway refuses the call.
        """
        documents: list[dict[str, Any]] = []
        for part in check_parts(handle.name, parts, self.min_part_bytes):
            etag, _, checksum = part.etag.partition(" ")
            named = {"ChecksumCRC32": checksum} if checksum else {}
            documents.append({"PartNumber": part.number, "ETag": etag, **named})
        doing = f"completing {handle.name!r}"
        answer = self._of_upload("complete_multipart_upload", doing, handle, MultipartUpload={"Parts": documents})
        if answer.keys() & _OF_COMPLETION:
            return
        try:
            size = self.head(handle.name).size_bytes
        except ObjectNotFound:
            size = None
        if size != sum(part.size_bytes for part in parts):
            raise StorageUnavailable(
                f"{doing} in {self.uri}: the service reported success, but the object is not there"
            )

    def abort_upload(self, handle: UploadHandle) -> None:
        with contextlib.suppress(ObjectNotFound):
            self._of_upload("abort_multipart_upload", f"aborting an upload of {handle.name!r}", handle)

    def list_uploads(self, prefix: str = "", *, older_than_ms: int | None = None) -> Iterator[UploadHandle]:
        """Yield unfinished uploads; one request for each 1,000."""
        check_prefix(prefix)
        tokens = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        doing = "listing unfinished uploads"
        for key, item in self._listed("list_multipart_uploads", doing, prefix, "Uploads", tokens):
            upload = "each unfinished upload of a listing"
            started_ms = _epoch_ms(self._needed(item, "Initiated", upload))
            if (name := self._name(key)) and (older_than_ms is None or started_ms < older_than_ms):
                yield UploadHandle(name, str(self._needed(item, "UploadId", upload)), started_ms)

    def now_ms(self) -> int:
        """Return the service's time in whole seconds, from the date of a response, or else as `Storage.now_ms`."""
        if (way := self._light) and (told_ms := way.now_ms(self.options.connect_timeout_s)) is not None:
            return told_ms
        answered_ms = _answered_ms(
            self._reads.send("list_objects_v2", "asking for the time", Prefix=self._base, MaxKeys=1)
        )
        return super().now_ms() if answered_ms is None else answered_ms

    def shortfalls(self) -> Mapping[str, str]:
        loaded = self._loaded
        return {} if loaded is None else dict(loaded.shortfalls)

    def close(self) -> None:
        """Close the client's connections."""
        with self._loading:
            self._light = None
            if self._loaded is not None:
                self._loaded.close()

    def _put(self, name: str, data: Bytes, **condition: str) -> None:
        body = _request_body(data)
        sent = {"Key": self._key(name), "Body": body, **self._reads.checksum(body)}
        self._reads.send("put_object", f"writing {name!r}", name, **sent, **self._encryption, **condition)

    def _check_bucket(self) -> None:
        """Raise `StorageMisconfigured` if the bucket is missing: a HEAD's 404 does not say whether bucket or object."""
        if self._bucket_seen:
            return
        try:
            self._reads.send("head_bucket", "looking at the bucket")
        except ObjectNotFound as error:
            raise StorageMisconfigured(
                f"there is no bucket {self.bucket!r} for {self.uri}: create it or correct the URI"
            ) from error
        except StorageMisconfigured:
            return  # access denied: the bucket exists
        self._bucket_seen = True

    def foreign_keys(self) -> Iterator[str]:
        """As `Storage.foreign_keys`, by a listing of all keys."""
        tokens = {"ContinuationToken": "NextContinuationToken"}
        for key, _ in self._listed("list_objects_v2", "listing all keys", "", "Contents", tokens):
            if self._name(key) is None:
                yield key.removeprefix(self._base)

    def _listed(
        self, operation: str, doing: str, prefix: str, member: str, tokens: dict[str, str], **asked: str
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield key and description of each item of `member` on all pages.

        `tokens` maps each parameter for the next page to the field of the response that has its value.
        """
        parameters = {"Prefix": self._base + prefix, **asked}
        while True:
            answer = self._reads.send(operation, doing, **parameters)
            if not answer.keys() & _IN_LISTINGS:
                # any web page would look like an empty listing
                raise StorageMisconfigured(f"{doing} in {self.uri}: the response is not a listing: {NO_S3}")
            for item in answer.get(member, ()):
                key = str(item["Key"])
                # a foreign key would be taken for another object, and perhaps deleted
                if not key.startswith(self._base + prefix):
                    raise StorageMisconfigured(
                        f"{self.uri}: the service lists {key!r}, which does not begin with {self._base + prefix!r}: "
                        f"{NO_S3}"
                    )
                yield key, item
            if not answer.get("IsTruncated"):
                return
            for parameter, field in tokens.items():
                # without it the rest of the listing would be lost silently
                if not answer.get(field):
                    problem = f"a listing continues without a marker ({field} is missing)"
                    raise StorageUnavailable(f"{self.uri}: {problem}")
                parameters[parameter] = str(answer[field])

    def _of_upload(self, operation: str, doing: str, handle: UploadHandle, **parameters: Any) -> dict[str, Any]:
        """Send a request about an upload. Raises `ObjectNotFound` if it was aborted or completed."""
        upload: dict[str, Any] = {"Key": self._key(handle.name), "UploadId": handle.upload_id}
        try:
            return self._reads.send(operation, doing, handle.name, **upload, **parameters)
        except StorageUnavailable as error:
            # Ceph's gateway answers 500 for a dropped upload; listing its parts then raises ObjectNotFound. Without a
            # response, botocore's error has no `response`, or None.
            if getattr(error.__cause__, "response", None) is not None:
                with contextlib.suppress(StorageUnavailable):
                    self._reads.send("list_parts", doing, handle.name, **upload, MaxParts=1)
            raise


def _request_body(data: Bytes) -> bytes | bytearray:
    """Return `data` in a type that boto3 accepts; only a memoryview is copied."""
    return data if isinstance(data, bytes | bytearray) else bytes(data)


def _epoch_ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def _answered_ms(answer: dict[str, Any]) -> int | None:
    """Return the date of a response in epoch milliseconds, by the service's clock; None: it has no date."""
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    return _epoch_ms(parsedate_to_datetime(date)) if date else None
