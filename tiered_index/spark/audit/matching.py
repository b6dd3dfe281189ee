"""Finds the entries that differ between index and source: compares digests of both, range by range, by one shuffle.

A digest has 64 bits of an entry's identity and values and 32 bits of its topic's name. A bucket of a range with equal
sums on both sides has the same entries. Two different entries have one digest, which hides a difference, with a
probability of 2^-64 a pair. Each block of digests has the number of its origin, a part of the source or a group of
objects. If few digests differ, only their origins must be read again. Memory of a task: `_HELD` digests before the
shuffle, those of a range after it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.format.distinct import distinct_numbers
from tiered_index.format.schema import Schema
from tiered_index.format.shard import mixed_columns
from tiered_index.spark.audit.digest_table import DigestShape, DigestTable, is_among
from tiered_index.spark.audit.entries import INDEX, SOURCE, UNKNOWN, Groups, Part, Picked, Sides, Unread, entry_digests
from tiered_index.spark.frames import arrow_schema, cells_of, one_row, shuffles_deleted
from tiered_index.spark.workers import between_tasks

# `topic` is 0 if an object has no table of topics
DIGEST = np.dtype([("entry", "<u8"), ("topic", "<u4")])
# About the most digests of a range on each side. A source with unknown rows has more if it has more than the index.
_RANGE = 1 << 19
_LEAST_RANGES = 64
# Digests of one side that are distributed to ranges at once
_HELD = 1 << 20
# Buckets of a range, by the last bits of a digest
_BUCKETS = 1 << 16
_BLOCKS = "partition int, range int, side int, origin int, digests binary, unread string"
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
    be read whole. `repeated` entries are more often in the index than in the source. `whole` has the differing digests
    (u64), and `places` has for each side the distinct origins of them (i32); None and nothing if they are too many.
    """

    source: int = 0
    index: int = 0
    differing: int = 0
    blocks: tuple[tuple[int, bytes], ...] = ()
    unread: frozenset[str] = frozenset()
    repeated: int = 0
    whole: bytes | None = b""
    places: tuple[bytes, bytes] = (b"", b"")

    def origins(self, side: int) -> list[int] | None:
        """Return the origins of a side that have differing digests, None if any may have some."""
        found = np.frombuffer(self.places[side], np.int32).tolist()
        return None if self.whole is None or UNKNOWN in found else found

    @classmethod
    def joined(cls, parts: Sequence[Matched]) -> Matched:
        """Return the sum of the results of partitions, which have different ranges."""
        wholes = [one.whole for one in parts if one.whole is not None]
        return cls(
            sum(one.source for one in parts),
            sum(one.index for one in parts),
            sum(one.differing for one in parts),
            tuple(block for one in parts for block in one.blocks),
            frozenset().union(*(one.unread for one in parts)),
            sum(one.repeated for one in parts),
            b"".join(wholes) if len(wholes) == len(parts) else None,
            (_distinct(one.places[SOURCE] for one in parts), _distinct(one.places[INDEX] for one in parts)),
        )


def _distinct(origins: Iterable[bytes]) -> bytes:
    return distinct_numbers(np.frombuffer(b"".join(origins), np.int32)).tobytes()


