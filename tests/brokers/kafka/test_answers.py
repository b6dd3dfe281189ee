"""The main job of docs/kafka.md on a real broker by the page's own commands, and the words of their answers."""

import json

from tests.brokers.kafka.topics import packet
from tests.integration.cli.command_lines import run_here
from tiered_index.clock import SystemClock


def test_records_are_indexed_found_and_shown_from_the_broker(broker, topics, producing, run, topic, storage):
    topics.create(topic, 3)
    sent = [
        {"key": f"key-{n % 20}", "value": json.dumps({"order": {"id": f"order-{n}"}}), "headers": [("trace", f"t-{n}")]}
        for n in range(60)
    ]
    producing.send(topic, sent)
    keys = ("--key", "key", "--key", "header:trace", "--key", "json:order.id")
    done = run("ingest", f"kafka://{broker.address}/{topic}", *keys, "--storage", storage, "--wait", "--json")
    assert (done.code, done.document["messages"], done.document["entries"]) == (0, 60, 180), done.err
    logged = topics.records(topic)
    assert len(logged) == 60

    def places_of(number):
        return {(record.partition, record.offset) for record in logged if record.key == b"key-%d" % number}

    for number in range(20):
        answer = run("query", topic, f"key-{number}", "--storage", storage, "--json").document
        assert {(item["queue_id"], item["offset"]) for item in answer["items"]} == places_of(number)
    for number in range(60):
        for key in (f"order-{number}", f"t-{number}"):
            (item,) = run("query", topic, key, "--storage", storage, "--json").document["items"]
            assert (item["queue_id"], item["offset"]) in places_of(number % 20)
    for record in logged[::10]:
        place = f"kafka:{topic}/{record.partition}/{record.offset}"
        shown = run("message", place, "--storage", storage, "--kafka", f"bootstrap.servers={broker.address}", "--json")
        (fetched,) = shown.document["messages"]
        message = fetched["message"]
        assert (fetched["state"], message["key"]) == ("local", record.key.decode())
        assert message["headers"] == [[name, value.decode()] for name, value in record.headers]
        assert (message["body"], message["timestamp_ms"]) == (record.value.decode(), record.timestamp_ms)


def test_a_pattern_that_matches_nothing_is_told_and_that_patterns_are_globs(run, topics, producing, topic, storage):
    topics.create(topic)
    producing.send(topic, packet(1))
    globs = "; patterns are globs (orders-*), not regular expressions (orders-.*)"

    def ingested(pattern):
        done = run("ingest", f"kafka://{topics.servers}/{pattern}", "--storage", storage, "--wait")
        return done.code, done.err.splitlines()

    code, notes = ingested(f"^{topic}$")
    assert (code, notes[0].endswith(globs)) == (2, True), notes
    for pattern, hint in ((f"{topic}-*", ""), (f"{topic}-.*", globs)):
        code, notes = ingested(pattern)
        assert (code, f"no topic matches the pattern '{pattern}'{hint}" in notes) == (0, True), notes
    code, notes = ingested(f"{topic[:-1]}*")
    assert (code, [line for line in notes if "pattern" in line]) == (0, [])


def test_expire_tells_of_archived_records_and_has_a_rule_of_a_topic_for_them(
    run, topics, producing, topic, storage, monkeypatch
):
    topics.create(topic, 2)
    producing.send(topic, packet(30) + packet(10, partition=1))
    client = ("--storage", storage, "--kafka", f"bootstrap.servers={topics.servers}")
    assert run("ingest", f"kafka://{topics.servers}/{topic}", "--storage", storage, "--archive", "--wait").code == 0

    def states():
        """The states of a record that the broker has, and of one that it has deleted."""
        shown = [run_here("message", f"kafka:{topic}/0/{offset}", *client, "--json") for offset in (29, 7)]
        return [outcome.document["messages"][0]["state"] for outcome in shown]

    topics.delete_records(topic, {0: 20})
    now_ms = SystemClock().now_ms()
    monkeypatch.setattr(SystemClock, "now_ms", lambda clock: now_ms + 60_000)

    def expire(rule, *options):
        done = run_here("expire", "--storage", storage, "--set", f"{rule}=1s", *options)
        assert done.code == 0, done.err
        return done

    # the rule of entries is none of the archive, whose records have the same age
    done = expire("retention.age_s", "--yes")
    assert "archive: expired: no segment; kept: 2 segments (" in done.out and f"; {topic}: 40 offsets)" in done.out
    assert "retention.segments_topics.TOPIC" in done.err
    assert states() == ["local", "archived"]
    by_topic = f"retention.segments_topics.{topic}"
    done = expire(by_topic, "--yes", "--json").document["archive"]
    assert done["expired"].items() >= {"segments": 2, "offsets_by_topic": {topic: 40}}.items()
    assert done["kept"]["segments"] == 0
    assert states() == ["local", "expired"]


def test_people_read_kafkas_words_and_a_page_of_a_large_value(run, topics, producing, topic, storage):
    topics.create(topic)
    large = "x" * 10_000
    headers = [("trace", None), ("trace", "t-1")]
    producing.send(topic, [{"key": "small", "value": "v"}, {"key": "large", "value": large, "headers": headers}])
    client = ("--storage", storage, "--kafka", f"bootstrap.servers={topics.servers}")
    assert run("ingest", f"kafka://{topics.servers}/{topic}", "--storage", storage, "--wait").code == 0
    assert "partition   offset" in run_here("query", topic, "large", "--storage", storage).out

    def shown(*options):
        return run_here("message", f"kafka:{topic}/0/1", *client, *options).out

    page, whole = shown(), shown("--raw")
    for text in (page, whole):
        words = [line.split() for line in text.splitlines()]
        assert ["partition", "0"] in words and ["offset", "1"] in words
        assert ["headers", "trace", "(null),", "trace:", "t-1"] in words
        assert not {"None", "queue", "commit"} & {word for line in words for word in line}
    assert f") {'x' * 4_000}... and 6,000 more bytes: --raw writes all\n" in page
    assert f") {large}\n" in whole and "--raw" not in whole
    topics.delete_records(topic, {0: 2})
    expired = run_here("query", topic, "large", "--messages", *client).out
    assert "partition 0  offset 1  expired: the broker has deleted it" in expired
