"""Merges and sweeps run beside readers, writers and other merges. Nobody misses an entry, or sees one twice."""

import os
import shutil
import tracemalloc

import pytest

from tests.support.changes import replace
from tests.support.log_records import GENESIS, an_object
from tests.support.log_records import publish as put_record
from tests.support.merging import BASE_MS, DAY_MS, DAY_S, HOUR_S
from tests.support.storage_faults import FaultStorage
from tiered_index.base.clock import SystemClock
from tiered_index.errors import CorruptFile, InvalidArgument, StorageMisconfigured
from tiered_index.format.names import number_of
from tiered_index.service.jobs.orphans import delete_orphans, find_orphans
from tiered_index.service.jobs.rewriting.job import JobOvertaken, publish
from tiered_index.service.log.log import StorageLog
from tiered_index.storage.base import WrapperStorage
from tiered_index.storage.local import LocalStorage


def run_all(life, job):
    return [task.run(life.storage, life.clock.now_ms()) for task in job.tasks]


def test_a_lookup_after_a_merge_costs_a_request_per_window(merging):
    costs = []
    for files in (2, 4):
        life = merging()
        life.fill(3, files)
        for merged in (None, DAY_S, 30 * DAY_S):
            if merged:
                life.merge(merged)
            with life.reader(cache_slot_groups=False) as reader:
                reader.query("t", "hot", max_count=10**6)  # this reads the directories
                explain = reader.query("t", "k1", max_count=10**6).explain
                in_range = reader.query("t", "k1", BASE_MS, BASE_MS + DAY_MS - 1, max_count=10**6).explain
                costs.append((files, merged, explain.requests, in_range.requests))
    merged = [(DAY_S, 3, 1), (30 * DAY_S, 1, 1)]
    assert costs == [(files, *cost) for files in (2, 4) for cost in [(None, 3 * files, files), *merged]]


def test_of_two_merges_of_the_same_files_one_is_overtaken(life):
    life.fill(2)
    (first, second), later = life.plan().rewrites, life.plan(30 * DAY_S).rewrites[0]
    results = run_all(life, later)
    log = life.log()
    publish(first, run_all(life, first), log)
    with pytest.raises(JobOvertaken, match="3 of 6 inputs"):
        publish(later, results, life.log())
    publish(second, run_all(life, second), log)
    assert life.windows() == [(0, 24), (24, 24)]
    assert sum(stored.count for stored in life.state.objects.values()) == life.messages
    life.check()


def test_publishing_again_after_an_unknown_outcome_finds_its_own_record(life):
    life.fill()
    (job,) = life.plan().rewrites
    results = run_all(life, job)
    log = life.log()
    number = publish(job, results, log).number
    assert publish(job, results, log).number == number
    life.check()


def test_results_that_do_not_add_up_are_not_published(life):
    life.fill()
    (job,) = life.plan().rewrites
    (result,) = run_all(life, job)
    name, count = next(iter(result.read_counts.items()))
    shard = result.objects[0]
    counts, sent = result.read_counts | {name: count - 1}, replace(shard.sent, size_bytes=5)
    wrong = {
        "another number of entries than the log says": [replace(result, read_counts=counts)],
        "another number of entries than it read": [replace(result, objects=())],
        "other entries than it read": [replace(result, read_checksum=result.read_checksum ^ 1)],
        "another size": [replace(result, objects=(replace(shard, sent=sent), *result.objects[1:]))],
    }
    number = life.state.number
    for problem, results in [*wrong.items(), *(("one result of each task", [result] * times) for times in (0, 2))]:
        with pytest.raises(CorruptFile, match=problem):
            publish(job, results, life.log())
        assert life.state.number == number
    publish(job, [result], life.log())
    life.check()


