"""The bounds of buffer and disk: a put over a bound is refused whole, `health` has the reason, and puts continue once
a flush or an upload has freed space. Disk space is taken in steps, before entries are written.
"""

import contextlib
import gc
import pickle
import re

import pytest

from tests.support.batches import batch
from tests.support.disk_faults import FaultDisk
from tests.support.hanging import beside, until
from tests.support.memory import traced_memory
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, IndexService
from tiered_index.errors import BackPressure, DiskFull, StorageUnavailable, TieredIndexError
from tiered_index.service import opening
from tiered_index.service.read.files import unsealed

T = 1_700_000_000_000
BUDGET = 60_000
STEP = 512
PAGE = 4096


def columns(first, count):
    return batch(count, topic="orders", key="a", offset=range(first, first + count))


@pytest.mark.parametrize("bound", [{"buffer_max_entries": 10}, {"buffer_max_bytes": 1700}])
def test_a_call_that_would_pass_the_buffers_bound_is_refused_whole(make_world, bound):
    world = make_world()
    service = world.open(**bound)
    for number in range(8):
        service.put("orders", 0, "a", number, 1, T, source="log", source_position=number)
    state = service.health()["buffered_entries"], service.health()["buffered_bytes"]
    assert service.health()["problems"] == []
    for call in (
        lambda: service.put("orders", 0, ["a", "b", "c"], 100, 1, T, source="log", source_position=100),
        lambda: service.put("new topic", 0, ["a", "b", "c"], 100, 1, T, topic_id=7),
        lambda: service.put_batch(columns(100, 100), source="log", source_position=200),
    ):
        with pytest.raises(BackPressure, match="write buffer") as refused:
            call()
        assert (refused.value.reason, type(refused.value)) == ("buffer", BackPressure)
        assert refused.value.number <= refused.value.bound
    assert (service.health()["buffered_entries"], service.health()["buffered_bytes"]) == state
    (problem,) = service.health()["problems"]
    assert problem.startswith("put: the write buffer holds 8 entries")
    service.put("orders", 0, "a", 8, 1, T)  # entries that still fit are accepted
    assert [item.offset for item in service.query("orders", "a", max_count=1000)] == list(range(8, -1, -1))
    assert not service.query("orders", "b")
    service.flush()
    assert service.health()["problems"] == []
    assert service.durable_position("log") == 7
    # an empty buffer accepts a call of any size
    assert service.put_batch(columns(100, 100), source="log", source_position=200) == 100
    service.flush()
    assert service.durable_position("log") == 200
    assert len(service.query("orders", "a", max_count=1000)) == 109
    service.put("other", 0, "a", 1, 1, T, topic_id=7)  # the refused call did not assign the id


def test_puts_between_failed_flushes_hold_the_memory_that_the_buffer_counts(open_index, offsets):
    """A chunk of the buffer that a flush closes early does not keep the space of a full one."""
    disk = FaultDisk()
    service = open_index(disk=disk)
    disk.fail("create", times=None)
    with traced_memory() as memory:
        for number in range(100):
            service.put("t", 0, "k", number, 1, T)
            with pytest.raises(TieredIndexError):
                service.flush()
        gc.collect()  # cycles hold errors that pytest has inspected
        held, _ = memory()
    assert service.health()["buffered_entries"] == 100
    assert held < 2**20  # a hundred full blocks would be 13 MiB
    disk.clear()
    service.flush()
    assert offsets(service) == list(range(100))


@pytest.mark.parametrize("settings", [{"local_keep_s": 0}, {}], ids=["none kept", "kept by default"])
def test_the_disks_bound_is_kept_and_uploads_make_room(make_world, settings):
    world = make_world()
    storage = FaultStorage(world.storage)
    world.settings |= {"items": 100}
    del world.settings["local_keep_s"]
    service = world.open(storage=storage, disk_max_bytes=BUDGET, buffer_max_entries=60, **settings)
    storage.fail("*", times=None)
    with pytest.raises(DiskFull, match=r"disk_max_bytes.*write buffer") as refused:
        for _ in range(400):
            world.put(5)
            with contextlib.suppress(DiskFull):
                service.flush()
    assert (refused.value.reason, refused.value.bound) == ("disk", BUDGET) and refused.value.number > BUDGET / 2
    assert any("disk_max_bytes" in problem for problem in service.health()["problems"])
    assert BUDGET / 2 < service.health()["local_bytes"] <= BUDGET
    with pytest.raises(StorageUnavailable):
        service.run_lifecycle()
    # known now: no upload can free space
    with pytest.raises(DiskFull, match="the storage fails: ") as refused:
        world.put(20)
    assert (refused.value.reason, refused.value.bound) == ("storage", BUDGET)
    assert vars(pickle.loads(pickle.dumps(refused.value))) == vars(refused.value)
    world.check()
    storage.clear()
    for _ in range(40):  # more than the bound allows
        for refusals in range(11):
            try:
                service.run_lifecycle()
                world.flush()
                break
            except BackPressure:
                assert refusals < 10, service.health()
        world.put(15)
    world.flush()
    assert service.health()["problems"] == []
    assert bool(service.health()["files"].get("uploaded")) == (not settings)  # only as many files as necessary retire
    assert service.health()["local_bytes"] <= BUDGET
    world.come_back()


