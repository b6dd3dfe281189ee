"""The filter of compacted files: Parquet's split-block Bloom filter (`BloomFilter.md`). SPEC.md section 6.

Its keys are a mix of key hash and fingerprint. A key sets, and a lookup tests, one bit in each of the 8 words of one
block of 256 bits, so a lookup needs 32 bytes of a filter. No false negatives. Pure functions, safe under threads.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.format.hashing import normal_hashes
from tiered_index.kernels import compiled

FILTER_BLOCK_BYTES = 32
# Bits a distinct key: some 1.1% false positives
BITS_PER_KEY = 10.5

SALTS = (0x47B6137B, 0x44974D91, 0x8824AD5B, 0xA2B7289D, 0x705495C7, 0x2DF1424B, 0x9EFC4947, 0x5C6BFB31)
_SALTS = np.array(SALTS, np.uint32)
_SALT_COLUMN = _SALTS[:, None]
_WORDS = struct.Struct("<8I")
# MurmurHash3's fmix64: shift and multiply, twice, then a last shift
_MIX = ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53))
# Hashes sorted, and hashes masked, at a time: their temporaries fit the cache, and other threads run in between
_CHUNK, _MASKED = 1 << 16, 1 << 14
_FIRST, _FIRST_SHIFT, _NEXT_SHIFT = 1 << 8, np.uint64(64 - 8), np.uint64(64 - 8 - 16)
_FIRST_VALUES = np.arange(_FIRST, dtype=np.uint64)

Array = npt.NDArray[Any]
UInt64 = npt.NDArray[np.uint64]


# a lookup asks the filter of each of its files
@lru_cache(64)
def filter_hash(key_hash: int, fingerprint: int) -> int:
    """Return the 64-bit number (u64) that a filter holds for a key; `fingerprint` is 0 where the schema has none."""
    value = (0 if key_hash == -(2**31) else key_hash) << 32 | fingerprint
    if (loops := compiled()) is not None:
        return loops.filter_hash(value)  # type: ignore[no-any-return]
    for shift, factor in _MIX:
        value ^= value >> shift
        value = value * factor & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 33


def filter_hashes(key_hash: Array, fingerprint: Array | None) -> UInt64:
    """Return `filter_hash` (u64, n) of stored columns (n, any byte order); `fingerprint` None: the schema has none."""
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
    """Collects the hashes (about `capacity`) of one filter and builds it once. One thread.

    In order, equal hashes and those of one block are neighbours. A full sort would take longer than the rest: each
    chunk is sorted by its first 8 bits as it comes, then those of all chunks with the same first 8 bits by the next 16,
    and the rest is nearly in order. Memory: 8 bytes a hash, in `build` 8 more and 48 for those with the most common
    first 8 bits.
    """

    def __init__(self, capacity: int) -> None:
        self._hashes: UInt64 = np.empty(capacity, np.uint64)
        # for each chunk, where in `_hashes` the run of each first 8 bits ends; row 0 stands before the first chunk
        self._ends = [np.zeros(_FIRST, np.int64)]
        # decided once, since what is collected is in no order with the compiled core
        self._loops = compiled()

    def add(self, hashes: UInt64) -> None:
        """Add `hashes` (u64, n), in any order and with any repeats."""
        for start in range(0, len(hashes), _CHUNK):
            part = hashes[start : start + _CHUNK]
            if self._loops is None:
                part = part.take(np.argsort((part >> _FIRST_SHIFT).astype(np.uint8), kind="stable"))
            part = _without_repeats(part)
            at = int(self._ends[-1][-1])
            if at + len(part) > len(self._hashes):
                self._hashes = np.concatenate((self._hashes[:at], np.empty(max(at, len(part)), np.uint64)))
            self._hashes[at : at + len(part)] = part
            ends = (
                np.searchsorted(part >> _FIRST_SHIFT, _FIRST_VALUES, "right")
                if self._loops is None
                else np.array([len(part)])
            )
            self._ends.append(at + ends)

    def build(self) -> bytes:
        """Return the filter."""
        ordered = self._in_order()
        blocks = max(1, math.ceil(BITS_PER_KEY * len(ordered) / (8 * FILTER_BLOCK_BYTES)))
        words = np.zeros((blocks, 8), "<u4")
        if self._loops is not None:
            self._loops.set_bits(ordered, _SALTS, words)
            return words.tobytes()
        for start in range(0, len(ordered), _MASKED):
            part = ordered[start : start + _MASKED]
            numbers = block_numbers(part, blocks)
            firsts = np.flatnonzero(np.diff(numbers, prepend=-1))
            words[numbers[firsts]] |= np.bitwise_or.reduceat(_masks(part), firsts, axis=1).T
        return words.tobytes()

    def _in_order(self) -> UInt64:
        """Return the distinct hashes in order, and release the collected ones."""
        if self._loops is not None:
            collected = self._hashes[: int(self._ends[-1][-1])]
            found = np.empty_like(collected)
            del self._hashes, self._ends
            return found[: self._loops.distinct(collected, found)]
        ends = np.array(self._ends)
        starts = np.column_stack((np.append(0, ends[:-1, -1]), ends[:, :-1]))
        ordered: UInt64 = np.empty(int(ends[-1, -1]), np.uint64)
        distinct = 0
        # a small file has a few of the first 8 bits only
        for first in np.flatnonzero((ends - starts).any(axis=0)).tolist():
            runs = zip(starts[:, first].tolist(), ends[:, first].tolist(), strict=True)
            part = np.concatenate([self._hashes[low:high] for low, high in runs])
            part = part.take(np.argsort((part >> _NEXT_SHIFT).astype(np.uint16), kind="stable"))
            part.sort(kind="stable")  # which merges the runs that it finds
            part = _without_repeats(part)
            ordered[distinct : distinct + len(part)] = part
            distinct += len(part)
        del self._hashes, self._ends
        return ordered[:distinct]


def _without_repeats(hashes: UInt64) -> UInt64:
    """Return `hashes` without those that equal their predecessor."""
    new = np.empty(len(hashes), bool)
    new[:1] = True
    np.not_equal(hashes[1:], hashes[:-1], out=new[1:])
    return hashes if new.all() else hashes[new]


def block_number(hash64: int, blocks: int) -> int:
    """Return which of a filter's `blocks` holds the bits of `hash64`."""
    return (hash64 >> 32) * blocks >> 32


