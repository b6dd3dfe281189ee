"""Compaction equals lists per slot in both orders, with many ties. The directory agrees with the file's content."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.compacted_files import verify
from tiered_index.errors import InvalidArgument
from tiered_index.format import compacted as module
from tiered_index.format.compacted import BLOCK_BYTES, GROUP_BYTES, Compaction
from tiered_index.format.layout import HEADER_SIZE, NATIVE, ROCKETMQ, Layout
from tiered_index.format.schema import Schema
from tiered_index.format.trailer import parse_trailer
from tiered_index.types import IndexItem, KeyedIndexItem, column


@dataclass(frozen=True, kw_only=True)
class RegionItem(KeyedIndexItem):
    region: int = column(">u2", identity=True)
    zone: int = column(">i8", identity=True)
    label: bytes = column("S3", default=b"")


@dataclass(frozen=True, kw_only=True)
class BareItem(IndexItem):
    weight: float = column(">f8")


LAYOUTS = {
    "rocketmq": (ROCKETMQ, ROCKETMQ.schema),
    "native": (NATIVE, NATIVE.schema),
    "extended": (NATIVE, Schema.of(RegionItem)),
    "unkeyed": (NATIVE, Schema.of(BareItem)),
}


def naive_slots(entries, layout):
    """Return the items of each slot in the order of the format, built one entry at a time."""
    slots = [[] for _ in range(layout.slots)]
    for entry in entries:
        slots[int(entry["key_hash"]) % layout.slots].append(entry)
    for items in slots:
        if layout.preset.newest_first:
            items.reverse()
        else:
            further = [c.name for c in layout.schema.extra if c.identity]
            named = ["queue_id", *further]
            items.sort(key=lambda e: (e["key_hash"], -int(e["time_diff_s"]), -int(e["offset"]), *[e[n] for n in named]))
    return slots


def naive_bytes(entries, layout, begin_ms, end_ms):
    slots = naive_slots(entries, layout)
    size = layout.schema.item.itemsize
    position = 28 + 8 * layout.slots
    table, arrays = b"", b""
    for items in slots:
        table += struct.pack(">ii", position, size * len(items))
        arrays += b"".join(item.tobytes()[:size] for item in items)
        position += size * len(items)
    in_use = sum(bool(items) for items in slots)
    return struct.pack(">IqqiI", layout.preset.end_magic, begin_ms, end_ms, in_use, len(entries)) + table + arrays


@pytest.mark.usefixtures("way")
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 120), st.integers(1, 50), st.integers(1, 12), st.integers(0, 3),
    st.sampled_from(sorted(LAYOUTS)), st.integers(1, 130),
)  # fmt: skip
def test_equals_lists_per_slot(make, seed, count, slots, distinct, spread_s, kind, chunk):
    preset, schema = LAYOUTS[kind]
    layout = Layout(preset, schema, slots, count + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)  # chunks end anywhere
        patch.setattr(module, "_COUNTED", 131 - chunk)  # as do the parts of the statistics
        data, entries = make.file(layout, count, seed=seed, distinct_hashes=distinct, spread_s=spread_s)
    end_ms = struct.unpack_from(">q", data, 12)[0]
    expected = naive_bytes(entries, layout, make.begin_ms, end_ms)
    assert data[: len(expected)] == expected
    assert parse_trailer(data, "f", len(data)).tail.position == len(expected)
    assert verify(data) == []


def test_extreme_values_keep_their_order(make):
    layout = Layout(NATIVE, NATIVE.schema, 1, 10)
    offsets = np.array([0, 2**63 - 1, -(2**63), -1, 5, 5])
    queues = np.array([0, 0, 0, 0, -(2**31), 2**31 - 1])
    columns = dict.fromkeys(("topic_id", "size", "fingerprint"), np.ones(6, int))
    columns |= {"queue_id": queues, "offset": offsets}
    times = np.full(6, make.begin_ms)
    table, entries = make.entries(layout, np.full(6, 2**31 - 1, np.int32), times, columns)
    compaction = Compaction(entries, layout, make.begin_ms, table.end_ms)
    items = np.frombuffer(b"".join(compaction.arrays()), layout.schema.item)
    assert items["offset"].tolist() == [2**63 - 1, 5, 5, 0, -1, -(2**63)]
    assert items["queue_id"].tolist()[1:3] == [-(2**31), 2**31 - 1]


def test_widest_differences(make):
    """A file with the times -2^31 s and 2^31 - 1 s has the right interval and a descending order."""
    layout = Layout(NATIVE, NATIVE.schema, 1, 10)
    begin_ms = 2**31 * 1000
    columns = {name: np.arange(3) for name in ("topic_id", "queue_id", "offset", "size", "fingerprint")}
    times = np.array([0, (2**32 - 1) * 1000, begin_ms])
    table, entries = make.entries(layout, np.array([4, 4, 4], np.int32), times, columns, begin_ms=begin_ms)
    compaction = Compaction(entries, layout, begin_ms, table.end_ms)
    assert (compaction.second_min, compaction.second_max) == (0, 2**32 - 1)
    items = np.frombuffer(b"".join(compaction.arrays()), layout.schema.item)
    assert items["time_diff_s"].tolist() == [2**31 - 1, 0, -(2**31)]


def test_no_entries():
    layout = Layout(NATIVE, NATIVE.schema, 7, 10)
    with pytest.raises(InvalidArgument, match="without entries"):
        Compaction(np.zeros(0, NATIVE.schema.entry), layout, 0, 0)


def giant_file(make, kind):
    """Return layout, file and entries, one per second. Only one slot, with two hashes, is long enough for blocks."""
    preset, schema = LAYOUTS["native" if kind == "packed" else kind]
    layout = Layout(preset, schema, 40, 40_001)
    rng = np.random.default_rng(1)
    hashes = np.concatenate([np.full(20_000, 5), np.full(10_000, 45), rng.integers(0, 10_000, 10_000)]).astype(np.int32)
    rng.shuffle(hashes)
    times = make.begin_ms + 1000 * np.arange(40_000)
    table, entries = make.entries(layout, hashes, times, make.columns(rng, schema, 40_000))
    return layout, make.compacted(table, entries, packed=kind == "packed"), entries


@pytest.fixture(scope="module", params=["native", "rocketmq", "extended", "packed"])
def giant(request, make):
    return giant_file(make, request.param)


def items_of(data, trailer, run):
    return trailer.metadata.items_of(data[run.offset : run.offset + run.length], run.count, "f")


def matches(items, wanted, low, high):
    seconds = items["time_diff_s"]
    return int((np.isin(items["key_hash"], wanted) & (seconds >= low) & (seconds <= high)).sum())


def test_giant_group_is_cut_into_blocks(giant):
    layout, data, _ = giant
    trailer = parse_trailer(data, "f", len(data))
    groups, blocks = trailer.directory.groups, trailer.directory.blocks
    size = layout.schema.item.itemsize
    cut = groups[groups["blocks"] > 0]
    assert cut["first_slot"].tolist() == [5]  # hashes 5 and 45
    unpacked = int(cut[0]["count"]) * size
    assert unpacked > 3 * BLOCK_BYTES
    assert len(blocks) == int(cut[0]["blocks"]) == -(-unpacked // (BLOCK_BYTES // size * size))
    assert blocks["length"].max() <= BLOCK_BYTES
    for block, run in zip(
        blocks, trailer.directory.blocks_of(int(np.flatnonzero(groups["blocks"])[0]))[1], strict=True
    ):
        items = items_of(data, trailer, run)
        seconds = items["time_diff_s"].astype(np.int64) + trailer.metadata.begin_ms // 1000
        assert (block["hash_min"], block["hash_max"]) == (items["key_hash"].min(), items["key_hash"].max())
        assert (block["second_min"], block["second_max"]) == (seconds.min(), seconds.max())
    assert groups[groups["blocks"] == 0]["length"].max() < 2 * GROUP_BYTES


def test_runs_cover_every_item_exactly_once(giant):
    layout, data, entries = giant
    trailer = parse_trailer(data, "f", len(data))
    is_packed = trailer.metadata.packing is not None
    position = HEADER_SIZE if is_packed else layout.items_position
    for run in trailer.directory.all_runs():
        assert run.offset == position
        assert is_packed or run.length == run.count * layout.schema.item.itemsize
        assert zlib.crc32(data[run.offset : run.offset + run.length]) == run.crc32
        position += run.length
    assert position == trailer.tail.position
    assert is_packed or position == layout.compacted_size(len(entries))


@pytest.mark.parametrize(
    ("low", "high"), [(0, 2**40), (5_000, 5_100), (39_999, 39_999), (0, 0), (50_000, 60_000), (-10, -1)]
)
def test_runs_skip_right_blocks(giant, make, low, high):
    """Runs that `runs()` leaves out hold no match, and the named runs hold all.

    A narrow range of a time-ordered slot reads one or two blocks.
    """
    layout, data, entries = giant
    trailer = parse_trailer(data, "f", len(data))
    base = make.begin_ms // 1000
    for wanted in (5, 45, 85, 7):
        runs = trailer.directory.runs_of(np.array([wanted % layout.slots]), base + low, base + high)
        found = sum(matches(items_of(data, trailer, run), wanted, low, high) for run in runs)
        assert found == matches(entries, wanted, low, high)
        if wanted == 5 and high - low <= 100:
            # of each of the slot's two hashes
            assert len(runs) <= 4


def test_groups_close_at_multiples_of_16_kib(make):
    layout = Layout(NATIVE, NATIVE.schema, 5_000, 20_001)
    data, _ = make.file(layout, 20_000)
    trailer = parse_trailer(data, "f", len(data))
    groups = trailer.directory.groups
    assert len(groups) == -(-20_000 * 32 // GROUP_BYTES)
    assert groups["length"].sum() == 20_000 * 32
    assert groups["length"].max() < GROUP_BYTES + 1024
    assert not len(trailer.directory.blocks)
    for slot in (0, 17, 4_999):
        (run,) = trailer.directory.runs_of(np.array([slot]), 0, 2**40)
        position, length = struct.unpack_from(">ii", data, 28 + 8 * slot)
        assert run.offset <= position
        assert position + length <= run.offset + run.length


def test_giant_slot_never_drags_neighbours_along(make):
    """Slot 0 is small and shares its 16 KiB with the beginning of giant slot 1. They and slot 2 are three groups."""
    layout = Layout(NATIVE, NATIVE.schema, 3, 30_001)
    hashes = np.repeat(np.array([0, 1, 2], np.int32), [10, 20_000, 10])
    columns = make.columns(np.random.default_rng(0), layout.schema, len(hashes))
    data = make.compacted(*make.entries(layout, hashes, np.full(len(hashes), make.begin_ms), columns))
    groups = parse_trailer(data, "f", len(data)).directory.groups
    assert groups[["first_slot", "count"]].tolist() == [(0, 10), (1, 20_000), (2, 10)]
    assert groups["blocks"].tolist() == [0, 3, 0]


def test_slot_of_an_empty_group_costs_no_read(make):
    layout = Layout(NATIVE, NATIVE.schema, 10, 3_000)
    columns = {name: np.zeros(2_000, int) for name in ("topic_id", "queue_id", "offset", "size", "fingerprint")}
    data = make.compacted(*make.entries(layout, np.full(2_000, 3, np.int32), np.full(2_000, make.begin_ms), columns))
    directory = parse_trailer(data, "f", len(data)).directory
    assert directory.runs_of(np.array([9]), 0, 2**40) == []
    assert len(directory.runs_of(np.array([3]), 0, 2**40)) == 1
