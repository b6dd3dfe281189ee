"""Finds the entries that differ between index and source: compares digests of both, range by range, by one shuffle.

A digest has 64 bits of an entry's identity and values and 32 bits of its topic's name. A range of digests with equal
sums on both sides has the same entries. Two different entries have one digest, which hides a difference, with a
probability of 2^-64 a pair. Memory of a task: `_HELD` digests before the shuffle, those of a range after it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.format.distinct import distinct_numbers
from tiered_index.format.schema import Schema
from tiered_index.format.shard import mixed_columns
from tiered_index.service.log.records import StoredObject
from tiered_index.spark.audit.digest_table import DigestShape, DigestTable
from tiered_index.spark.audit.entries import INDEX, SOURCE, Part, Picked, Sides, Unread, entry_digests
from tiered_index.spark.frames import arrow_schema, cells_of, one_row, shuffles_deleted
from tiered_index.spark.workers import between_tasks

# `topic` is 0 if an object has no table of topics
DIGEST = np.dtype([("entry", "<u8"), ("topic", "<u4")])
# About the digests of a range on each side. The least number of ranges bounds it if the source has far more entries
# than the index.
_RANGE = 1 << 19
_LEAST_RANGES = 64
# Digests of one side that are distributed to ranges at once
_HELD = 1 << 20
_BLOCKS = "partition int, range int, side int, digests binary, unread string"
_ARROW = arrow_schema(_BLOCKS)
_RESULT = "result binary"
Digests = npt.NDArray[np.void]
UInt64 = npt.NDArray[np.uint64]


def _digests(part: Part, schema: Schema) -> Digests:
    made = np.empty(len(part.columns["second"]), DIGEST)
    made["entry"] = entry_digests(part.columns, schema)
    if part.topics is None:
        made["topic"] = 0
    else:
        told = [blake2b(name.encode(), digest_size=4).digest() for name in part.topics.dictionary.to_pylist()]
        numbers = np.frombuffer(b"".join(told), "<u4") | np.uint32(1)
        made["topic"] = numbers[part.topics.indices.to_numpy(zero_copy_only=False)]
    return made


@dataclass(frozen=True, slots=True)
class Matched:
    """The numbers of distinct entries of each side, and of differing digests.

    `blocks` are the numbers and `DigestShape.block` of the ranges that differ. `unread` are the objects that could not
    be read whole. `repeated` entries are more often in the index than in the source.
    """

    source: int = 0
    index: int = 0
    differing: int = 0
    blocks: tuple[tuple[int, bytes], ...] = ()
    unread: frozenset[str] = frozenset()
    repeated: int = 0

    @classmethod
    def joined(cls, parts: Sequence[Matched]) -> Matched:
        """Return the sum of the results of partitions, which have different ranges."""
        return cls(
            sum(one.source for one in parts),
            sum(one.index for one in parts),
            sum(one.differing for one in parts),
            tuple(block for one in parts for block in one.blocks),
            frozenset().union(*(one.unread for one in parts)),
            sum(one.repeated for one in parts),
        )


def match(sides: Sides, stored: Sequence[StoredObject], picked: Picked) -> tuple[Matched, DigestTable]:
    """Compare the picked entries of both sides; return the result, and the digests that differ. Driver.

    Raises the errors of `entries`.
    """
    schema, count, spark = sides.schema, sum(one.count for one in stored), sides.entries.frame.sparkSession
    bits = (max(_LEAST_RANGES, count // _RANGE) - 1).bit_length()
    partitions = min(1 << bits, max(2 * sides.cores, (1 << bits) // 16))
    shape = DigestShape.of(bits, count)

    def cut(parts: Iterator[Part | Unread]) -> Iterator[pa.RecordBatch]:
        return _blocks(parts, schema, bits, partitions)

    def compare(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with between_tasks():
            result = _compared(batches, shape)
        yield pa.record_batch({"result": pa.array([pickle.dumps(result)], pa.binary())})

    with shuffles_deleted(spark), sides.rows(stored, picked, cut, _BLOCKS) as rows:
        blocks = rows.repartitionById(partitions, "partition").sortWithinPartitions("range")
        results = blocks.mapInArrow(compare, _RESULT).collect()
    matched = Matched.joined([pickle.loads(row[0]) for row in results])
    return matched, DigestTable(shape, matched.blocks)


def _blocks(parts: Iterable[Part | Unread], schema: Schema, bits: int, partitions: int) -> Iterator[pa.RecordBatch]:
    """Yield blocks of digests for 2**`bits` ranges, of about `_HELD` entries of one side together.

    Also a row for each unread object. Neighbouring ranges share a partition.
    """
    held: list[Digests] = []
    side = INDEX
    for part in parts:
        if isinstance(part, Unread):
            yield one_row(_ARROW, 0, -1, INDEX, b"", part.name)
            continue
        held.append(_digests(part, schema))
        side = part.side
        if sum(map(len, held)) >= _HELD:
            yield _cut(np.concatenate(held), side, bits, partitions)
            held = []
    if held:
        yield _cut(np.concatenate(held), side, bits, partitions)


def _cut(digests: Digests, side: int, bits: int, partitions: int) -> pa.RecordBatch:
    # NumPy sorts 16-bit numbers by radix
    short = (digests["entry"] >> np.uint64(64 - bits)).astype(np.uint16 if bits <= 16 else np.uint32)
    order = np.argsort(short, kind="stable")
    numbers = short[order].astype(np.int64)
    firsts = np.flatnonzero(np.diff(numbers, prepend=-1))
    numbers = numbers[firsts]
    columns = [numbers * partitions >> bits, numbers, np.full(len(numbers), side)]
    cells = [*(pa.array(column.astype(np.int32)) for column in columns), cells_of(digests.take(order), firsts)]
    return pa.RecordBatch.from_arrays([*cells, pa.nulls(len(numbers), pa.string())], schema=_ARROW)


def _compared(batches: Iterable[pa.RecordBatch], shape: DigestShape) -> Matched:
    """Compare the ranges of a partition, whose blocks are sorted by range."""
    parts: list[Matched] = []
    unread: set[str] = set()
    rows = (row for batch in batches for row in zip(*(batch.column(name) for name in _ARROW.names[1:]), strict=True))
    for number, blocks in groupby(rows, lambda row: row[0].as_py()):
        sides: tuple[list[pa.Buffer], list[pa.Buffer]] = ([], [])
        for _, side, cell, name in blocks:
            if name.is_valid:
                unread.add(name.as_py())
            sides[side.as_py()].append(cell.as_buffer())
        source, index = (np.frombuffer(b"".join(sides[side]), DIGEST) for side in (SOURCE, INDEX))
        of_source, of_index, differing, repeated = compare_range(source, index)
        told = ((number, shape.block(differing)),) if len(differing) else ()
        parts.append(Matched(of_source, of_index, len(differing), told, repeated=repeated))
    return Matched.joined([*parts, Matched(unread=frozenset(unread))])


def compare_range(source: Digests, index: Digests) -> tuple[int, int, UInt64, int]:
    """Return the numbers of distinct entries of source and index, the differing digests, and the count of repeats.

    Repeats are entries that the index has more often than the source; they are no difference. Neither is an unknown
    topic of an object without a table.
    """
    if len(source) == len(index) and _sum(source) == _sum(index):
        count = len(distinct_numbers(source["entry"]))
        return count, count, np.empty(0, np.uint64), 0
    both = np.concatenate([source, index])
    # sort by digests only; equal digests may have any order
    order = np.argsort(both["entry"])
    digests, topics, mine = both["entry"][order], both["topic"][order], order < len(source)
    firsts = np.flatnonzero(np.diff(digests, prepend=~digests[:1]))
    own, sizes = np.add.reduceat(mine, firsts, dtype=np.int64), np.diff(firsts, append=len(digests))
    in_source, in_index = own > 0, own < sizes
    # numbers of topics are odd; 0 is an unknown topic
    least = np.minimum.reduceat(np.where(topics > 0, topics, np.uint32(2**32 - 1)), firsts)
    most = np.maximum.reduceat(topics, firsts)
    differs = (in_source != in_index) | ((most > 0) & (least != most))
    repeated = int(np.maximum(0, sizes - own - np.maximum(own, 1)).sum())
    return int(in_source.sum()), int(in_index.sum()), digests[firsts[differs]], repeated


def _sum(digests: Digests) -> int:
    return int(mixed_columns([digests["topic"]], digests["entry"]).sum(dtype=np.uint64))
