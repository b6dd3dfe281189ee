"""Credentials, wherever a set-up has them: no error, traceback, log, `repr` or document shows them."""

import json
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto import mock_aws
from msgspec import structs

from tests.integration.cli.command_lines import run_here
from tests.storage.scripted_server import ScriptedServer, error, scripted_server
from tiered_index import IndexConfig, IndexReader, IndexService
from tiered_index.errors import TieredIndexError
from tiered_index.storage.opening import open_storage

SECRET, TOKEN = "hidden-secret-of-the-test", "hidden-token-of-the-test"
_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIAHIDDEN",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_SESSION_TOKEN": TOKEN,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",
}


def shown(failure: BaseException) -> str:
    """Return the text of a traceback with its causes, and each `repr`."""
    text = "".join(traceback.format_exception(failure))
    cause: BaseException | None = failure
    while cause is not None:
        text += repr(cause) + str(cause)
        cause = cause.__cause__ or cause.__context__
    return text


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in _ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


URIS = [
    f"s3://AKIAHIDDEN:{SECRET}@bucket/prefix",
    f"s3://bucket?endpoint_url=http://AKIAHIDDEN:{SECRET}@127.0.0.1:9",
    f"s3://bucket?aws_secret_access_key={SECRET}",
    f"s3://bucket?{SECRET}",
    f"s3://bucket?aws_secret_access_key%3D{SECRET}",
    f"s3://bucket?X-Amz-Signature={SECRET}&X-Amz-Credential=AKIAHIDDEN",
    f"file://user:{SECRET}@host/dir",
    f"sqlite://user:{SECRET}@host/file.db",
    f"memory://user:{SECRET}@name",
    f"https://user:{SECRET}@host/bucket",
    f"{SECRET}@bucket",
    f"AKIAHIDDEN:{SECRET}@bucket://x",
    f"s3://[user:{SECRET}@bucket",
]


@pytest.mark.parametrize("uri", URIS)
def test_a_uri_with_a_secret_is_refused_without_showing_it(uri: str, tmp_path: Path) -> None:
    for act in (
        lambda: open_storage(uri),
        lambda: IndexConfig(storage=uri),
        lambda: IndexConfig.load(None, storage=uri),
        lambda: IndexReader.open(uri),
        lambda: IndexReader.open([uri, uri]),
        lambda: IndexService.open(root=tmp_path / "root", storage=uri),
    ):
        with pytest.raises(TieredIndexError) as refused:
            act()
        assert "hidden" not in shown(refused.value)
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        f's3 = {{ secret_access_key = "{SECRET}" }}',
        f'secret_access_key = "{SECRET}"',
        f's3 = "{SECRET}"',
        f'slots = "{SECRET}"',
        f's3 = {{ endpoint_url = "http://user:{SECRET}@host" }}',
        f's3 = {{ sse_kms_key_id = ["{SECRET}"] }}',
        f"[s3]\nx = {SECRET}",
    ],
)
def test_wrong_settings_are_not_repeated(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "settings.toml").write_text(wrong)
    with pytest.raises(TieredIndexError) as refused:
        IndexConfig.load(tmp_path / "settings.toml")
    assert SECRET not in shown(refused.value)
    done = run_here("files", "--config", tmp_path / "settings.toml", "--debug")
    assert done.code == 2
    assert SECRET not in done.out + done.err


@pytest.mark.parametrize(
    "name", ["S3", "S3__ENDPOINT_URL", "S3__SECRET_ACCESS_KEY", "STORAGE", "SECRET_ACCESS_KEY", "SLOTS"]
)
def test_wrong_variables_are_not_repeated(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"TIERED_INDEX_{name}", f"http://user:{SECRET}@host")
    with pytest.raises(TieredIndexError) as refused:
        IndexConfig.load()
    assert SECRET not in shown(refused.value)


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


@pytest.mark.usefixtures("credentials")
@pytest.mark.parametrize("where", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "profile"])
def test_an_endpoint_and_a_proxy_with_a_secret_are_refused_without_showing_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    url = f"http://user:{SECRET}@127.0.0.1:9"
    if where == "profile":
        (tmp_path / "config").write_text(f"[default]\nendpoint_url = {url}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    else:
        monkeypatch.setenv(where, url)
    with pytest.raises(TieredIndexError, match="credentials") as refused:
        IndexReader.open("s3://bucket/prefix")
    assert "hidden" not in shown(refused.value)
    monkeypatch.setenv("HTTP_PROXY", url)
    monkeypatch.setenv("NO_PROXY", "")
    with open_storage("s3://bucket/prefix?endpoint_url=http://s3.invalid") as storage:
        with pytest.raises(TieredIndexError, match="names a proxy") as refused:
            storage.get("a")
    assert "hidden" not in shown(refused.value)


@pytest.mark.usefixtures("credentials")
def test_a_server_in_trouble(server: ScriptedServer) -> None:
    with open_storage(f"s3://bucket/prefix?endpoint_url={server.endpoint_url}") as storage:
        text = repr(storage) + storage.uri
        refused = ((403, "SignatureDoesNotMatch"), (403, "InvalidAccessKeyId"), (400, "ExpiredToken"), (404, "x"))
        for status, code in refused:
            server.answers(error(status, code))
            for act in (lambda: storage.get("a"), lambda: storage.put("a", b""), lambda: list(storage.list())):
                with pytest.raises(TieredIndexError) as failed:
                    act()
                text += shown(failed.value)
        assert any(TOKEN in value for request in server.requests for value in request.headers.values())
    assert "hidden" not in text
    assert "Signature=" not in text


@pytest.mark.usefixtures("credentials")
@mock_aws
def test_a_whole_life_shows_no_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The test reads the marker, the lease, every object's bytes, `health`, `explain`, `repr`, logs, and the output of
    commands with --debug.
    """
    boto3.client("s3").create_bucket(Bucket="bucket")
    caplog.set_level(logging.DEBUG, "tiered_index")
    uri = "s3://bucket/index"
    settings = IndexConfig(root=tmp_path / "root", storage=uri, slots=7, items=20, background=False)
    text = repr(settings) + str(settings) + str(structs.asdict(settings)) + repr(settings.s3)
    with IndexService.open(settings) as index:
        index.put("t", 0, ["k"], 0, 10, 1_700_000_000_000)
        index.seal()
        index.run_lifecycle()
        answer = index.query("t", "k")
        text += json.dumps(index.health(), default=repr) + json.dumps(answer.to_dict())
        text += repr(answer) + repr(index) + repr(index.storage)
        with open_storage(uri) as storage:
            text += "".join(info.name + storage.get(info.name).decode("latin-1") for info in storage.list())
    text += "".join(path.read_bytes().decode("latin-1") for path in (tmp_path / "root").rglob("*") if path.is_file())
    text += caplog.text
    for form in ((), ("--json",)):
        done = run_here("query", "t", "k", "--storage", uri, "--explain", "--debug", *form, environment=_ENVIRONMENT)
        assert done.code == 0, done.err
        text += done.out + done.err
    assert "lease/" in text
    assert "hidden" not in text.lower()
