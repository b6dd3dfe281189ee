"""Log records and checkpoints are bytes in a fixed order. Leases are objects."""

import os
import socket
import threading
from functools import partial

import numpy as np
import pytest

from tests.support.changes import replace
from tests.support.log_records import GENESIS, an_object, open_log, publish
from tests.support.storage_faults import FaultStorage
from tiered_index.base.clock import ManualClock
from tiered_index.errors import (
    CorruptFile,
    InvalidArgument,
    LockHeld,
    NotAnIndex,
    ObjectExists,
    StorageMisconfigured,
    StorageUnavailable,
)
from tiered_index.format.layout import ROCKETMQ, Layout, SlotMap
from tiered_index.format.names import log_name
from tiered_index.service.log.expired import Expired
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import (
    ArchivedSegment,
    LogRecord,
    LostObject,
    RetiredSegment,
    StreamBatch,
    TableShard,
    encode_document,
)
from tiered_index.service.log.session import Lease, LeaseWatch, writer_of
from tiered_index.service.log.state import LogState
from tiered_index.service.read.segments.segments import inline_catalog
from tiered_index.storage.memory import MemoryStorage


def test_a_record_comes_back_as_it_was():
    """Also with the greatest numbers, times before the epoch, and any text."""
    greatest, times = 2**63 - 1, {"second_min": -(2**42), "second_max": 2**42}
    segment = ArchivedSegment("segments/s/0.log", "лог\0", 2**62, 2**43, 2**32 - 1, 2**32 - 1, 2**43 + 152, 2**52)
    record = LogRecord(
        greatest,
        "\N{GRINNING FACE}",
        greatest,
        "",
        -(2**42),
        add=(replace(an_object(1), **times, sequence=greatest, count=2**36, size_bytes=2**42),),
        remove=("\n",),
        positions={"тема": greatest, "": 0},
        genesis=replace(GENESIS, layout=Layout(ROCKETMQ, ROCKETMQ.schema, 1, 2)),
        catalogs=(inline_catalog([segment]),),
        retire=(RetiredSegment(segment.name, *segment.place),),
        batches={"b": StreamBatch(greatest, greatest, 2**64 - 1)},
    )
    assert LogRecord.decode(record.encode(), "x") == record


def test_the_greatest_number_of_each_stream_counts():
    state = LogState().apply(LogRecord(1, "create", 0, "a", 5, genesis=GENESIS), "x")
    begun = state
    for number, batch_numbers in enumerate([{"a": 1}, {"b": 7}, {"a": 3}, {}, {"a": 2, "b": 8}], 2):
        last = {stream: StreamBatch(at, number, 0) for stream, at in batch_numbers.items()}
        state = state.apply(LogRecord(number, "build", 0, "a", 5, batches=last), "x")
    assert state.batches == {"a": StreamBatch(3, 4, 0), "b": StreamBatch(8, 6, 0)} and begun.batches == {}


def test_an_invalid_record_is_damage():
    for data in (b"", b"{}", b"\n#crc32 00000000\n", b"#crc32", b"x" * 100):
        with pytest.raises(CorruptFile):
            LogRecord.decode(data, "x")
    for document in ({"version": None}, {"version": "1"}, {}):
        with pytest.raises(CorruptFile, match="version"):
            LogRecord.decode(encode_document(document), "x")


@pytest.fixture
def log(storage, clock):
    new_log = StorageLog(storage, clock, checkpoint_every=4)
    new_log.create(GENESIS)
    return new_log


@pytest.mark.parametrize("losses", [0, 1])
def test_a_record_that_is_damaged_on_the_way_is_read_again_before_an_append(log, storage, clock, losses):
    """The end of the log, or the record of a process that was faster."""
    faulty = FaultStorage(storage)
    job, other = open_log(faulty, clock), open_log(storage, clock)
    number = job.state.number + losses
    if losses:
        faulty.meanwhile("put_if_absent", lambda: publish(other, 0, (an_object(1),)), name_prefix="log/")
    faulty.corrupt("get", name_prefix=log_name(number))
    assert publish(job, 0, (an_object(2),)).number == number + 1
    assert len(open_log(storage, clock).state.objects) == 1 + losses


