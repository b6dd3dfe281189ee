"""Build: window tables straight from a source, by Spark. docs/spark.md says what runs where.

Nothing has changed until the log record: retries, speculation, lost executors and a killed driver leave objects that no
record names, which `orphans` deletes. One thread drives a build; builds, merges and writers may run side by side.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tiered_index.clock import Clock, SystemClock
from tiered_index.config import IndexConfig
from tiered_index.errors import CorruptFile, InvalidArgument, NotAnIndex, SchemaMismatch
from tiered_index.service.lifecycle.publication import abandon
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import IndexDescriptor
from tiered_index.service.log.session import StorageSession, check_descriptor
from tiered_index.service.merge.run import RECORD_REQUESTS, writing_requests
from tiered_index.service.opening import wanted_descriptor
from tiered_index.spark.build.plan import BuildPlan, Census, WindowScale, plan_build, take_census
from tiered_index.spark.build.publishing import MODES, check_windows, publish_tables
from tiered_index.spark.build.shards import PartitionResult, check_sums, write_shards
from tiered_index.spark.build.sources import SourceLike, entry_frame, frame_of, has_log_offsets, is_frame
from tiered_index.spark.executors import StorageAddress, typed_errors
from tiered_index.spark.metrics import JobMeter, JobMetrics, Progress
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.opening import probe_put_if_absent
from tiered_index.types import format_time

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession


@dataclass(frozen=True, slots=True)
class BuildResult:
    """What was built, or with `dry_run` what would be.

    Windows are (first second, length in seconds, entries). `requests` and `cost_usd` are what the writing was expected
    to take, `metrics` what the job took. `skipped` are (file, first offset, end, problem) of a log's first hundred
    damaged ranges; `skipped_ranges` and `skipped_bytes` count all.
    """

    entries: int = 0
    without_key: int = 0
    quarantined: int = 0
    windows: tuple[tuple[int, int, int], ...] = ()
    shards: int = 0
    written_bytes: int = 0
    removed_objects: int = 0
    requests: int = 0
    cost_usd: float = 0.0
    log_number: int = field(default=0)
    dry_run: bool = False
    skipped_ranges: int = 0
    skipped_bytes: int = 0
    skipped: tuple[tuple[str, int, int, str], ...] = ()
    metrics: JobMetrics = field(default_factory=JobMetrics)


def build(
    spark: SparkSession,
    source: SourceLike,
    *,
    storage: str,
    window: str | int = "1d",
    shards: int | str = "auto",
    columns: Mapping[str, str | Column] | None = None,
    mode: str = "error",
    config: IndexConfig | None = None,
    max_windows: int = 10_000,
    skip_corrupt: bool = False,
    dry_run: bool = False,
    clock: Clock | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> BuildResult:
    """Build tables of `window` (``1h``, ``1d``, seconds) from a DataFrame, Parquet or NDJSON path(s), or commit logs.

    A commit log is a RocketMQ store directory, or ``archive:STORAGE-URI[?store=NAME]`` for an index's archived
    segments. `columns` say which column of the source a field of an entry is (``{"key": "order_id"}``), `shards` how
    many a window has, `mode` what to do where a window has tables already: ``error``, ``append`` a further table, or
    ``replace`` them in the same record. The index is created as `config` says where there is none, once all is written.
    Timestamps outside its `max_late_s` and `max_early_s` go to quarantine windows. `progress` is called with (stage,
    tasks done, tasks).

    Raises `InvalidArgument` (the source or the call), `SchemaMismatch`, `CorruptFile`, `JobOverdue` (23 hours after
    tasks began to write): nothing is published then. So after what the storage raises, but for an error of the log
    record's put, the last step, whose outcome is unknown: repeated, ``append`` may double the entries, ``error`` says
    that they are there, ``replace`` is harmless.
    """
    if mode not in MODES:
        raise InvalidArgument(f"mode is {', '.join(MODES)}, not {mode!r}")
    settings = config or IndexConfig()
    present = clock or SystemClock()
    now_ms = present.now_ms()
    address = StorageAddress(storage, settings.s3)
    scale = WindowScale.of(window, settings, now_ms)
    with contextlib.closing(MeteredStorage(address.open(), settings.prices)) as opened:
        meter = JobMeter(spark, opened, progress)
        log = StorageLog(opened, present)
        implied = has_log_offsets(source) and "offset_space" not in settings.model_fields_set
        wanted = wanted_descriptor(settings.model_copy(update={"offset_space": "commitlog"} if implied else {}), None)
        with meter.stage("plan"):
            genesis = stored_genesis(log, settings, opened.uri) or wanted
        with typed_errors(f"reading {_name_of(source)}"):
            with meter.stage("plan"):
                frame = frame_of(spark, source, meter.sources(settings.s3), skip_corrupt=skip_corrupt)
                entries = entry_frame(frame, columns or {}, genesis.layout.schema)
            with meter.stage("count", tasks=True) as counted:
                census = take_census(entries, scale, max_windows)
                counted.entries = census.entries
        if not census.entries:
            keyless = [f"it has {census.without_key:,} messages, none with a key"] * bool(census.without_key)
            damaged = [f"{census.skipped_bytes:,} damaged bytes were passed over"] * bool(census.skipped_ranges)
            why = f" ({', '.join(keyless + damaged)})" if keyless + damaged else ""
            raise InvalidArgument(f"{_name_of(source)} has no entries{why}")
        sequence = max((o.sequence for o in log.state.objects.values()), default=0)
        cores = spark.sparkContext.defaultParallelism
        plan = plan_build(census, genesis, scale, shards, cores, sequence=sequence, max_windows=max_windows)
        check_windows(log.state, plan, mode)
        result = _expected(plan, census, settings)
        if dry_run:
            return replace(result, metrics=meter.metrics)
        with meter.stage("plan"):
            # a server that accepts two records of one number would lose one of two builds
            probe_put_if_absent(opened)
        with typed_errors(f"building from {_name_of(source)}"), meter.stage("build", tasks=True) as building:
            results = write_shards(entries, plan, meter.address(address), present.now_ms())
            building.entries = sum(part.entries for part in results)
        finished = [shard for part in results for shard in part.shards]
        try:
            with meter.stage("publish") as publishing:
                _check(plan, results)
                if log.state.genesis is None:
                    # tasks need what the index will be like, not that it is there: a build that fails leaves none
                    StorageSession(opened, log, present, settings.lease_ttl_s).join(genesis, lambda stored: genesis)
                state, removed = publish_tables(finished, mode, opened, log)
                publishing.entries = plan.entries
        except (InvalidArgument, CorruptFile, SchemaMismatch):
            # certainly not published; after an error of the storage that is not known, and `orphans` decides
            abandon(finished, opened)
            raise
    written = sum(shard.stored.size_bytes for shard in finished)
    done = replace(result, shards=len(finished), written_bytes=written, removed_objects=removed, dry_run=False)
    return replace(done, log_number=state.number, metrics=meter.metrics)


def stored_genesis(log: StorageLog, config: IndexConfig, where: str) -> IndexDescriptor | None:
    """Return what the stored index is, with the hash rule that is wanted, None where there is none.

    Raises `SchemaMismatch` where another is wanted.
    """
    try:
        stored = log.open().genesis
    except NotAnIndex:
        return None
    assert stored is not None
    wanted = wanted_descriptor(config, stored)
    check_descriptor(stored, wanted, where)
    return replace(stored, layout=replace(stored.layout, hash=wanted.layout.hash))


def _check(plan: BuildPlan, results: Sequence[PartitionResult]) -> None:
    """Raise unless the shards hold what was read, and as much of it in each window as was counted."""
    counts: Counter[str] = Counter()
    for made in (shard.stored for result in results for shard in result.shards):
        if made.shard is not None:
            counts[made.shard.table] += made.count
    for table in plan.tables:
        written = counts[table.window.table]
        if written != table.window.entries:
            raise InvalidArgument(
                f"the source changes while it is read: the window from {format_time(table.window.begin_s * 1000)} had "
                f"{table.window.entries:,} entries when it was counted and {written:,} when it was read; "
                "build from a copy that stands still"
            )
    check_sums("build", results)


def _expected(plan: BuildPlan, census: Census, config: IndexConfig) -> BuildResult:
    item_size, requests = plan.genesis.layout.schema.item.itemsize, Counter(RECORD_REQUESTS)
    for table in plan.tables:
        made = min(table.shards, table.window.entries)
        requests += writing_requests(made, table.window.entries * item_size // made)
    counted = ("without_key", "quarantined", "skipped_ranges", "skipped_bytes", "skipped")
    return BuildResult(
        entries=plan.entries,
        windows=tuple((t.window.begin_s, t.window.window_s, t.window.entries) for t in plan.tables),
        shards=plan.shards,
        written_bytes=plan.entries * item_size,
        requests=requests.total(),
        cost_usd=config.prices.cost_usd(requests, 0),
        dry_run=True,
        **{name: getattr(census, name) for name in counted},
    )


def _name_of(source: SourceLike) -> str:
    if is_frame(source):
        return "the DataFrame"
    paths = [source] if isinstance(source, str | Path) else source
    return " and ".join(map(str, paths[:2])) + (" and others" if paths[2:] else "")
