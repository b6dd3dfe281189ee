"""A few failed disk calls in a row lost durable entries, or made a journal permanently unreadable.

Recovery trusted bytes whose sync had failed, which the kernel shows until the power is cut, and wrote on after them. A
file that the writer had abandoned was half deleted.
"""

from __future__ import annotations

import errno
import random

import pytest

from tests.regressions.conftest import offsets
from tests.support.disk_faults import FaultDisk, SimulatedCrash
from tiered_index.errors import TieredIndexError

NOW_MS = 1_700_000_000_000
LANES = {"main": NOW_MS, "quarantine": 5_000}


@pytest.fixture(params=LANES)
def put(request):
    """Return a function that puts messages to one lane, and flushes them."""
    begin_ms = LANES[request.param]

    def make(service, *numbers):
        for number in numbers:
            service.put("t", 0, "k", number, 1, begin_ms + number * 1000, source="s", source_position=number)
        service.flush()

    return make


def in_turn(*operations):
    """Return an error for `FaultDisk.fail` that strikes the next call of each operation in turn."""
    left = list(operations)

    def error(operation):
        if not left or operation != left[0]:
            return None
        left.pop(0)
        return errno.EIO

    return error


@pytest.mark.parametrize("kept", [(), (1, 2)], ids=["first batch", "later batch"])
@pytest.mark.parametrize("more", [[], ["create"], ["create", "create"]], ids=len)
def test_recovery_writes_again_what_a_failed_sync_may_not_have_written(open_index, put, kept, more):
    """The second sync of a flush is the journal's. Its record is read after a kill, but is gone after a power cut."""
    disk = FaultDisk()
    service = open_index(disk=disk)
    if kept:
        put(service, *kept)
    disk.fail("sync", nth=2 if kept else 4)
    disk.fail("*", times=None, error=in_turn(*more))
    disk.fail("unlink", times=None)
    disk.crash("create", nth=len(more) + (1 if kept else 4))
    with pytest.raises((SimulatedCrash, TieredIndexError)):
        put(service, 3, 4)
        put(service)
        put(service)
    service.abandon()
    disk.revive()
    service = open_index(disk=disk)
    assert set(offsets(service)) >= set(kept)
    recovered = offsets(service)
    assert service.durable_position("s") == (recovered[-1] if recovered else None)
    put(service, 5)
    service.abandon()
    disk.lose_unsynced()
    service = open_index(disk=disk)
    assert offsets(service) == [*recovered, 5]
    assert service.durable_position("s") == 5


@pytest.mark.parametrize("fails", ["sync_folder", "unlink"])
def test_a_file_that_is_given_up_is_nothing_to_a_reader_however_far_its_deletion_went(
    open_index, open_reader, put, fails
):
    disk = FaultDisk()
    service = open_index(disk=disk)
    # none of the entries reaches a file
    disk.fail("*", nth=1, times=None, error=in_turn("sync", "sync", "sync", "sync"))
    with pytest.raises(TieredIndexError):
        put(service, 1, 2)
    disk.clear()
    disk.fail("sync", nth=4)  # the journal's record is there, but not durable
    disk.fail(fails, nth=2, times=1)
    put(service)
    put(service, 3)
    for _ in range(2):
        with open_reader("root") as reader:
            assert offsets(reader) == [1, 2, 3]
        service.abandon()
        disk.revive()
        service = open_index(disk=disk)
        assert offsets(service) == [1, 2, 3]


@pytest.mark.parametrize("seed", range(8))
def test_a_compacted_file_has_its_name_before_a_recovery_drops_the_unsealed_one(open_index, put, tmp_path, seed):
    disk = FaultDisk()
    service = open_index(disk=disk)
    put(service, 1, 2, 3)
    service.seal()
    disk.crash("sync_folder")  # the compacted file's name is there, but not durable
    with pytest.raises(SimulatedCrash):
        service.run_lifecycle()
    service.abandon()
    disk.revive()
    open_index(disk=disk).abandon()
    disk.lose_unsynced(random.Random(seed), "changes")
    assert offsets(open_index(disk=disk)) == [1, 2, 3]


def test_recovery_continues_if_it_can_not_delete(open_index, put, tmp_path):
    disk = FaultDisk()
    service = open_index(disk=disk)
    put(service, 1, 2, 3)
    service.seal()
    left = {path: path.read_bytes() for path in (tmp_path / "root" / "unsealed").iterdir()}
    service.run_lifecycle()
    service.close()
    left[tmp_path / "root" / "compacted" / ".tmp-of-a-crash"] = b"half"
    for path, data in left.items():
        path.write_bytes(data)
    disk.fail("unlink", times=None)
    service = open_index(disk=disk)
    assert offsets(service) == [1, 2, 3]
    with pytest.raises(TieredIndexError, match="deleting"):
        service.run_lifecycle()
    undeleted = {problem.split(":")[0] for problem in service.health()["problems"]}
    assert undeleted & {path.name for path in left} == {path.name for path in left if path.suffix != ".index"}
    disk.clear()
    service.run_lifecycle()
    assert service.health()["problems"] == []
    assert not [path for path in left if path.exists()]


def test_space_that_could_not_be_taken_ahead_is_no_trouble_once_the_disk_has_healed(open_index):
    disk = FaultDisk()
    service = open_index(disk=disk)
    disk.fail("allocate", nth=2, times=None, error=errno.ENOSPC)
    service.put("t", 0, "k", 1, 1, NOW_MS)
    service.seal()
    (problem,) = [problem for problem in service.health()["problems"] if "reserving" in problem]
    assert problem.startswith("main files: ") and "No space left" in problem
    disk.clear()
    service.flush()
    assert service.health()["problems"] == []