def test_an_epoch_claimed_by_a_writer_that_died_before_its_fence_is_passed_over(log, storage):
    storage.put_if_absent("epoch/00000000000000000001", b"dead")
    assert log.claim_epoch() == 2


def test_a_claim_whose_answer_was_lost_is_recognised(storage, clock):
    faulty = FaultStorage(storage)
    for name in ("epoch/", log_name(2)):
        # as of a backend that repeats its own successful put
        faulty.fail("put_if_absent", when="after", error=ObjectExists, name_prefix=name)
    log = StorageLog(faulty, clock)
    log.create(GENESIS)
    assert log.claim_epoch() == 1
    assert log.state.number == 2
    assert StorageLog(storage, clock).open() == log.state


@pytest.mark.parametrize("prefix", ["log/", "epoch/"])
@pytest.mark.parametrize(("races", "seconds"), [(1, 3600), (150, 0), (None, 1)])
def test_a_suspended_or_slow_process_takes_the_next_number_or_gives_up(faulty, clock, log, prefix, races, seconds):
    def lose():
        clock.advance(seconds)
        if prefix == "log/":
            log.append("a race", None, lambda state: LogRecord(0, "positions", 0, "", 0, positions={"a": state.number}))
        else:
            log.claim_epoch()

    faulty.meanwhile("put_if_absent", lose, times=races, name_prefix=prefix)
    racing = StorageLog(faulty, clock)
    racing.open()
    if races is None:
        with pytest.raises(StorageUnavailable, match=r"the last 100 .* first.*; try again"):
            racing.claim_epoch()
    else:
        assert racing.claim_epoch() == racing.state.epoch
        assert log.refresh() == racing.state


def test_a_listing_that_repeats_records_is_refused_and_one_that_lacks_some_makes_none_of_them_old(
    log, storage, clock, monkeypatch
):
    epoch = log.claim_epoch()
    for number in range(5):
        clock.advance(10)
        publish(log, epoch, (an_object(number),))
    since_ms, last, plain = clock.now_ms() - 15_000, log.state.number, storage.list
    assert list(log.numbers_since(last, since_ms)) == [last, last - 1]
    monkeypatch.setattr(storage, "list", lambda *arguments, **more: iter(list(plain(*arguments, **more))[:-2]))
    assert list(log.numbers_since(last, since_ms))[:2] == [last, last - 1]
    monkeypatch.setattr(
        storage, "list", lambda *arguments, **more: (info for info in plain(*arguments, **more) for _ in range(2))
    )
    with pytest.raises(StorageMisconfigured, match="order of name"):
        list(log.numbers_since(last, since_ms))


@pytest.mark.parametrize("error", [lambda text: CorruptFile("db", text), InvalidArgument])
def test_any_error_of_the_put_of_a_record_leaves_its_outcome_unknown(log, storage, clock, error):
    """Callers delete their uploads only if an error says that the record does not exist."""
    faulty = FaultStorage(storage)
    other = StorageLog(faulty, clock)
    epoch = other.claim_epoch() if other.open() else 0
    faulty.fail("put_if_absent", when="after", error=error)
    with pytest.raises(StorageUnavailable, match="is unknown"):
        publish(other, epoch, (an_object(1),))
    assert list(log.refresh().objects) == [an_object(1).name]
    number = log.state.number
    assert publish(other, epoch, (an_object(1),)).number == number


SEGMENT = ArchivedSegment("segments/s/0", "broker", 0, 10, 1, 1, 12, 0)
CATALOG = inline_catalog([SEGMENT])
SHARD = TableShard("t1", 0, 3600, SlotMap(GENESIS.layout.slots), 0, 3, "writer")
TABLE = replace(an_object(1), shard=SHARD)
LOST = LostObject("data/x/9.index", "x9", 0, 1, 1)