def test_compactions_of_many_sealed_files_keep_the_disks_bound(open_index, monkeypatch):
    """Before, each unsealed file stayed beside its compacted form until the last one was compacted."""
    index = open_index(items=100, disk_max_bytes=BUDGET)
    with pytest.raises(DiskFull):
        for number in range(2_000):
            index.put("t", 0, f"k{number}", number, 1, T)
            if number % 50 == 0:
                index.flush()
    taken, life = [], index._lifecycle
    compact = life._compact
    monkeypatch.setattr(life, "_compact", lambda file: (compact(file), taken.append(life.local_bytes())))
    index.run_lifecycle()
    assert len(taken) > 3
    assert max(taken) <= BUDGET


def test_the_first_uploads_after_an_outage_make_room_for_puts(make_world):
    """Before, each file had to be uploaded before the first local copy was deleted."""
    world = make_world()
    storage = FaultStorage(world.storage)
    world.settings |= {"items": 100}
    service = world.open(storage=storage, disk_max_bytes=BUDGET, buffer_max_entries=60)
    told = []
    service._lifecycle.made_room = lambda: told.append(service.health()["local_bytes"])
    storage.fail("*", times=None)
    with pytest.raises(DiskFull):
        for _ in range(400):
            world.put(5)
            with contextlib.suppress(DiskFull):
                service.flush()
    storage.clear()
    hang = storage.hang("put", nth=3, name_prefix="data/")
    round_ = beside(service.run_lifecycle)
    try:
        assert hang.entered.wait(60)
        # the flusher is woken after each upload
        assert len(told) == 2 and told[1] < told[0] < BUDGET
        world.flush()
        world.put(5)
    finally:
        hang.release.set()
    assert round_().uploaded > 3
    world.come_back()


def test_health_names_a_request_that_hangs(open_index, storage, monkeypatch):
    monkeypatch.setattr(opening, "_LATE_S", 0.05)
    faulty = FaultStorage(storage)
    index = open_index(storage_backend=faulty)
    index.put("t", 0, "k", 1, 1, T)
    index.seal()
    assert index.health()["problems"] == []
    hang = faulty.hang("put", name_prefix="data/")
    round_ = beside(index.run_lifecycle)
    try:
        until(lambda: index.health()["problems"])
        (problem,) = index.health()["problems"]
        assert re.fullmatch(r"storage: put of 'data/.*' has been under way for \d+ s", problem)
    finally:
        hang.release.set()
    assert round_().uploaded == 1 and index.health()["problems"] == []


def test_health_reports_an_unexpected_error_of_a_worker(open_index):
    disk = FaultDisk()
    service = open_index(disk=disk, background=True, flush_interval_s=0.005)
    disk.fail("pwrite", times=None, error=lambda _: KeyError("a defect"))
    service.put("t", 0, "k", 1, 1, T)
    until(lambda: any("'a defect'" in problem for problem in service.health()["problems"]))
    disk.clear()
    until(lambda: service.health()["problems"] == [])


def test_an_index_of_one_entry_is_small(tmp_path):
    with IndexService.open(root=tmp_path / "root", storage=f"file://{tmp_path}/storage", background=False) as index:
        index.put("t", 0, "k", 1, 1, T)
        index.flush()
        assert sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*") if path.is_file()) <= 20 << 20
        assert index.health()["local_bytes"] <= 20 << 20
        (file,) = index.files()
        assert file.size_bytes <= 10 << 20
        # programs that know the format find the size that the file states
        assert file.path.stat().st_size == file.layout.unsealed_size > 100 << 20
    with IndexReader.open(root=tmp_path / "root") as reader:
        assert len(reader.query("t", "k")) == 1
        assert reader.files()[0].size_bytes <= 10 << 20


@pytest.fixture
def small_steps(monkeypatch):
    monkeypatch.setattr(unsealed, "STEP_BYTES", STEP)


def test_space_is_taken_in_steps_as_the_file_fills_and_after_a_restart(open_index, offsets, small_steps):
    disk = FaultDisk()
    index = open_index(disk=disk, items=200)
    for number in range(60):
        index.put("t", 0, "k", number, 1, T)
        index.flush()
        (file,) = index.files()
        # written bytes are within the allocated space, which is at most one step ahead
        written = file.layout.entry_position(file.count + 1)
        taken = file.path.stat().st_blocks * 512  # in pages of the file system
        assert written <= taken <= written + STEP + PAGE
    index.abandon()
    disk.lose_unsynced()
    index = open_index(items=200)
    assert offsets(index) == list(range(60))
    # several steps at once, and several files
    index.put_batch(batch(700, offset=range(60, 760)))
    index.seal()
    for _ in range(2):
        assert offsets(index) == list(range(760))
        index.run_lifecycle()


def test_a_file_that_alone_fills_the_bound_of_the_disk_is_uploaded(open_index, offsets, small_steps):
    bound = 20 * STEP
    index = open_index(disk_max_bytes=bound, items=4_000)
    assert index.config.geometry().unsealed_size > 10 * bound  # the bound counts what is taken
    refused = 0
    for number in range(600):
        index.put("t", 0, "k", number, 1, T)
        assert index.health()["local_bytes"] <= bound
        try:
            index.flush()
        except DiskFull as error:
            assert error.bound == bound
            refused += 1
            index.run_lifecycle()
    index.run_lifecycle()
    index.flush()
    assert refused and index.log_state.objects and index.health()["problems"] == []
    assert offsets(index) == list(range(600))
