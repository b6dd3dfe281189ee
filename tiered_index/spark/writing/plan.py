"""The plan of a build: the census of the source, and the tables, shards and pieces. Pure.

A window is a table. Its base slots are cut into shards, and shards into pieces, which are numbered through all tables.
One sort has one piece; a shard has consecutive pieces, a Spark partition consecutive shards. Windows are aligned to the
epoch, UTC. A second outside the plausible range is in a *quarantine window* of 2**31 seconds, which no merge reads.
"""

from __future__ import annotations

import json
import pickle
import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.config import IndexConfig
from tiered_index.errors import InvalidArgument
from tiered_index.format.slots import SlotMap, divided
from tiered_index.service.jobs.merge_plan import window_seconds
from tiered_index.service.jobs.rewrite import Window
from tiered_index.service.log.records import QUARANTINE_S, IndexDescriptor, Origin
from tiered_index.service.write.validation import TopicTable, milliseconds
from tiered_index.sources.columns import is_text
from tiered_index.spark.frames import large_batches
from tiered_index.spark.writing.files import HAS_KEY
from tiered_index.spark.writing.log_sources import SKIPPED
from tiered_index.spark.writing.sources import Entries
from tiered_index.types import MAX_TIMESTAMP_MS


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
        """Return the begin of each second's window (i64, n), and whether it is a quarantine window (bool, n)."""
        wrong = (seconds < self.plausible_min) | (seconds > self.plausible_max)
        # NumPy divides by a single number several times as fast
        length = np.where(wrong, QUARANTINE_S, self.window_s) if wrong.any() else self.window_s
        return seconds // length * length, wrong


T = TypeVar("T")
CENSUS_COLUMNS = ("topic", "timestamp_ms", "has_key", "topic_id", SKIPPED)
# Most skipped ranges that are named; all are counted.
_NAMED = 100


@dataclass
class Census:
    """Entries by window (is quarantine window, begin), keyless messages, topics (id or None, name), skipped ranges."""

    windows: dict[tuple[bool, int], int] = field(default_factory=dict)
    without_key: int = 0
    topics: set[tuple[int | None, str]] = field(default_factory=set)
    skipped_ranges: int = 0
    skipped_bytes: int = 0
    # (file, first offset, end, problem) of the first `_NAMED`
    skipped: tuple[tuple[str, int, int, str], ...] = ()

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

    @classmethod
    def of(cls, rows: Iterable[Any]) -> Census:
        """Return the sum of the tasks' rows."""
        total = cls()
        for row in rows:
            total.add(pickle.loads(row[0]))
        return total


def take_census(entries: Entries, scale: WindowScale, max_windows: int) -> Census:
    """Count a source's entries in tasks. Raises `InvalidArgument`."""
    names = [name for name in CENSUS_COLUMNS if name in entries.names]
    count = partial(count_batches, scale=scale, max_windows=max_windows)
    with large_batches(entries.frame.sparkSession):
        return Census.of(entries.mapped(count, [*names, HAS_KEY], "census binary").collect())


def count_batches(batches: Iterable[pa.RecordBatch], scale: WindowScale, max_windows: int) -> Iterator[pa.RecordBatch]:
    """Yield one row, the census of `batches` (`CENSUS_COLUMNS`, the last two optional). Raises `InvalidArgument`."""
    census = Census()
    for batch in batches:
        census.add(naming_rows(batch, partial(_of_batch, scale=scale)))
        if len(census.windows) > max_windows:
            raise InvalidArgument(_too_many(f"more than {max_windows:,}", scale))
    yield pa.record_batch({"census": pa.array([pickle.dumps(census)], pa.binary())})


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
    if SKIPPED in batch.schema.names:
        told = [json.loads(text) for text in batch.column(SKIPPED).drop_null().to_pylist()]
        passed = tuple((str(file), int(begin), int(end), str(problem)) for file, begin, end, problem in told)
        size = sum(end - begin for _, begin, end, _ in passed)
        census.add(Census(skipped_ranges=len(passed), skipped_bytes=size, skipped=passed))
        batch = batch.filter(pc.is_null(batch.column(SKIPPED))).drop_columns([SKIPPED])
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


def _too_many(count: str, scale: WindowScale, bound: str = "") -> str:
    has = f"the source has entries in {count} windows of {scale.window_s:,} s{bound}"
    return f"{has}: choose longer windows, or raise max_windows"


