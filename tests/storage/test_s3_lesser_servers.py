"""`S3Storage` on servers that lack a part of S3: it works round what it can, and names what it needs."""

import base64
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.conftest import WAYS
from tests.storage.scripted_server import Answer, Request, ScriptedServer, answer_of, error, part
from tests.storage.test_s3_answers import DATA, listing
from tests.storage.test_s3_writer import BEGUN
from tests.support.object_store import Store, unchunked
from tiered_index.errors import ConfigError, InvalidArgument, StorageError, StorageMisconfigured, StorageUnavailable
from tiered_index.storage.base import BULK_DELETES, PART_BYTES, RANGES, START_AFTER
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.probe import check_storage, probe
from tiered_index.storage.s3.options import S3Options
from tiered_index.storage.s3.storage import S3Storage

CHUNKED = b"400\r\n" + DATA + b"\r\n0\r\n\r\n"
MODIFIED = "Mon, 02 Nov 2026 10:00:00 GMT"
LISTED = (
    b"<ListBucketResult><Contents><Key>pre/fix/object</Key><Size>7</Size>"
    b"<LastModified>2026-11-02T10:00:00Z</LastModified></Contents></ListBucketResult>"
)


def opened(scripted: ScriptedServer, **options: object) -> S3Storage:
    settings = S3Options(endpoint_url=scripted.endpoint_url, max_attempts=2, **options)  # type: ignore[arg-type]
    return S3Storage("bucket", "pre/fix", settings, sleep=lambda seconds: None)


@pytest.fixture
def s3(scripted: ScriptedServer) -> Iterator[S3Storage]:
    with opened(scripted) as storage:
        yield storage


CHUNKED_RANGE = Answer(206, CHUNKED, {"Transfer-Encoding": "chunked", "Content-Range": "bytes 0-1023/2000"})
WHOLE = {"with its length": Answer(200, DATA), "chunked": Answer(200, CHUNKED, {"Transfer-Encoding": "chunked"})}


@pytest.mark.parametrize("answer", WHOLE.values(), ids=WHOLE)
def test_boto3_reads_a_whole_object_in_place_of_a_range_up_to_the_ranges_end(
    s3: S3Storage, scripted: ScriptedServer, answer: Answer
) -> None:
    for refused in (answer, CHUNKED_RANGE):
        scripted.answers(refused)
        with pytest.raises(StorageError, match=r"add client=boto3 to the storage's URI"):
            s3.get_range("object", 0, 1024)
    with opened(scripted, client="boto3") as storage:
        assert storage.get_range("object", 0, 1024) == DATA
        scripted.answers(answer)
        metered = MeteredStorage(storage)
        assert metered.get_range("object", 10, 20) == DATA[10:30]
        # the bytes before the range are delivered, too
        assert metered.total.bytes_read == 30
        with pytest.raises(InvalidArgument, match="1024 bytes"):
            storage.get_range("object", 1000, 25)
        assert storage.shortfalls().keys() <= {RANGES}
        # a chunked body that is shorter than its range
        scripted.answers(Answer(206, CHUNKED, {"Transfer-Encoding": "chunked", "Content-Range": "bytes 0-1024/2000"}))
        with pytest.raises(StorageUnavailable):
            storage.get_range("object", 0, 1025)


def test_a_server_without_ranges_is_refused_with_the_name_of_the_client_that_reads_it(
    scripted: ScriptedServer, tmp_path: Path
) -> None:
    store = Store(tmp_path)

    def script(request: Request) -> Answer:
        headers = {name: value for name, value in request.lowered.items() if name != "range"}
        is_framed = "aws-chunked" in headers.get("content-encoding", "")
        body = unchunked(request.body) if is_framed else request.body
        return answer_of(store.answer(request.method, request.path, headers, body))

    scripted.script = script
    with opened(scripted) as storage, pytest.raises(StorageMisconfigured, match=r"bytes 1000-.*add client=boto3"):
        check_storage(storage)
    with opened(scripted, client="boto3") as storage:
        states = {finding.what: finding.state for finding in probe(storage, uploads=False)}
        assert states.pop(RANGES) == "worked round"
        assert set(states.values()) == {"ok"}


