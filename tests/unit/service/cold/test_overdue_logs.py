"""A complete answer is at most one interval behind the log, or with a timeout two (the second at least 30 s)."""

import threading
import time
from concurrent.futures import Future

import pytest

from tests.support.cold_index import cold_index
from tests.support.hanging import beside
from tests.support.model import Answer
from tests.support.pages import asking
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader
from tiered_index.errors import BudgetExceeded, IndexClosed, StorageUnavailable
from tiered_index.service.read.index_view import IndexView

LONG_S = 300.0
pytestmark = pytest.mark.usefixtures("impatient")


@pytest.fixture
def made(tmp_path):
    return cold_index(tmp_path / "root", files=2)


@pytest.fixture
def storage(made):
    storage = FaultStorage(made.inner)
    hang = storage.hang("list", name_prefix="log/", nth=10**9)
    yield storage
    hang.release.set()


@pytest.mark.parametrize("beside_the_root", [False, True])
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("interval_s", [10, 100])
def test_a_refresh_that_hangs_for_too_long(made, clock, storage, many, interval_s, beside_the_root):
    root = made.root if beside_the_root else None
    with made.reader(storage, clock=clock, refresh_interval_s=interval_s, root=root) as reader:
        ask = asking(reader, "t", "all", many=many)
        before = made.expected("t", "all")
        assert [Answer.of(item) for item in ask()] == before
        made.add(2)
        hangs = [storage.hang(what, name_prefix="log/", times=None) for what in ("get", "list")]
        late_s = max(interval_s, 30)
        clock.advance(interval_s + late_s)
        if not beside_the_root:  # beside a root the lookup sees that folders have changed, and reads the log itself
            assert ask(timeout_s=LONG_S).status == "complete"
        clock.advance(1)
        for _ in range(2):
            with pytest.raises(BudgetExceeded, match="log") as caught:
                ask(timeout_s=LONG_S)
            assert [report.file for report in caught.value.failed] == ["log"]
            result = ask(timeout_s=LONG_S, allow_partial=True)
            assert (result.status, [report.file for report in result.failed]) == ("partial", ["log"])
            assert {Answer.of(item) for item in result} >= set(before)
        storage.clear()
        for hang in hangs:
            hang.release.set()
        # a lookup without a timeout waits for the hanging request
        result = ask()
        assert (result.status, [Answer.of(item) for item in result]) == ("complete", made.expected("t", "all"))


def test_one_that_may_make_no_request_is_not_complete_either(made, clock):
    with made.reader(clock=clock, refresh_interval_s=10) as reader:
        reader.query("t", "all")
        clock.advance(40)
        assert reader.query("t", "all", max_requests=0).status == "complete"
        clock.advance(1)
        with pytest.raises(BudgetExceeded, match="41 s ago"):
            reader.query("t", "all", max_requests=0)
        assert reader.query("t", "all").status == "complete"
        assert reader.query("t", "all", max_requests=0).status == "complete"


def test_a_log_that_is_read_later_in_the_lookup_is_young(made, clock):
    """A lookup beside a root reads the log because folders have changed, though its refresh ran out of requests."""
    with made.reader(clock=clock, refresh_interval_s=10, root=made.root) as reader:
        reader.query("t", "all")
        made.add(2)
        clock.advance(100)
        (view,) = reader._views
        # the log was not read
        assert view.is_due(clock.monotonic_s())
        with view.taking(clock.monotonic_s()) as taken:
            found = [handle.file_id for handle in taken.handles(0, 10**10)]
        assert "log" not in found
        assert len(found) == len(made.stored) + 1


def test_files_are_listed_whatever_the_age(made, clock):
    with made.reader(clock=clock, refresh_interval_s=10) as reader:
        clock.advance(1000)
        with pytest.raises(BudgetExceeded):
            reader.query("t", "all", max_requests=0)
        assert [handle.file_id for handle in reader.files()] == [stored.file_id for stored in made.stored]


def test_a_lookup_that_joins_a_refresh_without_result_repeats_it(made, clock, storage, log_readings):
    """The lookup that began the refresh may make no request. The one that waits for it may."""
    with made.reader(storage, clock=clock, refresh_interval_s=10) as reader:
        reader.query("t", "all")
        made.add(2)
        clock.advance(11)
        (view,) = reader._views
        view._due = Future()
        found = []
        joining = threading.Thread(target=lambda: found.append(reader.query("t", "all")), daemon=True)
        joining.start()
        joining.join(0.02)
        assert not found
        view._due.set_result(None)
        joining.join(30)
        assert [Answer.of(item) for item in found[0]] == made.expected("t", "all")
        reader.query("t", "all")
        assert log_readings == [view]


def test_an_interval_of_nothing_reads_the_log_once_a_lookup(made, storage, log_readings):
    with made.reader(storage, refresh_interval_s=0) as reader:
        for number in (1, 2):
            reader.query("t", "all")
            assert len(log_readings) == number
        reader.query("t", "all", timeout_s=LONG_S)
        assert len(log_readings) <= 3


def test_a_join_of_a_closed_reader_ends(made, clock, storage):
    reader = made.reader(storage, clock=clock, refresh_interval_s=10)
    clock.advance(11)
    (view,) = reader._views
    view._due = Future()
    ended = beside(lambda: reader.query("t", "all"))
    reader.close()
    view._due.set_result(None)
    error = ended()
    assert isinstance(error, IndexClosed) and "closed" in str(error)


def pass_long(made, storage, clock, afterwards=lambda: None):
    """Let much time pass after the next answer to a listing of the log, while the writer continues."""

    def act():
        made.add(2)
        clock.advance(100_000)
        afterwards()

    storage.meanwhile("list", act, when="after", name_prefix="log/")


