"""Topics of Kafka as a source: all partitions, from the index's own positions on, and the rule for each surprise."""

import contextlib
import time
from random import Random
from types import SimpleNamespace

import pytest

from tests.kafka.followed import archive, archived, ingest, places, source_of
from tests.support.cutting_proxy import cutting_proxy
from tests.support.hanging import until
from tests.support.kafka_cluster import PARTITIONS, Producing, kafka_cluster
from tiered_index.config import IndexConfig
from tiered_index.connectors.documents import document_of
from tiered_index.connectors.follow import Follower
from tiered_index.connectors.kafka.client.broker import KafkaBroker, LogRange, kafka, record_of
from tiered_index.connectors.kafka.names import Name
from tiered_index.connectors.kafka.partitions import Partition
from tiered_index.connectors.kafka.record import KafkaRecord, TimestampType
from tiered_index.connectors.read_again import MessageSources
from tiered_index.errors import ConfigError, InvalidArgument, StorageMisconfigured, StorageUnavailable


def test_a_topic_that_the_brokers_can_not_describe_now_is_read_to_its_end(index, cluster, servers, producing, topic):
    producing.send(topic, ({"key": f"{n}", "partition": n % PARTITIONS} for n in range(400)))
    source = source_of(index, servers, topic)
    cluster.fail_topic(topic, 5)
    source._looked_s = -1e9
    with Follower(index, source, follow=False, note=lambda _: None) as follower:
        follower.run()
    cluster.fail_topic(topic, 0)
    assert follower.messages == 400


def test_a_start_waits_for_a_topic_that_the_brokers_can_not_describe(
    index, cluster, servers, producing, topic, monkeypatch
):
    monkeypatch.setattr("tiered_index.connectors.kafka.source.TIMEOUT_S", 3.0)
    monkeypatch.setattr("tiered_index.connectors.kafka.source.STEP_S", 3.0)
    producing.send(topic, [{"key": "k", "partition": 0}])
    cluster.fail_topic(topic, 5)
    with pytest.raises(StorageUnavailable, match=f"all of {topic}: "):
        source_of(index, servers, topic)
    notes: list[str] = []
    source = source_of(index, servers, topic, follow=True, note=notes.append)
    assert f"all of {topic}: " in notes[0]
    cluster.fail_topic(topic, 0)
    source._looked_s = -1e9
    with Follower(index, source, note=lambda _: None) as follower:
        follower.in_background()
        until(lambda: follower.messages == 1)


def test_a_batch_that_was_not_put_comes_again(index, servers, producing, topic):
    producing.send(topic, ({"key": "a", "partition": n % 2} for n in range(10)))
    source = source_of(index, servers, topic)
    assert source.lag().bytes == 10
    seen = set()
    while not seen:
        batches = source.batches()
        for batch in batches:
            if batch.columns is not None and batch.messages:
                seen.add((batch.source, batch.position))
                break
        batches.close()
    assert (set(source.positions().values()), source.lag().bytes) == ({0}, 10)
    again = next(source.batches())
    assert (again.source, again.position) in seen
    with Follower(index, source, follow=False) as follower:
        follower.run()
    assert len(places(index, topic, "a")) == 10


def test_records_whose_keys_cannot_be_taken_are_not_passed_by_a_later_round(index, servers, producing, topic):
    """The client does not return them again, so the source ends; another one begins before them."""
    producing.send(topic, ({"key": "a", "partition": 0} for _ in range(5)))

    def refuse(record):
        raise ZeroDivisionError(record.offset)

    source = source_of(index, servers, topic, function=refuse)
    for problem in (f"record {topic}/0/0: the function of keys failed: ZeroDivisionError", "open another source"):
        with pytest.raises(InvalidArgument, match=problem):
            for _ in range(100):
                for batch in source.batches():
                    assert not batch.position
    assert set(source.positions().values()) == {0}
    source.close()
    assert ingest(index, servers, topic).messages == 5
    assert len(places(index, topic, "a")) == 5


