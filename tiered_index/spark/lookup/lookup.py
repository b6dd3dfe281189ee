"""Bulk lookup: the answers of `query` for every row of a DataFrame. docs/spark-jobs.md shows the steps.

Spark sends each row to a task by the slot of its key, and in the order of slots. The tasks look their rows up with
`IndexReader.query_many`. So each task reads its own slot groups of each file, once. The storage is read while `look_up`
runs, and Spark keeps the rows; the returned DataFrame reads the storage only if Spark lost them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tiered_index.config import IndexConfig
from tiered_index.errors import InvalidArgument
from tiered_index.service.log.state import LogState
from tiered_index.service.read.answers.budget import LookupLimits
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.failures import typed_errors
from tiered_index.spark.frames import cleaned_up_on_error, large_batches, repartitioned
from tiered_index.spark.lookup.answers import SKIPPED, TaskLookups, column_names
from tiered_index.spark.lookup.hash_column import hash_key
from tiered_index.spark.lookup.keys import LOOKUP, keys_of
from tiered_index.spark.lookup.messages import check_place, with_messages
from tiered_index.spark.metrics import described
from tiered_index.spark.versions import check_classic
from tiered_index.types import LostFile

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

# so that a slow task does not delay the others for long
_TASKS_A_CORE = 2


@dataclass(frozen=True)
class LookupResult:
    """The result of a bulk lookup; `frame` has the answers.

    - `rows`: rows of the source with a lookup. `skipped_null` further rows had no topic or no key.
    - `statuses`: number of these rows by the status of their answer.
    - `objects`: files and window tables that were read, by `tasks` tasks.
    - `log_number`: the log's position at the start. A task answers as of this position or a newer one.
    - `requests`, `bytes_read`, `cost_usd`, `replaced` (see `QueryResult`): those of the tasks, also of repeated ones.
    - `failed`: (file, reason) of unreadable files.
    - `lost`: files that were given up permanently.
    - `expired_before_ms`: the latest horizon of the topics, in epoch milliseconds.
    - `kept`: the data that Spark keeps until `release`.

    Call `release` after the use of `frame`. Data that Spark has lost are read again.
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
    kept: DataFrame | None = field(default=None, repr=False)
    lost: tuple[LostFile, ...] = ()
    expired_before_ms: int | None = None
    replaced: int = 0
    statuses: Mapping[str, int] = field(default_factory=dict)

    def release(self) -> None:
        """Free the data that Spark keeps; a further use of `frame` would look its rows up again."""
        if self.kept is not None:
            self.kept.unpersist()


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
    max_requests: int | None = None,
    max_bytes: int | None = None,
    config: IndexConfig | None = None,
) -> LookupResult:
    """Look up the key of each row of `df` in its topic and time range, as `IndexReader.query` does.

    Fields of a row are `topic`, `key` and optionally `begin_ms` and `end_ms` (inclusive; null: no bound; epoch
    milliseconds, timestamps, or text of either). `columns` has by field the name of its column
    (``{"key": "order_id"}``), or a Spark column (``lit("orders")``). All columns of `df` are kept. The result has each
    row's entries, newest first, at most `max_count`: a row for each with `position` from 0, or one row with nulls if
    there are none. `status` is ``complete``, ``truncated`` or, only with `allow_partial`, ``partial``: then `failed`
    names unreadable files, with the reason.

    Rows without topic or key are an error, or with `skip_null` left out and counted. `messages` joins the messages,
    from ``archive``, the folder of a RocketMQ store or ``kafka://...``; rows of files are read where they are.
    `max_requests` and `max_bytes` bound the cost of all tasks together: each has an equal share, and has it again if
    Spark repeats it. `config` has the settings of the tasks' readers.

    Raises `InvalidArgument`, which names the column, `NotAnIndex`, `ConfigError` for `messages` that the index can't
    have, and without `allow_partial` `BudgetExceeded`, and `StorageError` or `CorruptFile` for a file that can't be
    read.

    The function is long, because it makes one plan for Spark, and its result has all counts.
    """
    from pyspark import StorageLevel
    from pyspark.accumulators import AddingAccumulatorParam
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    check_classic(spark)
    # checked before they are divided
    LookupLimits(max_requests, max_bytes)
    settings = config or IndexConfig()
    address, state, taken = opened_index(storage, settings, max_count=max_count, messages=messages)
    assert state.genesis is not None
    layout = state.genesis.layout
    keys = keys_of(df, columns or {}, taken)
    sums: Any = AddingAccumulatorParam(Counter())
    spent = spark.sparkContext.accumulator(Counter(), sums)
    # a task reads each slot group once, so a cache of them would only take memory; and it stays at its log position
    per_task = {"storage": address.uri, "root": None, "item_type": None, "cache_slot_groups": False}
    reader = settings.changed(**per_task, refresh_interval_s=3600.0)
    tasks = _TASKS_A_CORE * max(1, spark.sparkContext.defaultParallelism)
    share = LookupLimits(*(None if most is None else most // tasks for most in (max_requests, max_bytes)))
    answers = TaskLookups(reader, layout.schema, keys.names, max_count, allow_partial, skip_null, share, spent)
    rows = keys.rows()
    slot = hash_key(F.col(f"{LOOKUP}.topic"), F.col(f"{LOOKUP}.key")) % layout.slots
    rows = rows.withColumn(LOOKUP, F.col(LOOKUP).withField("slot", slot))
    place = F.expr(f"CAST(coalesce({LOOKUP}.slot, 0) * CAST({tasks} AS BIGINT) DIV {layout.slots} AS INT)")
    placed = repartitioned(rows, tasks, place).sortWithinPartitions(f"{LOOKUP}.slot")
    answered = placed.mapInArrow(answers.of, answers.columns(rows)).persist(StorageLevel.DISK_ONLY)
    with cleaned_up_on_error(answered.unpersist), typed_errors("looking up"):
        counts, failed = _searched(answered)
        topics = answered.select(keys.column("topic")).distinct().collect() if state.expired.horizons else []
    horizon = max((state.expired.before_ms(row[0]) for row in topics if row[0] is not None), default=0)
    skipped = counts.pop(SKIPPED, 0)
    frame = answered.where(F.col("status") != SKIPPED) if skip_null else answered
    if messages is not None:
        frame = with_messages(frame, keys.column("topic"), keys.column("key"), messages, reader, allow_partial)
    usage = Counter(spent.value)
    return LookupResult(
        frame=frame,
        rows=sum(counts.values()),
        skipped_null=skipped,
        objects=sum(isinstance(name, tuple) for name in usage),
        tasks=tasks,
        log_number=state.number,
        requests=int(usage["requests"]),
        bytes_read=int(usage["bytes"]),
        cost_usd=float(usage["cost_usd"]),
        failed=failed,
        kept=answered,
        lost=tuple(lost.lost_file() for lost in state.lacking.values() if lost.lacks_entries),
        expired_before_ms=horizon or None,
        replaced=int(usage["replaced"]),
        statuses=counts,
    )


def _searched(answered: DataFrame) -> tuple[dict[str, int], tuple[tuple[str, str], ...]]:
    """Let Spark make the answers. Return the number of rows by status, and (file, reason) of unreadable files."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    spark = answered.sparkSession
    with described(spark, "search: look keys up in the stored objects"), large_batches(spark):
        first = answered.where("coalesce(position, 0) = 0")
        counts = {row[0]: row[1] for row in first.groupBy("status").count().sort("status").collect()}
    if not counts.get("partial"):
        return counts, ()
    files = answered.where(F.col("failed").isNotNull()).select(F.explode("failed").alias("file"))
    unreadable = files.select("file.*").distinct().collect()
    return counts, tuple(sorted((row[0], row[1]) for row in unreadable))


def opened_index(
    storage: str, config: IndexConfig, *, max_count: int, messages: str | None
) -> tuple[StorageAddress, LogState, list[str]]:
    """Return the address of an index, its log's state, and the names of answers' columns. Needs no Spark.

    Raises as `look_up` for arguments other than the keys, and `NotAnIndex`.
    """
    if isinstance(max_count, bool) or not isinstance(max_count, int) or not 1 <= max_count < 2**31 - 1:
        raise InvalidArgument(f"max_count is a whole number from 1 on, not {max_count!r}")
    address = StorageAddress(storage, config.s3)
    state = address.state()
    assert state.genesis is not None
    if messages is not None:
        check_place(messages, state)
    return address, state, column_names(state.genesis.layout.schema, messages=messages)
