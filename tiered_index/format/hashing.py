"""Key hash and fingerprint of ``topic + "#" + key``, vectorised and equal to Java's. SPEC.md section 5.

Two polynomials over UTF-16 code units modulo 2**32: sum(unit[i] * m**(length-1-i)). With m = 31 it is
`java.lang.String.hashCode`; with the other multiplier, finished by MurmurHash3's 32-bit mix, it is the fingerprint.
Pure functions, safe under threads.

How Java's hash, a signed number, becomes the key's is a file's *hash rule*: ``abs``, its absolute value (RocketMQ's
files up to release 5.5.0, and ours), or ``mask``, its lower 31 bits (RocketMQ's from 5.5.1 on). They agree where Java's
hash is not negative, else they add up to 2**31. ``both``: a table merged out of files of both rules.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from tiered_index.errors import InvalidArgument
from tiered_index.kernels import compiled

if TYPE_CHECKING:
    import pyarrow as pa

# Code units summed at a time; the tables of powers fit the CPU cache
_BLOCK = 1 << 16


@cache
def _powers(multiplier: int) -> tuple[UInt32, UInt32]:
    """Return multiplier**j and multiplier**-j modulo 2**32 (u32, `_BLOCK` + 1 each) for j from 0 to `_BLOCK`."""
    tables = []
    for base in (multiplier, pow(multiplier, -1, 1 << 32)):
        # doubling: the second half is the first half times base**(half)
        table = np.ones(_BLOCK + 1, np.uint32)
        filled = 1
        while filled < len(table):
            step = min(filled, len(table) - filled)
            table[filled : filled + step] = table[:step] * np.uint32(pow(base, filled, 1 << 32))
            filled += step
        tables.append(table)
    return tables[0], tables[1]


def power_at(multiplier: int, exponents: Int64) -> UInt32:
    """Return multiplier**exponent modulo 2**32 (u32, n) for exponents (i64, n), none negative."""
    powers, _ = _powers(multiplier)
    if not len(exponents) or (longest := int(exponents.max())) <= _BLOCK:
        return powers[exponents]
    # m**e = m**(e mod block) * (m**block)**(e div block)
    blocks = np.array([pow(multiplier, _BLOCK * j, 1 << 32) for j in range(longest // _BLOCK + 1)], np.uint32)
    return powers[exponents % _BLOCK] * blocks[exponents // _BLOCK]


def polynomials(units: npt.NDArray[Any], offsets: Int64, multipliers: Sequence[int]) -> list[UInt32]:
    """Return the values (u32, n) of n strings for each multiplier.

    `units` are u8 (ASCII only) or u16 code units, `offsets` (n + 1, never falling) say where in them each string begins
    and ends. With c the running sum of unit[i] * m**-i over a block, a string at [s, e) has the value
    (c[e] - c[s]) * m**(e-1). Memory beyond the result: 8 bytes a unit of `_BLOCK`.
    """
    count = len(offsets) - 1
    results = [np.zeros(count, np.uint32) for _ in multipliers]
    wide = np.empty(_BLOCK, np.uint32)
    running = np.zeros(_BLOCK + 1, np.uint32)
    first = 0
    while first < count:
        base = int(offsets[first])
        last = min(int(np.searchsorted(offsets, base + _BLOCK, "right")) - 1, count)
        # one string longer than a block
        if last <= first:
            for out, multiplier in zip(results, multipliers, strict=True):
                out[first] = _polynomial(units[base : int(offsets[first + 1])].tolist(), multiplier)
            first += 1
            continue
        stop = int(offsets[last]) - base
        local = offsets[first : last + 1] - base
        ends = np.maximum(local[1:] - 1, 0)
        wide[:stop] = units[base : base + stop]
        sums = running[1 : stop + 1]
        for out, multiplier in zip(results, multipliers, strict=True):
            powers, inverse = _powers(multiplier)
            np.multiply(wide[:stop], inverse[:stop], out=sums)
            np.cumsum(sums, out=sums)
            at = running[local]
            out[first:last] = (at[1:] - at[:-1]) * powers[ends]
        first = last
    return results


_JAVA = 31
# Odd, and 1 modulo 4: all but one bit of the fingerprint are independent of the polynomial in 31
_FINGERPRINT = 0x9E3779B1
# Code units of one string hashed at a time, outside of batches
_SHORT = 256
# Topics of a batch whose prefixes are remembered one by one
_FEW_TOPICS = 64
# Rows of a batch hashed at a time: their temporaries fit the cache
_ROWS = 1 << 14

HashRule = Literal["abs", "mask", "both"]
HASH_RULES: tuple[HashRule, ...] = ("abs", "mask", "both")
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


# of both polynomials, the fingerprint's 64 bits higher: a sum of `_SHORT` products of one has at most 56 bits
_BOTH_POWERS = tuple(
    java | other << 64 for java, other in zip(_falling_powers(_JAVA), _falling_powers(_FINGERPRINT), strict=True)
)


def _both_polynomials(text: str) -> tuple[int, int]:
    """Return the two polynomials of one string, in one number as `_BOTH_POWERS`, and its length in units; of a short
    one in one pass.
    """
    units: Sequence[int] | memoryview
    units = text.encode() if text.isascii() else memoryview(text.encode("utf-16-le", "surrogatepass")).cast("H")
    length = len(units)
    if length > _SHORT:
        return _polynomial(units, _JAVA) | _polynomial(units, _FINGERPRINT) << 64, length
    return sum(map(operator.mul, units, _BOTH_POWERS[_SHORT - length :])), length


@lru_cache(maxsize=4_096)
def _of_prefix(topic: str, length: int) -> int:
    """Return what topic# adds to the two polynomials of a key of `length` units."""
    value, _ = _both_polynomials(f"{topic}#")
    java = (value & 0xFFFFFFFF) * pow(_JAVA, length, 1 << 32) & 0xFFFFFFFF
    return java | ((value >> 64) * pow(_FINGERPRINT, length, 1 << 32) & 0xFFFFFFFF) << 64


