"""`tiered-index spark merge`: uploaded files become window tables, by executors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from tiered_index.cli.merging import Begin, DryRun, End, MinAge, Tiers, Window, merge_options, print_report, print_total, show_plans
from tiered_index.cli.session import Session, command
from tiered_index.cli.spark.sharing import Conf, Master, Ship, progress_of, spark_of
from tiered_index.cli.stored_index import open_stored_index, storage_uri
from tiered_index.config import IndexConfig
from tiered_index.service.merge.run import MergeOptions
from tiered_index.spark.metrics import JobMetrics

__all__ = ["merge"]


@command
def merge(
    session: Session,
    window: Window = 86400,
    tiers: Tiers = None,
    begin: Begin = None,
    end: End = None,
    min_age: MinAge = 3600,
    shard_bytes: Annotated[int, typer.Option(help="Size of a shard at which a window is cut, about; one a task.")] = 256 << 20,
    dry_run: DryRun = False,
    master: Master = None,
    conf: Conf = None,
    ship: Ship = False,
) -> int:
    """Merge uploaded files, and tables of shorter windows, into window tables: `tiered-index merge` by any number of executors.

    With --dry-run Spark is not started.

    [bold]Examples[/bold]

      tiered-index spark merge --storage s3://bucket/index --window 1d --dry-run

      tiered-index spark merge --storage s3://bucket/index --tiers 1d,30d --master spark://host:7077
    """
    options = merge_options(window, tiers, begin, end, min_age, shard_bytes)
    config = session.config()
    if dry_run:
        with open_stored_index(config) as index:
            show_plans(session, index, options, config.prices)
        return 0
    _merge(session, config, options, spark_of(master, conf, ship=ship))
    return 0


def _merge(session: Session, config: IndexConfig, options: Sequence[MergeOptions], spark: Any) -> None:
    from tiered_index.spark.build.merge import merge as merge_tables

    told: list[dict[str, Any]] = []
    requests: Counter[str] = Counter()
    spent: list[JobMetrics] = []
    for chosen in options:
        result = merge_tables(
            spark, storage=storage_uri(config), window=chosen.window_s, options=chosen, s3=config.s3, prices=config.prices,
            progress=progress_of(session),
        )  # fmt: skip
        document = asdict(replace(result, metrics=JobMetrics()))
        left = [list(pair) for pair in result.left]
        told.append({"window_s": chosen.window_s, **document, "left": left, "metrics": result.metrics.to_json()})
        requests.update(result.metrics.requests)
        spent.append(result.metrics)
        if not session.out.as_json:
            print_report(session, chosen.window_s, result)
    read, written = sum(job.bytes_read for job in spent), sum(job.bytes_written for job in spent)
    print_total(session, told, result.log_number, dict(requests), read, written, sum(job.cost_usd for job in spent))
