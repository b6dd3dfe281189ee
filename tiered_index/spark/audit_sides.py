"""The two sides of an audit, brought together: one shuffle of a source's entries and of those that objects hold. Driver only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from tiered_index.format.schema import Schema
from tiered_index.service.log.records import StoredObject
from tiered_index.spark.audit_entries import ENTRY_SCHEMA, INDEX, SOURCE, UNREAD, Picked, source_entries, stored_entries
from tiered_index.spark.kept import kept
from tiered_index.spark.metrics import Address

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Sides", "unread_of"]


@dataclass(frozen=True, slots=True)
class Sides:
    """A source's entries and an index's storage; `base` is how many slots the index's files have."""

    entries: DataFrame
    address: Address
    schema: Schema
    base: int

    @contextmanager
    def met(self, stored: Sequence[StoredObject], picked: Picked) -> Iterator[DataFrame]:
        """Yield a row for each different entry of the picked ones, and for each object of which something is `unread`; kept until the end.

        `source` and `index` count how often a side has the entry.
        """
        from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

        spark, schema, address = self.entries.sparkSession, self.schema, self.address
        shared = spark.sparkContext.broadcast((list(stored), picked))

        def of_source(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return source_entries(batches, schema, shared.value[1])

        def of_index(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            objects, wanted = shared.value
            with closing(address.open()) as storage:
                for batch in batches:
                    for number in batch.column(0).to_pylist():
                        yield from stored_entries(objects[number], storage, schema, wanted)

        try:
            both = self.entries.mapInArrow(of_source, ENTRY_SCHEMA)
            if stored:
                both = both.unionAll(spark.range(0, len(stored), 1, len(stored)).mapInArrow(of_index, ENTRY_SCHEMA))
            in_source, in_index = F.col("side") == SOURCE, F.col("side") == INDEX
            # a topic is a part of the key's hash; what an index's table says must agree with it, or no look-up finds the entry
            rows = both.groupBy("identity", "value", F.when(F.col("side") == UNREAD, F.col("object")).alias("unread")).agg(
                F.count_if(in_source).alias("source"), F.count_if(in_index).alias("index"), F.first("second").alias("second"),
                F.min(F.when(in_source, F.col("topic"))).alias("topic"), F.max(F.when(in_source, F.col("topic"))).alias("last_topic"),
                F.min(F.when(in_index, F.col("topic"))).alias("found_topic"), F.max(F.when(in_index, F.col("topic"))).alias("last_found"),
                F.first("key", ignorenulls=True).alias("key"), F.min("object").alias("object"),
            )  # fmt: skip
            with kept(rows):
                yield rows
        finally:
            shared.destroy()


def unread_of(rows: DataFrame) -> frozenset[str]:
    """Return the objects of which something is unread."""
    return frozenset(row[0] for row in rows.where("unread IS NOT NULL").select("unread").collect())
