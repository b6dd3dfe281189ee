"""Builds, merges and erasures on separate executors that fail: each result counts once, and a sweep deletes leftovers.
Reads check every entry.

Each program runs in its own process, since a process can have only one Spark session. Speculation needs executors on
different hosts, since Spark never runs two attempts on one host. So it runs on a cluster of two workers on loopback
addresses. There the tests also write DataFrames and streams. Of two attempts of a task one may commit. Spark denies the
other, and counts it as failed.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest

from tests.spark.commands import run_program


def run(master: str, folder: Path, entries: int, *troubles: str) -> list[dict[str, Any]]:
    lines, _ = run_program("cluster_program", master, folder, entries, *troubles)
    jobs = dict.fromkeys(troubles, ("build", "merge", "erase"))
    jobs |= {"none": ("build", "read", "merge", "erase"), "changed": ("build",)}
    assert [(line["trouble"], line["job"]) for line in lines] == [
        (trouble, job) for trouble in troubles for job in jobs[trouble]
    ]
    for line in lines:
        assert line["job"] == "read" or line["trouble"] == "changed" or line["objects"] == line["shards"]
    return lines


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """The results of one session: undisturbed, then with tasks that fail, then with a killed worker."""
    return run("local-cluster[2,1,1024]", tmp_path_factory.mktemp("session"), 3_000, "none", "fail", "worker")


@pytest.mark.slow
def test_failing_tasks_and_a_killed_executor(tmp_path):
    built, merged, erased = run("local-cluster[2,1,1024]", tmp_path, 3_000, "executor")
    # two tasks failed, then a third task killed its executor
    assert built["struck"] == merged["struck"] == erased["struck"] == ["a", "b", "killed"]
    # leftovers of the dead executor, and objects that the merge replaced
    assert built["swept"] >= 1 and merged["swept"] > built["objects"]


@pytest.mark.slow
def test_killed_workers_failing_tasks_and_nothing_at_all(session):
    quiet, failed, killed = (line for line in session if line["job"] == "build")
    assert (quiet["struck"], quiet["swept"]) == ([], 0)
    # an object whose response was lost may exist: no record names it, and it is deleted by its age
    assert failed["struck"] == ["a", "b"] and failed["swept"] <= 2
    assert killed["struck"] == ["killed"] and killed["swept"] >= 1


@pytest.mark.slow
def test_lost_executors_whose_source_has_changed_meanwhile(tmp_path):
    """The build reads the source again, finds other rows, and fails. It never publishes a mixture of both."""
    [told] = run("local-cluster[2,1,1024]", tmp_path, 3_000, "changed")
    assert told["struck"] == ["killed"]
    assert told["failed"].startswith("InvalidArgument") and "was replaced while it was read" in told["failed"]
    assert (told["before"], told["entries"], told["stored"], told["rows"]) == (0, 4_500, 4_500, 4_500)


@pytest.mark.slow
def test_lookups_audits_and_data_sources(session):
    """Each answer equals the model's and `query`'s; otherwise the program ends and prints the difference."""
    (told,) = (line for line in session if line["job"] == "read")
    assert sum(told["statuses"].values()) == told["lookups"] >= 30
    assert told["statuses"].keys() == {"complete", "truncated"}
    assert told["tasks"] >= 2 and told["objects"] >= 2  # window tables
    assert (told["audit"], told["differences"]) == ("ok", {"missing": 0, "extra": 0, "wrong": 0})
    assert told["scanned"] == 3_000 and told["partitions"] >= 2 and told["of_key"] > 500
    assert told["messages"] == 300 and told["segments"] >= 2


@pytest.mark.slow
def test_speculation_with_a_slow_task(tmp_path):
    with two_hosts(tmp_path / "cluster") as master:
        lines = run(master, tmp_path, 90_000, "slow")
    for line in lines:
        assert line["struck"] == ["slow"]  # Spark ended its attempt before it had waited for a minute
        assert line["shards"] > 1


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[str]:
    """Yield the URL of a standalone cluster of two workers of one core each, on two addresses."""
    folder.mkdir()
    home = Path(pyspark.__file__).parent
    environment = {**os.environ, "SPARK_HOME": str(home), "SPARK_WORKER_DIR": str(folder)}
    environment["PYSPARK_PYTHON"] = sys.executable
    start = str(home / "bin" / "spark-class")
    deploy = "org.apache.spark.deploy"
    processes = []

    def begin(*command: str) -> Path:
        path = folder / f"log{len(processes)}"
        with path.open("w") as log:
            processes.append(subprocess.Popen([start, *command], env=environment, stdout=log, stderr=subprocess.STDOUT))
        return path

    try:
        url = _url_in(begin(f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0"))
        for host in ("127.0.0.2", "127.0.0.3"):
            limits = ("--cores", "1", "--memory", "1g", "--webui-port", "0")
            begin(f"{deploy}.worker.Worker", "--host", host, *limits, url)
        yield url
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(30)


def _url_in(log: Path) -> str:
    """Return the URL in a master's log, once the log names the port."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if said := re.search(r"Starting Spark master at (spark://[0-9.]+:[1-9][0-9]*)\n", log.read_text()):
            return said[1]
        time.sleep(0.1)
    raise TimeoutError(f"no master: {log.read_text()}")


