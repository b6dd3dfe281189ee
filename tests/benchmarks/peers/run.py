"""Interleaved rounds of peers: in each round every peer lives its whole life once, in processes that this one starts.

The first process writes a store and is killed. The second opens that store and settles it. The third reads. The fourth
takes small batches during compaction, in another folder. Two rounds never share a folder.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.benchmarks.machine.figures import facts
from tests.benchmarks.peers.registry import PEERS
from tests.benchmarks.peers.worker import Job
from tests.benchmarks.running import write_document

_MANY = 1_000
_TOP = Path(__file__).parents[3]


def run(
    peers: Sequence[str],
    sizes: Sequence[tuple[int, int]],
    *,
    rounds: int,
    commit_entries: int,
    lookups: int,
    parent: Path,
    out: Path,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Measure peers at sizes (entries, entries per key) in folders below `parent`, and return the document.

    It also writes the document to `out` after each peer.
    """
    sizes = [(entries - entries % per_key, per_key) for entries, per_key in sizes]
    skipped = {name: reason for name in peers if (reason := PEERS[name].missing()) is not None}
    for name, reason in skipped.items():
        note(f"{PEERS[name].name} is skipped: {reason}")
    chosen = [name for name in peers if name not in skipped]
    parent.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        "machine": facts(parent),
        "commit_entries": commit_entries,
        "lookups": lookups,
        "columns": {name: {"title": PEERS[name].name, "version": PEERS[name].version()} for name in chosen},
        "skipped": {PEERS[name].name: reason for name, reason in skipped.items()},
        "sizes": [],
    }
    for entries, per_key in sizes:
        found: dict[str, dict[str, list[float]]] = {name: {} for name in chosen}
        document["sizes"].append({"entries": entries, "per_key": per_key, "columns": found})
        for seed in range(rounds):
            # each round begins with a different peer
            for name in chosen[seed % len(chosen) :] + chosen[: seed % len(chosen)]:
                note(f"{entries:,} entries, {per_key} a key, round {seed + 1} of {rounds}: {PEERS[name].name}")
                with tempfile.TemporaryDirectory(prefix="tiered-index-peers-", dir=parent) as folder:
                    job = Job(
                        name, "", folder, entries, per_key, commit_entries, lookups, min(_MANY, 2 * lookups), seed
                    )
                    for figure, value in _life(job, Path(folder)).items():
                        found[name].setdefault(figure, []).append(value)
                write_document(out, document)
    return document


def _life(job: Job, folder: Path) -> dict[str, float]:
    """Return a peer's figures of one round."""
    figures: dict[str, float] = {}
    for phase in ("write", "recover", "read", "pause"):
        at = folder / ("small" if phase == "pause" else "store")
        at.mkdir(exist_ok=True)
        more = _work(Job(**{**asdict(job), "phase": phase, "folder": str(at)}))
        more["bytes written"] = more.get("bytes written", 0) + figures.get("bytes written", 0)
        figures |= more
    return figures


def _work(job: Job) -> dict[str, float]:
    """Give a worker a job. If it writes, kill it at its end, with its servers. Raises the worker's error."""
    command = [sys.executable, "-m", "tests.benchmarks.peers.worker", json.dumps(asdict(job))]
    environment = {**os.environ, "PYTHONPATH": str(_TOP), "PYTHONHASHSEED": "0"}
    # in a session of its own, so that a kill ends all that it started
    worker = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert worker.stdout is not None and worker.stdin is not None
    line = ""
    try:
        line = worker.stdout.readline()
        if job.phase != "write" and worker.wait() != 0:
            line = ""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
        worker.stdin.close()
        worker.stdout.close()
    if not line:
        raise RuntimeError(f"{job.peer} failed in phase {job.phase}: see above")
    figures: dict[str, float] = json.loads(line)
    return figures
