"""Fixtures of this package's tests: a followed store, and the golden store with an index and a storage that counts and
fails.
"""

from pathlib import Path

import pytest

from tests.rocketmq import golden_store
from tests.rocketmq.archived_store import open_index
from tests.rocketmq.followed import Followed
from tests.support.storage_faults import FaultStorage
from tiered_index.storage.memory import MemoryStorage


@pytest.fixture
def followed(tmp_path):
    made = Followed(tmp_path)
    yield made
    made.index.abandon()


@pytest.fixture
def storage() -> FaultStorage:
    return FaultStorage(MemoryStorage())


@pytest.fixture
def store(tmp_path) -> Path:
    return golden_store.unpack(tmp_path / "store")


@pytest.fixture
def index(tmp_path, storage):
    service = open_index(tmp_path / "root", storage)
    yield service
    service.abandon()
