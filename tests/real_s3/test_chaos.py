"""A short run of the chaos campaign (`python -m tests.reliability.chaos`), in separate processes: no check fails."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.real_s3.cluster import Cluster
from tests.real_s3.conftest import Server
from tests.real_s3.server import ENDPOINT_VARIABLE, STATE_VARIABLE

pytestmark = pytest.mark.real_s3

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 600


def test_most_of_a_minute_of_chaos(server: Server, cluster: Cluster, tmp_path: Path) -> None:
    environment = {**os.environ, ENDPOINT_VARIABLE: server.endpoint_url, STATE_VARIABLE: str(cluster.state)}
    environment["TMPDIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.reliability.chaos", "--json", "--minutes", "0.7", "--seed"]
    tried = Counter[str]()
    # a slow machine does less in the time, so one campaign may not try every fault
    for seed in range(3, 11):
        started = {"env": environment, "cwd": REPOSITORY, "timeout": TIMEOUT_S}
        done = subprocess.run([*command, str(seed)], capture_output=True, text=True, check=False, **started)
        assert done.returncode == 0, done.stderr
        tally = json.loads(done.stdout)
        assert tally["by_kind"] == {}, done.stderr
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
