"""Range GETs with less work around them: signed, sent and read by botocore's own parts, without what it does for every
call of any service.

For each call botocore checks parameters, chooses an endpoint, asks dozens of handlers and parses headers that nobody
reads: most of the processor time of a GET, which a lookup in a hundred files pays a hundred times
(docs/decisions/0047). So the first GET goes the ordinary way; what it shows (address of the bucket, region, name to
sign for) serves those that follow. One lean attempt is made; where another may fare better (a passing fault, another
region), the ordinary way takes over, with its repeats and redirects. A lean attempt counts as one of `max_attempts`
(one that is sent elsewhere doesn't), is told to `metering`, and asks the handlers of `before-send`, so that deadlines,
counters and moto see it. Credentials are asked for afresh by each.

While the service fails, all goes the ordinary way, whose repeats are fewer the longer that lasts, until a request
succeeds. A client that the caller built may have handlers that matter for any step: it always goes the ordinary way.
Threads: any number.

Verified reads of S3 objects: what comes back is what was asked for, byte for byte in extent, or an error.

A range's answer must be status 206 with the asked start and length in Content-Range and in Content-Length, and a body
of exactly that length. Servers, proxies and caches that ignore ranges answer 200 with the whole object: that is refused
before its body is read. A body that breaks off is fetched again, within the retry policy's bound. Threads: any number.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, cast
from urllib.parse import quote

from botocore.awsrequest import AWSRequest
from botocore.exceptions import BotoCoreError, ClientError
from botocore.hooks import first_non_none_response
from botocore.parsers import ResponseParserError, create_parser
from botocore.response import StreamingBody
from urllib3.exceptions import HTTPError

from tiered_index.errors import BudgetExceeded, InvalidArgument, StorageUnavailable
from tiered_index.storage.context import check_deadline, wasted
from tiered_index.storage.s3.client import S3Calls
from tiered_index.storage.s3.failures import (
    NO_CREDENTIALS,
    PassingFault,
    RetryPolicy,
    attempts_spent,
    is_elsewhere,
    may_pass,
    translate,
)

if TYPE_CHECKING:
    from botocore.model import Shape
    from mypy_boto3_s3 import S3Client

__all__ = ["OrdinaryGets", "RangeGets", "VerifiedReads"]

_SIGNATURE = "s3v4"
_DELIVERED = (200, 206)
_FIRST_ERROR = 301
_OPERATION = "get_object"
_BEFORE_SIGN, _BEFORE_SEND = "before-sign.s3.GetObject", "before-send.s3.GetObject"
_ERRORS = create_parser("rest-xml")


@dataclass(frozen=True, slots=True)
class _Way:
    """How botocore reached an object: its address without the key, and what it signed for."""

    base_url: str
    user_agent: str
    signing_name: str
    region: str
    signer: Any


class _Failed(Exception):
    """A lean attempt that another may follow: at once, or after a wait where the service or the network is the
    cause.
    """

    def __init__(self, cause: Exception, *, wait: bool) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.wait = wait


class OrdinaryGets:
    """GETs through the client's own method."""

    def __init__(self, calls: S3Calls) -> None:
        self._calls = calls

    def __call__(self, what: str, name: str, key: str, asked: str) -> dict[str, Any]:
        """Return botocore's answer to a GET of `asked` (the header `Range`), its body not yet read.

        Raises as `S3Calls`.
        """
        return self._calls(_OPERATION, what, name, Key=key, Range=asked)

    def close(self) -> None:
        """Let go of the client."""


