"""A kill at each call to the storage ends a process that publishes a build, or merges. Builds also race in processes.

Whatever the moment, the storage has the old state or the new one. A second run does the rest. A sweep deletes
leftovers, such as unfinished uploads.
"""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.spark.entries import check, messages, put_files, states, sweep, total
from tests.spark.in_process import planned, shards_of, written
from tests.spark.killed_program import REFUSED, WRITES
from tests.support.log_records import open_log
from tiered_index.clock import SystemClock
from tiered_index.service.jobs.orphans import find_orphans
from tiered_index.service.log.log import StorageLog
from tiered_index.storage.opening import open_storage

_ROOT = Path(__file__).parents[2]
TABLE = messages(260, days=2)
OTHER = messages(180, days=1, seed=2)
THIRD = messages(180, days=1, seed=3)


class Program:
    """The program that forks the processes to kill."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.spark.killed_program", str(folder / "answer")]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=_ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def __call__(self, **task: Any) -> Any:
        assert self._process.stdin and self._process.stdout and self._process.stderr
        print(json.dumps(task), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, self._process.stderr.read()
        return json.loads(line)

    def end(self) -> None:
        self._process.communicate("")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    made = Program(tmp_path_factory.mktemp("program"))
    yield made
    made.end()


def built(uri: str, table: pa.Table, path: Path, *, shards: int = 1) -> int:
    """Write the tables of a build as its tasks do, keep the driver's arguments in a file, and return the number of
    shards.
    """
    with open_storage(uri) as storage:
        log = StorageLog(storage, SystemClock())
        genesis = log.create(planned(table).genesis).genesis
        assert genesis is not None
        plan = replace(planned(table, shards=shards), genesis=genesis)
        finished = shards_of(written(table, plan, storage, now_ms=SystemClock().now_ms()))
    path.write_bytes(pickle.dumps(finished))
    return len(finished)


def test_a_driver_killed_at_each_call_of_publish(program: Program, tmp_path: Path) -> None:
    origin, first, second = tmp_path / "origin", tmp_path / "first", tmp_path / "second"
    old = built(f"file://{origin}", TABLE, first)
    done = program(job="publish", uri=f"file://{origin}", build=str(first), mode="error", nth=0, when="")
    assert done["killed"] is False
    new = built(f"file://{origin}", OTHER, second, shards=2)
    kept = TABLE.filter(pa.compute.greater_equal(TABLE["timestamp_ms"], _second_day()))
    whole = tmp_path / "whole"
    shutil.copytree(origin, whole)
    calls = program(job="publish", uri=f"file://{whole}", build=str(second), mode="replace", nth=0, when="")["calls"]
    # check both objects, read the log's two records and its last one again, append a record, write a checkpoint
    assert calls == [*["head"] * new, "list", *["get"] * 3, "put_if_absent", "put"] and new == 2
    published = 0
    for nth in range(1, len(calls) + 1):
        for when in ("before", "after"):
            storage = tmp_path / f"{nth}-{when}"
            shutil.copytree(origin, storage)
            uri = f"file://{storage}"
            ended = program(job="publish", uri=uri, build=str(second), mode="replace", nth=nth, when=when)
            assert ended == {"killed": True}, (nth, when, calls, ended)
            is_new = nth > (place := calls.index("put_if_absent") + 1) or (nth, when) == (place, "after")
            published += is_new
            assert total(uri) == (kept.num_rows + OTHER.num_rows if is_new else TABLE.num_rows), (nth, when)
            assert len(states(uri).objects) == (old - 1 + new if is_new else old)
            # young objects stay: a process may be about to publish them
            assert _young(uri) == 0
            assert sweep(uri) == (1 if is_new else new)
            check(uri, *((kept, OTHER) if is_new else (TABLE,)), keys=1)
            shutil.rmtree(storage)
    assert 0 < published < len(calls) * 2


def _second_day() -> int:
    return int(TABLE["timestamp_ms"][0].as_py()) // 86_400_000 * 86_400_000 + 86_400_000


def _young(uri: str) -> int:
    """Return the number of objects that are orphans now."""
    with open_storage(uri) as storage:
        found = find_orphans(storage, open_log(storage, SystemClock()), older_than_s=3600)
        return len(found.objects)


@pytest.mark.parametrize("moments", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_a_merge_killed_in_the_middle_and_run_again(program: Program, tmp_path: Path, moments: str) -> None:
    """Tables published before stay, the next run does the rest, and no step happens twice."""
    origin = tmp_path / "origin"
    uri = f"file://{origin}"
    put_files(uri, tmp_path / "root", TABLE, rows=70, max_late_s=10**10)
    files = len(states(uri).objects)
    whole = tmp_path / "whole"
    shutil.copytree(origin, whole)
    calls = program(job="merge", uri=f"file://{whole}", nth=0, when="")["calls"]
    jobs = calls.count("put_if_absent")
    assert calls.count("write") >= 2 and jobs >= 1
    if moments == "all":
        struck = [(nth, when) for nth, call in enumerate(calls, 1) if call in WRITES for when in ("before", "after")]
    else:
        part, record = calls.index("write") + 1, calls.index("put_if_absent") + 1
        struck = [(part, "after"), (record - 2, "before"), (record, "before"), (record, "after")]
    for nth, when in struck:
        storage = tmp_path / f"{nth}-{when}"
        shutil.copytree(origin, storage)
        uri = f"file://{storage}"
        assert program(job="merge", uri=uri, nth=nth, when=when) == {"killed": True}
        assert total(uri) == TABLE.num_rows
        check(uri, TABLE, keys=2)
        log_before = states(uri).number
        done = program(job="merge", uri=uri, nth=0, when="")["calls"]
        assert done.count("put_if_absent") == jobs - (log_before - states(f"file://{origin}").number)
        state = states(uri)
        assert not state.files and total(uri) == TABLE.num_rows
        assert program(job="merge", uri=uri, nth=0, when="")["calls"].count("put_if_absent") == 0
        assert _young(uri) == 0
        assert sweep(uri) >= files
        check(uri, TABLE, keys=2)
        shutil.rmtree(storage)


@pytest.mark.parametrize(("mode", "kind"), [("error", "file"), ("append", "sqlite"), ("replace", "file")])
def test_builds_of_one_window_at_once_by_processes(program: Program, tmp_path: Path, mode: str, kind: str) -> None:
    """Processes publish three builds at the same moment; two of them have the same rows."""
    rows = (OTHER, THIRD, THIRD)
    for number in range(3):
        uri = {"file": f"file://{tmp_path}/{number}", "sqlite": f"sqlite://{tmp_path}/{number}.db"}[kind]
        paths = [tmp_path / f"{number}-{n}" for n in range(3)]
        shards = [built(uri, table, path) for table, path in zip(rows, paths, strict=True)]
        assert shards == [1, 1, 1]
        outcomes = program(job="race", uri=uri, builds=list(map(str, paths)), mode=mode)["outcomes"]
        state = states(uri)
        if mode == "error":
            assert sorted(outcomes) == [0, REFUSED, REFUSED] and len(state.objects) == 1
            check(uri, rows[outcomes.index(0)], keys=5)
        elif mode == "append":
            assert outcomes == [0, 0, 0]
            assert total(uri) == 3 * 180 and len(state.objects) == 3
            check(uri, OTHER, THIRD, keys=5)  # a lookup returns an entry that is there twice only once
        else:
            # each build replaced the table of the one before: only the last one's table is there
            assert outcomes == [0, 0, 0] and total(uri) == 180 and len(state.objects) == 1
            (name,) = state.objects
            names = [{shard.stored.name for shard in pickle.loads(path.read_bytes())} for path in paths]
            (last,) = (table for table, made in zip(rows, names, strict=True) if name in made)
            check(uri, last, keys=5)
        assert sweep(uri) == {"error": 2, "append": 0, "replace": 2}[mode]
