"""A copy is no index or a complete one, whatever goes on at the source, and nobody else's index is changed by it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import tiered_index
from tests.support.merging import BASE_MS, DAY_MS, DAY_S, HOUR_MS, HOUR_S, Merging
from tiered_index import IndexReader, IndexService
from tiered_index.clock import ManualClock
from tiered_index.errors import CorruptFile, InvalidArgument, NotAnIndex, StorageUnavailable, TieredIndexError
from tiered_index.format import verify
from tiered_index.retention import Expired, Horizon, Retention
from tiered_index.service.checks.checks import check_storage
from tiered_index.service.checks.report import Report
from tiered_index.service.lifecycle import copying
from tiered_index.service.lifecycle.copying import Copier, CopyStopped, difference
from tiered_index.service.lifecycle.expiry import record_expiry, sweep
from tiered_index.service.lifecycle.orphans import delete_orphans, find_orphans, give_up
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import LogRecord, LostObject, StreamBatch
from tiered_index.service.log.state import LogState
from tiered_index.service.merge.migrate import migrate
from tiered_index.storage.base import Call, Storage, WrapperStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import open_storage
from tiered_index.testing.disk_faults import FaultDisk
from tiered_index.testing.storage_faults import FaultStorage

WRITING = ("put", "put_if_absent", "begin_upload", "upload_part", "complete_upload", "delete")
READING = ("get", "get_range", "head", "list", "get_suffix")
SEGMENT = bytes(range(256)) * 40


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Merging]:
    life = Merging(tmp_path)
    yield life
    life.close()


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects are copied in several parts."""
    for module in (copying, verify):
        monkeypatch.setattr(module, "WINDOW_BYTES", 1 << 11)


def fill(life: Merging, days: int = 2, first: int = 0) -> None:
    """Publish two files a day; the first day becomes a window table, and a segment is archived."""
    for day in range(first, first + days):
        for hour in (1, 20):
            start = BASE_MS + day * DAY_MS + hour * HOUR_MS
            rows = [(start + step * 60_000, key) for step in range(40) for key in ("hot", f"k{step % 3}")]
            life.put(rows[:40], source="s", source_position=life.messages)
            life.put(rows[40:], "debug")
            life.publish()


def until(life: Merging, time_ms: int) -> None:
    life.clock.advance(max(0, time_ms - life.clock.now_ms()) / 1000)


def merge_first_day(life: Merging) -> None:
    until(life, BASE_MS + DAY_MS)
    life.merge(DAY_S)


def archive(life: Merging, start: int = 0, data: bytes = SEGMENT) -> None:
    life.index.archive("broker", start, len(data), lambda at, length: data[at : at + length], None)


def copier(life: Merging, target: Storage, source: Storage | None = None, **more: Any) -> Copier:
    made = Copier(source or life.storage, target, life.clock, threads=more.pop("threads", 1), **more)
    made.open()
    return made


class Lent(WrapperStorage):
    """A reader closes the storage that it was given."""

    def close(self) -> None:
        """Leave it open."""


def check_target(life: Merging, target: Storage, questions: Any = None) -> LogState:
    """Everything that the target's log names is there, to the byte, and it answers as the model does."""
    report = Report()
    state = check_storage(target, {}, report, lambda *_: None, deep=True, threads=1)
    assert (report.findings, report.missing) == ([], [])
    assert state is not None
    with life.reader(Lent(target)) as reader:
        life.check(reader, questions)
    return state


def bytes_of(storage: Storage) -> dict[str, bytes]:
    return {info.name: storage.get(info.name) for info in storage.list()}


def same(copied: LogState, source: LogState) -> bool:
    """Whether two states name the same and say the same."""
    own = {"number", "epoch", "genesis", "positions"}
    return all(getattr(copied, f.name) == getattr(source, f.name) for f in fields(LogState) if f.name not in own)


