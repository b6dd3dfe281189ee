"""Answers are complete up to the time before which every record of a topic was read, and no later."""

from __future__ import annotations

import time

import pytest

from tests.kafka.followed import ingest, source_of
from tests.support.hanging import until
from tests.support.rounds import upload
from tiered_index import IndexReader, Lookup
from tiered_index.follow import Follower
from tiered_index.kafka.client import range_in
from tiered_index.kafka.names import Name
from tiered_index.kafka.reads import Look, TopicRead
from tiered_index.service.log.reads import READ_PREFIX

P, Q = Name("c", "t", 0), Name("c", "t", 1)


def test_a_topic_is_read_up_to_a_look_once_every_partition_has_reached_its_end_of_then():
    read = TopicRead(1_000, False)
    read.look(Look(2_000, {P: 10, Q: 5}))
    read.reach({P: 9, Q: 50})
    assert read.read_ms == 1_000
    # a later look does not replace one that is waited for, else a slow reader would prove nothing
    read.look(Look(3_000, {P: 20, Q: 60}))
    read.look(Look(4_000, {P: 30, Q: 60}))
    read.reach({P: 10, Q: 50})
    assert read.read_ms == 2_000
    read.reach({P: 29, Q: 60})
    assert read.read_ms == 2_000
    read.reach({P: 30, Q: 60})
    assert read.read_ms == 4_000


def test_a_partition_that_is_read_again_proves_nothing_by_its_earlier_name():
    read, again = TopicRead(0, True), P.begun_again(same_log=False)
    read.look(Look(2_000, {P: 10}))
    read.reach({again: 10_000})
    assert read.read_ms == 0
    read.look(Look(3_000, {again: 20}))
    read.reach({again: 20})
    assert read.read_ms == 3_000


def test_a_log_that_was_cut_need_not_reach_its_earlier_end():
    read = TopicRead(0, True)
    read.look(Look(2_000, {P: 10}))
    read.look(Look(3_000, {P: 4}))
    read.reach({P: 4})
    assert read.read_ms == 3_000


@pytest.fixture
def held(monkeypatch):
    """The first partition has this number of offsets that can't be read: an open transaction is before them."""
    held = [0]

    def ranged(found, place):
        log = range_in(found, place)
        return log._replace(high=log.high + held[0]) if place[1] == 0 else log

    monkeypatch.setattr("tiered_index.kafka.source.range_in", ranged)
    monkeypatch.setattr("tiered_index.kafka.source._METADATA_S", 0.1)
    return held


def packet(count, **more):
    return [{"key": f"k{n}", "partition": n % 2, **more} for n in range(count)]


def as_of_stored(index, topic):
    """The time of an answer from the storage, which has all that was put so far."""
    upload(index)
    with IndexReader.open(storage_backend=index.storage.inner) as reader:
        one, (of_batch,) = reader.query(topic, "none"), reader.query_many([Lookup(topic=topic, key="none")])
        assert one.as_of_ms == of_batch.as_of_ms == one.to_dict()["as_of_ms"]
        return one.as_of_ms


def now_s_ms():
    return int(time.time()) * 1000


def test_answers_are_not_complete_past_a_partition_that_waits_for_a_transaction(index, servers, producing, topic, held):
    producing.send(topic, packet(10))
    with Follower(index, source_of(index, servers, topic, follow=True), note=lambda _: None) as follower:
        follower.in_background()
        until(lambda: follower.messages == 10 and not follower.source._has_moved)
        before_ms = as_of_stored(index, topic)
        assert before_ms >= now_s_ms() - 60_000 and index.query(topic, "none").as_of_ms is None
        held[0] = 7
        until(lambda: index.flush() or index.query(topic, "none").as_of_ms is not None)
        held_ms = index.query(topic, "none").as_of_ms
        time.sleep(1.1)  # the next records are of another second
        producing.send(topic, ({"key": f"more{n}", "partition": 1} for n in range(5)))
        until(lambda: follower.messages == 15)
        assert index.query(topic, "none").as_of_ms == held_ms < index.query(topic, "more4").items[0].timestamp_ms
        assert as_of_stored(index, topic) <= held_ms
        held[0] = 0
        until(lambda: index.flush() or index.query(topic, "none").as_of_ms is None)
        producing.send(topic, packet(1))
        until(lambda: follower.messages == 16 and not follower.source._has_moved)
        assert as_of_stored(index, topic) == index.query(topic, "k0").items[0].timestamp_ms
    follower.end()


def test_a_run_that_ends_before_a_transaction_tells_it_and_the_next_one_reads_it_whole(
    index, servers, producing, topic, held
):
    held[0] = 7
    producing.send(topic, packet(10))
    ingest(index, servers, topic)
    assert index.query(topic, "k1").as_of_ms == as_of_stored(index, topic) == 0
    held[0] = 0
    ingest(index, servers, topic)
    assert index.query(topic, "k1").as_of_ms is None
    assert as_of_stored(index, topic) == max(index.query(topic, f"k{n}").items[0].timestamp_ms for n in range(10))
    held[0] = 7
    ingest(index, servers, topic)
    (read_ms,) = (at for name, at in index.durable_positions().items() if name.startswith(READ_PREFIX))
    assert index.query(topic, "k1").as_of_ms == read_ms // 1000 * 1000


def test_a_run_without_new_records_writes_nothing(index, servers, producing, topic):
    producing.send(topic, packet(10))
    ingest(index, servers, topic)
    before = index.durable_positions()
    ingest(index, servers, topic)
    assert index.durable_positions() == before


def test_a_producer_with_a_fast_clock_makes_no_answer_complete_up_to_the_future(index, servers, producing, topic):
    fast_ms = int((time.time() + 500) * 1000)
    producing.send(topic, packet(4))
    producing.send(topic, [{"key": "fast", "partition": 1, "timestamp": fast_ms}])
    ingest(index, servers, topic)
    (item,) = index.query(topic, "fast").items
    assert item.timestamp_ms == fast_ms // 1000 * 1000
    assert as_of_stored(index, topic) <= now_s_ms() < item.timestamp_ms
