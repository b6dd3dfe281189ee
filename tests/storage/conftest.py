"""What storage tests share: the way to the S3 server, and a database file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.s3_server import S3Server
from tiered_index.storage.sqlite import bodies
from tiered_index.storage.sqlite.storage import SqliteStorage


@pytest.fixture
def s3_environment(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """Let boto3's usual chain find the server's credentials, and nothing of the machine's own set-up."""
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the storage has its database file."""
    return tmp_path / "objects.db"


@pytest.fixture
def storage(path: Path) -> Iterator[SqliteStorage]:
    """A storage in the database file; suites of other backends have their own."""
    with SqliteStorage(path) as storage:
        yield storage


@pytest.fixture
def small_rows(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let rows hold 1,000 bytes and transactions two rows, so that small objects have many of both; return a row's
    size.
    """
    monkeypatch.setattr(bodies, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(bodies, "_ROWS_A_TRANSACTION", 2)
    return 1000
