"""Streams files into an index while Spark speculates, and has one of two attempts of a task denied; run by
test_writing_cluster.py.

    denied_streaming_program.py MASTER FOLDER ENTRIES MAX_FAILURES      prints one JSON line of what was there at each
                                                                        stage

One checkpoint for all. Micro-batch 0 is one task, which has no twin; in micro-batch 1 an attempt is denied. Then a
session that doesn't speculate goes on with one file more.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from tests.spark.entries import check, check_stored, messages, states, sweep, total, write_parquet
from tests.spark.held_writers import HeldSource, one_is_denied, speculating_session
from tiered_index.spark import register


def _run(spark: SparkSession, folder: Path, sink: str = "tiered_index", tasks: int = 4) -> str:
    """Run the query until it has what is there; return how it failed, or nothing."""
    schema = "topic string, queue_id int, key string, offset long, size int, timestamp_ms long"
    source = spark.readStream.schema(schema).parquet(f"{folder}/in").repartition(tasks)
    options = {"slots": "64", "items": "100000", "checkpointLocation": f"{folder}/checkpoint"}
    query = (
        source.writeStream.format(sink).options(**options).trigger(availableNow=True).start(f"file://{folder}/index")
    )
    try:
        query.awaitTermination()
    except StreamingQueryException as error:
        return str(error)
    return ""


def _stored(uri: str, *tables: pa.Table) -> dict[str, Any]:
    """Assert that the index has just these entries, sweep what is nobody's, and return figures of what is there."""
    state = states(uri)
    line = {
        "record": state.number,
        "batches": list(state.positions.values()),
        "total": total(uri),
        "tables": len(state.tables),
    }
    check(uri, *tables, keys=10)
    line["swept"] = sweep(uri)
    check_stored(uri, *tables)
    return line


def _main(master: str, folder: Path, count: int, max_failures: str) -> None:
    uri = f"file://{folder}/index"
    tables = [messages(count, days=2, seed=seed) for seed in (1, 2, 3)]
    (folder / "in").mkdir()

    def add(number: int) -> None:
        write_parquet(tables[number], folder / f"{number}.parquet")
        (folder / f"{number}.parquet").rename(folder / "in" / f"{number}.parquet")

    spark = speculating_session(master, max_failures)
    register(spark)
    spark.dataSource.register(HeldSource)
    add(0)
    line: dict[str, Any] = {"first": _run(spark, folder, tasks=1)}
    line["begun"] = _stored(uri, tables[0])
    add(1)
    with one_is_denied(spark, folder) as failures:
        line["error"] = _run(spark, folder, "held")
    line["failures"] = sum(failures)
    line["disturbed"] = _stored(uri, *tables[: 1 if line["error"] else 2])
    spark.stop()
    spark = speculating_session(master, max_failures, speculates=False)
    register(spark)
    add(2)
    line["last"] = _run(spark, folder)
    line["ended"] = _stored(uri, *tables)
    print(json.dumps(line), flush=True)
    spark.stop()


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
