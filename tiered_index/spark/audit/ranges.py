"""Both sides of an audit brought together range by range: one shuffle of packed blocks.

Callers define the ranges, and the part of an entry that a block holds. A task first gets the names of all objects that
could not be read, then the blocks of its ranges. Memory of a task: `HELD` entries before the shuffle, those of a range
after it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.format.schema import Schema
from tiered_index.retention import NOTHING, Expired
from tiered_index.service.log.records import StoredObject
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.audit import entries
from tiered_index.spark.audit.entries import Part, Picked, Unread
from tiered_index.spark.build.sources import Entries
from tiered_index.spark.frames import arrow_schema, broadcast, large_batches
from tiered_index.spark.workers import between_tasks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_BLOCKS = "partition int, range int, side int, block binary, object string"
_ARROW = arrow_schema(_BLOCKS)
_RESULT = "result binary"
# Comes before all ranges.
_FIRST = -1
_UNREAD = -1
# Bytes of objects that a task reads, about
_LEAST_BYTES, _MOST_BYTES = 16 << 20, 1 << 28
# Entries of one side that are cut at once.
HELD = 1 << 20
UInt64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Ranges:
    """2**`bits` ranges of mixed 64 bits, by the first ones, dealt out to `partitions`, neighbours to one."""

    bits: int
    partitions: int

    @classmethod
    def of(cls, count: int, a_range: int, least: int, cores: int) -> Ranges:
        """Return at least `least` ranges, of about `a_range` of `count` entries."""
        bits = (max(least, count // a_range) - 1).bit_length()
        return cls(bits, min(1 << bits, max(2 * cores, (1 << bits) // 16)))

    def cut(self, mixed: UInt64) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], npt.NDArray[np.int64]]:
        """Return the order (n) by range of entries (n), where each range begins in it (k), and the ranges (k)."""
        # of 16 bits NumPy sorts by radix
        short = (mixed >> np.uint64(64 - self.bits)).astype(np.uint16 if self.bits <= 16 else np.uint32)
        order = np.argsort(short, kind="stable")
        numbers: npt.NDArray[np.int64] = short[order].astype(np.int64)
        firsts = np.flatnonzero(np.diff(numbers, prepend=-1))
        return order, firsts, numbers[firsts]


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of one range, by side."""

    number: int
    sides: tuple[list[bytes], list[bytes]]


# Makes of what was packed the numbers of ranges (i64, k) and a block of each.
Cut = Callable[[Sequence[Any], Ranges], tuple[npt.NDArray[np.int64], Sequence[bytes] | pa.Array]]
# Gets the ranges of a partition, and the objects that could not be read whole.
Meet = Callable[[Iterator[Blocks], frozenset[str]], Any]


