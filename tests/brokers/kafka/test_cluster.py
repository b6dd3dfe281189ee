"""A cluster of three brokers: elections clean and unclean, and followers that are killed meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.brokers.kafka.checked import assert_found, by_place
from tests.brokers.kafka.topics import Topics
from tests.kafka.followed import archive, archived, ingest, places, source_of
from tests.kafka.killed import HASTY, open_index
from tests.support.hanging import until
from tests.support.kafka_cluster import Producing
from tiered_index.connectors.follow import Follower

pytestmark = pytest.mark.xdist_group("kafka cluster")
TOP = Path(__file__).parents[3]
_HASTY = {name: value for name, value in HASTY.items() if name != "log_level"}


def test_a_leader_that_is_killed_and_comes_back_while_it_is_followed(cluster, index, topic, monkeypatch):
    # on a busy machine the election may last longer than the time without an alarm
    monkeypatch.setattr("tiered_index.connectors.kafka.source._FAILOVER_S", 3600.0)
    topics = Topics(cluster.servers)
    topics.create(topic, 1, 3, min_insync_replicas=1)
    producing = Producing(cluster.servers, acks="all", **_HASTY)
    sent = 0

    def send():
        nonlocal sent
        producing.send(topic, [{"key": f"k{n}", "value": "v" * 50} for n in range(sent, sent + 100)])
        sent += 100

    send()
    source = source_of(index, cluster.servers, topic, follow=True, settings=HASTY)
    with Follower(index, source, note=print) as follower:
        follower.in_background()
        until(lambda: follower.messages == sent)
        leader = cluster.leader(topic)
        alarms: list[str] = []

        def has_another():
            # all was read before
            alarms.extend(follower.problems(3600.0))
            return cluster.leader(topic) not in (leader, -1)

        until(lambda: source.lag().bytes == 0)
        # on a busy machine a broker may have been missed for a while: it could not lead
        until(lambda: len(topics.in_sync(topic)) == 3, every_s=0.05)
        cluster.brokers[leader].kill()
        try:
            until(has_another, every_s=0.05)
            assert alarms == []
            send()
            until(lambda: follower.messages == sent, every_s=0.05)
        finally:
            cluster.brokers[leader].start()
        send()
        until(lambda: follower.messages == sent, every_s=0.05)
        follower.end()
    index.flush()
    assert follower.loss_count == 0
    assert archive(index, cluster.servers, topic, settings=HASTY).messages == 0
    logged = topics.records(topic)
    assert by_place(list(archived(index))) == logged
    assert len(logged) == sent
    assert_found(index, topic, logged)


def test_an_unclean_election_is_told_by_a_follower_and_by_the_next_run(cluster, index, topic):
    """The log of topic "read" is cut and grows again while no run reads it."""
    topics, followed, read = Topics(cluster.servers), f"{topic}.followed", f"{topic}.read"
    first, second = list(cluster.brokers)[:2]
    for topic_name in (followed, read):
        topics.create(topic_name, on=[[first, second]], min_insync_replicas=1, unclean_leader_election_enable="true")
    producing = Producing(cluster.servers, acks="all", **_HASTY)

    def send(topic_name: str, name: str, count: int) -> None:
        producing.send(topic_name, [{"key": f"{name}-{n}", "value": "v"} for n in range(count)])

    def send_both(name: str, count: int) -> None:
        for topic_name in (followed, read):
            send(topic_name, name, count)

    send_both("old", 20)
    # the second replica misses records, and then leads alone
    cluster.brokers[second].kill()
    until(lambda: all(topics.in_sync(topic_name) == [first] for topic_name in (followed, read)), every_s=0.05)
    send_both("lost", 10)
    assert ingest(index, cluster.servers, read, settings=HASTY).messages == 30
    source = source_of(index, cluster.servers, followed, follow=True, settings=HASTY)
    with Follower(index, source, note=print) as follower:
        follower.in_background()
        until(lambda: follower.messages == 30, every_s=0.05)
        cluster.brokers[first].kill()
        cluster.brokers[second].start()
        try:
            until(lambda: follower.loss_count == 1 and source.lag().seconds is not None, every_s=0.05)
            send(read, "new", 15)
            # the offset that was read next is in the log again
            run = ingest(index, cluster.servers, read, settings=HASTY)
            send(followed, "new", 15)
            until(lambda: follower.messages == 45, every_s=0.05)
        finally:
            cluster.brokers[first].start()
        follower.end()
    index.flush()
    for topic_name, losses in ((followed, follower.losses), (read, run.losses)):
        assert [(loss.kind, loss.begin, loss.end) for loss in losses] == [("rewritten", 20, 30)]
        assert [record.key for record in topics.records(topic_name)[20:]] == [b"new-%d" % n for n in range(15)]
        assert all(places(index, topic_name, f"new-{n}") == {(0, 20 + n)} for n in range(15))
        again = ingest(index, cluster.servers, topic_name, settings=HASTY)
        assert (again.messages, again.loss_count) == (0, 0)


def test_followers_that_are_killed_twenty_times_under_load(cluster, topic, tmp_path):
    topics, root, count = Topics(cluster.servers), tmp_path / "root", 0
    topics.create(topic, 4, 3, min_insync_replicas=1)
    producing = Producing(cluster.servers, acks="all", **_HASTY)

    def send():
        nonlocal count
        numbers = range(count, count + 500)
        producing.send(topic, ({"key": f"k{n}", "value": "v" * 30, "partition": n % 4} for n in numbers))
        count += 500

    send()
    command = [sys.executable, "-m", "tests.kafka.killed", str(root), cluster.servers, topic, "20", "0.3", "archive"]
    with subprocess.Popen(command, cwd=TOP, stdout=subprocess.PIPE, text=True) as killing:
        while killing.poll() is None:
            send()
            try:
                killing.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        assert killing.stdout is not None
        assert (killing.returncode, killing.stdout.read().split()[-1]) == (0, "20")
    with open_index(root) as index:
        archive(index, cluster.servers, topic)
        logged = topics.records(topic)
        assert len(logged) == count
        assert by_place(list(archived(index))) == logged
        assert_found(index, topic, logged)
