"""The two clients of an S3 storage: which one sends a request, to which address, and with which credentials."""

import gc
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import runpy
import select
import signal
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import boto3
import pytest
from botocore.credentials import SSOProvider
from moto import mock_aws

from tests.storage.scripted_server import Answer, Request, ScriptedServer, error, part, scripted_server
from tests.storage.test_s3_answers import listing
from tests.support.authority import Authority
from tests.support.hanging import beside, until
from tests.support.s3_server import S3Server
from tiered_index.base.call import deadline_at
from tiered_index.errors import BudgetExceeded, ConfigError, ObjectNotFound, StorageMisconfigured
from tiered_index.storage.base import ObjectInfo
from tiered_index.storage.opening import open_storage
from tiered_index.storage.s3 import reads
from tiered_index.storage.s3 import storage as storage_of_s3
from tiered_index.storage.s3.options import S3Options
from tiered_index.storage.s3.place import find_place
from tiered_index.storage.s3.storage import S3Storage

DATA = bytes(range(256)) * 4
NAME = "data/a-1"
MODIFIED = "Mon, 02 Nov 2026 10:00:00 GMT"
PREFIX = "pre fix/ä~+"  # characters that a URL must quote
HANGS_S = 60


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment with credentials and a region, and nothing else."""
    for name in list(os.environ):
        if name.startswith("AWS_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIASCRIPTED")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "scripted-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")


@pytest.fixture
def scripted(answering: ScriptedServer) -> ScriptedServer:
    answering.reset()
    return answering


@pytest.fixture
def s3(scripted: ScriptedServer) -> Iterator[S3Storage]:
    with opened(scripted) as storage:
        yield storage


def opened(scripted: ScriptedServer, **options: Any) -> S3Storage:
    settings = {"endpoint_url": scripted.endpoint_url, "max_attempts": 3, **options}
    return S3Storage("bucket", PREFIX, S3Options(**settings), sleep=lambda seconds: None)


def is_botos(request: Request) -> bool:
    """Return whether boto3 sent the request: botocore numbers the attempts of its own ones."""
    return "amz-sdk-request" in request.lowered


# The choice of a client


def test_obstore_reads_and_boto3_writes(s3: S3Storage, scripted: ScriptedServer) -> None:
    keys = [f"{PREFIX}/log/1", f"{PREFIX}/log/2"]
    head = Answer(200, DATA, {"Last-Modified": MODIFIED})
    whole, end = Answer(200, DATA), part(DATA, 1004, 1024)
    scripted.answers(whole, part(DATA, 3, 9), head, end, listing(*keys), Answer(403), Answer(200))
    assert s3.get("a") == DATA
    assert s3.get_range("a", 3, 6) == DATA[3:9]
    assert s3.get_suffix("a", 20) == (DATA[-20:], 1024)
    listed = s3.list("log/", start_after="log/0")
    assert list(listed) == [ObjectInfo(f"log/{number}", 1, 1_793_491_200_000) for number in (1, 2)]
    # without a signature: obstore does not show the time
    assert abs(s3.now_ms() / 1000 - time.time()) < HANGS_S
    s3.put("a", DATA)
    assert [is_botos(request) for request in scripted.requests] == [False] * 6 + [True]
    assert {request.path for request in scripted.requests if "?" not in request.path} == {
        "/bucket",
        "/bucket/pre%20fix/%C3%A4~%2B/a",
    }


def test_the_services_time_is_waited_for_until_the_deadline_of_the_call(scripted: ScriptedServer) -> None:
    held = threading.Event()
    scripted.answers(Answer(200, held=held))
    try:
        with opened(scripted, connect_timeout_s=86_400) as storage, deadline_at(time.monotonic() + 0.2):
            with pytest.raises(BudgetExceeded, match="timeout_s"):
                storage.now_ms()
    finally:
        held.set()


def test_the_uri_can_choose_boto3(scripted: ScriptedServer) -> None:
    scripted.answers(part(DATA, 3, 9))
    with open_storage(f"s3://bucket/p?endpoint_url={scripted.endpoint_url}&client=boto3") as s3:
        assert s3.get_range("a", 3, 6) == DATA[3:9]
        assert is_botos(scripted.requests[0])
        assert s3.uri.endswith("&client=boto3")
    with pytest.raises(ConfigError, match="client is boto3"):
        open_storage("s3://bucket?client=curl")


def write_and_read(older: S3Storage | None = None) -> None:
    where = {"LocationConstraint": "eu-central-1"}
    boto3.client("s3").create_bucket(Bucket="bucket", CreateBucketConfiguration=where)
    with S3Storage("bucket", "p", S3Options()) as newer:
        (older or newer).put(NAME, DATA)
        for storage in (older or newer, newer):
            assert storage.get_range(NAME, 3, 10) == DATA[3:13]
            assert [info.name for info in storage.list()] == [NAME]
            with pytest.raises(ObjectNotFound):
                storage.get("data/gone")


@mock_aws
def in_a_function() -> None:
    write_and_read()


@mock_aws
class InAClass:
    def setup_method(self) -> None:
        write_and_read()

    def test(self) -> None:
        with S3Storage("bucket", "p", S3Options()) as storage:
            assert storage.get(NAME) == DATA


AT_MODULE_LEVEL = """
from moto import mock_aws
from tests.storage.test_s3_clients import write_and_read
mock = mock_aws()
mock.start()
write_and_read()
mock.stop()
"""


def test_motos_mock_has_all_requests_while_it_is_active(
    tmp_path: Path, s3: S3Storage, scripted: ScriptedServer
) -> None:
    """Around functions, classes, and code at module level, also those of an older storage; obstore reads afterwards."""
    scripted.answers(part(DATA, 0, 10))
    s3.get_range(NAME, 0, 10)
    with S3Storage("bucket", "p", S3Options()) as older, mock_aws():
        write_and_read(older)
    in_a_function()
    in_class = InAClass()
    in_class.setup_method()
    in_class.test()
    (tmp_path / "module.py").write_text(AT_MODULE_LEVEL)
    runpy.run_path(str(tmp_path / "module.py"))
    s3.get_range(NAME, 0, 10)
    assert [is_botos(request) for request in scripted.requests] == [False, False]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_reads_and_collects_no_garbage_of_its_parent(s3: S3Storage, scripted: ScriptedServer) -> None:
    """obstore would wait for threads that do not exist in the child."""

    class Garbage:
        def __init__(self) -> None:
            self.own, self.made_by = self, os.getpid()

        def __del__(self) -> None:
            if os.getpid() != self.made_by:
                os._exit(7)

    scripted.script = lambda request: part(DATA, 0, 10) if request.method == "GET" else Answer(200)
    s3.get_range(NAME, 0, 10)
    s3.put("a", b"x")
    connections = scripted.connections
    gc.disable()
    try:
        Garbage()
        child = os.fork()
        if not child:
            signal.alarm(HANGS_S)
            gc.collect()
            s3.put("a", b"x")
            # a storage of its own, too, as a worker of gunicorn or multiprocessing opens
            with open_storage(s3.uri) as own:
                both = s3.get_range(NAME, 0, 10), own.get_range(NAME, 0, 10)
            os._exit(0 if both == (DATA[:10], DATA[:10]) else 1)
    finally:
        gc.enable()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    # one for each storage, and none of its parent
    assert scripted.connections >= connections + 2
    assert s3.get_range(NAME, 0, 10) == DATA[:10]
    assert [is_botos(request) for request in scripted.requests] == [False, *[True] * 4, False]


def read_twice(uri: str) -> None:
    # also if the read never returns to the interpreter
    signal.alarm(HANGS_S)
    for _ in range(2):
        with open_storage(uri) as storage:
            assert storage.get_range(NAME, 0, 10) == DATA[:10]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forked_workers_of_multiprocessing_read(s3: S3Storage, scripted: ScriptedServer) -> None:
    scripted.answers(part(DATA, 0, 10))
    s3.get_range(NAME, 0, 10)
    workers = [multiprocessing.get_context("fork").Process(target=read_twice, args=[s3.uri]) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert [is_botos(request) for request in scripted.requests] == [False, *[True] * 4]


APPLICATION = """
import os
from tiered_index.storage.opening import open_storage
def read():
    with open_storage(os.environ["STORED"]) as storage:
        return storage.get_range("data/a-1", 0, 10)
