"""A storage that fails, is full, does not answer, or is not mounted: files wait, puts and lookups of local files go on.

The state machine and the simulation let each call of a storage fail, before and after it acts.
"""

import errno
import shutil

import pytest

from tests.support.disk_faults import FaultDisk
from tests.support.hanging import until
from tests.support.merging import DAY_S, Merging, small_shards
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, Lookup
from tiered_index.errors import DiskFull, LockHeld, ObjectNotFound, StorageUnavailable
from tiered_index.service.log.records import LogRecord
from tiered_index.storage.local import LocalStorage
from tiered_index.storage.memory import MemoryStorage

WRITING = ("put", "put_if_absent", "write", "delete_many")
DOWN = {"everything": ("*",), "writing": WRITING, "reading": ("get", "get_range", "get_suffix", "head", "list")}


@pytest.fixture
def world(make_world):
    """An index whose storage can fail, and whose files stay on the local disk."""
    world = make_world()
    world.settings |= {"local_keep_s": 2 * 86400, "items": 40, "buffer_max_entries": 60}
    world.reach = FaultStorage(world.storage)
    return world


def take_down(world, operations=("*",)):
    for operation in operations:
        world.reach.fail(operation, times=None)


def let_minutes_pass(world, minutes):
    """Put, flush and try to upload once per minute."""
    for _ in range(minutes):
        world.clock.advance(60)
        world.do("4 flush")
        with pytest.raises(StorageUnavailable):
            world.service.run_lifecycle()
        assert any("scripted fault" in problem for problem in world.service.health()["problems"])
    world.check()


def settle(world):
    """Publish everything, and check all answers and objects."""
    for _ in range(3):
        world.do("run_lifecycle flush")
    assert world.service.health()["problems"] == []
    world.heal()


def published(world):
    """Return the files of the log's records in order, as (lane, sequence)."""
    records = [LogRecord.decode(world.storage.get(info.name), info.name) for info in world.storage.list("log/")]
    return [(added.lane, added.sequence) for record in records for added in record.add]


@pytest.mark.parametrize("down", DOWN)
def test_files_wait_and_uploads_resume_in_order(world, down):
    world.open(storage=world.reach)
    world.publish(20)
    before = published(world)
    take_down(world, DOWN[down])
    let_minutes_pass(world, 40)
    assert published(world) == before
    world.reach.clear()
    settle(world)
    after = published(world)
    assert after[: len(before)] == before
    assert len(after) == len(set(after)) > len(before) + 3
    for lane in ("main", "quarantine"):
        waited = [sequence for name, sequence in after[len(before) :] if name == lane]
        assert waited == sorted(waited)
    world.service.close()
    world.do("open check")


@pytest.mark.parametrize("operation", ["put", "put_if_absent"])
def test_a_storage_that_does_not_answer_holds_up_nobody_but_the_life_cycle(world, operation):
    world.open(storage=world.reach, background=True, flush_interval_s=0.01, lifecycle_interval_s=0.01)
    world.put(30)
    hang = world.reach.hang(operation)
    world.seal()
    until(hang.entered.is_set)
    world.do("20 seal check")
    hang.release.set()
    until(lambda: set(world.service.health()["files"]) == {"uploaded"})
    world.check()


def test_a_writer_that_starts_without_its_storage_claims_it_later_only_without_another_writer(world, make_world):
    """The storage was down for this host only. `tests/fencing` has a writer that was taken over and goes on."""
    world.open(storage=world.reach)
    world.do("20 flush")
    take_down(world)
    other = make_world(world.storage)
    other.clock = world.clock
    let_minutes_pass(world, 5)
    world.abandon()
    world.open(storage=world.reach)
    world.do("3 flush")
    other.do("open 7 publish")
    before = [info.name for info in world.storage.list("log/")]
    world.reach.clear()
    for _ in range(2):
        with pytest.raises(LockHeld, match="is being written by this process"):
            world.service.run_lifecycle()
    assert any("is being written by this process" in problem for problem in world.service.health()["problems"])
    assert [info.name for info in world.storage.list("log/")] == before
    other.service.close()
    world.do("run_lifecycle seal run_lifecycle")
    stored = sum(o.count for o in world.service.log_state.objects.values())
    assert stored == len(world.model.entries) + len(other.model.entries)


