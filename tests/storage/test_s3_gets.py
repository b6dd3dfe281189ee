"""Ranges through obstore: the same answers and errors as through boto3, and boto3 if a range fails or is redirected."""

import os
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials, RefreshableCredentials
from moto import mock_aws

from tests.storage.scripted_server import Answer, Request, ScriptedServer, error, part
from tiered_index.errors import BudgetExceeded, ObjectNotFound, StorageMisconfigured, StorageUnavailable
from tiered_index.storage.context import RequestContext, deadline_at
from tiered_index.storage.s3 import reads
from tiered_index.storage.s3.options import S3Options
from tiered_index.storage.s3.storage import S3Storage

pytest.importorskip("obstore", reason="the extra `object` is not installed")
DATA = bytes(range(256)) * 4
NAME = "data/a-1"
PREFIX = "pre fix/ä~+"  # characters that a URL must quote


@pytest.fixture
def waits() -> list[float]:
    return []


@pytest.fixture
def light(scripted: ScriptedServer, waits: list[float]) -> Iterator[S3Storage]:
    """A storage that has read once, so that it knows its way to the bucket."""
    with opened(scripted, waits) as storage:
        yield storage


def opened(scripted: ScriptedServer, waits: list[float], **options: Any) -> S3Storage:
    settings = S3Options(endpoint_url=scripted.endpoint_url, **{"max_attempts": 3, "transfer_attempts": 3, **options})
    storage = S3Storage("bucket", PREFIX, settings, sleep=waits.append, uniform=lambda low, high: high)
    scripted.answers(part(DATA, 0, 10))
    storage.get_range(NAME, 0, 10)
    scripted.reset()
    return storage


class Heard:
    def __init__(self) -> None:
        self.sent = self.wasted_bytes = 0

    def sending(self) -> None:
        self.sent += 1

    def wasted(self, size_bytes: int) -> None:
        self.wasted_bytes += size_bytes


def is_light(request: Request) -> bool:
    """Return whether obstore sent the request: botocore numbers the attempts of its own ones."""
    return "amz-sdk-request" not in request.lowered


def test_the_first_range_uses_boto3_and_the_next_ones_are_light(scripted):
    storage = S3Storage("bucket", PREFIX, S3Options(endpoint_url=scripted.endpoint_url))
    scripted.answers(part(DATA, 0, 10))
    for _ in range(3):
        assert storage.get_range(NAME, 0, 10) == DATA[:10]
    assert [is_light(request) for request in scripted.requests] == [False, True, True]
    assert len({request.path for request in scripted.requests}) == 1
    ordinary, after, _ = (request.lowered for request in scripted.requests)
    assert (after["range"], after["host"]) == (ordinary["range"], ordinary["host"])
    storage.close()


def test_a_light_request_is_signed_as_botocore_signs(light, scripted):
    """botocore's signer makes the signature again from the request on the wire."""
    scripted.answers(part(DATA, 3, 9))
    light.get_range("data/b-2", 3, 6)
    [request] = scripted.requests
    sent = request.lowered
    scope, signed, _ = sent["authorization"].split(", ")
    assert scope.split("/")[2:] == ["eu-central-1", "s3", "aws4_request"]
    again = AWSRequest("GET", scripted.endpoint_url + request.path, headers={"Range": sent["range"]})
    again.context["timestamp"] = sent["x-amz-date"]
    signer = S3SigV4Auth(Credentials("AKIASCRIPTED", "scripted-secret"), "s3", "eu-central-1")
    again.headers["X-Amz-Date"] = sent["x-amz-date"]
    again.headers["X-Amz-Content-SHA256"] = signer.payload(again)
    assert signed == f"SignedHeaders={signer.signed_headers(signer.headers_to_sign(again))}"
    signature = signer.signature(signer.string_to_sign(again, signer.canonical_request(again)), again)
    assert sent["authorization"].endswith(f"Signature={signature}")
    assert request.path == "/bucket/pre%20fix/%C3%A4~%2B/data/b-2"


