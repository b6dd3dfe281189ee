"""One writer per index: locks, leases, takeovers, fences, and the calls that a fenced writer may still make."""

from __future__ import annotations

import os
import socket

import pytest

from tests.fencing.scenarios import an_object
from tests.support.log_records import publish
from tests.support.storage_faults import FaultStorage
from tiered_index.errors import IndexClosed, LockHeld, NotAnIndex, StorageUnavailable, WriterFenced
from tiered_index.service.log.log import StorageLog


@pytest.fixture
def two(make_world):
    """Two roots of one storage and one clock."""
    first = make_world()
    second = make_world(first.storage)
    second.clock = first.clock
    return first, second


def test_a_root_has_one_writer(make_world):
    world = make_world()
    service = world.open()
    before = {path: path.stat().st_size for path in world.root.rglob("*")}
    with pytest.raises(LockHeld) as held:
        world.open()
    assert {path: path.stat().st_size for path in world.root.rglob("*")} == before
    assert (held.value.pid, held.value.host) == (os.getpid(), socket.gethostname())
    world.put(3)
    world.service = service
    world.check()
    service.close()
    world.open()


def test_another_root_waits_for_the_lease(two):
    first, second = two
    first.open()
    with pytest.raises(LockHeld) as held:
        second.open()
    assert (held.value.pid, held.value.host) == (os.getpid(), socket.gethostname())
    first.clock.advance(59)
    with pytest.raises(LockHeld):
        second.open()
    first.service.run_lifecycle()  # renews
    first.clock.advance(59)
    with pytest.raises(LockHeld):
        second.open()
    first.clock.advance(2)
    second.open()


def test_a_killed_writers_root_takes_over_at_once(make_world):
    world = make_world()
    world.open()
    world.put(3)
    world.flush()
    world.abandon()
    world.open()
    world.check()


def test_a_fenced_writer_publishes_nothing_and_keeps_its_files(two):
    first, second = two
    first.open()
    first.put(9)
    first.flush()
    first.clock.advance(61)
    second.open()
    second.publish(4)
    before = [info.name for info in first.storage.list("log/")]
    first.service.seal()
    with pytest.raises(WriterFenced):
        first.service.run_lifecycle()
    with pytest.raises(WriterFenced):
        first.service.run_lifecycle()
    assert [info.name for info in first.storage.list("log/")] == before
    first.check()  # what it has it still answers
    assert first.service.health()["fenced"]
    with pytest.raises(WriterFenced):
        first.service.put("orders", 0, "a", 1, 1, 1)
    first.service.close()
    # later it may take over in turn, and then its files follow
    second.service.close()
    first.open()
    first.service.run_lifecycle()
    stored = first.service.log_state.objects.values()
    assert sum(o.count for o in stored) == len(first.model.entries) + len(second.model.entries)


def test_a_record_whose_answer_was_lost_is_there_once(make_world):
    world = make_world()
    world.open()
    world.service.close()
    storage = FaultStorage(world.storage)
    log = StorageLog(storage, world.clock)
    log.open()
    before = log.state.number
    storage.fail("put_if_absent", when="after")
    with pytest.raises(StorageUnavailable):
        publish(log, log.state.epoch, (an_object(1),))
    publish(log, log.state.epoch, (an_object(1),))
    assert log.refresh().number == before + 1
    assert list(log.state.objects) == [an_object(1).name]


def test_a_record_that_arrives_late_does_not_publish_a_file_twice(make_world):
    """A put whose answer was lost reaches the storage only after the writer has looked for it in vain."""
    world = make_world()
    storage = _Straggling(world.storage)
    world.open(storage=storage)
    world.put(5)
    world.service.seal()
    storage.delayed = True
    with pytest.raises(StorageUnavailable):
        world.service.run_lifecycle()
    storage.arrive_with_the_next = True
    world.service.run_lifecycle()
    world.service.run_lifecycle()
    stored = list(world.service.log_state.objects.values())
    assert sum(o.count for o in stored) == len(world.model.entries)
    assert len({o.file_id for o in stored}) == len(stored)
    world.confirm()
    world.check()


class _Straggling(FaultStorage):
    """Holds one put-if-absent of a log record back and lets it arrive just before the next one."""

    delayed = arrive_with_the_next = False
    held = None

    def put_if_absent(self, name, data):
        if name.startswith("log/") and self.delayed:
            self.delayed, self.held = False, (name, bytes(data))
            raise StorageUnavailable("no answer")
        if name.startswith("log/") and self.arrive_with_the_next:
            self.arrive_with_the_next = False
            self.inner.put_if_absent(*self.held)
        super().put_if_absent(name, data)


def test_a_storage_with_another_index_is_refused_also_when_it_comes_back_late(make_world):
    world, other = make_world(), make_world()
    world.open()
    world.put(3)
    world.service.close()
    other.open()
    other.service.close()
    with pytest.raises(NotAnIndex):
        world.open(storage=other.storage)
    storage = FaultStorage(other.storage)
    storage.fail("*", times=None)
    world.open(storage=storage)
    world.service.seal()
    storage.clear()
    before = [info.name for info in other.storage.list()]
    with pytest.raises(NotAnIndex):
        world.service.run_lifecycle()
    assert [info.name for info in other.storage.list()] == before


def test_a_closed_index_does_nothing(make_world):
    world = make_world()
    service = world.open()
    service.close()
    service.close()
    for call in (
        lambda: service.put("t", 0, "k", 0, 0, 0),
        lambda: service.put_batch({}),
        service.flush,
        service.seal,
        service.run_lifecycle,
        lambda: service.query("t", "k"),
        lambda: service.query_many([]),
        service.files,
        service.files_table,
    ):
        with pytest.raises(IndexClosed, match="closed"):
            call()
