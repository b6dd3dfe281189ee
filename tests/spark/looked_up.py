"""The task of a bulk lookup on Spark, in this process, on any storage, also on one with faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from tiered_index.config import IndexConfig
from tiered_index.format.schema import Schema
from tiered_index.service.reader import IndexReader
from tiered_index.spark.lookup.answers import TaskLookups
from tiered_index.spark.lookup.keys import LOOKUP
from tiered_index.storage.base import Storage
from tiered_index.types import Lookup


@dataclass
class Spent:
    """Stands for an accumulator of Spark."""

    value: Counter[Any] = field(default_factory=Counter)

    def add(self, more: Counter[Any]) -> None:
        """Add the counts of one batch."""
        self.value += more


@dataclass(frozen=True)
class HereAnswers(TaskLookups):
    """The answers of a task that reads `storage`."""

    storage: Storage | None = None

    def open_reader(self) -> IndexReader:
        """See `TaskLookups`."""
        return IndexReader(self.config, storage=self.storage)


def answers_in(storage: Storage, schema: Schema, *, max_count: int = 64, **options: Any) -> HereAnswers:
    """Return the answers of tasks; `options` are further fields of `HereAnswers`."""
    names = {name: f"'{name}'" for name in ("topic", "key", "begin_ms", "end_ms")}
    config = IndexConfig(block_cache_bytes=0, coalesce_gap_bytes=0)
    given: dict[str, Any] = {"allow_partial": False, "skip_null": False, "spent": Spent(), "config": config, **options}
    return HereAnswers(schema=schema, names=names, max_count=max_count, storage=storage, **given)


def rows_of(lookups: Sequence[Lookup]) -> pa.RecordBatch:
    """Return rows of lookups as Spark passes them to a task, with their numbers as `id`."""
    texts = [pa.array([getattr(one, name) for one in lookups], pa.string()) for name in ("topic", "key")]
    times = [pa.array([getattr(one, name) for one in lookups], pa.int64()) for name in ("begin_ms", "end_ms")]
    slots = pa.array(range(len(lookups)), pa.int32())
    lookup = pa.StructArray.from_arrays([*texts, *times, slots], ["topic", "key", "begin_ms", "end_ms", "slot"])
    return pa.record_batch({"id": slots, LOOKUP: lookup})


def looked_up(
    answers: TaskLookups, lookups: Sequence[Lookup], *, batch_rows: int = 64
) -> list[tuple[str, list[dict[str, Any]], Any]]:
    """Return the answer to each lookup: (status, entries as dicts, failed)."""
    rows = rows_of(lookups)
    found: list[tuple[str, list[dict[str, Any]], Any]] = []
    for batch in answers.of(rows.slice(start, batch_rows) for start in range(0, len(lookups), batch_rows)):
        for row in batch.to_pylist():
            number, status, failed, position = (row.pop(name) for name in ("id", "status", "failed", "position"))
            if number == len(found):
                found.append((status, [], failed))
            known = found[number]
            assert number == len(found) - 1 and (status, failed) == (known[0], known[2])
            if position is None:
                assert not known[1] and set(row.values()) == {None}
            else:
                assert position == len(known[1])
                known[1].append(row)
    assert len(found) == len(lookups)
    return found
