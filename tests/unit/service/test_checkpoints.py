"""Checkpoints of the storage's log: the cost of an opening, the times of writing, the kept ones, and races
with sweeps.
"""

import random
import threading
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.benchmarks.scale import synthetic_objects
from tests.support.cases import each
from tests.support.changes import replace
from tests.support.log_records import GENESIS, an_object, checkpoint_document, open_log, publish
from tests.support.measuring import measured
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader
from tiered_index.base.clock import ManualClock
from tiered_index.errors import CorruptFile, DiskFull, StorageBehind, StorageUnavailable
from tiered_index.format.layout import SlotMap
from tiered_index.format.names import checkpoint_name, checkpoint_of, log_name
from tiered_index.service.jobs.verify import _check_log
from tiered_index.service.jobs.verify_report import Report
from tiered_index.service.log import checkpoint
from tiered_index.service.log import log as log_module
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import ArchivedSegment, LogRecord, TableShard
from tiered_index.service.log.state import CHAINED, LogState
from tiered_index.service.read.segments.segments import Segments, inline_catalog
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.metering import MeteredStorage

EPOCH = 1


def a_segment(number, store="s"):
    return ArchivedSegment(f"segments/{store}/{number:020d}/a.log", store, number * 100, 100, 1, 2, 152, 3)


def a_log(storage, objects=0, at_once=1):
    log = StorageLog(storage, ManualClock())
    log.create(GENESIS)
    assert log.claim_epoch() == EPOCH
    log.write_checkpoint()
    for begin in range(0, objects, at_once):
        publish(log, EPOCH, tuple(an_object(n) for n in range(begin, min(begin + at_once, objects))))
    return log


def opened(storage):
    """Return the log state that a fresh reader sees, and its requests."""
    metered = MeteredStorage(storage)
    return StorageLog(metered, ManualClock()).open(), metered.total.requests_by_kind


def stored_checkpoints(storage):
    return [checkpoint_of(info.name)[0] for info in storage.list("checkpoint/")]


def named(state):
    """Return the name of a state's checkpoint."""
    return checkpoint_name(state.number, state.digest)


def test_a_record_that_is_lost_is_found_by_whoever_reads_on_or_writes():
    """The first missing record need not be the log's end, so nobody may write a record in its place."""
    storage = MemoryStorage()
    log = a_log(storage, objects=2)
    reader, job = StorageLog(storage, ManualClock()), StorageLog(storage, ManualClock())
    stood = reader.open()
    job.open()
    for n in range(10, 13):
        publish(log, EPOCH, (an_object(n),))
    lost = log_name(stood.number + 1)
    storage.delete_many([lost])
    for act in (reader.refresh, lambda: publish(job, EPOCH, (an_object(20),))):
        with pytest.raises(CorruptFile, match="hole"):
            act()
    assert reader.state == stood and lost not in {info.name for info in storage.list("log/")}


# the times of writing


@pytest.fixture
def large(monkeypatch):
    """Count states of some 40 objects and more as large."""
    monkeypatch.setattr(log_module, "_SMALL_BYTES", 1500)


def a_shard(number):
    part = TableShard(f"{number // 4:016x}", 3600 * number, 3600, SlotMap(7), number % 4, number % 4 + 1, "writer")
    return replace(an_object(number), name=f"data/{number}/a.index", file_id=f"{number}", shard=part)


