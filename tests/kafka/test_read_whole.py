"""Answers are complete up to the time before which every record of a topic was read, and no later."""

from tests.kafka.followed import ingest
from tiered_index.kafka.names import Name
from tiered_index.kafka.reads import Look, TopicRead

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


def packet(count, **more):
    return [{"key": f"k{n}", "partition": n % 2, **more} for n in range(count)]


def test_a_run_without_new_records_writes_nothing(index, servers, producing, topic):
    producing.send(topic, packet(10))
    ingest(index, servers, topic)
    before = index.durable_positions()
    ingest(index, servers, topic)
    assert index.durable_positions() == before
