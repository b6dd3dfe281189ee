"""`verify_compacted` names every kind of defect in files whose checksums are right but whose content is wrong."""

import struct
import zlib

import numpy as np
import pytest

from tests.support.changes import replace
from tests.support.compacted_files import SMALL, parts, verify
from tiered_index.errors import InvalidArgument
from tiered_index.format.layout import HEADER_SIZE, NATIVE, ROCKETMQ, Header, Layout
from tiered_index.format.trailer import Directory, build_trailer, parse_trailer
from tiered_index.format.verify import verify_compacted


@pytest.fixture(scope="module")
def giant(make):
    """A slot of two blocks and a part of a third, then a small slot."""
    layout = Layout(NATIVE, NATIVE.schema, 2, 30_001)
    rng = np.random.default_rng(3)
    hashes = np.concatenate([np.full(20_000, 4), np.full(10, 7)]).astype(np.int32)
    times, columns = make.begin_ms + 1000 * np.arange(20_010), make.columns(rng, layout.schema, 20_010)
    return make.compacted(*make.entries(layout, hashes, times, columns))


def rebuilt(data, *, body=None, metadata=None, more=None, directory=None, filter_bytes=None):
    """Return the file or shard with a changed body or trailer. All checksums match it, so only its content is wrong."""
    trailer = parse_trailer(data, "file", len(data))
    body = data[: trailer.tail.position] if body is None else bytes(body)
    groups, blocks = trailer.directory.groups.copy(), trailer.directory.blocks.copy()
    if directory:
        directory(groups, blocks)
    for table in (groups, blocks):
        for run in table:
            run["crc32"] = zlib.crc32(body[int(run["offset"]) : int(run["offset"]) + int(run["length"])])
    crcs = {"header_crc32": zlib.crc32(body[:HEADER_SIZE])}
    if not is_shard(trailer):
        crcs["slots_crc32"] = zlib.crc32(body[HEADER_SIZE : items_position(trailer)])
    meta = replace(trailer.metadata, **(crcs | (metadata or {})))
    meta = replace(meta, more={k: v for k, v in {**meta.more, **(more or {})}.items() if v is not None})
    if filter_bytes is None:
        filter_bytes = data[trailer.tail.position : trailer.tail.directory_position]
    return body + build_trailer(trailer.tail.position, Directory(groups, blocks), meta, filter_bytes)


def is_shard(trailer):
    return "slot_map" in trailer.metadata.more


def items_position(trailer):
    return HEADER_SIZE if is_shard(trailer) else trailer.metadata.layout.items_position


def changed(data, change):
    """Return the bytes before the trailer after `change` has edited the items."""
    trailer = parse_trailer(data, "file", len(data))
    body = bytearray(data[: trailer.tail.position])
    change(np.frombuffer(memoryview(body)[items_position(trailer) :], trailer.metadata.layout.schema.item))
    return bytes(body)


def change_item(data, index, **fields):
    def change(items):
        for name, value in fields.items():
            items[name][index] = value

    return changed(data, change)


def items_in(data):
    trailer = parse_trailer(data, "file", len(data))
    meta = trailer.metadata
    return np.frombuffer(data, meta.layout.schema.item, meta.count, items_position(trailer))


def test_rebuilding_without_change_is_sound(small, giant):
    assert rebuilt(small) == small
    assert rebuilt(giant) == giant
    assert verify(giant) == []


def test_item_in_another_slot(small):
    wrong = int(items_in(small)["key_hash"][3]) ^ 1
    findings = verify(rebuilt(small, body=change_item(small, 3, key_hash=wrong)))
    assert "slot" in parts(findings)
    (finding,) = [f for f in findings if f.part == "slot"]
    assert finding.offset == SMALL.items_position + 3 * 32
    assert "1 items are in the wrong slot" in finding.problem