def block_may_hold(block: bytes | memoryview, hash64: int) -> bool:
    """Return whether `block` (32 bytes, the one of `block_number`) may hold `hash64`; False is certain."""
    low = hash64 & 0xFFFFFFFF
    if (loops := compiled()) is not None and type(block) is bytes:
        return loops.block_may_hold(block, low)  # type: ignore[no-any-return]
    for word, salt in zip(_WORDS.unpack(block), SALTS, strict=True):
        if not word >> ((low * salt & 0xFFFFFFFF) >> 27) & 1:
            return False
    return True


def block_numbers(hashes: UInt64, blocks: int) -> npt.NDArray[np.int64]:
    """Return `block_number` (i64, n) of `hashes` (u64, n)."""
    return ((hashes >> np.uint64(32)) * np.uint64(blocks) >> np.uint64(32)).astype(np.int64)


def blocks_may_hold(words: npt.NDArray[np.uint32], hashes: UInt64) -> npt.NDArray[np.bool_]:
    """Return `block_may_hold` (bool, n) of `hashes` (u64, n), given the words (u32, n x 8) of each one's block."""
    masks = _masks(hashes).T
    held: npt.NDArray[np.bool_] = ((words & masks) == masks).all(axis=1)
    return held


def _masks(hashes: UInt64) -> npt.NDArray[np.uint32]:
    """Return the bit that each hash sets in each word (u32, 8 x n)."""
    masks: npt.NDArray[np.uint32] = hashes.astype(np.uint32) * _SALT_COLUMN
    masks >>= np.uint32(27)
    np.left_shift(np.uint32(1), masks, out=masks)
    return masks
