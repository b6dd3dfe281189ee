"""A small cluster in memory, and the storages that its readers open."""

import time

import pytest

from tests.support.several_indexes import Cluster, Watched, rows
from tiered_index.config import IndexConfig
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import open_storage

SEVERAL = 3


@pytest.fixture
def prefix(tmp_path):
    name = f"several-{tmp_path.name}-{time.time_ns()}"
    yield f"memory://{name}"
    for shelf in [shelf for shelf in MemoryStorage._shelves if shelf.startswith(name)]:
        MemoryStorage.forget(shelf)


@pytest.fixture
def cluster(tmp_path, prefix):
    indexes = Cluster(tmp_path)
    for number in range(SEVERAL):
        indexes.add(f"{prefix}/broker-{number}", rows(number))
    return indexes


@pytest.fixture
def opened(monkeypatch):
    """The storages that readers open, by URI, in the order of opening."""
    storages = []

    def watched(config, uri=None):
        storage = open_storage(uri or str(config.storage))
        if config.root is not None:
            return storage  # this storage is a writer's
        storages.append(Watched(storage))
        return storages[-1]

    monkeypatch.setattr(IndexConfig, "open_storage", watched)
    return storages
