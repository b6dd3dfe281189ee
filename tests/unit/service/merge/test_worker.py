"""The writer's own merges: what it merges and when, what it leaves, and what users see of it."""

import itertools
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from msgspec import structs

from tests.support.hanging import beside, until
from tests.support.log_records import an_object
from tests.support.merging import BASE_MS, DAY_MS, DAY_S, HOUR_MS, HOUR_S, Merging
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexConfig, IndexService
from tiered_index.base.clock import ManualClock
from tiered_index.errors import ConfigError, CorruptFile, ObjectArchived, StorageUnavailable
from tiered_index.format.layout import NATIVE, ROCKETMQ, SlotMap
from tiered_index.format.names import CATALOG_PREFIX, linked_store
from tiered_index.format.segments.segment import LinkedSegment
from tiered_index.service import index as index_module
from tiered_index.service.jobs.rewriting.rewrite import RewriteTask
from tiered_index.service.jobs.segments.catalogs import FULL_LEVEL
from tiered_index.service.jobs.segments.linking import link
from tiered_index.service.life.merge_worker import MergeWorker
from tiered_index.service.log.records import LogRecord, TableShard
from tiered_index.storage.memory import MemoryStorage

DAYS_30 = (0, 720)


def rows(hour: float, count: int = 20) -> list[tuple[int, str]]:
    """Return rows from an hour on after `BASE_MS`, a minute apart, of five keys."""
    begin_ms = BASE_MS + round(hour * HOUR_MS)
    return [(begin_ms + step * 60_000, "hot" if step % 2 else f"k{step % 4}") for step in range(count)]


def publish_at(life: Merging, *hours: float) -> None:
    """Publish a file of each hour, when that hour has passed."""
    for hour in hours:
        life.put(rows(hour))
        behind_s = (BASE_MS + round((hour + 1) * HOUR_MS) - life.clock.now_ms()) / 1000
        life.clock.advance(max(0, behind_s))
        life.publish()


@pytest.fixture
def life(merging):
    """An index with a `FaultStorage`."""
    clock = ManualClock(BASE_MS)
    return merging(storage=FaultStorage(MemoryStorage(clock=clock)), clock=clock)


def merge_health(index: IndexService) -> dict[str, Any]:
    return index.health()["merge"]


def left(life: Merging) -> list[tuple[str, str]]:
    return [(window["window"], window["reason"]) for window in merge_health(life.index)["left"]]


def test_finished_windows_are_merged_an_hour_after_their_end_and_their_sources_deleted_after_the_grace(life):
    publish_at(life, 1, 9, 17)
    replaced = {stored.name for stored in life.state.objects.values()}
    life.clock.advance(7 * HOUR_S - 1)  # 00:59:59 of the next day
    assert life.index.run_merge().jobs == 0 and life.windows() == []
    life.clock.advance(1)
    done = life.index.run_merge()
    assert (done.jobs, done.sources, done.entries) == (1, 3, 60)
    assert life.windows() == [(0, 24)] and not life.state.files
    assert life.index.run_merge().jobs == 0
    health = merge_health(life.index)
    assert health["last_ms"] == life.clock.now_ms() and health["waiting_windows"] == 0
    assert life.index.health()["steps"]["merge"]["count"] == 1
    for reader in (life.index, None):
        life.check(reader)
    # also without a retention rule; a writer looks once a day
    for hours, left_of_them in ((23, replaced), (25, set())):
        life.clock.advance(hours * HOUR_S)
        life.index.run_lifecycle()
        assert replaced & {info.name for info in life.storage.list("data/")} == left_of_them
    life.check()


def test_late_entries_get_a_small_table_until_they_are_many(life):
    publish_at(life, 1, 3, 5)
    life.clock.advance(20 * HOUR_S)
    life.index.run_merge()
    life.put(rows(7, 5))
    life.publish()
    life.index.run_merge()
    assert life.windows() == [(0, 24), (0, 24)]
    life.put(rows(9, 20))
    life.publish()
    life.index.run_merge()
    assert life.windows() == [(0, 24)]
    life.check()


def test_a_file_of_the_present_day_waits_and_a_clock_that_is_set_back_merges_nothing(life):
    publish_at(life, 1)
    life.put(rows(23.9))  # reaches into the next day
    life.publish()
    life.clock.advance(25 * HOUR_S - 60)
    life.index.run_merge()
    assert life.windows() == [(0, 24)] and len(life.state.files) == 1
    life.clock._now_ms -= 2 * DAY_MS
    assert life.index.run_merge().jobs == 0
    life.clock._now_ms += 5 * DAY_MS
    # a writer follows a clock that was set if the storage's agrees, and puts a sweep off
    with pytest.raises(ConfigError, match="no orphan is deleted"):
        life.index.run_lifecycle()
    life.index.run_merge()
    assert not life.state.files
    life.check()


