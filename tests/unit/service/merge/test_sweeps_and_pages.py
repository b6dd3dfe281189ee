"""Sweeps run at the worst moments. A reader pages through 10,000 answers while hours become days, and days a month."""

import itertools
import os
import random
import shutil
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.log_records import GENESIS, an_object
from tests.support.log_records import publish as publish_objects
from tests.support.merging import BASE_MS, DAY_MS, DAY_S, HOUR_MS, HOUR_S
from tests.support.storage_faults import FaultStorage
from tiered_index.clock import SystemClock
from tiered_index.errors import StorageMisconfigured
from tiered_index.service.jobs.job import publish
from tiered_index.service.jobs.orphans import delete_orphans, find_orphans
from tiered_index.service.log.log import StorageLog
from tiered_index.storage.base import WrapperStorage
from tiered_index.storage.local.storage import LocalStorage
from tiered_index.storage.probe import probe_put_if_absent


class KilledBeforeDeleting(WrapperStorage):
    """A process that is killed before its deletions."""

    def delete(self, name):
        """Do nothing."""


def test_what_is_published_while_a_sweep_looks_is_no_orphan(life):
    """The objects were uploaded long ago, and no record named them when the sweep opened the log."""
    life.fill()
    (job,) = life.plan().rewrites
    results = [task.run(life.storage, life.clock.now_ms()) for task in job.tasks]
    published, storage = [], FaultStorage(life.storage)
    life.clock.advance(2 * HOUR_S)
    log = life.log()
    # between the listings and the next call
    storage.meanwhile(
        "list", lambda: published.append(publish(job, results, life.log())), when="after", name_prefix="staging/"
    )
    found = find_orphans(storage, log, older_than_s=HOUR_S)
    assert published and found.objects == ()
    delete_orphans(life.storage, found)
    assert {info.name for info in life.storage.list("data/")} > set(life.state.objects)
    life.check()


def test_a_sweep_without_grace_finds_objects_that_a_merge_removes_while_it_looks(life):
    """So an erasure without grace also finds the objects that a concurrent merge replaced."""
    life.fill()
    inputs, storage = set(life.state.objects), FaultStorage(life.storage)
    storage.meanwhile("list", life.merge, when="after", name_prefix="staging/")
    found = find_orphans(storage, life.log(), older_than_s=HOUR_S, removed_s=0)
    assert {info.name for info in found.objects} == inputs != set(life.state.objects)


def test_memory_of_a_sweep_does_not_grow_with_the_objects_that_the_log_names(life):
    log = life.log()
    objects = tuple(an_object(number) for number in range(1, 5_001))
    publish_objects(log, log.state.epoch, objects)
    for stored in objects:
        life.storage.put_if_absent(stored.name, b"")
    life.clock.advance(2 * DAY_S)
    tracemalloc.start()
    try:
        assert find_orphans(life.storage, log).objects == ()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 * len(objects), "an object's description alone takes more than 150 bytes"


def test_a_log_that_others_have_moved_on_since_it_was_opened(life):
    life.fill()
    log = life.log()
    life.merge()
    life.later(3)
    found = find_orphans(life.storage, log)
    assert len(found.objects) == 3 and not {info.name for info in found.objects} & set(life.state.objects)
    delete_orphans(life.storage, found)
    life.check()


def test_a_merge_without_a_thread_says_so_and_leaves_nothing(life, monkeypatch):
    life.fill()
    before = {info.name for info in life.storage.list()}

    def submit(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        life.merge()
    assert {info.name for info in life.storage.list()} == before


def test_the_probe_of_a_process_that_was_killed_is_swept(life):
    life.fill()
    probe_put_if_absent(KilledBeforeDeleting(life.storage))
    (left,) = life.storage.list("probe/")
    life.clock.advance(HOUR_S + 1)
    found = find_orphans(life.storage, life.log(), older_than_s=HOUR_S)
    assert [info.name for info in found.objects] == [left.name]
    delete_orphans(life.storage, found)
    assert not list(life.storage.list("probe/"))


def test_the_half_made_work_of_a_process_that_was_killed_is_swept(tmp_path):
    """No listing shows it."""
    path = tmp_path / "storage"
    storage = LocalStorage(path)
    log = StorageLog(storage, SystemClock())
    log.create(GENESIS)
    left = path / ".%work" / ".tmp-1-killed"
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    assert len(storage.purge(0)) == 1
    delete_orphans(storage, find_orphans(storage, log))
    assert storage.purge(0) == ()
    storage.close()


def test_half_made_work_that_can_not_be_swept_fails_no_sweep(tmp_path):
    """Otherwise a writer lists the storage again in each round, and expires nothing else."""
    storage = LocalStorage(tmp_path)
    log = StorageLog(storage, SystemClock())
    log.create(GENESIS)
    shutil.rmtree(tmp_path / ".%work")
    (tmp_path / ".%work").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageMisconfigured):
        storage.purge(0)
    assert delete_orphans(storage, find_orphans(storage, log)).objects == ()


def test_pages_continue_while_hours_become_days_and_days_a_month(life):
    """97 of 10,000 answers make a page.

    Merges and sweeps run between some pages. Some readers refresh, and others do not.
    """
    rng = random.Random(4)
    for number in range(10_000):
        # Each file covers twelve hours. No identity repeats, so all pages together are one answer.
        time_ms = BASE_MS + number // 1_250 * 12 * HOUR_MS + rng.randrange(12 * HOUR_MS)
        message = ("t", number % 3, "hot", number, 7, time_ms)
        life.model.put(*message)
        life.index.put(*message)
        if number % 1_250 == 1_249:
            life.publish()
    life.later()
    expected = life.model.query("t", "hot", max_count=None)
    assert len(expected) == 10_000
    one, two = [{"end_s": (BASE_MS + day * DAY_MS) // 1000} for day in (1, 2)]
    # merges up to a time or of everything, and sweeps
    steps = [(HOUR_S, one), (HOUR_S, {}), None, (DAY_S, two), None, (DAY_S, {}), (30 * DAY_S, {}), None]
    found, cursor = [], None
    with (
        life.reader(block_cache_bytes=0, refresh_interval_s=10**9) as standing,
        life.reader(refresh_interval_s=0) as following,
    ):
        for page in itertools.count():
            reader = (standing, following, life.index)[page % 3]
            result = reader.query("t", "hot", max_count=97, cursor=cursor)
            found += life.answers(result)
            cursor = result.cursor
            if cursor is None:
                break
            if page % 10 == 4 and steps:
                step = steps.pop(0)
                if step is None:
                    assert life.sweep()
                else:
                    life.merge(step[0], **step[1])
    assert found == expected
    assert not steps and life.windows() == [(0, 720)]
    assert {info.name for info in life.storage.list("data/")} == set(life.state.objects)
