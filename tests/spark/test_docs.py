"""The program of docs/spark.md runs, its jobs "From the command line" print what it shows, links hold.

This process has a session already.
"""

from __future__ import annotations

import doctest
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tiered_index.cli.main import run

_ROOT = Path(__file__).parents[2]


def test_the_program_of_the_page_runs(spark):
    programs = re.findall(r"^```python\n(.*?)^```", (_ROOT / "docs" / "spark.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(programs) == 1
    exec(compile(programs[0], "docs/spark.md", "exec"), {})


def test_every_page_about_spark_is_linked_and_links_lead_somewhere():
    docs = _ROOT / "docs"
    pages = sorted([*docs.glob("spark*.md"), docs / "tutorial.md"])
    links = {page.name: re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()) for page in pages}
    assert {page.name for page in pages} <= {"spark.md", *(target for target, _ in links["spark.md"])}
    for name, found in links.items():
        for target, anchor in found:
            if "://" in target:
                continue
            page = (docs / (target or name)).resolve()
            assert page.is_file(), f"{name} leads to {target}"
            heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE) if anchor else []
            assert not anchor or anchor in {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}, (
                f"{name}: #{anchor}"
            )


def test_the_jobs_of_the_page_print_what_it_shows(spark, tmp_path, monkeypatch, capfd):
    section = (_ROOT / "docs" / "spark.md").read_text().split("\n## From the command line\n")[1].split("\n## ")[0]
    block = re.findall(r"^```text\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[0]
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
