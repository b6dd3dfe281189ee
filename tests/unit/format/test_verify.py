"""`verify` names each defect of files and shards whose checksums are right but whose content is wrong."""

import struct
import zlib

import numpy as np
import pytest

from tests.support.changes import replace
from tests.support.compacted_files import SMALL, parts, reader
from tests.unit.format.conftest import BEGIN_MS, columns_of, compacted, entries_of, random_file
from tiered_index.errors import InvalidArgument
from tiered_index.format.layout import HEADER_SIZE, NATIVE, PRESETS, ROCKETMQ, Header, Layout, SlotMap
from tiered_index.format.packed import PackingOptions
from tiered_index.format.shard import ShardWriter, answer_sorted
from tiered_index.format.trailer import Directory, build_trailer, parse_trailer
from tiered_index.format.verify import verify_compacted, verify_shard

BEGIN_S = 1_700_006_400
SIZE = ROCKETMQ.schema.item.itemsize
SLOTS = SlotMap(7, split=3)


def shard(count, slots=SLOTS, hot=0, preset="native"):
    """Return a shard of random entries, `hot` of them with one hash."""
    schema = PRESETS[preset].schema
    rng = np.random.default_rng(5)
    items = np.zeros(count + hot, schema.item)
    items["key_hash"] = np.append(rng.integers(0, 2**31, count), np.full(hot, 77))
    items["topic_id"] = rng.integers(1, 3, count + hot)
    items["offset"] = rng.permutation(count + hot)
    items["time_diff_s"] = rng.integers(0, 86400, count + hot)
    if schema.keyed:
        items["fingerprint"] = items["key_hash"].astype(np.uint32) ^ 5
    items = items[answer_sorted(items, items["time_diff_s"].astype(np.int64), slots, schema)]
    options = PackingOptions.of(items, (1, 2), len(items))
    times = BEGIN_S * 1000, (BEGIN_S + 86400) * 1000 - 1
    layout = Layout(PRESETS[preset], schema, slots.base, 100)
    writer = ShardWriter(layout, slots, (0, slots.slots), *times, len(items), options)
    pieces = [writer.begin(), bytes(writer.add(items))]
    more = {"table": "t1", "window_s": 86400, "sequence": 3}
    return b"".join([*pieces, writer.finish("f", "test", "commitlog", {1: "orders", 2: "payments"}, more)])


def giant_file(preset):
    """Return a file with a slot of two blocks and a part of a third, then a small slot."""
    layout = Layout(preset, preset.schema, 2, 30_001)
    hashes = np.concatenate([np.full(20_000, 4), np.full(10, 7)]).astype(np.int32)
    columns = columns_of(np.random.default_rng(3), layout.schema, 20_010)
    return compacted(*entries_of(layout, hashes, BEGIN_MS + 1000 * np.arange(20_010), columns))


@pytest.fixture(scope="module")
def files():
    layout = Layout(ROCKETMQ, ROCKETMQ.schema, 5, 20)
    return {
        "file": random_file(SMALL, 12, distinct_hashes=4)[0],
        "giant file": giant_file(NATIVE),
        "rocketmq": random_file(layout, 12, distinct_hashes=4)[0],
        "giant rocketmq": giant_file(ROCKETMQ),
        "shard": shard(50),
        "giant shard": shard(3000, hot=20_000),
    }


def is_shard(trailer):
    return "slot_map" in trailer.metadata.more


def trailer_of(data):
    return parse_trailer(data, "file", len(data))


def verify(data, kind):
    check = verify_shard if "shard" in kind else verify_compacted
    return check(reader(data), len(data), "file")


def rebuilt(data, *, body=None, items=None, metadata=None, more=None, directory=None, filter_bytes=None):
    """Return the file or shard with changed items, bytes or trailer. All checksums match, so only its content is wrong.

    `items` edits the array of the file's items; `metadata` is changed fields, or makes them from the present ones.
    """
    trailer = trailer_of(data)
    packing = trailer.metadata.packing
    begin = trailer.metadata.layout.items_position if packing is None else HEADER_SIZE
    body = bytearray(data[: trailer.tail.position] if body is None else body)
    groups, blocks = trailer.directory.groups.copy(), trailer.directory.blocks.copy()
    if items is not None and packing is None:
        items(np.frombuffer(memoryview(body)[begin:], trailer.metadata.layout.schema.item))
    elif items is not None:
        body[begin:] = repacked(body, trailer, items, groups, blocks)
    body = bytes(body)
    if directory is not None:
        directory(groups, blocks)
    for table in (groups, blocks):
        for run in table:
            run["crc32"] = zlib.crc32(body[int(run["offset"]) : int(run["offset"]) + int(run["length"])])
    crcs = {"header_crc32": zlib.crc32(body[:HEADER_SIZE])}
    if not is_shard(trailer):
        crcs["slots_crc32"] = zlib.crc32(body[HEADER_SIZE:begin])
    changed = metadata(trailer.metadata) if callable(metadata) else metadata or {}
    meta = replace(trailer.metadata, **crcs, **changed)
    meta = replace(meta, more={k: v for k, v in {**meta.more, **(more or {})}.items() if v is not None})
    if filter_bytes is None:
        filter_bytes = data[trailer.tail.position : trailer.tail.directory_position]
    return body + build_trailer(len(body), Directory(groups, blocks), meta, filter_bytes)