@pytest.mark.parametrize(
    ("good", "bad", "said"),
    [
        ({"kind": "fence"}, {"kind": 5}, "kind"),
        ({"positions": {"s": 7}}, {"positions": {"s": 7.5}}, "positions"),
        ({"add": (an_object(1),)}, {"add": (replace(an_object(1), count=0),)}, "count"),
        ({"add": (TABLE,)}, {"add": (replace(an_object(1), second_max=2**50),)}, "second_max"),
        ({"remove": (an_object(0).name,)}, {"remove": (None,)}, "remove"),
        ({"catalogs": (CATALOG,)}, {"catalogs": (replace(CATALOG, name="../s"),)}, "name"),
        ({"batches": {"b": StreamBatch(1, 2, 3)}}, {"batches": {"b": StreamBatch(-1, 2, 3)}}, "number"),
        ({"lost": (LOST,)}, {"lost": (replace(LOST, file_id=""),)}, "file_id"),
        ({"expired": Expired((), {"s": 5})}, {"expired": Expired((), {"s": -5})}, "expired"),
        ({"left_out": 3}, {"left_out": -3}, "left_out"),
        ({"epoch": 2}, {"epoch": np.int64(2)}, "int64"),
    ],
)
def test_a_record_that_readers_would_refuse_is_not_written(log, storage, clock, good, bad, said):
    publish(log, log.claim_epoch(), (an_object(0),))
    before, state = {info.name for info in storage.list("")}, log.state
    record = LogRecord(0, "any", 1, "", 0)
    with pytest.raises(InvalidArgument, match=rf"invalid record.*{said}"):
        log.append("bad", None, lambda _: replace(record, **bad))
    assert ({info.name for info in storage.list("")}, log.state) == (before, state)
    # the log accepts the corrected record
    written = log.append("good", None, lambda _: replace(record, **good))
    assert written.number == state.number + 1 and StorageLog(storage, clock).open() == written


@pytest.mark.parametrize("read", [StorageLog.refresh, partial(StorageLog.refresh, by_number=True)])
def test_a_record_that_contradicts_the_state_is_not_written_and_leaves_no_half_of_itself(log, storage, clock, read):
    """A stored record removes an object and contradicts the state. A reader applies no part of it."""
    epoch = log.claim_epoch()
    publish(log, epoch, (an_object(1),))
    number = log.state.number
    with pytest.raises(CorruptFile, match="exists already"):
        log.append("twice", epoch, lambda state: LogRecord(0, "publish", epoch, "", 0, (an_object(1),)))
    assert log.refresh().number == number
    reader = StorageLog(storage, clock)
    state = reader.open()
    end = publish(log, epoch, (an_object(2),))
    removed = (an_object(1).name, "data/none")
    bad = LogRecord(state.number + 2, "publish", epoch, "", 0, remove=removed, previous=end.digest)
    storage.put(log_name(bad.number), bad.encode())
    with pytest.raises(CorruptFile, match="data/none"):
        read(reader)
    assert an_object(1).name in reader.state.objects


def test_an_index_is_created_once_and_only_if_it_can_be_opened(storage, clock):
    with pytest.raises(InvalidArgument, match="invalid record"):
        StorageLog(storage, clock).create(replace(GENESIS, index_id="a/b"))
    assert not list(storage.list(""))
    storage.put("log/readme", b"x")
    with pytest.raises(NotAnIndex):
        StorageLog(storage, clock).open()
    first, second = StorageLog(storage, clock), StorageLog(storage, clock)
    first.create(GENESIS)
    assert second.create(replace(GENESIS, index_id="other")).genesis == GENESIS


class SteppingClock(ManualClock):
    """The monotonic time advances by a second at each call. The wall time, which is the storage's, stays the same."""

    def monotonic_s(self):
        self._monotonic_s += 1
        return super().monotonic_s()


def claim(storage, place, clock=None, **more):
    LeaseWatch(storage, clock or ManualClock(0)).check(place, **more)


def test_a_lease_holds_off_other_roots_until_it_ends(clock, storage):
    claim(storage, "b")
    lease = Lease(storage, 1, clock, 60, "a")
    claim(storage, "a")
    with pytest.raises(LockHeld, match="60 s"):
        claim(storage, "b")
    clock.advance(19)
    lease.renew()  # not due yet
    clock.advance(40.999)
    with pytest.raises(LockHeld):
        claim(storage, "b")
    lease.renew()
    clock.advance(59)
    with pytest.raises(LockHeld):
        claim(storage, "b")
    clock.advance(1)
    claim(storage, "b")
    lease.renew()
    # each renewal deletes the one before it
    assert len(list(storage.list("lease/"))) == 1


