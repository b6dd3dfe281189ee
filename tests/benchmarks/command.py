"""`python -m tests.benchmarks`: measure this project beside others; what `make bench-spark` and `make bench-s3` run."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any

import typer

from tests.benchmarks.cold import COLD_BESIDE_ROCKETMQ, curve_space_bytes
from tests.benchmarks.lookups import missing_packages, place_of_uri
from tests.benchmarks.setting import SparkAmounts, SparkSetting
from tests.benchmarks.spark import Spark
from tests.benchmarks.spark_lookup import SparkLookup
from tiered_index.cli.bench.cold import check_storage
from tiered_index.cli.bench.command import (
    Items,
    Out,
    Preset,
    Quick,
    RootDir,
    Rounds,
    Slots,
    check_places,
    layout_of,
    measure,
)
from tiered_index.cli.bench.setting import ColdAmounts
from tiered_index.cli.main import run
from tiered_index.cli.session import Session, command
from tiered_index.errors import ConfigError

SUITES: dict[str, Any] = {suite.name: suite for suite in (Spark(), SparkLookup(), COLD_BESIDE_ROCKETMQ)}
SuiteName = StrEnum("SuiteName", list(SUITES))  # type: ignore[misc]
_ON_SPARK = ("spark", "spark-lookup")


@command
def benchmarks(
    session: Session,
    suites: Annotated[
        list[SuiteName] | None,
        typer.Argument(help="Suites to run; all where none is named (Spark's where its packages are installed)."),
    ] = None,
    preset: Preset = "native",
    slots: Slots = None,
    items: Items = None,
    rounds: Rounds = 3,
    quick: Quick = False,
    entries: Annotated[
        int | None, typer.Option(min=1_000, help="Suites of Spark: entries that are built, merged, looked up.")
    ] = None,
    master: Annotated[
        list[str] | None, typer.Option(help="Suite spark, and --scale: where Spark runs; several times.")
    ] = None,
    scale: Annotated[
        list[int] | None,
        typer.Option(
            min=1_000,
            help="Suites of Spark: measure memory, of lookups also what is read, at so many entries; several times.",
        ),
    ] = None,
    keys: Annotated[
        list[int] | None, typer.Option(min=1, help="Suites of Spark: keys that are looked up at once; several times.")
    ] = None,
    root_dir: RootDir = None,
    out: Out = None,
) -> int:
    """Measure this project beside others: jobs on Spark beside one process, Spark's own jobs and DuckDB (suite spark),
    what bulk lookups read (suite spark-lookup); cold lookups beside RocketMQ's way of reading (suite cold).

    Everything happens in a temporary folder, which is deleted at the end. Wrong answers end the run. Suites spark and
    cold, each alone, read from --storage too, where they delete what they made.

    [bold]Examples[/bold]

      python -m tests.benchmarks spark --entries 4000000 --keys 10000 --out bench.json

      python -m tests.benchmarks spark --scale 25000000 --scale 100000000

      python -m tests.benchmarks spark-lookup --quick

      python -m tests.benchmarks spark-lookup --scale 100000000 --keys 1000000

      python -m tests.benchmarks cold --slots 5000000 --items 20000000 --json --out cold.json

      python -m tests.benchmarks cold --storage "s3://bucket/prefix?endpoint_url=http://127.0.0.1:7480"
    """
    check_places(session, suites, {"cold": check_storage, "spark": place_of_uri})
    names = _chosen(session, suites)
    layout = layout_of(preset, slots, items, quick=quick)
    setting = replace(
        SparkSetting(layout, rounds, quick=quick, storage=session.storage),
        spark_entries=entries,
        masters=tuple(master or ()),
        scale=tuple(scale or ()),
        keys=tuple(keys or ()),
    )
    space_bytes = max(setting.space_bytes, ColdAmounts.of(setting).space_bytes, curve_space_bytes(setting))
    if set(names) & set(_ON_SPARK):
        space_bytes = max(space_bytes, SparkAmounts.of(setting).space_bytes)
    return measure(session, [SUITES[name] for name in names], setting, root_dir, out, space_bytes)


def _chosen(session: Session, suites: list[SuiteName] | None) -> list[str]:
    """Return the names of the suites to run. Raises `ConfigError` where Spark is asked for and packages are missing."""
    missing = missing_packages()
    extras = f"pip install 'tiered_index[{','.join(sorted(set(missing.values())))}]'"
    if suites:
        if lacking := [suite for suite in suites if missing and suite in _ON_SPARK]:
            raise ConfigError(f"suite {lacking[0]} needs {', '.join(missing)}: {extras}")
        return [name.value for name in dict.fromkeys(suites)]
    if missing:
        session.out.note(f"suite spark is left out: {', '.join(missing)} not installed ({extras})")
    return [name for name in SUITES if name not in _ON_SPARK or not missing]


app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(benchmarks)


def main(arguments: list[str] | None = None) -> None:
    """Run one command line (the process's own by default) and exit with its code."""
    run(arguments, app, "python -m tests.benchmarks")