# Expected entries of a piece. A piece of more than twice as many (it has a hot key) is written in parts by time.
PIECE_ITEMS = 1 << 19
_SHARD_BYTES = 256 << 20
# Least size of a shard if shards are made smaller for parallel work.
_LEAST_BYTES = 32 << 20
# Added to the begins of quarantine windows, so that their codes follow all others.
_BEHIND = 1 << 40
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TablePlan:
    """One table: `pieces` from number `first_piece` on, of `width` base slots each, `pieces_a_shard` to a shard."""

    window: Window
    quarantined: bool
    first_piece: int
    pieces: int
    width: int
    pieces_a_shard: int

    @property
    def shards(self) -> int:
        """Number of shards, without the further parts of pieces with a hot key."""
        return -(-self.pieces // self.pieces_a_shard)

    def base_slots(self, first: int, pieces: int) -> tuple[int, int]:
        """Return the half-open range of base slots of `pieces` pieces, the first with number `first` in this table."""
        base = self.window.slots.base
        return min(base, first * self.width), min(base, (first + pieces) * self.width)


@dataclass(frozen=True)
class BuildPlan:
    """All tables, quarantine windows last, each kind by time; `topics` are (id, name), `sequence` is that of shards."""

    genesis: IndexDescriptor
    scale: WindowScale
    tables: tuple[TablePlan, ...]
    topics: tuple[tuple[int, str], ...]
    sequence: int
    partition_of_piece: npt.NDArray[np.int32]
    piece_items: int

    @property
    def partitions(self) -> int:
        """Number of Spark partitions that write."""
        return int(self.partition_of_piece[-1]) + 1

    @property
    def shards(self) -> int:
        """Number of shards, without the further parts of pieces with a hot key."""
        return sum(table.shards for table in self.tables)

    @property
    def entries(self) -> int:
        """Number of entries of all tables."""
        return sum(table.window.entries for table in self.tables)

    @cached_property
    def _firsts(self) -> Int64:
        return np.array([table.first_piece for table in self.tables], np.int64)

    @cached_property
    def _codes(self) -> Int64:
        """An ascending number for each table: its begin, quarantine windows after all others."""
        return np.array([table.window.begin_s + table.quarantined * _BEHIND for table in self.tables], np.int64)

    def table_of(self, piece: int) -> int:
        """Return the index of a piece's table."""
        return int(np.searchsorted(self._firsts, piece, "right")) - 1

    def pieces_of(self, seconds: Int64, hashes: npt.NDArray[np.int32]) -> tuple[Int64, Int64]:
        """Return pieces and begins of windows (i64, n each). Raises `InvalidArgument` for an unplanned window."""
        begins, wrong = self.scale.begins(seconds)
        codes = begins + wrong * _BEHIND
        index = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
        if not (self._codes[index] == codes).all():
            raise InvalidArgument("the source changed while it was read: it has windows that were not counted")
        widths = np.array([table.width for table in self.tables], np.int64)
        width = widths[0] if (widths == widths[0]).all() else widths[index]
        _, slots = divided(hashes, self.genesis.layout.slots)
        return self._firsts[index] + slots // width, begins


def plan_build(
    census: Census,
    genesis: IndexDescriptor,
    scale: WindowScale,
    shards: int | str,
    parallelism: int,
    *,
    sequence: int,
    max_windows: int,
    origin: Origin = "build",
) -> BuildPlan:
    """Return the plan of a build, or of another `origin`.

    Raises `InvalidArgument` for too many windows.
    """
    if len(census.windows) > max_windows:
        raise InvalidArgument(_too_many(f"{len(census.windows):,}", scale, f", and {max_windows:,} are allowed"))
    base, item_size = genesis.layout.slots, genesis.layout.schema.item.itemsize
    aim = max(_LEAST_BYTES, min(_SHARD_BYTES, census.entries * item_size // max(1, 2 * parallelism)))
    tables: list[TablePlan] = []
    loads: list[int] = []
    first = 0
    for (wrong, begin), count in sorted(census.windows.items()):
        slots = SlotMap.for_count(base, count)
        window = Window(secrets.token_hex(8), begin, QUARANTINE_S if wrong else scale.window_s, slots, count, origin)
        wanted = -(-count * item_size // aim) if shards == "auto" else int(shards)
        a_shard = max(1, -(-count // (wanted * PIECE_ITEMS)))
        # a piece ends at a slot boundary of every slot map
        width = max(1, -(-base // (wanted * a_shard * slots.join))) * slots.join
        table = TablePlan(window, wrong, first, -(-base // width), width, a_shard)
        tables.append(table)
        loads += [count // table.shards] * table.shards
        first += table.pieces
    partitions = _partitions(tables, loads, aim // item_size)
    # the source's ids, then those assigned, in order of name
    topics = TopicTable()
    named_by_source = sorted((topic_id, name) for topic_id, name in census.topics if topic_id is not None)
    topics.give(named_by_source)
    others = sorted(name for topic_id, name in census.topics if topic_id is None)
    named = tuple(dict.fromkeys((*named_by_source, *((topics.assign(name), name) for name in others))))
    return BuildPlan(genesis, scale, tuple(tables), named, sequence, partitions, PIECE_ITEMS)


def _partitions(tables: Sequence[TablePlan], loads: Sequence[int], most: int) -> npt.NDArray[np.int32]:
    """Return the partition (i32) of each piece: neighbouring small shards share one, up to about `most` entries."""
    of_shard: list[int] = []
    number, held = 0, 0
    for load in loads:
        if held and held + load > most:
            number, held = number + 1, 0
        of_shard.append(number)
        held += max(1, load)
    # the last shard of a table may have fewer pieces
    pieces = [min(t.pieces_a_shard, t.pieces - first) for t in tables for first in range(0, t.pieces, t.pieces_a_shard)]
    return np.repeat(np.array(of_shard, np.int32), pieces)
