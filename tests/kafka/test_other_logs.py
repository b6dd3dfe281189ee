"""Logs that are not the ones that were read: topics that were deleted and created again, and logs without an offset."""

import confluent_kafka
import pytest

from tests.kafka.followed import archive, archived, ingest, places, source_of
from tests.support.hanging import beside, until
from tests.support.kafka_cluster import Producing, kafka_cluster
from tiered_index.connectors.follow import Follower
from tiered_index.connectors.kafka.archive import KafkaArchiver
from tiered_index.connectors.kafka.client.calls import Consumer
from tiered_index.connectors.kafka.names import Name
from tiered_index.connectors.kafka.partitions import OffsetOutOfRange
from tiered_index.errors import ConfigError

BEFORE = 50
# Kafka's numbers of two requests and of an error
METADATA, OFFSET_COMMIT, GROUP_REFUSED = 3, 8, 30


def records(name, count):
    of_all = {"value": "v", "partition": 0, "timestamp": 1_700_000_000_000}
    return [{"key": f"{name}-{n}", **of_all} for n in range(count)]


def losses_of(follower):
    """The losses of partitions that had records."""
    return [(loss.kind, loss.begin, loss.end) for loss in follower.losses if loss.end]


@pytest.fixture
def old_records(cluster, topic, producing):
    cluster.create(topic)
    producing.send(topic, records("old", BEFORE))


def test_a_cluster_whose_topics_have_no_ids_is_refused(index, topic):
    with kafka_cluster() as cluster:
        cluster.limit_version(METADATA, 8)  # Kafka 2.4 to 2.7
        Producing(cluster.servers).send(topic, records("old", BEFORE))
        with pytest.raises(ConfigError, match=rf"no id of topic {topic}: Kafka before 2\.8 is not supported: upgrade"):
            ingest(index, cluster.servers, topic)
    assert index.durable_positions() == {}


def test_records_of_a_log_that_was_empty_before_are_not_lost_without_a_report(
    index, cluster, servers, topic, producing
):
    cluster.create(topic)
    assert ingest(index, servers, topic).messages == 0
    producing.send(topic, records("new", 50))
    cluster.trim(topic, 0, 30)
    with pytest.raises(OffsetOutOfRange, match="the next offset is 0, and the log has 30 to 49"):
        ingest(index, servers, topic)


@pytest.mark.parametrize("was_archived", [True, False])
def test_a_log_that_was_cut_is_read_from_its_end_and_archived_on_as_another_one(
    index, cluster, servers, topic, old_records, producing, monkeypatch, was_archived
):
    """What was not archived before the cut is archived, without a wait for the records behind it."""
    remaining = BEFORE - 5
    for module in ("client.broker", "source"):
        monkeypatch.setattr(f"tiered_index.connectors.kafka.{module}.id_in", lambda *_: "a" * 32)
    before, then = (archive, ingest) if was_archived else (ingest, archive)
    before(index, servers, topic)
    cluster.delete(topic)
    cluster.create(topic)
    producing.send(topic, records("old", remaining))
    follower = then(index, servers, topic)
    assert [record.offset for record in archived(index)] == [*range(BEFORE if was_archived else remaining)]
    assert (follower.messages, losses_of(follower)) == (0, [("rewritten", remaining, BEFORE)])
    assert f"its log was cut: it had offset {BEFORE} next, and its log has" in follower.losses[0].problem
    producing.send(topic, records("new", 20))
    archive(index, servers, topic)
    new = {record.offset: record.key for record in archived(index) if record.key.startswith(b"new")}
    assert new == {remaining + n: b"new-%d" % n for n in range(20)}
    assert all(places(index, topic, f"new-{n}") == {(0, remaining + n)} for n in range(20))


def test_the_document_of_a_topic_has_its_id_also_of_a_topic_that_was_created_again(
    index, cluster, servers, topic, old_records, producing
):
    ids = []
    for _ in range(2):
        ingest(index, servers, topic)
        document = index.topic_document(topic)
        newest = max(filter(None, map(Name.parse, index.durable_positions())), key=lambda name: name.generation)
        assert document.facts == {"cluster": newest.cluster, "keys": ["key"], "topic_id": newest.topic_id}
        ids.append(newest.topic_id)
        cluster.delete(topic)
        cluster.create(topic)
        producing.send(topic, records("new", 5))
    assert len({*ids}) == 2 and "" not in ids


def committed(servers, topic):
    asker = confluent_kafka.Consumer({"bootstrap.servers": servers, "group.id": topic, "log_level": 0})
    try:
        (partition,) = asker.committed([confluent_kafka.TopicPartition(topic, 0)], timeout=30)
    finally:
        asker.close()
    return partition.offset


def test_offsets_that_a_group_did_not_get_are_told_and_sent_again(
    index, cluster, servers, topic, old_records, monkeypatch
):
    monkeypatch.setattr("tiered_index.connectors.kafka.client.group.COMMIT_S", 0.1)
    notes: list[str] = []
    source = source_of(index, servers, topic, follow=True, commit_group=topic, note=notes.append)
    cluster.fail(OFFSET_COMMIT, GROUP_REFUSED)
    with Follower(index, source) as follower:
        follower.in_background()
        until(lambda: follower.messages == BEFORE)
        index.flush()
        until(lambda: committed(servers, topic) == BEFORE)
        until(lambda: source.trouble is None)
    assert source.group.failed == 1
    assert follower.gauges()["follow_failed_commits_total"][1] == 1
    assert f"group {topic}: its offsets are not published" in notes[0]
    assert notes[0].endswith("authorization failed: allow the client's login to READ it")