read()
def application(environ, start_response):
    start_response("200 OK", [])
    return [read()]
"""


def test_a_worker_of_gunicorn_reads_although_its_master_has_read(tmp_path: Path, scripted: ScriptedServer) -> None:
    scripted.answers(part(DATA, 0, 10))
    (tmp_path / "app.py").write_text(APPLICATION)
    options = ["--workers", "1", "--bind", "127.0.0.1:0", "--preload", "--no-control-socket"]
    stored = f"s3://bucket?endpoint_url={scripted.endpoint_url}"
    variables = {"STORED": stored, "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    with subprocess.Popen(
        [sys.executable, "-m", "gunicorn", *options, "app:application"],
        cwd=tmp_path,
        env={**os.environ, **variables},
        stderr=subprocess.PIPE,
        text=True,
    ) as served:
        assert served.stderr is not None
        addresses = (re.search(r"Listening at: (http://\S+)", line) for line in served.stderr)
        try:
            address = next(address[1] for address in addresses if address)
            with urllib.request.urlopen(address, timeout=HANGS_S) as answer:
                assert answer.read() == DATA[:10]
        finally:
            served.terminate()
            served.stderr.read()
    assert [is_botos(request) for request in scripted.requests] == [False, True]


def test_reads_go_on_while_another_thread_closes_the_clients(s3: S3Storage, scripted: ScriptedServer) -> None:
    """As when it finds that the bucket is in another region."""
    scripted.answers(part(DATA, 0, 10))
    with ThreadPoolExecutor(4) as pool:
        reads = [pool.submit(s3.get_range, NAME, 0, 10) for _ in range(100)]
        while not all(read.done() for read in reads):
            s3.close()
    assert {read.result() for read in reads} == {DATA[:10]}


# Addresses


ENDPOINT = "AWS_ENDPOINT_URL_S3"


@pytest.mark.parametrize(
    ("bucket", "options", "variables", "base_url"),
    [
        ("bucket", {}, {}, "https://bucket.s3.eu-central-1.amazonaws.com"),
        ("bucket", {"region": "eu-west-3"}, {}, "https://bucket.s3.eu-west-3.amazonaws.com"),
        ("bucket", {"addressing_style": "path"}, {}, "https://s3.eu-central-1.amazonaws.com/bucket"),
        ("with.dots", {}, {}, "https://s3.eu-central-1.amazonaws.com/with.dots"),
        ("With_Case", {}, {}, "https://s3.eu-central-1.amazonaws.com/With_Case"),
        ("bucket", {}, {ENDPOINT: "http://ceph:7480/"}, "http://ceph:7480/bucket"),
        ("bucket", {}, {"AWS_ENDPOINT_URL": "http://ceph:7480"}, "http://ceph:7480/bucket"),
        ("bucket", {"endpoint_url": "http://a"}, {ENDPOINT: "http://b"}, "http://a/bucket"),
        ("bucket", {"endpoint_url": "http://a", "addressing_style": "virtual"}, {}, "http://bucket.a"),
        ("bucket", {"endpoint_url": "http://[::1]:80", "addressing_style": "auto"}, {}, "http://[::1]:80/bucket"),
        ("bucket", {"endpoint_url": "http://10.0.0.1", "addressing_style": "auto"}, {}, "http://10.0.0.1/bucket"),
        # those that boto3's session knows
        ("bucket", {"region": "cn-north-1"}, {}, "https://bucket.s3.cn-north-1.amazonaws.com.cn"),
        ("bucket", {}, {"AWS_USE_FIPS_ENDPOINT": "true"}, "https://bucket.s3-fips.eu-central-1.amazonaws.com"),
        (
            "with.dots",
            {},
            {"AWS_USE_DUALSTACK_ENDPOINT": "true"},
            "https://s3.dualstack.eu-central-1.amazonaws.com/with.dots",
        ),
    ],
)
def test_both_clients_have_the_same_address(
    monkeypatch: pytest.MonkeyPatch, bucket: str, options: dict[str, str], variables: dict[str, str], base_url: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with S3Storage(bucket, "", S3Options(**options)) as storage:
        assert find_place(bucket, "s3://bucket", S3Options(**options)).base_url == base_url
        sent: list[str] = []

        def catch(request: Any, **_: object) -> None:
            sent.append(request.url)
            raise KeyboardInterrupt

        storage.client.meta.events.register("before-send.s3", catch)
        with pytest.raises(KeyboardInterrupt):
            storage.put("a", b"x")
        assert sent == [f"{base_url}/a"]


def has_session() -> bool:
    return find_place("bucket", "s3://bucket", S3Options()).session is not None


@pytest.mark.parametrize("place", ["config", "credentials"])
def test_files_of_amazons_are_read_by_boto3s_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    assert not has_session()
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / place).write_text("")
    assert not has_session()
    (tmp_path / ".aws" / place).write_text("[default]\nregion = eu-west-3\n")
    assert has_session()
    # a home that does not exist, and a file that can't be looked at
    for unreadable in ("~no-such-user/config", f"/{'x' * 300}"):
        monkeypatch.setenv("AWS_CONFIG_FILE", unreadable)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", unreadable)
        assert not has_session()


def test_buckets_and_endpoints_of_the_environment_that_can_not_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="use a general purpose bucket"):
        open_storage("s3://bucket--use1-az4--x-s3")
    for endpoint in ("http://[::1", "http://key:secret@host"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        with pytest.raises(StorageMisconfigured, match="AWS_ENDPOINT_URL") as caught:
            open_storage("s3://bucket")
        assert "secret@" not in str(caught.value)


def test_variables_that_obstore_alone_reads_change_nothing(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_REQUEST_PAYER": "true",
        "AWS_S3_EXPRESS": "true",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1",
        "AWS_SERVER_SIDE_ENCRYPTION": "sse-c",
        "AWS_SSE_CUSTOMER_KEY_BASE64": "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=",
    }.items():
        monkeypatch.setenv(name, value)
    with opened(scripted) as storage:
        scripted.answers(part(DATA, 0, 10))
        storage.get_range(NAME, 0, 10)
        sent = set(scripted.requests[-1].lowered)
        assert "authorization" in sent
        assert not sent & {"x-amz-request-payer", "x-amz-server-side-encryption-customer-key", "x-amz-s3session-token"}
    monkeypatch.setenv("AWS_CHECKSUM_ALGORITHM", "CRC32")
    with opened(scripted) as storage, pytest.raises(StorageMisconfigured, match="unset AWS_CHECKSUM_ALGORITHM"):
        storage.get_range(NAME, 0, 10)


@pytest.mark.parametrize("status", [400, 301])
def test_another_region_is_found_once_for_both_clients(s3: S3Storage, scripted: ScriptedServer, status: int) -> None:
    def script(request: Request) -> Answer:
        if "/eu-west-3/" in request.lowered.get("authorization", ""):
            return part(DATA, 0, 10) if request.method == "GET" else Answer(200)
        code = "AuthorizationHeaderMalformed" if status == 400 else "PermanentRedirect"
        wrong = error(status, code)
        wrong.headers["x-amz-bucket-region"] = "eu-west-3"
        return wrong

    scripted.script = script
    for _ in range(2):
        assert s3.get_range(NAME, 0, 10) == DATA[:10]
    # refused, asked for the region without a signature, and read
    assert [request.method for request in scripted.requests] == ["GET", "HEAD", "GET", "GET"]
    assert "authorization" not in scripted.requests[1].lowered
    s3.put("a", b"x")
    assert len(scripted.requests) == 5


def test_another_region_is_found_by_two_threads_at_once(
    s3: S3Storage, scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one learns the region after the first one has moved the storage there."""
    both, calls, region = threading.Barrier(2), itertools.count(1), storage_of_s3._region

    def told(reads: Any) -> str | None:
        both.wait(60)
        if next(calls) == 2:
            until(lambda: s3._place.options.region == "eu-west-3")
        return region(reads)

    def script(request: Request) -> Answer:
        if "/eu-west-3/" in request.lowered.get("authorization", ""):
            return part(DATA, 0, 10)
        wrong = error(400, "AuthorizationHeaderMalformed")
        wrong.headers["x-amz-bucket-region"] = "eu-west-3"
        return wrong

    monkeypatch.setattr(storage_of_s3, "_region", told)
    scripted.script = script
    reads = [beside(lambda: s3.get_range(NAME, 0, 10)) for _ in range(2)]
    assert [read() for read in reads] == [DATA[:10]] * 2


