"""A crash at every single call of the local disk, and the power cut after it: nothing durable is lost, nothing half-made is seen.

`make test` crashes at each call, and cuts the power at three calls in five, in one of two ways; `make test-all` at each in both.
"""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from tiered_index.testing.disk_faults import FaultDisk, SimulatedCrash

CALLS = 400
# more than the scenario has; the last test below says when that stops being true
STRIDE = 5


def shares(*short):
    """Return where each share of the calls begins; those that are not in `short` are for long runs."""
    return [first if first in short else pytest.param(first, marks=pytest.mark.slow) for first in range(1, STRIDE + 1)]


def live(world, disk):
    """Run the scenario on `disk` up to its crash, if it has one."""
    with suppress(SimulatedCrash):
        service = world.open(disk)
        for step in world.script():
            step()
        service.close()
        world.confirm()
    return disk.crashed


def come_back(world):
    """Reopen on a healthy disk, check everything, go on working, check again."""
    world.open()
    world.check()
    world.settle()
    world.put(6)
    world.flush()
    world.service.seal()
    world.service.run_lifecycle()
    world.check()
    world.service.close()
    world.confirm()
    world.open()
    world.check()
    world.tidy()
    world.service.close()


def strike(make_world, first, cut):
    """Crash at every `STRIDE`-th call from `first` on; return at how many calls."""
    crashes = 0
    for number in range(first, CALLS, STRIDE):
        world = make_world()
        disk = FaultDisk()
        disk.crash(nth=number, after=number % 3 == 0, torn=number % 2 == 0)
        if not live(world, disk):
            break
        crashes += 1
        world.abandon()
        cut(disk, number)
        try:
            come_back(world)
        except BaseException as error:
            error.add_note(f"crash at call {number}")
            raise
    return crashes


@pytest.mark.parametrize("first", shares(1, 2, 3, 4, 5))
def test_a_crash_at_any_call_loses_nothing_durable(make_world, first):
    assert strike(make_world, first, lambda disk, number: None) > 30


@pytest.mark.parametrize("first", shares(1, 3))
def test_a_power_cut_that_takes_everything_unsynced_loses_nothing_durable(make_world, first):
    assert strike(make_world, first, lambda disk, number: disk.lose_unsynced()) > 30


@pytest.mark.parametrize("first", shares(4))
def test_a_power_cut_that_takes_sectors_and_names_by_chance_loses_nothing_durable(make_world, first):
    assert strike(make_world, first, lambda disk, number: disk.lose_unsynced(random.Random(number))) > 30


def test_the_scenario_has_fewer_calls_than_are_struck(make_world):
    world, disk = make_world(), FaultDisk()
    assert not live(world, disk)
    assert 150 < disk.calls() < CALLS
