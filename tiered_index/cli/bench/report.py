"""The benchmark's report: one JSON document, or a table and what there is to say of missed goals."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from tiered_index.cli.bench.figures import Figure
from tiered_index.cli.bench.setting import Setting
from tiered_index.cli.bench.table import Table
from tiered_index.cli.output import Printer, human_bytes, human_seconds

__all__ = ["document_of", "print_report"]

_COLUMNS = ("figure", "median", "unit", "min", "max", "goal", "met")


def document_of(
    machine: dict[str, Any], setting: Setting, figures: Sequence[Figure], elapsed_s: float, tables: Sequence[Table] = ()
) -> dict[str, Any]:
    """Return everything that was found out, JSON-ready."""
    return {
        "machine": machine,
        "setting": setting.describe(),
        "figures": [figure.to_dict() for figure in figures],
        "tables": [table.to_dict() for table in tables],
        "missed": [f"{figure.suite}: {figure.spec.name}" for figure in figures if figure.met is False],
        "elapsed_s": round(elapsed_s, 1),
    }


def print_report(
    out: Printer,
    machine: dict[str, Any],
    setting: Setting,
    figures: Sequence[Figure],
    elapsed_s: float,
    tables: Sequence[Table] = (),
) -> None:
    """Print machine and geometry, the figures of each suite and its tables, and the profile of every missed goal."""
    layout = setting.layout
    out.facts(machine, title="machine")
    geometry = (
        f"{layout.slots:,} slots and {layout.items:,} items a file ({human_bytes(layout.unsealed_size)} unsealed)"
    )
    out.line(f"preset {layout.preset.name}: {geometry}; median of {setting.rounds} rounds")
    for suite, group in itertools.groupby(figures, key=lambda figure: figure.suite):
        out.table(_COLUMNS, [_row(figure) for figure in group], title=suite, right="median min max")
        for table in tables:
            if table.suite == suite:
                out.table(table.columns, [tuple(map(_cell, row)) for row in table.rows], title=table.title)
    for figure in figures:
        if figure.met is False:
            _print_missed(out, figure)
    out.line(f"took {human_seconds(elapsed_s)}")


def _row(figure: Figure) -> tuple[object, ...]:
    goal = figure.spec.goal
    bound = f"{'>=' if goal.is_minimum else '<='} {_number(goal.limit)}" if goal is not None else ""
    met = {None: "", True: "yes", False: "NO"}[figure.met]
    values = (_number(value) for value in (figure.median, min(figure.values), max(figure.values)))
    median, low, high = values
    return figure.spec.name, median, figure.spec.unit, low, high, bound, met


def _print_missed(out: Printer, figure: Figure) -> None:
    assert figure.spec.goal is not None
    out.line(
        f"MISSED {figure.suite}: {figure.spec.name} is {figure.spec.goal.ratio(figure.median):.2f} times as good as "
        f"its goal"
    )
    for frame in figure.frames:
        out.line(f"  {frame.own_s:8.3f} s in {frame.calls:>9,} calls of {frame.function}")


def _cell(value: Any) -> object:
    return _number(value) if isinstance(value, int | float) else value


def _number(value: float) -> str:
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"
