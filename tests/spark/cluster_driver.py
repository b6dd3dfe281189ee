"""A Spark driver that dies while each of many jobs waits at a step. test_cluster_driver_killed.py runs this program.

- `cluster_driver.py MASTER FOLDER SOURCE die` runs each kind of job whole, then once per step, and kills itself with
  SIGKILL.
- `cluster_driver.py MASTER FOLDER SOURCE again` runs the same jobs on the storages that the killed driver left. It runs
  the first job also before that, on a storage that accepts nothing from tasks.

A step is a call by which the driver changes the storage. A run of the whole job shows its steps. The program then stops
the job before its first step and after each step. Each time, the storage FOLDER/left/JOB-STEPS begins as a copy of
FOLDER/origins/JOB.

Spark starts only once: the jobs are threads of one driver, which dies when all of them wait. `FOLDER/steps.json` lists
the steps. In the last jobs a task also waits: it has written the first bytes of an object, and writes no more.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from tests.spark.held_writers import ON_LOOPBACK
from tests.spark.killed_program import WRITES
from tiered_index import IndexConfig
from tiered_index.errors import InvalidArgument, StorageError, StorageUnavailable
from tiered_index.service.jobs.merge_run import MergeOptions
from tiered_index.spark import build, merge, open_session
from tiered_index.spark.addresses import StorageAddress
from tiered_index.storage.base import Call, Storage, WrapperStorage

__all__ = ["JOBS", "TASKS"]

JOBS = ("build", "replace", "merge", "pending")
TASKS = ("build", "merge")
"""Jobs that also wait while a task uploads: one for each core of the cluster."""
_AT_ONCE = 3
_LONGEST_S = 300.0
_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_T = TypeVar("_T")


@dataclass
class Stand:
    """The place where a job waits: after `steps` steps, or nowhere if None.

    `taken` are the steps so far. `over` is set when the job waits or has ended.
    """

    steps: int | None = None
    taken: list[tuple[str, str]] = field(default_factory=list)
    stands: bool = False
    over: threading.Event = field(default_factory=threading.Event)


_STANDS: dict[str, Stand] = {}
# by name of the storage


class Standing(WrapperStorage):
    """The driver's storage: after the given number of steps, calls do not return."""

    def __init__(self, inner: Storage, stand: Stand) -> None:
        super().__init__(inner)
        self._stand = stand

    def _around(self, call: Call, act: Callable[[], _T]) -> _T:
        stand = self._stand
        if stand.steps is None or len(stand.taken) < stand.steps:
            if call.operation not in WRITES:
                return act()
            stand.taken.append((call.operation, call.name))
            if len(stand.taken) != stand.steps:
                return act()
            with contextlib.suppress(StorageError):
                act()
        stand.stands = True
        stand.over.set()
        threading.Event().wait()
        raise AssertionError("the job waits")


class HeldTask(WrapperStorage):
    """A task's storage: the first task that writes bytes of an object then waits, and sends no more."""

    def __init__(self, inner: Storage, mark: Path) -> None:
        super().__init__(inner)
        self._mark = mark

    def _around(self, call: Call, act: Callable[[], _T]) -> _T:
        result = act()
        if call.operation == "write":
            with contextlib.suppress(FileExistsError):
                self._mark.touch(exist_ok=False)
                threading.Event().wait(_LONGEST_S)
        return result


class GoneStorage(WrapperStorage):
    """A task's storage that fails in the middle of a job and does not recover."""

    def _around(self, call: Call, act: Callable[[], _T]) -> _T:
        if call.operation == "write":
            raise StorageUnavailable("it takes nothing more")
        return act()


@dataclass(frozen=True)
class Address:
    """Opens the storage `name`. In the driver, its calls may wait."""

    address: StorageAddress
    name: str
    mark: Path
    gone: bool
    driver: int
    request_stats: Any = None

    def open(self) -> Storage:
        """Return the storage."""
        inner = replace(self.address, request_stats=self.request_stats).open()
        if os.getpid() == self.driver:
            return Standing(inner, _STANDS[self.name])
        if self.gone:
            return GoneStorage(inner)
        return HeldTask(inner, self.mark) if self.name.endswith("-tasks") else inner


