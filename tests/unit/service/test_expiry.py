"""An expired entry is in no answer, whether its bytes are deleted or not.

Only whole objects are deleted, after a delay.
"""

import pytest

import tiered_index
from tests.support.changes import replace
from tests.support.damage import checked
from tests.support.merging import BASE_MS, DAY_S, HOUR_MS, HOUR_S
from tests.support.rounds import upload
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, IndexService, Lookup
from tiered_index.base.clock import ManualClock, SystemClock
from tiered_index.base.retention import Retention
from tiered_index.errors import StorageUnavailable, WriterFenced
from tiered_index.service.jobs.erase import EraseRequest, erase
from tiered_index.service.jobs.expiry import expire as run_expiry
from tiered_index.service.jobs.expiry import record_expiry
from tiered_index.service.jobs.orphans import sweep
from tiered_index.service.life.lifecycle import Lifecycle
from tiered_index.service.log.expired import NOTHING
from tiered_index.service.log.records import LogRecord
from tiered_index.storage.local import LocalStorage
from tiered_index.storage.memory import MemoryStorage

TOPICS = ("orders", "debug-x", "t")


def fill(life, hours=range(30), *, files=5):
    """Put an entry per hour of three topics, into files of `files` hours."""
    for hour in hours:
        for topic in TOPICS:
            life.put([(BASE_MS + hour * HOUR_MS, "k")], topic)
        if hour % files == files - 1:
            life.publish()
    life.publish()


def expire(life, rule, hours):
    """Let a job record an expiry at `hours` after `BASE_MS`, and update the model and the writer."""
    clock = ManualClock(BASE_MS + round(hours * HOUR_MS))
    plan = record_expiry(life.log(), rule, clock.now_ms())
    horizon = rule.horizon(clock.now_ms())
    life.model.expire(horizon.before_ms, dict(horizon.topics))
    life.index._lifecycle.refresh()
    return plan


def test_answers_name_the_horizon(life):
    """Cursors continue past it."""
    fill(life)
    before, page = (life.index.query("orders", "k", max_count=count) for count in (100, 5))
    assert (len(before), before.expired_before_ms, before.to_dict()["expired_before_ms"]) == (30, None, None)
    plan = expire(life, Retention(age_s=20 * HOUR_S, topics={"debug-*": 5 * HOUR_S}), 30)
    assert (len(plan.objects), plan.entries) == (2, 30)
    rest = life.index.query("orders", "k", max_count=100, cursor=page.cursor)
    assert (len(rest), rest.status) == (15, "complete")
    with life.reader() as reader:
        for opened in (life.index, reader):
            life.check(opened)
            result = opened.query("debug-x", "k", max_count=100)
            assert result.expired_before_ms == BASE_MS + 25 * HOUR_MS and len(result) == 5
            assert result.status == "complete"
            late = opened.query("orders", "k", BASE_MS + 10 * HOUR_MS)
            assert (late.expired_before_ms, len(late)) == (None, 20)
            none = opened.query("orders", "k", end_ms=BASE_MS + 9 * HOUR_MS)
            assert (len(none), none.status, none.expired_before_ms) == (0, "complete", BASE_MS + 10 * HOUR_MS)
            many = opened.query_many([Lookup(topic=topic, key="k") for topic in TOPICS])
            assert [answer.expired_before_ms for answer in many] == [BASE_MS + h * HOUR_MS for h in (10, 25, 10)]
    assert set(life.state.objects) == {o.name for o in life.storage.list("data/")} - {o.name for o in plan.objects}


