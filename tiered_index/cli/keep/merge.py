"""`tiered-index merge`: merges uploaded files into window tables, in this process or with Spark."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tiered_index.base.units import human_duration, parse_tiers
from tiered_index.cli.options import SparkOptions, WindowOptions
from tiered_index.cli.output import Output, describe_object
from tiered_index.cli.session import Session, StoredIndex, open_stored_index
from tiered_index.config import IndexConfig
from tiered_index.errors import InvalidArgument
from tiered_index.service.jobs.merge_run import estimate, plan
from tiered_index.service.jobs.merge_run import merge as merge_tables
from tiered_index.service.jobs.rewriting.merge_plan import MergeOptions, MergeRewrite
from tiered_index.service.jobs.segments.joining import small_neighbours
from tiered_index.service.read.segments.segments import Segments
from tiered_index.storage.prices import PriceTable, rounded_usd
from tiered_index.storage.probe import probe_put_if_absent


def _options_of(windows: WindowOptions, shard_bytes: int) -> list[MergeOptions]:
    """Return the options of each length of windows, the shortest first. Raises `InvalidArgument`."""
    try:
        lengths = parse_tiers(windows.window)
    except ValueError as error:
        raise InvalidArgument(f"--window: {error}") from error
    return [
        MergeOptions(
            window_s=window_s,
            min_age_s=windows.min_age,
            shard_bytes=shard_bytes,
            begin_s=windows.begin // 1000 if windows.begin is not None else 0,
            end_s=windows.end // 1000 + 1 if windows.end is not None else 1 << 62,
            skip_lost=windows.skip_lost,
        )
        for window_s in lengths
    ]


def _show_plans(session: Session, index: StoredIndex, options: Sequence[MergeOptions], prices: PriceTable) -> None:
    """Write the plan, for each window length separately."""
    tiers: list[dict[str, Any]] = []
    for chosen in options:
        made = plan(index.log, index.clock, chosen)
        jobs = [_describe(rewrite, prices) for rewrite in made.rewrites]
        tiers.append({"window_s": chosen.window_s, "jobs": jobs, "left": made.left})
    groups = [*map(len, small_neighbours(Segments(index.log.state, index.storage)))]
    described = {"status": "planned", "log_number": index.log.state.number}
    described |= {"segments_to_join": sum(groups), "segments_to_make": len(groups), "tiers": tiers}
    session.out.show(described, without=("tiers",))
    for tier in tiers:
        session.out.fields({"window_s": tier["window_s"], **_totals(tier["jobs"]), **tier})
    if len(options) > 1:
        session.out.remark(
            "the plan shows present files only; a longer tier also merges the tables of the shorter ones"
        )


def _totals(jobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    requests = Counter[str]()
    for job in jobs:
        requests.update(job["requests"])
    return {
        "sources": sum(len(job["sources"]) for job in jobs),
        "tables": sum(len(job["windows"]) for job in jobs),
        "entries": sum(job["entries"] for job in jobs),
        "requests": dict(requests),
        "cost_usd": rounded_usd(sum(job["cost_usd"] for job in jobs)),
    }


def _write_merged(out: Output, tiers: Sequence[Mapping[str, Any]], log_number: int, costs: Mapping[str, Any]) -> None:
    """Write the result of a merge; `costs` are requests by operation, bytes read and written, USD."""
    status = "merged" if any(tier["jobs"] or tier["segments_made"] for tier in tiers) else "nothing to do"
    out.show({"status": status, "log_number": log_number, "tiers": tiers, **costs}, without=("tiers",))
    for tier in tiers:
        out.fields(tier, without=("log_number",))


def _describe(rewrite: MergeRewrite, prices: PriceTable) -> dict[str, Any]:
    cost = estimate(rewrite, prices)
    return {
        "begin_ms": rewrite.windows[0].begin_s * 1000,
        "sources": [
            describe_object(stored) | {"table": stored.shard.table if stored.shard is not None else None}
            for stored in rewrite.of_entries
        ],
        "windows": [
            {"begin_ms": w.begin_s * 1000, "window_s": w.window_s, "slots": w.slots.slots, "entries": w.entries}
            for w in rewrite.windows
        ],
        "tasks": len(rewrite.tasks),
        "entries": rewrite.entries,
        "source_bytes": rewrite.size_bytes,
        **{name: getattr(cost, name) for name in ("shards", "read_bytes", "written_bytes", "requests", "cost_usd")},
    }


# a task of Spark writes one shard, and has less memory than this process
_SHARD_BYTES, _SPARK_SHARD_BYTES = 1 << 30, 256 << 20
# set by spark-submit in the process of its program
_SUBMITTED = "PYSPARK_GATEWAY_PORT"


def merge(
    session: Session, *, windows: WindowOptions, shard_bytes: int | None, threads: int | None, on: SparkOptions
) -> int:
    """Merge uploaded files into window tables, so that a lookup costs one request per window."""
    on_spark = on != SparkOptions() or _SUBMITTED in os.environ
    if on_spark and threads is not None:
        raise InvalidArgument("leave --threads out: Spark decides how many tasks are parallel (--master, --conf)")
    if shard_bytes is None:
        shard_bytes = _SPARK_SHARD_BYTES if on_spark else _SHARD_BYTES
    options = _options_of(windows, shard_bytes)
    config = session.config()
    if windows.dry_run:
        with open_stored_index(config) as index:
            _show_plans(session, index, options, config.prices)
    elif on_spark:
        merge_on_spark(session, config, options, on)
    else:
        _merge_here(session, config, options, threads or 2)
    return 0


def _merge_here(session: Session, config: IndexConfig, options: Sequence[MergeOptions], threads: int) -> None:
    """Merge in this process, and write the result."""
    with open_stored_index(config) as index:
        plan(index.log, index.clock, options[0])
        # a storage that ignores put-if-absent would let two jobs merge the same files
        probe_put_if_absent(index.storage)
        tiers: list[dict[str, Any]] = []
        for chosen in options:
            of_index = index.log, index.clock, chosen
            entries = sum(rewrite.entries for rewrite in plan(*of_index).rewrites)
            with session.out.progress(
                f"merging into windows of {human_duration(chosen.window_s)}", entries
            ) as progress:
                count = progress.counting("entries")
                report = merge_tables(index.storage, *of_index, threads=threads, progress=count)
            tiers.append({"window_s": chosen.window_s, **asdict(report)})
        total = index.storage.total
        costs = {**index.costs, "bytes_read": total.bytes_read, "bytes_written": total.bytes_written}
        _write_merged(session.out, tiers, index.log.state.number, costs)


def merge_on_spark(session: Session, config: IndexConfig, options: Sequence[MergeOptions], on: SparkOptions) -> None:
    """Merge on executors, and write the result."""
    # imported here: a merge in this process needs no PySpark
    from tiered_index.cli.on_spark import check_index, of_index, run_job, spark_of

    check_index(config)
    spark = spark_of(session, on)
    from tiered_index.spark.writing.merge import merge as merge_on

    tiers: list[dict[str, Any]] = []
    for chosen in options:
        result, _ = run_job(merge_on, spark, window=chosen.window_s, options=chosen, **of_index(config))
        tiers.append({"window_s": chosen.window_s, **asdict(result)})
    jobs = [tier["metrics"] for tier in tiers]
    costs = {name: sum(job[name] for job in jobs) for name in ("bytes_read", "bytes_written")}
    costs |= {"requests": dict(sum((Counter(job["requests"]) for job in jobs), Counter()))}
    costs |= {"cost_usd": rounded_usd(sum(job["cost_usd"] for job in jobs))}
    _write_merged(session.out, tiers, result.log_number, costs)
