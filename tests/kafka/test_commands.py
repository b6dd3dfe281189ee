"""`ingest` of topics, and its refusals."""

import contextlib
import json
import re
import struct
import threading

import pytest

from tests.integration.cli.command_lines import run_here
from tests.spark.pages import programs, section
from tests.support.hanging import until
from tiered_index import IndexReader
from tiered_index.connectors.kafka.client.broker import KafkaBroker
from tiered_index.connectors.kafka.messages import KafkaMessages

T_MS = 1_700_000_000_000


@pytest.fixture
def run(tmp_path):
    return lambda *arguments: run_here(*arguments, "--root", tmp_path / "root")


def test_topics_are_ingested_and_found_by_each_kind_of_key(run, servers, producing, topic, tmp_path):
    records = [
        {"key": f"key-{n}", "value": json.dumps({"order": {"id": n}}), "headers": [("trace", f"t-{n}")]}
        for n in range(20)
    ]
    producing.send(topic, [*records, {"key": None, "value": "no json"}])
    place = f"kafka://{servers}/{topic}"
    keys = ("--key", "key", "--key", "header:trace", "--key", "json:order.id")
    first = run("ingest", place, *keys, "--storage", tmp_path.as_uri() + "/store", "--json")
    assert first.code == 0, first.err
    document = first.document
    names = ("messages", "entries", "left_out", "no_json", "unit", "position")
    assert [document[name] for name in names] == [21, 60, 1, 1, "records", 21]
    assert document["lag"] == {"end_offset": 21, "bytes": 0, "seconds": 0.0}
    (named,) = document["no_json_first"]
    assert named.startswith(f"{topic}/")
    offsets = set()
    for key in ("key-7", "t-7", "7"):
        (item,) = run("query", topic, key, "--json").document["items"]
        offsets.add((item["queue_id"], item["offset"]))
    assert len(offsets) == 1
    again = run("ingest", place)
    assert re.search("messages +0\n", again.out), again.err
    assert re.search(f"source +{re.escape(place)}\n", again.out)


def test_doctor_tells_whether_topics_can_be_read_and_how_long_they_are_kept(servers, producing, topic):
    producing.send(topic, [{"key": "k", "value": "v"}])
    done = run_here("doctor", "--source", f"kafka://{servers}/{topic}", "--json")
    assert done.code == 0, done.err
    results = {row["what"]: row["state"] for row in done.document["abilities"]}
    # the mock cluster tells no settings of topics
    assert results == {"topics": "ok", f"retention of {topic}": "worked round"}
    typo = run_here("doctor", "--source", f"kafka://{servers}/{topic}-typo")
    assert (typo.code, "there is no topic" in typo.err) == (2, True)


def test_the_program_of_the_page_indexes_by_a_function_of_its_own(run, servers, producing, topic, tmp_path):
    producing.send(topic, [{"key": f"k{n}", "value": f"id={n}", "partition": 0} for n in range(3)])
    root, uri = tmp_path / "root", (tmp_path / "store").as_uri()
    (program,) = programs(section("kafka.md", "Index topics"))
    for placeholder, own in (("/data/index", str(root)), ("s3://bucket/index", uri), ("broker:9092/orders", "")):
        assert placeholder in program
        program = program.replace(placeholder, own or f"{servers}/{topic}")
    named = {"decode": lambda value: {"order_id": f"order-{value.decode().removeprefix('id=')}"}}
    running = threading.Thread(target=exec, args=(compile(program, "docs/kafka.md", "exec"), named))
    running.start()
    until(lambda: "follower" in named and named["follower"].messages == 3)
    named["follower"].stop.set()
    running.join()
    with (
        IndexReader.open(uri, root=root) as reader,
        contextlib.closing(KafkaBroker({"bootstrap.servers": servers})) as b,
    ):
        assert len(reader.query(topic, "order-1").items) == 1 and not reader.query(topic, "k1").items
        source = KafkaMessages(reader.segment_archives, b, function=named["keys_of"])
        (fetched,) = reader.messages(topic, "order-1", source=source).messages
        assert (fetched.state, fetched.message.value) == ("local", b"id=1")
    refused = run("query", topic, "order-1", "--messages", "--kafka", f"bootstrap.servers={servers}")
    assert (refused.code, "pass it to KafkaMessages(function=)" in " ".join(refused.err.split())) == (2, True)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--kafka", "sasl.pasword=secret"), "sasl.pasword"),
        (("--kafka", "secret"), "NAME=VALUE"),
        (("--kafka", "enable.auto.commit=true"), "leave --kafka enable.auto.commit out"),
        (("--key", "json:a["), "JMESPath"),
        (("--skip-corrupt",), "--skip-corrupt is for a RocketMQ store"),
        (("kafka://user:secret@h:1/t",), "pass logins by --kafka"),
        (("FILE", "--archive"), "--archive is for Kafka"),
        (("FILE", "--key", "key"), "--topic is missing"),
    ],
)
def test_wrong_options_are_bad_usage_and_no_secret_is_printed(run, options, problem, tmp_path):
    (file := tmp_path / "messages.ndjson").write_text('{"key": "a", "timestamp": 1}\n')
    source = () if options[0].startswith(("kafka:", "FILE")) else ("kafka://127.0.0.1:1/orders",)
    options = [file if option == "FILE" else option for option in options]
    result = run("ingest", *source, *options, "--storage", "memory://x")
    assert (result.code, [*tmp_path.iterdir()]) == (2, [file])
    assert problem in " ".join(result.err.split())
    assert "secret" not in result.out + result.err