@pytest.mark.parametrize(("age_h", "topics", "left"), [(20, {"debug-*": 5 * HOUR_S}, 2), (12, {}, 1)])
def test_window_tables_hide_expired_entries_or_are_removed(life, age_h, topics, left):
    fill(life, range(60), files=20)
    life.later()
    assert life.merge(DAY_S).tables == 3
    tables = dict(life.state.tables)
    plan = expire(life, Retention(age_s=age_h * HOUR_S, topics=topics), 60)
    gone = tables.keys() - life.state.tables.keys()
    assert len(gone) == 3 - left
    assert {o.name for o in plan.objects} == {o.name for table in gone for o in tables[table]}
    life.check()
    life.check(life.index)
    # a merge of nothing but expired entries leaves no table
    life.put([(BASE_MS, "k")], "debug-x")
    life.publish()
    life.later()
    report = life.merge(HOUR_S, end_s=BASE_MS // 1000 + HOUR_S)
    assert (report.expired, report.tables) == (1, 0)
    life.check()


def test_verify_counts_what_a_merge_left_out(life, monkeypatch):
    fill(life, range(20))
    expire(life, Retention(age_s=15 * HOUR_S, topics={"debug-*": 5 * HOUR_S}), 20)
    life.later()
    life.merge(DAY_S)
    assert life.log().record(life.state.number).left_out == 10

    def findings():
        return [finding.problem for finding in checked(life.storage).findings]

    assert findings() == []
    decode = LogRecord.decode
    with monkeypatch.context() as forged:
        forged.setattr(LogRecord, "decode", lambda *arguments: replace(decode(*arguments), left_out=9))
        assert any("had 45 entries" in problem for problem in findings())
    with monkeypatch.context() as forged:
        forged.setattr(LogRecord, "decode", lambda *arguments: replace(decode(*arguments), expired=NOTHING))
        assert any("nothing had expired by then" in problem for problem in findings())


def test_bytes_stay_for_the_grace(life):
    """Objects that no record has named stay for a day, however short the grace is."""
    fill(life, range(10))
    rule = Retention(age_s=5 * HOUR_S, grace_s=7200)
    life.clock.advance(HOUR_S * 10)
    plan = expire(life, rule, 10)
    assert plan.objects
    # repeating it writes no record
    number = life.state.number
    expire(life, rule, 10)
    assert life.state.number == number
    life.storage.put(unnamed := "data/000001700000000-0123456789ab/0123456789abcdef.index", b"of a long merge")
    names = {info.name for info in life.storage.list("data/")}
    for advance_s, deleted in ((0, 0), (7000, 0), (300, len(plan.objects)), (20 * HOUR_S, 0), (3 * HOUR_S, 1)):
        life.clock.advance(advance_s)
        assert len(sweep(life.storage, life.log(), rule.grace_s).objects) == deleted
    gone = names - {info.name for info in life.storage.list("data/")}
    assert gone == {unnamed, *(stored.name for stored in plan.objects)}
    life.check()


def test_a_writer_and_a_job_remove_the_same(tmp_path):
    """Both also remove objects that expire by their topic alone. Their bytes do not count against `max_bytes`."""
    now_ms, left = SystemClock().now_ms(), {}
    files = [{"debug-x": 30}, {"debug-x": 10}, {"debug-x": 10, "t": 10}, {"t": 10}, {"t": 40}, {"debug-x": 1}]
    for caller in ("writer", "job"):
        uri, root = f"file://{tmp_path}/{caller}", tmp_path / f"{caller}-root"
        settings = {"storage": uri, "slots": 100, "items": 1000, "background": False, "local_keep_s": 0}
        with IndexService.open(root=root, **settings) as index:
            for number, held in enumerate(files):
                for topic, hours in held.items():
                    index.put(topic, 0, "k", number, 9, now_ms - hours * HOUR_MS)
                upload(index)
        with IndexReader.open(uri) as reader:
            stored = sorted(reader.log_state.objects.values(), key=lambda index_object: index_object.sequence)
        most = sum(stored[number].size_bytes for number in (2, 3, 5))
        rule = Retention(age_s=20 * HOUR_S, topics={"debug-*": 5 * HOUR_S}, max_bytes=most)
        if caller == "writer":
            with IndexService.open(root=root, **settings, retention=rule) as index:
                index.run_lifecycle()
        else:
            tiered_index.expire(uri, rule, yes=True)
        with IndexReader.open(uri) as reader:
            names = {index_object.name for index_object in reader.log_state.objects.values()}
        left[caller] = [number for number, index_object in enumerate(stored) if index_object.name in names]
    assert left == {"writer": [2, 3, 5], "job": [2, 3, 5]}


def test_a_writer_renews_its_lease_while_it_reads_the_topics_of_objects(monkeypatch, merging):
    life, renewed = merging(settings={"retention": Retention(topics={"debug-*": 2 * HOUR_S})}), []
    fill(life)
    life.clock.advance(40 * HOUR_S)
    monkeypatch.setattr("tiered_index.service.life.lifecycle.sweep", lambda *_, **__: None)
    monkeypatch.setattr(Lifecycle, "_renew", lambda _: renewed.append(1))
    life.index.run_lifecycle()
    assert len(renewed) >= len(life.state.objects) > 3


def test_a_sweep_that_fails_is_not_in_each_round_again(merging):
    """It lists the whole storage."""
    clock = ManualClock(BASE_MS)
    storage = FaultStorage(MemoryStorage(clock=clock))
    life = merging(storage, clock=clock, settings={"retention": Retention(age_s=HOUR_S), "refresh_interval_s": 0})
    storage.fail("list", times=None, name_prefix="data/")
    with pytest.raises(StorageUnavailable):
        life.index.run_lifecycle()
    for _ in range(3):
        clock.advance(61)
        life.index.run_lifecycle()
    clock.advance(HOUR_S)
    with pytest.raises(StorageUnavailable):
        life.index.run_lifecycle()


def test_an_object_that_is_gone_or_damaged_stays_and_hinders_nothing(tmp_path, merging):
    clock = ManualClock(BASE_MS + 17 * HOUR_MS)
    life = merging(storage=LocalStorage(tmp_path / "storage", clock=clock))
    fill(life, range(15))
    names = sorted(life.state.objects)
    life.storage.delete_many([names[1]])
    life.storage.put(names[2], bytes(life.state.objects[names[2]].size_bytes))
    rule = Retention(age_s=20 * HOUR_S, topics={"debug-*": HOUR_S, "orders": HOUR_S, "t": HOUR_S})
    plan = run_expiry(life.storage, life.log(), rule, clock, yes=False)[0]
    assert ([o.name for o in plan.objects], [o.name for o in plan.mixed]) == (names[:1], names[1:])
    assert life.state.expired == NOTHING
    assert run_expiry(life.storage, life.log(), rule, clock, yes=True)[0] == plan
    assert sorted(life.state.objects) == names[1:]


def test_a_fenced_writer_expires_nothing(life):
    fill(life, range(10))
    log, epoch = life.log(), life.state.epoch
    log.claim_epoch()
    with pytest.raises(WriterFenced):
        record_expiry(life.log(), Retention(age_s=1), life.clock.now_ms(), epoch)
    assert life.state.expired == NOTHING


@pytest.mark.parametrize(
    ("old", "young", "expired"), [([0], [1], 0), ([0, 2], [], 1)], ids=["archived", "never archived"]
)
def test_segments_that_have_expired_are_not_archived_again(life, old, young, expired):
    """Earlier segments that were never archived are not archived either."""

    def archive(number):
        return life.index.archive("log", number * 3000, 3000, lambda at, length: bytes(3000)[at : at + length])

    assert all(map(archive, old))
    life.clock.advance(100)
    assert all(map(archive, young))
    record_expiry(life.log(), Retention(segments_age_s=50), life.clock.now_ms())
    assert life.state.expired.segments == {"log": 3000 * (old[-1] + 1)}
    life.index._lifecycle.refresh()
    assert not archive(expired)
    assert [segment.start for segment in life.index.archived()] == [3000 * number for number in young]


def test_what_is_stated_outlives_checkpoints(merging):
    life = merging(settings={"checkpoint_every": 1})
    fill(life, range(10))
    expire(life, Retention(age_s=5 * HOUR_S), 10)
    life.put([(BASE_MS + 9 * HOUR_MS, "k")])
    life.publish()
    life.check()
    assert life.log().state.expired != NOTHING


def test_a_writer_that_starts_without_its_storage_knows_the_horizon(life):
    fill(life, range(10))
    life.index.put("t", 0, "k", 99, 1, BASE_MS)
    expire(life, Retention(age_s=5 * HOUR_S), 10)
    life.index.run_lifecycle()
    life.index.close()
    down = FaultStorage(life.storage)
    down.fail("*", times=None)
    index = life.open(storage_backend=down, local_keep_s=0)
    result = index.query("t", "k", allow_partial=True)
    assert (len(result), result.status, result.expired_before_ms) == (0, "partial", BASE_MS + 5 * HOUR_MS)
    down.clear()
    life.clock.advance(100)
    index.run_lifecycle()
    life.check(index)


def test_several_indexes_each_with_its_own_horizon_and_tombstones(tmp_path, merging):
    lives = [merging(LocalStorage(tmp_path / name)) for name in "ab"]
    for life in lives:
        fill(life, range(10))
    expire(lives[0], Retention(age_s=4 * HOUR_S), 10)
    request = EraseRequest("t", ("k",), before_ms=BASE_MS + 3 * HOUR_MS)
    erase(lives[1].storage, lives[1].log(), request, lives[1].clock, yes=True)
    lives[1].model.erase("t", request.before_ms, key="k")
    left = [len(life.model.query("t", "k")) for life in lives]
    assert left == [4, 7]
    with IndexReader.open([life.storage.uri for life in lives], clock=lives[0].clock) as reader:
        for result in (reader.query("t", "k", max_count=100), reader.query_many([("t", "k")])[0]):
            assert (len(result), result.expired_before_ms) == (sum(left), BASE_MS + 6 * HOUR_MS)
        late = reader.query("t", "k", BASE_MS + 7 * HOUR_MS)
        assert (len(late), late.expired_before_ms) == (6, None)
