"""Run the campaigns and write docs/reliability.md: what was tried, and what of it failed.

Each campaign's tally is kept in build/reliability, so that the page can be made of runs at different times; each row
names its commit.

examples:
  python -m tests.reliability.report                       all of them, one after the other (hours)
  python -m tests.reliability.report --only crashes        one anew, the others as they were last
  python -m tests.reliability.report --quick               a part of each (a quarter of an hour)
  python -m tests.reliability.report --only ''             none: make the page of what there is
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.reliability.tally import Tally

TOP = Path(__file__).resolve().parents[2]
KEPT = TOP / "build" / "reliability"
PAGE = TOP / "docs" / "reliability.md"
CAMPAIGNS = {
    "crashes": ["--all"],
    "interrupts": ["--all"],
    "simulation": ["--seeds", "10000"],
    "mutations": ["--all"],
    "chaos": ["--minutes", "10"],
}
QUICK = {
    "crashes": ["--share", "0.01"],
    "interrupts": ["--stride", "97", "--signal-lives", "4"],
    "simulation": ["--seeds", "1500"],
    "mutations": ["--count", "60000", "--every", "1000"],
    "chaos": ["--minutes", "1"],
}
SAID = {
    "crashes": "The process dies, or the power is cut, at every call of the local disk and of the storage. This "
    "includes the recovery from an earlier crash. Each call fails in each way. Bursts of 2 to 8 calls fail. "
    "Unsynced bytes are "
    "lost, kept, torn or reordered.",
    "interrupts": "An exception strikes every line of every public call, in eight states of an index. It strikes the "
    "caller's thread and, as `MemoryError`, the service's own threads. Real timer signals strike a service with "
    "background workers.",
    "simulation": "One seeded scheduler runs writers on two hosts, readers, the life cycle, merges, jobs, expiry, "
    "erasures, clocks, kills, and faults of disk and storage, one thread at a time. A seed is one life and replays "
    "exactly.",
    "mutations": "Stored bytes are changed within their checksums, format by format. All their readers read them.",
    "chaos": "Processes on a real S3 server (Ceph's gateway), with an eraser, are killed, stopped and cut off. "
    "Meanwhile the server is restarted, filled, and reached through a faulty network.",
}


def main() -> int:
    """Run the program; return its exit code: 1 where a campaign found a failure."""
    parser = argparse.ArgumentParser(
        "python -m tests.reliability.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(CAMPAIGNS), help="campaigns to run, with commas between them")
    parser.add_argument("--quick", action="store_true", help="run a part of each")
    options = parser.parse_args()
    KEPT.mkdir(parents=True, exist_ok=True)
    wanted = [name for name in options.only.split(",") if name]
    if unknown := set(wanted) - set(CAMPAIGNS):
        parser.error(f"no campaign is called {', '.join(sorted(unknown))}; there are {', '.join(CAMPAIGNS)}")
    for name in wanted:
        print(f"{name} ...", file=sys.stderr, flush=True)
        (KEPT / f"{name}.json").write_text(
            json.dumps(_run(name, (QUICK if options.quick else CAMPAIGNS)[name]), indent=1)
        )
    tallies = {
        name: json.loads((KEPT / f"{name}.json").read_text()) for name in CAMPAIGNS if (KEPT / f"{name}.json").exists()
    }
    # the soak is a benchmark: its section stays as it is
    _, head, soak = PAGE.read_text().partition("\n## soak\n")
    PAGE.write_text(page(tallies) + head + soak)
    return 1 if any(tally["failures"] for tally in tallies.values()) else 0


def _run(name: str, arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", f"tests.reliability.{name}", *arguments, "--json"]
    if name == "chaos":
        command = [sys.executable, "-m", "tests.real_s3.server", "run", "--", *command]
    done = subprocess.run(command, cwd=TOP, stdout=subprocess.PIPE, text=True, check=False)
    tally: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=TOP, stdout=subprocess.PIPE, text=True, check=True
    )
    return tally | {"commit": commit.stdout.strip()}


def page(tallies: dict[str, dict[str, Any]]) -> str:
    """Return the page's text."""
    lines = [
        "# Reliability",
        "",
        "This page is for those who judge the engine's safety. It has the campaigns of `tests/reliability`, which try",
        "to break the engine, and their results. `make reliability-report` runs them and writes this page. A sample of",
        "each is part of `make test`.",
        "",
        "| campaign | commit | minutes | " + " | ".join(_KINDS[kind] for kind in Tally.KINDS) + " |",
        "|---|---|---|" + "---|" * len(Tally.KINDS),
    ]
    for name, tally in tallies.items():
        found = [f"{tally['found'].get(kind, 0):,}" for kind in Tally.KINDS]
        lines.append(
            f"| [{name}](#{name}) | {tally['commit']} | {tally['seconds'] / 60:.0f} | " + " | ".join(found) + " |"
        )
    for name, tally in tallies.items():
        lines += ["", f"## {name}", "", SAID[name], "", f"`{tally['command']}`", "", "| tried | |", "|---|---:|"]
        lines += [f"| {what} | {count:,} |" for what, count in tally["tried"].items()]
    return "\n".join(lines) + "\n"


_KINDS = {"lost": "durable entries lost", "wrong": "wrong answers", "untyped": "untyped errors", "hangs": "hangs"}

if __name__ == "__main__":
    sys.exit(main())
