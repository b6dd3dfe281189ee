"""Compiled loops give NumPy's bytes; they are loaded once they pay, and where that fails NumPy goes on."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import zlib
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_index import kernels
from tiered_index.format.bloom import FilterBuilder, block_may_hold, filter_hash
from tiered_index.format.compacted import Compaction
from tiered_index.format.hashing import code_units, hash_batch, lookup_numbers
from tiered_index.format.layout import NATIVE, ROCKETMQ, Layout
from tiered_index.format.packed import Packing
from tiered_index.format.packed_find import asked_ranks, find_asked
from tiered_index.format.schema import KEYED_SCHEMA
from tiered_index.format.time_line import TimeLine
from tiered_index.format.unsealed import UnsealedTable
from tiered_index.service.answers.batch import LookupBatch
from tiered_index.types import Lookup


@pytest.fixture(scope="module")
def loops():
    """The loops, which need numba."""
    pytest.importorskip("numba", reason="the extra 'fast' is not installed")
    found = kernels.load()
    assert found is not None
    return found


@contextlib.contextmanager
def using(loops):
    """Have batches of any size use `loops`, or NumPy for None."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_FEW", 0)
        patch.setattr(kernels._State, "loops", loops)
        yield


def both(loops, make):
    """Compare what `make` returns with NumPy and with the loops."""
    with using(None):
        expected = make()
    with using(loops):
        found = make()
    assert found == expected


numbers = st.integers(0, 2**32 - 1)


def listed(arrays):
    return [array.tolist() if isinstance(array, np.ndarray) else array for array in arrays]


@settings(max_examples=30)
@given(
    keys=st.lists(st.text(st.characters(exclude_categories=()), min_size=1, max_size=40), min_size=1, max_size=20),
    topics=st.lists(st.text(min_size=1), min_size=1, max_size=3, unique=True),
    fingerprints=st.booleans(),
)
def test_hashes(loops, keys, topics, fingerprints):
    index = np.arange(len(keys), dtype=np.int8) % len(topics)
    both(loops, lambda: listed(hash_batch(topics, index, code_units(keys), fingerprints=fingerprints)))


@settings(max_examples=100)
@given(
    topic=st.text(st.characters(exclude_categories=()), max_size=9),
    key=st.one_of(st.text(st.characters(exclude_categories=()), max_size=40), st.text(st.characters(codec="ascii"))),
    block=st.lists(st.integers(1, 2**8 - 1), min_size=32, max_size=32),
)
def test_one_key(loops, topic, key, block):
    def make():
        key_hash, masked, fingerprint = lookup_numbers(topic, key)
        mixed = filter_hash.__wrapped__(key_hash, fingerprint)
        held = [block_may_hold(bytes(b | fill for b in block), mixed) for fill in (0, 0xEE, 0xFE, 0xFF)]
        return key_hash, masked, fingerprint, mixed, held, type(mixed), {type(one) for one in held}

    both(loops, make)


@settings(max_examples=30)
@given(
    seed=numbers,
    slots=st.integers(1, 9),
    hashes=st.sampled_from([2, 50, 2**31]),
    counts=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    family=st.sampled_from([NATIVE, ROCKETMQ]),
)
def test_chains_and_what_they_are_compacted_to(loops, seed, slots, hashes, counts, family):
    layout = Layout(family, family.schema, slots, 300)

    def make():
        random, table, entries, heads = np.random.default_rng(seed), UnsealedTable(layout, 0), [], []
        for count in counts:
            columns = {
                name: random.integers(0, 3, count) for name in ("topic_id", "queue_id", "offset", "size", "fingerprint")
            }
            seconds = np.sort(random.integers(0, 30, count)) if seed % 2 else random.integers(0, 30, count)
            key_hash = random.integers(0, hashes, count).astype(np.int32)
            batch = table.prepare(key_hash, seconds * 1000, columns)
            table.commit(batch)
            entries.append(batch.entries)
            heads.append(table.heads.tobytes())
        stored = np.concatenate([part.view(np.void) for part in entries]).view(layout.schema.entry)
        # as RocketMQ stores a hash without an absolute value
        stored["key_hash"][stored["key_hash"] == 0] = -(2**31)
        compaction = Compaction(stored, layout, 0, 30_000)
        about = {"source_positions": {}, "lane": "main", "offset_space": "", "writer": "", "topics": ()}
        return b"".join([*heads, stored.tobytes(), *compaction.pieces(file_id="000000000000000-0123456789ab", **about)])

    both(loops, make)


