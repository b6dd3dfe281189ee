"""Reads of a bucket through the boto3 client: under moto's mock, in a forked process, and with `client=boto3`.

It accepts chunked bodies, and whole objects (200) in answer to ranges: it drops the bytes before the range, and leaves
those after it. Threads: any number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from botocore.exceptions import BotoCoreError
from urllib3.exceptions import HTTPError

from tiered_index.base.call import wasted
from tiered_index.errors import StorageMisconfigured, StorageUnavailable
from tiered_index.storage.base import ObjectInfo
from tiered_index.storage.buckets import Extent, Headers, Reads, plain_etag
from tiered_index.storage.faults import NO_S3, S3
from tiered_index.storage.obstores import epoch_ms
from tiered_index.storage.retry import PassingFault, RetryLoop
from tiered_index.storage.s3.boto import REQUEST_ERRORS, translate

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class Boto3Reads(Reads):
    """Reads one bucket."""

    errors, sees_ends, service, translate = REQUEST_ERRORS, True, S3, staticmethod(translate)

    def __init__(self, client: Any, bucket: str, uri: str, loop: Callable[..., RetryLoop], lacks_ranges: Any) -> None:
        """Read through `client`, and call `lacks_ranges` for each whole object in answer to a range."""
        self._client, self._bucket, self._uri, self._lacks_ranges = client, bucket, uri, lacks_ranges
        self.loop = loop(errors=self.errors, translate=self.translate)

    def get(self, key: str, extent: Extent, what: str) -> tuple[bytes, int]:
        span = {"Range": f"bytes={extent[0]}-{extent[1] - 1}"} if extent else {}
        answer = self._client.get_object(Bucket=self._bucket, Key=key, **span)
        try:
            return self._taken(answer, extent, what)
        except (BotoCoreError, HTTPError, OSError, StorageUnavailable) as error:
            answer["Body"].close()
            if isinstance(error, StorageUnavailable):
                raise
            length = extent[1] - extent[0] if extent else 0
            raise PassingFault(f"{what}: the body broke off: {error}", wasted_bytes=length) from error

    def _taken(self, answer: dict[str, Any], extent: Extent, what: str) -> tuple[bytes, int]:
        body, size, header = answer["Body"], answer.get("ContentLength"), str(answer.get("ContentRange", ""))
        if extent is None:
            data: bytes = body.read()
            return data, len(data) if size is None else size
        status, sent = answer["ResponseMetadata"]["HTTPStatusCode"], _CONTENT_RANGE.fullmatch(header)
        first, end = extent
        if status == 206 and sent:
            # an unknown size is no smaller than the range: a shorter answer is wrong
            whole = end if sent[3] == "*" else int(sent[3])
            right = first, min(end, whole)
            if (int(sent[1]), int(sent[2]) + 1) != right or size not in (None, right[1] - first):
                raise PassingFault(f"{what}: the answer is {header}")
            # not to the end: botocore would compare a range with the checksum of the whole object
            return body.read(right[1] - first), whole
        if status != 200 or header or (first and size == end - first):
            text = f"{what}: the service does not honour ranges (status {status}, Content-Range {header!r})"
            raise StorageUnavailable(text) if header or status != 206 else StorageMisconfigured.lacking(text)
        dropped = 0
        while dropped < first and (block := body.read(min(1 << 20, first - dropped))):
            dropped += len(block)
        data = body.read(end - first) if dropped == first else b""
        body.close()
        self._lacks_ranges()
        wasted(dropped)
        return data, dropped + len(data) if size is None else size

    def head(self, key: str) -> Headers | None:
        answer = self._client.head_object(Bucket=self._bucket, Key=key)
        if "ContentLength" not in answer:
            return None
        modified = answer.get("LastModified")
        return answer["ContentLength"], modified and epoch_ms(modified), plain_etag(answer.get("ETag"))

    def bucket_headers(self, prefix: str) -> Any:
        """Return the headers of a listing of `prefix`."""
        answer = self._client.list_objects_v2(Bucket=self._bucket, Prefix=prefix, MaxKeys=1)
        return answer["ResponseMetadata"]["HTTPHeaders"]

    def pages(self, prefix: str, after: str) -> Iterator[list[ObjectInfo]]:
        start = {"Prefix": prefix} | ({"StartAfter": after} if after else {})
        parameters = start
        while True:
            answer = self._client.list_objects_v2(Bucket=self._bucket, **parameters)
            if not answer.keys() & {"IsTruncated", "Name", "Contents"}:
                raise StorageMisconfigured(f"listing {prefix!r} in {self._uri}: the response is not a listing: {NO_S3}")
            try:
                page = [
                    ObjectInfo(
                        listed["Key"], listed["Size"], epoch_ms(listed["LastModified"]), plain_etag(listed.get("ETag"))
                    )
                    for listed in answer.get("Contents", ())
                ]
            except KeyError as error:
                raise StorageMisconfigured.lacking(f"{self._uri}: a listing lacks {error} of an object") from error
            yield page
            if not answer.get("IsTruncated"):
                return
            token = answer.get("NextContinuationToken", "")
            if token not in {"", parameters.get("ContinuationToken")}:
                parameters = {**start, "ContinuationToken": token}
            elif page and page[-1].name > after:
                parameters = {**start, "StartAfter": page[-1].name}
            else:
                problem = f"a listing goes on after {after!r} without a name or a new NextContinuationToken"
                raise StorageMisconfigured(f"{self._uri}: {problem}: {NO_S3}")
            after = max([after, *(listed.name for listed in page[-1:])])
