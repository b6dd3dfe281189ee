"""Run the campaigns and write their counts and failures into docs/reliability.md.

The tally of each campaign is kept in build/reliability. So the page may have runs of different times: each row has its
commit.

examples:
  python -m tests.reliability.report                       all campaigns, one after the other (hours)
  python -m tests.reliability.report --only crashes        one campaign; the others from their last tallies
  python -m tests.reliability.report --quick               a part of each campaign (a quarter of an hour)
  python -m tests.reliability.report --only ''             no campaign: write the page from the last tallies
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import textwrap
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
INTRO = """# Reliability

This page is for those who judge the engine's safety. It has the results of campaigns that try to break the
[guarantees](../README.md#guarantees). `make reliability-report` runs all campaigns again (some hours), and writes this
page. `make test` runs a small part of each.

After damage or a loss, see [Repair](restore.md#repair), [lost objects](restore.md#what-the-storage-lost), [restored
roots](restore.md#a-root-from-a-backup) and [errors of the storage](troubleshooting.md#storageunavailable).

The limits of this evidence: all campaigns run on one machine. Power cuts are simulated. No cloud provider's storage was
used.

Each row of the table has the commit that a campaign tested, and its failures of four kinds:

- *Durable entries lost*: an entry is missing although a flush or the [durable
  position](glossary.md#stored-data) confirmed it.
- *Wrong answers*: an answer differs from the *model* (the entries that the test has put), or says `complete` and is
  not.
- *Untyped errors*: a call fails with an exception that is not in `tiered_index/errors.py`.
- *Hangs*: a call does not return in time.
"""
SAID = {
    "crashes": "The campaign kills the process or simulates a power cut before each call to disk or storage, and "
    "within each write. A power cut loses, keeps, tears or reorders unsynced bytes. Then the campaign opens the "
    "index, compares it with the model, and continues to write. In further runs one call fails (*fault*), or two to "
    "eight calls fail (*burst*), and a crash follows. A *double crash* is a second crash during the recovery. The "
    "campaign tries all single crashes, and a random sample of the rest: 10 % of faults, 3 % of bursts, 0.5 % of "
    "double crashes. A *crash state* is the index after one crash. A scenario is a sequence of calls, such as "
    "`quarantine`.",
    "interrupts": "The campaign raises an exception at each line of each public call, in eight states of an index. "
    "Then it uses, closes and reopens the index. Rows *interrupted lines* count these lines: *interrupt*, a "
    "`KeyboardInterrupt` in the caller's thread; *memory*, a `MemoryError` there; *engine*, a `MemoryError` in the "
    "engine's own threads. *Signals* are timer signals at random moments, while background workers run.",
    "simulation": "A scheduler with a seed runs one thread at a time. The threads are writers on two hosts, readers, "
    "the life cycle and merges. Clocks jump, processes are killed, and calls to disk and storage fail. To repeat a "
    "run, use its seed.",
    "mutations": "The campaign changes stored bytes, and corrects their checksums to match. Then each reader of the "
    "format reads them. A row counts the changes to one format. *End to end* counts those after which the campaign "
    "also ran a whole call or command. A write or deletion outside the index counts as a wrong answer.",
    "chaos": "Real processes write, read and merge on a real S3 server (Ceph's gateway). The campaign compares each "
    "answer with the entries that were put. It kills and stops the processes (SIGKILL, SIGTERM, SIGSTOP), breaks the "
    "server (*server*), and disturbs the requests (*network*). *No response*: the connection stays open without a "
    "response. *Lost responses*: the connection closes after the server has done the work. A *session* is one run of "
    "a writer. A *sweep* deletes orphans. Typed errors and partial answers are correct: the rows count them.",
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
        INTRO,
        "| campaign | commit | minutes | " + " | ".join(_KINDS[kind] for kind in Tally.KINDS) + " |",
        "|---|---|---|" + "---|" * len(Tally.KINDS),
    ]
    for name, tally in tallies.items():
        found = [f"{tally['found'].get(kind, 0):,}" for kind in Tally.KINDS]
        lines.append(
            f"| [{name}](#{name}) | {tally['commit']} | {tally['seconds'] / 60:.0f} | " + " | ".join(found) + " |"
        )
    for name, tally in tallies.items():
        lines += [
            "",
            f"## {name}",
            "",
            textwrap.fill(SAID[name], 120, break_on_hyphens=False),
            "",
            f"`{tally['command']}`",
            "",
            "| tried | |",
            "|---|---:|",
        ]
        lines += [f"| {what} | {count:,} |" for what, count in tally["tried"].items()]
    return "\n".join(lines) + "\n"


_KINDS = {"lost": "durable entries lost", "wrong": "wrong answers", "untyped": "untyped errors", "hangs": "hangs"}

if __name__ == "__main__":
    sys.exit(main())