def match(sides: Sides, groups: Groups, picked: Picked) -> tuple[Matched, DigestTable]:
    """Compare the picked entries of both sides; return the result, and the digests that differ. Driver.

    Raises the errors of `entries`.
    """
    schema, spark = sides.schema, sides.entries.frame.sparkSession
    count = max(sides.entries.rows, sum(one.count for group in groups for one in group))
    bits = (max(_LEAST_RANGES, count // _RANGE) - 1).bit_length()
    partitions = min(1 << bits, max(2 * sides.cores, (1 << bits) // 16))
    shape = DigestShape.of(bits, count)

    def cut(parts: Iterator[Part | Unread]) -> Iterator[pa.RecordBatch]:
        return _blocks(parts, schema, bits, partitions)

    def compare(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with between_tasks():
            result = _compared(batches, shape)
        yield pa.record_batch({"result": pa.array([pickle.dumps(result)], pa.binary())})

    with shuffles_deleted(spark), sides.rows(groups, picked, cut, _BLOCKS) as rows:
        blocks = rows.repartitionById(partitions, "partition").sortWithinPartitions("range")
        results = blocks.mapInArrow(compare, _RESULT).collect()
    matched = Matched.joined([pickle.loads(row[0]) for row in results])
    whole = None if matched.whole is None else np.frombuffer(matched.whole, np.uint64)
    return matched, DigestTable(shape, matched.blocks, whole)


def _blocks(parts: Iterable[Part | Unread], schema: Schema, bits: int, partitions: int) -> Iterator[pa.RecordBatch]:
    """Yield blocks of digests for 2**`bits` ranges, of up to about `_HELD` entries of one origin together.

    Also a row for each unread object. Neighbouring ranges share a partition.
    """
    held: list[Digests] = []
    place = INDEX, UNKNOWN
    for part in parts:
        if isinstance(part, Unread):
            yield one_row(_ARROW, 0, -1, INDEX, UNKNOWN, b"", part.name)
            continue
        if held and ((part.side, part.origin) != place or sum(map(len, held)) >= _HELD):
            yield _cut(np.concatenate(held), *place, bits, partitions)
            held = []
        place = part.side, part.origin
        held.append(_digests(part, schema))
    if held:
        yield _cut(np.concatenate(held), *place, bits, partitions)


def _cut(digests: Digests, side: int, origin: int, bits: int, partitions: int) -> pa.RecordBatch:
    # NumPy sorts 16-bit numbers by radix
    short = (digests["entry"] >> np.uint64(64 - bits)).astype(np.uint16 if bits <= 16 else np.uint32)
    order = np.argsort(short, kind="stable")
    numbers = short[order].astype(np.int64)
    firsts = np.flatnonzero(np.diff(numbers, prepend=-1))
    numbers = numbers[firsts]
    columns = [numbers * partitions >> bits, numbers, *(np.full(len(numbers), one) for one in (side, origin))]
    cells = [*(pa.array(column.astype(np.int32)) for column in columns), cells_of(digests.take(order), firsts)]
    return pa.RecordBatch.from_arrays([*cells, pa.nulls(len(numbers), pa.string())], schema=_ARROW)


def _compared(batches: Iterable[pa.RecordBatch], shape: DigestShape) -> Matched:
    """Compare the ranges of a partition, whose blocks are sorted by range."""
    parts: list[Matched] = []
    unread: set[str] = set()
    for number, blocks in groupby(_rows_of(batches), lambda row: row[0]):
        cells: tuple[list[pa.Buffer], list[pa.Buffer]] = ([], [])
        origins: tuple[list[int], list[int]] = ([], [])
        for _, side, origin, name, cell in blocks:
            if name is not None:
                unread.add(name)
            cells[side].append(cell.as_buffer())
            origins[side].append(origin)
        both = [np.frombuffer(b"".join(cells[side]), DIGEST) for side in (SOURCE, INDEX)]
        of_source, of_index, differing, repeated = compare_range(*both)
        told = ((number, shape.block(differing)),) if len(differing) else ()
        part = Matched(of_source, of_index, len(differing), told, repeated=repeated)
        if len(differing) > shape.few:
            part = replace(part, whole=None)
        elif len(differing):
            in_source, in_index = (
                np.array(origins[side], np.int32)[_cells_with(differing, both[side]["entry"], cells[side])].tobytes()
                for side in (SOURCE, INDEX)
            )
            part = replace(part, whole=differing.tobytes(), places=(in_source, in_index))
        parts.append(part)
    return Matched.joined([*parts, Matched(unread=frozenset(unread))])


def _rows_of(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[Any, ...]]:
    for batch in batches:
        told = (batch.column(name).to_pylist() for name in ("range", "side", "origin", "unread"))
        yield from zip(*told, batch.column("digests"), strict=True)


def _cells_with(wanted: UInt64, digests: UInt64, cells: Sequence[pa.Buffer]) -> npt.NDArray[np.intp]:
    """Return the places of the cells, whose digests are joined in `digests`, that have `wanted` ones (rising)."""
    near = np.zeros(_BUCKETS, np.bool_)
    near[wanted.astype(np.uint16)] = True
    found = np.flatnonzero(near[digests.astype(np.uint16)])
    found = found[is_among(digests[found], wanted)]
    ends = np.cumsum([cell.size // DIGEST.itemsize for cell in cells])
    return distinct_numbers(np.searchsorted(ends, found, "right"))


def compare_range(source: Digests, index: Digests) -> tuple[int, int, UInt64, int]:
    """Return the numbers of distinct entries of source and index, the differing digests, and the count of repeats.

    Repeats are entries that the index has more often than the source; they are no difference. Neither is an unknown
    topic of an object without a table.
    """
    differs = _sums(source) != _sums(index)
    if len(source) != len(index) and not differs.any():
        differs[:] = True
    odd = [differs[side["entry"].astype(np.uint16)] for side in (source, index)]
    # buckets with equal sums have the same entries
    count = len(distinct_numbers(source["entry"][~odd[SOURCE]]))
    source, index = source[odd[SOURCE]], index[odd[INDEX]]
    if not len(source) and not len(index):
        return count, count, np.empty(0, np.uint64), 0
    both = np.concatenate([source, index])
    # sort by digests only; equal digests may have any order
    order = np.argsort(both["entry"])
    digests, topics, mine = both["entry"][order], both["topic"][order], order < len(source)
    firsts = np.flatnonzero(np.diff(digests, prepend=~digests[:1]))
    own, sizes = np.add.reduceat(mine, firsts, dtype=np.int64), np.diff(firsts, append=len(digests))
    in_source, in_index = own > 0, own < sizes
    # numbers of topics are odd; 0 is an unknown topic
    least, most = (
        [extreme.reduceat(np.where((mine == side) & (topics > 0), topics, none), firsts) for side in (True, False)]
        for extreme, none in ((np.minimum, np.uint32(2**32 - 1)), (np.maximum, np.uint32(0)))
    )
    differing = (in_source != in_index) | ((most[INDEX] > 0) & ((least[0] != least[1]) | (most[0] != most[1])))
    repeated = int(np.maximum(0, sizes - own - np.maximum(own, 1)).sum())
    return count + int(in_source.sum()), count + int(in_index.sum()), digests[firsts[differing]], repeated


def _sums(digests: Digests) -> UInt64:
    """Return the sum of each bucket of digests."""
    sums = np.zeros(_BUCKETS, np.uint64)
    np.add.at(sums, digests["entry"].astype(np.uint16), mixed_columns([digests["topic"]], digests["entry"]))
    return sums
