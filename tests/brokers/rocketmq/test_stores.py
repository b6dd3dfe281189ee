"""Files that brokers leave on disk, as they configure it: queues in RocksDB and of batches, segments that a broker
deleted, a log after a crash. A broker's own answers are compared with our server's, field for field.
"""

import json
import signal

import pytest

from tests.brokers.rocketmq.conftest import NEWEST, OLDEST
from tests.brokers.rocketmq.living import (
    RocketmqError,
    assert_same,
    let_delete,
    made_topic,
    same_by_key,
    same_by_pulls,
    serving,
    tiered_index,
    until,
)


@pytest.fixture
def index(tmp_path):
    """Arguments that name an index of this test."""
    return ("--root", tmp_path / "root", "--storage", (tmp_path / "storage").as_uri())


def test_consume_queues_in_rocksdb(new_broker, client, topic, index):
    """The queue offsets come from the messages of the log: the broker's database is not read."""
    broker, living = new_broker(storeType="defaultRocksDB")
    made_topic(living, broker, topic)
    living.send(topic, *[{"keys": f"k k{n}", "body": f"{n:04d}", "queue": n % 3} for n in range(30)])
    with serving(client, broker.name, *index, "--follow", broker.store) as ours:
        same_by_key(living, ours, topic, "k", 30)
        same_by_pulls(living, ours, topic, 30)
        # appended while the last segment is known
        living.send(topic, *[{"keys": "more", "body": f"{n:04d}", "queue": n % 3} for n in range(6)])
        same_by_key(living, ours, topic, "more", 6)
        same_by_pulls(living, ours, topic, 36)
        for queue, ends in living.ends(topic).items():
            assert int(queue) > 2 or ours.ends(topic)[queue] == ends == [0, 12]
    (fetched,) = json.loads(
        tiered_index("message", "--topic", topic, "--queue-id", 1, "--offset", 2, "--store", broker.store, "--json")
    )["messages"]
    (pulled,) = living.pull(topic, 1, 2, 1)["messages"]
    assert (fetched["state"], fetched["message"]["physical_offset"]) == ("local", pulled["log_offset"])


def test_a_store_that_was_changed_over_to_rocksdb(new_broker, client, topic, index):
    """The files of the old queues stay beside the database, and lack every later message."""
    broker, living = new_broker()
    made_topic(living, broker, topic)
    living.send(topic, *[{"keys": f"k k{n}", "body": f"{n:04d}", "queue": n % 3} for n in range(30)])
    drained_whole(living, topic, 30)
    broker.end()
    broker.start(storeType="defaultRocksDB")
    living.send(topic, *[{"keys": f"k k{n}", "body": f"{n:04d}", "queue": n % 3} for n in range(30, 60)])
    assert (broker.store / "consumequeue" / "CURRENT").exists() and (broker.store / "consumequeue" / topic).is_dir()
    with serving(client, broker.name, *index, "--follow", broker.store) as ours:
        until(lambda: len(ours.answered("drain", topic)) == 60)
        assert ours.ends(topic) == {str(queue): [0, 20] for queue in range(3)}
        # this broker does not find the message at commit log offset 0 in its new queues
        theirs = until(lambda: len(pulled := living.answered("drain", topic)) >= 59 and pulled)
        contents = [
            {(message["log_offset"], message["body"]) for message in each} for each in (ours.drain(topic), theirs)
        ]
        assert contents[1] <= contents[0] and len(contents[0]) == 60


def test_queues_of_batches(new_broker, client, topic, index):
    broker, living = new_broker()
    made_topic(living, broker, topic, "-a", "+queue.type=BatchCQ")
    for n in range(6):
        living.send(topic, *[{"keys": f"k{m}", "body": f"{n:02d}{m:02d}"} for m in range(4)], batch=True)
        living.send(topic, {"keys": "single", "body": f"{n:02d}"})
    with serving(client, broker.name, *index, "--follow", broker.store) as ours:
        same_by_key(living, ours, topic, "single", 6)
        same_by_pulls(living, ours, topic, 30)
        assert ours.ends(topic) == living.ends(topic)
        for queue, (begin, end) in living.ends(topic).items():
            for offset in range(begin, end + 2):
                # also from within a batch, which is answered whole
                assert ours.pull(topic, int(queue), offset, 1) == living.pull(topic, int(queue), offset, 1)
        assert ours.mqadmin("topicStatus", "-t", topic) == living.mqadmin("topicStatus", "-t", topic)


