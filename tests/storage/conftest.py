"""The S3 server that the storage tests share: one a test process, started when the first test asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.s3_server import S3Server, s3_server


@pytest.fixture(scope="session")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture
def s3_environment(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """Let boto3's usual chain find the server's credentials, and nothing of the machine's own set-up."""
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server
