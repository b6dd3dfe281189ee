"""Reads of S3 objects: what comes back is what was asked for, byte for byte in extent, or an error.

Ranges are read by lean GETs: signed, sent and read by botocore's own parts, without what it does for every call of any
service, most of the processor time of a GET (docs/decisions/0047). A GET by the client's method shows the way (address
of the bucket, region, name to sign for), and the GETs that follow are lean until the service or the network fails one
or sends it to another region. Handlers of `before-send` are asked, so that counters and moto see it.

Servers, proxies and caches that ignore ranges answer 200 with the whole object: that is refused before its body is
read. Threads: any number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from botocore.awsrequest import AWSRequest
from botocore.exceptions import BotoCoreError, ClientError
from botocore.hooks import first_non_none_response
from botocore.parsers import create_parser
from botocore.response import StreamingBody
from urllib3.exceptions import HTTPError

from tiered_index.errors import InvalidArgument, StorageUnavailable
from tiered_index.storage.s3.retry import REQUEST_ERRORS, PassingFault, S3Calls, is_elsewhere, may_pass

if TYPE_CHECKING:
    from botocore.model import Shape
    from mypy_boto3_s3 import S3Client

_SIGNATURE = "s3v4"
_DELIVERED = (200, 206)
_FIRST_ERROR = 301
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


class RangeGets:
    """GETs of ranges, each an attempt within `S3Calls.run`; without `client` all go by the client's own method."""

    def __init__(self, calls: S3Calls, bucket: str, client: S3Client | None) -> None:
        self._calls = calls
        self._bucket = bucket
        self._way: _Way | None = None
        self._signed: _Way | None = None
        # Not public in botocore: where it has another name, no way is learned (a test tells).
        self._session: Any = getattr(getattr(client, "_endpoint", None), "http_session", None)
        self._events: Any = client.meta.events if client is not None and self._session is not None else None
        self._handler_id = f"tiered-index-way-{id(self)}"
        if self._events is not None:
            service = cast("S3Client", client).meta.service_model
            self._shape = cast("Shape", service.operation_model("GetObject").output_shape)
            self._events.register(_BEFORE_SIGN, self._learn, unique_id=self._handler_id)

    def __call__(self, key: str, asked: str) -> dict[str, Any]:
        """Return the answer, body unread, to a GET of `asked` (`Range`). Raises what botocore raises."""
        way = self._way
        try:
            answer = None if way is None else self._lean(way, key, asked)
            if answer is None:
                answer = self._calls.once("get_object", Key=key, Range=asked)
                self._way = self._signed
        except REQUEST_ERRORS as error:
            if not isinstance(error, ClientError) or may_pass(error):
                self._way = None
            raise
        return answer

    def _learn(self, **about: Any) -> None:
        """See how botocore is about to send a GET of this bucket."""
        request = about["request"]
        signing = request.context.get("signing", {})
        asked = request.context.get("s3_redirect", {}).get("params", {})
        end = "/" + _quoted(asked.get("Key", ""))
        if asked.get("Bucket") != self._bucket:
            return
        if (
            about["signature_version"] != _SIGNATURE
            or "request_credentials" in signing
            or not request.url.endswith(end)
        ):
            self._signed = None
            return
        agent = request.headers.get("User-Agent", "")
        self._signed = _Way(
            request.url.removesuffix(end) + "/",
            agent.decode() if isinstance(agent, bytes) else agent,
            signing.get("signing_name") or about["signing_name"],
            signing.get("region") or about["region_name"],
            about["request_signer"],
        )

    def close(self) -> None:
        """Leave the client's handlers. Idempotent."""
        if self._events is not None:
            self._events.unregister(_BEFORE_SIGN, self._learn, unique_id=self._handler_id)

    def _lean(self, way: _Way, key: str, asked: str) -> dict[str, Any] | None:
        """Return the answer; None for one that only the client's method can follow."""
        headers = {"Range": asked, "User-Agent": way.user_agent}
        request = AWSRequest("GET", way.base_url + _quoted(key), headers=headers, stream_output=True)
        way.signer.get_auth_instance(way.signing_name, way.region, _SIGNATURE).add_auth(request)
        prepared = request.prepare()
        response = first_non_none_response(self._events.emit(_BEFORE_SEND, request=prepared))
        if response is None:
            response = self._session.send(prepared)
        status = response.status_code
        if status in _DELIVERED:
            return _answer(status, response.headers, response.raw)
        if status < _FIRST_ERROR:
            response.raw.close()
            return None
        answered = {"status_code": status, "headers": response.headers, "body": response.content}
        error = ClientError(_ERRORS.parse(answered, self._shape), "GetObject")
        if is_elsewhere(error):
            return None
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


