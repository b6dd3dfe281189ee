"""A target has no index or a complete copy, whatever fails and whatever changes at the source."""

from dataclasses import fields
from itertools import product

import pytest

from tests.support.changes import replace
from tests.support.copies import (
    SEGMENT,
    WRITING,
    Watched,
    archive,
    bytes_of,
    check_target,
    copier,
    fill,
    merge_first_day,
    same,
)
from tests.support.damage import flip_object
from tests.support.disk_faults import FaultDisk, SimulatedCrash
from tests.support.log_records import GENESIS
from tests.support.merging import BASE_MS, DAY_S, Merging
from tests.support.storage_faults import FaultStorage
from tiered_index.clock import ManualClock
from tiered_index.errors import CorruptFile, NotAnIndex, StorageUnavailable
from tiered_index.format import verify
from tiered_index.retention import Expired, Horizon
from tiered_index.service.jobs import copying
from tiered_index.service.jobs.catalogs import send_catalog
from tiered_index.service.jobs.copying import Copier, difference
from tiered_index.service.jobs.lost import give_up
from tiered_index.service.jobs.orphans import delete_orphans, find_orphans
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import ArchivedSegment, LogRecord, LostObject, PendingFile, StreamBatch
from tiered_index.service.log.state import LogState
from tiered_index.service.read.segments import hidden_in
from tiered_index.storage.base import WrapperStorage
from tiered_index.storage.local.storage import LocalStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import open_storage

READING = ("get", "head", "list")


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
        for name in (*life.state.objects, *life.state.archive):
            assert back.get(name) == life.storage.get(name)


SEGMENT_OF_LOG = ArchivedSegment(f"segments/b/{0:020d}/{1:020d}-{1:016x}.log", "b", 0, 10, 1, 1, 62, 0)


def test_every_member_of_the_state_is_copied():
    """This includes members that later versions add: the record must lead to exactly the same state."""
    table = LostObject("data/a/1.index", "a", 5, 6, 7)
    listed, _ = send_catalog(StorageLog(MemoryStorage(), ManualClock(5)), [SEGMENT_OF_LOG])
    gone = hidden_in(listed, SEGMENT_OF_LOG)
    waiting = PendingFile("data/b/1.index", "b", "main", 1, 5, 6, 7, 300, 252, 0, 0, 48, 9, created_ms=8)
    full = replace(
        LogState(),
        number=9,
        catalogs={listed.name: listed},
        hidden={gone.name: gone},
        epoch=4,
        genesis=GENESIS,
        positions={"s": 5},
        pending={waiting.name: waiting},
        batches={"q": StreamBatch(3, 10, 99)},
        put_before_ms=1_700_000_000_000,
        lost={table.name: table},
        expired=Expired((Horizon(1000, (("a*", 500),)),), {"broker": 10}),
    )
    record = difference(LogState(), full, "copy:x")
    assert LogRecord.decode(record.encode(), "r") == record
    reached = LogState().apply(record, "r")
    assert same(reached, full)
    assert reached.positions == {"s": 5, "copy:x": 9}
    filled = {f.name for f in fields(LogState) if getattr(full, f.name) != getattr(LogState(), f.name)}
    assert {f.name for f in fields(LogState)} - filled <= {
        "objects",
        "pending",
        "archive",
        "roots",
        "digest",
        "chain",
        "steps",
    }, "give the new member a value in `full`"
    with pytest.raises(CorruptFile, match="no record leads"):
        difference(replace(reached, positions={"s": 6}), full, "copy:x")


@pytest.mark.parametrize("round_", ["first", "later"])
def test_a_crash_at_any_step_leaves_no_target_or_a_complete_one(life, inner, small_windows, round_):
    fill(life, 1)
    archive(life)
    target = Watched(inner)
    made = copier(life, target)
    if round_ == "later":
        made.run_once()
        merge_first_day(life)
        fill(life, 1, first=1)
    before = bytes_of(life.storage)
    old = StorageLog(inner, life.clock)
    old_number = old.open().number if round_ == "later" else 0
    looked = set()

    def look():
        log = StorageLog(inner, life.clock)
        try:
            state = log.open()
        except NotAnIndex:
            assert not old_number
            state = LogState()
        looked.add(state.number)
        assert {name: len(inner.get(name)) for name in (*state.objects, *state.archive)} == {
            **{name: stored.size_bytes for name, stored in state.objects.items()},
            **{name: segment.object_bytes for name, segment in state.archive.items()},
        }

    target.look = look
    made.run_once()
    look()
    assert looked == {old_number, old_number + 1}
    check_target(life, inner)
    assert bytes_of(life.storage) == before


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """An index of one merged day, and a segment that is copied in parts."""
    life = Merging(tmp_path_factory.mktemp("source"))
    fill(life, 1)
    merge_first_day(life)
    archive(life)
    yield life
    life.close()


