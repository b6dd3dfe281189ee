"""A real S3 server (Ceph's gateway) on one machine, for the tests marked `real_s3`. It needs no root.

`python -m tests.real_s3.server run -- COMMAND...` runs COMMAND, for example a shell, beside a new server.

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
        keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        places = {ENDPOINT_VARIABLE: cluster.endpoint_url, STATE_VARIABLE: str(state)}
        # no settings of the user
        settings = inherited | CREDENTIALS | keys | places
        return subprocess.run(command, env=settings, check=False).returncode
    finally:
        cluster.remove()


def main(arguments: Sequence[str]) -> int:
    """Run the command line."""
    if arguments[:2] != ["run", "--"] or not arguments[2:]:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        return run(arguments[2:])
    except (MissingPrerequisite, ClusterError) as error:
        print(f"the S3 server can't run: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