class Driver:
    """Runs jobs by the name of the storage, which begins with the kind of job."""

    def __init__(self, master: str, folder: Path, source: str) -> None:
        os.environ["PYSPARK_PYTHON"] = sys.executable
        self.folder, self.left, self._source, self._gone = folder, folder / "left", source, False
        java = {f"spark.{side}.extraJavaOptions": _JAVA for side in ("driver", "executor")}
        # small jobs end before compiled code would save time
        small = {"spark.sql.shuffle.partitions": "2", "spark.sql.codegen.wholeStage": "false"}
        self.spark = open_session(master, settings={**ON_LOOPBACK, **small, **java})
        self.spark.sparkContext.setLogLevel("OFF")
        for module in ("build", "merge"):
            sys.modules[f"tiered_index.spark.writing.{module}"].StorageAddress = self._address  # type: ignore[attr-defined]

    def _address(self, uri: str, options: Any) -> Address:
        name = uri.rpartition("/")[2]
        return Address(StorageAddress(uri, options), name, self.folder / f"{name}.held", self._gone, os.getpid())

    def run(self, name: str) -> Any:
        """Run the job on its storage; return the number of entries or jobs that it published, or its error."""
        stand = _STANDS.setdefault(name, Stand())
        kind, storage = name.partition("-")[0], f"file://{self.left}/{name}"
        try:
            if kind in ("merge", "pending"):
                options = MergeOptions(min_age_s=0, shard_bytes=1 << 20)
                return merge(self.spark, storage=storage, window="1d", options=options).jobs
            mode, config = "replace" if kind == "replace" else "error", IndexConfig(slots=64, items=100_000)
            return build(self.spark, self._source, storage=storage, shards=2, mode=mode, config=config).entries
        except (InvalidArgument, StorageUnavailable) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            stand.over.set()

    def begin(self, name: str) -> None:
        """Prepare a storage with the objects that the job finds."""
        kind = name.partition("-")[0]
        if (origin := self.folder / "origins" / kind).exists():
            shutil.copytree(origin, self.left / name)

    def start(self, name: str, steps: int | None) -> None:
        """Begin a job in a thread that may never end."""
        self.begin(name)
        _STANDS[name] = Stand(steps)
        threading.Thread(target=self.run, args=(name,), daemon=True).start()

    def die(self) -> None:
        """Start jobs of each kind; each waits after its own number of steps. Then kill this process."""
        steps: dict[str, list[tuple[str, str]]] = {}
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for kind in JOBS:
                self.begin(f"{kind}-whole")
            for kind, done in zip(JOBS, pool.map(self.run, [f"{kind}-whole" for kind in JOBS]), strict=True):
                assert isinstance(done, int) and done > 0, (kind, done)
                steps[kind] = _STANDS[f"{kind}-whole"].taken
            list(pool.map(self._stand, [(kind, number) for kind in JOBS for number in range(len(steps[kind]) + 1)]))
        for kind in TASKS:
            name = f"{kind}-tasks"
            self.start(name, None)
            while not (self.folder / f"{name}.held").exists():
                assert not _STANDS[name].over.wait(0.05), f"{name} has ended"
        (self.folder / "steps.json").write_text(json.dumps(steps))
        os.kill(os.getpid(), signal.SIGKILL)

    def _stand(self, which: tuple[str, int]) -> None:
        name = f"{which[0]}-{which[1]}"
        self.start(name, which[1])
        assert _STANDS[name].over.wait(_LONGEST_S) and _STANDS[name].stands, f"{name} does not stand"

    def again(self) -> None:
        """Run the job of each storage that exists, and print its outcome as a JSON line."""
        steps = json.loads((self.folder / "steps.json").read_text())
        names = [f"{kind}-tasks" for kind in TASKS] + [
            f"{kind}-{number}" for kind in JOBS for number in range(len(steps[kind]) + 1)
        ]
        self._gone = True
        print(json.dumps({"name": names[0], "done": self.run(names[0])}), flush=True)
        self._gone = False
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for name, done in zip(names, pool.map(self.run, names), strict=True):
                print(json.dumps({"name": name, "done": done}), flush=True)
        self.spark.stop()


def main(master: str, folder: str, source: str, part: str) -> None:
    """Run the program."""
    driver = Driver(master, Path(folder), source)
    (driver.die if part == "die" else driver.again)()


if __name__ == "__main__":
    # the module as tasks import it: pickled objects of __main__ would include the state of threads
    from tests.spark.cluster_driver import main as _main

    _main(*sys.argv[1:])
