"""Records that a broker holds back, refuses or deletes while topics are followed: each is named, and stops no other."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time

import pytest
from confluent_kafka.admin import AclOperation

from tests.brokers.kafka.broker import LOGINS
from tests.brokers.kafka.topics import packet, transactional
from tests.integration.cli.command_lines import run_here
from tests.kafka.followed import archived, places, source_of
from tests.support.hanging import until
from tiered_index.connectors.follow import Follower
from tiered_index.connectors.kafka.archive import KafkaArchiver
from tiered_index.connectors.kafka.client.broker import KafkaBroker
from tiered_index.connectors.kafka.messages import KafkaMessages
from tiered_index.connectors.kafka.partitions import OffsetOutOfRange
from tiered_index.errors import StorageUnavailable


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    monkeypatch.setattr("tiered_index.connectors.kafka.client.broker._AWAY_S", 0.0)


@contextlib.contextmanager
def following(index, servers, topic, **options):
    """Follow a topic in the background; the follower's notes are its `notes`."""
    notes: list[str] = []
    source = source_of(index, servers, topic, follow=True, note=notes.append, **options)
    with Follower(index, source, note=notes.append) as follower:
        follower.notes = notes
        yield follower.in_background()


@pytest.fixture
def open_transaction(servers, topic):
    """Begin a transaction in partition 0; return its producer."""
    producer = transactional(servers, topic)

    def begin():
        producer.begin_transaction()
        producer.produce(topic, key="open", value="v", partition=0)
        assert producer.flush(120) == 0
        return producer

    return begin


def test_records_behind_an_open_transaction_are_lag_and_are_named(
    index, servers, topics, producing, topic, open_transaction
):
    topics.create(topic, 2)
    producing.send(topic, packet(10))
    with following(index, servers, topic) as follower:
        until(lambda: follower.messages == 10)
        producer = open_transaction()
        producing.send(topic, packet(1_000, name="held"))
        producing.send(topic, packet(5, partition=1, name="other"))
        until(lambda: follower.messages == 15)
        until(lambda: follower.source.lag().bytes == 1_001)
        until(lambda: any("1,001 offsets" in problem for problem in follower.problems()))
        (problem,) = follower.problems()
        assert f"{topic}/0: 1,001 offsets can't be read: a transaction is open at the last stable" in problem
        assert "offset, 10, since 20" in problem
        assert follower.gauges()["follow_open_transaction_partitions"][1] == 1
        until(lambda: any("a transaction is open at the last stable offset, 10," in note for note in follower.notes))
        assert "seconds behind the source" in str(follower.behind(-1.0))
        broker = KafkaBroker({"bootstrap.servers": servers})
        with pytest.raises(StorageUnavailable, match="offset 500 is after the last stable offset, 10, of an open"):
            KafkaMessages({}, broker).at(topic, 0, 500)
        assert KafkaMessages({}, broker).at(topic, 0, 2_000).state == "missing"
        broker.close()
        producer.commit_transaction(120)
        until(lambda: follower.messages == 1_016)
        # the marker of the commit has an offset of its own
        until(lambda: (follower.source.lag().bytes, follower.problems()) == (0, []))
    assert len(places(index, topic, "held7")) == 1


def test_a_run_to_the_end_names_what_an_open_transaction_holds(
    run, servers, topics, producing, topic, open_transaction, storage
):
    topics.create(topic, 1)
    producing.send(topic, packet(10))
    producer = open_transaction()
    producing.send(topic, packet(20, name="held"))
    done = run("ingest", f"kafka://{servers}/{topic}", "--storage", storage, "--wait", "--json")
    assert (done.code, done.document["messages"], done.document["lag"]["bytes"]) == (0, 10, 21)
    (held,) = done.document["open_transactions"]
    assert (held["partition"], held["last_stable_offset"], held["offsets"]) == (f"{topic}/0", 10, 21)
    assert "21 offsets can't be read" in done.err
    shown = run("ingest", f"kafka://{servers}/{topic}")
    assert re.search("behind +21 records\n", shown.out)
    producer.abort_transaction(120)


