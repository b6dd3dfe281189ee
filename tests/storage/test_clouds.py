"""`gs://` against a stand-in of Google's XML API. `az://` is in `tests/real_s3`, against Azurite."""

import gc
import json
import os
import random
import signal
import time
import uuid
from collections.abc import Iterator

import pytest

from tests.integration.cli.command_lines import run_here
from tests.storage.google_server import GoogleServer, google_server
from tests.support.object_store import Reply, error
from tiered_index import IndexConfig, IndexReader, IndexService
from tiered_index.base.call import deadline_at
from tiered_index.connectors.files.rows.places import opened_place
from tiered_index.errors import BudgetExceeded, ConfigError, InvalidArgument, StorageMisconfigured, StorageUnavailable
from tiered_index.storage.base import PART_BYTES, Storage
from tiered_index.storage.clouds import CloudStorage
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.opening import open_storage
from tiered_index.storage.probe import check_storage, probe, probe_put_if_absent
from tiered_index.testing.storage_conformance import StorageConformance

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
    has_etags = True

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
    monkeypatch.setattr("tiered_index.storage.retry.LONGEST_WAIT_S", 0.0)
    google.failures[:] = [503, 503]
    storage.put_if_absent("a", b"data")
    google.failures[:] = [500]
    assert storage.get_range("a", 1, 2) == b"at"
    assert [info.name for info in storage.list()] == ["a"]
    assert storage.total.requests == len(google.requests) == 6
    google.failures[:] = [500] * 9
    with pytest.raises(StorageUnavailable, match=r"'a' in gs://.*5 attempts"):
        storage.get("a")


def test_a_server_without_ranges_is_named(uri, google, monkeypatch):
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
        with pytest.raises(StorageMisconfigured, match="does not honour ranges"):
            storage.get_range("object", 10, 20)
        assert storage.get("object") == data
        assert {ability.what: ability.state for ability in probe(storage)}["ranges"] == "missing"


def test_an_index_in_the_storage(uri, google, tmp_path):
    small = {"slots": 7, "items": 12}
    with IndexService.open(root=tmp_path, storage=uri, background=False, **small) as index:
        index.put("t", 0, "k", 5, 1, 1_700_000_000_000)
        index.seal()
        index.run_lifecycle()
        google.requests.clear()
        # beside the writer, a reader writes nothing to learn the store's time
        with IndexReader.open(uri) as reader:
            assert [item.offset for item in reader.query("t", "k")] == [5]
            assert [writer.state for writer in reader.writers().values()] == ["alive"]
        assert {request.split()[0] for request in google.requests} <= {"GET", "HEAD"}


def test_redirects_to_another_host_are_refused(uri, google, monkeypatch):
    with google_server() as other, open_storage(uri) as storage:
        elsewhere = other.endpoint_url.replace("127.0.0.1", "localhost")
        monkeypatch.setattr(google, "answer", lambda *_: Reply(307, headers=(("Location", f"{elsewhere}/b/a"),)))
        for call in (lambda: storage.get("a"), lambda: storage.put("a", b"x"), lambda: list(storage.list())):
            google.requests.clear()
            with pytest.raises(StorageMisconfigured, match=r"redirects to a host"):
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


@pytest.mark.parametrize("count", [0, 999, 1000, 1001])
def test_requests_of_a_listing_are_counted(uri, google, count):
    storage = MeteredStorage(open_storage(uri))
    place = f"{uri.split('/')[2]}/some/prefix/log"
    google.answer("PUT", f"/{place}/", {}, b"")
    stored = google.objects.pop(place)
    google.objects |= {f"{place}/{number:05}": stored for number in range(count)}
    assert len([*storage.list("log/")]) == count
    assert storage.total.requests == len(google.requests)


