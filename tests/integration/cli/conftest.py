"""The two ways to run a command line, and a small index made by one."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.cli.command_lines import run_here

BEGIN_MS = 1_700_000_000_000
MESSAGES = 3000
KEYS = 40


def message(number):
    """Return message `number`: its first key is one of 40, its second its own."""
    return {
        "topic": "orders" if number % 3 else "payments",
        "queue_id": number % 4,
        "keys": [f"k{number % KEYS}", f"own-{number}"],
        "offset": number,
        "size": 100 + number % 50,
        "timestamp_ms": BEGIN_MS + number * 1000,
    }


def expected_offsets(topic, key, stop=MESSAGES):
    """Return the right answer of a lookup, in answer order."""
    return [n for n in reversed(range(stop)) if key in message(n)["keys"] and message(n)["topic"] == topic]


def write_source(path, start=0, stop=MESSAGES):
    with path.open("a") as handle:
        for number in range(start, stop):
            handle.write(json.dumps(message(number)) + "\n")
    return path


@dataclass(frozen=True)
class Made:
    """An index: its root, its storage and its source file."""

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


@pytest.fixture(name="run_here", scope="session")
def run_here_():
    return run_here


@pytest.fixture
def small_index(tmp_path):
    """Options of `ingest` for an index of small files, and a document as its output."""
    where = ("--root", tmp_path / "root", "--storage", f"file://{tmp_path}/objects")
    return *where, "--slots", 50, "--items", 2_000, "--json"


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    """An index whose first part is uploaded and whose last 100 messages are unsealed."""
    made = Made(tmp_path_factory.mktemp("index"))
    write_source(made.source, 0, MESSAGES - 100)
    where = ("ingest", made.source, "--root", made.root)
    first = run_here(*where, "--storage", made.uri, "--slots", 64, "--items", 1500, "--wait")
    assert first.code == 0, first.err
    write_source(made.source, MESSAGES - 100, MESSAGES)
    second = run_here(*where, "--json")
    assert second.code == 0, second.err
    assert second.document["messages"] == 100
    return made


@pytest.fixture
def damaged(original, tmp_path):
    """A copy of the index that a test may change; its root's marker names the copy's storage."""
    made = Made(tmp_path / "copy")
    shutil.copytree(original.folder, made.folder)
    marker = made.root / "tiered_index.json"
    marker.write_text(marker.read_text().replace(original.uri, made.uri))
    return made
