"""Builds, merges and erasures on executors that are processes of their own, and fail: each result counts once,
leftovers are swept. All is read back.

The programs run apart, for a process has one Spark at a time. Speculation needs executors on different hosts, since
Spark never runs two attempts on one: it is tested on a cluster of two workers on loopback addresses. There DataFrames
and streams are written, too: of two attempts of a task one may commit, and the other is denied, and counts as failed.
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
    """What one session did: undisturbed, then with tasks that fail, then with a worker that is killed."""
    return run("local-cluster[2,1,1024]", tmp_path_factory.mktemp("session"), 3_000, "none", "fail", "worker")


@pytest.mark.slow
def test_failing_tasks_and_a_killed_executor(tmp_path):
    built, merged, erased = run("local-cluster[2,1,1024]", tmp_path, 3_000, "executor")
    # two tasks failed, then an executor was killed in a third
    assert built["struck"] == merged["struck"] == erased["struck"] == ["a", "b", "killed"]
    # what the dead one left, and what the merge replaced
    assert built["swept"] >= 1 and merged["swept"] > built["objects"]


@pytest.mark.slow
def test_killed_workers_failing_tasks_and_nothing_at_all(session):
    quiet, failed, killed = (line for line in session if line["job"] == "build")
    assert (quiet["struck"], quiet["swept"]) == ([], 0)
    assert (failed["struck"], failed["swept"]) == (["a", "b"], 0)  # a task that fails takes back what it uploaded
    assert killed["struck"] == ["killed"] and killed["swept"] >= 1


@pytest.mark.slow
def test_lost_executors_whose_source_has_changed_meanwhile(tmp_path):
    """The build reads the source again, finds other rows, and fails: it never publishes a mixture of both."""
    [told] = run("local-cluster[2,1,1024]", tmp_path, 3_000, "changed")
    assert told["struck"] == ["killed"]
    assert told["failed"].startswith("InvalidArgument") and "was replaced while it was read" in told["failed"]
    assert (told["before"], told["entries"], told["stored"], told["rows"]) == (0, 4_500, 4_500, 4_500)


@pytest.mark.slow
def test_lookups_audits_and_data_sources(session):
    """Each equals the model and `query`, or the program ends with what differs."""
    (told,) = (line for line in session if line["job"] == "read")
    assert sum(told["statuses"].values()) == told["lookups"] >= 30
    assert told["statuses"].keys() == {"complete", "truncated"}
    assert told["tasks"] >= 2 and told["objects"] >= 4
    assert (told["audit"], told["differences"]) == ("ok", {"missing": 0, "extra": 0, "wrong": 0})
    assert told["scanned"] == 3_000 and told["partitions"] >= 2 and told["of_key"] > 500
    assert told["messages"] == 300 and told["segments"] >= 2


@pytest.mark.slow
def test_speculation_with_a_slow_task(tmp_path):
    with two_hosts(tmp_path / "cluster") as master:
        lines = run(master, tmp_path, 90_000, "slow")
    for line in lines:
        assert line["struck"] == ["slow"]  # its attempt was ended, before it had waited for a minute
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
    """Return the URL of the master whose log this is, once it says which port it has taken."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if said := re.search(r"Starting Spark master at (spark://[0-9.]+:[1-9][0-9]*)\n", log.read_text()):
            return said[1]
        time.sleep(0.1)
    raise TimeoutError(f"no master: {log.read_text()}")


def write(folder: Path, job: str, max_failures: str) -> dict[str, Any]:
    """Write on two hosts; return the line that the program prints, and what Spark logged as `log`."""
    with two_hosts(folder / "cluster") as master:
        [line], log = run_program("writing_program", master, folder, 2000, job, max_failures)
    return {**line, "log": log}


@pytest.mark.slow
def test_a_data_source_is_written_while_spark_speculates(tmp_path: Path) -> None:
    line = write(tmp_path, "speculated", "4")
    assert line["twice"] and line["total"] == 2_000
    assert line["tables"] == 8  # of four tasks, each of which met both days; those of the other attempt are none


@pytest.mark.slow
def test_an_attempt_that_is_denied_its_commit_is_a_failure_that_a_task_may_have(tmp_path: Path) -> None:
    line = write(tmp_path, "denied", "4")
    assert line["failures"] >= 1 and "Commit denied for partition 3" in line["log"]
    assert (line["failed"], line["records"], line["total"]) == (False, 1, 4_000)
    assert line["tables"] == 10  # two were there; of four tasks, each of which met both days, one attempt each
    assert line["swept"] >= 2  # what the denied one uploaded
    assert "spark.task.maxFailures is" not in line["log"]


@pytest.mark.slow
def test_an_attempt_that_is_denied_its_commit_fails_a_write_whose_tasks_may_not_fail(tmp_path: Path) -> None:
    line = write(tmp_path, "denied", "1")
    assert line["failed"] and line["denied"]
    # though one attempt of each task had all uploaded; the index is as it was
    assert (line["records"], line["total"], line["tables"]) == (0, 2_000, 2)
    assert line["swept"] >= 2
    assert "spark.task.maxFailures is 1" in line["log"]


@pytest.mark.slow
def test_a_micro_batch_of_which_an_attempt_is_denied_its_commit_is_published_once(tmp_path: Path) -> None:
    line = write(tmp_path, "streamed", "4")
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
    line = write(tmp_path, "streamed", "1")
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