def test_items_out_of_order(small):
    items = items_in(small)
    row = next(i for i in range(11) if items["key_hash"][i] == items["key_hash"][i + 1] and items[i] != items[i + 1])

    def swap(items):
        items[[row, row + 1]] = items[[row + 1, row]]

    findings = verify(rebuilt(small, body=changed(small, swap)))
    assert parts(findings) == {"order"}
    assert findings[0].offset == SMALL.items_position + 32 * (row + 1)


def test_order_across_blocks(giant):
    """The first item of a block is newer than the last item of the block before."""
    trailer = parse_trailer(giant, "file", len(giant))
    second = int(trailer.directory.blocks["count"][0])
    newer = int(items_in(giant)["time_diff_s"][second]) + 5_000

    def bounds(groups, blocks):
        blocks["second_max"][1] = newer + trailer.metadata.begin_ms // 1000

    findings = verify(rebuilt(giant, body=change_item(giant, second, time_diff_s=newer), directory=bounds))
    assert parts(findings) == {"order"}


def test_block_bounds(giant):
    for name in ("hash_min", "hash_max", "second_min", "second_max"):

        def change(groups, blocks, name=name):
            blocks[name][1] += 1

        assert parts(verify(rebuilt(giant, directory=change))) == {"bounds"}


@pytest.mark.parametrize("change", [{"second_min": -1}, {"second_min": 1}, {"second_max": -1}, {"second_max": 1}])
def test_interval(small, change):
    meta = parse_trailer(small, "file", len(small)).metadata
    findings = verify(rebuilt(small, metadata={name: getattr(meta, name) + value for name, value in change.items()}))
    assert parts(findings) == {"interval"}


def test_topic_without_name(small):
    assert parts(verify(rebuilt(small, metadata={"topics": ((1, "orders"),)}))) == {"topic"}
    # a topic does not narrow a lookup in a file without a topic table
    assert verify(rebuilt(small, metadata={"topics": ()})) == []


@pytest.mark.parametrize("field", Header._fields)
def test_header_contradicts_metadata(small, field):
    header = Header(*struct.unpack_from(">IqqiI", small))
    value = NATIVE.begin_magic if field == "magic" else getattr(header, field) + 1
    body = header._replace(**{field: value}).pack() + small[28 : parse_trailer(small, "file", len(small)).tail.position]
    findings = verify(rebuilt(small, body=body))
    assert parts(findings) == {"header"}
    assert field in findings[0].problem


def test_unknown_magic(small):
    body = b"\0\0\0\0" + small[4 : parse_trailer(small, "file", len(small)).tail.position]
    (finding,) = verify(rebuilt(small, body=body))
    assert (finding.part, finding.offset) == ("header", 0)
    assert "wrong magic" in finding.problem


def test_counts(small):
    """A count that contradicts geometry and position is a finding about the metadata, and ends the checks."""
    findings = verify(rebuilt(small, metadata={"count": 13}))
    assert parts(findings) == {"metadata"}
    assert parts(verify(rebuilt(small, metadata={"slots_in_use": 1}))) == {"header", "slots"}


@pytest.mark.parametrize(("slot", "position", "length"), [(0, 4, 0), (4, 0, 32), (2, 0, -64), (1, 32, -32), (3, 0, 1)])
def test_slot_table_does_not_join(small, slot, position, length):
    body = bytearray(small[: parse_trailer(small, "file", len(small)).tail.position])
    at = 28 + 8 * slot
    old = struct.unpack_from(">ii", body, at)
    struct.pack_into(">ii", body, at, old[0] + position, old[1] + length)
    assert parts(verify(rebuilt(small, body=body))) == {"slots"}


