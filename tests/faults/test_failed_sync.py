"""A failed sync at any call: the file accepts no more entries, and its unconfirmed entries go into another file.

No durable position includes unconfirmed entries. The kernel may drop the bytes of a failed sync, and report the next
sync as good. So does the disk of these tests: a power cut loses all bytes that no successful sync has confirmed.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.faults.small_disk import path_of
from tests.support.disk_faults import FaultDisk, SimulatedCrash
from tiered_index.errors import DiskFull, StorageUnavailable
from tiered_index.storage.disk import TEMPORARY_PREFIX

MOST = 60
# more syncs of each kind than the scenario has
POINTS = {
    "entries": "sync unsealed/.index",
    "journal": "sync unsealed/.journal",
    "next file": "sync unsealed/temporary",
    "its name": "sync_folder unsealed",
    "compacted file": "sync compacted/temporary",
    "name of the compacted file": "sync_folder compacted",
    "move to uploaded": "sync_folder uploaded",
}


class ForgetfulDisk(FaultDisk):
    """Its syncs of one kind of file fail. A power cut loses the unsynced bytes, although later syncs are reported as
    good.
    """

    def __init__(self):
        super().__init__()
        self.point, self.skip, self.left, self.struck = "", 0, 0, 0
        self.failed: set[int] = set()
        self.touched: list[Path] = []
        """Files that were written or synced after a failed sync."""

    def fail_at(self, point, *, nth=1, times=1):
        self.point, self.skip, self.left = point, nth - 1, times

    def pwrite(self, descriptor, data, position):
        self._touch(descriptor)
        super().pwrite(descriptor, data, position)

    def sync(self, descriptor):
        path = path_of(descriptor)
        kind = "temporary" if path.name.startswith(TEMPORARY_PREFIX) else path.suffix
        self._touch(descriptor)
        if self._fails(f"sync {path.parent.name}/{kind}"):
            self.failed.add(self._number(descriptor))
            raise OSError(errno.EIO, "the sync failed")
        if self._number(descriptor) not in self.failed:
            super().sync(descriptor)

    def sync_folder(self, folder):
        if self._fails(f"sync_folder {folder.name}"):
            raise OSError(errno.EIO, "the sync failed")
        super().sync_folder(folder)

    def _fails(self, point):
        if point != self.point or not self.left:
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.left -= 1
        self.struck += 1
        return True

    def _touch(self, descriptor):
        if self._number(descriptor) in self.failed:
            self.touched.append(path_of(descriptor))

    def _number(self, descriptor):
        return self._numbers[os.fstat(descriptor).st_ino]


def live(world, disk, *, until_struck):
    """Run the scenario, and check the world after each step with a failed sync."""
    struck = 0
    for step in world.script():
        try:
            step()
        except StorageUnavailable as error:
            assert "the sync failed" in str(error)
            assert any("the sync failed" in problem for problem in world.service.health()["problems"])
        if disk.struck > struck:
            struck = disk.struck
            world.check()
            if until_struck:
                break


def finish(world):
    world.heal()
    world.service.close()
    world.tidy()


# short runs strike every fourth call, long runs others, slow runs each
LONG = pytest.param(3, 4, marks=pytest.mark.long)
EACH = pytest.param(1, 1, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("times", "first", "step"),
    [(4, 1, 4), pytest.param(4, *LONG.values, marks=LONG.marks)]
    + [pytest.param(times, *EACH.values, marks=EACH.marks) for times in (1, 5)],
)
@pytest.mark.parametrize("point", POINTS)
def test_it_heals_without_a_restart(make_world, point, times, first, step):
    struck = 0
    for nth in range(first, MOST, step):
        world, disk = make_world(), ForgetfulDisk()
        world.open(disk)
        disk.fail_at(POINTS[point], nth=nth, times=times)
        live(world, disk, until_struck=False)
        if not disk.struck:
            break
        struck += 1
        disk.left = 0
        assert disk.touched == []
        finish(world)
        assert disk.touched == []
    assert 0 < struck < MOST - 1


@pytest.mark.parametrize(("first", "step"), [(1, 4), LONG, EACH])
@pytest.mark.parametrize("point", POINTS)
def test_a_power_cut_after_it_loses_nothing_that_was_confirmed(make_world, point, first, step):
    struck = 0
    for nth in range(first, MOST, step):
        world, disk = make_world(), ForgetfulDisk()
        world.open(disk)
        disk.fail_at(POINTS[point], nth=nth, times=1 + nth % 3)
        live(world, disk, until_struck=nth // step % 2 == 0)
        if not disk.struck:
            break
        struck += 1
        world.abandon()
        disk.lose_unsynced()
        world.do("come_back settle 5 publish check")
        world.service.close()
        world.tidy()
    assert 0 < struck < MOST - 1


def test_as_long_as_no_sync_succeeds_nothing_is_called_durable(make_world):
    world, disk = make_world(), ForgetfulDisk()
    world.open(disk)
    world.do("3 flush")
    before = world.service.durable_position("log")
    disk.fail_at(POINTS["entries"], times=10**6)
    for _ in range(5):
        world.put(2)
        with pytest.raises(StorageUnavailable, match="sync"):
            world.flush()
        assert any(problem.startswith("flush: ") for problem in world.service.health()["problems"])
        assert world.service.durable_position("log") == before
        assert world.service.health()["buffered_entries"] > 0
        world.check()
    assert disk.touched == []
    assert len(list((world.root / "unsealed").glob("*.journal"))) <= 2  # empty files don't accumulate
    disk.left = 0
    finish(world)


def test_a_kill_before_the_unsealed_form_is_deleted_does_not_refuse_the_root(make_world):
    """The journal had the record of a failed append, so it had more entries than the published file."""
    world, disk = make_world(), FaultDisk()
    world.open(disk)
    world.do("2 flush")
    disk.fail("sync", nth=2)  # the journal's: its record is in the page cache
    world.do("1 flush seal")
    kill_before_the_unsealed_form_is_deleted(world, disk)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_such_a_kill_does_not_refuse_the_root_if_the_disk_had_no_room_for_another_journal(make_world, error):
    world, disk = make_world(), FaultDisk()
    world.open(disk)
    world.do("2 flush")
    disk.fail("sync", nth=2, error=error, times=None)
    with pytest.raises(DiskFull):
        world.do("1 flush")
    disk.clear()
    world.do("flush seal")
    kill_before_the_unsealed_form_is_deleted(world, disk)


def kill_before_the_unsealed_form_is_deleted(world, disk):
    assert len(list((world.root / "unsealed").glob("*.journal"))) == 2
    disk.crash("unlink")
    with pytest.raises(SimulatedCrash):
        world.run_lifecycle()
    (uploaded, *_) = (world.root / "uploaded").glob("*.index")
    assert (world.root / "unsealed" / f"{uploaded.stem}.journal").exists()
    world.come_back()
    world.heal()
