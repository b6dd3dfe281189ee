"""Writes, builds, merges and erasures on separate executors that fail: each result counts once, and a sweep deletes
leftovers. Reads check every entry.

Each program runs in its own process, since a process can have only one Spark session. Speculation needs executors on
different hosts, since Spark never runs two attempts on one host. So it runs on a cluster of two workers on loopback
addresses.
"""

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

JOBS = ("write", "build", "merge", "erase")


def run(master: str, folder: Path, entries: int, *troubles: str) -> list[dict[str, Any]]:
    lines, _ = run_program("cluster_program", master, folder, entries, *troubles)
    jobs = dict.fromkeys(troubles, JOBS) | {"changed": ("build",), "stages": ("link",)}
    assert [(line["trouble"], line["job"]) for line in lines] == [
        (trouble, job) for trouble in troubles for job in jobs[trouble]
    ]
    return lines


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """The results of one session: undisturbed, then with tasks that fail, then with a killed worker."""
    return run("local-cluster[2,1,1024]", tmp_path_factory.mktemp("session"), 3_000, "none", "fail", "worker")


@pytest.mark.slow
def test_failing_tasks_and_a_killed_executor(tmp_path):
    written, built, merged, erased = run("local-cluster[2,1,1024]", tmp_path, 3_000, "executor")
    # two tasks failed, then a third task killed its executor
    assert all(line["struck"] == ["a", "b", "killed"] for line in (written, built, merged, erased))
    # leftovers of the dead executor, and objects that the merge replaced
    assert built["swept"] >= 1 and merged["swept"] > built["objects"]


@pytest.mark.slow
def test_a_linked_build_whose_executors_are_killed_in_each_stage_loses_and_doubles_no_row(tmp_path):
    # the program looks up the rows of each file
    [figures] = run("local-cluster[2,1,1024]", tmp_path, 3_000, "stages")
    killed = {mark.partition(" ")[0] for mark in figures["struck"]}
    assert len(killed) == 2 and len(figures["struck"]) >= 3, figures
    # one for each file, and those of lost executors are swept
    assert figures["points"] == 4 and figures["swept"] >= 2


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
    [figures] = run("local-cluster[2,1,1024]", tmp_path, 3_000, "changed")
    assert figures["struck"] == ["killed"]
    assert figures["failed"].startswith("InvalidArgument") and "was replaced while it was read" in figures["failed"]
    assert (figures["before"], figures["entries"], figures["stored"], figures["rows"]) == (0, 4_500, 4_500, 4_500)


@pytest.mark.slow
def test_speculation_with_a_slow_task(tmp_path):
    with two_hosts(tmp_path / "cluster") as master:
        lines = run(master, tmp_path, 90_000, "slow")
    for line in lines:
        assert line["struck"] == ["slow"]  # Spark ended its attempt before it had waited for a minute
        assert line["objects"] > 1


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