def test_a_full_page_of_a_listing_without_the_next_pages_token_is_followed(
    s3: S3Storage, scripted: ScriptedServer
) -> None:
    """obstore takes a page without a token for the last one."""
    keys = [f"{PREFIX}/log/{number:05}" for number in range(2001)]

    def script(request: Request) -> Answer:
        [after] = parse_qs(request.path).get("start-after", [""])
        return listing(*[key for key in keys if key > after][:1000])

    scripted.script = script
    assert len(list(s3.list("log/"))) == 2001
    assert len(scripted.requests) == 3
    # a server that ignores start-after as well would be asked for the same page without end
    body = listing(*keys[:1000]).body.replace(
        b"</ListBucketResult>", b"<IsTruncated>true</IsTruncated></ListBucketResult>"
    )
    scripted.answers(Answer(200, body))
    with pytest.raises(StorageMisconfigured, match="order of name"):
        list(s3.list("log/"))


def test_the_mark_of_a_folder_is_no_object(s3: S3Storage, scripted: ScriptedServer) -> None:
    """obstore strips the slash from its key."""
    marked = [f"{PREFIX}/", f"{PREFIX}/log-a", f"{PREFIX}/log/", f"{PREFIX}/log/1"]
    body = listing(*marked).body.replace(b"/</Key><Size>1", b"/</Key><Size>0")
    scripted.answers(Answer(200, body))
    assert [info.name for info in s3.list()] == ["log-a", "log/1"]
    # without bytes: an object, and the mark of a folder without objects
    body = listing(f"{PREFIX}/empty", f"{PREFIX}/folder/").body.replace(b"<Size>1", b"<Size>0")

    def script(request: Request) -> Answer:
        if request.method == "HEAD":
            return Answer(200 if request.path.endswith("/empty") else 404, headers={"Last-Modified": MODIFIED})
        return Answer(200, body) if "list-type" in request.path else error(404, "NoSuchKey")

    scripted.script = script
    assert [info.name for info in s3.list()] == ["empty"]


