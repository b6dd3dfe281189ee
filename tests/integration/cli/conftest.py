"""The real console script in a process of its own, and a small index made by it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tiered_index.cli.main import app

SCRIPT = Path(sys.executable).with_name("tiered-index")
BEGIN_MS = 1_700_000_000_000
MESSAGES = 3000
KEYS = 40


@dataclass(frozen=True)
class Outcome:
    """One run: exit code and both streams."""

    code: int
    out: str
    err: str

    @property
    def document(self):
        """The JSON document on stdout; fails where stdout is anything else."""
        return json.loads(self.out)

    @property
    def records(self):
        """The NDJSON on stdout."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self):
        """The error document on stderr."""
        return json.loads(self.err.splitlines()[-1])["error"]


def clean_environment(**more):
    return {name: value for name, value in os.environ.items() if not name.startswith(("TIERED_INDEX_", "AWS_"))} | more


def run_script(*arguments, environment=None, timeout=60):
    done = subprocess.run(
        [str(SCRIPT), *map(str, arguments)], capture_output=True, text=True, timeout=timeout, env=clean_environment(**(environment or {})),
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    return Outcome(done.returncode, done.stdout, done.stderr)


def message(number):
    """Return message `number`: its first key is one of 40, its second its own."""
    return {
        "topic": "orders" if number % 3 else "payments", "queue_id": number % 4, "keys": [f"k{number % KEYS}", f"own-{number}"],
        "offset": number, "size": 100 + number % 50, "timestamp_ms": BEGIN_MS + number * 1000,
    }  # fmt: skip


def expected_offsets(topic, key, stop=MESSAGES):
    """Return what a look-up must find, in answer order."""
    return [n for n in reversed(range(stop)) if key in message(n)["keys"] and message(n)["topic"] == topic]


def write_source(path, start=0, stop=MESSAGES):
    with path.open("a") as handle:
        for number in range(start, stop):
            handle.write(json.dumps(message(number)) + "\n")
    return path


@dataclass(frozen=True)
class Made:
    """An index: its root, its storage and the file it was made of."""

    folder: Path

    @property
    def root(self):
        return self.folder / "root"

    @property
    def store(self):
        return self.folder / "store"

    @property
    def uri(self):
        return f"file://{self.store}"

    @property
    def source(self):
        return self.folder / "messages.ndjson"

    def files(self, state):
        return sorted((self.root / state).glob("*.index"))

    def objects(self, prefix="data"):
        return sorted(path for path in (self.store / f"{prefix}%").rglob("*") if path.is_file())


@pytest.fixture(scope="session")
def script():
    return run_script


@pytest.fixture
def in_process():
    """Return a function that runs a command line in this process, for what ends before any work; it returns the exit code."""
    logger = logging.getLogger("tiered_index")
    before = logger.level, logger.propagate, list(logger.handlers)
    yield lambda *arguments: CliRunner().invoke(app, list(arguments)).exit_code
    logger.level, logger.propagate, logger.handlers[:] = before


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    """An index whose first part is uploaded and whose last 100 messages are unsealed."""
    made = Made(tmp_path_factory.mktemp("index"))
    write_source(made.source, 0, MESSAGES - 100)
    first = run_script("ingest", made.source, "--root", made.root, "--storage", made.uri, "--slots", 64, "--items", 1500, "--wait")
    assert first.code == 0, first.err
    write_source(made.source, MESSAGES - 100, MESSAGES)
    second = run_script("ingest", made.source, "--root", made.root, "--json")
    assert second.code == 0, second.err
    assert second.document["messages"] == 100
    return made


@pytest.fixture
def damaged(original, tmp_path):
    """A copy of the index, to be changed; its root's marker names the copy's storage."""
    made = Made(tmp_path / "copy")
    shutil.copytree(original.folder, made.folder)
    marker = made.root / "tiered_index.json"
    marker.write_text(marker.read_text().replace(original.uri, made.uri))
    return made