@pytest.mark.usefixtures("large")
def test_a_large_checkpoint_is_written_after_every_32nd_record():
    """Also if several processes append in turn. A reader replays the records after it."""
    metered = MeteredStorage(MemoryStorage())
    log = a_log(metered, objects=300, at_once=100)
    job, written = open_log(metered), [max(stored_checkpoints(metered.inner))]
    for n in range(100):
        appending = job if n % 3 == 0 and n < 80 else log
        publish(appending, EPOCH, (an_object(1000 + n), a_shard(n)), remove=[an_object(n).name] if n % 3 == 0 else [])
        there = stored_checkpoints(metered.inner)
        written += [there[-1]] if there[-1] > written[-1] else []
        state, requests = opened(metered.inner)
        assert state == appending.state and list(state.objects) == list(appending.state.objects)
        assert requests == {"list": 2, "get": 1 + state.number - there[-1]} and requests["get"] <= 32
    # at most: a process writes the next one without knowledge of the other's
    gaps = [after - before for before, after in pairwise(written)]
    assert max(gaps) == 32 and len(gaps) <= 6
    assert len(stored_checkpoints(metered.inner)) <= 2 + len(gaps) // 2
    report = Report()
    _check_log(metered.inner, report)
    assert [finding for finding in report.findings if finding.part == "checkpoint"] == []
    assert report.checked["checkpoints"] > 1


@pytest.mark.usefixtures("large")
def test_an_opening_reads_the_records_after_a_large_checkpoint_side_by_side():
    storage = MemoryStorage()
    log = a_log(storage, objects=300, at_once=100)
    begun = max(stored_checkpoints(storage))
    for n in range(8):
        publish(log, EPOCH, (an_object(1000 + n),))
    records = 8 + log.state.number - 8 - begun
    faulty, together = FaultStorage(storage), threading.Barrier(records)
    faulty.meanwhile("get", lambda: together.wait(60), times=None, name_prefix="log/")
    with IndexReader.open(storage_backend=faulty, background=False, query_threads=16) as reader:
        assert len(reader.files()) == 308


def test_the_values_of_a_checkpoint_are_checked():
    log = a_log(MemoryStorage(), objects=20)
    data = publish(log, EPOCH, tuple(map(a_shard, range(100, 104)))).encode()
    assert LogState.decode(data, "checkpoint") == log.state
    document = checkpoint_document(data)
    objects = document["objects"]
    wrong = each(
        file_id=[7], tail=["a/b", "..", 5], sequence=[-1], second_min=[10**9], count=[0], slot_high=[0], table=[99]
    )
    columns = [{**objects, name: [*objects[name][:-1], value]} for change in wrong for name, value in change.items()]
    # a size that its parts exceed, and columns that are too short
    columns += [{**objects, "size_bytes": [*objects["size_bytes"][:-1], 1]}, {**objects, "count": objects["count"][1:]}]
    columns.append({**objects, "generation": []})
    for changed in columns:
        with pytest.raises(CorruptFile, match="is invalid"):
            LogState.decode(checkpoint.encode({**document, "objects": changed}), "checkpoint")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("operation", "error"), [("put", StorageUnavailable), ("put", DiskFull), ("delete_many", DiskFull)]
)
def test_an_append_never_fails_for_a_checkpoint(operation, error, when):
    storage = FaultStorage(MemoryStorage())
    log = a_log(storage)
    storage.fail(operation, name_prefix="checkpoint/" if operation == "put" else "", times=None, when=when, error=error)
    for n in range(30):
        assert an_object(n).name in publish(log, EPOCH, (an_object(n),)).objects
    assert opened(storage.inner)[0] == log.state
    storage.clear()
    # the next checkpoint replaces the missing ones
    for n in range(40, 60):
        publish(log, EPOCH, (an_object(n),))
    assert opened(storage.inner) == (log.state, {"list": 2, "get": 1})
    # the next process that opens the log deletes checkpoints of puts whose response was lost
    next_one = open_log(storage)
    for n in range(80, 89):
        publish(next_one, EPOCH, (an_object(n),))
    assert len(stored_checkpoints(storage.inner)) <= 10


# the kept checkpoints


