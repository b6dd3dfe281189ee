"""Each kind of message that a producer sends, beside a living broker: our server answers each lookup of RocketMQ's
client as the broker does, field for field.
"""

import contextlib
import itertools
import json
from collections import Counter

import pytest

from tests.brokers.rocketmq.living import RocketmqError, made_topic, same_by_key, same_by_pulls, tiered_index, until
from tiered_index.connectors.rocketmq.classic import classic_file_names, read_entries

TEXT = "7b7d"
# The messages that a producer sends of each kind, how, and the keys under which all of it is found
KINDS = {
    "ordinary": ([{"keys": "k", "body": TEXT, "tags": "paid"}, {"keys": "k", "body": "00"}], {}),
    "with several keys": ([{"keys": "k k1 k2", "body": TEXT}, {"keys": "k2 k", "body": TEXT}], {}),
    "with properties": ([{"keys": "k", "body": "00ff", "properties": {"ä": "ü", "trace": "1 2"}}], {}),
    "batched": ([{"keys": f"k k{n}", "body": f"{n:02d}"} for n in range(5)], {"batch": True}),
    "compressed by zlib": ([{"keys": "k", "body": "61" * 9000}], {"compression": "ZLIB"}),
    "compressed by LZ4": ([{"keys": "k", "body": "62" * 9000}], {"compression": "LZ4"}),
    "compressed by Zstandard": ([{"keys": "k", "body": "63" * 9000}], {"compression": "ZSTD"}),
    "ordered": ([{"keys": "k", "body": f"{n:02d}", "queue": 1} for n in range(6)], {}),
    "committed": ([{"keys": "k", "body": TEXT, "transaction": "COMMIT_MESSAGE"} for _ in range(2)], {}),
    "delayed by a level": ([{"keys": "k", "body": TEXT, "delay_level": 1}], {}),
    "delayed by a timer": ([{"keys": "k", "body": TEXT, "delay_ms": 1200}], {}),
    "of odd keys": ([{"keys": "k schlüssel-ß 鍵 #T#x", "body": TEXT}], {}),
}


@pytest.fixture
def topic(beside, topic):
    """A topic of this test alone, at the broker of these tests."""
    made_topic(beside.living, beside.broker, topic)
    return topic


@pytest.mark.parametrize("kind", KINDS)
def test_messages_are_answered_as_by_the_broker(beside, topic, kind):
    living, ours = beside.living, beside.ours
    messages, how = KINDS[kind]
    sent = living.send(topic, *messages, **how)
    answers = same_by_key(living, ours, topic, "k", len(messages))
    for key in {key for message in messages for key in message["keys"].split()}:
        same_by_key(living, ours, topic, key, sum(key in message["keys"].split() for message in messages))
    # the client of 5.2.0 names one id of a batch, that of 5.4.0 all
    assert how.get("batch") or {answer["id"] for answer in answers} == {
        name for result in sent for name in result["id"].split(",")
    }
    for answer in answers:
        by_id = living.by_id(topic, answer["id"])
        assert ours.by_id(topic, answer["id"]) == by_id
        # the client of 5.2.0 gives all messages of a batch the same id
        assert by_id["body"] in {same["body"] for same in answers if same["id"] == answer["id"]}
        pulled = living.pull(topic, answer["queue"], answer["queue_offset"], 1)
        assert [message["id"] for message in pulled["messages"]] == [answer["id"]]
        assert ours.pull(topic, answer["queue"], answer["queue_offset"], 1) == pulled
    same_by_pulls(living, ours, topic, len(messages))
    assert ours.ends(topic) == living.ends(topic)


def test_a_rolled_back_transaction_is_found_nowhere(beside, topic):
    living, ours = beside.living, beside.ours
    living.send(topic, {"keys": "gone", "body": TEXT, "transaction": "ROLLBACK_MESSAGE"})
    living.send(topic, {"keys": "kept", "body": TEXT, "transaction": "COMMIT_MESSAGE"})
    same_by_key(living, ours, topic, "kept", 1)
    assert ours.by_key(topic, "gone") == living.by_key(topic, "gone") == []
    same_by_pulls(living, ours, topic, 1)


