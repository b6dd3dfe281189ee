"""Tables of archived segments, and catalogs of them: what is written is read again, and damage is found.

The table is made during the copy of the bytes. A reader accepts it only if all parts agree.
"""

import base64
import itertools
import operator
import zlib
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_index.errors import CorruptFile, InvalidArgument, UnsupportedVersion
from tiered_index.format.names import segment_name, store_prefix
from tiered_index.format.segments import archived
from tiered_index.format.segments.archived import SegmentSums, SegmentTable, segment_object_bytes
from tiered_index.format.segments.catalog import CATALOG_VERSION, TAIL_BYTES, CatalogWriter, decode_end, decode_group
from tiered_index.format.segments.segment import ArchivedSegment, LinkedSegment
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


def test_flipped_bits_of_table_and_tail_and_another_version_are_seen(monkeypatch):
    encoded = summed(bytes(2 * PIECE), []).table(5).encode()
    assert len(encoded) == 56
    for at, bit in itertools.product(range(56), range(8)):
        damaged = bytearray(encoded)
        damaged[at] ^= 1 << bit
        with pytest.raises(CorruptFile, match="x: "):
            SegmentTable.decode(bytes(damaged), 2 * PIECE + 56, "x")
    with monkeypatch.context() as patched:
        patched.setattr(archived, "SEGMENT_VERSION", 4)
        later = summed(b"abc", []).table(5).encode()
    with pytest.raises(UnsupportedVersion, match="version 4"):
        SegmentTable.decode(later, segment_object_bytes(3), "x")


def test_a_stores_name_becomes_part_of_an_objects_name():
    for store, part in (("broker-a",) * 2, ("..", "=2E=2E"), ("a b/c", "a=20b=2Fc"), ("é", "=C3=A9"), ("=", "=3D")):
        assert store_prefix(store) == f"segments/{part}/"
        assert segment_name(store, 16384, 7).startswith(f"segments/{part}/{16384:020d}/{7:020d}-")
    with pytest.raises(InvalidArgument):
        store_prefix("")


LONG = st.builds(operator.mul, st.text(min_size=4, max_size=8), st.integers(30, 37))


@given(st.text(min_size=1) | LONG | st.just("a/" * 2000))
def test_every_store_has_a_prefix_of_its_own(store):
    assert check_name(segment_name(store, 2**63 - 1, 2**63 - 1)).startswith(store_prefix(store))
    # the length is the greatest that a record can hold
    assert len(store_prefix(store).split("/")[1]) <= 128
    assert len({store_prefix(name) for name in (store, store + "/", f"={store}", f"=={store}", store + store)}) == 5


# of `segments_of(Random(0), 2)`
GOLDEN = (
    "eJyNUlFywiAQvQu/3SoQIcGrqNOJkUQqCZmA06md3r1LgtXUj5plluzj7QN2+SLWNWS9oUCBoXHgOyBN2SMmQaBFnCLWla1GkNDHj73+AeQiqsL/XF"
    "bWV67P1svlfikWzeUWFXwKn9mUPbsppUKNXLyVN5d4K1koBrmSHJQQCpgQK2CcKsjzTCKtP++t8Ud9QC5DARidQvuNkGV114Rjqmaex1EUkMeKVkOV"
    "8bGmUlEOU7kLhStHXUZVZI8ozgjWzgU9JKXUm3gM500wrksLKzQ6Nse781DFi3Rna2HDYhfH37lD5uA+PPJiZzO0+6VgWu2vGndCyQuQySN3b111mp"
    "OnjBVVcsrYzcVdb6q32mh7mGWR8Nlr8njO2g1tGeKDw5bi6A7v3nUvzcX0D1EcmKJD2dwStkRs08y35Mr6/gEEQsYJeJxNjsEKgzAQRP9lz1Pc1SS6"
    "/krIIYVoi4IS9ST998a2hzIwc3kzzEnzMm7Ue0/3vEwpExzEdM6gLqm2hTDz14Y4bwkMDvA0POe09Y+UU7VXTLAQq6XE0KI9HxdZX+QUhyneVoJAnB"
    "RE2ejf7I/lEEBjXo7184fLEUZTG0jbqnadNAYuhNcbvOwunlRJWENBVEEKAAAAAwAAAIsAAAAAAAAABjPsGU9Qeh7t"
)


