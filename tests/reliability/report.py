"""Run the campaigns and write their counts and failures into docs/reliability.md, whose text stays as it is.

The tally of each campaign is kept in build/reliability. So the page may have runs of different times: each row has its
commit.

examples:

- `python -m tests.reliability.report`: all campaigns, one after another (hours)
- `python -m tests.reliability.report --only crashes`: one campaign, and the last tallies of the others
- `python -m tests.reliability.report --quick`: a part of each campaign (a quarter of an hour)
- `python -m tests.reliability.report --only ''`: no campaign, only the page from the last tallies
"""

from __future__ import annotations

import argparse
import json
import re
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
    "interrupts": ["--lives", "30", "--interrupts", "200"],
    "simulation": ["--seeds", "10000"],
    "mutations": ["--all"],
    "chaos": ["--minutes", "10"],
}
QUICK = {
    "crashes": ["--share", "0.01"],
    "interrupts": ["--lives", "2", "--interrupts", "500"],
    "simulation": ["--seeds", "1500"],
    "mutations": ["--count", "60000", "--every", "1000"],
    "chaos": ["--minutes", "1"],
}


def main() -> int:
    """Run the program; return its exit code: 1 if a campaign found a failure."""
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
        tally = _run(name, (QUICK if options.quick else CAMPAIGNS)[name])
        (KEPT / f"{name}.json").write_text(json.dumps(tally, indent=1))
    kept = {name: KEPT / f"{name}.json" for name in CAMPAIGNS}
    tallies = {name: json.loads(path.read_text()) for name, path in kept.items() if path.exists()}
    PAGE.write_text(page(PAGE.read_text(), tallies))
    return 1 if any(tally["failures"] for tally in tallies.values()) else 0


def _run(name: str, arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", f"tests.reliability.{name}", *arguments, "--json"]
    if name == "chaos":
        command = [sys.executable, "-m", "tests.real_s3.server", "run", "--", *command]
    done = subprocess.run(command, cwd=TOP, stdout=subprocess.PIPE, text=True, check=False)
    tally: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    head = ["git", "rev-parse", "--short", "HEAD"]
    return tally | {"commit": subprocess.check_output(head, cwd=TOP, text=True).strip()}


def page(text: str, tallies: dict[str, dict[str, Any]]) -> str:
    """Return the page with the figures of tallies."""
    for name, tally in tallies.items():
        found = [f"{tally['found'].get(kind, 0):,}" for kind in Tally.KINDS]
        cells = (f"[{name}](#{name})", tally["commit"], f"{tally['seconds'] / 60:.0f}", *found)
        tried = ", ".join(f"{what} {count:,}" for what, count in tally["tried"].items())
        figures = f"`{tally['command']}`:\n{textwrap.fill(tried, 120)}\n"
        text = _replaced(text, rf"^\| \[{name}\].*", f"| {' | '.join(cells)} |")
        section = rf"(?<=^## {name}\n)((?:(?!## ).*\n)*?)^`python .*:\n(?:.+\n)*"
        text = _replaced(text, section, rf"\g<1>{figures}")
    return text


def _replaced(text: str, pattern: str, new: str) -> str:
    made, times = re.subn(pattern, new, text, count=1, flags=re.MULTILINE)
    assert times == 1, f"{PAGE} lacks {pattern}"
    return made


if __name__ == "__main__":
    sys.exit(main())