def test_messages_that_a_consumer_popped_and_gave_back(beside, topic):
    """A message that a pop consumer could not process is in a retry topic, too, which is looked up as any other."""
    living, ours, group = beside.living, beside.ours, f"poppers-{topic}"
    living.send(topic, *[{"keys": f"k{n}", "body": TEXT} for n in range(4)])
    request = {"topic": topic, "group": group, "most": 4, "wait_ms": 120_000, "broker_address": beside.broker.address}
    popped = living.ask("consume", pop=True, failures=0, **request)
    assert {message["properties"]["KEYS"] for message in popped} == {"k0", "k1", "k2", "k3"}
    for n in range(4):
        same_by_key(living, ours, topic, f"k{n}", 1)
    same_by_pulls(living, ours, topic, 4)


def test_messages_that_a_consumer_sent_back(beside, topic):
    living, ours, group = beside.living, beside.ours, f"retrying-{topic}"
    living.send(topic, {"keys": "again", "body": TEXT})
    request = {"topic": topic, "group": group, "most": 1, "wait_ms": 120_000}
    assert [message["reconsumed"] for message in living.ask("consume", failures=1, **request)] == [1]
    (retried,) = same_by_key(living, ours, f"%RETRY%{group}", "again", 1)
    assert retried["reconsumed"] == 1 and retried["properties"]["RETRY_TOPIC"] == topic
    same_by_key(living, ours, topic, "again", 1)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("queryMsgByKey", ("-k", "k")),
        ("queryMsgByUniqueKey", ("-i", "{id}")),
        ("queryMsgByOffset", ("-b", "broker-a", "-i", "{queue}", "-o", "{offset}")),
        ("topicStatus", ()),
        ("topicRoute", ()),
        ("printMsg", ()),
    ],
)
def test_mqadmin_prints_the_same(beside, topic, command, options):
    living, ours = beside.living, beside.ours
    (sent,) = living.send(topic, {"keys": "k k2", "body": "6f6e65", "tags": "paid", "properties": {"a": "b"}})
    same_by_key(living, ours, topic, "k", 1)
    # a broker's messages lie in its consume queue before its index, and so do ours
    arguments = [option.format(**sent) for option in options]
    printed = [asks.mqadmin(command, "-t", topic, *arguments) for asks in (living, ours)]
    if command == "topicRoute":
        # the address of the server, and that nothing can be sent there
        readdressed = printed[0].replace(beside.broker.address, ours.namesrv)
        printed[0] = readdressed.replace('"perm":6', '"perm":4')
    assert printed[1] == printed[0]
    assert (sent["id"] in printed[1]) or command not in ("queryMsgByKey", "queryMsgByUniqueKey", "printMsg")


def test_ingest_gives_every_entry_of_the_brokers_own_index_files(beside, topic, tmp_path):
    """RocketMQ 5.4.0 indexes tags, too."""
    living, ours, broker = beside.living, beside.ours, beside.broker
    living.send(topic, {"keys": "k k2", "body": TEXT, "tags": "paid"})
    same_by_key(living, ours, topic, "k", 1)
    # read before ingest: a broker writes messages of its own at any time, as those that no pop consumer acknowledged
    folder = broker.store / "index"
    classic = [read_entries(folder / name) for name in classic_file_names(folder)]
    theirs = {
        *itertools.chain(*(zip(rows["offset"].tolist(), rows["key_hash"].tolist(), strict=True) for rows in classic))
    }
    assert len(theirs) >= 3
    index = ("--root", tmp_path / "root", "--storage", (tmp_path / "storage").as_uri())
    tiered_index("ingest", broker.store, *index, "--topics", "*", "--index-tags", "--wait")
    files = (tiered_index("files", path, "--entries") for path in (tmp_path / "root").rglob("*.index"))
    entries = [json.loads(line) for printed in files for line in printed.splitlines()[:-1]]
    ours_of = Counter(entry["offset"] for entry in entries)
    theirs_of = Counter(offset for offset, _ in theirs)
    missing = {offset: count - ours_of[offset] for offset, count in theirs_of.items() if ours_of[offset] < count}
    assert missing == {}


