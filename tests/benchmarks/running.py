"""Run suites of figures in a new folder, and print the results."""

from __future__ import annotations

import cProfile
import itertools
import json
import os
import pstats
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from tests.benchmarks.machine.figures import Figure, Frame, Meter, Suite, Table, facts
from tests.benchmarks.machine.setting import Setting, scratch
from tests.support.environment import own_environment
from tiered_index.cli.output import Output, human_bytes, human_seconds
from tiered_index.cli.session import Session
from tiered_index.errors import DiskFull, InvalidArgument
from tiered_index.format.layout import PRESETS, Layout

_FRAMES = 8
_COLUMNS = ("figure", "median", "unit", "min", "max", "goal", "met")
_QUICK = (500_000, 2_000_000)
Preset = Annotated[Literal["native", "rocketmq"], Option(help="File family.")]
Slots = Annotated[int | None, Option(min=1, help="Hash slots per file. Default: the preset's.")]
Items = Annotated[int | None, Option(min=1_000, help="Items per file. Default: the preset's.")]
Rounds = Annotated[int, Option(min=1, help="Rounds; figures are their medians.")]
Quick = Annotated[bool, Option("--quick", help="Smaller amounts. Default: 500,000 slots and 2,000,000 items.")]
RootDir = Annotated[Path | None, Option(help="Folder to measure in. Default: TMPDIR or /var/tmp.")]
Out = Annotated[Path | None, Option(help="Write the JSON document to this file, too.")]


def base_folder(root_dir: Path | None) -> Path:
    """Return the folder to measure in, and make it if it is missing."""
    base = (root_dir or Path(os.environ.get("TMPDIR", "/var/tmp"))).absolute()
    base.mkdir(parents=True, exist_ok=True)
    return base


def write_document(out: Path | None, document: object) -> None:
    """Write a document of figures to a file, if one is named."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=1) + "\n")


def check_places(session: Session, suites: Sequence[str] | None, stored: Mapping[str, Callable[[str], object]]) -> None:
    """Raise `InvalidArgument` for a root, for a file of settings, and for a storage that the suites don't read from.

    `stored`: the suites that read from the user's storage, each alone, with its check of the storage.
    """
    alone = suites[0] if suites is not None and len(suites) == 1 else None
    if (
        session.root is not None
        or session.config_file is not None
        or (session.storage is not None and alone not in stored)
    ):
        raise InvalidArgument(
            f"bench makes its own indexes in --root-dir: leave out --root and --config; give --storage only with suite "
            f"{' or '.join(stored)} alone"
        )
    if session.storage is not None and alone is not None:
        stored[alone](session.storage)


def layout_of(preset: str, slots: int | None, items: int | None, *, quick: bool) -> Layout:
    """Return the geometry that the options name."""
    family = PRESETS[preset]
    standard = _QUICK if quick else (family.slots, family.items)
    return Layout(family, family.schema, slots or standard[0], items or standard[1])


def measure(
    session: Session,
    suites: Sequence[Suite],
    setting: Setting,
    root_dir: Path | None,
    out: Path | None,
    space_bytes: int,
) -> int:
    """Run suites in a new folder and report. Raises `DiskFull` if fewer than `space_bytes` are free."""
    started_s = time.monotonic()
    base = base_folder(root_dir)
    if (free := shutil.disk_usage(base).free) < space_bytes:
        raise DiskFull(
            f"{base} has {human_bytes(free)} free; the benchmark needs {human_bytes(space_bytes)} (--root-dir, --items)"
        )
    machine = facts(base)
    tables: list[Table] = []
    done = itertools.count(1)
    with (
        own_environment(),
        scratch(base) as folder,
        session.out.progress("measuring", sum(suite.passes for suite in suites) * setting.rounds) as progress,
    ):
        figures = list(run_suites(suites, setting, folder, lambda suite: progress.update(next(done), suite), tables))
    elapsed_s = time.monotonic() - started_s
    document = {
        "machine": machine,
        "setting": setting.describe(),
        "figures": [figure.to_dict() for figure in figures],
        "tables": [asdict(table) for table in tables],
        "missed": [f"{figure.suite}: {figure.spec.name}" for figure in figures if figure.met is False],
        "elapsed_s": round(elapsed_s, 1),
    }
    write_document(out, document)
    session.out.answer(document)
    print_report(session.out, machine, setting, figures, elapsed_s, tables)
    return 0


def run_suites(
    suites: Sequence[Suite],
    setting: Setting,
    folder: Path,
    tick: Callable[[str], None],
    tables: list[Table] | None = None,
) -> Iterator[Figure]:
    """Yield every figure, and add tables to `tables`. `tick` gets the suite's name after each pass of a round."""
    for suite in suites:
        meter = Meter(setting.rounds, partial(tick, suite.name))
        with scratch(folder) as place:
            suite.run(setting, place, meter)
        if tables is not None:
            tables.extend(replace(table, suite=suite.name) for table in meter.tables)
        figures = [Figure(suite.name, spec, tuple(meter.values[spec.name])) for spec in suite.specs(setting)]
        missed = [figure.spec for figure in figures if figure.met is False and figure.spec.sections]
        profiled = Meter(1, lambda: None, {section for spec in missed for section in spec.sections})
        if missed:
            with scratch(folder) as place:
                suite.run(setting, place, profiled)
        for figure in figures:
            sections = figure.spec.sections if figure.spec in missed else ()
            yield replace(figure, frames=_top([profiled.profiles[section] for section in sections]))


