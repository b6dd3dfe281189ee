"""The census of a source: the first reading counts entries by window, before the second one writes them. Tasks.

A second outside the plausible range is in a *quarantine window* of 2**31 seconds, which no merge reads.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.config import IndexConfig
from tiered_index.connectors.files.rows.columns import is_text
from tiered_index.errors import InvalidArgument
from tiered_index.service.jobs.rewriting.merge_plan import window_seconds
from tiered_index.service.log.records import QUARANTINE_S
from tiered_index.service.write.validation import milliseconds


@dataclass(frozen=True, slots=True)
class WindowScale:
    """Windows of `window_s` for seconds within [`plausible_min`, `plausible_max`], quarantine windows for others."""

    window_s: int
    plausible_min: int
    plausible_max: int

    @classmethod
    def of(cls, window: str | int, config: IndexConfig, now_ms: int) -> WindowScale:
        """Return the scale of windows like ``1h``, plausible by the settings `max_late_s` and `max_early_s`.

        Raises `InvalidArgument`.
        """
        low, high = now_ms // 1000 - round(config.max_late_s), now_ms // 1000 + round(config.max_early_s)
        return cls(window_seconds(window), low, high)

    def begins(self, seconds: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the start of each second's window (i64, n), and whether it is a quarantine window (bool, n)."""
        wrong = (seconds < self.plausible_min) | (seconds > self.plausible_max)
        # NumPy divides by a single number several times as fast
        length = np.where(wrong, QUARANTINE_S, self.window_s) if wrong.any() else self.window_s
        return seconds // length * length, wrong


T = TypeVar("T")
# Column (bool): the entry has a key; for readers that do not need the key itself.
HAS_KEY = "has_key"
CENSUS_COLUMNS = ("topic", "timestamp_ms", "topic_id")
# Most skipped ranges that are named; all are counted.
_NAMED = 100


@dataclass
class Census:
    """Entries by window (is quarantine window, start), keyless messages, topics (id or None, name), skipped ranges.

    `parts` are what readers learned of parts of the source.
    """

    windows: dict[tuple[bool, int], int] = field(default_factory=dict)
    without_key: int = 0
    topics: set[tuple[int | None, str]] = field(default_factory=set)
    skipped_ranges: int = 0
    skipped_bytes: int = 0
    # (file, first offset, end, problem) of the first `_NAMED`
    skipped: tuple[tuple[str, int, int, str], ...] = ()
    parts: list[Any] = field(default_factory=list)

    @property
    def entries(self) -> int:
        """Number of all entries."""
        return sum(self.windows.values())

    @property
    def quarantined(self) -> int:
        """Number of entries with implausible timestamps."""
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
        self.parts += other.parts


def census_of(batches: Iterable[pa.RecordBatch | Census], scale: WindowScale, max_windows: int) -> Census:
    """Return the census of `batches` (`CENSUS_COLUMNS`, the last one optional, and `HAS_KEY`) and of censuses of parts.

    Raises `InvalidArgument`.
    """
    census = Census()
    for batch in batches:
        census.add(batch if isinstance(batch, Census) else naming_rows(batch, partial(_of_batch, scale=scale)))
        if len(census.windows) > max_windows:
            raise InvalidArgument(too_many_windows(f"more than {max_windows:,}", scale))
    return census


def naming_rows(batch: pa.RecordBatch, make: Callable[[pa.RecordBatch], T]) -> T:
    """Return `make(batch)`; name the first row that is invalid (`InvalidArgument`) or has bytes that are not UTF-8."""
    try:
        return make(batch)
    except (InvalidArgument, UnicodeDecodeError) as error:
        wrong = _first_wrong(batch, make)
        if wrong is None:
            raise
        said = re.sub(r"(,| in) row \d+", "", str(error))  # counted within the batch
        raise InvalidArgument(f"{_place_of(batch, wrong)}: {said}") from error


def _first_wrong(batch: pa.RecordBatch, make: Callable[[pa.RecordBatch], object]) -> int | None:
    """Return the first row with which `make` raises, None if it raises for no rows."""

    def is_wrong(count: int) -> bool:
        try:
            make(batch.slice(0, count))
        except (InvalidArgument, UnicodeDecodeError):
            return True
        return False

    wrong = bisect_left(range(len(batch) + 1), True, key=is_wrong)
    return wrong - 1 if wrong else None


def _place_of(batch: pa.RecordBatch, row: int) -> str:
    """Return a row and its partition for a message."""
    from pyspark import TaskContext

    context = TaskContext.get()
    single_row = batch.slice(row, 1)
    try:
        values = single_row.to_pylist()[0]
    except UnicodeDecodeError:
        raw = [c.cast(pa.large_binary()) if is_text(c.type) else c for c in single_row.columns]
        values = {name: c[0].as_py() for name, c in zip(single_row.schema.names, raw, strict=True)}
    values.pop(HAS_KEY, None)
    has = f"a row {values!r:.200}"
    return has if context is None else f"{has} of partition {context.partitionId()}"


def _of_batch(batch: pa.RecordBatch, scale: WindowScale) -> Census:
    census = Census()
    keyed = batch.column(HAS_KEY)
    census.without_key = len(batch) - (pc.sum(keyed).as_py() or 0)
    if census.without_key:
        batch = batch.filter(keyed)
    if not len(batch):
        return census
    for name in batch.schema.names:
        if name != "topic_id" and (nulls := batch.column(name).null_count):
            has = f"{nulls:,} null{'s' * (nulls > 1)} in rows that have a key"
            raise InvalidArgument(f"column {name!r} has {has}; a value is needed in every one")
    times = batch.column("timestamp_ms")
    if pa.types.is_timestamp(times.type):
        times = milliseconds(times)
    stamps = times.to_numpy(zero_copy_only=False).astype(np.int64)
    low, high = int(stamps.min()), int(stamps.max())
    if low < 0 or high > MAX_TIMESTAMP_MS:
        raise InvalidArgument(f"timestamp_ms {low if low < 0 else high} is outside 0..{MAX_TIMESTAMP_MS}")
    begins, wrong = scale.begins(stamps // 1000)
    codes, counts = np.unique(begins * 2 + wrong, return_counts=True)
    census.windows = {
        (bool(code & 1), code >> 1): count for code, count in zip(codes.tolist(), counts.tolist(), strict=True)
    }
    names = ["topic", *(["topic_id"] if "topic_id" in batch.schema.names else [])]
    if len(names) == 1:
        census.topics = {(None, name) for name in batch.column("topic").unique().to_pylist()}
        return census
    texts = batch.column("topic").cast(pa.string())
    distinct = pa.table({"topic": texts, "topic_id": batch.column("topic_id")}).group_by(names).aggregate([])
    census.topics = set(zip(distinct["topic_id"].to_pylist(), distinct["topic"].to_pylist(), strict=True))
    return census


def too_many_windows(count: str, scale: WindowScale, bound: str = "") -> str:
    """Return the text of an error of too many windows, of which there are `count`."""
    has = f"the source has entries in {count} windows of {scale.window_s:,} s{bound}"
    return f"{has}: choose longer windows, or raise max_windows"
