"""Makes Spark deny the commit of one of two attempts of a task.

Both attempts of one task have uploaded all their tables. The first attempt asks Spark first. A thread stops its
executor as soon as Spark allows the commit. Its message is so large that it can't have reached the driver by then. Then
the second attempt asks. Files beside the index show the progress of each attempt.
"""

from __future__ import annotations

import contextlib
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
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceStreamWriter, DataSourceWriter
from pyspark.sql.types import StructType

from tiered_index.spark import open_session
from tiered_index.spark.datasource.entries import EntrySource
from tiered_index.spark.datasource.writing import EntryStreamWriter, EntryWriter, PartitionJob, Written

__all__ = ["ON_LOOPBACK", "HeldSource", "one_is_denied", "parent_of", "speculating_session"]

ON_LOOPBACK = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executorEnv.PYTHONPATH": str(Path(__file__).parents[2]),
}
"""Settings of a driver on this machine, and of executors that import the package from this tree."""
_WAIT_S = 120.0
_TASK = 3
_MESSAGE_BYTES = 64 << 20


def speculating_session(master: str, max_failures: str = "4", *, speculates: bool = True) -> SparkSession:
    """Start a session that starts a second attempt of a task soon after others have ended. A task may fail fewer than
    `max_failures` times.
    """
    os.environ["PYSPARK_PYTHON"] = sys.executable
    speculation = {"interval": "200ms", "multiplier": "1.1", "quantile": "0.5", "minTaskRuntime": "500ms"}
    settings = {
        **ON_LOOPBACK,
        "spark.executor.memory": "1g",
        "spark.task.maxFailures": max_failures,
        "spark.speculation": str(speculates).lower(),
        **{f"spark.speculation.{name}": value for name, value in speculation.items()},
    }
    return open_session(master, settings=settings)


@dataclass(frozen=True)
class _Large(Written):
    padding: bytes = b""


def _held(written: Written, job: PartitionJob) -> Written:
    """Wait until this attempt may ask for its commit; return its message to the driver."""
    context = TaskContext.get()
    assert context is not None
    if context.partitionId() != _TASK:
        return written
    folder, attempt = Path(job.address.uri.removeprefix("file://")).parent, context.attemptNumber()
    if attempt == 0:
        _tell(folder / "first", f"{context.stageId()} {parent_of(os.getppid())}")
        _until((folder / "second").exists)
        return _Large(written.shards, written.query, written.content, written.genesis, bytes(_MESSAGE_BYTES))
    _tell(folder / "second", "")
    _until((folder / ("allowed" if attempt == 1 else "never")).exists)
    return written


class _HeldWriter(EntryWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return _held(super().write(iterator), self._job)


class _HeldStreamWriter(EntryStreamWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return _held(super().write(iterator), self._job)


class HeldSource(EntrySource):
    """The format ``tiered_index``, except that it delays two attempts of one task."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "held"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a DataFrame."""
        writer = super().writer(schema, overwrite)
        writer.__class__ = _HeldWriter
        return writer

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        """Return the writer of a micro-batch."""
        writer = super().streamWriter(schema, overwrite)
        writer.__class__ = _HeldStreamWriter
        return writer


def _tell(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


def parent_of(pid: int) -> int:
    """Return the parent of a process. A worker's parent is the daemon, whose parent is the executor."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + _WAIT_S
    while not happened() and time.monotonic() < end:
        time.sleep(0.001)


@contextlib.contextmanager
def one_is_denied(spark: SparkSession, folder: Path) -> Iterator[list[int]]:
    """Have Spark deny one attempt of a write to FOLDER/index, as `held`, in this block. Afterwards the list has the
    number of failed attempts.
    """
    failures: list[int] = []
    holder = threading.Thread(target=_hold_the_first, args=(spark, folder, failures))
    holder.start()
    try:
        yield failures
    finally:
        holder.join()


def _hold_the_first(spark: SparkSession, folder: Path, failures: list[int]) -> None:
    """Stop the executor of the first attempt once that may commit, until the second attempt has failed.

    This runs in a thread of the driver.
    """
    _until((folder / "second").exists)
    stage, executor = map(int, (folder / "first").read_text().split())
    _until(lambda: _is_allowed(spark, stage))
    os.kill(executor, signal.SIGSTOP)
    try:
        _tell(folder / "allowed", "")
        tracker = spark.sparkContext.statusTracker()
        _until(lambda: (info := tracker.getStageInfo(stage)) is not None and info.numFailedTasks > 0)
        failures.append(info.numFailedTasks if (info := tracker.getStageInfo(stage)) is not None else 0)
    finally:
        os.kill(executor, signal.SIGCONT)


def _is_allowed(spark: SparkSession, stage: int) -> bool:
    """Return whether an attempt of the task may commit. Only the private state of Spark's coordinator has this."""
    context: Any = spark.sparkContext._jsc
    coordinator = _field(spark, "SparkEnv", "outputCommitCoordinator").get(context.sc().env())
    state = _field(spark, "scheduler.OutputCommitCoordinator", "stageStates").get(coordinator).get(stage)
    return state.isDefined() and state.get().authorizedCommitters()[_TASK] is not None


def _field(spark: SparkSession, owner: str, name: str) -> Any:
    jvm: Any = spark._jvm
    # Java can't list the methods of Spark's own classes: some need packages that PySpark does not include
    field = jvm.java.lang.Class.forName(f"org.apache.spark.{owner}").getDeclaredField(name)
    field.setAccessible(True)
    return field
