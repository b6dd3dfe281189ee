"""Filters that do not all fit: those at hand stay while they are of use, and none is fetched again and again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.cold_index import ColdIndex, cold_index
from tiered_index import IndexReader
from tiered_index.storage.base import Storage
from tiered_index.testing.storage_faults import FaultStorage

FILES = 12
ROOM = 4
PROBES = 3
ABSENT = 40


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> ColdIndex:
    return cold_index(tmp_path_factory.mktemp("root"), files=FILES, entries=6000, slots=6000)


def reader(made: ColdIndex, cache: Path | None, storage: Storage | None = None) -> IndexReader:
    """Return a reader with room for the filters of four files, in memory or on the disk."""
    size = made.stored[0].filter_length
    directory = made.stored[0].size_bytes - made.stored[0].directory_position
    settings: dict[str, int] = {"directory_cache_bytes": 2 * ROOM * size + size}
    if cache is not None:
        settings["cache_max_bytes"] = int((ROOM * size * 1.01 + FILES * directory * 1.1 + size / 2) / 0.9)
    assert FILES * directory < settings["directory_cache_bytes"]
    return made.reader(storage, cache_dir=cache, filter_after_probes=PROBES, block_cache_bytes=0, **settings)


def ask(made: ColdIndex, asked: IndexReader, first: int, stop: int, count: int, name: str) -> tuple[list[str], int]:
    """Look `count` absent keys up in files `first` to below `stop`; return whose filters were fetched, and how many
    requests were made.
    """
    made.storage.reset()
    span = made.stored[first].second_min * 1000, made.stored[stop - 1].second_max * 1000
    for number in range(count):
        assert len(asked.query("t", f"{name}{number}", *span)) == 0
    places = {(o.name, o.trailer_position, o.filter_length) for o in made.stored}
    return [read.name for read in made.storage.reads if (read.name, read.start, read.length) in places], len(
        made.storage.reads
    )


@pytest.mark.parametrize("local", [False, True], ids=["memory", "cache_dir"])
def test_those_that_fit_stay_and_the_rest_is_read(made: ColdIndex, tmp_path: Path, local: bool) -> None:
    with reader(made, tmp_path / "cache" if local else None) as asked:
        fetched, requests = ask(made, asked, 0, FILES, ABSENT, "absent")
    assert len(fetched) == len(set(fetched)) == ROOM
    # once they are at hand, the files of the others are read, and no more
    assert requests <= FILES + FILES * PROBES + ROOM + (FILES - ROOM) * (ABSENT - PROBES) + ROOM * ABSENT // 20


def idle(cache: Path | None) -> None:
    """Let an hour pass since all entries on the disk were used."""
    for path in cache.rglob("*.*") if cache is not None else ():
        os.utime(path, (path.stat().st_atime - 3600, path.stat().st_mtime - 3600))


@pytest.mark.parametrize("local", [False, True], ids=["memory", "cache_dir"])
def test_what_is_of_no_use_any_more_makes_room(made: ColdIndex, tmp_path: Path, local: bool) -> None:
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


def test_changing_lookups_fetch_a_filter_ever_more_rarely(made: ColdIndex) -> None:
    """Two parts of the files are asked in turn, each long enough that it would have the filters of the other thrown
    out.
    """
    turns = 24
    with reader(made, None) as asked:
        fetched: list[str] = []
        for turn in range(turns):
            first = turn % 2 * ROOM
            fetched += ask(made, asked, first, first + ROOM, 2 * PROBES, f"turn{turn}-")[0]
    # without a longer wait it is one each turn; with it 3, 3, 6, 12 ... reads in vain, of which a turn has 6
    each = {name: fetched.count(name) for name in fetched}
    assert len(each) == 2 * ROOM and max(each.values()) <= 4
    assert len(fetched) < turns * ROOM / 3


def test_room_is_held_while_filters_are_under_way(made: ColdIndex) -> None:
    """All files are due in one lookup, and searched side by side."""
    with reader(made, None) as asked:
        (path,) = asked._cold_paths
        filters = path.filters
        for stored in made.stored * PROBES:
            filters.record_miss(stored, 1)
        claimed = [stored for stored in made.stored if filters.claim(stored)]
        assert len(claimed) == ROOM
        for stored in claimed:
            filters.release(stored)
        # room that is let go of is given anew
        for _ in range(PROBES):
            filters.record_miss(made.stored[-1], 1)
        assert filters.claim(made.stored[-1])


def test_a_filter_that_can_not_be_had_holds_no_room(made: ColdIndex, caplog: pytest.LogCaptureFixture) -> None:
    """The filters of the newest files can't be read; those of the oldest get the room."""
    faulty = FaultStorage(made.inner)
    with reader(made, None, faulty) as asked:
        ask(made, asked, 0, FILES, PROBES, "before")
        for stored in made.stored[FILES - ROOM :]:
            faulty.fail("get_range", name_prefix=stored.name)
        ask(made, asked, FILES - ROOM, FILES, 1, "fails")
        assert caplog.text.count("is not used") == ROOM
        ask(made, asked, 0, ROOM, 1, "due")
        span = made.stored[0].second_min * 1000, made.stored[ROOM - 1].second_max * 1000
        assert sum(asked.query("t", f"last{number}", *span).explain.requests for number in range(5)) <= 2