@settings(max_examples=40)
@given(seed=numbers, count=st.sampled_from([0, 1, 50, 3_000, 20_000]), different=st.sampled_from([1, 40, 9_000, 2**63]))
def test_filters(loops, seed, count, different):
    hashes = np.random.default_rng(seed).integers(0, different, count, np.uint64)
    hashes *= np.uint64(0x9E3779B97F4A7C15 if seed % 3 else 1)

    def make():
        builder = FilterBuilder(max(1, count // 2))
        for part in np.array_split(hashes, 3):
            builder.add(part)
        return builder.build()

    both(loops, make)


@settings(max_examples=40)
@given(seed=numbers, keys=st.integers(1, 300), kinds=st.sampled_from([1, 30, 2**31]))
def test_matches(loops, seed, keys, kinds):
    random = np.random.default_rng(seed)
    wanted = random.integers(0, kinds, keys).astype(np.int32)
    stored = np.concatenate((random.integers(0, kinds, 200), random.choice(wanted, 20), [-5, -(2**31), 0]))

    def make():
        batch = LookupBatch([Lookup(topic="t", key="k")] * keys)
        batch.key_hash = wanted
        return [listed(pair) for pair in batch.pairs(stored.astype(">i4"))]

    both(loops, make)


@settings(max_examples=30)
@given(
    seed=numbers,
    counts=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    most=st.sampled_from([2, 2**20, 2**63 - 1]),
    ordered=st.booleans(),
)
def test_packing(loops, seed, counts, most, ordered):
    random, count = np.random.default_rng(seed), sum(counts)
    items = np.empty(count, KEYED_SCHEMA.item)
    for name in items.dtype.names:
        dtype = items.dtype[name]
        low, high = (-most, most) if name == "offset" else (0, min(most, np.iinfo(dtype).max))
        items[name] = random.integers(low, high, count)
    if ordered:
        items.sort(order="key_hash")
    packing = Packing(KEYED_SCHEMA, 1 if ordered else 7, TimeLine.through(items))

    def make():
        packed = packing.pack_runs(items, counts)
        unpacked = packing.unpack_runs(zip(packed, counts, strict=True), "file")
        assert unpacked.tobytes() == items.tobytes()
        # more than are read one by one
        one = packing.unpack(packed[0], counts[0], "file")
        assert one.tobytes() == items[: counts[0]].tobytes()
        asked = asked_ranks(packing, items["key_hash"][::3].astype(np.int32))
        found, of_runs = find_asked(packing, packed, np.array(counts), asked, "file")
        return b"".join([*packed, found.tobytes(), of_runs.tobytes()])

    both(loops, make)


@given(data=st.binary(max_size=300), begin=numbers)
def test_crc32(data, begin):
    assert kernels.crc32(data) == zlib.crc32(data)
    assert kernels.crc32(data, begin) == zlib.crc32(data, begin)


@pytest.fixture
def fresh(monkeypatch):
    """A process that has not loaded anything yet."""
    for name, value in (("rows", 0), ("begun", False), ("loops", None)):
        monkeypatch.setattr(kernels._State, name, value)


def test_they_are_loaded_once_they_pay(fresh):
    pytest.importorskip("numba")
    assert kernels.compiled(kernels._ENOUGH - 1) is None
    assert not [thread for thread in threading.enumerate() if thread.name == "tiered-index-kernels"]
    # small batches neither count nor use them
    for _ in range(3):
        assert kernels.compiled(kernels._FEW - 1) is None
    assert not kernels._State.begun
    kernels.compiled(kernels._FEW)
    wait_for_loops()
    assert kernels.compiled(kernels._FEW) is not None
    assert kernels.compiled(kernels._FEW - 1) is None


def test_searches_of_one_key_have_them_loaded_too(fresh):
    pytest.importorskip("numba")
    items = 512
    assert not any(kernels.compiled_for_one(items) for _ in range(2 * kernels._ENOUGH // items - 1))
    assert not kernels._State.begun
    kernels.compiled_for_one(items)
    wait_for_loops()
    assert kernels.compiled_for_one(1) is not None


def wait_for_loops():
    for thread in threading.enumerate():
        if thread.name == "tiered-index-kernels":
            thread.join()


def test_numba_that_cant_be_used_is_one_warning(fresh, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "tiered_index.loops", None)
    monkeypatch.delattr("tiered_index.loops", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with caplog.at_level(logging.WARNING):
        assert kernels.load() is None
        assert kernels.load() is None
        assert kernels.compiled(kernels._ENOUGH) is None
    assert [record.name for record in caplog.records] == ["tiered_index.kernels"]
    assert "NumPy goes on" in caplog.text


def test_a_batch_does_without_where_no_thread_can_be_started(fresh, monkeypatch, caplog):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert kernels.compiled(kernels._ENOUGH) is None
    assert kernels.compiled(kernels._ENOUGH) is None
    assert "NumPy goes on: can't start new thread" in caplog.text


def test_without_numba_nothing_is_said(fresh, monkeypatch, caplog):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(kernels, "_load", partial(pytest.fail, "it was loaded"))
    assert kernels.compiled(kernels._ENOUGH) is None
    assert kernels.load() is None
    assert not caplog.records
