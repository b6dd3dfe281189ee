"""Foreign files, by RocketMQ or its crashes: some are read, and the others are refused with the reason."""

import struct
import zlib

import numpy as np
import pytest

from tests.support.compacted_files import reader, unsealed_image
from tiered_index.errors import CorruptFile, UnsupportedVersion
from tiered_index.format.foreign import HEAD_SIZE, ForeignCompacted, ForeignUnsealed, bare_slots, recognise
from tiered_index.format.layout import NATIVE, ROCKETMQ, Layout
from tiered_index.format.trailer import TAIL_SIZE
from tiered_index.format.unsealed import UnsealedTable

LAYOUT = Layout(ROCKETMQ, ROCKETMQ.schema, 20, 40)


def image_of(make, count=30, layout=LAYOUT):
    rng = np.random.default_rng(0)
    hashes = rng.integers(1, 2**31, count).astype(np.int32)
    table, entries = make.entries(
        layout, hashes, make.begin_ms + 1000 * np.arange(count), make.columns(rng, layout.schema, count)
    )
    return bytearray(unsealed_image(table, entries)), entries


def test_no_byte_of_slots_or_chains_is_trusted(make):
    """Stale heads and garbage in `previous` change no item, because the reader uses neither."""
    data, entries = image_of(make)
    view = np.frombuffer(memoryview(data)[LAYOUT.entry_position(1) :], LAYOUT.schema.entry, 30)
    view["previous"][:] = 2**31 - 1
    heads = heads_of(data)
    heads[np.flatnonzero(heads)[:3]] = 0
    (items,) = ForeignUnsealed(data, LAYOUT, "f").items()
    assert all(items[name].tolist() == entries[name].tolist() for name in items.dtype.names)


def heads_of(data):
    return np.frombuffer(memoryview(data)[28:], ">i4", 40)[::2]


def wrong_heads(data):
    """Change most heads. After a crash a few are stale; if all are wrong, the file has another geometry."""
    heads = heads_of(data)
    assert np.count_nonzero(heads[:4]) >= 2
    heads[4:] = np.roll(heads[4:], 1)
    return data


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        *((lambda data, by=by: data[:by], "cut off") for by in (-1, -32)),
        *((lambda data, by=by: data + bytes(by), "geometry") for by in (1, 8, 32)),
        (wrong_heads, "contradict"),
        (lambda data: data[:28] + bytes(160) + data[188:], "contradict"),
        (lambda data: b"xxxx" + data[4:], "wrong magic"),
        (lambda data: b"", "shorter than a header"),
        (lambda data: data[: LAYOUT.entry_position(1) - 1] + b"\1" + data[LAYOUT.entry_position(1) :], "entry 0"),
        (lambda data: struct.pack(">I", NATIVE.begin_magic) + data[4:], "not a rocketmq file"),
        *(
            (lambda data, count=count: data[:24] + struct.pack(">I", count) + data[28:], "more entries")
            for count in (40, 2**31 - 1, 2**32 - 1)
        ),
    ],
)
def test_unsealed_files_that_contradict_the_geometry_or_themselves(make, change, problem):
    with pytest.raises(CorruptFile, match=problem):
        ForeignUnsealed(change(image_of(make)[0]), LAYOUT, "f")


def test_bare_compacted_files_that_contradict_themselves(make):
    data, _ = make.file(LAYOUT, 30)
    sound = data[: LAYOUT.compacted_size(30)]

    def opened(data):
        return ForeignCompacted.open(reader(data), len(data), "f")

    assert opened(sound).count == 30
    for length in range(len(sound)):
        with pytest.raises(CorruptFile):
            opened(sound[:length])
    with pytest.raises(CorruptFile, match="cut off"):
        list(opened(sound).items(lambda position, length: sound[position : position + length - 1]))
    with pytest.raises(CorruptFile, match="no slot table"):
        bare_slots(b"1234567", "f")
    with pytest.raises(CorruptFile, match="end at the file's end"):
        opened(sound + bytes(28))
    for at, value, message in (
        (0, b"xxxx", "wrong magic"),
        *((0, struct.pack(">I", magic), "not a compacted") for magic in (ROCKETMQ.begin_magic, NATIVE.end_magic)),
        (28, struct.pack(">i", 28 + 8 * 19), "end at the file's end"),
        (28, struct.pack(">i", 28 + 8 * 21), "end at the file's end"),
        (28, struct.pack(">i", 29), "slot 0"),
        (28, struct.pack(">i", 28 + 8 * 200_000), "behind the file's end"),
        (20, struct.pack(">i", 21), "header and slot table"),
        (24, struct.pack(">i", 29), "header and slot table"),
    ):
        with pytest.raises(CorruptFile, match=message):
            opened(sound[:at] + value + sound[at + 4 :])


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
    with pytest.raises(UnsupportedVersion, match="trailer of version 9"):
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
