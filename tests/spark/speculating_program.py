"""Writes a DataFrame while Spark speculates; run as a program by test_writing_cluster.py.

    speculating_program.py MASTER FOLDER ENTRIES       writes FOLDER/m.parquet to FOLDER/index, prints one JSON line

The first attempt of one task waits at its end until another attempt got as far, so that both have everything uploaded
or about to be.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from tests.spark.entries import check, messages, states, sweep, total, write_parquet
from tests.spark.held_writers import speculating_session
from tiered_index.spark import register

_WAIT_S = 240.0


def _main(master: str, folder: Path, count: int) -> None:
    spark = speculating_session(master)
    spark.sparkContext.setLogLevel("OFF")
    register(spark)
    table = messages(count, days=2)
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
    uri = f"file://{folder}/index"
    frame.mapInArrow(held, frame.schema).write.format("tiered_index").mode("append").options(
        slots=64, items=100_000
    ).save(uri)
    line = {"total": total(uri), "tables": len(states(uri).tables), "twice": second.exists()}
    check(uri, table, keys=10)
    line["swept"] = sweep(uri)
    check(uri, table, keys=5)
    print(json.dumps(line), flush=True)
    spark.stop()


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
