"""Packed runs and files have the items of plain ones. A lookup finds one key's items. Damage is an error."""

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.compacted_files import verify
from tests.unit.format.test_compacted import LAYOUTS, naive_slots
from tiered_index.errors import CorruptFile
from tiered_index.format import compacted as module
from tiered_index.format.compacted import GROUP_BYTES
from tiered_index.format.keys.hashing import normal_hashes
from tiered_index.format.layout import NATIVE, Header, Layout, SlotMap
from tiered_index.format.packed import Packing, PackingOptions, read_options
from tiered_index.format.packed_numpy import UnlistedTopic
from tiered_index.format.schema import KEYED_SCHEMA, ROCKETMQ_SCHEMA, Column, Schema
from tiered_index.format.shard import answer_sorted
from tiered_index.format.time_line import TimeLine
from tiered_index.format.trailer import FORMAT_VERSION, TAIL_SIZE, parse_trailer

pytestmark = pytest.mark.usefixtures("way")
ODD = Schema(
    "Odd",
    (
        *(Column("fingerprint", ">u4"), Column("part", ">u8", identity=True), Column("flag", "|i1")),
        *(Column("share", ">f8"), Column("half", ">f2"), Column("tag", "|S3"), Column("trace", "|S11")),
    ),
)
# One schema has a column with another name than the key's fingerprint. The other has that name with another type.
UNKEYED = Schema("Unkeyed", (Column("fingerprint", ">i8"), Column("price", ">i2")))
# the core has no space for its 70 columns
WIDE = Schema("Wide", (Column("trace", "|S512"),))
SCHEMAS = {schema.name: schema for schema in (KEYED_SCHEMA, ROCKETMQ_SCHEMA, ODD, UNKEYED, WIDE)}


def pack(packing: Packing, items: Any) -> bytes:
    """Return the packed form of one run's items."""
    (packed,) = packing.pack(items, [len(items)])
    return packed


def unpack(packing: Packing, data: bytes, count: int, key_hash: int | None = None) -> Any:
    """Return all items of one run, or those of a key's hash."""
    if key_hash is None:
        return packing.unpack([data], np.array([count]), "f")[0]
    return packing.find(data, count, "f", key_hash, None, 0)


def items_of_runs(packing: Packing, runs: list[tuple[bytes, int]], ranks: Any) -> tuple[Any, Any]:
    """Return the wanted items of separate runs, after a check that a mapped file gives the same."""
    pieces, counts = [data for data, _ in runs], np.array([count for _, count in runs])
    # no run begins at a whole word of the mapped file
    whole = b"header!" + b"gap".join(pieces) + bytes(24)
    begins = 7 + np.cumsum([0, *(len(data) + 3 for data in pieces[:-1])])
    words = np.frombuffer(whole, np.uint64, len(whole) // 8)
    results = [packing.unpack(pieces, counts, "f", ranks, mapped) for mapped in (None, (words, begins))]
    assert results[0][0].tobytes() == results[1][0].tobytes() and results[0][1].tolist() == results[1][1].tolist()
    return results[0]


@st.composite
def anything(draw: st.DrawFn) -> tuple[Packing, Any]:
    """Draw items of any bits, with some columns of few values, in rank order or in no order."""
    schema = SCHEMAS[draw(st.sampled_from(sorted(SCHEMAS)))]
    count, seed = draw(st.integers(1, 80)), draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    items = np.frombuffer(rng.bytes(count * schema.item.itemsize), schema.item).copy()
    if draw(st.booleans()):
        items["offset"][:2] = [0, 2**63 - 1][:count]
    for name in draw(st.sets(st.sampled_from(items.dtype.names))):
        items[name] = items[name][rng.integers(0, draw(st.integers(1, 3)), count) % count]
    slots = SlotMap(draw(st.sampled_from([1, 7, 1000, 2**28])))
    if draw(st.booleans()):
        if draw(st.booleans()):
            items["key_hash"] = items["key_hash"].astype(np.int64) & (2**31 - 1)
        items["key_hash"][items["key_hash"] < 0] = -(2**31) if draw(st.booleans()) else 0
        items = items[answer_sorted(items, items["time_diff_s"].astype(np.int64), slots, schema)]
    seconds = tuple(draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=9)))
    base = draw(st.sampled_from([0, -(2**63), 2**63 - 1, int(items["offset"][0])]))
    own = TimeLine(base, draw(st.integers(0, 62)), seconds)
    line = draw(st.sampled_from([TimeLine.through(items), own]))
    topics = tuple(np.unique(items["topic_id"]).tolist()) if draw(st.booleans()) else ()
    return Packing(schema, slots.base, PackingOptions(line, topics)), items


@given(anything())
def test_everything_comes_back(packed: tuple[Packing, Any]) -> None:
    packing, items = packed
    options = PackingOptions(packing.line, tuple(packing.topics.tolist()))
    assert read_options(json.loads(json.dumps(options.to_json()))) == options
    data = pack(packing, items)
    assert unpack(packing, data, len(items)).tobytes() == items.tobytes()
    hashes = normal_hashes(items["key_hash"])
    for key_hash in {*hashes[hashes >= 0][:5].tolist(), 0, 77, 2**31 - 1}:
        assert unpack(packing, data, len(items), key_hash).tobytes() == items[hashes == key_hash].tobytes()


