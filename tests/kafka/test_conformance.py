"""Kafka against the contract of connectors, on a mock cluster."""

import contextlib
import itertools
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.support.kafka_cluster import PARTITIONS, Cluster, Producing, kafka_cluster
from tiered_index.connectors.kafka.connector import CONNECTOR
from tiered_index.connectors.kafka.spec import KafkaOptions
from tiered_index.service.index import IndexService
from tiered_index.testing.connector_conformance import ConnectorConformance, TestedSource, WrittenMessage

_NUMBERS = itertools.count()


class Topics(TestedSource):
    """Two topics of a cluster."""

    connector = CONNECTOR
    options = KafkaOptions(restart_at="begin", archive=True)
    archives = True

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.producing = cluster, Producing(cluster.servers)
        self.topics = tuple(f"topic-{next(_NUMBERS)}" for _ in range(2))
        for topic in self.topics:
            cluster.create(topic)
        self.address = f"kafka://{cluster.servers}/{','.join(self.topics)}"
        self.ends = dict.fromkeys(itertools.product(self.topics, range(PARTITIONS)), 0)
        self.number = 0

    def write(self, count: int) -> list[WrittenMessage]:
        written = []
        for _ in range(count):
            self.number += 1
            topic, partition = self.topics[self.number % 2], self.number % PARTITIONS
            key, text = f"key-{self.number}", f"text-{self.number}."
            self.producing.send(topic, [{"partition": partition, "key": key, "value": text}])
            self.ends[topic, partition] += 1
            written.append(WrittenMessage(topic, key, text))
        return written

    def trim(self) -> None:
        for (topic, partition), end in self.ends.items():
            self.cluster.trim(topic, partition, max(end - 1, 0))

    def replace(self) -> None:
        for topic in self.topics:
            self.cluster.delete(topic)
            self.cluster.create(topic)
        self.ends = dict.fromkeys(self.ends, 0)
        self.producing = Producing(self.cluster.servers)

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        self.cluster.take_down(1)
        try:
            yield
        finally:
            self.cluster.bring_up(1)

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        self.cluster.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.cluster.process.send_signal(signal.SIGCONT)


class TestKafka(ConnectorConformance):
    @pytest.fixture
    def tested(self) -> Iterator[Topics]:
        with kafka_cluster() as cluster:
            yield Topics(cluster)

    @pytest.mark.long
    def test_each_entry_is_stored_once_wherever_the_process_is_killed(
        self, tested: TestedSource, open_index: Callable[[], IndexService], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        super().test_each_entry_is_stored_once_wherever_the_process_is_killed(tested, open_index, monkeypatch)
