"""Drivers of builds, merges and compactions on a cluster of two executors, killed before and after each step: the old
state or the new one.

A step is a call by which the driver changes the storage; they are those that each kind of job takes when nothing
disturbs it (see `cluster_driver`), so that a new one is covered by itself. Before and after a call that only reads, the
storage is the same, so a job is killed before its first step, and after each: after one is before the next. Two kinds
of builds do, one that creates the index and one that replaces a table: ``append`` differs from them by what it does not
remove. Each job is a thread of one driver, which is killed once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.spark.cluster_driver import JOBS, TASKS
from tests.spark.entries import BEGIN_MS, DAY_MS, check, check_stored, messages, states, sweep, total, write_parquet
from tests.spark.in_process import build_here
from tiered_index import IndexService
from tiered_index.cli.main import run
from tiered_index.errors import NotAnIndex
from tiered_index.storage.opening import open_storage

_ROOT = Path(__file__).parents[2]
_PATIENCE_S = 900.0
MASTER = "local-cluster[2,1,1024]"
COUNT = 240
BUILT = messages(COUNT, days=1)
OLDER = messages(150, days=1, seed=2)
WRITTEN = (messages(120, days=1, seed=3), messages(120, days=1, seed=4, begin_ms=BEGIN_MS + DAY_MS))
Tell = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Kind:
    """What a kind of job finds and leaves: tables with these entries, and how many records it appends."""

    before: tuple[pa.Table, ...]
    after: tuple[pa.Table, ...]
    records: int


KINDS = {
    "build": Kind((), (BUILT,), 2),  # the first record creates the index
    "replace": Kind((OLDER,), (BUILT,), 1),
    "merge": Kind(WRITTEN, WRITTEN, 2),
    "compact": Kind((), WRITTEN, 1),
}


def origins(folder: Path) -> None:
    """Make what the jobs begin with: a table, two days of a writer's files, and the same files staged."""
    build_here(f"file://{folder}/replace", OLDER)
    for name, by in (("merge", "local"), ("compact", "spark")):
        with IndexService.open(
            root=folder / f"root-{name}",
            storage=f"file://{folder}/{name}",
            slots=64,
            items=1_000,
            background=False,
            compaction=by,
            max_late_s=10**10,
        ) as index:
            for table in WRITTEN:
                index.put_batch(table)
                index.flush()
                index.seal()
            index.run_lifecycle()


def driver(folder: Path, source: str, part: str) -> tuple[int, str, str]:
    """Run the program to its end; return its exit code, and what it said."""
    command = [sys.executable, "-m", "tests.spark.cluster_driver", MASTER, str(folder), source, part]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "SPARK_LOCAL_IP": "127.0.0.1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            # ends when Java and the executors are gone, too, which have the same pipes
            out, error = process.communicate(timeout=_PATIENCE_S)
        finally:
            process.kill()
    return process.returncode, out, error


@pytest.fixture
def tell(capfd: pytest.CaptureFixture[str]) -> Tell:
    """Return what runs a command on a storage and gives its document."""

    def told(*arguments: str, storage: str) -> dict[str, Any]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            run([*arguments, "--storage", storage, "--json", "--quiet"])
        captured = capfd.readouterr()
        assert ended.value.code == 0, captured
        return dict(json.loads(captured.out))

    return told