@given(anything(), st.lists(st.integers(1, 9), max_size=40), st.data())
def test_asked_keys_are_found_in_many_runs(packed: tuple[Packing, Any], sizes: list[int], data: st.DataObject) -> None:
    packing, items = packed
    stops = [at for at in np.cumsum(sizes).tolist() if at < len(items)]
    counts = np.diff([0, *stops, len(items)]).tolist()
    runs = list(zip(packing.pack(items, counts), counts, strict=True))
    hashes = normal_hashes(items["key_hash"])
    there = hashes[hashes >= 0]
    some = data.draw(st.sets(st.sampled_from(there.tolist()))) if len(there) else set()
    wanted_hashes = np.array([*some, *some, 0, 77, 2**31 - 1], np.int32)
    unpacked, of_runs = items_of_runs(packing, runs, packing.ranks_of(wanted_hashes))
    wanted = np.isin(hashes, wanted_hashes)
    assert unpacked.tobytes() == items[wanted].tobytes()
    assert of_runs.tolist() == [int(part.sum()) for part in np.split(wanted, stops)]


@pytest.mark.parametrize("marks", [0b0101, 0b1111, 0b1010, 0b10001, 0b1], ids=bin)
def test_marks_of_another_number_of_keys_are_damage(marks: int) -> None:
    """The packed form of four items marks the first item of each of two keys. Here the second mark is anywhere."""
    items = np.zeros(4, KEYED_SCHEMA.item)
    items["key_hash"] = [3, 3, 5, 5]
    items["offset"] = range(4)
    packing = Packing(KEYED_SCHEMA, 1, PackingOptions(TimeLine.through(items)))
    data = bytearray(pack(packing, items))
    # after the marks come only four offsets of two bits
    assert data[-2] == 0b0101
    data[-2] = marks
    if marks != 0b0101:
        with pytest.raises(CorruptFile, match="differs from the 2 of its header"):
            unpack(packing, data, 4)
        with pytest.raises(CorruptFile, match="too short"):
            unpack(packing, data[:3], 4)
    for key_hash in (3, 4, 5):
        if marks == 0b0101:
            assert unpack(packing, data, 4, key_hash).tobytes() == items[items["key_hash"] == key_hash].tobytes()
        else:
            with pytest.raises(CorruptFile, match="differs from the 2 of its header"):
                unpack(packing, data, 4, key_hash)
            # an empty answer would claim that the run lacks the key
            with pytest.raises(CorruptFile, match="differs from the 2 of its header"):
                items_of_runs(packing, [(data, 4)], packing.ranks_of(np.array([key_hash], np.int32)))


@pytest.mark.parametrize("wrong", [[3, 3], [3, 2], [2**31], ["1"], 3, {}, [True]], ids=str)
def test_a_list_of_topics_has_rising_ids(wrong: Any) -> None:
    with pytest.raises(ValueError):
        read_options({"base": 0, "shift": 1, "seconds": [0, 1], "topics": wrong})


@pytest.mark.parametrize("number", [3, 4, 255])
def test_a_topic_without_number_is_refused_and_a_number_without_topic_is_damage(number: int) -> None:
    items = np.zeros(2, KEYED_SCHEMA.item)
    items["key_hash"], items["topic_id"] = [3, 5], [0, number]
    plain = Packing(KEYED_SCHEMA, 1, PackingOptions(TimeLine.through(items)))
    data = pack(plain, items)
    numbered = Packing(KEYED_SCHEMA, 1, PackingOptions(plain.line, (9, 2**30, 2**31 - 1)))
    with pytest.raises(UnlistedTopic, match="a topic id without a name"):
        numbered.pack(items, [2])
    assert unpack(numbered, data, 2, 3)["topic_id"].tolist() == [9]
    for key_hash in (None, 5):
        with pytest.raises(CorruptFile, match="more than the 3 topics of its file"):
            unpack(numbered, data, 2, key_hash)


NATIVES = [kind for kind in sorted(LAYOUTS) if not LAYOUTS[kind][0].newest_first]


def items_of_file(data):
    """Return the items of a file, read by its directory."""
    trailer = parse_trailer(data, "file", len(data))
    runs = trailer.directory.all_runs()
    pieces = [data[run.offset : run.offset + run.length] for run in runs]
    return trailer.metadata.packing.unpack(pieces, np.array([run.count for run in runs]), "file")[0]


@given(
    st.integers(0, 2**32 - 1), st.integers(1, 120), st.integers(1, 50), st.integers(1, 12), st.integers(0, 3),
    st.sampled_from(NATIVES), st.integers(1, 130), st.sampled_from([64, GROUP_BYTES]),
)  # fmt: skip
def test_equals_lists_per_slot(make, seed, count, slots, distinct, spread_s, kind, chunk, group_bytes):
    layout = Layout(*LAYOUTS[kind], slots, count + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)  # chunks end anywhere
        patch.setattr(module, "_COUNTED", 131 - chunk)  # as do the parts of the statistics
        patch.setattr(module, "GROUP_BYTES", group_bytes)
        patch.setattr(module, "BLOCK_BYTES", 20 * group_bytes)
        data, entries = make.file(layout, count, seed=seed, distinct_hashes=distinct, spread_s=spread_s)
    expected = [
        item.tobytes()[: layout.schema.item.itemsize] for items in naive_slots(entries, layout) for item in items
    ]
    assert items_of_file(data).tobytes() == b"".join(expected)
    assert verify(data) == []
    header = Header(*struct.unpack_from(">IqqiI", data))
    in_use = len({int(hash) % slots for hash in entries["key_hash"]})
    assert (header.magic, header.slots_in_use, header.items) == (NATIVE.end_magic, in_use, count)
    assert data[-TAIL_SIZE + 8 : -TAIL_SIZE + 12] == struct.pack(">I", FORMAT_VERSION)
