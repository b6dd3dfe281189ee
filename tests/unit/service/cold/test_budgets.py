"""A lookup never exceeds a limit. Its error has the entries found so far, and names the unread files."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.cases import each
from tests.support.cold_index import BASE_MS, cold_index, columns, publish, put
from tests.support.hanging import until
from tests.support.model import Answer
from tests.support.pages import asking
from tests.support.storage_faults import FaultStorage, LatencyStorage
from tiered_index import Lookup
from tiered_index.base.clock import ManualClock
from tiered_index.errors import BudgetExceeded, InvalidArgument

FILES = 6


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return cold_index(tmp_path_factory.mktemp("cold") / "root", files=FILES)


@pytest.fixture(autouse=True)
def _forget(index):
    index.storage.gate = None
    index.storage.reset()


@pytest.mark.parametrize(
    "limits",
    each(
        max_requests=(-1, 1.0, "1", True), max_bytes=(-1, 2.5, False), timeout_s=(0, -1, math.nan, math.inf, "1", True)
    ),
    ids=str,
)
def test_an_invalid_limit_is_refused(index, limits):
    with index.reader() as reader:
        index.storage.reset()
        name = next(iter(limits))
        with pytest.raises(InvalidArgument, match=name):
            reader.query("t", "all", **limits)
        with pytest.raises(InvalidArgument, match=name):
            reader.query_many([Lookup(topic="t", key="all")], **limits)
        assert index.storage.operations == []


@pytest.mark.parametrize("timeout_s", [1e300, 10**400], ids=["float", "integer"])
def test_a_timeout_of_any_length_is_a_timeout(index, timeout_s):
    with index.reader(query_threads=1) as reader:
        answer = reader.query("t", "all", timeout_s=timeout_s)
        assert [Answer.of(item) for item in answer] == index.expected("t", "all")
        assert len(reader.query_many([Lookup(topic="t", key="all")], timeout_s=timeout_s)[0]) == FILES


@pytest.mark.parametrize(("files", "many"), [(FILES, False), (1, True)])
def test_a_storage_that_hangs_is_waited_for_until_the_timeout(index, tmp_path, files, many):
    """The call returns while the storage still hangs, so only its own deadline can have ended it."""
    chosen = index if files == FILES else cold_index(tmp_path / "root", files=1)
    faulty = FaultStorage(chosen.inner)
    with chosen.reader(storage=faulty) as reader:
        ask = asking(reader, "t", "all", many=many)
        hang = faulty.hang("get_range", times=None)
        try:
            for timeout_s in (0.4, 4.0, 40.0):
                with pytest.raises(BudgetExceeded, match="timeout_s was reached") as caught:
                    ask(timeout_s=timeout_s)
                if hang.entered.is_set():
                    break  # on a busy machine the lookup may not send its request in time
            assert hang.entered.is_set() and not hang.release.is_set()
            assert len(caught.value.failed) == files
            explain = caught.value.result.explain
            sizes = {stored.file_id: stored.size_bytes - stored.trailer_position for stored in chosen.stored}
            # a request that is sent and not awaited counts fully
            assert explain.requests >= 1 and all(r.bytes == sizes[r.file] * r.requests for r in explain.files)
            partly = ask(timeout_s=0.4, allow_partial=True)
            assert {report.outcome for report in partly.failed} == {"failed"} and len(partly.failed) == files
            # a lookup without a timeout, begun meanwhile, answers once the storage continues
            with ThreadPoolExecutor(1) as pool:
                patient = pool.submit(reader.query, "t", "all")
                hang.release.set()
                assert [Answer.of(item) for item in patient.result(30)] == chosen.expected("t", "all")
        finally:
            hang.release.set()
        faulty.clear()
        assert len(reader.query("t", "all", timeout_s=30)) == files


@pytest.mark.parametrize("error", [BudgetExceeded, KeyboardInterrupt])
def test_an_interrupted_lookup_does_not_end_those_that_waited_for_its_directory(index, error):
    entered, release, stored = threading.Event(), threading.Event(), index.stored[0]

    def gate(read):
        if len(index.storage.reads) == 1:
            entered.set()
            assert release.wait(30)
            raise error("struck")

    question = ("t", "all", stored.second_min * 1000, stored.second_max * 1000)
    with index.reader() as reader, ThreadPoolExecutor(5) as pool:
        index.storage.reset()
        index.storage.gate = gate
        first = pool.submit(reader.query, *question)
        assert entered.wait(30)
        others = [pool.submit(reader.query, *question) for _ in range(4)]
        until(lambda: reader.cache_use()["directories"].misses >= 5)  # all lookups wait for the directory
        release.set()
        assert isinstance(first.exception(30), error)
        assert [len(other.result(30)) for other in others] == [1] * 4
    assert len(index.storage.reads) <= 4


def test_early_pages_stay_within_what_they_need(tmp_path):
    """A limit that suffices for the page is enough, however many older files there are."""
    many = cold_index(tmp_path / "root", files=30, entries=5)
    # requests are so slow that any early one is sent before the first answer arrives
    with many.reader(LatencyStorage(many.storage, seed=1, median_ms=30, sigma=0)) as reader:
        assert reader.query("t", "all", max_count=1).explain.requests == 2
    with many.reader() as reader:
        assert len(reader.query("t", "all", max_count=1, max_requests=2)) == 1
        page = reader.query("t", "all", max_count=4, max_requests=8)
        assert [Answer.of(item) for item in page] == many.expected("t", "all")[:4] and page.status == "truncated"
        with many.writer() as writer:
            put(many, writer, columns(31, 5))
            publish(many, writer)
        assert len(reader.query("t", "all", max_count=1, max_requests=2)) == 1


@pytest.mark.parametrize("limit", [2, 6])
def test_lookups_with_few_requests_catch_up_with_the_log(tmp_path, limit):
    index = cold_index(tmp_path / "root", files=2)
    clock = ManualClock(BASE_MS)
    with index.reader(clock=clock, refresh_interval_s=5, cache_slot_groups=False) as reader:
        known = [Answer.of(item) for item in reader.query("t", "all")]
        with index.writer() as writer:
            for number in range(12):
                writer.put("t", 0, "all", 10**6 + number, 1, BASE_MS + 10**9 + number * 1000)
                writer.seal()
                writer.run_lifecycle()
            behind = writer.log_state.number - reader.log_state.number
            whole = [Answer.of(item) for item in writer.query("t", "all")]
        assert behind >= 12 and len(whole) == len(known) + 12
        for attempt in range(4 * behind):
            clock.advance(6)
            index.storage.reset()
            partly = reader.query("t", "all", max_count=100, max_requests=limit, allow_partial=True)
            assert len(index.storage.operations) <= limit
            if limit == 6 and attempt == 0:
                # the log took half; the known files were read all the same
                assert [Answer.of(item) for item in partly] == known
            if reader.log_state.number >= writer.log_state.number:
                break
        else:
            pytest.fail(f"still at {reader.log_state.number}")
        assert [Answer.of(item) for item in reader.query("t", "all", max_count=100)] == whole