class VerifiedReads:
    """Reads whole objects through `calls` and ranges through `gets`."""

    def __init__(self, calls: S3Calls, gets: RangeGets) -> None:
        self._calls = calls
        self._gets = gets

    def whole(self, name: str, key: str) -> bytes:
        """Return the whole object."""
        what = f"reading {name!r}"

        def attempt() -> bytes:
            answer = self._calls.once("get_object", Key=key)
            return self._body(answer, answer.get("ContentLength"), what)

        return self._calls.run(what, name, attempt)

    def range(self, name: str, key: str, start: int, length: int) -> bytes:
        """Return `length` (at least 1) bytes from `start`; `InvalidArgument` where the object ends before."""
        what = f"reading bytes {start}-{start + length - 1} of {name!r}"
        return self._calls.run(what, name, lambda: self._range(what, key, start, length))

    def suffix(self, name: str, key: str, length: int, size_bytes: Callable[[], int]) -> tuple[bytes, int]:
        """Return the last `length` (at least 1) bytes, and the object's size.

        An empty object has no suffix for HTTP: the service answers 416, and `size_bytes` asks for the object's size.
        """
        what = f"reading the last {length} bytes of {name!r}"
        return self._calls.run(what, name, lambda: self._suffix(what, name, key, length, size_bytes))

    def _range(self, what: str, key: str, start: int, length: int) -> bytes:
        answer = self._gets(key, f"bytes={start}-{start + length - 1}")
        first, size, total = self._extent(answer, what)
        if total is not None and start + length > total:
            answer["Body"].close()
            raise InvalidArgument(f"{what} in {self._calls.uri}: the object has {total} bytes")
        if (first, size) != (start, length):
            raise self._refused(answer, f"{what} in {self._calls.uri}: the answer is {answer['ContentRange']}")
        return self._body(answer, length, what)

    def _suffix(self, what: str, name: str, key: str, length: int, size_bytes: Callable[[], int]) -> tuple[bytes, int]:
        try:
            answer = self._gets(key, f"bytes=-{length}")
        except ClientError as error:
            if _status(error.response) != 416:
                raise
            if size_bytes() == 0:
                return b"", 0
            raise PassingFault(
                f"reading the end of {name!r} in {self._calls.uri}: it was replaced between two requests"
            ) from error
        size = answer.get("ContentLength")
        if _status(answer) == 200 and size is not None and size <= length:
            return self._body(answer, size, what), size  # the whole object, which is what was asked for
        first, size, total = self._extent(answer, what)
        if total is None or size != min(length, total) or first + size != total:
            raise self._refused(answer, f"{what} in {self._calls.uri}: the answer is {answer['ContentRange']}")
        return self._body(answer, size, what), total

    def _extent(self, answer: dict[str, Any], what: str) -> tuple[int, int, int | None]:
        """Return start and length of the bytes that the answer says it holds, and the object's size or None."""
        status = _status(answer)
        header = str(answer.get("ContentRange", ""))
        match = _CONTENT_RANGE.fullmatch(header)
        if status != 206 or match is None:
            answer["Body"].close()
            problem = f"status {status} instead of 206" if status != 206 else f"Content-Range {header!r}"
            raise StorageUnavailable(f"{what} in {self._calls.uri}: the service does not honour ranges ({problem})")
        start, last = int(match[1]), int(match[2])
        return start, last - start + 1, None if match[3] == "*" else int(match[3])

    def _body(self, answer: dict[str, Any], length: int | None, what: str) -> bytes:
        """Return the body, which must have exactly `length` bytes (None: what botocore verifies by itself)."""
        body = answer["Body"]
        announced = answer.get("ContentLength")
        if announced != length:
            raise self._refused(answer, f"{what} in {self._calls.uri}: a body of {announced} bytes instead of {length}")
        try:
            # Reading a range by its length, not to the end, also keeps botocore from comparing it with the whole
            # object's checksum, which some services send along with a range.
            data: bytes = body.read() if _status(answer) == 200 else _read_exactly(body, length or 0)
        except (BotoCoreError, HTTPError, OSError) as error:
            problem = f"{what} in {self._calls.uri}: the body broke off: {error}"
            raise self._refused(answer, problem, wasted_bytes=length or 0) from error
        if length is not None and len(data) != length:
            problem = f"{what} in {self._calls.uri}: a body of {len(data)} bytes instead of {length}"
            raise self._refused(answer, problem, wasted_bytes=length)
        return data

    def _refused(self, answer: dict[str, Any], problem: str, *, wasted_bytes: int = 0) -> PassingFault:
        """Close the connection, instead of reading a body that nobody wants, and return the fault."""
        answer["Body"].close()
        return PassingFault(problem, wasted_bytes=wasted_bytes)


def _status(answer: Mapping[str, Any]) -> int:
    return int(answer["ResponseMetadata"]["HTTPStatusCode"])


def _read_exactly(body: Any, length: int) -> bytes:
    data: bytes = body.read(length)
    while len(data) < length and (more := body.read(length - len(data))):
        data += more
    return data
