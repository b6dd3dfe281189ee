"""Which entries index and source disagree about: digests of both sides, compared range by range.

A digest is 64 bits of an entry's identity and values and 32 of its topic's name, whatever object or file it stands in.
A range of digests whose sums are the same on both sides has the same entries; of others the digests that differ are
marked. That two different entries of a range have one digest, so that a difference goes unseen, has a chance of 2^-64 a
pair. Marks are a bit for each of a number of intervals of digests, so what is marked may be alike, and is never missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.format.schema import Schema
from tiered_index.format.shard import mixed_columns
from tiered_index.service.log.records import StoredObject
from tiered_index.spark.audit import entries
from tiered_index.spark.audit.entries import INDEX, SOURCE, Part, Picked
from tiered_index.spark.audit.ranges import Blocks, Ranges, Sides
from tiered_index.spark.executors import cells_of

# `topic` is 0 where an object has no table of topics.
DIGEST = np.dtype([("entry", "<u8"), ("topic", "<u4")])
# Digests of a range, about, on each side; the least number of ranges bounds it where the source has far more entries
# than the index.
_RANGE = 1 << 19
_LEAST_RANGES = 64
# Marks, as bits of their number: so many for an entry, and 32 MiB of them at most.
_MARKS_AN_ENTRY, _LEAST_BITS, _MOST_BITS = 16, 16, 28
# Digests that are told: 32 MiB
_MOST_DIGESTS = 1 << 22
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
    """How many different entries each side has, and the marks of those that differ, where any do, as (range, bits of
    its marks, its digests that differ where they are of one side); `unread` are the objects of which something could
    not be read. The index has `repeated` entries more often than the source.
    """

    source: int
    index: int
    differing: int
    marks: Sequence[tuple[int, bytes, bytes]]
    unread: frozenset[str]
    repeated: int = 0

    @property
    def side(self) -> int | None:
        """The side that has all that differs; None where both have some, or not all digests are known."""
        if sum(len(told) for _, _, told in self.marks) < 8 * self.differing:
            return None
        return {self.source - self.index: SOURCE, self.index - self.source: INDEX}.get(self.differing)

    def digests(self) -> UInt64:
        """Return the digests that differ, rising, where they are of one `side`."""
        return np.sort(np.frombuffer(b"".join(told for _, _, told in self.marks), np.uint64))

    @classmethod
    def joined(cls, parts: Iterable[Matched]) -> Matched:
        """Return what all partitions found together."""
        source = index = differing = repeated = 0
        marks: list[tuple[int, bytes, bytes]] = []
        unread: set[str] = set()
        for one in parts:
            source, index, differing = source + one.source, index + one.index, differing + one.differing
            repeated += one.repeated
            marks += one.marks
            unread |= one.unread
        return cls(source, index, differing, marks, frozenset(unread), repeated)


def match(sides: Sides, stored: Sequence[StoredObject], picked: Picked) -> tuple[Matched, npt.NDArray[np.uint8]]:
    """Return what differs between the picked entries of both sides, and its marks as `Picked` has them. Driver. Raises
    as `entries` does.
    """
    count = sum(one.count for one in stored)
    ranges = Ranges.of(count, _RANGE, _LEAST_RANGES, sides.cores)
    bits = min(_MOST_BITS, max(_LEAST_BITS, ranges.bits + 3, (count * _MARKS_AN_ENTRY).bit_length()))
    pack = partial(_digests, schema=sides.schema)
    meet = partial(_compared, bits=ranges.bits, mark_bits=bits, most=_MOST_DIGESTS // ranges.partitions)
    matched: Matched = sides.met(stored, picked, ranges, pack, _cut, meet, Matched.joined)
    return matched, all_marks(matched.marks, ranges.bits, bits)


def all_marks(marks: Sequence[tuple[int, bytes, bytes]], bits: int, mark_bits: int) -> npt.NDArray[np.uint8]:
    """Return the marks of all 2**`bits` ranges, as bits (u8, 2**`mark_bits` / 8)."""
    whole = np.zeros(1 << (mark_bits - 3), np.uint8)
    size = len(whole) >> bits
    for number, told, _ in marks:
        whole[number * size : (number + 1) * size] = np.frombuffer(told, np.uint8)
    return whole


def _cut(held: Sequence[Digests], ranges: Ranges) -> tuple[npt.NDArray[np.int64], pa.Array]:
    digests = np.concatenate(held)
    order, firsts, numbers = ranges.cut(digests["entry"])
    return numbers, cells_of(digests.take(order), firsts)


def _compared(
    found: Iterator[Blocks], unread: frozenset[str], bits: int, mark_bits: int, most: int = _MOST_DIGESTS
) -> Matched:
    """Return what differs in the ranges of a partition, with digests of one side as long as `most` or fewer differ."""
    counts = [0, 0, 0]
    repeated = 0
    marks: list[tuple[int, bytes, bytes]] = []
    for one in found:
        source, index = (np.frombuffer(b"".join(cells), DIGEST) for cells in one.sides)
        of_source, of_index, differing, more = compare_range(source, index)
        repeated += more
        counts[SOURCE] += of_source
        counts[INDEX] += of_index
        counts[2] += len(differing)
        if len(differing):
            marked = np.zeros(1 << (mark_bits - bits), np.bool_)
            marked[(differing >> np.uint64(64 - mark_bits)) & np.uint64(len(marked) - 1)] = True
            one_sided = abs(of_source - of_index) == len(differing)
            told = differing.tobytes() if one_sided and counts[2] <= most else b""
            marks.append((one.number, np.packbits(marked, bitorder="little").tobytes(), told))
    return Matched(counts[SOURCE], counts[INDEX], counts[2], marks, unread, repeated)


def compare_range(source: Digests, index: Digests) -> tuple[int, int, UInt64, int]:
    """Return how many different entries each side (n) has, the digests of those that may differ, and how many entries
    the index has more often than the source.

    An entry that one side has more often is no difference; nor is a topic that an object's lack of a table hides.
    """
    if len(source) == len(index) and _sum(source) == _sum(index):
        count = _different(source["entry"])
        return count, count, np.empty(0, np.uint64), 0
    both = np.concatenate([source, index])
    # the order of digests alone: of what is alike the lot is small
    order = np.argsort(both["entry"])
    digests, topics, mine = both["entry"][order], both["topic"][order], order < len(source)
    firsts = np.flatnonzero(np.diff(digests, prepend=~digests[:1]))
    own, sizes = np.add.reduceat(mine, firsts, dtype=np.int64), np.diff(firsts, append=len(digests))
    in_source, in_index = own > 0, own < sizes
    # numbers of topics are odd: 0 stands for none that is known
    least = np.minimum.reduceat(np.where(topics > 0, topics, np.uint32(2**32 - 1)), firsts)
    most = np.maximum.reduceat(topics, firsts)
    differs = (in_source != in_index) | ((most > 0) & (least != most))
    repeated = int(np.maximum(0, sizes - own - np.maximum(own, 1)).sum())
    return int(in_source.sum()), int(in_index.sum()), digests[firsts[differs]], repeated


def _different(digests: UInt64) -> int:
    ordered = np.sort(digests)
    return len(ordered[:1]) + int(np.count_nonzero(ordered[1:] != ordered[:-1]))


def _sum(digests: Digests) -> int:
    return int(mixed_columns([digests["topic"]], digests["entry"]).sum(dtype=np.uint64))
