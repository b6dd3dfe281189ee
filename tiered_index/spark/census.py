"""The first look at a source: how many entries each window has, and which topics there are. What shards there will be follows from it.

Only the columns that say so are read. `count_batches` runs in tasks and yields one small row each; `Census.of` adds them up on the driver.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.errors import InvalidArgument
from tiered_index.service.answers.validation import milliseconds
from tiered_index.spark.log_sources import SKIPPED
from tiered_index.spark.windows import WindowScale
from tiered_index.types import MAX_TIMESTAMP_MS

__all__ = ["CENSUS_COLUMNS", "CENSUS_SCHEMA", "Census", "count_batches"]

CENSUS_COLUMNS = ("topic", "timestamp_ms", "has_key", "topic_id", SKIPPED)
CENSUS_SCHEMA = "census binary"
_NAMED = 100
# stretches that are named; all are counted


@dataclass
class Census:
    """Entries by (is quarantine window, begin of the window), messages without key, topics as (id or None, name), what was passed over.

    `skipped` are (file, first offset, end, problem) of the first stretches, `skipped_ranges` and `skipped_bytes` of all.
    """

    windows: dict[tuple[bool, int], int] = field(default_factory=dict)
    without_key: int = 0
    topics: set[tuple[int | None, str]] = field(default_factory=set)
    skipped_ranges: int = 0
    skipped_bytes: int = 0
    skipped: tuple[tuple[str, int, int, str], ...] = ()

    @property
    def entries(self) -> int:
        """All of them."""
        return sum(self.windows.values())

    @property
    def quarantined(self) -> int:
        """Those whose timestamps can't be right."""
        return sum(count for (wrong, _), count in self.windows.items() if wrong)

    def add(self, other: Census) -> None:
        """Add another part of the source."""
        for window, count in other.windows.items():
            self.windows[window] = self.windows.get(window, 0) + count
        self.without_key += other.without_key
        self.topics |= other.topics
        self.skipped_ranges += other.skipped_ranges
        self.skipped_bytes += other.skipped_bytes
        self.skipped = (*self.skipped, *other.skipped)[:_NAMED]

    @classmethod
    def of(cls, rows: Iterable[Any]) -> Census:
        """Return the sum of what tasks yielded."""
        total = cls()
        for row in rows:
            total.add(pickle.loads(row[0]))
        return total


def count_batches(batches: Iterable[pa.RecordBatch], scale: WindowScale, max_windows: int) -> Iterator[pa.RecordBatch]:
    """Yield the census of `batches` (columns as `CENSUS_COLUMNS`, the last two optional) as one row. Raises `InvalidArgument`."""
    census = Census()
    for batch in batches:
        census.add(_of_batch(batch, scale))
        if len(census.windows) > max_windows:
            raise InvalidArgument(_too_many(f"more than {max_windows:,}", scale))
    yield pa.record_batch({"census": pa.array([pickle.dumps(census)], pa.binary())})


def _of_batch(batch: pa.RecordBatch, scale: WindowScale) -> Census:
    census = Census()
    if SKIPPED in batch.schema.names:
        told = [json.loads(text) for text in batch.column(SKIPPED).drop_null().to_pylist()]
        passed = tuple((str(file), int(begin), int(end), str(problem)) for file, begin, end, problem in told)
        census.add(Census(skipped_ranges=len(passed), skipped_bytes=sum(end - begin for _, begin, end, _ in passed), skipped=passed))
        batch = batch.filter(pc.is_null(batch.column(SKIPPED))).drop_columns([SKIPPED])
    keyed = batch.column("has_key")
    census.without_key = len(batch) - (pc.sum(keyed).as_py() or 0)
    if census.without_key:
        batch = batch.filter(keyed)
    if not len(batch):
        return census
    for name in batch.schema.names:
        if name != "topic_id" and (nulls := batch.column(name).null_count):
            counted = f"{nulls:,} null{'s' * (nulls > 1)}"
            raise InvalidArgument(f"column {name!r} has {counted} in rows that have a key; a value is needed in every one")
    times = batch.column("timestamp_ms")
    if pa.types.is_timestamp(times.type):
        times = milliseconds(times)
    stamps = times.to_numpy(zero_copy_only=False).astype(np.int64)
    low, high = int(stamps.min()), int(stamps.max())
    if low < 0 or high > MAX_TIMESTAMP_MS:
        raise InvalidArgument(f"timestamp_ms {low if low < 0 else high} is outside 0..{MAX_TIMESTAMP_MS}")
    begins, wrong = scale.begins(stamps // 1000)
    codes, counts = np.unique(begins * 2 + wrong, return_counts=True)
    census.windows = {(bool(code & 1), code >> 1): count for code, count in zip(codes.tolist(), counts.tolist(), strict=True)}
    names = ["topic", *(["topic_id"] if "topic_id" in batch.schema.names else [])]
    distinct = pa.Table.from_batches([batch.select(names)]).group_by(names).aggregate([])
    ids = distinct["topic_id"].to_pylist() if len(names) > 1 else [None] * len(distinct)
    census.topics = set(zip(ids, distinct["topic"].to_pylist(), strict=True))
    return census


def _too_many(count: str, scale: WindowScale) -> str:
    return f"the source's entries lie in {count} windows of {scale.window_s:,} s: choose longer windows, or raise max_windows"
