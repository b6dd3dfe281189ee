"""Filters equal Parquet's own byte for byte, and never exclude a key that is present."""

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.compacted_files import built_filter
from tiered_index.format.keys import bloom
from tiered_index.format.keys.bloom import (
    BITS_PER_KEY,
    FILTER_BLOCK_BYTES,
    FilterBuilder,
    block_may_hold,
    block_number,
    block_numbers,
    blocks_may_hold,
    filter_hash,
    filter_hashes,
)
from tiered_index.format.layout import NATIVE, ROCKETMQ, Layout
from tiered_index.format.schema import Column, Schema
from tiered_index.format.trailer import parse_trailer

PARQUET = json.loads((Path(__file__).parent / "data" / "bloom.json").read_text())
u64 = st.integers(0, 2**64 - 1)
hash_lists = st.lists(u64, max_size=60)


def seeded(seed, count):
    """Return the first `count` numbers of SplitMix64, as the author of the vectors made them."""
    state = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return state ^ state >> np.uint64(31)


def found_in(data, hashes):
    words = np.frombuffer(data, "<u4").astype(np.uint32).reshape(-1, 8)
    return blocks_may_hold(words[block_numbers(hashes, len(words))], hashes)


def scalar_found_in(data, hash64):
    at = FILTER_BLOCK_BYTES * block_number(hash64, len(data) // FILTER_BLOCK_BYTES)
    return block_may_hold(memoryview(data)[at : at + FILTER_BLOCK_BYTES], hash64)


@pytest.mark.parametrize("vector", PARQUET["whole"], ids=lambda vector: str(len(vector["hashes"])))
def test_whole_filters_are_parquets(vector):
    hashes = np.array([int(text, 16) for text in vector["hashes"]], np.uint64)
    data = built_filter(hashes)
    assert data.hex() == vector["bitset"]
    assert built_filter(np.repeat(hashes, 3)[::-1]) == data


def test_large_filters_are_parquets_and_find_the_same():
    for vector in PARQUET["large"]:
        hashes = seeded(vector["seed"], vector["count"])
        assert [f"{int(h):016x}" for h in hashes[[0, -1]]] == [vector["first"], vector["last"]]
        assert hashlib.sha256(built_filter(hashes)).hexdigest() == vector["sha256"]
    vector = PARQUET["found"]
    data = built_filter(seeded(vector["seed"], vector["count"]))
    probes = seeded(vector["probe_seed"], vector["probes"])
    assert np.flatnonzero(found_in(data, probes)).tolist() == vector["found"]
    assert [index for index, probe in enumerate(probes.tolist()) if scalar_found_in(data, probe)] == vector["found"]


@pytest.mark.usefixtures("way")
@given(hash_lists, st.lists(u64, max_size=20))
def test_nothing_is_denied_and_scalars_agree(held, others):
    data = built_filter(np.array(held, np.uint64))
    blocks = max(1, math.ceil(BITS_PER_KEY * len(set(held)) / 256))
    assert len(data) == FILTER_BLOCK_BYTES * blocks
    probes = np.array(held + others, np.uint64)
    assert block_numbers(probes, blocks).tolist() == [block_number(probe, blocks) for probe in held + others]
    hits = found_in(data, probes)
    assert hits[: len(held)].all()
    assert hits.tolist() == [scalar_found_in(data, probe) for probe in held + others]


@pytest.mark.usefixtures("way")
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 2**16), st.sampled_from([0, 8, 40]), st.integers(1, 9)), max_size=30
    ),
    st.integers(1, 4),
    st.integers(0, 40),
)
def test_order_and_repeats_make_no_difference(rows, pieces, capacity):
    """Hashes that share their first bits, in any order and pieces, give the filter of the distinct hashes.

    There may be more of them than the builder has space for.
    """
    hashes = np.array([first << 62 | low << shift for first, low, shift, _ in rows], np.uint64)
    repeated = np.repeat(hashes, [row[-1] for row in rows])
    expected = built_filter(np.array(sorted(set(hashes.tolist())), np.uint64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bloom, "_MASKED", 5)
        builder = FilterBuilder(np.empty(capacity, np.uint64))
        shuffled = np.random.default_rng(0).permutation(repeated)
        for part in np.array_split(shuffled, pieces):
            builder.add(part)
        assert builder.build() == expected


@given(
    st.lists(
        st.tuples(
            st.integers(-(2**31), 2**31 - 1).map(lambda h: h if h == -(2**31) else abs(h)), st.integers(0, 2**32 - 1)
        )
    )
)
def test_mix_of_columns_and_of_scalars(rows):
    hashes, fingerprints = np.array([h for h, _ in rows], ">i4"), np.array([f for _, f in rows], ">u4")
    assert filter_hashes(hashes, fingerprints).tolist() == [filter_hash(h, f) for h, f in rows]
    assert filter_hashes(hashes.astype("<i4"), None).tolist() == [filter_hash(h, 0) for h, _ in rows]
    assert len({filter_hash(h, f) for h, f in rows}) == len({(0 if h < 0 else h, f) for h, f in rows})


WEIGHED = Schema("WeightItem", (Column("weight", ">f8", False),))


@pytest.mark.parametrize(
    ("preset", "schema"),
    [(NATIVE, NATIVE.schema), (ROCKETMQ, ROCKETMQ.schema), (NATIVE, WEIGHED)],
    ids=["native", "rocketmq", "unkeyed"],
)
def test_compacted_files_hold_the_filter_of_their_items(make, preset, schema):
    layout = Layout(preset, schema, 50, 5_000)
    data, entries = make.file(layout, 4_000, distinct_hashes=900)
    tail = parse_trailer(data, "file", len(data)).tail
    fingerprints = entries["fingerprint"].tolist() if schema.keyed else [0] * len(entries)
    mixed = {filter_hash(h, f) for h, f in zip(entries["key_hash"].tolist(), fingerprints, strict=True)}
    held = data[tail.position : tail.directory_position]
    assert len(held) == FILTER_BLOCK_BYTES * math.ceil(BITS_PER_KEY * len(mixed) / 256)
    assert held == built_filter(np.array(sorted(mixed), np.uint64))
    # a reader needs only directory, metadata and tail
    assert parse_trailer(data[tail.directory_position :], "file", len(data)).tail == tail
