"""One writer per index: locks, leases, and storages that are not the index's or ignore put-if-absent.

`tests/fencing` has the scenarios of several processes.
"""

import json
import os
import socket
import threading

import pytest

from tests.support.copies import bytes_of
from tests.support.storage_faults import FaultStorage, LateRecords
from tiered_index import IndexService
from tiered_index.errors import (
    ConfigError,
    LockHeld,
    NotAnIndex,
    StorageMisconfigured,
    StorageUnavailable,
    WriterFenced,
)
from tiered_index.storage.opening import open_storage

NOW_MS = 1_700_000_000_000


def test_a_root_has_one_writer(make_world):
    world = make_world()
    service = world.open()
    before = {path: path.stat().st_size for path in world.root.rglob("*")}
    with pytest.raises(LockHeld) as held:
        world.open()
    assert {path: path.stat().st_size for path in world.root.rglob("*")} == before
    assert (held.value.pid, held.value.host) == (os.getpid(), socket.gethostname())
    (world.root / "lock").unlink()  # a deleted file lets no second writer in
    with pytest.raises(LockHeld):
        world.open()
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


DAMAGE = {
    "cut": lambda data: data[:-5],
    "no text": lambda data: b"\xff\xff",
    "no object": lambda data: b"[]",
    "nested deeply": lambda data: b"[" * 100_000,
    "an endless number": lambda data: json.dumps(json.loads(data) | {"ttl_ms": float("inf")}).encode(),
    "a list for a number": lambda data: json.dumps(json.loads(data) | {"pid": []}).encode(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_lease_excludes_no_writer_and_fences_still_hold(open_index, offsets, storage, caplog, damage):
    first = open_index("first")
    first.put("t", 0, "k", 1, 1, NOW_MS)
    first.seal()
    (lease,) = [info.name for info in storage.list("lease/")]
    storage.put(lease, damage(storage.get(lease)))
    second = open_index("second")
    assert [record.levelname for record in caplog.records if lease in record.getMessage()] == ["WARNING"]
    second.put("t", 0, "k", 2, 1, NOW_MS)
    second.seal()
    second.run_lifecycle()
    with pytest.raises(WriterFenced):
        first.run_lifecycle()
    assert offsets(second) == [2]
    assert not second.health()["problems"]


def test_an_opening_that_fails_late_flushes_nothing(open_index, storage, caplog):
    faulty = FaultStorage(storage)
    # it takes longer than many pauses, and is then refused as by another writer
    faulty.meanwhile("put_if_absent", lambda: threading.Event().wait(0.02), times=None)
    faulty.fail("put_if_absent", times=None, error=LockHeld)
    for attempt in range(3):
        with pytest.raises(LockHeld, match="scripted"):
            open_index(f"{attempt}", storage_backend=faulty, background=True, flush_interval_s=0.001)
    assert not [record for record in caplog.records if "flush" in record.getMessage()]


def test_a_root_whose_storage_is_empty_says_that_it_belongs_to_another_and_makes_no_index_there(
    tmp_path, uri="memory://a-life-that-ended"
):
    with IndexService.open(root=tmp_path / "root", storage=uri, slots=7, items=64):
        with pytest.raises(LockHeld, match=rf"root is being written by this process \({os.getpid()}\)"):
            IndexService.open(root=tmp_path / "root")
        with pytest.raises(LockHeld, match=r"ended is being written by this process .* with another root; its lease"):
            IndexService.open(root=tmp_path / "other", storage=uri, slots=7, items=64)
    empty = f"file://{tmp_path}/empty"
    for other in (None, empty):
        with open_storage(uri) as storage:
            storage.delete_many([info.name for info in storage.list("")])
        with pytest.raises(NotAnIndex) as caught:
            IndexService.open(root=tmp_path / "root", storage=other)
        for part in (other or uri, f"root {tmp_path}/root belongs to another storage", f"in {uri}, which ended"):
            assert part in str(caught.value)
        with open_storage(other or uri) as storage:
            assert list(storage.list()) == []


def test_a_bucket_with_too_short_a_name_is_named():
    with pytest.raises(ConfigError, match=r"'b' is not a bucket's name: .* a name of 3 to 255 letters"):
        open_storage("s3://b/p")