def test_no_setting_is_in_the_text_of_a_source_or_a_broker(index, servers, topic, producing):
    producing.send(topic, [{"key": "a"}])
    secret = {"ssl.key.password": "pw-4711"}
    source = source_of(index, servers, topic, settings=secret)
    assert "pw-4711" not in repr(source)
    assert "pw-4711" not in repr(KafkaBroker(secret | {"bootstrap.servers": servers}))
    source.close()


def test_an_index_is_of_one_cluster_and_of_topics_that_are_there(index, cluster, servers, producing, topic):
    producing.send(topic, [{"key": "k"}])
    ingest(index, servers, topic)
    with pytest.raises(ConfigError, match="another root"):
        source_of(index, servers, topic, cluster="another")
    with pytest.raises(InvalidArgument, match="--store-name"):
        source_of(index, servers, topic, cluster="prod/eu")
    with pytest.raises(InvalidArgument, match="--commit-group"):
        source_of(index, servers, topic, commit_group="")
    with pytest.raises(InvalidArgument, match=f"did you mean '{topic}'"):
        source_of(index, servers, f"{topic}s")
    with pytest.raises(InvalidArgument, match="name topics"):
        source_of(index, servers)
    cluster.fail_topic(topic, 29)  # Kafka's number of the refusal of a topic
    with pytest.raises(StorageMisconfigured, match=f"{topic}: .*authorization failed: allow the .* login to READ it"):
        source_of(index, servers, topic)
    cluster.fail_topic(topic, 0)


def test_the_records_that_wait_for_a_put_are_bounded(index, topic):
    """The client stops fetching while nothing is taken: that is the back-pressure."""
    with kafka_cluster() as cluster, cutting_proxy(cluster.servers) as proxy:
        cluster.advertise(1, proxy.port)
        random = Random(7)
        sent = [{"key": f"{n}", "value": random.randbytes(4_000), "partition": n % PARTITIONS} for n in range(2_000)]
        Producing(cluster.servers).send(topic, sent)
        small = {"queued.max.messages.kbytes": "256", "fetch.message.max.bytes": "65536"}
        source = source_of(index, cluster.servers, topic, settings=small)
        until(lambda: proxy.passed > 256 << 10)
        time.sleep(1.0)
        assert proxy.passed < 2 << 20
        with Follower(index, source, follow=False) as follower:
            follower.run()
        assert follower.messages == 2_000
        assert proxy.passed > 8_000_000


def test_headers_with_a_name_that_is_no_text_are_left_out():
    class Damaged(SimpleNamespace):
        def headers(self):
            if self.raw_headers is None:
                raise SystemError("returned a result with an exception set")
            return self.raw_headers

        def set_headers(self, headers):
            self.raw_headers = headers

    values = {"topic": "t", "partition": 1, "offset": 2, "key": b"k", "value": b"v", "timestamp": (1, 5)}
    message = Damaged(raw_headers=None, **{name: lambda value=value: value for name, value in values.items()})
    for _ in range(2):
        assert record_of(message) == KafkaRecord("t", 1, 2, b"k", b"v", (), 5, TimestampType.CREATE)


def test_topics_of_an_index_of_a_rocketmq_store_are_not_those_of_a_broker():
    broker = SimpleNamespace()
    for connectors, is_of_kafka in (
        ({"pay": "rocketmq"}, False),
        ({"pay": "rocketmq", "orders": "kafka"}, True),
        ({"payments": "kafka"}, True),
        ({}, True),
    ):
        documents = {topic: document_of(name) for topic, name in connectors.items()}
        index = SimpleNamespace(
            documents_of_indexes=lambda known=documents: {None: known}, topic_document=documents.get
        )
        sources = MessageSources(index, IndexConfig(), {"kafka": broker})
        assert (sources.connector_of("orders") == "kafka") == is_of_kafka


