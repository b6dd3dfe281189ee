"""The storage is down for an hour: files wait, and puts continue up to the bound of the disk.

Lookups of local files are complete. Uploads continue after the outage.
"""

from __future__ import annotations

import contextlib
import os
import shutil

import pytest

from tests.support.hanging import until
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, Lookup
from tiered_index.errors import BackPressure, LockHeld, StorageUnavailable, WriterFenced
from tiered_index.service.log.records import LogRecord
from tiered_index.storage.local.storage import LocalStorage

MINUTES = 60
WRITING = ("put", "put_if_absent", "write", "delete")
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


def let_hours_pass(world, minutes=MINUTES, bound=None):
    """Put, flush and try to upload once per minute; return the number of refused calls."""
    pushed_back = 0
    for _ in range(minutes):
        world.clock.advance(60)
        try:
            world.put(4)
        except BackPressure as error:
            assert "write buffer" in str(error)
            pushed_back += 1
        try:
            world.flush()
        except BackPressure as error:
            assert "disk_max_bytes" in str(error)
            pushed_back += 1
            assert any(problem.startswith("flush: ") for problem in world.service.health()["problems"])
        with pytest.raises(StorageUnavailable):
            world.service.run_lifecycle()
        assert any("scripted fault" in problem for problem in world.service.health()["problems"])
        assert bound is None or world.service.health()["local_bytes"] < bound
    world.check()
    return pushed_back


def published(world):
    """Return the files of the log's records in order, as (lane, sequence)."""
    records = [LogRecord.decode(world.storage.get(info.name), info.name) for info in world.storage.list("log/")]
    return [(added.lane, added.sequence) for record in records for added in record.add]


def settle(world):
    """Publish everything, and check all answers and objects."""
    for _ in range(3):
        world.do("run_lifecycle flush")
    assert world.service.health()["problems"] == []
    world.heal()


@pytest.mark.parametrize("down", DOWN)
def test_files_wait_and_uploads_resume_in_order(world, down):
    world.open(storage=world.reach)
    world.publish(20)
    before = published(world)
    take_down(world, DOWN[down])
    assert let_hours_pass(world) == 0
    assert published(world) == before
    world.reach.clear()
    settle(world)
    after = published(world)
    assert after[: len(before)] == before
    assert len(after) == len(set(after)) > len(before) + 5
    for lane in ("main", "quarantine"):
        waited = [sequence for name, sequence in after[len(before) :] if name == lane]
        assert waited == sorted(waited)
    world.service.close()
    world.do("open check")


def test_at_the_disks_bound_puts_are_pushed_back_until_the_storage_is_there_again(world):
    bound = 15_000
    world.open(storage=world.reach, disk_max_bytes=bound)
    take_down(world)
    assert let_hours_pass(world, bound=1.3 * bound) > 0
    with pytest.raises(BackPressure):
        world.put(40)
    world.check()
    assert world.service.health()["buffered_entries"] > 50
    world.reach.clear()
    for _ in range(20):
        with contextlib.suppress(BackPressure):
            world.do("run_lifecycle flush")
            break
    settle(world)


def test_the_writers_own_threads_resume_by_themselves(world):
    world.open(storage=world.reach, background=True, flush_interval_s=0.01, lifecycle_interval_s=0.01)
    take_down(world)
    world.do("30 seal")
    until(lambda: any("scripted fault" in problem for problem in world.service.health()["problems"]))
    world.clock.advance(3600)
    world.do("5 flush check")
    world.reach.clear()
    world.seal()
    until(lambda: set(world.service.health()["files"]) == {"uploaded"} and not world.service.health()["problems"])
    world.check()
    assert sum(o.count for o in world.service.log_state.objects.values()) == len(world.model.entries)