class RangeGets(OrdinaryGets):
    """GETs of one bucket by a client that `build_client` made; `retry` waits before what failed is handed over."""

    def __init__(self, calls: S3Calls, client: S3Client, retry: RetryPolicy, max_attempts: int) -> None:
        super().__init__(calls)
        self._retry = retry
        self._may_repeat = max_attempts > 1
        self._events = client.meta.events
        # Not public in botocore: where it has another name, all goes the ordinary way (a test tells).
        self._session = getattr(getattr(client, "_endpoint", None), "http_session", None)
        self._shape = cast("Shape", client.meta.service_model.operation_model("GetObject").output_shape)
        self._asking = threading.local()
        self._way: _Way | None = None
        self._in_trouble = False
        self._handler_id = f"tiered-index-way-{id(self)}"
        self._events.register(_BEFORE_SIGN, cast("Callable[..., None]", self._learn), unique_id=self._handler_id)

    def __call__(self, what: str, name: str, key: str, asked: str) -> dict[str, Any]:
        """Return the parts of an answer that a reader of ranges needs, as botocore names them; its body is not yet
        read.
        """
        way = self._way
        if way is None or self._session is None or self._in_trouble:
            return self._ordinary(what, name, key, asked)
        check_deadline(f"{what} in {self._calls.uri}")
        try:
            return self._lean(way, key, asked)
        except BudgetExceeded as error:
            raise BudgetExceeded(f"{what} in {self._calls.uri}: {error}") from error
        except ClientError as error:
            raise translate(error, doing=what, uri=self._calls.uri, name=name) from error
        except _Failed as failed:
            return self._handed_over(failed, what, name, key, asked)

    def _handed_over(self, failed: _Failed, what: str, name: str, key: str, asked: str) -> dict[str, Any]:
        fault = translate(failed.cause, doing=what, uri=self._calls.uri, name=name)
        if failed.wait:
            if not self._may_repeat:
                raise fault from failed.cause
            self._retry.wait(1, PassingFault(str(fault)))
        with attempts_spent(1 if failed.wait else 0):
            return self._ordinary(what, name, key, asked)

    def _ordinary(self, what: str, name: str, key: str, asked: str) -> dict[str, Any]:
        self._asking.key = key
        try:
            answer = super().__call__(what, name, key, asked)
        except StorageUnavailable:
            self._in_trouble = True
            raise
        finally:
            self._asking.key = None
        self._in_trouble = False
        return answer

    def _learn(self, **about: Any) -> None:
        """See how botocore is about to send a GET of this thread's."""
        key = getattr(self._asking, "key", None)
        if key is None:
            return
        request = about["request"]
        signing = request.context.get("signing", {})
        end = "/" + _quoted(key)
        if (
            about["signature_version"] != _SIGNATURE
            or "request_credentials" in signing
            or not request.url.endswith(end)
        ):
            self._way = None
            return
        agent = request.headers.get("User-Agent", "")
        self._way = _Way(
            request.url.removesuffix(end) + "/",
            agent.decode() if isinstance(agent, bytes) else agent,
            signing.get("signing_name") or about["signing_name"],
            signing.get("region") or about["region_name"],
            about["request_signer"],
        )

    def close(self) -> None:
        """Leave the client's handlers. Idempotent."""
        self._events.unregister(_BEFORE_SIGN, cast("Callable[..., None]", self._learn), unique_id=self._handler_id)

    def _lean(self, way: _Way, key: str, asked: str) -> dict[str, Any]:
        """Make one attempt. Raises `ClientError` for a refusal, `_Failed` for all else that goes wrong."""
        headers = {"Range": asked, "User-Agent": way.user_agent}
        try:
            request = AWSRequest("GET", way.base_url + _quoted(key), headers=headers, stream_output=True)
            way.signer.get_auth_instance(way.signing_name, way.region, _SIGNATURE).add_auth(request)
            prepared = request.prepare()
            response = first_non_none_response(self._events.emit(_BEFORE_SEND, request=prepared))
            if response is None:
                response = cast("Any", self._session).send(prepared)
            if response.status_code not in _DELIVERED:
                self._raise_refused(response)
        except (BotoCoreError, ResponseParserError, HTTPError, OSError) as error:
            raise _Failed(error, wait=not isinstance(error, NO_CREDENTIALS)) from error
        return _answer(response.status_code, response.headers, response.raw)

    def _raise_refused(self, response: Any) -> NoReturn:
        status = response.status_code
        if status < _FIRST_ERROR:
            response.raw.close()
            raise _Failed(ResponseParserError(f"status {status}"), wait=False)
        answered = {"status_code": status, "headers": response.headers, "body": response.content}
        error = ClientError(_ERRORS.parse(answered, self._shape), "GetObject")
        if is_elsewhere(error) or may_pass(error):
            raise _Failed(error, wait=may_pass(error))
        raise error


def _quoted(key: str) -> str:
    return quote(key, safe="/~")


def _answer(status: int, headers: Mapping[str, str], raw: Any) -> dict[str, Any]:
    length = headers.get("Content-Length", "")
    size = int(length) if length.isdecimal() else None
    return {
        "ResponseMetadata": {"HTTPStatusCode": status},
        "ContentRange": headers.get("Content-Range", ""),
        "ContentLength": size,
        "Body": StreamingBody(raw, cast("int", size)),  # it takes None for a length that is not known
    }


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
            # Reading a range by its length, not to the end, also keeps botocore from comparing it with the whole
            # object's checksum, which some services send along with a range.
            data: bytes = body.read() if _status(answer) == 200 else _read_exactly(body, length or 0)
        except (BotoCoreError, HTTPError, OSError) as error:
            self._refuse(answer)
            wasted(length or 0)
            raise PassingFault(f"{what} in {self._calls.uri}: the body broke off: {error}") from error
        if length is not None and len(data) != length:
            self._refuse(answer)
            wasted(length)
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