def test_a_backlog_above_the_bound_is_merged_day_by_day_without_small_tables(merging):
    life = merging(settings={"merge_max_entries": 60})
    for day in range(4):
        # the last file of each day reaches into the next one
        publish_at(life, 24 * day + 5, 24 * day + 23.9)
    life.clock.advance(3 * DAY_S)
    assert life.index.run_merge().jobs == 4
    assert life.windows() == [(24 * day, 24) for day in range(5)]
    life.clock.advance(30 * DAY_S)
    assert life.index.run_merge().jobs == 0
    assert "160 entries are more than merge_max_entries = 60" in left(life)[0][1]
    life.check()


def test_the_setting(tmp_path):
    config = IndexConfig(environment=False)
    assert config.merge_tiers(NATIVE) == [DAY_S, 30 * DAY_S] and config.merge_tiers(ROCKETMQ) == []
    assert IndexConfig(merge="30d, 1d,24h", environment=False).merge == "1d,30d"
    assert IndexConfig(merge="1h", environment=False).merge_tiers(ROCKETMQ) == [HOUR_S]
    assert IndexConfig(merge="OFF", environment=False).merge_tiers(NATIVE) == []
    for wrong in ("1h,90m", "", "7", "0", "daily", 7):
        with pytest.raises(ConfigError, match="merge"):
            IndexConfig(merge=wrong, environment=False)