def repacked(body, trailer, change, groups, blocks):
    """Return the packed runs of changed items, and set their places in the tables of the directory."""
    runs, packing = trailer.directory.all_runs(), trailer.metadata.packing
    counts = [run.count for run in runs]
    items, _ = packing.unpack([body[run.offset : run.offset + run.length] for run in runs], np.array(counts), "file")
    change(items)
    written = packing.pack(items, counts)
    ends = np.cumsum([HEADER_SIZE, *map(len, written)]).tolist()
    moved = {run.offset: end for run, end in zip(runs, ends, strict=False)} | {trailer.tail.position: ends[-1]}
    for table in (groups, blocks):
        stops = (table["offset"] + table["length"]).tolist()
        table["offset"] = [moved[offset] for offset in table["offset"].tolist()]
        table["length"] = [moved[stop] - int(at) for stop, at in zip(stops, table["offset"], strict=True)]
    return b"".join(written)


def stats_of(topic_id, meta):
    """Return the rows of one topic id."""
    return [row for row in meta.more["topic_stats"] if row[0] == topic_id]


def moved(field, by):
    """Change a number of the metadata."""
    return {"metadata": lambda meta: {field: getattr(meta, field) + by}}


def item(index, **fields):
    """Change fields of an item."""

    def change(items):
        for name, value in fields.items():
            items[name][index] = value(items) if callable(value) else value

    return {"items": change}


def swapped(items):
    """Exchange two items of one hash, or else the first two items' keys."""
    same = np.flatnonzero((items["key_hash"][1:] == items["key_hash"][:-1]) & (items[1:] != items[:-1]))
    row = int(same[0]) if len(same) else 10
    items[[row, row + 1]] = items[[row + 1, row]]


def run(table, name, by, row=1):
    """Change a number of the directory's groups (0) or blocks (1)."""

    def change(*tables):
        tables[table][name][row] = int(tables[table][name][row]) + by

    return {"directory": change}


def packed_line(**change):
    return {"metadata": lambda meta: {"more": {**meta.more, "packed": {**meta.more["packed"], **change}}}}


