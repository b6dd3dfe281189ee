"""A real S3 server (Ceph's gateway) on one machine, for the tests marked `real_s3`. It needs no root.

- `python -m tests.real_s3.server run -- COMMAND...` runs COMMAND beside a new server.
- `python -m tests.real_s3.server install | init | start | stop` does one step by hand: download and unpack the server,
  make an empty one, run it, stop it.

Environment:

- `TIERED_INDEX_TEST_S3_CACHE` is the folder for packages (170 MB), programs (600 MB) and state, by default
  `.cache/s3-server` here.
- `TIERED_INDEX_TEST_S3_SUITE` is Debian's suite, by default sid.
- `TIERED_INDEX_TEST_S3_MIRROR` is Debian's mirror, by default the machine's own.
- `TIERED_INDEX_TEST_S3_ENDPOINT` is another S3 service. If it is set, `run` starts no server.
"""

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
"""Set for COMMAND if this program runs the server: its state folder, by which a test may kill and restart it."""

_ENDS = (signal.SIGTERM, signal.SIGHUP)


def environment(endpoint_url: str) -> dict[str, str]:
    """Return the environment of clients: credentials and endpoint, and no settings of the user."""
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    return {**CREDENTIALS, **keys, ENDPOINT_VARIABLE: endpoint_url}


def run(command: Sequence[str]) -> int:
    """Run `command` beside a new server, which is stopped and deleted in every case; return its exit status."""
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
    """Run the command line."""
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
