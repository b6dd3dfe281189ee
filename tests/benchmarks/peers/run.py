"""`make bench SUITE=peers`: the same entries in this index and in other stores on one machine.

Rounds are interleaved: in each, every peer lives its whole life once, in processes of its own. The first one writes a
store and is killed. The second opens that store and settles it. The third reads. The fourth takes small batches during
compaction, in another folder.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.benchmarks.peers.worker import PEERS, Job
from tests.benchmarks.report import TOP, Measured, compared, finish, note, numbers, options, scratch

FIGURES = {
    "ingest CPU": "durable ingest, CPU us per entry",
    "ingest wall": "durable ingest, wall us per entry",
    "settle CPU": "compaction to the settled state, CPU us per entry",
    "bytes written": "bytes written per byte of entries",
    "batch p50": "durable batch of 500 beside compaction, p50 ms",
    "batch p99.9": "... p99.9 ms",
    "hot lookup p50": "lookup, just written, p50 us",
    "hot lookup p99": "... p99 us",
    "settled lookup p50": "lookup, settled, p50 us",
    "settled lookup p99": "... p99 us",
    "settled absent p50": "absent key, settled, p50 us",
    "settled absent p99": "... p99 us",
    "settled many p50": "1,000 keys at once, settled, us per key",
    "cold lookup p50": "lookup after a restart, no page cached, p50 us",
    "cold lookup p99": "... p99 us",
    "reader lookup p50": "lookup by a reader without the local files, p50 us",
    "stored bytes": "stored, bytes per entry",
    "recovery": "opened and answering after SIGKILL, s",
    "memory writing": "peak memory while writing, MiB",
    "memory reading": "peak memory while reading, MiB",
}
"""The figures of the table. All are better when smaller."""
_MANY = 1_000


def _life(job: Job, folder: Path) -> dict[str, float]:
    """Return a peer's figures of one round."""
    figures: dict[str, float] = {}
    for phase in ("write", "recover", "read", "pause"):
        at = folder / ("small" if phase == "pause" else "store")
        at.mkdir(exist_ok=True)
        more = _work(replace(job, phase=phase, folder=str(at)))
        more["bytes written"] = more.get("bytes written", 0) + figures.get("bytes written", 0)
        figures |= more
    return figures


def _work(job: Job) -> dict[str, float]:
    """Give a worker a job. If it writes, kill it at its end. Raises the worker's error."""
    command = [sys.executable, "-m", "tests.benchmarks.peers.worker", json.dumps(asdict(job))]
    environment = {**os.environ, "PYTHONPATH": str(TOP), "PYTHONHASHSEED": "0"}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    # in a session of its own, so that a kill ends all that it started
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as worker:
        line = ""
        try:
            line = worker.stdout.readline()
            if job.phase != "write" and worker.wait() != 0:
                line = ""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
    if not line:
        raise RuntimeError(f"{job.peer} failed in phase {job.phase}: see above")
    figures: dict[str, float] = json.loads(line)
    return figures


def main(suite: str, arguments: list[str]) -> None:
    """Measure, write the document after each peer, and print its tables."""
    parser = options(suite, __doc__, rounds=3)
    parser.add_argument("--entries", type=numbers, default=[1_000_000], help="sizes, by commas")
    parser.add_argument("--per-key", type=numbers, default=[1, 4], help="entries per key, by commas")
    parser.add_argument("--commit-entries", type=int, default=10_000, help="entries of a durable batch")
    parser.add_argument("--lookups", type=int, default=5_000, help="lookups of each kind per round")
    parser.add_argument("--peers", default=",".join(PEERS), help="the peers, by commas")
    flags = parser.parse_args(arguments)
    names = flags.peers.split(",")
    missing = {name: reason for name in names if (reason := PEERS[name].missing()) is not None}
    for name, reason in missing.items():
        note(f"{PEERS[name].name} is left out: {reason}")
    chosen = [name for name in names if name not in missing]
    versions = {PEERS[name].name: PEERS[name].version() for name in chosen}
    document: dict[str, Any] = {"versions": versions, "missing": missing, "sizes": [], "tables": {}}
    # so that no store outlives this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for entries in flags.entries:
        for per_key in flags.per_key:
            columns: dict[str, Measured] = {PEERS[name].name: {} for name in chosen}
            document["sizes"].append({"entries": entries, "per_key": per_key, "columns": columns})
            for seed in range(flags.rounds):
                # each round begins with a different peer
                for name in chosen[seed % len(chosen) :] + chosen[: seed % len(chosen)]:
                    note(f"{entries:,} entries, {per_key} a key, round {seed + 1}: {PEERS[name].name}")
                    with scratch(flags.root_dir) as folder:
                        amounts = entries - entries % per_key, per_key, flags.commit_entries, flags.lookups
                        job = Job(name, "", "", *amounts, min(_MANY, 2 * flags.lookups), seed)
                        for figure, value in _life(job, folder).items():
                            columns[PEERS[name].name].setdefault(figure, []).append(value)
            title = f"{entries:,} entries, {per_key} per key, {flags.rounds} rounds"
            document["tables"][title] = compared(columns, FIGURES)
    finish(flags, document)