def _top(profiles: Sequence[cProfile.Profile]) -> tuple[Frame, ...]:
    """Return the functions with the most time in themselves."""
    if not profiles:
        return ()
    stats: Any = pstats.Stats(*profiles)
    frames = []
    for (file, line, name), row in sorted(stats.stats.items(), key=lambda item: -item[1][2])[:_FRAMES]:
        function = name if file == "~" else f"{Path(file).parent.name}/{Path(file).name}:{line} {name}"
        frames.append(Frame(function, row[1], row[2]))
    return tuple(frames)


def print_report(
    out: Output,
    machine: dict[str, Any],
    setting: Setting,
    figures: Sequence[Figure],
    elapsed_s: float,
    tables: Sequence[Table] = (),
) -> None:
    """Print machine and geometry, the figures of each suite and its tables, and the profile of every missed goal."""
    layout = setting.layout
    out.fields(machine, title="machine")
    geometry = (
        f"{layout.slots:,} slots and {layout.items:,} items per file ({human_bytes(layout.unsealed_size)} unsealed)"
    )
    out.line(f"preset {layout.preset.name}: {geometry}; median of {setting.rounds} rounds")
    for suite, group in itertools.groupby(figures, key=lambda figure: figure.suite):
        out.table(_COLUMNS, [_row(figure) for figure in group], title=suite, right=("median", "min", "max"))
        for table in tables:
            if table.suite == suite:
                out.table(table.columns, [tuple(map(_cell, row)) for row in table.rows], title=table.title)
    for figure in figures:
        if figure.met is False and (goal := figure.spec.goal) is not None:
            ratio = f"{goal.ratio(figure.median):.2f} times as good as its goal"
            out.line(f"MISSED {figure.suite}: {figure.spec.name} is {ratio}")
            for frame in figure.frames:
                out.line(f"  {frame.own_s:8.3f} s in {frame.calls:>9,} calls of {frame.function}")
    out.line(f"took {human_seconds(elapsed_s)}")


def _row(figure: Figure) -> tuple[object, ...]:
    goal = figure.spec.goal
    bound = f"{'>=' if goal.is_minimum else '<='} {shown_number(goal.limit)}" if goal is not None else ""
    met = {None: "", True: "yes", False: "NO"}[figure.met]
    median, low, high = map(shown_number, (figure.median, min(figure.values), max(figure.values)))
    return figure.spec.name, median, figure.spec.unit, low, high, bound, met


def _cell(value: Any) -> object:
    return shown_number(value) if isinstance(value, int | float) else value


def shown_number(value: float) -> str:
    """Return a number as tables show it."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"
