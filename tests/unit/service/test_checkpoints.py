"""Checkpoints of the storage's log: the cost of an opening, the times of writing, the kept ones, and races
with sweeps.
"""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.log_records import GENESIS, an_object, open_log, publish
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader
from tiered_index.clock import ManualClock
from tiered_index.errors import (
    BudgetExceeded,
    CorruptFile,
    DiskFull,
    StorageBehind,
    StorageUnavailable,
    UnsupportedVersion,
    WriterFenced,
)
from tiered_index.format.names import base_of, checkpoint_name, checkpoint_of, log_name
from tiered_index.format.slots import SlotMap
from tiered_index.service.checks.checks import _check_log
from tiered_index.service.checks.report import Report
from tiered_index.service.log import log as log_module
from tiered_index.service.log import state as state_module
from tiered_index.service.log import summary as summary_module
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import ArchivedSegment, LogRecord, TableShard, decode_document, encode_document
from tiered_index.service.log.state import CHAINED, LogState
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.metering import MeteredStorage, Usage

EPOCH = 1


def a_segment(number, store="s"):
    return ArchivedSegment(f"segments/{store}/{number:020d}/a.log", store, number * 100, 100, 1, 2, 152, 3)


def a_log(storage, objects=0, at_once=1):
    log = StorageLog(storage, ManualClock())
    log.create(GENESIS)
    assert log.claim_epoch() == EPOCH
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


# the cost of an opening


@pytest.mark.parametrize(("objects", "at_once"), [(0, 1), (1, 1), (100, 10), (2_001, 500)])
def test_a_reader_of_any_number_of_files_opens_with_three_requests(objects, at_once):
    storage = MemoryStorage()
    log = a_log(storage, objects=objects, at_once=at_once)
    state, requests = opened(storage)
    assert state == log.state
    assert len(state.objects) == objects
    assert requests == {"list": 2, "get": 1}
    with IndexReader.open(storage_backend=storage, background=False) as reader:
        assert reader.storage.total.requests_by_kind == {"list": 2, "get": 1}
        assert len(reader.files()) == objects
        reader.refresh()
        assert reader.storage.total.requests_by_kind == {"list": 3, "get": 1}


def test_a_checkpoint_of_objects_and_none_is_one_line_of_json():
    for objects in (0, 1, 3):
        document = a_log(MemoryStorage(), objects=objects).state.encode().rpartition(b"\n#crc32 ")[0]
        members = json.loads(document)
        assert list(members)[:6] == ["version", "kind", "number", "epoch", "genesis", "objects"]
        assert list(members)[6:] == ["positions", "digest", "chain"]
        assert document == json.dumps(members, separators=(",", ":")).encode()


@pytest.mark.parametrize("lost", [1, 2, 5])
def test_each_record_without_its_checkpoint_costs_one_request_more(lost):
    storage = FaultStorage(MemoryStorage())
    log = a_log(storage, objects=1000, at_once=50)
    storage.fail("put", name_prefix="checkpoint/", times=None)
    for n in range(lost):
        publish(log, EPOCH, (an_object(2000 + n),))
    storage.clear()
    state, requests = opened(storage.inner)
    assert state == log.state
    assert requests == {"list": 2, "get": 1 + lost}
    publish(log, EPOCH, (an_object(3000),))  # this checkpoint replaces the missing ones
    assert opened(storage.inner) == (log.state, {"list": 2, "get": 1})


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
    storage.delete(lost)
    for act in (reader.refresh, lambda: publish(job, EPOCH, (an_object(20),))):
        with pytest.raises(CorruptFile, match="hole"):
            act()
    assert reader.state == stood and lost not in {info.name for info in storage.list("log/")}


def test_records_that_were_read_within_a_budget_are_not_read_again():
    storage = MemoryStorage()
    log = a_log(storage, objects=2)
    metered = MeteredStorage(storage)
    reader = StorageLog(metered, ManualClock())
    first = reader.open().number
    for n in range(10, 20):
        publish(log, EPOCH, (an_object(n),))
    for reached in (first + 3, first + 6, first + 9):
        with pytest.raises(BudgetExceeded), metered.measure(Usage(max_requests=4)):
            reader.refresh()
        assert reader.state.number == reached
    with metered.measure(Usage(max_requests=2)):
        assert reader.refresh() == log.state


# the times of writing


@pytest.fixture
def large(monkeypatch):
    """Count states of more than five objects as large: their checkpoints have rows, and changes."""
    monkeypatch.setattr(state_module, "MOST_DOCUMENTS", 5)
    monkeypatch.setattr(log_module, "_WHOLE_BYTES", 5000)
    monkeypatch.setattr(state_module, "_MOST_RECORDS", 20)


