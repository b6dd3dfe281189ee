"""`python -m tests.benchmarks`, tiny: cold lookups beside RocketMQ's way, and which suites are run. Never how fast.

Tests of the suites of Spark are in tests/spark.
"""

from __future__ import annotations

import json

import pytest

from tests.benchmarks import command
from tests.integration.cli.command_lines import Outcome, run_here

SIZES = ("--items", 1_000, "--slots", 50, "--rounds", 2)


def compare(*arguments: object) -> Outcome:
    return run_here(*arguments, program=command.main, timeout=240)


@pytest.mark.parametrize("preset", ["native", pytest.param("rocketmq", marks=pytest.mark.slow)])
def test_cold_lookups_beside_rocketmq(preset, tmp_path):
    (tmp_path / "work").mkdir()
    places = ("--root-dir", tmp_path / "work", "--out", tmp_path / "out.json")
    outcome = compare("cold", *SIZES, "--preset", preset, "--json", *places)
    assert outcome.code == 0, outcome
    assert json.loads((tmp_path / "out.json").read_text()) == outcome.document
    assert list((tmp_path / "work").iterdir()) == []
    tables = outcome.document["tables"]
    assert {table["suite"] for table in tables} == {"cold"} and len(tables) == 5
    assert all(len(row) == len(table["columns"]) for table in tables for row in table["rows"])
    lookups, others, fresh, curve, matches = tables
    requests = {tuple(row[:3]): row[4] for table in (lookups, others, fresh) for row in table["rows"]}
    for files in (1, 10):
        for kind in ("one", "all", "none"):
            assert requests[files, kind, "ours"] == requests[files, kind, "plain GETs"] == files
        assert requests[files, "one", "RocketMQ, file by file"] > files
        assert requests[files, "one", "RocketMQ, side by side"] > files
    for row in curve["rows"]:
        keys, coalesced, _, apart, _, filtered, _, filtered_apart, _ = row
        assert coalesced == 10 and coalesced <= apart <= 10 * keys, row
        assert 1 <= filtered <= filtered_apart <= apart, row
    assert [row[0] for row in curve["rows"]] == [1, 10, 100]
    assert matches["rows"][0][3] == 1_000 / 2**31 and matches["rows"][1][1] == 0


def test_a_storage_of_the_users_is_compared_and_left_as_it_was(tmp_path):
    uri = f"file://{tmp_path}/store"
    outcome = compare("cold", *SIZES, "--storage", uri, "--root-dir", tmp_path / "work", "--json")
    assert outcome.code == 0, outcome
    tables = outcome.document["tables"]
    assert len(tables) == 3 and all(uri in table["title"] for table in tables)
    assert "RocketMQ, side by side" in {row[2] for table in tables for row in table["rows"]}
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("--root", "x"),
        ("put",),
        ("cold", "--storage", "memory://x"),
        ("cold", "spark", "--storage", "s3://b/p"),
        ("spark", "--storage", "file:///x"),
        ("spark", "--storage", "s3://b/p?endpoint_url=https://x"),
        ("spark", "--entries", "5"),
        ("spark", "--scale", "1"),
    ],
)
def test_bad_usage(arguments):
    assert compare(*arguments).code == 2


def test_spark_is_measured_where_its_packages_are(tmp_path, monkeypatch):
    arguments = ("--items", "1000", "--slots", "10", "--rounds", "1", "--root-dir", str(tmp_path))
    monkeypatch.setattr(command, "missing_packages", lambda: {"pyspark": "spark", "duckdb": "bench"})
    refused = compare("spark", *arguments)
    assert refused.code == 2
    assert "suite spark needs pyspark, duckdb: pip install 'tiered_index[bench,spark]'" in refused.err
    chosen = []
    monkeypatch.setattr(
        command, "measure", lambda session, suites, *rest: chosen.append([suite.name for suite in suites]) or 0
    )
    left_out = compare(*arguments)
    assert left_out.code == 0
    assert "spark is left out: pyspark, duckdb not installed" in left_out.err
    monkeypatch.setattr(command, "missing_packages", dict)
    assert compare(*arguments).code == 0
    assert chosen == [["cold"], ["spark", "spark-lookup", "cold"]]


def test_help_has_examples():
    shown = compare("--help")
    assert shown.code == 0 and "python -m tests.benchmarks spark --entries 4000000" in shown.out
