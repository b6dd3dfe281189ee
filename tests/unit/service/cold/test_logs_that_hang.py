"""A log hangs or is old. A lookup with a timeout does not wait longer, and no answer is older than promised.

A complete answer is at most one interval behind the log, or with a timeout that and 30 s. If a thread
cannot start, lookups continue without it, and the next lookup completes the work.
"""

import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from tests.support.cold_index import cold_index
from tests.support.hanging import beside, until
from tests.support.model import Answer
from tests.support.pages import asking
from tests.support.several_indexes import Watched
from tests.support.storage_faults import FaultStorage
from tests.support.thread_limit import ThreadLimit
from tiered_index import IndexReader, QueryResult
from tiered_index.base import kernels
from tiered_index.base.call import Call
from tiered_index.errors import BudgetExceeded, CorruptFile, IndexClosed, InvalidArgument, StorageUnavailable
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.metering import Usage
from tiered_index.storage.opening import PrefixedStorage, open_storage

FILES = 3
SHORT_S, SOME_S, LONG_S = 0.05, 2.0, 300.0


@pytest.fixture
def index(tmp_path):
    return cold_index(tmp_path / "root", files=FILES)


@pytest.fixture
def storage(index):
    storage = FaultStorage(index.inner)
    hang = storage.hang("list", name_prefix="log/", nth=10**9)
    yield storage
    storage.clear()
    hang.release.set()


@pytest.fixture
def reader(index, storage, clock):
    """A reader that knows all directories and blocks, so that its lookups need only the log."""
    with index.reader(storage, clock=clock, refresh_interval_s=10) as reader:
        assert answers(reader.query("t", "all")) == index.expected("t", "all")
        yield reader


def answers(result):
    return [Answer.of(item) for item in result]


def test_a_due_refresh_continues_behind_the_lookup_only_once(index, storage, reader, clock):
    before = index.expected("t", "all")
    index.add(FILES)
    hang = storage.hang("get", name_prefix="log/")
    clock.advance(11)
    ask = partial(reader.query, "t", "all")
    calls = storage.calls("get")
    # only the core answers from memory in no time
    for timeout_s in (SHORT_S, SHORT_S, 1e-9 if kernels.compiled() else SHORT_S):
        result = ask(timeout_s=timeout_s)
        assert (answers(result), result.status) == (before, "complete")
        assert hang.entered.wait(30)
        assert storage.calls("get") == calls + 1
    # only lookups without a timeout wait for it
    patient = [beside(ask) for _ in range(2)]
    hang.release.set()
    for waited in patient:
        assert answers(waited()) == index.expected("t", "all") != before
    assert answers(ask(timeout_s=LONG_S)) == index.expected("t", "all")


def test_a_log_that_hangs_takes_at_most_half_of_the_time_so_the_files_are_read_in_the_other_half(index, storage, clock):
    with index.reader(storage, clock=clock, refresh_interval_s=10, cache_slot_groups=False) as reader:
        before = index.expected("t", "all")
        assert answers(reader.query("t", "all")) == before
        index.add(FILES)
        storage.hang("get", name_prefix="log/")
        clock.advance(11)
        result = reader.query("t", "all", timeout_s=SOME_S)
        assert (answers(result), result.status) == (before, "complete")
        assert SOME_S * 500 <= result.explain.elapsed_ms < SOME_S * 1000


def test_a_read_that_another_call_began_does_not_end_by_that_ones_budget(index, storage):
    with index.reader(storage) as reader:
        view = reader._views[0]
        hang = storage.hang("list", name_prefix="log/")
        first = beside(reader.refresh)
        assert hang.entered.wait(30)

        def spent():
            view.read_anew(Call(usages=(Usage(max_requests=0),)))

        second = beside(spent)
        until(lambda: view._requested is not None)
        third = beside(reader.refresh)
        time.sleep(0.2)
        hang.release.set()
        for call in (first, second, third):
            call()
        assert isinstance(second.error, BudgetExceeded)
        assert (first.error, third.error) == (None, None)