@pytest.mark.parametrize("operation", ["put", "put_if_absent", "head", "list"])
def test_a_storage_that_does_not_answer_holds_up_nobody_but_the_life_cycle(world, operation):
    world.open(storage=world.reach, background=True, flush_interval_s=0.01, lifecycle_interval_s=0.01)
    world.put(30)
    hang = world.reach.hang(operation)
    world.seal()
    until(hang.entered.is_set)
    world.do("20 seal check")
    world.service.health()
    hang.release.set()
    until(lambda: set(world.service.health()["files"]) == {"uploaded"})
    world.check()


def test_a_lease_that_ended_meanwhile_is_renewed_where_nobody_claimed(world, make_world):
    world.open(storage=world.reach)
    take_down(world)
    let_hours_pass(world, minutes=5)
    world.reach.clear()
    world.put(3)
    settle(world)
    assert [info.name for info in world.storage.list("epoch/")] == ["epoch/" + "1".zfill(20)]
    other = make_world(world.storage)
    other.clock = world.clock
    with pytest.raises(LockHeld) as held:
        other.open()
    assert held.value.pid == os.getpid()


def test_a_writer_that_was_taken_over_meanwhile_is_fenced(world, make_world):
    """The storage was down for this host only."""
    world.open(storage=world.reach)
    world.do("20 flush")
    take_down(world)
    other = make_world(world.storage)
    other.clock = world.clock
    with pytest.raises(LockHeld):
        other.open()
    let_hours_pass(world, minutes=5)
    other.do("open 7 publish")
    before = [info.name for info in world.storage.list("log/")]
    world.reach.clear()
    for _ in range(2):
        with pytest.raises(WriterFenced, match="newer writer"):
            world.service.run_lifecycle()
    assert world.service.health()["fenced"]
    assert any("newer writer" in problem for problem in world.service.health()["problems"])
    assert [info.name for info in world.storage.list("log/")] == before
    assert {info.name for info in world.storage.list("data/")} == set(other.service.log_state.objects)
    with pytest.raises(WriterFenced):
        world.put(1)
    world.check()  # all its entries are there, and are found
    world.service.close()
    # once it is the writer again, it publishes the waiting files
    other.service.close()
    world.open(storage=world.reach)
    world.service.run_lifecycle()
    count = len(world.model.entries) + len(other.model.entries)
    world.do("seal run_lifecycle")
    assert sum(o.count for o in world.service.log_state.objects.values()) == count


def test_a_writer_that_starts_without_its_storage_counts_as_unpublished_what_waits_alone(world):
    world.open(storage=world.reach)
    world.publish(20)
    assert world.service.health()["unpublished"] == {"files": 0, "entries": 0}
    world.service.close()
    take_down(world)
    world.open(storage=world.reach)
    health = world.service.health()
    assert "uploaded" in health["files"] and health["unpublished"] == {"files": 0, "entries": 0}
    world.do("1 flush")
    assert world.service.health()["unpublished"]["files"] == 1
    world.reach.clear()
    settle(world)


def test_a_writer_that_restarted_meanwhile_waits_for_the_one_that_claimed(world, make_world):
    world.open(storage=world.reach)
    world.do("20 flush")
    take_down(world)
    let_hours_pass(world, minutes=5)
    world.abandon()
    world.open(storage=world.reach)
    world.do("3 flush")
    other = make_world(world.storage)
    other.clock = world.clock
    other.open()
    world.reach.clear()
    before = [info.name for info in world.storage.list("log/")]
    with pytest.raises(LockHeld):
        world.service.run_lifecycle()
    assert any("is being written by this process" in problem for problem in world.service.health()["problems"])
    world.do("3 flush")
    assert [info.name for info in world.storage.list("log/")] == before
    other.service.close()
    world.service.run_lifecycle()
    settle(world)


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
        assert seen.not_asked is not None
        assert seen.as_of_ms == world.service.log_state.newest_ms
        (many,) = reader.query_many([Lookup(topic="orders", key="a")])
        assert many.freshness == (seen,)
        world.clock.advance(86_401)
        world.do("3 flush")
        world.service.run_lifecycle()  # the writer can use the storage: the older file leaves the root
        older = {file.file_id: file for file in reader.files() if file.place == "storage" and file.file_id != "log"}
        assert len(older) == world.service.health()["files"]["storage"] > 0
        behind_ms = max(file.second_max + 1 for file in older.values()) * 1000
        with pytest.raises(StorageUnavailable):
            reader.query("orders", "a")
        result = reader.query("orders", "a", max_count=1000, allow_partial=True)
        assert result.status == "partial"
        assert {report.file for report in result.failed} <= set(older)
        later = reader.query("orders", "a", begin_ms=behind_ms)
        assert later.status == "complete"
        assert later.freshness[0].not_asked is not None
        (world.root / "log").unlink()
        with pytest.raises(StorageUnavailable):
            reader.query("orders", "a", begin_ms=behind_ms)
        result = reader.query("orders", "a", max_count=1000, allow_partial=True)
        assert "log" in [report.file for report in result.failed]
        storage.clear()
        world.clock.advance(11)
        world.check(reader.query)
        assert reader.query("orders", "a").freshness == ()


