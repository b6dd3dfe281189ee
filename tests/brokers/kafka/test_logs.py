"""Logs that change: records that the broker deletes or compacts, transactions, topics that come and go."""

from __future__ import annotations

import contextlib
import time

import pytest

from tests.brokers.kafka.checked import assert_found, assert_indexed, assert_read, by_place
from tests.brokers.kafka.topics import packet, transactional
from tests.kafka.followed import archive, archived, ingest, places, source_of
from tests.support.hanging import until
from tests.support.kafka_cluster import Producing
from tiered_index.connectors.follow import Follower
from tiered_index.connectors.kafka.archive import KafkaArchiver
from tiered_index.connectors.kafka.partitions import OffsetOutOfRange

# each record gets a segment of its own, which the broker may delete or compact
_SMALL = {"segment_bytes": 1_048_576, "segment_ms": 100, "file_delete_delay_ms": 0}


def lost(follower):
    return [(loss.kind, loss.begin, loss.end) for loss in follower.losses]


def test_archived_records_outlive_delete_records(producing, topics, index, topic):
    topics.create(topic, 2)
    producing.send(topic, packet(40) + packet(40, "m", 1))
    _, logged = assert_indexed(index, topics, topic)
    topics.delete_records(topic, {0: 25, 1: 40})
    assert [topics.range(topic, number) for number in (0, 1)] == [(25, 40), (40, 40)]
    producing.send(topic, packet(5, "n"))
    follower = archive(index, topics.servers, topic)
    assert (follower.messages, follower.loss_count) == (5, 0)
    everything = by_place([*logged, *topics.records(topic)[-5:]])
    assert by_place(list(archived(index))) == everything
    assert_found(index, topic, everything)
    assert_read(index, topics.servers, everything[::10], "archived")


@pytest.mark.parametrize("restart_at", [None, "begin", "end"])
def test_retention_that_overtakes_is_named_with_its_range(producing, topics, index, topic, restart_at):
    topics.create(topic)
    producing.send(topic, packet(20))
    assert ingest(index, topics.servers, topic).messages == 20
    producing.send(topic, packet(30, "m"))
    topics.delete_records(topic, {0: 45})
    if restart_at is None:
        with pytest.raises(OffsetOutOfRange, match=r"the next offset is 20, and the log has 45 to 49.*--restart-at"):
            ingest(index, topics.servers, topic)
        return
    follower = ingest(index, topics.servers, topic, restart_at=restart_at)
    at = {"begin": 45, "end": 50}[restart_at]
    assert (follower.messages, lost(follower)) == (50 - at, [("missing", 20, at)])
    assert places(index, topic, "m29") == ({(0, 49)} if restart_at == "begin" else set())
    assert places(index, topic, "k3") == {(0, 3)}


def test_compaction_with_tombstones_before_and_behind_the_position(producing, topics, index, topic):
    topics.create(topic, min_cleanable_dirty_ratio=0.01, delete_retention_ms=0, **_SMALL)
    for turn in range(3):
        producing.send(topic, [{"key": f"k{n}", "value": f"{turn} " + "v" * 20_000} for n in range(30)])
        producing.send(topic, [{"key": f"k{n}", "value": None} for n in range(0, 30, 3)])
    before = topics.records(topic)
    archive(index, topics.servers, topic)
    topics.configure(topic, cleanup_policy="compact")
    producing.send(topic, [{"key": "last", "value": "v"}])
    until(lambda: len(topics.records(topic)) < len(before), every_s=0.2)
    # a second index reads the log with its holes
    follower = archive(index, topics.servers, topic)
    assert (follower.messages, follower.loss_count) == (1, 0)
    archived_records = by_place(list(archived(index)))
    assert [(record.key, record.value) for record in archived_records[: len(before)]] == [
        (record.key, record.value) for record in before
    ]
    assert_found(index, topic, archived_records)


def test_a_compacted_log_is_read_over_its_holes(producing, topics, index, topic):
    topics.create(topic, cleanup_policy="compact", min_cleanable_dirty_ratio=0.01, delete_retention_ms=0, **_SMALL)
    producing.send(topic, [{"key": f"k{n % 10}", "value": "v"} for n in range(100)])
    time.sleep(0.2)  # the next record begins a segment, and the one before may be compacted
    producing.send(topic, [{"key": "last", "value": "v"}])
    until(lambda: len(topics.records(topic)) == 11, every_s=0.2)
    _, logged = assert_indexed(index, topics, topic)
    assert [record.offset for record in logged] == list(range(90, 101))


