"""Hashes of ``topic + "#" + key``, vectorised over batches of strings and equal to Java's. SPEC.md section 5.

Two polynomials over UTF-16 code units, modulo 2**32 (polynomials.py): multiplier 31 is `java.lang.String.hashCode`, the other one,
finished by MurmurHash3's 32-bit mix, is the fingerprint. Pure functions, safe under threads.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.format.polynomials import polynomials, power_at

__all__ = ["CodeUnits", "code_units", "fingerprint", "hash_batch", "java_string_hash", "key_hash", "normal_hashes"]

_JAVA = 31
_FINGERPRINT = 0x9E3779B1
# odd, and 1 modulo 4: all but one bit of it are independent of a polynomial in 31
_SHORT = 256
# code units of one string hashed at a time, outside of batches
_ROWS = 1 << 14
# rows of a batch hashed at a time: what they need stays within the cache

UInt32 = npt.NDArray[np.uint32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CodeUnits:
    """A column of n strings: `units` (u8 where all are ASCII, else u16) and `offsets` (i64, n + 1) into it."""

    units: npt.NDArray[Any]
    offsets: Int64

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int64:
        """Length of each string in UTF-16 code units."""
        return np.diff(self.offsets)


@cache
def _falling_powers(multiplier: int) -> tuple[int, ...]:
    """Return multiplier**j modulo 2**32 for j from 255 down to 0."""
    return tuple(pow(multiplier, j, 1 << 32) for j in range(_SHORT - 1, -1, -1))


def _hash_one(text: str, multiplier: int) -> int:
    """Return the polynomial of one string modulo 2**32."""
    units = memoryview(text.encode("utf-16-le", "surrogatepass")).cast("H")
    powers = _falling_powers(multiplier)
    value = 0
    for start in range(0, len(units), _SHORT):
        part = units[start : start + _SHORT]
        value = value * pow(multiplier, len(part), 1 << 32) + sum(map(operator.mul, part, powers[_SHORT - len(part) :]))
        value &= 0xFFFFFFFF
    return value


def java_string_hash(text: str) -> int:
    """Return `String.hashCode()` of `text`, a signed 32-bit number."""
    value = _hash_one(text, _JAVA)
    return value - (1 << 32) if value >= 1 << 31 else value


def key_hash(topic: str, key: str) -> int:
    """Return the hash under which a key is indexed: the absolute Java hash of topic#key; `Integer.MIN_VALUE` becomes 0."""
    value = abs(java_string_hash(f"{topic}#{key}"))
    return 0 if value == 1 << 31 else value


def fingerprint(topic: str, key: str) -> int:
    """Return the 32-bit fingerprint of topic#key (SPEC.md section 5 has test vectors)."""
    value = _hash_one(f"{topic}#{key}", _FINGERPRINT)
    value ^= value >> 16
    value = (value * 0x85EBCA6B) & 0xFFFFFFFF
    value ^= value >> 13
    value = (value * 0xC2B2AE35) & 0xFFFFFFFF
    return value ^ (value >> 16)


def code_units(strings: Sequence[str] | pa.Array) -> CodeUnits:
    """Return a column of strings as UTF-16 code units; lone surrogates in Python strings are kept as they are.

    An Arrow array must have no nulls. Cost: one pass over the bytes; for non-ASCII text a few temporaries of 8 bytes a byte.
    Raises `TypeError` where something else than text is among Python strings.
    """
    if not isinstance(strings, pa.Array):
        return _units_of_text(strings)
    if pa.types.is_dictionary(strings.type) or not pa.types.is_large_string(strings.type):
        strings = strings.cast(pa.large_string())
    if not len(strings):
        return CodeUnits(np.zeros(0, np.uint8), np.zeros(1, np.int64))
    _, offset_buffer, data_buffer = strings.buffers()
    raw = np.frombuffer(offset_buffer, np.int64)[strings.offset : strings.offset + len(strings) + 1]
    start, stop = int(raw[0]), int(raw[-1])
    data = np.frombuffer(data_buffer, np.uint8)[start:stop] if stop > start else np.zeros(0, np.uint8)
    offsets = raw - start
    if not len(data) or int(data.max()) < 0x80:
        return CodeUnits(data, offsets)
    # A byte that starts a character of 1 to 3 bytes stands for one code unit, of 4 bytes for two, a continuation for none;
    # so a string's offset in units is the running sum at its offset in bytes.
    units_before = np.zeros(len(data) + 1, np.int64)
    np.cumsum((data & 0xC0 != 0x80).astype(np.int8) + (data >= 0xF0), out=units_before[1:])
    units = np.frombuffer(data.tobytes().decode("utf-8").encode("utf-16-le"), "<u2")
    return CodeUnits(units, units_before[offsets])


