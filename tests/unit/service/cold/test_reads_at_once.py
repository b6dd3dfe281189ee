"""A lookup reads files in parallel: all files that it needs in any case, and of the rest only as many as it
may need.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from tests.support.batches import batch
from tests.support.cold_index import BASE_MS, cold_index, in_rounds, publish, put
from tests.support.model import Answer
from tests.support.storage_faults import FaultStorage
from tests.support.thread_limit import ThreadLimit
from tiered_index import IndexService, Lookup
from tiered_index.clock import ManualClock
from tiered_index.errors import BudgetExceeded, StorageUnavailable
from tiered_index.format.layout import HEADER_SIZE
from tiered_index.format.trailer import Tail
from tiered_index.storage.memory import MemoryStorage

THREADS = 4
FILES = 13


@pytest.fixture(scope="module")
def brokers(tmp_path_factory):
    """Files of one hour, as many brokers write them.

    The key "k" is early in each file. Each file ends a second before the next one.
    """
    made = cold_index(tmp_path_factory.mktemp("cold") / "root", files=0)
    with made.writer() as writer:
        for number in range(FILES):
            keys, begin_ms = ["k", f"end{number}"], BASE_MS + 1000 * number
            times = [begin_ms, begin_ms + 3_000_000]
            put(made, writer, batch(2, key=keys, offset=[2 * number, 2 * number + 1], timestamp_ms=times))
            writer.seal()
        publish(made, writer)
    return made


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    """Files whose times do not overlap. The key "all" is in each."""
    return cold_index(tmp_path_factory.mktemp("cold") / "root", files=FILES, entries=3)


@pytest.fixture
def reader_of():
    readers = []

    def opened(made):
        """Return a reader that knows every directory and keeps no group."""
        reader = made.reader(query_threads=THREADS, block_cache_bytes=0, filter_after_probes=10**6)
        readers.append(reader)
        reader.query_many([Lookup(topic="t", key="warm")])
        made.storage.reset()
        return reader

    yield opened
    for reader in readers:
        reader.close()


@pytest.mark.parametrize("keys", [1, 2, 20])
def test_a_batch_of_any_size_reads_as_many_files_at_once_as_may_be(days, reader_of, keys):
    reader = reader_of(days)
    asked = [Lookup(topic="t", key="all")] + [Lookup(topic="t", key=f"k{number}-0") for number in range(keys - 1)]
    answers = in_rounds(days.storage, lambda: reader.query_many(asked), THREADS, FILES)
    for q, answer in zip(asked, answers, strict=True):
        assert [Answer.of(item) for item in answer] == days.expected("t", q.key)
    assert (days.storage.most_at_once, len(days.storage.reads)) == (THREADS, FILES)


@pytest.mark.parametrize(
    ("end_ms", "alone"),
    [(None, 1), (BASE_MS + 2_000_000, 0)],
    ids=["none ends before the answers of the first", "all reach to the end of the range"],
)
def test_files_that_no_answer_spares_are_read_side_by_side(brokers, reader_of, end_ms, alone):
    reader = reader_of(brokers)
    ask = partial(reader.query, "t", "k", end_ms=end_ms, max_count=1)
    answer = in_rounds(brokers.storage, ask, THREADS, FILES, alone=alone)
    assert [Answer.of(item) for item in answer] == brokers.expected("t", "k", max_count=1)
    assert (brokers.storage.most_at_once, len(brokers.storage.reads)) == (THREADS, FILES)
    assert answer.status == "truncated"


# the number of entries of each key in the file of each day, newest first
KEYS = {
    "hot": lambda age: 70,
    "warm": lambda age: 20,
    "fading": lambda age: 40 if age == 0 else 1,
    "old": lambda age: 70 if age > 1 else 0,
    "weekly": lambda age: 1 if age % 7 == 3 else 0,
    "daily": lambda age: 1,
    "absent": lambda age: 0,
}
DAYS = 30
# the most requests for the newest 64 entries, without filters and with all of them
FIRST_64 = {"hot": (2, 2), "warm": (4, 4), "weekly": (30, 4), "daily": (30, 30), "absent": (30, 0)}


@pytest.fixture(scope="module")
def month(tmp_path_factory):
    """A file per day, with frequent and rare keys."""
    made = cold_index(tmp_path_factory.mktemp("cold") / "root", files=0, items=1000)
    with made.writer() as writer:
        offset = 0
        for day in range(DAYS):
            keys = [key for key, entries in KEYS.items() for _ in range(entries(DAYS - 1 - day))]
            offsets, times = np.arange(len(keys)) + offset, BASE_MS + day * 86_400_000 + np.arange(len(keys)) * 1000
            put(made, writer, batch(len(keys), key=keys, offset=offsets, timestamp_ms=times))
            offset += len(keys)
            writer.seal()
        publish(made, writer)
    return made


@pytest.mark.parametrize("with_filters", [False, True])
def test_a_frequent_key_costs_its_newest_files_and_a_rare_one_a_round_trip_more(month, with_filters):
    with month.reader(block_cache_bytes=0, filter_after_probes=10**6) as reader:
        reader.query_many([Lookup(topic="t", key="hot")])
        if with_filters:
            for stored in month.stored:
                assert reader._cold_paths[0].fetch_filter(stored)
        for key in KEYS:
            month.storage.reset()
            answer = reader.query("t", key, max_count=64)
            assert [Answer.of(item) for item in answer] == month.expected("t", key, max_count=64)
            assert len(month.storage.reads) == answer.explain.requests
            if key in FIRST_64:
                assert answer.explain.requests <= FIRST_64[key][with_filters], key
            assert len(answer.explain.files) == DAYS


def test_a_rare_key_costs_one_round_trip_if_filters_exclude_most_files(month):
    """Also if one call of the core has excluded them."""
    with month.reader(query_threads=8, block_cache_bytes=0, filter_after_probes=10**6) as reader:
        reader.query_many([Lookup(topic="t", key="hot")])
        for stored in month.stored:
            assert reader._cold_paths[0].fetch_filter(stored)
        reader.query("t", "absent")
        month.storage.reset()
        answer = in_rounds(month.storage, lambda: reader.query("t", "weekly"), 4, 4)
        assert [Answer.of(item) for item in answer] == month.expected("t", "weekly")
        assert (month.storage.most_at_once, answer.explain.requests) == (4, 4)


def test_a_small_budget_reads_items_and_not_directories_alone(brokers):
    """If all files were read in parallel, their directories would use up the budget."""
    with brokers.reader(query_threads=THREADS, block_cache_bytes=0, filter_after_probes=10**6) as reader:
        batch = reader.query_many([Lookup(topic="t", key="k")], max_requests=6, allow_partial=True)
        assert (batch.explain.requests, len(batch[0]), len(batch[0].failed)) == (6, 3, FILES - 3)


@pytest.fixture
def damaged(tmp_path):
    """A writer with one file in root and storage."""
    storage, root = FaultStorage(MemoryStorage()), tmp_path / "root"
    settings = {"slots": 100, "items": 1000, "background": False, "block_cache_bytes": 0, "clock": ManualClock(BASE_MS)}
    with IndexService.open(root=root, storage_backend=storage, **settings) as writer:
        writer.put_batch(batch(50))
        writer.seal()
        writer.run_lifecycle()
        (path,) = (tmp_path / "root" / "uploaded").glob("*.index")
        yield writer, storage, path


def damage(path):
    data = path.read_bytes()
    stop = Tail.decode(data, str(path), len(data)).position
    with path.open("r+b") as file:
        file.seek(HEADER_SIZE)
        file.write(bytes(255 - byte for byte in data[HEADER_SIZE:stop]))


def test_a_storage_that_hangs_behind_a_damaged_copy_is_given_up(damaged):
    writer, storage, path = damaged
    damage(path)
    assert len(writer.query("t", "k", timeout_s=600)) == 50
    hanging = storage.hang("get_range", times=None)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(writer.query, "t", "k", timeout_s=0.3)
        try:
            with pytest.raises(BudgetExceeded, match="timeout_s"):
                asked.result(60)
        finally:
            hanging.release.set()


def test_a_whole_copy_is_searched_in_the_callers_thread(damaged):
    writer, _, _ = damaged
    before = set(threading.enumerate())
    answer = writer.query("t", "k", timeout_s=600)
    assert (len(answer), answer.explain.requests) == (50, 0)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("many", [False, True])
def test_without_threads_files_are_searched_in_the_callers(days, monkeypatch, many):
    limit = ThreadLimit(monkeypatch)
    with days.reader(query_threads=THREADS) as reader:
        limit.refuse("tiered-index-query", 10**6)
        # a read that must end in time needs a thread
        result = reader.query("t", "all", timeout_s=600, allow_partial=True)
        assert (result.status, len(result), {report.outcome for report in result.failed}) == ("partial", 0, {"failed"})
        with pytest.raises(StorageUnavailable, match="thread"):
            reader.query("t", "all", timeout_s=600)
        answer = reader.query_many([Lookup(topic="t", key="all")])[0] if many else reader.query("t", "all")
        assert ([Answer.of(item) for item in answer], answer.status) == (days.expected("t", "all"), "complete")
        # and one from memory needs none
        assert len(reader.query("t", "all", timeout_s=600)) == FILES
        limit.refuse("tiered-index-query", 0)
        assert len(reader.query("t", "all", timeout_s=600)) == FILES
    assert limit.refused > 0