def test_closing_does_not_wait_long_for_brokers_that_are_away(index, topic):
    with kafka_cluster() as cluster:
        Producing(cluster.servers).send(topic, records("old", BEFORE))
        source = source_of(index, cluster.servers, topic, follow=True, commit_group=topic)
        archiver = KafkaArchiver(source, every_s=0.0)
        with Follower(index, source, archiver=archiver, note=lambda _: None) as follower:
            until(lambda: sum(batch.messages for batch in source.batches()) == BEFORE)
            cluster.take_down(1)
            follower.archiving.poll()
            beside(follower.archiving.close)()
            beside(source.close)()


def test_a_log_that_was_cut_and_grew_again_between_two_runs_is_told_by_the_epochs_of_records(
    index, cluster, servers, topic, old_records, producing, monkeypatch
):
    monkeypatch.setattr("tiered_index.connectors.kafka.source.id_in", lambda *_: "a" * 32)
    assert ingest(index, servers, topic).messages == BEFORE
    cluster.delete(topic)
    cluster.create(topic)
    producing.send(topic, records("old", BEFORE - 20))
    for _ in range(3):  # elections, each with an epoch of its own
        cluster.lead(topic, 0, 1)
    producing.send(topic, records("new", 40))
    follower = ingest(index, servers, topic)
    assert (follower.messages, losses_of(follower)) == (40, [("rewritten", BEFORE - 20, BEFORE)])
    assert all(places(index, topic, f"new-{n}") == {(0, BEFORE - 20 + n)} for n in range(40))
    # an election alone cuts nothing
    cluster.lead(topic, 0, 1)
    producing.send(topic, records("more", 5))
    for count in (5, 0):
        follower = ingest(index, servers, topic)
        assert (follower.messages, follower.loss_count) == (count, 0)


@pytest.fixture
def cut_and_grown(cluster, topic, producing, monkeypatch):
    """Cut a log after so many records, elect leaders of a new epoch, and write new records."""
    for module in ("client.broker", "source"):
        monkeypatch.setattr(f"tiered_index.connectors.kafka.{module}.id_in", lambda *_: "a" * 32)

    def cut(remaining, new):
        cluster.delete(topic)
        cluster.create(topic)
        producing.send(topic, records("old", remaining))
        for _ in range(3):
            cluster.lead(topic, 0, 1)
        producing.send(topic, records("new", new))

    return cut


@pytest.mark.parametrize("remaining", [0, 1, 599, 600, 940, 999])
def test_a_log_that_lost_its_end_between_two_runs_is_read_and_archived_on_from_there(
    index, cluster, servers, topic, producing, cut_and_grown, remaining
):
    cluster.create(topic)
    producing.send(topic, records("old", 1_000))
    archive(index, servers, topic)
    cut_and_grown(remaining, 900)
    follower = archive(index, servers, topic)
    assert (follower.messages, losses_of(follower)) == (900, [("rewritten", remaining, 1_000)])
    assert [record.key for record in archived(index)] == [
        *(b"old-%d" % n for n in range(1_000)),
        *(b"new-%d" % n for n in range(900)),
    ]


def test_nothing_is_archived_before_a_log_is_known_to_be_the_one_that_was_put(
    index, cluster, servers, topic, old_records, cut_and_grown
):
    """The offsets that were put before have other records after the cut."""
    ingest(index, servers, topic)
    cut_and_grown(BEFORE - 20, 40)
    source = source_of(index, servers, topic)
    archiver = KafkaArchiver(source)
    with Follower(index, source, follow=False, archiver=archiver, note=lambda _: None) as follower:
        archiver.finish()
        assert [record.offset for record in archived(index)] == []
        follower.run()
        follower.finish_archiving()
    assert losses_of(follower) == [("rewritten", BEFORE - 20, BEFORE)]
    assert [record.key for record in archived(index)] == [
        *(b"old-%d" % n for n in range(BEFORE - 20)),
        *(b"new-%d" % n for n in range(40)),
    ]


@pytest.mark.parametrize("new", [20, 40])
def test_a_cut_log_that_reaches_the_position_while_it_is_taken_up_is_compared(
    index, cluster, servers, topic, old_records, producing, cut_and_grown, monkeypatch, new
):
    """It grows after the source asked for its range, and before the client reads on behind the cut."""
    ingest(index, servers, topic)
    cut_and_grown(BEFORE - 20, 0)
    assigned, grown = Consumer.incremental_assign, iter([records("new", new)])

    def grow_and_assign(self, partitions):
        producing.send(topic, next(grown, []))
        assigned(self, partitions)

    monkeypatch.setattr(Consumer, "incremental_assign", grow_and_assign)
    source = source_of(index, servers, topic, follow=True)
    with Follower(index, source, note=lambda _: None) as follower:
        follower.in_background()
        until(lambda: follower.messages == new)
        follower.end()
    assert losses_of(follower) == [("rewritten", BEFORE - 20, BEFORE)]
    index.flush()
    assert all(places(index, topic, f"new-{n}") == {(0, BEFORE - 20 + n)} for n in range(new))


def test_a_run_without_new_records_finds_that_a_log_was_cut_and_grew_to_the_same_end(
    index, servers, topic, old_records, cut_and_grown
):
    ingest(index, servers, topic)
    cut_and_grown(BEFORE - 20, 20)
    follower = ingest(index, servers, topic)
    assert (follower.messages, losses_of(follower)) == (20, [("rewritten", BEFORE - 20, BEFORE)])


def test_a_group_gets_the_durable_positions(index, servers, topic, old_records, producing):
    ingest(index, servers, topic, commit_group=topic)
    producing.send(topic, records("more", 7))
    # what is durable when the source is closed; its own records are flushed behind that
    follower = ingest(index, servers, topic, commit_group=topic)
    assert (committed(servers, topic), set(follower.source.positions().values())) == (BEFORE, {BEFORE + 7, 0})
