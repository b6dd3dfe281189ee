"""One broker of Kafka a session for most tests, and a cluster of three; tests have topics of their own."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.brokers.kafka.broker import Broker, BrokerCluster
from tests.brokers.kafka.topics import Topics
from tests.integration.cli.command_lines import run_here
from tests.support.authority import Authority
from tests.support.kafka_cluster import Producing, look_often, wait_briefly
from tiered_index import IndexService
from tiered_index.storage.memory import MemoryStorage


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    wait_briefly(monkeypatch)
    look_often(monkeypatch)


@pytest.fixture(scope="session")
def authority(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def broker(tmp_path_factory, authority) -> Iterator[Broker]:
    """The broker of most tests."""
    running = Broker(tmp_path_factory.mktemp("kafka"), authority=authority)
    running.format()
    try:
        running.start()
        yield running
    finally:
        running.kill()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[BrokerCluster]:
    """Three brokers."""
    running = BrokerCluster(tmp_path_factory.mktemp("kafka-cluster"))
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.fixture
def servers(broker) -> str:
    return broker.address


@pytest.fixture
def topics(broker) -> Topics:
    """Makes and changes topics of the broker."""
    return Topics(broker.address)


@pytest.fixture
def topic(request) -> str:
    """A name of a topic that no other test has."""
    return re.sub(r"[^A-Za-z0-9._-]", ".", request.node.name.partition("@")[0].removeprefix("test_"))[:200]


@pytest.fixture
def producing(servers) -> Producing:
    return Producing(servers)


@pytest.fixture
def storage(tmp_path) -> str:
    """The URI of a storage of the test's own."""
    return (tmp_path / "store").as_uri()


@pytest.fixture
def run(tmp_path: Path):
    """Run a command of `tiered-index` on the test's own root."""
    return lambda *arguments, **options: run_here(*arguments, "--root", tmp_path / "root", **options)


@pytest.fixture
def index(tmp_path):
    settings = {"slots": 97, "items": 5_000, "background": False}
    service = IndexService.open(root=tmp_path / "index", storage_backend=MemoryStorage(), **settings)
    yield service
    service.abandon()