def test_answers_are_complete_only_up_to_a_transaction_that_stays_open(
    run, servers, topics, producing, topic, open_transaction, storage
):
    topics.create(topic, 2)
    producing.send(topic, packet(10))
    options = [f"kafka://{servers}/{topic}", "--storage", storage, "--wait", "--json"]

    def as_of_ms(key, count):
        """The times of answers with `count` entries, from the storage and from the root."""
        stored = run_here("query", topic, key, "--storage", storage, "--json").document
        rooted = run("query", topic, key, "--json").document
        assert [(len(answer["items"]), answer["status"]) for answer in (stored, rooted)] == [(count, "complete")] * 2
        return stored["as_of_ms"], rooted["as_of_ms"]

    assert run("ingest", *options).code == 0
    before_ms, from_root = as_of_ms("held7", 0)
    assert time.time() * 1000 - 60_000 < before_ms <= from_root
    time.sleep(1.1)  # the next records are of another second
    opened_ms = time.time() * 1000
    producer = open_transaction()
    producing.send(topic, packet(20, name="held"))
    producing.send(topic, packet(5, partition=1, name="other"))
    assert run("ingest", *options).document["messages"] == 5
    assert max(as_of_ms("held7", 0)) < opened_ms
    assert "0 found, complete as of 20" in run("query", topic, "held7").out
    producer.commit_transaction(120)
    topics.settle(topic)
    assert run("ingest", *options).document["messages"] == 21
    after_ms, from_root = as_of_ms("held7", 1)
    assert from_root >= after_ms >= opened_ms // 1000 * 1000


def archived_offsets(index):
    return sorted(record.offset for record in archived(index))


@pytest.mark.parametrize(
    "retention", [{"retention_ms": 60_000}, {"retention_bytes": 20_000}, {"local_retention_ms": 60_000}]
)
def test_records_are_archived_before_the_retention_of_their_topic_deletes_them(
    index, servers, topics, producing, topic, retention
):
    topics.create(topic, 1, **retention)
    producing.send(topic, packet(100))
    notes: list[str] = []
    source = source_of(index, servers, topic, follow=True, note=notes.append)
    with Follower(index, source, archiver=KafkaArchiver(source), note=notes.append) as follower:
        follower.in_background()
        until(lambda: follower.messages == 100)
        index.flush()
        until(lambda: follower.archiving.archived == 1)
        topics.delete_records(topic, {0: 100})
        producing.send(topic, packet(3))
        until(lambda: follower.messages == 103)
    assert (follower.losses, notes) == ([], [])
    assert archived_offsets(index) == [*range(100)]


def test_old_records_beside_current_ones_are_archived_soon(index, servers, topics, producing, topic):
    """They are in one segment with current ones, so that this broker, which looks all the time, keeps them for now."""
    topics.create(topic, 1, retention_ms=7 * 86_400_000)
    now_ms = time.time_ns() // 10**6
    current, old = ([{**line, "timestamp": at} for line in packet(500)] for at in (now_ms, now_ms - 30 * 86_400_000))
    producing.send(topic, [*current[:1], *old, *current[1:]])
    source = source_of(index, servers, topic, follow=True)
    with Follower(index, source, archiver=KafkaArchiver(source)) as follower:
        follower.in_background()
        until(lambda: follower.messages == 1_000)
        index.flush()
        until(lambda: follower.archiving.archived == 1)
    assert (follower.losses, archived_offsets(index)) == ([], [*range(1_000)])


def test_records_that_retention_deleted_before_they_were_archived_are_told_at_once_and_end_with_a_finding(
    run, servers, topics, producing, topic, storage
):
    topics.create(topic, 1)
    producing.send(topic, packet(40))
    assert run("ingest", f"kafka://{servers}/{topic}", "--storage", storage).code == 0
    topics.delete_records(topic, {0: 40})
    done = run("ingest", f"kafka://{servers}/{topic}", "--storage", storage, "--archive", "--json")
    assert (done.code, done.document["loss_count"]) == (1, 1), done.err
    assert f"missing: offsets 0 to 39: not archived: {topic}/0: offset 0 is next, and the log begins at 40" in done.err
    again = run("ingest", f"kafka://{servers}/{topic}", "--storage", storage, "--archive", "--json")
    assert (again.code, again.document["loss_count"]) == (0, 0)


