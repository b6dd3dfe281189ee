"""The steps of a bulk lookup on Spark, in this process: pack, search task by task, answer.

They work on any storage, and on one with faults.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tests.spark.in_process import Address
from tiered_index.service.cold.path import ColdSettings
from tiered_index.service.log.state import LogState
from tiered_index.spark.lookup.answers import answer_partitions
from tiered_index.spark.lookup.packing import KeysCensus, pack_keys, pack_lookups
from tiered_index.spark.lookup.plan import LookupPlan, lookups_of, places_of, plan_lookup
from tiered_index.spark.lookup.search import REPORT, TaskReport, search_asked, search_task
from tiered_index.storage.base import Storage
from tiered_index.storage.prices import PriceTable
from tiered_index.types import Lookup

SETTINGS = ColdSettings(query_threads=2, coalesce_gap_bytes=0, block_cache_bytes=0)


@dataclass
class LookedUp:
    """Answers by question, each (status, entries as dicts, failed), and the reports of the tasks."""

    plan: LookupPlan
    reports: list[TaskReport] = field(default_factory=list)
    answers: dict[bytes | int, tuple[str, list[dict[str, Any]], Any]] = field(default_factory=dict)

    def of(self, lookup: Lookup) -> tuple[str, list[dict[str, Any]], Any]:
        """Return the answer to one lookup."""
        question = lookups_of(*_columns([lookup]), self.plan.places, keyed=self.plan.schema.keyed)
        if self.plan.asked is None:
            return self.answers[question.tobytes()]
        # a question without a block in any partition has no entry
        return self.answers.get(int(places_of(self.plan.asked, question)[0]), ("complete", [], None))

    def add(self, row: dict[str, Any]) -> None:
        """Add a row of an answer; its rows are in order, or it has one without an entry."""
        question, status, failed, position = (row.pop(name) for name in ("_lookup", "status", "failed", "position"))
        is_first = question not in self.answers
        known = self.answers.setdefault(question, (status, [], failed))
        assert (status, failed) == (known[0], known[2])
        if position is None:
            assert is_first and set(row.values()) == {None}
        else:
            assert position == len(known[1]) and is_first == (position == 0)
            known[1].append(row)

    @property
    def requests(self) -> int:
        return sum(sum(report.requests.values()) for report in self.reports)


def plan_of(state: LogState, lookups: Sequence[Lookup], **options: Any) -> LookupPlan:
    """Return a plan for lookups, of two cores unless `options` name another number."""
    lows = [q.begin_ms or 0 for q in lookups]
    highs = [2**60 if q.end_ms is None else q.end_ms for q in lookups]
    chosen: dict[str, Any] = {
        "parallelism": 2,
        "max_count": 64,
        "allow_partial": False,
        "settings": SETTINGS,
        "prices": PriceTable(),
        **options,
    }
    rows = chosen.pop("rows", len(lookups))
    seconds = min(lows, default=0) // 1000, max(highs, default=0) // 1000
    return plan_lookup(state, sorted({q.topic for q in lookups}), seconds, rows, **chosen)


def held(plan: LookupPlan, lookups: Sequence[Lookup]) -> LookupPlan:
    """Return the plan with all lookups."""
    topics, keys, begins, ends = _columns(lookups)
    packed = lookups_of(topics, keys, begins, ends, plan.places, keyed=plan.schema.keyed)
    return replace(plan, asked=KeysCensus(len(lookups), plan.topics, (0, 0), 0, None, packed).asked(plan.kept_from))


def looked_up(
    storage: Storage, plan: LookupPlan, lookups: Sequence[Lookup], *, batch_rows: int = 64, accepted: bool = False
) -> LookedUp:
    """Return the answers of a bulk lookup of `lookups`. There are none if an object was missing, unless the plan was
    `accepted`.

    If it was `accepted`, tasks run as those that replace blocks that Spark lost: no code reads their reports.
    """
    made = LookedUp(plan)
    topics, keys, begins, ends = _columns(lookups)
    rows = pa.record_batch({"topic": topics, "key": keys, "begin": begins, "end": ends})
    batches = [rows.slice(start, batch_rows) for start in range(0, len(lookups), batch_rows)]
    shuffled = plan if plan.asked is None else replace(plan, asked=None)
    lots = pack_keys(batches, keyed=plan.schema.keyed, column="'key'")
    packed = pa.Table.from_batches(list(pack_lookups(lots, shuffled)))
    found: list[pa.RecordBatch] = []
    for task in range(len(plan.tasks)):
        blocks = packed.filter(pc.equal(packed["task"], task)).to_batches()
        address: Any = Address(storage)
        number = pa.record_batch({"id": [task]})
        searched = search_task(blocks, plan, address) if plan.asked is None else search_asked([number], plan, address)
        for batch in searched:
            if batch.column("kind")[0].as_py() == REPORT:
                made.reports.append(pickle.loads(batch.column("more")[0].as_py()))
            else:
                found.append(batch)
    if not accepted and any(report.missing for report in made.reports):
        return made
    gathered = pa.Table.from_batches(found)
    for answerer in range(plan.answerers):
        mine = pa.array(gathered["partition"].to_numpy() % plan.answerers == answerer)
        blocks = gathered.filter(mine).sort_by([("partition", "ascending"), ("kind", "ascending")]).to_batches(7)
        for row in [row for batch in answer_partitions(blocks, plan) for row in batch.to_pylist()]:
            made.add(row)
    return made


def _columns(lookups: Sequence[Lookup]) -> tuple[Any, Any, Any, Any]:
    return (
        pa.array([q.topic for q in lookups], pa.string()),
        pa.array([q.key for q in lookups], pa.string()),
        pa.array([q.begin_ms for q in lookups], pa.int64()),
        pa.array([q.end_ms for q in lookups], pa.int64()),
    )
