"""README.md and the pages for users are right: shell commands and programs run, and print the shown output.

Blocks of a page that are marked ``console`` run in order in one folder. The lines after a command are its expected
output, and ``...`` matches anything. Blocks marked ``python`` run as programs, also in one folder.
"""

import doctest
import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.command_lines import clean_environment, run_here

_ROOT = Path(__file__).parents[2]
# the least number of their commands
_PAGES_OF_COMMANDS = {"README.md": 3, "docs/rocketmq.md": 4, "docs/export.md": 7}
# pages whose commands read the index of the README's first example
_PAGES_ON_THE_README = [
    page.relative_to(_ROOT).as_posix()
    for page in sorted((_ROOT / "docs").glob("*.md"))
    if "\n```console\n" in page.read_text() and f"docs/{page.name}" not in _PAGES_OF_COMMANDS
]
_PAGES_OF_PROGRAMS = ("README.md", "docs/using.md", "docs/embedding.md")
# programs of docs/examples that need no argument and no Spark, and their pages
_EXAMPLES = {
    "expire_and_erase.py": "docs/lifetime.md",
    "export.py": "docs/export.md",
    "asyncio_reader.py": "docs/using.md",
    "several_indexes.py": "docs/using.md",
    "own_columns.py": "docs/using.md",
    "own_source.py": "docs/embedding.md",
    "merge_files.py": "docs/merge.md",
}
_EACH_ALONE = """
import sys
for name, program in zip(sys.argv[1::2], sys.argv[2::2]):
    exec(compile(program, name, "exec"), {"__name__": "__main__"})
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


def _run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = clean_environment(PATH=path, PYTHONPATH=str(_ROOT), TMPDIR=str(folder))
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120, "check": False}
    return subprocess.run(command, cwd=folder, env=environment, **how)


def _printed(folder: Path, command: str) -> str:
    """Run a line of a page in `folder`, and return its output. A call of `tiered-index` runs in this process."""
    if command.startswith("tiered-index ") and "||" not in command:
        arguments = shlex.split(command.replace("$PWD", str(folder)))[1:]
        # roots that no option names stay from an earlier run otherwise
        state = {"XDG_STATE_HOME": str(folder / "state")}
        done = run_here(*arguments, environment={"COLUMNS": "140", "NO_COLOR": "1", "TERM": "dumb", **state})
        assert done.code == 0, f"$ {command}\n{done.out}{done.err}"
        return done.out
    run = _run(folder, "bash", "-euo", "pipefail", "-c", command)
    assert run.returncode == 0, f"$ {command}\n{run.stdout}{run.stderr}"
    return run.stdout


def _check_commands(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the commands of a page in `folder`, compare what they print, and return their number."""
    commands = [pair for block in _blocks(page, "console") for pair in _commands(block)]
    monkeypatch.chdir(folder)
    checker = doctest.OutputChecker()
    for command, expected in commands:
        printed = _printed(folder, command)
        if expected:
            # rules are as long as the folder's name
            wanted, output = (re.sub("─+", "─", text) for text in (expected + "\n", printed))
            matches = checker.check_output(wanted, output, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
            assert matches, f"$ {command}\nprinted:\n{printed}\n{page} shows:\n{expected}"
    return len(commands)


@pytest.mark.parametrize("page", _PAGES_OF_COMMANDS)
def test_commands_run_and_print_the_output_on_the_page(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _check_commands(page, tmp_path, monkeypatch) >= _PAGES_OF_COMMANDS[page]


def test_pages_begin_with_commands_on_the_index_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(_PAGES_ON_THE_README) >= 10
    monkeypatch.chdir(tmp_path)
    for command, _ in _commands(_blocks("README.md", "console")[0]):
        _printed(tmp_path, command)
    for page in _PAGES_ON_THE_README:
        assert _check_commands(page, tmp_path, monkeypatch), page


def test_programs_run(tmp_path: Path) -> None:
    """All run one after the other in one process, each with its own names, because the imports take longer than the
    programs.
    """
    programs: dict[str, str] = {}
    for page in _PAGES_OF_PROGRAMS:
        of_page = _blocks(page, "python")
        assert of_page, page
        programs |= {f"{page}, program {number}": program for number, program in enumerate(of_page, 1)}
    for example, page in _EXAMPLES.items():
        assert f"](examples/{example})" in (_ROOT / page).read_text()
        programs[example] = (_ROOT / "docs/examples" / example).read_text()
    run = _run(tmp_path, sys.executable, "-c", _EACH_ALONE, *itertools.chain(*programs.items()))
    assert run.returncode == 0, run.stderr
    # an example that left its root behind would fail when it is run again: its storage is in memory
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith("tmp")}
    of_pages = "".join(program for name, program in programs.items() if name not in _EXAMPLES)
    assert {name for name in left if f'"{name}"' not in of_pages} == set()


def test_make_help_names_every_task_of_the_pages() -> None:
    shown = subprocess.run(["make", "help"], cwd=_ROOT, capture_output=True, text=True, check=True).stdout
    for page in ("README.md", "CONTRIBUTING.md", "docs/performance.md"):
        tasks = set(re.findall(r"(?:^|`)make ([a-z0-9-]+)", (_ROOT / page).read_text(), re.MULTILINE))
        assert tasks, page
        for task in tasks:
            assert re.search(rf"^{task}\s", shown, re.MULTILINE), f"{page}: the Makefile has no `make {task}`"
