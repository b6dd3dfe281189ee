"""Index against source: both sides' entries meet in one shuffle, and what has no like on the other side is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tiered_index.errors import StorageUnavailable
from tiered_index.format.schema import Schema
from tiered_index.service.log_records import StoredObject
from tiered_index.spark.audit_entries import (
    ENTRY_SCHEMA,
    INDEX,
    SOURCE,
    UNREAD,
    identity_dtype,
    source_entries,
    stored_entries,
    value_dtype,
)
from tiered_index.spark.lookup_plan import Target
from tiered_index.spark.metrics import Address

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["KINDS", "Compared", "Difference", "Differences", "compare"]

KINDS = ("missing", "extra", "wrong")
_UNPROVEN = "unproven"


@dataclass(frozen=True, slots=True)
class Difference:
    """One entry that index and source disagree about.

    `kind` is ``missing`` (from the index), ``extra`` (the source has none) or ``wrong`` (both have one, with other values). `expected` are
    the source's values, `found` the index's: second, size, further columns, and the topic where the two name different ones. `topic` and
    `key` are known where the source has it.
    """

    kind: str
    topic: str | None
    key: str | None
    key_hash: int
    queue_id: int
    offset: int
    expected: dict[str, Any] | None
    found: dict[str, Any] | None
    object: str | None


@dataclass(frozen=True, slots=True)
class Differences:
    """All differences, counted, and the first of each kind; `unproven` entries of the source may have lain in damaged objects.

    `source_entries` and `index_entries` are how many different entries were compared.
    """

    counts: dict[str, int]
    listed: tuple[Difference, ...]
    unproven: int
    source_entries: int
    index_entries: int

    @property
    def findings(self) -> int:
        """How many differences there are."""
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class Compared:
    """A comparison that is under way: `unread` names objects of which something could not be read."""

    rows: DataFrame
    unread: frozenset[str]
    schema: Schema

    def told(self, damaged: Sequence[Target], base: int, most_listed: int) -> Differences:
        """Return the differences. Entries of the source that `damaged` would hold, by second and slot (of `base`), may have lain there.

        Raises `StorageUnavailable` where Spark lost rows, and an object could not be read again.
        """
        told = _told(self.rows.where("unread IS NULL"), self.schema, damaged, base, most_listed)
        if _unread(self.rows) != self.unread:
            raise StorageUnavailable("objects were removed while they were compared: run the audit again")
        return told


def _unread(rows: DataFrame) -> frozenset[str]:
    return frozenset(row[0] for row in rows.where("unread IS NOT NULL").select("unread").collect())


@contextmanager
def compare(
    entries: DataFrame, stored: Sequence[StoredObject], address: Address, schema: Schema, seconds: tuple[int, int]
) -> Iterator[Compared]:
    """Bring a source's entries and what objects hold together, within an inclusive range of seconds, until the block ends.

    Raises `InvalidArgument`, what the storage raises.
    """
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    spark = entries.sparkSession
    shared = spark.sparkContext.broadcast(list(stored))

    def of_source(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return source_entries(batches, schema, seconds)

    def of_index(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with closing(address.open()) as storage:
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    yield from stored_entries(shared.value[number], storage, schema, seconds)

    try:
        both = entries.mapInArrow(of_source, ENTRY_SCHEMA)
        if stored:
            both = both.unionAll(spark.range(0, len(stored), 1, len(stored)).mapInArrow(of_index, ENTRY_SCHEMA))
        in_source, in_index = F.col("side") == SOURCE, F.col("side") == INDEX
        # a topic is a part of the key's hash; what an index's table says must agree with it, or no look-up finds the entry
        rows = both.groupBy("identity", "value", F.when(F.col("side") == UNREAD, F.col("object")).alias("unread")).agg(
            F.count_if(in_source).alias("source"), F.count_if(in_index).alias("index"), F.first("second").alias("second"),
            F.min(F.when(in_source, F.col("topic"))).alias("topic"), F.max(F.when(in_source, F.col("topic"))).alias("last_topic"),
            F.min(F.when(in_index, F.col("topic"))).alias("found_topic"), F.max(F.when(in_index, F.col("topic"))).alias("last_found"),
            F.first("key", ignorenulls=True).alias("key"), F.first("object", ignorenulls=True).alias("object"),
        ).persist()  # fmt: skip
        try:
            yield Compared(rows, _unread(rows), schema)
        finally:
            rows.unpersist()
    finally:
        shared.destroy()


def _told(values: DataFrame, schema: Schema, damaged: Sequence[Target], base: int, most_listed: int) -> Differences:
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    totals = values.agg(F.count_if(F.col("source") > 0).alias("source"), F.count_if(F.col("index") > 0).alias("index")).first()
    assert totals is not None
    differing = _differing(values, damaged, base).persist()
    try:
        counts = Counter({row["kind"]: row["count"] for row in differing.groupBy("kind").count().collect()})
        ordered = differing.orderBy("topic", "key", "identity", "said", "held")
        kinds = [kind for kind in KINDS if counts[kind] and most_listed]
        rows = [row for kind in kinds for row in ordered.where(F.col("kind") == kind).limit(most_listed).collect()]
    finally:
        differing.unpersist()
    identities, fields = identity_dtype(schema), value_dtype(schema)
    listed = [_difference(row, identities, fields) for row in rows]
    listed.sort(key=lambda d: (KINDS.index(d.kind), d.topic or "", d.key or "", d.queue_id, d.offset))
    return Differences(
        {kind: counts[kind] for kind in KINDS}, tuple(listed), counts[_UNPROVEN], int(totals["source"]), int(totals["index"])
    )


def _differing(values: DataFrame, damaged: Sequence[Target], base: int) -> DataFrame:
    """Return a row for each difference, and for each entry that is unproven: what was `said` by the source and `held` by the index."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    in_both = (F.col("source") > 0) & (F.col("index") > 0)
    misplaced = in_both & F.col("found_topic").isNotNull() & (
        (F.col("found_topic") != F.col("topic")) | (F.col("last_found") != F.col("last_topic"))
    )  # fmt: skip
    none = F.lit(None).cast("string")
    alone = values.where(~in_both | misplaced)
    said = F.struct("value", "second", F.when(misplaced, F.col("topic")).otherwise(none).alias("topic"))
    wrong_topic = F.when(F.col("found_topic") != F.col("topic"), F.col("found_topic")).otherwise(F.col("last_found"))
    held = F.struct("value", "second", F.when(misplaced, wrong_topic).otherwise(none).alias("topic"))
    parts = alone.groupBy("identity").agg(
        F.sort_array(F.collect_list(F.when(F.col("source") > 0, said))).alias("expected"),
        F.sort_array(F.collect_list(F.when(F.col("index") > 0, held))).alias("found"),
        F.first("topic", ignorenulls=True).alias("topic"), F.first("key", ignorenulls=True).alias("key"),
        F.first("object", ignorenulls=True).alias("object"),
    )  # fmt: skip
    pairs = parts.withColumn("pair", F.explode(F.arrays_zip("expected", "found")))
    pairs = pairs.select("identity", "topic", "key", "object", F.col("pair.expected").alias("said"), F.col("pair.found").alias("held"))
    kind = F.when(F.col("said").isNull(), "extra").when(F.col("held").isNotNull(), "wrong").otherwise("missing")
    pairs = pairs.withColumn("kind", kind)
    if not damaged:
        return pairs
    hash_hex = F.hex(F.substring("identity", 1, 4))  # the first field, and never negative
    where = F.conv(hash_hex, 16, 10).cast("long") % base
    spans = F.broadcast(values.sparkSession.createDataFrame(_joined(damaged), "first long, last long, slot_low long, slot_high long"))
    hidden = (
        (F.col("kind") == "missing") & F.col("said.second").between(F.col("first"), F.col("last"))
        & (where >= F.col("slot_low")) & (where < F.col("slot_high"))
    )  # fmt: skip
    unproven = pairs.join(spans, hidden, "left_semi").withColumn("kind", F.lit(_UNPROVEN))
    return pairs.join(spans, hidden, "left_anti").unionByName(unproven)


