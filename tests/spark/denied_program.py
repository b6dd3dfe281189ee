"""Writes a DataFrame while Spark speculates, and has one of two attempts of a task denied; run as a program by test_writing_cluster.py.

    denied_program.py MASTER FOLDER ENTRIES MAX_FAILURES      appends to FOLDER/index twice, prints one JSON line

Both attempts have uploaded all they have. The first asks first, and its executor is stopped as soon as Spark let it commit; its message is
large, so that it can't have reached the driver by then. The second one asks now.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceWriter
from pyspark.sql.types import StructType

from tests.spark.entries import check, joined, messages, states, sweep, total, write_parquet
from tiered_index.spark import open_session, register
from tiered_index.spark.datasource_entries import EntrySource
from tiered_index.spark.datasource_writing import EntryWriter, Written

_WAIT_S = 120.0
_TASK = 3
_MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True)
class _Large(Written):
    padding: bytes


class _HeldWriter(EntryWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        written = super().write(iterator)
        context = TaskContext.get()
        assert context is not None
        if context.partitionId() != _TASK:
            return written
        folder, attempt = Path(self._job.address.uri.removeprefix("file://")).parent, context.attemptNumber()
        if attempt == 0:
            _tell(folder / "first", f"{context.stageId()} {_parent(os.getppid())}")
            _until((folder / "second").exists)
            return _Large(written.shards, None, written.content, bytes(_MESSAGE_BYTES))
        _tell(folder / "second", "")
        _until((folder / ("allowed" if attempt == 1 else "never")).exists)
        return written


class _HeldSource(EntrySource):
    @classmethod
    def name(cls) -> str:
        return "held"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        writer = super().writer(schema, overwrite)
        writer.__class__ = _HeldWriter
        return writer


def _tell(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


def _parent(pid: int) -> int:
    """Return the parent of a process; a worker's is the daemon, whose is the executor."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + _WAIT_S
    while not happened() and time.monotonic() < end:
        time.sleep(0.001)


def _hold_the_first(spark: SparkSession, folder: Path) -> None:
    """Stop the executor of the first attempt when that may commit, until the second one has failed. A thread of the driver."""
    _until((folder / "second").exists)
    stage, executor = map(int, (folder / "first").read_text().split())
    _until(lambda: _is_allowed(spark, stage))
    os.kill(executor, signal.SIGSTOP)
    try:
        _tell(folder / "allowed", "")
        tracker = spark.sparkContext.statusTracker()
        _until(lambda: (info := tracker.getStageInfo(stage)) is not None and info.numFailedTasks > 0)
        _tell(folder / "failed", str(info.numFailedTasks if (info := tracker.getStageInfo(stage)) is not None else 0))
    finally:
        os.kill(executor, signal.SIGCONT)


def _is_allowed(spark: SparkSession, stage: int) -> bool:
    """Return whether an attempt of the task may commit: looks into Spark's coordinator, which tells nobody."""
    context: Any = spark.sparkContext._jsc
    coordinator = _field(spark, "SparkEnv", "outputCommitCoordinator").get(context.sc().env())
    state = _field(spark, "scheduler.OutputCommitCoordinator", "stageStates").get(coordinator).get(stage)
    return state.isDefined() and state.get().authorizedCommitters()[_TASK] is not None


def _field(spark: SparkSession, owner: str, name: str) -> Any:
    jvm: Any = spark._jvm
    # methods of Spark's own classes can't be listed: some are of packages that PySpark doesn't bring
    field = jvm.java.lang.Class.forName(f"org.apache.spark.{owner}").getDeclaredField(name)
    field.setAccessible(True)
    return field


def _main(master: str, folder: Path, count: int, max_failures: str) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = open_session(master, settings={
        "spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1",
        "spark.executorEnv.PYTHONPATH": str(Path(__file__).parents[2]), "spark.executor.memory": "1g",
        "spark.task.maxFailures": max_failures, "spark.speculation": "true", "spark.speculation.interval": "200ms",
        "spark.speculation.multiplier": "1.1", "spark.speculation.quantile": "0.5", "spark.speculation.minTaskRuntime": "500ms",
    })  # fmt: skip
    register(spark)
    spark.dataSource.register(_HeldSource)
    uri = f"file://{folder}/index"
    tables = [messages(count, days=2), messages(count, days=2, seed=2)]
    frames = [spark.read.parquet(write_parquet(table, folder / f"{n}.parquet")).repartition(4) for n, table in enumerate(tables)]
    options = {"slots": 64, "items": 100_000}
    frames[0].coalesce(1).write.format("tiered_index").mode("append").options(**options).save(uri)
    before = states(uri).number
    holder = threading.Thread(target=_hold_the_first, args=(spark, folder))
    holder.start()
    error = ""
    try:
        frames[1].write.format("held").mode("append").options(**options).save(uri)
    except (PySparkException, Py4JJavaError) as raised:
        error = str(raised)
    holder.join()
    stored = [tables[0]] if error else [joined(tables)]
    line = {
        "denied": "Commit denied for partition" in error, "failed": bool(error), "failures": int((folder / "failed").read_text()),
        "records": states(uri).number - before, "total": total(uri), "tables": len(states(uri).tables),
    }  # fmt: skip
    check(uri, *stored, keys=10)
    line["swept"] = sweep(uri)
    check(uri, *stored, keys=5)
    print(json.dumps(line), flush=True)
    spark.stop()


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
