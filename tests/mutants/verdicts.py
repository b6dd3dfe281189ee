"""The result of a run of pytest on a defect. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

_FAILED = 1
"""pytest's exit code if tests ran and one failed; other codes mean usage, collection or an interrupt."""


class Verdict(Enum):
    """The result of the tests."""

    RED = "red"
    TIMEOUT = "red by timeout"
    GREEN = "green"
    INVALID = "proves nothing"


def judge(tests: Sequence[str], code: int, output: str) -> Verdict:
    """Return RED if a named test itself failed. A failure before or after a test is an ERROR for pytest."""
    if code == 0:
        return Verdict.GREEN
    starts = [f"FAILED {test}{end}" for test in tests for end in ("[", "::", " ", "\n")]
    failed = any(f"{line}\n".startswith(tuple(starts)) for line in output.splitlines())
    return Verdict.RED if code == _FAILED and failed else Verdict.INVALID
