"""`python -m tests.benchmarks`: measure this machine, and this project beside others. `make bench...` runs it."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any

import typer

from tests.benchmarks.billion.command import billion
from tests.benchmarks.cold import COLD, curve_space_bytes
from tests.benchmarks.cold_peers.command import cold_peers
from tests.benchmarks.machine.cold import check_storage
from tests.benchmarks.machine.reading import COMMITLOG, LOOKUP, RECOVERY
from tests.benchmarks.machine.setting import ColdAmounts
from tests.benchmarks.machine.writing import COMPACT, PAUSE, PUT
from tests.benchmarks.merging import merging
from tests.benchmarks.running import Items, Out, Preset, Quick, RootDir, Rounds, Slots, check_places, layout_of, measure
from tests.benchmarks.scale import scale
from tests.benchmarks.setting import SparkAmounts, SparkSetting
from tests.benchmarks.soak import soak
from tests.benchmarks.spark import Spark
from tests.benchmarks.spark_lookup import SparkLookup
from tiered_index.cli.main import alone, run
from tiered_index.cli.session import Session, command
from tiered_index.errors import ConfigError

_MACHINE = (PUT, PAUSE, COMPACT, LOOKUP, RECOVERY, COMMITLOG, COLD)
SUITES: dict[str, Any] = {suite.name: suite for suite in (*_MACHINE, Spark(), SparkLookup())}
SuiteName = StrEnum("SuiteName", list(SUITES))  # type: ignore[misc]
_ON_SPARK = ("spark", "spark-lookup")


@command
def benchmarks(
    session: Session,
    suites: Annotated[
        list[SuiteName] | None, typer.Argument(help="Suites to run. Default: all except those of Spark.")
    ] = None,
    preset: Preset = "native",
    slots: Slots = None,
    items: Items = None,
    rounds: Rounds = 3,
    quick: Quick = False,
    entries: Annotated[
        int | None, typer.Option(min=1_000, help="Suites of Spark: number of entries to build, merge and look up in.")
    ] = None,
    master: Annotated[
        list[str] | None, typer.Option(help="Suite spark, and --scale: the Spark master; several times.")
    ] = None,
    scale: Annotated[
        list[int] | None,
        typer.Option(
            min=1_000,
            help="Suites of Spark: measure memory, and bytes that lookups read, with this many entries; several times.",
        ),
    ] = None,
    keys: Annotated[
        list[int] | None, typer.Option(min=1, help="Suites of Spark: number of keys to look up at once; several times.")
    ] = None,
    root_dir: RootDir = None,
    out: Out = None,
) -> int:
    """Measure puts, pauses, compaction, lookups, recovery and commit logs on this machine's real disk.

    Writes are durable. Suite cold compares cold lookups with RocketMQ's way of reading. Suites spark and spark-lookup
    compare jobs on Spark with one process, with Spark's own jobs and with DuckDB.

    All files are in a temporary folder, which is deleted at the end. A goal is for two quiet cores. A missed goal is no
    error: the report shows its ratio and a profile. Goals of whole files count only with 20,000,000 items. Wrong
    answers end the run. Only suite cold, alone, also reads from --storage. It deletes its objects there at the end.

    [bold]Examples[/bold]

      python -m tests.benchmarks --quick

      python -m tests.benchmarks put compact --preset rocketmq --rounds 5

      python -m tests.benchmarks cold --storage "s3://bucket/prefix?endpoint_url=http://127.0.0.1:7480"

      python -m tests.benchmarks spark --entries 4000000 --keys 10000 --out bench.json

      python -m tests.benchmarks spark-lookup --scale 100000000 --keys 1000000

      python -m tests.benchmarks soak --help

      python -m tests.benchmarks scale

      python -m tests.benchmarks merging --entries 1000000 --rounds 1

      python -m tests.benchmarks billion --entries 1000000
    """
    check_places(session, suites, {"cold": check_storage})
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


_WANTED = {"pyspark": "spark", "pandas": "spark", "duckdb": "bench"}
"""The packages that suites of Spark need -> the extra that has each."""


def missing_packages() -> dict[str, str]:
    """Return the packages of `_WANTED` that are not installed, with their extras."""
    return {name: extra for name, extra in _WANTED.items() if importlib.util.find_spec(name) is None}


def _chosen(session: Session, suites: list[SuiteName] | None) -> list[str]:
    """Return the names of the suites to run. Raises `ConfigError` for a suite of Spark without its packages."""
    chosen = [name.value for name in dict.fromkeys(suites)] if suites else [suite.name for suite in _MACHINE]
    missing = missing_packages()
    if missing and (lacking := [name for name in chosen if name in _ON_SPARK]):
        extras = ",".join(sorted(set(missing.values())))
        raise ConfigError(f"suite {lacking[0]} needs {', '.join(missing)}: pip install '.[{extras}]'")
    return chosen


app = alone(benchmarks)
# these programs have their own options
PROGRAMS = {
    "billion": alone(billion),
    "cold-peers": alone(cold_peers),
    "merging": alone(merging),
    "scale": alone(scale),
    "soak": alone(soak),
}


def main(arguments: list[str] | None = None) -> None:
    """Run one command line (the process's own by default) and exit with its code."""
    given = sys.argv[1:] if arguments is None else arguments
    if given and given[0] in PROGRAMS:
        run(given[1:], PROGRAMS[given[0]], f"python -m tests.benchmarks {given[0]}")
    run(given, app, "python -m tests.benchmarks")
