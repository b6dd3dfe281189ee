"""`tiered-index spark build`: window tables straight from a source."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from tiered_index.cli.output import counted, human_bytes, human_count, human_seconds
from tiered_index.cli.session import Session, command
from tiered_index.cli.spark.sharing import Conf, Master, Ship, progress_of, spark_of
from tiered_index.cli.spark.source_options import Column, Constant, given_columns, spark_columns
from tiered_index.cli.times import format_time, human_duration
from tiered_index.errors import ConfigError, InvalidArgument
from tiered_index.spark.metrics import JobMetrics

if TYPE_CHECKING:
    from tiered_index.spark.build.build import BuildResult

__all__ = ["build"]

_WINDOWS_SHOWN = 20
_SKIPPED_SHOWN = 5


@command
def build(
    session: Session,
    source: Annotated[list[str], typer.Option(help="Parquet or NDJSON: files, folders, s3:// URIs; RocketMQ stores; archive:STORAGE-URI.")],
    window: Annotated[str, typer.Option(metavar="1h|1d|30d", help="Length of a window, from the epoch on.")] = "1d",
    column: Column = None,
    constant: Constant = None,
    shards: Annotated[str, typer.Option(metavar="auto|N", help="Shards of a window.")] = "auto",
    mode: Annotated[str, typer.Option(metavar="error|append|replace", help="What to do where a window has tables already.")] = "error",
    max_windows: Annotated[int, typer.Option(min=1, help="More windows than this are an error.")] = 10_000,
    skip_corrupt: Annotated[bool, typer.Option("--skip-corrupt", help="Pass over damage in a commit log, and count it.")] = False,
    slots: Annotated[int | None, typer.Option(help="Base slots, where the index is made.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show windows, shards, bytes, requests and cost; change nothing.")] = False,
    master: Master = None,
    conf: Conf = None,
    ship: Ship = False,
) -> int:
    """Build window tables from files or a commit log, on Spark, and publish them with one log record.

    Nothing is visible until all of it is. Timestamps that can't be right (settings max_late_s, max_early_s) go to windows of their own, and
    are counted.

    [bold]Examples[/bold]

      tiered-index spark build --source messages/ --storage file:///tmp/index --window 1d

      tiered-index spark build --source orders.parquet --column key=order_id --constant topic=orders --storage s3://bucket/index --dry-run

      tiered-index spark build --source 'archive:s3://bucket/index?store=broker-a' --storage s3://bucket/rebuilt
    """
    config = session.config(slots=slots)
    if config.storage is None:
        raise ConfigError("no storage is given: --storage URI")
    if shards != "auto" and not shards.isdecimal():
        raise InvalidArgument(f"--shards is auto or a number, not {shards!r}")
    columns, constants = given_columns(column, constant)
    spark = spark_of(master, conf, ship=ship)
    from tiered_index.spark.build.build import build as build_tables

    begun = time.monotonic()
    result = build_tables(
        spark, source, storage=config.storage, window=window, shards="auto" if shards == "auto" else int(shards),
        columns=spark_columns(columns, constants), mode=mode, config=config, max_windows=max_windows, skip_corrupt=skip_corrupt,
        dry_run=dry_run, progress=progress_of(session),
    )  # fmt: skip
    _print(session, result, time.monotonic() - begun)
    return 0


def _print(session: Session, result: BuildResult, elapsed_s: float) -> None:
    if session.out.as_json:
        document = asdict(replace(result, metrics=JobMetrics()))
        document["windows"] = [{"begin_ms": begin * 1000, "window_s": length, "entries": n} for begin, length, n in result.windows]
        document["skipped"] = [{"file": file, "begin": b, "end": e, "problem": problem} for file, b, e, problem in result.skipped]
        document["metrics"] = result.metrics.to_json()
        session.out.document({"status": "planned" if result.dry_run else "built", **document, "elapsed_s": round(elapsed_s, 3)})
        return
    shown = result.windows[:_WINDOWS_SHOWN]
    session.out.table(
        ("window", "length", "entries"),
        [(format_time(begin * 1000), human_duration(length), human_count(entries)) for begin, length, entries in shown],
        right="length entries",
    )
    if len(result.windows) > len(shown):
        session.out.line(f"and {counted(len(result.windows) - len(shown), 'further window')}")
    verb = "would become" if result.dry_run else "became"
    session.out.line(
        f"{counted(result.entries, 'entry', 'entries')} {verb} {counted(len(result.windows), 'table')} of "
        f"{counted(result.shards, 'shard')}, {human_bytes(result.written_bytes)}"
    )
    if result.quarantined:
        session.out.line(f"{counted(result.quarantined, 'entry', 'entries')} with a time that can't be right went to quarantine")
    if result.without_key:
        session.out.line(f"{counted(result.without_key, 'message')} without key made no entry")
    if result.skipped_ranges:
        stretches = counted(result.skipped_ranges, "damaged stretch", "damaged stretches")
        session.out.line(f"{stretches} passed over, {human_bytes(result.skipped_bytes)}: how many messages they had is not known")
        for file, begin, end, problem in result.skipped[:_SKIPPED_SHOWN]:
            session.out.note(f"passed over: {file}: offsets {begin} to {end}: {problem}")
    if result.removed_objects:
        session.out.line(f"{counted(result.removed_objects, 'object')} replaced")
    if result.dry_run:
        session.out.line(f"about {counted(result.requests, 'request')}, ${result.cost_usd:.6f}; nothing was changed")
    else:
        session.out.line(f"log record {result.log_number}, {human_seconds(elapsed_s)}")