@pytest.mark.parametrize("name", ["a//b.log", "/b.log", "tab\tb.log", "a/../b.log"])
def test_a_key_that_obstore_can_not_name_is_named_and_stops_no_other_source(uri, google, tmp_path, name):
    place, parameters = uri.split("?")
    bucket, row = uri.split("/")[2], b'{"k": "%d", "timestamp": 1700000000000}\n'
    for number, key in enumerate(["good/a.log", "good/b.log", "odd/held", "odd/b.log"]):
        google.answer("PUT", f"/{bucket}/some/prefix/{key}", {}, row % number)
    google.objects[f"{bucket}/some/prefix/odd/{name}"] = google.objects.pop(f"{bucket}/some/prefix/odd/held")
    with open_storage(uri, any_names=True) as storage:
        assert [info.name for info in storage.list("good/")] == ["good/a.log", "good/b.log"]
        with pytest.raises(StorageMisconfigured, match="rename the object"):
            list(storage.list())
        # obstore would read odd/b.log
        for read in (storage.get, storage.head, lambda name: storage.get_range(name, 0, 1)):
            with pytest.raises(InvalidArgument, match="can't be read: its name has"):
                read(f"odd/{name}")
    where = ("--topic", "t", "--key", "k", "--root", tmp_path / "root", "--storage", f"file://{tmp_path}/objects")
    done = run_here("ingest", f"{place}/odd/?{parameters}", f"{place}/good/?{parameters}", *where, "--json")
    assert (done.code, done.document["rows"], done.document["damaged"]) == (1, 2, 1), done.err
    [damage] = done.document["damaged_first"]
    assert damage["file"].startswith(f"{place}/odd/") and "rename the object" in damage["reason"]
    done = run_here("ingest", f"{place}/odd/?{parameters}", *where, "--json")
    assert done.code == StorageMisconfigured.exit_code and "rename the object" in done.err


def test_no_listing_asks_for_the_same_page_for_ever(uri, google, monkeypatch):
    monkeypatch.setattr("tiered_index.storage.obstores._LONGEST_PAGE_S", 0.5)
    more = b"<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>"
    endless = b"<ListBucketResult>" + more + b"</ListBucketResult>"
    with open_storage(uri) as storage:
        with monkeypatch.context() as patched:
            patched.setattr(google, "answer", lambda *_: Reply(200, endless))
            with pytest.raises(StorageMisconfigured, match=r"gs://.*gone on for 0.5 s without a name"):
                list(storage.list())
            with deadline_at(time.monotonic() + 0.1), pytest.raises(BudgetExceeded, match="timeout_s"):
                list(storage.list())
        google.requests.clear()
        assert list(storage.list()) == []
        # no client has gone on
        assert len(google.requests) <= 3


def test_a_long_write_may_take_longer_than_the_limit_of_a_read(uri, google, monkeypatch):
    """obstore counts the time in which it sends a body as a wait for the response."""
    monkeypatch.setattr("tiered_index.storage.clouds.READ_TIMEOUT_S", 0.7)
    answer = google.answer

    def slow(method, *request):
        if method == "PUT":
            time.sleep(1.2)
        return answer(method, *request)

    monkeypatch.setattr(google, "answer", slow)
    data = bytes(1 << 20)
    with open_storage(uri) as storage:
        storage.put("a", data)
        assert storage.get("a") == data
    assert [request.split()[0] for request in google.requests] == ["PUT", "GET"]


def test_wrong_set_ups_raise_typed_errors(uri, monkeypatch):
    missing = f"gs://no-such-bucket{uri[uri.index('/some') :]}"
    with open_storage(missing) as storage:
        for call in (lambda: storage.get("a"), lambda: storage.put("a", b""), lambda: list(storage.list())):
            with pytest.raises(StorageMisconfigured, match="NoSuchBucket: create the bucket"):
                call()
    for wrong in ("az://container/p", "gs://x", "gs://bucket/a//b", "gs://bucket/p?account=a"):
        with pytest.raises(ConfigError):
            open_storage(wrong)
    with open_storage(uri) as storage:
        probe_put_if_absent(storage)
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", "secret")
    with pytest.raises(StorageMisconfigured, match="refuses the credentials of the environment") as raised:
        open_storage(uri)
    assert "secret" not in str(raised.value)


def test_the_hosts_that_renew_credentials_are_known(monkeypatch):
    monkeypatch.setenv("AZURE_AUTHORITY_HOST", "https://login.microsoftonline.us/")
    hosts_asked = []
    monkeypatch.setattr(
        "tiered_index.storage.clouds.client_options", lambda hosts, *_, **__: hosts_asked.append(hosts) or {}
    )
    for uri in ("gs://bucket/p", "az://container/p?account=a"):
        open_storage(uri).close()
    assert "accounts.google.com" in hosts_asked[0] and "login.microsoftonline.us" in hosts_asked[-1]


