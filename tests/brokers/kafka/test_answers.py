"""Answers of commands about the records of a real broker, and the words in them."""

import time

import pytest

from tests.brokers.kafka.topics import packet
from tests.integration.cli.command_lines import run_here
from tests.kafka.followed import ingest
from tiered_index.base.clock import SystemClock
from tiered_index.errors import InvalidArgument
from tiered_index.storage.local import LocalStorage


def test_a_producer_with_a_fast_clock_makes_no_answer_complete_up_to_the_future(run, topics, producing, topic, storage):
    topics.create(topic, 2)
    fast_ms = int((time.time() + 500) * 1000)
    producing.send(topic, [*packet(4), {"key": "fast", "partition": 1, "timestamp": fast_ms}])
    assert run("ingest", f"kafka://{topics.servers}/{topic}", "--storage", storage, "--wait").code == 0
    for key, times_ms in (("fast", [fast_ms // 1000 * 1000]), ("none", [])):
        answer = run_here("query", topic, key, "--storage", storage, "--json").document
        assert ([item["timestamp_ms"] for item in answer["items"]], answer["status"]) == (times_ms, "complete")
        # the log was read before this moment
        assert 0 < answer["as_of_ms"] <= time.time() * 1000 < fast_ms


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


def test_a_function_of_keys_that_fails_names_the_record(topics, producing, index, topic):
    topics.create(topic, 2)
    producing.send(topic, packet(5) + packet(5, partition=1))

    def keys_of(record):
        if (record.partition, record.offset) == (1, 3):
            raise KeyError("order")
        return [record.key.decode()]

    with pytest.raises(InvalidArgument) as failed:
        ingest(index, topics.servers, topic, function=keys_of)
    assert f"record {topic}/1/3: the function of keys failed: KeyError('order')" in str(failed.value)


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
    for clock in (SystemClock, LocalStorage):
        monkeypatch.setattr(clock, "now_ms", lambda clock: now_ms + 60_000)

    def expire(rule, *options):
        done = run_here("expire", "--storage", storage, "--set", f"{rule}=1s", *options)
        assert done.code == 0, done.err
        return done

    none, whole = {"segments": 0, "offsets_by_topic": {}}, {"segments": 2, "offsets_by_topic": {topic: 40}}
    # the rule of entries is none of the archive, whose records have the same age
    planned = expire("retention.age_s", "--json").document
    assert planned["entries"] == 40
    for part, segments in (("to_expire", none), ("kept", whole), ("kept_of_expired_age", whole)):
        assert planned["archive"][part].items() >= segments.items()
    done = expire("retention.age_s", "--yes")
    assert "archive: expired: no segment; kept: 2 segments (" in done.out and f"; {topic}: 40 offsets)" in done.out
    assert "retention.segments_topics.TOPIC" in done.err
    assert states() == ["local", "archived"]
    by_topic = f"retention.segments_topics.{topic}"
    planned = expire(by_topic, "--json").document["archive"]
    assert planned["to_expire"].items() >= whole.items() and planned["kept"].items() >= none.items()
    done = expire(by_topic, "--yes", "--json").document["archive"]
    assert done["expired"].items() >= whole.items() and done["kept"].items() >= none.items()
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
