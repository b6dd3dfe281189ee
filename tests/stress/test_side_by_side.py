"""Calls of several threads to one index at once: flushes, seals, rounds of the life cycle, and lookups that read the
log. Each step is done once, and no file is lost.
"""

import os
import threading

import pytest

from tests.support.batches import columns_of
from tests.support.hanging import beside
from tests.support.unsynced_disk import UnsyncedDisk
from tiered_index.storage.memory import MemoryStorage

NOW_MS = 1_700_000_000_000
AT_ONCE, TIMES = 3, 10


@pytest.fixture
def storage():
    return MemoryStorage()


def offsets(index):
    result = index.query("t", "k", max_count=10**6)
    assert result.status == "complete"
    return sorted(item.offset for item in result)


def at_once(call):
    """Make a call in several threads at the same moment; return the results."""
    barrier = threading.Barrier(AT_ONCE)

    def act():
        barrier.wait(30)
        return call()

    return [ended(running) for running in [beside(act) for _ in range(AT_ONCE)]]


def ended(running):
    assert running.ended(), "it hangs"
    assert running.error is None, repr(running.error)
    return running.value


def test_equal_calls_at_once_do_each_step_once(open_index, storage, eager_switches):
    index = open_index(storage_backend=storage, background=False, local_keep_s=0, items=20)
    count = files = 0
    for _ in range(TIMES):
        index.put_batch(columns_of([("t", 0, "k", count + n, 1, NOW_MS + n * 1000) for n in range(50)]))
        count += 50
        at_once(index.flush)
        assert index.health()["buffered_entries"] == 0
        assert sum(file.count for file in index.files()) == count
        at_once(index.seal)
        assert all(file.sealed and file.count for file in index.files() if file.place == "unsealed")
        fresh, files = len(index.files()) - files, len(index.files())
        done = at_once(index.run_lifecycle)
        for step in ("compacted", "uploaded", "retired"):
            assert sum(getattr(progress, step) for progress in done) == fresh, step
    assert {file.place for file in index.files()} == {"storage"}
    assert sorted(info.name for info in storage.list("data/")) == sorted(index.log_state.objects)
    assert offsets(index) == list(range(count))


class HeldDisk(UnsyncedDisk):
    """A disk that holds the next sync of a file until it is released."""

    def __init__(self):
        self.is_armed, self.entered, self.goes_on = False, threading.Event(), threading.Event()

    def sync(self, descriptor):
        if self.is_armed:
            self.is_armed = False
            self.entered.set()
            assert self.goes_on.wait(30)
        super().sync(descriptor)


def test_a_round_leaves_a_file_alone_whose_seal_is_being_written(open_index, storage, monkeypatch):
    """The seal would be written to closed descriptors, or to the file that got their number next."""
    disk, sealing, statvfs = HeldDisk(), [], os.statvfs
    index = open_index(storage_backend=storage, disk=disk, background=False)
    index.put("t", 0, "k", 1, 1, NOW_MS)
    index.flush()

    def seal_meanwhile(path):
        # the round has looked for old files, and looks for sealed ones next
        if not sealing:
            disk.is_armed = True
            sealing.append(beside(index.seal))
            assert disk.entered.wait(30)
        return statvfs(path)

    monkeypatch.setattr(os, "statvfs", seal_meanwhile)
    index.run_lifecycle()
    disk.goes_on.set()
    ended(sealing[0])
    index.run_lifecycle()
    assert offsets(index) == [1]
    assert [file.place for file in index.files()] == ["uploaded"]


def test_a_file_published_beside_lookups_that_read_the_log_stays(open_index, storage, tmp_path, eager_switches):
    """A lookup that misses an object reads the log: a file that was published meanwhile is none of those removed."""
    index = open_index(storage_backend=storage, background=False, local_keep_s=0)
    index.put("t", 0, "gone", 1, 1, NOW_MS)
    index.seal()
    index.run_lifecycle()
    index.close()
    (gone,) = [info.name for info in storage.list("data/")]
    storage.delete_many([gone])
    index = open_index(storage_backend=storage, background=False, local_keep_s=10**6)
    ends = threading.Event()

    def look_up():
        looks = 0
        while not ends.is_set():
            assert index.query("t", "gone", allow_partial=True).status == "partial"
            looks += 1
        return looks

    lookups = [beside(look_up) for _ in range(2)]
    for number in range(10 * TIMES):
        index.put("t", 0, "k", number, 1, NOW_MS + number * 1000)
        index.seal()
        index.run_lifecycle()
        assert len(list((tmp_path / "root" / "uploaded").iterdir())) == number + 1
    ends.set()
    assert all(ended(lookup) for lookup in lookups)
    assert offsets(index) == list(range(10 * TIMES))
    assert sorted({file.place for file in index.files()}) == ["storage", "uploaded"]
