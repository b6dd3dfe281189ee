"""Commit logs through Spark itself: a batch as a source of `build`, and a query that is stopped, goes on from its
checkpoint, and fails.
"""

from __future__ import annotations

from collections import Counter

import pytest
from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

from tests.spark.entries import BEGIN_MS
from tests.support.store_writer import StoreWriter
from tiered_index.errors import CorruptFile
from tiered_index.format.schema import KEYED_SCHEMA
from tiered_index.rocketmq.log.commitlog import CommitLogReader
from tiered_index.spark import register
from tiered_index.spark.build.sources import entry_frame
from tiered_index.spark.failures import typed_errors

AS_ENTRIES = {"key": "keys", "offset": "physical_offset", "size": "store_size", "timestamp_ms": "store_timestamp"}


def fill(folder, count, first=0):
    with StoreWriter(folder, segment_bytes=20_000) as writer:
        return [
            writer.put("orders", 0, b"body", keys=[f"k-{n % 9}"], store_ms=BEGIN_MS + n * 1000)
            for n in range(first, first + count)
        ]


def test_rows_are_what_a_build_takes(spark, tmp_path):
    register(spark)
    fill(tmp_path / "store", 250)
    rows = spark.read.format("rocketmq_commitlog").load(str(tmp_path / "store"))
    entries = entry_frame(rows.filter("visible"), AS_ENTRIES, KEYED_SCHEMA).withColumn(
        "timestamp_ms", F.unix_millis("timestamp_ms")
    )
    names = ("topic", "queue_id", "key", "offset", "size", "timestamp_ms")
    expected = [
        row
        for batch in CommitLogReader(tmp_path / "store" / "commitlog").batches()
        for row in batch.columns.to_pylist()
    ]
    found = [tuple(row[name] for name in names) for row in entries.collect()]
    assert sorted(found) == sorted(tuple(row[name] for name in names) for row in expected) and len(found) == 250


def test_a_query_takes_each_message_once_across_restarts(spark, tmp_path):
    register(spark)
    store, out = tmp_path / "store", tmp_path / "out"

    def run(**options):
        source = spark.readStream.format("rocketmq_commitlog").options(body="none", **options).load(str(store))
        writer = source.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).start(str(out))
        with typed_errors("streaming"):
            query.awaitTermination()
        return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]

    puts = fill(store, 250)
    assert len(run(maxBytesPerTrigger="15k")) > 1
    puts += fill(store, 60, first=250)
    assert run() == [60]
    assert run() == []
    rows = spark.read.parquet(str(out)).select("physical_offset").collect()
    assert Counter(row[0] for row in rows) == Counter(put.offset for put in puts)
    last = max((store / "commitlog").iterdir())
    data = bytearray(last.read_bytes())
    at = puts[-1].offset - int(last.name)
    data[at + puts[-1].size - 4] ^= 1
    last.write_bytes(data)
    fill(store, 5, first=310)
    with pytest.raises(CorruptFile, match="rewritten"):
        run()
