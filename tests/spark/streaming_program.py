"""A query from Parquet files into an index. test_streaming_example.py runs this program and kills it.

`streaming_program.py MASTER FOLDER ENDLESS|UP-TO-NOW [MARK]`

FOLDER has `source`, and gets `index` and `checkpoint`. If the file MARK does not exist, the first task makes it, and
fails.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from tiered_index.spark import open_session, register

__all__ = ["failing_once"]


ENTRIES = "topic string, queue_id int, key string, offset long, size int, timestamp_ms long"


def entries_of(spark: SparkSession, source: str) -> DataFrame:
    """Return the entries of files as a stream, one file in a batch."""
    return spark.readStream.schema(ENTRIES).option("maxFilesPerTrigger", 1).parquet(source)


def start(entries: DataFrame, folder: Path, *, endless: bool) -> StreamingQuery:
    """Start the query into FOLDER/index."""
    settings = {"slots": "64", "items": "100000", "offsetSpace": "custom"}
    sink = entries.writeStream.format("tiered_index").options(**settings, checkpointLocation=f"{folder}/checkpoint")
    return (sink if endless else sink.trigger(availableNow=True)).start(f"file://{folder}/index")


def failing_once(entries: DataFrame, mark: Path) -> DataFrame:
    """Return the same rows; the first of all tasks fails after some of its rows."""

    def fail(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            try:
                mark.touch(exist_ok=False)
            except FileExistsError:
                continue
            raise OSError("struck on purpose")

    return entries.mapInArrow(fail, entries.schema)


def _main(master: str, folder: Path, how: str, mark: str | None) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = open_session(
        master, settings={"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.driver.memory": "1g"}
    )
    spark.sparkContext.setLogLevel("OFF")
    register(spark)
    entries = entries_of(spark, str(folder / "source"))
    if mark is not None:
        entries = failing_once(entries, Path(mark))
    start(entries, folder, endless=how == "ENDLESS").awaitTermination()
    spark.stop()


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4] if len(sys.argv) > 4 else None)