def _polynomial(units: Sequence[int] | memoryview, multiplier: int) -> int:
    powers = _falling_powers(multiplier)
    value = 0
    for start in range(0, len(units), _SHORT):
        part = units[start : start + _SHORT]
        value = value * pow(multiplier, len(part), 1 << 32) + sum(map(operator.mul, part, powers[_SHORT - len(part) :]))
        value &= 0xFFFFFFFF
    return value


def java_string_hash(text: str) -> int:
    """Return `String.hashCode()` of `text`, a signed 32-bit number."""
    value = _polynomial(memoryview(text.encode("utf-16-le", "surrogatepass")).cast("H"), _JAVA)
    return value - (1 << 32) if value >= 1 << 31 else value


def key_hash(topic: str, key: str, rule: Literal["abs", "mask"] = "abs") -> int:
    """Return the hash of a key, 0 to 2**31 - 1, from Java's string hash of topic#key by `rule`.

    ``abs`` is its absolute value (0 if there is none), ``mask`` its lower 31 bits. Raises `InvalidArgument` for another
    rule.
    """
    return lookup_numbers(topic, key)[known_rule(rule) == "mask"]


def known_rule(rule: str) -> str:
    """Return `rule`; raise `InvalidArgument` where no single hash is made by it."""
    if rule not in ("abs", "mask"):
        raise InvalidArgument(f"a key is hashed by rule 'abs' or 'mask', not by {rule!r}")
    return rule


def lookup_numbers(topic: str, key: str) -> tuple[int, int, int]:
    """Return a key's hash by rule ``abs`` and by rule ``mask``, and its fingerprint.

    Since hash(topic#key) = hash(topic#) * m**len(key) + hash(key), a topic is hashed once for all keys of a length.
    """
    if key.isascii() and (loops := compiled()) is not None:
        prefix = _of_prefix(topic, 0)
        value = loops.hash_key(key.encode(), prefix & 0xFFFFFFFF, prefix >> 64)
        java, second = value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF
    else:
        value, length = _both_polynomials(key)
        value += _of_prefix(topic, length)
        java, second = value & 0xFFFFFFFF, value >> 64 & 0xFFFFFFFF
        # as `_mix` does
        second ^= second >> 16
        second = (second * 0x85EBCA6B) & 0xFFFFFFFF
        second ^= second >> 13
        second = (second * 0xC2B2AE35) & 0xFFFFFFFF
        second ^= second >> 16
    mask = java & 0x7FFFFFFF
    # the absolute value of a negative number, modulo 2**31: Integer.MIN_VALUE, which has none, becomes 0
    return mask if java == mask else -java & 0x7FFFFFFF, mask, second


def absolute_hash(text: str) -> int:
    """Return the absolute value of the Java hash of `text`, 0 where that has none."""
    value = abs(java_string_hash(text))
    return 0 if value == 1 << 31 else value


def fingerprint(topic: str, key: str) -> int:
    """Return the 32-bit fingerprint of topic#key (SPEC.md section 5 has test vectors)."""
    return lookup_numbers(topic, key)[2]


def code_units(strings: Sequence[str] | pa.Array) -> CodeUnits:
    """Return a column of strings as UTF-16 code units; lone surrogates in Python strings are kept.

    An Arrow array must have no nulls. Cost: one pass over the bytes; for non-ASCII text temporaries of some 8 bytes a
    byte. Raises `TypeError` for a Python sequence that holds anything but text.
    """
    # Imported on use: a lookup of one key needs no Arrow
    import pyarrow as pa

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
    # The first byte of a character of 1 to 3 bytes counts one code unit, of 4 bytes two, a continuation byte none; so a
    # string's offset in units is the running sum at its offset in bytes. Memory: 9 bytes a byte.
    units_before = np.zeros(len(data) + 1, np.int64)
    np.cumsum((data & 0xC0 != 0x80).astype(np.int8) + (data >= 0xF0), out=units_before[1:])
    units = np.frombuffer(data.tobytes().decode("utf-8").encode("utf-16-le"), "<u2")
    return CodeUnits(units, units_before[offsets])


