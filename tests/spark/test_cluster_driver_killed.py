"""Drivers of builds and merges on a cluster of two executors, killed before and after each step.

The storage then has the old state or the new one. A step is a call by which the driver changes the storage (see
`cluster_driver`). An undisturbed run of each kind of job gives the steps, so the test covers a new step by itself.

Calls that only read don't change the storage. So the test kills a job before its first step and after each step. It
covers two kinds of builds: one creates the index, and one replaces a table. ``append`` differs from them only in the
objects that it does not remove. Each job is a thread of one driver, which is killed once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.integration.cli.command_lines import TOP, run_here
from tests.spark.cluster_driver import JOBS, TASKS
from tests.spark.commands import run_program
from tests.spark.entries import (
    BEGIN_MS,
    DAY_MS,
    check,
    check_stored,
    messages,
    put_files,
    states,
    sweep,
    total,
    write_parquet,
)
from tests.spark.in_process import build_here
from tiered_index.errors import NotAnIndex
from tiered_index.storage.opening import open_storage

_PATIENCE_S = 900.0
MASTER = "local-cluster[2,1,1024]"
COUNT = 240
BUILT = messages(COUNT, days=1)
OLDER = messages(150, days=1, seed=2)
WRITTEN = (messages(120, days=1, seed=3), messages(120, days=1, seed=4, begin_ms=BEGIN_MS + DAY_MS))


@dataclass(frozen=True)
class Kind:
    """A kind of job: the tables that it finds and leaves, by their entries, and the number of its records."""

    before: tuple[pa.Table, ...]
    after: tuple[pa.Table, ...]
    records: int


KINDS = {
    "build": Kind((), (BUILT,), 2),  # the first record creates the index
    "replace": Kind((OLDER,), (BUILT,), 1),
    "merge": Kind(WRITTEN, WRITTEN, 2),
    "pending": Kind((), WRITTEN, 2),
}


def origins(folder: Path) -> None:
    """Make the storages that the jobs begin with: a table, two days of a writer's files, and these as pending."""
    build_here(f"file://{folder}/replace", OLDER)
    for name, by in (("merge", "local"), ("pending", "spark")):
        uri, root = f"file://{folder}/{name}", folder / f"root-{name}"
        put_files(uri, root, *WRITTEN, items=1_000, max_late_s=10**10, compaction=by)


