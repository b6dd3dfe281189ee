"""Foreign files, by RocketMQ or its crashes: some are read, and the others are refused with the reason."""

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.compacted_files import reader, rebuilt, unsealed_image
from tests.support.foreign_lookups import find_compacted, find_unsealed
from tiered_index.errors import CorruptFile, UnsupportedVersion
from tiered_index.format.foreign import HEAD_SIZE, ForeignCompacted, ForeignUnsealed, bare_slots, recognise
from tiered_index.format.layout import NATIVE, ROCKETMQ, Layout
from tiered_index.format.trailer import TAIL_SIZE
from tiered_index.format.unsealed import UnsealedTable

LAYOUT = Layout(ROCKETMQ, ROCKETMQ.schema, 20, 40)
EVER = (-(2**62), 2**62)


def image_of(make, count=30, layout=LAYOUT, seed=0):
    rng = np.random.default_rng(seed)
    hashes = rng.integers(1, 2**31, count).astype(np.int32)
    table, entries = make.entries(
        layout, hashes, make.begin_ms + 1000 * np.arange(count), make.columns(rng, layout.schema, count)
    )
    return bytearray(unsealed_image(table, entries)), entries


def bare(make, count=30, layout=LAYOUT):
    data, entries = make.file(layout, count)
    return bytearray(data[: layout.compacted_size(count)]), entries


def opened(data):
    return ForeignCompacted.open(reader(bytes(data)), len(data), "f")


def test_no_byte_of_slots_or_chains_is_trusted(make):
    """Stale heads and garbage in `previous` change no answer, because the reader rebuilds the chains."""
    data, entries = image_of(make)
    view = np.frombuffer(memoryview(data)[LAYOUT.entry_position(1) :], LAYOUT.schema.entry, 30)
    view["previous"][:] = 2**31 - 1
    heads = np.frombuffer(memoryview(data)[28:], ">i4", 40)[::2]
    stale = np.flatnonzero(heads)[:3]
    heads[stale] = 0
    image = ForeignUnsealed(data, LAYOUT, "f")
    for entry in entries:
        (item,) = find_unsealed(image, int(entry["key_hash"]), *EVER)
        assert item["offset"] == entry["offset"]
    _, again = rebuilt(image)
    assert again.tobytes() == entries.tobytes()


@given(
    *(st.integers(0, 2**32 - 1), st.integers(1, 60), st.integers(1, 20), st.integers(1, 6)),
    *(st.integers(-6_000, 6_000), st.integers(0, 9_000)),
)
@settings(max_examples=60)
def test_lookups_equal_a_scan(make, seed, count, slots, distinct, low_ms, width_ms):
    layout = Layout(ROCKETMQ, ROCKETMQ.schema, slots, count + 1)
    data, entries = make.file(layout, count, seed=seed, distinct_hashes=distinct)
    table = UnsealedTable(layout, make.begin_ms)
    table.load(entries, 0)
    unsealed = ForeignUnsealed(unsealed_image(table, entries), layout, "f")
    data = data[: layout.compacted_size(count)]
    read = reader(data)
    compacted = ForeignCompacted.open(read, len(data), "f")
    begin_ms, end_ms = make.begin_ms + low_ms, make.begin_ms + low_ms + width_ms
    for wanted in {*entries["key_hash"].tolist(), 1}:
        expected = [
            tuple(entry)[:6]
            for entry in entries[::-1].tolist()
            if entry[0] == wanted and begin_ms <= make.begin_ms + 1000 * entry[5] <= end_ms
        ]
        assert find_unsealed(unsealed, wanted, begin_ms, end_ms).tolist() == expected
        assert find_compacted(compacted, read, wanted, begin_ms, end_ms).tolist() == expected


@pytest.mark.parametrize("change", [-1, 1, -32, 32, 8])
def test_the_size_must_fit_the_geometry(make, change):
    data, _ = image_of(make)
    wrong = data[:change] if change < 0 else data + bytes(change)
    with pytest.raises(CorruptFile, match="cut off" if change < 0 else "geometry"):
        ForeignUnsealed(wrong, LAYOUT, "f")


def test_slots_that_contradict_the_entries(make):
    """After a crash a few heads are stale. If all heads are wrong, the file has another geometry."""
    data, _ = image_of(make)
    heads = np.frombuffer(memoryview(data)[28:], ">i4", 40)[::2]
    assert np.count_nonzero(heads[:4]) >= 2
    heads[4:] = np.roll(heads[4:], 1)  # the first four heads still agree
    with pytest.raises(CorruptFile, match="contradict"):
        ForeignUnsealed(data, LAYOUT, "f")
    heads[:] = 0
    with pytest.raises(CorruptFile, match="contradict"):
        ForeignUnsealed(data, LAYOUT, "f")


