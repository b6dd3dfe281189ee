"""Compaction equals lists per slot in both orders, with many ties. The directory agrees with the file's content.

A writer makes a shard in one pass. In every geometry the directory finds the shard's items, in order.
"""

import struct
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.compacted_files import verify
from tests.support.memory import traced_memory
from tiered_index.errors import ConfigError, InvalidArgument
from tiered_index.format import compacted as module
from tiered_index.format import layout as slots_module
from tiered_index.format.compacted import BLOCK_BYTES, GROUP_BYTES, Compaction
from tiered_index.format.keys.bloom import block_may_hold, block_number, filter_hash
from tiered_index.format.layout import NATIVE, ROCKETMQ, Layout, SlotMap, hash_rank, offset_columns, order_giant
from tiered_index.format.packed import PackingOptions
from tiered_index.format.schema import KEYED_SCHEMA, Schema
from tiered_index.format.shard import ShardWriter, answer_sorted, entry_checksum
from tiered_index.format.trailer import parse_trailer
from tiered_index.service.read.files.spans import check_run
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
    st.integers(1, 130),
)  # fmt: skip
def test_equals_lists_per_slot(make, seed, count, slots, distinct, spread_s, chunk):
    layout = Layout(ROCKETMQ, ROCKETMQ.schema, slots, count + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)  # chunks end anywhere
        patch.setattr(module, "_COUNTED", 131 - chunk)  # as do the parts of the statistics
        data, entries = make.file(layout, count, seed=seed, distinct_hashes=distinct, spread_s=spread_s)
    end_ms = struct.unpack_from(">q", data, 12)[0]
    expected = naive_bytes(entries, layout, make.begin_ms, end_ms)
    assert data[: len(expected)] == expected
    assert parse_trailer(data, "f", len(data)).tail.position == len(expected)
    assert verify(data) == []


def giant_file(make, kind):
    """Return layout, file and entries, one per second. Only one slot, with two hashes, is long enough for blocks."""
    preset, schema = LAYOUTS[kind]
    layout = Layout(preset, schema, 40, 40_001)
    rng = np.random.default_rng(1)
    hashes = np.concatenate([np.full(20_000, 5), np.full(10_000, 45), rng.integers(0, 10_000, 10_000)]).astype(np.int32)
    rng.shuffle(hashes)
    times = make.begin_ms + 1000 * np.arange(40_000)
    table, entries = make.entries(layout, hashes, times, make.columns(rng, schema, 40_000))
    return layout, make.compacted(table, entries), entries


@pytest.fixture(scope="module", params=["native", "rocketmq", "extended"])
def giant(request, make):
    return giant_file(make, request.param)


def items_of(data, trailer, run):
    return trailer.metadata.items_of(data[run.offset : run.offset + run.length], run.count, "f")


def matches(items, wanted, low, high):
    seconds = items["time_diff_s"]
    return int((np.isin(items["key_hash"], wanted) & (seconds >= low) & (seconds <= high)).sum())


def directory_of(data):
    return parse_trailer(data, "f", len(data)).directory


