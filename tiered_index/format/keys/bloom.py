"""The filter of compacted files: Parquet's split-block Bloom filter (`BloomFilter.md`). SPEC.md section 6.

A filter holds a 64-bit mix of each key's hash and fingerprint. A key sets one bit in each of the 8 words of one block
of 256 bits, and a lookup tests these bits. So a lookup needs 32 bytes of a filter. There are no false negatives. Pure;
any thread.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.base.kernels import compiled
from tiered_index.format.keys.distinct import distinct_numbers
from tiered_index.format.keys.hashing import normal_hashes

FILTER_BLOCK_BYTES = 32
# Bits per distinct key: about 1.1% false positives
BITS_PER_KEY = 10.5

SALTS = (0x47B6137B, 0x44974D91, 0x8824AD5B, 0xA2B7289D, 0x705495C7, 0x2DF1424B, 0x9EFC4947, 0x5C6BFB31)

_SALT_COLUMN = np.array(SALTS, np.uint32)[:, None]
# MurmurHash3's fmix64: shift and multiply, twice, then a last shift
_MIX = ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53))
# Hashes masked at a time: the temporaries fit the cache, and other threads run in between
_MASKED = 1 << 14

Array = npt.NDArray[Any]
UInt64 = npt.NDArray[np.uint64]


# cached, because a lookup tests the filters of many files
@lru_cache(64)
def filter_hash(key_hash: int, fingerprint: int) -> int:
    """Return the 64-bit number that a filter holds for a key. `fingerprint` is 0 if the schema has none."""
    if (loops := compiled()) is not None:
        return loops.filter_hash((0 if key_hash == -(2**31) else key_hash) << 32 | fingerprint)  # type: ignore[no-any-return]
    return int(filter_hashes(np.array([key_hash]), np.array([fingerprint]))[0])


def filter_hashes(key_hash: Array, fingerprint: Array | None) -> UInt64:
    """Return the `filter_hash` (u64, n) of stored columns (n, any byte order). `fingerprint`: None if there is none."""
    values = normal_hashes(key_hash).astype(np.uint64)
    values <<= np.uint64(32)
    if fingerprint is not None:
        values |= fingerprint.astype(np.uint64)
    for shift, factor in _MIX:
        values ^= values >> np.uint64(shift)
        values *= np.uint64(factor)
    values ^= values >> np.uint64(33)
    return values


class FilterBuilder:
    """Collects the hashes of one filter and builds the filter once. One thread.

    `room` (u64) is overwritten: it should have a place for each hash. Memory in `build`: 8 bytes per hash, unless they
    are distinct.
    """

    def __init__(self, room: UInt64) -> None:
        self._hashes = room
        self._count, self._are_distinct = 0, True

    def add(self, hashes: UInt64, *, are_distinct: bool = False) -> None:
        """Add `hashes` (u64, n) in any order. `are_distinct`: no hash is twice among all that are added."""
        if not are_distinct:
            self._are_distinct = False
            new = np.ones(len(hashes), bool)
            np.not_equal(hashes[1:], hashes[:-1], out=new[1:])
            hashes = hashes if new.all() else hashes[new]
        end = self._count + len(hashes)
        if end > len(self._hashes):
            room = np.empty(max(self._count, len(hashes)), np.uint64)
            self._hashes = np.concatenate((self._hashes[: self._count], room))
        self._hashes[self._count : end] = hashes
        self._count = end

    def build(self) -> bytes:
        """Return the filter."""
        collected, loops = self._hashes[: self._count], compiled()
        if self._are_distinct and loops is not None:
            ordered = collected
        elif loops is None:
            ordered = distinct_numbers(collected)
        else:
            distinct = np.empty_like(collected)
            ordered = distinct[: loops.distinct(collected, distinct)]
        # frees memory before the filter is made, unless `ordered` is a part of it
        del self._hashes, collected
        blocks = max(1, math.ceil(BITS_PER_KEY * len(ordered) / (8 * FILTER_BLOCK_BYTES)))
        words = np.zeros((blocks, 8), "<u4")
        if loops is not None:
            loops.set_bits(ordered, words)
            return words.tobytes()
        for start in range(0, len(ordered), _MASKED):
            part = ordered[start : start + _MASKED]
            numbers = block_numbers(part, blocks)
            firsts = np.flatnonzero(np.diff(numbers, prepend=-1))
            words[numbers[firsts]] |= np.bitwise_or.reduceat(_masks(part), firsts, axis=1).T
        return words.tobytes()


def block_number(hash64: int, blocks: int) -> int:
    """Return the number of the block, of `blocks`, that has the bits of `hash64`."""
    return (hash64 >> 32) * blocks >> 32


def block_may_hold(block: bytes | memoryview, hash64: int) -> bool:
    """Return whether `block` (32 bytes, the block of `block_number`) may hold `hash64`. False is certain."""
    if (loops := compiled()) is not None and type(block) is bytes:
        return loops.block_may_hold(block, hash64 & 0xFFFFFFFF)  # type: ignore[no-any-return]
    return bool(blocks_may_hold(np.frombuffer(block, "<u4")[None], np.array([hash64], np.uint64))[0])


def block_numbers(hashes: UInt64, blocks: int) -> npt.NDArray[np.int64]:
    """Return the `block_number` (i64, n) of each of `hashes` (u64, n)."""
    return ((hashes >> np.uint64(32)) * np.uint64(blocks) >> np.uint64(32)).astype(np.int64)


def blocks_may_hold(words: npt.NDArray[np.uint32], hashes: UInt64) -> npt.NDArray[np.bool_]:
    """Return `block_may_hold` (bool, n) for `hashes` (u64, n), given the words (u32, n x 8) of the block of each."""
    masks = _masks(hashes).T
    held: npt.NDArray[np.bool_] = ((words & masks) == masks).all(axis=1)
    return held


def _masks(hashes: UInt64) -> npt.NDArray[np.uint32]:
    """Return the bit that each hash sets in each word (u32, 8 x n)."""
    masks: npt.NDArray[np.uint32] = hashes.astype(np.uint32) * _SALT_COLUMN
    masks >>= np.uint32(27)
    np.left_shift(np.uint32(1), masks, out=masks)
    return masks