def test_an_ipv6_address() -> None:
    with scripted_server("::1") as server:
        server.answers(part(DATA, 0, 10), Answer(200))
        with opened(server) as storage:
            assert storage.get_range(NAME, 0, 10) == DATA[:10]
            storage.put("a", b"x")


def test_a_proxy_of_the_environment_gets_the_requests_of_both_clients(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", scripted.endpoint_url)
    with (
        opened(scripted, endpoint_url="http://s3.internal:9000") as storage,
        pytest.raises(StorageMisconfigured, match=r"names a proxy.*client=boto3.*NO_PROXY"),
    ):
        storage.get_range(NAME, 0, 10)
    assert scripted.requests == []
    scripted.answers(part(DATA, 0, 10), listing(), Answer(200))
    with opened(scripted, endpoint_url="http://s3.internal:9000", client="boto3") as storage:
        assert storage.get_range(NAME, 0, 10) == DATA[:10]
        storage.now_ms()
        storage.put("a", b"x")
    assert {request.lowered["host"] for request in scripted.requests} == {"s3.internal:9000"}
    assert {request.path[:30] for request in scripted.requests} == {"http://s3.internal:9000/bucket"}
    scripted.reset()
    scripted.answers(part(DATA, 0, 10))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with opened(scripted) as storage:
        assert storage.get_range(NAME, 0, 10) == DATA[:10]


def test_a_redirect_through_a_proxy_reaches_no_other_host(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy would carry the session's token to any host."""
    monkeypatch.setenv("http_proxy", scripted.endpoint_url)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    moved = Answer(307, headers={"Location": "http://other.example/x"})
    scripted.script = lambda request: moved if "s3.internal" in request.path else part(DATA, 0, 10)
    with opened(scripted, endpoint_url="http://s3.internal", client="boto3") as storage:
        for act in (lambda: storage.get_range(NAME, 0, 10), lambda: list(storage.list()), storage.now_ms):
            with pytest.raises(StorageMisconfigured, match="only redirects"):
                act()
    assert {request.lowered["host"] for request in scripted.requests} == {"s3.internal"}


class Tunnel(socketserver.StreamRequestHandler):
    """A proxy that connects its clients to the hosts that they name."""

    def handle(self) -> None:
        request = self.rfile.readline().decode()
        while self.rfile.readline().strip():
            pass
        self.server.requests.append(request.partition(" HTTP")[0])  # type: ignore[attr-defined]
        host, _, port = request.split()[1].rpartition(":")
        with socket.create_connection((host, int(port))) as other:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            ends = {self.connection: other, other: self.connection}
            while data := (end := select.select([*ends], [], [])[0][0]).recv(1 << 16):
                ends[end].sendall(data)


def test_a_proxy_carries_the_encrypted_requests_of_both_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, tls = Authority(tmp_path / "tls"), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(authority.server_file)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.certificate_file))
    with scripted_server(tls=tls) as server, socketserver.ThreadingTCPServer(("127.0.0.1", 0), Tunnel) as proxy:
        proxy.daemon_threads = True
        proxy.requests = []  # type: ignore[attr-defined]
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.server_address[1]}")
        server.answers(part(DATA, 0, 10), Answer(200))
        with opened(server, client="boto3") as storage:
            assert storage.get_range(NAME, 0, 10) == DATA[:10]
            storage.put("a", b"x")
        proxy.shutdown()
        connect = f"CONNECT {server.endpoint_url.removeprefix('https://')}"
        # boto3 sends both, through one connection
        assert set(proxy.requests) == {connect}  # type: ignore[attr-defined]
        assert [request.method for request in server.requests] == ["GET", "PUT"]


