"""The messages of the suites of Spark, made inside Spark from their numbers, and the Parquet files that they are
compared with.

Nothing is stored first, and any key can be asked for again. Messages are spread evenly over the days. Every (a day /
64)th has one of 64 keys that all days hold once each; every other one has a key of its own, 32 hexadecimal digits (MD5
of its number). Runs on the driver and in tasks; PySpark is imported by who has a session.

Parquet is what a data engineer would do otherwise: a Spark job that writes the messages partitioned by day and sorted
by key, in two layouts. *Plain*: the columns as they are, sorted by topic and key, Spark's own defaults (row groups of
128 MiB). *Tuned*: a 64-bit hash in place of the key's text, sorted by it, row groups of 1 MiB (some 30,000 rows), and a
Bloom filter on the hash in each. Both are compressed by zstd. Jobs run on a session of the caller's; files are written
to a local folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.benchmarks.setting import SHARED

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

__all__ = [
    "ABSENT",
    "BEGIN_S",
    "DAY_S",
    "PLAIN",
    "TOPIC",
    "TUNED",
    "hashes_of",
    "key_in_all",
    "key_in_one",
    "message_columns",
    "message_frame",
    "shared_step",
    "write_parquet",
]

TOPIC = "TopicOrder01"
DAY_S = 86_400
BEGIN_S = 1_700_000_000 // (30 * DAY_S) * (30 * DAY_S)
"""The beginning of a window, whether of an hour, a day or 30 days."""
ABSENT = 1 << 50
"""Numbers from here on are no message's."""


def key_in_all(number: int) -> str:
    """Return a key that every day holds."""
    return f"shared-{number % SHARED}"


def key_in_one(number: int) -> str:
    """Return the key of message `number`, or of none from `ABSENT` on."""
    return hashlib.md5(str(number).encode(), usedforsecurity=False).hexdigest()


def shared_step(entries: int, days: int) -> int:
    """Return how far apart the messages with a key that all days hold are."""
    return max(1, entries // days // SHARED)


def message_frame(spark: SparkSession, entries: int, days: int, partitions: int) -> DataFrame:
    """Return the messages, in order of time."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    return spark.range(0, entries, 1, partitions).select(*message_columns(entries, days, F.col("id")).values())


def message_columns(entries: int, days: int, number: Any) -> dict[str, Column]:
    """Return the columns of message `number`, by their names; `number` is a column."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    step = shared_step(entries, days)
    shared = F.concat(F.lit("shared-"), ((number / step).cast("long") % SHARED).cast("string"))
    own = F.md5(number.cast("string").cast("binary"))
    mixed: Any = F.xxhash64(number)
    columns = {
        "topic": F.lit(TOPIC),
        "queue_id": (number % 8).cast("int"),
        "key": F.when(number % step == 0, shared).otherwise(own),
        "offset": number * 4096 + F.pmod(mixed, F.lit(1000)),
        "size": (F.pmod(mixed, F.lit(4000)) + 96).cast("int"),
        "timestamp_ms": F.lit(BEGIN_S * 1000)
        + F.floor(number.cast("double") * (days * DAY_S * 1000 / entries)).cast("long"),
    }
    return {name: column.alias(name) for name, column in columns.items()}


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
