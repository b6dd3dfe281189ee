"""The metrics of a job by stage, and its progress while it runs.

Storages opened by a meter's addresses add their counts to a Spark accumulator when they are closed. Failed tasks and
Spark's own reads are not counted. `JobMeter` belongs to the driver's thread; its addresses are sent to tasks.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from tiered_index.spark.addresses import READ, WRITTEN, StorageAddress, counts_of
from tiered_index.spark.versions import check_classic
from tiered_index.storage.base import StorageOptions
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.prices import rounded_usd

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

# Called with (stage, tasks done, tasks).
Progress: TypeAlias = Callable[[str, int, int], None]
_INTERVAL_S = 0.5
_GROUP, _DESCRIPTION = "spark.jobGroup.id", "spark.job.description"


# Descriptions of a stage's jobs for Spark's web pages.
_DOING = {
    "count": "count the entries of each window, or the keys",
    "build": "hash, pack and write window tables",
    "objects": "check every byte of objects and archived segments",
    "compare": "compare the index's entries with its source's",
    "merge": "merge files and tables into window tables",
    "find": "find the entries to erase",
    "overwrite": "overwrite archived segments without erased messages",
    "search": "look keys up in the stored objects",
    "write": "write the answers",
}


@dataclass
class TaskCount:
    """The number of tasks of a stage, after it has ended."""

    tasks: int = 0


@contextlib.contextmanager
def watched(spark: SparkSession, stage: str, progress: Progress) -> Iterator[TaskCount]:
    """Call `progress` with (stage, tasks done, tasks) during the block and at its end.

    The number of tasks is known at the end. Spark's jobs in the block have a job group and a description.
    """
    seen = TaskCount()
    context, group = spark.sparkContext, f"tiered_index-{stage}-{secrets.token_hex(4)}"
    named = {_GROUP: group, _DESCRIPTION: f"tiered_index {stage}: {_DOING[stage]}"}
    before: dict[str, Any] = {name: context.getLocalProperty(name) for name in named}
    for name, value in named.items():
        context.setLocalProperty(name, value)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_INTERVAL_S):
            with contextlib.suppress(Exception):
                progress(stage, *_tasks(context, group))

    thread = threading.Thread(target=watch, name="tiered-index-watch", daemon=True)
    thread.start()
    try:
        yield seen
        done, total = _tasks(context, group)
        seen.tasks = max(done, total)
    finally:
        over.set()
        thread.join()
        for name, value in before.items():
            context.setLocalProperty(name, value)
    progress(stage, max(done, total), total)


def _tasks(context: SparkContext, group: str) -> tuple[int, int]:
    """Return (tasks done, tasks) of the stages of a job group so far."""
    tracker = context.statusTracker()
    done, total = 0, 0
    for job in tracker.getJobIdsForGroup(group):
        info = tracker.getJobInfo(job)
        for number in info.stageIds if info is not None else ():
            stage = tracker.getStageInfo(number)
            if stage is not None:
                done, total = done + stage.numCompletedTasks, total + stage.numTasks
    return done, total


@dataclass(frozen=True, slots=True)
class StageMetrics:
    """The metrics of the steps of a job with one name. Requests are counted by operation, bytes are payload.

    - `name`: the name of the steps.
    - `tasks`: the number of tasks.
    - `seconds`: elapsed time, without that of stages inside it.
    - `entries`: the number of entries of the merged files; other steps count none.
    - `bytes_read`, `bytes_written`: bytes that tasks and driver read from, and wrote to, the storage.
    - `task_requests`, `driver_requests`: requests of the tasks, and of the driver, by operation.
    - `cost_usd`: cost of the requests and bytes by the price table, in US dollars.
    """

    name: str
    tasks: int
    seconds: float
    entries: int
    bytes_read: int
    bytes_written: int
    task_requests: Mapping[str, int]
    driver_requests: Mapping[str, int]
    cost_usd: float


@dataclass(frozen=True, slots=True)
class JobMetrics:
    """The metrics of a job by stage, in the order of their begin.

    - `application_id`: the id of the Spark application.
    - `stages`: the metrics of each stage.
    """

    application_id: str = ""
    stages: tuple[StageMetrics, ...] = ()

    @property
    def requests(self) -> dict[str, int]:
        """All requests of tasks and driver, by operation."""
        counts = [counts for stage in self.stages for counts in (stage.task_requests, stage.driver_requests)]
        return dict(sum(map(Counter, counts), Counter()))

    @property
    def bytes_read(self) -> int:
        """Payload bytes of all reads."""
        return sum(stage.bytes_read for stage in self.stages)

    @property
    def bytes_written(self) -> int:
        """Payload bytes of all writes."""
        return sum(stage.bytes_written for stage in self.stages)

    @property
    def cost_usd(self) -> float:
        """The estimated cost of all requests, in US dollars."""
        return rounded_usd(sum(stage.cost_usd for stage in self.stages))

    def to_json(self) -> dict[str, Any]:
        """Return the metrics, JSON-ready."""
        stages = []
        for stage in self.stages:
            told = asdict(stage) | {"seconds": round(stage.seconds, 3)}
            told["requests"] = {"tasks": told.pop("task_requests"), "driver": told.pop("driver_requests")}
            told["cost_usd"] = told.pop("cost_usd")
            stages.append(told)
        sums = {name: getattr(self, name) for name in ("requests", "bytes_read", "bytes_written", "cost_usd")}
        return {"application_id": self.application_id, "stages": stages, **sums}


def _requests(counts: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in sorted(counts.items()) if name not in (READ, WRITTEN)}


@dataclass(slots=True)
class _Stage:
    """The counts of a stage so far; the caller adds the number of entries."""

    entries: int = 0
    tasks: int = 0
    seconds: float = 0.0
    of_tasks: Counter[str] = field(default_factory=Counter)
    of_driver: Counter[str] = field(default_factory=Counter)


# All counters at one moment: seconds, requests of opened addresses, requests of the driver's own storage.
_Reading = tuple[float, Counter[str], Counter[str]]
_NOTHING: _Reading = (0.0, Counter(), Counter())


class JobMeter:
    """The meter of one job; `driver` is the driver's storage, whose prices are used.

    Raises `ConfigError` for a session of Spark Connect.
    """

    def __init__(self, spark: SparkSession, driver: MeteredStorage, progress: Progress) -> None:
        from pyspark.accumulators import AddingAccumulatorParam

        check_classic(spark)
        self._spark, self._driver, self._progress = spark, driver, progress
        sums: Any = AddingAccumulatorParam(Counter())
        self._request_stats = spark.sparkContext.accumulator(Counter(), sums)
        self._stages: dict[str, _Stage] = {}
        # Counts of the stages within the current one.
        self._within = _NOTHING

    def address(self, address: StorageAddress) -> StorageAddress:
        """Return an address for tasks whose requests count here."""
        return replace(address, request_stats=self._request_stats)

    def sources(self, s3: StorageOptions, index: str) -> Callable[[str], StorageAddress]:
        """Return a function that returns the address of a source of `index` by its URI; its requests count here."""
        return partial(StorageAddress, options=s3, request_stats=self._request_stats, index=index)

    @contextlib.contextmanager
    def stage(self, name: str, *, tasks: bool = False) -> Iterator[_Stage]:
        """Count the block in the stage `name` and not in an enclosing one; with `tasks` it runs Spark jobs."""
        stage = self._stages.setdefault(name, _Stage())
        begun, outside, self._within = self._read(), self._within, _NOTHING
        watch: Any = watched(self._spark, name, self._progress) if tasks else contextlib.nullcontext(TaskCount())
        try:
            with watch as seen:
                yield stage
            stage.tasks += seen.tasks
        finally:
            now, inner = self._read(), self._within
            whole = (now[0] - begun[0], now[1] - begun[1], now[2] - begun[2])
            self._within = (outside[0] + whole[0], outside[1] + whole[1], outside[2] + whole[2])
            stage.seconds += whole[0] - inner[0]
            # without tasks the driver opened the addresses
            (stage.of_tasks if tasks else stage.of_driver).update(whole[1] - inner[1])
            stage.of_driver.update(whole[2] - inner[2])

    @property
    def metrics(self) -> JobMetrics:
        """The metrics so far."""
        stages = tuple(self._stage_metrics(name, stage) for name, stage in self._stages.items())
        return JobMetrics(self._spark.sparkContext.applicationId, stages)

    def _read(self) -> _Reading:
        return time.monotonic(), Counter(self._request_stats.value), counts_of(self._driver.total)

    def _stage_metrics(self, name: str, stage: _Stage) -> StageMetrics:
        both = stage.of_tasks + stage.of_driver
        read, written = both.pop(READ, 0), both.pop(WRITTEN, 0)
        cost = self._driver.prices.cost_usd(both, read)
        requests = _requests(stage.of_tasks), _requests(stage.of_driver)
        return StageMetrics(name, stage.tasks, stage.seconds, stage.entries, read, written, *requests, cost)
