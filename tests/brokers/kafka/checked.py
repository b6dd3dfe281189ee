"""Compares an index and its archive with the log of a real broker, as a plain consumer reads it."""

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tests.brokers.kafka.topics import Topics
from tests.kafka.followed import archive, archived
from tiered_index import IndexService
from tiered_index.connectors.follow import Follower
from tiered_index.connectors.kafka.client.broker import KafkaBroker
from tiered_index.connectors.kafka.messages import KafkaMessages
from tiered_index.connectors.kafka.record import KafkaRecord, key_text


def by_place(records: Sequence[KafkaRecord]) -> list[KafkaRecord]:
    """Return records in order of partition and offset."""
    return sorted(records, key=lambda record: (record.partition, record.offset))


def assert_found(index: IndexService, topic: str, logged: Sequence[KafkaRecord]) -> None:
    """Fail unless the index has the places of each key of the log's records, and the times and sizes, and no others."""
    of_keys = defaultdict(dict)
    for record in logged:
        if record.key:
            of_keys[key_text(record.key)][record.partition, record.offset] = record
    answers = index.query_many([(topic, key) for key in of_keys], max_count=len(logged) + 1)
    for (key, expected), answer in zip(of_keys.items(), answers, strict=True):
        assert answer.status == "complete"
        places = {(item.queue_id, item.offset): (item.size, item.timestamp_ms) for item in answer.items}
        assert places == {
            place: (record.size, record.timestamp_ms // 1000 * 1000) for place, record in expected.items()
        }, f"{key!r}: {places}"


def assert_read(index: IndexService, servers: str, logged: Sequence[KafkaRecord], state: str) -> None:
    """Fail unless each record is shown as it was logged, from the broker (`local`) or from the archive (`archived`)."""
    broker = KafkaBroker({"bootstrap.servers": servers}) if state == "local" else None
    with contextlib.closing(KafkaMessages({None: index.segment_archive}, broker)) as source:
        for record in logged:
            fetched = source.at(record.topic, record.partition, record.offset)
            assert (fetched.state, fetched.message) == (state, record), fetched.problem


def assert_indexed(
    index: IndexService, topics: Topics, topic: str, shown: int = 5, **options: Any
) -> tuple[Follower, list[KafkaRecord]]:
    """Index and archive a topic; fail unless index and archive have what a plain consumer reads.

    Shows so many records from broker and archive. Returns the follower and the records.
    """
    follower = archive(index, topics.servers, topic, **options)
    logged = topics.records(topic)
    assert by_place([record for record in archived(index) if record.topic == topic]) == logged
    assert_found(index, topic, logged)
    some = logged[:: max(1, len(logged) // shown)]
    for state in ("local", "archived"):
        assert_read(index, topics.servers, some, state)
    return follower, logged
