"""The classic index beyond the golden files: rolling, ignoring, damage, geometry."""

from __future__ import annotations

import itertools
import struct

import pytest

from tests.support.classic_lookups import MAX_COUNT, find, find_in, query, select_offsets
from tests.support.classic_writer import ClassicIndex, WritableClassicFile, load_classic_index
from tiered_index.errors import CorruptFile, InvalidArgument, StorageMisconfigured
from tiered_index.rocketmq.classic import ENTRY_BYTES, Geometry, decode_header, infer_geometry

NOW_MS = 1_700_000_000_000
SMALL = Geometry(4, 6)
EVER = (0, 2**63 - 1)


def filled(geometry: Geometry = SMALL, count: int = 5, key: str = "T#k") -> WritableClassicFile:
    file = WritableClassicFile.create(geometry)
    for number in range(count):
        assert file.put_key(key, 100 * number, NOW_MS + 1000 * number)
    return file


def index(geometry: Geometry = SMALL) -> ClassicIndex:
    numbers = itertools.count()
    return ClassicIndex(geometry, new_name=lambda: f"file {next(numbers)}")


def put(target: ClassicIndex, number: int, keys: str | None = "k", sys_flag: int = 0, uniq: str | None = None) -> None:
    target.put("T", uniq, keys, 100 * number, NOW_MS + 1000 * number, sys_flag)


def test_a_new_file_inherits_and_the_full_one_stays():
    target = index()
    for number in range(12):
        put(target, number)
    assert [file.file for file in target.files] == ["file 0", "file 1", "file 2"]
    assert [file.header.index_count for file in target.files] == [6, 6, 3]
    assert target.files[1].header.begin_ms == NOW_MS + 5000  # its first entry's, over what it inherited
    empty = WritableClassicFile.create(SMALL, end_offset=7, end_ms=9)
    assert empty.header == (9, 9, 7, 7, 0, 1)
    assert find(target, "T", "k") == [100 * number for number in reversed(range(12))]
    assert query(target, "T", "k", 5) == ([1100, 1000, 900, 800, 700], NOW_MS + 11_000, 1100)


def test_what_lies_below_the_end_offset_is_ignored():
    target = index()
    put(target, 5)
    for number in (0, 4):
        put(target, number)
    assert find(target, "T", "k") == [500]
    put(target, 5)  # the very last one is put again, as the broker does
    assert find(target, "T", "k") == [500, 500]


def test_transactions_and_keys_as_the_broker_puts_them():
    target = index(Geometry(4, 60))
    for number, sys_flag in enumerate((0, 4, 8, 12)):
        put(target, number, f"only-{number} twice twice  ", sys_flag, uniq="twice")
    assert [find(target, "T", f"only-{number}") for number in range(4)] == [[0], [100], [200], []]
    assert find(target, "T", "twice") == [200] * 3 + [100] * 3 + [0] * 3
    assert find(target, "T", "") == []
    before = target.files[0].header
    put(target, 9, None)
    put(target, 9, "")
    assert target.files[0].header == before


def test_a_message_whose_keys_span_two_files():
    target = index()
    put(target, 1, "a b c d e f g h")
    assert [file.header.index_count for file in target.files] == [6, 4]
    assert [find(target, "T", key) for key in "abcdefgh"] == [[100]] * 8


def test_the_brokers_bound_is_not_ours():
    target = index(Geometry(4, 500))
    for number in range(300):
        put(target, number)
    assert len(query(target, "T", "k", 1000).offsets) == MAX_COUNT
    assert len(find(target, "T", "k")) == 300


def test_the_first_entry_of_a_file_has_its_own_time():
    """RocketMQ counts its seconds from the end of the file before, and reads them from its own begin."""
    target = index()
    for number in range(7):
        put(target, number)
    at = NOW_MS + 5_000
    assert query(target, "T", "k", 10, at, at).offsets == []
    assert find(target, "T", "k", at, at) == [500]
    assert query(target, "T", "k", 10, at + 1000, at + 1000).offsets == [600, 500]
    assert find(target, "T", "k", at + 1000, at + 1000) == [600]
    seconds = target.files[1].entries()["seconds"].tolist()
    assert [target.files[1].header.begin_ms + 1000 * second for second in (0, *seconds[1:])] == [at, at + 1000]


def test_a_file_that_java_does_not_look_into():
    """A late last message sets a file's end back; a range behind that end then finds nothing in it."""
    file = WritableClassicFile.create(Geometry(4, 60))
    for number, second in enumerate((0, 50, 90, 10)):
        file.put_key("T#k", number, NOW_MS + 1000 * second)
    target = ClassicIndex(file.geometry, [file])
    assert query(target, "T", "k", 10, NOW_MS + 80_000, NOW_MS + 100_000).offsets == []
    assert find(target, "T", "k", NOW_MS + 80_000, NOW_MS + 100_000) == [2]


