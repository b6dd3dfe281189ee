"""Disk space is allocated in steps: a small index is small, and a full disk is found before an entry is written."""

from __future__ import annotations

import errno

import pytest

from tests.support.batches import batch
from tests.support.disk_faults import FaultDisk
from tiered_index import IndexReader, IndexService
from tiered_index.errors import DiskFull
from tiered_index.service.read import unsealed
from tiered_index.storage.memory import MemoryStorage

T = 1_700_000_000_000
STEP = 512


def taken_bytes(folder):
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def test_an_index_of_one_entry_is_small(tmp_path):
    with IndexService.open(root=tmp_path / "root", storage=f"file://{tmp_path}/storage", background=False) as index:
        index.put("t", 0, "k", 1, 1, T)
        index.flush()
        assert taken_bytes(tmp_path) <= 20 << 20
        assert index.health()["local_bytes"] <= 20 << 20
        (file,) = index.files()
        assert file.size_bytes <= 10 << 20
        # programs that know the format find the size that the file states
        assert file.path.stat().st_size == file.layout.unsealed_size > 100 << 20
    with IndexReader.open(root=tmp_path / "root") as reader:
        assert len(reader.query("t", "k")) == 1
        assert reader.files()[0].size_bytes <= 10 << 20


@pytest.fixture
def small_steps(monkeypatch):
    monkeypatch.setattr(unsealed, "STEP_BYTES", STEP)


def open_index(tmp_path, storage, disk, **settings):
    given = {"slots": 7, "items": 200, "background": False, **settings}
    return IndexService.open(root=tmp_path / "root", storage_backend=storage, disk=disk, **given)


def offsets(index):
    return [item.offset for item in index.query("t", "k", max_count=10_000)]


def test_steps_are_taken_as_the_file_fills_and_after_a_restart(tmp_path, small_steps):
    storage, disk = MemoryStorage(), FaultDisk()
    index = open_index(tmp_path, storage, disk)
    for number in range(60):
        index.put("t", 0, "k", number, 1, T)
        index.flush()
        (file,) = index.files()
        # written bytes are within the allocated space, which is at most one step ahead
        written = file.layout.entry_position(file.count + 1)
        assert written <= file._allocated <= written + STEP
    index.abandon()
    disk.lose_unsynced()
    with open_index(tmp_path, storage, disk) as index:
        assert offsets(index) == list(range(59, -1, -1))
        # several steps at once, and several files
        index.put_batch(batch(700, offset=range(60, 760)))
        index.flush()
        assert offsets(index) == list(range(759, -1, -1))
        index.seal()
        index.run_lifecycle()
        index.run_lifecycle()
        assert offsets(index) == list(range(759, -1, -1))


@pytest.mark.parametrize("nth", range(1, 8))
def test_a_disk_that_fills_is_found_before_an_entry_is_written(tmp_path, small_steps, nth):
    storage, disk = MemoryStorage(), FaultDisk()
    index = open_index(tmp_path, storage, disk, buffer_max_entries=40)
    index.put("t", 0, "k", 0, 1, T)
    index.flush()
    disk.fail("allocate", nth=nth, times=None, error=errno.ENOSPC)
    put = 1
    with pytest.raises(DiskFull):
        while True:
            index.put("t", 0, "k", put, 1, T)
            put += 1
            try:
                index.flush()
            except DiskFull as error:
                assert error.reason == "disk"
    assert index.health()["problems"]
    assert offsets(index) == list(range(put - 1, -1, -1))
    # the file without space stays, and continues once there is space again
    assert len(index.files()) == 1
    disk.clear()
    index.flush()
    assert len(index.files()) == 1 and index.health()["problems"] == []
    index.abandon()
    disk.lose_unsynced()
    with open_index(tmp_path, storage, disk) as index:
        assert offsets(index) == list(range(put - 1, -1, -1))


def test_the_bound_of_the_disk_counts_what_is_taken(tmp_path, small_steps):
    bound = 20 * STEP
    index = open_index(tmp_path, MemoryStorage(), FaultDisk(), disk_max_bytes=bound, items=4_000)
    assert index.config.geometry().unsealed_size > 10 * bound
    with pytest.raises(DiskFull) as refused:
        for number in range(1_000):
            index.put("t", 0, "k", number, 1, T)
            index.flush()
    # journals grow beside their files
    assert refused.value.bound == bound and index.health()["local_bytes"] < 2 * bound
    index.abandon()


def test_a_file_that_alone_fills_the_bound_is_uploaded(tmp_path, small_steps):
    storage = MemoryStorage()
    with open_index(tmp_path, storage, FaultDisk(), disk_max_bytes=20 * STEP, items=4_000) as index:
        assert index.config.geometry().unsealed_size > 200 * STEP
        refused = 0
        for number in range(600):
            index.put("t", 0, "k", number, 1, T)
            try:
                index.flush()
            except DiskFull:
                refused += 1
                index.run_lifecycle()
        index.run_lifecycle()
        index.flush()
        assert refused and index.log_state.objects
        assert index.health()["problems"] == []
        assert offsets(index) == list(range(599, -1, -1))
