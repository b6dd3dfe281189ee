"""One seeded defect, and what became of it. Pure."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from enum import Enum

__all__ = ["Mutant", "OutOfDate", "Result", "Verdict", "mutate"]

PACKAGE = "tiered_index"


class OutOfDate(Exception):
    """The mutant's snippet isn't in the code exactly once, or what comes of a module is no Python: the catalogue must
    follow the code.
    """


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old`, which occurs exactly once in `file` (below the package), becomes `new`; then one of `tests` (pytest node
    ids) fails.
    """

    name: str
    why: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def path(self) -> str:
        """Path of the file below the top of the tree."""
        return f"{PACKAGE}/{self.file}"


class Verdict(Enum):
    """What the tests said."""

    RED = "red"
    TIMEOUT = "red by timeout"
    SURVIVED = "SURVIVED"
    INVALID = "invalid"

    @property
    def is_red(self) -> bool:
        """Whether the defect was noticed."""
        return self in (Verdict.RED, Verdict.TIMEOUT)


@dataclass(frozen=True, slots=True)
class Result:
    """One mutant's verdict; `detail` is the first failed test, or why the mutant proves nothing."""

    mutant: Mutant
    verdict: Verdict
    detail: str
    seconds: float
    line: int = 0


def mutate(mutant: Mutant, source: str) -> tuple[str, int]:
    """Return `source` with the defect in it, and the line it begins at. Raises `OutOfDate`."""
    count = source.count(mutant.old)
    if count != 1:
        raise OutOfDate(f"out of date: {mutant.path} holds its snippet {count} times, not once")
    if mutant.old == mutant.new:
        raise OutOfDate("out of date: it changes nothing")
    mutated = source.replace(mutant.old, mutant.new)
    try:
        if mutant.file.endswith(".py"):
            ast.parse(mutated)
    except SyntaxError as error:
        raise OutOfDate(f"out of date: no Python with the defect in it ({error})") from error
    return mutated, source[: source.index(mutant.old)].count("\n") + 1
