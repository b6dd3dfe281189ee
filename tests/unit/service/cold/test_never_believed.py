"""Objects are damaged.

A fresh reader answers exactly the put entries, or names the object. No answer is wrong or short.
"""

from functools import partial

import pytest

from tests.support.cold_index import cold_index, spoiled
from tests.support.model import Answer
from tests.support.storage_faults import FaultStorage
from tiered_index import Lookup
from tiered_index.errors import CorruptFile
from tiered_index.format.layout import HEADER_SIZE, NATIVE
from tiered_index.format.trailer import TAIL_SIZE

KEYS = ("k0-0", "k0-1", "all", "absent")


@pytest.fixture(scope="module", params=["native", "rocketmq"])
def made(request, tmp_path_factory):
    return cold_index(tmp_path_factory.mktemp("cold") / "root", files=2, entries=3, slots=3, preset=request.param)


def check(made, reader, name, keys=KEYS):
    """Look up every key, then all at once. Return how many lookups named the object `name` as corrupt."""
    named = 0
    for key in keys:
        try:
            answer = reader.query("t", key)
        except CorruptFile as error:
            assert name in str(error)
            named += 1
        else:
            assert ([Answer.of(item) for item in answer], answer.status) == (made.expected("t", key), "complete")
    try:
        answers = list(reader.query_many([Lookup(topic="t", key=key) for key in KEYS]))
    except CorruptFile as error:
        assert name in str(error)
        return named + 1
    assert [[Answer.of(item) for item in answer] for answer in answers] == [made.expected("t", key) for key in KEYS]
    return named


def first_item(made):
    """Return the position of the first item. Native files are packed and have no slot table."""
    layout = made.reader().genesis.layout
    return HEADER_SIZE if layout.preset is NATIVE else layout.items_position


@pytest.mark.parametrize("apart", [20, pytest.param(4, marks=pytest.mark.long)])
def test_a_flipped_byte_anywhere_in_the_items_or_the_trailer_is_noticed(made, apart):
    """Lookups do not read header and slot table. So few lookups fetch no filter.

    Flips of the trailer are `apart` bytes from each other: `test_trailer.py` flips each of its bits.
    """
    stored = made.stored[0]
    items = first_item(made)

    def flip(position, data):
        data[position] ^= 0x40

    # so that every field of the items is hit
    positions = [*range(items, stored.trailer_position, 4), *range(stored.trailer_position, stored.size_bytes, apart)]
    quiet = []
    for position in positions:
        with spoiled(made, stored.name, partial(flip, position)), made.reader() as reader:
            # any lookup reads the bytes outside the groups
            if not check(made, reader, stored.name, KEYS if position < stored.trailer_position else KEYS[2:3]):
                quiet.append(position)
    # lookups notice every byte except the filter's
    assert quiet == [at for at in positions if stored.trailer_position <= at < stored.directory_position]


def test_a_flipped_byte_during_a_readers_life_is_noticed(made):
    stored = made.stored[0]
    with made.reader(block_cache_bytes=0) as reader:
        assert check(made, reader, stored.name) == 0
        for position in range(first_item(made), stored.trailer_position, 5):
            with spoiled(made, stored.name, lambda data, at=position: data.__setitem__(at, data[at] ^ 1)):
                assert check(made, reader, stored.name) > 0
        assert check(made, reader, stored.name) == 0


def test_a_truncated_object_is_named(made):
    stored = made.stored[1]
    size = stored.size_bytes
    for left in (0, 1, 27, stored.trailer_position - 1, stored.directory_position + 3, size - TAIL_SIZE, size - 1):

        def cut(data, left=left):
            del data[left:]

        with spoiled(made, stored.name, cut), made.reader() as reader:
            assert check(made, reader, stored.name) == len(KEYS) + 1


def test_a_longer_object_is_not_taken_for_another(made):
    """Every range that the log names is unchanged, so every answer is right."""
    stored = made.stored[1]
    with spoiled(made, stored.name, lambda data: data.extend(b"more")), made.reader() as reader:
        assert check(made, reader, stored.name) == 0


def test_objects_that_changed_places_are_named(made, tmp_path):
    older, newer = made.stored
    whole = {stored.name: made.inner.get(stored.name) for stored in made.stored}
    foreign = cold_index(tmp_path / "root", files=2, entries=3, slots=3, preset=made.settings["preset"])
    assert foreign.stored[0].size_bytes == older.size_bytes  # so that only the content differs
    warm = made.reader(block_cache_bytes=0)
    assert check(made, warm, "") == 0
    other_index = foreign.inner.get(foreign.stored[0].name)
    for name, other in ((older.name, whole[newer.name]), (newer.name, whole[older.name]), (older.name, other_index)):

        def exchange(data, other=other):
            data[:] = other

        with spoiled(made, name, exchange), made.reader() as fresh:
            assert check(made, fresh, name) == len(KEYS) + 1
            if other in whole.values():
                assert check(made, warm, name) > 0
    assert check(made, warm, "") == 0
    warm.close()


@pytest.mark.parametrize("mode", ["short", "long", "wrong"])
def test_a_range_answered_wrongly_is_asked_once_more(made, mode):
    for nth in range(1, 5):  # directory and group of one file, then of the other
        faulty = FaultStorage(made.inner)
        with made.reader(storage=faulty, query_threads=1) as reader:
            faulty.corrupt("get_range", mode=mode, nth=nth)
            answer = reader.query("t", "all")
            assert [Answer.of(item) for item in answer] == made.expected("t", "all")
            assert (answer.explain.requests, faulty.calls("get_range")) == (5, 5)


@pytest.mark.parametrize("mode", ["short", "long", "wrong"])
def test_a_range_always_answered_wrongly_is_corrupt(made, mode):
    for warm in (False, True):
        faulty = FaultStorage(made.inner)
        with made.reader(storage=faulty, query_threads=1, block_cache_bytes=0) as reader:
            if warm:
                reader.query("t", "all")
            before = faulty.calls("get_range")
            faulty.corrupt("get_range", mode=mode, times=None)
            with pytest.raises(CorruptFile, match=made.stored[1].name):
                reader.query("t", "all", max_count=1)
            assert faulty.calls("get_range") - before == 2
            partly = reader.query("t", "all", allow_partial=True)
            assert (partly.status, len(partly), len(partly.failed)) == ("partial", 0, 2)
            faulty.clear()
            assert [Answer.of(item) for item in reader.query("t", "all")] == made.expected("t", "all")
