"""`python -m tests.benchmarks.peers`: the command of `make bench SUITE=peers`."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.comparing import heading, table
from tests.benchmarks.peers.figures import FIGURES, PLAIN
from tests.benchmarks.peers.registry import PEERS
from tests.benchmarks.peers.run import run

_OUT = Path(__file__).parents[3] / "build" / "peers.json"


def _numbers(text: str) -> list[int]:
    return [int(part.replace("_", "")) for part in text.split(",")]


def main(arguments: list[str] | None = None) -> None:
    """Measure, write the document and print its tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.peers", description=main.__doc__)
    parser.add_argument("--entries", type=_numbers, default=[1_000_000], help="sizes, by commas")
    parser.add_argument("--per-key", type=_numbers, default=[1, 4], help="entries per key, by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commit-entries", type=int, default=10_000, help="entries of a durable batch")
    parser.add_argument("--lookups", type=int, default=5_000, help="lookups of each kind per round")
    parser.add_argument("--peers", default=",".join(PEERS), help="the peers, by commas")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="folder for the stores")
    parser.add_argument("--out", type=Path, default=_OUT, help="the document")
    given = parser.parse_args(arguments)
    names = given.peers.split(",")
    if unknown := sorted(set(names) - set(PEERS)):
        parser.error(f"unknown peers: {', '.join(unknown)}")
    document = run(
        names,
        [(entries, per_key) for entries in given.entries for per_key in given.per_key],
        rounds=given.rounds,
        commit_entries=given.commit_entries,
        lookups=given.lookups,
        parent=given.dir,
        out=given.out,
        note=lambda text: print(text, file=sys.stderr, flush=True),
    )
    for size in document["sizes"]:
        print(f"\n{heading(size)}\n\n{table(document, size, FIGURES, plain=PLAIN)}")
    for name, reason in document["skipped"].items():
        print(f"{name} skipped: {reason}")


if __name__ == "__main__":
    # so that no store and no server outlives this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
