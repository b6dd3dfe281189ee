"""DataFrames and streams are written to an index on two hosts, on which Spark runs one task twice: what Spark takes
counts once.

One attempt of two may commit; the other is denied, and counts as a failure of its task.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.spark.test_local_cluster import two_hosts

_ROOT = Path(__file__).parents[2]


def run(folder: Path, program: str, *arguments: str) -> dict[str, Any]:
    """Run a program of this folder on two hosts; return the line that it prints, and what Spark logged as `log`."""
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "SPARK_LOCAL_IP": "127.0.0.1"}
    with two_hosts(folder / "cluster") as master:
        command = [sys.executable, "-m", f"tests.spark.{program}", master, str(folder), "2000", *arguments]
        ended = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stderr[-3000:]
    [line] = [json.loads(text) for text in ended.stdout.splitlines() if text.startswith("{")]
    return {**line, "log": ended.stderr}


@pytest.mark.slow
def test_a_data_source_is_written_while_spark_speculates(tmp_path: Path) -> None:
    line = run(tmp_path, "speculating_program")
    assert line["twice"] and line["total"] == 2_000
    assert line["tables"] == 8  # of four tasks, each of which met both days; those of the other attempt are none


@pytest.mark.slow
def test_an_attempt_that_is_denied_its_commit_is_a_failure_that_a_task_may_have(tmp_path: Path) -> None:
    line = run(tmp_path, "denied_program", "4")
    assert line["failures"] >= 1 and "Commit denied for partition 3" in line["log"]
    assert (line["failed"], line["records"], line["total"]) == (False, 1, 4_000)
    assert line["tables"] == 10  # two were there; of four tasks, each of which met both days, one attempt each
    assert line["swept"] >= 2  # what the denied one uploaded
    assert "spark.task.maxFailures is" not in line["log"]


@pytest.mark.slow
def test_an_attempt_that_is_denied_its_commit_fails_a_write_whose_tasks_may_not_fail(tmp_path: Path) -> None:
    line = run(tmp_path, "denied_program", "1")
    assert line["failed"] and line["denied"]
    # though one attempt of each task had all uploaded; the index is as it was
    assert (line["records"], line["total"], line["tables"]) == (0, 2_000, 2)
    assert line["swept"] >= 2
    assert "spark.task.maxFailures is 1" in line["log"]


@pytest.mark.slow
def test_a_micro_batch_of_which_an_attempt_is_denied_its_commit_is_published_once(tmp_path: Path) -> None:
    line = run(tmp_path, "denied_streaming_program", "4")
    assert line["failures"] >= 1 and "Commit denied for partition 3" in line["log"]
    assert (line["first"], line["error"], line["last"]) == ("", "", "")
    before, disturbed, ended = line["begun"], line["disturbed"], line["ended"]
    assert (before["batches"], before["total"], before["swept"]) == ([0], 2_000, 0)
    # one record, of one attempt of each of the four tasks, each of which met both days; the denied one's tables are
    # swept
    assert disturbed["record"] == before["record"] + 1 and disturbed["tables"] == before["tables"] + 8
    assert (disturbed["batches"], disturbed["total"]) == ([1], 4_000)
    assert disturbed["swept"] >= 2
    assert (ended["record"], ended["batches"], ended["total"]) == (disturbed["record"] + 1, [2], 6_000)
    assert "spark.task.maxFailures is" not in line["log"]


@pytest.mark.slow
def test_a_query_that_failed_by_a_denied_commit_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    line = run(tmp_path, "denied_streaming_program", "1")
    assert line["error"].startswith("[STREAM_FAILED]") and "Commit denied for partition 3" in line["error"]
    before, disturbed, ended = line["begun"], line["disturbed"], line["ended"]
    assert (before["batches"], before["total"]) == ([0], 2_000)
    # though one attempt of each task had all uploaded
    assert {**disturbed, "swept": 0} == {**before, "swept": 0}
    # of the two attempts of one task; what the other tasks uploaded, the query itself took back
    assert disturbed["swept"] == 4
    assert (line["first"], line["last"]) == ("", "")
    # two records: the batch that failed, and the file that came after; the program compares the entries stored, one by
    # one
    assert (ended["record"], ended["batches"], ended["total"]) == (before["record"] + 2, [2], 6_000)
    assert ended["swept"] == 0
    # of two sessions, one of which speculated, and of four micro-batches
    assert line["log"].count("spark.task.maxFailures is 1") == 1
