"""The classic index beyond the golden files: geometry, damage, the names in a folder."""

import struct

import pytest

from tests.support.classic_writer import ClassicIndexFile
from tiered_index.connectors.rocketmq.classic import (
    Geometry,
    classic_file_names,
    decode_header,
    infer_geometry,
    read_entries,
)
from tiered_index.errors import CorruptFile, StorageMisconfigured

NOW_MS = 1_700_000_000_000
SMALL = Geometry(4, 6)


def filled(geometry: Geometry = SMALL, count: int = 5) -> ClassicIndexFile:
    file = ClassicIndexFile.create(geometry)
    for number in range(count):
        assert file.put_key(f"T#{number}", 5_000 + number, NOW_MS)
    return file


def test_damaged_headers():
    good = filled().data
    with pytest.raises(CorruptFile, match="cut short"):
        decode_header(b"\0" * 39, "f")
    for position, value, problem in ((36, 7, "no geometry"), (36, 2**31 - 1, "no geometry"), (32, -1, "negative")):
        data = bytearray(good)
        struct.pack_into(">i", data, position, value)
        with pytest.raises(CorruptFile, match=problem):
            infer_geometry(data, "f")
    for data in (bytes(40), bytes(41), bytes(43), b"\0" * 36 + b"\0\0\0\x09" + bytes(400)):
        with pytest.raises(CorruptFile, match="no geometry"):
            infer_geometry(data, "f")
    struct.pack_into(">i", good, 36, -5)
    assert decode_header(bytes(good[:40])).index_count == 1  # the broker reads the header in this way


def test_only_names_of_index_files_count(tmp_path):
    for name in ("20260102030405678", "20260101030405678", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "1").mkdir()
    assert classic_file_names(tmp_path) == ["20260101030405678", "20260102030405678"]
    with pytest.raises(StorageMisconfigured):
        classic_file_names(tmp_path / "notes.txt")


@pytest.mark.parametrize(
    "geometry", [Geometry(1, 2), Geometry(3, 9), Geometry(50, 200), Geometry(7, 400), Geometry(500, 11)]
)
def test_the_geometry_comes_from_the_contents(geometry):
    assert infer_geometry(filled(geometry, min(geometry.items - 1, 40)).data) == geometry


def test_entries_that_come_while_a_file_is_read_are_left_out(tmp_path):
    """The header is read before the slots, which then name entries that it does not count."""
    file = filled(Geometry(4, 30), 10)
    header, entries = bytes(file.data[:40]), file.entries().tolist()
    for number in range(10, 25):
        assert file.put_key(f"T#{number}", 5_000 + number, NOW_MS)
    path = tmp_path / "20260101030405678"
    path.write_bytes(header + bytes(file.data[40:]))
    assert read_entries(path).tolist() == entries


@pytest.mark.parametrize("counted", [8, 10])
def test_older_brokers_count_a_slot_for_each_entry(counted):
    """A file that was begun before an upgrade has a count between both."""
    file = filled(Geometry(4, 30), 10)
    assert file.header.slots_in_use <= 4
    struct.pack_into(">i", file.data, 32, counted)
    assert infer_geometry(file.data) == Geometry(4, 30)
    struct.pack_into(">i", file.data, 32, 11)
    with pytest.raises(CorruptFile, match="no geometry"):
        infer_geometry(file.data)
