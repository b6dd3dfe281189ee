"""The soak, for a few seconds: its answers agree with its model, and it notices a wrong answer."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.benchmarks import command
from tests.benchmarks.soak import KEYS, Ledger, Soak, sparkline
from tests.integration.cli.command_lines import run_here
from tiered_index import IndexConfig, IndexItem, QueryResult


@pytest.mark.long
def test_a_short_soak_answers_as_its_model(tmp_path):
    options = ("--minutes", 0.05, "--rate", 20_000, "--items", 20_000, "--root-dir", tmp_path / "work")
    done = run_here("soak", *options, "--out", tmp_path / "soak.json", "--json", program=command.main)
    assert done.code == 0, done
    document = json.loads((tmp_path / "soak.json").read_text())
    assert document == done.document
    assert (document["status"], document["wrong_answers"]) == ("ok", 0)
    (minute,) = document["minutes"]
    assert minute["entries"] > 0 and document["answers"] >= 200 and minute["rss_bytes"] > 1 << 20
    assert list((tmp_path / "work").iterdir()) == []


def test_missing_additional_and_unordered_entries_of_an_answer_are_wrong():
    soak = Soak(IndexConfig(), 1_000, 1)
    ledger = soak._ledgers[0]
    for second in (100, 101, 102):
        ledger.begin(second)
        ledger.acknowledged += 1
    ledger.begin(103)
    item = IndexItem(topic="orders", topic_id=1, queue_id=0, offset=7, size=100, timestamp_ms=100_000, key_hash=1)
    right = QueryResult(items=(item,), status="complete")
    assert soak._wrong(right, 7, [3, 0], 0) is None
    assert "missing" in str(soak._wrong(replace(right, items=()), 7, [3, 0], 0))
    assert soak._wrong(replace(right, items=()), 7, [3, 0], 101) is None
    assert "never put" in str(soak._wrong(replace(right, items=(item, replace(item, offset=8))[::-1]), 7, [3, 0], 0))
    assert "twice" in str(soak._wrong(replace(right, items=(item, item)), 7, [3, 0], 0))
    assert soak._wrong(replace(right, status="truncated"), 7, [3, 0], 0) == "status truncated"


def test_numbers_of_a_key_follow_from_the_batches():
    ledger = Ledger()
    for batch in range(12):
        ledger.begin(50 + batch)
    numbers, seconds = ledger.numbers(1_500, 12, 51, 60)
    assert numbers.tolist() == [1_500, 1_500 + KEYS] and seconds.tolist() == [51, 56]
    assert ledger.numbers(1_500, 6, 51, 60)[0].tolist() == [1_500]


def test_a_sparkline_has_a_bar_a_value():
    assert sparkline([0, 1, 8]) == "▁▂█" and sparkline([]) == ""
