"""A query from files to an index, with lookups meanwhile. It fails, is killed and starts again; no entry is lost
or doubled.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.integration.cli.command_lines import TOP
from tests.spark.commands import program_of
from tests.spark.entries import BEGIN_MS, states, sweep, total
from tests.spark.streaming_program import ENTRIES, start
from tests.support.model import Answer, ReferenceModel
from tiered_index import IndexReader
from tiered_index.errors import InvalidArgument, NotAnIndex
from tiered_index.spark import register
from tiered_index.spark.failures import typed_errors

_PATIENCE_S = 300.0
_SCHEMA = pa.schema(
    {
        "topic": pa.string(),
        "queue_id": pa.int32(),
        "keys": pa.list_(pa.string()),
        "offset": pa.int64(),
        "size": pa.int32(),
        "timestamp_ms": pa.int64(),
    }
)


class Messages:
    """Writes files of messages; knows the right answers of their index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = 0
        self.model = ReferenceModel()
        self.entries = 0

    def fill(self, count: int, files: int = 1) -> None:
        self._folder.mkdir(exist_ok=True)
        for _ in range(files):
            rows = []
            for _ in range(count // files):
                keys, number = [f"k-{self.entries % 9}", "all"], self.entries // 2
                rows.append(("orders", 0, keys, number, 90, BEGIN_MS + number * 1000))
                for key in keys:
                    self.model.put("orders", 0, key, number, 90, BEGIN_MS + number * 1000)
                self.entries += 2
            columns = dict(zip(_SCHEMA.names, map(list, zip(*rows, strict=True)), strict=True))
            # Spark leaves hidden names out
            hidden = self._folder / f".{self._files}.parquet"
            pq.write_table(pa.table(columns, _SCHEMA), hidden)
            hidden.rename(self._folder / f"{self._files}.parquet")
            self._files += 1

    def check(self, uri: str) -> None:
        assert total(uri) == self.entries
        with IndexReader.open(uri) as reader:
            for key in ("all", *(f"k-{n}" for n in range(9))):
                answer = reader.query("orders", key, max_count=100_000)
                assert [Answer.of(item) for item in answer.items] == self.model.query("orders", key, max_count=None)


@pytest.mark.long
def test_a_checkpoint_that_is_one_batch_older_than_the_index(spark: Any, tmp_path: Path) -> None:
    """Spark plans its last batch again, with the files that came meanwhile: the same number, more rows."""
    register(spark)
    messages, uri, checkpoint = Messages(tmp_path / "source"), f"file://{tmp_path}/index", tmp_path / "checkpoint"

    def run() -> None:
        with typed_errors("streaming"):
            files = spark.readStream.schema(ENTRIES).parquet(str(tmp_path / "source"))
            start(files, tmp_path, endless=False).awaitTermination()

    def restore() -> None:
        for kind in ("offsets", "commits", "sources/0"):
            for name in ("0", ".0.crc"):
                (checkpoint / kind / name).unlink()

    messages.fill(100)
    run()
    before = states(uri)
    restore()
    run()
    # no file came: the batch is the same, and is done
    assert (checkpoint / "commits" / "0").exists() and states(uri) == before
    restore()
    messages.fill(50)
    with pytest.raises(InvalidArgument, match=r"micro-batch 0 .*200 entries.*checkpoint"):
        run()
    assert states(uri) == before and sweep(uri) == 0
    shutil.rmtree(checkpoint)
    run()
    assert total(uri) == 200 + 300
    with IndexReader.open(uri) as reader:
        answer = reader.query("orders", "all", max_count=1_000)
        assert [Answer.of(item) for item in answer.items] == messages.model.query("orders", "all", max_count=None)


@pytest.mark.slow
def test_a_query_that_is_killed_while_it_is_looked_up_in(tmp_path: Path) -> None:
    messages, uri = Messages(tmp_path / "source"), f"file://{tmp_path}/index"
    messages.fill(600, files=12)
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
            messages.fill(50, files=2)
            if round_number == 1:  # the kill most probably comes during a batch
                objects = len(states(uri).objects)
                while len(states(uri).objects) == objects and time.monotonic() < end:
                    time.sleep(0.01)
        assert process.returncode == -signal.SIGKILL
    assert mark.exists()  # a task failed, and ran again
    with _program(tmp_path, "UP-TO-NOW") as process:
        assert process.wait(_PATIENCE_S) == 0
    messages.check(uri)
    sweep(uri)
    messages.check(uri)
    assert len(states(uri).positions) == 1


def _found(uri: str, before: int) -> int:
    """Return the number of entries that a reader finds. Each is there once, and there are no fewer than before."""
    try:
        with IndexReader.open(uri) as reader:
            answer = reader.query("orders", "all", max_count=100_000)
            stored = sum(stored.count for stored in reader.log_state.objects.values())
    except NotAnIndex:
        return 0
    assert answer.status == "complete" and stored == 2 * len(answer.items) >= 2 * before
    assert max(Counter(item.offset for item in answer.items).values(), default=1) == 1
    return len(answer.items)


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
