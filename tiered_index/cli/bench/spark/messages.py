"""The messages of suite `spark`, made inside Spark from their numbers: nothing is stored first, and any key can be
asked for again.

Messages are spread evenly over the days. Every (a day / 64)th has one of 64 keys that all days hold once each; every
other one has a key of its own, 32 hexadecimal digits (MD5 of its number). Runs on the driver and in tasks; PySpark is
imported by who has a session.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from tiered_index.cli.bench.spark.amounts import SHARED

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

__all__ = [
    "ABSENT",
    "BEGIN_S",
    "DAY_S",
    "TOPIC",
    "key_in_all",
    "key_in_one",
    "message_columns",
    "message_frame",
    "shared_step",
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
