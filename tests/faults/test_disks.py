"""Disk calls that fail: errors are typed, nothing is written twice, and confirmed entries stay.

The crash campaigns (`tests/reliability/test_crashes.py`) let each call fail, alone and in bursts, before crashes and
power cuts.
"""

import errno
import random

import pytest

from tests.support.disk_faults import FaultDisk, SimulatedCrash
from tiered_index.errors import StorageUnavailable, TieredIndexError

NOW_MS = 1_700_000_000_000


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
    for number in range(1, 40, 2):
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
    assert failed > 3


# Bursts: some calls in a row, and what recovery makes of them


@pytest.fixture(params=[NOW_MS, 5_000], ids=["main", "quarantine"])
def put(request):
    """Return a function that puts messages to one lane, and flushes them."""

    def make(service, *numbers):
        for number in numbers:
            service.put("t", 0, "k", number, 1, request.param + number * 1000, source="s", source_position=number)
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


@pytest.mark.parametrize("durable", [(), (1, 2)], ids=["first batch", "later batch"])
@pytest.mark.parametrize("more", [[], ["create", "create"]], ids=len)
def test_recovery_writes_again_what_a_failed_sync_may_not_have_written(open_index, offsets, put, durable, more):
    """The second sync of a flush is the journal's. Its record is read after a kill, but is gone after a power cut."""
    disk = FaultDisk()
    service = open_index(disk=disk)
    if durable:
        put(service, *durable)
    disk.fail("sync", nth=2 if durable else 4)
    disk.fail("*", times=None, error=in_turn(*more))
    disk.fail("unlink", times=None)
    disk.crash("create", nth=len(more) + (1 if durable else 4))
    with pytest.raises((SimulatedCrash, TieredIndexError)):
        put(service, 3, 4)
        put(service)
        put(service)
    service.abandon()
    disk.revive()
    service = open_index(disk=disk)
    recovered = offsets(service)
    assert set(recovered) >= set(durable)
    assert service.durable_position("s") == (recovered[-1] if recovered else None)
    put(service, 5)
    service.abandon()
    disk.lose_unsynced()
    service = open_index(disk=disk)
    assert offsets(service) == [*recovered, 5]
    assert service.durable_position("s") == 5


@pytest.mark.parametrize("fails", ["sync_folder", "unlink"])
def test_a_file_that_is_given_up_is_nothing_to_a_reader_however_far_its_deletion_went(
    open_index, open_reader, offsets, put, fails
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
        assert offsets(open_reader("root")) == [1, 2, 3]
        service.abandon()
        disk.revive()
        service = open_index(disk=disk)
        assert offsets(service) == [1, 2, 3]


@pytest.mark.parametrize("seed", range(3))
def test_a_compacted_file_has_its_name_before_a_recovery_drops_the_unsealed_one(open_index, offsets, put, seed):
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


@pytest.mark.parametrize("error", [errno.EROFS, errno.EIO])
def test_files_that_could_not_be_deleted_are_named_and_deleted_later(open_index, offsets, tmp_path, error):
    disk = FaultDisk()
    service = open_index(disk=disk)
    service.put("t", 0, "k", 1, 1, NOW_MS)
    service.seal()
    left = {path: path.read_bytes() for path in (tmp_path / "root" / "unsealed").iterdir()}
    disk.fail("unlink", times=None, error=error)
    with pytest.raises(TieredIndexError, match="deleting"):
        service.run_lifecycle()
    assert any("deleting" in problem for problem in service.health()["problems"])
    disk.clear()
    service.run_lifecycle()
    assert service.health()["problems"] == []
    assert not [path for path in left if path.suffix and path.exists()]
    service.close()
    # as a recovery finds them
    left[tmp_path / "root" / "compacted" / ".tmp-of-a-crash"] = b"half"
    for path, data in left.items():
        path.write_bytes(data)
    disk.fail("unlink", times=None, error=error)
    service = open_index(disk=disk)
    assert offsets(service) == [1]
    with pytest.raises(TieredIndexError, match="deleting"):
        service.run_lifecycle()
    undeleted = {problem.split(":")[0] for problem in service.health()["problems"]}
    assert undeleted & {path.name for path in left} == {path.name for path in left if path.suffix != ".index"}
    disk.clear()
    service.run_lifecycle()
    assert service.health()["problems"] == []
    assert not [path for path in left if path.exists()]


def test_a_file_whose_making_fails_in_any_way_leaves_nothing_behind(open_index, offsets, tmp_path):
    """Each round of a life cycle without enough memory left a half-made file."""
    disk = FaultDisk()
    service = open_index(disk=disk)
    for number in range(30):
        service.put("t", 0, "k", number, 1, NOW_MS)
    service.seal()
    for error in (MemoryError, ValueError, OSError):
        disk.fail("pwrite", times=None, error=error, torn=True)
        with pytest.raises((MemoryError, TieredIndexError)):
            service.run_lifecycle()
        assert list((tmp_path / "root" / "compacted").iterdir()) == []
        disk.clear()
        service.abandon()
        service = open_index(disk=disk)
    assert offsets(service) == list(range(30))
    service.run_lifecycle()
    assert [handle.place for handle in service.files()] == ["uploaded"]


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
