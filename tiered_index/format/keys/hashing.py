"""Key hash and fingerprint of ``topic + "#" + key``, vectorised and equal to Java's. SPEC.md section 5.

Both are polynomials over UTF-16 code units modulo 2**32: sum(unit[i] * m**(length-1-i)). With m = 31 it is
`java.lang.String.hashCode`. With another multiplier, and MurmurHash3's 32-bit mix at the end, it is the fingerprint. By
Horner's rule a key continues the sum of its topic#, which all keys of the topic share. Pure; any thread.

The *hash rule* of a file makes the key's hash of Java's hash, which is signed:

- ``abs``: its absolute value (our files, and those of RocketMQ up to release 5.5.0)
- ``mask``: its lower 31 bits (RocketMQ from 5.5.1 on)
- ``both``: for a table that was merged from files of both rules

The two hashes are equal if Java's hash is not negative. Otherwise their sum is 2**31.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from tiered_index.base.kernels import compiled
from tiered_index.errors import InvalidArgument

if TYPE_CHECKING:
    import pyarrow as pa

_JAVA = 31
# It is 1 modulo 4, so that all but one bit of the fingerprint are independent of the polynomial in 31
_FINGERPRINT = 0x9E3779B1
# the first id of topics whose source gives none
_ASSIGNED = 1 << 30
HashRule = Literal["abs", "mask", "both"]
HASH_RULES: tuple[HashRule, ...] = ("abs", "mask", "both")
UInt32 = npt.NDArray[np.uint32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CodeUnits:
    """A column of n strings: `units` (u8 if all are ASCII, else u16), and `offsets` (i64, n + 1) into it."""

    units: npt.NDArray[Any]
    offsets: Int64

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int64:
        """Length of each string in UTF-16 code units."""
        return np.diff(self.offsets)


def _polynomials(text: str, java: int = 0, second: int = 0) -> tuple[int, int]:
    """Return the two polynomials of a string that continues one with the polynomials `java` and `second`."""
    units = text.encode() if text.isascii() else memoryview(text.encode("utf-16-le", "surrogatepass")).cast("H")
    for unit in units:
        java = java * _JAVA + unit & 0xFFFFFFFF
        second = second * _FINGERPRINT + unit & 0xFFFFFFFF
    return java, second


@lru_cache(maxsize=4_096)
def _of_prefix(topic: str) -> tuple[int, int]:
    """Return the two polynomials of topic#, which each key of the topic continues."""
    # not formatted: the format of a member of an enumeration may be another text
    return _polynomials(str.__str__(topic) + "#")


def java_string_hash(text: str) -> int:
    """Return `String.hashCode()` of `text`, a signed 32-bit number."""
    value, _ = _polynomials(text)
    return value - (1 << 32) if value >= 1 << 31 else value


def key_hash(topic: str, key: str, rule: Literal["abs", "mask"] = "abs") -> int:
    """Return the hash of topic#key by RocketMQ's `rule`: a number from 0 to 2**31 - 1.

    ``abs`` is the absolute value of Java's string hash (0 for -2**31), ``mask`` its lower 31 bits. Raises
    `InvalidArgument` for another rule, and for a topic or key that is not text.
    """
    for name, value in (("topic", topic), ("key", key)):
        if not isinstance(value, str):
            raise InvalidArgument(f"{name} must be text, not {type(value).__name__}")
    return lookup_numbers(topic, key)[known_rule(rule) == "mask"]


def known_rule(rule: str) -> str:
    """Return `rule` if it is ``abs`` or ``mask``. Raises `InvalidArgument` for any other."""
    if rule not in ("abs", "mask"):
        raise InvalidArgument(f"the hash rule of a key must be 'abs' or 'mask', not {rule!r}")
    return rule


def lookup_numbers(topic: str, key: str) -> tuple[int, int, int]:
    """Return a key's hash by rule ``abs`` and by rule ``mask``, and its fingerprint."""
    java, second = _of_prefix(topic)
    if (loops := compiled()) is not None:
        # the core accepts no subclass of str
        value = loops.hash_key(key if type(key) is str else str.__str__(key), java, second)
        java, second = value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF
    else:
        java, second = _polynomials(key, java, second)
        second = int(_mix(np.array([second], np.uint32))[0])
    mask = java & 0x7FFFFFFF
    # the absolute value modulo 2**31: Integer.MIN_VALUE becomes 0
    return mask if java == mask else -java & 0x7FFFFFFF, mask, second


