"""A writer makes a shard in one pass. In every geometry the directory finds the shard's items, in order."""

import struct

import numpy as np
import pytest

from tiered_index.errors import ConfigError, InvalidArgument
from tiered_index.format.bloom import block_may_hold, block_number, filter_hash
from tiered_index.format.layout import NATIVE, Layout
from tiered_index.format.packed import PackingOptions
from tiered_index.format.schema import KEYED_SCHEMA
from tiered_index.format.shard import ShardWriter, answer_sorted, entry_checksum
from tiered_index.format.slots import SlotMap, hash_rank
from tiered_index.format.trailer import TAIL_SIZE, parse_trailer
from tiered_index.service.read.cold_path import check_run

BEGIN_MS = 1_700_000_000_000
SPLIT, JOINED = [SlotMap(1000, split=3), SlotMap(7, split=101)], [SlotMap(1000, join=10), SlotMap(1000, join=999)]
MAPS = [SlotMap(1), SlotMap(7), SlotMap(1000), *SPLIT, *JOINED]


def make_items(count, hashes=2**31, seed=1):
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


def write(items, slots, step, slot_range=None, *, packed=False):
    """Add the items in pieces of about `step` that end where slots end. Return (file, writer)."""
    layout, topics = Layout(NATIVE, KEYED_SCHEMA, slots.base, 100), {1: "t"}
    options = PackingOptions.of(items, topics, len(items)) if packed else None
    times = BEGIN_MS, BEGIN_MS + 86_399_000
    writer = ShardWriter(layout, slots, slot_range or (0, slots.slots), *times, len(items), options)
    seconds = items["time_diff_s"].astype(np.int64) + BEGIN_MS // 1000
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


@pytest.mark.parametrize("slots", MAPS, ids=str)
def test_slots_rise_with_the_rank_in_every_map(slots):
    hashes = np.append(make_items(5000)["key_hash"].astype(np.int32), [0, 2**31 - 1]).astype(np.int32)
    order = np.argsort(hash_rank(hashes, slots.base), kind="stable")
    of_slot = slots.slots_of(hashes[order])
    assert (np.diff(of_slot) >= 0).all()
    assert of_slot[0] >= 0 and of_slot[-1] < slots.slots
    assert [slots.slot_of(int(h)) for h in hashes[:100]] == slots.slots_of(hashes[:100]).tolist()
    base = hashes.astype(np.int64) % slots.base
    for low in (0, slots.base // 3, slots.base - 1):
        first, last = slots.slots_of_base(low, low + 1)
        mine = slots.slots_of(hashes[base == low])
        assert ((mine >= first) & (mine < last)).all()


def test_maps_that_cannot_be():
    for arguments in ({"base": 0}, {"base": 5, "split": 2, "join": 2}, {"base": 2**30, "split": 4}):
        with pytest.raises(ConfigError):
            SlotMap(**arguments)
    assert SlotMap.for_count(1000, 40_000) == SlotMap(1000, split=10)
    assert SlotMap.for_count(1000, 400) == SlotMap(1000, join=8)
    assert SlotMap.for_count(1000, 0).slots == 2


@pytest.mark.parametrize("slots", MAPS[::2], ids=str)
@pytest.mark.parametrize(("count", "hashes"), [(1, 2**31), (5000, 2**31), (20_000, 3)])
@pytest.mark.parametrize("packed", [False, True])
def test_every_key_is_found_by_the_directory(slots, count, hashes, packed):
    items = make_items(count, hashes)
    data, writer, ordered = write(items, slots, 700, packed=packed)
    trailer = parse_trailer(data, "shard", len(data))
    assert trailer.tail.position == writer.position
    assert trailer.metadata.count == count
    runs = trailer.directory.all_runs()
    pieces = [memoryview(data)[run.offset : run.offset + run.length] for run in runs]
    for run, piece in zip(runs, pieces, strict=True):
        check_run(piece, run, "shard")
    meta = trailer.metadata
    assert data[-TAIL_SIZE + 8 : -TAIL_SIZE + 12] == struct.pack(">I", 3 if packed else 1)
    read = [meta.items_of(piece, run.count, "shard") for run, piece in zip(runs, pieces, strict=True)]
    assert b"".join(part.tobytes() for part in read) == ordered.tobytes()
    if packed and count > 1000:
        assert sum(run.length for run in runs) < 0.6 * ordered.nbytes
    words = data[trailer.tail.position : trailer.tail.directory_position]
    for key_hash in np.unique(items["key_hash"])[:: max(1, count // 50)].tolist():
        wanted = ordered[ordered["key_hash"] == key_hash]
        found = [
            part[part["key_hash"] == key_hash]
            for run in trailer.directory.runs_of(np.array([slots.slot_of(key_hash)]), 0, 2**62)
            for part in [meta.items_of(data[run.offset : run.offset + run.length], run.count, "shard")]
        ]
        assert b"".join(part.tobytes() for part in found) == wanted.tobytes()
        for fingerprint in wanted["fingerprint"][:3].tolist():
            mixed = filter_hash(key_hash, fingerprint)
            at = 32 * block_number(mixed, len(words) // 32)
            assert block_may_hold(words[at : at + 32], mixed)


@pytest.mark.parametrize("slots", [SlotMap(1), SlotMap(7, split=11), SlotMap(1000, join=10)], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_pieces_make_no_difference(slots, packed):
    items = make_items(30_000, 300)
    assert write(items, slots, 600, packed=packed)[0] == write(items, slots, 1 << 20, packed=packed)[0]


def test_checksums_tell_multisets_apart():
    items = make_items(1000)
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


def test_items_out_of_order_are_refused():
    items = make_items(100)
    seconds = items["time_diff_s"].astype(np.int64)
    slots = SlotMap(1000)
    items = items[answer_sorted(items, seconds, slots, KEYED_SCHEMA)]
    layout = Layout(NATIVE, KEYED_SCHEMA, 1000, 100)
    writer = ShardWriter(layout, slots, (0, 1000), BEGIN_MS, BEGIN_MS, 100)
    with pytest.raises(InvalidArgument, match="without entries"):
        writer.finish("f", "w", "custom", {}, {})
    writer.add(items[50:])
    with pytest.raises(InvalidArgument, match="follow"):
        writer.add(items[:50])
    part = SlotMap(1)
    writer = ShardWriter(Layout(NATIVE, KEYED_SCHEMA, 1, 100), part, (0, 1), BEGIN_MS, BEGIN_MS, 100)
    ordered = items[answer_sorted(items, items["time_diff_s"].astype(np.int64), part, KEYED_SCHEMA)]
    writer.add(ordered[:50])
    with pytest.raises(InvalidArgument, match="continues"):
        writer.add(ordered[50:])
    with pytest.raises(InvalidArgument, match="follow"):
        ShardWriter(layout, slots, (0, 10), BEGIN_MS, BEGIN_MS, 100).add(items)
    with pytest.raises(InvalidArgument, match="follow"):
        ShardWriter(layout, slots, (500, 1000), BEGIN_MS, BEGIN_MS, 100).add(items)


@pytest.mark.parametrize("oldest", [0, -(2**33)], ids=["of days", "of centuries"])
@pytest.mark.parametrize("slots", [SlotMap(1), SlotMap(7)], ids=str)
@pytest.mark.parametrize("runs", [0, 4], ids=["unsorted", "sorted runs"])
def test_answer_order_is_that_of_the_columns(slots, oldest, runs):
    items = make_items(5_000, hashes=40)
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
