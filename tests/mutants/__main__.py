"""Put seeded defects into copies of the tree, one at a time, and show that each turns a named test red.

The working tree is only read. First the named tests must be green without any defect. A defect counts as noticed where
its own test fails (or never ends); one that keeps Python from importing proves nothing and is called invalid, as is one
whose snippet isn't in its function exactly once any more.

examples:
  python -m tests.mutants                            all of them, two at a time (make mutants)
  python -m tests.mutants --list                     what there is, and why
  python -m tests.mutants --only 'journal-*'         some, by name; shell patterns, may be repeated
  python -m tests.mutants --jobs 1 --json > out.json one at a time; one JSON document on stdout, progress on stderr

exit codes: 0 every defect was noticed, 1 one survived or is invalid, 2 bad usage, 130 interrupted
"""

from __future__ import annotations

import argparse
import fnmatch
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.campaign import prepared_copies, run_campaign
from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import Mutant, Result, Verdict
from tiered_index.cli.output import Output
from tiered_index.cli.progress import Progress

TOP = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    options = _parser().parse_args(arguments)
    out = Output(as_json=options.json, quiet=options.quiet)
    mutants = [
        m for m in MUTANTS if not options.only or any(fnmatch.fnmatchcase(m.name, pattern) for pattern in options.only)
    ]
    if not mutants:
        out.error("usage", f"no mutant is called {' or '.join(options.only)}; --list shows all")
        return 2
    if options.list:
        _show_list(out, mutants)
        return 0
    started_s = time.monotonic()
    with (
        prepared_copies(TOP, options.jobs) as copies,
        Progress("mutants", len(mutants), quiet=options.quiet) as progress,
    ):
        results = run_campaign(mutants, copies, options.timeout, progress.update)
    _show(out, results, time.monotonic() - started_s)
    return 0 if all(result.verdict.is_red for result in results) else 1


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        "python -m tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="only mutants of this name or shell pattern"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    parser.add_argument(
        "--jobs", type=_positive, default=2, metavar="N", help="copies of the tree at work at a time (default 2)"
    )
    parser.add_argument(
        "--timeout", type=_positive, default=60, metavar="S", help="seconds for one mutant's tests (default 60)"
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _show_list(out: Output, mutants: Sequence[Mutant]) -> None:
    if out.as_json:
        out.answer(
            {
                "mutants": [
                    {"name": m.name, "why": m.why, "function": m.function, "tests": list(m.tests)} for m in mutants
                ]
            }
        )
        return
    out.table(("name", "function", "the defect"), [(m.name, m.function, m.why) for m in mutants])
    out.line(f"{len(mutants)} mutants")


def _show(out: Output, results: Sequence[Result], seconds: float) -> None:
    counts = Counter(result.verdict for result in results)
    if out.as_json:
        rows = [
            {
                "name": r.mutant.name,
                "why": r.mutant.why,
                "function": r.mutant.function,
                "line": r.line,
                "tests": list(r.mutant.tests),
                "verdict": r.verdict.value,
                "detail": r.detail,
                "seconds": round(r.seconds, 2),
            }
            for r in results
        ]
        out.answer(
            {
                "mutants": rows,
                "counts": {verdict.value: counts[verdict] for verdict in Verdict},
                "seconds": round(seconds, 1),
            }
        )
        return
    table = [
        (
            r.mutant.name,
            f"{r.mutant.function}:{r.line}",
            r.detail if r.verdict is Verdict.RED else r.mutant.tests[0],
            r.verdict.value,
            f"{r.seconds:.1f}",
        )
        for r in results
    ]
    out.table(("name", "function", "test", "verdict", "seconds"), table, right="seconds")
    for result in results:
        if not result.verdict.is_red:
            out.line(f"{result.mutant.name}: {result.verdict.value}: {result.mutant.why} ({result.detail})")
    red = counts[Verdict.RED] + counts[Verdict.TIMEOUT]
    out.line(
        f"{red} of {len(results)} defects were noticed ({counts[Verdict.TIMEOUT]} by timeout), "
        f"{counts[Verdict.SURVIVED]} survived, "
        f"{counts[Verdict.INVALID]} invalid, in {seconds:.0f} s"
    )


if __name__ == "__main__":
    # ended from outside: the copies and what runs in them go, too
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
