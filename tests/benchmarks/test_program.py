"""`python -m tests.benchmarks` with few entries: every suite records each of its figures in every round. No test judges
their values.

Tests of the suites of Spark are in tests/spark.
"""

from __future__ import annotations

import json
import shutil
from collections import namedtuple

import pytest

from tests.benchmarks import command
from tests.integration.cli.command_lines import Outcome, run_here, run_script


def bench(*arguments: object) -> Outcome:
    return run_here(*arguments, program=command.main, timeout=240)


SIZES = ("--items", 1_000, "--slots", 50, "--rounds", 2)
GOALS = {
    "put": {
        *("put_batch and durable flush", "put, one entry per call"),
        *("durable put_batch of 1,000 rows", "durable put_batch of 10,000 rows"),
    },
    "pause": set(),
    "compact": set(),
    "lookup": {"hot lookup p50", "hot query_many"},
    "recovery": set(),
    "commitlog": {"extraction, walking", "extraction, walking, bodies checked"},
    "cold": {
        *(
            f"key in {kind} of {n}: times the slowest plain GET, p50"
            for n in ("1 file", "10 files")
            for kind in ("one", "all", "none")
        ),
        "absent keys, filters cached: files of 10 without a GET",
        "requests to open a reader on 10 files",
    },
}


@pytest.fixture(params=["native", pytest.param("rocketmq", marks=pytest.mark.slow)])
def measured(request, tmp_path_factory):
    """One run of all suites: its outcome, its folder, and its output."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "work").mkdir()
    outputs = ("--json", "--out", folder / "out.json")
    outcome = run_script(
        *(*GOALS, *SIZES, "--preset", request.param, *outputs),
        module="tests.benchmarks",
        timeout=240,
        environment={
            "TMPDIR": str(folder / "work"),
            "TIERED_INDEX_ROOT": str(folder / "mine"),
            "TIERED_INDEX_ITEMS": "77",
            "TIERED_INDEX_BACKGROUND": "true",
        },
    )
    assert outcome.code == 0, outcome
    return request.param, folder, outcome


def _the_document_is_the_file_and_nothing_else_is_left(measured):
    _, folder, outcome = measured
    assert json.loads((folder / "out.json").read_text()) == outcome.document
    assert list((folder / "work").iterdir()) == []
    assert not (folder / "mine").exists()


def _machine_and_setting_are_said(measured):
    preset, _, outcome = measured
    machine, setting = outcome.document["machine"], outcome.document["setting"]
    assert {"cpu", "cores", "kernel", "python", "numpy", "pyarrow", "filesystem", "load_average"} <= set(machine)
    assert machine["cores"] >= 1 and machine["filesystem"] != "unknown"
    assert (setting["preset"], setting["slots"], setting["items"], setting["entries"]) == (preset, 50, 1_000, 999)


def _every_figure_has_its_rounds(measured):
    figures = measured[2].document["figures"]
    assert list(dict.fromkeys(figure["suite"] for figure in figures)) == list(GOALS)
    assert len({(figure["suite"], figure["name"]) for figure in figures}) == len(figures)
    for figure in figures:
        assert figure["rounds"] == len(figure["values"]) == 2, figure
        assert figure["min"] <= figure["median"] <= figure["max"]
        assert figure["min"] > 0 or figure["unit"] in ("count", "MiB"), figure


def _goals_and_what_is_said_of_missed_ones(measured):
    document = measured[2].document
    with_goal = {suite: set() for suite in GOALS}
    for figure in document["figures"]:
        if figure["goal"] is None:
            assert figure["met"] is None and "profile" not in figure
            continue
        with_goal[figure["suite"]].add(figure["name"])
        assert figure["met"] == (figure["times_as_good_as_goal"] >= 1)
        assert ("profile" in figure) == (not figure["met"])
        assert all(frame["calls"] > 0 for frame in figure.get("profile", ()))
    assert with_goal == GOALS
    assert document["missed"] == [f"{f['suite']}: {f['name']}" for f in document["figures"] if f["met"] is False]


def _files_moved_while_the_writer_was_watched(measured):
    counts = {
        f["name"]: f["min"] for f in measured[2].document["figures"] if f["suite"] == "pause" and f["unit"] == "count"
    }
    waiting = measured[2].document["setting"]["pause_files"]
    assert counts["files begun"] >= 1
    assert counts["compactions"] >= counts["uploads"] >= waiting + 1
    assert counts["queries"] >= 1


def _percentiles_rise(measured):
    values = {f["name"]: f["values"] for f in measured[2].document["figures"] if f["suite"] == "pause"}
    for call in ("put", "put_batch"):
        for state in ("busy", "idle"):
            rounds = zip(
                *(values[f"{call}, {state}, {which}"] for which in ("p50", "p99", "p99.9", "max")), strict=True
            )
            assert all(list(row) == sorted(row) for row in rounds)


def _tables_beside_the_figures_are_of_the_cold_suite(measured):
    tables = measured[2].document["tables"]
    assert {table["suite"] for table in tables} == {"cold"} and len(tables) == 6
    assert all(len(row) == len(table["columns"]) for table in tables for row in table["rows"])
    lookups, others, fresh, first, curve, matches = tables
    by_kind = {row[1]: row for row in first["rows"]}
    assert {kind: row[2] for kind, row in by_kind.items()} == {"none": 3, "one": 3, "all": 3}
    # a filter admits one of 100 other keys
    assert 24 <= by_kind["none"][4] <= 27 and 25 <= by_kind["one"][4] <= 28 and by_kind["all"][4] == 48
    requests = {tuple(row[:3]): row[4] for table in (lookups, others, fresh) for row in table["rows"]}
    for files in (1, 10):
        for kind in ("one", "all", "none"):
            assert requests[files, kind, "ours"] == requests[files, kind, "plain GETs"] == files
        assert requests[files, "all", "ours, filters cached"] == files
        assert requests[files, "(opening only)", "fresh reader"] == 3
        assert requests[files, "all", "fresh reader"] == 2 * files
        assert requests[files, "one", "RocketMQ, file by file"] > files
        assert requests[files, "one", "RocketMQ, in parallel"] > files
    for row in curve["rows"]:
        keys, coalesced, _, apart, _, filtered, _, filtered_apart, _ = row
        assert coalesced == 10 and coalesced <= apart <= 10 * keys, row
        assert 1 <= filtered <= filtered_apart <= apart, row
    assert [row[0] for row in curve["rows"]] == [1, 10, 100]
    assert matches["rows"][0][3] == 1_000 / 2**31 and matches["rows"][1][1] == 0


@pytest.mark.long
def test_a_run_of_every_suite(measured):
    """All checks are one test, because processes that share a file's tests would each measure again."""
    _the_document_is_the_file_and_nothing_else_is_left(measured)
    _machine_and_setting_are_said(measured)
    _every_figure_has_its_rounds(measured)
    _goals_and_what_is_said_of_missed_ones(measured)
    _files_moved_while_the_writer_was_watched(measured)
    _percentiles_rise(measured)
    _tables_beside_the_figures_are_of_the_cold_suite(measured)