@pytest.mark.parametrize("backend", ["memory", "file", "sqlite", "s3"])
def test_from_and_to_each_backend(life, tmp_path, small_windows, backend, request, monkeypatch):
    fill(life)
    merge_first_day(life)
    archive(life, data=SEGMENT * 1100 if backend == "s3" else SEGMENT)
    if backend == "s3":
        server = request.getfixturevalue("server")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        uri = f"s3://{server.new_bucket()}/copied?endpoint_url={server.endpoint_url}"
        for module in (copying, verify):
            # of several parts, of which the last comes first
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


def test_every_member_of_the_state_is_copied():
    """Also a member that a later version adds: the record must lead to the very state."""
    life_state = LogState()
    genesis = _genesis()
    table = LostObject("data/a/1.index", "a", 5, 6, 7)
    full = replace(
        life_state,
        number=9,
        epoch=4,
        genesis=genesis,
        positions={"s": 5},
        batches={"q": StreamBatch(3, 10, 99)},
        lost={table.name: table},
        expired=Expired((Horizon(1000, (("a*", 500),)),), {"broker": 10}),
    )
    record = difference(LogState(), full, "copy:x")
    assert LogRecord.decode(record.encode(), "r") == record
    reached = LogState().apply(record, "r")
    assert same(reached, full)
    assert reached.positions == {"s": 5, "copy:x": 9}
    filled = {f.name for f in fields(LogState) if getattr(full, f.name) != getattr(LogState(), f.name)}
    assert {f.name for f in fields(LogState)} - filled <= {"objects", "archive"}, (
        "give the new member something to hold"
    )
    with pytest.raises(CorruptFile, match="no record leads"):
        difference(replace(reached, positions={"s": 6}), full, "copy:x")


def _genesis() -> Any:
    from tiered_index.format.layout import NATIVE, Layout
    from tiered_index.service.log.records import IndexDescriptor

    return IndexDescriptor("abc", Layout(NATIVE, NATIVE.schema, 11, 100), "commitlog")


class Watched(WrapperStorage):
    """Looks at what is there before each call that changes something: what a crash would leave."""

    look: Callable[[], None] | None = None

    def _around(self, call: Call, act: Callable[[], Any]) -> Any:
        if self.look is not None and call.operation in WRITING:
            self.look()
        return act()