ONE_TOPIC = {"metadata": {"topics": ((1, "orders"),)}}
STATS_OF_ONE = {
    "metadata": lambda meta: {**ONE_TOPIC["metadata"], "more": {**meta.more, "topic_stats": stats_of(1, meta)}}
}
ANY_FILE, ANY_SHARD = ("file", "rocketmq"), ("shard", "giant shard")
PLACES = ("offset", "length", "count")
GIANT = ("giant file", "giant rocketmq", "giant shard")
BOUNDS = ("hash_min", "hash_max", "second_min", "second_max")
DEFECTS = [
    *[(kind, moved(name, by), {"interval"}) for kind in ANY_FILE for name in BOUNDS[2:] for by in (-1, 1)],
    *[("shard", moved("second_max", by), {"interval"}) for by in (-1, 1, 86_400)],
    *[(kind, STATS_OF_ONE, {"topic"}) for kind in (*ANY_FILE, *ANY_SHARD)],
    *[(kind, ONE_TOPIC, {"metadata"}) for kind in (*ANY_FILE, *ANY_SHARD)],
    *[(kind, {"metadata": {"topics": ()}}, {"metadata"}) for kind in (*ANY_FILE, *ANY_SHARD)],
    *[(kind, {"more": {"topic_stats": []}}, {"metadata"}) for kind in (*ANY_FILE, *ANY_SHARD)],
    ("rocketmq", {"metadata": {"count": 13}}, {"metadata"}),
    ("file", {"metadata": {"count": 13}}, {"directory"}),
    ("rocketmq", {"metadata": {"slots_in_use": 1}}, {"header", "slots"}),
    ("file", {"metadata": {"slots_in_use": 1}}, {"header", "metadata"}),
    ("shard", {"metadata": {"slots_in_use": 3}}, {"metadata"}),
    ("shard", {"metadata": {"count": 49}}, {"directory"}),
    ("shard", {"metadata": {"slot_base": 8}}, {"metadata"}),
    *[("shard", {"metadata": {"slot_range": value}}, {"metadata"}) for value in ((0, 22), (5, 5))],
    *[
        ("shard", {"metadata": {name: value}}, {"metadata"})
        for name, value in (("begin_ms", BEGIN_S * 1000 + 1), ("end_ms", 5))
    ],
    *[("shard", {"more": {name: None}}, {"metadata"}) for name in ("window_s", "checksum", "slot_map")],
    ("shard", {"more": {"window_s": 3600}}, {"metadata", "interval"}),
    ("shard", {"more": {"checksum": "no"}}, {"metadata"}),
    ("shard", {"more": {"slot_map": {"base": 8, "split": 1, "join": 1}}}, {"metadata"}),
    *[(kind, {"more": {"checksum": "0" * 16}}, {"checksum"}) for kind in ANY_SHARD],
    ("shard", item(4, size=9), {"checksum"}),
    ("shard", item(4, fingerprint=9), {"filter", "checksum"}),
    (
        "giant shard",
        item(0, key_hash=lambda items: items["key_hash"][-1]),
        {"metadata", "slot", "order", "bounds", "checksum", "filter"},
    ),
    ("file", item(3, key_hash=lambda items: items["key_hash"][3] ^ 1), {"metadata", "filter", "order"}),
    ("rocketmq", item(0, key_hash=lambda items: items["key_hash"][0] ^ 1) | {"filter_bytes": b""}, {"slot"}),
    ("file", {"items": swapped}, {"order"}),
    ("shard", {"items": swapped}, {"metadata", "order"}),
    *[(kind, run(1, name, 1), {"bounds"}) for kind in GIANT for name in BOUNDS],
    *[(kind, run(0, name, 1, 0), {"directory"}) for kind in ANY_FILE for name in ("first_slot", "count", "offset")],
    *[("rocketmq", run(0, name, SIZE, 0), {"directory"}) for name in ("offset", "length")],
    *[("giant file", run(0, name, by, 0), {"directory"}) for name, by in (("first_block", 1), ("blocks", -1))],
    # no group names these blocks
    ("giant file", {"directory": lambda groups, blocks: groups["blocks"].fill(0)}, {"directory"}),
    *[(kind, run(1, name, -1), {"directory"}) for kind in GIANT for name in PLACES],
    *[("giant rocketmq", run(1, name, -SIZE), {"directory"}) for name in PLACES],
    *[(kind, run(n, name, 1), {"directory"}) for kind in GIANT for n in (0, 1) for name in PLACES],
    ("giant shard", run(0, "first_slot", 100), {"directory"}),
    *[("file", packed_line(**wrong), {"metadata"}) for wrong in ({"seconds": [7]}, {"shift": 63}, {"base": "0"})],
    *[(kind, {"more": {"packed": []}}, {"metadata"}) for kind in ("file", "shard")],
    ("rocketmq", {"more": {"packed": {"base": 0, "shift": 0, "seconds": [0, 0]}}}, {"metadata"}),
    ("file", {"filter_bytes": b"\xff" * 33}, {"filter"}),
    # a file need not have a filter
    *[(kind, {"filter_bytes": b""}, set()) for kind in ("file", "giant file", "rocketmq")],
]


@pytest.mark.parametrize("number", range(len(DEFECTS)), ids=lambda n: f"{n} {DEFECTS[n][0]} {sorted(DEFECTS[n][2])}")
def test_each_contradiction_is_named_by_its_part(files, number):
    kind, change, expected = DEFECTS[number]
    assert parts(verify(rebuilt(files[kind], **change), kind)) == expected


def test_files_without_a_defect_are_sound(files):
    for kind, data in files.items():
        assert rebuilt(data) == data and verify(data, kind) == []
    for slots in (SlotMap(1), SlotMap(1000), SlotMap(1000, join=64)):
        for preset in PRESETS:
            for count, hot in ((1, 0), (500, 20_000)):
                data = shard(count, slots, hot, preset)
                assert verify(data, "shard") == [] and b'"order":"answer"' in data


