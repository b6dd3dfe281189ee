"""A cluster of Kafka for tests: librdkafka's mock brokers, in a process of their own, on real sockets.

As a program it prints the brokers' addresses. It then executes the lines of stdin until stdin ends, and answers each by
a line. The first record makes its topic, with four partitions. A partition keeps its last 5 MiB, and deletes older
batches as a real one does by its retention.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import confluent_kafka

from tests.support.child import Child

if TYPE_CHECKING:
    import pytest

PARTITIONS = 4
_NUMBER = re.compile("-?[0-9]+")


class Cluster(Child):
    """The brokers at the addresses `servers`, in a process that ends with the context."""

    def __init__(self, brokers: int) -> None:
        super().__init__("-m", "tests.support.kafka_cluster", str(brokers), stderr=subprocess.DEVNULL)
        self.servers = self.line()
        assert self.servers, "the mock cluster did not start"

    def create(self, topic: str) -> None:
        """Make a topic, with an id of its own."""
        self._obey("topic_create", topic, PARTITIONS, 1)

    def delete(self, topic: str) -> None:
        self._obey("topic_delete", topic)

    def trim(self, topic: str, partition: int, offset: int) -> None:
        """Delete the records of a partition before an offset."""
        self._obey("partition_delete_records", topic, partition, offset)

    def control(self, broker: int) -> None:
        """Make a broker the controller, which knows the ids of topics; 0: there is none."""
        self._obey("set_controller_id", broker)

    def lead(self, topic: str, partition: int, broker: int) -> None:
        """Make a broker the leader of a partition."""
        self._obey("partition_set_leader", topic, partition, broker)

    def take_down(self, broker: int) -> None:
        """Close a broker's connections, and refuse new ones."""
        self._obey("broker_set_down", broker)

    def bring_up(self, broker: int) -> None:
        """Make a broker accept connections again."""
        self._obey("broker_set_up", broker)

    def slow_down(self, broker: int, delay_ms: int) -> None:
        """Delay each of a broker's answers by this time."""
        self._obey("broker_set_rtt", broker, delay_ms)

    def fail(self, request: int, *errors: int) -> None:
        """Answer the next requests of a kind with errors; Kafka's numbers name both."""
        self._obey("push_request_errors", request, len(errors), *errors)

    def forgive(self, request: int) -> None:
        """Drop the errors that `fail` set for a kind of request and that no request has used."""
        self._obey("clear_request_errors", request)

    def fail_topic(self, topic: str, error: int) -> None:
        """Make metadata report an error in place of a topic; 0 ends this."""
        self._obey("topic_set_error", topic, error)

    def advertise(self, broker: int, port: int) -> None:
        """Make metadata name another port of this host for a broker."""
        self._obey("broker_set_host_port", broker, "127.0.0.1", port)

    def limit_version(self, request: int, version: int) -> None:
        """Answer a kind of request only up to a version, as older brokers do; Kafka's number names the kind."""
        self._obey("set_apiversion", request, 0, version)

    def _obey(self, *words: object) -> None:
        self.tell(" ".join(map(str, words)))
        assert self.line() == "0", words


def kafka_cluster(brokers: int = 1) -> Cluster:
    """Start a cluster, which ends with the context."""
    return Cluster(brokers)


def wait_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package wait for brokers a fiftieth of a second at a time."""
    for module in ("client.broker", "source"):
        monkeypatch.setattr(f"tiered_index.connectors.kafka.{module}._WAIT_S", 0.02)


def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sources ask the brokers several times a second what has changed."""
    monkeypatch.setattr("tiered_index.connectors.kafka.source._METADATA_S", 0.2)


class Producing:
    """Writes records, and waits until the brokers have them."""

    def __init__(self, servers: str, **settings: object) -> None:
        chosen = {name.replace("_", "."): value for name, value in settings.items()}
        self._producer = confluent_kafka.Producer(
            {"bootstrap.servers": servers, "linger.ms": 5, "compression.type": "lz4", "log_level": 0, **chosen}
        )

    def send(self, topic: str, records: Iterable[dict[str, Any]]) -> None:
        """Write records, each as the arguments of `Producer.produce`."""
        failed: list[Any] = []
        for record in records:
            while True:
                try:
                    self._producer.produce(topic, on_delivery=lambda error, _: error and failed.append(error), **record)
                    break
                except BufferError:
                    self._producer.poll(0.1)
        assert self._producer.flush(60) == 0 and not failed, failed


def main(brokers: str) -> None:
    """Run a cluster until stdin ends. Each line has a function of the mock API, without prefix, and its arguments."""
    (path,) = (Path(confluent_kafka.__file__).parents[1] / "confluent_kafka.libs").glob("librdkafka*")
    library = ctypes.CDLL(str(path))
    for name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_mock_cluster_new"):
        getattr(library, name).restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    owner = library.rd_kafka_new(0, ctypes.c_void_p(library.rd_kafka_conf_new()), None, ctypes.c_size_t(0))
    cluster = ctypes.c_void_p(library.rd_kafka_mock_cluster_new(ctypes.c_void_p(owner), int(brokers)))
    library.rd_kafka_mock_set_controller_id(cluster, 1)
    print(library.rd_kafka_mock_cluster_bootstraps(cluster).decode(), flush=True)
    for line in sys.stdin:
        name, *words = line.split()
        arguments = [ctypes.c_int64(int(word)) if _NUMBER.fullmatch(word) else word.encode() for word in words]
        print(library[f"rd_kafka_mock_{name}"](cluster, *arguments) or 0, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