def a_shard(number):
    part = TableShard(f"{number // 4:016x}", 3600 * number, 3600, SlotMap(7), number % 4, number % 4 + 1, "writer")
    return replace(an_object(number), name=f"data/{number}/a.index", file_id=f"{number}", shard=part)


@pytest.mark.usefixtures("large")
def test_a_record_of_a_large_state_costs_its_changes_and_is_opened_by_one_request_more():
    metered = MeteredStorage(MemoryStorage())
    log = a_log(metered, objects=600, at_once=200)
    whole, kinds = len(log.state.encode()), []
    for n in range(60):
        publish(log, EPOCH, (an_object(1000 + n), a_shard(n)), remove=[an_object(n).name] if n % 3 == 0 else [])
        name, size_bytes = max((info.name, info.size_bytes) for info in metered.inner.list("checkpoint/"))
        kinds.append(bool(base_of(name)))
        state, requests = opened(metered.inner)
        assert state == log.state and list(state.objects) == list(log.state.objects)
        assert requests == {"list": 2, "get": 2 if base_of(name) else 1}
        if base_of(name):
            assert size_bytes < whole / 7
        assert len(stored_checkpoints(metered.inner)) < 12
    assert kinds.count(False) == 60 // 20
    for _ in range(2):  # the next writers continue with the same whole checkpoint
        log = open_log(metered)
        publish(log, EPOCH, (an_object(5000 + log.state.number),))
        assert base_of(max(info.name for info in metered.inner.list("checkpoint/")))
    report = Report()
    _check_log(metered.inner, report)
    assert [found for found in report.findings if found.part == "checkpoint"] == []
    assert report.checked["checkpoints"] > 1


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("share", [1, 3])
def test_two_processes_do_not_rely_on_whole_checkpoints_that_the_other_has_deleted(share):
    """A writer and a job append in turn. Then the job ends."""
    storage = MemoryStorage()
    log = a_log(storage, objects=400, at_once=200)
    job = open_log(storage)
    for n in range(120):
        one = job if n % (share + 1) and n < 90 else log
        publish(one, EPOCH, (an_object(1000 + n),))
        state, requests = opened(storage)
        assert state == one.state
        assert requests["get"] <= 2
        assert len(stored_checkpoints(storage)) < 24


@pytest.mark.usefixtures("large")
def test_a_record_that_changes_much_is_followed_by_a_whole_checkpoint():
    storage = MemoryStorage()
    log = a_log(storage, objects=400, at_once=100)
    gone = [an_object(n).name for n in range(200)]
    publish(log, EPOCH, tuple(an_object(1000 + n) for n in range(100)), remove=gone)
    assert max(info.name for info in storage.list("checkpoint/")) == named(log.state)
    assert opened(storage) == (log.state, {"list": 2, "get": 1})


@pytest.mark.usefixtures("large")
def test_segments_and_losses_are_among_the_changes():
    storage = MemoryStorage()
    log = a_log(storage, objects=600, at_once=200)
    for n in range(8):
        make = LogRecord(0, "a", EPOCH, "", 0, archive=(a_segment(n),), remove=(an_object(n).name,))
        log.append("s", EPOCH, lambda state, make=make: make)
        gone = a_segment(n - 1).name if n % 2 else an_object(100 + n).name
        publish(log, EPOCH, remove=(gone,))
        assert base_of(max(info.name for info in storage.list("checkpoint/")))
        assert opened(storage) == (log.state, {"list": 2, "get": 2})


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("lost", ["whole", "changes", "both"])
@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_changes_without_their_whole_checkpoint_cost_requests_only(lost, how):
    storage = MemoryStorage()
    log = a_log(storage, objects=600, at_once=200)
    publish(log, EPOCH, (an_object(1000),))
    names = [info.name for info in storage.list("checkpoint/")]
    for name in names:
        if lost == "both" or bool(base_of(name)) == (lost == "changes"):
            storage.delete(name)
            if how == "damaged":
                storage.put(name, b"damaged")
    assert opened(storage)[0] == log.state
    next_one = open_log(storage)
    publish(next_one, EPOCH, (an_object(2000),))
    assert opened(storage)[0] == next_one.state
    assert opened(storage)[1]["get"] <= 2


@pytest.mark.usefixtures("large")
def test_changes_since_a_checkpoint_of_another_history_are_refused():
    logs = [a_log(MemoryStorage(), objects=600, at_once=200) for _ in range(2)]
    bases = [LogState.decode(log.state.encode(), "base") for log in logs]
    state = publish(logs[0], EPOCH, (an_object(1000),))
    base = logs[0]._checkpoints._base
    data = state.encode_since(base)
    assert LogState.decode(data, "changes", bases[0]) == state
    for other in (None, bases[1], state):
        with pytest.raises(CorruptFile, match="base is another state"):
            LogState.decode(data, "changes", other)


