"""`serve --follow kafka://...`: lookups over HTTP of records that arrive, how far it is, and its refusals."""

import signal

import pytest

from tests.integration.cli.command_lines import run_here
from tests.kafka.followed import places
from tests.server.conftest import PATIENCE_S, serving
from tests.server.test_serve_command import started
from tests.support.hanging import until
from tiered_index import IndexReader


def places_of(client, topic, key):
    answer = client.get("/v1/query", params={"topic": topic, "key": key}).json()
    return [(item["queue_id"], item["offset"]) for item in answer["items"]]


def test_records_are_found_and_shown_while_they_arrive_and_the_lag_is_told(servers, producing, topic, tmp_path):
    records = [
        {"key": f"k{n}", "value": f'{{"n": {n}}}', "partition": 1, "headers": [("trace", f"t{n}"), ("trace", None)]}
        for n in range(5)
    ]
    producing.send(topic, records)
    index = ("--root", tmp_path / "root", "--storage", (tmp_path / "storage").as_uri())
    keys = ("--key", "key", "--key", "header:trace", "--max-lag", 60, "--kafka", "client.id=served")
    params = {"topic": topic, "body": "json"}
    with started(*index, "--follow", f"kafka://{servers}/{topic}", *keys) as (process, client):
        until(lambda: places_of(client, topic, "k4") == [(1, 4)])
        producing.send(topic, [{"key": "k0", "value": None, "partition": 1, "headers": [("trace", "t9")]}])
        until(lambda: places_of(client, topic, "t9") == [(1, 5)])
        until(lambda: client.get("/readyz").status_code == 200)
        metrics = client.get("/metrics").text.splitlines()
        for line in ("lag_records 0.0", "lag_seconds 0.0", "position_records 6.0"):
            assert f"tiered_index_follow_{line}" in metrics
        assert client.get("/v1/health").json()["problems"] == []
        (row,) = client.get("/v1/messages", params=params | {"key": "t1"}).json()["messages"]
        assert (row["state"], row["read_from"]) == ("local", f"kafka://{servers}/{topic}/1")
        message = row["message"]
        shown = ("partition", "offset", "key", "body", "headers", "timestamp_type")
        assert [message[n] for n in shown] == [1, 1, "k1", {"n": 1}, [["trace", "t1"], ["trace", None]], "create"]
        several = client.get("/v1/messages", params=params | {"key": "k0"}).json()["messages"]
        assert [(each["message"]["offset"], each["message"]["body_bytes"]) for each in several] == [(5, None), (0, 8)]
        having = client.get("/v1/messages", params=params | {"key": "k0", "contains": "T0"}).json()
        assert [each["message"]["offset"] for each in having["messages"]] == [0]
        place = client.get(f"/v1/messages/kafka:{topic}/1/2", params={"body": "text"}).json()["messages"]
        assert [each["message"]["body"] for each in place] == ['{"n": 2}']
        assert client.get(f"/v1/messages/kafka:{topic}/1/9").status_code == 404
        (row,) = client.get("/v1/messages/t1", params={"topic": topic}).json()["messages"]
        assert row["message"]["offset"] == 1
        browsed = client.get("/v1/browse", params={"topic": topic, "at_ms": 0})
        assert (browsed.status_code, "it is a topic of Kafka: look up a key" in browsed.text) == (404, True)
        assert client.get("/v1/messages/kafka:nowhere/one").status_code == 400
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, error
    with IndexReader.open(root=tmp_path / "root") as reader, serving(reader) as client:
        assert places(reader, topic, "t0") == {(1, 0)}
        (row,) = client.get("/v1/messages", params=params | {"key": "t1"}).json()["messages"]
        assert (row["message"], "no archive has it" in row["problem"]) == (None, True)


def test_a_record_is_shown_by_its_key_before_its_entry_is_flushed(servers, producing, topic, tmp_path):
    producing.send(topic, [{"key": "k", "partition": 0, "headers": [("trace", "t")]}])
    index = ("--root", tmp_path / "root", "--storage", (tmp_path / "storage").as_uri())
    late = ("--key", "header:trace", "--set", "flush_interval_s=600")
    with started(*index, "--follow", f"kafka://{servers}/{topic}", *late) as (_, client):
        until(lambda: places_of(client, topic, "t") == [(0, 0)])
        (row,) = client.get("/v1/messages", params={"topic": topic, "key": "t"}).json()["messages"]
        assert (row["state"], row["message"]["key"]) == ("local", "k")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--follow", "kafka://127.0.0.1:1/t", "--archive-segments"), "--archive-segments is for a RocketMQ store"),
        (("--follow", "STORE", "--key", "key"), "--key is for Kafka"),
        (("--follow", "kafka://127.0.0.1:1/t", "--kafka", "sasl.pasword=secret"), "sasl.pasword"),
        (("--follow", "kafka://127.0.0.1:1/t", "--rocketmq-port", "0"), "--rocketmq-port is for a RocketMQ store"),
        (("--max-lag", "3"), "tiered-index: --max-lag needs --follow SOURCE"),
        (("--store-name", "a", "--key", "key"), "tiered-index: --store-name, --key need --follow SOURCE"),
    ],
)
def test_wrong_options_are_bad_usage(tmp_path, options, problem):
    options = [tmp_path if option == "STORE" else option for option in options]
    places = ["--root", tmp_path / "root", "--storage", (tmp_path / "storage").as_uri(), "--port", "0"]
    result = run_here("serve", *places, *options)
    assert result.code == 2
    assert problem in " ".join(result.err.split())
    assert "secret" not in result.out + result.err
