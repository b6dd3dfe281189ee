"""Records as the answer: from the broker while it has them, else out of the archive, and of the key alone."""

import json
import time
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace

import pytest
from confluent_kafka import TopicPartition

from tests.integration.cli.command_lines import run_here
from tests.kafka.followed import archive, ingest
from tests.server.conftest import serving
from tests.support.log_records import segments_of
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, IndexService
from tiered_index.base.call import Call
from tiered_index.connectors.kafka.client.broker import KafkaBroker
from tiered_index.connectors.kafka.messages import KafkaMessages, parse_place
from tiered_index.connectors.kafka.record import KafkaRecord
from tiered_index.connectors.read_again import MessageSources
from tiered_index.errors import BudgetExceeded, InvalidArgument, ObjectRefused, StorageUnavailable
from tiered_index.storage.memory import MemoryStorage

TIME_MS = 1_700_000_000_000


def messages_of(index, servers=None, **options):
    index.flush()
    broker = None if servers is None else KafkaBroker({"bootstrap.servers": servers})
    return KafkaMessages({None: index.segment_archive}, broker, **options)


def sent(count, name="k"):
    return [
        {"key": f"{name}{n}", "value": f"{name} value {n}", "partition": 0, "timestamp": TIME_MS + n}
        for n in range(count)
    ]


def test_records_of_a_partition_whose_broker_is_away_are_waited_for_once(index, servers, producing, topic, monkeypatch):
    producing.send(topic, sent(9))
    archive(index, servers, topic)
    places_asked, answer = [], Future()

    def away(_, places):
        places_asked.extend(places)
        return [{TopicPartition(topic, 0): answer}]

    monkeypatch.setattr(KafkaBroker, "ranges", away)
    monkeypatch.setattr("tiered_index.connectors.kafka.client.broker.TIMEOUT_S", 0.0)
    # a call with little time waits no longer than that, and says nothing of the broker
    source = messages_of(index, servers)
    with Call(deadline_s=time.monotonic() + 0.2).active(), pytest.raises(BudgetExceeded):
        source.at(topic, 0, 7)
    answer.set_exception(StorageUnavailable("timed out"))
    for _ in range(3):
        assert source.at(topic, 0, 7).state == "archived"
    assert places_asked == [(topic, 0)] * 2


@pytest.mark.parametrize("with_broker", [True, False])
def test_a_colliding_key_is_never_shown_as_a_match(index, servers, producing, topic, with_broker):
    producing.send(topic, sent(20))
    archive(index, servers, topic)
    source = messages_of(index, servers if with_broker else None)
    (item,) = index.query(topic, "k7").items
    # the entry of k7, as a lookup of a key of the same hash would find it
    (fetched,) = source.fetch([item], topic, "another")
    assert (fetched.carries_key, fetched.message.key) == (False, b"k7")
    for wrong in (replace(item, size=item.size + 1), replace(item, timestamp_ms=item.timestamp_ms + 5_000)):
        (fetched,) = source.fetch([wrong], topic, "k7")
        assert (fetched.state, fetched.message) == ("missing", None)
        assert "another record is there" in fetched.problem
        assert fetched.instead == replace(item, timestamp_ms=TIME_MS)


def test_records_of_a_log_before_are_shown_out_of_its_archive(index, cluster, servers, producing, topic):
    cluster.create(topic)
    producing.send(topic, sent(20, "old"))
    archive(index, servers, topic)
    cluster.delete(topic)
    cluster.create(topic)
    producing.send(topic, sent(20, "newer"))
    assert archive(index, servers, topic).archiving.archived == 1
    for source in (messages_of(index, servers), messages_of(index)):
        for name in ("old", "newer"):
            (fetched,) = index.messages(topic, f"{name}7", source=source).messages
            assert fetched.message.value == f"{name} value 7".encode()
            # the broker should have it, and the archive has both logs
            assert ("another record is there" in (fetched.problem or "")) == (
                name == "old" and source.broker is not None
            )
            assert "parquet" not in (fetched.problem or "")
        # by its place alone the newest log is meant
        assert source.at(topic, 0, 7).message.value == b"newer value 7"


def test_keys_of_a_function_need_the_function_for_records_of_the_broker(index, servers, producing, topic):
    producing.send(topic, [{"key": "abc", "value": "v", "partition": 0}])

    def backwards(record):
        return [record.key.decode()[::-1]]

    archive(index, servers, topic, function=backwards)
    index.seal()
    index.run_lifecycle()
    # the archive has the keys
    for source in (messages_of(index, servers, function=backwards), messages_of(index)):
        (fetched,) = index.messages(topic, "cba", source=source).messages
        assert fetched.message.key == b"abc"
    with pytest.raises(InvalidArgument, match="function"):
        index.messages(topic, "cba", source=messages_of(index, servers))


