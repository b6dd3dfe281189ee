"""The compiled core returns the same bytes as NumPy. If it is missing, NumPy does the work and the log says so."""

import subprocess
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.core import compiled_core, using
from tiered_index import kernels
from tiered_index.format import compacted
from tiered_index.format.bloom import FilterBuilder, block_may_hold, filter_hash
from tiered_index.format.compacted import Compaction
from tiered_index.format.hashing import code_units, hash_batch, lookup_numbers
from tiered_index.format.layout import NATIVE, ROCKETMQ, Layout
from tiered_index.format.packed import Packing, PackingOptions
from tiered_index.format.schema import KEYED_SCHEMA
from tiered_index.format.slots import by_slot
from tiered_index.format.time_line import TimeLine
from tiered_index.format.unsealed import UnsealedTable
from tiered_index.service.read.batch import LookupBatch
from tiered_index.types import Lookup


@pytest.fixture(scope="module")
def loops():
    """The compiled core."""
    return compiled_core()


def both(loops, make):
    """Compare the results of `make` with NumPy and with the core."""
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
    fingerprints=st.sampled_from([1, 3, 2**32]),
    chunk=st.sampled_from([20, 1 << 16]),
)
def test_chains_and_their_compacted_form(loops, seed, slots, hashes, counts, family, fingerprints, chunk):
    layout = Layout(family, family.schema, slots, 300)

    def make():
        random, table, entries, heads = np.random.default_rng(seed), UnsealedTable(layout, 0), [], []
        for count in counts:
            columns = {name: random.integers(0, 3, count) for name in ("topic_id", "queue_id", "offset", "size")}
            columns["fingerprint"] = random.integers(0, fingerprints, count)
            seconds = np.sort(random.integers(0, 30, count)) if seed % 2 else random.integers(0, 30, count)
            key_hash = random.integers(0, hashes, count).astype(np.int32)
            batch = table.prepare(key_hash, seconds * 1000, columns)
            table.commit(batch)
            entries.append(batch.entries)
            heads.append(table.heads.tobytes())
        stored = np.concatenate([part.view(np.void) for part in entries]).view(layout.schema.entry)
        # RocketMQ stores this hash without its absolute value
        stored["key_hash"][stored["key_hash"] == 0] = -(2**31)
        about = {"source_positions": {}, "lane": "main", "offset_space": "", "writer": "", "topics": ()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compacted, "_COUNTED", 17)  # statistics are made part by part
            patch.setattr(compacted, "CHUNK", chunk)
            compaction = Compaction(stored, layout, 0, 30_000)
            pieces = [*compaction.pieces(file_id="000000000000000-0123456789ab", **about)]
        return b"".join([*heads, stored.tobytes(), *pieces])

    both(loops, make)


@settings(max_examples=40)
@given(
    seed=numbers,
    count=st.sampled_from([1, 50, 9_000]),
    slots=st.sampled_from([1, 4_096, 4_097, 20_000]),
    hashes=st.sampled_from([2, 5_000, 2**32]),
)
def test_entries_by_slot(loops, seed, count, slots, hashes):
    """Slots are counted in parts of 4,096. Any stored hash has a slot, also a negative one."""
    entries = np.zeros(count, KEYED_SCHEMA.entry)
    entries["key_hash"] = np.random.default_rng(seed).integers(0, hashes, count).astype(np.uint32).view(np.int32)
    both(loops, lambda: listed(by_slot(entries, slots, np.empty(count, np.uint64))))


def test_items_of_negative_hashes_are_left_to_numpy(loops):
    """Their ranks may be those of another slot: the hashes for the filter would not be distinct."""
    entries = np.zeros(2, KEYED_SCHEMA.entry)
    for key_hash, found in ((7, 1), (-(2**31), 1), (-5, -1)):
        entries["key_hash"] = key_hash
        entries["offset"] = [1, 2]
        items, hashes = np.empty((2, KEYED_SCHEMA.item.itemsize), np.uint8), np.empty(2, np.uint64)
        order = np.array([1, 0], np.int32)
        assert loops.gather(entries.view(np.uint8), entries.itemsize, order, 3, 28, items, hashes) == found


