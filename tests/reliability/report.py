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

This page helps you judge the engine's safety. It has the results of campaigns that try to break the
[guarantees](../README.md#guarantees). `make reliability-report` runs all campaigns of the table again (some hours), and
writes their part of this page. You can also run one campaign alone, so the table may have several commits. `make test`
runs a small part of each campaign. `make mutants` checks the tests themselves: it puts defects into copies of the code,
and each defect must turn a test red. Each past defect has a test in `tests/regressions`. The [soak](#soak) is a
benchmark. [Kafka](kafka.md#tests) has a campaign of its own.

After damage or a loss, see [Repair](restore.md#repair), [lost objects](restore.md#what-the-storage-lost), [restored
roots](restore.md#a-root-from-a-backup) and [errors of the storage](troubleshooting.md#storageunavailable).

The evidence has these limits:

- All campaigns run on one machine, with Linux.
- Power cuts are simulated.
- Chaos uses a real S3 server. The other campaigns use a storage in memory or in local files. No campaign used a cloud
  provider's storage.

The table shows the commit that each campaign tested, its duration, and the failures that it found. There are four kinds
of failures:

- *Durable entries lost*: an entry is missing, although a flush or the [durable
  position](glossary.md#stored-data) confirmed it.
- *Wrong answers*: an answer differs from the *model*. The model is the list of entries that the test has put. A
  `complete` answer that lacks entries is wrong, too. *Mutations* [does not check this](#mutations).
- *Untyped errors*: a call fails with an exception that is not in `tiered_index/errors.py`.
- *Hangs*: a call does not return in time.
"""
SAID = {
    "crashes": "The campaign kills the process or simulates a power cut before each call to disk or storage, and "
    "within each write. A power cut loses, keeps, tears or reorders unsynced bytes. Then the campaign opens the "
    "index, compares it with the model, and continues to write.\n"
    "\n"
    "In further runs one call fails (*fault*), or two to eight calls fail (*burst*). A crash follows. In a *double "
    "crash*, a second crash interrupts the recovery. The campaign tries all crashes that are not double. It tries "
    "10 % of the faults and 3 % of the bursts. Of the double crashes it tries a random sample.\n"
    "\n"
    "A *crash state* is the index after one crash or a double crash. The table counts each crash state twice: "
    "once *by cause* and once *by scenario*. A scenario is a script that uses one part of an index. For example, "
    "*merging* merges files while a writer continues.",
    "interrupts": "The campaign brings an index into one of eight states, and raises an exception at one line of a "
    "public call. Then it uses, closes and reopens the index. It tries every Python line of every call in every "
    "state. A line in a loop is tried at most twice. The rows count the interrupted lines:\n"
    "\n"
    "- *interrupt*: a `KeyboardInterrupt` in the caller's thread\n"
    "- *memory*: a `MemoryError` in the caller's thread\n"
    "- *engine*: a `MemoryError` in a thread of the engine\n"
    "\n"
    "In the row *signals* a timer interrupts the call at a random moment. Background workers run meanwhile.",
    "simulation": "A seed determines a whole run: the order of the threads and all faults. One thread runs at a time. "
    "The threads are writers on two hosts, readers, the life cycle and merges. Clocks jump, processes are killed, "
    "and calls to disk and storage fail. To repeat a run, pass its seed (`--seed 4711`).",
    "mutations": "The campaign changes bytes of one stored file. In nine of ten changes it also corrects the "
    "checksums, so they match. Then it decodes the file. *End to end* counts the changes after which the campaign also "
    "ran a whole call or command. Each other row counts the changes to one format:\n"
    "\n"
    "- The rows from *commit log* down to *bare files* count files of RocketMQ. Bare files are RocketMQ's index files "
    "without a trailer.\n"
    "- *marker* is `tiered_index.json` in the root.\n"
    "- *upload leftovers* are the files of an unfinished upload.\n"
    "- *database rows* are the objects of a `sqlite://` storage.\n"
    "\n"
    "In this campaign an answer is wrong if it has an entry that nobody put under its topic and key. A write or "
    "deletion outside the index also counts as a wrong answer. The campaign does not check that an answer has all "
    "entries: if checksums match, a reader can't know that an entry is missing.",
    "chaos": "Real processes write, read and merge on a real S3 server (Ceph's gateway). The campaign compares each "
    "answer with the entries that were put. Meanwhile it disturbs the processes and the server:\n"
    "\n"
    "- It kills, ends or stops a process (SIGKILL, SIGTERM, SIGSTOP).\n"
    "- It breaks the server (rows *server*).\n"
    "- It disturbs requests for some seconds. The rows *network* count these periods, and *disturbed requests* counts "
    "the requests.\n"
    "\n"
    "*No response* leaves the connection open without a response. *Lost* requests and responses end with a closed "
    "connection. After *lost responses* and *no response after the work*, the server has done the work.\n"
    "\n"
    "In a *session* a process opens the index, uses it, and closes it. The row *sessions of writers* counts only those "
    "that opened the index. The row *typed errors of a session* counts the failed sessions of all processes, also "
    "those that could not open it. A new writer that takes over begins an *epoch*, and *fences* the earlier writer. "
    "A *sweep* deletes orphans. Typed errors and partial answers are not failures: a call may fail while the server is "
    "broken.",
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
            "\n".join(_filled(line) for line in SAID[name].split("\n")),
            "",
            f"`{tally['command']}`",
            "",
            "| tried | |",
            "|---|---:|",
        ]
        lines += [f"| {what} | {count:,} |" for what, count in tally["tried"].items()]
    return "\n".join(lines) + "\n"


def _filled(line: str) -> str:
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 120, break_on_hyphens=False, subsequent_indent=indent)


_KINDS = {"lost": "durable entries lost", "wrong": "wrong answers", "untyped": "untyped errors", "hangs": "hangs"}

if __name__ == "__main__":
    sys.exit(main())