def test_directory_does_not_cover(small, giant):
    def spoiled(data, table, name, row, delta):
        def change(*tables):
            tables[table][name][row] = int(tables[table][name][row]) + delta

        return parts(verify(rebuilt(data, directory=change)))

    for name, delta in (("first_slot", 1), ("count", 1), ("offset", 32), ("length", -32)):
        assert spoiled(small, 0, name, 0, delta) == {"directory"}, name
    for name, delta in (("first_block", 1), ("blocks", -1), ("blocks", 1)):
        assert spoiled(giant, 0, name, 0, delta) == {"directory"}, name
    # no group names these blocks
    assert parts(verify(rebuilt(giant, directory=lambda groups, blocks: groups["blocks"].fill(0)))) == {"directory"}
    for name, delta in (("offset", 32), ("length", -32), ("count", -1)):
        assert spoiled(giant, 1, name, 1, delta) == {"directory"}, name


def test_damaged_run_is_named_and_the_rest_is_still_checked(giant):
    trailer = parse_trailer(giant, "file", len(giant))
    damaged = bytearray(giant)
    damaged[int(trailer.directory.blocks["offset"][1]) + 5] ^= 255
    (finding,) = verify(bytes(damaged))
    assert (finding.part, finding.offset) == ("run", int(trailer.directory.blocks["offset"][1]))


def test_short_reads_are_findings(small):
    def short_table(position, length):
        return small[position : position + min(length, 30 if position == 28 else length)]

    assert parts(verify_compacted(short_table, len(small), "f")) == {"slots"}
    assert verify_compacted(lambda position, length: b"", len(small), "f")[0].part == "tail"


def test_rocketmq_order_is_not_judged_by_time(make):
    """The order "newest insertion first" says nothing about times. `verify` checks only that order's own rules."""
    layout = Layout(ROCKETMQ, ROCKETMQ.schema, 5, 20)
    data, _ = make.file(layout, 12, distinct_hashes=4)
    assert verify(data) == []
    changed = change_item(data, 0, key_hash=int(items_in(data)["key_hash"][0]) ^ 1)
    assert parts(verify(rebuilt(data, body=changed, filter_bytes=b""))) == {"slot"}


@pytest.mark.parametrize("column", ["key_hash", "fingerprint"])
def test_items_that_the_filter_denies(small, column):
    """The filter must have every item. All missing items make one finding, at the first of them."""
    wrong = int(items_in(small)[column][3]) ^ 1 << 20
    findings = [f for f in verify(rebuilt(small, body=change_item(small, 3, **{column: wrong}))) if f.part == "filter"]
    told = ("1 items are excluded by the filter", SMALL.items_position + 3 * 32)
    assert [(f.problem, f.offset) for f in findings] == [told]
    (finding,) = verify(rebuilt(small, filter_bytes=bytes(32)))
    assert (finding.part, finding.offset) == ("filter", SMALL.items_position)
    assert finding.problem.startswith("12 items")


def test_every_bit_of_the_filter_counts(make):
    """If one bit of any block is cleared, the filter excludes an item."""
    data, _ = make.file(Layout(NATIVE, NATIVE.schema, 50, 500), 400)
    tail = parse_trailer(data, "file", len(data)).tail
    held = data[tail.position : tail.directory_position]
    assert len(held) > 10 * 32
    words = np.frombuffer(held, "<u4")
    for at in (0, len(words) // 2, len(words) - 1):
        less = words.copy()
        less[at] &= less[at] - np.uint32(1)  # the number's lowest bit
        assert parts(verify(rebuilt(data, filter_bytes=less.tobytes()))) == {"filter"}


def test_files_of_earlier_versions_have_no_filter(small, giant):
    for data in (small, giant):
        bare = rebuilt(data, filter_bytes=b"")
        assert parse_trailer(bare, "file", len(bare)).tail.filter_length == 0
        assert verify(bare) == []


def test_a_filter_is_whole_blocks(small):
    (finding,) = verify(rebuilt(small, filter_bytes=b"\xff" * 33))
    assert finding.part == "filter"
    assert "not a whole number of blocks" in finding.problem


def test_a_part_of_the_slots_is_not_a_whole_file(make):
    data, _ = make.file(SMALL, 12, distinct_hashes=4, about={"slot_base": 10, "slot_range": (5, 10)})
    with pytest.raises(InvalidArgument, match="a part of a file"):
        verify(data)