def _units_of_text(strings: Sequence[str]) -> CodeUnits:
    # not by Arrow, which refuses lone surrogates and imports pandas, where installed, to inspect a Python sequence
    text = "".join(strings)
    offsets = np.zeros(len(strings) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, strings), np.int64, len(strings)), out=offsets[1:])
    if text.isascii():
        return CodeUnits(np.frombuffer(text.encode(), np.uint8), offsets)
    units = np.frombuffer(text.encode("utf-16-le", "surrogatepass"), "<u2")
    if len(units) > len(text):
        # A character above U+FFFF represents two units, so a string's offset in units is the running sum at its offset
        # in characters.
        units_before = np.zeros(len(text) + 1, np.int64)
        np.cumsum(
            (np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4") > 0xFFFF).astype(np.int8) + 1,
            out=units_before[1:],
        )
        offsets = units_before[offsets]
    return CodeUnits(units, offsets)


def normal_hashes(hashes: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Return stored hashes (n, any byte order) as native i32 (n), `Integer.MIN_VALUE` replaced by 0.

    RocketMQ stores that one negative value where a key's hash has no absolute value; all others are *normal* already.
    """
    native: npt.NDArray[np.int32] = hashes.astype(np.int32)
    native[native == -(2**31)] = 0
    return native


def key_hashes(
    java: npt.NDArray[np.int32], rule: HashRule, out: npt.NDArray[np.int32] | None = None
) -> npt.NDArray[np.int32]:
    """Return `key_hash` (i32, n) by `rule`, ``abs`` or ``mask``, of Java's hashes (i32, n)."""
    if rule == "mask":
        return np.bitwise_and(java, np.int32(2**31 - 1), out=out)
    # abs() of the most negative number is itself; the format says 0
    hashes: npt.NDArray[np.int32] = np.abs(java, out=out)
    hashes[hashes == np.int32(-(2**31))] = 0
    return hashes


def folded_hashes(hashes: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return what a key's hash (i32, n; normal) by either rule becomes alike: the smaller of h and 2**31 - h."""
    return np.minimum(hashes, (1 << 31) - hashes.astype(np.int64)).astype(np.int32)


def joint_rule(rules: Iterable[HashRule]) -> HashRule:
    """Return the hash rule of a table made of files of `rules`: theirs where they agree."""
    met = set(rules)
    return "both" if len(met) > 1 else met.pop() if met else "abs"


def hash_batch(
    topics: Sequence[str],
    topic_index: npt.NDArray[np.integer[Any]],
    keys: CodeUnits,
    *,
    fingerprints: bool = True,
    rule: HashRule = "abs",
) -> tuple[npt.NDArray[np.int32], UInt32]:
    """Return `key_hash` (i32, n) by `rule` and `fingerprint` (u32, n) of n rows; arguments as `java_hash_batch`."""
    java, second = java_hash_batch(topics, topic_index, keys, fingerprints=fingerprints)
    return key_hashes(java, rule, java), second


def java_hash_batch(
    topics: Sequence[str], topic_index: npt.NDArray[np.integer[Any]], keys: CodeUnits, *, fingerprints: bool = True
) -> tuple[npt.NDArray[np.int32], UInt32]:
    """Return Java's hash (i32, n) of topic#key and `fingerprint` (u32, n; empty unless `fingerprints`) of n rows.

    `topics` are the distinct topics, `topic_index` (n) says which one each row has, `keys` are the n keys. Since
    hash(topic#key) = hash(topic#) * m**len(key) + hash(key), prefixes and keys are hashed separately and never joined.
    """
    multipliers = (_JAVA, _FINGERPRINT) if fingerprints else (_JAVA,)
    offsets = keys.offsets
    if len(topics) <= _FEW_TOPICS:
        known = [_of_prefix(topic, 0) for topic in topics]
        of_prefixes = [np.array([value >> at & 0xFFFFFFFF for value in known], np.uint32) for at in (0, 64)]
    else:
        prefixes = code_units([f"{topic}#" for topic in topics])
        of_prefixes = polynomials(prefixes.units, prefixes.offsets, multipliers)
    count = len(keys)
    hashes = np.empty(count, np.int32)
    second = np.empty(count if fingerprints else 0, np.uint32)
    # an index beyond the topics is an error, which NumPy raises; the core has another error for it
    within = count and topic_index.min() >= 0 and topic_index.max() < len(topics)
    if within and (loops := compiled()) is not None:
        rows = np.ascontiguousarray(topic_index, np.int64)
        of_topics = of_prefixes[0], of_prefixes[-1]
        loops.hash_rows(keys.units, offsets, rows, *of_topics, hashes.view(np.uint32), second)
        return hashes, second
    for start in range(0, count, _ROWS):
        block = slice(start, min(start + _ROWS, count))
        part = offsets[start : block.stop + 1]
        lengths, index = np.diff(part), topic_index[block]
        values = polynomials(keys.units, part, multipliers)
        for multiplier, prefix, value in zip(multipliers, of_prefixes, values, strict=False):
            value += prefix[index] * power_at(multiplier, lengths)
        hashes[block] = values[0].view(np.int32)
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
