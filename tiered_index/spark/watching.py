"""How far a Spark job is, told on the driver: a thread asks Spark's status tracker now and then.

`watched` tells about the jobs that its block starts. The thread ends with the block; whatever it is told by a context that is going down is
not worth an error.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

__all__ = ["Watched", "watched"]

_INTERVAL_S = 0.5
_GROUP = "spark.jobGroup.id"


@dataclass(slots=True)
class Watched:
    """How many tasks there were; known when the block is over."""

    tasks: int = 0


@contextlib.contextmanager
def watched(spark: SparkSession, stage: str, progress: Callable[[str, int, int], None]) -> Iterator[Watched]:
    """Call `progress` with (stage, tasks done, tasks) while the block runs, from a thread of its own, and once more at its end."""
    seen = Watched()
    context = spark.sparkContext
    group = f"tiered_index-{secrets.token_hex(4)}"
    before = context.getLocalProperty(_GROUP)
    context.setLocalProperty(_GROUP, group)
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
        progress(stage, max(done, total), total)
    finally:
        over.set()
        thread.join()
        context.setLocalProperty(_GROUP, before)  # type: ignore[arg-type]


def _tasks(context: SparkContext, group: str) -> tuple[int, int]:
    """Return (tasks done, tasks) of all stages of a job group that are known so far."""
    tracker = context.statusTracker()
    done, total = 0, 0
    for job in tracker.getJobIdsForGroup(group):
        info = tracker.getJobInfo(job)
        for number in info.stageIds if info is not None else ():
            stage = tracker.getStageInfo(number)
            if stage is not None:
                done, total = done + stage.numCompletedTasks, total + stage.numTasks
    return done, total
