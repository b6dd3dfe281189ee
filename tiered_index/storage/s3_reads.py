"""Verified reads of S3 objects: what comes back is what was asked for, byte for byte in extent, or an error.

A range's answer must be status 206 with the asked start and length in Content-Range and in Content-Length, and a body of exactly
that length. Servers, proxies and caches that ignore ranges answer 200 with the whole object: that is refused before its body is
read. A body that breaks off is fetched again, within the retry policy's bound. Threads: any number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import BotoCoreError
from urllib3.exceptions import HTTPError

from tiered_index.errors import InvalidArgument, StorageUnavailable
from tiered_index.storage.attempts import came_in_vain
from tiered_index.storage.s3_client import S3Calls
from tiered_index.storage.s3_errors import PassingFault
from tiered_index.storage.s3_gets import OrdinaryGets
from tiered_index.storage.s3_retry import RetryPolicy

__all__ = ["VerifiedReads"]

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


@dataclass(frozen=True, slots=True)
class _Extent:
    start: int
    length: int
    total: int | None

    def __str__(self) -> str:
        return f"bytes {self.start}-{self.start + self.length - 1}/{'*' if self.total is None else self.total}"


class VerifiedReads:
    """Reads whole objects through `calls` and ranges through `gets`, repeated by `retry`."""

    def __init__(self, calls: S3Calls, gets: OrdinaryGets, retry: RetryPolicy) -> None:
        self._calls = calls
        self._gets = gets
        self._retry = retry

    def whole(self, name: str, key: str) -> bytes:
        """Return the whole object."""
        return self._retry.run(lambda: self._whole(name, key))

    def range(self, name: str, key: str, start: int, length: int) -> bytes:
        """Return `length` (at least 1) bytes from `start`; `InvalidArgument` where the object ends before."""
        return self._retry.run(lambda: self._range(name, key, start, length))

    def suffix(self, name: str, key: str, length: int) -> tuple[bytes, int]:
        """Return the last `length` (at least 1) bytes of an object that is not empty, and the object's size.

        An empty object has no suffix for HTTP: the service answers 416, raised as `InvalidArgument`.
        """
        return self._retry.run(lambda: self._suffix(name, key, length))

    def _whole(self, name: str, key: str) -> bytes:
        what = f"reading {name!r}"
        answer = self._calls("get_object", what, name, Key=key)
        return self._body(answer, answer.get("ContentLength"), what)

    def _range(self, name: str, key: str, start: int, length: int) -> bytes:
        what = f"reading bytes {start}-{start + length - 1} of {name!r}"
        answer = self._gets(what, name, key, f"bytes={start}-{start + length - 1}")
        got = self._extent(answer, what)
        if got.total is not None and start + length > got.total:
            self._refuse(answer)
            raise InvalidArgument(f"{what} in {self._calls.uri}: the object has {got.total} bytes")
        if (got.start, got.length) != (start, length):
            self._refuse(answer)
            raise PassingFault(f"{what} in {self._calls.uri}: the answer is {got}")
        return self._body(answer, length, what)

    def _suffix(self, name: str, key: str, length: int) -> tuple[bytes, int]:
        what = f"reading the last {length} bytes of {name!r}"
        answer = self._gets(what, name, key, f"bytes=-{length}")
        size = answer.get("ContentLength")
        if _status(answer) == 200 and size is not None and size <= length:
            return self._body(answer, size, what), size  # the whole object, which is what was asked for
        got = self._extent(answer, what)
        if got.total is None or got.length != min(length, got.total) or got.start + got.length != got.total:
            self._refuse(answer)
            raise PassingFault(f"{what} in {self._calls.uri}: the answer is {got}")
        return self._body(answer, got.length, what), got.total

    def _extent(self, answer: dict[str, Any], what: str) -> _Extent:
        """Return what the answer's headers say it holds."""
        status = _status(answer)
        header = str(answer.get("ContentRange", ""))
        match = _CONTENT_RANGE.fullmatch(header)
        if status != 206 or match is None:
            self._refuse(answer)
            problem = f"status {status} instead of 206" if status != 206 else f"Content-Range {header!r}"
            raise StorageUnavailable(f"{what} in {self._calls.uri}: the service does not honour ranges ({problem})")
        start, last = int(match[1]), int(match[2])
        return _Extent(start, last - start + 1, None if match[3] == "*" else int(match[3]))

    def _body(self, answer: dict[str, Any], length: int | None, what: str) -> bytes:
        """Return the body, which must have exactly `length` bytes (None: what botocore verifies by itself)."""
        body = answer["Body"]
        announced = answer.get("ContentLength")
        if announced != length:
            self._refuse(answer)
            raise PassingFault(f"{what} in {self._calls.uri}: a body of {announced} bytes instead of {length}")
        try:
            # Reading a range by its length, not to the end, also keeps botocore from comparing it with the whole object's
            # checksum, which some services send along with a range.
            data: bytes = body.read() if _status(answer) == 200 else _read_exactly(body, length or 0)
        except (BotoCoreError, HTTPError, OSError) as error:
            self._refuse(answer)
            came_in_vain(length or 0)
            raise PassingFault(f"{what} in {self._calls.uri}: the body broke off: {error}") from error
        if length is not None and len(data) != length:
            self._refuse(answer)
            came_in_vain(length)
            raise PassingFault(f"{what} in {self._calls.uri}: a body of {len(data)} bytes instead of {length}")
        return data

    def _refuse(self, answer: dict[str, Any]) -> None:
        """Close the connection instead of reading a body that nobody wants."""
        answer["Body"].close()


def _status(answer: dict[str, Any]) -> int:
    return int(answer["ResponseMetadata"]["HTTPStatusCode"])


def _read_exactly(body: Any, length: int) -> bytes:
    data: bytes = body.read(length)
    pieces = [data]
    missing = length - len(data)
    while data and missing:
        data = body.read(missing)
        pieces.append(data)
        missing -= len(data)
    return b"".join(pieces)
