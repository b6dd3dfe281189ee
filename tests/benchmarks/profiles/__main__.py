"""`python -m tests.benchmarks.profiles`: profiles of the main operations."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.machine.figures import facts
from tests.benchmarks.running import write_document
from tests.real_s3.server import ENDPOINT_VARIABLE

_HERE = Path(__file__).parents[3]
_OUT = _HERE / "build" / "profiles.json"


def main() -> None:
    """Measure, write the document and print it.

    Each round is a separate process. A figure is the median of the rounds. Stored files are on the tests' S3 server if
    it runs (`python -m tests.real_s3.server run -- ...`), else on the disk.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.profiles", description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--lookups", type=int, default=5_000, help="lookups of each kind")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="folder for the indexes")
    parser.add_argument("--out", type=Path, default=_OUT, help="the document")
    given = parser.parse_args()
    document = _measure(given)
    write_document(given.out, document)
    print(json.dumps(document["operations"], indent=1))


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    machine = facts(given.dir)
    endpoint = os.environ.get(ENDPOINT_VARIABLE)
    with _bucket(endpoint) as bucket:
        for number in range(given.rounds):
            with tempfile.TemporaryDirectory(dir=given.dir) as folder:
                uri = f"s3://{bucket}/{number}?addressing_style=path" if bucket else Path(folder, "storage").as_uri()
                runs.append(_run(folder, uri, given.entries, given.lookups, endpoint))
            print(f"round {number + 1} of {given.rounds} measured", file=sys.stderr, flush=True)
    return {
        "machine": machine,
        "entries": given.entries,
        "rounds": given.rounds,
        "server": "a real S3 server (Ceph) on the same machine" if endpoint else "the local disk",
        "operations": {name: _medians([run[name] for run in runs]) for name in runs[0]},
    }


def _run(folder: str, uri: str, entries: int, lookups: int, endpoint: str | None) -> dict[str, Any]:
    environment = os.environ | ({"AWS_ENDPOINT_URL_S3": endpoint} if endpoint else {})
    command = [sys.executable, "-m", "tests.benchmarks.profiles.worker", folder, uri, str(entries), str(lookups)]
    done = subprocess.run(command, env=environment, cwd=_HERE, stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of an operation's figures, and the parts of the round with the median CPU time."""
    middle = sorted(runs, key=lambda run: float(run["cpu_us"]))[len(runs) // 2]
    return middle | {name: statistics.median(run[name] for run in runs) for name in ("cpu_us", "limit_us")}


@contextlib.contextmanager
def _bucket(endpoint: str | None) -> Iterator[str | None]:
    """Make a bucket on the server, if there is one. It ends with the server."""
    if endpoint is None:
        yield None
        return
    import boto3

    name = f"profiles-{secrets.token_hex(4)}"
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=name)
    yield name


if __name__ == "__main__":
    main()
