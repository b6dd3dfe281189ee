"""What a benchmark finds out: figures with their goals, and the suites that take them. Pure.

A suite declares its figures, then measures: `Suite.run` records one value a figure and round with a `Meter`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tiered_index.cli.bench.meter import Meter
from tiered_index.cli.bench.setting import Setting

__all__ = ["Figure", "Frame", "Goal", "Spec", "Suite", "at_least", "at_most"]


@dataclass(frozen=True)
class Goal:
    """A bound that the median should keep."""

    limit: float
    is_minimum: bool

    def met(self, value: float) -> bool:
        """Return whether `value` keeps it."""
        return value >= self.limit if self.is_minimum else value <= self.limit

    def ratio(self, value: float) -> float:
        """Return how many times as good as the goal `value` is: 1 or more where the goal is met."""
        if self.is_minimum:
            return value / self.limit
        return self.limit / value if value > 0 else float("inf")


def at_least(limit: float) -> Goal:
    """Return the goal of a figure that should be great."""
    return Goal(limit, is_minimum=True)


def at_most(limit: float) -> Goal:
    """Return the goal of a figure that should be small."""
    return Goal(limit, is_minimum=False)


@dataclass(frozen=True)
class Spec:
    """A figure that a suite takes.

    `sections` are the meter's sections whose time it is: what a profile of it looks at.
    """

    name: str
    unit: str
    goal: Goal | None = None
    sections: tuple[str, ...] = ()


@dataclass(frozen=True)
class Frame:
    """One line of a profile: a function, how often it was called, and the seconds spent in itself."""

    function: str
    calls: int
    own_s: float


@dataclass(frozen=True)
class Figure:
    """A figure with its values, one a round, and for a missed goal the profile's top frames."""

    suite: str
    spec: Spec
    values: tuple[float, ...]
    frames: tuple[Frame, ...] = ()

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        """Whether the median keeps the goal; None without one."""
        return self.spec.goal.met(self.median) if self.spec.goal is not None else None

    def to_dict(self) -> dict[str, Any]:
        """Return the figure JSON-ready."""
        goal = self.spec.goal
        document: dict[str, Any] = {
            "suite": self.suite,
            "name": self.spec.name,
            "unit": self.spec.unit,
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "rounds": len(self.values),
            "values": list(self.values),
            "goal": None,
            "met": self.met,
        }
        if goal is not None:
            document["goal"] = {"limit": goal.limit, "is": "at least" if goal.is_minimum else "at most"}
            document["times_as_good_as_goal"] = goal.ratio(self.median)
        if self.frames:
            document["profile"] = [{"function": f.function, "calls": f.calls, "own_s": f.own_s} for f in self.frames]
        return document


class Suite(Protocol):
    """A group of figures taken on the same files."""

    @property
    def name(self) -> str:
        """The word on the command line."""
        ...

    @property
    def passes(self) -> int:
        """How often `run` goes through the rounds: what progress counts."""
        ...

    def specs(self, setting: Setting) -> Sequence[Spec]:
        """Return the figures that `run` records, in the order of the table."""
        ...

    def run(self, setting: Setting, folder: Path, meter: Meter) -> None:
        """Measure in the empty `folder`: record every figure once a round."""
        ...
