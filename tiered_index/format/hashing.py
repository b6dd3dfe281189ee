"""Key hash and fingerprint of ``topic + "#" + key``, vectorised and equal to Java's. SPEC.md section 5.

Two polynomials over UTF-16 code units modulo 2**32: sum(unit[i] * m**(length-1-i)). With m = 31 it is
`java.lang.String.hashCode`; with the other multiplier, finished by MurmurHash3's 32-bit mix, it is the fingerprint. By
Horner's rule a key continues the sum of its topic#, which is known for all keys of a topic. Pure functions, safe under
threads.

How Java's hash, a signed number, becomes the key's is a file's *hash rule*: ``abs``, its absolute value (RocketMQ's
files up to release 5.5.0, and ours), or ``mask``, its lower 31 bits (RocketMQ's from 5.5.1 on). They agree where Java's
hash is not negative, else they add up to 2**31. ``both``: a table merged out of files of both rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from tiered_index.errors import InvalidArgument
from tiered_index.kernels import compiled

if TYPE_CHECKING:
    import pyarrow as pa

_JAVA = 31
# Odd, and 1 modulo 4: all but one bit of the fingerprint are independent of the polynomial in 31
_FINGERPRINT = 0x9E3779B1
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


def _polynomials(text: str, java: int = 0, second: int = 0) -> tuple[int, int]:
    """Return the two polynomials of a string whose beginning has the polynomials `java` and `second`."""
    units = text.encode() if text.isascii() else memoryview(text.encode("utf-16-le", "surrogatepass")).cast("H")
    for unit in units:
        java = java * _JAVA + unit & 0xFFFFFFFF
        second = second * _FINGERPRINT + unit & 0xFFFFFFFF
    return java, second


@lru_cache(maxsize=4_096)
def _of_prefix(topic: str) -> tuple[int, int]:
    """Return the two polynomials of topic#: each key of the topic continues them."""
    return _polynomials(f"{topic}#")


def java_string_hash(text: str) -> int:
    """Return `String.hashCode()` of `text`, a signed 32-bit number."""
    value, _ = _polynomials(text)
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
    """Return a key's hash by rule ``abs`` and by rule ``mask``, and its fingerprint."""
    java, second = _of_prefix(topic)
    if (loops := compiled()) is not None:
        # the core takes no subclass
        value = loops.hash_key(key if type(key) is str else str.__str__(key), java, second)
        java, second = value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF
    else:
        java, second = _polynomials(key, java, second)
        second = int(_mix(np.array([second], np.uint32))[0])
    mask = java & 0x7FFFFFFF
    # the absolute value of a negative number, modulo 2**31: Integer.MIN_VALUE, which has none, becomes 0
    return mask if java == mask else -java & 0x7FFFFFFF, mask, second


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

    `topics` are the distinct topics, `topic_index` (n) says which one each row has, `keys` are the n keys. Memory
    beyond the result, in NumPy: 40 bytes a row.
    """
    prefixes = np.array(list(map(_of_prefix, topics)), np.int64).reshape(-1, 2).astype(np.uint32)
    java, second = np.ascontiguousarray(prefixes.T)
    count, offsets = len(keys), keys.offsets
    # an index beyond the topics is an error, which NumPy raises; the core has another error for it
    within = count and topic_index.min() >= 0 and topic_index.max() < len(topics)
    if within and (loops := compiled()) is not None:
        hashes, fingerprint = np.empty(count, np.int32), np.empty(count if fingerprints else 0, np.uint32)
        rows = np.ascontiguousarray(topic_index, np.int64)
        loops.hash_rows(keys.units, offsets, rows, java, second, hashes.view(np.uint32), fingerprint)
        return hashes, fingerprint
    # one unit of all rows at a time: longest rows first, so that those that go on are the first `going`
    falling = np.argsort(-keys.lengths, kind="stable")
    begins, topic = offsets[falling], topic_index[falling]
    polynomials = [(_JAVA, java[topic])] + ([(_FINGERPRINT, second[topic])] if fingerprints else [])
    for at, going in enumerate(np.cumsum(np.bincount(keys.lengths)[:0:-1])[::-1].tolist()):
        units = keys.units[begins[:going] + at]
        for multiplier, values in polynomials:
            values[:going] = values[:going] * np.uint32(multiplier) + units
    found = [np.empty_like(values) for _, values in polynomials]
    for values, (_, in_turn) in zip(found, polynomials, strict=True):
        values[falling] = in_turn
    return found[0].view(np.int32), _mix(found[1]) if fingerprints else java[:0]


def _mix(values: UInt32) -> UInt32:
    """MurmurHash3's fmix32: every input bit changes every output bit with a chance of one half."""
    values = values ^ (values >> np.uint32(16))
    values *= np.uint32(0x85EBCA6B)
    values ^= values >> np.uint32(13)
    values *= np.uint32(0xC2B2AE35)
    values ^= values >> np.uint32(16)
    return values