@pytest.mark.usefixtures("large")
def test_a_checkpoint_of_rows_is_refused_by_name_in_versions_before():
    log = a_log(MemoryStorage(), objects=20)
    data = publish(log, EPOCH, tuple(map(a_shard, range(100, 104)))).encode()
    assert LogState.decode(data, "checkpoint") == log.state
    with pytest.raises(UnsupportedVersion):
        decode_document(data, "checkpoint", newest=4)
    document = json.loads(data.rpartition(b"\n#crc32")[0])
    for place, wrong in ((0, 7), (1, "a/b"), (4, 10**9), (6, 0), (8, 10**9), (14, 99), (16, 0)):
        rows = [list(row) for row in document["objects"]]
        rows[-1][place] = wrong
        with pytest.raises(CorruptFile, match="is invalid"):
            LogState.decode(encode_document({**document, "objects": rows}), "checkpoint")


def test_a_document_an_object_takes_three_times_the_bytes_of_its_row(monkeypatch):
    state = a_log(MemoryStorage()).state
    state = replace(state, objects={o.name: o for o in map(a_shard, range(1000))})
    documents = len(state.encode())
    monkeypatch.setattr(state_module, "MOST_DOCUMENTS", 999)
    assert len(replace(state).encode()) < documents / 3


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", [StorageUnavailable, DiskFull])
@pytest.mark.parametrize("operation", ["put", "delete_many"])
def test_an_append_never_fails_for_a_checkpoint(operation, error, when):
    storage = FaultStorage(MemoryStorage())
    log = a_log(storage)
    storage.fail(operation, name_prefix="checkpoint/" if operation == "put" else "", times=None, when=when, error=error)
    for n in range(30):
        assert an_object(n).name in publish(log, EPOCH, (an_object(n),)).objects
    assert opened(storage.inner)[0] == log.state
    storage.clear()
    for n in range(40, 60):
        publish(log, EPOCH, (an_object(n),))
    assert opened(storage.inner) == (log.state, {"list": 2, "get": 1})
    # the next process that opens the log deletes checkpoints of puts whose response was lost
    next_one = open_log(storage)
    for n in range(80, 89):
        publish(next_one, EPOCH, (an_object(n),))
    assert len(stored_checkpoints(storage.inner)) <= 10


# the kept checkpoints


def test_the_newest_two_are_kept_and_nothing_is_listed_for_it():
    metered = MeteredStorage(MemoryStorage())
    log = a_log(metered)
    with metered.measure() as usage:
        for n in range(100):
            publish(log, EPOCH, (an_object(n),))
            there = stored_checkpoints(metered.inner)
            assert there[-2:] == [log.state.number - 1, log.state.number]
            assert len(there) < 10
    assert usage.requests_by_kind["put"] == usage.requests_by_kind["put_if_absent"] == 100
    assert usage.requests_by_kind["delete_many"] <= 100 / 8
    # the log is listed before each record, and once per 8 objects for the summary, but checkpoints are not
    assert usage.requests_by_kind["list"] == 100 + 100 // 8


@pytest.mark.parametrize("records", [1, 2])
def test_checkpoints_of_short_lived_writers_are_swept_by_the_next(records):
    storage = MemoryStorage()
    storage.put("checkpoint/readme", b"not ours")
    storage.put("checkpoint/00000000000000000001/00000000000000000001", b"not ours")
    a_log(storage)
    for n in range(40):
        log = open_log(storage)
        for k in range(records):
            publish(log, EPOCH, (an_object(2 * n + k),))
        names = [info.name for info in storage.list("checkpoint/")]
        assert len(names) < 2 + 12
        assert names[-2] == named(log.state)
        assert names[-1] == "checkpoint/readme"
        assert names.count("checkpoint/00000000000000000001/00000000000000000001") == 1
    assert opened(storage) == (log.state, {"list": 2, "get": 1})


@pytest.mark.parametrize("damaged", [b"ahead of the log", LogState(1, 0, GENESIS).encode()])
def test_a_damaged_checkpoint_is_not_one_of_the_two(damaged):
    storage = MemoryStorage()
    a_log(storage)
    storage.put(checkpoint_name(10**6), damaged)
    log = open_log(storage)
    for n in range(20):
        publish(log, EPOCH, (an_object(n),))
        assert stored_checkpoints(storage)[-1] == log.state.number
    assert stored_checkpoints(storage)[-2] == log.state.number - 1
    assert opened(storage) == (log.state, {"list": 2, "get": 1})


