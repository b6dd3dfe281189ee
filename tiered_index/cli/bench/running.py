"""Running suites: each in a folder of its own, and for missed goals one more round under a profile. One thread."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiered_index.cli.bench.figures import Figure, Frame, Spec, Suite
from tiered_index.cli.bench.meter import Meter
from tiered_index.cli.bench.setting import Setting, scratch
from tiered_index.cli.bench.spark_lookup import SparkLookup
from tiered_index.cli.bench.suites.cold import Cold
from tiered_index.cli.bench.suites.commitlog import CommitLog
from tiered_index.cli.bench.suites.compact import Compact
from tiered_index.cli.bench.suites.lookup import Lookups
from tiered_index.cli.bench.suites.pause import Pause
from tiered_index.cli.bench.suites.put import Put
from tiered_index.cli.bench.suites.recovery import Recovery
from tiered_index.cli.bench.suites.spark import Spark
from tiered_index.cli.bench.suites.upload import Upload
from tiered_index.cli.bench.table import Table

__all__ = ["SUITES", "run_suites"]

_ALL: tuple[Suite, ...] = (
    Put(),
    Pause(),
    Compact(),
    Lookups(),
    Recovery(),
    Upload(),
    CommitLog(),
    Cold(),
    Spark(),
    SparkLookup(),
)
SUITES: dict[str, Suite] = {suite.name: suite for suite in _ALL}
_FRAMES = 8


def run_suites(
    suites: Sequence[Suite],
    setting: Setting,
    folder: Path,
    tick: Callable[[str], None],
    tables: list[Table] | None = None,
) -> Iterator[Figure]:
    """Yield every figure of every suite as it is known, and add its tables to `tables`.

    `tick` is called with the suite's name after each pass of each round.
    """
    for suite in suites:
        figures = _figures(suite, setting, folder, tick, tables)
        missed = [figure.spec for figure in figures if figure.met is False and figure.spec.sections]
        frames = _frames(suite, setting, folder, missed) if missed else {}
        for figure in figures:
            yield Figure(figure.suite, figure.spec, figure.values, frames.get(figure.spec.name, ()))


def _figures(
    suite: Suite, setting: Setting, folder: Path, tick: Callable[[str], None], tables: list[Table] | None
) -> list[Figure]:
    meter = Meter(setting.rounds, lambda: tick(suite.name))
    _measure(suite, setting, folder, meter)
    if tables is not None:
        tables.extend(replace(table, suite=suite.name) for table in meter.tables)
    return [Figure(suite.name, spec, tuple(meter.values[spec.name])) for spec in suite.specs(setting)]


def _frames(suite: Suite, setting: Setting, folder: Path, missed: Sequence[Spec]) -> dict[str, tuple[Frame, ...]]:
    """Return the top frames of each missed figure, by its name."""
    meter = Meter(1, lambda: None, {section for spec in missed for section in spec.sections})
    _measure(suite, setting, folder, meter)
    return {spec.name: _top([meter.profiles[section] for section in spec.sections]) for spec in missed}


def _measure(suite: Suite, setting: Setting, folder: Path, meter: Meter) -> None:
    with scratch(folder) as place:
        suite.run(setting, place, meter)


def _top(profiles: Sequence[cProfile.Profile]) -> tuple[Frame, ...]:
    """Return the functions that took most time in themselves."""
    stats: Any = pstats.Stats(profiles[0])
    for profile in profiles[1:]:
        stats.add(profile)
    rows = sorted(stats.stats.items(), key=lambda row: -row[1][2])[:_FRAMES]
    return tuple(Frame(_named(function), row[1], row[2]) for function, row in rows)


def _named(function: tuple[str, int, str]) -> str:
    file, line, name = function
    return name if file == "~" else f"{Path(file).parent.name}/{Path(file).name}:{line} {name}"
