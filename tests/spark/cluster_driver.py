"""A Spark driver that is killed where it is told to; run as a program by test_cluster_driver_killed.py.

    cluster_driver.py MASTER FOLDER SOURCE NAME:JOB:MOMENT...

Each job works on the storage FOLDER/NAME. A job that ends says so by one JSON line; MOMENT ``tasks`` only makes the first part of an upload
wait in its task, so that somebody else can kill the driver then, with ``gone`` no part is taken, and ``none`` lets the job be.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tiered_index import IndexConfig
from tiered_index.errors import InvalidArgument, StorageUnavailable
from tiered_index.service.merge import writing
from tiered_index.service.merge.run import MergeOptions
from tiered_index.spark import build, merge, open_session
from tiered_index.spark.executors import StorageAddress
from tiered_index.storage.base import Storage
from tiered_index.storage.wrappers import Call, WrapperStorage

__all__ = ["MOMENTS"]

MOMENTS = {
    "with one upload complete": ("complete_upload", "data/", True),
    "before its record": ("put_if_absent", "log/", False),
    "before it hears of its record": ("put_if_absent", "log/", True),
}
_LONGEST_S = 60.0
_T = TypeVar("_T")


class DyingDriver(WrapperStorage):
    """The driver's storage: the first call that fits kills the process."""

    def __init__(self, inner: Storage, operation: str, prefix: str, after: bool) -> None:
        super().__init__(inner)
        self._operation, self._prefix, self._after = operation, prefix, after

    def _around(self, call: Call, act: Callable[[], _T]) -> _T:
        if call.operation != self._operation or not call.name.startswith(self._prefix):
            return act()
        if self._after:
            act()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")


class HeldTask(WrapperStorage):
    """A task's storage: the first part that is uploaded is there, and then nothing goes on."""

    def __init__(self, inner: Storage, mark: Path) -> None:
        super().__init__(inner)
        self._mark = mark

    def _around(self, call: Call, act: Callable[[], _T]) -> _T:
        result = act()
        if call.operation == "upload_part":
            self._mark.touch()
            threading.Event().wait(_LONGEST_S)
        return result


class GoneStorage(WrapperStorage):
    """A task's storage that fails in the middle and stays so."""

    def _around(self, call: Call, act: Callable[[], _T]) -> _T:
        if call.operation in ("upload_part", "abort_upload"):
            raise StorageUnavailable("it takes nothing more")
        return act()


@dataclass(frozen=True)
class Address:
    """Opens a storage in the driver and in tasks, which upload in small parts, as the moment wants it."""

    address: StorageAddress
    moment: str
    mark: Path
    driver: int

    def open(self) -> Storage:
        """Return the storage."""
        inner = self.address.open()
        if os.getpid() != self.driver:
            writing._PART_BYTES = 2_000
            if self.moment == "gone":
                return GoneStorage(inner)
            return HeldTask(inner, self.mark) if self.moment == "tasks" else inner
        return DyingDriver(inner, *MOMENTS[self.moment]) if self.moment in MOMENTS else inner


def main(master: str, folder: Path, source: str, jobs: list[str]) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = open_session(master, settings={
        "spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2", "spark.executorEnv.PYTHONPATH": str(Path(__file__).parents[2]),
    })  # fmt: skip
    spark.sparkContext.setLogLevel("OFF")
    modules: Any = {name: sys.modules[f"tiered_index.spark.{name}"] for name in ("build", "merge")}
    for name, job, moment in (each.split(":") for each in jobs):

        def address(uri: str, options: Any, moment: str = moment, name: str = name) -> Address:
            return Address(StorageAddress(uri, options), moment, folder / f"{name}.held", os.getpid())

        modules[job].StorageAddress = address
        storage = f"file://{folder}/{name}"
        try:
            if job == "build":
                config = IndexConfig(slots=64, items=100_000)
                done: Any = build(spark, source, storage=storage, shards=2, config=config).entries
            else:
                done = merge(spark, storage=storage, window="30d", options=MergeOptions(shard_bytes=1 << 20)).jobs
        except (InvalidArgument, StorageUnavailable) as error:
            done = f"{type(error).__name__}: {error}"
        print(json.dumps({"name": name, "job": job, "done": done}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