def test_a_suffix_is_light_too_and_a_whole_object_is_not(light, scripted):
    scripted.answers(part(DATA, 1004, 1024), Answer(200, DATA))
    assert light.get_suffix(NAME, 20) == (DATA[-20:], 1024)
    assert light.get(NAME) == DATA  # botocore compares it with its checksum
    assert [is_light(request) for request in scripted.requests] == [True, False]


@pytest.mark.parametrize("is_named", [True, False])
def test_the_environments_endpoint_does_not_move_light_requests(scripted, monkeypatch, is_named):
    """obstore would take it for the address of the bucket, and request an object of another one."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1" if is_named else scripted.endpoint_url)
    scripted.answers(part(DATA, 0, 10))
    named = {"endpoint_url": scripted.endpoint_url} if is_named else {}
    with S3Storage("bucket", "p", S3Options(**named)) as storage:
        for _ in range(2):
            assert storage.get_range(NAME, 0, 10) == DATA[:10]
    assert [is_light(request) for request in scripted.requests] == [False, True]
    assert {request.path for request in scripted.requests} == {"/bucket/p/data/a-1"}


def test_variables_that_obstore_alone_reads_change_nothing(scripted, monkeypatch):
    key = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
    for name, value in {
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_REQUEST_PAYER": "true",
        "AWS_S3_EXPRESS": "true",
        "AWS_SERVER_SIDE_ENCRYPTION": "sse-c",
        "AWS_SSE_CUSTOMER_KEY_BASE64": key,
    }.items():
        monkeypatch.setenv(name, value)
    with opened(scripted, []) as storage:
        scripted.answers(part(DATA, 0, 10))
        storage.get_range(NAME, 0, 10)
        assert is_light(scripted.requests[-1])
        sent = set(scripted.requests[-1].lowered)
        assert "authorization" in sent
        assert not sent & {"x-amz-request-payer", "x-amz-server-side-encryption-customer-key", "x-amz-s3session-token"}
    # if obstore refuses a setting, botocore sends every request
    monkeypatch.setenv("AWS_CHECKSUM_ALGORITHM", "CRC32")
    with opened(scripted, []) as storage:
        scripted.answers(part(DATA, 0, 10))
        for _ in range(2):
            assert storage.get_range(NAME, 0, 10) == DATA[:10]
        assert [is_light(request) for request in scripted.requests] == [False, False]


def test_a_refusal_is_one_request(light, scripted, waits):
    for status, code, kind in ((404, "NoSuchKey", ObjectNotFound), (403, "AccessDenied", StorageMisconfigured)):
        scripted.reset()
        scripted.answers(error(status, code))
        with pytest.raises(kind, match="data/a-1"):
            light.get_range(NAME, 0, 10)
        assert [is_light(request) for request in scripted.requests] == [True]
    assert waits == []


@pytest.mark.parametrize(
    ("fault", "wait_s"),
    [
        (error(503, "SlowDown"), 1.0),
        (error(500, "InternalError"), 0.2),
        (Answer(429), 1.0),
        (Answer(502, b"<html>no</html>"), 0.2),
    ],
)
def test_a_passing_fault_is_repeated_by_the_clients_method_after_a_wait(light, scripted, waits, fault, wait_s):
    scripted.answers(fault, part(DATA, 0, 10))
    heard = Heard()
    with RequestContext(listeners=(heard,)).active():
        assert light.get_range(NAME, 0, 10) == DATA[:10]
    assert [is_light(request) for request in scripted.requests] == [True, False]
    assert (waits, heard.sent) == ([wait_s], 2)
    scripted.answers(part(DATA, 0, 10))
    light.get_range(NAME, 0, 10)
    assert is_light(scripted.requests[-1])


@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_attempts_are_bounded_whichever_way_they_go(scripted, attempts):
    with opened(scripted, [], max_attempts=attempts) as storage:
        scripted.answers(error(503, "SlowDown"))
        with pytest.raises(StorageUnavailable, match="SlowDown"):
            storage.get_range(NAME, 0, 10)
    assert len(scripted.requests) == attempts


def test_while_the_service_fails_nothing_is_light(scripted):
    with opened(scripted, [], max_attempts=2) as storage:
        scripted.answers(error(503, "SlowDown"))
        for _ in range(3):
            with pytest.raises(StorageUnavailable):
                storage.get_range(NAME, 0, 10)
        assert [is_light(request) for request in scripted.requests].count(True) == 1
        scripted.reset()
        scripted.answers(part(DATA, 0, 10))
        for _ in range(3):
            storage.get_range(NAME, 0, 10)
        assert [is_light(request) for request in scripted.requests] == [False, True, True]


def test_without_credentials_nothing_is_waited_for(light, scripted, waits):
    light.client._request_signer._credentials = None
    with pytest.raises(StorageMisconfigured, match="AWS_ACCESS_KEY_ID"):
        light.get_range(NAME, 0, 10)
    assert (scripted.requests, waits) == ([], [])


def test_after_a_lost_connection_the_clients_method_is_used(light, scripted, waits):
    def lose(request: Request) -> Answer:
        if is_light(request):
            raise ConnectionAbortedError
        return part(DATA, 0, 10)

    scripted.script = lose
    for _ in range(5):
        assert light.get_range(NAME, 0, 10) == DATA[:10]
    # obstore alone fails here, and it is not tried without end
    assert [is_light(request) for request in scripted.requests] == [True, False] * 3 + [False] * 2
    assert waits == [0.2] * 3


def test_answers_that_obstore_never_accepts_are_left_to_the_clients_method(light, scripted):
    scripted.answers(Answer(206, DATA[:10], {"Content-Range": "bytes 0-9/*"}))
    for _ in range(5):
        assert light.get_range(NAME, 0, 10) == DATA[:10]
    assert [is_light(request) for request in scripted.requests] == [True, False] * 3 + [False] * 2


@pytest.mark.parametrize(
    ("answer", "wasted_bytes"),
    [
        (Answer(206, DATA[:5], {"Content-Range": "bytes 0-9/1024"}, announced=10), 10),
        (Answer(503, b"40\r\n<Error>", {"Transfer-Encoding": "chunked"}), 10),
        (Answer(204), 0),
    ],
    ids=["a body that breaks off", "an error page that breaks off", "a status of neither kind"],
)
def test_after_an_incomplete_answer_the_clients_method_is_used(light, scripted, answer, wasted_bytes):
    scripted.answers(answer, part(DATA, 0, 10))
    heard = Heard()
    with RequestContext(listeners=(heard,)).active():
        assert light.get_range(NAME, 0, 10) == DATA[:10]
    assert (heard.sent, heard.wasted_bytes) == (2, wasted_bytes)
    assert [is_light(request) for request in scripted.requests] == [True, False]


def test_another_region_is_found_once(light, scripted, waits):
    """The service names the bucket's region. botocore follows, and obstore signs for that region from then on."""

    def script(request: Any) -> Answer:
        if "/eu-west-3/" in request.lowered.get("authorization", ""):
            return part(DATA, 0, 10) if request.method == "GET" else Answer(200)
        wrong = error(400, "AuthorizationHeaderMalformed", "expecting 'eu-west-3'")
        wrong.body = wrong.body.replace(b"</Error>", b"<Region>eu-west-3</Region></Error>")
        wrong.headers["x-amz-bucket-region"] = "eu-west-3"
        return wrong

    scripted.script = script
    assert light.get_range(NAME, 0, 10) == DATA[:10]
    followed = len(scripted.requests)
    assert is_light(scripted.requests[0]) and not is_light(scripted.requests[-1])
    for _ in range(2):
        assert light.get_range(NAME, 0, 10) == DATA[:10]
    assert [is_light(request) for request in scripted.requests[followed:]] == [True, True]
    assert waits == []


