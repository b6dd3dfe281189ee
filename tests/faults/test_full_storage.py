"""The storage's own disk is full: calls without it continue, optional writes are left out, nothing is lost."""

from __future__ import annotations

import errno

import pytest

from tests.support.disk_faults import FaultDisk
from tests.support.storage_faults import FaultStorage
from tiered_index.errors import DiskFull
from tiered_index.storage.local.storage import LocalStorage


@pytest.fixture
def stored(make_world, tmp_path):
    """An open index with one file ready for upload, and the disk of its storage."""
    disk = FaultDisk()
    world = make_world(LocalStorage(tmp_path / "store", disk=disk))
    world.open()
    world.put(5)
    world.service.seal()
    world.confirm()
    return world, disk


def test_files_wait_locally_and_are_published_once_there_is_room(stored):
    world, disk = stored
    disk.fail("pwrite", times=None, error=errno.ENOSPC)
    for _ in range(3):
        with pytest.raises(DiskFull):
            world.service.run_lifecycle()
        assert any("No space left" in problem for problem in world.service.health()["problems"])
        world.put(5)
        world.flush()
        world.check()
    disk.clear()
    world.service.seal()
    world.service.run_lifecycle()
    assert world.service.health()["problems"] == []
    assert sum(o.count for o in world.service.log_state.objects.values()) == len(world.model.entries)
    assert {info.name for info in world.storage.list("data/")} == set(world.service.log_state.objects)
    world.check()


def test_a_lease_that_can_t_be_released_is_no_reason_to_fail(stored):
    world, disk = stored
    world.service.run_lifecycle()
    disk.fail("pwrite", times=None, error=errno.ENOSPC)
    world.service.close()
    disk.clear()
    world.open()
    world.check()


def test_a_checkpoint_that_finds_no_room_does_not_undo_its_record(make_world):
    world = make_world()
    storage = FaultStorage(world.storage)
    storage.fail("put", name_prefix="checkpoint/", times=None, error=DiskFull)
    world.open(storage=storage, checkpoint_every=1)
    world.put(5)
    world.service.seal()
    world.confirm()
    assert world.service.run_lifecycle().uploaded == 1
    assert world.service.health()["problems"] == []
    assert not list(world.storage.list("checkpoint/"))
    world.check()
    storage.clear()
    world.publish(5)
    assert list(world.storage.list("checkpoint/"))


def test_a_known_root_starts_while_the_storage_has_no_room(stored):
    world, disk = stored
    world.service.close()
    disk.fail("pwrite", times=None, error=errno.ENOSPC)
    world.open()
    world.put(2)
    world.flush()
    disk.clear()
    world.service.seal()
    world.service.run_lifecycle()
    assert world.service.health()["problems"] == []
    world.check()
