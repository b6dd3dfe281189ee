"""The keys of a bulk lookup in one pass: tasks hash, pack and count them; the driver gets them unless they are many.

A task reports the rows and topics of each lot of its rows. A few packed lookups go to the driver with the report. More
are rows of their own: they go to the driver by a second job, or, if they are many, from task to task. Nulls are
counted, other invalid rows fail the task.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.errors import InvalidArgument
from tiered_index.service.answers.rows import check_topic
from tiered_index.spark.failures import typed_errors
from tiered_index.spark.frames import arrow_schema, cleaned_up, gathered, one_row, rows_kept_singly
from tiered_index.spark.lookup.plan import (
    LOOKUP,
    Array,
    LookupPlan,
    distinct,
    kept,
    lookups_of,
    records_of,
    routes,
    values_of,
)
from tiered_index.spark.metrics import Progress, watched

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tiered_index.spark.lookup.keys import Keys

LOTS_SCHEMA = (
    "topics array<string>, rows long, topicless long, keyless long, low long, high long, asked binary, few binary"
)
_LOTS = arrow_schema(LOTS_SCHEMA)
_LOT_ROWS = 1 << 18
# Most lookups of a row behind its lot's report: 0.9 MB, because Java's serialization holds 100 rows.
_ASKED_ROWS = 20_000
# Most lookups of a lot in its report: with thousands of tasks less than Spark's limit for a job's result.
_FEW = 4_000
# Most lookups that the driver and each Python worker hold: 88 MiB.
_MOST_HELD = 1 << 21
_MAX_TOPICS = 1_000_000


@dataclass(frozen=True)
class KeysCensus:
    """The counts of rows to look up and of skipped rows, the topics, and the inclusive range of seconds.

    Spark keeps `lots`. `lookups` are all lookups (n), in any order, perhaps repeated; None: too many to hold.
    """

    rows: int
    topics: tuple[str, ...]
    seconds: tuple[int, int]
    skipped_null: int
    lots: Any = field(default=None, compare=False, repr=False)
    lookups: Array | None = field(default=None, compare=False, repr=False)

    def asked(self, kept_from: Sequence[int]) -> Array | None:
        """Return the distinct lookups after `kept`."""
        return None if self.lookups is None else distinct(kept(self.lookups, kept_from))


def pack_keys(batches: Iterable[pa.RecordBatch], *, keyed: bool, column: str) -> Iterator[pa.RecordBatch]:
    """Yield the lots (`LOTS_SCHEMA`) of rows (topic, key, begin, end); a topic is its place in the `topics` of its row.

    A lot is a report. If it has more than a few lookups, rows with only `topics` and `asked` follow it. Raises as
    `lookups_of`; messages use `column` as the name of the keys.
    """
    places: dict[str, int] = {}

    def packed(batch: pa.RecordBatch) -> tuple[int, int, int, Array]:
        with_topic, with_key = pc.is_valid(batch.column(0)), pc.is_valid(batch.column(1))
        topicless = batch.column(0).null_count
        whole = pc.and_(with_topic, with_key)
        rows = pc.sum(whole).as_py() or 0
        columns = batch.columns if rows == len(batch) else [one.filter(whole) for one in batch.columns]
        for name in values_of(pc.unique(columns[0]), "a topic"):
            places.setdefault(name, len(places))
        if len(places) > _MAX_TOPICS:
            raise InvalidArgument(_TOPICS)
        topics, texts, begins, ends = columns
        lookups = lookups_of(topics, texts, begins, ends, places, keyed=keyed, column=column)
        return rows, topicless, len(batch) - topicless - rows, lookups

    for held in gathered(map(packed, filter(len, batches)), lambda one: len(one[3]), _LOT_ROWS):
        rows, topicless, keyless = (sum(one[part] for one in held) for part in range(3))
        lookups = distinct(np.concatenate([one[3] for one in held]))
        low, high = (int(lookups["second_min"].min()), int(lookups["second_max"].max())) if len(lookups) else (0, 0)
        few = lookups.tobytes() if len(lookups) <= _FEW else None
        yield one_row(_LOTS, list(places), rows, topicless, keyless, low, high, None, few)
        if few is None:
            names = list(places)
            for start in range(0, len(lookups), _ASKED_ROWS):
                asked = lookups[start : start + _ASKED_ROWS].copy()
                # a row repeats only the topics that it needs
                used, asked["topic"] = np.unique(asked["topic"], return_inverse=True)
                topics = [names[place] for place in used.tolist()]
                yield one_row(_LOTS, topics, None, None, None, None, None, asked.tobytes(), None)


_TOPICS = f"the keys have more than {_MAX_TOPICS:,} topics"


def take_census(
    spark: SparkSession, keys: Keys, progress: Progress, ending: ExitStack, *, keyed: bool, skip_null: bool
) -> KeysCensus:
    """Count and pack the keys; Spark keeps the lots until `ending`.

    Raises `InvalidArgument` for nulls without `skip_null`.
    """
    from pyspark import StorageLevel

    column = keys.names["key"]

    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return pack_keys(batches, keyed=keyed, column=column)

    with rows_kept_singly(spark):
        lots = keys.all_fields().mapInArrow(pack, LOTS_SCHEMA).persist(StorageLevel.DISK_ONLY)
    ending.enter_context(cleaned_up(lots.unpersist))
    with typed_errors("counting the keys"), watched(spark, "count", progress):
        heads = [row.asDict() for row in lots.where("asked IS NULL").drop("asked").collect()]
        census = replace(census_of(heads, keys.names, skip_null=skip_null), lots=lots)
        if census.rows > _MOST_HELD:
            return census
        large = any(row["few"] is None for row in heads)
        rest = lots.where("asked IS NOT NULL").select("topics", "asked").collect() if large else []
    return replace(census, lookups=lookups_in([*heads, *(row.asDict() for row in rest)], census.topics))


def census_of(lots: Sequence[Mapping[str, Any]], names: Mapping[str, str], *, skip_null: bool) -> KeysCensus:
    """Return the census of lots' reports, without lookups; messages use `names` of fields. Raises `InvalidArgument`."""
    without_topic, without_key = sum(row["topicless"] for row in lots), sum(row["keyless"] for row in lots)
    for name, count in (("topic", without_topic), ("key", without_key)):
        if count and not skip_null:
            has = f"column {names[name]} has {count:,} null{'s' * (count > 1)}"
            raise InvalidArgument(f"{has}; a value is needed in every row (or skip_null)")
    topics = sorted({topic for row in lots for topic in row["topics"]})
    if len(topics) > _MAX_TOPICS:
        raise InvalidArgument(_TOPICS)
    for topic in topics:
        check_topic(topic)
    some = [row for row in lots if row["rows"]]
    seconds = min((row["low"] for row in some), default=0), max((row["high"] for row in some), default=0)
    return KeysCensus(sum(row["rows"] for row in lots), tuple(topics), seconds, without_topic + without_key)