def test_records_that_are_indexed_are_archived_when_the_command_is_ended(
    servers, topics, producing, topic, storage, tmp_path
):
    topics.create(topic, 1)
    producing.send(topic, packet(40))
    place = f"kafka://{servers}/{topic}"
    command = [sys.executable, "-m", "tiered_index", "ingest", place, "--root", str(tmp_path / "root")]
    command += ["--storage", storage, "--archive", "--follow", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if json.loads(line).get("entries") == 40:
                process.send_signal(signal.SIGTERM)
                break
        rest, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    last = json.loads(rest.splitlines()[-1])
    assert (last["status"], last["archived_segments"], last["loss_count"]) == ("stopped", 1, 0)


def secure(broker):
    login = {"sasl.mechanisms": "PLAIN", "sasl.username": "indexer", "sasl.password": LOGINS["indexer"]}
    return f"127.0.0.1:{broker.ports['SASL_PLAINTEXT']}", {"security.protocol": "SASL_PLAINTEXT", **login}


@pytest.mark.parametrize("operation", [AclOperation.READ, AclOperation.DESCRIBE])
def test_a_topic_that_the_login_may_no_longer_read_stops_alone(index, broker, topics, producing, topic, operation):
    """Without READ the topic is still listed, and without both it is hidden like one that does not exist."""
    other, (servers, login) = f"{topic}-other", secure(broker)
    for name in (topic, other):
        topics.create(name, 1)
        topics.allow("indexer", name, AclOperation.READ, AclOperation.DESCRIBE)
        producing.send(name, packet(5))
    with following(index, servers, f"{topic}*", settings=login) as follower:
        until(lambda: follower.messages == 10)
        topics.forbid("indexer", topic, *{AclOperation.READ, operation})
        until(lambda: follower.gauges()["follow_stopped_partitions"][1] == 1)
        # later: the broker obeys the new rules some time after its answer
        for name in (topic, other):
            producing.send(name, packet(5))
        until(lambda: follower.messages == 15)
        (problem,) = follower.problems()
        assert f"stopped partitions: 1, the first {topic}" in problem and "authorization failed" in problem
        assert follower.source.lag().seconds is None
        assert not any(" is gone" in note for note in follower.notes)
        topics.allow("indexer", topic, AclOperation.READ, AclOperation.DESCRIBE)
        until(lambda: follower.messages == 20)
        until(lambda: follower.problems() == [])


def test_records_that_retention_overtook_stop_their_partition_alone(index, servers, topics, producing, topic):
    topics.create(topic, 2)
    for partition in (0, 1):
        producing.send(topic, packet(10, partition=partition))
    with following(index, servers, topic) as follower:
        until(lambda: follower.messages == 20)
    index.flush()
    for partition in (0, 1):
        producing.send(topic, packet(10, "more", partition))
    topics.delete_records(topic, {0: 15})
    with following(index, servers, topic) as follower:
        until(lambda: follower.messages == 10)
        until(lambda: follower.gauges()["follow_stopped_partitions"][1] == 1)
        producing.send(topic, packet(1, "last", 1))
        until(lambda: follower.messages == 11)
        assert any(note.startswith(f"{topic}/0 stops: ") and "the log has 15 to 19" in note for note in follower.notes)
    index.flush()
    notes: list[str] = []
    producing.send(topic, packet(3, "later", 1))
    with Follower(index, source_of(index, servers, topic, note=notes.append), follow=False) as follower:
        with pytest.raises(OffsetOutOfRange, match=f"{topic}/0: the next offset is 10"):
            follower.run()
        # the other one was read to its end before
        assert follower.messages == 3


def test_deleted_refused_unavailable_and_no_topic_are_told_apart(broker, run, topics, producing, topic, storage):
    servers, login = secure(broker)
    topics.create(topic, 1)
    producing.send(topic, packet(10))
    assert run("ingest", f"kafka://{broker.address}/{topic}", "--storage", storage, "--wait").code == 0
    topics.delete_records(topic, {0: 3})
    client = [part for name, value in login.items() for part in ("--kafka", f"{name}={value}")]
    client += ["--kafka", f"bootstrap.servers={servers}", "--storage", storage]

    def states(key, *client):
        shown = run("query", topic, key, "--messages", "--allow-partial", "--json", *client).document
        return [fetched["state"] for fetched in shown["messages"]]

    def message(offset, *client):
        done = run("message", f"kafka:{topic}/0/{offset}", "--json", *client)
        return done.code, done.document["messages"][0]["state"] if done.code in (0, 1) else done.error["type"]

    # neither READ nor DESCRIBE, then only DESCRIBE
    assert (states("k7", *client), message(7, *client)) == (["refused"], (3, "StorageMisconfigured"))
    topics.allow("indexer", topic, AclOperation.DESCRIBE)
    assert (states("k7", *client), message(7, *client)) == (["refused"], (3, "StorageMisconfigured"))
    topics.allow("indexer", topic, AclOperation.READ)
    assert (states("k7", *client), message(7, *client)) == (["local"], (0, "local"))
    assert (states("k1", *client), message(1, *client)) == (["expired"], (1, "expired"))
    topics.forbid("indexer", topic, AclOperation.READ, AclOperation.DESCRIBE)
    everyone = ["--kafka", f"bootstrap.servers={broker.address}", "--storage", storage]
    topics.delete(topic)
    assert (states("k7", *everyone), message(7, *everyone)) == (["no_topic"], (1, "no_topic"))
    nobody = ["--kafka", f"bootstrap.servers=127.0.0.1:{broker.unused_port}", "--storage", storage, "--timeout", 3]
    assert message(7, *nobody)[0] in (3, 6)
