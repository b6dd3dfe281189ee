"""Brokers that fail, are slow or away, and connections that are cut: nothing is lost, nothing is doubled."""

import contextlib
import math
import socket
import threading
import time
from types import SimpleNamespace

import pytest

import tiered_index.connectors.kafka.source as kafka_source
from tests.kafka.followed import ingest, places, proxied_cluster, source_of
from tests.kafka.killed import HASTY
from tests.support.hanging import until
from tests.support.kafka_cluster import PARTITIONS
from tiered_index.connectors.follow import Follower
from tiered_index.connectors.kafka.client.broker import KafkaBroker, SetupErrors, kafka
from tiered_index.errors import CorruptFile, StorageMisconfigured

BROKERS = 3
FETCH, LIST_OFFSETS = 1, 2


@pytest.fixture(scope="module")
def brokers():
    with proxied_cluster(BROKERS) as made:
        yield made


@pytest.fixture
def cluster(brokers):
    brokers[0].control(1)
    yield brokers[0]
    for broker in range(1, BROKERS + 1):
        brokers[0].bring_up(broker)
        brokers[0].slow_down(broker, 0)


@pytest.fixture
def sent(producing, topic):
    """Send records `first` to `last`, each to the partition of its number."""

    def send(first, last):
        producing.send(topic, ({"key": f"k{n}", "partition": n % PARTITIONS} for n in range(first, last)))

    return send


@pytest.fixture
def following(cluster, index, servers, topic, sent, looking_often):
    """A follower that has read ten records of each partition, and looks often for what changed."""
    sent(0, 10 * PARTITIONS)
    # otherwise a broker may lead none or all
    for partition in range(PARTITIONS):
        cluster.lead(topic, partition, partition % 3 + 1)
    source = source_of(index, servers, topic, follow=True, settings=HASTY)
    with Follower(index, source, note=lambda _: None) as follower:
        follower.in_background()
        until(lambda: follower.messages == 10 * PARTITIONS)
        yield follower
    follower.end()


