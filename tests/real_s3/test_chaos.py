"""A short run of the chaos campaign (`python -m tests.reliability.chaos`), in separate processes: no check fails, and
no process stays behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.real_s3.cluster import Cluster
from tests.real_s3.conftest import Server
from tests.real_s3.server import ENDPOINT_VARIABLE, STATE_VARIABLE
from tests.support.hanging import until

pytestmark = pytest.mark.real_s3

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 600


def campaign(server: Server, cluster: Cluster, folder: Path, *options: str) -> subprocess.Popen[str]:
    environment = {**os.environ, ENDPOINT_VARIABLE: server.endpoint_url, STATE_VARIABLE: str(cluster.state)}
    environment["TMPDIR"] = str(folder)
    command = [sys.executable, "-m", "tests.reliability.chaos", "--json", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, cwd=REPOSITORY, text=True, **pipes)


def crew_of(folder: str) -> list[str]:
    """Return the processes that work in a campaign's folder."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            commands.append(path.read_text())
        except OSError:
            continue  # the process has just ended
    return [command for command in commands if "chaos_crew" in command and folder in command]


def test_most_of_a_minute_of_chaos(server: Server, cluster: Cluster, tmp_path: Path) -> None:
    tried = Counter[str]()
    # a slow machine does less in the time, so one campaign may not try every fault
    for seed in range(3, 11):
        process = campaign(server, cluster, tmp_path, "--minutes", "0.7", "--seed", str(seed))
        out, told = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, told
        tally = json.loads(out)
        assert tally["found"] == {}, told
        tried.update(tally["tried"])
        if (
            all(tried[what] for what in ("kills (SIGKILL)", "stops (SIGSTOP)", "disturbed requests"))
            and any(what.startswith("server: ") for what in tried)
            # more than the lookups at the end
            and tried["answers checked"] > (seed - 2) * 2 * 2 * 199
            and tried["entries declared durable"] > 1000
        ):
            return
    pytest.fail(f"too little was tried: {tried}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_campaign_that_is_interrupted_leaves_no_process(
    server: Server, cluster: Cluster, tmp_path: Path, number: signal.Signals
) -> None:
    # the campaign leaves the server alone: once killed, it could not undo its faults
    process = campaign(server, cluster, tmp_path, "--minutes", "5", "--endpoint", server.endpoint_url)
    folder = ""
    for line in process.stderr:
        if "files in" in line:
            folder = line.split()[-1]
        if "stop " in line:  # one of them is stopped
            break
    assert len(crew_of(folder)) > 1
    process.send_signal(number)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode != 0
    # a new process looks for its parent first
    until(lambda: not crew_of(folder), every_s=0.1)
