"""A second process that wants to write the same root is refused and told who has it; when the first one is killed it
gets in at once.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import tests
from tests.stress.writer import FLUSHED, put
from tiered_index import IndexReader, IndexService
from tiered_index.errors import LockHeld

REPOSITORY = Path(tests.__file__).parent.parent
PATIENCE_S = 60
HELD = 5


@contextmanager
def writer(root: Path, store: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the root open; it is gone when the block ends."""
    command = [sys.executable, "-m", "tests.stress.writer", str(root), f"file://{store}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "flushed\n"
            yield process
        finally:
            process.kill()
            process.wait(PATIENCE_S)


def ingest(folder: Path) -> tuple[int, dict]:
    """Run `tiered-index ingest` on the root; return its exit code and the error that it reports."""
    source = folder / "more.ndjson"
    line = {"topic": "t", "queue_id": 0, "keys": ["k"], "offset": 100, "size": 1, "timestamp_ms": 1_700_000_000_000}
    source.write_text(json.dumps(line) + "\n")
    command = [sys.executable, "-m", "tiered_index.cli", "ingest", source, "--root", folder / "root", "--json"]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=PATIENCE_S, cwd=REPOSITORY, check=False
    )
    return done.returncode, json.loads(done.stderr.splitlines()[-1])["error"] if done.returncode else {}


def offsets(index) -> list[int]:
    return [item.offset for item in index.query("t", "k")]


@pytest.fixture
def open_here(tmp_path):
    """Open the root in this process."""
    return lambda: IndexService.open(
        root=tmp_path / "root", storage=f"file://{tmp_path}/store", background=False, query_threads=2
    )


def test_a_second_process_is_refused_and_reading_is_not(open_here, tmp_path):
    with writer(tmp_path / "root", tmp_path / "store") as first:
        for _ in range(3):
            with pytest.raises(LockHeld) as held:
                open_here()
            assert (held.value.pid, held.value.host) == (first.pid, socket.gethostname())
        code, error = ingest(tmp_path)
        assert code == HELD
        assert error["type"] == "LockHeld"
        assert (error["pid"], error["host"]) == (first.pid, socket.gethostname())
        with IndexReader.open(root=tmp_path / "root", query_threads=2) as reader:
            assert offsets(reader) == list(reversed(range(FLUSHED)))
        _, errors = first.communicate("end\n", timeout=PATIENCE_S)
        assert first.returncode == 0, errors
    with open_here() as service:
        assert offsets(service) == list(reversed(range(FLUSHED)))


def test_when_the_first_writer_is_killed_the_second_gets_in_at_once(open_here, tmp_path):
    for turn in range(2):
        with writer(tmp_path / "root", tmp_path / "store") as first:
            with pytest.raises(LockHeld):
                open_here()
            first.send_signal(signal.SIGKILL)
            assert first.wait(PATIENCE_S) == -signal.SIGKILL
            # the same root takes the lease over too, though that has not expired
            with open_here() as service:
                expected = FLUSHED + 3 * turn
                assert offsets(service) == list(reversed(range(expected)))
                put(service, expected, expected + 3)
                service.seal()
                service.run_lifecycle()
                assert len(service.log_state.objects) == turn + 1
    assert ingest(tmp_path)[0] == 0
    with open_here() as service:
        assert offsets(service)[-1] == 0
        assert 100 in offsets(service)


def test_a_process_that_was_refused_leaves_the_root_as_it_was(open_here, tmp_path):
    with writer(tmp_path / "root", tmp_path / "store") as first:
        before = {path: path.stat().st_size for path in (tmp_path / "root").rglob("*")}
        for _ in range(3):
            with pytest.raises(LockHeld):
                open_here()
        assert ingest(tmp_path)[0] == HELD
        after = {path: path.stat().st_size for path in (tmp_path / "root").rglob("*")}
        assert after == before
        first.communicate("end\n", timeout=PATIENCE_S)
        assert first.returncode == 0
