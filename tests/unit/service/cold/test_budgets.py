"""A lookup never exceeds a limit. Its error has the entries found so far, and names the unread files."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.cases import each
from tests.support.cold_index import cold_index, columns, publish, put
from tests.support.hanging import until
from tests.support.model import Answer
from tests.support.storage_faults import FaultStorage, LatencyStorage
from tiered_index import Lookup
from tiered_index.errors import BudgetExceeded, InvalidArgument
from tiered_index.storage.memory import MemoryStorage

FILES = 6


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return cold_index(tmp_path_factory.mktemp("cold") / "root", files=FILES)


@pytest.fixture(autouse=True)
def _forget(made):
    made.storage.reset()


def check_partial(made, error, requests):
    """Check that an error has the newest answers within the limits, and names the other files."""
    result = error.result
    assert result is not None and result.status == "partial"
    found = [Answer.of(item) for item in result]
    expected = made.expected("t", "all")
    assert set(found) < set(expected) and len(found) == len(set(found)) <= requests
    if requests < FILES:
        # a file needs two requests, so directories do not take all of them
        assert len(found) == requests // 2
    names = {report.file for report in result.failed}
    assert names == {report.file for report in error.failed} and len(names) == FILES - len(found)
    assert all("max_" in str(report.error) for report in result.failed)
    for answer in expected:
        file = next(o.file_id for o in made.stored if o.second_min <= answer.timestamp_ms // 1000 <= o.second_max)
        assert (answer in found) is (file not in names)


@pytest.mark.parametrize("limit", range(2 * FILES + 1))
def test_max_requests_is_never_passed(made, limit):
    for allow_partial in (False, True):
        with made.reader() as reader:
            made.storage.reset()
            if limit == 2 * FILES:
                answer = reader.query("t", "all", max_requests=limit, allow_partial=allow_partial)
                assert [Answer.of(item) for item in answer] == made.expected("t", "all")
            elif allow_partial:
                answer = reader.query("t", "all", max_requests=limit, allow_partial=True)
                check_partial(made, BudgetExceeded("", failed=answer.failed, result=answer), limit)
                assert answer.explain.requests <= limit
            else:
                with pytest.raises(BudgetExceeded, match=f"max_requests={limit} ") as caught:
                    reader.query("t", "all", max_requests=limit)
                check_partial(made, caught.value, limit)
            assert len(made.storage.operations) <= limit


def test_max_bytes_is_never_passed(made):
    with made.reader() as reader:
        whole = reader.query("t", "all").explain.bytes
    for limit in [0, 1, *range(100, whole, 997), whole - 1]:
        with made.reader() as reader:
            made.storage.reset()
            with pytest.raises(BudgetExceeded, match=f"max_bytes={limit} ") as caught:
                reader.query("t", "all", max_bytes=limit)
            check_partial(made, caught.value, FILES)
            assert made.storage.delivered <= limit
            assert len(caught.value.result) >= limit * FILES // whole - 1
    with made.reader() as reader:
        assert len(reader.query("t", "all", max_bytes=whole)) == FILES


def test_local_files_are_answered_for_nothing(tmp_path):
    mixed = cold_index(tmp_path / "root", files=2)
    with mixed.writer() as writer:
        put(mixed, writer, columns(2, 40))
        writer.flush()
        assert len(writer.query("t", "k2-3", mixed.stored[-1].second_max * 1000 + 1000, max_requests=0)) == 1
        with pytest.raises(BudgetExceeded) as caught:
            writer.query("t", "all", max_requests=0)
        result = caught.value.result
        assert [Answer.of(item) for item in result] == mixed.expected("t", "all")[:1]
        partly = writer.query("t", "all", max_requests=0, allow_partial=True)
        assert (partly.status, len(partly), len(partly.failed)) == ("partial", 1, 2)


@pytest.mark.parametrize("limit", [0, 1, 3, 5])
def test_the_limits_of_a_batch_are_of_the_whole_batch(made, limit):
    keys = [*(f"k{file}-{n}" for file in range(FILES) for n in range(3)), "all"]
    asked = [Lookup(topic="t", key=key) for key in keys]
    with made.reader() as reader:
        made.storage.reset()
        with pytest.raises(BudgetExceeded) as caught:
            reader.query_many(asked, max_requests=limit)
        assert len(made.storage.operations) <= limit
        results = caught.value.result
        failed = {report.file for report in results.failed}
        assert failed == {report.file for report in caught.value.failed} and len(failed) >= FILES - limit // 2
        for q, answer in zip(asked, results, strict=True):
            assert answer.status == "partial"
            assert set(map(Answer.of, answer)) <= set(made.expected(q.topic, q.key))
        assert results.counts.sum() == 4 * (FILES - len(failed))
        made.storage.reset()
        partly = reader.query_many(asked, max_bytes=0, allow_partial=True)
        assert made.storage.delivered == 0
        assert {answer.status for answer in partly} == {"partial"}


@pytest.mark.parametrize(
    "limits",
    each(
        max_requests=(-1, 1.0, "1", True), max_bytes=(-1, 2.5, False), timeout_s=(0, -1, math.nan, math.inf, "1", True)
    ),
    ids=str,
)
def test_an_invalid_limit_is_refused(made, limits):
    with made.reader() as reader:
        made.storage.reset()
        name = next(iter(limits))
        with pytest.raises(InvalidArgument, match=name):
            reader.query("t", "all", **limits)
        with pytest.raises(InvalidArgument, match=name):
            reader.query_many([Lookup(topic="t", key="all")], **limits)
        assert made.storage.operations == []


@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("call", ["query", "query_many"])
def test_a_limit_of_another_name_is_refused(made, call, limit):
    given = ("t", "k") if call == "query" else ([("t", "k")],)
    with made.reader() as reader, pytest.raises(TypeError, match="max_conut"):
        getattr(reader, call)(*given, max_conut=limit)


@pytest.mark.parametrize(
    "timeout_s", [10**10, 1e300, 10**400, 0.5e9], ids=["317 years", "float", "integer", "16 years"]
)
def test_a_timeout_of_any_length_is_a_timeout(made, timeout_s):
    with made.reader(query_threads=1) as reader:
        answer = reader.query("t", "all", timeout_s=timeout_s)
        assert [Answer.of(item) for item in answer] == made.expected("t", "all")
        assert len(reader.query_many([Lookup(topic="t", key="all")], timeout_s=timeout_s)[0]) == FILES


ASKS = {
    "query": lambda reader, timeout_s, allowed: reader.query("t", "all", timeout_s=timeout_s, allow_partial=allowed),
    "query_many": lambda reader, timeout_s, allowed: reader.query_many(
        [Lookup(topic="t", key="all"), Lookup(topic="t", key="k0-1")], timeout_s=timeout_s, allow_partial=allowed
    ),
}


@pytest.fixture
def threads_end():
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive(), thread


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS.keys())
@pytest.mark.parametrize("files", [1, FILES])
def test_a_storage_that_hangs_is_waited_for_until_the_timeout(made, tmp_path, threads_end, ask, files):
    """The call returns while the storage still hangs, so only its own deadline can have ended it."""
    chosen = made if files == FILES else cold_index(tmp_path / "root", files=1)
    faulty = FaultStorage(chosen.inner)
    reader = chosen.reader(storage=faulty)
    with reader:
        hang = faulty.hang("get_range", times=None)
        try:
            for timeout_s in (0.4, 4.0, 40.0):
                with pytest.raises(BudgetExceeded, match="timeout_s was reached") as caught:
                    ask(reader, timeout_s, False)
                if hang.entered.is_set():
                    break  # on a busy machine the lookup may not send its request in time
            assert hang.entered.is_set() and not hang.release.is_set()
            assert len(caught.value.failed) == files
            explain = caught.value.result.explain
            asked = {stored.file_id: stored.size_bytes - stored.trailer_position for stored in chosen.stored}
            # a request that is sent and not awaited counts fully
            assert explain.requests >= 1 and all(r.bytes == asked[r.file] * r.requests for r in explain.files)
            partly = ask(reader, 0.4, True)
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
def test_an_interrupted_lookup_does_not_end_those_that_waited_for_its_directory(made, error, monkeypatch):
    entered, release = threading.Event(), threading.Event()
    inner = MemoryStorage.get_range
    calls = []

    def get_range(self, name, start, length):
        calls.append(name)
        if len(calls) == 1:
            entered.set()
            assert release.wait(30)
            raise error("struck")
        return inner(self, name, start, length)

    stored = made.stored[0]
    question = ("t", "all", stored.second_min * 1000, stored.second_max * 1000)
    with made.reader() as reader, ThreadPoolExecutor(5) as pool:
        monkeypatch.setattr(MemoryStorage, "get_range", get_range)
        first = pool.submit(reader.query, *question)
        assert entered.wait(30)
        others = [pool.submit(reader.query, *question) for _ in range(4)]
        until(lambda: reader.cache_use()["directories"].misses >= 5)  # all lookups wait for the directory
        release.set()
        assert isinstance(first.exception(30), error)
        assert [other.exception(30) for other in others] == [None] * 4
        assert [len(other.result(30)) for other in others] == [1] * 4
    assert len(calls) <= 4


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
