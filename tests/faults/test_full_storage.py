"""The storage's own disk is full: calls without it continue, optional writes are left out, nothing is lost."""

from __future__ import annotations

import errno

import pytest

from tests.support.disk_faults import FaultDisk
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
