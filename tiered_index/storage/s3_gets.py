"""Range GETs with less work around them: signed, sent and read by botocore's own parts, without what it does for every call of any service.

For each call botocore checks parameters, chooses an endpoint, asks dozens of handlers and parses headers that nobody reads: most of the
processor time of a GET, which a lookup in a hundred files pays a hundred times (CONTRIBUTING, "Decisions"). So the first GET goes
the ordinary way; what it shows (address of the bucket, region, name to sign for) serves those that follow. One lean attempt is made;
where another may fare better (a passing fault, another region), the ordinary way takes over, with its repeats and redirects. A lean
attempt counts as one of `max_attempts` (one that is sent elsewhere doesn't), is told to `attempts`, and asks the handlers of
`before-send`, so that deadlines, counters and moto see it. Credentials are asked for afresh by each.

While the service fails, all goes the ordinary way, whose repeats are fewer the longer that lasts, until a request succeeds. A client that
the caller built may have handlers that matter for any step: it always goes the ordinary way. Threads: any number.
"""

from __future__ import annotations

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

from tiered_index.errors import BudgetExceeded, StorageUnavailable
from tiered_index.storage.deadline import check_deadline
from tiered_index.storage.s3_client import S3Calls
from tiered_index.storage.s3_errors import NO_CREDENTIALS, PassingFault, is_elsewhere, may_pass, translate
from tiered_index.storage.s3_retry import RetryPolicy, attempts_spent

if TYPE_CHECKING:
    from botocore.model import Shape
    from mypy_boto3_s3 import S3Client

__all__ = ["OrdinaryGets", "RangeGets"]

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
    """A lean attempt that another may follow: at once, or after a wait where the service or the network is the cause."""

    def __init__(self, cause: Exception, *, wait: bool) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.wait = wait


class OrdinaryGets:
    """GETs through the client's own method."""

    def __init__(self, calls: S3Calls) -> None:
        self._calls = calls

    def __call__(self, what: str, name: str, key: str, asked: str) -> dict[str, Any]:
        """Return botocore's answer to a GET of `asked` (the header `Range`), its body not yet read. Raises as `S3Calls`."""
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
        """Return the parts of an answer that a reader of ranges needs, as botocore names them; its body is not yet read."""
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
        if about["signature_version"] != _SIGNATURE or "request_credentials" in signing or not request.url.endswith(end):
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
