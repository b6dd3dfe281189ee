"""Counts and digests of both sides of an audit, by ranges of seconds and hashes. Ranges with equal sums are equal.

A digest has 64 bits of an entry's identity, values and topic. Two different ranges have equal sums with a probability
of 2^-64. Each task adds up its entries and gives Spark one row for each range, so no entry is shuffled. Memory of a
task: 48 bytes a range.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.format.shard import mixed_columns
from tiered_index.service.log.records import StoredObject
from tiered_index.spark.frames import arrow_schema, one_row

Columns = Mapping[str, npt.NDArray[Any]]
# Entries of a range on each side, about, and bounds of the number of ranges, as powers of 2
_ENTRIES, _LEAST_BITS, _MOST_BITS = 1 << 12, 3, 8
# `range` is -1 for an object that could not be read
SUMS = "side int, range int, entries long, low long, high long, unread string"
_ARROW = arrow_schema(SUMS)


@dataclass(frozen=True, slots=True)
class Part:
    """Some entries of one side: columns (n), topics, keys (of a source), and the object's name."""

    side: int
    columns: Mapping[str, npt.NDArray[Any]]
    topics: pa.DictionaryArray
    keys: pa.Array | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Unread:
    """An object that could not be read whole."""

    name: str


@dataclass(frozen=True, slots=True)
class Ranges:
    """2^`bits` periods of `seconds` from second `first` on, each with 2^`bits` ranges of hashes.

    Each entry of either side is in one range: earlier ones in those of the first period, later ones in those of the
    last. `marked` has the ranges that differ (bool, packed bits).
    """

    bits: int
    first: int
    seconds: int
    marked: bytes = b""

    @classmethod
    def of(cls, objects: Sequence[StoredObject], entries: int) -> Ranges:
        """Return ranges for about `entries` entries on each side, over the seconds of objects."""
        bits = min(_MOST_BITS, max(_LEAST_BITS, (entries // _ENTRIES).bit_length() + 1 >> 1))
        first = min((stored.second_min for stored in objects), default=0)
        last = max((stored.second_max for stored in objects), default=0)
        return cls(bits, first, (last - first >> bits) + 1)

    def __len__(self) -> int:
        return 1 << 2 * self.bits

    def periods(self, seconds: Any) -> Any:
        """Return the periods of seconds (i64, n)."""
        return np.clip((seconds - self.first) // self.seconds, 0, (1 << self.bits) - 1)

    def numbers(self, columns: Columns) -> npt.NDArray[np.int64]:
        """Return the ranges (i64, n) of entries."""
        hashes = columns["key_hash"].astype(np.int64) >> (31 - self.bits)
        range_numbers: npt.NDArray[np.int64] = self.periods(columns["second"].astype(np.int64)) << self.bits | hashes
        return range_numbers

    def marking(self, differ: npt.NDArray[np.bool_]) -> Ranges:
        """Return these ranges with marks: `differ` is whether each differs (bool, one for each)."""
        return replace(self, marked=np.packbits(differ).tobytes())

    def differ(self, columns: Columns) -> npt.NDArray[np.bool_]:
        """Return whether the range of each entry (bool, n) differs."""
        return self._marks[self.numbers(columns)]

    def may_differ(self, stored: StoredObject) -> bool:
        """Return whether an object may have entries in a range that differs."""
        low, high = (int(self.periods(second)) for second in (stored.second_min, stored.second_max))
        return bool(self._marks[low << self.bits : high + 1 << self.bits].any())

    @property
    def _marks(self) -> npt.NDArray[np.bool_]:
        return np.unpackbits(np.frombuffer(self.marked, np.uint8)).view(np.bool_)


def digests(part: Part, names: Sequence[tuple[str, np.dtype[Any]]]) -> npt.NDArray[np.uint64]:
    """Return a 64-bit digest (u64, n) of each entry's fields `names`, and of its topic."""
    # integers are mixed by their values, others by their bytes
    told = (part.columns[n] if kind.kind in "iu" else part.columns[n].astype(kind) for n, kind in names)
    mixed = mixed_columns(told, np.zeros(len(part.columns["second"]), np.int64))
    texts = [blake2b(name.encode(), digest_size=8).digest() for name in part.topics.dictionary.to_pylist()]
    topics = np.frombuffer(b"".join(texts), "<i8")[part.topics.indices.to_numpy(zero_copy_only=False)]
    return mixed_columns([topics], mixed)


def sums_of(
    parts: Iterable[Part | Unread], ranges: Ranges, names: Sequence[tuple[str, np.dtype[Any]]]
) -> Iterator[pa.RecordBatch]:
    """Yield the number of entries and the sum of digests (in two halves) of each range of a task's entries.

    Yields a row for each object that could not be read whole.
    """
    sums = np.zeros((2, 3, len(ranges)), np.int64)
    for part in parts:
        if isinstance(part, Unread):
            yield one_row(_ARROW, 1, -1, 0, 0, 0, part.name)
            continue
        numbers, told = ranges.numbers(part.columns), digests(part, names)
        for place, halves in enumerate((None, told & np.uint64(0xFFFFFFFF), told >> np.uint64(32))):
            # sums of less than 2^21 halves are exact in float64
            sums[part.side, place] += np.bincount(numbers, halves, len(ranges)).astype(np.int64)
    for side, each in enumerate(sums):
        places = np.flatnonzero(each[0])
        columns = [np.full(len(places), side, np.int32), places.astype(np.int32), *each[:, places]]
        arrays = [*map(pa.array, columns), pa.nulls(len(places), pa.string())]
        yield pa.RecordBatch.from_arrays(arrays, schema=_ARROW)
