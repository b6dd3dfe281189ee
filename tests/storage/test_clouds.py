"""`gs://` against a stand-in of Google's XML API. `az://` is in `tests/real_s3`, against Azurite."""

import json
import time
import uuid
from collections.abc import Iterator

import pytest

from tests.support.google_server import GoogleServer, google_server
from tests.support.object_store import Reply, error
from tiered_index import IndexReader, IndexService
from tiered_index.errors import ConfigError, InvalidArgument, StorageMisconfigured, StorageUnavailable
from tiered_index.storage.base import Storage
from tiered_index.storage.clouds import CloudStorage
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.opening import open_storage
from tiered_index.storage.probe import probe, probe_put_if_absent
from tiered_index.testing.storage_conformance import StorageConformance

pytest.importorskip("obstore", reason="the extra `object` is not installed")
NO_KEY = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}


@pytest.fixture(scope="module")
def google() -> Iterator[GoogleServer]:
    with google_server() as server:
        yield server


@pytest.fixture
def uri(google: GoogleServer, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(NO_KEY))
    bucket = f"bucket-{uuid.uuid4().hex}"
    google.buckets.add(bucket)
    google.requests.clear()
    google.failures.clear()
    return f"gs://{bucket}/some/prefix?endpoint_url={google.endpoint_url}"


class TestGoogleStorage(StorageConformance):
    @pytest.fixture
    def storage(self, uri: str) -> Iterator[Storage]:
        with open_storage(uri) as storage:
            yield storage

    @pytest.fixture
    def another(self, storage: Storage) -> Iterator[Storage]:
        with open_storage(storage.uri) as another:
            yield another


def test_requests_are_counted_with_their_repeats(uri, google, monkeypatch):
    storage = MeteredStorage(open_storage(uri))
    assert isinstance(storage.inner, CloudStorage)
    monkeypatch.setattr("tiered_index.storage.retry._LONGEST_WAIT_S", 0.0)
    google.failures[:] = [503, 503]
    storage.put_if_absent("a", b"data")
    google.failures[:] = [500]
    assert storage.get_range("a", 1, 2) == b"at"
    assert [info.name for info in storage.list()] == ["a"]
    assert storage.total.requests == len(google.requests) == 6
    google.failures[:] = [500] * 9
    with pytest.raises(StorageUnavailable, match=r"'a' in gs://.*5 attempts"):
        storage.get("a")


def test_a_whole_object_in_place_of_a_range_is_read_up_to_the_ranges_end(uri, google, monkeypatch):
    right = google.answer
    monkeypatch.setattr(
        google,
        "answer",
        lambda method, target, headers, body: right(
            method, target, {name: value for name, value in headers.items() if name != "range"}, body
        ),
    )
    with open_storage(uri) as storage:
        storage.put("object", data := bytes(range(256)) * 4)
        for start, length in ((10, 20), (0, 1024), (1000, 24)):
            assert storage.get_range("object", start, length) == data[start : start + length]
        assert storage.get_suffix("object", 20) == (data[-20:], 1024)
        with pytest.raises(InvalidArgument, match="1024 bytes"):
            storage.get_range("object", 1000, 25)
        assert {one.what: one.state for one in probe(storage)}["ranges"] == "worked round"


def test_a_large_upload_is_written_in_chunks(uri, google):
    bodies = [bytes([n]) * (6 << 20) for n in range(3)]
    with open_storage(uri) as storage:
        handle = storage.begin_upload("large")
        storage.complete_upload(handle, [storage.upload_part(handle, n + 1, body) for n, body in enumerate(bodies)])
        assert storage.get("large") == b"".join(bodies)
        assert list(storage.list_uploads()) == list(storage.foreign_keys()) == []
    bucket = uri.split("/")[2]
    assert [name for name in google.objects if name.startswith(bucket)] == [f"{bucket}/some/prefix/large"]


def test_an_index_in_the_storage(uri, tmp_path):
    small = {"slots": 7, "items": 12}
    with IndexService.open(root=tmp_path, storage=uri, background=False, **small) as index:
        index.put("t", 0, "k", 5, 1, 1_700_000_000_000)
        index.seal()
        index.run_lifecycle()
    with IndexReader.open(uri) as reader:
        assert [item.offset for item in reader.query("t", "k")] == [5]


