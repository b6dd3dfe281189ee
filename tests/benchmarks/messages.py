"""The messages of the suites of Spark, made in Spark from their numbers, and the Parquet files of the comparison.

Nothing is stored first, and any key can be made again. Messages are spread evenly over the days. Every (a day / 64)th
message has one of 64 keys that all days have once each. Every other message has its own key of 32 hexadecimal digits
(MD5 of its number). The code runs on the driver and in tasks. Only a caller with a session imports PySpark.

A data engineer would otherwise use Parquet: a Spark job writes the messages partitioned by day and sorted by key. There
are two layouts. *Plain* has the columns unchanged, sorted by topic and key, with Spark's defaults (row groups of 128
MiB). *Tuned* has a 64-bit hash in place of the key's text and is sorted by it. Its row groups of 1 MiB (about 30,000
rows) each have a Bloom filter on the hash. Both are compressed by zstd. Jobs run on a session of the caller's, and
write files to a local folder.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.benchmarks import ways
from tests.benchmarks.setting import SHARED

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

TOPIC = "TopicOrder01"
DAY_S = 86_400
BEGIN_S = 1_700_000_000 // (30 * DAY_S) * (30 * DAY_S)
"""The beginning of a window of any length: an hour, a day or 30 days."""
ABSENT = 1 << 50
"""No message has a number from this one on."""


def quiet_session(master: str, level: str = "ERROR", **settings: str) -> SparkSession:
    """Return a session without console pages and with few log lines."""
    from tiered_index.spark import open_session

    quiet = {"spark.ui.enabled": "false", "spark.local.dir": tempfile.gettempdir()}
    spark = open_session(master, app_name="tiered_index bench", settings=quiet | settings)
    spark.sparkContext.setLogLevel(level)
    return spark


def key_in_one(number: int) -> str:
    """Return the key of message `number`. From `ABSENT` on, the key has no message."""
    return hashlib.md5(str(number).encode(), usedforsecurity=False).hexdigest()


def shared_step(entries: int, days: int) -> int:
    """Return the distance of messages whose key all days have."""
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
        # integers: a rounded number would put a day's first message into the day before
        "timestamp_ms": F.lit(BEGIN_S * 1000)
        + F.call_function("div", number.cast("long") * (days * DAY_S * 1000), F.lit(entries)),
    }
    return {name: column.alias(name) for name, column in columns.items()}


_FILE_ROWS = 8_000_000
# a file of about 128 to 256 MiB
_GROUP_BYTES, _GROUP_ROWS = 1 << 20, 32_768


def write_parquet(messages: DataFrame, target: Path, layout: str, days: int, a_day: int) -> None:
    """Write messages to `target`/day=.../*.parquet, the files of a day by ranges of keys."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    frame = messages.withColumn("day", F.to_date(F.timestamp_millis("timestamp_ms")))
    options = {"compression": "zstd"}
    order: tuple[str, ...] = ("topic", "key")
    if layout == ways.TUNED:
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


_BUCKETS = 16


def write_buckets(messages: DataFrame, target: Path) -> None:
    """Write messages as a Spark table in buckets by topic and key, with a sorted file each.

    Keys are joined with it if there are too many messages to shuffle.
    """
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    by_key = messages.repartition(_BUCKETS, "topic", "key").sortWithinPartitions("topic", "key")
    names = ("topic", "queue_id", "key", "offset", "size", F.col("timestamp_ms").cast("long").alias("timestamp_ms"))
    writer = by_key.select(*names).write.option("path", str(target)).option("compression", "zstd")
    writer.bucketBy(_BUCKETS, "topic", "key").sortBy("topic", "key").format("parquet").saveAsTable(_table(target))


def sum_of_join(spark: SparkSession, keys: DataFrame, buckets: Path) -> tuple[int, int]:
    """Join keys with the table of `write_buckets`, and return the same values as `sum_of`."""
    name = _table(buckets)
    if not spark.catalog.tableExists(name):
        # another process has written the table, with its own catalog
        columns = "topic string, queue_id int, key string, offset long, size int, timestamp_ms long"
        clustered = f"CLUSTERED BY (topic, key) SORTED BY (topic, key) INTO {_BUCKETS} BUCKETS"
        spark.sql(f"CREATE TABLE {name} ({columns}) USING parquet {clustered} LOCATION '{buckets}'")
    return sum_of(keys.join(spark.table(name), ["topic", "key"]))


def _table(folder: Path) -> str:
    return f"messages_{hashlib.md5(str(folder).encode(), usedforsecurity=False).hexdigest()}"


def sum_of(frame: DataFrame) -> tuple[int, int]:
    """Return the number of entries, and the sum of their offsets and sizes."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    row = frame.agg(F.count("offset"), F.sum(F.col("offset") + F.col("size"))).collect()[0]
    return row[0], row[1] or 0


def keys_folder(folder: Path, count: int) -> str:
    """Return the folder that `write_keys` writes to."""
    return str(folder / f"keys-{count}")


def write_keys(spark: SparkSession, folder: Path, count: int, entries: int) -> None:
    """Write keys of messages from all days."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    number: Any = F.col("id") * (entries // count) + 1
    keys = spark.range(count).select(
        F.lit(TOPIC).alias("topic"), F.md5(number.cast("string").cast("binary")).alias("key")
    )
    keys.repartition(2).write.parquet(keys_folder(folder, count))


def write_by_duckdb(source: str, target: Path, cores: int | None) -> None:
    """Write messages of Parquet files sorted by hash, by DuckDB, on the given number of cores.

    DuckDB uses its default amount of memory, and spills beside `target`.
    """
    import duckdb

    target.mkdir(parents=True)
    with duckdb.connect(
        config={"temp_directory": str(target / "spilled"), **({"threads": cores} if cores else {})}
    ) as db:
        rows = f"SELECT * EXCLUDE (key), hash(topic, key) AS key_hash FROM read_parquet('{source}/*.parquet')"
        db.sql(f"COPY ({rows} ORDER BY key_hash) TO '{target}/sorted.parquet' (FORMAT parquet, COMPRESSION zstd)")


def _hash(topic: Column, key: Column) -> Column:
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    return F.xxhash64(topic, key)
