"""A target has no index or a complete copy, whatever fails and whatever changes at the source.

Any host can bring a copy up to date, round by round. A round changes no other index.
"""

from dataclasses import fields

import pytest
from msgspec import structs

from tests.support.changes import replace
from tests.support.copies import SEGMENT, archive, bytes_of, check_target, copier, fill, merge_first_day, same
from tests.support.damage import checked, flip_object
from tests.support.disk_faults import FaultDisk, SimulatedCrash
from tests.support.log_records import GENESIS, segments_of
from tests.support.merging import BASE_MS, DAY_MS, DAY_S, HOUR_S, small_shards
from tests.support.storage_faults import FaultStorage, Watched
from tiered_index.base.clock import ManualClock
from tiered_index.base.retention import Horizon, Retention
from tiered_index.errors import CorruptFile, InvalidArgument, NotAnIndex, StorageUnavailable
from tiered_index.format import verify
from tiered_index.format.names import linked_store
from tiered_index.format.segments.ranges import encode_ranges, ranges_crc32
from tiered_index.format.topic_documents import Revision, TopicDocument
from tiered_index.service.jobs import copying
from tiered_index.service.jobs.copying import Copier, CopyStopped, difference
from tiered_index.service.jobs.expiry import record_expiry
from tiered_index.service.jobs.lost import give_up
from tiered_index.service.jobs.orphans import delete_orphans, find_orphans
from tiered_index.service.jobs.repair import Repairs
from tiered_index.service.jobs.segments.catalogs import send_catalog
from tiered_index.service.log.expired import Expired
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.range_objects import whole_record
from tiered_index.service.log.records import ArchivedSegment, LogRecord, LostObject, StoredRanges, StreamBatch
from tiered_index.service.log.replaced import RangeTable, Replaced, ReplacedRanges
from tiered_index.service.log.state import LogState
from tiered_index.storage.base import WrapperStorage
from tiered_index.storage.local import LocalStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import open_storage


@pytest.fixture
def small_windows(monkeypatch):
    """Copy objects in several parts."""
    for module in (copying, verify):
        monkeypatch.setattr(module, "WINDOW_BYTES", 1 << 11)


@pytest.fixture
def inner(life):
    """An empty storage with the clock of `life`."""
    return MemoryStorage(clock=life.clock)


@pytest.mark.parametrize("backend", ["memory", "file", "sqlite", "s3"])
def test_from_and_to_each_backend(life, tmp_path, small_windows, backend, request, monkeypatch):
    fill(life)
    merge_first_day(life)
    archive(life, data=SEGMENT * 1100 if backend == "s3" else SEGMENT)
    if backend == "s3":
        server = request.getfixturevalue("s3_environment")
        uri = f"s3://{server.new_bucket()}/copied?endpoint_url={server.endpoint_url}"
        for module in (copying, verify):
            # the segment has several parts, and the last one is sent first
            monkeypatch.setattr(module, "WINDOW_BYTES", 5 << 20)
    else:
        path = {"memory": "copied", "file": f"{tmp_path}/b", "sqlite": f"{tmp_path}/b.db"}[backend]
        uri = f"{backend}://{path}"
    with open_storage(uri) as target, MemoryStorage(clock=life.clock) as back:
        report = copier(life, target, threads=3).run_once()
        assert (report.sent, report.log_number, report.kept) == (len(life.state.objects) + 1, 1, 0)
        assert same(check_target(life, target), life.state)
        again = Copier(target, back, life.clock)
        again.open()
        again.run_once()
        assert same(check_target(life, back), life.state)
        for name in (*life.state.objects, *(segment.name for segment in segments_of(life.state))):
            assert back.get(name) == life.storage.get(name)


SEGMENT_OF_LOG = ArchivedSegment(f"segments/b/{0:020d}/{1:020d}-{1:016x}.log", "b", 0, 10, 1, 1, 62, 0)


