"""Runs builds, merges and erasures on a cluster of two executors, with seeded failures. test_local_cluster.py runs this
program.

`cluster_program.py MASTER FOLDER ENTRIES TROUBLE...` prints one JSON line per trouble and job.

If the trouble is ``changed``, the source has other rows once all executors are lost. One build then fails, and another
build publishes the new rows. If the trouble is ``none``, the program also reads the index in every way, as the job
``read``.

Executors are separate processes. The way in which tasks open their storage decides which calls fail. `Troubled`
replaces the address. It counts openings by files in a folder, which all processes see.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812

from tests.spark.entries import BEGIN_MS, check, messages, states, stored_rows, sweep, total, write_parquet
from tests.spark.held_writers import parent_of, speculating_session
from tests.support.store_writer import StoreWriter
from tiered_index import IndexConfig, IndexReader, hash_key
from tiered_index.errors import NotAnIndex, StorageUnavailable, TieredIndexError
from tiered_index.service.jobs.merge_run import MergeOptions
from tiered_index.spark import audit, build, erase, look_up, merge, register
from tiered_index.spark import hash_key as hash_column
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.writing import plan as planning
from tiered_index.storage.base import Call, Storage, WrapperStorage

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

    def _around(self, call: Call, act: Any) -> Any:
        if call.operation != "put":
            return act()
        if self._trouble in ("fail", "executor") and (self._first("a") or self._first("b")):
            act()
            raise StorageUnavailable("the test drops this response")
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
        pid = parent_of(pid)
    return pid


def _executors() -> list[int]:
    """Return the process ids of all executors: those with the same parent. The caller's own is the last."""
    own = _executor()
    siblings = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process may have ended in the meantime
            is_sibling = parent_of(int(folder.name)) == parent_of(own)
            if is_sibling and b"CoarseGrainedExecutor" in (folder / "cmdline").read_bytes():
                siblings.append(int(folder.name))
    return sorted(siblings, key=lambda pid: pid == own)


@dataclass(frozen=True)
class Troubled:
    """Opens a plain storage in the driver, and a `Troubling` one in tasks."""

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


_MOST = 50
_KEYS = 30


def _read_back(spark: Any, storage: str, table: pa.Table, source: str, folder: Path) -> dict[str, Any]:
    """Assert that each way of reading returns the entries that were put; return their counts."""
    register(spark)
    rows = table.to_pylist()
    stored = sorted({(row["topic"], row["key"]) for row in rows})
    pairs = {*stored[:: max(1, len(stored) // _KEYS)], ("orders", "key-0"), ("orders", "nobody's")}
    return {
        **_looked_up(spark, storage, sorted(pairs)),
        **_audited(spark, storage, source, len(rows)),
        **_loaded(spark, storage, rows),
        **_commit_log(spark, folder),
    }


def _looked_up(spark: Any, storage: str, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    asked = spark.createDataFrame(pairs, "topic string, key string").withColumn("hash", hash_column("topic", "key"))
    result = look_up(spark, asked, storage=storage, max_count=_MOST)
    assert result.frame is not None
    found: dict[tuple[str, str], list[Any]] = {}
    for row in result.frame.sort("position").collect():
        found.setdefault((row.topic, row.key), []).append(row)
    assert sorted(found) == pairs
    with IndexReader.open(storage) as reader:
        for (topic, key), rows in found.items():
            answer = reader.query(topic, key, max_count=_MOST)
            told = {(row.status, row.failed, row.hash) for row in rows}
            assert told == {(answer.status, None, hash_key(topic, key))}
            entries = [(e.queue_id, e.offset, e.size, e.timestamp_ms) for e in rows if e.position is not None]
            assert entries == [(item.queue_id, item.offset, item.size, item.timestamp_ms) for item in answer]
    figures = {"lookups": len(pairs), "tasks": result.tasks, "objects": result.objects, "statuses": result.statuses}
    result.release()
    return figures


def _audited(spark: Any, storage: str, source: str, count: int) -> dict[str, Any]:
    audited = audit(spark, source, storage=storage)
    assert audited.differences is not None and audited.differences.index_entries == count
    return {"audit": audited.status, "differences": audited.differences.counts}


def _loaded(spark: Any, storage: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    columns = ("topic", "key_hash", "queue_id", "offset", "size", F.col("timestamp").cast("long"))
    entries = spark.read.format("tiered_index").option("maxPartitionBytes", "30k").load(storage)
    scanned = Counter(tuple(row) for row in entries.select(*columns).collect())
    assert scanned == stored_rows(rows)
    order = spark.sql(f"SELECT * FROM tiered_index_lookup('{storage}', 'orders', 'key-0')")
    with IndexReader.open(storage) as reader:
        answer = reader.query("orders", "key-0", max_count=len(rows))
    assert sorted(row.offset for row in order.collect()) == sorted(item.offset for item in answer)
    return {"scanned": scanned.total(), "partitions": entries.rdd.getNumPartitions(), "of_key": len(answer)}


def _commit_log(spark: Any, folder: Path) -> dict[str, Any]:
    with StoreWriter(folder / "store", segment_bytes=20_000) as writer:
        put = {}
        for n in range(300):
            queue, body, keys = n % 3, b"body %d" % n, [f"k-{n}", "all"]
            put[writer.put("orders", queue, body, keys=keys, store_ms=BEGIN_MS + n).offset] = (queue, body, keys)
    log = spark.read.format("rocketmq_commitlog").load(str(folder / "store"))
    found = {row.physical_offset: (row.queue_id, bytes(row.body), list(row["keys"])) for row in log.collect()}
    assert found == put
    return {"messages": len(found), "segments": log.rdd.getNumPartitions()}


def main(master: str, folder: Path, troubles: list[str], count: int) -> None:
    spark = speculating_session(master)
    spark.sparkContext.setLogLevel("OFF")
    modules: Any = {name: sys.modules[f"tiered_index.spark.writing.{name}"] for name in ("build", "merge", "erase")}
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
            shards = done.scanned_objects if job == "erase" else done.shards
            line = {"trouble": trouble, "struck": struck, "shards": shards, "objects": objects, "swept": swept}
            print(json.dumps({**line, "job": job}), flush=True)
            if (trouble, job) == ("none", "build"):
                read = _read_back(spark, storage, table, path, folder)
                print(json.dumps({"trouble": trouble, "job": "read", **read}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[4:], int(sys.argv[3]))