@pytest.mark.parametrize("size", [0, 5, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES])
def test_each_byte_of_an_object_is_sent_once(uri, google, monkeypatch, size):
    answer, sent = google.answer, []
    monkeypatch.setattr(google, "answer", lambda *request: sent.append(len(request[3])) or answer(*request))
    data = random.Random(size).randbytes(size)
    storage = MeteredStorage(open_storage(uri))
    with storage.open_writer("large") as writer:
        for start in range(0, size, 3 << 20):
            writer.write(data[start : start + (3 << 20)])
    # the message that completes an upload names its parts
    assert size <= sum(sent) <= size + 2000
    assert storage.total.requests == len(google.requests) == (1 if size <= PART_BYTES else 2 + -(-size // PART_BYTES))
    assert storage.get("large") == data


def test_a_part_is_sent_again_after_a_fault(uri, google):
    with open_storage(uri) as storage:
        with storage.open_writer("large") as writer:
            google.failures[:] = [503]
            writer.write(bytes(PART_BYTES + 5))
        assert storage.head("large").size_bytes == PART_BYTES + 5


@pytest.mark.parametrize("end", ["abort", "garbage", "error", "a failed part"])
def test_an_upload_that_is_dropped_leaves_no_parts(uri, google, monkeypatch, end):
    answer = google.answer

    def refusing(method, target, headers, body):
        return error(403, "AccessDenied") if "partNumber=2" in target else answer(method, target, headers, body)

    with open_storage(uri) as storage:
        writer = storage.open_writer("large")
        writer.write(bytes(2 * PART_BYTES))
        if end == "abort":
            writer.abort()
        elif end == "error":
            with pytest.raises(ZeroDivisionError), writer:
                raise ZeroDivisionError
        elif end == "a failed part":
            monkeypatch.setattr(google, "answer", refusing)
            with pytest.raises(StorageMisconfigured, match=r"'large' in gs://.*AccessDenied"):
                for _ in range(99):
                    writer.write(bytes(PART_BYTES))
        del writer
        gc.collect()
        assert list(storage.list()) == []
    assert google.uploads == {}
    assert {"POST", "DELETE"} <= {request.split()[0] for request in google.requests}


def test_an_emulator_gets_the_requests_and_no_credentials(google, uri, monkeypatch):
    """They would else go to the real cloud."""
    monkeypatch.delenv("GOOGLE_SERVICE_ACCOUNT_KEY")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", google.endpoint_url.removeprefix("http://"))
    headers = []
    answer = google.answer
    monkeypatch.setattr(google, "answer", lambda *request: headers.append(request[2]) or answer(*request))
    with open_storage(uri.partition("?")[0]) as storage:
        storage.put("a", b"data")
        assert storage.get("a") == b"data"
    assert len(headers) == 2
    assert {header.get("authorization", "").removeprefix("Bearer").strip() for header in headers} == {""}


def test_a_source_without_parameters_is_read_at_the_indexs_endpoint(google, uri):
    with open_storage(uri) as storage:
        storage.put("day.ndjson", b"{}")
    place = uri.partition("?")[0]
    with opened_place(f"{place.replace('gs', 'gcs', 1)}/day.ndjson", IndexConfig(storage=uri)) as source:
        assert str(source) == f"{place}/day.ndjson"
        with source.open() as file:
            assert file.read() == b"{}"


def test_a_server_without_the_xml_api_is_named(uri, google, monkeypatch):
    monkeypatch.setattr(google, "answer", lambda *_: Reply(404, b"404 page not found\n"))
    with open_storage(uri) as storage:
        with pytest.raises(StorageMisconfigured, match="XML API"):
            check_storage(storage)
        monkeypatch.setattr(google, "answer", lambda *_: Reply(404))
        with pytest.raises(StorageMisconfigured, match=r"404 without a reason: .*XML API"):
            storage.put("a", b"x")
        # a page that forbids is not taken for a missing interface
        monkeypatch.setattr(google, "answer", lambda *_: Reply(403, b"<html>Forbidden by policy</html>"))
        for act in (lambda: storage.get("a"), lambda: storage.put("a", b"x")):
            with pytest.raises(StorageMisconfigured, match=r"\(403\) is text/html: .*firewall") as raised:
                act()
            assert "without a reason" not in str(raised.value)


def test_a_forked_process_is_told_what_to_do(uri):
    with open_storage(uri) as storage:
        storage.put("a", b"data")
        receiver, sender = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(60)
            for call in (
                lambda: storage.get("a"),
                lambda: open_storage(uri),
                lambda: storage.open_writer("b").write(bytes(PART_BYTES + 1)),
            ):
                try:
                    call()
                except StorageMisconfigured as error:
                    os.write(sender, f"{error}\n".encode())
            os._exit(0)
        os.close(sender)
        with os.fdopen(receiver) as told:
            lines = told.read().splitlines()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(lines) == 3
        assert all("forked after obstore was used: start it by spawn" in line for line in lines)
