"""Large objects in parts: their sizes, what a failure leaves, and completions without a clear answer."""

import contextlib
from collections.abc import Iterator

import pytest

from tests.storage.scripted_server import Answer, Request, ScriptedServer, error
from tests.support.object_store import unchunked
from tiered_index.errors import ObjectNotFound, StorageUnavailable
from tiered_index.storage import base
from tiered_index.storage.s3.options import S3Options
from tiered_index.storage.s3.storage import S3Storage

BEGUN = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
DONE = b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"
MODIFIED = "Mon, 02 Nov 2026 10:00:00 GMT"


@pytest.fixture
def s3(scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Storage]:
    """A storage whose parts have 4 bytes."""
    monkeypatch.setattr(base, "PART_BYTES", 4)
    options = S3Options(endpoint_url=scripted.endpoint_url, max_attempts=2, sse="aws:kms", sse_kms_key_id="key-1")
    with S3Storage("bucket", "p", options, sleep=lambda seconds: None) as storage:
        yield storage


def answering(scripted: ScriptedServer, part: Answer | None = None, end: Answer | None = None, head: int = 404) -> None:
    def script(request: Request) -> Answer:
        if request.method == "POST":
            return Answer(200, BEGUN) if "uploads" in request.path else end or Answer(200, DONE)
        if request.method == "PUT" and part is not None and "partNumber" in request.path:
            return part
        if request.method == "HEAD":
            return Answer(head, b"x" * 30, {"Last-Modified": MODIFIED})
        return Answer(200, headers={"ETag": '"tag"', "x-amz-checksum-crc32": "AbCdEg=="})

    scripted.script = script


def test_a_large_object_is_sent_in_parts_with_their_checksums(s3: S3Storage, scripted: ScriptedServer) -> None:
    answering(scripted)
    data = bytes(range(30))
    with s3.open_writer("object") as writer:
        for start in range(0, 30, 3):
            writer.write(data[start : start + 3])
    bodies = [body_of(request) for request in scripted.requests if request.method == "PUT"]
    assert [len(body) for body in bodies] == [4, 4, 4, 4, 4, 4, 4, 2]
    assert b"".join(bodies) == data
    # the completion repeats the checksum of each part
    body = scripted.requests[-1].body
    assert body.count(b"<ChecksumCRC32>AbCdEg==</ChecksumCRC32>") == 8
    assert body.count(b"<PartNumber>8</PartNumber>") == 1


def body_of(request: Request) -> bytes:
    """Return the body without boto3's chunks, of which the last one is the checksum."""
    return unchunked(request.body) if "aws-chunked" in request.lowered.get("content-encoding", "") else request.body


def test_a_small_object_is_one_put_and_encryption_is_asked_for_on_every_write(
    s3: S3Storage, scripted: ScriptedServer
) -> None:
    answering(scripted)
    with s3.open_writer("object") as writer:
        writer.write(b"1234")
        assert scripted.requests == []
    assert scripted.paths() == ["PUT /bucket/p/object"]
    s3.put("a", b"x")
    s3.put_if_absent("b", b"x")
    s3.open_writer("c").write(b"12345")
    begun = [request for request in scripted.requests if "partNumber" not in request.path][:4]
    assert [request.method for request in begun] == ["PUT", "PUT", "PUT", "POST"]
    for request in begun:
        assert request.lowered["x-amz-server-side-encryption"] == "aws:kms"
        assert request.lowered["x-amz-server-side-encryption-aws-kms-key-id"] == "key-1"


@pytest.mark.parametrize("end", ["exception", "refused part"])
def test_a_writer_that_does_not_finish_aborts_its_upload(s3: S3Storage, scripted: ScriptedServer, end: str) -> None:
    answering(scripted, error(403, "AccessDenied") if end == "refused part" else None)
    said = "AccessDenied" if end == "refused part" else "stop"
    with pytest.raises(Exception, match=said), s3.open_writer("object") as writer:
        writer.write(b"12345")
        raise RuntimeError("stop")
    assert [request.method for request in scripted.requests] == ["POST", "PUT", "DELETE"]


@pytest.mark.parametrize(
    "end", [Answer(200), error(404, "NoSuchUpload"), error(500, "InternalError")], ids=["empty", "404", "500"]
)
def test_a_completion_without_a_clear_answer_is_looked_up(s3: S3Storage, scripted: ScriptedServer, end: Answer) -> None:
    """The answer to an own successful request may be lost: then its repeat finds no upload."""
    answering(scripted, end=end, head=200)
    with s3.open_writer("object") as writer:
        writer.write(bytes(30))
    answering(scripted, end=end)
    with pytest.raises((StorageUnavailable, ObjectNotFound)), s3.open_writer("object") as writer:
        writer.write(bytes(30))
    assert scripted.requests[-1].method == "DELETE"


@pytest.mark.parametrize("is_own", [True, False])
def test_a_completion_is_not_taken_for_an_earlier_object_of_the_same_size(
    s3: S3Storage, scripted: ScriptedServer, is_own: bool
) -> None:
    """As when a damaged object is replaced by its copy while the service fails."""

    def script(request: Request) -> Answer:
        if request.method == "HEAD":
            begun = scripted.requests[0].lowered["x-amz-meta-attempt"]
            meta = {"x-amz-meta-attempt": begun if is_own else "earlier", "Last-Modified": MODIFIED}
            return Answer(200, b"x" * 30, meta)
        if request.method == "POST":
            return Answer(200, BEGUN) if "uploads" in request.path else error(500, "InternalError")
        return Answer(200, headers={"ETag": '"tag"'})

    scripted.script = script
    outcome = contextlib.nullcontext() if is_own else pytest.raises(StorageUnavailable)
    with outcome, s3.open_writer("object") as writer:
        writer.write(bytes(30))


def test_purge_drops_old_uploads_of_its_prefix_and_names_the_others(s3: S3Storage, scripted: ScriptedServer) -> None:
    began = "<Upload><Key>p/{}</Key><UploadId>u</UploadId><Initiated>2026-11-0{}T00:00:00Z</Initiated></Upload>"
    page = f"<ListMultipartUploadsResult>{began.format('a', 1)}{began.format('b', 2)}</ListMultipartUploadsResult>"
    scripted.script = lambda request: Answer(200, page.encode()) if request.method == "GET" else Answer(204)
    second_ms = 1_793_577_600_000  # 2026-11-02T00:00:00Z
    assert s3.purge(second_ms) == ("b",)
    assert scripted.paths() == ["GET /bucket", "DELETE /bucket/p/a"]
    assert "prefix=p%2F" in scripted.requests[0].path
