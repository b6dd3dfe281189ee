"""Files are published once, and objects that were just sent or removed stay.

Wrong clocks of hosts and late records do not change that.
"""

import pytest

from tests.storage.scripted_server import Answer, scripted_server
from tests.support.filled import fill, holds, names_below, places
from tests.support.later import Later
from tests.support.log_records import open_log, segments_of
from tiered_index import IndexService
from tiered_index.base.clock import ManualClock, SystemClock
from tiered_index.errors import StorageUnavailable
from tiered_index.format.names import log_name
from tiered_index.service.jobs.orphans import delete_orphans, find_orphans
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.publication import MAX_AGE_S
from tiered_index.storage.base import Storage, WrapperStorage
from tiered_index.storage.local import LocalStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.s3.options import S3Options
from tiered_index.storage.s3.storage import S3Storage

DAYS_S = 3 * 86_400


TICK_MS = 20


class Probing(WrapperStorage):
    """A backend whose responses have no time."""

    now_ms = Storage.now_ms


@pytest.fixture(params=["memory", "file", "probing"])
def place(request, tmp_path):
    if request.param == "file":
        return LocalStorage(tmp_path / "s")
    return MemoryStorage() if request.param == "memory" else Probing(MemoryStorage())


def test_a_host_whose_clock_is_days_fast_deletes_nothing_that_was_just_sent(place, tmp_path):
    fast = ManualClock(SystemClock().now_ms() + DAYS_S * 1000)
    IndexService.open(root=tmp_path / "root", storage_backend=place, slots=7, items=20, background=False).close()
    place.put("data/sent/1.index", b"x")
    log = open_log(place, fast)
    orphans = find_orphans(place, log)
    assert orphans.objects == ()
    orphans = find_orphans(Later(place, DAYS_S), log)
    assert [info.name for info in orphans.objects] == ["data/sent/1.index"]
    assert not list(place.list("probe/"))


def test_a_storage_tells_the_time_of_its_objects(place):
    before_ms = place.now_ms()
    place.put("a", b"x")
    # a file's time is that of the kernel's last tick
    assert before_ms - TICK_MS <= place.head("a").modified_ms


def test_s3_tells_the_services_time_by_one_request(monkeypatch):
    """By a listing through boto3."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "a")
    with scripted_server() as server:
        for client in (None, "boto3"):
            with S3Storage("bucket", "index", S3Options(endpoint_url=server.endpoint_url, client=client)) as storage:
                server.requests.clear()
                listing = b"<ListBucketResult><Name>bucket</Name></ListBucketResult>"
                server.answers(Answer(200, listing))
                told_ms = storage.now_ms()
                assert (told_ms % 1000, abs(told_ms - SystemClock().now_ms()) < 60_000) == (0, True)
                assert len(server.requests) == 1


AHEAD_S = 3601
"""The clock of a sweep may be so many seconds ahead."""


@pytest.fixture
def index(open_index, faulty):
    return open_index("root", storage_backend=faulty, refresh_interval_s=10**6, local_keep_s=10**9)


@pytest.fixture
def sweep(storage, clock):
    """Return a function that deletes orphans that are a day old, and returns their names."""

    def act():
        log = open_log(storage, clock)
        return [info.name for info in delete_orphans(storage, find_orphans(Later(storage, AHEAD_S), log)).objects]

    return act


def fails(act, faulty, when="before"):
    """Let the log refuse the record of `act`."""
    faulty.fail("put_if_absent", name_prefix="log/", when=when)
    with pytest.raises(StorageUnavailable):
        act()


def archive(index, size=1000):
    return index.archive("s", 0, size, lambda at, length: bytes(length), None)


@pytest.mark.parametrize("what", ["data/", "segments/"])
def test_an_object_that_waited_for_the_log_is_sent_again(index, faulty, storage, clock, sweep, what):
    is_file = what == "data/"
    if is_file:
        fill(index, 1, 2, 3)
    act = index.run_lifecycle if is_file else lambda: archive(index)
    fails(act, faulty)
    (old,) = names_below(storage, what)
    clock.advance(MAX_AGE_S - 1)
    fails(act, faulty)
    assert names_below(storage, what) == [old], "a record may still name it"
    clock.advance(1)
    swept = []
    faulty.meanwhile("put_if_absent", lambda: swept.extend(sweep()), name_prefix="log/")
    act()
    assert swept == [old]
    assert names_below(storage, what) == [
        *index.log_state.objects,
        *(segment.name for segment in segments_of(index.log_state)),
    ]
    if is_file:
        assert places(index) == ["uploaded"]
        holds(storage, clock, 1, 2, 3)
    else:
        assert index.segment_archive.table(index.archived()[0]).size_bytes == 1000


@pytest.mark.parametrize("what", ["data/", "segments/"])
def test_a_writer_that_sleeps_before_its_record_sends_again(index, faulty, storage, clock, sweep, what):
    """The writer checks that its object is there, then sleeps.

    Meanwhile a day passes and a sweep deletes the object.
    """
    fill(index, 1)
    act = index.run_lifecycle if what == "data/" else lambda: archive(index)
    swept = []

    def sleep():
        clock.advance(MAX_AGE_S)
        swept.extend(sweep())

    faulty.meanwhile("head", sleep, when="after", name_prefix=what)
    with pytest.raises(StorageUnavailable, match=r"23\.0 hours ago"):
        act()
    assert len(swept) == 1 and not names_below(storage, what)
    number = index.log_state.number
    act()
    assert index.log_state.number > number
    named = [*index.log_state.objects, *(segment.name for segment in segments_of(index.log_state))]
    assert len(named) == 1 and names_below(storage, what) == named


def test_numbers_of_young_records_are_found_a_listing_at_a_time(storage, clock):
    """A listing has a thousand names."""
    end = 2_500
    for number in range(1, end + 1):
        clock.advance(10)
        storage.put(log_name(number), b"x")
    log = StorageLog(storage, clock)
    ages_and_lasts = [(age_s, end) for age_s in (0, 25, 9_990, 10_000, 15_000, 10**6)]
    for age_s, last in (*ages_and_lasts, (9_000, 1_601), (10**6, 9), (5, 4), (1000, 0)):
        young = [n for n in range(last, 0, -1) if (end - n) * 10 <= age_s]
        assert list(log.numbers_since(last, clock.now_ms() - age_s * 1000)) == young
