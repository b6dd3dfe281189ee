"""Endpoints that redirect to another port, their certificates, and credentials that there are not."""

import os
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.storage.scripted_server import Answer, Request, ScriptedServer, error, part, scripted_server
from tests.storage.test_s3_answers import listing
from tests.support.authority import Authority
from tiered_index.errors import StorageMisconfigured
from tiered_index.storage.base import Storage
from tiered_index.storage.clouds import CloudStorage
from tiered_index.storage.opening import open_storage

DATA = bytes(range(256)) * 4


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment with credentials and a region, and nothing else."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIASCRIPTED")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "scripted-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "YWJj")


@pytest.fixture
def new() -> Iterator[ScriptedServer]:
    with scripted_server(is_new=True) as server:
        yield server


S3, AZURE = "s3://bucket/p?endpoint_url={}", "az://bucket/p?account=x&endpoint_url={}"
READS: tuple[Callable[[Storage], object], ...] = (
    lambda storage: storage.get_range("a", 0, 10),
    lambda storage: storage.get("a"),
    lambda storage: storage.get_suffix("a", 10),
    lambda storage: list(storage.list()),
)
WRITES: tuple[Callable[[Storage], object], ...] = (
    lambda storage: storage.put("a", b"x"),
    lambda storage: storage.delete_many(["a"]),
)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
@pytest.mark.parametrize("client", ["", "&client=boto3"])
def test_a_redirect_to_another_port_is_refused_like_another_host(
    new: ScriptedServer, scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, status: int, client: str
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    new.answers(Answer(status, headers={"Location": f"{scripted.endpoint_url}/bucket/p/a"}))
    scripted.answers(part(DATA, 0, 10))
    for act in (*READS, *WRITES):
        with open_storage(S3.format(new.endpoint_url) + client) as storage:
            with pytest.raises(StorageMisconfigured, match="redirects") as caught:
                act(storage)
            if not client and act in READS:
                assert f"redirects to {scripted.endpoint_url}: name that address" in str(caught.value)
                assert new.requests[-1].method == "HEAD"
                assert not new.requests[-1].lowered.keys() & {"authorization", "x-amz-security-token"}
    assert scripted.requests == []


@pytest.mark.parametrize("uri", ["gs://bucket/p?endpoint_url={}", AZURE])
def test_no_request_to_another_cloud_follows_to_another_port(
    new: ScriptedServer, scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, uri: str
) -> None:
    """It would name the first URL as its referrer, and that may hold a signature."""
    new.answers(Answer(307, headers={"Location": f"{scripted.endpoint_url}/bucket/p/a"}))
    for act in (*READS, *WRITES, lambda storage: storage.open_writer("a").write(bytes(1 << 24))):
        with open_storage(uri.format(new.endpoint_url)) as storage:
            with pytest.raises(StorageMisconfigured, match=f"redirects to {scripted.endpoint_url}"):
                act(storage)
    assert {request.method for request in new.requests} == {"HEAD"}
    assert scripted.requests == []


def test_an_endpoint_without_redirects_is_asked_once_in_a_process(
    new: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")

    def script(request: Request) -> Answer:
        # to the same address: no other one
        moved = Answer(307, headers={"Location": "/bucket/"})
        return moved if request.method == "HEAD" else part(DATA, 0, 10)

    new.script = script
    for _ in range(2):
        with open_storage(S3.format(new.endpoint_url)) as storage:
            assert storage.get_range("a", 0, 10) == DATA[:10]
    assert [request.method for request in new.requests] == ["HEAD", "GET", "GET"]


def test_keys_without_a_session_take_no_request_first_and_no_refusal_hides_a_redirect(
    new: ScriptedServer, scripted: ScriptedServer
) -> None:
    """The redirected request has lost its signature, and has no token."""
    new.answers(part(DATA, 0, 10))
    with open_storage(S3.format(new.endpoint_url)) as storage:
        assert storage.get_range("a", 0, 10) == DATA[:10]
    assert [request.method for request in new.requests] == ["GET"]
    new.answers(Answer(307, headers={"Location": f"{scripted.endpoint_url}/bucket/p/a"}))
    scripted.answers(error(403, "AccessDenied"))
    with open_storage(S3.format(new.endpoint_url)) as storage:
        with pytest.raises(StorageMisconfigured, match=f"redirects to {scripted.endpoint_url}"):
            storage.get_range("a", 0, 10)
    assert "authorization" not in scripted.requests[0].lowered


def served_by(authority: Authority) -> Any:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(authority.server_file)
    return scripted_server(tls=tls)


def script(request: Request) -> Answer:
    if request.method != "GET":
        return Answer(200)
    return listing("p/a") if "list-type" in request.path else part(DATA, 0, 10)


def test_a_certificate_that_is_its_own_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore refuses it, and boto3 does not."""
    authority = Authority(tmp_path / "tls", is_server=True)
    with served_by(authority) as server:
        server.script = script
        acts: tuple[Callable[[Storage], object], ...] = (
            lambda storage: storage.get_range("a", 0, 10),
            lambda storage: [info.name for info in storage.list()],
            lambda storage: storage.put("a", b"x"),
        )
        for act in acts:
            with open_storage(S3.format(server.endpoint_url)) as storage:
                with pytest.raises(StorageMisconfigured, match="set AWS_CA_BUNDLE to a file with"):
                    act(storage)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.certificate_file))
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate_file))
        for act, expected in zip(acts, (DATA[:10], ["a"], None), strict=True):
            with open_storage(S3.format(server.endpoint_url)) as storage:
                assert [act(storage) for _ in range(2)] == [expected] * 2
        with open_storage(AZURE.format(server.endpoint_url)) as storage:
            with pytest.raises(StorageMisconfigured, match=r"is its own authority.*CA:FALSE"):
                storage.get("a")


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"host": "127.0.0.2"}, "does not name this host: make one whose subjectAltName does"),
        ({"is_server": True, "host": "127.0.0.2"}, "does not name this host: make one whose subjectAltName does"),
        ({"days": -1}, "renew the server's certificate"),
    ],
)
def test_an_error_says_what_is_wrong_with_a_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], said: str
) -> None:
    authority = Authority(tmp_path / "tls", **facts)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.certificate_file))
    with served_by(authority) as server:
        for client in ("", "&client=boto3"):
            with open_storage(S3.format(server.endpoint_url) + client) as storage:
                for act in (*READS, *WRITES, lambda storage: storage.now_ms()):
                    with pytest.raises(StorageMisconfigured, match=said) as caught:
                        act(storage)
                    assert "AWS_CA_BUNDLE" not in str(caught.value)


def test_another_cloud_trusts_an_authority_that_the_system_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path / "tls")
    with served_by(authority) as server:
        server.answers(Answer(200, b"data", {"Last-Modified": "Mon, 02 Nov 2026 10:00:00 GMT", "ETag": "a"}))
        with open_storage(AZURE.format(server.endpoint_url)) as storage:
            with pytest.raises(StorageMisconfigured, match="set SSL_CERT_FILE to a file with") as caught:
                storage.get("a")
            assert "AWS" not in str(caught.value)
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate_file))
        with open_storage(AZURE.format(server.endpoint_url)) as storage:
            assert storage.get("a") == b"data"


@pytest.mark.parametrize("act", [READS[0], READS[3], WRITES[0]])
def test_without_credentials_of_a_cloud_the_error_says_what_to_set(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, act: Callable[[Storage], object]
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    # that of the machine's identity; nothing listens there
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", "http://127.0.0.1:1/identity")
    with open_storage(AZURE.format(scripted.endpoint_url)) as storage:
        with pytest.raises(StorageMisconfigured, match=r"no credentials.*set AZURE_STORAGE_KEY or AZURE_STORAGE_SAS"):
            act(storage)
    assert scripted.requests == []


def test_without_credentials_of_google_the_error_says_what_to_set(scripted: ScriptedServer) -> None:
    with open_storage(f"gs://bucket?endpoint_url={scripted.endpoint_url}") as storage:
        assert isinstance(storage, CloudStorage)
        said = (
            "Error performing token request: Error performing GET http://metadata/computeMetadata/v1 in 1s - HTTP error"
        )
        error = storage.client.translate(ValueError(said), doing="reading", uri=storage.uri, name="a")
    assert isinstance(error, StorageMisconfigured)
    assert "set GOOGLE_APPLICATION_CREDENTIALS; docs/clouds.md" in str(error)


KEYS = '"AccessKeyId":"a","SecretAccessKey":"b","SessionToken":"c"'


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo nothing", "Expecting value"),
        ("echo '[1]'", "'list' object"),
        ("echo '{\"Version\": 1}'", "'AccessKeyId'"),
        ('echo \'{"Version": 1,' + KEYS.replace('"', '"') + ',"Expiration":"soon"}\'', '"soon"'),
        ("/no/such/program", "'/no/such/program'"),
        ("false", "the command failed"),
    ],
)
def test_a_command_for_credentials_that_prints_none_is_named(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, said: str
) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text(f"[profile p]\ncredential_process = {command}\n")
    for act in (READS[0], WRITES[0]):
        with pytest.raises(StorageMisconfigured, match=r"credential_process.*must print JSON such as") as caught:
            with open_storage(S3.format(scripted.endpoint_url) + "&profile=p") as storage:
                act(storage)
        assert said in str(caught.value)
        assert "AWS_ACCESS_KEY_ID" not in str(caught.value)


def test_a_command_that_prints_no_credentials_later_is_named(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first ones are due at once, and renewed for each request."""
    (tmp_path / ".aws").mkdir()
    (tmp_path / "keys").write_text('{"Version":1,' + KEYS + ',"Expiration":"2020-01-01T00:00:00Z"}')
    (tmp_path / ".aws" / "config").write_text(f"[profile p]\ncredential_process = cat {tmp_path}/keys\n")
    scripted.answers(Answer(200))
    with open_storage(S3.format(scripted.endpoint_url) + "&profile=p") as storage:
        (tmp_path / "keys").write_text("nothing")
        with pytest.raises(StorageMisconfigured, match=r"Expecting value.*credential_process"):
            storage.put("a", b"x")
