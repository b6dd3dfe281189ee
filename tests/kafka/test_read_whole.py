"""Answers are complete up to the time before which every record of a topic was read, and no later."""

import pytest

from tests.kafka.followed import ingest, source_of
from tests.support.hanging import until
from tiered_index import IndexReader
from tiered_index.base.clock import ManualClock
from tiered_index.connectors.follow import Follower
from tiered_index.connectors.kafka.names import Name
from tiered_index.connectors.kafka.reads import Look, TopicRead, TopicReads
from tiered_index.errors import InvalidArgument
from tiered_index.service.log.reads import read_name
from tiered_index.types import Lookup

P, Q = Name("c", "t", 0), Name("c", "t", 1)


def test_a_topic_is_read_up_to_a_look_once_every_partition_has_reached_its_end_of_then():
    read = TopicRead(1_000)
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
    read, again = TopicRead(0), P.begun_again(same_log=False)
    read.look(Look(2_000, {P: 10}))
    read.reach({again: 10_000})
    assert read.read_ms == 0
    read.look(Look(3_000, {again: 20}))
    read.reach({again: 20})
    assert read.read_ms == 3_000


def test_a_log_that_was_cut_need_not_reach_its_earlier_end():
    read = TopicRead(0)
    read.look(Look(2_000, {P: 10}))
    read.look(Look(3_000, {P: 4}))
    read.reach({P: 4})
    assert read.read_ms == 3_000


def packet(count, **more):
    return [{"key": f"k{n}", "partition": n % 2, **more} for n in range(count)]


def test_a_run_without_new_records_advances_only_the_time_of_its_topic(index, servers, producing, topic):
    producing.send(topic, packet(10))
    clock = ManualClock()
    ingest(index, servers, topic, clock=clock)
    before = index.durable_positions()
    clock.advance(1.0)
    source = ingest(index, servers, topic, clock=clock).source
    assert index.durable_positions() == before | {read_name(f"kafka:{source.cluster}", topic): clock.now_ms()}


@pytest.mark.parametrize("ends_by_error", [False, True])
def test_answers_of_a_root_have_the_time_of_its_last_run(index, servers, producing, topic, ends_by_error):
    """Records that the broker got later are not in the root, whether or not the run ended by an error."""
    clock = ManualClock()
    producing.send(topic, packet(10))
    ingest(index, servers, topic, clock=clock)
    read_ms = clock.now_ms() // 1000 * 1000
    clock.advance(3600.0)
    producing.send(topic, packet(10, value="later"))
    if ends_by_error:
        with pytest.raises(InvalidArgument), Follower(index, source_of(index, servers, topic, clock=clock)) as follower:
            follower.source._is_taking = True
            follower.run()
        index.flush()
    with IndexReader.open(root=index.config.root, storage_backend=index._session.storage) as reader:
        for lookups in (index, reader):
            (answer,) = lookups.query_many([Lookup(topic=topic, key="k3")])
            assert (len(answer), answer.status, answer.as_of_ms) == (1, "complete", read_ms)
            assert lookups.query("another", "k3").as_of_ms is None
        ingest(index, servers, topic, clock=clock)
        for lookups in (index, reader):
            assert len(lookups.query(topic, "k3")) == 2
            assert lookups.query(topic, "k3").as_of_ms == clock.now_ms() // 1000 * 1000


def test_a_run_that_is_stopped_tells_its_last_look(index, servers, producing, topic):
    """Without new records, it would tell it later."""
    clock = ManualClock()
    producing.send(topic, packet(10))
    source = source_of(index, servers, topic, clock=clock, follow=True)

    def as_of_ms():
        index.flush()
        return index.query(topic, "k3").as_of_ms

    with Follower(index, source, note=lambda _: None).in_background() as follower:
        until(as_of_ms)
        clock.advance(5.0)
        until(lambda: source._reads._topics[topic][1].read_ms == clock.now_ms())
        assert as_of_ms() == clock.now_ms() - 5_000
        follower.end()
    assert as_of_ms() == clock.now_ms()


def told(reads, position, *, is_ending=False):
    return [batch.position for batch in reads.told({P: position}, is_ending=is_ending)]


def test_the_time_of_a_topic_without_new_records_advances_once_a_minute_and_at_the_end(index):
    reads = TopicReads(index, "c")
    for now_ms, expected in ((1_000, []), (60_999, []), (61_000, [61_000]), (120_000, []), (121_000, [121_000])):
        reads.look(now_ms - 1_000, ["t"], {})
        reads.look(now_ms - 1_000 if expected == [] else now_ms, ["t"], {"t": {P: 5}})
        assert told(reads, 5) == expected
    reads.look(122_000, ["t"], {"t": {P: 6}})
    assert told(reads, 5) == []
    reads.has_moved = True
    assert told(reads, 6) == [122_000]
    reads.look(123_000, ["t"], {"t": {P: 6}})
    assert told(reads, 6) == []
    assert told(reads, 6, is_ending=True) == [123_000]
