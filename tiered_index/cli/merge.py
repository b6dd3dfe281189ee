"""`tiered-index merge`: uploaded files become window tables, in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from tiered_index.cli.merging import Begin, DryRun, End, MinAge, Tiers, Window, merge_options, print_report, print_total, show_plans
from tiered_index.cli.progress import Progress
from tiered_index.cli.session import Session, command
from tiered_index.cli.stored_index import StoredIndex, open_stored_index
from tiered_index.cli.times import human_duration
from tiered_index.service.merge.run import MergeOptions, plan
from tiered_index.service.merge.run import merge as merge_tables
from tiered_index.storage.opening import probe_put_if_absent

__all__ = ["merge"]


@command
def merge(
    session: Session,
    window: Window = 86400,
    tiers: Tiers = None,
    begin: Begin = None,
    end: End = None,
    min_age: MinAge = 3600,
    shard_bytes: Annotated[int, typer.Option(help="Size of a shard at which a window is cut, about.")] = 1 << 30,
    threads: Annotated[int, typer.Option(min=1, help="Tasks at the same time.")] = 2,
    dry_run: DryRun = False,
) -> int:
    """Merge uploaded files, and tables of shorter windows, into window tables, so that a lookup costs a request a window.

    A window is a multiple of seconds from the epoch in UTC: 30d is a month of 30 days, not one of the calendar. Writers and readers may be
    at work; what was merged is removed from the log, and its objects go by `tiered-index orphans`. Repeating it is harmless.

    [bold]Examples[/bold]

      tiered-index merge --storage s3://bucket/index --window 1d --dry-run

      tiered-index merge --storage s3://bucket/index --tiers 1d,30d

      tiered-index merge --storage s3://bucket/index --window 1h --begin 2023-11-14 --min-age 10m --json
    """
    options = merge_options(window, tiers, begin, end, min_age, shard_bytes)
    config = session.config()
    with open_stored_index(config) as index:
        if dry_run:
            show_plans(session, index, options, config.prices)
            return 0
        plan(index.log, index.clock, options[0])
        # whose put-if-absent isn't one would let two jobs merge the same files
        probe_put_if_absent(index.storage)
        _merge(session, index, options, threads)
    return 0


def _merge(session: Session, index: StoredIndex, options: Sequence[MergeOptions], threads: int) -> None:
    tiers: list[dict[str, Any]] = []
    for chosen in options:
        entries = sum(job.entries for job in plan(index.log, index.clock, chosen).jobs)
        with session.progress(f"merging into windows of {human_duration(chosen.window_s)}", entries) as progress:
            report = merge_tables(index.storage, index.log, index.clock, chosen, threads=threads, progress=_counting(progress))
        tiers.append({"window_s": chosen.window_s, **asdict(report), "left": [list(pair) for pair in report.left]})
        if not session.out.as_json:
            print_report(session, chosen.window_s, report)
    usage = index.storage.total
    number = index.log.state.number
    print_total(session, tiers, number, usage.requests_by_kind, usage.bytes_read, usage.bytes_written, usage.cost_usd)


def _counting(progress: Progress) -> Callable[[int], None]:
    """Return what tasks tell of entries done, from any thread."""
    lock = threading.Lock()
    done = 0

    def count(entries: int) -> None:
        nonlocal done
        with lock:
            done += entries
            progress.update(done, f"{done:,} entries")

    return count
