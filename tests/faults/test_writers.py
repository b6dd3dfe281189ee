"""One writer per index: locks, leases, takeovers, fences, and the calls that a fenced writer may still make."""

from __future__ import annotations

import os
import socket

import pytest

from tests.support.copies import bytes_of
from tests.support.storage_faults import FaultStorage, LateRecords
from tiered_index.errors import IndexClosed, LockHeld, NotAnIndex, StorageMisconfigured, StorageUnavailable


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


def test_a_record_that_arrives_late_does_not_publish_a_file_twice(make_world):
    """A put whose response was lost reaches the storage only after the writer has looked for it in vain."""
    world = make_world()
    storage = LateRecords(world.storage)
    world.open(storage=storage)
    world.do("5 seal")
    storage.delayed = True
    with pytest.raises(StorageUnavailable):
        world.service.run_lifecycle()
    storage.delayed = False
    storage.meanwhile("put_if_absent", storage.arrive, name_prefix="log/")
    world.service.run_lifecycle()
    stored = list(world.service.log_state.objects.values())
    assert len({o.file_id for o in stored}) == len(stored)
    world.heal()


def test_a_storage_with_another_index_is_refused_also_when_it_comes_back_late(make_world):
    world, other = make_world(), make_world()
    world.do("open 3")
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


def test_an_index_is_not_made_or_written_where_put_if_absent_is_ignored(make_world):
    world, other = make_world(), make_world()
    storage = FaultStorage(world.storage)
    storage.ignore_put_if_absent()
    with pytest.raises(StorageMisconfigured, match="put-if-absent"):
        world.open(storage=storage)
    assert (list(world.storage.list()), storage.calls("put")) == ([], 0)
    # the index came from a good storage: every claim probes the present one
    world.do("open 3 seal")
    world.service.close()
    before = bytes_of(world.storage)
    for writer in (world, other):
        with pytest.raises(StorageMisconfigured, match="put-if-absent"):
            writer.open(storage=storage)
        assert bytes_of(world.storage) == before


def test_a_closed_index_does_nothing(make_world):
    world = make_world()
    service = world.open()
    service.close()
    service.close()
    arguments = {"put": ("t", 0, "k", 0, 0, 0), "put_batch": ({},), "query": ("t", "k"), "query_many": ([],)}
    for name in (*arguments, "flush", "seal", "run_lifecycle", "files", "files_table"):
        with pytest.raises(IndexClosed, match="closed"):
            getattr(service, name)(*arguments.get(name, ()))