@pytest.mark.slow
def test_drivers_that_are_killed(tmp_path: Path, tell: Tell) -> None:
    source = write_parquet(BUILT, tmp_path / "m.parquet", group_rows=COUNT // 4)
    origins(tmp_path / "origins")
    code, out, error = driver(tmp_path, source, "die")
    assert code == -signal.SIGKILL, (out, error[-3000:])
    steps = {
        kind: [tuple(step) for step in taken]
        for kind, taken in json.loads((tmp_path / "steps.json").read_text()).items()
    }
    assert list(steps) == list(JOBS) == list(KINDS)
    names = [f"{kind}-tasks" for kind in TASKS] + [
        f"{kind}-{number}" for kind in JOBS for number in range(len(steps[kind]) + 1)
    ]
    uploading = 0
    for name in names:
        kind, _, at = name.partition("-")
        taken = steps[kind][: int(at)] if at != "tasks" else []
        records = _records(taken)
        uri, job = f"file://{tmp_path}/left/{name}", KINDS[kind]
        _check_state(uri, kind, records)
        assert _records(steps[kind]) == job.records
        unfinished = _uploads(uri)
        uploading += unfinished
        assert unfinished >= (at == "tasks")
    assert uploading > len(names) / 4

    # the same commands again; before, one whose storage takes nothing more fails, and changes nothing
    code, out, error = driver(tmp_path, source, "again")
    assert code == 0, error[-3000:]
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    gone = lines.pop(0)
    assert gone["done"].startswith("StorageUnavailable") and "takes nothing more" in gone["done"]
    assert [line["name"] for line in lines] == names and gone["name"] == names[0]
    for line in lines:
        kind, _, at = line["name"].partition("-")
        records = _records(steps[kind][: int(at)]) if at != "tasks" else 0
        job = KINDS[kind]
        if kind == "build" and records == job.records:
            assert "has a table already" in line["done"]
        elif kind == "replace":
            assert line["done"] == COUNT
            # the second time it replaced itself
            assert states(f"file://{tmp_path}/left/{line['name']}").number == 2 + 1 + records
        else:
            assert line["done"] == {"build": COUNT, "merge": 2 - records, "compact": 2 * (1 - records)}[kind]
        _check_in_the_end(f"file://{tmp_path}/left/{line['name']}", kind, tell)


def _records(taken: list[tuple[str, ...]]) -> int:
    """Return how many log records there are among steps."""
    return sum(operation == "put_if_absent" and name.startswith("log/") for operation, name in taken)


def _uploads(uri: str) -> int:
    with open_storage(uri) as storage:
        return len(list(storage.list_uploads("data/")))


def _check_state(uri: str, kind: str, records: int) -> None:
    """Assert that the storage is as `records` of the job's records leave it, and answers so."""
    job = KINDS[kind]
    if kind == "build" and not records:
        with pytest.raises(NotAnIndex):
            states(uri)
        return
    state = states(uri)
    tables = job.after if records == job.records else job.before
    assert total(uri) == sum(table.num_rows for table in tables)
    if kind == "merge":
        assert (len(state.files), len(state.tables)) == (2 - records, records)
    else:
        assert len(state.tables if kind != "compact" else state.files) == {"build": 1, "replace": 1, "compact": 2}[
            kind
        ] * bool(tables)
    if tables:
        check(uri, *tables, keys=2)


def _check_in_the_end(uri: str, kind: str, tell: Tell) -> None:
    """Assert that all is as it should be, that nothing young is swept, and everything that is old."""
    _check_state(uri, kind, KINDS[kind].records)
    check_stored(uri, *KINDS[kind].after)
    assert tell("verify", "--deep", storage=uri)["status"] == "ok"
    with open_storage(uri) as storage:
        before = {info.name for info in storage.list()}
    young = tell("orphans", "--yes", storage=uri)
    assert young["objects"] == young["uploads"] == []
    _age(Path(uri.removeprefix("file://")))
    old = tell("orphans", "--yes", storage=uri)
    with open_storage(uri) as storage:
        assert before - {info.name for info in storage.list()} == {one["object"] for one in old["objects"]}
    assert sweep(uri) == 0
    _check_state(uri, kind, KINDS[kind].records)


def _age(folder: Path) -> None:
    """Let everything in a storage be two days old."""
    then_s = time.time() - 2 * DAY_MS / 1000
    for path in folder.rglob("*"):
        if path.name == "upload.json":
            path.write_text(json.dumps({**json.loads(path.read_text()), "started_ms": round(then_s * 1000)}))
        if path.is_file():
            os.utime(path, (then_s, then_s))


@pytest.mark.slow
def test_ctrl_c_ends_a_job_with_one_line(tmp_path: Path) -> None:
    """The driver's terminal showed up to 96 lines of Java."""
    source, storage = write_parquet(messages(100_000, days=1), tmp_path / "m.parquet"), f"file://{tmp_path}/storage"
    # a line of progress for each task: there are too few for one every few seconds
    code = "from tiered_index.cli import main, progress; progress._LINE_INTERVAL_S = 0.0; main.run()"
    program = [sys.executable, "-c", code, "spark", "build"]
    options = ["--source", source, "--set", "slots=64", "--storage", storage, "--master", "local[2]"]
    for moment in ("count: ", "build: "):
        with subprocess.Popen(
            [*program, *options, "--conf", "spark.ui.enabled=false"],
            cwd=_ROOT,
            env=os.environ | {"SPARK_LOCAL_IP": "127.0.0.1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as driver:
            assert driver.stderr is not None
            told = next(line for line in driver.stderr if line.startswith(moment))
            driver.send_signal(signal.SIGINT)
            out, errors = driver.communicate(timeout=_PATIENCE_S)
        lines = [line for line in errors.splitlines() if " tasks" not in line]
        assert (driver.returncode, out, lines) == (130, "", ["interrupted"]), told
    with pytest.raises(NotAnIndex):
        total(storage)
