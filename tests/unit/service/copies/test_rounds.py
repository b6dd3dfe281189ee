"""Any host can bring a copy up to date, round by round. A round changes no other index."""

import random
import shutil

import pytest

import tiered_index
from tests.support.changes import replace
from tests.support.copies import Watched, archive, bytes_of, check_target, copier, fill, merge_first_day, same, until
from tests.support.damage import flip_object
from tests.support.disk_faults import FaultDisk
from tests.support.merging import BASE_MS, DAY_MS, DAY_S, HOUR_S, Merging
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, IndexService
from tiered_index.clock import ManualClock
from tiered_index.errors import InvalidArgument, NotAnIndex, StorageUnavailable, TieredIndexError
from tiered_index.retention import Retention
from tiered_index.service.jobs import merge_plan as plan_module
from tiered_index.service.jobs.copying import Copier, CopyStopped
from tiered_index.service.jobs.expiry import record_expiry, sweep
from tiered_index.service.jobs.lost import give_up
from tiered_index.service.jobs.repair import Repairs
from tiered_index.service.jobs.verify import check_storage
from tiered_index.service.jobs.verify_report import Report
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import LogRecord
from tiered_index.service.read.segments import Segments
from tiered_index.storage.memory import MemoryStorage


@pytest.mark.parametrize("by", ["a writer", "a job"])
def test_a_target_that_was_written_to_is_let_alone(life, target, by):
    fill(life)
    made = copier(life, target)
    made.run_once()
    if by == "a writer":
        life.open("another", storage_backend=target)
    else:
        record_expiry(StorageLog(target, life.clock), Retention(age_s=3600), ManualClock(BASE_MS + DAY_MS))
    fill(life, 1, first=2)
    before = bytes_of(target)
    for again in (made, Copier(life.storage, target, life.clock)):
        with pytest.raises(InvalidArgument, match="written to since it was copied"):
            again.open()
        with pytest.raises(InvalidArgument, match="written to since it was copied"):
            again.run_once()
    assert {name: data for name, data in bytes_of(target).items() if name in before} == before


def test_a_writer_that_takes_the_target_over_during_a_round(life, inner):
    """The first record at the log's end wins. The copier then has lost permanently."""
    fill(life)
    target = Watched(inner)
    made = copier(life, target)
    made.run_once()
    fill(life, 1, first=2)

    def take_over():
        target.look = None
        life.open("another", storage_backend=inner)

    target.look = take_over
    with pytest.raises(InvalidArgument, match="written to since it was copied"):
        made.run_once()
    assert StorageLog(inner, life.clock).open().epoch == 1


def test_an_index_that_is_not_a_copy_is_refused(life, tmp_path):
    fill(life, 1)
    other = Merging(tmp_path / "other")
    other.put([(BASE_MS, "k")])
    other.publish()
    for target in (other.storage, life.storage):
        before = bytes_of(target)
        with pytest.raises(InvalidArgument, match=r"not a copy|the source itself"):
            copier(life, target)
        assert bytes_of(target) == before
    other.close()


def test_a_restored_source_is_not_the_one_that_was_copied(life, target, tmp_path):
    fill(life, 1)
    early = MemoryStorage(clock=life.clock)
    for name, data in bytes_of(life.storage).items():
        early.put(name, data)
    fill(life, 1, first=1)
    copier(life, target).run_once()
    with pytest.raises(InvalidArgument, match="not the storage that was copied"):
        copier(life, target, early)


def test_the_sources_root_does_not_write_to_the_copy_and_a_new_one_continues(life, target):
    fill(life)
    positions = life.state.positions
    assert positions["s"] > 0
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


def test_a_repaired_shard_replaces_its_copy(life, target, monkeypatch):
    """A copy's record may replace a shard that the source has repaired, but may not change a table otherwise."""
    make = plan_module._rewrite
    monkeypatch.setattr(plan_module, "_rewrite", lambda *given: make(*given[:-1], 1 << 10))
    fill(life)
    merge_first_day(life)
    made = copier(life, target)
    made.run_once()
    first, second, *_ = (stored for stored in life.state.objects.values() if stored.shard is not None)
    flip_object(life.storage, first.name, first.trailer_position + 3)
    report = Report()
    check_storage(life.storage, {}, report, lambda *_: None, deep=True, threads=1)
    (done,) = Repairs(life.storage, life.log(), standby=target).run(report, yes=True)
    assert done.object == first.name
    made.run_once()
    assert done.replaced_by in check_target(life, target).objects
    log = StorageLog(target, life.clock)
    log.open()
    # the shard of before with other entries instead of the repaired one, and one shard less
    shorter = replace(first, count=first.count - 1)
    log.append("a copy", None, lambda _: LogRecord(0, "copy", 0, "", 0, (shorter,), (done.replaced_by, second.name)))
    log.append("a copy", None, lambda _: LogRecord(0, "copy", 0, "", 0, (second,)))
    report = Report()
    check_storage(target, {}, report, lambda *_: None, deep=True, threads=1)
    of_log = [one for one in report.findings if one.file.startswith("log/")]
    parts, problems = zip(*((one.part, one.problem) for one in of_log), strict=True)
    assert parts == ("repair", "table", "table")
    entries = f"{first.count:,} entries by {first.count - 1:,}"
    assert entries in problems[0] and "removes only a part of table" in problems[1]
    assert "adds shards to table" in problems[2]