@pytest.mark.parametrize("round_", ["first", "later"])
def test_a_crash_at_any_step_leaves_no_target_or_a_complete_one(life, small_windows, round_):
    fill(life, 1)
    archive(life)
    inner = MemoryStorage(clock=life.clock)
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

    def look() -> None:
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


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("operation", [*WRITING, *READING])
def test_the_target_fails_at_any_call_and_the_next_run_goes_on(life, small_windows, operation, when):
    fill(life, 1)
    merge_first_day(life)
    before = bytes_of(life.storage)

    def calls() -> int:
        faulty = FaultStorage(MemoryStorage(clock=life.clock))
        copier(life, faulty).run_once()
        return faulty.calls(operation)

    counted = calls()
    for nth in sorted({1, 2, (counted + 1) // 2, counted}) if counted else ():
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


def test_what_is_there_is_not_sent_again_unless_it_differs(life):
    fill(life)
    inner = MemoryStorage(clock=life.clock)
    target = FaultStorage(inner)
    made = copier(life, target)
    target.fail("put_if_absent", nth=1, times=None)
    with pytest.raises(StorageUnavailable):
        made.run_once()
    target.clear()
    names = sorted(life.state.objects)
    assert [info.name for info in inner.list("data/")] == names
    # of the same size, and damaged; cut; of the same size, and nothing at all
    damaged = bytearray(inner.get(names[0]))
    damaged[len(damaged) // 2] ^= 1
    inner.put(names[0], bytes(damaged))
    inner.put(names[1], inner.get(names[1])[:-1])
    inner.put(names[2], bytes(len(inner.get(names[2]))))
    puts = target.calls("put")
    report = copier(life, target).run_once()
    assert (report.sent, report.kept) == (3, len(names) - 3)
    assert target.calls("put") - puts == 3 + 1
    check_target(life, inner)
    assert copier(life, target).run_once().sent == 0


def test_an_object_that_went_while_it_was_copied(life):
    fill(life)
    target = MemoryStorage(clock=life.clock)

    class Overtaken(WrapperStorage):
        done = False

        def _around(self, call: Call, act: Callable[[], Any]) -> Any:
            if call.operation == "get_range" and not self.done:
                self.done = True
                life.later()
                life.merge(DAY_S)
                life.later()
                delete_orphans(life.storage, find_orphans(life.storage, life.log(), life.clock))
            return act()

    report = copier(life, target, Overtaken(life.storage)).run_once()
    assert report.source_number == life.state.number and len(life.state.tables) == 2
    assert same(check_target(life, target), life.state)


@pytest.mark.parametrize("what", ["lost", "damaged"])
def test_nothing_damaged_is_copied_and_the_name_is_told(life, what):
    fill(life)
    target, name = MemoryStorage(clock=life.clock), sorted(life.state.objects)[1]
    if what == "lost":
        life.storage.delete(name)
    else:
        data = bytearray(life.storage.get(name))
        data[100] ^= 1
        life.storage.put(name, bytes(data))
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


def test_what_is_sent_is_what_was_checked(life, monkeypatch):
    """The last window is read for the trailer, and again for the end of the entries, which is checked only then."""
    life.put([(BASE_MS + number * 1000, f"k{number % 50}") for number in range(2000)])
    life.publish()
    ((name, stored),) = life.state.objects.items()
    window = stored.trailer_position - 100
    assert window < stored.size_bytes < 2 * window
    for module in (copying, verify):
        monkeypatch.setattr(module, "WINDOW_BYTES", window)

    class Flipping(WrapperStorage):
        done = 0

        def get_range(self, name: str, start: int, length: int) -> bytes:
            data = super().get_range(name, start, length)
            if start == window:
                self.done += 1
            return bytes([data[0] ^ 1]) + data[1:] if start == window and self.done == 1 else data

    source, target = Flipping(life.storage), MemoryStorage(clock=life.clock)
    copier(life, target, source).run_once()
    assert source.done > 2
    assert target.get(name) == life.storage.get(name)


@pytest.mark.parametrize("by", ["a writer", "a job"])
def test_a_target_that_was_written_to_is_let_alone(life, by):
    fill(life)
    target = MemoryStorage(clock=life.clock)
    made = copier(life, target)
    made.run_once()
    if by == "a writer":
        life.open("another", storage_backend=target)
    else:
        record_expiry(StorageLog(target, life.clock), Retention(age_s=3600), ManualClock(BASE_MS + DAY_MS))
    fill(life, 1, first=2)
    before = bytes_of(target)
    for again in (made, Copier(life.storage, target, life.clock)):
        with pytest.raises(InvalidArgument, match="written to by somebody else"):
            again.open()
        with pytest.raises(InvalidArgument, match="written to by somebody else"):
            again.run_once()
    assert {name: data for name, data in bytes_of(target).items() if name in before} == before


def test_a_writer_that_takes_the_target_over_during_a_round(life):
    """Who is first at the log's end wins; the copier then has lost for good."""
    fill(life)
    inner = MemoryStorage(clock=life.clock)
    target = Watched(inner)
    made = copier(life, target)
    made.run_once()
    fill(life, 1, first=2)

    def take_over() -> None:
        target.look = None
        life.open("another", storage_backend=inner)

    target.look = take_over
    with pytest.raises(InvalidArgument, match="written to by somebody else"):
        made.run_once()
    assert StorageLog(inner, life.clock).open().epoch == 1


def test_an_index_that_is_no_copy_is_refused(life, tmp_path):
    fill(life, 1)
    other = Merging(tmp_path / "other")
    other.put([(BASE_MS, "k")])
    other.publish()
    for target in (other.storage, life.storage):
        before = bytes_of(target)
        with pytest.raises(InvalidArgument, match="no copy"):
            copier(life, target)
        assert bytes_of(target) == before
    other.close()


def test_a_source_that_went_back_is_not_the_one_that_was_copied(life, tmp_path):
    fill(life, 1)
    early = MemoryStorage(clock=life.clock)
    for name, data in bytes_of(life.storage).items():
        early.put(name, data)
    fill(life, 1, first=1)
    target = MemoryStorage(clock=life.clock)
    copier(life, target).run_once()
    with pytest.raises(InvalidArgument, match="not the storage that was copied"):
        copier(life, target, early)


def test_the_sources_root_does_not_write_to_the_copy_and_a_new_one_goes_on(life):
    fill(life)
    positions = life.state.positions
    assert positions["s"] > 0
    target = MemoryStorage(clock=life.clock)
    copier(life, target).run_once()
    before = bytes_of(target)
    life.index.close()
    with pytest.raises(NotAnIndex, match="holds index"):
        life.open("root", storage_backend=target)
    assert bytes_of(target) == before
    writer = life.open("promoted", storage_backend=target)
    assert writer.durable_position("s") == positions["s"]
    life.put([(BASE_MS + 5 * DAY_MS, "late")], into=writer, source="s", source_position=10**6)
    life.publish(writer)
    assert check_target(life, target).positions["s"] == 10**6


def test_following_a_life(life, small_windows):
    """Puts, merges, expiry, sweeps and copies in any order: after each round the copy answers as the model does."""
    for seed in range(3):
        _follow(life, random.Random(seed))
        life.close()
        shutil.rmtree(life.folder)
        life = Merging(life.folder)
    life.close()


def _follow(life: Merging, rng: random.Random) -> None:
    target = MemoryStorage(clock=life.clock)
    day = 0
    fill(life, 1)
    made = copier(life, target)
    for _ in range(12):
        step = rng.choice(["fill", "merge", "expire", "archive", "migrate", "sweep", "pass", "again"])
        if step == "fill":
            day += 1
            fill(life, 1, first=day)
        elif step == "merge":
            until(life, BASE_MS + (day + 1) * DAY_MS)
            life.merge(rng.choice([DAY_S, 30 * DAY_S]))
        elif step == "expire":
            rule = Retention(age_s=DAY_S * 3, topics={"debug*": DAY_S})
            record_expiry(life.log(), rule, life.clock)
            horizon = rule.horizon(life.clock.now_ms())
            life.model.expire(horizon.before_ms, dict(horizon.topics))
        elif step == "archive":
            archive(life, life.messages * 10**7)
        elif step == "migrate":
            migrate(life.storage, life.log(), life.clock, rng.choice(["plain", "packed"]))
        elif step == "sweep":
            sweep(life.storage, life.log(), life.clock, Retention(grace_s=3600), delete=True)
            made.sweep(3600)
        elif step == "pass":
            life.clock.advance(rng.choice([HOUR_S, 2 * DAY_S]))
        else:
            made = copier(life, target)
        report = made.run_once()
        assert report.source_number == life.state.number
        state = check_target(life, target, [("t", "hot"), ("debug", "k1")])
        assert same(state, life.state)
        left = {i.name for i in target.list()} & set(report.removed)
        if step != "sweep":
            assert left == set(report.removed), "readers of the copy may be at work"
    life.clock.advance(3 * DAY_S)
    made.sweep(DAY_S)
    named = {*life.state.objects, *life.state.archive}
    assert {i.name for p in ("data/", "segments/") for i in target.list(p)} == named


def test_what_lay_in_a_target_for_so_long_that_a_sweep_may_take_it_is_sent_again(life):
    fill(life, 1)
    inner = MemoryStorage(clock=life.clock)
    target = FaultStorage(inner)
    made = copier(life, target)
    made.run_once()
    fill(life, 1, first=1)
    target.fail("put_if_absent", nth=1)
    with pytest.raises(StorageUnavailable):
        made.run_once()
    life.clock.advance(23.5 * HOUR_S)
    report = made.run_once()
    assert report.sent == 2
    life.clock.advance(HOUR_S)
    made.sweep(DAY_S)
    check_target(life, inner)


@pytest.mark.parametrize("days", [-3, 3])
def test_a_storage_of_another_day_gets_its_copy(life, days):
    """The clock of the copier, or of the target, is wrong by days; each object is sent once."""
    fill(life, 1)
    target = MemoryStorage(clock=ManualClock(life.clock.now_ms() + days * DAY_MS))
    made = copier(life, target)
    made.run_once()
    fill(life, 1, first=1)
    assert made.run_once().sent == 2
    check_target(life, target)


def test_bytes_stay_in_the_copy_for_the_grace(life):
    fill(life, 1)
    target = MemoryStorage(clock=life.clock)
    made = copier(life, target)
    made.run_once()
    merge_first_day(life)
    removed = made.run_once().removed
    life.clock.advance(2 * DAY_S)
    assert (len(removed), made.sweep(3 * DAY_S).objects) == (2, ())
    assert {info.name for info in target.list("data/")} >= set(removed)
    life.clock.advance(2 * DAY_S)
    assert {info.name for info in made.sweep(3 * DAY_S).objects} == set(removed)
    check_target(life, target)


def test_two_copiers_at_once(life):
    fill(life)
    inner = MemoryStorage(clock=life.clock)
    target = Watched(inner)
    made = copier(life, target)

    def other_first() -> None:
        target.look = None
        copier(life, inner).run_once()

    target.look = other_first
    report = made.run_once()
    assert (report.log_number, len(list(inner.list("log/")))) == (1, 1)
    fill(life, 1, first=2)
    target.look = other_first
    assert made.run_once().log_number == 2
    check_target(life, inner)


def test_a_stop_ends_it_between_objects(life):
    fill(life)
    target = MemoryStorage(clock=life.clock)
    made = copier(life, target)
    made.progress = lambda size_bytes: made.stop.set()
    with pytest.raises(CopyStopped):
        made.run_once()
    assert len(list(target.list("data/"))) == 1
    report = copier(life, target).run_once()
    assert (report.kept, report.sent) == (1, len(life.state.objects) - 1)


def test_readers_of_the_target_see_rounds_whole(life):
    fill(life, 1)
    target = MemoryStorage(clock=life.clock)
    made = copier(life, target)
    made.run_once()
    with IndexReader.open(storage_backend=target, clock=life.clock, refresh_interval_s=0) as reader:
        life.check(reader)
        merge_first_day(life)
        fill(life, 1, first=1)
        made.run_once()
        life.check(reader)


def test_the_library_copies_by_uris(tmp_path):
    source, target = f"file://{tmp_path}/a", f"sqlite://{tmp_path}/b.db"
    with IndexService.open(root=tmp_path / "root", storage=source, slots=11, items=100, disk=FaultDisk()) as index:
        index.put("t", 0, "k", 1, 1, 1_700_000_000_000)
        index.seal()
        index.run_lifecycle()
    done: list[int] = []
    report = tiered_index.copy(source, target, progress=done.append)
    assert (report.sent, sum(done)) == (1, report.sent_bytes)
    with IndexReader.open(target) as reader:
        assert [item.offset for item in reader.query("t", "k")] == [1]
    with pytest.raises(NotAnIndex):
        tiered_index.copy(f"file://{tmp_path}/nothing", f"file://{tmp_path}/c")
    with pytest.raises(TieredIndexError):
        tiered_index.copy(target, source)
