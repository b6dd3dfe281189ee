"""Hashes equal Java's `String.hashCode`, computed unit by unit over UTF-16, for every Python string."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_index.errors import InvalidArgument
from tiered_index.format.keys.hashing import (
    code_units,
    fingerprint,
    hash_batch,
    java_string_hash,
    key_hash,
    lookup_numbers,
)

pytestmark = pytest.mark.usefixtures("way")
FINGERPRINT_MULTIPLIER = 0x9E3779B1
any_text = st.text(st.characters(), max_size=40)  # surrogates included
valid_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)


def units_of(text):
    """Return the UTF-16 code units by their definition, without a codec."""
    units = []
    for character in text:
        point = ord(character)
        units += [0xD800 + (point - 0x10000 >> 10), 0xDC00 + (point - 0x10000 & 0x3FF)] if point >= 0x10000 else [point]
    return units


def naive_polynomial(text, multiplier):
    value = 0
    for unit in units_of(text):
        value = (value * multiplier + unit) % 2**32
    return value


def naive_java(text):
    value = naive_polynomial(text, 31)
    return value - 2**32 if value >= 2**31 else value


def naive_fingerprint(topic, key):
    value = naive_polynomial(f"{topic}#{key}", FINGERPRINT_MULTIPLIER)
    for shift, multiplier in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        value = ((value ^ value >> shift) * multiplier) % 2**32
    return value


def naive_key_hash(topic, key):
    value = abs(naive_java(f"{topic}#{key}"))
    return 0 if value == 2**31 else value


def check(topics, index, keys, units):
    hashes, fingerprints = hash_batch(topics, np.array(index, np.int64), units)
    assert hashes.dtype == np.int32
    assert fingerprints.dtype == np.uint32
    assert hashes.tolist() == [naive_key_hash(topics[i], key) for i, key in zip(index, keys, strict=True)]
    assert fingerprints.tolist() == [naive_fingerprint(topics[i], key) for i, key in zip(index, keys, strict=True)]


@given(any_text, any_text)
def test_scalar_key_hash_and_fingerprint(topic, key):
    value, second = naive_java(f"{topic}#{key}"), naive_fingerprint(topic, key)
    assert java_string_hash(f"{topic}#{key}") == value
    assert (key_hash(topic, key), fingerprint(topic, key)) == (naive_key_hash(topic, key), second)
    assert lookup_numbers(topic, key) == (naive_key_hash(topic, key), value & 0x7FFFFFFF, second)


@given(st.lists(any_text, min_size=1, max_size=4), st.data())
def test_batches_of_any_strings(topics, data):
    rows = data.draw(st.lists(st.tuples(st.integers(0, len(topics) - 1), any_text), max_size=30))
    keys = [key for _, key in rows]
    check(topics, [i for i, _ in rows], keys, code_units(keys))
    assert code_units(keys).lengths.tolist() == [len(units_of(key)) for key in keys]


@given(
    st.lists(valid_text, max_size=30),
    st.integers(0, 30),
    st.integers(0, 30),
    st.sampled_from(["string", "large", "dictionary"]),
)
def test_sliced_arrow_arrays(keys, start, length, kind):
    array = pa.array(keys, pa.large_string() if kind == "large" else pa.string())
    if kind == "dictionary":
        array = array.dictionary_encode()
    part = keys[start : start + length]
    check(["t"], [0] * len(part), part, code_units(array.slice(start, length)))


@pytest.mark.parametrize(
    ("alphabet", "length"),
    [
        *[("a", length) for length in (65_535, 65_536, 65_537)],
        *[(alphabet, 65_537) for alphabet in ("a😀", "中", "\ud83d")],
    ],
)
def test_strings_longer_than_a_block(alphabet, length):
    long = (alphabet * length)[:length]
    keys = ["before", long, "", "after", long + "x"]
    check(["topic"], [0] * 5, keys, code_units(keys))


def test_min_value_becomes_zero():
    assert java_string_hash("TopicTest#boxvajrkywm") == -(2**31)
    assert key_hash("TopicTest", "boxvajrkywm") == 0
    hashes, _ = hash_batch(["TopicTest"], np.zeros(2, np.int64), code_units(["boxvajrkywm", "euuudrqcyle"]))
    assert hashes.tolist() == [0, 0]


@pytest.mark.parametrize(("topic", "key", "said"), [(1, "k", "topic must be text, not int"), ("t", 2, "key must be")])
def test_a_hash_of_other_than_text_is_refused(topic, key, said):
    with pytest.raises(InvalidArgument, match=said):
        key_hash(topic, key)
