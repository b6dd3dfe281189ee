"""What a data engineer would do otherwise: a Spark job that writes the messages as Parquet, partitioned by day and
sorted by key.

Two layouts. *Plain*: the columns as they are, sorted by topic and key, Spark's own defaults (row groups of 128 MiB).
*Tuned*: a 64-bit hash in place of the key's text, sorted by it, row groups of 1 MiB (some 30,000 rows), and a Bloom
filter on the hash in each. Both are compressed by zstd. Jobs run on a session of the caller's; files are written to a
local folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tiered_index.cli.bench.spark.messages import BEGIN_S

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

__all__ = ["PLAIN", "TUNED", "hashes_of", "write_parquet"]

PLAIN, TUNED = "Parquet, plain", "Parquet, tuned"
_FILE_ROWS = 8_000_000
# a file of some 128 to 256 MiB
_GROUP_BYTES, _GROUP_ROWS = 1 << 20, 32_768


def write_parquet(messages: DataFrame, target: Path, layout: str, days: int, a_day: int) -> None:
    """Write messages to `target`/day=.../*.parquet, the files of a day by ranges of keys."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    frame = messages.withColumn("day", F.to_date(F.timestamp_millis("timestamp_ms")))
    options = {"compression": "zstd"}
    order: tuple[str, ...] = ("topic", "key")
    if layout == TUNED:
        frame = frame.withColumn("key_hash", _hash(F.col("topic"), F.col("key"))).drop("key")
        order = ("key_hash",)
        options |= {
            "parquet.block.size": str(_GROUP_BYTES),
            "parquet.bloom.filter.enabled#key_hash": "true",
            "parquet.bloom.filter.expected.ndv#key_hash": str(_GROUP_ROWS),
            "parquet.enable.dictionary#key_hash": "false",
        }
    files = max(1, -(-a_day // _FILE_ROWS))
    parted: DataFrame
    if files == 1:
        parted = frame.repartitionById(days, F.datediff("day", F.to_date(F.timestamp_seconds(F.lit(BEGIN_S)))))
    else:
        parted = frame.repartitionByRange(days * files, "day", *order)
    parted.sortWithinPartitions("day", *order).write.partitionBy("day").options(**options).parquet(str(target))


def hashes_of(spark: SparkSession, topic: str, keys: Sequence[str]) -> list[int]:
    """Return the hashes that the tuned layout has for keys."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    rows = spark.createDataFrame([(topic, key) for key in keys], "topic string, key string")
    return [row[0] for row in rows.coalesce(1).select(_hash(F.col("topic"), F.col("key"))).collect()]


def _hash(topic: Column, key: Column) -> Column:
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    return F.xxhash64(topic, key)