def test_names_of_positions_can_be_read_again():
    topic_id = "8f9a870252ae49a3b4d95fe305a3a2be"
    for name in (Name("c", "orders", 3), Name("c", "orders", 3, 2), Name("c", "orders", 3, 2, topic_id)):
        assert Name.parse(str(name)) == name
    assert str(Name("c", "orders", 3)) == "kafka:c/orders/3"
    assert Name.parse("rocketmq:/store") is None


def test_the_login_needs_no_access_to_the_clients_group(index, topic):
    with kafka_cluster() as cluster:
        Producing(cluster.servers).send(topic, [{"key": "k", "partition": 0}])
        # Kafka's numbers of the search for a group's coordinator, and of the refusal of a group
        cluster.fail(10, *[30] * 100)
        assert archive(index, cluster.servers, topic).messages == 1
        assert [record.key for record in archived(index)] == [b"k"]


def test_a_record_without_a_time_gets_the_time_at_which_it_is_read(index, servers, producing, topic):
    """The client returns type 0 and time 0 for formats of Kafka before 0.10, and time -1 for newer ones."""
    producing.send(topic, [{"key": "k", "partition": 0}])
    with contextlib.closing(source_of(index, servers, topic)) as source:
        now_ms = source.clock.now_ms()
        messages = [
            kafka.Message(topic=topic, partition=0, offset=n, key=b"k", value=b"v", timestamp=time)
            for n, time in enumerate([(0, 0), (1, -1), (1, 0), (1, 5)])
        ]
        source._take_in([messages[:1], messages[1:]])
        first, second, *others = source._pending[-1].batch.columns["timestamp_ms"].tolist()
    assert first == second >= now_ms and others == [0, 5]


def test_a_pattern_does_not_mean_the_topics_of_kafka_itself(index, servers, producing, topic):
    producing.send(f"{topic}-a", [{"key": "k"}])
    producing.send(f"__{topic}", [{"key": "k"}])
    source = ingest(index, servers, f"*{topic}*").source
    assert {Name.parse(name).topic for name in source.positions()} == {f"{topic}-a"}


def test_records_written_while_the_ends_are_asked_for_are_no_open_transaction():
    """A note said so after a broker had been killed, although the topic had no transaction."""
    partition = Partition(Name("cluster", "orders", 0), position=125, read=125)
    partition.look_at(LogRange(0, 125, 125), now_ms=1_000)
    partition.look_at(LogRange(0, 125, 138), now_ms=6_000)
    assert not partition.is_seen_again
    partition.look_at(LogRange(0, 125, 138), now_ms=11_000)
    assert partition.is_seen_again and "offset, 125, since 1970-01-01T00:00:06Z" in (partition.held or "")


@pytest.mark.parametrize("problem", ["broken", "did not answer"])
def test_a_client_that_fails_or_stays_silent_is_closed_and_not_used_again(
    servers, producing, topic, monkeypatch, problem
):
    """After its broker was killed, the archive made no progress: "the broker did not answer within 30 seconds"."""
    producing.send(topic, [{"key": "k", "partition": 0}])
    is_closed = []

    def end_reading():
        if problem == "broken":
            raise StorageUnavailable("the client is broken")

    client = SimpleNamespace(
        assign=lambda _: None, consume=lambda *_: [], unassign=end_reading, close=lambda: is_closed.append(True)
    )
    with contextlib.closing(KafkaBroker({"bootstrap.servers": servers})) as broker:
        broker._idle[False].append(client)
        with monkeypatch.context() as patched, pytest.raises(StorageUnavailable, match=problem):
            patched.setattr("tiered_index.connectors.kafka.client.broker.TIMEOUT_S", 0.0)
            list(broker.records((topic, 0), 0, 1))
        assert is_closed
        assert [record.key for record in broker.records((topic, 0), 0, 1)] == [b"k"]