def test_wrong_set_ups_raise_typed_errors(uri, monkeypatch):
    missing = f"gs://no-such-bucket{uri[uri.index('/some') :]}"
    with open_storage(missing) as storage:
        for call in (lambda: storage.get("a"), lambda: storage.put("a", b""), lambda: list(storage.list())):
            with pytest.raises(StorageMisconfigured, match="NoSuchBucket: create the bucket"):
                call()
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    for wrong in ("az://container/p", "gs://x", "gs://bucket/a//b", "gs://bucket/p?account=a"):
        with pytest.raises(ConfigError):
            open_storage(wrong)
    with open_storage(uri) as storage:
        probe_put_if_absent(storage)


def test_redirects_to_another_host_are_refused(uri, google, monkeypatch):
    with google_server() as other, open_storage(uri) as storage:
        elsewhere = other.endpoint_url.replace("127.0.0.1", "localhost")
        monkeypatch.setattr(google, "answer", lambda *_: Reply(307, headers=(("Location", f"{elsewhere}/b/a"),)))
        for call in (lambda: storage.get("a"), lambda: storage.put("a", b"x"), lambda: list(storage.list())):
            google.requests.clear()
            with pytest.raises(StorageMisconfigured, match=r"redirects to a host|: 307 "):
                call()
            assert len(google.requests) == 1
        assert other.requests == []


def test_a_leased_blob_does_not_count_as_an_existing_object(uri, google, monkeypatch):
    """This is Azure's response to a write of a leased blob."""
    with open_storage(uri) as storage:
        monkeypatch.setattr(google, "answer", lambda *_: error(412, "LeaseIdMissing"))
        for call in (storage.put, storage.put_if_absent):
            with pytest.raises(StorageMisconfigured, match="break the lease"):
                call("a", b"x")


@pytest.mark.parametrize("size", [0, 5, 8 << 20, 17 << 20, 24 << 20])
def test_requests_of_an_upload_are_counted(uri, google, size):
    storage = MeteredStorage(open_storage(uri))
    handle = storage.begin_upload("large")
    part = storage.upload_part(handle, 1, bytes(size))
    before, _ = storage.total.requests, google.requests.clear()
    storage.complete_upload(handle, [part])
    assert storage.total.requests - before == len(google.requests)


@pytest.mark.parametrize("count", [0, 1, 999, 1000, 1001, 2000])
def test_requests_of_a_listing_are_counted(uri, google, count):
    storage = MeteredStorage(open_storage(uri))
    place = f"{uri.split('/')[2]}/some/prefix/log"
    google.answer("PUT", f"/{place}/", {}, b"")
    stored = google.objects.pop(place)
    google.objects |= {f"{place}/{number:05}": stored for number in range(count)}
    assert len([*storage.list("log/")]) == count
    assert storage.total.requests == len(google.requests)


def test_the_hosts_that_renew_credentials_are_known(monkeypatch):
    monkeypatch.setenv("AZURE_AUTHORITY_HOST", "https://login.microsoftonline.us/")
    with open_storage("gs://bucket/p") as google, open_storage("az://container/p?account=a") as azure:
        assert isinstance(google, CloudStorage) and isinstance(azure, CloudStorage)
        assert "accounts.google.com" in google._hosts()
        assert "login.microsoftonline.us" in azure._hosts()


def test_a_long_write_may_take_longer_than_the_limit_of_a_read(uri, google, monkeypatch):
    """obstore counts the time in which it sends a body as a wait for the response."""
    monkeypatch.setattr("tiered_index.storage.clouds._READ_TIMEOUT_S", 1.0)
    answer = google.answer

    def slow(method, *request):
        if method == "PUT":
            time.sleep(2)
        return answer(method, *request)

    monkeypatch.setattr(google, "answer", slow)
    data = bytes(1 << 20)
    with open_storage(uri) as storage:
        storage.put("a", data)
        assert storage.get("a") == data
    assert [request.split()[0] for request in google.requests] == ["PUT", "GET"]


def test_an_upload_begins_although_the_first_response_is_lost(uri, google, monkeypatch):
    monkeypatch.setattr("tiered_index.storage.retry._LONGEST_WAIT_S", 0.0)
    answer, lost = google.answer, [True]

    def losing(*request):
        reply = answer(*request)
        return error(503, "ServiceUnavailable") if lost and lost.pop() else reply

    monkeypatch.setattr(google, "answer", losing)
    with open_storage(uri) as storage:
        handle = storage.begin_upload("large")
        storage.complete_upload(handle, [storage.upload_part(handle, 1, b"data")])
        assert storage.get("large") == b"data"
        assert list(storage.list_uploads()) == []