def fingerprint(topic: str, key: str) -> int:
    """Return the 32-bit fingerprint of topic#key (SPEC.md section 5 has test vectors)."""
    return lookup_numbers(topic, key)[2]


def code_units(strings: Sequence[str] | pa.Array) -> CodeUnits:
    """Return a column of strings as UTF-16 code units; lone surrogates in Python strings are kept.

    An Arrow array must have no nulls. Memory for non-ASCII text: about 8 more bytes per byte. Raises `TypeError` for a
    Python sequence with anything other than text, and `InvalidArgument` for Arrow text that is not UTF-8.
    """
    # an Arrow array is no `Sequence`
    if isinstance(strings, Sequence):
        return _units_of_text(strings)
    # imported on use: lookups need no Arrow, which takes 25 MiB
    import pyarrow as pa

    if pa.types.is_dictionary(strings.type) or not pa.types.is_large_string(strings.type):
        strings = strings.cast(pa.large_string())
    if not len(strings):
        return CodeUnits(np.zeros(0, np.uint8), np.zeros(1, np.int64))
    _, offset_buffer, data_buffer = strings.buffers()
    raw = np.frombuffer(offset_buffer, np.int64)[strings.offset : strings.offset + len(strings) + 1]
    start, stop = int(raw[0]), int(raw[-1])
    data = np.frombuffer(data_buffer, np.uint8)[start:stop] if stop > start else np.zeros(0, np.uint8)
    offsets = raw - start if start else raw
    if not len(data) or int(data.max()) < 0x80:
        return CodeUnits(data, offsets)
    try:
        strings.validate(full=True)  # Arrow and Spark accept any bytes as text
    except pa.ArrowInvalid as error:
        raise InvalidArgument("a key has bytes that are not UTF-8") from error
    # The first byte of a character counts two code units if the character has 4 bytes, else one; other bytes count 0.
    # A string's offset in units is the running sum at its offset in bytes.
    units_before = np.zeros(len(data) + 1, np.int64)
    np.cumsum((data & 0xC0 != 0x80).astype(np.int8) + (data >= 0xF0), out=units_before[1:])
    units = np.frombuffer(data.tobytes().decode("utf-8").encode("utf-16-le"), "<u2")
    return CodeUnits(units, units_before[offsets])


def _units_of_text(strings: Sequence[str]) -> CodeUnits:
    # without Arrow, which refuses lone surrogates, and which imports pandas to inspect a Python sequence
    text = "".join(strings)
    offsets = np.zeros(len(strings) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, strings), np.int64, len(strings)), out=offsets[1:])
    if text.isascii():
        return CodeUnits(np.frombuffer(text.encode(), np.uint8), offsets)
    encoded = [string.encode("utf-16-le", "surrogatepass") for string in strings]
    np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)) // 2, out=offsets[1:])
    return CodeUnits(np.frombuffer(b"".join(encoded), "<u2"), offsets)


def is_one_value(column: npt.NDArray[Any]) -> bool:
    """Return whether a column (n) repeats one value, as of `np.broadcast_to`. It takes the memory of one."""
    return column.strides == (0,) and len(column) > 0