def test_every_member_of_the_state_is_copied():
    """This includes members that later versions add: the record must lead to exactly the same state."""
    table = LostObject("data/a/1.index", "a", 5, 6, 7)
    listed, _ = send_catalog(StorageLog(MemoryStorage(), ManualClock(5)), [SEGMENT_OF_LOG])
    listed = structs.replace(listed, generation=0)
    store, shelf = linked_store("t", 0), MemoryStorage()
    in_object, retired = RangeTable.of([(0, 4, 1, 5, 6)]), RangeTable.of([(0, 4, 1, 5, 6), (7, 9, 2, 5, 6)])
    shelf.put("ranges/a.ranges", data := encode_ranges(in_object.rows))
    ranges = StoredRanges("ranges/a.ranges", store, 1, ranges_crc32(in_object.rows), len(data), 8)
    replaced = Replaced({store: ReplacedRanges(retired)}, 2)
    full = replace(
        LogState(),
        number=9,
        range_objects={ranges.name: ranges},
        range_tables={store: in_object},
        catalogs={listed.name: listed},
        retired={"b": {0: 1}},
        epoch=4,
        genesis=GENESIS,
        positions={"s": 5},
        documents={"t": Revision(2, TopicDocument.of("kafka", 1, {"keys": ["order"]}))},
        batches={"q": StreamBatch(3, 10, 99)},
        put_before_ms=1_700_000_000_000,
        expiry_ms=1_700_000_000_001,
        lost={table.name: table},
        expired=Expired((Horizon(1000, (("a*", 500),)),), {"broker": 10}, replaced=replaced),
        digest="0" * 32,
    )
    record = difference(LogState(), full, "copy:x")
    read = LogRecord.decode(record.encode(), "r")
    assert [*read.expired.replaced.retired(store)] == [(7, 9)]
    assert whole_record(shelf, read) == record
    reached = LogState().apply(record, "r")
    assert same(reached, full)
    assert reached.positions == {"s": 5, "copy:x": 9}
    filled = {f.name for f in fields(LogState) if getattr(full, f.name) != getattr(LogState(), f.name)}
    left_out = {"objects", "roots", "digest", "chain", "steps"}
    assert {f.name for f in fields(LogState)} - filled <= left_out, "give the new member a value in `full`"
    with pytest.raises(CorruptFile, match="no record leads"):
        difference(replace(reached, positions={"s": 6}), full, "copy:x")


@pytest.mark.parametrize("round_", ["first", "later"])
def test_a_crash_at_any_step_leaves_no_target_or_a_complete_one(life, inner, small_windows, round_):
    fill(life, 1)
    archive(life)
    target = Watched(inner)
    copy_job = copier(life, target)
    if round_ == "later":
        copy_job.run_once()
        merge_first_day(life)
        fill(life, 1, first=1)
    before = bytes_of(life.storage)
    old = StorageLog(inner, life.clock)
    old_number = old.open().number if round_ == "later" else 0
    looked = set()

    def look(_):
        log = StorageLog(inner, life.clock)
        try:
            state = log.open()
        except NotAnIndex:
            assert not old_number
            state = LogState()
        looked.add(state.number)
        assert {
            name: len(inner.get(name))
            for name in (*state.objects, *(segment.name for segment in segments_of(state, inner)))
        } == {
            **{name: stored.size_bytes for name, stored in state.objects.items()},
            **{segment.name: segment.object_bytes for segment in segments_of(state, inner)},
        }

    target.watch = look
    copy_job.run_once()
    look("end")
    assert looked == {old_number, old_number + 1}
    check_target(life, inner)
    assert bytes_of(life.storage) == before


