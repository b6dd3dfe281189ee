"""Uploads whose record comes a day late: sweeps that run meanwhile, with what they spare by default, take nothing that
a record names.
"""

import pytest

from tests.support.later import Later
from tests.support.log_records import open_log
from tests.support.staging import Job, Sneaks, fill, found, holds, merge_all, names_below, places, staged
from tiered_index.errors import StorageUnavailable
from tiered_index.service.lifecycle.orphans import delete_orphans, find_orphans
from tiered_index.service.lifecycle.publication import MAX_AGE_S

AHEAD_S = 3601
"""How much later it may be for whoever sweeps."""


class Sees(Sneaks):
    """Something happens just after an object below a prefix was seen to be there."""

    seen = None

    def head(self, name):
        info = super().head(name)
        if self.seen is not None and name.startswith(self.seen[0]):
            (_, act), self.seen = self.seen, None
            act()
        return info


@pytest.fixture
def sneaks(storage):
    return Sees(storage)


@pytest.fixture
def index(open_index, sneaks):
    return open_index("root", storage_backend=sneaks, refresh_interval_s=10**6, local_keep_s=10**9)


@pytest.fixture
def sweep(storage, clock):
    """Delete the orphans of a day; return what went."""

    def act():
        log = open_log(storage, clock)
        return [info.name for info in delete_orphans(storage, find_orphans(Later(storage, AHEAD_S), log)).objects]

    return act


def fails(act, sneaks, when="before"):
    """Have the log refuse what is to be recorded."""
    sneaks.fail("put_if_absent", name_prefix="log/", when=when)
    with pytest.raises(StorageUnavailable):
        act()


def archive(index, size=1000):
    return index.archive("s", 0, size, lambda at, length: bytes(length), None)


@pytest.mark.parametrize("what", ["data/", "segments/"])
def test_what_waited_for_the_log_is_sent_anew(index, sneaks, storage, clock, sweep, what):
    is_file = what == "data/"
    if is_file:
        fill(index, 1, 2, 3)
    act = index.run_lifecycle if is_file else lambda: archive(index)
    fails(act, sneaks)
    (old,) = names_below(storage, what)
    clock.advance(MAX_AGE_S - 1)
    fails(act, sneaks)
    assert names_below(storage, what) == [old], "it may still be named"
    clock.advance(1)
    swept = []
    sneaks.before = lambda: swept.extend(sweep())
    act()
    assert swept == [old]
    assert names_below(storage, what) == [*index.log_state.objects, *index.log_state.archive]
    if is_file:
        assert places(index) == ["uploaded"]
        holds(storage, clock, 1, 2, 3)
    else:
        assert index.segment_archive.table(index.archived()[0]).size_bytes == 1000


@pytest.mark.parametrize("what", ["data/", "segments/"])
def test_a_writer_that_sleeps_before_its_record_sends_anew(index, sneaks, storage, clock, sweep, what):
    """It has just seen that its object is there; when it goes on, a day has passed and a sweep with it."""
    fill(index, 1)
    act = index.run_lifecycle if what == "data/" else lambda: archive(index)
    swept = []

    def sleep():
        clock.advance(MAX_AGE_S)
        swept.extend(sweep())

    sneaks.seen = what, sleep
    with pytest.raises(StorageUnavailable, match=r"23\.0 hours ago"):
        act()
    assert len(swept) == 1 and not names_below(storage, what)
    number = index.log_state.number
    act()
    assert index.log_state.number > number
    named = [*index.log_state.objects, *index.log_state.archive]
    assert len(named) == 1 and names_below(storage, what) == named


def test_a_record_that_nobody_heard_of_is_not_repeated_after_a_day(index, sneaks, storage, clock):
    """The file was published after all, and merged away: what is sent anew would be there twice."""
    fill(index, 1, 2)
    fails(index.run_lifecycle, sneaks, when="after")
    assert merge_all(storage, clock).sources == 1
    clock.advance(MAX_AGE_S)
    index.run_lifecycle()
    assert found(index) == [1, 2] and set(places(index)) == {"storage"}
    holds(storage, clock, 1, 2)


def test_what_is_staged_is_sent_anew_where_its_ticket_waited(open_index, sneaks, storage, clock):
    index = open_index(
        "root", storage_backend=sneaks, compaction="spark", compact_timeout_s=10**7, refresh_interval_s=10**6
    )
    fill(index, 1)
    sneaks.fail("put", name_prefix="staging/", nth=2)  # the ticket
    with pytest.raises(StorageUnavailable):
        index.run_lifecycle()
    (old,) = staged(storage)
    clock.advance(MAX_AGE_S)
    index.run_lifecycle()
    assert len(staged(storage)) == 2 and old not in staged(storage)
    assert len(Job(storage, clock).run()) == 1
    holds(storage, clock, 1)
