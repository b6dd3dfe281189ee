"""Topics of a real cluster: their changes, and a plain consumer that reads them, the oracle of tests."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import confluent_kafka
from confluent_kafka import IsolationLevel
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourcePatternType,
    ResourceType,
)

from tests.support.hanging import until
from tiered_index.connectors.kafka.record import KafkaRecord, TimestampType

_WAIT_S = 120.0


def packet(count: int, name: str = "k", partition: int = 0, size: int = 100) -> list[dict[str, Any]]:
    """Return records with keys of their own, for a producer."""
    return [{"key": f"{name}{n}", "value": f"{name}{n} " + "v" * size, "partition": partition} for n in range(count)]


def transactional(servers: str, name: str) -> confluent_kafka.Producer:
    """Return a producer of transactions, which stay open until it ends them."""
    # the broker would abort one after a minute
    settings = {"transactional.id": name, "transaction.timeout.ms": 3_600_000, "log_level": 0}
    producer = confluent_kafka.Producer({"bootstrap.servers": servers, **settings})
    producer.init_transactions(_WAIT_S)
    return producer


class Topics:
    """Makes and changes topics, and reads them. Each call returns when the cluster has done it."""

    def __init__(self, servers: str) -> None:
        self.servers = servers
        self.admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})

    def create(
        self, topic: str, partitions: int = 1, replicas: int = 1, on: Sequence[Sequence[int]] = (), **config: object
    ) -> None:
        """Make a topic; `config` has its settings, with `_` for each dot. `on`: the brokers of each partition."""
        settings = {name.replace("_", "."): str(value) for name, value in config.items()}
        where = {"replica_assignment": on} if on else {"replication_factor": replicas}
        futures = self.admin.create_topics([NewTopic(topic, partitions, config=settings, **where)])
        futures[topic].result(_WAIT_S)
        until(lambda: self._partitions(topic) == partitions, every_s=0.02)

    def delete(self, topic: str) -> None:
        """Delete a topic."""
        self.admin.delete_topics([topic])[topic].result(_WAIT_S)
        until(lambda: self._partitions(topic) == 0, every_s=0.02)

    def grow(self, topic: str, partitions: int) -> None:
        """Give a topic so many partitions."""
        self.admin.create_partitions([NewPartitions(topic, partitions)])[topic].result(_WAIT_S)
        until(lambda: self._partitions(topic) == partitions, every_s=0.02)

    def configure(self, topic: str, **config: object) -> None:
        """Change settings of a topic."""
        changes = [
            ConfigEntry(name.replace("_", "."), str(value), incremental_operation=AlterConfigOpType.SET)
            for name, value in config.items()
        ]
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=changes)
        self.admin.incremental_alter_configs([resource])[resource].result(_WAIT_S)

    def delete_records(self, topic: str, before: Mapping[int, int]) -> None:
        """Delete the records of partitions before an offset each."""
        offsets = [confluent_kafka.TopicPartition(topic, number, offset) for number, offset in before.items()]
        for answer in self.admin.delete_records(offsets).values():
            answer.result(_WAIT_S)

    def allow(self, user: str, topic: str, *operations: AclOperation) -> None:
        """Allow a user operations on a topic."""
        rules = [AclBinding(*_rule(user, topic, operation)) for operation in operations]
        for answer in self.admin.create_acls(rules).values():
            answer.result(_WAIT_S)
        until(lambda: all(self._rules(user, topic, operation) for operation in operations), every_s=0.02)

    def forbid(self, user: str, topic: str, *operations: AclOperation) -> None:
        """Take back what `allow` allowed."""
        rules = [AclBindingFilter(*_rule(user, topic, operation)) for operation in operations]
        for answer in self.admin.delete_acls(rules).values():
            answer.result(_WAIT_S)
        until(lambda: not any(self._rules(user, topic, operation) for operation in operations), every_s=0.02)

    def _rules(self, user: str, topic: str, operation: AclOperation) -> list[AclBinding]:
        """Return the rules that the broker obeys, which come to it some time after the controller's answer."""
        return list(self.admin.describe_acls(AclBindingFilter(*_rule(user, topic, operation))).result(_WAIT_S))

    def settle(self, topic: str) -> None:
        """Wait until no transaction is open. Partitions get its end some time after a commit or abort has returned."""
        partitions = [confluent_kafka.TopicPartition(topic, number) for number in range(self._partitions(topic))]

        def ends(level: IsolationLevel) -> list[int]:
            latest = {partition: OffsetSpec.latest() for partition in partitions}
            answers = self.admin.list_offsets(latest, isolation_level=level)
            return [answers[partition].result(_WAIT_S).offset for partition in partitions]

        until(lambda: ends(IsolationLevel.READ_COMMITTED) == ends(IsolationLevel.READ_UNCOMMITTED) != [], every_s=0.02)

    def _partitions(self, topic: str) -> int:
        metadata = self.admin.list_topics(timeout=_WAIT_S).topics.get(topic)
        return 0 if metadata is None or metadata.error is not None else len(metadata.partitions)

    def in_sync(self, topic: str, partition: int = 0) -> list[int]:
        """Return the brokers that have all of a partition's log."""
        return list(self.admin.list_topics(topic, timeout=_WAIT_S).topics[topic].partitions[partition].isrs)

    def range(self, topic: str, partition: int = 0) -> tuple[int, int]:
        """Return the first offset of a partition, and its high watermark."""
        reader = self._reader()
        try:
            low, high = reader.get_watermark_offsets(confluent_kafka.TopicPartition(topic, partition), timeout=_WAIT_S)
        finally:
            reader.close()
        return low, high

    def _reader(self, **settings: object) -> Any:
        fixed = {"group.id": "oracle", "enable.partition.eof": True, "enable.auto.commit": False, "log_level": 0}
        chosen = {"auto.offset.reset": "earliest", "fetch.message.max.bytes": 30_000_000}
        return confluent_kafka.Consumer({"bootstrap.servers": self.servers, **fixed, **chosen, **settings})

    def records(self, topic: str, isolation: str = "read_committed") -> list[KafkaRecord]:
        """Return the records of a topic as a plain consumer reads them, by partition and offset."""
        reader = self._reader(**{"isolation.level": isolation})
        partitions = range(self._partitions(topic))
        reader.assign(
            [confluent_kafka.TopicPartition(topic, number, confluent_kafka.OFFSET_BEGINNING) for number in partitions]
        )
        records, ended, end_s = list[KafkaRecord](), set[int](), time.monotonic() + _WAIT_S
        try:
            while len(ended) < len(partitions):
                assert time.monotonic() < end_s, f"{topic}: only partitions {ended} were read to their ends"
                for message in reader.consume(10_000, 0.1):
                    if message.error() is None:
                        records.append(_record(message))
                    elif message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF:
                        ended.add(message.partition())
        finally:
            reader.close()
        return sorted(records, key=lambda record: (record.partition, record.offset))


def _rule(user: str, topic: str, operation: AclOperation) -> tuple[Any, ...]:
    place = ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, f"User:{user}"
    return (*place, "*", operation, AclPermissionType.ALLOW)


def _record(message: Any) -> KafkaRecord:
    clock, time_ms = message.timestamp()
    return KafkaRecord(
        message.topic(),
        message.partition(),
        message.offset(),
        message.key(),
        message.value(),
        tuple(message.headers() or ()),
        None if clock == confluent_kafka.TIMESTAMP_NOT_AVAILABLE else time_ms,
        TimestampType(clock),
    )


def places_of(records: Iterable[KafkaRecord], key: bytes) -> set[tuple[int, int]]:
    """Return partition and offset of each record with a key."""
    return {(record.partition, record.offset) for record in records if record.key == key}
