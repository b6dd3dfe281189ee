"""Builds window tables from a source by Spark, and publishes the tables of a build or a write.

Publication checks the tasks' objects, then appends one log record. Driver only; docs/spark-jobs.md shows the steps.
The index does not change before the log record: retries, speculation, lost executors and a killed driver leave orphans.
One thread drives a build; builds, merges and writers may run at the same time. `mode` is checked again against the
state before the record, so that of two builds of one window with ``error`` only one is published. All builds share the
quarantine windows: a build is recognised there by its entries (`repeated`).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import structs

from tiered_index.base.clock import Clock, SystemClock
from tiered_index.base.units import format_time
from tiered_index.config import IndexConfig
from tiered_index.connectors.documents import document_of
from tiered_index.connectors.registry import OF_OTHERS
from tiered_index.errors import CorruptFile, InvalidArgument, NotAnIndex, ObjectNotFound, SchemaMismatch
from tiered_index.format.packed import packed_bytes
from tiered_index.format.topic_documents import Documents, connectors_in, new_revisions
from tiered_index.service.jobs.merge_run import RECORD_REQUESTS, writing_requests
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.publication import FinishedObject, Publication, SentObject, abandon
from tiered_index.service.log.records import QUARANTINE_S, IndexDescriptor, LogRecord, StoredObject, latest_ms
from tiered_index.service.log.session import StorageSession, check_descriptor
from tiered_index.service.log.state import LogState
from tiered_index.service.opening import wanted_descriptor
from tiered_index.service.read.files.cold_path import ColdPath, ColdSettings
from tiered_index.service.read.segments.segments import names_object
from tiered_index.service.write.owned import SourceQueues, names_of
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.failures import typed_errors
from tiered_index.spark.metrics import JobMeter, JobMetrics, described
from tiered_index.spark.writing.census import Census, WindowScale
from tiered_index.spark.writing.plan import BuildPlan, plan_build
from tiered_index.spark.writing.positions import MicroBatch, SourceRange
from tiered_index.spark.writing.shards import PartitionResult, check_sums, write_shards
from tiered_index.spark.writing.sources import (
    Entries,
    SourceLike,
    check_source,
    entries_of,
    has_log_offsets,
    is_frame,
    take_census,
)
from tiered_index.storage.base import Storage
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.probe import probe_put_if_absent

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

_log = logging.getLogger(__name__)


def repeated(state: LogState, shards: Sequence[FinishedObject], mode: str, storage: Storage) -> tuple[str, ...]:
    """Return the objects that have exactly the entries of a new quarantine window, for ``replace``.

    Raises `InvalidArgument` for ``error``.
    """
    written: dict[int, list[FinishedObject]] = {}
    for shard in shards if mode != "append" else ():
        if (table := shard.stored.shard) is not None and table.window_s == QUARANTINE_S:
            written.setdefault(table.begin_s, []).append(shard)
    # objects of one build have the same time of publication
    earlier: dict[tuple[int, int], list[StoredObject]] = {}
    for stored in state.objects.values():
        table = stored.shard
        # an erasure writes such tables of a writer's files, too
        if table is None or table.window_s != QUARANTINE_S or table.origin == "writer":
            continue
        if table.begin_s in written:
            earlier.setdefault((table.begin_s, stored.published_ms), []).append(stored)
    if not earlier:
        return ()
    names: list[str] = []
    assert state.genesis is not None
    keyed, settings = state.genesis.layout.schema.keyed, ColdSettings(query_threads=1, cache_slot_groups=False)
    with contextlib.closing(ColdPath(storage, keyed=keyed, settings=settings)) as cold:
        for (begin_s, _), theirs in earlier.items():
            mine, count = written[begin_s], sum(stored.count for stored in theirs)
            if sum(shard.stored.count for shard in mine) != count:
                continue
            checksum = sum(int(cold.trailer(stored).metadata.more["checksum"], 16) for stored in theirs)
            if (checksum - sum(shard.checksum for shard in mine)) % 2**64:
                continue
            if mode == "error":
                raise InvalidArgument(
                    f"the {count:,} entries with implausible times, from {format_time(begin_s * 1000)} on, are in the "
                    f"index already, in {theirs[0].name}: use mode append or replace"
                )
            names += [stored.name for stored in theirs]
    return tuple(names)


MODES = ("error", "append", "replace", "replace-all")
_READERS = 8


def check_windows(state: LogState, plan: BuildPlan, mode: str) -> tuple[str, ...]:
    """Return the names of the objects that a build in `mode` replaces. Raises `InvalidArgument` if it must not."""
    times = [(table.window.begin_s, table.window.window_s) for table in plan.tables if not table.quarantined]
    return _replaced(state, sorted((begin, begin + length) for begin, length in times), mode)


def publish_batch(shards: Sequence[FinishedObject], batch: MicroBatch, log: StorageLog) -> bool:
    """Publish a micro-batch. If it was published before, drop its uploads and return False.

    Raises as `publish_tables`.
    """
    state = log.refresh()
    if not shards:
        log.append("a micro-batch without entries", None, partial(_batch_record, batch))
        return True
    names = {shard.stored.name for shard in shards}
    if not names <= state.objects.keys() and not batch.is_in(state):
        state, _ = publish_tables(shards, "append", log, batch)
    if names <= state.objects.keys():
        return True
    abandon([shard.sent for shard in shards], log.storage)
    return False


def _batch_record(batch: MicroBatch, state: LogState) -> LogRecord | None:
    if batch.is_in(state):
        return None
    return LogRecord(
        0, "positions", 0, "", 0, positions={batch.stream: batch.number}, batches={batch.stream: batch.told}
    )


def _replaced(state: LogState, windows: list[tuple[int, int]], mode: str) -> tuple[str, ...]:
    """Return the names of the objects that tables of `windows` replace in `mode`. Raises `InvalidArgument`."""
    if mode == "append":
        return ()
    replaced: list[str] = []
    for shards in state.tables.values():
        shard = shards[0].shard
        assert shard is not None
        begin, end = shard.begin_s, shard.begin_s + shard.window_s
        if shard.window_s == QUARANTINE_S or not (met := [w for w in windows if w[0] < end and begin < w[1]]):
            continue
        if shard.origin == "writer" and mode != "replace-all":
            continue
        if mode == "error":
            where = f"the window from {format_time(met[0][0] * 1000)}"
            raise InvalidArgument(f"{where} has a table already, {shard.table}: use mode append or replace")
        if begin < met[0][0] or end > met[0][1]:
            raise InvalidArgument(
                f"table {shard.table} has {shard.window_s:,} s from {format_time(begin * 1000)} on, more than the "
                f"window of {met[0][1] - met[0][0]:,} s that would replace it: build windows that are as long"
            )
        replaced += [stored.name for stored in shards]
    return tuple(replaced)


def entries_by_topic(state: LogState, names: Sequence[str], storage: Storage) -> tuple[tuple[str, int], ...]:
    """Return the number of entries of each topic in objects, by one request an object."""
    assert state.genesis is not None
    entries: Counter[str] = Counter()
    settings = ColdSettings(query_threads=_READERS, cache_slot_groups=False)
    keyed, objects = state.genesis.layout.schema.keyed, [state.objects[name] for name in names]
    with (
        contextlib.closing(ColdPath(storage, keyed=keyed, settings=settings)) as cold,
        ThreadPoolExecutor(_READERS, "tiered-index-replace") as pool,
    ):
        each = [(stored, pool.submit(cold.trailer, stored)) for stored in objects]
        for stored, read in each:
            try:
                trailer = read.result()
            except (ObjectNotFound, CorruptFile):
                # this build replaces it
                entries["(not readable)"] += stored.count
                continue
            for topic, topic_stats in trailer.metadata.stats_by_topic():
                entries[topic] += topic_stats.entries
    return tuple(sorted(entries.items()))


def publish_tables(
    shards: Sequence[FinishedObject],
    mode: str,
    log: StorageLog,
    batch: MicroBatch | None = None,
    source_range: SourceRange | None = None,
    topics_of_log: Iterable[str] = (),
) -> tuple[LogState, int]:
    """Check the shards and append one record; return the new state and the number of removed objects.

    `topics_of_log` are the topics of entries from a commit log.

    Raises as `check_windows`, `CorruptFile`, `JobOverdue`: then nothing is published. After the storage's errors the
    outcome may be unknown.
    """
    tables = [shard.stored.shard for shard in shards if shard.stored.shard is not None]
    windows = sorted({(t.begin_s, t.begin_s + t.window_s) for t in tables if t.window_s != QUARANTINE_S})
    publication = Publication(log, [shard.sent for shard in shards])
    publication.check()
    added = {shard.stored.name for shard in shards}
    removed: tuple[str, ...] = ()

    def make(state: LogState) -> LogRecord | None:
        nonlocal removed
        if added <= state.objects.keys():
            return None  # an earlier attempt has appended the record
        if batch is not None and batch.is_in(state):
            return None
        if source_range is not None:
            source_range.check(state)
        removed = _replaced(state, windows, mode) + repeated(state, shards, mode, log.storage)
        positions = {} if batch is None else {batch.stream: batch.number}
        if source_range is not None:
            positions[source_range.name] = source_range.end
        told = {} if batch is None else {batch.stream: batch.told}
        stored = tuple(shard.stored for shard in shards)
        before_ms = latest_ms(stored)
        more: dict[str, Any] = {"batches": told, "put_before_ms": before_ms}
        more["documents"] = _documents_after(state, topics_of_log)
        return LogRecord(0, "build", 0, "", 0, stored, removed, positions, **more)

    return publication.record("a build", make), len(removed)


def _documents_after(state: LogState, topics_of_log: Iterable[str]) -> Documents:
    """Return the new documents of topics whose entries came from a commit log: the notes of a follower stay.

    Raises as `new_revisions`.
    """
    known, document = state.documents, document_of(OF_OTHERS)
    described = dict.fromkeys(topics_of_log, document)
    for topic in described.keys() & known.keys():
        if (followed := known[topic].document).connector == document.connector:
            described[topic] = followed
    return new_revisions(known, described)


@dataclass(frozen=True, slots=True)
class BuildResult:
    """The result of a build, or with `dry_run` its plan.

    It wrote `entries` entries in `shards` shards of `written_bytes` bytes. `windows` are (first second, length in
    seconds, entries). `without_key` counts messages without a key, `quarantined` entries in quarantine windows.
    `removed_objects` counts replaced objects; `log_number` is the log's last record. `requests` and `cost_usd` are
    estimates for the writing, `metrics` the measured values of the job. `skipped` are (file, first offset, end,
    problem) of a log's first hundred damaged ranges; `skipped_ranges` and `skipped_bytes` count all. `removed_topics`
    are (topic, entries) of the replaced tables, as planned.
    """

    entries: int = 0
    without_key: int = 0
    quarantined: int = 0
    windows: tuple[tuple[int, int, int], ...] = ()
    shards: int = 0
    written_bytes: int = 0
    removed_objects: int = 0
    removed_topics: tuple[tuple[str, int], ...] = ()
    requests: int = 0
    cost_usd: float = 0.0
    log_number: int = field(default=0)
    dry_run: bool = False
    skipped_ranges: int = 0
    skipped_bytes: int = 0
    skipped: tuple[tuple[str, int, int, str], ...] = ()
    metrics: JobMetrics = field(default_factory=JobMetrics)


def _check_call(mode: str, shards: int | str) -> None:
    if mode not in MODES:
        raise InvalidArgument(f"mode is {', '.join(MODES)}, not {mode!r}")
    if shards != "auto" and not (isinstance(shards, int) and not isinstance(shards, bool) and shards >= 1):
        raise InvalidArgument(f"shards is 'auto' or how many a window has, not {shards!r}")


def check_build(
    source: SourceLike,
    *,
    storage: str,
    window: str | int,
    shards: int | str,
    fields: Mapping[str, object],
    mode: str,
    config: IndexConfig,
) -> None:
    """Raise the errors of `build` that need no Spark: invalid arguments, a missing source, an index or a source with
    other columns; `fields` are its `columns`.
    """
    _check_call(mode, shards)
    present = SystemClock()
    WindowScale.of(window, config, present.now_ms())
    with StorageAddress(storage, config.s3).open() as opened:
        genesis = stored_genesis(StorageLog(opened, present), config, opened.uri) or wanted_descriptor(config, None)
        check_source(source, fields, genesis.layout.schema, config.changed(storage=storage))


ResultT = TypeVar("ResultT", bound=BuildResult)
# publishes shards and further objects; returns the log's state, and the number of removed objects
Publish = Callable[[list[FinishedObject], list[SentObject]], tuple[LogState, int]]


@contextlib.contextmanager
def abandoned_if_refused(sent: Sequence[SentObject], log: StorageLog) -> Iterator[None]:
    """Delete objects after an error of the block with which they are certainly not published.

    After other errors the outcome is unknown, and `orphans` deletes them.
    """
    try:
        yield
    except (InvalidArgument, CorruptFile, SchemaMismatch, NotAnIndex):
        is_named = names_object(log.storage)
        abandon([each for each in sent if not is_named(log.state, each.name)], log.storage)
        raise


@dataclass(frozen=True)
class BuiltIndex:
    """The index that a job builds, with its storage and its log. Driver."""

    spark: SparkSession
    address: StorageAddress
    opened: MeteredStorage
    log: StorageLog
    meter: JobMeter
    config: IndexConfig
    clock: Clock
    genesis: IndexDescriptor

    @classmethod
    @contextlib.contextmanager
    def opening(
        cls, spark: SparkSession, storage: str, config: IndexConfig, clock: Clock, more: Mapping[str, Any]
    ) -> Iterator[BuiltIndex]:
        """Yield the index in `storage`; `more` are settings of a new one. Raises `SchemaMismatch`, as the storage."""
        address = StorageAddress(storage, config.s3)
        with contextlib.closing(MeteredStorage(address.open(), config.prices)) as opened:
            meter, log = JobMeter(spark, opened), StorageLog(opened, clock)
            genesis = stored_genesis(log, config, opened.uri) or wanted_descriptor(config.changed(**more), None)
            yield cls(spark, address, opened, log, meter, config, clock, genesis)

    def plan(
        self,
        census: Census,
        scale: WindowScale,
        shards: int | str,
        max_windows: int,
        queues: SourceQueues | None = None,
    ) -> BuildPlan:
        """Return the plan of a build; `queues` are those of `BuildPlan`. Raises as `plan_build`."""
        cores = self.spark.sparkContext.defaultParallelism
        sequence = max((stored.sequence for stored in self.log.state.objects.values()), default=0)
        more: Any = {"sequence": sequence, "max_windows": max_windows, "queues": queues}
        return plan_build(census, self.genesis, scale, shards, cores, **more)

    def write(
        self,
        result: ResultT,
        entries: Entries,
        plan: BuildPlan,
        name: str,
        publish: Publish,
        sent: Sequence[SentObject] = (),
    ) -> ResultT:
        """Write the shards of entries, and `publish` them; `sent` are further objects. Return the completed result."""
        # a server that ignores put-if-absent would lose one of two concurrent builds
        probe_put_if_absent(self.opened)
        building = described(self.spark, "build: hash, pack and write window tables")
        with typed_errors(f"building from {name}"), building:
            results = write_shards(entries, plan, self.meter.address(self.address), self.clock.now_ms())
        shards = [shard for part in results for shard in part.shards]
        objects = [*(shard.sent for shard in shards), *sent]
        with abandoned_if_refused(objects, self.log):
            check_written(plan, results)
            if self.log.state.genesis is None:
                # create the index only now: tasks do not need it, and a failed build leaves no index
                lease_ttl_s = self.config.lease_ttl_s
                StorageSession(self.opened, self.log, self.clock, lease_ttl_s, lambda stored: self.genesis).join()
            state, removed = publish(shards, objects)
        return replace(
            result,
            shards=len(shards),
            written_bytes=sum(shard.stored.size_bytes for shard in shards),
            removed_objects=removed,
            dry_run=False,
            log_number=state.number,
            metrics=self.meter.metrics,
        )


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
    begin_ms: int | None = None,
    end_ms: int | None = None,
    skip_corrupt: bool = False,
    source_range: SourceRange | None = None,
    dry_run: bool = False,
    clock: Clock | None = None,
) -> BuildResult:
    """Build tables of `window` (``1h``, ``1d``, seconds) from a DataFrame, paths of files, or commit logs.

    A commit log is a RocketMQ store directory, or ``archive:STORAGE-URI[?store=NAME]`` for an index's archived
    segments. `columns` maps fields of an entry to columns of the source (``{"key": "order_id"}``). `shards` is the
    number of shards of a window. `mode` decides what happens if a window has tables of builds already: ``error``,
    ``append`` a further table, or ``replace`` them in the same record. ``replace-all`` also replaces tables of live
    writers' entries. Entries to be removed are logged by topic first. If there is no index, it is
    created by `config` after the tables are written. Entries with timestamps outside `max_late_s` and `max_early_s` are
    put in quarantine windows. `source_range` is the part of a source that is built: the build is published only if the
    index has the source up to its `begin`; the same record sets the source's position to its `end`. `clock` replaces
    the clock in tests. All windows must be within `begin_ms` and `end_ms` (inclusive), except for quarantine windows;
    otherwise the source is an error.

    Raises `InvalidArgument` (the source or the call; `OwnedBySource` as `IndexService.put` does), `SchemaMismatch`,
    `CorruptFile`, `JobOverdue` (23 hours after the first write). Then nothing is published. The same holds for the
    storage's errors, except for one of the last step, the put of the log record: its outcome is unknown. If you repeat
    the build, ``append`` may double the entries (with a `source_range` it is refused), ``error`` reports that they
    exist, ``replace`` is harmless.
    """
    _check_call(mode, shards)
    settings, present = config or IndexConfig(), clock or SystemClock()
    scale = WindowScale.of(window, settings, present.now_ms())
    implied = has_log_offsets(source) and "offset_space" not in settings.given
    more = {"offset_space": "commitlog"} if implied else {}
    with BuiltIndex.opening(spark, storage, settings, present, more) as index:
        log, name = index.log, _name_of(source)
        if source_range is not None:
            source_range.check(log.state)
        with typed_errors(f"reading {name}"), described(spark, "count: count the entries of each window"):
            schema, addresses = index.genesis.layout.schema, index.meter.sources(settings.s3, storage)
            of_source = settings.changed(storage=storage), addresses
            entries = entries_of(spark, source, columns or {}, schema, *of_source, skip_corrupt=skip_corrupt)
            census = take_census(entries, scale, max_windows)
        if not census.entries:
            keyless = [f"it has {census.without_key:,} messages, none with a key"] * bool(census.without_key)
            damaged = [f"{census.skipped_bytes:,} damaged bytes were skipped"] * bool(census.skipped_ranges)
            why = f" ({', '.join(keyless + damaged)})" if keyless + damaged else ""
            raise InvalidArgument(f"{name} has no entries{why}")
        _check_bounds(census, scale, begin_ms, end_ms)
        of_others = SourceQueues.of(names_of(log.state), connectors_in(log.state.documents))
        queues = None if has_log_offsets(source) else of_others
        plan = index.plan(census, scale, shards, max_windows, queues)
        topics_of_log = [topic for _, topic in plan.topics] if has_log_offsets(source) else []
        # before the tables are written
        _documents_after(log.state, topics_of_log)
        removed_names = check_windows(log.state, plan, mode)
        result = expected_result(plan, census, settings, BuildResult)
        if removed_names:
            topics = entries_by_topic(log.state, removed_names, index.opened)
            result = replace(result, removed_objects=len(removed_names), removed_topics=topics)
            told = ", ".join(f"topic {topic}: {entries:,} entries" for topic, entries in topics)
            verb = "would be" if dry_run else "are"
            _log.warning("%d objects of these windows %s replaced: %s", len(removed_names), verb, told)
        if dry_run:
            return replace(result, metrics=index.meter.metrics)

        def publish(tables: list[FinishedObject], _: list[SentObject]) -> tuple[LogState, int]:
            return publish_tables(tables, mode, log, source_range=source_range, topics_of_log=topics_of_log)

        return index.write(result, entries, plan, name, publish)


def stored_genesis(log: StorageLog, config: IndexConfig, where: str) -> IndexDescriptor | None:
    """Return the stored index's descriptor with the hash rule of `config`; None if there is no index.

    Raises `SchemaMismatch` if `config` wants another index.
    """
    try:
        stored = log.open().genesis
    except NotAnIndex:
        return None
    assert stored is not None
    wanted = wanted_descriptor(config, stored)
    check_descriptor(stored, wanted, where)
    return structs.replace(stored, layout=structs.replace(stored.layout, hash=wanted.layout.hash))


def _check_bounds(census: Census, scale: WindowScale, begin_ms: int | None, end_ms: int | None) -> None:
    """Raise `InvalidArgument` unless all windows are within the bounds; quarantine windows may be anywhere."""
    outside = [
        begin
        for wrong, begin in sorted(census.windows)
        if not wrong
        and (
            (begin_ms is not None and begin < begin_ms // 1000)
            or (end_ms is not None and begin + scale.window_s - 1 > end_ms // 1000)
        )
    ]
    if outside:
        first = format_time(outside[0] * 1000)
        raise InvalidArgument(f"the source has {len(outside):,} windows outside of begin and end, first {first}")


def check_written(plan: BuildPlan, results: Sequence[PartitionResult]) -> None:
    """Raise unless the shards have the entries that were read, and in each window as many as were counted."""
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
                "build from a copy that does not change"
            )
    check_sums("build", results)


def expected_result(plan: BuildPlan, census: Census, config: IndexConfig, kind: type[ResultT], **more: Any) -> ResultT:
    """Return the result of a build by its plan, as of a dry run, with `more` fields of its `kind`."""
    schema, requests = plan.genesis.layout.schema, Counter(RECORD_REQUESTS)
    for table in plan.tables:
        made = min(table.shards, table.window.entries)
        requests += writing_requests(made, packed_bytes(schema, table.window.entries) // made)
    counted = ("without_key", "quarantined", "skipped_ranges", "skipped_bytes", "skipped")
    return kind(
        entries=plan.entries,
        windows=tuple((t.window.begin_s, t.window.window_s, t.window.entries) for t in plan.tables),
        shards=plan.shards,
        written_bytes=packed_bytes(schema, plan.entries),
        requests=requests.total(),
        cost_usd=config.prices.cost_usd(requests, 0),
        dry_run=True,
        **{name: getattr(census, name) for name in counted},
        **more,
    )


def _name_of(source: SourceLike) -> str:
    if is_frame(source):
        return "the DataFrame"
    paths = [source] if isinstance(source, str | os.PathLike) else [*source]
    return " and ".join(map(str, paths[:2])) + (" and others" if paths[2:] else "")
