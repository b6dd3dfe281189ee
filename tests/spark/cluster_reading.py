"""What a session reads back of an index and of a commit log, on executors that are processes: every way equals the
model and `query`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812

from tests.spark.entries import BEGIN_MS
from tests.support.store_writer import StoreWriter
from tiered_index import IndexReader, hash_key
from tiered_index.spark import audit, look_up, register
from tiered_index.spark import hash_key as hash_column

__all__ = ["read_back"]

_MOST = 50
_KEYS = 30


def read_back(spark: Any, storage: str, table: pa.Table, source: str, folder: Path) -> dict[str, Any]:
    """Assert that each way of reading gives what was put; return how much that was."""
    register(spark)
    rows = table.to_pylist()
    stored = sorted({(row["topic"], row["key"]) for row in rows})
    pairs = {*stored[:: max(1, len(stored) // _KEYS)], ("orders", "key-0"), ("orders", "nobody's")}
    return {
        **_looked_up(spark, storage, sorted(pairs)),
        **_audited(spark, storage, source, len(rows)),
        **_loaded(spark, storage, rows),
        **_commit_log(spark, folder),
    }


def _looked_up(spark: Any, storage: str, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    asked = spark.createDataFrame(pairs, "topic string, key string").withColumn("hash", hash_column("topic", "key"))
    result = look_up(spark, asked, storage=storage, max_count=_MOST, nested=True)
    assert result.frame is not None
    found = {(row.topic, row.key): row for row in result.frame.collect()}
    assert sorted(found) == pairs
    with IndexReader.open(storage) as reader:
        for (topic, key), row in found.items():
            answer = reader.query(topic, key, max_count=_MOST)
            assert (row.status, row.failed, row.hash) == (answer.status, None, hash_key(topic, key))
            assert [(e.queue_id, e.offset, e.size, e.timestamp_ms) for e in row.entries] == [
                (item.queue_id, item.offset, item.size, item.timestamp_ms) for item in answer
            ]
    told = {"lookups": len(pairs), "tasks": result.tasks, "objects": result.objects, "statuses": result.statuses}
    result.release()
    return told


def _audited(spark: Any, storage: str, source: str, count: int) -> dict[str, Any]:
    audited = audit(spark, source, storage=storage)
    assert audited.differences is not None and audited.differences.index_entries == count
    return {"audit": audited.status, "differences": audited.differences.counts}


def _loaded(spark: Any, storage: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    columns = ("topic", "key_hash", "queue_id", "offset", "size", F.col("timestamp").cast("long"))
    entries = spark.read.format("tiered_index").option("maxPartitionBytes", "30k").load(storage)
    scanned = Counter(tuple(row) for row in entries.select(*columns).collect())
    assert scanned == Counter(
        (r["topic"], hash_key(r["topic"], r["key"]), r["queue_id"], r["offset"], r["size"], r["timestamp_ms"] // 1000)
        for r in rows
    )
    order = spark.read.format("tiered_index").option("topic", "orders").option("key", "key-0").load(storage)
    with IndexReader.open(storage) as reader:
        answer = reader.query("orders", "key-0", max_count=len(rows))
    assert sorted(row.offset for row in order.collect()) == sorted(item.offset for item in answer)
    return {"scanned": scanned.total(), "partitions": entries.rdd.getNumPartitions(), "of_key": len(answer)}


def _commit_log(spark: Any, folder: Path) -> dict[str, Any]:
    with StoreWriter(folder / "store", segment_bytes=20_000) as writer:
        put = {}
        for n in range(300):
            queue, body, keys = n % 3, b"body %d" % n, [f"k-{n}", "all"]
            put[writer.put("orders", queue, body, keys=keys, store_ms=BEGIN_MS + n).offset] = (queue, body, keys)
    log = spark.read.format("rocketmq_commitlog").load(str(folder / "store"))
    found = {row.physical_offset: (row.queue_id, bytes(row.body), list(row["keys"])) for row in log.collect()}
    assert found == put
    return {"messages": len(found), "segments": log.rdd.getNumPartitions()}
