"""Bulk lookup: the answers of `query` for every row of a DataFrame. docs/spark-sql.md shows the steps.

The storage is read while `lookup` runs, and Spark keeps the data; the returned DataFrame reads the storage only if
Spark lost it. If a merge removed an object meanwhile, the driver plans again at the log's newer position, up to
`_RETRIES` times, then raises `StorageUnavailable`. One thread drives a lookup.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tiered_index.clock import SystemClock
from tiered_index.config import IndexConfig
from tiered_index.errors import InvalidArgument, StorageError, StorageUnavailable
from tiered_index.format.names import DATA_PREFIX
from tiered_index.service.cold.path import ColdSettings, lost_error
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.state import LogState
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.failures import typed_errors
from tiered_index.spark.frames import broadcast_for_frames, cleaned_up_on_error, rows_kept_singly
from tiered_index.spark.lookup import search
from tiered_index.spark.lookup.answers import (
    STATUSES,
    answer_partitions,
    answer_schema,
    check_place,
    column_names,
    with_messages,
)
from tiered_index.spark.lookup.keys import Keys, keys_of
from tiered_index.spark.lookup.packing import TASK_SCHEMA, pack_lookups, take_census
from tiered_index.spark.lookup.plan import LookupPlan, plan_lookup
from tiered_index.spark.metrics import Progress, watched
from tiered_index.spark.versions import check_classic
from tiered_index.storage.base import Storage
from tiered_index.types import LostFile, no_progress

if TYPE_CHECKING:
    from pyspark import Broadcast
    from pyspark.sql import Column, DataFrame, SparkSession

# Most further plans, each after an object was removed meanwhile.
_RETRIES = 10
_LOOKUP = "_lookup"
# Most rows of answers that are broadcast to executors
_FEW_ROWS = 200_000
_CHANGED = (
    "tiered_index.errors.InvalidArgument: the keys change while they are read; look up from a copy that does not change"
)


@dataclass(frozen=True)
class LookupResult:
    """The result of a bulk lookup; `frame` has the answers.

    - `rows`: rows of the source with a lookup. `skipped_null` further rows had no topic or no key.
    - `lookups`: distinct lookups; None: too many to count on the driver.
    - `objects`: objects that `tasks` tasks searched, at log position `log_number`.
    - `requests`, `bytes_read`, `cost_usd`: those of the tasks.
    - `failed`: (file, reason) of unreadable files.
    - `plans`: number of plans. Each after the first follows the removal of an object.
    - `answers`: the answers by lookup. `kept` has the data that Spark keeps until `release`.
    - `lost`: files that were given up permanently.
    - `expired_before_ms`: the latest horizon of the topics, in epoch milliseconds.

    Call `release` after the use of `frame`. Data that Spark has lost are read again, and the job fails if an object is
    gone.
    """

    frame: DataFrame
    rows: int
    skipped_null: int
    objects: int
    tasks: int
    log_number: int
    requests: int = 0
    bytes_read: int = 0
    cost_usd: float = 0.0
    failed: tuple[tuple[str, str], ...] = ()
    plans: int = 1
    answers: DataFrame | None = field(default=None, repr=False)
    kept: DataFrame | None = field(default=None, repr=False)
    lost: tuple[LostFile, ...] = ()
    expired_before_ms: int | None = None
    lookups: int | None = field(default=None, repr=False)

    @cached_property
    def statuses(self) -> dict[str, int]:
        """Number of distinct lookups by status. Runs a job at the first call."""
        if self.answers is None:
            return {}
        once = self.answers.select(_LOOKUP, "status").distinct()
        with typed_errors("counting answers"):
            counts = {row["status"]: row["count"] for row in once.groupBy("status").count().sort("status").collect()}
        # lookups of partitions without entries
        if without := self.lookups - sum(counts.values()) if self.lookups is not None else 0:
            counts[STATUSES[0]] = counts.get(STATUSES[0], 0) + without
        return dict(sorted(counts.items()))

    def release(self) -> None:
        """Free the data that Spark keeps; `frame` would read them again if the objects still exist."""
        if self.kept is not None:
            self.kept.unpersist()


def lookup(spark: SparkSession, df: DataFrame, *, storage: str, **options: Any) -> DataFrame:
    """Return the answers for the rows of `df`; arguments as `look_up`, which also returns the cost."""
    return look_up(spark, df, storage=storage, **options).frame


def look_up(
    spark: SparkSession,
    df: DataFrame,
    *,
    storage: str,
    columns: Mapping[str, str | Column] | None = None,
    max_count: int = 64,
    allow_partial: bool = False,
    skip_null: bool = False,
    messages: str | None = None,
    config: IndexConfig | None = None,
    progress: Progress = no_progress,
) -> LookupResult:
    """Look up the key of each row of `df` in its topic and time range, as `IndexReader.query` does.

    Fields of a row are `topic`, `key` and optionally `begin_ms` and `end_ms` (inclusive; null: no bound; epoch
    milliseconds, timestamps, or text of either). `columns` has by field the name of its column
    (``{"key": "order_id"}``), or a Spark column (``lit("orders")``). All columns of `df` are kept. The result has each
    row's entries, newest first, at most `max_count`: a row for each with `position` from 0, or one row with nulls if
    there are none. `status` is ``complete``, ``truncated`` or, only with `allow_partial`, ``partial``: then `failed`
    names unreadable files, with the reason.

    Rows without topic or key are an error, or with `skip_null` left out and counted. `messages` joins the messages,
    from ``archive`` or the folder of a RocketMQ store.

    Raises `InvalidArgument`, which names the column, `NotAnIndex`, and without `allow_partial` `StorageError` or
    `CorruptFile` for an object that can't be read.
    """
    check_classic(spark)
    settings = config or IndexConfig()
    given = opened_index(storage, settings, max_count=max_count, messages=messages)
    with given as (address, opened, log, taken), ExitStack() as ending:
        keys = keys_of(df, columns or {}, taken)
        genesis = log.state.genesis
        assert genesis is not None
        census = take_census(spark, keys, progress, ending, keyed=genesis.layout.schema.keyed, skip_null=skip_null)
        make_plan = partial(
            plan_lookup,
            topics=census.topics,
            seconds=census.seconds,
            rows=census.rows,
            parallelism=spark.sparkContext.defaultParallelism,
            max_count=max_count,
            allow_partial=allow_partial,
            settings=ColdSettings.of(settings),
            prices=settings.prices,
        )
        lost: frozenset[str] = frozenset()
        by_kind, read = Counter[str](), 0
        for plans in range(1, _RETRIES + 2):  # noqa: B007 - used behind the loop
            plan = make_plan(log.state, lost=lost)
            plan = replace(plan, asked=census.asked(plan.kept_from))
            shared = broadcast_for_frames(spark, plan)
            # otherwise the plan's file stays on the driver's disk until Spark ends
            with cleaned_up_on_error(shared.destroy):
                kept, reports = _search(spark, census.lots, shared, address, progress)
            # also of plans that failed
            by_kind += sum((Counter(report.requests) for report in reports), Counter[str]())
            read += sum(report.bytes_read for report in reports)
            missing = {report.missing for report in reports if report.missing is not None}
            if not missing:
                break
            kept.unpersist()
            shared.destroy()
            state = log.refresh()
            # an object that the newer state still names is lost
            if gone := sorted(missing & state.objects.keys()):
                if not allow_partial:
                    raise lost_error(gone[0])
                # a task ends at the first missing object; a listing finds the others without a plan for each
                lost |= frozenset(gone) | _not_listed(opened, state)
        else:
            what = f"objects were removed during each of {_RETRIES + 1} plans of one lookup"
            raise StorageUnavailable(f"{opened.uri}: {what}; try again")
        most = max(sum(report.found for report in reports), census.rows)
        few = most <= _FEW_ROWS and not any(report.failed for report in reports)
        frame, answers = _answers(keys, shared, kept, few=few)
        if messages is not None:
            topic, key = keys.column("topic"), keys.column("key")
            frame = with_messages(frame, topic, key, messages, address, allow_partial=allow_partial)
        return LookupResult(
            frame=frame,
            rows=census.rows,
            skipped_null=census.skipped_null,
            objects=sum(report.opened for report in reports),
            tasks=len(reports),
            log_number=plan.number,
            requests=by_kind.total(),
            bytes_read=read,
            cost_usd=plan.prices.cost_usd(by_kind, read),
            failed=tuple(sorted({pair for report in reports for pair in report.failed})),
            plans=plans,
            answers=answers,
            kept=kept,
            lost=tuple(one.told() for one in log.state.lost.values() if one.lacks_entries),
            expired_before_ms=max(plan.kept_from) * 1000 if plan.kept_from else None,
            lookups=None if plan.asked is None else len(plan.asked),
        )


@contextmanager
def opened_index(
    storage: str, config: IndexConfig, *, max_count: int, messages: str | None
) -> Iterator[tuple[StorageAddress, Storage, StorageLog, list[str]]]:
    """Yield the address and storage of an index, its log, and the names of answers' columns. Needs no Spark.

    Raises as `look_up` for arguments other than the keys, and `NotAnIndex`.
    """
    if isinstance(max_count, bool) or not isinstance(max_count, int) or not 1 <= max_count < 2**31 - 1:
        raise InvalidArgument(f"max_count is a whole number from 1 on, not {max_count!r}")
    address = StorageAddress(storage, config.s3)
    with address.open() as opened:
        log = StorageLog(opened, SystemClock())
        genesis = log.open().genesis
        assert genesis is not None
        if messages is not None:
            check_place(messages, genesis.offset_space)
        yield address, opened, log, column_names(genesis.layout.schema, messages=messages)


def _not_listed(storage: Storage, state: LogState) -> frozenset[str]:
    """Return the state's objects that a listing lacks, none if the storage can't be listed."""
    try:
        return frozenset(state.objects.keys() - {info.name for info in storage.list(DATA_PREFIX)})
    except StorageError:
        return frozenset()


def _search(
    spark: SparkSession, lots: DataFrame, shared: Broadcast[LookupPlan], address: StorageAddress, progress: Progress
) -> tuple[DataFrame, list[search.TaskReport]]:
    """Run the tasks; return their blocks, which Spark keeps, and the reports of the tasks that had lookups."""
    from pyspark import StorageLevel
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    plan = shared.value

    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return pack_lookups(batches, shared.value)

    def find(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        search_tasks = search.search_task if shared.value.asked is None else search.search_asked
        return search_tasks(batches, shared.value, address)

    if plan.asked is None:
        packed = lots.mapInArrow(pack, TASK_SCHEMA).repartitionById(len(plan.tasks), "task")
    else:
        packed = spark.range(0, len(plan.tasks), 1, len(plan.tasks))
    # large blocks that are read twice: in memory they would take most of a small heap
    with rows_kept_singly(spark):
        found = packed.mapInArrow(find, search.FOUND_SCHEMA).persist(StorageLevel.DISK_ONLY)
    with cleaned_up_on_error(found.unpersist), typed_errors("looking up"), watched(spark, "search", progress):
        reports = found.where(F.col("kind") == search.REPORT).select("more").collect()
    return found, [pickle.loads(row[0]) for row in reports]


def _answers(keys: Keys, shared: Broadcast[LookupPlan], kept: DataFrame, *, few: bool) -> tuple[DataFrame, DataFrame]:
    """Return the rows of keys with their answers, and the answers by lookup; `few` answers are broadcast."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it
    from pyspark.sql.pandas.types import from_arrow_schema

    plan = shared.value

    def answer(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return answer_partitions(batches, shared.value)

    found = kept.where(F.col("kind") != search.REPORT)
    few = few and plan.asked is not None
    parts = found.coalesce(1) if few else found.repartitionById(plan.answerers, F.col("partition") % plan.answerers)
    blocks = parts.sortWithinPartitions("partition", "kind")
    answers = blocks.mapInArrow(answer, from_arrow_schema(answer_schema(plan)))
    near = answers.hint("broadcast") if few else answers
    joined = keys.with_lookup(shared, _LOOKUP).join(near, _LOOKUP, "left")
    if plan.asked is None:
        # a row without a lookup: the source gave other rows at the second read
        joined = joined.withColumn("status", F.coalesce("status", F.raise_error(_CHANGED).cast("string")))
    else:
        # a lookup of a partition without entries
        joined = joined.withColumn("status", F.coalesce("status", F.lit(STATUSES[0])))
    return joined.drop(_LOOKUP), answers