def test_wrong_files(make):
    data, _ = image_of(make)
    with pytest.raises(CorruptFile, match="wrong magic"):
        ForeignUnsealed(b"xxxx" + data[4:], LAYOUT, "f")
    with pytest.raises(CorruptFile, match="shorter than a header"):
        ForeignUnsealed(b"", LAYOUT, "f")
    used = bytearray(data)
    used[LAYOUT.entry_position(0) + 31] = 1
    with pytest.raises(CorruptFile, match="entry 0"):
        ForeignUnsealed(used, LAYOUT, "f")
    with pytest.raises(CorruptFile, match="not a rocketmq file"):
        ForeignUnsealed(struct.pack(">I", NATIVE.begin_magic) + data[4:], LAYOUT, "f")
    for count in (40, 2**31 - 1, 2**32 - 1):
        struct.pack_into(">I", data, 24, count)
        with pytest.raises(CorruptFile, match="more entries"):
            ForeignUnsealed(data, LAYOUT, "f")


def test_bare_compacted_files_that_contradict_themselves(make):
    sound, _ = bare(make)
    assert opened(sound).count == 30
    for length in range(len(sound)):
        with pytest.raises(CorruptFile):
            opened(sound[:length])
    with pytest.raises(CorruptFile, match="no slot table"):
        bare_slots(b"1234567", "f")
    with pytest.raises(CorruptFile, match="end at the file's end"):
        opened(sound + bytes(28))
    with pytest.raises(CorruptFile, match="wrong magic"):
        opened(b"xxxx" + sound[4:])
    for magic in (ROCKETMQ.begin_magic, NATIVE.end_magic):
        with pytest.raises(CorruptFile, match="not a compacted"):
            opened(struct.pack(">I", magic) + sound[4:])
    for at, value, message in (
        (28, 28 + 8 * 19, "end at the file's end"),
        (28, 28 + 8 * 21, "end at the file's end"),
        (28, 29, "slot 0"),
        (28, 28 + 8 * 200_000, "behind the file's end"),
        (20, 21, "header and slot table"),
        (24, 29, "header and slot table"),
    ):
        wrong = bytearray(sound)
        struct.pack_into(">i", wrong, at, value)
        with pytest.raises(CorruptFile, match=message):
            opened(wrong)


def test_short_read_is_an_error_not_a_short_list(make):
    data, entries = bare(make)
    file = opened(data)
    wanted, read = int(entries["key_hash"][0]), reader(bytes(data))
    with pytest.raises(CorruptFile, match="cut off"):
        find_compacted(file, lambda position, length: read(position, length - 1), wanted, *EVER)


def test_recognise_refuses(make):
    data, _ = make.file(LAYOUT, 30)
    with pytest.raises(CorruptFile, match="the file is empty"):
        recognise(b"", b"", 0, "f")
    with pytest.raises(CorruptFile, match="wrong magic"):
        recognise(bytes(40), bytes(40), 40, "f")
    damaged = bytearray(data)
    damaged[-30] ^= 1
    with pytest.raises(CorruptFile, match="trailer's CRC32"):
        recognise(bytes(damaged[:HEAD_SIZE]), bytes(damaged[-TAIL_SIZE:]), len(data), "f")
    future = bytearray(data)
    struct.pack_into(">I", future, len(data) - TAIL_SIZE + 8, 9)
    struct.pack_into(">I", future, len(data) - 4, zlib.crc32(future[-TAIL_SIZE:-4]))
    with pytest.raises(UnsupportedVersion, match="format version 9"):
        recognise(bytes(future[:HEAD_SIZE]), bytes(future[-TAIL_SIZE:]), len(data), "f")


def test_a_full_unsealed_file_that_has_the_end_magic_of_a_compacted_one_is_told_from_it(make):
    layout = Layout(NATIVE, NATIVE.schema, 10, 40)
    compacted, entries = make.file(layout, 39)
    table = UnsealedTable(layout, make.begin_ms)
    table.load(entries, 0)
    unsealed = unsealed_image(table, entries)
    assert unsealed[:4] == compacted[:4]
    for data, state in ((unsealed, "unsealed"), (compacted, "compacted")):
        assert recognise(data[:HEAD_SIZE], data[-TAIL_SIZE:], len(data), "f").state == state