@dataclass(frozen=True, slots=True)
class Sides:
    """A source's entries and an index's storage; `base` is how many slots the index's files have. What has `expired` is
    on neither side.
    """

    entries: Entries
    address: StorageAddress
    schema: Schema
    base: int
    expired: Expired = NOTHING

    @property
    def cores(self) -> int:
        """How many tasks run at once."""
        return self.entries.frame.sparkSession.sparkContext.defaultParallelism

    def met(
        self,
        stored: Sequence[StoredObject],
        picked: Picked,
        ranges: Ranges,
        pack: Callable[[Part], Any],
        cut: Cut,
        meet: Meet,
        fold: Callable[[Iterable[Any]], Any],
    ) -> Any:
        """Return what `meet` makes of each partition's ranges of the picked entries, folded. Driver.

        A task packs each part and cuts what it has packed. Raises as `entries` does.
        """
        spark, schema = self.entries.frame.sparkSession, self.schema
        largest, tasks = self._dealt(stored)
        with broadcast(spark, (largest, picked)) as shared, large_batches(spark):
            stored_parts = partial(_stored_parts, shared=shared, tasks=tasks, address=self.address, schema=schema)

            def of_source(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
                return _blocks(entries.source_entries(batches, schema, shared.value[1]), ranges, pack, cut)

            def of_index(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
                return _blocks(stored_parts(batches), ranges, pack, cut)

            def made(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
                with between_tasks():
                    result = _met(batches, meet)
                yield _row(result)

            both = self.entries.mapped(of_source, entries.compared_fields(self.entries), _BLOCKS)
            if stored:
                both = both.unionAll(spark.range(0, tasks, 1, tasks).mapInArrow(of_index, _BLOCKS))
            blocks = both.repartitionById(ranges.partitions, "partition").sortWithinPartitions("range")
            return _folded(blocks.mapInArrow(made, _RESULT), fold)

    def _dealt(self, stored: Sequence[StoredObject]) -> tuple[list[StoredObject], int]:
        """Return objects, the largest first, and how many tasks read them: every so many an object of each."""
        size = sum(one.size_bytes for one in stored)
        # four a core, fewer where one has little to read
        tasks = max(self.cores, min(4 * self.cores, size // _LEAST_BYTES), size // _MOST_BYTES)
        return sorted(stored, key=lambda one: -one.size_bytes), min(len(stored), tasks)


def _stored_parts(
    batches: Iterable[pa.RecordBatch], shared: Any, tasks: int, address: StorageAddress, schema: Schema
) -> Iterator[Part | Unread]:
    """Yield the picked entries of the objects of the tasks that `batches` number."""
    objects, picked = shared.value
    with closing(address.open()) as storage:
        for number in (number for batch in batches for number in batch.column(0).to_pylist()):
            for one in objects[number::tasks]:
                yield from entries.stored_entries(one, storage, schema, picked)


def _row(result: Any) -> pa.RecordBatch:
    return pa.record_batch({"result": pa.array([pickle.dumps(result)], pa.binary())})


def _folded(made: DataFrame, fold: Callable[[Iterable[Any]], Any]) -> Any:
    """Return what tasks made, folded by a task: results of many are more than a driver should hold."""

    def folded(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield _row(fold(pickle.loads(cell.as_buffer()) for batch in batches for cell in batch.column(0)))

    [row] = made.repartition(1).mapInArrow(folded, _RESULT).collect()
    return pickle.loads(row[0])


def _blocks(
    parts: Iterable[Part | Unread], ranges: Ranges, pack: Callable[[Part], Any], cut: Cut
) -> Iterator[pa.RecordBatch]:
    """Yield a block for each range, of up to `HELD` entries of one side together, and rows for what is unread."""
    held: list[Any] = []
    count, side = 0, 0
    for part in parts:
        if isinstance(part, Unread):
            everyone = pa.array(range(ranges.partitions), pa.int32())
            names = pa.array([part.name] * ranges.partitions, pa.string())
            yield _rows(everyone, np.full(ranges.partitions, _FIRST), _UNREAD, names)
            continue
        held.append(pack(part))
        side, count = part.side, count + len(part.columns["second"])
        if count >= HELD:
            yield _cut(held, side, ranges, cut)
            held, count = [], 0
    if held:
        yield _cut(held, side, ranges, cut)


def _cut(held: Sequence[Any], side: int, ranges: Ranges, cut: Cut) -> pa.RecordBatch:
    numbers, blocks = cut(held, ranges)
    where = pa.array((numbers * ranges.partitions >> ranges.bits).astype(np.int32))
    return _rows(where, numbers, side, None, blocks)


def _rows(
    where: pa.Array, numbers: npt.NDArray[Any], side: int, names: pa.Array | None, blocks: Any = None
) -> pa.RecordBatch:
    count = len(numbers)
    cells = pa.array([b""] * count if blocks is None else blocks, pa.binary())
    texts = pa.nulls(count, pa.string()) if names is None else names
    columns = [where, pa.array(numbers.astype(np.int32)), pa.array(np.full(count, side, np.int32)), cells, texts]
    return pa.RecordBatch.from_arrays(columns, schema=_ARROW)


def _met(batches: Iterable[pa.RecordBatch], meet: Meet) -> Any:
    """Return what `meet` makes of a partition, whose rows come range by range, what is unread first."""
    unread: set[str] = set()
    rows = _each(batches, unread)
    # the first block comes when all that is unread is known
    first = next(rows, None)
    return meet(_ranges(first, rows), frozenset(unread))


def _each(batches: Iterable[pa.RecordBatch], unread: set[str]) -> Iterator[tuple[int, int, bytes]]:
    for batch in batches:
        numbers, sides = (batch.column(name).to_pylist() for name in ("range", "side"))
        blocks, names = batch.column("block"), batch.column("object")
        for row, (number, side) in enumerate(zip(numbers, sides, strict=True)):
            if side == _UNREAD:
                unread.add(names[row].as_py())
            else:
                yield number, side, blocks[row].as_py()


def _ranges(first: tuple[int, int, bytes] | None, rows: Iterator[tuple[int, int, bytes]]) -> Iterator[Blocks]:
    held: Blocks | None = None
    for number, side, block in () if first is None else _again(first, rows):
        if held is None or number != held.number:
            if held is not None:
                yield held
            held = Blocks(number, ([], []))
        held.sides[side].append(block)
    if held is not None:
        yield held


def _again(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest
