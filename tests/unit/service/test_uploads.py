"""A published file is complete and equals its description in the log. A failed upload leaves nothing behind."""

import asyncio
import mmap
import time

import pytest

from tests.support.disk_faults import FaultDisk
from tests.support.filled import merge_all
from tests.support.hanging import until
from tests.support.later import Later
from tests.support.log_records import open_log
from tests.support.measuring import measured
from tests.support.rounds import compact_only, upload
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, IndexService
from tiered_index.base.retention import Retention
from tiered_index.errors import CorruptFile, StorageBehind, StorageUnavailable
from tiered_index.format.names import log_name
from tiered_index.service.jobs.orphans import find_orphans
from tiered_index.service.life.rounds import Rounds
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.session import writer_of
from tiered_index.service.read.files.unsealed import UnsealedFile

T = 1_700_000_000_000
ITEMS_POSITION = 28 + 8 * 7


def objects(storage):
    return [info.name for info in storage.list("data/")]


def test_damaged_items_are_not_published(open_index, faulty, tmp_path):
    index = open_index("root", storage_backend=faulty)
    index.put("t", 0, "k", 1, 1, T)
    compact_only(index, faulty)
    (path,) = (tmp_path / "root" / "compacted").glob("*.index")
    with path.open("r+b") as handle, mmap.mmap(handle.fileno(), 0) as data:
        data[ITEMS_POSITION + 9] ^= 1
    with pytest.raises(CorruptFile, match=path.name):
        index.run_lifecycle()
    assert not objects(faulty)
    assert not index.log_state.objects


def test_a_root_knows_the_record_whose_positions_it_took_over_without_a_claim(open_index, storage, faulty):
    """Otherwise it would publish them again after a restore, without the entries that the storage has lost."""

    def publish_one(index, position):
        index.put("t", 0, "k", position, 1, T, source="s", source_position=position)
        upload(index)

    first = open_index("first")
    publish_one(first, 1)
    first.close()
    second = open_index("second")
    backup = {info.name: storage.get(info.name) for info in storage.list()}
    publish_one(second, 2)
    second.close()
    faulty.fail("list", name_prefix="lease/", times=None)
    unclaimed = open_index("first", storage_backend=faulty)
    assert not unclaimed._session.claimed
    assert unclaimed.durable_position("s") == 2
    unclaimed.abandon()
    for info in list(storage.list()):
        storage.delete_many([info.name])
    for name, data in backup.items():
        storage.put(name, data)
    with pytest.raises(StorageBehind):
        open_index("first")


def test_a_damaged_file_does_not_stop_the_uploads_of_later_files(open_index, faulty, clock, tmp_path):
    """It waits, and no record states a position that would leave its entries out."""
    index = open_index("root", storage_backend=faulty)
    faulty.fail("put", name_prefix="data/", times=None)
    damaged = None
    for number in range(3):
        index.put("t", 0, "k", number, 1, T + number, source="s", source_position=number + 1)
        index.seal()
        with pytest.raises(StorageUnavailable):
            index.run_lifecycle()
        damaged = damaged or next((tmp_path / "root" / "compacted").glob("*.index"))
    faulty.clear()
    with damaged.open("r+b") as handle, mmap.mmap(handle.fileno(), 0) as data:
        data[ITEMS_POSITION + 9] ^= 1
    for _ in range(2):
        with pytest.raises(CorruptFile, match=damaged.name):
            index.run_lifecycle()
    state = index.log_state
    assert (len(state.objects), dict(state.positions), damaged.exists()) == (2, {}, True)
    # of merged files only the newest local copy stays: the others have no position that it lacks
    clock.advance(86_400)
    assert merge_all(faulty, clock).sources == 2
    index._lifecycle.refresh()
    assert [file.place for file in index.files()].count("uploaded") == 1
    index._catalog.reclaim()
    assert len(list((tmp_path / "root" / "uploaded").glob("*.index"))) == 1
    index.close()
    with open_index("root", storage_backend=faulty) as index:
        assert index.durable_positions() == {"s": 3}


def test_a_writer_deletes_what_a_crash_left_an_hour_after_its_opening(open_index, faulty, clock):
    """There is no rule of retention."""
    index = open_index("root", storage_backend=faulty)
    index.put("t", 0, "k", 1, 1, T)
    index.seal()
    faulty.fail("put", name_prefix="data/", when="after")
    faulty.fail("delete_many", name_prefix="data/")
    with pytest.raises(StorageUnavailable):
        index.run_lifecycle()
    (left,) = objects(faulty)
    index.abandon()
    faulty.clear()
    segment = "segments/s/00000000000000000000/00000000000000000001-0123456789abcdef.log"
    faulty.put(segment, b"never named")
    index = open_index("root", storage_backend=Later(faulty, 2 * 86_400))
    index.run_lifecycle()
    clock.advance(3599)
    index.run_lifecycle()
    assert {left, segment} <= {info.name for info in faulty.list()}
    clock.advance(1)
    index.run_lifecycle()
    assert not {left, segment} & {info.name for info in faulty.list()}
    assert [item.offset for item in index.query("t", "k")] == [1]


@pytest.mark.parametrize("meanwhile", ["repair", "merge"])
def test_a_restart_leaves_an_object_that_a_repair_has_sent_or_a_merge_has_just_removed(
    open_index, faulty, storage, clock, meanwhile
):
    """The record exists, but the file was not moved. An export may still read the removed object."""
    disk = FaultDisk()
    index = open_index("root", storage_backend=faulty, disk=disk)
    index.put("t", 0, "k", 1, 1, T)
    compact_only(index, faulty)
    disk.fail("rename", times=None)
    with pytest.raises(StorageUnavailable, match="moving"):
        index.run_lifecycle()
    (name,) = index.log_state.objects
    assert [handle.place for handle in index.files()] == ["compacted"]
    index.abandon()
    left = [name]
    if meanwhile == "repair":
        left.append(name.rpartition("/")[0] + "/" + "0" * 16 + ".index")
        storage.put(left[1], storage.get(name))
    else:
        clock.advance(3 * 86_400)
        assert merge_all(storage, clock).sources == 1
    index = open_index("root")
    assert {*objects(storage)} >= {*left}
    index.run_lifecycle()
    assert {*objects(storage)} >= {*left}
    assert [handle.place for handle in index.files()] == ["uploaded" if meanwhile == "repair" else "storage"]
    assert [item.offset for item in index.query("t", "k")] == [1]
    if meanwhile == "merge":
        clock.advance(2 * 86_400)
        assert [info.name for info in find_orphans(storage, open_log(storage, clock)).objects] == [name]


def test_a_local_copy_stays_while_its_object_is_not_whole(open_index, storage, clock):
    index = open_index(local_keep_s=100)
    index.put("t", 0, "k", 1, 1, T)
    upload(index)
    (name,) = objects(storage)
    whole = storage.get(name)
    storage.put(name, whole[:-1])
    clock.advance(101)
    for _ in range(2):
        with pytest.raises(CorruptFile, match="kept"):
            index.run_lifecycle()
        assert [handle.place for handle in index.files()] == ["uploaded"]
        assert [item.offset for item in index.query("t", "k")] == [1]
    storage.put(name, whole)
    index.run_lifecycle()
    assert [handle.place for handle in index.files()] == ["storage"]
    assert [item.offset for item in index.query("t", "k")] == [1]


def test_a_file_is_not_taken_for_uploaded_before_the_log_names_it(open_index, faulty, tmp_path):
    """A restart drops from uploaded/ each file that the log does not name."""
    index = open_index("root", storage_backend=faulty)
    index.put("t", 0, "k", 1, 1, T)
    compact_only(index, faulty)  # only the compacted form remains
    assert not list((tmp_path / "root" / "unsealed").glob("[0-9]*.index"))
    faulty.fail("put_if_absent", name_prefix="log/")
    with pytest.raises(StorageUnavailable):
        index.run_lifecycle()
    index.abandon()
    index = open_index("root", storage_backend=faulty)
    assert [item.offset for item in index.query("t", "k")] == [1]
    index.run_lifecycle()
    assert {*index.log_state.objects} <= {*objects(faulty)}
    assert [handle.place for handle in index.files()] == ["uploaded"]


@pytest.mark.parametrize(
    ("seal_after_s", "checkpoint_every", "requests", "cost_usd"),
    [(10_800, None, 9, 0.000023), (0.35, None, 9, 0.0000186), (0.35, 32, 8, 0.0000138)],
)
def test_the_cost_of_a_published_file(open_index, storage, seal_after_s, checkpoint_every, requests, cost_usd):
    """docs/using.md states this price of a small `seal_after_s`."""
    index = open_index("priced", seal_after_s=seal_after_s, checkpoint_every=checkpoint_every)
    usage = []
    for number in range(17):
        with measured() as used:
            index.put("t", 0, "k", number, 1, T + number * 1000)
            upload(index)
        usage.append(used)
    # the first file also claims the index
    assert sum(used.requests for used in usage[1:]) <= 16 * requests
    assert sum(used.cost_usd for used in usage[1:]) <= 16 * cost_usd


def test_a_writer_of_files_of_less_than_a_second_reads_the_records_of_others(open_index, storage, clock):
    """The writer does not list the log for each record, and yet fills no hole of it."""
    index = open_index("often", seal_after_s=0.35)
    put_and_publish(index, 1)
    log = open_log(storage, clock)
    for others in (0, 1, 3):
        for number in range(others):
            log.append_positions(index._session.epoch, {f"source {number}": log.state.number})
        put_and_publish(index, 2 + others)
        assert len(index.log_state.positions) == others
        assert StorageLog(storage, clock).open() == log.refresh() == index.log_state
    assert len(index.log_state.objects) == 4
    number = log.state.number
    for source in ("one", "other"):
        log.append_positions(index._session.epoch, {source: 1})
    storage.delete_many([log_name(number + 1)])
    with pytest.raises(CorruptFile, match="hole"):
        put_and_publish(index, 9)


def put_and_publish(index, number):
    index.put("t", 0, "k", number, 1, T + number * 1000)
    upload(index)


@pytest.mark.parametrize("later", ["compacted", "uploaded", "storage"])
def test_an_unsealed_form_that_came_back_is_dropped(open_index, storage, tmp_path, later):
    """The deletion did not reach the disk, and the file's state has changed since."""
    faulty = FaultStorage(storage)
    index = open_index("root", storage_backend=faulty, local_keep_s=0 if later == "storage" else 1000)
    index.put("t", 0, "k", 1, 1, T)
    index.seal()
    unsealed = tmp_path / "root" / "unsealed"
    unsealed_files = {path.name: path.read_bytes() for path in unsealed.iterdir() if path.name[0].isdigit()}
    if later == "compacted":
        compact_only(index, faulty)
    else:
        index.run_lifecycle()
        index.run_lifecycle()
    index.abandon()
    assert len(unsealed_files) == 2
    for name, data in unsealed_files.items():
        (unsealed / name).write_bytes(data)
    index = open_index("root", storage_backend=faulty)
    assert [handle.place for handle in index.files()] == [later]
    assert not [path.name for path in unsealed.iterdir() if path.name in unsealed_files]
    assert [item.offset for item in index.query("t", "k")] == [1]


@pytest.fixture
def slow(faulty, clock):
    """Let calls of the storage take 25 s each, or steps of a disk 1 s, and return the lease's states after them."""

    def make(operation, name_prefix, disk):
        states = []

        def pass_by(_=None):
            clock.advance(1 if operation == "disk" else 25)
            if (writer := writer_of(faulty.inner, clock)) is not None:
                states.append(writer.state)

        if operation == "disk":
            disk.watch = pass_by
        else:
            faulty.meanwhile(operation, pass_by, times=None, name_prefix=name_prefix)
        return states

    return make


def put_files(index, count):
    for number in range(count):
        index.put("t", 0, "k", number, 1, T + 1000 * number)
        index.seal()


@pytest.mark.parametrize(
    ("operation", "prefix", "settings"),
    [
        ("put", "data/", {}),
        # one large upload
        ("write", "", {"preset": "rocketmq", "slots": 4_000_000}),
        # work on local files
        ("disk", "", {}),
        # a sweep
        *(("list", prefix, {"retention": Retention(age_s=3650 * 86_400)}) for prefix in ("epoch/", "segments/")),
    ],
)
def test_steps_that_take_longer_than_the_lease_renew_it(open_index, faulty, slow, operation, prefix, settings):
    disk = FaultDisk()
    settings = {"disk": disk, "storage_backend": faulty, "lease_ttl_s": 60, "refresh_interval_s": 0, **settings}
    index = open_index("root", **settings)
    put_files(index, {"write": 1, "disk": 20}.get(operation, 5))
    states = slow(operation, prefix, disk)
    index.run_lifecycle()
    assert states and set(states) == {"alive"}
    assert len(states) >= {"list": 1, "disk": 60}.get(operation, 3)