@settings(max_examples=40)
@given(seed=numbers, count=st.sampled_from([0, 1, 50, 3_000, 20_000]), different=st.sampled_from([1, 40, 9_000, 2**63]))
def test_filters(loops, seed, count, different):
    hashes = np.random.default_rng(seed).integers(0, different, count, np.uint64)
    hashes *= np.uint64(0x9E3779B97F4A7C15 if seed % 3 else 1)

    def make():
        builder = FilterBuilder(np.empty(max(1, count // 2), np.uint64))
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
        return [listed(pair) for pair in batch.matched(stored.astype(">i4")).pairs()]

    both(loops, make)


@settings(max_examples=30)
@given(
    seed=numbers,
    counts=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    most=st.sampled_from([2, 2**20, 2**63 - 1]),
    ordered=st.booleans(),
    numbered=st.booleans(),
)
def test_packing(loops, seed, counts, most, ordered, numbered):
    random, count = np.random.default_rng(seed), sum(counts)
    items = np.empty(count, KEYED_SCHEMA.item)
    for name in items.dtype.names:
        dtype = items.dtype[name]
        low, high = (-most, most) if name == "offset" else (0, min(most, np.iinfo(dtype).max))
        items[name] = random.integers(low, high, count)
    if ordered:
        items.sort(order="key_hash")
    topics = tuple(np.unique(items["topic_id"]).tolist()) if numbered else ()
    options = PackingOptions(TimeLine.through(items), topics)
    packing = Packing(KEYED_SCHEMA, 1 if ordered else 7, options)

    def make():
        packed = packing.pack(items, counts)
        unpacked, of_runs = packing.unpack(packed, np.array(counts), "file")
        assert (unpacked.tobytes(), of_runs.tolist()) == (items.tobytes(), counts)
        asked = packing.ranks_of(items["key_hash"][::3].astype(np.int32))
        found, of_runs = packing.unpack(packed, np.array(counts), "file", asked)
        return b"".join([*packed, found.tobytes(), of_runs.tobytes()])

    both(loops, make)


@pytest.mark.parametrize("count", range(1, 10))
def test_packed_items_of_any_bits_stay_in_their_room(loops, count):
    items = np.random.default_rng(count).integers(0, 256, (count, 24), np.uint8)
    items[0], items[-1] = 0, 255
    # a header of 5 and 9 bytes per column, 64 bits per column and item, marks, and a word
    room = 5 + 27 + 24 * count + count + 3 + 8
    buffer, ends = np.full(room + 16, 165, np.uint8), np.zeros(1, np.int64)
    columns, line, topics = np.array([[8, 0, 8], [8, 8, 8], [8, 16, 8]]), np.zeros(4, np.int64), np.zeros(0, np.int32)
    assert loops.pack_items(items, np.array([0, count]), 7, 1, columns, line, topics, buffer[:room], ends)
    assert 32 <= ends[0] <= room
    assert (buffer[room:] == 165).all()


@given(data=st.binary(max_size=300), begin=numbers)
def test_crc32(data, begin):
    assert kernels.crc32(data) == zlib.crc32(data)
    assert kernels.crc32(data, begin) == zlib.crc32(data, begin)


PROGRAM = """
import logging, sys
logging.basicConfig(level=logging.INFO)
sys.modules["tiered_index." + sys.argv[2]] = None
from tiered_index import IndexService, kernels
assert kernels.compiled() is None and kernels.compiled_views() is None
with IndexService.open(root=sys.argv[1], storage="memory://core", slots=100, items=1000) as index:
    index.put("orders", 0, "k", 8, 1, 1_700_000_000_000)
    assert [item.offset for item in index.query("orders", "k")] == [8]
"""


@pytest.mark.parametrize("module", ["_core", "_views"])
def test_without_the_core_numpy_works_and_the_log_says_so_once(tmp_path, module):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "root"), module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.count("the compiled core is missing, and NumPy does its work more slowly") == 1


WRONG = {
    "rows without units": lambda core: core.hash_rows(
        np.zeros(3, np.uint8), np.array([0, 4]), np.zeros(1, np.int64), *np.zeros((4, 1), np.uint32)
    ),
    "more slots than heads": lambda core: core.insert(
        np.zeros(1, np.int32), 2, 1, *np.zeros((2, 1), np.int32), np.zeros(1, np.int64), np.zeros(1, np.int32)
    ),
    "less bytes than entries": lambda core: core.place_by_slot(
        np.zeros(31, np.uint8), 32, 1, np.zeros(1, np.uint64), np.zeros(1, np.int32), np.zeros(1, np.int64)
    ),
    "less places than entries": lambda core: core.place_by_slot(
        np.zeros(32, np.uint8), 32, 1, np.zeros(0, np.uint64), np.zeros(1, np.int32), np.zeros(1, np.int64)
    ),
    "less counts than slots": lambda core: core.place_by_slot(
        np.zeros(32, np.uint8), 32, 2, np.zeros(1, np.uint64), np.zeros(1, np.int32), np.zeros(1, np.int64)
    ),
    "an entry that is not there": lambda core: core.gather(
        *(np.zeros(71, np.uint8), 36, np.ones(1, np.int32), 7, 28, np.zeros((1, 32), np.uint8), np.zeros(1, np.uint64))
    ),
    "an item that is longer than an entry": lambda core: core.gather(
        *(np.zeros(36, np.uint8), 36, np.zeros(1, np.int32), 7, 28, np.zeros((1, 37), np.uint8), np.zeros(1, np.uint64))
    ),
    "a fingerprint behind the item": lambda core: core.gather(
        *(np.zeros(36, np.uint8), 36, np.zeros(1, np.int32), 7, 29, np.zeros((1, 32), np.uint8), np.zeros(1, np.uint64))
    ),
    "less room than hashes": lambda core: core.gather(
        *(np.zeros(72, np.uint8), 36, np.zeros(2, np.int32), 7, 28, np.zeros((2, 32), np.uint8), np.zeros(1, np.uint64))
    ),
    "a column that is wider than an item": lambda core: core.find_items(
        *(np.zeros(9, np.uint64), np.array([[0, 40, 1]]), None, 7, 9, 1, np.array([[8, 0, 8], [8, 30, 8], [8, 0, 8]])),
        *(np.zeros(4, np.int64), np.zeros(0, np.int32), np.zeros((1, 32), np.uint8), np.zeros(1, np.int64)),
    ),
    "fewer counts than runs": lambda core: core.find_items(
        *(np.zeros(9, np.uint64), np.array([[0, 40, 1]]), None, 7, 9, 1, np.array([[8, 0, 8]] * 3)),
        *(np.zeros(4, np.int64), np.zeros(0, np.int32), np.zeros((1, 32), np.uint8), np.zeros(0, np.int64)),
    ),
    "keys without a topic": lambda core: core.find_items(
        *(np.zeros(9, np.uint64), np.array([[0, 40, 1]]), None, 7, 9, 1, np.array([[8, 0, 8]] * 3)),
        *(np.zeros(4, np.int64), np.zeros(2, np.int32), np.zeros((1, 32), np.uint8), np.zeros(1, np.int64)),
    ),
    "no room for packed items": lambda core: core.pack_items(
        *(np.zeros((1, 32), np.uint8), np.array([0, 1]), 7, 1, np.array([[8, 0, 8]] * 3), np.zeros(4, np.int64)),
        *(np.zeros(0, np.int32), np.zeros(67, np.uint8), np.zeros(1, np.int64)),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_sizes_are_checked_before_anything_is_read(loops, case):
    with pytest.raises(ValueError):
        WRONG[case](loops)


def test_an_argument_of_another_type_is_an_error(loops):
    with pytest.raises(ValueError, match="Buffer dtype mismatch"):
        loops.distinct(np.zeros(3, np.int32), np.zeros(3, np.uint64))
