"""The main job of docs/kafka.md on a real broker, by the page's own commands."""

import json

from tests.brokers.kafka.topics import places_of


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
    for number in range(20):
        answer = run("query", topic, f"key-{number}", "--storage", storage, "--json").document
        assert {(item["queue_id"], item["offset"]) for item in answer["items"]} == places_of(logged, b"key-%d" % number)
    for number in range(60):
        for key in (f"order-{number}", f"t-{number}"):
            (item,) = run("query", topic, key, "--storage", storage, "--json").document["items"]
            assert (item["queue_id"], item["offset"]) in places_of(logged, b"key-%d" % (number % 20))
    for record in logged[::10]:
        place = f"kafka:{topic}/{record.partition}/{record.offset}"
        shown = run("message", place, "--storage", storage, "--kafka", f"bootstrap.servers={broker.address}", "--json")
        (fetched,) = shown.document["messages"]
        message = fetched["message"]
        assert (fetched["state"], message["key"]) == ("local", record.key.decode())
        assert message["headers"] == [[name, value.decode()] for name, value in record.headers]
        assert (message["body"], message["timestamp_ms"]) == (record.value.decode(), record.timestamp_ms)