@pytest.mark.parametrize("fails", [False, True])
def test_an_opening_that_takes_longer_than_the_lease_renews_it(open_index, faulty, storage, clock, monkeypatch, fails):
    states = []
    index = open_index("root", storage_backend=faulty, lease_ttl_s=60)
    put_files(index, 4)
    index.abandon()
    recover = UnsealedFile.recover

    def slow(*arguments):
        clock.advance(25)
        states.append(writer_of(storage, clock).state)
        if fails:
            faulty.fail("put", name_prefix="lease/")
        return recover(*arguments)

    monkeypatch.setattr(UnsealedFile, "recover", slow)
    index = open_index("root", storage_backend=faulty, lease_ttl_s=60)
    assert states == ["alive"] * (2 if fails else 4) + ["gone"] * (2 if fails else 0)
    assert [item.offset for item in index.query("t", "k")] == [3, 2, 1, 0]


def test_a_file_that_begins_without_the_storage_knows_the_log_that_its_root_has_seen(open_index, faulty):
    index = open_index("root", storage_backend=faulty)
    index.put("t", 0, "k", 1, 1, T)
    upload(index)
    number = index.log_state.number
    index.close()
    faulty.fail("*", times=None)
    index = open_index("root", storage_backend=faulty)
    index.put("t", 0, "k", 2, 1, T + 1000)
    index.flush()
    (begun,) = [file for file in index.files() if file.place == "unsealed"]
    assert begun.journal.log_number == number
    faulty.clear()


def test_a_reader_that_looks_often_asks_for_the_next_record(index, storage, clock):
    put_and_publish(index, 1)
    counted = FaultStorage(storage)
    with IndexReader.open(storage_backend=counted, clock=clock, refresh_interval_s=0.2) as reader:
        opened = counted.calls("list")
        for number in range(2, 5):
            put_and_publish(index, number)
            clock.advance(0.25)
            assert len(reader.query("t", "k")) == number
        assert counted.calls("list") == opened
        clock.advance(30)
        reader.query("t", "k")
        # a listing notices another log, and holes
        assert counted.calls("list") == opened + 1


def test_a_background_round_that_fails_in_any_way_is_repeated_after_longer_and_longer_pauses():
    begun_s = []

    def work():
        begun_s.append(time.monotonic())
        raise asyncio.CancelledError

    worker = Rounds("test", work, 0.01)
    worker.start()
    until(lambda: len(begun_s) > 6)
    worker.stop()
    assert isinstance(worker.error, asyncio.CancelledError) and worker.failed_rounds == len(begun_s)
    # pauses double: the last one is of 0.32 s at least
    assert begun_s[6] - begun_s[5] >= 0.3


def test_errors_of_one_kind_are_logged_once_and_shortly(caplog):
    errors = [StorageUnavailable(f"s3://b: no answer after {number}.2s " + "x" * 300) for number in range(4)]
    errors += [StorageUnavailable("s3://b: refused")]
    failed = []

    def work():
        failed.append(errors[min(len(failed), 4)])
        raise failed[-1]

    worker = Rounds("test", work, 0.001)
    worker.start()
    until(lambda: len(failed) > 5)
    worker.stop()
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("test: ")]
    assert len(lines) == 2 and lines[1] == "test: s3://b: refused"
    assert lines[0].startswith("test: s3://b: no answer after 0.2s xxx") and len(lines[0]) <= 206


def test_a_worker_that_failed_is_soon_back_when_a_request_succeeds(tmp_path, storage):
    faulty = FaultStorage(storage)
    # the worker's own next round is an hour away
    settings = {"background": True, "lifecycle_interval_s": 3600, "flush_interval_s": 3600}
    with IndexService.open(root=tmp_path / "r", storage_backend=faulty, max_late_s=10**10, **settings) as index:
        index.put("t", 0, "k", 1, 1, T)
        index.seal()
        faulty.fail("put", times=1, name_prefix="data/")
        index._rounds.error = StorageUnavailable("as of the worker's last round")
        with pytest.raises(StorageUnavailable):
            # requests after the failed one succeed
            index.run_lifecycle()
        until(lambda: index.log_state.objects)


def test_an_entry_is_published_by_a_file_of_less_than_a_second(tmp_path, storage):
    settings = {"slots": 7, "items": 30, "seal_after_s": 0.05, "max_late_s": 10**10}
    with IndexService.open(root=tmp_path / "fresh", storage_backend=storage, **settings) as index:
        index.put("t", 0, "k", 1, 1, T)
        until(lambda: index.log_state.objects)
        with IndexReader.open(storage_backend=storage) as reader:
            assert len(reader.query("t", "k")) == 1