def lookups_in(lots: Iterable[Mapping[str, Any]], topics: Sequence[str]) -> Array:
    """Return the lookups (n) in `few` or `asked` of lots; a topic is its place in `topics`."""
    places = {topic: place for place, topic in enumerate(topics)}
    parts = [np.zeros(0, LOOKUP)]
    for row in lots:
        if cell := row.get("few") or row.get("asked"):
            part = records_of(pa.array([cell], pa.binary())).copy()
            part["topic"] = np.array([places[topic] for topic in row["topics"]], np.uint32)[part["topic"]]
            parts.append(part)
    return np.concatenate(parts)


TASK_SCHEMA = "task int, asked binary, wanted binary"
_TASK = arrow_schema(TASK_SCHEMA)


def pack_lookups(batches: Iterable[pa.RecordBatch], plan: LookupPlan) -> Iterator[pa.RecordBatch]:
    """Yield the lookups of lots for the tasks that search; those of `_LOT_ROWS` or more are distinct."""
    rows = (row for batch in batches for row in batch.to_pylist())
    for held in gathered(rows, lambda row: len(row["asked"] or row["few"] or b"") // LOOKUP.itemsize, _LOT_ROWS):
        lookups = distinct(kept(lookups_in(held, plan.topics), plan.kept_from))
        base_slots, homes = plan.base_slots(lookups), routes(lookups, len(plan.tasks))
        for task in range(len(plan.tasks)):
            mine, here = lookups[homes == task], lookups[plan.wanted(task, lookups, base_slots)]
            if len(mine) or len(here):
                # a batch for each task: several MB for hundreds of tasks would not fit a column
                yield one_row(_TASK, task, mine.tobytes(), here.tobytes())
