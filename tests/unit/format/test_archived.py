"""The table of an archived segment is made during the copy of the bytes.

A reader accepts it only if all parts agree.
"""

import operator
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_index.errors import CorruptFile, UnsupportedVersion
from tiered_index.format import archived
from tiered_index.format.archived import SegmentSums, SegmentTable, segment_object_bytes
from tiered_index.format.names import segment_epoch, segment_name, store_prefix
from tiered_index.storage.base import check_name

PIECE = archived.PIECE_BYTES


def summed(data, cuts):
    sums = SegmentSums()
    at = 0
    for cut in [*sorted(cuts), len(data)]:
        sums.update(data[at:cut])
        at = cut
    return sums


@pytest.mark.parametrize("size", [1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 7, archived.HEAD_BYTES + 9])
def test_sums_are_those_of_the_pieces_however_the_bytes_arrive(size):
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    pieces = [zlib.crc32(data[at : at + PIECE]) for at in range(0, size, PIECE)]
    for cuts in ([], [1], [PIECE - 1, PIECE + 5], [7, 7, size // 2]):
        sums = summed(data, [min(cut, size) for cut in cuts])
        head = zlib.crc32(data[: archived.HEAD_BYTES])
        assert (sums.size_bytes, sums.crc32, sums.head_crc32) == (size, zlib.crc32(data), head)
        table = sums.table(99)
        assert (table.start, table.size_bytes, table.pieces.tolist()) == (99, size, pieces)
        stored = data + table.encode()
        assert len(stored) == segment_object_bytes(size)
        read = SegmentTable.decode(stored[size:], len(stored), "x")
        assert (read.start, read.size_bytes, read.crc32, read.pieces.tolist()) == (99, size, zlib.crc32(data), pieces)


@given(st.integers(0, 55), st.integers(0, 7))
def test_every_flipped_bit_of_table_and_tail_is_seen(at, bit):
    data = bytes(2 * PIECE)
    encoded = bytearray(summed(data, []).table(5).encode())
    assert len(encoded) == 56
    encoded[at] ^= 1 << bit
    with pytest.raises(CorruptFile, match="x: "):
        SegmentTable.decode(bytes(encoded), 2 * PIECE + 56, "x")


@pytest.mark.parametrize("keep", [0, 47, 48, 55])
def test_a_table_that_is_cut_short_is_damage(keep):
    encoded = summed(bytes(2 * PIECE), []).table(5).encode()
    with pytest.raises(CorruptFile):
        SegmentTable.decode(encoded[len(encoded) - keep :], 2 * PIECE + 56, "x")


def test_other_versions_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(archived, "SEGMENT_VERSION", 5)
    encoded = summed(b"abc", []).table(5).encode()
    monkeypatch.undo()
    with pytest.raises(UnsupportedVersion, match="version 5"):
        SegmentTable.decode(encoded, segment_object_bytes(3), "x")


@pytest.mark.parametrize(
    ("store", "prefix"),
    [
        ("broker-a", "segments/broker-a/"),
        ("..", "segments/=2E=2E/"),
        ("a b/c", "segments/a=20b=2Fc/"),
        ("é", "segments/=C3=A9/"),
        ("a=20b", "segments/a=3D20b/"),
    ],
)
def test_a_stores_name_becomes_part_of_an_objects_name(store, prefix):
    assert store_prefix(store) == prefix
    assert segment_name(store, 16384, 7).startswith(f"{prefix}00000000000000016384/00000000000000000007-")
    assert segment_epoch(segment_name(store, 16384, 7)) == 7


LONG = st.builds(operator.mul, st.text(min_size=4, max_size=8), st.integers(30, 37))


@given(st.text(min_size=1) | LONG | st.sampled_from(["\ud800", "a/" * 2000]))
def test_every_store_has_a_prefix_of_its_own(store):
    assert check_name(segment_name(store, 2**63 - 1, 2**63 - 1)).startswith(store_prefix(store))
    # the length is the greatest that a record can hold
    assert len(store_prefix(store).split("/")[1]) <= 128
    assert len({store_prefix(name) for name in (store, store + "/", f"={store}", f"=={store}", store + store)}) == 5


@pytest.mark.parametrize(
    "name",
    ["segments/a/1/x.log", "data/a/00000000000000000007-0123456789abcdef.log", "segments/a/1/7-0123456789abcdef.log"],
)
def test_foreign_names_have_no_epoch(name):
    with pytest.raises(CorruptFile):
        segment_epoch(name)