def test_a_lease_that_is_renewed_while_it_is_read_holds_off_other_roots(clock):
    """A renewal deletes the lease that was listed."""
    storage = FaultStorage(MemoryStorage(clock=clock))
    lease = Lease(storage.inner, 1, clock, 60, "a")
    lease._write(released=False)

    def renew():
        clock.advance(30)
        lease.renew()

    storage.meanwhile("get", renew, name_prefix="lease/", times=3)
    with pytest.raises(LockHeld):
        LeaseWatch(storage, clock).check("b")
    assert storage.calls("get") == 4


def test_the_newest_epochs_lease_counts_for_the_lock_of_its_root(clock, storage):
    old = Lease(storage, 1, clock, 60, "a")
    clock.advance(61)
    Lease(storage, 2, clock, 60, "here")
    old.renew()  # a paused writer continues
    for place in ("a copy", "a"):
        with pytest.raises(LockHeld):
            claim(storage, place)
    claim(storage, "here")


DAY_S = 86_400


@pytest.mark.parametrize("holder_s", [DAY_S, -DAY_S])
@pytest.mark.parametrize("claimer_s", [DAY_S, -DAY_S])
def test_clocks_of_hosts_neither_prolong_nor_shorten_a_lease(clock, storage, holder_s, claimer_s):
    Lease(storage, 1, ManualClock(clock.now_ms() + 1000 * holder_s), 60, "a")

    def claimers() -> ManualClock:
        return ManualClock(clock.now_ms() + 1000 * claimer_s)

    for passed_s in (0, 59.999):
        clock.advance(passed_s)
        assert writer_of(storage, claimers()).state == "alive"
        with pytest.raises(LockHeld):
            claim(storage, "b", claimers())
    clock.advance(0.001)
    assert writer_of(storage, claimers()).state == "gone"
    claim(storage, "b", claimers())


def test_a_lease_of_the_storages_future_is_watched_for_its_time_to_live(clock):
    Lease(MemoryStorage("went-back", clock=ManualClock(clock.now_ms() + 1000 * DAY_S)), 1, clock, 60, "a")
    storage, claimer = MemoryStorage("went-back", clock=clock), SteppingClock(0)
    assert writer_of(storage, clock).state == "gone"
    # a round of the life cycle does not wait, and remembers when it began to watch
    watch = LeaseWatch(storage, claimer)
    with pytest.raises(LockHeld, match="60 s"):
        watch.check("b")
    with pytest.raises(LockHeld, match="59 s"):
        watch.check("b")
    claimer.advance(58)
    watch.check("b")


def test_an_opening_waits_for_a_watched_lease_and_refuses_a_renewed_one(clock, monkeypatch):
    holder = ManualClock(clock.now_ms() + 1000 * DAY_S)
    lease = Lease(MemoryStorage("watched", clock=holder), 1, holder, 60, "a")
    storage, claimer, waited = MemoryStorage("watched", clock=clock), ManualClock(0), []

    class Waiting(threading.Event):
        def wait(self, timeout=None):
            waited.append(timeout)
            claimer.advance(timeout)
            if is_alive:
                holder.advance(20)
                lease.renew()

    monkeypatch.setattr("tiered_index.service.log.session.threading.Event", Waiting)
    is_alive = True
    with pytest.raises(LockHeld):
        claim(storage, "b", claimer, waits=True)
    assert len(waited) == 1
    is_alive = False
    claim(storage, "b", claimer, waits=True)
    assert sum(waited[1:]) == 60


def test_a_killed_process_of_this_host_is_not_called_a_writer(clock, storage, monkeypatch):
    Lease(storage, 1, clock, 60, "a")
    with pytest.raises(LockHeld, match=r"is being written by this process .* its lease ends in 60 s"):
        claim(storage, "b")

    def kill(pid, number):
        assert number == 0
        raise ProcessLookupError

    monkeypatch.setattr("tiered_index.service.log.session.os.kill", kill)
    with pytest.raises(LockHeld, match=r"This host has no such process now.* ends in 60 s; .*--take-over") as held:
        claim(storage, "b")
    assert "is being written" not in str(held.value)
    assert (held.value.pid, held.value.host) == (os.getpid(), socket.gethostname())
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    with pytest.raises(LockHeld, match="is being written by process"):
        claim(storage, "b")
