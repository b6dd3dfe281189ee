"""`S3Storage` and answers that a good server never gives: the right bytes after a passing fault, else a typed error."""

import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from tests.storage.conftest import WAYS
from tests.storage.scripted_server import Answer, ScriptedServer, error, part, scripted_server
from tiered_index.errors import (
    InvalidArgument,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    StorageMisconfigured,
    StorageUnavailable,
    TieredIndexError,
)
from tiered_index.storage.base import PART_BYTES, Storage
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.probe import probe_put_if_absent
from tiered_index.storage.s3 import boto
from tiered_index.storage.s3.options import S3Options
from tiered_index.storage.s3.storage import S3Storage

DATA = bytes(range(256)) * 4


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[ScriptedServer, S3Storage]]:
    """One server and one client for all tests here, since a client takes longer to build than any of them runs."""
    with pytest.MonkeyPatch.context() as environment, scripted_server() as server:
        environment.setenv("AWS_ACCESS_KEY_ID", "AKIASCRIPTED")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "scripted-secret")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        options = S3Options(endpoint_url=server.endpoint_url, max_attempts=3)
        with S3Storage("bucket", "pre/fix", options) as storage:
            yield server, storage


@pytest.fixture
def scripted(running: tuple[ScriptedServer, S3Storage]) -> ScriptedServer:
    running[0].reset()
    return running[0]