def test_tables_of_builds_stay_in_their_windows(life):
    publish_at(life, 1)
    log, table = life.log(), an_object(7)
    slots = SlotMap.for_count(11, 1)
    built = {"begin_s": BASE_MS // 1000, "window_s": DAY_S, "slots": slots, "slot_low": 0, "slot_high": 1}
    shard, begin_s = TableShard(table="built", origin="build", **built), BASE_MS // 1000
    stored = structs.replace(table, second_min=begin_s, second_max=begin_s + 5, shard=shard)
    log.append("a build", None, lambda state: LogRecord(0, "build", 0, "", 0, (stored,)))
    life.later()
    life.index.run_lifecycle()
    life.index.run_merge()
    assert "built" in life.state.tables and life.windows() == [(0, 24), DAYS_30]
    assert left(life) == []


def test_a_window_lost_to_another_job_waits_an_hour(life):
    publish_at(life, 1, 3)
    life.later(2)
    life.storage.meanwhile("head", life.merge, name_prefix="data/")
    assert life.index.run_merge().jobs == 0
    assert merge_health(life.index)["lost_to_others"] == 1 and not life.index.health()["problems"]
    # the loser's objects are gone, those of the winner are there
    assert {info.name for info in life.storage.list("data/")} >= set(life.state.objects)
    assert len(list(life.storage.list("data/"))) == 3
    assert "another job was faster" in left(life)[0][1]
    life.put(rows(5))
    life.publish()
    life.clock.advance(HOUR_S - 1)
    assert life.index.run_merge().jobs == 0
    life.clock.advance(1)
    assert life.index.run_merge().jobs == 1
    life.check()


def test_the_background_thread_merges_and_close_ends_it_within_a_merge(merging, monkeypatch):
    life = merging(settings={"merge": "off"})
    publish_at(life, 1, 3)
    life.later(2)
    life.index.close()
    monkeypatch.setattr(index_module, "ROUND_S", 0.01)
    with life.open(background=True, merge="1d"):
        until(lambda: life.windows() == [(0, 24)])
    life.index = life.open(merge="off")
    publish_at(life, 25, 27)
    life.later(2)
    life.index.close()
    index = life.open(background=True, merge="1d")
    # the writer is busy until it is closed
    monkeypatch.setattr(index._parts.merger, "_is_busy", lambda: True)
    until(lambda: merge_health(index)["waiting_windows"])
    index.close()
    assert not any(thread.name == "tiered-index-merge" for thread in threading.enumerate())
    assert life.windows() == [(0, 24)] and len(life.state.files) == 2


def test_a_close_gives_a_merge_up_whose_request_hangs(life, monkeypatch):
    publish_at(life, 1, 3)
    life.later(2)
    life.index.close()
    monkeypatch.setattr(index_module, "ROUND_S", 0.01)
    monkeypatch.setattr(index_module, "_STOP_PATIENCE_S", 0.1)
    hang = life.storage.hang("get_range", name_prefix="data/")
    index = life.open(background=True, merge="1d")
    assert hang.entered.wait(60)
    try:
        assert beside(index.close)() is None
        # the root is free, and the merge changes nothing once its request is answered
        life.index = life.open(merge="off")
    finally:
        hang.release.set()
    until(lambda: not any(thread.name == "tiered-index-merge" for thread in threading.enumerate()))
    assert life.windows() == [] and len(life.state.files) == 2
    assert life.index.run_lifecycle() is not None and life.index.health()["problems"] == []


@pytest.mark.parametrize("error", [CorruptFile, ObjectArchived])
def test_a_source_that_can_not_be_read_is_told_until_it_is_merged_and_others_are_merged(life, error):
    publish_at(life, 1, 25)
    unread = min(life.state.objects.values(), key=lambda stored: stored.second_min)
    life.later(2)
    if error is CorruptFile:
        life.storage.corrupt("get_range", name_prefix=unread.name, times=None)
    else:
        life.storage.fail("get_range", name_prefix=unread.name, times=None, error=error)
    with pytest.raises(error):
        life.index.run_merge()
    assert life.windows() == [(24, 24)]
    (problem,) = life.index.health()["problems"]
    assert problem.startswith("merge of 1d from 2023-10-20T00:00:00Z: ")
    assert life.index.run_merge().jobs == 0 and life.index.health()["problems"]
    assert [name for name, _ in left(life)] == ["1d from 2023-10-20T00:00:00Z"]
    life.storage.clear()
    life.clock.advance(HOUR_S)
    assert life.index.run_merge().jobs == 1 and not life.index.health()["problems"]
    life.check()


def test_a_merge_rests_for_puts_and_waits_for_flushes_and_uploads(life, monkeypatch):
    publish_at(life, 1, 3)
    life.later(2)
    run, puts = RewriteTask.run, itertools.repeat(0)

    def work(task, storage, now_ms, progress):
        """Let each piece take 10 ms."""
        return run(task, storage, now_ms, lambda count: (life.clock.advance(0.01), progress(count)))

    monkeypatch.setattr(RewriteTask, "run", work)
    slept, busy = [], [True, True, False]
    merger = MergeWorker(
        life.index._parts.merger._context,
        [DAY_S],
        is_busy=lambda: busy.pop(0) if busy else False,
        put_entries=lambda: next(puts),
        sleep=slept.append,
        monotonic_s=life.clock.monotonic_s,
    )
    merger.bounds = replace(merger.bounds, piece_items=16)
    assert merger.run_once().jobs == 1
    # twice for a flush, then after each piece of 10 ms as long as it took
    assert slept[:2] == [0.05, 0.05] and len(slept) > 3
    assert {round(pause_s, 6) for pause_s in slept[2:]} == {0.01}
    publish_at(life, 30)
    life.later(2)
    slept.clear()
    puts = itertools.count()
    assert merger.run_once().jobs == 1
    # while entries are put it works a tenth of the time: it rests 90 ms after 10 ms
    assert {round(pause_s, 6) for pause_s in slept} == {0.05, 0.04}


def test_an_unavailable_storage_ends_the_round_and_the_next_one_goes_on(life):
    """No window waits for an hour, as a damaged one does."""
    publish_at(life, 1, 25)
    life.later(2)
    life.storage.fail("get_range", times=None)
    with pytest.raises(StorageUnavailable):
        life.index.run_merge()
    assert life.index.health()["problems"] and merge_health(life.index)["waiting_windows"] == 2
    life.storage.clear()
    assert life.index.run_merge().jobs == 2 and not life.index.health()["problems"]


@pytest.mark.parametrize("error", [StorageUnavailable, partial(CorruptFile, "a catalog")])
def test_catalogs_that_can_not_be_merged_are_a_problem_until_they_are(life, error):
    store, session = linked_store("t", 0), life.index._session
    for number in range(FULL_LEVEL):
        uri, etag = f"file:///{number}.log", f"1-{number}-0-00000000"
        segment = LinkedSegment(uri, store, number * 10, 10, "ndjson", 10, etag, 5, 0)
        link(session.log, session.epoch, [segment], [])
    life.storage.fail("*", times=None, error=error, name_prefix=CATALOG_PREFIX)
    with pytest.raises((StorageUnavailable, CorruptFile)):
        life.index.run_merge()
    (problem,) = life.index.health()["problems"]
    assert problem.startswith("merge of catalogs of segments: ")
    life.storage.clear()
    life.index.run_merge()
    assert life.index.health()["problems"] == [] and len(life.index.log_state.catalogs) == 1
