"""The usual mistakes in a set-up of S3: each is `StorageMisconfigured`, names the remedy, and shows no secret."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.s3_server import SECRET_KEY, S3Server
from tiered_index.errors import ObjectNotFound, StorageMisconfigured
from tiered_index.storage.opening import open_storage
from tiered_index.storage.probe import probe_put_if_absent
from tiered_index.storage.s3.options import S3Options
from tiered_index.storage.s3.storage import S3Storage


@pytest.fixture
def options(s3_environment: S3Server) -> S3Options:
    return S3Options(endpoint_url=s3_environment.endpoint_url, max_attempts=1)


@pytest.fixture
def storage(s3_environment: S3Server, options: S3Options) -> Iterator[S3Storage]:
    with S3Storage(s3_environment.new_bucket(), "", options) as storage:
        yield storage


def test_a_missing_bucket_is_named_by_every_call(options: S3Options) -> None:
    with S3Storage("no-such-bucket-anywhere", "p", options) as storage:
        for call in (
            lambda: storage.get("a"),
            lambda: storage.get_range("a", 0, 1),
            lambda: storage.head("a"),
            lambda: storage.put("a", b"x"),
            lambda: storage.put_if_absent("a", b"x"),
            lambda: list(storage.list()),
            lambda: storage.delete_many(["a"]),
            lambda: storage._writes.begin("a", "p/a", "1"),
            lambda: probe_put_if_absent(storage, "probe"),
        ):
            with pytest.raises(StorageMisconfigured, match="no-such-bucket-anywhere"):
                call()


def test_no_credentials(options: S3Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    for name in (
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
    ):
        monkeypatch.delenv(name, raising=False)
    with S3Storage("bucket", "", options) as storage, pytest.raises(StorageMisconfigured, match="AWS_ACCESS_KEY_ID"):
        storage.get("a")


def test_half_of_the_credentials_shows_nothing(options: S3Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with S3Storage("bucket", "", options) as storage, pytest.raises(StorageMisconfigured) as caught:
        storage.get("a")
    assert SECRET_KEY not in str(caught.value)


def test_an_unknown_profile() -> None:
    with pytest.raises(StorageMisconfigured, match="no-such-profile"):
        S3Storage("bucket", "", S3Options(profile="no-such-profile"))
    with pytest.raises(StorageMisconfigured, match="no-such-profile"):
        open_storage("s3://bucket/p?profile=no-such-profile")


def test_a_profile_is_used(s3_environment: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text(
        f"[profile work]\nregion = eu-west-3\nendpoint_url = {s3_environment.endpoint_url}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    with S3Storage("bucket", "", S3Options(profile="work")) as storage:
        assert storage.client.meta.region_name == "eu-west-3"
        assert storage.client.meta.endpoint_url == s3_environment.endpoint_url


def test_the_environments_endpoint_is_used_path_style(
    s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # localhost, not an address: only then would boto3 put the bucket's name before the host
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_environment.endpoint_url.replace("127.0.0.1", "localhost"))
    bucket = s3_environment.new_bucket()
    with open_storage(f"s3://{bucket}/p") as storage:
        storage.put("a", b"x")
        assert storage.get("a") == b"x"
        assert storage.uri == f"s3://{bucket}/p"
        assert isinstance(storage, S3Storage)
        assert storage.client.meta.config.s3["addressing_style"] == "path"


def test_the_uri_reopens_the_same_place_and_holds_no_secret(s3_environment: S3Server) -> None:
    bucket = s3_environment.new_bucket()
    uri = f"s3://{bucket}/some/prefix?endpoint_url={s3_environment.endpoint_url}&region=us-east-1&addressing_style=path"
    with open_storage(uri) as storage, open_storage(storage.uri) as again:
        assert storage.uri == uri
        storage.put("a", b"x")
        assert again.get("a") == b"x"
        for text in (storage.uri, repr(storage), str(storage)):
            assert SECRET_KEY not in text
    with open_storage(f"s3://{bucket}?endpoint_url={s3_environment.endpoint_url}") as whole_bucket:
        assert [info.name for info in whole_bucket.list()] == ["some/prefix/a"]


def test_a_prefix_shows_only_its_own(storage: S3Storage) -> None:
    with (
        S3Storage(storage.bucket, "/index/one/", storage.options) as one,
        S3Storage(storage.bucket, "index/on", storage.options) as on,
    ):
        one.put("a", b"1")
        on.put("a", b"2")
        assert [info.name for info in one.list()] == ["a"]
        on.delete("a")
        assert one.get("a") == b"1"
        with pytest.raises(ObjectNotFound):
            on.get("a")
    assert [info.name for info in storage.list()] == ["index/one/a"]


def test_botocore_before_logins_is_enough() -> None:
    without = "import boto3.session, botocore.exceptions as e; vars(e).pop('LoginError', None)"
    script = f"{without}; import tiered_index.storage.s3.boto"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
