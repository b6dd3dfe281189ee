"""Writes to an index while Spark speculates, and prints one JSON line. test_local_cluster.py runs this program.

- `writing_program.py MASTER FOLDER ENTRIES speculated 4` writes a DataFrame to FOLDER/index. The first attempt of one
  task waits at its end until another attempt has come as far. So both have uploaded everything, or are about to.
- `writing_program.py MASTER FOLDER ENTRIES denied FAILURES` appends a DataFrame twice. Spark denies the commit of one
  of two attempts of a task of the second append.
- `writing_program.py MASTER FOLDER ENTRIES streamed FAILURES` streams files, with one checkpoint. Micro-batch 0 is one
  task, which has no second attempt. In micro-batch 1 Spark denies an attempt. Then a session without speculation
  continues with one more file.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import SparkSession

from tests.spark.entries import check, check_stored, joined, messages, states, sweep, total, write_parquet
from tests.spark.held_writers import HeldSource, one_is_denied, speculating_session
from tiered_index.spark import register

_WAIT_S = 240.0
_OPTIONS = {"slots": "64", "items": "100000"}


def _session(master: str, max_failures: str, *, speculates: bool = True) -> SparkSession:
    spark = speculating_session(master, max_failures, speculates=speculates)
    register(spark)
    spark.dataSource.register(HeldSource)
    return spark


def _speculated(master: str, folder: Path, count: int, max_failures: str) -> dict[str, Any]:
    spark = _session(master, max_failures)
    spark.sparkContext.setLogLevel("OFF")
    table, uri = messages(count, days=2), f"file://{folder}/index"
    source = write_parquet(table, folder / "m.parquet", group_rows=count // 4)
    first, second = folder / "first", folder / "second"

    def held(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        has_last = False
        for batch in batches:
            has_last = has_last or count - 1 + 10_000_000 in batch.column("offset").to_pylist()
            yield batch
        if not has_last:
            return
        try:
            first.touch(exist_ok=False)
        except FileExistsError:
            second.touch()
            return
        end = time.monotonic() + _WAIT_S
        while not second.exists() and time.monotonic() < end:
            time.sleep(0.01)

    frame = spark.read.parquet(source).repartition(4)
    writer = frame.mapInArrow(held, frame.schema).write.format("tiered_index").mode("append")
    writer.options(**_OPTIONS).save(uri)
    line = {"total": total(uri), "tables": len(states(uri).tables), "twice": second.exists()}
    check(uri, table, keys=10)
    line["swept"] = sweep(uri)
    check(uri, table, keys=5)
    spark.stop()
    return line


def _denied(master: str, folder: Path, count: int, max_failures: str) -> dict[str, Any]:
    spark, uri = _session(master, max_failures), f"file://{folder}/index"
    tables = [messages(count, days=2), messages(count, days=2, seed=2)]
    paths = [write_parquet(table, folder / f"{n}.parquet") for n, table in enumerate(tables)]
    frames = [spark.read.parquet(path).repartition(4) for path in paths]
    frames[0].coalesce(1).write.format("tiered_index").mode("append").options(**_OPTIONS).save(uri)
    before, error = states(uri).number, ""
    with one_is_denied(spark, folder) as failures:
        try:
            frames[1].write.format("held").mode("append").options(**_OPTIONS).save(uri)
        except (PySparkException, Py4JJavaError) as raised:
            error = str(raised)
    stored = [tables[0]] if error else [joined(tables)]
    line = {"denied": "Commit denied for partition" in error, "failed": bool(error), "failures": sum(failures)}
    line |= {"records": states(uri).number - before, "total": total(uri), "tables": len(states(uri).tables)}
    check(uri, *stored, keys=10)
    line["swept"] = sweep(uri)
    check(uri, *stored, keys=5)
    spark.stop()
    return line


def _query(spark: SparkSession, folder: Path, sink: str = "tiered_index", tasks: int = 4) -> str:
    """Run the query until it has read all files; return its error, or nothing."""
    schema = "topic string, queue_id int, key string, offset long, size int, timestamp_ms long"
    source = spark.readStream.schema(schema).parquet(f"{folder}/in").repartition(tasks)
    writer = source.writeStream.format(sink).options(**_OPTIONS, checkpointLocation=f"{folder}/checkpoint")
    query = writer.trigger(availableNow=True).start(f"file://{folder}/index")
    try:
        query.awaitTermination()
    except StreamingQueryException as error:
        return str(error)
    return ""


def _stored(uri: str, *tables: pa.Table) -> dict[str, Any]:
    """Assert that the index has exactly these entries, sweep the orphans, and return figures of the index."""
    state = states(uri)
    line: dict[str, Any] = {"record": state.number, "batches": list(state.positions.values())}
    line |= {"total": total(uri), "tables": len(state.tables)}
    check(uri, *tables, keys=10)
    line["swept"] = sweep(uri)
    check_stored(uri, *tables)
    return line


def _streamed(master: str, folder: Path, count: int, max_failures: str) -> dict[str, Any]:
    uri = f"file://{folder}/index"
    tables = [messages(count, days=2, seed=seed) for seed in (1, 2, 3)]
    (folder / "in").mkdir()

    def add(number: int) -> None:
        write_parquet(tables[number], folder / f"{number}.parquet")
        (folder / f"{number}.parquet").rename(folder / "in" / f"{number}.parquet")

    spark = _session(master, max_failures)
    add(0)
    line: dict[str, Any] = {"first": _query(spark, folder, tasks=1)}
    line["begun"] = _stored(uri, tables[0])
    add(1)
    with one_is_denied(spark, folder) as failures:
        line["error"] = _query(spark, folder, "held")
    line["failures"] = sum(failures)
    line["disturbed"] = _stored(uri, *tables[: 1 if line["error"] else 2])
    spark.stop()
    spark = _session(master, max_failures, speculates=False)
    add(2)
    line["last"] = _query(spark, folder)
    line["ended"] = _stored(uri, *tables)
    spark.stop()
    return line


if __name__ == "__main__":
    job = {"speculated": _speculated, "denied": _denied, "streamed": _streamed}[sys.argv[4]]
    print(json.dumps(job(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[5])), flush=True)