def test_nothing_is_sent_past_the_deadline_and_no_wait_passes_it(light, scripted, waits, monkeypatch):
    monkeypatch.setattr("tiered_index.storage.context.time", SimpleNamespace(monotonic=lambda: 100.0))
    scripted.answers(error(503, "SlowDown"))
    with deadline_at(100.0), pytest.raises(BudgetExceeded, match="data/a-1"):
        light.get_range(NAME, 0, 10)
    assert scripted.requests == []
    with deadline_at(100.1), pytest.raises(BudgetExceeded, match="SlowDown"):
        light.get_range(NAME, 0, 10)
    assert (len(scripted.requests), waits) == (1, [])


def test_credentials_are_asked_for_again(scripted, monkeypatch):
    """Credentials of a role are renewed during a reader's life."""
    rounds: list[int] = []

    def renewed() -> dict[str, str]:
        rounds.append(1)
        # due at once, because botocore renews credentials that expire within ten minutes, and refuses expired ones
        expires = datetime.now(UTC) + timedelta(minutes=9)
        key = {"access_key": f"AKIA{len(rounds)}", "secret_key": "s"}
        return key | {"token": f"token-{len(rounds)}", "expiry_time": expires.isoformat()}

    # obstore keeps credentials that are valid for more than five minutes
    monkeypatch.setattr(reads, "_CREDENTIALS_HOLD", timedelta(minutes=5))
    session = boto3.Session()
    session._session._credentials = RefreshableCredentials.create_from_metadata(renewed(), renewed, "test")
    monkeypatch.setattr("boto3.Session", lambda **settings: session)
    with opened(scripted, []) as storage:
        scripted.answers(part(DATA, 0, 10))
        until_s = time.monotonic() + 30
        tokens: set[str] = set()
        while len(tokens) < 2 and time.monotonic() < until_s:
            storage.get_range(NAME, 0, 10)
            tokens.add(scripted.requests[-1].lowered["x-amz-security-token"])
    assert len(tokens) == 2
    assert all(is_light(request) for request in scripted.requests)


