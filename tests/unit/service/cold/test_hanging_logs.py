"""A log does not answer. A lookup with a timeout does not wait longer for it.

One reading of the log continues in the background.
"""

import subprocess
import sys
import threading
import time
from contextvars import copy_context
from dataclasses import replace

import pytest

from tests.support.cold_index import BASE_MS, cold_index
from tests.support.hanging import beside, until
from tests.support.model import Answer
from tests.support.pages import asking
from tests.support.storage_faults import FaultStorage
from tiered_index import QueryResult
from tiered_index.clock import ManualClock
from tiered_index.errors import BudgetExceeded, CorruptFile, IndexClosed
from tiered_index.service import reader as reader_module
from tiered_index.service.read import polled
from tiered_index.storage import pools as workers
from tiered_index.storage.context import deadline_at, remaining_s
from tiered_index.storage.opening import open_storage

FILES = 3
LONG_S = 300.0


@pytest.fixture
def made(tmp_path):
    return cold_index(tmp_path / "root", files=FILES)


@pytest.fixture
def storage(made):
    return FaultStorage(made.inner)


@pytest.fixture(autouse=True)
def _short(impatient, monkeypatch):
    """Waits for a log, and at a close, are short."""
    monkeypatch.setattr(workers, "_CLOSE_S", 0.02)


@pytest.fixture
def reader(made, storage):
    """A reader that knows all directories and blocks."""
    with made.reader(storage, clock=ManualClock(BASE_MS), refresh_interval_s=10) as reader:
        assert answers(reader.query("t", "all")) == made.expected("t", "all")
        yield reader


def answers(result):
    return [Answer.of(item) for item in result]


def advance(reader):
    clock = reader._views[0]._clock
    assert isinstance(clock, ManualClock)
    clock.advance(11)


@pytest.mark.parametrize("many", [False, True])
def test_a_due_refresh_continues_behind_the_lookup_only_once(made, storage, reader, many):
    before = made.expected("t", "all")
    made.add(FILES)
    hang = storage.hang("get", name_prefix="log/")
    advance(reader)
    ask = asking(reader, "t", "all", many=many)
    asked = storage.calls("get")
    for _ in range(3):
        result = ask(timeout_s=LONG_S)
        assert (answers(result), result.status) == (before, "complete")
        assert hang.entered.wait(30)
        assert storage.calls("get") == asked + 1
    # only lookups without a timeout wait for it
    patient = [beside(ask) for _ in range(2)]
    number = reader.log_state.number
    hang.release.set()
    until(lambda: reader.log_state.number > number)
    for waited in patient:
        assert answers(waited()) == made.expected("t", "all")
    until(lambda: reader._views[0]._due.done())
    assert answers(ask(timeout_s=LONG_S)) == made.expected("t", "all") != before


def test_a_refresh_whose_lookup_is_out_of_time_is_read_to_the_end(made, storage, reader):
    for number in range(FILES, FILES + 3):
        made.add(number)
    hang = storage.hang("get", name_prefix="log/")
    advance(reader)
    # the present files are in memory, and answer without more time
    assert len(reader.query("t", "all", timeout_s=1e-9)) == FILES
    assert hang.entered.wait(30)
    hang.release.set()
    until(lambda: len(reader.files()) == FILES + 3)
    assert answers(reader.query("t", "all")) == made.expected("t", "all")


def test_a_refresh_behind_a_lookup_is_counted_to_it(storage, reader, monkeypatch):
    hang = storage.hang("list", name_prefix="log/")
    advance(reader)
    real = polled.wait_for

    def wait_until_it_is_sent(*how):
        assert hang.entered.wait(30)
        return real(*how)

    with monkeypatch.context() as patch:
        patch.setattr(polled, "wait_for", wait_until_it_is_sent)
        result = reader.query("t", "all", timeout_s=LONG_S)
    assert result.explain.requests == 1
    (log,) = (report for report in result.explain.files if report.file == "log")
    assert (log.outcome, log.requests) == ("refreshed", 1)
    hang.release.set()
    until(lambda: reader._views[0]._due.done())
    # a lookup without a request left leaves the refresh to the next lookup
    advance(reader)
    assert reader.query("t", "all", timeout_s=LONG_S, max_requests=0).explain.requests == 0
    assert reader.query("t", "all").explain.requests == 1


