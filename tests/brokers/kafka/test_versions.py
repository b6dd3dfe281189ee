"""The newest and the oldest supported version of Kafka: the same job on each."""

from collections.abc import Iterator

import pytest

from tests.brokers.kafka.broker import NEWEST, OLDEST, Broker
from tests.brokers.kafka.checked import assert_found, assert_indexed, by_place
from tests.brokers.kafka.topics import Topics
from tests.kafka.followed import archive, archived
from tests.support.kafka_cluster import Producing

pytestmark = pytest.mark.xdist_group("kafka versions")


@pytest.fixture(scope="module", params=[OLDEST, NEWEST])
def versioned(request, tmp_path_factory) -> Iterator[Broker]:
    """A broker of a version."""
    running = Broker(tmp_path_factory.mktemp("kafka-version"), request.param)
    running.format()
    try:
        running.start()
        yield running
    finally:
        running.kill()


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_records_of_a_version(versioned, index, topic, codec):
    topics = Topics(versioned.address)
    topics.create(topic, 2)
    sent = [
        {"key": f"k{n % 9}", "value": f"v{n}", "headers": [("a", b"\xff"), ("a", None)], "partition": n % 2}
        for n in range(200)
    ]
    Producing(versioned.address, compression_type=codec).send(topic, sent)
    follower, _ = assert_indexed(index, topics, topic)
    assert (follower.messages, follower.loss_count) == (200, 0)


def test_a_log_of_a_version_that_changes(versioned, index, topic):
    topics = Topics(versioned.address)
    topics.create(topic)
    Producing(versioned.address).send(topic, [{"key": f"old{n}"} for n in range(20)])
    _, before = assert_indexed(index, topics, topic)
    topics.delete_records(topic, {0: 15})
    assert archive(index, versioned.address, topic).loss_count == 0
    topics.delete(topic)
    topics.create(topic)
    Producing(versioned.address).send(topic, [{"key": f"new{n}"} for n in range(30)])
    follower = archive(index, versioned.address, topic)
    assert [(loss.kind, loss.begin, loss.end) for loss in follower.losses] == [("rewritten", 0, 20)]
    after = topics.records(topic)
    assert by_place(list(archived(index))) == by_place([*before, *after])
    assert_found(index, topic, [*before, *after])
