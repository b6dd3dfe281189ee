"""`tiered-index spark merge`: uploaded files become window tables, by executors."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import typer

from tiered_index.cli.output import counted, human_bytes, human_seconds
from tiered_index.cli.session import Session, command
from tiered_index.cli.spark.sharing import Conf, Master, progress_of, spark_of
from tiered_index.cli.times import duration_option, human_duration, time_option
from tiered_index.errors import ConfigError
from tiered_index.service.merge.run import MergeOptions

__all__ = ["merge"]

_LEFT_SHOWN = 5


@command
def merge(
    session: Session,
    window: Annotated[
        int, typer.Option(parser=duration_option, metavar="1h|1d|30d", help="Length of a window, from the epoch on.", show_default="1d")
    ] = 86400,
    begin: Annotated[int | None, typer.Option(parser=time_option, metavar="T", help="Only what begins here or later.")] = None,
    end: Annotated[int | None, typer.Option(parser=time_option, metavar="T", help="Only what ends here or earlier, inclusive.")] = None,
    min_age: Annotated[
        int, typer.Option(parser=duration_option, metavar="1h", help="Only windows that ended this long ago.", show_default="1h")
    ] = 3600,
    shard_bytes: Annotated[int, typer.Option(help="Size of a shard at which a window is cut, about; one a task.")] = 256 << 20,
    master: Master = None,
    conf: Conf = None,
) -> int:
    """Merge uploaded files, and tables of shorter windows, into window tables: `tiered-index merge` by any number of executors.

    [bold]Examples[/bold]

      tiered-index spark merge --storage s3://bucket/index --window 1d

      tiered-index spark merge --storage s3://bucket/index --window 30d --master spark://host:7077
    """
    config = session.config()
    if config.storage is None:
        raise ConfigError("no storage is given: --storage URI")
    options = MergeOptions(
        min_age_s=min_age,
        shard_bytes=shard_bytes,
        begin_s=begin // 1000 if begin is not None else 0,
        end_s=end // 1000 + 1 if end is not None else 1 << 62,
    )
    spark = spark_of(master, conf)
    from tiered_index.spark.merge import merge as merge_tables

    begun = time.monotonic()
    report = merge_tables(spark, storage=config.storage, window=window, options=options, s3=config.s3, progress=progress_of(session))
    elapsed_s = time.monotonic() - begun
    if session.out.as_json:
        status = "merged" if report.jobs else "nothing to do"
        left = [list(pair) for pair in report.left]
        session.out.document({"status": status, "window_s": window, **asdict(report), "left": left, "elapsed_s": round(elapsed_s, 3)})
        return 0
    if report.jobs:
        session.out.line(
            f"windows of {human_duration(window)}: {counted(report.sources, 'object')} with {counted(report.entries, 'entry', 'entries')} "
            f"became {counted(report.tables, 'table')} of {counted(report.shards, 'shard')}, {human_bytes(report.written_bytes)}, "
            f"{human_seconds(elapsed_s)}"
        )
    else:
        session.out.line(f"windows of {human_duration(window)}: nothing to merge")
    for name, reason in report.left[:_LEFT_SHOWN]:
        session.out.note(f"left as it is: {name}: {reason}")
    if len(report.left) > _LEFT_SHOWN:
        session.out.note(f"left as they are: {len(report.left) - _LEFT_SHOWN:,} more")
    return 0
