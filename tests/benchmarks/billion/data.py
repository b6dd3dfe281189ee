"""The messages of the year, made by Spark, and the keys that are looked up.

Messages are in order of time, a Parquet file a day. One message in fifty is up to six hours late. Half of the messages
have a key of their own. The others share keys: the hottest key has some ten thousand times as many messages as the
median one. Topics are skewed too: a fifth of the messages are in the first of 200 topics.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

DAYS = 365
TOPICS = 200
DAY_S = 86_400
BEGIN_S = 1_700_000_000 // (30 * DAY_S) * (30 * DAY_S) + DAY_S // 2
"""The time of the first message, in epoch seconds: half a day after a window of 30 days begins."""
KEYS = 1_000_000
SOURCE, CHANGED, KEYS_FILE, FEW_KEYS = "source", "changed", "keys", "few-keys"
_FEW = 1_000
_LATE_ONE_IN, _LATE_MS = 50, DAY_S // 4 * 1000
_ABSENT_ONE_IN, _ABSENT = 20, 1 << 50
# files with changed messages, and messages that are changed in them: one message in a thousand
_CHANGED_FILE_ONE_IN, _CHANGED_ONE_IN = 20, 50


def quiet_session(master: str) -> SparkSession:
    """Return a session without console pages and with few log lines."""
    from tiered_index.spark import open_session

    quiet = {"spark.ui.enabled": "false", "spark.local.dir": tempfile.gettempdir()}
    spark = open_session(master, app_name="tiered_index bench", settings=quiet)
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def _share(number: Column, seed: int) -> Column:
    """A pseudo-random number in [0, 1) for each number."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    return F.pmod(F.xxhash64(number, F.lit(seed)), F.lit(1 << 30)) / float(1 << 30)


def columns(number: Any, entries: int) -> list[Column]:
    """Return the columns of the messages with these numbers."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    mixed: Any = F.xxhash64(number)
    shared = (F.pow(_share(number, 1), F.lit(2.0)) * max(64, entries // 20)).cast("long")
    is_shared: Any = (F.pmod(mixed, F.lit(2)) == 0) & (number < _ABSENT)
    name: Any = F.when(is_shared, -shared - 1).otherwise(number)
    topic = (F.pow(_share(name, 2), F.lit(3.0)) * TOPICS).cast("int")
    late = F.when(number % _LATE_ONE_IN == 7, F.pmod(mixed, F.lit(_LATE_MS))).otherwise(F.lit(0))
    # the number's share of the year, in 64 bits
    whole, rest = divmod(DAYS * DAY_S * 1000, entries)
    time_ms: Any = number * whole + F.call_function("div", number * rest, F.lit(entries))
    return [
        F.concat(F.lit("topic-"), F.lpad(topic.cast("string"), 3, "0")).alias("topic"),
        (number % 8).cast("int").alias("queue_id"),
        F.md5(name.cast("string").cast("binary")).alias("key"),
        (number * 4096 + F.pmod(mixed, F.lit(1000))).alias("offset"),
        (F.pmod(mixed, F.lit(4000)) + 96).cast("int").alias("size"),
        (F.lit(BEGIN_S * 1000) + time_ms.cast("long") - late).alias("timestamp_ms"),
    ]


def write(place: str, count: str, master: str) -> None:
    """Write the messages, the source of the audit that must find differences, and the keys."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    folder, entries, spark = Path(place), int(count), quiet_session(master)
    source = folder / SOURCE
    numbers = spark.range(0, entries, 1, DAYS)
    numbers.select(*columns(F.col("id"), entries)).write.option("compression", "zstd").parquet(str(source))
    files = sorted(source.glob("part-*.parquet"))
    (folder / CHANGED).mkdir()
    for place, file in enumerate(files):
        if place % _CHANGED_FILE_ONE_IN:
            os.link(file, folder / CHANGED / file.name)
    for place in range(0, len(files), _CHANGED_FILE_ONE_IN):
        rows: Any = spark.read.parquet(str(files[place]))
        is_changed = F.pmod(F.xxhash64("offset"), F.lit(_CHANGED_ONE_IN)) == 0
        rows = rows.withColumn("size", F.when(is_changed, F.col("size") + 1).otherwise(F.col("size")))
        with tempfile.TemporaryDirectory(dir=folder) as written:
            rows.coalesce(1).write.mode("overwrite").parquet(written)
            (part,) = Path(written).glob("part-*.parquet")
            part.rename(folder / CHANGED / files[place].name)
    wanted_keys = min(KEYS, max(1, entries // 2))
    step = entries // wanted_keys
    number: Any = F.col("id") * step + F.pmod(F.xxhash64("id", F.lit(3)), F.lit(step))
    number = F.when(F.col("id") % _ABSENT_ONE_IN == 0, F.col("id") + _ABSENT).otherwise(number)
    wanted = spark.range(0, wanted_keys, 1, 4).select(*columns(number, entries)).select("topic", "key").distinct()
    wanted.coalesce(2).write.parquet(str(folder / KEYS_FILE))
    spark.read.parquet(str(folder / KEYS_FILE)).limit(_FEW).coalesce(1).write.parquet(str(folder / FEW_KEYS))
    spark.stop()