def test_present_objects_are_not_sent_again_unless_they_differ(life, inner):
    fill(life)
    target = FaultStorage(inner)
    copy_job = copier(life, target)
    target.fail("put_if_absent", nth=1, times=None)
    with pytest.raises(StorageUnavailable):
        copy_job.run_once()
    target.clear()
    names = sorted(life.state.objects)
    assert [info.name for info in inner.list("data/")] == names
    # one has the same size and is damaged, one is cut, and one has the same size and only zeroes
    flip_object(inner, names[0], len(inner.get(names[0])) // 2)
    inner.put(names[1], inner.get(names[1])[:-1])
    inner.put(names[2], bytes(len(inner.get(names[2]))))
    puts = target.calls("put")
    report = copier(life, target).run_once()
    assert (report.sent, report.kept) == (3, len(names) - 3)
    # the probe, before the log is created, puts one object
    assert target.calls("put") - puts == 3 + 1 + 1
    check_target(life, inner)
    assert copier(life, target).run_once().sent == 0


def test_an_object_that_is_merged_while_it_is_copied(life, inner):
    fill(life)

    def overtake():
        life.later()
        life.merge(DAY_S)
        life.later()
        delete_orphans(life.storage, find_orphans(life.storage, life.log()))

    source = FaultStorage(life.storage)
    source.meanwhile("get_range", overtake)
    report = copier(life, inner, source).run_once()
    assert report.source_number == life.state.number and len(life.state.tables) == 2
    assert same(check_target(life, inner), life.state)


@pytest.mark.parametrize("what", ["lost", "damaged"])
def test_nothing_damaged_is_copied_and_the_name_is_told(life, what):
    fill(life)
    target, name = MemoryStorage(clock=life.clock), sorted(life.state.objects)[1]
    if what == "lost":
        life.storage.delete_many([name])
    else:
        flip_object(life.storage, name, 100)
    with pytest.raises(CorruptFile) as caught:
        copier(life, target).run_once()
    assert caught.value.file == name
    with pytest.raises(NotAnIndex):
        StorageLog(target, life.clock).open()
    if what == "lost":
        give_up(life.storage, life.log(), [name])
        copier(life, target).run_once()
        assert same(StorageLog(target, life.clock).open(), life.state)


@pytest.mark.parametrize("wrong", [{1}, {3}, {1, 3}], ids=["once", "as it is sent", "unless it is checked"])
def test_what_is_sent_is_what_was_checked(life, monkeypatch, wrong):
    """The last window is read for the trailer, for the end of the entries, whose check comes only then, and to send."""
    life.put([(BASE_MS + number * 1000, f"k{number % 50}") for number in range(2000)])
    life.publish()
    ((name, stored),) = life.state.objects.items()
    window = stored.trailer_position - 100
    assert window < stored.size_bytes < 2 * window
    for module in (copying, verify):
        monkeypatch.setattr(module, "WINDOW_BYTES", window)

    class Flipping(WrapperStorage):
        done = 0

        def get_range(self, name, start, length):
            data = super().get_range(name, start, length)
            if start == window:
                self.done += 1
            return bytes([data[0] ^ 1]) + data[1:] if start == window and self.done in wrong else data

    source, target = Flipping(life.storage), MemoryStorage(clock=life.clock)
    if len(wrong) == 1:
        copier(life, target, source).run_once()
        assert target.get(name) == life.storage.get(name)
    else:
        with pytest.raises(CorruptFile, match="two reads"):
            copier(life, target, source).run_once()
        assert not bytes_of(target).keys() & {name}
    assert source.done > 2


def test_an_object_that_a_killed_copier_left_outlives_a_power_cut(life, tmp_path):
    """The copier died after an object had its name, and before the sync of its folder."""
    fill(life, 1)
    disk = FaultDisk()
    copy_job = copier(life, LocalStorage(tmp_path / "target", disk=disk))
    disk.crash("rename", after=True)
    with pytest.raises(SimulatedCrash):
        copy_job.run_once()
    disk.revive()
    assert copier(life, LocalStorage(tmp_path / "target", disk=disk)).run_once().kept == 1
    disk.lose_unsynced()
    check_target(life, LocalStorage(tmp_path / "target"))


@pytest.mark.parametrize("by", ["a writer", "a writer during a round", "a job"])
def test_a_target_that_was_written_to_is_let_alone(life, inner, by):
    """The first record at the log's end wins. The copier then has lost permanently, and sends nothing more."""
    fill(life)
    target = Watched(inner)
    copy_job = copier(life, target)
    copy_job.run_once()
    fill(life, 1, first=2)

    def take_over(_=None):
        target.watch = None
        life.open("another", storage_backend=inner).close()

    if by == "a job":
        record_expiry(StorageLog(inner, life.clock), Retention(age_s=3600), BASE_MS + DAY_MS)
    elif by == "a writer":
        take_over()
    else:
        target.watch = take_over
    refused = pytest.raises(InvalidArgument, match="written to since it was copied")
    before = bytes_of(inner)
    for _ in range(2):
        with refused:
            copy_job.run_once()
    assert bytes_of(inner) == before or by == "a writer during a round"
    again = Copier(life.storage, target, life.clock)
    for act in (copy_job.open, again.open, again.run_once):
        with refused:
            act()
    assert StorageLog(inner, life.clock).open().epoch == (by != "a job")
    assert {name: data for name, data in bytes_of(inner).items() if name in before} == before


def test_another_index_or_a_restored_source_is_not_the_one_that_was_copied(life, merging, inner):
    fill(life, 1)
    other, early = merging(), MemoryStorage(clock=life.clock)
    other.put([(BASE_MS, "k")])
    other.publish()
    before = bytes_of(other.storage)
    with pytest.raises(InvalidArgument, match="not a copy"):
        copier(life, other.storage)
    assert bytes_of(other.storage) == before
    for name, data in bytes_of(life.storage).items():
        early.put(name, data)
    fill(life, 1, first=1)
    copier(life, inner).run_once()
    with pytest.raises(InvalidArgument, match="not the storage that was copied"):
        copier(life, inner, early)


def test_the_sources_root_does_not_write_to_the_copy_and_a_new_one_continues(life, inner):
    fill(life)
    positions = life.state.positions
    assert positions["s"] > 0
    copier(life, inner).run_once()
    before = bytes_of(inner)
    life.index.close()
    with pytest.raises(NotAnIndex, match="holds index"):
        life.open("root", storage_backend=inner)
    assert bytes_of(inner) == before
    writer = life.open("promoted", storage_backend=inner)
    assert writer.durable_position("s") == positions["s"]
    life.put([(BASE_MS + 5 * DAY_MS, "late")], into=writer, source="s", source_position=10**6)
    life.publish(writer)
    assert check_target(life, inner).positions["s"] == 10**6


def test_an_object_that_a_sweep_of_the_target_may_delete_is_sent_again(life, inner):
    fill(life, 1)
    target = FaultStorage(inner)
    copy_job = copier(life, target)
    copy_job.run_once()
    fill(life, 1, first=1)
    target.fail("put_if_absent", nth=1)
    with pytest.raises(StorageUnavailable):
        copy_job.run_once()
    life.clock.advance(23.5 * HOUR_S)
    report = copy_job.run_once()
    assert report.sent == 2
    life.clock.advance(HOUR_S)
    copy_job.sweep(DAY_S)
    check_target(life, inner)


def test_a_repaired_shard_replaces_its_copy(life, inner):
    """A copy's record may replace a shard that the source has repaired, but may not change a table otherwise."""
    fill(life)
    with small_shards():
        merge_first_day(life)
    copy_job = copier(life, inner)
    copy_job.run_once()
    first, second, *_ = (stored for stored in life.state.objects.values() if stored.shard is not None)
    flip_object(life.storage, first.name, first.trailer_position + 3)
    report = checked(life.storage)
    (done,) = Repairs(life.storage, life.log(), standby=inner).run(report, yes=True)
    assert done.object == first.name
    copy_job.run_once()
    assert done.replaced_by in check_target(life, inner).objects
    log = StorageLog(inner, life.clock)
    log.open()
    # the shard of before with other entries instead of the repaired one, and one shard less
    shorter = replace(first, count=first.count - 1)
    log.append("a copy", None, lambda _: LogRecord(0, "copy", 0, "", 0, (shorter,), (done.replaced_by, second.name)))
    log.append("a copy", None, lambda _: LogRecord(0, "copy", 0, "", 0, (second,)))
    report = checked(inner)
    of_log = [finding for finding in report.findings if finding.file.startswith("log/")]
    parts, problems = zip(*((finding.part, finding.problem) for finding in of_log), strict=True)
    assert parts == ("repair", "table", "table")
    entries = f"{first.count:,} entries by {first.count - 1:,}"
    assert entries in problems[0] and "removes only a part of table" in problems[1]
    assert "adds shards to table" in problems[2]


def test_two_copiers_at_once(life, inner):
    fill(life)
    target = Watched(inner)
    copy_job = copier(life, target)

    def other_first(_):
        target.watch = None
        copier(life, inner).run_once()

    target.watch = other_first
    report = copy_job.run_once()
    assert (report.log_number, len(list(inner.list("log/")))) == (1, 1)
    fill(life, 1, first=2)
    target.watch = other_first
    assert copy_job.run_once().log_number == 2
    check_target(life, inner)


def test_a_stop_ends_it_between_objects(life, inner):
    fill(life)
    copy_job = copier(life, inner)
    copy_job.progress = lambda size_bytes: copy_job.stop.set()
    with pytest.raises(CopyStopped):
        copy_job.run_once()
    assert len(list(inner.list("data/"))) == 1
    report = copier(life, inner).run_once()
    assert (report.kept, report.sent) == (1, len(life.state.objects) - 1)


@pytest.mark.parametrize("records", [0, 119])
def test_bytes_stay_in_the_copy_for_the_grace_and_go_however_many_records_follow(life, inner, records):
    fill(life, 1)
    copy_job, log = copier(life, inner), life.log()
    copy_job.run_once()
    merge_first_day(life)
    removed = copy_job.run_once().removed
    log.refresh()
    for number in range(records):
        life.clock.advance(600)
        record = LogRecord(0, "test", 0, "", 0, positions={"ticks": number + 1})
        log.append("a record", None, lambda state, record=record: record)
        copy_job.run_once()
    assert (len(removed), copy_job.may_sweep(DAY_S), copy_job.sweep(DAY_S).objects) == (2, False, ())
    # the last sweep was some minutes before the last record: it could not delete them yet
    assert not records or copy_job.may_sweep((records - 1) * 600)
    life.clock.advance(2 * DAY_S)
    # a sweep was interrupted
    assert copy_job.may_sweep(DAY_S)
    inner.delete_many([min(removed)])
    assert copy_job.may_sweep(DAY_S)
    assert {info.name for info in copy_job.sweep(DAY_S).objects} == {max(removed)}
    assert not copy_job.may_sweep(DAY_S)
    check_target(life, inner)
