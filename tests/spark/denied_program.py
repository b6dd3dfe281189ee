"""Writes a DataFrame while Spark speculates, and has one of two attempts of a task denied; run as a program by
test_writing_cluster.py.

    denied_program.py MASTER FOLDER ENTRIES MAX_FAILURES      appends to FOLDER/index twice, prints one JSON line
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from tests.spark.entries import check, joined, messages, states, sweep, total, write_parquet
from tests.spark.held_writers import HeldSource, one_is_denied, speculating_session
from tiered_index.spark import register


def _main(master: str, folder: Path, count: int, max_failures: str) -> None:
    spark = speculating_session(master, max_failures)
    register(spark)
    spark.dataSource.register(HeldSource)
    uri = f"file://{folder}/index"
    tables = [messages(count, days=2), messages(count, days=2, seed=2)]
    frames = [
        spark.read.parquet(write_parquet(table, folder / f"{n}.parquet")).repartition(4)
        for n, table in enumerate(tables)
    ]
    options = {"slots": 64, "items": 100_000}
    frames[0].coalesce(1).write.format("tiered_index").mode("append").options(**options).save(uri)
    before = states(uri).number
    error = ""
    with one_is_denied(spark, folder) as failures:
        try:
            frames[1].write.format("held").mode("append").options(**options).save(uri)
        except (PySparkException, Py4JJavaError) as raised:
            error = str(raised)
    stored = [tables[0]] if error else [joined(tables)]
    line = {
        "denied": "Commit denied for partition" in error,
        "failed": bool(error),
        "failures": sum(failures),
        "records": states(uri).number - before,
        "total": total(uri),
        "tables": len(states(uri).tables),
    }
    check(uri, *stored, keys=10)
    line["swept"] = sweep(uri)
    check(uri, *stored, keys=5)
    print(json.dumps(line), flush=True)
    spark.stop()


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