def test_a_storage_of_the_users_is_measured_and_left_as_it_was(tmp_path):
    uri = f"file://{tmp_path}/store"
    outcome = bench("cold", *SIZES, "--storage", uri, "--root-dir", tmp_path / "work", "--json")
    assert outcome.code == 0, outcome
    titles = [table["title"] for table in outcome.document["tables"]]
    assert len(titles) == 3 and all(uri in title for title in titles)
    assert outcome.document["setting"]["storage"] == uri
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


def test_the_table_of_chosen_suites(tmp_path):
    outcome = bench("recovery", "commitlog", "recovery", *SIZES, "--quick", "--root-dir", tmp_path / "new")
    assert outcome.code == 0, outcome
    lines = [line.strip() for line in outcome.out.splitlines()]
    assert [line for line in lines if line in GOALS] == ["recovery", "commitlog"]
    assert "preset native: 50 slots and 1,000 items per file" in outcome.out
    assert "median of 2 rounds" in outcome.out
    assert any(line.startswith("opening a root with 10 files") for line in lines)
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("--root", "x"),
        ("--storage", "memory://x"),
        ("--config", "x.toml"),
        ("nope",),
        ("--items", "5"),
        ("--rounds", "0"),
        ("--preset", "x"),
        ("cold", "--storage", "memory://x"),
        ("cold", "put", "--storage", "file:///x"),
        ("cold", "spark", "--storage", "s3://b/p"),
        ("spark", "--storage", "file:///x"),
        ("spark", "--storage", "s3://b/p?endpoint_url=https://x"),
        ("spark", "--entries", "5"),
        ("spark", "--scale", "1"),
    ],
)
def test_bad_usage(arguments):
    assert bench(*arguments).code == 2


def test_a_disk_without_room_is_found_out_before_anything_is_written(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1_000))
    assert bench("put", "--items", "2000", "--root-dir", str(tmp_path)).code == 7
    assert list(tmp_path.iterdir()) == []


def test_a_suite_of_spark_without_its_packages(monkeypatch):
    monkeypatch.setattr(command, "missing_packages", lambda: {"pyspark": "spark", "duckdb": "bench"})
    refused = bench("spark")
    assert refused.code == 2
    assert "suite spark needs pyspark, duckdb: pip install '.[bench,spark]'" in refused.err


def test_help_has_examples():
    shown = bench("--help")
    assert shown.code == 0 and "python -m tests.benchmarks spark --entries 4000000" in shown.out
