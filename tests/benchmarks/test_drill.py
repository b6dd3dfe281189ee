"""The drill: each incident by itself, and what its program says of one that fails."""

from __future__ import annotations

import pytest

from tests.benchmarks import command
from tests.benchmarks.drill import INCIDENTS, Drill, drilled
from tests.integration.cli.command_lines import run_here


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda incident: incident.__name__)
def test_nothing_is_lost_without_a_word_and_nobody_is_stuck(tmp_path, incident):
    row = drilled(incident, tmp_path / "drill")
    assert row["status"] == "ok", row
    assert row["declared"] > 0 and (row["lost"], row["foreign"]) == (0, 0), row


def test_entries_that_go_without_a_word_and_commands_that_fail_are_findings(tmp_path):
    def loses(drill: Drill) -> set[int]:
        drill.ingest(3)
        return {0, 1}

    def ends_stuck(drill: Drill) -> set[int]:
        drill.ingest(3)
        drill.run("merge", "--storage", drill.uri("nowhere"))
        return {0, 1, 2}

    row = drilled(loses, tmp_path / "a")
    assert (row["status"], row["lost"], row["told"]) == ("lost without a word", 1, [])
    row = drilled(ends_stuck, tmp_path / "b")
    assert (row["status"], row["lost"], len(row["told"])) == ("stuck", 0, 1)


def test_the_program_prints_its_incidents(tmp_path):
    options = ("--only", "unmounted_target", "--root-dir", tmp_path / "work", "--out", tmp_path / "drill.json")
    done = run_here("drill", *options, program=command.main)
    assert done.code == 0, done
    assert "unmounted_target" in done.out and (tmp_path / "drill.json").exists()
    assert list((tmp_path / "work").iterdir()) == []
    assert run_here("drill", "--only", "nothing", program=command.main).code == 2