@pytest.mark.parametrize("opening", [True, False])
def test_a_view_is_as_old_as_the_beginning_of_its_reading(made, clock, opening):
    storage = FaultStorage(made.inner)
    if opening:
        pass_long(made, storage, clock)
    with made.reader(storage, clock=clock, refresh_interval_s=10) as reader:
        if not opening:
            pass_long(made, storage, clock)
            reader.refresh()
        answers = [Answer.of(item) for item in reader.query("t", "all", max_count=100)]
    assert answers == made.expected("t", "all")


def test_a_long_lookup_answers_as_of_its_begin(made, clock):
    storage = FaultStorage(made.inner)
    with made.reader(storage, clock=clock, refresh_interval_s=10) as reader:
        before = made.expected("t", "all")
        pass_long(made, storage, clock)
        clock.advance(11)
        result = reader.query("t", "all", max_count=100)
        assert (result.status, [Answer.of(item) for item in result]) == ("complete", before)
        assert made.expected("t", "all") != before


def test_a_lookup_that_joins_an_old_refresh_reads_again(made, clock):
    storage = FaultStorage(made.inner)
    with made.reader(storage, clock=clock, refresh_interval_s=10) as reader:
        found = []
        joining = threading.Thread(target=lambda: found.append(reader.query("t", "all", max_count=100)), daemon=True)

        def join():
            joining.start()
            joining.join(0.05)

        pass_long(made, storage, clock, join)
        clock.advance(11)
        reader.query("t", "all")
        joining.join(30)
        assert [Answer.of(item) for item in found[0]] == made.expected("t", "all")


@pytest.mark.parametrize("failed", [True, False], ids=["after an outage", "after a long rest"])
def test_no_lookup_fails_while_another_one_reads_the_log_again(made, clock, monkeypatch, failed):
    """Such a lookup once raised the error of an earlier refresh, or said that the log was too old.

    The storage was back by then.
    """
    monkeypatch.undo()  # here waits for the log have no short limit
    storage = FaultStorage(made.inner)
    with made.reader(storage, clock=clock, refresh_interval_s=10) as reader:
        if failed:
            storage.fail("list", name_prefix="log/", times=None)
            clock.advance(11)
            with pytest.raises(StorageUnavailable):
                reader.query("t", "all", timeout_s=LONG_S)
            storage.clear()
        made.add(2)
        clock.advance(100)
        hang = storage.hang("list", name_prefix="log/")

        def ask():
            return [Answer.of(item) for item in reader.query("t", "all", timeout_s=LONG_S)]

        first = beside(ask)
        assert hang.entered.wait(30)
        real, met = IndexView.begin_due, threading.Event()

        def begin_due(view, *how, **more):
            found = real(view, *how, **more)
            met.set()
            return found

        monkeypatch.setattr(IndexView, "begin_due", begin_due)
        second = beside(ask)
        assert met.wait(30)
        time.sleep(0.02)
        hang.release.set()
        assert first() == second() == made.expected("t", "all")


@pytest.mark.parametrize("timeout_s", [None, LONG_S])
def test_the_first_lookup_after_an_outage_answers(made, clock, monkeypatch, timeout_s, log_readings):
    """Lookups once raised the error of an earlier refresh for a second, though the storage was back."""
    monkeypatch.undo()
    storage = FaultStorage(made.inner)
    with made.reader(storage, clock=clock, refresh_interval_s=10) as reader:
        storage.fail("list", name_prefix="log/", times=None)
        clock.advance(11)
        with pytest.raises(StorageUnavailable):
            reader.query("t", "all", timeout_s=timeout_s)
        storage.clear()
        made.add(2)
        clock.advance(0.001)
        asked = reader.query("t", "all", timeout_s=timeout_s)
        assert [Answer.of(item) for item in asked] == made.expected("t", "all")
        log_readings.clear()
        clock.advance(0.001)
        reader.query("t", "all", timeout_s=timeout_s)
        assert not log_readings


@pytest.mark.parametrize("timeout_s", [None, LONG_S])
def test_lookups_that_begin_during_a_failing_refresh_share_one_retry(made, clock, monkeypatch, timeout_s, log_readings):
    """Lookups once raised the error of a refresh that began before them.

    Now one of them tries again, and the others wait.
    """
    monkeypatch.undo()
    storage = FaultStorage(made.inner)
    with made.reader(storage, clock=clock, refresh_interval_s=10) as reader:
        storage.fail("list", name_prefix="log/")
        clock.advance(11)
        with pytest.raises(StorageUnavailable):
            reader.query("t", "all", timeout_s=timeout_s)
        clock.advance(0.001)
        hang = storage.hang("list", name_prefix="log/")
        storage.fail("list", name_prefix="log/")

        def ask():
            return [Answer.of(item) for item in reader.query("t", "all", timeout_s=timeout_s)]

        first = beside(ask)
        assert hang.entered.wait(60)
        clock.advance(0.001)
        begun = threading.Barrier(6)
        real = IndexReader._begin
        monkeypatch.setattr(IndexReader, "_begin", lambda reader: (begun.wait(60), real(reader))[1])
        others = [beside(ask) for _ in range(5)]
        begun.wait(60)
        log_readings.clear()
        hang.release.set()
        found = [waited() for waited in (first, *others)]
        # the first lookup may still join the second reading
        answers = [one for one in found if not isinstance(one, StorageUnavailable)]
        assert len(answers) >= 5 and all(one == made.expected("t", "all") for one in answers)
        # the hanging one began before this count, and failed
        assert len(log_readings) == 1