def test_an_archived_object_that_is_refused_is_the_state_of_its_records(index, servers, producing, topic):
    producing.send(topic, sent(3, "old"))
    archive(index, servers, topic)
    refusing = FaultStorage(index.storage)
    source = KafkaMessages({None: replace(index.segment_archive, storage=refusing)})
    refusing.fail("get_range", times=None, error=ObjectRefused, name_prefix="segments/")
    answer = index.messages(topic, "old1", source=source)
    assert ([fetched.state for fetched in answer], answer.status) == (["refused"], "complete")
    with pytest.raises(ObjectRefused):
        source.at(topic, 0, 1)
    refusing.clear()
    assert [fetched.state for fetched in index.messages(topic, "old1", source=source)] == ["archived"]


def test_one_record_is_two_requests_and_one_once_the_footer_is_known(index, servers, producing, topic):
    producing.send(topic, sent(2_000))
    archive(index, servers, topic)
    (segment,) = segments_of(index.segment_archive.state())
    counted = FaultStorage(index.storage)
    source = KafkaMessages({None: replace(index.segment_archive, storage=counted)})
    for offset, requests in ((7, 2), (1_999, 1)):
        before = counted.calls()
        fetched = source.at(topic, 0, offset)
        assert fetched.message.offset == offset
        assert (fetched.requests, counted.calls() - before) == (requests, requests)
    assert 0 < fetched.bytes < segment.object_bytes


def test_a_local_file_tells_how_keys_were_given(servers, producing, topic, tmp_path):
    """Before its upload nothing else does."""
    producing.send(topic, [{"key": "other", "value": '{"id": "o7"}', "partition": 0, "timestamp": TIME_MS}])
    storage = FaultStorage(MemoryStorage())
    opened = {"root": tmp_path / "root", "storage_backend": storage}
    with IndexService.open(**opened, slots=97, items=5_000, background=False) as index:
        ingest(index, servers, topic, keys=("json:id",))
        index.seal()
        storage.fail("put", times=None)
        with pytest.raises(StorageUnavailable):
            index.run_lifecycle()
        assert [file.place for file in index.files()] == ["compacted"]
        with IndexReader.open(root=tmp_path / "root", storage_backend=storage) as reader:
            broker = KafkaBroker({"bootstrap.servers": servers})
            source = MessageSources(reader, reader.config, {"kafka": broker}).of(topic)
            (fetched,) = reader.messages(topic, "o7", source=source).messages
            assert (fetched.state, fetched.message.key) == ("local", b"other")
            broker.close()
        storage.clear()


def test_places_of_records():
    assert parse_place("kafka:orders/3/1234") == ("orders", 3, 1234)
    assert parse_place(f"kafka:orders/{2**31 - 1}/{2**63 - 1}") == ("orders", 2**31 - 1, 2**63 - 1)
    beyond = (
        f"kafka:orders/{2**31}/1",
        f"kafka:orders/1/{2**63}",
        "kafka:orders/1/" + "9" * 5000,
        "kafka:or\0ders/3/1",
    )
    for wrong in ("kafka:orders/3", "kafka:/3/4", "kafka:orders/x/1", "orders/3/1", *beyond):
        with pytest.raises(InvalidArgument, match="kafka:TOPIC/PARTITION/OFFSET"):
            parse_place(wrong)


def test_commands_show_records(cluster, servers, producing, topic, tmp_path):
    root, storage = tmp_path / "root", (tmp_path / "storage").as_uri()
    value = json.dumps({"order": {"id": 7}})
    headers = [("h", b"\xff")]
    producing.send(topic, [{"key": "a", "value": value, "headers": headers, "partition": 0, "timestamp": TIME_MS}])

    def run(*arguments):
        result = run_here(*arguments)
        assert result.code == 0, result.err
        return result.out

    place, keys = f"kafka://{servers}/{topic}", ("--key", "json:order.id")
    run("ingest", place, *keys, "--archive", "--root", root, "--storage", storage)
    broker = ("--kafka", f"bootstrap.servers={servers}")
    for where, state in (((*broker, "--root", root), "local"), (("--root", root), "archived")):
        text = run("query", topic, "7", "--messages", "--body", "json", *where)
        assert f"2023-11-14T22:13:20Z  {state}" in text, text
        assert "h: 0xff" in text and '"id": 7' in text
        assert run("query", topic, "7", "--messages", "--rows", *where) == f"{value}\n"
        document = json.loads(run("message", f"kafka:{topic}/0/0", "--json", *where))
        (shown,) = document["messages"]
        assert (shown["state"], shown["message"]["body"], shown["message"]["key"]) == (state, value, "a")
    for where, state in (((*broker, "--root", root), "local"), (("--root", root), "archived")):
        (shown,) = json.loads(run("message", "7", "--topic", topic, "--json", *where))["messages"]
        assert (shown["state"], shown["message"]["key"]) == (state, "a")
    # the records alone were uploaded yet
    assert "archived" in run("message", f"kafka:{topic}/0/0", "--storage", storage)
    assert "local" in run("message", f"kafka:{topic}/0/0", *broker)
    (tmp_path / "client.properties").write_text(f"bootstrap.servers={servers}\n")
    of_file = ("--kafka-config", tmp_path / "client.properties", "--root", root)
    assert "local" in run("query", topic, "7", "--messages", *of_file)
    # microseconds
    producing.send(topic, [{"key": "b", "value": value, "partition": 0, "timestamp": TIME_MS * 1000}])
    assert run("message", f"kafka:{topic}/0/1", *broker).startswith(f"{TIME_MS * 1000}  local")
    cluster.trim(topic, 0, 1)
    assert "archived" in run("message", f"kafka:{topic}/0/0", *broker, "--storage", storage)
    wrong = run_here("message", "kafka:none/0/0", "--storage", storage)
    assert (wrong.code, "has no topic 'none' of Kafka" in wrong.err) == (2, True)