def test_an_empty_index():
    target = index()
    assert query(target, "T", "k") == ([], 0, 0)
    assert find(target, "T", "k") == []


def test_read_only_bytes_are_not_written():
    file = WritableClassicFile(bytes(filled(count=2).data), SMALL)
    with pytest.raises(InvalidArgument, match="opened for reading"):
        file.put_key("T#k", 1, NOW_MS)


def test_damaged_files():
    good = filled()
    with pytest.raises(CorruptFile, match="size of a file"):
        WritableClassicFile(bytes(good.data[:-1]), SMALL)
    with pytest.raises(CorruptFile, match="cut short"):
        decode_header(b"\0" * 39, "f")
    for position, value, problem in ((36, 7, "more entries"), (36, 2**31 - 1, "more entries"), (32, -1, "negative")):
        data = bytearray(good.data)
        struct.pack_into(">i", data, position, value)
        with pytest.raises(CorruptFile, match=problem):
            WritableClassicFile(data, SMALL, file="f")
    zero = bytearray(good.data)
    struct.pack_into(">i", zero, 36, -5)
    assert WritableClassicFile(zero, SMALL).header.index_count == 1  # as the broker reads it


def entry_at(number: int) -> int:
    return SMALL.entries_at + ENTRY_BYTES * number


@pytest.mark.parametrize(("entry", "previous"), [(3, 4), (3, 5), (5, 5), (4, 99), (2, -1)])
def test_chains_that_point_nowhere(entry, previous):
    file = filled()
    struct.pack_into(">i", file.data, entry_at(entry) + 16, previous)
    with pytest.raises(CorruptFile, match="no older entry"):
        find_in(file, "T#k")


def test_a_circle_that_java_would_never_leave():
    file = filled()
    struct.pack_into(">i", file.data, entry_at(1) + 16, 3)
    with pytest.raises(CorruptFile, match="circle"):
        select_offsets(file, [], "T#k", 1000, *EVER)
    found: list[int] = []
    select_offsets(file, found, "T#k", 5, *EVER)
    assert found == [400, 300, 200, 100, 0]


def test_an_entry_of_another_slot():
    file = filled()
    struct.pack_into(">i", file.data, entry_at(2), int.from_bytes(file.data[entry_at(2) : entry_at(2) + 4], "big") + 1)
    with pytest.raises(CorruptFile, match="another slot"):
        find_in(file, "T#k")


def test_a_head_that_is_not_counted_yet():
    """The broker sets the slot before the count: whoever reads between the two misses nothing and is told of no
    damage.
    """
    file = filled(count=4)
    before = bytes(file.data[:40])
    file.put_key("T#k", 400, NOW_MS)
    file.data[:40] = before
    assert find_in(WritableClassicFile(file.data, SMALL), "T#k")[-4:] == [300, 200, 100, 0]


@pytest.mark.parametrize(
    "geometry", [Geometry(1, 2), Geometry(3, 9), Geometry(50, 200), Geometry(7, 400), Geometry(500, 11)]
)
def test_geometry_out_of_the_contents(geometry):
    file = WritableClassicFile.create(geometry)
    for number in range(min(geometry.items - 1, 40)):
        file.put_key(f"T#{number}", 5_000 + number, NOW_MS)
    assert infer_geometry(file.data) == geometry


def test_geometries_that_cannot_be():
    for geometry in (Geometry(0, 5), Geometry(5, 1), Geometry(2**29, 2)):
        with pytest.raises(InvalidArgument):
            WritableClassicFile.create(geometry)
    for data in (bytes(40), bytes(41), bytes(43), b"\0" * 36 + b"\0\0\0\x09" + bytes(400)):
        with pytest.raises(CorruptFile, match="no geometry"):
            infer_geometry(data, "f")


def test_loading_a_folder(tmp_path):
    assert load_classic_index(tmp_path / "missing").files == []
    for name, count in (("20260102030405678", 5), ("20260101030405678", 3)):
        (tmp_path / name).write_bytes(filled(count=count).data)
    (tmp_path / "notes.txt").write_bytes(b"junk")
    (tmp_path / "1").mkdir()
    loaded = load_classic_index(tmp_path, SMALL)
    assert [file.header.index_count for file in loaded.files] == [4, 6]
    (tmp_path / "30260101030405678").write_bytes(b"short")
    with pytest.raises(CorruptFile) as caught:
        load_classic_index(tmp_path, SMALL)
    assert caught.value.file == str(tmp_path / "30260101030405678")
    with pytest.raises(StorageMisconfigured):
        load_classic_index(tmp_path / "30260101030405678")