def test_messages_that_the_broker_deleted(beside, topic, index):
    """Every answer that the broker gave before it deleted its oldest segments is ours afterwards, without its store."""
    client, broker, living = beside.client, beside.broker, beside.living
    made_topic(living, broker, topic)
    before = len(broker.segments)
    for first in range(0, 60, 12):
        living.send(
            topic, *[{"keys": f"k k{n}", "body": "ab" * 40_000, "queue": n % 3} for n in range(first, first + 12)]
        )
    drained = drained_whole(living, topic, 60)
    messages_of_keys = {f"k{n}": living.by_key(topic, f"k{n}") for n in range(60)}
    by_id = {messages[0]["id"]: living.by_id(topic, messages[0]["id"]) for messages in messages_of_keys.values()}
    by_offset_id = {
        messages[0]["offset_id"]: living.by_id(topic, messages[0]["offset_id"])
        for messages in messages_of_keys.values()
    }
    pulled = living.pull(topic, 1, 3, 2)
    assert len(by_id) == 60
    # segments before that of the last message are whole; a broker writes on at any time, and may begin others
    last_offset = max(message["log_offset"] for message in drained)
    last_begin = max(int(path.name) for path in broker.segments if int(path.name) <= last_offset)
    follow = ("ingest", broker.store, *index, "--archive-queues", "--wait", "--json")
    tiered_index(*follow)
    until(lambda: len(broker.segments) >= before + 2)
    let_delete(client, broker, max(before, 2))
    begin = int(broker.segments[0].name)
    until(lambda: 0 < len(living.answered("drain", topic)) < 60 and living.by_key(topic, "k0") == [])
    # alone, the archive has all but the last segment; with the store it has all
    for more in (("--store", broker.store), ()):
        with serving(client, broker.name, *index, *more) as ours:
            end = None if more else last_begin
            archived = [message for message in drained if end is None or message["log_offset"] < end]
            assert len(archived) > len([message for message in drained if message["log_offset"] >= begin]) or more
            for key, messages in messages_of_keys.items():
                if messages[0]["log_offset"] < (end or 2**63):
                    assert_same(ours.by_key(topic, key), messages)
            for message in archived:
                assert ours.by_id(topic, message["id"]) == by_id[message["id"]]
            if more:
                assert_same(ours.drain(topic), drained)
                assert ours.pull(topic, 1, 3, 2) == pulled
                assert ours.ends(topic) == {str(n): [0, 20] for n in range(3)}
                # offset ids go to the broker that they name, which has deleted the message
                with pytest.raises(RocketmqError):
                    ours.by_id(topic, drained[0]["offset_id"])
    oldest = drained[0]
    for place_of in ((oldest["offset_id"],), ("--topic", topic, "--queue-id", 0, "--offset", oldest["queue_offset"])):
        printed = tiered_index("message", *place_of, *index[2:], "--json", "--body", "hex")
        (shown,) = json.loads(printed)["messages"]
        assert (shown["state"], shown["message"]["body"]) == ("archived", oldest["body"])
    assert by_offset_id[oldest["offset_id"]]["body"] == oldest["body"]


def test_an_archive_beside_a_store_without_readable_queues(new_broker, client, topic, index):
    """A store whose queues are in RocksDB hides nothing of the archive: `--store` adds to `--storage`."""
    broker, living = new_broker(storeType="defaultRocksDB", mappedFileSizeCommitLog=1 << 17)
    made_topic(living, broker, topic)
    sent = [{"keys": f"k k{n}", "body": "ab" * 4000, "queue": n % 2} for n in range(60)]
    living.send(topic, *sent)
    drained = drained_whole(living, topic, 60)
    broker.end()
    tiered_index("ingest", broker.store, *index, "--archive-queues", "--wait")
    for path in broker.segments[:1]:
        path.unlink()
    with serving(client, broker.name, *index, "--store", broker.store) as ours:
        assert_same(ours.drain(topic), drained)
        assert len(drained) == 60
        assert ours.ends(topic) == {"0": [0, 30], "1": [0, 30]}
    oldest = drained[0]
    command = ("message", "--topic", topic, "--queue-id", 0, "--offset", 0, *index, "--store", broker.store, "--json")
    (shown,) = json.loads(tiered_index(*command))["messages"]
    assert (shown["state"], shown["message"]["physical_offset"]) == ("archived", oldest["log_offset"])


def test_a_broker_that_is_killed_and_recovers(new_broker, client, topic, index):
    """Everything that a broker acknowledged and still has is found once, after each of three kills."""
    broker, living = new_broker(flushDiskType="SYNC_FLUSH")
    made_topic(living, broker, topic)
    with serving(client, broker.name, *index, "--follow", broker.store) as ours:
        for turn in range(3):
            sent = living.send(topic, *[{"keys": f"turn-{turn}", "body": f"{n:04d}"} for n in range(40)])
            assert {result["status"] for result in sent} == {"SEND_OK"}
            broker.end(signal.SIGKILL)
            broker.start()
            # the client connects again some time later
            same_by_key(living, ours, topic, f"turn-{turn}", 40)
            # the name server may take the end of the killed broker for that of the new one, until that registers again
            same_by_pulls(living, ours, topic, 40 * (turn + 1))


def drained_whole(living, topic, count):
    """Wait until a broker finds `count` messages by the key "k" and in its queues; return them."""
    until(lambda: len(living.answered("by_key", topic, "k")) == count)
    return until(lambda: len(messages := living.answered("drain", topic)) == count and messages)


@pytest.mark.parametrize("version", [NEWEST, OLDEST])
def test_a_commit_log_in_several_folders(new_broker, topic, index, tmp_path, version):
    """A broker with several folders in `storePathCommitLog` writes its segments to one after the other."""
    folders = [tmp_path / "disk-1" / "commitlog", tmp_path / "disk-2" / "commitlog"]
    broker, living = new_broker(
        version, storePathCommitLog=",".join(map(str, folders)), mappedFileSizeCommitLog=1 << 17
    )
    made_topic(living, broker, topic)
    living.send(topic, *[{"keys": f"k k{n}", "body": "ab" * 4000, "queue": n % 2} for n in range(60)])
    drained_whole(living, topic, 60)
    assert all(any(path.name.isdecimal() for path in folder.iterdir()) for folder in folders)
    commit_logs = [part for folder in folders for part in ("--commitlog", folder)]
    summary = json.loads(tiered_index("ingest", broker.store, *commit_logs, *index, "--wait", "--json"))
    assert summary["messages"] >= 60 and summary["loss_count"] == 0
    for n in (0, 30, 59):
        (message,) = living.by_key(topic, f"k{n}")
        (entry,) = json.loads(tiered_index("query", topic, f"k{n}", *index, "--json"))["items"]
        assert (entry["offset"], entry["queue_id"]) == (message["log_offset"], message["queue"])
