"""The program that measures indexes of many objects: it runs, and its figures are of the index that it names."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks import command
from tests.benchmarks.scale import _END_S, synthetic_objects
from tests.integration.cli.command_lines import run_here


@pytest.mark.long
def test_the_program_prints_the_figures_of_each_size(tmp_path):
    options = ("--objects", 1000, "--root-dir", tmp_path / "work", "--out", tmp_path / "scale.json", "--json")
    done = run_here("scale", *options, program=command.main)
    assert done.code == 0, done
    document = json.loads(done.out)
    assert document == json.loads((tmp_path / "scale.json").read_text())
    values = {row["name"]: row["values"][0] for row in document["rows"]}
    assert document["sizes"] == [1000]
    assert values["objects in the log"] == len(list(synthetic_objects(1000, 64)))
    assert values["open a reader: requests"] == 3
    assert values["many indexes: open a reader: requests"] == 3 * values["many indexes"]
    assert values["files and tables of a minute"] <= 2
    assert values["files and tables of ten years"] > 100
    assert values["a million lookups of ten years, at most"] == pytest.approx(
        0.4 * values["files and tables of ten years"]
    )
    assert list((tmp_path / "work").iterdir()) == []


def test_synthetic_objects_cover_ten_years_without_a_gap():
    ends = sorted({(one.second_min, one.second_max) for one in synthetic_objects(5000, 1000)})
    reached = ends[0][0]
    for low, high in ends:
        assert low <= reached + 1
        reached = max(reached, high)
    assert reached >= _END_S - 1
