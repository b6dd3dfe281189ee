"""The end of a build: the log decides, and nothing is left that the sweep does not find.

`test_beside_killed_drivers.py` kills the driver at every request.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.spark.entries import BEGIN_MS, DAY_MS, messages
from tests.spark.in_process import planned, shards_of, written
from tests.support.later import Later
from tests.support.storage_faults import FaultStorage
from tiered_index.clock import ManualClock
from tiered_index.errors import CorruptFile, InvalidArgument, ObjectExists, StorageUnavailable
from tiered_index.format.names import log_name
from tiered_index.service.lifecycle.orphans import delete_orphans, find_orphans
from tiered_index.service.lifecycle.publication import MAX_AGE_S, JobOverdue, Publication
from tiered_index.service.log.log import StorageLog
from tiered_index.service.merge import task as task_module
from tiered_index.spark.build.build import _check, check_windows, publish_tables
from tiered_index.storage.memory import MemoryStorage

TABLE = messages(900, days=2)
OTHER = messages(700, days=1, seed=2)


@pytest.fixture(autouse=True)
def uploads_in_parts(monkeypatch):
    monkeypatch.setattr(task_module, "_PART_BYTES", 500)


@pytest.fixture
def clock():
    return ManualClock(BEGIN_MS + 10 * DAY_MS)


def opened(storage, clock):
    log = StorageLog(storage, clock)
    log.create(planned(TABLE).genesis)
    return log


def count(storage, clock):
    log = StorageLog(storage, clock)
    return sum(stored.count for stored in log.open().objects.values())


def left_over(storage, clock):
    log = StorageLog(storage, clock)
    log.open()
    found = find_orphans(Later(storage, 300 * 365 * DAY_MS / 1000), log)
    delete_orphans(storage, found)
    assert {info.name for info in storage.list("data/")} == set(log.state.objects)
    assert not list(storage.list_uploads())
    return len(found.objects) + len(found.uploads)


def test_an_append_whose_answer_was_lost_is_found_and_not_repeated(clock):
    storage = FaultStorage(MemoryStorage())
    log = opened(storage, clock)
    plan = planned(TABLE)
    shards = shards_of(written(TABLE, plan, storage))
    storage.fail("put_if_absent", when="after")
    with pytest.raises(StorageUnavailable):
        publish_tables(shards, "error", storage, log)
    state, removed = publish_tables([_completed(shard) for shard in shards], "error", storage, log)
    assert (len(state.objects), removed) == (len(shards), 0)
    assert count(storage, clock) == 900


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_record_that_comes_back_damaged_is_not_taken_for_one_that_is_not_there(clock, damaged):
    """The put's answer is lost, the storage's own retry finds the record, and reading it goes wrong once, or twice."""
    inner = MemoryStorage()
    opened(inner, clock)
    storage = FaultStorage(inner)
    log = StorageLog(storage, clock)
    log.open()
    plan = planned(TABLE)
    shards = shards_of(written(TABLE, plan, storage))
    storage.fail("put_if_absent", name_prefix="log/", when="after", error=lambda text: ObjectExists("log/2", text))
    storage.corrupt("get", name_prefix=log_name(2), times=damaged)
    if damaged == 1:
        state, _ = publish_tables(shards, "error", storage, log)
        assert len(state.objects) == len(shards)
    else:
        # an error of the storage: nobody takes the objects back
        with pytest.raises(StorageUnavailable, match="is unknown"):
            publish_tables(shards, "error", storage, log)
    assert count(inner, clock) == 900
    assert left_over(inner, clock) == 0


@pytest.mark.parametrize("ahead_ms", [0, 23 * 3_600_000 - 1, 23 * 3_600_000, -23 * 3_600_000])
def test_a_job_that_began_too_long_ago_publishes_nothing_and_takes_back_what_it_sent(clock, ahead_ms):
    """`orphans` may be about to delete it. A clock that was put back hides how long it was."""
    storage = MemoryStorage()
    opened(storage, clock)
    plan = planned(TABLE)
    shards = shards_of(written(TABLE, plan, storage))
    late = ManualClock(clock.now_ms() + ahead_ms)
    if abs(ahead_ms) < MAX_AGE_S * 1000:
        publish_tables(shards, "error", storage, StorageLog(storage, late))
        assert count(storage, clock) == 900
    else:
        with pytest.raises(JobOverdue, match=r"build .*23\.0 hours ago"):
            publish_tables(shards, "error", storage, StorageLog(storage, late))
        assert count(storage, clock) == 0
    assert left_over(storage, clock) == 0


def test_what_is_published_between_finding_and_deleting_stays(clock):
    """A job that took longer than the sweep was told to spare."""
    storage = MemoryStorage(clock=clock)
    log = opened(storage, clock)
    plan, twice = planned(TABLE), planned(OTHER)
    shards = shards_of(written(TABLE, plan, storage, now_ms=clock.now_ms()))
    Publication(log, [shard.sent for shard in shards]).complete()
    never = shards_of(written(OTHER, twice, storage, now_ms=clock.now_ms()))
    Publication(log, [shard.sent for shard in never]).complete()
    clock.advance(3_700)
    sweeper = StorageLog(storage, clock)
    sweeper.open()
    found = find_orphans(storage, sweeper, older_than_s=3600)
    assert len(found.objects) == len(shards) + len(never)
    publish_tables([_completed(shard) for shard in shards], "error", storage, log)
    deleted = delete_orphans(storage, found)
    assert {info.name for info in deleted.objects} == {shard.stored.name for shard in never}
    assert {info.name for info in storage.list("data/")} == set(log.state.objects)


def test_the_log_is_read_again_before_each_batch_of_deletes(clock, monkeypatch):
    monkeypatch.setattr("tiered_index.service.lifecycle.orphans._AT_ONCE", 1)
    storage = FaultStorage(MemoryStorage(clock=clock))
    log = opened(storage, clock)
    plan = planned(TABLE)
    shards = shards_of(written(TABLE, plan, storage, now_ms=clock.now_ms()))
    Publication(log, [shard.sent for shard in shards]).complete()
    clock.advance(86_401)
    found = find_orphans(storage, log)
    before = storage.calls("list")
    assert delete_orphans(storage, found).objects == found.objects
    assert storage.calls("list") - before == len(found.objects) == len(shards) > 1


def _completed(shard):
    return replace(shard, sent=replace(shard.sent, upload=None))


def test_two_builds_of_one_window_at_once(clock):
    storage = MemoryStorage()
    log = opened(storage, clock)
    plans = [planned(TABLE), planned(TABLE)]
    both = [shards_of(written(TABLE, plan, storage)) for plan in plans]
    for plan in plans:
        assert check_windows(log.state, plan, "error") == ()  # neither sees the other
    publish_tables(both[0], "error", storage, log)
    with pytest.raises(InvalidArgument, match="has a table already"):
        publish_tables(both[1], "error", storage, StorageLog(storage, clock))
    assert count(storage, clock) == 900
    _, removed = publish_tables([_completed(s) for s in both[1]], "replace", storage, log)
    assert removed == len(both[0])
    assert count(storage, clock) == 900


def test_results_that_are_not_what_was_counted_are_not_published():
    storage = MemoryStorage()
    plan = planned(TABLE)
    results = written(TABLE, plan, storage)
    _check(plan, results)
    with pytest.raises(InvalidArgument, match="changes"):
        _check(plan, results[1:])
    with pytest.raises(CorruptFile, match="other entries"):
        _check(plan, [replace(results[0], read_checksum=results[0].read_checksum ^ 1), *results[1:]])


@pytest.mark.parametrize("operation", ["begin_upload", "upload_part"])
def test_a_task_whose_storage_fails_takes_back_what_it_uploaded(clock, operation):
    storage = FaultStorage(MemoryStorage())
    log = opened(storage, clock)
    plan = planned(TABLE)
    storage.fail(operation, nth=2, times=None)
    with pytest.raises(StorageUnavailable):
        written(TABLE, plan, storage)
    storage.clear()
    assert not list(storage.list("data/")) and not list(storage.list_uploads())
    publish_tables(shards_of(written(TABLE, plan, storage)), "error", storage, log)
    assert count(storage, clock) == 900
