"""README.md and the pages for users are right: shell commands and programs run, and print the shown output.

Blocks of a page that are marked ``console`` run in order in one folder. The lines after a command are its expected
output, and ``...`` matches anything. Blocks marked ``python`` run as programs, also in one folder.
"""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.command_lines import clean_environment

_ROOT = Path(__file__).parents[2]
# the least number of their commands
_PAGES_OF_COMMANDS = {"README.md": 3, "docs/rocketmq.md": 4, "docs/restore.md": 7}
_PAGES_OF_PROGRAMS = ("README.md", "docs/using.md", "docs/embedding.md", "docs/lifetime.md", "docs/restore.md")
_EACH_ALONE = """
import sys
for number, program in enumerate(sys.argv[1:], 1):
    exec(compile(program, f"program {number} of the page", "exec"), {"__name__": "__main__"})
"""
_BLOCK = re.compile(r"^```(console|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _blocks(page: str, kind: str) -> list[str]:
    return [body for name, body in _BLOCK.findall((_ROOT / page).read_text()) if name == kind]


def _commands(block: str) -> list[tuple[str, str]]:
    """Return (command, expected output) pairs. A command with a here-document ends at its END."""
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


def _environment(folder: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    plain = {"COLUMNS": "140", "NO_COLOR": "1", "TERM": "dumb"}
    return clean_environment(PATH=path, PYTHONPATH=str(_ROOT), TMPDIR=str(folder), **plain)


def _run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120, "check": False}
    return subprocess.run(command, cwd=folder, env=_environment(folder), **how)


@pytest.mark.parametrize("page", _PAGES_OF_COMMANDS)
def test_commands_run_and_print_the_output_on_the_page(page: str, tmp_path: Path) -> None:
    commands = [pair for block in _blocks(page, "console") for pair in _commands(block)]
    assert len(commands) >= _PAGES_OF_COMMANDS[page]
    checker = doctest.OutputChecker()
    for command, expected in commands:
        run = _run(tmp_path, "bash", "-euo", "pipefail", "-c", command)
        assert run.returncode == 0, f"$ {command}\n{run.stdout}{run.stderr}"
        if expected:
            matches = checker.check_output(expected + "\n", run.stdout, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
            assert matches, f"$ {command}\nprinted:\n{run.stdout}\n{page} shows:\n{expected}"


@pytest.mark.parametrize("page", _PAGES_OF_PROGRAMS)
def test_programs_run(page: str, tmp_path: Path) -> None:
    """All run one after the other in one process, each with its own names, because the imports take longer than the
    programs.
    """
    programs = _blocks(page, "python")
    assert programs
    run = _run(tmp_path, sys.executable, "-c", _EACH_ALONE, *programs)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/performance.md"])
def test_make_help_names_every_task_of_the_page(page: str) -> None:
    shown = subprocess.run(["make", "help"], cwd=_ROOT, capture_output=True, text=True, check=True).stdout
    tasks = set(re.findall(r"(?:^|`)make ([a-z0-9-]+)", (_ROOT / page).read_text(), re.MULTILINE))
    assert tasks
    for task in tasks:
        assert re.search(rf"^{task}\s", shown, re.MULTILINE), (
            f"{page} speaks of `make {task}`, which the Makefile does not have"
        )
