"""A root keeps a state of the storage's log. A crash at any step is safe."""

import errno
import random

import pytest

from tests.support.disk_faults import FaultDisk, SimulatedCrash
from tests.support.log_records import GENESIS, an_object, publish
from tiered_index.base.clock import ManualClock
from tiered_index.service.log.kept import KeptLog
from tiered_index.service.log.log import StorageLog
from tiered_index.service.root import Root
from tiered_index.storage.memory import MemoryStorage

OBJECTS = 200


@pytest.fixture(scope="module")
def states():
    """States of one log. Each record adds a file, and every third record removes one."""
    log = StorageLog(MemoryStorage(), ManualClock())
    log.create(GENESIS)
    log.claim_epoch()
    history = [publish(log, 1, tuple(map(an_object, range(OBJECTS))))]
    for n in range(60):
        gone = [an_object(n).name] if n % 3 == 0 else []
        history.append(publish(log, 1, (an_object(OBJECTS + n),), remove=gone))
    return history


def like(state):
    return state, state.digest, state.chain


def a_root(path, disk=None):
    path.mkdir(exist_ok=True)
    return Root(path, disk or FaultDisk())


@pytest.mark.parametrize("number", [1, 12])
def test_a_crash_at_each_step_leaves_the_state_before_or_the_new_one(tmp_path, states, number):
    rng = random.Random(number)
    steps = 0
    while True:
        steps += 1
        disk = FaultDisk()
        root = a_root(tmp_path / f"root{steps}", disk)
        kept_log = KeptLog(root)
        kept_log.keep(states[number - 1])
        assert like(KeptLog(root).read()) == like(states[number - 1])
        disk.crash(nth=steps, torn=steps % 2 == 0)
        try:
            kept_log.keep(states[number])
        except SimulatedCrash:
            disk.revive()
            disk.lose_unsynced(rng)
            state = KeptLog(root).read()
            assert like(state) in (like(states[number - 1]), like(states[number]))
            # the next writer deletes half-made work, and continues
            next_one = KeptLog(root)
            next_one.keep(states[number])
            assert like(KeptLog(root).read()) == like(states[number])
        else:
            break
    assert steps > 4


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("operation", ["create", "pwrite", "sync", "rename"])
def test_a_failing_disk_keeps_none_rather_than_an_earlier_one(tmp_path, states, operation, is_cut):
    """A power cut brings no earlier one back."""
    disk = FaultDisk()
    root = a_root(tmp_path / "root", disk)
    kept_log = KeptLog(root)
    kept_log.keep(states[0])
    disk.fail(operation, error=errno.ENOSPC, times=None)
    kept_log.keep(states[1])
    disk.clear()
    if is_cut:
        disk.lose_unsynced()
    assert KeptLog(root).read() is None
    for state in states[2:6]:
        kept_log.keep(state)
        assert like(KeptLog(root).read()) == like(state)
    # an earlier state changes nothing
    kept_log.keep(states[3])
    assert like(KeptLog(root).read()) == like(states[5])


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "gone"])
def test_damage_gives_no_state(tmp_path, states, how):
    root = a_root(tmp_path / "root")
    KeptLog(root).keep(states[3])
    path = root.path / "log"
    data = path.read_bytes()
    damaged = {"flipped": data[:70] + bytes([data[70] ^ 1]) + data[71:], "cut": data[: len(data) // 2], "empty": b""}
    path.unlink() if how == "gone" else path.write_bytes(damaged[how])
    reader = KeptLog(root)
    assert [reader.read() for _ in range(3)] == [None] * 3
    KeptLog(root).keep(states[4])
    assert like(reader.read()) == like(states[4])
