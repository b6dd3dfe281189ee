"""The demo of Kafka with few records: the kill happens, no record is lost, no answer is wrong."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from tests.demo import kafka
from tests.demo.kafka import KEYS, main
from tests.integration.cli.command_lines import run_here, run_script
from tiered_index import IndexConfig
from tiered_index.kafka.client import LogRange


@pytest.mark.long
def test_the_demo_of_kafka(tmp_path):
    outcome = run_script(
        *["--records", "12000", "--lookups", "60", "--json", "--quiet"],
        module="tests.demo.kafka",
        timeout=240,
        environment={"TIERED_INDEX_ROOT": str(tmp_path / "mine"), "TMPDIR": str(tmp_path)},
    )
    assert outcome.code == 0, outcome
    document = outcome.document
    names = ("records_lost", "records_doubled", "wrong_answers", "records")
    assert [document[name] for name in names] == [0, 0, 0, 12_000]
    assert document["status"] == "ok" and 0 < document["resumed_from"] <= 12_000
    assert [row["place"] for row in document["lookups"]] == list(KEYS)
    assert all(row["answers"] >= row["lookups"] for row in document["lookups"])
    assert {one["topic"]: [place[:2] for place in one["places"]] for one in document["asked"]} == {
        "orders": [[3, 1177]],
        "payments": [[3, 1177]],
    }
    assert document["records_at_brokers"] == 0 and document["shown"] >= 120
    assert document["gets_per_record"] <= 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [("--records", 5), ("--storage", "memory://x")])
def test_bad_usage(arguments):
    assert run_here(*arguments, program=main).code == 2


def test_a_message_that_is_not_shown_and_a_record_that_is_left_are_wrong(monkeypatch):
    nothing = SimpleNamespace(messages=(), message_requests=0)
    reader = SimpleNamespace(segment_archives=None, messages=lambda *_, **__: nothing)
    broker = SimpleNamespace(range=lambda place: LogRange(0, 1, 1), close=lambda: None)
    monkeypatch.setattr(kafka, "IndexReader", SimpleNamespace(open=lambda **_: contextlib.nullcontext(reader)))
    monkeypatch.setattr(kafka, "KafkaBroker", lambda settings: broker)
    monkeypatch.setattr(kafka, "KafkaMessages", lambda *_: None)
    cluster = SimpleNamespace(servers="", trim=lambda *_: None)
    stages = kafka.Stages(cluster, IndexConfig(), 4, 2, lambda text: None)
    stages.delete_and_show()
    # two records by two keys each, and one record in each of eight partitions
    *lost, left = stages.figures["shown_wrong"]
    assert len(lost) == 4 and left == "8 records are left at the brokers"
