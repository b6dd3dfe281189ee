"""`ingest` of topics, and its refusals."""

from __future__ import annotations

import json
import re

import pytest

from tests.integration.cli.command_lines import run_here


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
        (found,) = run("query", topic, key, "--json").document["items"]
        offsets.add((found["queue_id"], found["offset"]))
    assert len(offsets) == 1
    again = run("ingest", place)
    assert re.search("messages +0\n", again.out), again.err
    assert re.search(f"source +{re.escape(place)}\n", again.out)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--kafka", "sasl.pasword=secret"), "sasl.pasword"),
        (("--kafka", "security.protocol=secret"), "security.protocol"),
        (("--kafka", "secret"), "NAME=VALUE"),
        (("--kafka", "enable.auto.commit=true"), "leave --kafka enable.auto.commit out"),
        (("--key", "json:a["), "JMESPath"),
        (("--skip-bad",), "--skip-bad is for a file"),
        (("--skip-corrupt",), "--skip-corrupt is for a RocketMQ store"),
    ],
)
def test_wrong_options_are_bad_usage_and_no_secret_is_printed(run, options, problem):
    result = run("ingest", "kafka://127.0.0.1:1/orders", "--storage", "memory://x", *options)
    assert result.code == 2
    assert problem in " ".join(result.err.split())
    assert "secret" not in result.out + result.err


def test_settings_come_out_of_a_file(run, tmp_path):
    (tmp_path / "client.properties").write_text("# TLS\nsasl.pasword = secret\n\n")
    ingest = ("ingest", "kafka://h:1/orders", "--storage", "memory://x", "--kafka-config")
    result = run(*ingest, tmp_path / "client.properties")
    assert (result.code, "sasl.pasword" in result.err, "secret" in result.out + result.err) == (2, True, False)
    assert run(*ingest, tmp_path / "none").code == 3


def test_options_of_kafka_are_of_kafka(run, tmp_path):
    (tmp_path / "messages.ndjson").touch()
    result = run("ingest", tmp_path / "messages.ndjson", "--key", "key", "--storage", "memory://x")
    assert (result.code, "--key is for Kafka" in result.err) == (2, True)
    assert run("ingest", "kafka://user:password@h:1/t", "--storage", "memory://x").code == 2
