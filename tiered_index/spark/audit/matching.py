"""Which entries index and source disagree about: digests of both sides, compared range by range.

A digest is 64 bits of an entry's identity and values and 32 of its topic's name, whatever object or file it is in.
A range of digests whose sums are the same on both sides has the same entries; entries of other ranges are joined. Two
different entries of a range have one digest, which hides a difference, with a chance of 2^-64 a pair.
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
from tiered_index.spark.frames import cells_of

# `topic` is 0 where an object has no table of topics.
DIGEST = np.dtype([("entry", "<u8"), ("topic", "<u4")])
# Digests of a range, about, on each side; the least number of ranges bounds it where the source has far more entries
# than the index.
_RANGE = 1 << 19
_LEAST_RANGES = 64
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
    """The number of different entries of each side, of entries of both sides in each range that differs, and the
    objects that could not be read whole. The index has `repeated` entries more often than the source.
    """

    source: int
    index: int
    differing: dict[int, int]
    unread: frozenset[str]
    repeated: int = 0

    @classmethod
    def joined(cls, parts: Iterable[Matched]) -> Matched:
        """Return what all partitions found together."""
        source = index = repeated = 0
        differing: dict[int, int] = {}
        unread: set[str] = set()
        for one in parts:
            source, index, repeated = source + one.source, index + one.index, repeated + one.repeated
            differing |= one.differing
            unread |= one.unread
        return cls(source, index, differing, frozenset(unread), repeated)


def match(sides: Sides, stored: Sequence[StoredObject], picked: Picked) -> tuple[Matched, npt.NDArray[np.bool_]]:
    """Return what differs between the picked entries of both sides, and which ranges do as `Picked` has them. Driver.
    Raises as `entries` does.
    """
    ranges = Ranges.of(sum(one.count for one in stored), _RANGE, _LEAST_RANGES, sides.cores)
    pack = partial(_digests, schema=sides.schema)
    matched: Matched = sides.met(stored, picked, ranges, pack, _cut, _compared, Matched.joined)
    differs = np.zeros(1 << ranges.bits, np.bool_)
    differs[list(matched.differing)] = True
    return matched, differs


def _cut(held: Sequence[Digests], ranges: Ranges) -> tuple[npt.NDArray[np.int64], pa.Array]:
    digests = np.concatenate(held)
    order, firsts, numbers = ranges.cut(digests["entry"])
    return numbers, cells_of(digests.take(order), firsts)


def _compared(found: Iterator[Blocks], unread: frozenset[str]) -> Matched:
    """Return what differs in the ranges of a partition."""
    counts = [0, 0]
    repeated = 0
    ranges: dict[int, int] = {}
    for one in found:
        source, index = (np.frombuffer(b"".join(cells), DIGEST) for cells in one.sides)
        of_source, of_index, differing, more = compare_range(source, index)
        repeated += more
        counts[SOURCE] += of_source
        counts[INDEX] += of_index
        if len(differing):
            ranges[one.number] = len(source) + len(index)
    return Matched(counts[SOURCE], counts[INDEX], ranges, unread, repeated)


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
    # numbers of topics are odd: 0 represents none that is known
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
