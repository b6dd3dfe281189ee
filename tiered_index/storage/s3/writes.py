"""Writes to a bucket through boto3: puts, deletes, and large objects in parts.

A `S3Writer` holds one part in memory. The 10,000 parts that S3 allows hold 78 GiB: more than any object of an index. An
upload that was begun with a checksum algorithm is completed with the checksum of each part. Threads: any number.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from tiered_index.errors import ObjectNotFound, StorageMisconfigured, StorageUnavailable, TieredIndexError
from tiered_index.storage.base import PAGE, BufferedWriter, Bytes
from tiered_index.storage.faults import NO_S3
from tiered_index.storage.retry import RetryLoop
from tiered_index.storage.s3.boto import REQUEST_ERRORS, translate
from tiered_index.storage.s3.options import S3Options

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_NAMES_SHOWN = 3
# Codes of a service that does not accept bulk deletes as they are sent
_NO_BULK = {"MissingContentMD5", "NotImplemented", "MethodNotAllowed"}
# Metadata of an object that was sent in parts: another object of its name and size may have been there before
_ATTEMPT = "attempt"
_OF_COMPLETION = {"Bucket", "Key", "Location", "ETag"}


class Writes:
    """Sends requests that change one bucket. Raises typed errors."""

    def __init__(
        self,
        client: S3Client,
        bucket: str,
        uri: str,
        options: S3Options,
        loop: Callable[..., RetryLoop],
        refuses_bulk: Callable[[], object],
    ) -> None:
        """Write through `client`, and call `refuses_bulk` once if each object needs a delete of its own."""
        self.client, self._bucket, self.uri, self._refuses_bulk = client, bucket, uri, refuses_bulk
        self._run = loop(errors=REQUEST_ERRORS, translate=translate).run
        self._deletes_singly = False
        encryption = {"ServerSideEncryption": options.sse, "SSEKMSKeyId": options.sse_kms_key_id}
        self._encryption = {name: value for name, value in encryption.items() if value is not None}
        # As in Amazon's own tools, AWS_REQUEST_CHECKSUM_CALCULATION=when_required or the profile turns CRC32s off. Then
        # bodies have an MD5, which every service knows.
        self._sends_crc32 = client.meta.config.request_checksum_calculation != "when_required"  # type: ignore[attr-defined]

    def send(self, operation: str, doing: str, name: str = "", **parameters: Any) -> dict[str, Any]:
        """Send a request, repeated as `RetryLoop` says, and return the parsed response."""
        return self._run(doing, name, lambda: getattr(self.client, operation)(Bucket=self._bucket, **parameters))

    def put(self, name: str, key: str, data: Bytes, **condition: str) -> None:
        """Store an object in one request; at most 5 GiB."""
        sent = {"Key": key, **self._body(data), **self._encryption, **condition}
        self._send_new("put_object", f"writing {name!r}", name, **sent)

    def delete_many(self, keys: Iterable[str]) -> None:
        """Remove many objects, 1,000 a request. The first request with failures ends the call and names them."""
        keys = iter(keys)
        while batch := list(islice(keys, PAGE)):
            doing = f"deleting {len(batch)} objects"
            if failures := self._delete_at_once(batch, doing).get("Errors", []):
                codes = sorted({failure.get("Code", "?") for failure in failures})
                shown = ", ".join(repr(failure.get("Key", "?")) for failure in failures[:_NAMES_SHOWN])
                text = f"{doing} in {self.uri}: {len(failures)} failed ({', '.join(codes)}): {shown}"
                if "AccessDenied" in codes:
                    raise StorageMisconfigured(f"{text}: grant s3:DeleteObject")
                raise StorageUnavailable(text)

    def _delete_at_once(self, keys: Sequence[str], doing: str) -> Mapping[str, Any]:
        """Delete objects by one request, or one by one if the service does not accept it. Return the failures."""
        if not self._deletes_singly and len(keys) > 1:
            objects = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
            try:
                return self.send("delete_objects", doing, Delete=objects)
            except (StorageMisconfigured, StorageUnavailable) as error:
                answer = getattr(error.__cause__, "response", None) or {}
                refusal = answer.get("Error", {})
                if refusal.get("Code") not in _NO_BULK and "Content-MD5" not in refusal.get("Message", ""):
                    raise
            self._deletes_singly = True
            self._refuses_bulk()
        for key in keys:
            # Google's interface and others answer 404 for a missing object
            with contextlib.suppress(ObjectNotFound):
                self.send("delete_object", f"deleting {key!r}", key, Key=key)
        return {}

    def begin(self, name: str, key: str, attempt: str) -> str:
        """Start an upload in parts, and return its id. The object's metadata will have the `attempt`."""
        checked = {"ChecksumAlgorithm": "CRC32"} if self._sends_crc32 else {}
        doing = f"starting an upload of {name!r}"
        sent = {"Key": key, "Metadata": {_ATTEMPT: attempt}, **checked, **self._encryption}
        answer = self._send_new("create_multipart_upload", doing, name, **sent)
        return str(self._needed(answer, "UploadId", "an upload that it started"))

    def part(self, name: str, key: str, upload_id: str, number: int, data: Bytes) -> dict[str, Any]:
        """Store one part, and return its description for `complete`."""
        sent = {"Key": key, "UploadId": upload_id, "PartNumber": number, **self._body(data)}
        answer = self.send("upload_part", f"uploading part {number} of {name!r}", name, **sent)
        stored = {"PartNumber": number, "ETag": self._needed(answer, "ETag", "an uploaded part")}
        return stored | {field: answer[field] for field in ("ChecksumCRC32",) if field in answer}

    def complete(self, name: str, key: str, upload_id: str, parts: Sequence[Mapping[str, Any]]) -> bool:
        """Make the object exist. Return whether the answer says so: that of some servers has no content."""
        upload: dict[str, Any] = {"Key": key, "UploadId": upload_id, "MultipartUpload": {"Parts": parts}}
        answer = self.send("complete_multipart_upload", f"completing {name!r}", name, **upload)
        return bool(answer.keys() & _OF_COMPLETION)

    def has(self, name: str, key: str, size_bytes: int, attempt: str) -> bool:
        """Return whether there is an object of this size, and, if the service keeps metadata, of this attempt."""
        with contextlib.suppress(ObjectNotFound):
            answer = self.send("head_object", f"looking at {name!r}", name, Key=key)
            maker = answer.get("Metadata", {}).get(_ATTEMPT, attempt)
            return bool(answer.get("ContentLength") == size_bytes and maker == attempt)
        return False

    def abort(self, name: str, key: str, upload_id: str) -> None:
        """Drop an upload; one that is gone is no error."""
        with contextlib.suppress(ObjectNotFound):
            self.send("abort_multipart_upload", f"aborting an upload of {name!r}", name, Key=key, UploadId=upload_id)

    def uploads(self, prefix: str) -> Iterator[tuple[str, str, int]]:
        """Yield key, id and start (epoch milliseconds) of each unfinished upload below `prefix`."""
        doing, parameters = "listing unfinished uploads", {"Prefix": prefix}
        markers = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        while True:
            answer = self.send("list_multipart_uploads", doing, **parameters)
            if not answer.keys() & {"IsTruncated", "Bucket", "Uploads"}:
                raise StorageMisconfigured(f"{doing} in {self.uri}: the response is not a listing: {NO_S3}")
            for upload in answer.get("Uploads", ()):
                key, upload_id, began = (
                    self._needed(upload, field, "each unfinished upload of a listing")
                    for field in ("Key", "UploadId", "Initiated")
                )
                # else an upload of another index would be dropped
                if not key.startswith(prefix):
                    raise StorageMisconfigured(
                        f"{self.uri}: the service lists {key!r}, which does not begin with {prefix!r}: {NO_S3}"
                    )
                yield key, upload_id, round(began.timestamp() * 1000)
            if not answer.get("IsTruncated"):
                return
            for parameter, field in markers.items():
                if not answer.get(field):
                    raise StorageUnavailable(f"{self.uri}: a listing continues without a marker ({field} is missing)")
                parameters[parameter] = str(answer[field])

    def _send_new(self, operation: str, doing: str, name: str, **parameters: Any) -> dict[str, Any]:
        """As `send`, for a request that needs no object. Raises `StorageMisconfigured` if the answer is a bare 404."""
        try:
            return self.send(operation, doing, name, **parameters)
        except ObjectNotFound as error:
            raise StorageMisconfigured(f"{doing} in {self.uri}: the answer is a bare 404: {NO_S3}") from error

    def _body(self, data: Bytes) -> dict[str, Any]:
        """Return the parameters of a write: the body (only a memoryview is copied), and how the service checks it."""
        body = data if isinstance(data, bytes | bytearray) else bytes(data)
        if self._sends_crc32:
            return {"Body": body, "ChecksumAlgorithm": "CRC32"}
        digest = hashlib.md5(body, usedforsecurity=False).digest()
        return {"Body": body, "ContentMD5": base64.b64encode(digest).decode()}

    def _needed(self, answer: Mapping[str, Any], field: str, what: str) -> Any:
        """Return a field of a response. Raises `StorageMisconfigured` if the response lacks it."""
        if field not in answer:
            raise StorageMisconfigured.lacking(f"{self.uri}: the service leaves out {field} of {what}")
        return answer[field]