def test_answers_do_not_claim_log_records_read_before_the_storage_failed(make_world):
    world = make_world()
    world.settings["local_keep_s"] = 86400
    world.do("open 9 publish")
    storage = FaultStorage(world.storage)
    with IndexReader.open(root=world.root, storage_backend=storage, clock=world.clock, refresh_interval_s=10) as reader:
        storage.fail("*", times=None)
        world.clock.advance(11)
        (before,) = reader.query("orders", "a").freshness
        kept = (world.root / "log").read_bytes()
        for _ in range(2):
            world.clock.advance(60)
            world.publish(9)
        (world.root / "log").write_bytes(kept)  # as if another process has published
        storage.clear()
        storage.fail("get", nth=3, times=None)
        (after,) = reader.query("orders", "a").freshness
        assert after.not_asked is not None
        # the reader's log has a newer record than its files
        assert reader._views[0]._log.state.as_of_ms > before.as_of_ms == reader.log_state.as_of_ms
        assert (after.as_of_ms, after.positions) == (before.as_of_ms, before.positions)


@pytest.mark.parametrize("empty", [False, True], ids=["gone", "an empty folder in its place"])
def test_a_storage_that_is_not_mounted_is_not_taken_for_the_end_of_the_log(make_world, tmp_path, empty):
    folder = tmp_path / "store"
    world = make_world(LocalStorage(folder))
    world.do("open 9 publish 9 seal")
    folder.rename(tmp_path / "away")
    if empty:
        folder.mkdir()
    for _ in range(3):
        world.clock.advance(60)
        with pytest.raises(StorageUnavailable, match="mounted"):
            world.service.run_lifecycle()
        assert any("is it mounted" in problem for problem in world.service.health()["problems"])
    written = [info.name for info in LocalStorage(folder).list()]
    assert written == []
    world.do("3 flush")
    if folder.exists():
        shutil.rmtree(folder)
    (tmp_path / "away").rename(folder)
    world.heal()


@pytest.mark.parametrize("empty", [False, True], ids=["gone", "an empty folder in its place"])
def test_a_storage_that_is_not_mounted_is_not_taken_for_one_without_news(make_world, tmp_path, empty):
    folder = tmp_path / "store"
    world = make_world(LocalStorage(folder))
    world.settings["local_keep_s"] = 86400
    world.do("open 9 publish")
    kept = {"clock": world.clock, "refresh_interval_s": 10}
    with (
        IndexReader.open(root=world.root, **kept) as beside,
        IndexReader.open(storage=folder.as_uri(), **kept) as alone,
    ):
        folder.rename(tmp_path / "away")
        if empty:
            folder.mkdir()
        world.clock.advance(11)
        world.check(beside.query)
        world.service.seal()
        with pytest.raises(StorageUnavailable, match="mounted"):
            alone.query("orders", "a")
        (seen,) = beside.query("orders", "a").freshness
        assert "is it mounted?" in seen.not_asked
        if empty:
            folder.rmdir()
        (tmp_path / "away").rename(folder)
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
