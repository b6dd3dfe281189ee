"""A reader notices every cut and every flipped bit of a compacted file's trailer, and names later versions."""

import json
import struct
import zlib

import numpy as np
import pytest

from tests.support.changes import replace
from tests.support.compacted_files import SMALL, parts, verify
from tiered_index.errors import CorruptFile, TieredIndexError, UnsupportedVersion
from tiered_index.format.layout import HEADER_SIZE, PRESETS, ROCKETMQ, Layout
from tiered_index.format.metadata import Metadata, topic_stats
from tiered_index.format.trailer import FORMAT_VERSION, TAIL_SIZE, Directory, Tail, build_trailer, parse_trailer


def read_through_trailer(data):
    """Read a whole file and check the CRC32 of each part. Return the parts."""
    trailer = parse_trailer(data, "file", len(data))
    runs = []
    for run in trailer.directory.all_runs():
        part = data[run.offset : run.offset + run.length]
        if zlib.crc32(part) != run.crc32:
            raise CorruptFile("file", "run's CRC32 does not match", offset=run.offset)
        runs.append(part)
    return trailer.metadata, trailer.directory.encode(), runs


def test_round_trip(small):
    trailer = parse_trailer(small, "file", len(small))
    meta = trailer.metadata
    assert meta.layout == SMALL
    assert (meta.count, meta.file_id, meta.lane, meta.writer) == (12, "001700000000000-0123456789ab", "main", "test")
    assert (meta.topics, meta.source_positions) == (((1, "orders"), (2, "payments")), {"store-a": 42})
    assert (meta.slot_base, meta.slot_range) == (5, (0, 5))
    assert Metadata.decode(meta.encode(), "file") == meta
    assert json.loads(meta.encode())["order"] == "answer"
    assert Tail.decode(small, "file", len(small)) == trailer.tail
    assert trailer.tail.file_size == len(small)
    # directory, metadata and tail are one contiguous range, so a reader needs only its start
    assert parse_trailer(small[trailer.tail.directory_position :], "file", len(small)).metadata == meta
    assert verify(small) == []
    with pytest.raises(CorruptFile, match="add up"):
        parse_trailer(small, "file", len(small) + 1)
    with pytest.raises(CorruptFile, match="cut off"):
        parse_trailer(small[-TAIL_SIZE - 1 :], "file", len(small))


@pytest.fixture(params=["native", "rocketmq"])
def either(request, make):
    preset = PRESETS[request.param]
    return make.file(Layout(preset, preset.schema, 5, 20), 12, distinct_hashes=4)[0]