def _units_of_text(strings: Sequence[str]) -> CodeUnits:
    # without Arrow, which refuses lone surrogates and, to look at any Python sequence, imports pandas where that is installed
    text = "".join(strings)
    offsets = np.zeros(len(strings) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, strings), np.int64, len(strings)), out=offsets[1:])
    if text.isascii():
        return CodeUnits(np.frombuffer(text.encode(), np.uint8), offsets)
    units = np.frombuffer(text.encode("utf-16-le", "surrogatepass"), "<u2")
    if len(units) > len(text):
        # A character above U+FFFF stands for two units, so a string's offset in units is the running sum at its offset in characters.
        units_before = np.zeros(len(text) + 1, np.int64)
        np.cumsum((np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4") > 0xFFFF).astype(np.int8) + 1, out=units_before[1:])
        offsets = units_before[offsets]
    return CodeUnits(units, offsets)


def normal_hashes(hashes: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Return stored hashes with the one negative value that RocketMQ leaves (`Integer.MIN_VALUE`) turned into 0."""
    native: npt.NDArray[np.int32] = hashes.astype(np.int32)
    native[native == -(2**31)] = 0
    return native


def hash_batch(
    topics: Sequence[str], topic_index: npt.NDArray[np.integer[Any]], keys: CodeUnits, *, fingerprints: bool = True
) -> tuple[npt.NDArray[np.int32], UInt32]:
    """Return `key_hash` (i32) and `fingerprint` (u32) of n rows; the latter is empty where `fingerprints` is false.

    `topics` are the distinct topics, `topic_index` (n) says which one each row has, `keys` are the n keys. Since
    hash(topic#key) = hash(topic#) * m**len(key) + hash(key), prefix and key are hashed apart and never joined.
    """
    multipliers = (_JAVA, _FINGERPRINT) if fingerprints else (_JAVA,)
    offsets = keys.offsets
    prefixes = code_units([f"{topic}#" for topic in topics])
    of_prefixes = polynomials(prefixes.units, prefixes.offsets, multipliers)
    count = len(keys)
    hashes = np.empty(count, np.int32)
    second = np.empty(count if fingerprints else 0, np.uint32)
    for start in range(0, count, _ROWS):
        block = slice(start, min(start + _ROWS, count))
        part = offsets[start : block.stop + 1]
        lengths, index = np.diff(part), topic_index[block]
        values = polynomials(keys.units, part, multipliers)
        for multiplier, prefix, value in zip(multipliers, of_prefixes, values, strict=True):
            value += prefix[index] * power_at(multiplier, lengths)
        # abs() of the most negative number is itself; as the format demands it becomes 0
        java = np.abs(values[0].view(np.int32), out=hashes[block])
        java[java == np.int32(-(2**31))] = 0
        if fingerprints:
            second[block] = _mix(values[1])
    return hashes, second


def _mix(values: UInt32) -> UInt32:
    """MurmurHash3's fmix32: every input bit changes every output bit with a chance of one half."""
    values = values ^ (values >> np.uint32(16))
    values *= np.uint32(0x85EBCA6B)
    values ^= values >> np.uint32(13)
    values *= np.uint32(0xC2B2AE35)
    values ^= values >> np.uint32(16)
    return values
