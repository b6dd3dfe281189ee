"""A campaign: the named tests must be green without defects, then each defect must turn one of its own tests red.

Threads: as many as there are copies, each with a copy of its own.
"""

from __future__ import annotations

import queue
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from tests.mutants.copies import Copy, Run, copy_tree
from tests.mutants.mutant import Mutant, OutOfDate, Result, Verdict

__all__ = ["judge", "prepared_copies", "run_campaign", "try_mutant"]

_BASELINE_TIMEOUTS = 10
# the unmutated run has all tests in it, so it may take this many times as long as one mutant's
_FAILED = 1
# pytest's exit code where tests ran and one failed; others tell of usage, collection or interruption


@contextmanager
def prepared_copies(source: Path, count: int) -> Iterator[list[Copy]]:
    """Yield `count` copies of the tree at `source` in a private folder, which is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [Path(folder) / str(number) for number in range(count)]
        copy_tree(source, trees[0])
        for tree in trees[1:]:
            shutil.copytree(trees[0], tree)
        copies = [Copy(tree) for tree in trees]
        try:
            yield copies
        finally:
            for copy in copies:
                copy.stop()


def run_campaign(
    mutants: Sequence[Mutant],
    copies: Sequence[Copy],
    timeout_s: float,
    tell: Callable[[int, str], None] = lambda done, what: None,
) -> list[Result]:
    """Return the results in order of `mutants`; `tell` is called in this thread with how many are done. Raises
    `NotTheCopy`.
    """
    free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def baseline(share: Sequence[str]) -> dict[str, str]:
        with _lent(free) as copy:
            return _not_green(copy, share, timeout_s)

    def trial(mutant: Mutant) -> Result:
        with _lent(free) as copy:
            return try_mutant(mutant, copy, timeout_s, sick)

    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    sick: dict[str, str] = {}
    results: dict[str, Result] = {}
    with ThreadPoolExecutor(len(copies), "mutants") as pool:
        try:
            tell(0, f"{len(tests)} tests without defects")
            shares = [tests[start :: len(copies)] for start in range(len(copies))]
            for found in pool.map(baseline, shares):
                sick |= found
            for future in as_completed([pool.submit(trial, mutant) for mutant in mutants]):
                result = future.result()
                results[result.mutant.name] = result
                tell(len(results), f"{result.mutant.name}: {result.verdict.value}")
        except BaseException:
            for copy in copies:
                copy.stop()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return [results[mutant.name] for mutant in mutants]


@contextmanager
def _lent(free: queue.SimpleQueue[Copy]) -> Iterator[Copy]:
    copy = free.get()
    try:
        yield copy
    finally:
        free.put(copy)


def _not_green(copy: Copy, tests: Sequence[str], timeout_s: float) -> dict[str, str]:
    """Return the tests that don't pass without any defect, and why."""
    if not tests:
        return {}
    run = copy.run(tests, timeout_s * _BASELINE_TIMEOUTS, until_first=False)
    if run.code not in (0, _FAILED) and len(tests) > 1:
        # one name that isn't found stops all: ask by halves
        middle = len(tests) // 2
        return _not_green(copy, tests[:middle], timeout_s) | _not_green(copy, tests[middle:], timeout_s)
    if run.code is None:
        return dict.fromkeys(tests, "takes too long without any defect")
    if run.code not in (0, _FAILED):
        return dict.fromkeys(tests, f"can't be run: {_last_line(run)}")
    failed = [test for test, _ in run.failed]
    return {
        test: "is not green without any defect"
        for test in tests
        if any(_is_of(node, test) for node in failed) or not any(_is_of(node, test) for node in run.passed)
    }


def try_mutant(mutant: Mutant, copy: Copy, timeout_s: float, sick: dict[str, str]) -> Result:
    """Put one defect in, run its tests, take it out, and say what happened; `sick` tests can't tell."""
    started_s = time.monotonic()
    try:
        with copy.mutated(mutant) as line:
            for test in mutant.tests:
                if test in sick:
                    return Result(mutant, Verdict.INVALID, f"{test} {sick[test]}", 0.0, line)
            verdict, detail = judge(mutant, copy.run(mutant.tests, timeout_s))
            return Result(mutant, verdict, detail, time.monotonic() - started_s, line)
    except OutOfDate as error:
        return Result(mutant, Verdict.INVALID, str(error), 0.0)


def judge(mutant: Mutant, run: Run) -> tuple[Verdict, str]:
    """Say what a run of a mutant's tests means: red only where a named test itself failed, not something before or
    around it.
    """
    if run.code is None:
        return Verdict.TIMEOUT, "no end in sight"
    if run.code == 0:
        return Verdict.SURVIVED, f"{len(run.passed)} passed"
    failed = [
        node for node, phase in run.failed if phase == "call" and any(_is_of(node, test) for test in mutant.tests)
    ]
    if run.code == _FAILED and failed:
        return Verdict.RED, failed[0]
    if run.code == _FAILED:
        return Verdict.INVALID, f"failed outside of its test: {_last_line(run)}"
    return Verdict.INVALID, f"pytest's exit code {run.code}: {_last_line(run)}"


def _is_of(node: str, test: str) -> bool:
    return node == test or node.startswith((f"{test}[", f"{test}::"))


def _last_line(run: Run) -> str:
    lines = [line for line in run.output.splitlines() if line.strip()]
    return next(
        (line for line in reversed(lines) if line.startswith(("ERROR", "E  ", "FAILED"))),
        lines[-1] if lines else "no output",
    )
