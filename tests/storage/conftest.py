"""Fixtures of storage tests: the way to the S3 server, and a database file."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.scripted_server import ScriptedServer, scripted_server
from tiered_index.storage import sqlite
from tiered_index.storage.sqlite import SqliteStorage


@pytest.fixture(scope="session")
def answering() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


@pytest.fixture
def scripted(answering: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> ScriptedServer:
    """A server without scripted answers, and credentials for it in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIASCRIPTED")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "scripted-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    answering.reset()
    return answering


# the option `client`, by the library through which an S3 storage reads
WAYS = {"obstore": None, "boto3": "boto3"}


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """An event that a server waits for during a whole test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The storage's database file."""
    return tmp_path / "objects.db"


@pytest.fixture
def storage(path: Path) -> Iterator[SqliteStorage]:
    """A storage in the database file; suites of other backends override it."""
    with SqliteStorage(path) as storage:
        yield storage


@pytest.fixture
def small_rows(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let rows hold 1,000 bytes, so that small objects have many of them; return that size."""
    monkeypatch.setattr(sqlite, "CHUNK_BYTES", 1000)
    return 1000