@pytest.mark.slow
def test_drivers_that_are_killed(tmp_path: Path) -> None:
    source = write_parquet(BUILT, tmp_path / "m.parquet", group_rows=COUNT // 4)
    origins(tmp_path / "origins")
    program = ("cluster_driver", MASTER, tmp_path, source)
    run_program(*program, "die", timeout=_PATIENCE_S, code=-signal.SIGKILL)
    steps = json.loads((tmp_path / "steps.json").read_text())
    assert list(steps) == list(JOBS) == list(KINDS)
    names = [f"{kind}-tasks" for kind in TASKS] + [
        f"{kind}-{number}" for kind in JOBS for number in range(len(steps[kind]) + 1)
    ]
    left = 0
    for name in names:
        kind, _, at = name.partition("-")
        taken = steps[kind][: int(at)] if at != "tasks" else []
        records = _records(taken)
        uri, job = f"file://{tmp_path}/left/{name}", KINDS[kind]
        _check_state(uri, kind, records)
        assert _records(steps[kind]) == job.records
        left += _unnamed(uri, records)
    assert left > len(names) / 4

    # the same commands again; before them, a job on a storage that accepts nothing fails, and changes nothing
    (gone, *lines), _ = run_program(*program, "again", timeout=_PATIENCE_S)
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
            # the second run replaced its own table
            assert states(f"file://{tmp_path}/left/{line['name']}").number == 2 + 1 + records
        else:
            assert line["done"] == {"build": COUNT, "merge": 2 - records, "pending": 2 - records}[kind]
        _check_in_the_end(f"file://{tmp_path}/left/{line['name']}", kind)


def _records(taken: list[list[str]]) -> int:
    """Return the number of log records among steps."""
    return sum(operation == "put_if_absent" and name.startswith("log/") for operation, name in taken)


def _unnamed(uri: str, records: int) -> bool:
    """Whether the storage has objects of tasks that no record names."""
    named = {} if not records and uri.rpartition("/")[2].startswith("build") else states(uri).objects
    with open_storage(uri) as storage:
        return any(info.name not in named for info in storage.list("data/"))


def _check_state(uri: str, kind: str, records: int) -> None:
    """Assert that the storage and its answers are as the first `records` of the job's records leave them."""
    job = KINDS[kind]
    if kind == "build" and not records:
        with pytest.raises(NotAnIndex):
            states(uri)
        return
    state = states(uri)
    # a merge of pending files publishes a day by each record
    tables = job.after[:records] if kind == "pending" else job.after if records == job.records else job.before
    assert total(uri) == sum(table.num_rows for table in tables)
    if kind == "merge":
        assert (len(state.files), len(state.tables)) == (2 - records, records)
    else:
        assert len(state.tables) == (records if kind == "pending" else bool(tables))
    if tables:
        check(uri, *tables, keys=2)


def _told(command: str, uri: str) -> dict[str, Any]:
    """Run a command on a storage; return its document."""
    outcome = run_here(*command.split(), "--storage", uri, "--json", "--quiet")
    assert outcome.code == 0, outcome
    return dict(outcome.document)


def _check_in_the_end(uri: str, kind: str) -> None:
    """Assert that the index is right, and that a sweep deletes old leftovers, but no young ones."""
    _check_state(uri, kind, KINDS[kind].records)
    check_stored(uri, *KINDS[kind].after)
    assert _told("verify --deep", uri)["status"] == "ok"
    with open_storage(uri) as storage:
        before = {info.name for info in storage.list()}
    young = _told("orphans --yes", uri)
    assert young["objects"] == []
    _age(Path(uri.removeprefix("file://")))
    old = _told("orphans --yes", uri)
    with open_storage(uri) as storage:
        assert before - {info.name for info in storage.list()} == {one["object"] for one in old["objects"]}
    assert sweep(uri) == 0
    _check_state(uri, kind, KINDS[kind].records)


def _age(folder: Path) -> None:
    """Make all objects of a storage two days old."""
    then_s = time.time() - 2 * DAY_MS / 1000
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, (then_s, then_s))


@pytest.mark.slow
def test_ctrl_c_ends_a_job_with_one_line(tmp_path: Path) -> None:
    """The driver's terminal used to show up to 96 lines of Java."""
    source, storage = write_parquet(messages(100_000, days=1), tmp_path / "m.parquet"), f"file://{tmp_path}/storage"
    log = "log = logging.getLogger('tiered_index.spark.metrics'); log.setLevel('INFO')"
    code = (
        f"import logging; {log}; log.addHandler(logging.StreamHandler()); from tiered_index.cli import main; main.run()"
    )
    program = [sys.executable, "-c", code, "spark", "build"]
    options = ["--source", source, "--set", "slots=64", "--storage", storage, "--master", "local[2]"]
    options += ["--conf", "spark.ui.enabled=false"]
    for moment in ("count: ", "build: "):
        command, environment = [*program, *options], os.environ | {"SPARK_LOCAL_IP": "127.0.0.1"}
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=TOP, env=environment, **pipes) as driver:
            assert driver.stderr is not None
            told = next(line for line in driver.stderr if line.startswith(moment))
            driver.send_signal(signal.SIGINT)
            out, errors = driver.communicate(timeout=_PATIENCE_S)
        steps = ("count: ", "build: ", "INFO ", "Spark ")
        lines = [line for line in errors.splitlines() if not line.startswith(steps)]
        assert (driver.returncode, out, lines) == (130, "", ["interrupted"]), told
    with pytest.raises(NotAnIndex):
        total(storage)
