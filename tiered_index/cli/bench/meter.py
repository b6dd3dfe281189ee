"""The meter: wall and CPU time of named sections, one value a figure and round, and profiles of chosen sections.

One thread: the suite's. CPU time is the whole process's, so work of threads beside the section counts too.
"""

from __future__ import annotations

import cProfile
import time
from collections.abc import Callable, Collection, Iterator
from types import TracebackType

import numpy as np

from tiered_index.cli.bench.table import Table

__all__ = ["Meter", "Section", "percentiles_us"]


class Section:
    """Time of a piece of work, summed over every time it is entered."""

    def __init__(self, profile: cProfile.Profile | None) -> None:
        self.elapsed_s = 0.0
        self.cpu_s = 0.0
        self._profile = profile
        self._started: tuple[float, float] | None = None

    def start(self) -> None:
        """Begin the section, or go on with it."""
        self._started = time.perf_counter(), time.process_time()
        if self._profile is not None:
            self._profile.enable()

    def stop(self) -> None:
        """End the section, which may be before its block ends; ended already, it stays so."""
        if self._started is None:
            return
        if self._profile is not None:
            self._profile.disable()
        elapsed_s, cpu_s = time.perf_counter() - self._started[0], time.process_time() - self._started[1]
        self._started = None
        self.elapsed_s += elapsed_s
        self.cpu_s += cpu_s

    def __enter__(self) -> Section:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Meter:
    """Takes one suite's values. `profiled` names the sections to profile: their times are then of no use."""

    def __init__(self, rounds: int, tick: Callable[[], None], profiled: Collection[str] = ()) -> None:
        self.values: dict[str, list[float]] = {}
        self.tables: list[Table] = []
        self.profiles = {name: cProfile.Profile() for name in profiled}
        self._rounds = rounds
        self._tick = tick

    def rounds(self) -> Iterator[int]:
        """Yield the number of each round."""
        for number in range(self._rounds):
            yield number
            self._tick()

    def section(self, name: str) -> Section:
        """Return a section to be entered, once or often."""
        return Section(self.profiles.get(name))

    def record(self, name: str, value: float) -> None:
        """Take this round's value of a figure."""
        self.values.setdefault(name, []).append(float(value))

    def table(self, table: Table) -> None:
        """Take a table, once for all rounds."""
        self.tables.append(table)


def percentiles_us(samples_s: Collection[float], *which: float) -> list[float]:
    """Return percentiles (100: the maximum) of times in seconds, as microseconds."""
    return (np.percentile(np.fromiter(samples_s, np.float64, len(samples_s)), which) * 1e6).tolist()  # type: ignore[no-any-return]
