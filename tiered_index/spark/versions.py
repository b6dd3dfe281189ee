"""The sessions and versions of Spark that jobs can run on. Driver and executors."""

from __future__ import annotations

import re

from tiered_index.errors import ConfigError

OLDEST = (4, 0)
"""The first version that runs jobs and data sources."""
OLDEST_OF_STREAMS = (4, 1)
"""The first version whose streams pass batches of Arrow to a data source."""


def is_connect(spark: object) -> bool:
    """Return whether a session is one of Spark Connect, which has no Spark context."""
    return any(kind.__module__.startswith("pyspark.sql.connect.") for kind in type(spark).__mro__)


def check_classic(spark: object) -> None:
    """Raise `ConfigError` for a session of Spark Connect, and for an old Spark."""
    if is_connect(spark):
        raise ConfigError(
            "this is a session of Spark Connect, and a classic one is needed: run it as a job of the cluster "
            "(spark-submit, or tiered-index spark ...), or use the data source: register(spark), then spark.read and "
            "df.write of format tiered_index"
        )
    check_version("Spark", str(getattr(spark, "version", "")))


def check_version(what: str, version: str, least: tuple[int, int] = OLDEST) -> None:
    """Raise `ConfigError` if a version is older than `least`; a version without numbers passes."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < least:
        oldest = ".".join(map(str, least))
        needed = "streams into an index need" if least == OLDEST_OF_STREAMS else "this package needs"
        raise ConfigError(
            f"{what} {version} is too old: {needed} {oldest} or later, on driver and executors: "
            f"pip install 'pyspark[sql]>={oldest}', and a cluster of that version"
        )
