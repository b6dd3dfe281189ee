"""A real S3 server (Ceph's gateway) on one machine, for the tests marked `real_s3`; nothing is installed, no root is
needed.

    python -m tests.real_s3.server run -- COMMAND...   a fresh server for as long as COMMAND runs
    python -m tests.real_s3.server install | init | start | stop   by hand: download, unpack; make an empty one; run

Environment: TIERED_INDEX_TEST_S3_CACHE  folder for packages (170 MB), programs (600 MB), state; by default
                                         .cache/s3-server here TIERED_INDEX_TEST_S3_SUITE  Debian's suite, by default
                                         sid TIERED_INDEX_TEST_S3_MIRROR  its mirror, by default the machine's own
                                         TIERED_INDEX_TEST_S3_ENDPOINT  an S3 service to use instead: then `run` starts
                                         nothing
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.real_s3.cluster import ACCESS_KEY, SECRET_KEY, Cluster, ClusterError
from tests.real_s3.packages import MissingPrerequisite, cache_folder, install
from tests.support.s3_server import CREDENTIALS

ENDPOINT_VARIABLE = "TIERED_INDEX_TEST_S3_ENDPOINT"
STATE_VARIABLE = "TIERED_INDEX_TEST_S3_STATE"
"""Set for COMMAND where the server is ours: its state folder, by which a test may kill and restart it."""

_ENDS = (signal.SIGTERM, signal.SIGHUP)


def environment(endpoint_url: str) -> dict[str, str]:
    """Return what lets a client in, and leads it nowhere else."""
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    return {**CREDENTIALS, **keys, ENDPOINT_VARIABLE: endpoint_url}


def run(command: Sequence[str]) -> int:
    """Run `command` beside a fresh server, which is stopped and deleted whatever happens; return the command's exit
    status.
    """
    if os.environ.get(ENDPOINT_VARIABLE):
        return subprocess.run(command, check=False).returncode
    programs = install()
    began_s = time.monotonic()
    state = Path(tempfile.mkdtemp(prefix="run-", dir=cache_folder()))
    cluster = Cluster(programs, state)
    for number in _ENDS:
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        cluster.init()
        cluster.start()
        took_s = time.monotonic() - began_s
        print(f"S3 server at {cluster.endpoint_url}, ready after {took_s:.1f} s", file=sys.stderr, flush=True)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        settings = {**inherited, **environment(cluster.endpoint_url), STATE_VARIABLE: str(state)}
        return subprocess.run(command, env=settings, check=False).returncode
    finally:
        cluster.remove()


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says."""
    word, *rest = arguments or ("",)
    try:
        if word == "run" and rest[:1] == ["--"] and rest[1:]:
            return run(rest[1:])
        if word not in {"install", "init", "start", "stop"} or rest:
            print(__doc__, file=sys.stderr)
            return 2
        cluster = Cluster(install(), cache_folder() / "state")
        if word == "init" or (word == "start" and not cluster.initialised):
            cluster.init()
        if word == "start":
            cluster.start()
            for name, value in environment(cluster.endpoint_url).items():
                print(f"export {name}={value}")
        elif word == "stop":
            cluster.stop()
    except (MissingPrerequisite, ClusterError) as error:
        print(f"the S3 server can't run: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