class S3Writer(BufferedWriter):
    """A stream of one object: one put at `close`, or, if it is larger than a part, an upload in parts."""

    def __init__(self, name: str, key: str, writes: Callable[[], Writes]) -> None:
        super().__init__(name)
        self._key, self._of_writes, self._attempt = key, writes, secrets.token_hex(8)
        self._upload_id: str | None = None
        self._parts: list[dict[str, Any]] = []

    def _send_part(self) -> None:
        writes = self._of_writes()
        if self._upload_id is None:
            self._upload_id = writes.begin(self.name, self._key, self._attempt)
        number = len(self._parts) + 1
        self._parts.append(writes.part(self.name, self._key, self._upload_id, number, self._held))

    def _finish(self) -> None:
        if self._upload_id is None:
            self._of_writes().put(self.name, self._key, self._held)
            return
        self._send()
        writes, upload = self._of_writes(), (self.name, self._key, self._upload_id)
        problem = f"completing {self.name!r} in {writes.uri}: the service reported success, but the object is not there"
        failure: TieredIndexError = StorageUnavailable(problem)
        try:
            if writes.complete(*upload, self._parts):
                return
        except (ObjectNotFound, StorageUnavailable) as error:
            # the answer to an own request may be lost, and its repeat finds no upload; Ceph's gateway says 500 then
            failure = error
        if not writes.has(self.name, self._key, self.size_bytes, self._attempt):
            raise failure

    def _drop(self) -> None:
        super()._drop()
        if self._upload_id is not None:
            self._of_writes().abort(self.name, self._key, self._upload_id)