def test_groups_close_at_multiples_of_16_kib_and_a_giant_slot_is_cut_into_blocks(giant, make):
    layout, data, _ = giant
    assert verify(data) == []
    directory, size = directory_of(data), layout.schema.item.itemsize
    cut = directory.groups[directory.groups["blocks"] > 0]
    assert cut["first_slot"].tolist() == [5]  # hashes 5 and 45
    unpacked = int(cut[0]["count"]) * size
    assert unpacked > 3 * BLOCK_BYTES
    assert len(directory.blocks) == int(cut[0]["blocks"]) == -(-unpacked // (BLOCK_BYTES // size * size))
    assert directory.blocks["length"].max() <= BLOCK_BYTES
    assert directory.groups[directory.groups["blocks"] == 0]["length"].max() < 2 * GROUP_BYTES
    for preset in (NATIVE, ROCKETMQ):
        layout = Layout(preset, preset.schema, 5_000, 20_001)
        groups, size = directory_of(make.file(layout, 20_000)[0]).groups, layout.schema.item.itemsize
        assert len(groups) == -(-20_000 * size // GROUP_BYTES)
        assert groups["count"].sum() == 20_000 and groups["count"].max() * size < GROUP_BYTES + 1024
        assert preset is NATIVE or (groups["length"] == groups["count"] * np.uint64(size)).all()
    # slot 0 is small and shares its 16 KiB with the beginning of giant slot 1; they and slot 2 are three groups
    layout = Layout(NATIVE, NATIVE.schema, 10, 30_001)
    hashes = np.repeat(np.array([0, 1, 2], np.int32), [10, 20_000, 10])
    columns = make.columns(np.random.default_rng(0), layout.schema, len(hashes))
    directory = directory_of(make.compacted(*make.entries(layout, hashes, np.full(20_020, make.begin_ms), columns)))
    assert directory.groups[["first_slot", "count"]].tolist() == [(0, 10), (1, 20_000), (2, 10)]
    assert directory.groups["blocks"].tolist() == [0, 3, 0]
    # a slot of an empty group costs no read
    entries = make.entries(
        layout, hashes[10:2_010] + 2, np.full(2_000, make.begin_ms), {n: c[:2_000] for n, c in columns.items()}
    )
    directory = directory_of(make.compacted(*entries))
    assert [len(directory.runs_of(np.array([slot]), 0, 2**40)) for slot in (9, 3)] == [0, 1]


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
        count = sum(matches(items_of(data, trailer, run), wanted, low, high) for run in runs)
        assert count == matches(entries, wanted, low, high)
        if wanted == 5 and high - low <= 100:
            # of each of the slot's two hashes
            assert len(runs) <= 4


SHARD_BEGIN_MS = 1_700_000_000_000
SPLIT, JOINED = [SlotMap(1000, split=3), SlotMap(7, split=101)], [SlotMap(1000, join=10), SlotMap(1000, join=999)]
MAPS = [SlotMap(1), SlotMap(7), SlotMap(1000), *SPLIT, *JOINED]


def shard_items(count, hashes=2**31, seed=1):
    rng = np.random.default_rng(seed)
    items = np.zeros(count, KEYED_SCHEMA.item)
    items["key_hash"] = rng.integers(0, hashes, count)
    items["topic_id"] = 1
    items["queue_id"] = rng.integers(0, 4, count)
    items["offset"] = rng.integers(0, 2**40, count)
    items["size"] = rng.integers(1, 1000, count)
    items["time_diff_s"] = rng.integers(-5, 86400, count)
    items["fingerprint"] = rng.integers(0, 2**32, count)
    return items


def write_shard(items, slots, step, slot_range=None):
    """Add the items in pieces of about `step` that end where slots end. Return (file, writer)."""
    layout, topics = Layout(NATIVE, KEYED_SCHEMA, slots.base, 100), {1: "t"}
    options = PackingOptions.of(items, topics, len(items))
    times = SHARD_BEGIN_MS, SHARD_BEGIN_MS + 86_399_000
    writer = ShardWriter(layout, slots, slot_range or (0, slots.slots), *times, len(items), options)
    seconds = items["time_diff_s"].astype(np.int64) + SHARD_BEGIN_MS // 1000
    items = items[answer_sorted(items, seconds, slots, KEYED_SCHEMA)]
    of_slot = slots.slots_of(items["key_hash"].astype(np.int32))
    parts, at = [writer.begin()], 0
    while at < len(items):
        stop = min(at + step, len(items))
        while (
            stop < len(items)
            and of_slot[stop] == of_slot[stop - 1]
            and (stop < 600 or of_slot[stop] != of_slot[max(at, stop - 600)])
        ):
            stop += 1
        parts.append(writer.add(items[at:stop]))
        at = stop
    parts.append(writer.finish("f", "test", "commitlog", topics, {"table": "x"}))
    return b"".join(parts), writer, items


def test_maps_that_cannot_be():
    for arguments in ({"base": 0}, {"base": 5, "split": 2, "join": 2}, {"base": 2**30, "split": 4}):
        with pytest.raises(ConfigError):
            SlotMap(**arguments)
    assert SlotMap.for_count(1000, 40_000) == SlotMap(1000, split=10)
    assert SlotMap.for_count(1000, 400) == SlotMap(1000, join=8)
    assert SlotMap.for_count(1000, 0).slots == 2


@pytest.mark.parametrize("slots", MAPS[::2], ids=str)
@pytest.mark.parametrize(("count", "hashes"), [(1, 2**31), (5000, 2**31), (20_000, 3)])
def test_every_key_is_found_by_the_directory(slots, count, hashes):
    items = shard_items(count, hashes)
    data, writer, ordered = write_shard(items, slots, 700)
    trailer = parse_trailer(data, "shard", len(data))
    assert trailer.tail.position == writer.position
    assert trailer.metadata.count == count
    runs = trailer.directory.all_runs()
    pieces = [memoryview(data)[run.offset : run.offset + run.length] for run in runs]
    for run, piece in zip(runs, pieces, strict=True):
        check_run(piece, run, "shard")
    meta = trailer.metadata
    read = [meta.items_of(piece, run.count, "shard") for run, piece in zip(runs, pieces, strict=True)]
    assert b"".join(part.tobytes() for part in read) == ordered.tobytes()
    if count > 1000:
        assert sum(run.length for run in runs) < 0.6 * ordered.nbytes
    words = data[trailer.tail.position : trailer.tail.directory_position]
    for key_hash in np.unique(items["key_hash"])[:: max(1, count // 50)].tolist():
        wanted = ordered[ordered["key_hash"] == key_hash]
        parts = [
            part[part["key_hash"] == key_hash]
            for run in trailer.directory.runs_of(np.array([slots.slot_of(key_hash)]), 0, 2**62)
            for part in [meta.items_of(data[run.offset : run.offset + run.length], run.count, "shard")]
        ]
        assert b"".join(part.tobytes() for part in parts) == wanted.tobytes()
        for fingerprint in wanted["fingerprint"][:3].tolist():
            mixed = filter_hash(key_hash, fingerprint)
            at = 32 * block_number(mixed, len(words) // 32)
            assert block_may_hold(words[at : at + 32], mixed)


def test_checksums_tell_multisets_apart():
    items = shard_items(1000)
    seconds = items["time_diff_s"].astype(np.int64) + 5
    whole = entry_checksum(items, seconds)
    order = np.random.default_rng(2).permutation(1000)
    assert entry_checksum(items[order], seconds[order]) == whole
    halves = entry_checksum(items[:300], seconds[:300]) + entry_checksum(items[300:], seconds[300:])
    assert halves % 2**64 == whole
    for name in items.dtype.names:
        changed = items.copy()
        changed[name][17] ^= 1
        assert (entry_checksum(changed, seconds) == whole) == (name == "time_diff_s")
    assert entry_checksum(items[1:], seconds[1:]) != whole
    assert entry_checksum(items, seconds + 1) != whole


def test_no_entries_and_items_out_of_order_are_refused():
    with pytest.raises(InvalidArgument, match="without entries"):
        Compaction(np.zeros(0, NATIVE.schema.entry), Layout(NATIVE, NATIVE.schema, 7, 10), 0, 0)

    def sorted_by(slots):
        items = shard_items(100)
        return items[answer_sorted(items, items["time_diff_s"].astype(np.int64), slots, KEYED_SCHEMA)]

    def writer(slots, *of_shard):
        layout = Layout(NATIVE, KEYED_SCHEMA, slots.base, 100)
        slot_range, options = of_shard or (0, slots.slots), PackingOptions.of(shard_items(100), (1,), 100)
        return ShardWriter(layout, slots, slot_range, SHARD_BEGIN_MS, SHARD_BEGIN_MS, 100, options)

    with pytest.raises(InvalidArgument, match="without entries"):
        writer(SlotMap(1)).finish("f", "w", "custom", {}, {})
    many_slots, one_slot = sorted_by(SlotMap(1000)), sorted_by(SlotMap(1))
    for of_shard, first, second, problem in (
        (writer(SlotMap(1000)), many_slots[50:], many_slots[:50], "follow"),
        (writer(SlotMap(1000), 0, 10), many_slots[:0], many_slots, "follow"),
        (writer(SlotMap(1000), 500, 1000), many_slots[:0], many_slots, "follow"),
        (writer(SlotMap(1)), one_slot[:50], one_slot[50:], "continues"),
    ):
        if len(first):
            of_shard.add(first)
        with pytest.raises(InvalidArgument, match=problem):
            of_shard.add(second)


@pytest.mark.parametrize("oldest", [0, -(2**33)], ids=["of days", "of centuries"])
@pytest.mark.parametrize("slots", [SlotMap(1), SlotMap(7)], ids=str)
@pytest.mark.parametrize("runs", [0, 4], ids=["unsorted", "sorted runs"])
def test_answer_order_is_that_of_the_columns(slots, oldest, runs):
    items = shard_items(5_000, hashes=40)
    items["offset"] %= 3
    seconds = np.random.default_rng(2).choice(np.array([oldest, oldest + 1, 0, 1, 50]), len(items))
    if runs:
        parts = zip(np.array_split(items, runs), np.array_split(seconds, runs), strict=True)
        ordered = [(some, times, answer_sorted(some, times, slots, KEYED_SCHEMA)) for some, times in parts]
        items = np.concatenate([some[order] for some, _, order in ordered])
        seconds = np.concatenate([times[order] for _, times, order in ordered])
    order = answer_sorted(items, seconds, slots, KEYED_SCHEMA)
    ranks = hash_rank(items["key_hash"].astype(np.int32), slots.base)
    columns = [~items["offset"].astype(np.int64), -seconds, ranks]
    named = [items[name].astype(np.int64) for name in (*reversed(KEYED_SCHEMA.identity_extra), "queue_id")]
    # the sort is stable: of equal entries the first one comes first
    assert order.tolist() == np.lexsort([*named, *columns]).tolist()


@pytest.mark.parametrize("kind", ["native", "extended"])
@pytest.mark.parametrize("put", ["as sent", "late ones", "shuffled", "twice"])
@pytest.mark.parametrize("hashes", [[5], [5, 45, 85]], ids=["one key", "three keys"])
def test_a_giant_slot_is_put_in_answer_order(make, monkeypatch, kind, put, hashes):
    monkeypatch.setattr(slots_module, "_PIECE", 100)
    preset, schema = LAYOUTS[kind]
    layout, rng, n = Layout(preset, schema, 40, 4_001), np.random.default_rng(3), 2_000
    times = make.begin_ms + 1000 * np.sort(rng.integers(0, 300 if put != "twice" else 3, n))
    entries = make.entries(layout, rng.choice(hashes, n).astype(np.int32), times, make.columns(rng, schema, n))[
        1
    ].copy()
    entries["offset"] = np.arange(n) // (1 if put == "as sent" else 3)
    if put != "as sent":
        moved = rng.permutation(n)[: n if put == "shuffled" else 50]
        entries[np.sort(moved)] = entries[moved]
    numbers = np.arange(n, dtype=np.int32)[::-1].copy()
    columns = [np.arange(n), *offset_columns(entries, schema), -entries["time_diff_s"].astype(np.int64)]
    wanted = np.lexsort([*columns, entries["key_hash"] // 40])
    order_giant(entries, numbers, layout)
    assert numbers.tolist() == wanted.tolist()


@pytest.mark.parametrize(("put", "most_bytes"), [("as sent", 24), ("shuffled", 72)])
def test_a_giant_slot_takes_little_memory(make, put, most_bytes):
    """20 million rows with the same key and second took 1.1 GiB: all columns of a slot were sorted at once."""
    layout, n = Layout(NATIVE, NATIVE.schema, 40, 1 << 20), 1_000_000
    rng = np.random.default_rng(4)
    times = np.full(n, make.begin_ms) if put == "as sent" else make.begin_ms + 1000 * rng.integers(0, 10_000, n)
    entries = make.entries(layout, np.full(n, 5, np.int32), times, make.columns(rng, NATIVE.schema, n))[1].copy()
    entries["offset"], entries["queue_id"] = np.arange(n), 0
    numbers = np.arange(n, dtype=np.int32)[::-1].copy()
    with traced_memory() as memory:
        order_giant(entries, numbers, layout)
        assert memory()[1] < most_bytes * n
