"""The compiled core returns the same bytes as NumPy. If it is missing, NumPy does the work and the log says so."""

import subprocess
import sys
import zlib
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.core import compiled_core, using
from tiered_index.base import kernels
from tiered_index.format.layout import NATIVE, Layout
from tiered_index.format.schema import KEYED_SCHEMA, Column, Schema
from tiered_index.format.unsealed import UnsealedTable
from tiered_index.types import IndexItem, KeyedIndexItem, column


@dataclass(frozen=True, kw_only=True)
class Tagged(KeyedIndexItem):
    tag: int = column(">u2")


@pytest.fixture(scope="module")
def loops():
    """The compiled core."""
    return compiled_core()


numbers = st.integers(0, 2**32 - 1)
KINDS = {"small": ">i2", "flag": "|u1", "real": ">f8", "name": ">S5", "bytes": "|S3"}
OWN = Schema("Own", (*KEYED_SCHEMA.extra, *(Column(name, kind) for name, kind in KINDS.items())))


@settings(max_examples=40, deadline=None)
@given(
    seed=numbers,
    count=st.sampled_from([0, 1, 300, 20_000]),
    slots=st.sampled_from([1, 300, 70_000]),
    unit_ms=st.sampled_from([1, 1000]),
)
def test_entries_of_columns(loops, seed, count, slots, unit_ms):
    """Columns have any type that converts, and any distance between values; one value may stand for all rows."""
    layout = Layout(NATIVE, OWN, slots, 40_000)

    def make():
        random = np.random.default_rng(seed)
        table, parts = UnsealedTable(layout, 10_000_000), []
        for part in (count, count // 2):
            columns = {
                "topic_id": np.broadcast_to(np.int32(random.integers(2**31)), part),
                "queue_id": random.integers(0, 2**31, part),
                "offset": random.integers(0, 2**63, (part, 2))[:, 1],
                "size": random.integers(0, 2**31, part).astype(">i4"),
                "fingerprint": random.integers(0, 2**32, part).astype(np.uint32),
                "small": random.integers(-(2**15), 2**15, part).astype(np.int16),
                "flag": random.integers(0, 256, part).astype(np.uint8),
                "real": random.random(part),
                "name": random.choice(np.array([b"", b"abc", b"abcde"]), part),
                "bytes": random.choice(np.array([b"x\0y", b"z"]), part),
            }
            hashes = random.integers(0, 400, part).astype(np.int32)
            batch = table.prepare(hashes, random.integers(0, 20_000_000 // unit_ms, part), columns, unit_ms)
            table.commit(batch)
            parts += [batch.entries.tobytes(), b"".join(batch.pieces())]
        return parts, table.heads.tolist(), table.slots_in_use, table.end_ms

    with using(None):
        expected = make()
    with using(loops):
        assert make() == expected


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
sys.modules["tiered_index.base." + sys.argv[2]] = None
from tiered_index import IndexService
from tiered_index.base import kernels
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


def u8(*shape):
    return np.zeros(shape, np.uint8)


def i64(*values):
    return np.array(values, np.int64)


I32, U32, U64 = (np.zeros(1, kind) for kind in (np.int32, np.uint32, np.uint64))
PACKED = {"base": 7, "of_keys": 1, "columns": i64([8, 0, 8], [8, 0, 8], [8, 0, 8]), "line": i64(0, 0, 0, 0)}
PACKED["topics"] = I32[:0]
# arguments without a fault
SOUND = {
    "hash_rows": {"units": u8(3), "offsets": i64(0, 3), "topic_index": i64(0)}
    | dict.fromkeys(("java_of_topic", "second_of_topic", "java", "second"), U32),
    "insert": {"hashes": I32, "slots": 1, "first": 1, "heads": I32.copy(), "previous": I32.copy()},
    "write_entries": {"entries": u8(1, 8), "first": 0, "columns": [u8(1, 4)], "places": i64([0, 1]), "times": i64(0)}
    | {"unit_ms": 1, "begin_ms": 0, "time_place": 4},
    "place_by_slot": {"data": u8(32), "size": 32, "slots": 1, "placed": U64, "order": I32.copy(), "counts": i64(0)},
    "gather": {"data": u8(36), "size": 36, "order": I32.copy(), "slots": 7, "fingerprint": 28}
    | {"items": u8(1, 32), "hashes": U64},
    "find_items": PACKED
    | {"words": U64.repeat(9), "runs": i64([0, 40, 1]), "wanted": None, "most": 9}
    | {"items": u8(1, 32), "counts": i64(0)},
    "pack_items": PACKED | {"data": u8(1, 32), "starts": i64(0, 1), "packed": u8(68), "ends": i64(0)},
}
WRONG = {
    "rows without units": ("hash_rows", {"offsets": i64(0, 4)}),
    "more slots than heads": ("insert", {"slots": 2}),
    "less room than rows": ("insert", {"hashes": I32.repeat(2)}),
    "fewer times than entries": ("write_entries", {"entries": u8(2, 8), "columns": [u8(2, 4)]}),
    "entries behind the times": ("write_entries", {"first": 1}),
    "no place for times": ("write_entries", {"time_place": 5}),
    "fewer places than columns": ("write_entries", {"places": np.zeros((0, 2), np.int64)}),
    "fewer values than entries": ("write_entries", {"entries": u8(2, 8), "times": i64(0, 0)}),
    "a column behind the entry": ("write_entries", {"places": i64([5, 1])}),
    "values whose bytes are apart": ("write_entries", {"columns": [u8(1, 8)[:, ::2]]}),
    "less bytes than entries": ("place_by_slot", {"data": u8(31)}),
    "less places than entries": ("place_by_slot", {"placed": U64[:0]}),
    "less counts than slots": ("place_by_slot", {"slots": 2}),
    "an entry that is not there": ("gather", {"data": u8(71), "order": np.ones(1, np.int32)}),
    "an item that is longer than an entry": ("gather", {"items": u8(1, 37)}),
    "a fingerprint behind the item": ("gather", {"fingerprint": 29}),
    "less room than hashes": ("gather", {"data": u8(72), "order": I32.repeat(2), "items": u8(2, 32)}),
    "a column that is wider than an item": ("find_items", {"columns": i64([8, 0, 8], [8, 30, 8], [8, 0, 8])}),
    "fewer counts than runs": ("find_items", {"counts": i64()}),
    "keys without a topic": ("find_items", {"topics": I32.repeat(2)}),
    "no room for packed items": ("pack_items", {"packed": u8(67)}),
}


@pytest.mark.parametrize("case", WRONG)
def test_sizes_are_checked_before_anything_is_read(loops, case):
    name, change = WRONG[case]
    getattr(loops, name)(**SOUND[name])
    with pytest.raises(ValueError):
        getattr(loops, name)(**SOUND[name] | change)


def test_an_argument_of_another_type_is_an_error(loops):
    with pytest.raises(ValueError, match="Buffer dtype mismatch"):
        loops.distinct(np.zeros(3, np.int32), np.zeros(3, np.uint64))


def test_items_are_made_only_of_classes_and_rows_that_the_core_can_fill(loops):
    make = kernels.compiled_views().ItemForm
    for kind, keyed in ((Tagged, True), (KeyedIndexItem, False), (IndexItem, True), (int, False), (object, False)):
        with pytest.raises((ValueError, AttributeError)):
            make(kind, keyed)
    for rows in (np.zeros(5, Schema.of(Tagged).row), np.zeros(5, Schema.of(IndexItem).row), np.zeros(3, "u1")):
        with pytest.raises(ValueError, match="columns that the items have not"):
            make(KeyedIndexItem, True).items("t", rows)
