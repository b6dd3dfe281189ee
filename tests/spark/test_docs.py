"""Each program of the pages on Spark is run by some test; jobs "From the command line" print what the guide shows.

This process has a session already.
"""

from __future__ import annotations

import doctest
import re
import shlex
import subprocess

import pytest

from tests.spark.pages import DOCS, PAGES, programs, section
from tiered_index.cli.main import run

# How many programs each section has. The tests of these pages name the same sections.
_RUN = {
    ("spark.md", "Step by step"): 18,
    ("spark.md", "An Iceberg table"): 2,
    ("spark.md", "A Delta table"): 1,
    ("spark-sql.md", "Bulk lookup"): 1,
    ("spark-sql.md", "Data source `tiered_index`"): 4,
    ("spark-sql.md", "Data source `rocketmq_commitlog`"): 2,
    ("spark-sql.md", "Streams into an index"): 2,
}


def test_every_program_is_in_a_section_that_a_test_runs():
    assert {at: len(programs(section(*at))) for at in _RUN} == _RUN
    assert sum(len(programs((DOCS / page).read_text())) for page in PAGES) == sum(_RUN.values())


def test_every_page_about_spark_is_linked_from_the_guide():
    assert {page.name for page in DOCS.glob("spark*.md")} == set(PAGES)
    assert set(PAGES) <= {"spark.md", *re.findall(r"\]\(([^)#\s]*)", (DOCS / "spark.md").read_text())}


def test_the_jobs_of_the_page_print_what_it_shows(spark, tmp_path, monkeypatch, capfd):
    text = section("spark.md", "From the command line")
    block = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]
    steps = re.findall(r"^\$ ([^\n]*(?:\n    [^\n]*)*)\n(.*?)(?=^\$ |\Z)", block, re.MULTILINE | re.DOTALL)
    assert len(steps) >= 4
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")
    for command, expected in steps:
        capfd.readouterr()
        if command.startswith("tiered-index "):
            with pytest.raises(SystemExit) as ended:
                run(shlex.split(command.replace("$PWD", str(tmp_path)))[1:])
            printed = capfd.readouterr()
            assert ended.value.code == 0, printed.err
        else:
            subprocess.run(["bash", "-euc", command], cwd=tmp_path, check=True)
            printed = capfd.readouterr()
        options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        assert doctest.OutputChecker().check_output(expected or "\n", printed.out or "\n", options), (
            f"$ {command}\n{printed.out}"
        )
