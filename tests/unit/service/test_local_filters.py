"""The compiled core uses the filter of a local compacted file after some misses.

It does so once the misses have read as many bytes as the filter has.
"""

import pytest

from tests.support.batches import batch
from tests.support.core import compiled_core
from tests.support.rounds import compact_only
from tiered_index.errors import CorruptFile
from tiered_index.format.trailer import TAIL_SIZE, Tail
from tiered_index.service.read.compacted import LocalBytes
from tiered_index.types import Lookup

KEYS = [f"k{number}" for number in range(3_000)]


@pytest.fixture
def index(open_index, faulty):
    """One compacted file with an entry for each of `KEYS`. It is not uploaded, and no lookup has read it."""
    service = open_index(slots=1_000, items=4_000, storage_backend=faulty)
    service.put_batch(batch(len(KEYS), key=KEYS))
    compact_only(service, faulty)
    return service


@pytest.fixture
def damage(tmp_path):
    """Return a function that overwrites the file's items or its filter."""

    def make(what):
        (path,) = tmp_path.glob("*/compacted/*")
        data = bytearray(path.read_bytes())
        tail = Tail.decode(data, path.name, len(data))
        start, stop = (tail.position, tail.directory_position) if what == "filter" else (1_000, tail.position)
        with path.open("r+b") as file:
            file.seek(start)
            file.write(bytes(255 - byte for byte in data[start:stop]) if what == "items" else bytes(stop - start))

    return make


def miss(index, count):
    """Look up `count` absent keys. Return the number of lookups that read damaged items."""
    read = 0
    for number in range(count):
        try:
            assert not index.query("t", f"no{number}").items
        except CorruptFile:
            read += 1
    return read


def offsets_of(index):
    return [item.offset for key in KEYS[::5] for item in index.query("t", key).items]


def test_the_filter_saves_reads_of_items_after_some_misses(index, damage):
    compiled_core()  # NumPy reads the items
    miss(index, 1)
    damage("items")
    assert miss(index, 300) <= 15
    assert index.query("t", "no1").explain.files_read == 1
    with pytest.raises(CorruptFile):
        index.query("t", KEYS[7])


@pytest.mark.parametrize("checked", [False, True])
def test_a_damaged_filter_is_not_trusted(index, damage, checked):
    """`checked`: lookups have used it before."""
    lookups = [Lookup("t", key) for key in KEYS]
    if checked:
        miss(index, 300)
        index.query_many(lookups)
    damage("filter")
    assert [[item.offset for item in answer] for answer in index.query_many(lookups)] == [[n] for n in range(len(KEYS))]
    miss(index, 300)
    assert offsets_of(index) == list(range(0, len(KEYS), 5))
    damage("items")
    assert miss(index, 300) > 200


def test_a_filter_with_part_of_a_block_is_damage(index, tmp_path):
    (path,) = tmp_path.glob("*/compacted/*")
    data = path.read_bytes()
    tail = Tail.decode(data, path.name, len(data))
    odd = tail._replace(filter_length=tail.filter_length - 1, directory_length=tail.directory_length + 1)
    path.write_bytes(data[:-TAIL_SIZE] + odd.encode(1))
    with pytest.raises(CorruptFile, match="not made of blocks of 32 bytes"):
        LocalBytes(path)