# a call that only reads changes nothing before it fails
@pytest.mark.parametrize(
    ("operation", "when"), [*product(WRITING, ("before", "after")), *((operation, "before") for operation in READING)]
)
def test_the_target_fails_at_any_call_and_the_next_run_continues(source, small_windows, operation, when):
    life = source
    before = bytes_of(life.storage)

    def calls():
        faulty = FaultStorage(MemoryStorage(clock=life.clock))
        copier(life, faulty).run_once()
        return faulty.calls(operation)

    counted = calls()
    assert counted
    for nth in sorted({1, 2, (counted + 1) // 2, counted}):
        inner = MemoryStorage(clock=life.clock)
        faulty = FaultStorage(inner)
        faulty.fail(operation, nth=nth, when=when)
        try:
            copier(life, faulty).run_once()
        except StorageUnavailable:
            for _ in range(2):
                report = copier(life, faulty).run_once()
            assert report.sent == 0
        assert same(StorageLog(inner, life.clock).open(), life.state)
        assert {i.name: inner.get(i.name) for i in inner.list("data/")} == {
            name: data for name, data in before.items() if name in life.state.objects
        }
    assert bytes_of(life.storage) == before


def test_present_objects_are_not_sent_again_unless_they_differ(life, inner):
    fill(life)
    target = FaultStorage(inner)
    made = copier(life, target)
    target.fail("put_if_absent", nth=1, times=None)
    with pytest.raises(StorageUnavailable):
        made.run_once()
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


def test_an_object_that_a_killed_copier_left_outlives_a_power_cut(life, tmp_path):
    """The copier died after an object had its name, and before the sync of its folder."""
    fill(life, 1)
    disk = FaultDisk()
    made = copier(life, LocalStorage(tmp_path / "target", disk=disk))
    disk.crash("rename", after=True)
    with pytest.raises(SimulatedCrash):
        made.run_once()
    disk.revive()
    assert copier(life, LocalStorage(tmp_path / "target", disk=disk)).run_once().kept == 1
    disk.lose_unsynced()
    check_target(life, LocalStorage(tmp_path / "target"))


def test_an_object_that_vanished_while_it_was_copied(life, target):
    fill(life)

    def overtake():
        life.later()
        life.merge(DAY_S)
        life.later()
        delete_orphans(life.storage, find_orphans(life.storage, life.log()))

    source = FaultStorage(life.storage)
    source.meanwhile("get_range", overtake)
    report = copier(life, target, source).run_once()
    assert report.source_number == life.state.number and len(life.state.tables) == 2
    assert same(check_target(life, target), life.state)


@pytest.mark.parametrize("what", ["lost", "damaged"])
def test_nothing_damaged_is_copied_and_the_name_is_told(life, what):
    fill(life)
    target, name = MemoryStorage(clock=life.clock), sorted(life.state.objects)[1]
    if what == "lost":
        life.storage.delete(name)
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


def test_damage_on_the_way_is_read_again(life, small_windows):
    fill(life, 1)
    archive(life)
    counted = FaultStorage(life.storage)
    copier(life, MemoryStorage(clock=life.clock), counted).run_once()
    for nth in range(1, counted.calls("get_range") + 1):
        target, faulty = MemoryStorage(clock=life.clock), FaultStorage(life.storage)
        faulty.corrupt("get_range", mode="wrong", nth=nth)
        copier(life, target, faulty).run_once()
        copied = {n: data for n, data in bytes_of(target).items() if n.startswith(("data/", "segments/"))}
        assert copied == {name: life.storage.get(name) for name in (*life.state.objects, *life.state.archive)}


@pytest.mark.parametrize("wrong", [{1}, {1, 3}], ids=["once", "unless it is checked"])
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
    if wrong == {1}:
        copier(life, target, source).run_once()
        assert target.get(name) == life.storage.get(name)
    else:
        with pytest.raises(CorruptFile, match="two reads"):
            copier(life, target, source).run_once()
        assert not bytes_of(target).keys() & {name}
    assert source.done > 2