@pytest.mark.parametrize("many", [False, True])
def test_an_object_that_is_gone_and_a_log_that_hangs(index, storage, many):
    gone, others = index.stored[1], set(threading.enumerate())
    with index.reader(storage, cache_slot_groups=False) as reader:
        reader.query("t", "all")
        data = index.inner.get(gone.name)
        index.inner.delete_many([gone.name])
        hang = storage.hang("list", name_prefix="log/", times=None)
        seconds = range(gone.second_min, gone.second_max + 1)
        rest = [answer for answer in index.expected("t", "all") if answer.timestamp_ms // 1000 not in seconds]
        ask = asking(reader, "t", "all", many=many)
        for _ in range(2):
            result = ask(timeout_s=SOME_S, allow_partial=True)
            assert (answers(result), result.status) == (rest, "partial")
            assert [report.file for report in result.failed] == [gone.file_id]
            assert "timeout_s" in str(result.failed[0].error)
        with pytest.raises(BudgetExceeded) as caught:
            ask(timeout_s=SOME_S)
        assert caught.value.result is not None
        # one thread reads and one waits to read, for all lookups
        assert storage.calls("get") <= 1 + 1 + 2  # the checkpoint, and the log
        assert sum(thread.name.startswith("tiered-index-log") for thread in {*threading.enumerate()} - others) <= 2
        index.inner.put(gone.name, data)
        storage.clear()
        hang.release.set()
        assert answers(ask(timeout_s=LONG_S)) == index.expected("t", "all")


@pytest.mark.parametrize("what", ["list", "get_range"])
def test_a_close_does_not_wait_for_a_request_that_hangs(index, storage, clock, what):
    others = set(threading.enumerate())
    reader = index.reader(storage, clock=clock, refresh_interval_s=10, cache_slot_groups=False)
    reader.query("t", "all")
    hang = storage.hang(what, times=None)
    clock.advance(11)
    lookup = beside(lambda: reader.query("t", "all", timeout_s=LONG_S, allow_partial=True))
    assert hang.entered.wait(30)
    assert beside(reader.close)() is None
    storage.clear()
    hang.release.set()
    assert isinstance(lookup(), IndexClosed | QueryResult)
    until(lambda: not any(thread.name.startswith("tiered-index") for thread in {*threading.enumerate()} - others))
    for ask in (lambda: reader.query("t", "all"), reader.refresh):
        with pytest.raises(IndexClosed, match="closed"):
            ask()


class Closing(FaultStorage):
    """Refuse every answer after the close, as backends with connections do."""

    closed = False

    def get_range(self, name, start, length):
        data = super().get_range(name, start, length)
        if self.closed:
            raise InvalidArgument("the storage is closed")
        return data

    def close(self):
        self.closed = True


@pytest.mark.parametrize("warm", [False, True])
def test_a_lookup_whose_storage_is_closed_under_it_reports_no_object_as_corrupt(index, warm):
    storage, stored = Closing(index.inner), index.stored[0]
    reader = index.reader(storage, cache_slot_groups=False)

    def ask():
        return len(reader.query("t", "all", stored.second_min * 1000, stored.second_max * 1000))

    assert not warm or ask() == 1
    hang = storage.hang("get_range")
    lookup = beside(ask)
    assert hang.entered.wait(30)
    closing = beside(reader.close)
    until(lambda: storage.closed)
    hang.release.set()
    assert isinstance(lookup(), IndexClosed) and closing() is None


_PROCESS = """
import sys, threading
from tiered_index import IndexReader
from tiered_index.base.clock import ManualClock
from tiered_index.storage.base import WrapperStorage
from tiered_index.storage.opening import open_storage

class Hanging(WrapperStorage):
    hangs = False
    def _around(self, call, act):
        if self.hangs:
            threading.Event().wait()
        return act()

storage, clock = Hanging(open_storage(sys.argv[1])), ManualClock(0)
settings = dict(refresh_interval_s=10, cache_slot_groups=False, filter_after_probes=10**6)
reader = IndexReader.open(storage_backend=storage, clock=clock, **settings)
assert len(reader.query("t", "all")) == 1
storage.hangs = True
clock.advance(11)
assert reader.query("t", "all", timeout_s=0.1, allow_partial=True).status == "partial"
print("done")
"""


def test_a_process_ends_though_a_request_hangs(tmp_path):
    uri = f"file://{tmp_path}/objects"
    cold_index(tmp_path / "index", files=1, storage=open_storage(uri)).inner.close()
    program = [sys.executable, "-c", _PROCESS, uri]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


def test_an_object_that_is_gone_and_a_damaged_log(index, storage):
    gone = index.stored[0]
    with index.reader(storage, cache_slot_groups=False) as reader:
        index.add(FILES)
        index.inner.delete_many([gone.name])
        storage.corrupt("get", name_prefix="log/", times=None)
        limits = {"begin_ms": gone.second_min * 1000, "end_ms": gone.second_max * 1000}
        result = reader.query("t", "all", allow_partial=True, **limits)
        assert [report.file for report in result.failed] == [gone.file_id]
        assert "log/" in str(result.failed[0].error)
        with pytest.raises(CorruptFile, match="log/"):
            reader.query("t", "all", **limits)


@pytest.mark.parametrize(("interval_s", "beside_the_root"), [(10, False), (100, False), (100, True)])
def test_a_refresh_that_hangs_for_too_long(index, clock, storage, interval_s, beside_the_root):
    root = index.root if beside_the_root else None
    with index.reader(storage, clock=clock, refresh_interval_s=interval_s, root=root) as reader:
        ask = partial(reader.query, "t", "all")
        before = index.expected("t", "all")
        assert answers(ask()) == before
        index.add(FILES)
        hangs = [storage.hang(what, name_prefix="log/", times=None) for what in ("get", "list")]
        clock.advance(interval_s + 30)
        if not beside_the_root:  # beside a root the lookup sees that folders have changed, and reads the log itself
            assert ask(timeout_s=SHORT_S).status == "complete"
        clock.advance(1)
        with pytest.raises(BudgetExceeded, match="log") as caught:
            ask(timeout_s=SHORT_S)
        result = ask(timeout_s=SHORT_S, allow_partial=True)
        assert result.status == "partial"
        for failed in (caught.value.failed, result.failed):
            # a reader beside a root may have no time left for its files
            assert failed[0].file == "log" and (len(failed) == 1 or beside_the_root)
        assert {*answers(result)} >= {*before} or beside_the_root
        storage.clear()
        for hang in hangs:
            hang.release.set()
        # a lookup without a timeout waits for the hanging request
        result = ask()
        assert (result.status, answers(result)) == ("complete", index.expected("t", "all"))


def test_one_that_may_make_no_request_is_not_complete_either(index, clock):
    with index.reader(clock=clock, refresh_interval_s=10) as reader:
        reader.query("t", "all")
        clock.advance(40)
        assert reader.query("t", "all", max_requests=0).status == "complete"
        clock.advance(1)
        with pytest.raises(BudgetExceeded, match="41 s ago"):
            reader.query("t", "all", max_requests=0)
        # files are listed whatever the age
        assert [handle.file_id for handle in reader.files()] == [stored.file_id for stored in index.stored]
        assert reader.query("t", "all").status == "complete"
        assert reader.query("t", "all", max_requests=0).status == "complete"


def pass_long(index, storage, clock):
    """Let much time pass after the next answer to a listing of the log, while the writer continues."""

    def act():
        index.add(FILES)
        clock.advance(100_000)

    storage.meanwhile("list", act, when="after", name_prefix="log/")


def test_a_view_is_as_old_as_the_beginning_of_its_opening(index, storage, clock):
    pass_long(index, storage, clock)
    with index.reader(storage, clock=clock, refresh_interval_s=10) as reader:
        assert answers(reader.query("t", "all", max_count=100)) == index.expected("t", "all")


def test_a_long_lookup_answers_as_of_its_begin(index, storage, clock, reader):
    before = index.expected("t", "all")
    pass_long(index, storage, clock)
    clock.advance(11)
    result = reader.query("t", "all", max_count=100)
    assert (result.status, answers(result)) == ("complete", before)
    assert index.expected("t", "all") != before


@pytest.mark.parametrize(("timeout_s", "outage_s"), [(None, 0.001), (None, 100), (LONG_S, 0.001), (LONG_S, 100)])
def test_lookups_after_an_outage_answer_and_share_one_reading_of_the_log(
    index, storage, clock, reader, timeout_s, outage_s
):
    """They once raised the error of an earlier refresh, or said that the log was too old."""
    storage.fail("list", name_prefix="log/", times=None)
    clock.advance(11)
    with pytest.raises(StorageUnavailable):
        reader.query("t", "all", timeout_s=timeout_s)
    storage.clear()
    index.add(FILES)
    clock.advance(outage_s)
    hang = storage.hang("list", name_prefix="log/")
    calls = storage.calls("list")
    waiting = [beside(lambda: answers(reader.query("t", "all", timeout_s=timeout_s))) for _ in range(5)]
    assert hang.entered.wait(30)
    time.sleep(0.05)
    hang.release.set()
    assert all(waited() == index.expected("t", "all") for waited in waiting)
    clock.advance(0.001)
    reader.query("t", "all", timeout_s=timeout_s)
    assert storage.calls("list") <= calls + 2


def test_a_lookup_that_joins_an_old_reading_of_the_log_reads_it_again(index, storage, clock, reader):
    """Else its answer would lack entries that were published long before it began."""
    joined = []

    def act():
        index.add(FILES)
        clock.advance(100_000)
        joined.append(beside(lambda: answers(reader.query("t", "all", max_count=100))))
        assert not joined[0].ended(0.05)

    storage.meanwhile("list", act, when="after", name_prefix="log/")
    clock.advance(11)
    reader.query("t", "all")
    assert joined[0]() == index.expected("t", "all")


def test_opening_and_refreshes_without_threads(tmp_path, monkeypatch, clock):
    storage = FaultStorage(MemoryStorage())  # one namespace, as in an object store
    for name in ("a", "b"):
        cold_index(tmp_path / name, files=2, storage=PrefixedStorage(storage, name))
    limit = ThreadLimit(monkeypatch)
    limit.refuse("tiered-index-log", 10**6)
    with IndexReader.open(storage_backend=storage, clock=clock, refresh_interval_s=10) as reader:
        assert len(reader.sources) == 2
        clock.advance(11)
        assert len(reader.query("t", "all")) == 4 and reader.refresh() is not None
        # the reader also reads each index's log in its own thread
        assert limit.refused > 4


# openings with a timeout


@pytest.mark.parametrize(
    ("operation", "prefix", "beside_the_root"),
    [("list", "checkpoint/", False), ("get", "checkpoint/", True), ("list", "log/", False)],
)
def test_an_opening_ends_in_time_and_leaves_nothing_open(index, operation, prefix, beside_the_root):
    storage = Watched(index.inner)
    hang = storage.hang(operation, name_prefix=prefix)
    root = index.root if beside_the_root else None
    error = beside(lambda: index.reader(storage, timeout_s=SOME_S, root=root))()
    opened = str(index.root) if beside_the_root else index.inner.uri
    assert isinstance(error, BudgetExceeded) and error.exit_code == 6
    assert str(error) == f"timeout_s was reached while opening {opened}: its log was not read by then"
    assert not hang.release.is_set()
    storage.clear()
    hang.release.set()
    until(lambda: storage.closed)
    with index.reader(storage, timeout_s=LONG_S) as reader:
        # the time is of the opening alone
        assert [Answer.of(item) for item in reader.query("t", "all")] == index.expected("t", "all")


def test_a_part_of_an_opening_that_reaches_its_end_first_is_not_what_is_named(index, storage):
    storage.fail("list", name_prefix="log/", error=BudgetExceeded)
    with pytest.raises(BudgetExceeded, match=f"while opening {index.inner.uri}: its log was not read by then"):
        index.reader(storage, timeout_s=LONG_S)


def test_an_error_of_an_opening_within_its_time_is_raised_itself(index, storage):
    storage.fail("list", name_prefix="checkpoint/")
    with pytest.raises(StorageUnavailable):
        index.reader(storage, timeout_s=LONG_S)
    for wrong in (0, -1, float("nan"), "1"):
        with pytest.raises(InvalidArgument, match="timeout_s"):
            index.reader(storage, timeout_s=wrong)
    assert storage.calls("list") == 1


def test_an_opening_of_a_prefix_whose_listing_hangs(tmp_path):
    shared = MemoryStorage()
    for name in ("a", "b"):
        cold_index(tmp_path / name, files=1, storage=PrefixedStorage(shared, name))
    below = Watched(shared)
    hang = below.hang("list", nth=3)  # after the listings that find no log at the prefix
    error = beside(lambda: IndexReader.open(storage_backend=below, timeout_s=SOME_S))()
    assert str(error) == f"timeout_s was reached while listing the objects below {below.uri}"
    hang.release.set()
