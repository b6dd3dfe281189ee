"""Files of versions before the packed layout are read beside packed ones, and merge into packed tables."""

import pytest

from tests.support.batches import batch
from tests.support.merging import BASE_MS, HOUR_MS, RegionItem
from tests.support.plain_files import plain_files
from tiered_index import Lookup, hash_key
from tiered_index.format.trailer import parse_trailer


def version(life, name):
    """Return the format version of an object."""
    data = life.storage.get(name)
    return parse_trailer(data, name, len(data)).metadata.version


@pytest.mark.parametrize(("keep_s", "item_type"), [(0, None), (10**9, RegionItem)])
def test_plain_files_of_earlier_versions_are_read_and_merged(merging, keep_s, item_type):
    life = merging(settings={"slots": 50, "local_keep_s": keep_s}, item_type=item_type)
    versions = []
    for number, layout in enumerate(("plain", "packed", "plain")):
        life.index.close()
        life.index = life.open()
        life.put((BASE_MS + number * HOUR_MS + row * 1000, f"k{row % 9}") for row in range(60))
        with plain_files(layout == "plain"):
            life.publish()
        versions.append(version(life, max(life.state.files.values(), key=lambda stored: stored.sequence).name))
        life.check(life.index)
    assert versions == [1, 4, 1]
    life.check()
    life.later()
    life.merge()
    assert not life.state.files and {version(life, name) for name in life.state.objects} == {3}
    life.check()


@pytest.mark.parametrize("layout", ["plain", "packed"])
def test_a_key_that_a_file_lacks_takes_nothing_from_a_giant_slot_beside_it(open_index, layout):
    """The slots before the giant one are empty: their group begins where its first block does."""
    index = open_index(slots=7, items=10_000)
    giant, absent = (next(f"k{n}" for n in range(99) if hash_key("t", f"k{n}") % 7 == slot) for slot in (3, 1))
    index.put_batch(batch(10_000, key=giant, timestamp_ms=BASE_MS))
    with plain_files(layout == "plain"):
        index.seal()
        index.run_lifecycle()
    found = index.query_many([Lookup(topic="t", key=key, max_count=2) for key in (giant, absent)])
    assert [[item.offset for item in result.items] for result in found] == [[9_999, 9_998], []]
