"""`tiered-index bench`: measure this machine; what `make bench` and `make bench-quick` run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from tiered_index.cli.bench.cold.amounts import Amounts
from tiered_index.cli.bench.cold.files import check_storage
from tiered_index.cli.bench.figures import Figure
from tiered_index.cli.bench.machine import facts
from tiered_index.cli.bench.report import document_of, print_report
from tiered_index.cli.bench.running import SUITES, run_suites
from tiered_index.cli.bench.setting import Setting, scratch
from tiered_index.cli.bench.spark.amounts import SparkAmounts
from tiered_index.cli.bench.spark.duck import missing_packages
from tiered_index.cli.bench.spark.lookups import place_of_uri
from tiered_index.cli.bench.table import Table
from tiered_index.cli.output import human_bytes
from tiered_index.cli.session import Session, command
from tiered_index.errors import ConfigError, DiskFull, InvalidArgument
from tiered_index.format.layout import PRESETS, Layout

__all__ = ["bench"]

_SETTINGS = "TIERED_INDEX_"
_QUICK = (500_000, 2_000_000)
SuiteName = StrEnum("SuiteName", list(SUITES))  # type: ignore[misc]
"""The suites as typer wants its choices."""
_SPARK = "spark"
_ON_SPARK = (_SPARK, "spark-lookup")
_READ_STORED = ([SuiteName("cold")], [SuiteName(_SPARK)])
# suites that read from the user's storage, each alone


@command
def bench(
    session: Session,
    suites: Annotated[
        list[SuiteName] | None,
        typer.Argument(help="Suites to run; all where none is named (spark where its packages are installed)."),
    ] = None,
    preset: Annotated[Literal["native", "rocketmq"], typer.Option(help="File family.")] = "native",
    slots: Annotated[int | None, typer.Option(min=1, help="Hash slots a file; the preset's where not given.")] = None,
    items: Annotated[int | None, typer.Option(min=1_000, help="Items a file; the preset's where not given.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; figures are their medians.")] = 3,
    quick: Annotated[
        bool, typer.Option("--quick", help="Smaller amounts; 500,000 slots and 2,000,000 items where not given.")
    ] = False,
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
        list[int] | None, typer.Option(min=1, help="Suite spark-lookup: keys that are looked up; several times.")
    ] = None,
    root_dir: Annotated[
        Path | None, typer.Option(help="Folder to measure in; TMPDIR or /var/tmp where not given.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the JSON document to this file, too.")] = None,
) -> int:
    """Measure this machine: puts, pauses, compaction, lookups, recovery and uploads, on its real disk, durably; what
    cold lookups cost.

    Everything happens in a temporary folder, which is deleted at the end. A goal is what the project wants of two quiet
    cores; a missed one is shown with its ratio and the functions that took most of the time, and is no error. Goals of
    whole files count at 20,000,000 items only. Wrong answers end the run. Suite cold reads through an injected latency,
    or from --storage, where it deletes what it made.

    [bold]Examples[/bold]

      tiered-index bench --quick

      tiered-index bench put compact --preset rocketmq --rounds 5

      tiered-index bench cold --storage "s3://bucket/prefix?endpoint_url=http://127.0.0.1:7480"

      tiered-index bench spark --entries 4000000

      tiered-index bench spark-lookup --quick

      tiered-index bench spark --scale 25000000 --scale 100000000

      tiered-index bench spark-lookup --scale 100000000 --keys 1000000

      tiered-index bench --slots 5000000 --items 20000000 --json --out bench.json
    """
    if (
        session.root is not None
        or session.config_file is not None
        or (session.storage is not None and suites not in _READ_STORED)
    ):
        raise InvalidArgument(
            "bench measures indexes of its own, in --root-dir: no --root, --config, nor --storage but for suite cold "
            "or spark alone"
        )
    if session.storage is not None:
        check_storage(session.storage) if suites == _READ_STORED[0] else place_of_uri(session.storage)
    names = _chosen(session, suites)
    started_s = time.monotonic()
    family = PRESETS[preset]
    standard = _QUICK if quick else (family.slots, family.items)
    layout = Layout(family, family.schema, slots or standard[0], items or standard[1])
    setting = Setting.of(layout, rounds, quick=quick, storage=session.storage)
    setting = replace(
        setting, spark_entries=entries, masters=tuple(master or ()), scale=tuple(scale or ()), keys=tuple(keys or ())
    )
    chosen = [SUITES[name] for name in names]
    base = (root_dir or Path(os.environ.get("TMPDIR", "/var/tmp"))).absolute()
    base.mkdir(parents=True, exist_ok=True)
    wanted = max(setting.space_bytes, Amounts.of(setting).space_bytes)
    if set(names) & set(_ON_SPARK):
        wanted = max(wanted, SparkAmounts.of(setting).space_bytes)
    if (free := shutil.disk_usage(base).free) < wanted:
        raise DiskFull(
            f"{base} has {human_bytes(free)} free; the benchmark wants {human_bytes(wanted)} (--root-dir, --items)"
        )
    machine = facts(base)
    figures: list[Figure] = []
    tables: list[Table] = []
    done = 0
    with (
        _own_settings(),
        scratch(base) as folder,
        session.progress("measuring", sum(s.passes for s in chosen) * rounds) as progress,
    ):

        def tick(suite: str) -> None:
            nonlocal done
            done += 1
            progress.update(done, suite)

        figures.extend(run_suites(chosen, setting, folder, tick, tables))
    elapsed_s = time.monotonic() - started_s
    document = document_of(machine, setting, figures, elapsed_s, tables)
    if out is not None:
        out.write_text(json.dumps(document, indent=2) + "\n")
    if session.out.as_json:
        session.out.document(document)
    else:
        print_report(session.out, machine, setting, figures, elapsed_s, tables)
    return 0


def _chosen(session: Session, suites: Sequence[SuiteName] | None) -> list[str]:
    """Return the names of the suites to run. Raises `ConfigError` where spark is asked for and packages are missing."""
    missing = missing_packages()
    extras = f"pip install 'tiered_index[{','.join(sorted(set(missing.values())))}]'"
    if suites:
        if asked := [suite for suite in suites if missing and suite in _ON_SPARK]:
            raise ConfigError(f"suite {asked[0]} needs {', '.join(missing)}: {extras}")
        return [name.value for name in dict.fromkeys(suites)]
    if missing:
        session.out.note(f"suite spark is left out: {', '.join(missing)} not installed ({extras})")
    return [name for name in SUITES if name not in _ON_SPARK or not missing]


@contextlib.contextmanager
def _own_settings() -> Iterator[None]:
    """Hide settings that are meant for the user's own index."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(_SETTINGS):
            del os.environ[name]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
