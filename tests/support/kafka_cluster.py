"""A cluster of Kafka for tests: librdkafka's mock brokers, in a process of their own, on real sockets.

As a program it prints the brokers' addresses and lives until its stdin ends. Topics are made by the first record, with
four partitions each; a partition keeps its last 5 MiB, and forgets older batches as a real one does by its retention.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka

__all__ = ["PARTITIONS", "Producing", "kafka_cluster"]

PARTITIONS = 4


@contextlib.contextmanager
def kafka_cluster(brokers: int = 1, **settings: object) -> Iterator[str]:
    """Yield the addresses of the brokers of a cluster, which ends with the context."""
    command = [sys.executable, "-m", "tests.support.kafka_cluster", str(brokers)]
    command += [f"{name.replace('_', '.')}={value}" for name, value in settings.items()]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            servers = process.stdout.readline().strip()
            assert servers, "the mock cluster did not start"
            yield servers
        finally:
            process.stdin.close()


class Producing:
    """Writes records, and waits until the brokers have them. `offsets` has each partition's next one."""

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


def main(brokers: str, *settings: str) -> None:
    """Run a cluster until stdin ends."""
    chosen = dict(setting.split("=", 1) for setting in settings)
    owner = confluent_kafka.Producer(
        {"bootstrap.servers": "-", "test.mock.num.brokers": int(brokers), "log_level": 0, **chosen}
    )
    found = owner.list_topics(timeout=30).brokers.values()
    print(",".join(f"{broker.host}:{broker.port}" for broker in found), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
