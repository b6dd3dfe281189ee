"""An erased entry is in no answer, in any state of its file.

Only its own bytes are removed. The certificate is true.
"""

import contextlib
from collections import Counter

import numpy as np
import pytest

from tests.support.batches import batch
from tests.support.cases import each
from tests.support.changes import replace
from tests.support.damage import checked
from tests.support.merging import BASE_MS, DAY_S, HOUR_MS, HOUR_S, Merging
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, Lookup
from tiered_index.base.retention import Horizon
from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.connectors.erase import erase_index
from tiered_index.errors import InvalidArgument, TieredIndexError
from tiered_index.format import compacted
from tiered_index.format.keys.hashing import key_hash
from tiered_index.service.jobs import erase_find
from tiered_index.service.jobs.erase import EraseRequest, _check_bound, erase, names_of_nothing_else
from tiered_index.service.jobs.erase_find import ScannedObject, find_hidden
from tiered_index.service.jobs.rewriting.job import publish
from tiered_index.service.log.expired import NOTHING, Expired
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import QUARANTINE_S
from tiered_index.service.log.state import LogState
from tiered_index.service.log.tombstones import Tombstone, Tombstones
from tiered_index.storage.local import LocalStorage

TOPICS = ("orders", "t")
KEYS = ("k", "k2")


@pytest.fixture(params=["native", "rocketmq"])
def life(request, merging):
    return merging(preset=request.param)


@pytest.fixture
def native(merging):
    return merging()


@pytest.fixture
def stored(tmp_path, merging):
    """An index whose storage has a URI."""
    return merging(LocalStorage(tmp_path / "storage"))


def fill(life, hours=range(12), *, files=4):
    """Put an entry per hour of two topics and two keys, into files of `files` hours."""
    for hour in hours:
        for topic in TOPICS:
            life.put([(BASE_MS + hour * HOUR_MS, key) for key in KEYS], topic)
        if hour % files == files - 1:
            life.publish()
    life.publish()


def wipe(life, topic="orders", *, storage=None, **more):
    """Erase, and update the model and the writer. Further arguments belong to the request or to `erase`."""
    fields = {name: more.pop(name) for name in ("keys", "queue_id", "before_ms") if name in more}
    request = EraseRequest(topic, **fields)
    stones = request.tombstones(life.clock.now_ms(), keyed=True)
    done = erase(storage or life.storage, life.log(), request, life.clock, **{"yes": True, "threads": 1, **more})
    for key in request.keys or (None,):
        life.model.erase(topic, stones[0].before_ms, key=key, queue_id=request.queue_id)
    life.index._lifecycle.refresh()
    return done


ASKED = {
    "topic": {"before_ms": BASE_MS + 6 * HOUR_MS},
    "key": {"keys": ("k",)},
    "keys": {"keys": KEYS, "before_ms": BASE_MS + 9 * HOUR_MS},
    "queue": {"queue_id": 1, "before_ms": BASE_MS + 9 * HOUR_MS},
}