@pytest.fixture
def waits() -> list[float]:
    return []


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def s3(
    request: pytest.FixtureRequest,
    running: tuple[ScriptedServer, S3Storage],
    scripted: ScriptedServer,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> S3Storage:
    """A storage that reads through obstore or boto3, with the one client of boto3."""
    client = running[1].client
    monkeypatch.setattr(boto, "client_of", lambda *_: client)
    return storage_of(running[1].options, waits, request.param)


def storage_of(options: S3Options, waits: list[float], client: str | None) -> S3Storage:
    longest: Any = {"sleep": waits.append, "uniform": lambda low, high: high}
    return S3Storage("bucket", "pre/fix", replace(options, client=client), **longest)


def impatient(scripted: ScriptedServer, read_timeout_s: float, client: str | None = "boto3") -> S3Storage:
    """Return a storage for answers that never arrive. Others are patient: a busy machine can delay any answer."""
    options = S3Options(endpoint_url=scripted.endpoint_url, max_attempts=1, read_timeout_s=read_timeout_s)
    return storage_of(options, [], client)


WRONG_RANGES = {
    "200 with just the range": Answer(200, DATA[10:30]),
    "200 with the range and its Content-Range": Answer(200, DATA[10:30], {"Content-Range": "bytes 10-29/1024"}),
    "a Content-Range that is none": Answer(206, DATA[10:30], {"Content-Range": "bytes all of them"}),
    "another start": part(DATA, 11, 31),
    "fewer bytes than asked": part(DATA, 10, 29),
    "fewer bytes than asked, of an unknown size": Answer(206, DATA[10:29], {"Content-Range": "bytes 10-28/*"}),
    "more bytes than asked": part(DATA, 10, 31),
    "a shorter body than Content-Range says": Answer(206, DATA[10:20], {"Content-Range": "bytes 10-29/1024"}),
    "a longer body than Content-Range says": Answer(206, DATA[10:50], {"Content-Range": "bytes 10-29/1024"}),
    "a body that breaks off": Answer(206, DATA[10:20], {"Content-Range": "bytes 10-29/1024"}, announced=20),
    "an empty body": Answer(206, b"", {"Content-Range": "bytes 10-29/1024"}, announced=20),
}


@pytest.mark.parametrize("answer", WRONG_RANGES.values(), ids=WRONG_RANGES.keys())
def test_a_range_that_is_not_what_was_asked_is_never_returned(s3, scripted, answer):
    scripted.answers(answer)
    with pytest.raises(StorageError, match=r"bytes 10-29 of 'object' in s3://bucket") as caught:
        s3.get_range("object", 10, 20)
    # obstore refuses some answers that boto3 may accept
    assert isinstance(caught.value, StorageUnavailable) or "client=boto3" in str(caught.value)
    assert 1 <= len(scripted.requests) <= 3
    if "(3 attempts)" in str(caught.value):
        scripted.answers(answer, answer, part(DATA, 10, 30))
        assert s3.get_range("object", 10, 20) == DATA[10:30]


def test_ranges_are_read_through_one_connection_and_one_beyond_the_end_is_the_callers_mistake(s3, scripted):
    scripted.answers(part(DATA, 10, 30))
    for _ in range(20):
        assert s3.get_range("object", 10, 20) == DATA[10:30]
    assert scripted.requests[0].lowered["range"] == "bytes=10-29"
    assert scripted.paths() == ["GET /bucket/pre/fix/object"] * 20
    # obstore may open a new connection if the last one returns a moment late
    assert scripted.connections < 10
    scripted.requests.clear()
    scripted.answers(part(DATA, 1000, 1024))
    with pytest.raises(InvalidArgument, match="1024 bytes"):
        s3.get_range("object", 1000, 25)
    scripted.answers(error(416, "InvalidRange"))
    with pytest.raises(InvalidArgument):
        s3.get_range("object", 2000, 1)
    assert len(scripted.requests) == 2


def test_a_body_that_breaks_off_is_fetched_again(s3, scripted, waits):
    scripted.answers(WRONG_RANGES["a body that breaks off"], part(DATA, 10, 30))
    metered = MeteredStorage(s3)
    assert metered.get_range("object", 10, 20) == DATA[10:30]
    # with those of the body that broke off
    assert (metered.total.requests, metered.total.bytes_read) == (2, 40)
    scripted.answers(Answer(200, DATA[:99], announced=1024), Answer(200, b"", announced=1024), Answer(200, DATA))
    assert s3.get("object") == DATA
    assert waits == [0.2, 0.2, 0.4]  # the longest waits allowed: 0.1 s * 2**n
    waits.clear()
    scripted.answers(error(503, "SlowDown"), error(429, "TooManyRequests"), part(DATA, 10, 30))
    assert s3.get_range("object", 10, 20) == DATA[10:30]
    assert waits == [1.0, 2.0]  # after throttling 0.5 s * 2**n


@pytest.mark.parametrize("client", WAYS.values(), ids=WAYS.keys())
def test_a_body_that_stalls_is_given_up(scripted, client, never):
    # a client whose time ends before the headers arrive says so, and learns nothing of the body
    for read_timeout_s in (0.3, 3.0, 30.0):
        scripted.reset()
        with impatient(scripted, read_timeout_s, client) as s3, pytest.raises(StorageUnavailable) as caught:
            scripted.answers(Answer(200, DATA[:100], announced=1024, stalled=never))
            s3.get("object")
        if "body" in str(caught.value):
            break
    assert re.search(r"body.*\(1 attempts\)", str(caught.value))
    assert len(scripted.requests) == 1


def test_a_suffix_is_of_one_version(s3, scripted):
    sized = {
        size: Answer(200, DATA[:size], {"Last-Modified": "Mon, 02 Nov 2026 10:00:00 GMT"}) for size in (0, 999, 1024)
    }
    scripted.answers(sized[1024], part(DATA, 1004, 1024))
    assert s3.get_suffix("object", 20) == (DATA[-20:], 1024)
    assert [request.method for request in scripted.requests] == ["HEAD", "GET"]
    assert scripted.requests[-1].lowered["range"] == "bytes=1004-1023"
    scripted.answers(sized[1024], part(DATA, 0, 1024))
    assert s3.get_suffix("object", 5000) == (DATA, 1024)
    scripted.answers(sized[0])
    assert s3.get_suffix("object", 20) == (b"", 0)
    # it is replaced between both requests by a longer one, and by a shorter one
    longer, shorter = part(DATA, 979, 999), error(416, "InvalidRange")
    scripted.answers(sized[999], longer, sized[1024], shorter, sized[999], part(DATA, 979, 999, total=999))
    assert s3.get_suffix("object", 20) == (DATA[979:999], 999)
    scripted.script = lambda request: sized[999] if request.method == "HEAD" else longer
    with pytest.raises(StorageUnavailable, match=r"replaced.*3 attempts"):
        s3.get_suffix("object", 20)


def test_put_if_absent_sends_the_condition_and_reads_412(s3, scripted):
    scripted.answers(Answer(200, headers={"ETag": '"x"'}), error(412, "PreconditionFailed"))
    s3.put_if_absent("log/1", b"data")
    with pytest.raises(ObjectExists) as caught:
        s3.put_if_absent("log/1", b"data")
    assert caught.value.name == "log/1"
    assert [request.headers["If-None-Match"] for request in scripted.requests] == ["*", "*"]
    scripted.answers(Answer(200, headers={"ETag": '"x"'}))
    s3.put("log/1", b"data")
    assert "If-None-Match" not in scripted.requests[-1].headers
    assert all("x-amz-checksum-crc32" in request.lowered for request in scripted.requests)
    # its own success, whose answer was lost: as the contract says, only the content can show that
    scripted.answers(error(500, "InternalError"), error(412, "PreconditionFailed"))
    with pytest.raises(ObjectExists):
        s3.put_if_absent("log/1", b"attempt 17")


def test_a_conditional_conflict_is_repeated_within_a_bound(s3, scripted, waits):
    conflict = error(409, "ConditionalRequestConflict")
    scripted.answers(conflict, conflict, Answer(200, headers={"ETag": '"x"'}))
    s3.put_if_absent("log/1", b"data")
    assert (len(scripted.requests), len(waits)) == (3, 2)
    scripted.answers(conflict, error(412, "PreconditionFailed"))
    with pytest.raises(ObjectExists):
        s3.put_if_absent("log/1", b"data")
    scripted.requests.clear()
    scripted.answers(conflict)
    with pytest.raises(StorageUnavailable, match="3 attempts"):
        s3.put_if_absent("log/1", b"data")
    assert len(scripted.requests) == 3
    waits.clear()
    scripted.answers(conflict, listing("pre/fix/a"))
    assert [info.name for info in s3.list()] == ["a"]
    scripted.answers(conflict, Answer(204))
    s3.delete_many(["a"])
    assert len(waits) == 2


BROKEN_OFF = b"40\r\n<Error><Co", {"Transfer-Encoding": "chunked"}
ERRORS: dict[str, tuple[Answer, type[TieredIndexError]]] = {
    "503 SlowDown": (error(503, "SlowDown"), StorageUnavailable),
    "500": (error(500, "InternalError"), StorageUnavailable),
    "502 of a proxy": (Answer(502, b"<html>Bad gateway</html>"), StorageUnavailable),
    "429": (error(429, "TooManyRequests"), StorageUnavailable),
    "400 RequestTimeout": (error(400, "RequestTimeout"), StorageUnavailable),
    "409 of a read": (error(409, "ConcurrentModification"), StorageUnavailable),
    "403 QuotaExceeded": (error(403, "QuotaExceeded"), StorageUnavailable),
    "507 of any code": (error(507, "NoSpace"), StorageUnavailable),
    "InsufficientCapacity": (error(400, "InsufficientCapacity"), StorageUnavailable),
    "403 AccessDenied": (error(403, "AccessDenied"), StorageMisconfigured),
    "403 of a proxy": (Answer(403, b"go away"), StorageMisconfigured),
    "401": (error(401, "Unauthorized"), StorageMisconfigured),
    "400 ExpiredToken": (error(400, "ExpiredToken"), StorageMisconfigured),
    "404 NoSuchBucket": (error(404, "NoSuchBucket"), StorageMisconfigured),
    "501 NotImplemented": (error(501, "NotImplemented"), StorageMisconfigured),
    "400 of another kind": (error(400, "InvalidRequest"), StorageMisconfigured),
    "404 NoSuchKey": (error(404, "NoSuchKey"), ObjectNotFound),
    "400 that breaks off": (Answer(400, *BROKEN_OFF), StorageUnavailable),
    "404 that breaks off": (Answer(404, *BROKEN_OFF), StorageUnavailable),
}


READS: tuple[Callable[[Storage], object], ...] = (lambda s3: s3.get("object"), lambda s3: s3.get_range("object", 0, 1))


@pytest.mark.parametrize(("answer", "kind"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_name_the_remedy(s3, scripted, answer, kind):
    scripted.answers(answer)
    for read in READS:
        scripted.requests.clear()
        with pytest.raises(kind) as caught:
            read(s3)
        text = str(caught.value)
        assert "object" in text
        assert "s3://bucket/pre/fix" in text
        assert "AKIASCRIPTED" not in text
        assert "scripted-secret" not in text
        # a repeat of the others would not help
        assert len(scripted.requests) == 1 or kind is StorageUnavailable


def test_a_lost_connection_and_a_dead_server_are_unavailable(scripted, never):
    with socket.socket() as bound:  # to a port without a listener
        bound.bind(("127.0.0.1", 0))
        gone = S3Options(endpoint_url=f"http://127.0.0.1:{bound.getsockname()[1]}", max_attempts=1)
        with S3Storage("bucket", "", gone) as storage, pytest.raises(StorageUnavailable):
            storage.put("object", b"x")
    with impatient(scripted, 0.3) as s3:
        scripted.answers(Answer(200, held=never))
        for call in (lambda: s3.put("object", b"x"), lambda: s3.head("object"), lambda: list(s3.list())):
            with pytest.raises(StorageUnavailable):
                call()


def test_all_kinds_of_faults_have_one_bound(scripted, waits):
    options = S3Options(endpoint_url=scripted.endpoint_url, max_attempts=4)
    cut = Answer(206, DATA[:5], {"Content-Range": "bytes 0-9/1024"}, announced=10)
    faults = error(500, "InternalError"), cut, error(409, "OperationAborted")
    with S3Storage("bucket", "", options, sleep=waits.append) as storage:
        scripted.answers(*faults, part(DATA, 0, 10))
        assert storage.get_range("object", 0, 10) == DATA[:10]
        scripted.requests.clear()
        scripted.answers(*faults)
        with pytest.raises(StorageUnavailable, match=r"\(4 attempts\)"):
            storage.get_range("object", 0, 10)
    assert len(scripted.requests) == 4


def test_a_head_of_a_missing_bucket_is_not_a_missing_object(s3, scripted):
    scripted.answers(Answer(404), error(404, "NoSuchBucket"))
    with pytest.raises(StorageMisconfigured, match="create the bucket"):
        s3.head("object")
    scripted.answers(Answer(404), error(404, "NoSuchKey"), Answer(404))
    for _ in range(2):
        with pytest.raises(ObjectNotFound, match="'object'"):
            s3.head("object")
    target = "/bucket/pre/fix/object"
    assert scripted.paths()[2:] == [f"HEAD {target}", "GET /bucket/pre/fix/probe/nothing", f"HEAD {target}"]
    scripted.answers(error(404, "NoSuchBucket"))
    for call in (
        lambda: s3.put("a", b"x"),
        lambda: s3.put_if_absent("a", b"x"),
        lambda: list(s3.list()),
        lambda: s3.delete_many(["a"]),
        lambda: s3.open_writer("a").write(bytes(PART_BYTES + 1)),
        lambda: probe_put_if_absent(s3),
    ):
        with pytest.raises(StorageMisconfigured, match=r"s3://bucket/.*create the bucket"):
            call()


def listing(*keys: str, token: str = "") -> Answer:
    items = "".join(
        f"<Contents><Key>{key}</Key><Size>1</Size><LastModified>2026-11-01T00:00:00Z</LastModified></Contents>"
        for key in keys
    )
    more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    return Answer(200, f"<?xml version='1.0'?><ListBucketResult>{items}{more}</ListBucketResult>".encode())


def test_list_pages_skips_foreign_keys_and_is_lazy(s3, scripted):
    scripted.answers(listing("pre/fix/", "pre/fix/a", "pre/fix/b c", token="next"), listing("pre/fix/d"))
    listed = s3.list("", start_after="A")
    assert scripted.requests == []
    assert next(listed).name == "a"
    # obstore takes 1,000 names in one step, however small the pages are
    assert len(scripted.requests) == (2 if s3.options.client is None else 1)
    assert [info.name for info in listed] == ["d"]
    assert "start-after=pre%2Ffix%2FA" in scripted.requests[0].path
    assert "continuation-token=next" in scripted.requests[1].path


PAGE_OF_HTML = b"<html><head><title>Welcome</title></head><body/></html>"


@pytest.mark.parametrize(
    ("status", "body", "kind", "error_type"),
    [
        (200, PAGE_OF_HTML, "text/html", StorageMisconfigured),  # otherwise a writer would begin an index there
        (200, b"", "text/plain", StorageMisconfigured),
        (404, PAGE_OF_HTML, "text/html; charset=utf-8", StorageMisconfigured),  # otherwise an object would seem lost
        (404, b'{"detail": "Not Found"}', "application/json", StorageMisconfigured),
        (501, PAGE_OF_HTML, "text/html", StorageMisconfigured),
        (503, PAGE_OF_HTML, "text/html", StorageUnavailable),
    ],
)
def test_an_endpoint_that_is_no_s3_is_said_to_be_none(s3, scripted, status, body, kind, error_type):
    scripted.answers(Answer(status, body, {"Content-Type": kind}))
    with pytest.raises(error_type, match="this is not an S3 service: correct the endpoint's URL"):
        list(s3.list())
    # obstore takes a page of HTML for a listing without objects
    assert len(scripted.requests) <= (3 if status == 503 else 2)
    if status >= 400:
        with pytest.raises(error_type, match="not an S3 service"):
            s3.get_range("object", 0, 10)


def test_a_listing_out_of_order_or_without_end_is_refused(s3, scripted):
    scripted.answers(listing("pre/fix/b", "pre/fix/a"))
    with pytest.raises(StorageMisconfigured, match="order"):
        list(s3.list())
    scripted.answers(Answer(200, b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>"))
    with pytest.raises(StorageError):
        list(s3.list())
    scripted.answers(listing("pre/fix/a", token="same"))
    with pytest.raises(StorageMisconfigured):
        list(s3.list())
    if s3.options.client is not None:
        # obstore takes a short page without a token for the last one (`list_whole` does not)
        endless = listing("pre/fix/a", token="t").body.replace(b"<NextContinuationToken>t</NextContinuationToken>", b"")
        scripted.answers(Answer(200, endless), listing("pre/fix/b"))
        assert [info.name for info in s3.list()] == ["a", "b"]
        scripted.answers(Answer(200, endless))
        with pytest.raises(StorageMisconfigured, match="order"):
            list(s3.list())
    scripted.answers(Answer(200, b"<ListBucketResult><Contents>"))
    with pytest.raises(StorageUnavailable):
        list(s3.list())


def test_delete_many_sends_batches_and_raises_every_failure(s3, scripted):
    scripted.answers(Answer(200, b"<DeleteResult></DeleteResult>"))
    s3.delete_many(f"name-{n}" for n in range(2500))
    assert [request.body.count(b"<Key>") for request in scripted.requests] == [1000, 1000, 500]
    failure = "<Error><Key>pre/fix/{}</Key><Code>{}</Code><Message>m</Message></Error>"
    for code, kind in (("InternalError", StorageUnavailable), ("AccessDenied", StorageMisconfigured)):
        body = f"<DeleteResult>{failure.format('x', code)}{failure.format('y', 'InternalError')}</DeleteResult>"
        scripted.answers(Answer(200, body.encode()))
        with pytest.raises(kind, match=r"2 failed .*pre/fix/x.*pre/fix/y"):
            s3.delete_many(["x", "y", "z"])


def test_uploads_are_listed_over_pages(s3, scripted):
    def page(key: str, day: int, more: str = "") -> Answer:
        began = f"<Initiated>2026-11-0{day}T00:00:00Z</Initiated>"
        upload = f"<Upload><Key>pre/fix/{key}</Key><UploadId>u</UploadId>{began}</Upload>"
        return Answer(200, f"<ListMultipartUploadsResult>{upload}{more}</ListMultipartUploadsResult>".encode())

    more = "<IsTruncated>true</IsTruncated><NextKeyMarker>k</NextKeyMarker><NextUploadIdMarker>u</NextUploadIdMarker>"
    scripted.answers(page("a", 1, more), page("b", 2))
    assert s3.purge(0) == ("a", "b")
    assert "key-marker=k&upload-id-marker=u" in scripted.requests[-1].path
    scripted.answers(page("a", 1, "<IsTruncated>true</IsTruncated>"))
    with pytest.raises(StorageUnavailable, match="NextKeyMarker"):
        s3.purge(0)
