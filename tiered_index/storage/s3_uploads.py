"""Multipart uploads of an `S3Storage`: requests about keys; the storage knows about names.

A part's receipt (`PartInfo.etag`) is the service's tag and, after a space, the part's CRC32 where the service gave one: completing
an upload that was begun with a checksum algorithm must repeat each part's checksum. Threads: any number.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from email.utils import parsedate_to_datetime
from typing import Any

from botocore.exceptions import ClientError

from tiered_index.errors import ObjectNotFound, StorageUnavailable
from tiered_index.storage.base import Bytes, PartInfo, UploadHandle
from tiered_index.storage.parts import check_part_number
from tiered_index.storage.s3_client import S3Calls, epoch_ms, page_token, request_body
from tiered_index.storage.s3_retry import RetryPolicy

__all__ = ["S3Uploads"]


class S3Uploads:
    """The unfinished uploads of one bucket."""

    def __init__(self, calls: S3Calls, retry: RetryPolicy, encryption: dict[str, str]) -> None:
        self._calls = calls
        self._retry = retry
        self._encryption = encryption

    def begin(self, name: str, key: str) -> UploadHandle:
        """Start an upload to `key`; its start is the service's time (whole seconds)."""
        doing = f"starting an upload of {name!r}"
        answer = self._calls("create_multipart_upload", doing, name, Key=key, ChecksumAlgorithm="CRC32", **self._encryption)
        date = answer["ResponseMetadata"].get("HTTPHeaders", {}).get("date")
        started_ms = epoch_ms(parsedate_to_datetime(date)) if date else time.time_ns() // 1_000_000
        return UploadHandle(name, str(answer["UploadId"]), started_ms)

    def put_part(self, handle: UploadHandle, key: str, number: int, data: Bytes) -> PartInfo:
        """Store one part."""
        parameters = {"PartNumber": check_part_number(number), "Body": request_body(data), "ChecksumAlgorithm": "CRC32"}
        answer = self._call("upload_part", f"uploading part {number} of {handle.name!r}", handle, key, **parameters)
        etag = f"{answer['ETag']} {answer.get('ChecksumCRC32', '')}".rstrip()
        return PartInfo(number, etag, memoryview(data).nbytes)

    def complete(self, handle: UploadHandle, key: str, parts: Sequence[PartInfo]) -> None:
        """Publish the object out of checked parts in order of number."""
        documents: list[dict[str, Any]] = []
        for part in parts:
            etag, _, checksum = part.etag.partition(" ")
            document: dict[str, Any] = {"PartNumber": part.number, "ETag": etag}
            if checksum:
                document["ChecksumCRC32"] = checksum
            documents.append(document)
        doing = f"completing {handle.name!r}"
        self._call("complete_multipart_upload", doing, handle, key, MultipartUpload={"Parts": documents})

    def abort(self, handle: UploadHandle, key: str) -> None:
        """Drop the upload; one that is gone is not an error."""
        with contextlib.suppress(ObjectNotFound):
            self._call("abort_multipart_upload", f"aborting an upload of {handle.name!r}", handle, key)

    def list(self, key_prefix: str) -> Iterator[tuple[str, str, int]]:
        """Yield key, upload id and start (epoch ms) of the unfinished uploads."""
        parameters: dict[str, str] = {"Prefix": key_prefix}
        while True:
            answer = self._calls("list_multipart_uploads", "listing unfinished uploads", **parameters)
            for item in answer.get("Uploads", ()):
                yield str(item["Key"]), str(item["UploadId"]), epoch_ms(item["Initiated"])
            if not answer.get("IsTruncated"):
                return
            parameters["KeyMarker"] = page_token(answer, "NextKeyMarker", self._calls.uri)
            parameters["UploadIdMarker"] = page_token(answer, "NextUploadIdMarker", self._calls.uri)

    def _call(self, operation: str, doing: str, handle: UploadHandle, key: str, **parameters: Any) -> dict[str, Any]:
        """Send a request about an upload; `ObjectNotFound` where it is gone."""
        upload: dict[str, Any] = {"Key": key, "UploadId": handle.upload_id}
        try:
            return self._retry.run(lambda: self._calls(operation, doing, handle.name, **upload, **parameters))
        except StorageUnavailable as error:
            # Ceph's gateway answers 500 for an upload that is gone; asking for its parts tells that from a passing fault.
            if isinstance(error.__cause__, ClientError):
                with contextlib.suppress(StorageUnavailable):
                    self._calls("list_parts", doing, handle.name, **upload, MaxParts=1)
            raise
