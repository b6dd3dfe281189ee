"""Says what a run of pytest shows about a defect. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

_FAILED = 1
"""pytest's exit code where tests ran and one failed; others tell of usage, collection or an interrupt."""


class Verdict(Enum):
    """What the tests said."""

    RED = "red"
    TIMEOUT = "red by timeout"
    GREEN = "green"
    INVALID = "proves nothing"


def judge(tests: Sequence[str], code: int, output: str) -> Verdict:
    """Return RED if a named test itself failed: pytest calls what fails before or behind a test an ERROR."""
    if code == 0:
        return Verdict.GREEN
    starts = [f"FAILED {test}{end}" for test in tests for end in ("[", "::", " ", "\n")]
    failed = any(f"{line}\n".startswith(tuple(starts)) for line in output.splitlines())
    return Verdict.RED if code == _FAILED and failed else Verdict.INVALID