def test_a_range_without_its_place_names_the_missing_header(s3: S3Storage, scripted: ScriptedServer) -> None:
    scripted.answers(Answer(206, DATA[10:30]))
    with pytest.raises(StorageMisconfigured, match="Content-Range header") as caught:
        s3.get_range("object", 10, 20)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "refusal",
    [
        error(400, "MissingContentMD5"),
        error(400, "InvalidRequest", "Missing required header for this request: Content-MD5"),
        error(501, "NotImplemented"),
    ],
    ids=["MissingContentMD5", "InvalidRequest", "NotImplemented"],
)
def test_objects_are_deleted_singly_once_a_bulk_delete_was_refused(
    s3: S3Storage, scripted: ScriptedServer, refusal: Answer
) -> None:
    scripted.script = lambda request: refusal if request.method == "POST" else Answer(204)
    s3.delete_many(["a"])
    s3.delete_many(["a", "b"])
    s3.delete_many(["c", "d"])
    assert [request.method for request in scripted.requests] == ["DELETE", "POST", *["DELETE"] * 4]
    assert "its own request" in s3.shortfalls()[BULK_DELETES]
    # Google's answer for a missing object, or for the repeat of a request whose answer was lost
    scripted.reset()
    scripted.answers(error(404, "NoSuchKey"), Answer(204), error(404, "NoSuchKey"))
    s3.delete_many(["gone", "there"])
    s3.delete_many(["gone"])
    assert [request.method for request in scripted.requests] == ["DELETE"] * 3


def test_a_bulk_delete_without_permission_is_not_repeated_singly(s3: S3Storage, scripted: ScriptedServer) -> None:
    scripted.answers(error(403, "AccessDenied"))
    with pytest.raises(StorageMisconfigured, match="AccessDenied"):
        s3.delete_many(["a", "b"])
    assert [request.method for request in scripted.requests] == ["POST"]


def test_names_that_a_listing_should_not_have_are_left_out(s3: S3Storage, scripted: ScriptedServer) -> None:
    scripted.answers(listing("pre/fix/log/1", "pre/fix/log/2", "pre/fix/log/3"))
    assert [info.name for info in s3.list("log/", start_after="log/2")] == ["log/3"]
    assert "start-after" in s3.shortfalls()[START_AFTER]
    assert s3.shortfalls().keys() == {START_AFTER}


@pytest.mark.parametrize("headers", [{}, {"Last-Modified": MODIFIED}], ids=["both", "Last-Modified"])
def test_headers_that_a_head_lacks_are_taken_from_a_listing(
    s3: S3Storage, scripted: ScriptedServer, headers: dict[str, str]
) -> None:
    bare = Answer(200, b"", headers | {"Transfer-Encoding": "chunked"})
    scripted.script = lambda request: bare if request.method == "HEAD" else Answer(200, LISTED)
    info = s3.head("object")
    assert (info.size_bytes, info.modified_ms) == (7, 1_793_613_600_000)


def test_a_field_that_is_needed_is_named(s3: S3Storage, scripted: ScriptedServer) -> None:
    scripted.answers(Answer(200, LISTED.replace(b"LastModified", b"Unmodified")))
    with pytest.raises(StorageMisconfigured, match="LastModified"):
        list(s3.list())
    scripted.answers(Answer(200))
    scripted.script = lambda request: Answer(200, BEGUN if request.method == "POST" else b"")
    with pytest.raises(StorageMisconfigured, match="ETag"):
        s3.open_writer("object").write(bytes(PART_BYTES + 1))


def test_checksums_are_sent_only_if_required_where_the_environment_says_so(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.answers(Answer(200, headers={"ETag": '"tag"'}))
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    with opened(scripted) as storage:
        storage.put_if_absent("object", DATA)
    for request in scripted.requests:
        headers = request.lowered
        assert headers["content-md5"] == base64.b64encode(hashlib.md5(DATA).digest()).decode()
        assert not [name for name in headers if "checksum" in name or "trailer" in name]
    monkeypatch.delenv("AWS_REQUEST_CHECKSUM_CALCULATION")
    scripted.reset()
    scripted.answers(Answer(200))
    with opened(scripted) as storage:
        storage.put("object", DATA)
    assert scripted.requests[0].lowered["x-amz-sdk-checksum-algorithm"] == "CRC32"


def test_a_bare_404_of_a_write_names_the_wrong_endpoint(s3: S3Storage, scripted: ScriptedServer) -> None:
    scripted.answers(Answer(404))
    for write in (lambda: s3.put("a", b"x"), lambda: s3.open_writer("a").write(bytes(PART_BYTES + 1))):
        with pytest.raises(StorageMisconfigured, match="this is not an S3 service"):
            write()


@pytest.mark.parametrize("client", WAYS.values(), ids=WAYS.keys())
def test_the_requester_pays_for_every_request_if_the_uri_says_so(scripted: ScriptedServer, client: str | None) -> None:
    scripted.answers(part(DATA, 0, 1))
    with opened(scripted, request_payer="requester", client=client) as storage:
        for _ in range(2):
            storage.get_range("object", 0, 1)
        scripted.answers(Answer(200))
        storage.put("object", b"x")
        storage.delete_many(["object"])
    assert [request.lowered["x-amz-request-payer"] for request in scripted.requests] == ["requester"] * 4
    with pytest.raises(ConfigError, match="request_payer"):
        S3Options(request_payer="owner")
