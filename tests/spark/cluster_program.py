"""Runs writes, builds, merges and erasures on a cluster of two executors, with seeded failures.

test_local_cluster.py runs this program.

`cluster_program.py MASTER FOLDER ENTRIES TROUBLE...` prints one JSON line per trouble and job.

If the trouble is ``changed``, the source has other rows once all executors are lost. One build then fails, and another
build publishes the new rows.

Executors are separate processes. The way in which tasks open their storage decides which calls fail. `Troubled`
replaces the address, in the format ``troubled`` that of ``tiered_index``. It counts by files in a folder, which all
processes see.
"""

import contextlib
import gzip
import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from tests.spark.entries import check, check_stored, messages, states, sweep, total, write_parquet
from tiered_index import FileRows, IndexConfig, IndexReader
from tiered_index.errors import NotAnIndex, StorageUnavailable, TieredIndexError
from tiered_index.service.jobs.merge_run import MergeOptions
from tiered_index.spark import build, erase, merge, open_session
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.datasource.entries import EntrySource
from tiered_index.spark.writing import linked
from tiered_index.spark.writing import plan as planning
from tiered_index.spark.writing.linked import RowsOfFiles, link_files
from tiered_index.storage.base import Storage, StorageRequest, WrapperStorage

_WAIT_S = 240.0


class Troubling(WrapperStorage):
    """A storage that makes the first writes of tasks fail, as `trouble` says."""

    def __init__(self, inner: Storage, marks: Path, trouble: str) -> None:
        super().__init__(inner)
        self._marks, self._trouble = marks, trouble

    def _first(self, what: str) -> bool:
        """Whether this process is the first one here."""
        try:
            (self._marks / what).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _around(self, call: StorageRequest, act: Any) -> Any:
        if call.operation != "put":
            return act()
        if self._trouble in ("fail", "executor") and (self._first("a") or self._first("b")):
            act()
            raise StorageUnavailable("the test drops this response")
        if self._trouble == "worker" and self._first("killed"):
            act()
            os.kill(os.getpid(), signal.SIGKILL)
        kind = call.name.partition("/")[0]
        # each stage loses executors: the one that sends restart points, and the one that sends tables
        if self._trouble == "stages" and (self._first(f"{kind} 1") or self._first(f"{kind} 2")):
            act()
            os.kill(_executor(), signal.SIGKILL)
            time.sleep(_WAIT_S)
        if self._trouble == "executor" and self._first("killed"):
            act()
            os.kill(_executor(), signal.SIGKILL)
            time.sleep(_WAIT_S)
        if self._trouble == "changed" and self._first("killed"):
            source = self._marks.parent / "m.parquet"
            (self._marks.parent / "changed.parquet").replace(source)
            # all executors: otherwise the rows that tasks have read could be on the surviving one
            for executor in _executors():
                os.kill(executor, signal.SIGKILL)
            time.sleep(_WAIT_S)
        if self._trouble == "slow" and self._first("slow"):
            end = time.monotonic() + _WAIT_S
            # until Spark ends this attempt, because the other attempt was faster
            while time.monotonic() < end:
                time.sleep(0.1)
            (self._marks / "waited").touch()
        return act()


def _executor() -> int:
    """Return the process id of the executor: the Java process that is this worker's ancestor."""
    pid = os.getpid()
    while "java" not in Path(f"/proc/{pid}/comm").read_text():
        pid = _parent_of(pid)
    return pid


def _executors() -> list[int]:
    """Return the process ids of all executors: those with the same parent. The caller's own is the last."""
    own = _executor()
    siblings = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process may have ended in the meantime
            is_sibling = _parent_of(int(folder.name)) == _parent_of(own)
            if is_sibling and b"CoarseGrainedExecutor" in (folder / "cmdline").read_bytes():
                siblings.append(int(folder.name))
    return sorted(siblings, key=lambda pid: pid == own)


@dataclass(frozen=True)
class Troubled:
    """Opens a plain storage in the driver, and a `Troubling` one in tasks."""

    address: StorageAddress
    marks: Path
    trouble: str
    request_stats: Any = None

    def open(self) -> Storage:
        """Return the storage."""
        inner = replace(self.address, request_stats=self.request_stats).open()
        return inner if TaskContext.get() is None else Troubling(inner, self.marks, self.trouble)