def test_orphans_are_what_nobody_names_and_old_enough(life):
    life.fill(2)
    with pytest.raises(InvalidArgument):
        find_orphans(life.storage, life.log(), older_than_s=3599)
    life.merge()
    strays = {"data/stray/1.index", "probe/left-by-a-killed-process"}
    for name in strays:
        life.storage.put(name, b"x")
    for days in (0, 0.9):
        life.later(days)
        young = find_orphans(life.storage, life.log())
        assert young.objects == (), "all objects are young, or were just removed"
        delete_orphans(life.storage, young)
    life.later(0.2)
    orphans = find_orphans(life.storage, life.log())
    assert len(orphans.objects) == 8 and strays <= {info.name for info in orphans.objects}
    delete_orphans(life.storage, orphans)
    assert {info.name for info in life.storage.list("data/")} == set(life.state.objects)
    life.check()


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
        "list", lambda: published.append(publish(job, results, life.log())), when="after", name_prefix="segments/"
    )
    orphans = find_orphans(storage, log, older_than_s=HOUR_S)
    assert published and orphans.objects == ()
    delete_orphans(life.storage, orphans)
    assert {info.name for info in life.storage.list("data/")} > set(life.state.objects)
    life.check()


class ShortListing(WrapperStorage):
    """A server that ends the listings of the log and of checkpoints early: they lack what is `since` a number."""

    since = 1 << 60

    def list(self, prefix="", *, start_after=""):
        for info in super().list(prefix, start_after=start_after):
            if prefix not in ("log/", "checkpoint/") or number_of(info.name) < self.since:
                yield info


def test_what_an_unlisted_record_names_is_no_orphan(life):
    life.fill()
    storage = ShortListing(life.storage)
    log = StorageLog(storage, life.clock)
    storage.since = log.open().number + 1
    life.merge()
    life.clock.advance(2 * HOUR_S)
    orphans = find_orphans(storage, log, older_than_s=HOUR_S)
    assert {info.name for info in orphans.objects} == {*life.state.objects}
    assert delete_orphans(storage, orphans).objects == ()
    life.check()


def test_a_sweep_without_grace_finds_objects_that_a_merge_removes_while_it_looks(life):
    """So an erasure without grace also finds the objects that a concurrent merge replaced."""
    life.fill()
    inputs, storage = {*life.state.objects}, FaultStorage(life.storage)
    storage.meanwhile("list", life.merge, when="after", name_prefix="segments/")
    orphans = find_orphans(storage, life.log(), older_than_s=HOUR_S, removed_s=0)
    assert {info.name for info in orphans.objects} == inputs != {*life.state.objects}


def test_memory_of_a_sweep_does_not_grow_with_the_objects_that_the_log_names(life):
    log = life.log()
    objects = tuple(an_object(number) for number in range(1, 5_001))
    put_record(log, log.state.epoch, objects)
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


def test_a_sweep_deletes_the_half_made_work_of_a_killed_process_or_passes_over_it(tmp_path):
    """No listing shows it. A writer whose sweep fails lists the storage again in each round."""
    storage, work = LocalStorage(tmp_path), tmp_path / ".%work"
    log = StorageLog(storage, SystemClock())
    log.create(GENESIS)
    left = work / ".tmp-1-killed"
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    delete_orphans(storage, find_orphans(storage, log))
    assert not left.exists()
    shutil.rmtree(work)
    work.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageMisconfigured):
        storage.purge(0)
    assert delete_orphans(storage, find_orphans(storage, log)).objects == ()


def test_a_position_that_only_a_merged_local_copy_has_survives_a_crash(merging):
    """While a quarantined entry waits, the log gets no positions.

    So the local copies have them, even of merged files.
    """
    life = merging(settings={"max_late_s": DAY_S, "max_early_s": DAY_S, "local_keep_s": 10**9, "items": 20})
    life.put([(5000, "early")], source="s", source_position=1)
    life.index.flush()
    position = 1
    while not life.state.files:
        position += 1
        life.put([(BASE_MS + position * 1000, "k")], source="s", source_position=position)
        life.index.flush()
        life.index.run_lifecycle()
    assert (life.state.positions, life.index.durable_position("s")) == ({}, position)
    life.clock.advance(3700)
    life.merge(3600)
    uploaded = life.folder / "root" / "uploaded"
    for _ in range(2):
        life.clock.advance(60)
        life.index.run_lifecycle()  # the round also reads the log
        life.check(life.index)
        life.index.abandon()
        life.index = life.open()
        assert life.index.durable_position("s") == position
        assert len(list(uploaded.iterdir())) == 1
    life.publish()
    assert life.state.positions == {"s": position}
    life.clock.advance(60)
    life.index.run_lifecycle()
    life.index.run_lifecycle()
    life.check(life.index)
    life.index.abandon()
    life.index = life.open()
    assert life.index.durable_position("s") == position
    assert sum(stored.count for stored in life.state.objects.values()) == life.messages
