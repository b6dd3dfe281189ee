"""Clusters for the tests of Kafka, one of each kind a test process; tests have topics of their own."""

import pytest

from tests.support.kafka_cluster import Cluster, Producing, kafka_cluster, look_often, wait_briefly
from tiered_index import IndexService
from tiered_index.storage.memory import MemoryStorage


@pytest.fixture(scope="session")
def _cluster():
    with kafka_cluster() as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    wait_briefly(monkeypatch)
    monkeypatch.setattr("tiered_index.connectors.kafka.source._FAILOVER_S", 0.0)


@pytest.fixture
def looking_often(monkeypatch) -> None:
    look_often(monkeypatch)


@pytest.fixture
def cluster(_cluster) -> Cluster:
    """A cluster whose topics have ids."""
    _cluster.control(1)
    return _cluster


@pytest.fixture
def servers(cluster) -> str:
    return cluster.servers


@pytest.fixture
def topic(request) -> str:
    """A name of a topic that no other test has."""
    return request.node.name.removeprefix("test_").replace("[", ".").replace("]", "")


@pytest.fixture
def producing(servers) -> Producing:
    return Producing(servers)


@pytest.fixture
def index(tmp_path):
    settings = {"slots": 97, "items": 5_000, "background": False}
    service = IndexService.open(root=tmp_path / "root", storage_backend=MemoryStorage(), **settings)
    yield service
    service.abandon()