def write(folder: Path, job: str, max_failures: str) -> dict[str, Any]:
    """Write on two hosts; return the line that the program prints, with Spark's log as `log`."""
    with two_hosts(folder / "cluster") as master:
        [line], log = run_program("writing_program", master, folder, 2000, job, max_failures)
    return {**line, "log": log}


@pytest.mark.slow
def test_a_data_source_is_written_while_spark_speculates(tmp_path: Path) -> None:
    line = write(tmp_path, "speculated", "4")
    assert line["twice"] and line["total"] == 2_000
    # each of four tasks had entries of both days; those of the other attempt are not published
    assert line["tables"] == 8


@pytest.mark.slow
def test_an_attempt_that_is_denied_its_commit_is_a_failure_that_a_task_may_have(tmp_path: Path) -> None:
    line = write(tmp_path, "denied", "4")
    assert line["failures"] >= 1 and "Commit denied for partition 3" in line["log"]
    assert (line["failed"], line["records"], line["total"]) == (False, 1, 4_000)
    # two existed; each of four tasks had entries of both days, and one attempt of each counts
    assert line["tables"] == 10
    assert line["swept"] >= 2  # uploads of the denied attempt
    assert "spark.task.maxFailures is" not in line["log"]


@pytest.mark.slow
def test_an_attempt_that_is_denied_its_commit_fails_a_write_whose_tasks_may_not_fail(tmp_path: Path) -> None:
    line = write(tmp_path, "denied", "1")
    assert line["failed"] and line["denied"]
    # one attempt of each task had uploaded everything, but the index is unchanged
    assert (line["records"], line["total"], line["tables"]) == (0, 2_000, 2)
    assert line["swept"] >= 2
    assert "spark.task.maxFailures is 1" in line["log"]


@pytest.mark.slow
def test_a_micro_batch_with_a_denied_attempt_is_published_once(tmp_path: Path) -> None:
    line = write(tmp_path, "streamed", "4")
    assert line["failures"] >= 1 and "Commit denied for partition 3" in line["log"]
    assert (line["first"], line["error"], line["last"]) == ("", "", "")
    before, disturbed, ended = line["begun"], line["disturbed"], line["ended"]
    assert (before["batches"], before["total"], before["swept"]) == ([0], 2_000, 0)
    # one record: each of the four tasks had entries of both days, and one attempt of each counts; a sweep deletes the
    # denied attempt's tables
    assert disturbed["record"] == before["record"] + 1 and disturbed["tables"] == before["tables"] + 8
    assert (disturbed["batches"], disturbed["total"]) == ([1], 4_000)
    assert disturbed["swept"] >= 2
    assert (ended["record"], ended["batches"], ended["total"]) == (disturbed["record"] + 1, [2], 6_000)
    assert "spark.task.maxFailures is" not in line["log"]


@pytest.mark.slow
def test_a_query_that_failed_by_a_denied_commit_continues_from_its_checkpoint(tmp_path: Path) -> None:
    line = write(tmp_path, "streamed", "1")
    assert line["error"].startswith("[STREAM_FAILED]") and "Commit denied for partition 3" in line["error"]
    before, disturbed, ended = line["begun"], line["disturbed"], line["ended"]
    assert (before["batches"], before["total"]) == ([0], 2_000)
    # one attempt of each task had uploaded everything
    assert {**disturbed, "swept": 0} == {**before, "swept": 0}
    # two attempts of one task uploaded these; the query itself deleted the uploads of the other tasks
    assert disturbed["swept"] == 4
    assert (line["first"], line["last"]) == ("", "")
    # two records: the batch that failed, and the later file; the program compares the stored entries one by one
    assert (ended["record"], ended["batches"], ended["total"]) == (before["record"] + 2, [2], 6_000)
    assert ended["swept"] == 0
    # once in two sessions and four micro-batches: one session speculated
    assert line["log"].count("spark.task.maxFailures is 1") == 1
