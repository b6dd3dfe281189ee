"""A query from files to an index, with lookups meanwhile. It fails, is killed and starts again; no entry is lost
or doubled.
"""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.command_lines import TOP
from tests.spark.commands import program_of
from tests.spark.entries import check, check_stored, messages, states, sweep, write_parquet
from tiered_index import IndexReader
from tiered_index.errors import NotAnIndex

_PATIENCE_S = 300.0


class Source:
    """Writes files of messages, one of them in a batch of the query."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.tables: list[Any] = []
        folder.mkdir()

    def fill(self, files: int) -> None:
        for _ in range(files):
            number = len(self.tables)
            self.tables.append(messages(50, days=1, seed=number + 1, hot=0.8))
            # Spark leaves hidden names out
            write_parquet(self.tables[-1], self._folder / f".{number}.parquet")
            (self._folder / f".{number}.parquet").rename(self._folder / f"{number}.parquet")


@pytest.mark.slow
def test_a_query_that_is_killed_while_it_is_looked_up_in(tmp_path: Path) -> None:
    source, uri = Source(tmp_path / "source"), f"file://{tmp_path}/index"
    source.fill(12)
    mark = tmp_path / "mark"
    seen = 0
    for round_number in range(3):
        with _program(tmp_path, "ENDLESS", str(mark)) as process:
            least = seen + 1
            end = time.monotonic() + _PATIENCE_S
            while seen < least:
                assert process.poll() is None and time.monotonic() < end
                seen = max(seen, _found(uri, seen))
                time.sleep(0.05)
            source.fill(2)
            if round_number == 1:  # the kill most probably comes during a batch
                objects = len(states(uri).objects)
                while len(states(uri).objects) == objects and time.monotonic() < end:
                    time.sleep(0.01)
        assert process.returncode == -signal.SIGKILL
    assert mark.exists()  # a task failed, and ran again
    with _program(tmp_path, "UP-TO-NOW") as process:
        assert process.wait(_PATIENCE_S) == 0
    sweep(uri)
    check_stored(uri, *source.tables)
    check(uri, *source.tables, keys=5)
    assert len(states(uri).positions) == 1


def _found(uri: str, before: int) -> int:
    """Return the number of entries of a key that a reader finds: each once, and no fewer than before."""
    try:
        with IndexReader.open(uri) as reader:
            answer = reader.query("orders", "key-0", max_count=100_000)
    except NotAnIndex:
        return 0
    offsets = [item.offset for item in answer.items]
    assert answer.status == "complete" and len(set(offsets)) == len(offsets) >= before
    return len(offsets)


@contextlib.contextmanager
def _program(folder: Path, how: str, *mark: str) -> Any:
    """Run the program in a process group, which is killed at the end."""
    command, environment = program_of("streaming_program", "local[2,2]", folder, how, *mark)
    quiet: Any = {"start_new_session": True, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=TOP, env=environment, **quiet) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