def archived_segment(store, start, size, **more):
    name = f"segments/{store}/{start:020d}/{1:020d}-{start:016x}.log"
    return ArchivedSegment(name, store, start, size, start % 2**32, 7, size + 4 * -(-size // 16384) + 48, 1000, **more)


def segments_of(random, count):
    """Return `count` segments of every form, sorted."""
    segments = []
    for store in sorted({"broker", "kafka-p", "files:here/t/0"}):
        start = random.randrange(10)
        for _ in range(count):
            size = random.randrange(1, 10_000)
            if store == "broker":
                source, rows = random.choice([None, (1, 2)]), random.choice([None, 5])
                segments.append(archived_segment(store, start, size, source=source, rows=rows))
            elif store == "kafka-p":
                segments.append(
                    archived_segment(store, start, size, columns=(random.randrange(1, 90), 1), times=(5, 6))
                )
            else:
                blocks, etag = random.choice([None, (4096, (1, 2))]), f'"{start:x}"'
                more = {"rows": 3, "times": (1, 2), "blocks": blocks, "is_open": random.random() < 0.5}
                more["topic_field"] = random.choice([None, "type"])
                if count > 2:
                    # the golden bytes have none
                    more["time_rule"] = random.choice([None, ("at", "s", None), ("b.c", None, "Europe/Berlin")])
                segments.append(
                    LinkedSegment(f"s3://b/{start}.gz", store, start, 77, "ndjson+gzip", size, etag, 9, 4, **more)
                )
            start = segments[-1].end + random.choice([0, 0, 5])
    return segments


def written(segments, group_rows):
    data = bytearray()
    writer = CatalogWriter(data.extend, group_rows)
    for segment in segments:
        writer.add(segment)
    return bytes(data), writer.finish(), data


def read(data, directory):
    groups = [
        decode_group(data[group.position : group.position + group.length], group, directory.logs, "c").segments()
        for group in directory.groups
    ]
    return list(itertools.chain.from_iterable(groups))


@pytest.mark.parametrize("seed", range(5))
def test_a_catalog_has_all_fields_of_its_segments_and_finds_each_by_one_group(seed):
    random = Random(seed)
    segments = segments_of(random, random.choice([1, 3, 40]))
    _, directory, data = written(segments, random.choice([1, 7, 512]))
    assert decode_end(bytes(data), "c") == directory
    assert read(bytes(data), directory) == segments
    for segment in segments:
        group = directory.groups[directory.group_of(segment.store, segment.end - 1)]
        rows = decode_group(bytes(data[group.position :][: group.length]), group, directory.logs, "c")
        at = rows.before(directory.numbers[segment.store], segment.end - 1) - 1
        assert rows.row(at) == segment


def test_a_flipped_byte_anywhere_is_found():
    _, _, whole = written(segments_of(Random(0), 3), 4)
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= 1
        with pytest.raises((CorruptFile, UnsupportedVersion)):
            read(bytes(data), decode_end(bytes(data), "c"))
    with pytest.raises(CorruptFile, match="tail"):
        decode_end(b"x" * (TAIL_BYTES - 1), "c")
    later = bytearray(whole)
    later[-TAIL_BYTES + 11] = CATALOG_VERSION + 1
    later[-4:] = zlib.crc32(later[-TAIL_BYTES:-4]).to_bytes(4, "big")
    with pytest.raises(UnsupportedVersion, match=f"version {CATALOG_VERSION + 1}"):
        decode_end(bytes(later), "c")


def test_segments_that_overlap_or_are_not_sorted_are_refused():
    for later in (archived_segment("s", 5, 10), archived_segment("s", 0, 3), archived_segment("r", 99, 3)):
        writer = CatalogWriter(lambda data: None)
        writer.add(archived_segment("s", 0, 10))
        with pytest.raises(CorruptFile, match="overlaps"):
            writer.add(later)
    with pytest.raises(CorruptFile, match="without an offset"):
        CatalogWriter(lambda data: None).add(archived_segment("s", 0, 0))


def test_stored_bytes_are_read():
    data = base64.b64decode(GOLDEN)
    assert read(data, decode_end(data, "c")) == segments_of(Random(0), 2)


def test_the_greatest_offsets_and_names_of_any_form_are_read_again():
    plain, linked = archived_segment("s", 2**62, 2**44), LinkedSegment("u", "t", 2**62, 2**62 - 1, "ndjson", 1, "e", 3)
    deep = ArchivedSegment(f"segments/s/{0:020d}/deep/name", "s", 0, 100, 1, 2, 152, 3)
    _, directory, data = written([deep, plain, linked], 512)
    assert read(bytes(data), decode_end(bytes(data), "c")) == [deep, plain, linked]
    assert [log.end for log in directory.logs] == [2**62 + 2**44, 2**63 - 1]
    with pytest.raises(ValueError, match="63 bits"):
        LinkedSegment("u", "t", 2**62, 2**62, "ndjson", 1, "e", 3)
