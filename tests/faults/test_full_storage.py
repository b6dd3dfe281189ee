"""The storage's own disk is full: calls without it continue, optional writes are left out, nothing is lost."""

from __future__ import annotations

import errno

import pytest

from tests.support.disk_faults import FaultDisk
from tests.support.merging import DAY_S, Merging
from tiered_index.errors import DiskFull
from tiered_index.storage.local.storage import LocalStorage


@pytest.fixture
def stored(make_world, tmp_path):
    """An open index with one file ready for upload, and the disk of its storage."""
    disk = FaultDisk()
    world = make_world(LocalStorage(tmp_path / "store", disk=disk))
    world.do("open 5 seal")
    return world, disk


def test_files_wait_locally_and_are_published_once_there_is_room(stored):
    world, disk = stored
    disk.fail("pwrite", times=None, error=errno.ENOSPC)
    for _ in range(3):
        with pytest.raises(DiskFull):
            world.service.run_lifecycle()
        assert any("No space left" in problem for problem in world.service.health()["problems"])
        world.do("5 flush check")
    disk.clear()
    world.heal()


def test_a_lease_that_can_t_be_released_is_no_reason_to_fail(stored):
    world, disk = stored
    world.service.run_lifecycle()
    disk.fail("pwrite", times=None, error=errno.ENOSPC)
    world.service.close()
    disk.clear()
    world.do("open check")


def test_a_known_root_starts_while_the_storage_has_no_room(stored):
    world, disk = stored
    world.service.close()
    disk.fail("pwrite", times=None, error=errno.ENOSPC)
    world.do("open 2 flush")
    disk.clear()
    world.heal()


class FullAfterName(FaultDisk):
    """Once `armed`, it is full at the next sync of the log's folder after a record got its name there."""

    armed, named = False, None

    def link(self, source, target):
        super().link(source, target)
        self.named = target.parent

    def sync_folder(self, folder):
        if self.armed and folder.name == "log%" and folder == self.named:
            self.armed = False
            raise OSError(errno.ENOSPC, "No space left on device")
        super().sync_folder(folder)


def test_a_merge_keeps_the_objects_of_a_record_that_has_no_room_after_its_name(tmp_path):
    disk = FullAfterName()
    life = Merging(tmp_path, LocalStorage(tmp_path / "store", disk=disk))
    life.fill()
    disk.armed, disk.named = True, None
    with pytest.raises(DiskFull):
        life.merge(DAY_S)
    assert not disk.armed
    assert life.state.tables
    for name in life.state.objects:
        assert life.storage.head(name)
    life.check()
    life.close()
