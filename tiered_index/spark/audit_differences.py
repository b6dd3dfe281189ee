"""Index against source: both sides' entries meet in one shuffle, and what has no like on the other side is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tiered_index.format.schema import Schema
from tiered_index.service.log_records import StoredObject
from tiered_index.spark.audit_entries import ENTRY_SCHEMA, identity_dtype, source_entries, stored_entries, value_dtype
from tiered_index.spark.metrics import Address

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["KINDS", "Difference", "Differences", "compare"]

KINDS = ("missing", "extra", "wrong")


@dataclass(frozen=True, slots=True)
class Difference:
    """One entry that index and source disagree about.

    `kind` is ``missing`` (from the index), ``extra`` (the source has none) or ``wrong`` (both have one, with other values). `expected` are
    the source's values, `found` the index's: second, size and further columns. `topic` and `key` are known where the source has it.
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


def compare(
    entries: DataFrame, stored: Sequence[StoredObject], address: Address, schema: Schema, seconds: tuple[int, int],
    damaged: Sequence[tuple[int, int]], most_listed: int,
) -> Differences:  # fmt: skip
    """Compare a source's entries with what objects hold, within an inclusive range of seconds.

    `damaged` are the intervals of damaged objects. Raises `InvalidArgument`, what the storage raises.
    """
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    spark = entries.sparkSession
    context = spark.sparkContext
    shared = context.broadcast(list(stored))

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
        values = both.groupBy("identity", "value").agg(
            F.sum(1 - F.col("side")).alias("source"), F.sum("side").alias("index"), F.first("topic", ignorenulls=True).alias("topic"),
            F.first("key", ignorenulls=True).alias("key"), F.first("object", ignorenulls=True).alias("object"),
        )  # fmt: skip
        values = values.persist()
        try:
            totals = values.agg(F.count_if(F.col("source") > 0).alias("source"), F.count_if(F.col("index") > 0).alias("index")).first()
            assert totals is not None
            alone = values.where((F.col("source") == 0) | (F.col("index") == 0))
            parts = alone.groupBy("identity").agg(
                F.sort_array(F.collect_list(F.when(F.col("source") > 0, F.col("value")))).alias("expected"),
                F.sort_array(F.collect_list(F.when(F.col("index") > 0, F.col("value")))).alias("found"),
                F.first("topic", ignorenulls=True).alias("topic"), F.first("key", ignorenulls=True).alias("key"),
                F.first("object", ignorenulls=True).alias("object"),
            )  # fmt: skip
            return _told(parts, schema, damaged, most_listed, totals)
        finally:
            values.unpersist()
    finally:
        shared.destroy()


def _told(parts: DataFrame, schema: Schema, damaged: Sequence[tuple[int, int]], most_listed: int, totals: Any) -> Differences:
    counts: Counter[str] = Counter()
    listed: list[Difference] = []
    unproven = 0
    identities, values = identity_dtype(schema), value_dtype(schema)
    for row in parts.toLocalIterator():
        expected, found = ([_fields(one, values) for one in side] for side in (row["expected"], row["found"]))
        identity = _fields(row["identity"], identities)
        for said, held in zip_longest(expected, found):
            kind = "wrong" if said is not None and held is not None else "missing" if said is not None else "extra"
            if said is not None and held is None and any(low <= said["second"] <= high for low, high in damaged):
                unproven += 1
                continue
            counts[kind] += 1
            if counts[kind] <= most_listed:
                listed.append(
                    Difference(kind, row["topic"], row["key"], identity["key_hash"], identity["queue_id"], identity["offset"], said, held,
                               row["object"])
                )  # fmt: skip
    listed.sort(key=lambda d: (KINDS.index(d.kind), d.topic or "", d.key or "", d.queue_id, d.offset))
    return Differences({kind: counts[kind] for kind in KINDS}, tuple(listed), unproven, int(totals["source"]), int(totals["index"]))


def _fields(packed: bytes, dtype: np.dtype[Any]) -> dict[str, Any]:
    row = np.frombuffer(packed, dtype)[0]
    return {name: value.item() if hasattr(value := row[name], "item") else value for name in dtype.names or ()}
