"""Objects are damaged. A fresh reader answers exactly the put entries, or names the object.

A batch is partial by slot group, as single lookups are.
"""

import random
from functools import partial

import pytest

from tests.support.cold_index import cold_index, spoiled
from tests.support.model import Answer
from tests.support.storage_faults import FaultStorage
from tiered_index import Lookup
from tiered_index.errors import CorruptFile, PartialAnswer
from tiered_index.format.layout import HEADER_SIZE, NATIVE
from tiered_index.format.trailer import parse_trailer

KEYS = ("k0-0", "k0-1", "all", "absent")


@pytest.fixture(scope="module", params=["native", "rocketmq"])
def index(request, tmp_path_factory):
    return cold_index(tmp_path_factory.mktemp("cold") / "root", files=2, entries=3, slots=3, preset=request.param)


def check(index, reader, name, keys=KEYS):
    """Look up every key, then all at once. Return how many lookups named the object `name` as corrupt."""
    named = 0
    for key in keys:
        try:
            answer = reader.query("t", key)
        except CorruptFile as error:
            assert name in str(error)
            named += 1
        else:
            assert ([Answer.of(item) for item in answer], answer.status) == (index.expected("t", key), "complete")
    try:
        answers = list(reader.query_many([Lookup(topic="t", key=key) for key in KEYS]))
    except CorruptFile as error:
        assert name in str(error)
        return named + 1
    assert [[Answer.of(item) for item in answer] for answer in answers] == [index.expected("t", key) for key in KEYS]
    return named


def first_item(index):
    """Return the position of the first item. Native files are packed and have no slot table."""
    layout = index.reader().genesis.layout
    return HEADER_SIZE if layout.preset is NATIVE else layout.items_position


@pytest.mark.parametrize("apart", [20, pytest.param(4, marks=pytest.mark.long)])
def test_a_flipped_byte_anywhere_in_the_items_or_the_trailer_is_noticed(index, apart):
    """Lookups do not read header and slot table. So few lookups fetch no filter.

    Flips of the trailer are `apart` bytes from each other: `test_trailer.py` flips each of its bits.
    """
    stored = index.stored[0]
    items = first_item(index)

    def flip(position, data):
        data[position] ^= 0x40

    # so that every field of the items is hit
    positions = [*range(items, stored.trailer_position, 4), *range(stored.trailer_position, stored.size_bytes, apart)]
    quiet = []
    for position in positions:
        with spoiled(index, stored.name, partial(flip, position)), index.reader() as reader:
            # any lookup reads the bytes outside the groups
            if not check(index, reader, stored.name, KEYS if position < stored.trailer_position else KEYS[2:3]):
                quiet.append(position)
    # lookups notice every byte except the filter's
    assert quiet == [at for at in positions if stored.trailer_position <= at < stored.directory_position]


def test_a_damaged_filter_that_comes_with_its_directory_hides_no_entry(index):
    stored = index.stored[0]

    def empty(data):
        data[stored.trailer_position : stored.directory_position] = bytes(stored.filter_length)

    with spoiled(index, stored.name, empty), index.reader() as reader:
        assert check(index, reader, stored.name) == 0


def test_objects_that_changed_places_are_named(index, tmp_path):
    older, newer = index.stored
    whole = {stored.name: index.inner.get(stored.name) for stored in index.stored}
    foreign = cold_index(tmp_path / "root", files=2, entries=3, slots=3, preset=index.settings["preset"])
    assert foreign.stored[0].size_bytes == older.size_bytes  # so that only the content differs
    warm = index.reader(cache_slot_groups=False)
    assert check(index, warm, "") == 0
    other_index = foreign.inner.get(foreign.stored[0].name)
    for name, other in ((older.name, whole[newer.name]), (newer.name, whole[older.name]), (older.name, other_index)):

        def exchange(data, other=other):
            data[:] = other

        with spoiled(index, name, exchange), index.reader() as fresh:
            assert check(index, fresh, name) == len(KEYS) + 1
            if other in whole.values():
                assert check(index, warm, name) > 0
    assert check(index, warm, "") == 0
    warm.close()


@pytest.mark.parametrize("mode", ["short", "long", "wrong"])
def test_a_range_always_answered_wrongly_is_corrupt(index, mode):
    for warm in (False, True):
        faulty = FaultStorage(index.inner)
        with index.reader(storage=faulty, query_threads=1, cache_slot_groups=False) as reader:
            if warm:
                reader.query("t", "all")
            before = faulty.calls("get_range")
            faulty.corrupt("get_range", mode=mode, times=None)
            with pytest.raises(CorruptFile, match=index.stored[1].name):
                reader.query("t", "all", max_count=1)
            assert faulty.calls("get_range") - before == 2
            partly = reader.query("t", "all", allow_partial=True)
            assert (partly.status, len(partly), len(partly.failed)) == ("partial", 0, 2)
            faulty.clear()
            assert [Answer.of(item) for item in reader.query("t", "all")] == index.expected("t", "all")


@pytest.mark.parametrize("preset", ["native", "rocketmq"])
def test_a_batch_is_partial_by_slot_group_as_single_lookups_are(tmp_path, preset):
    made = cold_index(tmp_path / "root", files=2, entries=3000, slots=500, preset=preset)
    rng = random.Random(preset)
    for stored in made.stored:
        data = bytearray(made.inner.get(stored.name))
        runs = [*parse_trailer(bytes(data), stored.name, len(data)).directory.all_runs()]
        for run in rng.sample(runs, len(runs) // 5):
            data[run.offset + rng.randrange(run.length)] ^= 1 << rng.randrange(8)
        made.inner.put(stored.name, bytes(data))
    lookups = [Lookup("t", f"k{file}-{number}") for file in range(2) for number in range(0, 2999, 25)]
    lookups += [Lookup("t", "all"), Lookup("t", "absent"), Lookup("u", "k0-1")]
    with made.reader(filter_after_probes=10**6) as reader:
        alone = [reader.query(lookup.topic, lookup.key, allow_partial=True) for lookup in lookups]
    with made.reader(filter_after_probes=10**6) as reader:
        many = reader.query_many(lookups, allow_partial=True)
        with pytest.raises((CorruptFile, PartialAnswer)):
            reader.query_many(lookups)
    assert 0 < sum(answer.status == "partial" for answer in alone) < len(lookups)
    for lookup, answer, other in zip(lookups, alone, many, strict=True):
        assert (other.status, other.items) == (answer.status, answer.items), lookup
        assert {report.file for report in other.failed} == {report.file for report in answer.failed}, lookup
    assert {report.file for report in many.failed} == {report.file for answer in alone for report in answer.failed}