@pytest.mark.parametrize("is_short_lived", [False, True])
def test_the_newest_two_are_kept_and_nothing_is_listed_for_it(is_short_lived):
    """A writer that lives for one record only leaves them to the next one."""
    metered, foreign = MeteredStorage(MemoryStorage()), "checkpoint/00000000000000000001/00000000000000000001"
    for name in ("checkpoint/readme", foreign):
        metered.put(name, b"not ours")
    log = a_log(metered)
    with measured() as usage:
        for n in range(50):
            log = open_log(metered) if is_short_lived else log
            publish(log, EPOCH, (an_object(n),))
            names = [info.name for info in metered.inner.list("checkpoint/")]
            assert len(names) < 2 + 12
            assert names[-2:] == [named(log.state), "checkpoint/readme"] and names.count(foreign) == 1
            assert [checkpoint_of(name)[0] for name in names[-3:-1]] == [log.state.number - 1, log.state.number]
    assert opened(metered.inner) == (log.state, {"list": 2, "get": 1})
    if not is_short_lived:
        assert usage.requests_by_kind["put"] == usage.requests_by_kind["put_if_absent"] == 50
        assert usage.requests_by_kind["delete_many"] <= 50 / 8 + 1
        # the log is listed before each record, but checkpoints are not
        assert usage.requests_by_kind["list"] == 50


@pytest.mark.parametrize(
    "damaged", [b"ahead of the log", LogState(1, 0, GENESIS, digest="a" * 32, chain="a" * 16).encode()]
)
def test_a_damaged_checkpoint_is_not_one_of_the_two(damaged):
    storage = MemoryStorage()
    a_log(storage)
    storage.put(checkpoint_name(10**6, "a" * 32), damaged)
    log = open_log(storage)
    for n in range(20):
        publish(log, EPOCH, (an_object(n),))
        assert stored_checkpoints(storage)[-1] == log.state.number
    assert stored_checkpoints(storage)[-2] == log.state.number - 1
    assert opened(storage) == (log.state, {"list": 2, "get": 1})


# opening while checkpoints are swept


@pytest.mark.parametrize("times", [1, 10])
def test_a_checkpoint_that_is_swept_before_it_is_read(times):
    storage = MemoryStorage()
    log = a_log(storage, objects=3)
    numbers = iter(range(100, 1000))

    def go_on():
        for _ in range(20):
            publish(log, EPOCH, (an_object(next(numbers)),))

    racing = FaultStorage(storage)
    racing.meanwhile("list", go_on, times=times, when="after", name_prefix="checkpoint/")
    state, requests = opened(racing)
    assert state == log.state
    assert requests["list"] == min(times, 2) + 2
    if times < 3:
        assert requests["get"] == times + 1
    else:  # it gives up, and reads the log from its beginning
        assert log.state.number <= requests["get"] <= log.state.number + 2 + 10


# the content


@st.composite
def logs(draw):
    """Draw records that a writer may append. Return them, and plain dicts of the content after each."""
    objects, segments, positions, epoch = {}, {}, {}, 0
    records, expected = [LogRecord(1, "create", 0, "x", 0, genesis=GENESIS)], [([], [], {}, 0)]
    for number in range(2, draw(st.integers(2, 14))):
        epoch += draw(st.integers(0, 1))
        fresh = {o.name: o for o in map(an_object, range(100 * number, 100 * number + draw(st.integers(0, 3))))}
        stores = draw(st.sets(st.sampled_from("st")))
        archived = {c.name: c for c in (inline_catalog([a_segment(number, store)]) for store in stores)}
        gone = draw(st.sets(st.sampled_from([*objects, *segments]))) if objects or segments else set()
        again = {s.name: s for s in (segments[name] for name in sorted(gone & segments.keys())[:1])}
        at = draw(st.dictionaries(st.sampled_from("ab"), st.integers(0, 9)))
        adds, removes = tuple(fresh.values()), tuple(sorted(gone))
        segs = tuple((archived | again).values())  # a record may remove a catalog and add it again
        kind = draw(st.sampled_from(["publish", "new"]))
        records.append(LogRecord(number, kind, epoch, "x", 0, adds, removes, at, catalogs=segs))
        objects = {name: o for name, o in objects.items() if name not in gone} | fresh
        segments = {name: s for name, s in segments.items() if name not in gone} | archived | again
        positions = positions | {name: max(value, positions.get(name, 0)) for name, value in at.items()}
        expected.append((list(objects), list(segments), positions, epoch))
    return records, expected