def test_an_option_leaves_every_request_to_botocore(scripted):
    with opened(scripted, [], lean_gets=False) as storage:
        scripted.answers(part(DATA, 0, 10))
        storage.get_range(NAME, 0, 10)
        assert not is_light(scripted.requests[-1])


def test_behind_a_proxy_every_request_is_left_to_botocore(scripted, monkeypatch):
    with opened(scripted, []) as storage:
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.setenv("http_proxy", scripted.endpoint_url)
        scripted.answers(error(503, "SlowDown"), part(DATA, 0, 10))
        for _ in range(3):
            storage.get_range(NAME, 0, 10)
        assert [is_light(request) for request in scripted.requests] == [True, False, False, False]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_reads_without_the_runtime_of_its_parent(light, scripted):
    """Rust's threads are not in the child, and obstore would wait for them permanently."""
    scripted.answers(part(DATA, 0, 10))
    light.get_range(NAME, 0, 10)
    child = os.fork()
    if not child:
        signal.alarm(60)
        with opened(scripted, []) as storage:
            reads_well = [storage.get_range(NAME, 0, 10), light.get_range(NAME, 0, 10)] == [DATA[:10]] * 2
        os._exit(0 if reads_well else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [is_light(request) for request in scripted.requests] == [True, False, False, False]


@mock_aws
def test_moto_within_the_process_answers_ranges(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="bucket")
    with S3Storage("bucket", "p", S3Options(region="us-east-1")) as storage:
        storage.put(NAME, DATA)
        for start in range(4):
            assert storage.get_range(NAME, start, 10) == DATA[start : start + 10]
        assert storage.get_suffix(NAME, 10) == (DATA[-10:], 1024)
        with pytest.raises(ObjectNotFound):
            storage.get_range("data/gone", 0, 1)
