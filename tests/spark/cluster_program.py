"""Builds, merges and erasures on a cluster of two executors, with failures on purpose; run as a program by
test_local_cluster.py.

    cluster_program.py MASTER FOLDER ENTRIES TROUBLE...      prints one JSON line a trouble and job

Where the trouble is ``changed``, the source has other rows once all executors are lost: one build fails, and another
takes the new rows. Where the trouble is ``none``, the program also reads the index in every way (`cluster_reading`):
the job ``read``.

Executors are processes of their own. What goes wrong is decided by how tasks open their storage: `Troubled` stands for
the address and counts openings by files in a folder, which all processes see.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tests.spark.cluster_reading import read_back
from tests.spark.entries import check, messages, states, sweep, total, write_parquet
from tiered_index import IndexConfig
from tiered_index.errors import NotAnIndex, StorageUnavailable, TieredIndexError
from tiered_index.service.merge.run import MergeOptions
from tiered_index.spark import build, erase, merge, open_session
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.build import plan as planning
from tiered_index.storage.base import Call, Storage, WrapperStorage

_WAIT_S = 240.0


class Troubling(WrapperStorage):
    """A storage in which the first writes of tasks go wrong, as `trouble` says."""

    def __init__(self, inner: Storage, marks: Path, trouble: str) -> None:
        super().__init__(inner)
        self._marks, self._trouble = marks, trouble

    def _first(self, what: str) -> bool:
        """Whether nobody was here before: one process wins."""
        try:
            (self._marks / what).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _around(self, call: Call, act: Any) -> Any:
        if call.operation not in ("put", "upload_part"):
            return act()
        if self._trouble in ("fail", "executor") and (self._first("a") or self._first("b")):
            act()
            raise StorageUnavailable("this answer was lost on purpose")
        if self._trouble == "worker" and self._first("killed"):
            act()
            os.kill(os.getpid(), signal.SIGKILL)
        if self._trouble == "executor" and self._first("killed"):
            act()
            os.kill(_executor(), signal.SIGKILL)
            time.sleep(_WAIT_S)
        if self._trouble == "changed" and self._first("killed"):
            source = self._marks.parent / "m.parquet"
            (self._marks.parent / "changed.parquet").replace(source)
            # every executor: what the tasks had read could otherwise lie on the one that lives
            for executor in _executors():
                os.kill(executor, signal.SIGKILL)
            time.sleep(_WAIT_S)
        if self._trouble == "slow" and self._first("slow"):
            end = time.monotonic() + _WAIT_S
            # until Spark ends this attempt, because the other one was faster
            while time.monotonic() < end:
                time.sleep(0.1)
            (self._marks / "waited").touch()
        return act()


def _executor() -> int:
    """Return the process id of the executor: the Java process above this worker."""
    pid = os.getpid()
    while "java" not in Path(f"/proc/{pid}/comm").read_text():
        pid = _parent(pid)
    return pid


def _executors() -> list[int]:
    """Return the process ids of all executors: those with the same parent, the caller's own last."""
    own = _executor()
    siblings = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a process that ended meanwhile
            if (
                _parent(int(folder.name)) == _parent(own)
                and b"CoarseGrainedExecutor" in (folder / "cmdline").read_bytes()
            ):
                siblings.append(int(folder.name))
    return sorted(siblings, key=lambda pid: pid == own)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@dataclass(frozen=True)
class Troubled:
    """Opens a storage on the driver as it is, in tasks as `Troubling`."""

    address: StorageAddress
    marks: Path
    trouble: str
    driver: int
    request_stats: Any = None

    def open(self) -> Storage:
        """Return the storage."""
        inner = replace(self.address, request_stats=self.request_stats).open()
        return inner if os.getpid() == self.driver else Troubling(inner, self.marks, self.trouble)


def _changed(spark: Any, storage: str, table: Any, path: str, config: IndexConfig) -> dict[str, Any]:
    """Build from a source that changes once all executors are lost, and again; return what became of both."""
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


def main(master: str, folder: Path, troubles: list[str], count: int) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    root = str(Path(__file__).parents[2])
    spark = open_session(
        master,
        settings={
            "spark.ui.enabled": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.executorEnv.PYTHONPATH": root,
            "spark.executor.memory": "1g",
            "spark.task.maxFailures": "4",
            "spark.speculation": "true",
            "spark.speculation.interval": "200ms",
            "spark.speculation.multiplier": "1.1",
            "spark.speculation.quantile": "0.5",
            "spark.speculation.minTaskRuntime": "500ms",
        },
    )
    spark.sparkContext.setLogLevel("OFF")
    modules: Any = {name: sys.modules[f"tiered_index.spark.build.{name}"] for name in ("build", "merge", "erase")}
    planning._LEAST_BYTES = 1 << 14  # so that a few thousand entries make several tasks
    table = messages(count, days=2)
    path = write_parquet(table, folder / "m.parquet", group_rows=count // 4)
    config = IndexConfig(slots=64, items=100_000)
    for number, trouble in enumerate(troubles):
        storage, marks = f"file://{folder}/storage{number}", folder / f"marks{number}"
        marks.mkdir()

        def troubled(uri: str, options: Any, marks: Path = marks, trouble: str = trouble) -> Troubled:
            return Troubled(StorageAddress(uri, options), marks, trouble, os.getpid())

        if trouble == "changed":
            modules["build"].StorageAddress = troubled
            told = _changed(spark, storage, table, path, config)
            print(json.dumps({**told, "struck": sorted(mark.name for mark in marks.iterdir())}), flush=True)
            continue
        kept = table.filter(pc.field("key") != "key-0")
        for job in ("build", "merge", "erase"):
            modules[job].StorageAddress = troubled
            for mark in marks.iterdir():
                mark.unlink()
            if job == "build":
                done: Any = build(spark, path, storage=storage, shards=4, config=config)
            elif job == "merge":
                done = merge(spark, storage=storage, window="30d", options=MergeOptions(shard_bytes=1 << 20))
            else:
                done = erase(spark, storage=storage, topic="orders", keys="key-0", yes=True, shard_bytes=1 << 20)
                assert done.entries_removed == count - len(kept) and not done.remaining, (trouble, done)
            left = kept if job == "erase" else table
            assert (job == "erase" or done.entries == count) and total(storage) == len(left), (trouble, job)
            struck = sorted(mark.name for mark in marks.iterdir())
            check(storage, left, keys=10)
            swept = sweep(storage)
            check(storage, left, keys=5)
            objects = len(states(storage).objects)
            line = {
                "trouble": trouble,
                "job": job,
                "struck": struck,
                "shards": done.scanned_objects if job == "erase" else done.shards,
                "objects": objects,
            }
            print(json.dumps({**line, "swept": swept}), flush=True)
            if (trouble, job) == ("none", "build"):
                print(
                    json.dumps({"trouble": trouble, "job": "read", **read_back(spark, storage, table, path, folder)}),
                    flush=True,
                )
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[4:], int(sys.argv[3]))