@settings(max_examples=25)
@given(logs(), st.integers(0, 13), st.integers(0, 13))
def test_from_every_checkpoint_the_state_is_the_fold_of_all_records(log, cut, damaged):
    records, expected = log
    pairs, previous = [], ""
    for record in records:
        name = log_name(record.number)
        pairs.append((LogRecord.decode(replace(record, previous=previous).encode(), name), name))
        previous = pairs[-1][0].digest
    states = [LogState()]
    for record, name in pairs:
        states.append(states[-1].apply(record, name))
    assert LogState().replayed(pairs) == states[-1]
    assert states[min(cut, len(records))].replayed(pairs[cut:]) == states[-1]
    assert states[-1].replayed([]) is states[-1]
    # a replay does not change the state that it began with
    for number, (state, (objects, segments, positions, epoch)) in enumerate(zip(states[1:], expected, strict=True), 1):
        assert (state.number, list(state.objects), list(state.catalogs)) == (number, objects, segments)
        assert (state.positions, state.epoch, state.genesis) == (positions, epoch, GENESIS)
    storage = MemoryStorage()
    for record, name in pairs:
        storage.put(name, record.encode())
    for state in states[1:]:
        storage.put(checkpoint_name(state.number, state.digest), state.encode())
        opened_state, requests = opened(storage)
        assert opened_state == states[-1]
        assert list(opened_state.objects) == list(states[-1].objects)
        assert requests["get"] == 1 + len(records) - state.number
    for state in states[damaged + 1 :]:
        storage.put(checkpoint_name(state.number, state.digest), state.encode()[:-3])
    assert opened(storage)[0] == states[-1]


# a storage that was restored to an earlier state


def restored(storage, clock, last):
    """Delete the log's records behind `last`, and keep the checkpoints."""
    storage.delete_many([info.name for info in storage.list("log/") if int(info.name.rpartition("/")[2]) > last])
    clock.advance(10)


def test_a_state_of_another_history_under_the_name_of_this_one_is_not_used(caplog):
    """A tool that copies a bucket may put bytes under another name."""
    clock = ManualClock()
    storage = MemoryStorage(clock=clock)
    other = a_log(storage, objects=6).state
    restored(storage, clock, 4)
    log = open_log(storage, clock)
    for number in range(100, 104):
        publish(log, EPOCH, (an_object(number),))
    assert log.state.number == other.number
    clock.advance(10)
    storage.put(named(log.state), other.encode())
    assert StorageLog(storage, clock).open(checks=False) == log.state
    assert "the checkpoint's digest differs from its name" in caplog.text


@pytest.mark.parametrize("is_of_this_log", [True, False])
def test_a_checkpoint_older_than_the_known_records_is_compared_with_the_log(is_of_this_log):
    clock = ManualClock()
    storage = MemoryStorage(clock=clock)
    log = a_log(storage, objects=6)
    older_objects = {name: storage.get(name) for name in (named(log.state), log_name(log.state.number))}
    if not is_of_this_log:
        restored(storage, clock, 4)
        log = open_log(storage, clock)
    for number in range(CHAINED + 20):
        publish(log, EPOCH, (an_object(100 + number),))
    for name, data in older_objects.items():
        storage.put(name, data)
    if is_of_this_log:
        assert opened(storage) == (log.state, {"list": 2, "get": 3})
    else:
        with pytest.raises(StorageBehind, match="two histories"):
            opened(storage)