def _changed(spark: Any, storage: str, table: Any, path: str, config: IndexConfig) -> dict[str, Any]:
    """Build from a source that changes once all executors are lost, and build again; return both outcomes."""
    more = pa.concat_tables([table, messages(len(table) // 2, days=2, seed=9)])
    write_parquet(more, Path(path).with_name("changed.parquet"), group_rows=len(table) // 4)
    try:
        build(spark, path, storage=storage, shards=4, config=config)
        failed = None
    except TieredIndexError as error:
        failed = f"{type(error).__name__}: {error}"
    try:
        built = total(storage)
    except NotAnIndex:
        built = 0
    done = build(spark, path, storage=storage, shards=4, config=config, mode="replace")
    check(storage, more, keys=5)
    entries = {"before": built, "entries": done.entries, "stored": total(storage), "rows": len(more)}
    return {"trouble": "changed", "job": "build", "failed": failed, **entries, "swept": sweep(storage)}


_FILES, _ROWS = 4, 9_000


def _link(spark: Any, folder: Path, storage: str, config: IndexConfig) -> dict[str, Any]:
    """Link packed files, and check that each row is found as often as it is there, and comes back."""
    noise = random.Random(3)
    for number in range(_FILES):
        rows = [{"id": n % 50, "at": 1_700_000_000 + n, "n": n} for n in range(number * _ROWS, (number + 1) * _ROWS)]
        text = "".join(f"{json.dumps(row | {'note': f'{noise.getrandbits(2_000):x}'})}\n" for row in rows)
        (folder / f"{number}.ndjson.gz").write_bytes(gzip.compress(text.encode(), 1))
    linked._TASK_FILES = 1  # so that each file has a task
    done = link_files(
        spark, [f"{folder}/*.gz"], RowsOfFiles(("id",), "at", None, "rows"), storage=storage, config=config
    )
    swept = sweep(storage)
    count = _FILES * _ROWS
    assert done.rows == done.entries == total(storage) == count, (done, total(storage))
    with IndexReader.open(storage) as reader, FileRows(reader) as source:
        for key in ("0", "17", "49"):
            fetched_rows = reader.messages("rows", key, source=source, max_count=count)
            assert [json.loads(fetched.message.text)["n"] for fetched in fetched_rows] == [
                *range(count - 50 + int(key), -1, -50)
            ]
        points = [*reader.segments().of("points:-/rows/0")]
    return {"objects": len(states(storage).objects), "points": len(points), "swept": swept}


def _session(master: str) -> Any:
    """Start a session that starts a second attempt of a task soon after others have ended."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    speculation = {"interval": "200ms", "multiplier": "1.1", "quantile": "0.5", "minTaskRuntime": "500ms"}
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executorEnv.PYTHONPATH": str(Path(__file__).parents[2]),
        "spark.executor.memory": "1g",
        "spark.task.maxFailures": "4",
        "spark.speculation": "true",
        **{f"spark.speculation.{name}": value for name, value in speculation.items()},
    }
    spark = open_session(master, settings=settings)
    spark.sparkContext.setLogLevel("OFF")
    return spark


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _written(spark: Any, storage: str, source: str, marks: Path, trouble: str) -> None:
    """Append the source as a DataFrame, in four tasks. Spark lets one attempt of each commit."""

    class TroubledSource(EntrySource):
        @classmethod
        def name(cls) -> str:
            return "troubled"

        def writer(self, schema: Any, overwrite: bool) -> Any:
            writer: Any = super().writer(schema, overwrite)
            writer._job = replace(writer._job, address=Troubled(writer._job.address, marks, trouble))
            return writer

    spark.dataSource.register(TroubledSource)
    frame = spark.read.parquet(source).repartition(4)
    frame.write.format("troubled").mode("append").options(slots="64", items="100000").save(storage)


def main(master: str, folder: Path, troubles: list[str], count: int) -> None:
    spark = _session(master)
    modules: Any = {name: sys.modules[f"tiered_index.spark.writing.{name}"] for name in ("build", "merge", "erase")}
    planning._LEAST_BYTES = 1 << 14  # so that a few thousand entries make several tasks
    table = messages(count, days=2)
    path = write_parquet(table, folder / "m.parquet", group_rows=count // 4)
    config = IndexConfig(slots=64, items=100_000)
    for number, trouble in enumerate(troubles):
        storage, marks = f"file://{folder}/storage{number}", folder / f"marks{number}"
        marks.mkdir()

        def troubled(uri: str, options: Any, marks: Path = marks, trouble: str = trouble) -> Troubled:
            return Troubled(StorageAddress(uri, options), marks, trouble)

        if trouble == "stages":
            modules["build"].StorageAddress = troubled
            figures = _link(spark, marks.parent, storage, config)
            struck = sorted(mark.name for mark in marks.iterdir())
            print(json.dumps({"trouble": trouble, "job": "link", **figures, "struck": struck}), flush=True)
            continue
        if trouble == "changed":
            modules["build"].StorageAddress = troubled
            figures = _changed(spark, storage, table, path, config)
            print(json.dumps({**figures, "struck": sorted(mark.name for mark in marks.iterdir())}), flush=True)
            continue
        # a second index, of a DataFrame
        written = f"file://{folder}/written{number}"
        left_by_erasure = table.filter(pc.field("key") != "key-0")
        for job in ("write", "build", "merge", "erase"):
            if job in modules:
                modules[job].StorageAddress = troubled
            for mark in marks.iterdir():
                mark.unlink()
            uri, left = written if job == "write" else storage, left_by_erasure if job == "erase" else table
            if job == "write":
                _written(spark, written, path, marks, trouble)
            elif job == "build":
                done: Any = build(spark, path, storage=storage, shards=4, config=config)
            elif job == "merge":
                done = merge(spark, storage=storage, window="30d", options=MergeOptions(shard_bytes=1 << 20))
            else:
                done = erase(spark, storage=storage, topic="orders", keys="key-0", yes=True, shard_bytes=1 << 20)
                assert done.entries_removed == count - len(left_by_erasure) and not done.remaining, (trouble, done)
            assert (job in ("write", "erase") or done.entries == count) and total(uri) == len(left), (trouble, job)
            struck = sorted(mark.name for mark in marks.iterdir())
            check(uri, left, keys=10)
            swept = sweep(uri)
            check_stored(uri, left)
            line = {"trouble": trouble, "struck": struck, "objects": len(states(uri).objects), "swept": swept}
            print(json.dumps({**line, "job": job}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[4:], int(sys.argv[3]))
