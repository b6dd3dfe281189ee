"""A compact set of digests: Bloom's filter with two bits a digest, in a block for each range of digests.

Partitions fill the blocks of their ranges, so the size of their results is bounded. A set of few digests also has the
digests themselves, so it holds no other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]

# Most bits of all blocks together: 32 MiB in the driver and in each worker
_MOST_BITS = 28
# Bits for each entry of a small audit
_BITS_PER_ENTRY = 64
# Most digests of all ranges together that are kept themselves: further 32 MiB, and about as much for their origins in
# the driver
_MOST_DIGESTS = 1 << 22


@dataclass(frozen=True, slots=True)
class DigestShape:
    """The 2**`range_bits` ranges of a table, and the 2**`block_bits` bits of each range's block.

    Up to `few` digests of a range are kept themselves.
    """

    range_bits: int
    block_bits: int
    few: int

    @property
    def bits(self) -> int:
        """The number of bits of all blocks."""
        return 1 << (self.range_bits + self.block_bits)

    @classmethod
    def of(cls, range_bits: int, entries: int) -> DigestShape:
        """Return the shape for about `entries` entries on each side."""
        bits = min(_MOST_BITS, (entries * _BITS_PER_ENTRY).bit_length())
        return cls(range_bits, max(3, bits - range_bits), _MOST_DIGESTS >> range_bits)

    def block(self, digests: UInt64) -> bytes:
        """Return the block of `digests` (u64, n), which are in one range."""
        held = np.zeros(1 << self.block_bits, np.bool_)
        for cells in self.cells(digests):
            held[cells & (len(held) - 1)] = True
        return np.packbits(held, bitorder="little").tobytes()

    def cells(self, digests: UInt64) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the two bits (i64, n) of each digest in the table: the bits after those of the range, and the last."""
        first = (digests >> np.uint64(64 - self.range_bits - self.block_bits)).astype(np.int64)
        last = (digests & np.uint64((1 << self.block_bits) - 1)).astype(np.int64)
        return first, (first >> self.block_bits << self.block_bits) | last


class DigestTable:
    """The blocks of all ranges, and if they are few all digests (`whole`, u64, n, any order).

    `may_hold` has no false negatives, and with `whole` no false positives.
    """

    def __init__(self, shape: DigestShape, blocks: Iterable[tuple[int, bytes]], whole: UInt64 | None = None) -> None:
        self.shape = shape
        self.whole = None if whole is None else np.sort(whole)
        self._held = np.zeros((1 << shape.range_bits, 1 << shape.block_bits >> 3), np.uint8)
        for number, block in blocks:
            self._held[number] = np.frombuffer(block, np.uint8)

    def may_hold(self, digests: UInt64) -> npt.NDArray[np.bool_]:
        """Return whether the table may hold each of `digests` (u64, n; bool, n). False is certain."""
        first, second = self.shape.cells(digests)
        found = self._bits(first)
        left = np.flatnonzero(found)
        found[left] = self._bits(second[left])
        if self.whole is not None:
            left = np.flatnonzero(found)
            found[left] = is_among(digests[left], self.whole)
        return found

    def _bits(self, cells: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        held: npt.NDArray[np.uint8] = self._held.reshape(-1)[cells >> 3] >> (cells & 7).astype(np.uint8) & 1
        return held.view(np.bool_)


def is_among(digests: UInt64, whole: UInt64) -> npt.NDArray[np.bool_]:
    """Return whether each of `digests` (u64, n; bool, n) is in `whole` (u64, m, rising)."""
    if not len(whole):
        return np.zeros(len(digests), np.bool_)
    found: npt.NDArray[np.bool_] = whole[np.searchsorted(whole[:-1], digests)] == digests
    return found