def test_a_refresh_that_has_a_deadline_ends_at_it(made, storage, reader):
    made.add(FILES)
    hang = storage.hang("list", name_prefix="log/")
    with deadline_at(time.monotonic() + LONG_S):
        begun = copy_context()
    asked = beside(lambda: begun.run(reader.refresh))
    assert hang.entered.wait(30)
    ended = asked.ended(10)
    hang.release.set()
    assert ended and isinstance(asked(), BudgetExceeded)
    until(lambda: len(reader.files()) == FILES + 1)


@pytest.mark.parametrize("many", [False, True])
def test_an_object_that_is_gone_and_a_log_that_hangs(made, storage, many):
    gone, others = made.stored[1], set(threading.enumerate())
    with made.reader(storage, block_cache_bytes=0) as reader:
        reader.query("t", "all")
        data = made.inner.get(gone.name)
        made.inner.delete(gone.name)
        hang = storage.hang("list", name_prefix="log/", times=None)
        seconds = range(gone.second_min, gone.second_max + 1)
        rest = [answer for answer in made.expected("t", "all") if answer.timestamp_ms // 1000 not in seconds]
        ask = asking(reader, "t", "all", many=many)
        for _ in range(4):
            result = ask(timeout_s=LONG_S, allow_partial=True)
            assert (answers(result), result.status) == (rest, "partial")
            assert [report.file for report in result.failed] == [gone.file_id]
            assert "timeout_s" in str(result.failed[0].error)
            with pytest.raises(BudgetExceeded) as caught:
                ask(timeout_s=LONG_S)
            assert caught.value.result is not None
        # one thread reads and one waits to read, for all lookups
        assert storage.calls("get") <= 1 + 1 + 2  # the checkpoint, and the log
        assert sum(one.name.startswith("tiered-index-log") for one in {*threading.enumerate()} - others) <= 2
        made.inner.put(gone.name, data)
        storage.clear()
        hang.release.set()
        assert answers(ask(timeout_s=LONG_S)) == made.expected("t", "all")


@pytest.mark.parametrize("many", [False, True])
def test_a_lookup_of_a_writer_does_not_wait_longer_for_its_log(made, storage, many):
    gone = made.stored[1]
    with replace(made, storage=storage).writer(block_cache_bytes=0) as writer:
        made.inner.delete(gone.name)
        hang = storage.hang("list", name_prefix="log/", times=None)
        ask = asking(writer, "t", "all", many=many)
        asked = [beside(lambda: ask(timeout_s=LONG_S, allow_partial=True)) for _ in range(2)]
        assert hang.entered.wait(30)
        ended = all(one.ended(10) for one in asked)
        storage.clear()
        hang.release.set()
        assert ended
        for one in asked:
            assert [report.file for report in one().failed] == [gone.file_id]
            assert "timeout_s" in str(one().failed[0].error)
        with pytest.raises(CorruptFile):
            ask()


def test_a_lookup_that_waits_for_anothers_reading_has_its_own_budget(made, storage):
    """The log is read for a lookup with one request left.

    Another lookup, which waits for it, may make many requests.
    """
    gone = made.stored[1]
    with made.reader(storage, block_cache_bytes=0) as reader:
        reader.query("t", "all")
        view = reader._views[0]
        made.inner.delete(gone.name)
        held = beside(lambda: view._lock.acquire())
        assert held()
        waits = []

        def patient_s():
            waits.append(remaining_s())
            return waits[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(polled, "remaining_s", patient_s)
            how = {"timeout_s": LONG_S, "allow_partial": True}
            poor = beside(
                lambda: reader.query("t", "all", gone.second_min * 1000, gone.second_max * 1000, max_requests=1, **how)
            )
            until(lambda: view._asked is not None)
            rich = beside(lambda: reader.query("t", "all", gone.second_min * 1000, gone.second_max * 1000, **how))
            until(lambda: len(waits) == 2)
            view._lock.release()
            assert "max_requests" in str(poor().failed[0].error)
            # it has read the log, which still names the object
            assert "no object" in str(rich().failed[0].error)


@pytest.mark.parametrize("what", ["get", "get_range"])
def test_a_close_does_not_wait_for_a_request_that_hangs(made, storage, what):
    others = set(threading.enumerate())
    reader = made.reader(storage, clock=ManualClock(BASE_MS), refresh_interval_s=10, block_cache_bytes=0)
    reader.query("t", "all")
    hang = storage.hang("list" if what == "get" else what, times=None)
    advance(reader)
    lookup = beside(lambda: reader.query("t", "all", timeout_s=LONG_S, allow_partial=True))
    assert hang.entered.wait(30)
    closed = beside(reader.close)
    assert closed() is None
    storage.clear()
    hang.release.set()
    assert isinstance(lookup(), IndexClosed | QueryResult)
    until(lambda: not any(one.name.startswith("tiered-index") for one in {*threading.enumerate()} - others))
    assert reader._views[0].catalog.all() == []
    for ask in (lambda: reader.query("t", "all"), reader.refresh):
        with pytest.raises(IndexClosed, match="closed"):
            ask()


_PROCESS = """
import sys, threading
from tiered_index import IndexReader
from tiered_index.clock import ManualClock
from tiered_index.storage.base import WrapperStorage
from tiered_index.storage.opening import open_storage

class Hanging(WrapperStorage):
    hangs = False
    def _around(self, call, act):
        if self.hangs:
            threading.Event().wait()
        return act()

storage, clock = Hanging(open_storage(sys.argv[1])), ManualClock(0)
settings = dict(refresh_interval_s=10, block_cache_bytes=0, filter_after_probes=10**6)
reader = IndexReader.open(storage_backend=storage, clock=clock, **settings)
assert len(reader.query("t", "all")) == 1
storage.hangs = True
clock.advance(11)
assert reader.query("t", "all", timeout_s=0.1, allow_partial=True).status == "partial"
print("done")
"""


def test_a_process_ends_though_a_request_hangs(tmp_path):
    uri = f"file://{tmp_path}/objects"
    cold_index(tmp_path / "root", files=1, storage=open_storage(uri)).inner.close()
    program = [sys.executable, "-c", _PROCESS, uri]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("beside_the_root", [False, True])
@pytest.mark.parametrize("timeout_s", [None, LONG_S])
def test_a_damaged_log_record_leaves_no_answer_complete(made, storage, beside_the_root, timeout_s, monkeypatch):
    monkeypatch.setattr(reader_module, "remaining_s", remaining_s)
    monkeypatch.setattr(polled, "remaining_s", remaining_s)
    clock = ManualClock(BASE_MS)
    root = made.root if beside_the_root else None
    with made.reader(storage, clock=clock, refresh_interval_s=10, root=root) as reader:
        before = made.expected("t", "all")
        assert answers(reader.query("t", "all")) == before
        record = f"log/{reader.log_state.number + 1:020}"
        made.add(FILES)
        storage.corrupt("get", name_prefix=record, times=None)
        for _ in range(2):
            clock.advance(11)
            with pytest.raises(CorruptFile) as caught:
                reader.query("t", "all", timeout_s=timeout_s)
            assert caught.value.file == record
            result = reader.query("t", "all", timeout_s=timeout_s, allow_partial=True)
            assert result.status == "partial"
            assert [(report.file, report.place) for report in result.failed] == [(record, "storage")]
            assert set(answers(result)) >= set(before)
            with pytest.raises(CorruptFile, match=record):
                reader.refresh()
        storage.clear()
        clock.advance(2)
        result = reader.query("t", "all", timeout_s=timeout_s)
        assert (answers(result), result.status) == (made.expected("t", "all"), "complete")


def test_an_object_that_is_gone_and_a_damaged_log(made, storage):
    gone = made.stored[0]
    with made.reader(storage, block_cache_bytes=0) as reader:
        made.add(FILES)
        made.inner.delete(gone.name)
        storage.corrupt("get", name_prefix="log/", times=None)
        asked = {"begin_ms": gone.second_min * 1000, "end_ms": gone.second_max * 1000}
        result = reader.query("t", "all", allow_partial=True, **asked)
        assert [report.file for report in result.failed] == [gone.file_id]
        assert "log/" in str(result.failed[0].error)
        with pytest.raises(CorruptFile, match="log/"):
            reader.query("t", "all", **asked)
