"""The cache has no room for all filters. A filter replaces others only after enough misses."""

import os

import pytest

from tests.support.cold_index import Read, cold_index
from tests.support.storage_faults import FaultStorage
from tiered_index.service.read import caches as caches_module

pytestmark = pytest.mark.usefixtures("large_filters")
FILES = 12
ROOM = 4
PROBES = 3
ABSENT = 40


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return cold_index(tmp_path_factory.mktemp("root"), files=FILES, entries=6000, slots=6000)


def reader(made, cache, storage=None):
    """Return a reader with room for the filters of four files, in memory or on the disk."""
    size = made.stored[0].filter_length
    directory = made.stored[0].size_bytes - made.stored[0].directory_position
    settings = {"directory_cache_bytes": 2 * ROOM * size + size}
    if cache is not None:
        settings["cache_max_bytes"] = int((ROOM * size * 1.01 + FILES * directory * 1.1 + size / 2) / 0.9)
    assert FILES * directory < settings["directory_cache_bytes"]
    return made.reader(storage, cache_dir=cache, filter_after_probes=PROBES, block_cache_bytes=0, **settings)


def ask(made, asked, first, stop, count, name):
    """Look up `count` absent keys in the files from `first` to before `stop`.

    Return the names of the objects whose filters were fetched, and the number of requests.
    """
    made.storage.reset()
    span = made.stored[first].second_min * 1000, made.stored[stop - 1].second_max * 1000
    for number in range(count):
        assert len(asked.query("t", f"{name}{number}", *span)) == 0
    places = {Read(o.name, o.trailer_position, o.filter_length) for o in made.stored}
    return [read.name for read in made.storage.reads if read in places], len(made.storage.reads)


@pytest.fixture
def dear(made, monkeypatch):
    """Let a filter cost as much as 1,600 misses, as with 20,000,000 keys.

    Otherwise this small filter has only half the bytes of a miss.
    """
    monkeypatch.setattr(caches_module, "_MISS_BYTES", made.stored[0].filter_length / 1600)


@pytest.mark.parametrize("local", [False, True], ids=["memory", "cache_dir"])
def test_filters_that_fit_stay_and_the_other_files_are_read(made, tmp_path, local, dear):
    with reader(made, tmp_path / "cache" if local else None) as asked:
        fetched, requests = ask(made, asked, 0, FILES, ABSENT, "absent")
    assert len(fetched) == len(set(fetched)) == ROOM
    # once these filters are cached, the files of the others are read, and no further reads happen
    assert requests <= FILES + FILES * PROBES + ROOM + (FILES - ROOM) * (ABSENT - PROBES) + ROOM * ABSENT // 20


def idle(cache):
    """Let an hour pass since the last use of all entries on the disk."""
    for path in cache.rglob("*.*") if cache is not None else ():
        os.utime(path, (path.stat().st_atime - 3600, path.stat().st_mtime - 3600))


@pytest.mark.parametrize("local", [False, True], ids=["memory", "cache_dir"])
def test_unused_filters_make_room(made, tmp_path, local):
    cache = tmp_path / "cache" if local else None
    with reader(made, cache) as asked:
        fetched, _ = ask(made, asked, 0, ROOM, 10, "old")
        assert len(fetched) == ROOM
    idle(cache)
    with reader(made, cache) as asked:
        if not local:
            ask(made, asked, 0, ROOM, 10, "old")
        newest, _ = ask(made, asked, FILES - ROOM, FILES, 10, "new")
        assert sorted(newest) == sorted(stored.name for stored in made.stored[FILES - ROOM :])
        _, requests = ask(made, asked, FILES - ROOM, FILES, 10, "newer")
        assert requests <= 4


@pytest.mark.parametrize("local", [False, True], ids=["memory", "cache_dir"])
def test_filters_in_place_of_others_cost_no_more_bytes_than_misses(made, tmp_path, monkeypatch, local):
    """The test looks up in two groups of files in turn. Each group has as many filters as fit."""
    misses, turns = 20, 24
    monkeypatch.setattr(caches_module, "_MISS_BYTES", made.stored[0].filter_length / misses)
    with reader(made, tmp_path / "cache" if local else None) as asked:
        ask(made, asked, 0, FILES, 1, "directories")
        fetched, reads = 0, FILES
        for turn in range(turns):
            first = turn % 2 * ROOM
            of_turn, requests = ask(made, asked, first, first + ROOM, 2 * PROBES, f"turn{turn}-")
            fetched, reads = fetched + len(of_turn), reads + requests - len(of_turn)
            # a false positive of a cached filter is not a miss, so these counts are upper bounds
            assert ROOM <= fetched <= ROOM + reads / misses
            assert fetched <= reads / PROBES
    assert fetched > ROOM


def test_room_is_counted_once_while_filters_are_being_fetched(made, dear):
    """All files are due in one lookup, which searches them in parallel. One thread fetches each filter."""
    with reader(made, None) as asked:
        filters = asked._cold_paths[0].filters
        for stored in made.stored * PROBES:
            filters.record_miss(stored, 1)
        begun = [stored for stored in made.stored if filters.begin_fetch(stored)]
        assert begun == made.stored[:ROOM]
        assert not any(filters.begin_fetch(stored) for stored in made.stored)
        for stored in begun:
            filters.end_fetch(stored)
        # filters that could not be fetched free their room, and their misses are counted from zero
        assert [stored for stored in made.stored if filters.begin_fetch(stored)] == made.stored[ROOM : 2 * ROOM]


def test_an_explicit_fetch_replaces_the_least_recently_used_filter(made, dear):
    with reader(made, None) as asked:
        for stored in made.stored:
            assert asked.fetch_filter(stored.file_id)
        assert [stored for stored in made.stored if asked._cold_paths[0].filters.has(stored)] == made.stored[-ROOM:]


def test_a_filter_that_cannot_be_fetched_holds_no_room(made, caplog, dear):
    """The filters of the newest files cannot be read. Those of the oldest files get the room."""
    faulty = FaultStorage(made.inner)
    with reader(made, None, faulty) as asked:
        ask(made, asked, 0, FILES, PROBES, "before")
        for stored in made.stored[FILES - ROOM :]:
            faulty.fail("get_range", name_prefix=stored.name)
        ask(made, asked, FILES - ROOM, FILES, 1, "fails")
        assert caplog.text.count("ignoring the filter") == ROOM
        ask(made, asked, 0, ROOM, 1, "due")
        span = made.stored[0].second_min * 1000, made.stored[ROOM - 1].second_max * 1000
        assert sum(asked.query("t", f"last{number}", *span).explain.requests for number in range(5)) <= 2