@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 40), max_size=12), st.booleans()), max_size=12))
@settings(max_examples=20)
def test_a_checkpoint_has_the_whole_state(steps):
    log = a_log(MemoryStorage())
    for number, (count, gone, of_tables) in enumerate(steps):
        make = a_shard if of_tables else an_object
        added = tuple(make(100 * number + n) for n in range(count))
        names = list(log.state.objects)
        state = publish(log, EPOCH, added, remove=sorted({names[n] for n in gone if n < len(names)}))
        decoded = LogState.decode(state.encode(), "checkpoint")
        assert (decoded, decoded.digest, decoded.chain) == (state, state.digest, state.chain)
        assert list(decoded.objects) == list(state.objects) and decoded.encode() == state.encode()
        segment = a_segment(number)
        state = log.append(
            "segment", EPOCH, lambda s, of=segment: LogRecord(0, "archive", EPOCH, "", 0, **Segments(s).change([of]))
        )
        assert LogState.decode(state.encode(), "checkpoint") == state


def test_a_checkpoint_of_a_lost_history_that_a_writer_deletes_meanwhile_is_no_second_history():
    storage = MemoryStorage()
    log = StorageLog(storage, ManualClock())
    log.create(GENESIS)
    for number in range(2):
        publish(log, 0, (an_object(number),))
    # as after a restore of the log without its last records
    lost = [checkpoint for checkpoint in storage.list("checkpoint/") if checkpoint_of(checkpoint.name)[0] == 2]
    storage.delete_many([log_name(2), log_name(3), *(checkpoint.name for checkpoint in lost)])
    faulty = FaultStorage(storage)

    def go_on():
        writer = open_log(storage)
        for number in range(2, 5):
            publish(writer, 0, (an_object(number),))

    faulty.meanwhile("list", go_on, name_prefix="log/")
    state = StorageLog(faulty, ManualClock()).open()
    assert state == open_log(storage).state and (state.number, len(state.objects)) == (4, 3)


# lookup tables that a state takes over from the state before

CARRIED = ("files", "tables", "_newest_s")


def look(state):
    for name in CARRIED:
        getattr(state, name)


@pytest.mark.parametrize("seed", range(20))
def test_tables_that_a_state_carries_over_equal_fresh_ones(seed):
    chance, log = random.Random(seed), a_log(MemoryStorage())
    # 200 shards and files, and some files have a second object
    stock = list(synthetic_objects(200, GENESIS.layout.slots))
    stock += [replace(stored, name=f"{stored.name}x", sequence=1) for stored in chance.sample(stock, 3 * (seed % 2))]
    chance.shuffle(stock)
    first = log.state
    for _ in range(38):
        before, held = log.state, list(log.state.objects)
        remove = chance.sample(held, min(len(held), chance.choice((0, 0, 1, 4))))
        add = tuple(stock.pop() for _ in range(min(len(stock), chance.choice((0, 1, 5)))))
        if chance.random() < 0.7:
            look(before)
        state = publish(log, EPOCH, add, remove=remove)
        fresh = replace(state)
        for name in CARRIED:
            assert getattr(state, name) == getattr(fresh, name), name
        assert list(state.files) == list(fresh.files)
        gone = {before.objects[name].file for name in remove}
        assert state.changed_since(before) == gone | {stored.file for stored in add}
        assert state.changed_since(first) is not None and state.changed_since(state) == frozenset()


def test_an_object_that_appears_and_vanishes_in_one_step_leaves_its_files_other_one():
    original = next(stored for stored in synthetic_objects(9, GENESIS.layout.slots) if stored.shard is None)
    log = a_log(MemoryStorage())
    state = publish(log, EPOCH, (original,))
    look(state)
    twin, number = replace(original, name=f"{original.name}x"), state.number
    added = LogRecord(number + 1, "publish", EPOCH, "a", 0, (twin,), previous=state.digest, digest="b" * 32)
    removed = LogRecord(number + 2, "publish", EPOCH, "a", 0, remove=(twin.name,), previous=added.digest)
    state = state.replayed([(added, "added"), (removed, "removed")])
    assert state.files == replace(state).files == {original.file_id: original}
