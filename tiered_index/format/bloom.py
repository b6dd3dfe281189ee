"""The filter of compacted files: a split-block Bloom filter, Parquet's, over a mix of key hash and fingerprint. SPEC.md section 6.

A filter is whole blocks of 256 bits: 8 little-endian words of 32 bits. A key sets, and a lookup tests, one bit in each word of one block,
so that a lookup needs 32 bytes of a filter. It has no false negatives. Pure functions, safe under threads.
Source: Apache Parquet's specification of Bloom filters (`BloomFilter.md`).
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.format.hashing import normal_hashes

__all__ = [
    "BITS_PER_KEY",
    "FILTER_BLOCK_BYTES",
    "block_may_hold",
    "block_number",
    "block_numbers",
    "blocks_may_hold",
    "build_filter",
    "filter_hash",
    "filter_hashes",
]

FILTER_BLOCK_BYTES = 32
BITS_PER_KEY = 10.5
"""Bits a distinct key: some 1.1% of absent keys are taken for present."""

_SALTS = (0x47B6137B, 0x44974D91, 0x8824AD5B, 0xA2B7289D, 0x705495C7, 0x2DF1424B, 0x9EFC4947, 0x5C6BFB31)
_SALT_COLUMN = np.array(_SALTS, np.uint32)[:, None]
_WORDS = struct.Struct("<8I")
_MIX = ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53))
# MurmurHash3's fmix64: shift, multiply, twice, and a last shift
_CHUNK = 1 << 15
# hashes at a time: what they need stays within the cache, and other threads get a turn between

Array = npt.NDArray[Any]
UInt64 = npt.NDArray[np.uint64]


def filter_hash(key_hash: int, fingerprint: int) -> int:
    """Return the 64-bit number (u64) that a filter holds for a key; `fingerprint` is 0 where the schema has none."""
    value = (0 if key_hash == -(2**31) else key_hash) << 32 | fingerprint
    for shift, factor in _MIX:
        value ^= value >> shift
        value = value * factor & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 33


def filter_hashes(key_hash: Array, fingerprint: Array | None) -> UInt64:
    """Return `filter_hash` (u64, n) of stored columns (n) of any byte order; `fingerprint` None: the schema has none."""
    values = normal_hashes(key_hash).astype(np.uint64)
    values <<= np.uint64(32)
    if fingerprint is not None:
        values |= fingerprint.astype(np.uint64)
    for shift, factor in _MIX:
        values ^= values >> np.uint64(shift)
        values *= np.uint64(factor)
    values ^= values >> np.uint64(33)
    return values


def build_filter(hashes: UInt64) -> bytes:
    """Return the filter that holds `hashes` (u64, n; repeats count once): max(1, ceil(10.5 * distinct / 256)) blocks.

    In order of hashes blocks come in order too: a chunk's masks are joined block by block and no block is touched by more than two chunks.
    Memory: 8 bytes a hash for a sorted copy, 72 a hash of one chunk, and twice the filter.
    """
    ordered = np.sort(hashes)
    distinct = min(len(ordered), 1)
    for start in range(0, len(ordered) - 1, _CHUNK):
        part = ordered[start : start + _CHUNK + 1]
        distinct += int(np.count_nonzero(part[1:] != part[:-1]))
    blocks = max(1, math.ceil(BITS_PER_KEY * distinct / (8 * FILTER_BLOCK_BYTES)))
    words = np.zeros((8, blocks), np.uint32)
    for start in range(0, len(ordered), _CHUNK):
        part = ordered[start : start + _CHUNK]
        numbers = block_numbers(part, blocks)
        firsts = np.flatnonzero(np.diff(numbers, prepend=-1))
        words[:, numbers[firsts]] |= np.bitwise_or.reduceat(_masks(part), firsts, axis=1)
    return words.T.astype("<u4", order="C").tobytes()


def block_number(hash64: int, blocks: int) -> int:
    """Return which of a filter's `blocks` holds the bits of `hash64`."""
    return (hash64 >> 32) * blocks >> 32


def block_may_hold(block: bytes | memoryview, hash64: int) -> bool:
    """Return whether `block` (32 bytes, the one of `block_number`) may hold `hash64`; False is certain."""
    low = hash64 & 0xFFFFFFFF
    return all(word >> ((low * salt & 0xFFFFFFFF) >> 27) & 1 for word, salt in zip(_WORDS.unpack(block), _SALTS, strict=True))


def block_numbers(hashes: UInt64, blocks: int) -> npt.NDArray[np.int64]:
    """Return `block_number` (i64, n) of `hashes` (u64, n)."""
    return ((hashes >> np.uint64(32)) * np.uint64(blocks) >> np.uint64(32)).astype(np.int64)


def blocks_may_hold(words: npt.NDArray[np.uint32], hashes: UInt64) -> npt.NDArray[np.bool_]:
    """Return `block_may_hold` (bool, n) of `hashes` (u64, n), given the words (u32, n x 8) of each one's block."""
    masks = _masks(hashes).T
    held: npt.NDArray[np.bool_] = ((words & masks) == masks).all(axis=1)
    return held


def _masks(hashes: UInt64) -> npt.NDArray[np.uint32]:
    """Return the bit that each hash has in each word (u32, 8 x n)."""
    masks: npt.NDArray[np.uint32] = hashes.astype(np.uint32) * _SALT_COLUMN
    masks >>= np.uint32(27)
    np.left_shift(np.uint32(1), masks, out=masks)
    return masks