@pytest.mark.parametrize("fields", ASKED.values(), ids=ASKED.keys())
def test_it_is_hidden_in_every_state_and_goes_with_the_next_merge(life, fields):
    life.later()
    fill(life)
    life.merge(HOUR_S * 4, begin_s=0, end_s=BASE_MS // 1000 + 4 * HOUR_S)
    for hour in range(3):
        life.put([(BASE_MS + hour * HOUR_MS, key) for key in KEYS], "orders")
    wipe(life, **fields)
    life.put([(BASE_MS, "k")], "orders")
    for step in (lambda: None, life.index.flush, life.index.seal, life.index.run_lifecycle):
        step()
        life.check(life.index)
        # what was erased has not expired, also for a lookup that begins before the epoch
        (batched,) = life.index.query_many([Lookup(topic="orders", key="k", begin_ms=-HOUR_MS)])
        for answer in (life.index.query("orders", "k", -HOUR_MS), batched, life.index.topics(-HOUR_MS)):
            assert answer.expired_before_ms is None
    life.check()
    with IndexReader.open(root=life.folder / "root", storage_backend=life.storage, clock=life.clock) as beside:
        life.check(beside)
    life.later()
    assert life.merge(DAY_S).expired > 0
    life.check()
    stones = Tombstones(life.state.expired.tombstones)
    schema = life.state.genesis.layout.schema
    hidden_by_object = find_hidden(life.storage, life.state.objects.values(), stones, schema)
    assert hidden_by_object and not any(held.hidden for held in hidden_by_object.values())
    # entries of a later time are found
    life.put([(life.clock.now_ms() + 1000, "k")], "orders")
    life.check(life.index)


@pytest.mark.parametrize("fields", ASKED.values(), ids=ASKED.keys())
def test_now_rewrites_the_objects_and_certifies(life, fields, monkeypatch):
    """Files are searched in windows, here of one slot group."""
    monkeypatch.setattr(compacted, "GROUP_BYTES", 64)
    monkeypatch.setattr(erase_find, "_WINDOW_BYTES", 1)
    fill(life)
    life.later()
    life.merge(HOUR_S * 4, end_s=BASE_MS // 1000 + 4 * HOUR_S)
    before = sum(stored.count for stored in life.state.objects.values())
    done = wipe(life, now=True, grace_s=0, **fields)
    assert (done.status, done.remaining, done.pending, done.to_do) == ("erased", (), (), ())
    assert done.entries == done.entries_removed > 0
    assert sum(stored.count for stored in life.state.objects.values()) == before - done.entries
    assert {info.name for info in life.storage.list("data/")} == set(life.state.objects)
    assert done.scanned_objects == len(life.state.objects)
    assert done.log_numbers and done.log_numbers[-1] == life.state.number
    life.check()
    life.check(life.index)
    assert not checked(life.storage).findings
    again = wipe(life, now=True, grace_s=0, **fields)
    assert (again.status, again.entries, again.removed) == ("erased", 0, ())


@pytest.mark.parametrize("meanwhile", ["moved", "published"])
def test_entries_that_others_move_or_publish_meanwhile_are_counted_once_or_not_at_all(native, meanwhile):
    fill(native)
    native.later()

    def find(*arguments):
        hidden = find_hidden(*arguments)
        if meanwhile == "moved":
            native.merge(DAY_S)
        else:
            native.put([(BASE_MS, "k2")])
            native.publish()
        return hidden

    done = wipe(native, keys=("k",), now=True, grace_s=0, find=find)
    assert (done.status, done.entries, done.entries_removed, done.pending) == ("erased", 12, 12, ())
    assert (len(done.removed) > len(done.objects)) == (meanwhile == "moved")


def test_entries_of_the_quarantine_stay_out_of_the_time_of_the_newest_entry(merging):
    """The rewritten tables have windows as those of the quarantine, which no merge reads."""
    life = merging(settings={"max_early_s": DAY_S})
    life.put([(BASE_MS, "k")], "orders")
    life.put([(BASE_MS + 30_000 * DAY_S * 1000, key) for key in KEYS], "orders")
    life.publish()
    assert life.state.newest_ms == BASE_MS
    wipe(life, keys=("k2",), before_ms=MAX_TIMESTAMP_MS, now=True)
    assert QUARANTINE_S in {shards[0].shard.window_s for shards in life.state.tables.values()}
    assert life.state.newest_ms == BASE_MS
    life.later()
    life.merge()
    life.check()


def test_objects_with_only_erased_entries_are_removed_by_the_record(native):
    for topic in TOPICS:
        native.put([(BASE_MS + hour * HOUR_MS, "k") for hour in range(4)], topic)
        native.publish()
    native.later()
    number = native.state.number
    done = wipe(native)
    assert native.state.number == number + 1 and len(native.state.objects) == 1
    assert (done.status, done.remaining, done.pending) == ("hidden", (), done.removed)
    assert any("--grace 0" in step for step in done.to_do)
    native.check()
    # its bytes stay for running readers, and are deleted later
    assert wipe(native, now=True, grace_s=3600).status == "pending"
    native.clock.advance(2 * DAY_S)
    assert wipe(native, now=True, grace_s=7 * DAY_S).pending == done.removed
    done = wipe(native, now=True, grace_s=3600)
    assert (done.status, done.deleted) == ("erased", 1)


def test_a_batch_leaves_out_an_erased_queue_of_a_giant_slot(merging):
    life = merging(settings={"items": 13_000})
    numbers = np.arange(12_000)
    life.index.put_batch(batch(12_000, key="hot", queue_id=numbers % 3, timestamp_ms=BASE_MS + numbers * 1000))
    life.publish()
    wipe(life, "t", queue_id=1, before_ms=BASE_MS + 6_000_000)
    lookups = [Lookup(topic, "hot", max_count=12_000) for topic in ("u", "t")]
    with life.reader() as reader:
        nothing, answer = reader.query_many(lookups)
        assert answer.items == reader.query("t", "hot", max_count=12_000).items
    queues = Counter((item.queue_id, item.timestamp_ms < BASE_MS + 6_000_000) for item in answer)
    assert not nothing.items
    assert queues == {(0, True): 2000, (2, True): 2000, (0, False): 2000, (1, False): 2000, (2, False): 2000}


# short runs fail every second call, long runs each
@pytest.mark.parametrize(
    ("when", "first", "step"),
    [("before", 1, 2), *(pytest.param(*case, marks=pytest.mark.long) for case in (("before", 2, 2), ("after", 1, 1)))],
)
def test_a_storage_that_fails_at_any_call_leaves_the_old_answer_or_the_new_one(tmp_path, when, first, step):
    original = Merging(tmp_path / "made")
    fill(original, range(2))
    # this file has no other entries, so the log record removes it
    original.put([(BASE_MS, "k")], "orders")
    original.publish()
    original.later()
    original.merge(HOUR_S, end_s=BASE_MS // 1000 + HOUR_S)
    original.index.close()
    nth, struck = first - step, True
    while struck:
        nth += step
        life = original.copied(tmp_path / str(nth))
        try:
            storage = FaultStorage(life.storage)
            log = StorageLog(storage, life.clock)
            storage.fail("*", nth=nth, when=when)
            request = EraseRequest("orders", ("k",))
            with contextlib.suppress(TieredIndexError):
                log.open()
                erase(storage, log, request, life.clock, yes=True, now=True, grace_s=0, threads=1)
            struck = storage.calls() >= nth
            if life.state.expired != NOTHING:
                life.model.erase("orders", life.state.expired.tombstones[0].before_ms, key="k")
            life.check()
            life.index._lifecycle.refresh()
            life.check(life.index, [("orders", "k")])
            # if the erasure is repeated, it continues after the last finished step
            assert wipe(life, keys=("k",), now=True, grace_s=0).remaining == ()
            life.check(questions=[("orders", "k"), ("orders", "k2")])
        finally:
            life.close()
    assert nth > 20


def test_the_certificate_tells_what_remains(native, monkeypatch):
    fill(native, range(4))
    native.later()
    hidden = wipe(native, keys=("k",))
    assert (hidden.status, len(hidden.remaining)) == ("hidden", len(hidden.objects))
    assert any("writer" in said for said in hidden.unchecked)
    assert any("caches of readers" in said for said in hidden.unchecked)
    assert not any("noncurrent versions" in said for said in hidden.unchecked)
    monkeypatch.setattr(native.storage, "uri", "s3://bucket/index")
    assert any("noncurrent versions" in said for said in wipe(native, keys=("k",)).unchecked)
    name = next(iter(native.state.objects))
    native.storage.put(name, bytes(native.state.objects[name].size_bytes))
    done = wipe(native, keys=("k",), now=True, grace_s=0)
    assert done.status == "remains" and name in done.remaining and done.to_do


def test_an_export_and_the_topics_leave_it_out(native):
    fill(native, range(4))
    native.later()
    wipe(native, keys=("k",))
    with native.reader() as reader, reader.export() as batches:
        rows = [row for batch in batches for row in batch.to_pylist()]
    expected = [(e.topic, e.queue_id, e.offset) for e in native.model.entries if not native.model.has_expired(e)]
    assert sorted((row["topic"], row["queue_id"], row["offset"]) for row in rows) == sorted(expected)
    wipe(native)
    assert [topic.topic for topic in native.reader().topics().topics] == ["t"]


def test_what_others_cover_is_dropped_and_their_number_is_bounded(monkeypatch):
    def stones(*tombstones):
        return Expired(tombstones=tombstones)

    key, later = Tombstone.of("t", 5000, key="k"), Tombstone.of("t", 9000, key="k")
    queue, topic, other = Tombstone.of("t", 5000, queue_id=1), Tombstone.of("t", 8000), Tombstone.of("u", 5000, key="k")
    assert stones(key).joined(stones(later)).tombstones == (later,)
    assert stones(later).joined(stones(key)) == stones(later)
    assert stones(key, queue, other).joined(stones(topic)).tombstones == (other, topic)
    assert stones(later).joined(stones(topic)).tombstones == (later, topic)
    assert stones(key, later, other).joined(Expired((Horizon(8000, (("u", 4000),)),))).tombstones == (later, other)
    assert Tombstone.of("t", 5001).before_ms == 6000
    monkeypatch.setattr("tiered_index.service.jobs.erase.MOST_TOMBSTONES", 2)
    assert _check_bound(stones(key, queue), stones(topic)).tombstones == (topic,)
    with pytest.raises(InvalidArgument, match="3 tombstones; the limit is 2"):
        _check_bound(stones(key, queue), stones(other))


REFUSED = each(
    queue_id=(2**31, -(2**31) - 1, True, "1"),
    before_ms=(2**62, -(2**62), 1.5e12),
    keys=([], [""], 3, b"k", [3]),
    threads=(0,),
)


@pytest.mark.parametrize("fields", [*REFUSED, {"topic": ""}, {"keys": ["k"], "queue_id": 1}], ids=str)
def test_a_refused_erasure_leaves_the_index_as_it_was(stored, fields):
    stored.put([(BASE_MS, "k")], "orders")
    stored.publish()
    arguments = {"topic": "orders", "yes": True, "now": True, "clock": stored.clock}
    with pytest.raises(InvalidArgument):
        erase_index(stored.storage.uri, **arguments | fields)
    assert stored.state.expired == NOTHING
    stored.check()


def test_a_table_of_which_one_shard_is_erased_stays(native):
    native.put([(BASE_MS, "k")], "orders")
    native.publish()
    native.later()
    native.merge(DAY_S)
    (shard,) = native.state.objects.values()
    state = LogState(objects={name: replace(shard, name=name) for name in ("a", "b")})
    assert names_of_nothing_else(state, {"a": ScannedObject(hidden=1), "b": ScannedObject()}) == []
    assert names_of_nothing_else(state, {"a": ScannedObject(hidden=1)}) == []
    assert names_of_nothing_else(state, {"a": ScannedObject(hidden=1), "b": ScannedObject(hidden=1)}) == ["a", "b"]


def test_a_key_of_an_equal_hash_goes_too_without_fingerprints(life):
    keyed = life.preset == "native"
    assert key_hash("orders", "Aa") == key_hash("orders", "BB")
    life.put([(BASE_MS, "Aa"), (BASE_MS, "BB"), (BASE_MS, "x")], "orders")
    life.publish()
    life.later()
    done = wipe(life, keys=("Aa",), now=True, grace_s=0)
    assert (done.by_hash_alone, done.entries_removed) == (not keyed, 1 if keyed else 2)
    life.check()
    assert len(life.index.query("orders", "x")) == 1
    assert len(life.index.query("orders", "BB")) == keyed


def test_a_merge_that_began_before_the_tombstone_is_followed(native):
    fill(native, range(4))
    native.later()
    stale = native.plan()
    wipe(native, keys=("k",))
    for job in stale.rewrites:
        results = [task.run(native.storage, native.clock.now_ms()) for task in job.tasks]
        publish(job, results, native.log())
    native.check()
    done = wipe(native, keys=("k",), now=True, grace_s=0)
    assert (done.status, done.entries_removed) == ("erased", 4)
    native.check()