def normal_hashes(hashes: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Return stored hashes (n, any byte order) as normal ones (native i32, n): `Integer.MIN_VALUE` becomes 0.

    RocketMQ stores that negative value for a key whose hash has no absolute value. All other hashes are *normal*.
    """
    native: npt.NDArray[np.int32] = hashes.astype(np.int32)
    native[native == -(2**31)] = 0
    return native


def key_hashes(
    java: npt.NDArray[np.int32], rule: HashRule, out: npt.NDArray[np.int32] | None = None
) -> npt.NDArray[np.int32]:
    """Return the `key_hash` (i32, n) by `rule`, ``abs`` or ``mask``, for Java's hashes (i32, n)."""
    if rule == "mask":
        return np.bitwise_and(java, np.int32(2**31 - 1), out=out)
    # abs() of the most negative number is that number; the format requires 0
    hashes: npt.NDArray[np.int32] = np.abs(java, out=out)
    hashes[hashes == np.int32(-(2**31))] = 0
    return hashes


def folded_hashes(hashes: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return a number (i32, n) that is the same for a key's hash (normal, n) by either rule: min(h, 2**31 - h)."""
    return np.minimum(hashes, (1 << 31) - hashes.astype(np.int64)).astype(np.int32)


def joint_rule(rules: Iterable[HashRule]) -> HashRule:
    """Return the hash rule of a table that is merged from files of `rules`: their common rule, or ``both``."""
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
    """Return `key_hash` (i32, n) by `rule` and `fingerprint` (u32, n) of n rows. Arguments: see `java_hash_batch`."""
    java, second = java_hash_batch(topics, topic_index, keys, fingerprints=fingerprints)
    return key_hashes(java, rule, java), second


def java_hash_batch(
    topics: Sequence[str], topic_index: npt.NDArray[np.integer[Any]], keys: CodeUnits, *, fingerprints: bool = True
) -> tuple[npt.NDArray[np.int32], UInt32]:
    """Return Java's hash (i32, n) of topic#key and `fingerprint` (u32, n; empty unless `fingerprints`) of n rows.

    `topics` are the distinct topics, `topic_index` (n) is the number of each row's topic, `keys` are the n keys. Memory
    in addition to the result: none in the core, 40 bytes per row in NumPy.
    """
    prefixes = np.array(list(map(_of_prefix, topics)), np.int64).reshape(-1, 2).astype(np.uint32)
    java, second = np.ascontiguousarray(prefixes.T)
    count, offsets = len(keys), keys.offsets
    # for an index beyond the topics the code below raises NumPy's error; the core would raise another one
    distinct = topic_index[:1] if is_one_value(topic_index) else topic_index
    within = count and distinct.min() >= 0 and distinct.max() < len(topics)
    if within and (loops := compiled()) is not None:
        hashes, fingerprint = np.empty(count, np.int32), np.empty(count if fingerprints else 0, np.uint32)
        numbers = topic_index.astype(np.int64, copy=False)
        loops.hash_rows(keys.units, offsets, numbers, java, second, hashes.view(np.uint32), fingerprint)
        return hashes, fingerprint
    # one unit of all rows at a time; the longest rows come first, so the first `going` rows have a unit
    falling = np.argsort(-keys.lengths, kind="stable")
    begins, topic = offsets[falling], topic_index[falling]
    polynomials = [(_JAVA, java[topic])] + ([(_FINGERPRINT, second[topic])] if fingerprints else [])
    for at, going in enumerate(np.cumsum(np.bincount(keys.lengths)[:0:-1])[::-1].tolist()):
        units = keys.units[begins[:going] + at]
        for multiplier, values in polynomials:
            values[:going] = values[:going] * np.uint32(multiplier) + units
    results = [np.empty_like(values) for _, values in polynomials]
    for values, (_, in_turn) in zip(results, polynomials, strict=True):
        values[falling] = in_turn
    return results[0].view(np.int32), _mix(results[1]) if fingerprints else java[:0]


def _mix(values: UInt32) -> UInt32:
    """Return MurmurHash3's fmix32 (n) of values (n)."""
    values = values ^ (values >> np.uint32(16))
    values *= np.uint32(0x85EBCA6B)
    values ^= values >> np.uint32(13)
    values *= np.uint32(0xC2B2AE35)
    values ^= values >> np.uint32(16)
    return values


def assigned_topic_id(topic: str) -> int:
    """Return the id of a topic whose source gives none: 2**30 plus 30 bits of the CRC32 of its name.

    Lookups use the names in each file's own topic table, never an id across files.
    """
    return _ASSIGNED | (zlib.crc32(topic.encode("utf-8", "surrogatepass")) & (_ASSIGNED - 1))


def next_topic_id(topic_id: int) -> int:
    """Return the assigned id after another, for a topic whose own id has another name."""
    return _ASSIGNED | ((topic_id + 1) & (_ASSIGNED - 1))
