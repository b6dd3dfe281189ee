"""README.md keeps its word: its shell commands and programs run, and what they print is what it shows.

Blocks marked ``console`` are run in order in one folder; lines after a command are its expected output, in which
``...`` stands for anything. Blocks marked ``python`` are run as programs.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_README = (_ROOT / "README.md").read_text()
_BLOCK = re.compile(r"^```(console|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _blocks(kind: str) -> list[str]:
    return [body for name, body in _BLOCK.findall(_README) if name == kind]


def _commands(block: str) -> list[tuple[str, str]]:
    """Return (command, expected output) pairs; a command with a here-document runs to its END."""
    pairs: list[tuple[list[str], list[str]]] = []
    inside = False
    for line in block.splitlines():
        if inside:
            pairs[-1][0].append(line)
            inside = line != "END"
        elif line.startswith("$ "):
            pairs.append(([line[2:]], []))
            inside = "<<'END'" in line
        else:
            pairs[-1][1].append(line)
    return [("\n".join(command), "\n".join(output).strip()) for command, output in pairs]


def _environment() -> dict[str, str]:
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("TIERED_INDEX_", "AWS_"))}
    return keep | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "COLUMNS": "140",
        "NO_COLOR": "1",
        "TERM": "dumb",
    }


def test_commands_run_and_print_what_readme_shows(tmp_path: Path) -> None:
    commands = [pair for block in _blocks("console") for pair in _commands(block)]
    assert len(commands) >= 4
    checker = doctest.OutputChecker()
    for command, expected in commands:
        run = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=tmp_path,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert run.returncode == 0, f"$ {command}\n{run.stdout}{run.stderr}"
        if expected:
            matches = checker.check_output(expected + "\n", run.stdout, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
            assert matches, f"$ {command}\nprinted:\n{run.stdout}\nREADME shows:\n{expected}"


@pytest.mark.parametrize("number", range(len(_blocks("python"))))
def test_programs_run(number: int, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _blocks("python")[number]],
        cwd=tmp_path,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr


def test_make_help_names_every_task_of_the_readme() -> None:
    shown = subprocess.run(["make", "help"], cwd=_ROOT, capture_output=True, text=True, check=True).stdout
    for task in set(re.findall(r"(?:^|`)make ([a-z0-9-]+)", _README, re.MULTILINE)):
        assert re.search(rf"^{task}\s", shown, re.MULTILINE), (
            f"README speaks of `make {task}`, which the Makefile does not have"
        )


def test_layout_names_files_that_exist() -> None:
    section = _README.split("## How the code is laid out")[1]
    for name in re.findall(r"\b([a-z_]+\.py)\b", section):
        assert list((_ROOT / "tiered_index").rglob(name)) or list((_ROOT / "tests").rglob(name)), (
            f"README names {name}, which is not there"
        )