def test_a_known_root_starts_without_its_storage_and_says_what_it_does_not_know(world):
    world.open(storage=world.reach)
    world.publish(20)
    world.service.close()
    take_down(world)
    service = world.open(storage=world.reach, local_keep_s=0)
    health = service.health()
    assert "uploaded" in health["files"] and health["unpublished"] == {"files": 0, "entries": 0}
    (problem,) = health["problems"]
    assert problem.startswith("log: ") and "scripted fault" in problem
    world.do("5 flush")
    assert service.health()["unpublished"]["files"] == 1
    with pytest.raises(StorageUnavailable):
        service.run_lifecycle()
    with pytest.raises(StorageUnavailable):
        service.query("orders", "a")
    result = service.query("orders", "a", max_count=1000, allow_partial=True)
    assert (result.status, [report.file for report in result.failed]) == ("partial", ["log"])
    assert len(result) == len(world.model.query("orders", "a", max_count=None))
    world.reach.clear()
    settle(world)


@pytest.mark.parametrize("refused", [("put", "put_if_absent"), ("*",)])
def test_a_start_without_a_claim_has_the_positions_of_retired_files(open_index, storage, refused):
    """The writer may read the log, or only the root's copy of it."""
    faulty = FaultStorage(storage)
    with open_index(storage_backend=faulty, local_keep_s=0) as service:
        service.put("t", 0, "k", 1, 1, 1_700_000_000_000, source="s", source_position=5)
        service.seal()
        for _ in range(2):
            service.run_lifecycle()
        assert service.health()["files"] == {"storage": 1}
    for call in refused:
        faulty.fail(call, times=None)
    with open_index(storage_backend=faulty, local_keep_s=0) as service:
        assert service.durable_position("s") == 5
        faulty.clear()


def test_a_reader_of_a_root_does_without_the_storage_as_far_as_the_root_reaches(make_world):
    world = make_world()
    world.settings["local_keep_s"] = 86400
    world.do("open 9 flush")
    storage = FaultStorage(world.storage)
    with IndexReader.open(root=world.root, storage_backend=storage, clock=world.clock, refresh_interval_s=10) as reader:
        world.check(reader.query)
        storage.fail("*", times=None)
        world.clock.advance(11)
        world.service.seal()  # the folders change too
        world.service.run_lifecycle()
        world.check(reader.query)
        (seen,) = reader.query("orders", "a").freshness
        assert seen.not_asked is not None and seen.as_of_ms == world.service.log_state.newest_ms
        (many,) = reader.query_many([Lookup(topic="orders", key="a")])
        assert many.freshness == (seen,)
        world.clock.advance(86_401)
        world.do("3 flush")
        world.service.run_lifecycle()  # the writer can use the storage: the older file leaves the root
        older = {file.file_id: file for file in reader.files() if file.place == "storage" and file.file_id != "log"}
        assert len(older) == world.service.health()["files"]["storage"] > 0
        with pytest.raises(StorageUnavailable):
            reader.query("orders", "a")
        result = reader.query("orders", "a", max_count=1000, allow_partial=True)
        assert result.status == "partial" and {report.file for report in result.failed} <= set(older)
        behind_ms = max(file.second_max + 1 for file in older.values()) * 1000
        later = reader.query("orders", "a", begin_ms=behind_ms)
        assert later.status == "complete" and later.freshness[0].not_asked is not None
        (world.root / "log").unlink()
        with pytest.raises(StorageUnavailable):
            reader.query("orders", "a", begin_ms=behind_ms)
        result = reader.query("orders", "a", max_count=1000, allow_partial=True)
        assert "log" in [report.file for report in result.failed]
        storage.clear()
        world.clock.advance(11)
        world.check(reader.query)
        assert reader.query("orders", "a").freshness == ()


