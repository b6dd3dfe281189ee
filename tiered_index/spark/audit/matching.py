"""Which entries index and source disagree about: one shuffle of packed digests, compared range by range.

A digest is 64 bits of an entry's identity and values and 32 of its topic's name, whatever object or file it stands in.
A range of digests whose sums are the same on both sides has the same entries; of others the digests that differ are
told. That two different entries of a range have one digest, so that a difference goes unseen, has a chance of 2^-64 a
pair. Memory of a task: `_HELD` digests before the shuffle, a range after it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.format.schema import Schema
from tiered_index.format.shard import mixed_columns
from tiered_index.service.log.records import StoredObject
from tiered_index.spark.audit import entries
from tiered_index.spark.audit.entries import INDEX, SOURCE, UNREAD, Part, Picked, Unread
from tiered_index.spark.build.sources import Entries
from tiered_index.spark.executors import StorageAddress, arrow_schema, between_tasks, broadcast, cells_of

# `topic` is 0 where an object has no table of topics.
DIGEST = np.dtype([("entry", "<u8"), ("topic", "<u4")])
_BLOCKS = "partition int, range int, side int, digests binary, object string"
_ARROW = arrow_schema(_BLOCKS)
_HELD = 1 << 22
# Digests of a range, about, on each side; the least number of ranges bounds it where the source has far more entries
# than the index.
_RANGE = 1 << 19
_LEAST_RANGES = 64
_OBJECT_BYTES = 1 << 28
# Digests that differ and are told, at most; where there are more, all entries are compared.
_MOST_TOLD = 1 << 22
Digests = npt.NDArray[np.void]
UInt64 = npt.NDArray[np.uint64]


def _digests(part: Part, schema: Schema) -> Digests:
    made = np.empty(len(part.columns["second"]), DIGEST)
    made["entry"] = entries.entry_digests(part.columns, schema)
    if part.topics is None:
        made["topic"] = 0
    else:
        told = [blake2b(name.encode(), digest_size=4).digest() for name in part.topics.dictionary.to_pylist()]
        numbers = np.frombuffer(b"".join(told), "<u4") | np.uint32(1)
        made["topic"] = numbers[part.topics.indices.to_numpy(zero_copy_only=False)]
    return made


@dataclass(frozen=True, slots=True)
class Matched:
    """How many different entries each side has, and the digests (u64, sorted) of those that differ, None for too many;
    `unread` are the objects of which something could not be read.
    """

    source: int
    index: int
    differing: UInt64 | None
    unread: frozenset[str]


def match(
    source: Entries, stored: Sequence[StoredObject], address: StorageAddress, schema: Schema, picked: Picked
) -> Matched:
    """Compare the picked entries of a source and of stored objects. Driver. Raises as `entries` does."""
    spark = source.frame.sparkSession
    cores = spark.sparkContext.defaultParallelism
    bits = (max(_LEAST_RANGES, sum(one.count for one in stored) // _RANGE) - 1).bit_length()
    partitions = min(1 << bits, max(2 * cores, (1 << bits) // 4))
    largest = sorted(stored, key=lambda one: -one.size_bytes)
    most = _MOST_TOLD // partitions
    tasks = min(len(stored), max(4 * cores, sum(one.size_bytes for one in stored) // _OBJECT_BYTES))
    with broadcast(spark, (largest, picked)) as shared:

        def of_source(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return _blocks(entries.source_entries(batches, schema, shared.value[1]), schema, bits, partitions)

        def of_index(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            objects, wanted = shared.value
            with closing(address.open()) as storage:
                numbers = [number for batch in batches for number in batch.column(0).to_pylist()]
                mine = [one for number in numbers for one in objects[number::tasks]]
                parts = (part for one in mine for part in entries.stored_entries(one, storage, schema, wanted))
                yield from _blocks(parts, schema, bits, partitions)

        def compared(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with between_tasks():
                result = _compared(batches, most)
            yield pa.record_batch({"result": pa.array([pickle.dumps(result)], pa.binary())})

        both = source.mapped(of_source, entries.compared_fields(source), _BLOCKS)
        if stored:
            both = both.unionAll(spark.range(0, tasks, 1, tasks).mapInArrow(of_index, _BLOCKS))
        blocks = both.repartitionById(partitions, "partition").sortWithinPartitions("range")
        rows = blocks.mapInArrow(compared, "result binary").collect()
    found: list[Matched] = [pickle.loads(row[0]) for row in rows]
    told = [one.differing for one in found if one.differing is not None]
    differing = np.sort(np.concatenate([np.empty(0, np.uint64), *told])) if len(told) == len(found) else None
    unread = frozenset[str]().union(*(one.unread for one in found))
    return Matched(sum(one.source for one in found), sum(one.index for one in found), differing, unread)


def _blocks(parts: Iterable[Part | Unread], schema: Schema, bits: int, partitions: int) -> Iterator[pa.RecordBatch]:
    """Yield a block for each range of digests, of up to `_HELD` of one side together, and a row for what is unread."""
    held: list[Digests] = []
    count, side = 0, SOURCE
    for part in parts:
        if isinstance(part, Unread):
            row = {"partition": 0, "range": 0, "side": UNREAD, "digests": b"", "object": part.name}
            yield pa.RecordBatch.from_pylist([row], _ARROW)
            continue
        held.append(_digests(part, schema))
        side, count = part.side, count + len(held[-1])
        if count >= _HELD:
            yield _cut(np.concatenate(held), side, bits, partitions)
            held, count = [], 0
    if held:
        yield _cut(np.concatenate(held), side, bits, partitions)


def _cut(digests: Digests, side: int, bits: int, partitions: int) -> pa.RecordBatch:
    ranges = (digests["entry"] >> np.uint64(64 - bits)).astype(np.uint16 if bits <= 16 else np.uint32)
    order = np.argsort(ranges, kind="stable")
    ranges = ranges[order].astype(np.int64)
    firsts = np.flatnonzero(np.diff(ranges, prepend=-1))
    numbers = ranges[firsts]
    where = [pa.array(each.astype(np.int32)) for each in (numbers * partitions // 2**bits, numbers)]
    sides, none = pa.array(np.full(len(firsts), side, np.int32)), pa.nulls(len(firsts), pa.string())
    return pa.RecordBatch.from_arrays([*where, sides, cells_of(digests.take(order), firsts), none], schema=_ARROW)


def _compared(batches: Iterable[pa.RecordBatch], most: int) -> Matched:
    """Return what differs in the ranges of a partition, whose blocks come range by range."""
    counts = [0, 0]
    told: list[UInt64] | None = []
    unread: set[str] = set()
    held: tuple[list[bytes], list[bytes]] = ([], [])
    number = -1

    def end() -> None:
        nonlocal told
        source, index = (np.frombuffer(b"".join(cells), DIGEST) for cells in held)
        of_source, of_index, differing = compare_range(source, index)
        counts[SOURCE] += of_source
        counts[INDEX] += of_index
        if told is not None:
            told = [*told, differing] if sum(map(len, told)) + len(differing) <= most else None
        for cells in held:
            cells.clear()

    for batch in batches:
        for row in range(len(batch)):
            _, where, side, digests, name = (column[row].as_py() for column in batch.columns)
            if side == UNREAD:
                unread.add(name)
                continue
            if where != number:
                end()
                number = where
            held[side].append(digests)
    end()
    differing = None if told is None else np.concatenate([np.empty(0, np.uint64), *told])
    return Matched(counts[SOURCE], counts[INDEX], differing, frozenset(unread))


def compare_range(source: Digests, index: Digests) -> tuple[int, int, UInt64]:
    """Return how many different entries each side (n) has, and the digests of those that may differ.

    An entry that one side has more often is no difference; nor is a topic that an object's lack of a table hides.
    """
    if len(source) == len(index) and _sum(source) == _sum(index):
        count = len(np.unique(source["entry"]))
        return count, count, np.empty(0, np.uint64)
    mine, other = np.unique(source["entry"]), np.unique(index["entry"])
    both = np.concatenate([source, index])
    both = both.compress(both["topic"] > 0)
    both = both.take(np.lexsort((both["topic"], both["entry"])))
    same = both["entry"][1:] == both["entry"][:-1]
    misplaced = both["entry"][1:][same & (both["topic"][1:] != both["topic"][:-1])]
    return len(mine), len(other), np.union1d(np.setxor1d(mine, other, assume_unique=True), misplaced)


def _sum(digests: Digests) -> int:
    return int(mixed_columns([digests["topic"]], digests["entry"]).sum(dtype=np.uint64))