def test_settings_come_out_of_a_file(run, tmp_path):
    (tmp_path / "client.properties").write_text("# TLS\nsasl.pasword = secret\n\n")
    ingest = ("ingest", "kafka://h:1/orders", "--storage", "memory://x", "--kafka-config")
    result = run(*ingest, tmp_path / "client.properties")
    assert (result.code, "sasl.pasword" in result.err, "secret" in result.out + result.err) == (2, True, False)
    assert run(*ingest, tmp_path / "none").code == 3


JAAS = """security.protocol=SASL_SSL
sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required username="u" password="secret";
"""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (JAAS, "line 2: sasl.jaas.config is a setting of Java's clients"),
        ("ssl.truststore.location=/etc/t.jks\n", "write ssl.ca.location=FILE.pem"),
        ("max.poll.records=500\n", "leave it out"),
    ],
)
def test_settings_of_javas_clients_are_named_with_those_to_use(run, tmp_path, text, problem):
    (tmp_path / "java.properties").write_text(text)
    where = ("ingest", "kafka://h:1/orders", "--storage", (tmp_path / "store").as_uri())
    done = run(*where, "--kafka-config", tmp_path / "java.properties", "--json")
    assert (done.code, "java.properties, line" in done.error["message"]) == (2, True)
    assert problem in done.error["message"] and "secret" not in done.out + done.err
    name, _, value = text.splitlines()[-1].partition("=")
    assert run(*where, "--kafka", f"{name}={value}", "--json").error["message"].startswith(f"--kafka: {name}")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("keys", "reasons"),
    [
        (["header:Trace"], ["none of 3 records has header Trace; seen: trace"]),
        (["json:order"], ["none of 3 records has a text or number at order, which is an object: name a member of it"]),
        (["json:orderId", "key"], ["a key of 1 to 32,767 characters", "at orderId; members seen: at, order"]),
    ],
)
def test_a_run_that_indexes_nothing_tells_why(run, servers, producing, topic, tmp_path, keys, reasons):
    value = json.dumps({"order": {"id": 1}, "at": 2})
    producing.send(topic, [{"value": value, "headers": [("trace", "t")], "partition": 0}] * 3)
    options = [part for key in keys for part in ("--key", key)]
    where = (f"kafka://{servers}/{topic}", *options, "--storage", (tmp_path / "store").as_uri())
    quiet = run("ingest", *where, "--quiet")
    assert quiet.code == 1 and all(reason in " ".join(quiet.err.split()) for reason in reasons), quiet.err
    again = run("ingest", *where, "--restart", "--allow-none", "--json")
    reasons_told = again.document["nothing_indexed"]
    assert again.code == 0 and len(reasons_told) == len(reasons)
    assert all(reason in told for reason, told in zip(reasons, reasons_told, strict=True)), reasons_told
    assert run("ingest", *where).code == 0  # it read nothing


def test_numbers_of_serializers_are_indexed_and_erased_by_each_key(run, servers, producing, topic, tmp_path):
    numbers = [0, 42, 200, -1, 2**40 + 5]
    uri = (tmp_path / "store").as_uri()
    records = [
        {"key": struct.pack(">q", number), "value": b"v", "partition": 0, "timestamp": T_MS} for number in numbers
    ]
    producing.send(topic, records)
    keys = ("--key", "key", "--key", "key:int64")
    done = run("ingest", f"kafka://{servers}/{topic}", *keys, "--storage", uri, "--archive", "--wait", "--json")
    assert (done.code, done.document["entries"]) == (0, 10), done.err
    for offset, number in enumerate(numbers):
        for key in (str(number), f"0x{struct.pack('>q', number).hex()}"):
            done = run_here("query", "--root", tmp_path / "root", "--json", "--messages", "--", topic, key)
            messages = done.document["messages"]
            assert [message["item"]["offset"] for message in messages] == [offset], key
            assert messages[0]["message"]["key"] == f"0x{struct.pack('>q', number).hex()}"
    erase = ("erase", "--storage", uri, "--topic", topic, "--now", "--yes", "--key")
    # keys are exact
    assert [run_here(*erase, f"0x000000000000002{digit}").code for digit in "Aa"] == [1, 0]
    messages = run_here("message", f"kafka:{topic}/0/1", "--storage", uri, "--json").document["messages"]
    assert [message["state"] for message in messages] == ["erased"]


def test_a_first_run_that_cannot_read_its_topics_makes_no_index(run, servers, topic, producing, tmp_path, monkeypatch):
    producing.send(topic, [{"key": "k", "value": "v"}])
    store = "--storage", (tmp_path / "storage").as_uri()
    missing = run("ingest", f"kafka://{servers}/{topic.upper()}x", *store)
    assert (missing.code, "there is no topic" in missing.err) == (2, True), missing.err
    with monkeypatch.context() as patch:
        patch.setattr("tiered_index.connectors.kafka.client.broker.TIMEOUT_S", 0.5)
        down = run("ingest", f"kafka://127.0.0.1:1/{topic}", *store)
    assert down.code == 3, down.err
    assert list(tmp_path.iterdir()) == []
    assert run("ingest", f"kafka://{servers}/{topic}", *store).code == 0
