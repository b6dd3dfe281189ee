"""The counts and failures of a campaign. Each campaign returns and prints them, and docs/reliability.md has them."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Tally:
    """The counts and failures of one campaign.

    `tried` has the number of tries of each kind ("crash states", "seeds", "mutations of journal", ...). Each failure is
    a line in `failures`, which ends with the command to replay it. Its kind is one of `KINDS`.
    """

    KINDS = ("lost", "wrong", "untyped", "hangs")

    campaign: str
    command: str = ""
    tried: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)  # failures by kind
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def fail(self, kind: str, what: str) -> None:
        """Count a failure: ``lost`` (a durable entry), ``wrong`` (an answer), ``untyped`` (an error), ``hangs``."""
        assert kind in self.KINDS
        self.found[kind] += 1
        self.failures.append(f"{kind}: {what}")
        print(self.failures[-1], file=sys.stderr, flush=True)

    def add(self, other: Tally) -> None:
        """Add the counts and failures of another process."""
        self.tried += other.tried
        self.found += other.found
        self.failures += other.failures


def main(
    doc: str, run: Callable[[argparse.Namespace], Tally], add_arguments: Callable[[argparse.ArgumentParser], None]
) -> int:
    """Run a campaign as a program and return its exit code: 1 after a failure.

    It prints failures on stderr, and the tally on stdout (``--json``: one document).
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the tally as one JSON document")
    add_arguments(parser)
    options = parser.parse_args()
    logging.getLogger("tiered_index").setLevel(logging.CRITICAL)  # the engine logs each injected fault
    began_s = time.monotonic()
    tally = run(options)
    tally.seconds = round(time.monotonic() - began_s, 1)
    given = [word for word in sys.argv[1:] if word != "--json"]
    tally.command = " ".join(["python -m", sys.modules["__main__"].__spec__.name, *given])
    if options.json:
        print(json.dumps(vars(tally), indent=1))
    else:
        lines = [*tally.tried.items(), *((kind, tally.found[kind]) for kind in Tally.KINDS), ("seconds", tally.seconds)]
        for name, count in lines:
            print(f"{name:40} {count:>12,}")
    return 1 if tally.failures else 0
