"""Drivers of builds and merges, killed while tasks upload and while they publish: the old state or the new one; the next run goes on.

Killing the driver takes Spark with it. The next run is one program for all the storages that were left behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.spark.cluster_driver import MOMENTS
from tests.spark.entries import check, messages, states, sweep, total, write_parquet
from tests.spark.in_process import GENESIS
from tiered_index.clock import SystemClock
from tiered_index.service.storage_log import StorageLog
from tiered_index.storage.opening import open_storage

_ROOT = Path(__file__).parents[2]
_PATIENCE_S = 400.0
COUNT = 2_000
KILLED = -signal.SIGKILL


def driver(folder: Path, source: str, *jobs: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.spark.cluster_driver", "local[2]", str(folder), source, *jobs]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "SPARK_LOCAL_IP": "127.0.0.1"}
    return subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def uploads(uri: str) -> int:
    with open_storage(uri) as storage:
        return len(list(storage.list_uploads("data/")))


@pytest.mark.slow
def test_drivers_that_are_killed(tmp_path: Path) -> None:
    table = messages(COUNT, days=2)
    source = write_parquet(table, tmp_path / "m.parquet", group_rows=COUNT // 4)
    names = {moment: moment.replace(" ", "-") for moment in ("tasks", *MOMENTS)}
    for name in names.values():
        with open_storage(f"file://{tmp_path}/{name}") as storage:
            StorageLog(storage, SystemClock()).create(GENESIS)
    for moment, name in names.items():
        uri = f"file://{tmp_path}/{name}"
        with driver(tmp_path, source, f"{name}:build:{moment}") as process:
            try:
                if moment == "tasks":
                    _wait_for(tmp_path / f"{name}.held", process)
                    process.kill()
                _, error = process.communicate(timeout=_PATIENCE_S)
            finally:
                process.kill()
        assert process.returncode == KILLED, error[-3000:]
        published = moment == "before it hears of its record"
        assert total(uri) == (COUNT if published else 0)
        if moment in ("tasks", "with one upload complete"):
            assert uploads(uri) >= 1
        elif published:
            check(uri, table, keys=10)
    # the driver of a merge, too: of the build that came through
    name, merged = names["before it hears of its record"], f"file://{tmp_path}/{names['before it hears of its record']}"
    tables = len(states(merged).tables)
    with driver(tmp_path, source, f"{name}:merge:with one upload complete") as process:
        _, error = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == KILLED, error[-3000:]
    assert (total(merged), len(states(merged).tables)) == (COUNT, tables)
    check(merged, table, keys=10)

    # a storage that takes nothing more fails the job, and changes nothing; then all goes well
    again = [f"{names['tasks']}:build:gone", *(f"{name}:{job}:none" for name in names.values() for job in ("build", "merge"))]
    with driver(tmp_path, source, *again) as process:
        out, error = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 0, error[-3000:]
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [f"{line['name']}:{line['job']}" for line in lines] == [job.rpartition(":")[0] for job in again]
    gone = lines.pop(0)["done"]
    assert gone.startswith("StorageUnavailable") and "takes nothing more" in gone
    for moment, name in names.items():
        built, merges = [line["done"] for line in lines if line["name"] == name]
        if moment == "before it hears of its record":
            assert "has a table already" in built
        else:
            assert built == COUNT
        assert merges == 1
        uri = f"file://{tmp_path}/{name}"
        assert total(uri) == COUNT and len(states(uri).tables) == 1
        check(uri, table, keys=10)
        assert sweep(uri) >= tables
        check(uri, table, keys=5)


def _wait_for(mark: Path, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not mark.exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