def test_a_shard_that_was_given_up_is_lost_in_the_copy_too(life, target):
    life.put([(BASE_MS + 1000 * n, f"k{n}") for n in range(20_000)])
    life.publish()
    merge_first_day(life)
    made = copier(life, target)
    made.run_once()
    (stored,) = life.state.objects.values()
    flip_object(life.storage, stored.name, stored.trailer_position // 2)
    (lost,) = give_up(life.storage, life.log(), [stored.name])
    made.run_once()
    report = Report()
    check_storage(target, {}, report, lambda *_: None, deep=True, threads=1)
    assert report.findings == [] and [one.entries for one in report.lost] == [lost.count] == [stored.count]


def test_following_a_life(life, small_windows):
    """Puts, merges, expiry, sweeps and copies run in any order. After each round the copy answers like the model."""
    for seed in range(3):
        _follow(life, random.Random(seed))
        life.close()
        shutil.rmtree(life.folder)
        life = Merging(life.folder)
    life.close()


def _follow(life, rng):
    target = MemoryStorage(clock=life.clock)
    day = 0
    fill(life, 1)
    made = copier(life, target)
    for _ in range(12):
        step = rng.choice(["fill", "merge", "expire", "archive", "sweep", "pass", "again"])
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
        elif step == "sweep":
            sweep(life.storage, life.log(), Retention(grace_s=3600), delete=True)
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
            assert left == set(report.removed), "running readers of the copy may need them"
    life.clock.advance(3 * DAY_S)
    made.sweep(DAY_S)
    named = {*life.state.objects, *(one.name for one in Segments(life.state, life.storage))}
    assert {i.name for p in ("data/", "segments/") for i in target.list(p)} == named


def test_an_object_that_a_sweep_of_the_target_may_delete_is_sent_again(life, inner):
    fill(life, 1)
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
def test_a_storage_whose_clock_is_wrong_by_days_gets_its_copy(life, days):
    """The clock of the copier or of the target is wrong by days. Each object is still sent once."""
    fill(life, 1)
    target = MemoryStorage(clock=ManualClock(life.clock.now_ms() + days * DAY_MS))
    made = copier(life, target)
    made.run_once()
    fill(life, 1, first=1)
    assert made.run_once().sent == 2
    check_target(life, target)


def test_bytes_stay_in_the_copy_for_the_grace(life, target):
    fill(life, 1)
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


def test_two_copiers_at_once(life, inner):
    fill(life)
    target = Watched(inner)
    made = copier(life, target)

    def other_first():
        target.look = None
        copier(life, inner).run_once()

    target.look = other_first
    report = made.run_once()
    assert (report.log_number, len(list(inner.list("log/")))) == (1, 1)
    fill(life, 1, first=2)
    target.look = other_first
    assert made.run_once().log_number == 2
    check_target(life, inner)


def test_a_stop_ends_it_between_objects(life, target):
    fill(life)
    made = copier(life, target)
    made.progress = lambda size_bytes: made.stop.set()
    with pytest.raises(CopyStopped):
        made.run_once()
    assert len(list(target.list("data/"))) == 1
    report = copier(life, target).run_once()
    assert (report.kept, report.sent) == (1, len(life.state.objects) - 1)


def test_the_library_copies_by_uris(tmp_path):
    source, target = f"file://{tmp_path}/a", f"sqlite://{tmp_path}/b.db"
    with IndexService.open(root=tmp_path / "root", storage=source, slots=11, items=100, disk=FaultDisk()) as index:
        index.put("t", 0, "k", 1, 1, 1_700_000_000_000)
        index.seal()
        index.run_lifecycle()
    done = []
    report = tiered_index.copy(source, target, progress=done.append)
    assert (report.sent, sum(done)) == (1, report.sent_bytes)
    with IndexReader.open(target) as reader:
        assert [item.offset for item in reader.query("t", "k")] == [1]
    with pytest.raises(NotAnIndex):
        tiered_index.copy(f"file://{tmp_path}/nothing", f"file://{tmp_path}/c")
    with pytest.raises(TieredIndexError):
        tiered_index.copy(target, source)
