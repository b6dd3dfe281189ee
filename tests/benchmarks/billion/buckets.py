"""Spark's own way: the messages as a table in buckets, sorted by topic and key, and the keys joined with it.

python -m tests.benchmarks.billion.buckets FOLDER MASTER          writes the table
python -m tests.benchmarks.billion.buckets FOLDER MASTER join     joins the keys
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.benchmarks.billion.data import KEYS_FILE, SOURCE
from tests.benchmarks.messages import quiet_session, sum_of_join, write_buckets


def main(folder: str, master: str, task: str = "write") -> None:
    """Write or join."""
    spark = quiet_session(master)
    buckets = Path(folder) / "buckets"
    if task == "write":
        write_buckets(spark.read.parquet(str(Path(folder) / SOURCE)), buckets)
    else:
        sum_of_join(spark, spark.read.parquet(str(Path(folder) / KEYS_FILE)), buckets)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
