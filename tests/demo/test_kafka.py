"""The demo of Kafka with few records: the kill happens, no record is lost, no answer is wrong."""

from __future__ import annotations

import pytest

from tests.demo.kafka import KEYS, main
from tests.integration.cli.command_lines import run_here, run_script


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