@pytest.mark.parametrize("empty", [False, True], ids=["gone", "an empty folder in its place"])
def test_a_storage_that_is_not_mounted_is_not_taken_for_a_new_one_or_one_without_news(make_world, tmp_path, empty):
    folder = tmp_path / "store"
    world = make_world(LocalStorage(folder))
    world.settings["local_keep_s"] = 86400
    world.do("open 9 publish 9 seal")
    settings = {"clock": world.clock, "refresh_interval_s": 10}
    with (
        IndexReader.open(root=world.root, **settings) as beside,
        IndexReader.open(storage=folder.as_uri(), **settings) as alone,
    ):
        folder.rename(tmp_path / "away")
        if empty:
            folder.mkdir()
        for _ in range(2):
            world.clock.advance(60)
            with pytest.raises(StorageUnavailable, match="mounted"):
                world.service.run_lifecycle()
            assert any("is it mounted" in problem for problem in world.service.health()["problems"])
            world.check(beside.query)
            with pytest.raises(StorageUnavailable, match="mounted"):
                alone.query("orders", "a")
            (seen,) = beside.query("orders", "a").freshness
            assert "is it mounted?" in seen.not_asked
        assert not list(LocalStorage(folder).list())
        world.do("3 flush")
        if folder.exists():
            shutil.rmtree(folder)
        (tmp_path / "away").rename(folder)
        world.heal()
        world.clock.advance(11)
        world.check(alone.query)
        world.check(beside.query)
        assert beside.query("orders", "a").freshness == ()


def test_an_export_without_the_storage_has_the_files_that_were_uploaded_last(make_world, tmp_path):
    folder = tmp_path / "store"
    world = make_world(LocalStorage(folder))
    world.settings["local_keep_s"] = 86400
    storage = FaultStorage(world.storage)
    world.open(storage=storage)
    world.do("9 seal")
    storage.fail("put", name_prefix="data/")
    with pytest.raises(StorageUnavailable):
        world.run_lifecycle()
    # the root keeps the log as it was at the compaction: the upload deletes nothing
    world.run_lifecycle()
    assert world.service.health()["unpublished"]["files"] == 0
    with world.service.export() as export:
        whole = sum(map(len, export))
    folder.rename(tmp_path / "lost")
    with IndexReader.open(root=world.root, clock=world.clock) as reader, reader.export() as export:
        assert "is it mounted?" in export.not_asked
        assert export.missing == []
        assert sum(map(len, export)) == whole > 0


def test_files_wait_for_room_and_neither_close_nor_start_needs_any(make_world, tmp_path):
    """The storage's own disk is full."""
    disk = FaultDisk()
    world = make_world(LocalStorage(tmp_path / "store", disk=disk))
    world.do("open 5 seal")
    disk.fail("pwrite", times=None, error=errno.ENOSPC)
    for _ in range(3):
        with pytest.raises(DiskFull):
            world.service.run_lifecycle()
        assert any("No space left" in problem for problem in world.service.health()["problems"])
        world.do("5 flush check")
    world.service.close()  # its lease can't be released
    world.do("open 2 flush")
    disk.clear()
    world.heal()


MERGES = {
    "an object is gone before its record": ("head", {"error": ObjectNotFound}),
    "a read fails between two parts": ("get_range", {"nth": 20}),
    "the first error counts": ("write", {"times": None}),
    "no room after a record's name": ("put_if_absent", {"when": "after", "error": DiskFull}),
}


@pytest.mark.parametrize("what", MERGES)
def test_a_merge_that_fails_deletes_its_uploads_and_no_object_of_the_log(tmp_path, what):
    """The state machine and the simulation fail each call of merges."""
    operation, how = MERGES[what]
    storage = FaultStorage(MemoryStorage())
    life = Merging(tmp_path, storage)
    life.fill(files=6)
    storage.fail(operation, **how)
    if what == "the first error counts":
        storage.fail("delete_many", times=None)
    with small_shards(), pytest.raises(how.get("error", StorageUnavailable), match=f"scripted fault .* {operation} "):
        life.merge(DAY_S)
    storage.clear()
    assert bool(life.state.tables) is (operation == "put_if_absent")
    stored = {info.name for info in storage.list("data/")}
    assert stored >= set(life.state.objects)
    assert stored == set(life.state.objects) or operation in ("head", "put_if_absent")
    life.sweep()
    life.check()
    life.close()