# Kafka's number of the refusal of a topic
TOPIC_REFUSED = 29


def test_each_reason_why_a_record_cannot_be_shown_is_a_state_of_its_own(
    index, cluster, servers, producing, topic, monkeypatch
):
    cluster.create(topic)
    producing.send(topic, sent(9))
    ingest(index, servers, topic)
    cluster.trim(topic, 0, 3)
    index.flush()

    def state_of(key="k7", servers=servers):
        """Return the state of a record and its problem, over HTTP the status of its answer, and that of its place."""
        broker = KafkaBroker({"bootstrap.servers": servers})
        sources = MessageSources(index, index.config, {"kafka": broker})
        with closing(sources), serving(index, sources=sources) as client:
            params = {"topic": topic, "key": key, "allow_partial": True}
            answer, place = client.get("/v1/messages", params=params), client.get(f"/v1/messages/kafka:{topic}/0/7")
        (row,) = answer.json()["messages"]
        assert (row["message"] is None) == (row["state"] != "local") == bool(row["problem"])
        assert place.status_code == 200 or "127.0.0.1" not in place.text
        return row["state"], row["problem"], answer.json()["status"], place.status_code

    assert state_of()[0] == "local"
    assert state_of("k1")[0] == "expired"
    cluster.fail_topic(topic, TOPIC_REFUSED)
    state, problem, *codes = state_of()
    assert (state, codes) == ("refused", ["partial", 502]) and "allow the client's login to READ it" in problem
    cluster.fail_topic(topic, 0)
    cluster.delete(topic)
    assert state_of() == ("no_topic", f"the cluster has no topic {topic}; no archive has it", "complete", 404)
    for name in ("STEP_S", "TIMEOUT_S"):
        monkeypatch.setattr(f"tiered_index.connectors.kafka.client.broker.{name}", 0.5)
    state, problem, *codes = state_of(servers="127.0.0.1:1")
    assert (state, codes) == ("unavailable", ["partial", 502]) and "127.0.0.1" not in problem.split(":")[0]


def test_a_partition_that_a_topic_does_not_have_is_named(index, servers, producing, topic):
    producing.send(topic, sent(9))
    source = messages_of(index, servers)
    fetched = source.at(topic, 99, 7)
    assert (fetched.state, f"the topic {topic} has no partition 99" in fetched.problem) == ("no_topic", True)
    source.close()


def test_a_unique_key_needs_the_index_beside_a_broker_too():
    done = run_here("message", "KEY", "--topic", "orders", "--kafka", "bootstrap.servers=127.0.0.1:1", "--json")
    assert (done.code, "a unique key needs the index" in done.error["message"]) == (2, True)


@pytest.mark.parametrize(
    ("value", "wanted", "shown"),
    [
        (b'\0\0\0\0\7{"id": 4}', "text", {"schema_id": 7, "body": '{"id": 4}', "body_format": "text"}),
        (b'\0\0\0\0\7{"id": 4}', "json", {"schema_id": 7, "body": {"id": 4}, "body_format": "json"}),
        (b'\0\0\0\0\7{"id": 4}', "excerpt", {"schema_id": 7, "body": '{"id": 4}', "body_format": "text"}),
        (b"\0\0\0\0\7{}", "hex", {"body": "00000000077b7d", "body_format": "hex"}),
        (b"\0\0\0\0\7{\0}", "text", {"body": "00000000077b007d", "body_format": "hex"}),
        (b"\0\0\0\0\7\2ab", "text", {"body": "0000000007026162", "body_format": "hex"}),
    ],
)
def test_json_behind_the_id_of_its_schema_is_shown_as_json(value, wanted, shown):
    """It was shown as hexadecimal digits, also with `--body json`."""
    document = KafkaRecord("orders", 0, 0, b"k", value).to_dict(wanted)
    assert {name: document[name] for name in document if name in ("schema_id", "body", "body_format")} == shown
    assert document["body_bytes"] == len(value)