@pytest.mark.parametrize("variable", ["AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "AWS_CONFIG_FILE"])
def test_a_certificate_authority_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    authority, tls = Authority(tmp_path / "tls"), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(authority.server_file)
    with scripted_server(tls=tls) as server:
        server.script = lambda request: part(DATA, 0, 10) if request.method == "GET" else Answer(200)
        with opened(server) as storage:
            for act in (lambda: storage.get_range(NAME, 0, 10), storage.now_ms, lambda: storage.put("a", b"x")):
                with pytest.raises(StorageMisconfigured, match="set AWS_CA_BUNDLE"):
                    act()
        trusted = authority.certificate_file
        (tmp_path / "profile").write_text(f"[default]\nca_bundle = {trusted}\n")
        monkeypatch.setenv(variable, str(tmp_path / "profile" if variable == "AWS_CONFIG_FILE" else trusted))
        with opened(server) as storage:
            assert storage.get_range(NAME, 0, 10) == DATA[:10]
            storage.put("a", b"x")


def test_an_endpoint_without_tls_is_named(scripted: ScriptedServer) -> None:
    with opened(scripted, endpoint_url=scripted.endpoint_url.replace("http", "https")) as storage:
        for act in (lambda: storage.get_range(NAME, 0, 10), storage.now_ms, lambda: storage.put("a", b"x")):
            with pytest.raises(StorageMisconfigured, match="does not speak TLS"):
                act()


# Credentials


def test_no_credentials_are_named_at_once(scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with opened(scripted) as storage, pytest.raises(StorageMisconfigured, match="set AWS_ACCESS_KEY_ID") as caught:
        storage.get_range(NAME, 0, 10)
    assert "scripted-secret" not in str(caught.value)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with opened(scripted) as storage:
        for act in (lambda: storage.get_range(NAME, 0, 10), lambda: storage.put(NAME, b"")):
            with pytest.raises(StorageMisconfigured, match="set AWS_ACCESS_KEY_ID"):
                act()
    assert scripted.requests == []


def role(number: int, expires_s: float) -> dict[str, str]:
    until = datetime.now(UTC) + timedelta(seconds=expires_s)
    keys = {"AccessKeyId": f"AKIA{number}", "SecretAccessKey": "s", "Token": f"token-{number}"}
    return {"Code": "Success", **keys, "Expiration": until.strftime("%Y-%m-%dT%H:%M:%SZ")}


def metadata_answer(request: Request, keys: dict[str, str]) -> Answer:
    """Return the answer of the services that know an instance's role, a container's, or a web identity's."""
    if request.path.endswith("/api/token"):
        return Answer(200, b"token")
    if request.path.endswith("/security-credentials/"):
        return Answer(200, b"role")
    if request.path == "/":
        names = {"AccessKeyId": "AccessKeyId", "SecretAccessKey": "SecretAccessKey", "SessionToken": "Token"}
        document = "".join(
            f"<{name}>{keys[key]}</{name}>" for name, key in (names | {"Expiration": "Expiration"}).items()
        )
        for name in ("Credentials", "AssumeRoleWithWebIdentityResult", "AssumeRoleWithWebIdentityResponse"):
            document = f"<{name}>{document}</{name}>"
        return Answer(200, document.encode(), {"Content-Type": "text/xml"})
    return Answer(200, json.dumps(keys).encode(), {"Content-Type": "application/json"})


def test_credentials_of_an_instance_role_are_renewed_before_they_expire(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    numbers = itertools.count()
    with scripted_server() as metadata, opened(scripted) as storage:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.endpoint_url)
        # due at once: obstore renews credentials five minutes before they expire
        metadata.script = lambda request: metadata_answer(request, role(next(numbers), 250))
        scripted.answers(part(DATA, 0, 10))
        until_renewed(scripted, lambda: storage.get_range(NAME, 0, 10))


def until_renewed(scripted: ScriptedServer, act: Callable[[], object]) -> None:
    """Act until the requests have had two sessions' tokens."""

    def is_renewed() -> bool:
        act()
        return len({request.lowered["x-amz-security-token"] for request in scripted.requests}) == 2

    until(is_renewed, within_s=30)


@pytest.mark.parametrize(
    ("variables", "is_by_session"),
    [
        ({"AWS_CONTAINER_CREDENTIALS_FULL_URI": "URL/keys"}, True),
        ({"AWS_CONTAINER_CREDENTIALS_FULL_URI": "URL/keys", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": "FILE"}, False),
        ({"AWS_EC2_METADATA_SERVICE_ENDPOINT": "URL"}, False),
        ({"AWS_EC2_METADATA_SERVICE_ENDPOINT": "URL", "AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE": "IPv4"}, True),
        ({"AWS_ENDPOINT_URL_STS": "URL", "AWS_WEB_IDENTITY_TOKEN_FILE": "FILE", "AWS_ROLE_ARN": "a" * 20}, True),
    ],
)
def test_both_clients_find_credentials_at_another_host(
    scripted: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variables: dict[str, str],
    is_by_session: bool,
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    (tmp_path / "token").write_text("token")
    with scripted_server() as source:
        source.script = lambda request: metadata_answer(request, role(1, 3600))
        # not the name of the endpoint's host
        url = source.endpoint_url.replace("127.0.0.1", "localhost")
        for name, value in variables.items():
            monkeypatch.setenv(name, value.replace("URL", url).replace("FILE", str(tmp_path / "token")))
        scripted.answers(part(DATA, 0, 10), Answer(200))
        with opened(scripted) as storage:
            assert has_session() == is_by_session
            assert storage.get_range(NAME, 0, 10) == DATA[:10]
            storage.put("a", b"x")
    assert [is_botos(request) for request in scripted.requests] == [False, True]
    assert all("Credential=AKIA1/" in request.lowered["authorization"] for request in scripted.requests)


def test_credentials_of_a_session_are_asked_for_again(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A profile, SSO or an assumed role: botocore renews them."""
    # due at once: botocore renews credentials that expire within ten minutes, and obstore those within five
    monkeypatch.setattr(reads, "CREDENTIALS_HOLD", timedelta(minutes=5))
    (tmp_path / "renew.py").write_text(RENEWING)
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text(
        f"[profile renewing]\nregion = eu-central-1\ncredential_process = {sys.executable} {tmp_path}/renew.py\n"
    )
    scripted.script = lambda request: part(DATA, 0, 10) if request.method == "GET" else Answer(200)
    with opened(scripted, profile="renewing") as storage:
        for act in (lambda: storage.get_range(NAME, 0, 10), lambda: storage.put("a", b"x")):
            scripted.requests.clear()
            until_renewed(scripted, act)


@pytest.mark.parametrize("profile", ["assumed", "sso"])
def test_an_assumed_role_and_sso_give_both_clients_credentials(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, profile: str
) -> None:
    """They are renewed before they expire."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    # due at once, as above
    monkeypatch.setattr(reads, "CREDENTIALS_HOLD", timedelta(minutes=5))
    start = "https://x.awsapps.com/start"
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text(
        "[profile keys]\naws_access_key_id = AKIAKEYS\naws_secret_access_key = s\n"
        "[profile assumed]\nrole_arn = arn:aws:iam::123456789012:role/r\nsource_profile = keys\n"
        f"[profile sso]\nsso_start_url = {start}\nsso_region = eu-central-1\n"
        "sso_account_id = 123456789012\nsso_role_name = r\n"
    )
    login = {"startUrl": start, "region": "eu-central-1", "accessToken": "t", "expiresAt": "2099-01-01T00:00:00Z"}
    # botocore looks up the home folder when it is imported
    cache = tmp_path / "sso"
    cache.mkdir()
    monkeypatch.setattr(SSOProvider, "_SSO_TOKEN_CACHE_DIR", str(cache))
    cached = cache / f"{hashlib.sha1(start.encode()).hexdigest()}.json"
    cached.write_text(json.dumps(login))
    numbers = itertools.count()

    def script(request: Request) -> Answer:
        keys = role(next(numbers), 540)
        if request.method == "POST":
            body = metadata_answer(replace(request, path="/"), keys).body.replace(b"WithWebIdentity", b"")
            return Answer(200, body, {"Content-Type": "text/xml"})
        expires_ms = 1000 * round(time.time() + 540)
        named = {"accessKeyId": keys["AccessKeyId"], "secretAccessKey": "s", "sessionToken": keys["Token"]}
        answer = {"roleCredentials": named | {"expiration": expires_ms}}
        return Answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    with scripted_server() as source:
        source.script = script
        for service in ("STS", "SSO"):
            monkeypatch.setenv(f"AWS_ENDPOINT_URL_{service}", source.endpoint_url)
        scripted.script = lambda request: part(DATA, 0, 10) if request.method == "GET" else Answer(200)
        with opened(scripted, profile=profile) as storage:
            for act in (lambda: storage.get_range(NAME, 0, 10), lambda: storage.put("a", b"x")):
                scripted.requests.clear()
                until_renewed(scripted, act)
        asked_for = "GET /federation/credentials" if profile == "sso" else "POST /"
        assert set(source.paths()) == {asked_for}


RENEWING = """
import datetime, json, secrets
until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=9)
keys = {"Version": 1, "AccessKeyId": "AKIA1", "SecretAccessKey": "s", "SessionToken": secrets.token_hex(8)}
print(json.dumps(keys | {"Expiration": until.isoformat()}))
"""


def test_a_session_without_credentials_says_what_to_set(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text(
        "[profile sso]\nsso_start_url = https://x.awsapps.com/start\nsso_region = eu-central-1\n"
        "sso_account_id = 1\nsso_role_name = r\n[profile none]\nregion = eu-central-1\n"
    )
    for profile, said in (
        ("none", "AWS_ACCESS_KEY_ID"),
        ("sso", "SSO.*aws sso login"),
        ("no-such-profile", "no-such-profile"),
    ):
        with pytest.raises(StorageMisconfigured, match=said), opened(scripted, profile=profile) as storage:
            storage.get_range(NAME, 0, 10)
    assert scripted.requests == []


def test_a_profile_gives_both_clients_endpoint_region_and_keys(
    s3_environment: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    for name in keys:
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text(
        f"[profile work]\nregion = eu-west-3\nendpoint_url = {s3_environment.endpoint_url}\n"
        + "".join(f"{name.lower()} = {value}\n" for name, value in keys.items())
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    with open_storage(f"s3://{s3_environment.new_bucket()}?profile=work") as storage:
        storage.put("a", DATA)
        assert storage.get_range("a", 3, 6) == DATA[3:9]
        assert isinstance(storage, S3Storage)
        assert storage.client.meta.region_name == "eu-west-3"