def test_a_fenced_writer_deletes_nothing_of_its_successor():
    storage = MemoryStorage()
    old = a_log(storage, objects=9)
    new = open_log(storage)
    epoch = new.claim_epoch()
    for n in range(20, 23):
        publish(new, epoch, (an_object(n),))
    before = stored_checkpoints(storage)
    with pytest.raises(WriterFenced):
        publish(old, EPOCH, (an_object(100),))
    assert stored_checkpoints(storage) == before
    assert opened(storage) == (new.state, {"list": 2, "get": 1})


# opening while checkpoints are swept


@pytest.mark.parametrize("times", [1, 2, 3, 10])
def test_a_checkpoint_that_is_swept_before_it_is_read(times):
    storage = MemoryStorage()
    log = a_log(storage, objects=3)
    numbers = iter(range(100, 1000))

    def go_on():
        for _ in range(20):
            publish(log, EPOCH, (an_object(next(numbers)),))

    racing = FaultStorage(storage)
    racing.meanwhile("list", go_on, times=times, when="after", name_prefix="checkpoint/")
    metered = MeteredStorage(racing)
    state = StorageLog(metered, ManualClock()).open()
    assert state == log.state
    requests = metered.total.requests_by_kind
    assert requests["list"] == min(times, 2) + 2
    if times < 3:
        assert requests["get"] == times + 1
    else:  # it gives up, and reads the log from its beginning
        assert log.state.number <= requests["get"] <= log.state.number + 2 + 10


def test_records_that_arrive_between_the_two_listings_are_read():
    storage = MemoryStorage()
    log = a_log(storage, objects=3)
    racing = FaultStorage(storage)
    racing.meanwhile("list", lambda: publish(log, EPOCH, (an_object(10),)), when="after", name_prefix="checkpoint/")
    assert opened(racing) == (log.state, {"list": 2, "get": 2})


# the content


@st.composite
def logs(draw):
    """Draw records that a writer may append. Return them, and plain dicts of the content after each."""
    objects, segments, positions, epoch = {}, {}, {}, 0
    records, expected = [LogRecord(1, "create", 0, "x", 0, genesis=GENESIS)], [([], [], {}, 0)]
    for number in range(2, draw(st.integers(2, 14))):
        epoch += draw(st.integers(0, 1))
        fresh = {o.name: o for o in map(an_object, range(100 * number, 100 * number + draw(st.integers(0, 3))))}
        archived = {s.name: s for s in (a_segment(number, store) for store in draw(st.sets(st.sampled_from("st"))))}
        gone = draw(st.sets(st.sampled_from([*objects, *segments]))) if objects or segments else set()
        again = {s.name: s for s in (segments[name] for name in sorted(gone & segments.keys())[:1])}
        at = draw(st.dictionaries(st.sampled_from("ab"), st.integers(0, 9)))
        adds, removes = tuple(fresh.values()), tuple(sorted(gone))
        segs = tuple((archived | again).values())  # a record may remove a segment and add it again
        kind = draw(st.sampled_from(["publish", "new"]))
        records.append(LogRecord(number, kind, epoch, "x", 0, adds, removes, at, None, segs))
        objects = {name: o for name, o in objects.items() if name not in gone} | fresh
        segments = {name: s for name, s in segments.items() if name not in gone} | archived | again
        positions = positions | {name: max(value, positions.get(name, 0)) for name, value in at.items()}
        expected.append((list(objects), list(segments), positions, epoch))
    return records, expected


@settings(deadline=None)
@given(logs(), st.integers(0, 13), st.integers(0, 13))
def test_from_every_checkpoint_the_state_is_the_fold_of_all_records(made, cut, damaged):
    records, expected = made
    names = [log_name(record.number) for record in records]
    pairs = list(zip(records, names, strict=True))
    states = [LogState()]
    for record, name in pairs:
        states.append(states[-1].apply(record, name))
    assert LogState().replayed(pairs) == states[-1]
    assert states[min(cut, len(records))].replayed(pairs[cut:]) == states[-1]
    assert states[-1].replayed([]) is states[-1]
    # a replay does not change the state that it began with
    for number, (state, (objects, segments, positions, epoch)) in enumerate(zip(states[1:], expected, strict=True), 1):
        assert (state.number, list(state.objects), list(state.archive)) == (number, objects, segments)
        assert (state.positions, state.epoch, state.genesis) == (positions, epoch, GENESIS)
    storage = MemoryStorage()
    for record, name in pairs:
        storage.put(name, record.encode())
    for state in states[1:]:
        storage.put(checkpoint_name(state.number), state.encode())
        found, requests = opened(storage)
        assert found == states[-1]
        assert (list(found.objects), list(found.archive)) == (list(states[-1].objects), list(states[-1].archive))
        assert requests["get"] == 1 + len(records) - state.number
    for state in states[damaged + 1 :]:
        storage.put(checkpoint_name(state.number), state.encode()[:-3])
    assert opened(storage)[0] == states[-1]


