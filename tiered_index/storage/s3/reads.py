"""Sends requests about one bucket through boto3, and reads ranges through obstore (Rust's object_store) if installed.

boto3 spends most of a GET's processor time in Python (docs/decisions/0085). A GET by boto3 shows the bucket's address,
its region and the signer with the credentials; later GETs of ranges use obstore. After a fault, a redirect or a
response that obstore does not accept, boto3 reads until it succeeds. boto3 makes all reads behind a proxy, and in a
process that was forked after obstore was loaded. It also does so if its client has no network (moto's decorator, a
stub). Some servers, proxies and caches ignore ranges and answer 200 with the whole object. Of such a body, the bytes
before the range are dropped, and those after it are not read. Threads: any number.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote, urlsplit

from botocore.exceptions import BotoCoreError, ClientError
from botocore.httpsession import get_cert_path
from botocore.parsers import create_parser
from botocore.session import Session
from botocore.utils import get_environ_proxies
from urllib3.exceptions import HTTPError
from urllib3.response import BaseHTTPResponse

from tiered_index.errors import StorageMisconfigured, StorageUnavailable
from tiered_index.storage.base import RANGES
from tiered_index.storage.context import wasted
from tiered_index.storage.obstores import answered, errors, obstore, went_elsewhere
from tiered_index.storage.retry import PassingFault, RequestFault, RetryLoop
from tiered_index.storage.s3 import light
from tiered_index.storage.s3.client import REQUEST_ERRORS, build_client, is_elsewhere, may_pass, translate
from tiered_index.storage.s3.options import S3Options

if TYPE_CHECKING:
    from botocore.model import Shape

_SIGNATURE = "s3v4"
# Bytes that are read at a time of a whole object, before the range
_DROPPED_BYTES = 1 << 20
# After so many failures in a row that only obstore has, only boto3 is used. Examples: a certificate that only boto3
# accepts, a `Content-Range` without the object's size.
_LOST_AT_MOST = 3
_BEFORE_SIGN = "before-sign.s3.GetObject"
_ERRORS = create_parser("rest-xml")
# Validity of credentials given to obstore. obstore renews them five minutes before its end, so after a minute. botocore
# renews credentials ten minutes before they expire: obstore never uses expired ones.
_CREDENTIALS_HOLD = timedelta(minutes=6)
_XML = re.compile(r"\s*($|<\?xml|<Error)")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Way:
    """The way in which botocore reads objects: the URL without the key, the signed region, and the signer."""

    base_url: str
    region: str
    signer: Any

    def credentials(self) -> dict[str, Any]:
        """Return the current credentials."""
        held = self.signer.get_auth_instance("s3", self.region, _SIGNATURE).credentials
        named = {"access_key_id": held.access_key, "secret_access_key": held.secret_key, "token": held.token}
        return {**named, "expires_at": datetime.now(UTC) + _CREDENTIALS_HOLD}


class Reads:
    """Sends requests about one bucket, and reads its objects. Raises typed errors."""

    def __init__(
        self,
        uri: str,
        bucket: str,
        options: S3Options,
        connections: int,
        sleep: Callable[[float], None],
        uniform: Callable[[float, float], float],
    ) -> None:
        attempts = options.max_attempts, options.transfer_attempts
        self._run = RetryLoop(uri, *attempts, options.backoff_s, sleep, uniform, REQUEST_ERRORS, translate).run
        self.client = build_client(options, uri, connections)
        self._uri, self._bucket, self._options, self._connections = uri, bucket, options, connections
        # Its lacks, as `Storage.shortfalls`
        self.shortfalls: dict[str, str] = {}
        # None: boto3 reads
        self._way: _Way | None = None
        # The last way and its store
        self._opened: tuple[_Way | None, Any] = None, None
        self._signed: _Way | None = None
        self._lost = 0
        self._shape = cast("Shape", self.client.meta.service_model.operation_model("GetObject").output_shape)
        self._handler_id = f"tiered-index-way-{id(self)}"
        if options.lean_gets:
            self.client.meta.events.register(_BEFORE_SIGN, self._learn, unique_id=self._handler_id)

    def close(self) -> None:
        """Close the client's connections, and unregister from its events. Idempotent."""
        self._way, self._opened = None, (None, None)
        self.client.meta.events.unregister(_BEFORE_SIGN, self._learn, unique_id=self._handler_id)
        self.client.close()

    def send(self, operation: str, doing: str, name: str = "", **parameters: Any) -> dict[str, Any]:
        """Send a request, repeated as `RetryLoop` says, and return the parsed response."""
        return self._run(doing, name, lambda: self._once(operation, **parameters))

    @property
    def sends_crc32(self) -> bool:
        """Whether bodies are sent with a CRC32; else they have an MD5, which every service knows.

        As in Amazon's own tools, `AWS_REQUEST_CHECKSUM_CALCULATION=when_required` or the profile turns CRC32s off.
        """
        return bool(self.client.meta.config.request_checksum_calculation != "when_required")  # type: ignore[attr-defined]

    def checksum(self, body: bytes | bytearray) -> dict[str, str]:
        """Return the parameters of a write by which the service checks its body."""
        if self.sends_crc32:
            return {"ChecksumAlgorithm": "CRC32"}
        return {"ContentMD5": base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()}

    def fell_short(self, ability: str, instead: str) -> None:
        """Note, and log once, that the service lacks an ability, and the backend's way round."""
        if ability not in self.shortfalls:
            self.shortfalls[ability] = instead
            _log.warning("%s: the service %s", self._uri, instead)

    def _once(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """Send a request once, for use within `_run`. Raises botocore's errors."""
        answer: dict[str, Any] = getattr(self.client, operation)(Bucket=self._bucket, **parameters)
        return answer

    def whole(self, name: str, key: str) -> bytes:
        """Return the whole object."""
        what = f"reading {name!r}"

        def attempt() -> bytes:
            answer = self._once("get_object", Key=key)
            return self._body(answer, answer.get("ContentLength"), what)

        return self._run(what, name, attempt)

    def range(self, what: str, name: str, key: str, asked: tuple[int, int]) -> tuple[bytes, int]:
        """Return the bytes [start, end) of `asked`, and the object's size or, if it is unknown, `end`.

        The bytes are of no use if the object's size is less than `end`.
        """
        return self._run(what, name, lambda: self._range(what, key, *asked))

    def suffix(self, name: str, key: str, length: int, size_bytes: Callable[[], int]) -> tuple[bytes, int]:
        """Return the last `length` (at least 1) bytes, and the object's size.

        An empty object has no suffix in HTTP: after status 416 `size_bytes` is called for the object's size.
        """
        what = f"reading the last {length} bytes of {name!r}"

        def attempt() -> tuple[bytes, int]:
            try:
                return self._suffix(what, key, length)
            except ClientError as error:
                if _status(error.response) != 416:
                    raise
                if size_bytes() == 0:
                    return b"", 0
                raise PassingFault(
                    f"reading the end of {name!r} in {self._uri}: it was replaced between two requests"
                ) from error

        return self._run(what, name, attempt)

    def _range(self, what: str, key: str, start: int, end: int) -> tuple[bytes, int]:
        if found := self._light(what, key, (start, end), end - start):
            return found if end > found[1] else (self._whole(what, found[0], end - start), found[1])
        answer = self._once("get_object", Key=key, Range=f"bytes={start}-{end - 1}")
        if _status(answer) == 200:
            return self._of_whole(answer, start, end, what)
        first, behind, total = self._extent(answer, what)
        if total is not None and end > total:
            answer["Body"].close()
            return b"", total
        if (first, behind) != (start, end):
            raise self._refused(answer, f"{what} in {self._uri}: the answer is {answer['ContentRange']}")
        return self._worked(answer, end - start, what), total or end

    def _suffix(self, what: str, key: str, length: int) -> tuple[bytes, int]:
        if found := self._light(what, key, {"suffix": length}, length):
            return self._whole(what, found[0], min(length, found[1])), found[1]
        answer = self._once("get_object", Key=key, Range=f"bytes=-{length}")
        size = answer.get("ContentLength")
        if _status(answer) == 200 and size is not None and size <= length:
            return self._body(answer, size, what), size  # the whole object, as requested
        if _status(answer) == 200:
            if size is not None:
                return self._of_whole(answer, size - length, size, what)
            data = self._body(answer, None, what)
            return data[-length:], len(data)
        first, behind, total = self._extent(answer, what)
        if total is None or behind != total or behind - first != min(length, total):
            raise self._refused(answer, f"{what} in {self._uri}: the answer is {answer['ContentRange']}")
        return self._worked(answer, behind - first, what), total

    # through boto3

    def _of_whole(self, answer: dict[str, Any], start: int, end: int, what: str) -> tuple[bytes, int]:
        """Return bytes [start, end) of a whole object that came in place of them, and its size (unknown: `end`).

        Drops the bytes before the range, and does not read those after it.
        """
        body, size = answer["Body"], answer.get("ContentLength")
        length, dropped, data = end - start, 0, b""
        try:
            if size is None or end <= size:
                while dropped < start and (block := body.read(min(_DROPPED_BYTES, start - dropped))):
                    dropped += len(block)
                data = _read_exactly(body, length) if dropped == start else b""
        except (BotoCoreError, HTTPError, OSError) as error:
            problem = f"{what} in {self._uri}: the body broke off: {error}"
            raise self._refused(answer, problem, wasted_bytes=dropped + length) from error
        body.close()
        if size is None and len(data) < length:
            size = dropped + len(data)
        if "ContentRange" in answer or (start and size == length):
            # perhaps the body is just the range
            raise StorageUnavailable(
                f"{what} in {self._uri}: the service does not honour ranges (status 200 instead of 206)"
            )
        wasted(dropped)
        self.fell_short(
            RANGES, "answers ranges with whole objects: each read takes all bytes of the object before its range"
        )
        return (b"", size) if size is not None and end > size else (self._whole(what, data, length), size or end)

    def _extent(self, answer: dict[str, Any], what: str) -> tuple[int, int, int | None]:
        """Return start and end of the response's bytes by its headers, and the object's size or None."""
        status, header = _status(answer), str(answer.get("ContentRange", ""))
        match = _CONTENT_RANGE.fullmatch(header)
        if status != 206 or match is None:
            answer["Body"].close()
            problem = f"status {status} instead of 206" if status != 206 else f"Content-Range {header!r}"
            text = f"{what} in {self._uri}: the service does not honour ranges ({problem})"
            if status == 206 and not header:
                raise StorageMisconfigured.lacking(f"{text}: its answers need the header Content-Range")
            raise StorageUnavailable(text)
        return int(match[1]), int(match[2]) + 1, None if match[3] == "*" else int(match[3])

    def _body(self, answer: dict[str, Any], length: int | None, what: str) -> bytes:
        """Return the body, which must have exactly `length` bytes (None: botocore verifies it)."""
        body, announced = answer["Body"], answer.get("ContentLength")
        # a chunked body has no announced length
        if announced not in (None, length):
            raise self._refused(answer, f"{what} in {self._uri}: a body of {announced} bytes instead of {length}")
        try:
            # Read a range by its length: at the end of the body botocore would compare it with the checksum of the
            # whole object, which some services send with a range
            data: bytes = body.read() if _status(answer) == 200 else _read_exactly(body, length or 0)
        except (BotoCoreError, HTTPError, OSError) as error:
            problem = f"{what} in {self._uri}: the body broke off: {error}"
            raise self._refused(answer, problem, wasted_bytes=length or 0) from error
        if len(data) != length or announced is None:
            body.close()
        return self._whole(what, data, length)

    def _whole(self, what: str, data: bytes, length: int | None) -> bytes:
        """Return `data`. Raises `PassingFault` if it does not have `length` bytes (None: any number)."""
        if length is not None and len(data) != length:
            problem = f"{what} in {self._uri}: a body of {len(data)} bytes instead of {length}"
            raise PassingFault(problem, wasted_bytes=length)
        return data

    def _refused(self, answer: dict[str, Any], problem: str, *, wasted_bytes: int = 0) -> PassingFault:
        """Close the connection without reading the body, and return the fault."""
        answer["Body"].close()
        return PassingFault(problem, wasted_bytes=wasted_bytes)

    def _worked(self, answer: dict[str, Any], length: int, what: str) -> bytes:
        """Return the body of a correct response, and use obstore for the next GETs."""
        data = self._body(answer, length, what)
        # `_raw_stream` is private in botocore. Without it, or if the response came over no connection, boto3 reads on.
        raw = getattr(answer["Body"], "_raw_stream", None)
        way = self._signed if isinstance(raw, BaseHTTPResponse) else None
        is_usable = way is not None and self._lost < _LOST_AT_MOST and not get_environ_proxies(way.base_url)
        self._way = way if is_usable else None
        return data

    def _learn(self, **about: Any) -> None:
        """Note how botocore is about to send a GET of this bucket."""
        request = about["request"]
        signing = request.context.get("signing", {})
        asked = request.context.get("s3_redirect", {}).get("params", {})
        end = "/" + quote(asked.get("Key", ""), safe="/~")
        if asked.get("Bucket") != self._bucket:
            return
        if (
            about["signature_version"] != _SIGNATURE
            or (signing.get("signing_name") or about["signing_name"]) != "s3"
            or "request_credentials" in signing
            or not request.url.endswith(end)
        ):
            self._signed = None
            return
        region = signing.get("region") or about["region_name"]
        self._signed = _Way(request.url.removesuffix(end), region, about["request_signer"])

    # through obstore

    def _light(self, what: str, key: str, asked: object, length: int) -> tuple[bytes, int] | None:
        """Read through obstore: return at most `length + 1` bytes of the range `asked`, and the object's size.

        None: read through boto3, which reports errors. Raises botocore's errors, `PassingFault`.
        """
        way = self._way
        if way is None or obstore() is None:
            return None
        # Opened by the second GET: a process that makes one lookup does not need obstore
        opened, store = self._opened
        if opened != way:
            try:
                store = self._open(way)
            except errors():
                # for example an environment variable that only obstore reads
                self._way, self._lost = None, _LOST_AT_MOST
                return None
            self._opened = way, store
        try:
            found = light.get(store, key, {"range": asked}, length)
            self._lost = 0
            return found
        except errors() as error:
            self._judge(error, what, length)
        return None

    def _judge(self, error: Exception, what: str, length: int) -> None:
        """Raise the typed error for an error of obstore; return if boto3 has to repeat the request."""
        text = str(error)
        said = f"{what} in {self._uri}: {text.partition(chr(10))[0]}"
        if told := answered(text):
            status, body = told
            # obstore does not give the response's headers
            kind = "" if _XML.match(body) else "text/html" if "<html" in body else "text/plain"
            document: Any = {"status_code": status, "headers": {"content-type": kind}, "body": body.encode()}
            refused = ClientError(_ERRORS.parse(document, self._shape), "GetObject")
            if may_pass(refused):
                self._way = None
                raise refused from error
            if refused.response["Error"].get("Code", "") not in {"", str(status)} and not is_elsewhere(refused):
                raise refused from error
        was_used, self._way = self._way is not None, None
        if "Requested " in text:
            raise PassingFault(said) from error
        if "body error" in text:
            raise PassingFault(said, wasted_bytes=length) from error
        # Count a failure once for all threads. If obstore never accepts a response, each range would cost two requests.
        self._lost += was_used
        if "error sending request" in text and not went_elsewhere(text):
            raise RequestFault(said) from error

    def _open(self, way: _Way) -> Any:
        """Return obstore's store for the bucket."""
        certificates = None
        if urlsplit(way.base_url).scheme == "https":
            named = Session(profile=self._options.profile).get_config_variable("ca_bundle")
            trusted: Any = named or os.environ.get("REQUESTS_CA_BUNDLE") or True
            certificates = str(get_cert_path(trusted))
        place = self._bucket, way.base_url, way.region, certificates
        return light.open_store(*place, self._options, self._connections, credential_provider=way.credentials)


def _status(answer: Mapping[str, Any]) -> int:
    return int(answer["ResponseMetadata"]["HTTPStatusCode"])


def _read_exactly(body: Any, length: int) -> bytes:
    data: bytes = body.read(length)
    while len(data) < length and (more := body.read(length - len(data))):
        data += more
    return data
