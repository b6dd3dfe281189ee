"""Other ways to do the same work: one process without Spark, and what Spark does without an index.

A data engineer would otherwise use Parquet. *Sorted Parquet* is partitioned by day, and sorted by a 64-bit hash of
topic and key. Its row groups of 1 MiB (about 30,000 rows) have a Bloom filter on the hash. *Buckets* are a table of
Spark by topic and key, with a sorted file in each; keys are joined with it. Both are compressed by zstd.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.benchmarks.billion.data import FEW_KEYS, KEYS_FILE, SOURCE, quiet_session
from tests.benchmarks.messages import FLUSH_ENTRIES
from tiered_index import IndexConfig, IndexService

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_BATCH = 250_000
_GROUP_BYTES, _GROUP_ROWS = 1 << 20, 32_768
_BUCKETS = 16
_COLUMNS = "topic string, queue_id int, key string, offset long, size int, timestamp_ms long"
_CLUSTERED = f"CLUSTERED BY (topic, key) SORTED BY (topic, key) INTO {_BUCKETS} BUCKETS"


def put(folder: str, root: str, storage: str) -> dict[str, int]:
    """Put, compact and upload all messages; return how many there were."""
    import pyarrow.dataset as ds

    config = IndexConfig.load(root=root, storage=storage, background=False, max_late_s=1e10, local_keep_s=0)
    files = sorted((Path(folder) / SOURCE).glob("*.parquet"))
    entries = waiting = 0
    with IndexService.open(config) as index:
        for rows in ds.dataset(files, format="parquet").to_batches(batch_size=_BATCH):
            waiting += index.put_batch(rows)
            if waiting >= FLUSH_ENTRIES:
                index.flush()
                index.run_lifecycle()
                entries, waiting = entries + waiting, 0
        index.seal()
        index.run_lifecycle()
    return {"entries": entries + waiting}


def start(spark: SparkSession, folder: Path) -> None:
    """Do nothing: what Spark's start costs."""


def frame(spark: SparkSession, folder: Path) -> dict[str, int]:
    """Build an index of a DataFrame, whose rows Spark moves to Python."""
    from tiered_index.spark import build

    rows = spark.read.parquet(str(folder / SOURCE))
    with tempfile.TemporaryDirectory(dir=folder) as place:
        config = IndexConfig.load(max_late_s=1e10)
        return {"entries": build(spark, rows, storage=f"file://{place}", window="1d", config=config).entries}


def sort(spark: SparkSession, folder: Path) -> None:
    """Write sorted Parquet."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    rows = spark.read.parquet(str(folder / SOURCE)).withColumn("day", F.to_date(F.timestamp_millis("timestamp_ms")))
    rows = rows.withColumn("key_hash", F.xxhash64("topic", "key")).drop("key")
    bloom = {
        "parquet.block.size": _GROUP_BYTES,
        "parquet.bloom.filter.enabled#key_hash": "true",
        "parquet.bloom.filter.expected.ndv#key_hash": _GROUP_ROWS,
        "parquet.enable.dictionary#key_hash": "false",
    }
    with tempfile.TemporaryDirectory(dir=folder) as place:
        parted = rows.repartition("day").sortWithinPartitions("day", "key_hash").write.partitionBy("day")
        parted.options(compression="zstd", **{name: str(value) for name, value in bloom.items()}).parquet(
            f"{place}/out"
        )


def buckets(spark: SparkSession, folder: Path) -> None:
    """Write the table in buckets."""
    rows = spark.read.parquet(str(folder / SOURCE))
    by_key = rows.repartition(_BUCKETS, "topic", "key").sortWithinPartitions("topic", "key")
    writer = by_key.write.option("path", str(folder / "buckets")).option("compression", "zstd")
    writer.bucketBy(_BUCKETS, "topic", "key").sortBy("topic", "key").format("parquet").saveAsTable("messages")


def join(spark: SparkSession, folder: Path, keys: str = KEYS_FILE) -> dict[str, int]:
    """Join the keys with the table in buckets."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    # another process has written it, with a catalog of its own
    spark.sql(f"CREATE TABLE messages ({_COLUMNS}) USING parquet {_CLUSTERED} LOCATION '{folder / 'buckets'}'")
    joined = spark.read.parquet(str(folder / keys)).join(spark.table("messages"), ["topic", "key"])
    return {"joined": joined.agg(F.count("offset"), F.sum(F.col("offset") + F.col("size"))).collect()[0][0]}


def join_few(spark: SparkSession, folder: Path) -> dict[str, int]:
    """Join a thousand keys."""
    return join(spark, folder, FEW_KEYS)


_ON_SPARK: dict[str, Callable[[SparkSession, Path], Any]] = {
    task.__name__: task for task in (start, frame, sort, buckets, join, join_few)
}


def on_spark(task: str, folder: str, master: str) -> Any:
    """Do a task on Spark."""
    spark = quiet_session(master)
    figures = _ON_SPARK[task](spark, Path(folder))
    spark.stop()
    return figures