# a storage that was restored to an earlier state


def restored(storage, clock, last):
    """Delete the log's records behind `last`, and keep the checkpoints."""
    storage.delete_many([info.name for info in storage.list("log/") if int(info.name.rpartition("/")[2]) > last])
    clock.advance(10)


def test_a_checkpoint_newer_than_the_log_blocks_nobody_and_is_deleted_with_the_next_record():
    clock = ManualClock()
    storage = MemoryStorage(clock=clock)
    a_log(storage, objects=6)
    restored(storage, clock, 4)
    state, _ = opened(storage)
    assert (state.number, len(state.objects)) == (4, 2)
    log = StorageLog(storage, clock)
    assert log.open() == state
    assert publish(log, EPOCH, (an_object(100),)).number == 5
    assert max(stored_checkpoints(storage)) == 5
    assert opened(storage)[0] == log.state


@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("has_digest", [True, False], ids=["named by its digest", "of an older version"])
def test_a_checkpoint_of_another_history_is_not_used(has_digest, is_alone):
    clock = ManualClock()
    storage = MemoryStorage(clock=clock)
    other = a_log(storage, objects=6).state
    restored(storage, clock, 4)
    log = open_log(storage, clock)
    for number in range(100, 104):
        publish(log, EPOCH, (an_object(number),))
    assert log.state.number == other.number == 8
    if is_alone:
        storage.delete(named(log.state))
    name = named(other) if has_digest else checkpoint_name(8)
    before = MemoryStorage(clock=ManualClock(0))
    before.put(name, other.encode())
    storage._shelf.objects[name] = before._shelf.objects[name]
    assert StorageLog(storage, clock).open(checks=False) == log.state
    if has_digest:
        with pytest.raises(StorageBehind, match="two histories"):
            opened(storage)
    else:
        assert opened(storage)[0] == log.state


@pytest.mark.parametrize("is_of_this_log", [True, False])
def test_a_checkpoint_older_than_the_known_records_is_compared_with_the_log(is_of_this_log):
    clock = ManualClock()
    storage = MemoryStorage(clock=clock)
    log = a_log(storage, objects=6)
    kept = {name: storage.get(name) for name in (named(log.state), log_name(log.state.number))}
    if not is_of_this_log:
        restored(storage, clock, 4)
        log = open_log(storage, clock)
    for number in range(CHAINED + 20):
        publish(log, EPOCH, (an_object(100 + number),))
    for name, data in kept.items():
        storage.put(name, data)
    if is_of_this_log:
        assert opened(storage) == (log.state, {"list": 2, "get": 3})
    else:
        with pytest.raises(StorageBehind, match="two histories"):
            opened(storage)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 40), max_size=12), st.booleans()), max_size=12),
    st.integers(0, 30),
)
@settings(max_examples=60, deadline=None)
def test_a_checkpoint_is_the_same_from_every_writer(steps, most_documents):
    """The texts of a state's objects come from the state before, or from the objects."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_module, "MOST_DOCUMENTS", most_documents)
        log = a_log(MemoryStorage())
        for number, (count, gone, of_tables) in enumerate(steps):
            make = a_shard if of_tables else an_object
            added = tuple(make(100 * number + n) for n in range(count))
            names = list(log.state.objects)
            state = publish(log, EPOCH, added, remove=sorted({names[n] for n in gone if n < len(names)}))
            assert state.encode() == replace(state).encode()
            assert LogState.decode(state.encode(), "checkpoint") == state


def test_a_few_more_files_are_not_compared_with_the_summary(monkeypatch):
    compared = []
    wanted = summary_module._wanted
    monkeypatch.setattr(summary_module, "_wanted", lambda state: compared.append(state.number) or wanted(state))
    log = a_log(MemoryStorage())
    for n in range(40):
        publish(log, EPOCH, (an_object(n),))
    # one of each eight records renews the summary, and the next one compares its content
    assert 0 < len(compared) <= 2 * (40 // 8) + 2
    compared.clear()
    publish(log, EPOCH, remove=[an_object(0).name])
    publish(log, EPOCH, (a_shard(1),))
    assert compared == [log.state.number - 1, log.state.number]
