"""A disk that is full or broken at any call: the error is typed, no entry is lost, and the index recovers."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from tests.support.disk_faults import FaultDisk
from tiered_index.errors import BackPressure, DiskFull, StorageUnavailable, TieredIndexError

# in short runs every 16th call fails in one way, in long runs others, in slow runs each in both ways
STEP = 16
SHORT: dict[tuple[int, int], Any] = {(errno.ENOSPC, 0): ()}
SHORT |= dict.fromkeys([(errno.ENOSPC, 8), (errno.EIO, 4), (errno.EIO, 12)], pytest.mark.long)


@pytest.mark.parametrize(
    ("error", "first"),
    [
        pytest.param(error, first, marks=SHORT.get((error, first), pytest.mark.slow))
        for error in (errno.ENOSPC, errno.EIO) for first in range(STEP)
    ],
)  # fmt: skip
@pytest.mark.parametrize("times", [1, 3])
def test_a_failing_call_loses_nothing(make_world, first, error, times):
    expected = DiskFull if error == errno.ENOSPC else StorageUnavailable
    for number in range(1 + first, 800, STEP * times):
        world, disk = make_world(), FaultDisk()
        disk.fail(nth=number, times=times, error=error, torn=number // STEP % 2 == 0)
        try:
            try:
                world.open(disk)
            except TieredIndexError as raised:
                assert isinstance(raised, expected)
                disk.clear()
                world.open(disk)
            for step in world.script():
                try:
                    step()
                except TieredIndexError as raised:
                    assert isinstance(raised, expected)
            if disk.calls() < number:
                return
            disk.clear()
            world.do("check heal come_back")
            world.service.close()
        except BaseException as raised:
            raised.add_note(f"call {number} fails")
            raise
    raise AssertionError("the scenario has more calls than were struck")


def test_after_a_failed_sync_a_file_takes_no_more_and_its_entries_go_to_the_next_one(make_world):
    world, disk = make_world(), FaultDisk()
    service = world.open(disk)
    world.do("2 flush")
    (before,) = service.files()
    count, length = before.count, before.path.stat().st_size
    content = before.path.read_bytes()
    disk.fail("sync")
    world.do("2 flush")
    assert before.count == count and not before.accepts
    written = disk.calls("pwrite")
    world.do("2 flush")
    assert len(service.files()) == 2
    assert disk.calls("pwrite") == written + 2  # entries and journal of the next file
    assert before.path.stat().st_size == length
    head = before.layout.entry_position(count + 1)
    assert before.path.read_bytes()[:head] == content[:head]
    world.do("check abandon")
    disk.lose_unsynced()
    world.come_back()


def test_a_flush_that_failed_half_way_continues_where_it_stopped(make_world):
    """The flush writes no entry twice. Answers would hide that, since they have each identity once."""
    failed = 0
    for number in range(1, 40):
        world, disk = make_world(), FaultDisk()
        service = world.open(disk)
        world.put(30)
        disk.fail("sync", nth=number, times=6)
        try:
            service.flush()
        except StorageUnavailable:
            failed += 1
        disk.clear()
        service.flush()
        assert sum(handle.count for handle in service.files()) == len(world.model.entries), f"from sync {number} on"
        world.confirm()
        world.check()
        world.service.close()
    assert failed > 5


STEPS = {
    "reserving": "allocate",
    "appending entries, journal and compacted files": "pwrite",
    "making files": "create",
    "naming and moving files": "rename",
    "making bytes durable": "sync",
    "making names durable": "sync_folder",
}


@pytest.mark.parametrize("operation", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("restart", [False, True], ids=["goes on", "restarts"])
def test_a_step_that_finds_no_room_for_as_long_as_it_takes(make_world, operation, restart):
    """Calls fail until there is space again. A real disk refuses only some of them; a quota or a network disk may
    refuse any.
    """
    struck = refused = 0
    # every eighth call; with a restart, other ones
    for nth in range(1 + 4 * restart, 120, 8):
        world, disk = make_world(), FaultDisk()
        world.settings["buffer_max_entries"] = 40
        disk.fail(operation, nth=nth, times=None, error=errno.ENOSPC)
        before = refused
        try:
            world.open(disk)
            for step in world.script():
                try:
                    step()
                except BackPressure:
                    assert any("No space left" in problem for problem in world.service.health()["problems"])
                    if refused == before:
                        world.check()
                    refused += 1
        except DiskFull:
            disk.clear()
            world.open(disk)
        if disk.calls(operation) < nth:
            break
        struck += 1
        world.check()
        if restart:
            world.do("come_back settle")
        disk.clear()
        world.do("flush 3 heal")
        world.service.close()
        world.tidy()
    assert 0 < struck < 14 and refused