def check(index, topic, count):
    """Every record is at its place, and at no other."""
    for n in range(count):
        assert places(index, topic, f"k{n}") == {(n % PARTITIONS, n // PARTITIONS)}


def wait(follower, met):
    """Wait until a condition is true. Raises the error of a follower that ends before."""
    until(lambda: met() or follower.has_ended())
    if follower.has_ended():
        follower.end()


def check_went_on(index, topic, follower, count):
    wait(follower, lambda: follower.messages >= count)
    assert (follower.messages, follower.entries, follower.losses) == (count, count, [])
    check(index, topic, count)


@pytest.mark.parametrize("errors", [(5, 5), *(pytest.param(e, marks=pytest.mark.long) for e in [(6,), (56, 1, -1)])])
def test_no_error_makes_the_range_of_a_partition_another_one(cluster, servers, topic, sent, errors):
    sent(0, 100 * PARTITIONS)
    cluster.trim(topic, 2, 30)
    broker = KafkaBroker({**HASTY, "bootstrap.servers": servers})
    for _ in range(8):
        cluster.fail(LIST_OFFSETS, *errors)
        assert broker.range((topic, 2)) == (30, 100, 100)
        assert broker.range((topic, 1)) == (0, 100, 100)
    broker.close()


@pytest.mark.parametrize(("error", "kind"), [(29, StorageMisconfigured), (2, CorruptFile)])
def test_what_does_not_pass_ends_the_following(cluster, index, topic, sent, servers, error, kind):
    sent(0, 100)
    assert ingest(index, servers, topic).messages == 100
    with Follower(index, source_of(index, servers, topic, follow=True, settings=HASTY)) as follower:
        # librdkafka reports the first answer of each broker at a log's end as that end, whatever its error
        cluster.fail(FETCH, *[error] * 60)
        follower.in_background()
        until(follower.has_ended)
        with pytest.raises(kind, match=topic):
            follower.end()
    cluster.forgive(FETCH)
    check(index, topic, 100)


def test_a_broker_that_is_away_is_told_and_caught_up_with(cluster, index, topic, sent, following):
    assert following.problems(60.0) == []
    problems: list[str] = []
    for broker in (2, 3):
        cluster.take_down(broker)

    def both() -> bool:
        problems[:] = following.problems(60.0)
        return len(problems) == 2

    until(both)
    (first, second) = problems
    assert first.startswith("source: ") and second == "follow: how far the index is behind the source is not known"
    assert math.isnan(following.gauges()["follow_lag_records"][1])
    for broker in (2, 3):
        cluster.bring_up(broker)
    # without a new record
    until(lambda: following.problems(60.0) == [])
    sent(10 * PARTITIONS, 200)
    check_went_on(index, topic, following, 200)


def test_a_cluster_that_does_not_answer_after_some_partitions_are_read_loses_no_record(
    cluster, index, servers, topic, sent, monkeypatch
):
    sent(0, 100)
    opened, questions = kafka_source.open_consumer, []

    class Silent:
        """A client whose cluster answers its first question only."""

        def __init__(self, *settings, **callbacks):
            self._client = opened(*settings, **callbacks)

        def __getattr__(self, name):
            return getattr(self._client, name)

        def list_topics(self, timeout):
            questions.append(timeout)
            if len(questions) in (2, 3):
                time.sleep(0.5)  # now it has records
                raise kafka.KafkaException(kafka.KafkaError(kafka.KafkaError._TRANSPORT))
            return self._client.list_topics(timeout=timeout)

    monkeypatch.setattr(kafka_source, "open_consumer", Silent)
    cluster.fail(LIST_OFFSETS, 6)  # so that one partition waits for the second look
    with Follower(index, source_of(index, servers, topic, follow=True, settings=HASTY)) as follower:
        assert len(questions) > 1
        follower.in_background()
        check_went_on(index, topic, follower, 100)
    follower.end()


@pytest.mark.parametrize("error", [5, 3])
def test_a_topic_that_its_brokers_do_not_know_for_a_moment(cluster, index, topic, sent, following, error):
    looked_s, notes = following.source._looked_s, []
    following.source.note = notes.append
    cluster.fail_topic(topic, error)
    # a topic without leaders for now is not gone
    until(lambda: following.source._gone if error == 3 else following.source._looked_s > looked_s)
    assert bool(following.source._gone) == (error == 3)
    until(lambda: sum(" is gone: it was deleted" in note for note in notes) == (PARTITIONS if error == 3 else 0))
    cluster.fail_topic(topic, 0)
    sent(10 * PARTITIONS, 200)
    check_went_on(index, topic, following, 200)


@pytest.mark.parametrize("is_far", [True, False])
def test_advertised_addresses_are_wrong_only_if_none_can_be_reached(monkeypatch, is_far):
    setup = SetupErrors("kafka://there", {"bootstrap.servers": "there:9092"})
    setup(SimpleNamespace(name=lambda: "_TRANSPORT", str=lambda: "there:9092/1: Connect failed (after 3ms)"))
    with contextlib.ExitStack() as stack:
        # its queue has room for one connection: further ones wait for seconds
        far = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        stack.enter_context(socket.create_connection(far.getsockname()))
        port = far.getsockname()[1]
        brokers = {at: SimpleNamespace(host="127.0.0.1", port=at) for at in (1, port if is_far else 99_999)}
        answering = SimpleNamespace(list_topics=lambda timeout: SimpleNamespace(brokers=brokers), close=lambda: None)
        monkeypatch.setattr("tiered_index.connectors.kafka.client.broker.open_consumer", lambda *_: answering)
        accepting = threading.Timer(0.3, lambda: far.accept()[0].close())
        accepting.start()
        stack.callback(accepting.join)
        with contextlib.nullcontext() if is_far else pytest.raises(StorageMisconfigured, match=r"there:9092.*Connect"):
            setup.check()