def test_the_time_range_and_the_count_of_a_lookup(beside, topic):
    living, ours = beside.living, beside.ours
    living.send(topic, *[{"keys": "k", "body": f"{n:02d}"} for n in range(4)])
    messages = same_by_key(living, ours, topic, "k", 4)
    newest_ms = max(message["store_ms"] for message in messages)
    for begin, end in ((0, newest_ms - 3_600_000), (newest_ms + 3_600_000, newest_ms + 7_200_000)):
        assert ours.by_key(topic, "k", begin=begin, end=end) == living.by_key(topic, "k", begin=begin, end=end) == []
    assert len(ours.by_key(topic, "k", most=2)) == len(living.by_key(topic, "k", most=2)) == 2


def test_what_is_not_there_is_told_alike(beside, topic):
    living, ours = beside.living, beside.ours
    (sent,) = living.send(topic, {"keys": "k", "body": TEXT})
    same_by_key(living, ours, topic, "k", 1)
    same_by_pulls(living, ours, topic, 1)
    for asks in (living, ours):
        assert asks.by_key(topic, "other") == []
        assert asks.pull(topic, sent["queue"], 1)["status"] == "NO_NEW_MSG"
        assert asks.pull(topic, sent["queue"], 7)["status"] == "OFFSET_ILLEGAL"
        with pytest.raises(RocketmqError):
            asks.by_id(topic, "FD0000000000000000000000000000024FFFFFFFFFFFFFFFFFFFFFFF")


# a push consumer asks for the members of its group a second after its start
@pytest.mark.parametrize(("consumer", "wait_ms"), [("consume", 2500), ("lite_pull", 500)])
def test_a_consumer_with_a_group_gets_nothing_and_its_log_says_why(beside, topic, consumer, wait_ms):
    living, ours = beside.living, beside.ours
    living.send(topic, {"keys": "k", "body": TEXT})
    same_by_key(living, ours, topic, "k", 1)

    def log_lines() -> list[str]:
        # which of its logs a client writes to depends on the jars beside it
        logs = [path.read_text(errors="replace") for path in beside.client.log_folder.glob("*.log")]
        return [line for log in logs for line in log.splitlines() if "this server has no consumer groups" in line]

    before = len(log_lines())
    request = {"topic": topic, "group": f"{consumer}-{topic}", "most": 1, "wait_ms": wait_ms}

    def has_nothing() -> bool:
        # on a busy machine the client gives its own request up
        with contextlib.suppress(RocketmqError):
            return bool(ours.ask(consumer, **request) == [])
        return False

    more = until(lambda: has_nothing() and log_lines()[before:])
    assert "connect the consumer to the broker" in more[0]


def test_the_configuration_of_our_name_server_is_empty_and_not_missing(beside):
    printed = beside.ours.mqadmin("getNamesrvConfig")
    assert beside.ours.namesrv in printed and "null" not in printed and "Exception" not in printed, printed


def test_a_trace_is_refused_with_the_reason(beside, topic):
    (sent,) = beside.living.send(topic, {"keys": "k", "body": TEXT})

    def refusals() -> int:
        # the tool only prints that the topic has no route; its log has the answer's reason
        logs = [path.read_text(errors="replace") for path in beside.client.log_folder.glob("*.log")]
        return sum(log.count("ingest leaves out RocketMQ's own topics") for log in logs)

    before = refusals()
    assert beside.ours.mqadmin("queryMsgTraceById", "-i", sent["id"]) == ""
    until(lambda: refusals() > before)