def _joined(damaged: Sequence[Target]) -> list[tuple[int, int, int, int]]:
    """Return (first second, last, base slots from, to): inclusive seconds, those of the same slots that meet made one."""
    joined: list[tuple[int, int, int, int]] = []
    for low, high, first, last in sorted((t.base_low, t.base_high, t.stored.second_min, t.stored.second_max) for t in damaged):
        before = joined[-1] if joined else None
        if before is not None and before[2:] == (low, high) and first <= before[1] + 1:
            joined[-1] = (before[0], max(before[1], last), low, high)
        else:
            joined.append((first, last, low, high))
    return joined


def _difference(row: Any, identities: np.dtype[Any], fields: np.dtype[Any]) -> Difference:
    identity = _fields(row["identity"], identities)
    expected, found = (_side(row[side], fields) for side in ("said", "held"))
    place = identity["key_hash"], identity["queue_id"], identity["offset"]
    return Difference(row["kind"], row["topic"], row["key"], *place, expected, found, row["object"])


def _side(side: Any, fields: np.dtype[Any]) -> dict[str, Any] | None:
    if side is None:
        return None
    topic = {} if side["topic"] is None else {"topic": side["topic"]}
    return _fields(side["value"], fields) | topic


def _fields(packed: bytes, dtype: np.dtype[Any]) -> dict[str, Any]:
    row = np.frombuffer(packed, dtype)[0]
    return {name: value.item() if hasattr(value := row[name], "item") else value for name in dtype.names or ()}
