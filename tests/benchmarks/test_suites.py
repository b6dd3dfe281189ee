"""Each suite of `make bench` at a tiny size: it ends, checks its own answers, and has a value for each figure.

No test judges a figure that depends on the machine.
"""

from __future__ import annotations

import json

import pytest

from tests.benchmarks import __main__ as program
from tests.benchmarks.peers.run import FIGURES
from tests.benchmarks.report import compared


@pytest.fixture
def run(tmp_path, capsys):
    """Run a suite in a folder, which it leaves empty; return the rows of its tables, by title, and the document."""

    def measured(suite, *options):
        out, work = tmp_path / "out.json", tmp_path / "work"
        program.main([suite, *map(str, options), "--root-dir", str(work), "--out", str(out)])
        document = json.loads(out.read_text())
        assert list(work.iterdir()) == []
        assert document["machine"]["cores"] >= 1 and document["machine"]["filesystem"] != "unknown"
        printed = capsys.readouterr().out
        for title, (columns, *rows) in document["tables"].items():
            assert title in printed and rows and all(len(row) == len(columns) for row in rows)
        return [rows for _, *rows in document["tables"].values()], document

    return measured


@pytest.mark.long
def test_the_machine(run):
    (rows,), document = run("quick", "--slots", 50, "--items", 2_000, "--rounds", 2)
    assert all(len(values) == 2 and min(values) >= 0 for values in document["figures"]["native"].values())
    figures = {name: median for name, median, *_ in rows}
    assert figures["opening a root with 10 files: s"] > 0 and 5 < figures["compacted file: bytes an entry"] < 40
    assert all(
        figures[f"lookup, {state}: p50 us"] <= figures[f"lookup, {state}: p99 us"]
        for state in ("unsealed", "compacted")
    )
    assert all(figures[f"put beside {state}: p50 us"] > 0 for state in ("nothing", "the writer's merge"))


@pytest.mark.long
def test_ranges(run):
    (lookups, readers, many), _ = run("ranges", "--files", 10, "--items", 500, "--rounds", 1)
    gets = {tuple(row[:3]): row[3] for row in lookups}
    for files in (1, 10):
        assert all(gets[files, kind, way] == files for kind in ("one", "all", "none") for way in ("ours", "plain GETs"))
        assert gets[files, "all", "ours, filters cached"] == files
        assert (gets[files, "(opening)", "a new reader"], gets[files, "all", "a new reader"]) == (3, 2 * files)
        assert gets[files, "one", "RocketMQ, in parallel"] > files < gets[files, "one", "RocketMQ, file by file"]
    assert [row[:3] for row in readers] == [[500, "none", 3], [500, "one", 3], [500, "all", 3]]
    # a filter admits one of 100 other keys
    assert 24 <= readers[0][4] <= 27 and 25 <= readers[1][4] <= 28 and readers[2][4] == 48
    requests = {tuple(row[:3]): row[3] for row in many}
    for keys in (1, 10, 100):
        assert requests[keys, "none", 256] <= requests[keys, "none", 0] <= 10 * keys
    assert all(requests[keys, "in memory", 0] <= keys for keys in (1, 10)), "a filter admits few other files"


@pytest.mark.long
def test_many_objects(run):
    (rows,), _ = run("scale", "--objects", 1_000)
    figures = dict(rows)
    assert figures["open a reader, requests"] == 3
    assert figures["many indexes: open a reader, requests"] == 3 * figures["many indexes"]


@pytest.mark.long
def test_the_service(run):
    (rows,), document = run("service", "--entries", 4_000, "--seconds", 0.2)
    assert {row[0].partition(":")[0] for row in rows} == {"hot", "cached", "cold"} and all(row[1] > 0 for row in rows)
    assert next(row for row in document["rows"] if "beside writes" in row["name"])["written/s"] > 0


@pytest.mark.long
def test_files(run):
    _, document = run("files", "--rows", 300, "--rounds", 1)
    assert all(way["rows a CPU s"] > 0 for way in document["ways"].values())
    assert document["ways"]["ndjson published"]["bytes a row"] > 0
    assert document["read again"]["rows_ms"] > 30


@pytest.mark.long
def test_the_soak(run):
    ((minute,),), document = run("soak", "--minutes", 0.05, "--items", 20_000)
    assert document["wrong_answers"] == 0 and document["answers"] >= 200 and minute[1] > 0


@pytest.mark.long
def test_peers(run):
    sizes = ("--entries", 2_000, "--per-key", 2, "--rounds", 1, "--commit-entries", 500, "--lookups", 100)
    (rows,), document = run("peers", *sizes, "--peers", "tiered_index,sqlite")
    assert set(document["sizes"][0]["columns"]["tiered_index"]) >= set(FIGURES)
    assert [row[0] for row in rows] == list(FIGURES.values())


@pytest.mark.slow
def test_object_storage(run):
    (rows,), _ = run("cold", "--entries", 10_000, "--rounds", 1, "--delay", 0, "--only", "month,parquet")
    requests = rows[3]
    assert requests[0] == "... requests" and requests[1] != requests[2] == "**1**", "files, and their table"


@pytest.mark.slow
def test_a_year_by_spark(run):
    (rows,), document = run("spark", "--entries", 100_000)
    (steps,) = document["sizes"].values()
    assert steps["million keys"]["keys_checked"] == steps["million keys, one process's index"]["keys_checked"]
    assert steps["thousand keys"]["keys_checked"] == 1_000 and steps["erase a key"]["erased_entries"] > 100
    assert {"build", "audit, equal", "merge, one process", "million keys joined (Spark)"} <= {row[0] for row in rows}


def test_the_suites_are_listed_and_others_refused(capsys):
    with pytest.raises(SystemExit) as end:
        program.main(["help"])
    assert not end.value.code
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(program.SUITES)
    for wrong in (["nothing"], ["billion", "--entries", "10_000_000_000_000", "--root-dir", "/tmp/nowhere"]):
        with pytest.raises(SystemExit) as end:
            program.main(wrong)
        assert end.value.code


def test_the_best_of_a_row_is_bold():
    columns = {"x": {"a": [1.0], "b": [5.0]}, "y": {"a": [2.0]}, "z": {"b": [7.0, 9.0]}}
    header, less, more = compared(columns, {"a": "less", "b": "more"}, {"b"})
    assert header == ["", "x", "y", "z"]
    assert less == ["less", "**1**", "2", ""] and more == ["more", "5", "", "**8**"]
