"""What every command has to load before it begins, and where its streams lead."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tiered_index import IndexService

HEAVY = ("pandas", "boto3", "pyspark", "pyarrow.dataset", "fastapi")


def test_the_command_line_loads_nothing_that_few_commands_need():
    script = f"import sys, tiered_index.cli.main; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_an_interrupt_while_it_loads_is_one_line():
    script = (
        "import signal, sys\n"
        "class Hook:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'numpy':\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Hook())\n"
        "from tiered_index.cli.__main__ import run\n"
        "run()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_public_names_load_when_they_are_used():
    script = (
        "import sys, tiered_index\n"
        "assert 'numpy' not in sys.modules\n"
        "assert tiered_index.errors.DiskFull.exit_code == 7\n"
        "assert all(getattr(tiered_index, name) is not None for name in tiered_index.__all__)\n"
        "assert dir(tiered_index) == sorted(tiered_index.__all__)\n"
        "assert not any(hasattr(tiered_index, name) for name in ('nothing', 'a.b', 'spark'))\n"
        "from tiered_index import *\n"
        "assert IndexService.__name__ == 'IndexService' and hash_key('t', 'k') >= 0\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("streams") / "root"
    with IndexService.open(root=path, storage=f"file://{path.parent}/store", slots=16, items=60) as index:
        index.put("t", 0, "k", 1, 1, 1_700_000_000_000)
    return path


@pytest.mark.parametrize(
    ("redirect", "arguments", "code", "word"),
    [
        (">&-", "query t k", 0, ""),
        ("2>&-", "query t k", 0, None),
        ("2>&-", "query t", 2, None),
        ("2>/dev/full", "query t k", 0, None),
        ("2>/dev/full", "query t", 2, None),
        (">/dev/full", "query t k", 7, "tiered-index: stdout can't be written: No space left on device\n"),
        (">/dev/full", "query t k --json", 7, '"exit_code": 7'),
        (">/dev/full", "--help", 7, "can't be written"),
        (">/dev/full", "--version", 7, "tiered-index: stdout can't be written: No space left on device\n"),
    ],
)
def test_streams_that_are_closed_or_full(root, redirect, arguments, code, word):
    place = f"--root {root}" if "query" in arguments else ""
    command = f"{sys.executable} -m tiered_index.cli {arguments} {place} {redirect}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert word is None or (word in done.stderr if word else not done.stderr)
    assert ("complete" in done.stdout) == (redirect.startswith("2") and code == 0)