def test_truncated_at_every_byte(either):
    for length in range(len(either)):
        cut = either[:length]
        with pytest.raises(CorruptFile):
            parse_trailer(cut, "file", length)
        with pytest.raises(CorruptFile):
            # the reader knows the size from elsewhere, and the bytes are too few
            parse_trailer(cut[-length // 2 :] if length else cut, "file", len(either))
        assert parts(verify(cut)) <= {"file", "tail", "directory", "metadata"}
        assert verify(cut)


@pytest.mark.parametrize("bits", [(0, 5), pytest.param(range(8), marks=pytest.mark.long)], ids=["two", "each"])
def test_every_flipped_bit_is_noticed(either, bits):
    """A read through the trailer raises a typed error or returns unaffected parts. `verify` finds every flipped bit."""
    sound = read_through_trailer(either)
    trailer = parse_trailer(either, "file", len(either))
    # a packed file has no slot table
    tail, items = trailer.tail, HEADER_SIZE if trailer.metadata.packing else trailer.metadata.layout.items_position
    unread = {*range(items), *range(tail.position, tail.directory_position)}
    metadata = tail.directory_position + tail.directory_length
    ends = [HEADER_SIZE, items, tail.position, tail.directory_position, metadata, len(either) - TAIL_SIZE]
    names = ["header", "slots", "run", "filter", "directory", "metadata", "tail"]
    unaffected = 0
    for at in range(len(either)):
        for bit in bits:
            damaged = bytearray(either)
            damaged[at] ^= 1 << bit
            damaged = bytes(damaged)
            try:
                assert read_through_trailer(damaged) == sound
                unaffected += 1
                # Lookups do not read header, slot table and filter. `verify` does.
                assert at in unread
            except CorruptFile:
                assert at not in unread
            findings = verify(damaged)
            assert findings
            assert parts(findings) == {names[np.searchsorted(ends, at, "right")]}
    assert unaffected == len(bits) * len(unread)


def test_a_later_version_and_an_unknown_order_are_refused_by_name(small):
    """A reader relies on the order within slots."""
    raw = bytearray(small[-TAIL_SIZE:])
    struct.pack_into(">I", raw, 8, FORMAT_VERSION + 1)
    struct.pack_into(">I", raw, 60, zlib.crc32(raw[:60]))
    future = small[:-TAIL_SIZE] + bytes(raw)
    for refuse in (lambda: parse_trailer(future, "file", len(future)), lambda: verify(future)):
        with pytest.raises(UnsupportedVersion, match=f"version {FORMAT_VERSION + 1}"):
            refuse()
    meta = parse_trailer(small, "file", len(small)).metadata
    with pytest.raises(UnsupportedVersion, match="'newest_first'"):
        Metadata.decode(meta.encode().replace(b'"order":"answer"', b'"order":"newest_first"'), "file")


@pytest.mark.parametrize("shard", [{}, {"slot_map": {"base": 5, "split": 1, "join": 1}}], ids=["file", "shard"])
def test_plain_runs_are_refused_unless_rocketmq_must_read_them(small, make, shard):
    trailer = parse_trailer(small, "file", len(small))
    meta, told = trailer.metadata, "plain runs of preset native, and this program reads packed ones: written by a "
    packed = Metadata.decode(replace(meta, more={**meta.more, **shard}).encode(), "file").more.pop("packed")
    plain = replace(meta, more={n: v for n, v in {**meta.more, **shard}.items() if n != "packed"})
    data = small[: trailer.tail.position] + build_trailer(trailer.tail.position, trailer.directory, plain)
    for refuse in (lambda: Metadata.decode(plain.encode(), "file"), lambda: verify(data)):
        with pytest.raises(UnsupportedVersion, match=f"{told}development version: build the index again"):
            refuse()
    layout = Layout(ROCKETMQ, ROCKETMQ.schema, 5, 20)
    data, _ = make.file(layout, 12)
    meta = parse_trailer(data, "file", len(data)).metadata
    assert "packed" not in meta.more and verify(data) == []
    with pytest.raises(CorruptFile, match="preset rocketmq has packed items"):
        Metadata.decode(replace(meta, more={**meta.more, "packed": packed}).encode(), "file")


def test_directory_and_metadata_with_sound_crc_but_wrong_content():
    for data in (b"", bytes(7), struct.pack(">II", 1, 0), struct.pack(">II", 0, 0) + b"x"):
        with pytest.raises(CorruptFile, match="directory"):
            Directory.decode(data, "file")
    slots = (b'{"slot_range": [1]}', b'{"slot_range": [0, 1], "file_id": "x", "layout": {}}')
    for data in (b"", b"[]", b"{}", b"\xff", *slots):
        with pytest.raises(TieredIndexError):
            Metadata.decode(data, "file")


@pytest.mark.parametrize(("topics", "order"), [(1, "<"), (7, "<"), (7, ">")])
def test_stats_of_topics_are_those_of_their_rows(topics, order):
    rng = np.random.default_rng(topics)
    ids = rng.integers(0, topics, 500) + 3
    sizes = rng.integers(2**31 - 9, 2**31 - 1, 500)
    seconds = rng.integers(-50, 50, 500)
    stats = topic_stats(*(column.astype(f"{order}i4") for column in (ids, sizes, seconds)))
    wanted = []
    for topic_id in sorted(set(ids.tolist())):
        own, its = ids == topic_id, seconds[ids == topic_id]
        wanted.append((topic_id, int(own.sum()), int(sizes[own].sum()), its.min(), its.max()))
    assert [(s.topic_id, s.entries, s.bytes, s.second_min, s.second_max) for s in stats] == wanted
    assert len(stats) == topics
    assert topic_stats(*[np.zeros(0, "<i4")] * 3) == []
