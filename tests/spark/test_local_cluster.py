"""Builds, merges and erasures on executors that are processes of their own, and fail: each result counts once,
leftovers are swept. All is read back.

The programs run apart, for a process has one Spark at a time. Speculation needs executors on different hosts, since
Spark never runs two attempts on one: it is tested on a cluster of two workers on loopback addresses.
"""

from __future__ import annotations

import contextlib
import json
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

_ROOT = Path(__file__).parents[2]


def run(master: str, folder: Path, entries: int, *troubles: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.spark.cluster_program", master, str(folder), str(entries), *troubles]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "SPARK_LOCAL_IP": "127.0.0.1"}
    ended = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stderr[-3000:]
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
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
    assert sum(told["statuses"].values()) == told["lookups"] >= 30 and told["statuses"].keys() == {
        "complete",
        "truncated",
    }
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
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_WORKER_DIR": str(folder),
        "PYSPARK_PYTHON": sys.executable,
    }
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