@pytest.mark.parametrize("kind", ["giant file", "giant shard"])
def test_order_across_blocks(files, kind):
    """The first item of a block is newer than the last item of the block before."""
    meta, directory = trailer_of(files[kind]).metadata, trailer_of(files[kind]).directory
    runs, all_blocks = directory.all_runs(), directory.blocks
    newest = meta.second_max - meta.begin_ms // 1000
    assert len(all_blocks) == 3
    # some blocks are checked together, and some borders are between two checks
    first = sum(run.count for run in runs if run.offset < int(all_blocks["offset"][0]))
    for number in (1, 2):
        row = first + int(all_blocks["count"][:number].sum())

        def bounds(groups, blocks, number=number):
            blocks["second_max"][number] = meta.second_max

        findings = verify(rebuilt(files[kind], **item(row, time_diff_s=newest), directory=bounds), kind)
        assert parts(findings) == ({"order", "checksum"} if "shard" in kind else {"order"})


def test_a_header_or_slot_table_that_contradicts_the_trailer(files):
    data, end = files["rocketmq"], trailer_of(files["rocketmq"]).tail.position

    def with_body(body):
        return verify(rebuilt(data, body=body), "rocketmq")

    header = Header(*struct.unpack_from(">IqqiI", data))
    for field in Header._fields:
        value = ROCKETMQ.begin_magic if field == "magic" else getattr(header, field) + 1
        (finding,) = with_body(header._replace(**{field: value}).pack() + data[HEADER_SIZE:end])
        assert finding.part == "header" and field in finding.problem
    (finding,) = with_body(bytes(4) + data[4:end])
    assert (finding.part, finding.offset) == ("header", 0) and "wrong magic" in finding.problem
    for slot, position, length in ((0, 4, 0), (4, 0, SIZE), (2, 0, -2 * SIZE), (1, SIZE, -SIZE)):
        body, at = bytearray(data[:end]), HEADER_SIZE + 8 * slot
        old = struct.unpack_from(">ii", body, at)
        struct.pack_into(">ii", body, at, old[0] + position, old[1] + length)
        assert parts(with_body(body)) == {"slots"}
    shard = files["shard"]
    items = shard[HEADER_SIZE : trailer_of(shard).tail.position]
    for at, value in ((0, b"TIXC"), (20, b"\0\0\0\1"), (11, b"\1")):
        changed = shard[:at] + value + shard[at + len(value) : HEADER_SIZE]
        assert parts(verify(rebuilt(shard, body=changed + items), "shard")) == {"header"}


@pytest.mark.parametrize("kind", ["giant file", "giant shard"])
def test_a_damaged_run_is_named_by_its_place_and_the_rest_is_still_checked(files, kind):
    offset = int(trailer_of(files[kind]).directory.blocks["offset"][1])
    damaged = bytearray(files[kind])
    damaged[offset + 5] ^= 255
    (finding,) = verify(bytes(damaged), kind)
    assert (finding.part, finding.offset) == ("run", offset)


def test_every_flipped_byte_and_every_cut_of_a_shard_is_found():
    small = shard(50)
    for position in range(len(small)):
        spoiled = bytearray(small)
        spoiled[position] ^= 16
        assert verify(bytes(spoiled), "shard") and verify(small[:position], "shard"), position


def test_blocks_of_other_counts_than_their_packed_runs(files):
    def move_one(groups, blocks):
        blocks["count"][0] += 1
        blocks["count"][1] -= 1

    first, second = verify(rebuilt(files["giant shard"], directory=move_one), "giant shard")[:2]
    assert (first.part, second.part) == ("run", "run") and "packed run" in first.problem


def test_short_reads_are_findings(files):
    small = files["rocketmq"]

    def short_table(position, length):
        return small[position : position + min(length, 30 if position == HEADER_SIZE else length)]

    assert parts(verify_compacted(short_table, len(small), "f")) == {"slots"}
    assert verify_compacted(lambda position, length: b"", len(small), "f")[0].part == "tail"


def test_every_bit_of_the_filter_counts():
    """If one bit of any block is cleared, the filter excludes an item."""
    data, _ = random_file(Layout(NATIVE, NATIVE.schema, 50, 500), 400)
    tail = trailer_of(data).tail
    words = np.frombuffer(data[tail.position : tail.directory_position], "<u4")
    assert len(words) > 80
    for at in (0, len(words) // 2, len(words) - 1):
        less = words.copy()
        less[at] &= less[at] - np.uint32(1)  # the number's lowest bit
        assert parts(verify(rebuilt(data, filter_bytes=less.tobytes()), "file")) == {"filter"}


def test_a_part_of_the_slots_is_not_a_whole_file():
    data, _ = random_file(SMALL, 12, distinct_hashes=4, about={"slot_base": 10, "slot_range": (5, 10)})
    with pytest.raises(InvalidArgument, match="a part of a file"):
        verify(data, "file")
