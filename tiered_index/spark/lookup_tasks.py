"""What a bulk lookup's tasks get and yield: keys become questions for tasks, questions become answers for partitions. DESIGN section 6.

```
keys ─> questions, packed ─> to tasks ─> objects searched ─> to partitions of questions ─> in order, cut, joined to the rows
        pack_questions       shuffle     search_task         shuffle                       lookup_answers
```
A row between stages is a block of many questions or rows in binary cells. What a task spent, and what it could not read, travels with its
answers, so Spark counts it once for each task whatever it repeats. One thread a task.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.errors import BudgetExceeded, CorruptFile, StorageError
from tiered_index.service.cold.path import MissingObject
from tiered_index.spark.executors import StorageAddress
from tiered_index.spark.freed_memory import between_tasks
from tiered_index.spark.lookup_plan import LookupPlan, Target
from tiered_index.spark.lookup_questions import cells_of, distinct, questions_of, records_of, routes
from tiered_index.spark.lookup_search import HeldAnswers, search_object
from tiered_index.storage.metering import MeteredStorage

__all__ = [
    "ASKED", "FAILED", "FOUND", "FOUND_SCHEMA", "MISSING", "REPORT", "TASK_SCHEMA", "TaskReport", "lots_of_questions", "pack_questions",
    "search_task",
]  # fmt: skip

TASK_SCHEMA = "task int, asked binary, wanted binary"
FOUND_SCHEMA = "kind int, partition int, questions binary, rows binary, more binary"
ASKED, FAILED, FOUND, REPORT, MISSING = 0, 1, 2, 3, 4
"""Kinds of blocks: every question once, questions of an object that could not be read, answers, what a task spent, questions given up."""
_HELD_QUESTIONS = 1 << 18
_BLOCK_QUESTIONS = 1 << 20
Array = npt.NDArray[Any]


@dataclass
class TaskReport:
    """What a task did. `failed` are (object, error), `missing` the object that was gone, after which the task gave up."""

    requests: dict[str, int] = field(default_factory=dict)
    bytes_read: int = 0
    objects: int = 0
    opened: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    missing: str | None = None


def pack_questions(batches: Iterable[pa.RecordBatch], plan: LookupPlan, column: str = "'key'") -> Iterator[pa.RecordBatch]:
    """Yield the questions of rows (topic, key, begin, end): each to the task that sees to it being answered, and to those that search.

    `column` is what errors call the column of keys.
    """
    for questions in lots_of_questions(batches, plan, column):
        yield _packed(questions, plan)


def lots_of_questions(batches: Iterable[pa.RecordBatch], plan: LookupPlan, column: str) -> Iterator[Array]:
    """Yield the questions of rows (topic, key, begin, end) in lots of some 260,000 rows, each once in its lot."""
    held: list[Array] = []
    count = 0
    for batch in batches:
        topics, keys, begins, ends = batch.columns
        held.append(questions_of(topics, keys, begins, ends, plan.places, keyed=plan.schema.keyed, column=column))
        count += len(batch)
        if count >= _HELD_QUESTIONS:
            yield distinct(np.concatenate(held))
            held, count = [], 0
    if count:
        yield distinct(np.concatenate(held))


def _packed(questions: Array, plan: LookupPlan) -> pa.RecordBatch:
    tasks, asked, wanted = [], [], []
    base_slots, homes = plan.base_slots(questions), routes(questions, len(plan.tasks))
    for task in range(len(plan.tasks)):
        mine, here = questions[homes == task], questions[plan.wanted(task, questions, base_slots)]
        if len(mine) or len(here):
            tasks.append(task)
            asked.append(mine.tobytes())
            wanted.append(here.tobytes())
    columns = [pa.array(tasks, pa.int32()), pa.array(asked, pa.binary()), pa.array(wanted, pa.binary())]
    return pa.RecordBatch.from_arrays(columns, ["task", "asked", "wanted"])


def search_task(batches: Iterable[pa.RecordBatch], plan: LookupPlan, address: StorageAddress) -> Iterator[pa.RecordBatch]:
    """Yield the blocks of one task (columns as `TASK_SCHEMA`, of that task only). Raises what a lookup does, unless it may be partial."""
    task, asked, wanted = -1, [], []
    for batch in batches:
        if len(batch):
            task = batch.column(0)[0].as_py()
            asked.append(records_of(batch.column(1)))
            wanted.append(records_of(batch.column(2)))
    if task < 0:
        return
    yield from _blocks(ASKED, np.concatenate(asked), None, plan)
    questions = distinct(np.concatenate(wanted))
    report = TaskReport()
    if len(questions):
        limits = plan.limits[task] if plan.limits else (None, None)
        with between_tasks(), address.open() as opened:
            metered = MeteredStorage(opened, plan.prices)
            metered.total.max_requests, metered.total.max_bytes = limits
            yield from _search_all(plan, metered, task, questions, report)
            report.requests, report.bytes_read = metered.total.requests_by_kind, metered.total.bytes_read
    empty = pa.array([None], pa.binary())
    yield _batch(REPORT, [0], empty, empty, pa.array([pickle.dumps(report)], pa.binary()))


def _search_all(
    plan: LookupPlan, storage: MeteredStorage, task: int, questions: Array, report: TaskReport
) -> Iterator[pa.RecordBatch]:
    held = HeldAnswers(plan, questions)
    base_slots = plan.base_slots(questions)
    for target in plan.tasks[task]:
        here = np.flatnonzero(target.holds(base_slots, questions))
        if not len(here):
            continue
        report.objects += 1
        try:
            for found in search_object(plan, storage, target.stored, questions, here):
                for questions_out, rows in held.add(found):
                    yield from _blocks(FOUND, questions_out, rows, plan)
        except MissingObject as error:
            if target.stored.name not in plan.lost:
                # told with the blocks, too: nobody reads the report of a task that Spark runs once more for blocks that it lost
                yield from _blocks(MISSING, questions, None, plan, error.name.encode())
                report.missing = error.name
                return
            meant = CorruptFile(error.name, "the log names this object, but the storage does not have it")
            yield from _failed(plan, target, meant, questions[here], report)
        except BudgetExceeded as error:
            named = _share_named(error, plan)
            if not plan.allow_partial:
                raise named from error
            yield from _failed(plan, target, named, questions[here], report)
        except (StorageError, CorruptFile) as error:
            if not plan.allow_partial:
                raise
            yield from _failed(plan, target, error, questions[here], report)
        else:
            report.opened += 1
    for questions_out, rows in held.rest():
        yield from _blocks(FOUND, questions_out, rows, plan)


def _share_named(error: BudgetExceeded, plan: LookupPlan) -> BudgetExceeded:
    bounds = (("max_requests", plan.max_requests), ("max_bytes", plan.max_bytes))
    given = " and ".join(f"{name}={bound}" for name, bound in bounds if bound is not None)
    return BudgetExceeded(f"{error}; that is this task's share of {given} for all {len(plan.tasks)} tasks")


def _failed(plan: LookupPlan, target: Target, error: Exception, questions: Array, report: TaskReport) -> Iterator[pa.RecordBatch]:
    shard = target.stored.shard
    file = target.stored.file_id if shard is None else target.stored.name
    report.failed.append((file, str(error)))
    yield from _blocks(FAILED, questions, None, plan, pickle.dumps((file, str(error))))


def _blocks(kind: int, questions: Array, rows: Array | None, plan: LookupPlan, more: bytes | None = None) -> Iterator[pa.RecordBatch]:
    """Yield blocks of one partition of questions each."""
    for start in range(0, len(questions), _BLOCK_QUESTIONS):
        part = slice(start, start + _BLOCK_QUESTIONS)
        partitions = routes(questions[part], plan.partitions)
        # 16 bits, enough for all partitions that a plan has, are sorted by counting
        order = np.argsort(partitions.astype(np.uint16), kind="stable")
        partitions = partitions[order]
        starts = np.flatnonzero(np.diff(partitions, prepend=-1))
        cells = pa.array([None] * len(starts), pa.binary()) if rows is None else cells_of(rows[part][order], starts)
        asked = cells_of(questions[part][order], starts)
        yield _batch(kind, partitions[starts].tolist(), asked, cells, pa.array([more] * len(starts), pa.binary()))


def _batch(kind: int, partitions: list[int], questions: pa.Array, rows: pa.Array, more: pa.Array) -> pa.RecordBatch:
    return pa.record_batch({
        "kind": pa.array([kind] * len(partitions), pa.int32()), "partition": pa.array(partitions, pa.int32()), "questions": questions,
        "rows": rows, "more": more,
    })  # fmt: skip