class _Transactions:
    def __init__(self, topics, topic):
        self.producer = transactional(topics.servers, topic)
        self.topics, self.topic = topics, topic

    def send(self, records):
        self.producer.begin_transaction()
        for record in records:
            self.producer.produce(self.topic, **record)
        assert self.producer.flush(120) == 0

    def commit(self):
        self.producer.commit_transaction(120)
        self.topics.settle(self.topic)

    def abort(self):
        self.producer.abort_transaction(120)
        self.topics.settle(self.topic)


def test_transactions_committed_and_aborted(producing, topics, index, topic):
    topics.create(topic, 2)
    writing = _Transactions(topics, topic)
    for turn in range(6):
        writing.send(packet(10, f"t{turn}-", turn % 2))
        if turn % 3 == 2:
            writing.abort()
        else:
            writing.commit()
        producing.send(topic, packet(2, f"plain{turn}-"))
    follower, logged = assert_indexed(index, topics, topic)
    assert (follower.messages, len(logged)) == (52, 52)
    assert places(index, topic, "t2-3") == places(index, topic, "t5-3") == set()
    assert len(places(index, topic, "t1-3")) == 1
    # control records end the log: nothing is left to read
    assert follower.source.lag().bytes == 0


def test_aborted_records_are_indexed_if_asked_for(servers, topics, index, topic):
    topics.create(topic)
    writing = _Transactions(topics, topic)
    writing.send(packet(3))
    writing.abort()
    follower = archive(index, servers, topic, settings={"isolation.level": "read_uncommitted"})
    assert follower.messages == 3
    assert list(archived(index)) == topics.records(topic, "read_uncommitted")


def test_records_of_an_open_transaction_are_indexed_after_its_commit(servers, producing, topics, index, topic):
    topics.create(topic)
    producing.send(topic, packet(2, "before"))
    writing = _Transactions(topics, topic)
    writing.send(packet(3, "open"))
    producing.send(topic, packet(2, "behind"))
    assert ingest(index, servers, topic).messages == 2
    writing.commit()
    follower, logged = assert_indexed(index, topics, topic)
    assert (follower.messages, len(logged)) == (5, 7)


@contextlib.contextmanager
def following(index, servers, *names, **options):
    """Follow topics in a thread, with an archiver."""
    source = source_of(index, servers, *names, follow=True, **options)
    follower = Follower(index, source, archiver=KafkaArchiver(source), note=print)
    follower.in_background()
    try:
        yield follower
    finally:
        follower.end()


def test_a_topic_that_is_deleted_and_created_again_while_it_is_followed(servers, producing, topics, index, topic):
    topics.create(topic)
    producing.send(topic, packet(20, "old"))
    with following(index, servers, topic) as follower:
        until(lambda: follower.messages == 20)
        topics.delete(topic)
        topics.create(topic)
        producing.send(topic, packet(30, "new"))
        # records of the new log may be read at the old position first, and then again
        until(lambda: follower.loss_count and follower.messages >= 50, every_s=0.05)
    index.flush()
    assert [loss.kind for loss in follower.losses] == ["rewritten"]
    assert all(places(index, topic, f"new{n}") == {(0, n)} for n in range(30))


def test_a_topic_that_is_created_again_while_nothing_runs(servers, producing, topics, index, topic):
    topics.create(topic)
    producing.send(topic, packet(20, "old"))
    archive(index, servers, topic)
    topics.delete(topic)
    topics.create(topic)
    producing.send(topic, packet(30, "new"))
    follower = archive(index, servers, topic)
    assert (follower.messages, lost(follower)) == (30, [("rewritten", 0, 20)])
    keys = sorted(record.key for record in archived(index))
    assert keys == sorted(f"{name}{n}".encode() for name, count in (("old", 20), ("new", 30)) for n in range(count))


def test_new_partitions_and_new_topics_of_a_pattern(servers, producing, topics, index, topic):
    for name in ("a", "b"):
        topics.create(f"{topic}.{name}", 1)
        producing.send(f"{topic}.{name}", packet(10, name))
    with following(index, servers, f"{topic}.*") as follower:
        until(lambda: follower.messages == 20)
        topics.grow(f"{topic}.a", 3)
        topics.create(f"{topic}.c", 2)
        # the producer before does not know them yet
        Producing(servers).send(f"{topic}.a", packet(10, "grown", 2))
        Producing(servers).send(f"{topic}.c", packet(10, "c", 1))
        until(lambda: follower.messages == 40, every_s=0.05)
    index.flush()
    assert places(index, f"{topic}.a", "grown7") == {(2, 7)}
    assert places(index, f"{topic}.c", "c7") == {(1, 7)}
    assert follower.loss_count == 0
