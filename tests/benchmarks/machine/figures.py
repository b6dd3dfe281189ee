"""Figures with goals, tables, suites, the meter that records values, and facts about the machine (Linux).

Only the suite's thread uses this module. CPU time is the whole process's, so other threads during a section count too.
Pinning applies to the threads that it names.
"""

from __future__ import annotations

import contextlib
import cProfile
import os
import platform
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from tests.benchmarks.machine.setting import Setting, scratch
from tests.benchmarks.memory import Sampler, memory_bytes, proc_lines
from tiered_index._version import __version__
from tiered_index.heap import give_back
from tiered_index.kernels import compiled

_MIB = 1 << 20


def facts(folder: Path) -> dict[str, Any]:
    """Return the facts that figures depend on, JSON-ready. The figures are measured in `folder`."""
    return {
        "cpu": proc_lines("cpuinfo").get("model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": proc_lines("meminfo").get("MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "pyarrow": pa.__version__,
        "compiled_core": compiled() is not None,
        "tiered_index": __version__,
        "filesystem": _filesystem(folder),
        "load_average": round(os.getloadavg()[0], 2),
    }


def cores() -> tuple[int, int]:
    """Return a core for the measured work and one for everything else: the same core if there is only one."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[-1], usable[0]


def pin_thread(core: int) -> None:
    """Keep the calling thread on one core."""
    os.sched_setaffinity(0, {core})


@contextlib.contextmanager
def pinned(core: int) -> Iterator[None]:
    """Keep the whole process on one core: its threads, and those that they start."""
    usable = os.sched_getaffinity(0)
    _pin_all({core})
    try:
        yield
    finally:
        _pin_all(usable)


def _pin_all(usable: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has ended meanwhile
            os.sched_setaffinity(int(thread), usable)


def settle() -> None:
    """Sync earlier writes and give freed memory back, so that the next measurement pays for neither."""
    os.sync()
    give_back()


class MemoryWatch(Sampler):
    """While entered, a thread samples the process's anonymous memory. `peak_mib` is the greatest increase over the
    start.
    """

    period_s = 0.01

    def __init__(self) -> None:
        super().__init__()
        self.peak_mib = 0.0

    def __enter__(self) -> Self:
        self._before = memory_bytes("self", "RssAnon")
        return super().__enter__()

    def sample(self) -> None:
        self.peak_mib = max(self.peak_mib, (memory_bytes("self", "RssAnon") - self._before) / _MIB)


def _filesystem(folder: Path) -> str:
    """Return the type of the file system that holds `folder`, by the longest mount point above it."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    path = folder.resolve()
    holding = [(len(point), kind) for _, point, kind, *_ in mounts if path.is_relative_to(point)]
    return max(holding, default=(0, "unknown"))[1]


@dataclass(frozen=True)
class Table:
    """Rows of texts and numbers; None is an empty cell. The program that runs the suite sets `suite`."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    suite: str = ""


class Section:
    """Time of a piece of work: the sum over all entries of the section."""

    def __init__(self, profile: cProfile.Profile | None) -> None:
        self.elapsed_s = 0.0
        self.cpu_s = 0.0
        self._profile = profile
        self._started: tuple[float, float] | None = None

    def start(self) -> None:
        """Begin the section, or continue it."""
        self._started = time.perf_counter(), time.process_time()
        if self._profile is not None:
            self._profile.enable()

    def stop(self) -> None:
        """End the section. A call after the end changes nothing, so a block can end its section early."""
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

    def __exit__(self, *_: object) -> None:
        self.stop()


class Meter:
    """Records one suite's values and tables. `profiled` names the sections to profile. Their times are not usable."""

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
        """Return the section of this name, which you can enter more than once."""
        return Section(self.profiles.get(name))

    def record(self, name: str, value: float) -> None:
        """Record this round's value of a figure."""
        self.values.setdefault(name, []).append(float(value))

    def record_percentiles(self, which: Mapping[str, float], samples_s: Collection[float]) -> None:
        """Record percentiles (100: the maximum) of times in seconds as this round's figures, in microseconds."""
        for name, value in zip(which, percentiles_us(samples_s, *which.values()), strict=True):
            self.record(name, value)


def percentiles_us(samples_s: Collection[float], *which: float) -> list[float]:
    """Return percentiles (100: the maximum) of times in seconds, as microseconds."""
    return (np.percentile(np.fromiter(samples_s, np.float64, len(samples_s)), which) * 1e6).tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Goal:
    """A bound that the median should keep."""

    limit: float
    is_minimum: bool

    def met(self, value: float) -> bool:
        """Return whether `value` meets the goal."""
        return value >= self.limit if self.is_minimum else value <= self.limit

    def ratio(self, value: float) -> float:
        """Return the ratio of `value` to the goal: 1 or more if the value meets it."""
        if self.is_minimum:
            return value / self.limit
        return self.limit / value if value > 0 else float("inf")


at_least = partial(Goal, is_minimum=True)
"""The goal of a figure that should be great."""
at_most = partial(Goal, is_minimum=False)
"""The goal of a figure that should be small."""


@dataclass(frozen=True)
class Spec:
    """A figure that a suite measures. Its time is that of the meter's `sections`."""

    name: str
    unit: str
    goal: Goal | None = None
    sections: tuple[str, ...] = ()


@dataclass(frozen=True)
class Frame:
    """One line of a profile: a function, its number of calls, and the seconds spent in itself."""

    function: str
    calls: int
    own_s: float


@dataclass(frozen=True)
class Figure:
    """A figure with its values, one per round, and for a missed goal the profile's top frames."""

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
        """Whether the median meets the goal; None without a goal."""
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
            document["profile"] = [asdict(frame) for frame in self.frames]
        return document


@dataclass(frozen=True)
class Suite:
    """A group of figures measured on the same files; `name` is the word on the command line.

    `specs` returns the figures in the order of the table. `run` measures in an empty folder. It runs the rounds
    `passes` times, and records every figure once per round.
    """

    name: str
    specs: Callable[[Setting], Sequence[Spec]]
    run: Callable[[Setting, Path, Meter], None]
    passes: int = 1


def every_round(*parts: Callable[[Setting, Path, Meter], None]) -> Callable[[Setting, Path, Meter], None]:
    """Return the `run` of a suite that measures each part once per round, in an empty folder."""

    def run(setting: Setting, folder: Path, meter: Meter) -> None:
        for _ in meter.rounds():
            for part in parts:
                with scratch(folder) as place:
                    part(setting, place, meter)

    return run
