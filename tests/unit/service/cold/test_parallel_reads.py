"""Files, ranges and shards are read in parallel, within the reader's bound.

A lookup reads all files that it needs in any case, and of the rest only as many as it may need. Verified groups stay in
memory, and batches fetch each byte once.
"""

import threading

import numpy as np
import pytest

from tests.support.batches import batch
from tests.support.cold_index import BASE_MS, Recorder, cold_index, in_rounds, publish, put, spoiled
from tests.support.merging import BASE_MS as WINDOW_MS
from tests.support.merging import DAY_S, HOUR_MS, Merging, small_shards
from tests.support.model import Answer
from tests.support.thread_limit import ThreadLimit
from tiered_index import IndexReader, Lookup
from tiered_index.base import kernels
from tiered_index.errors import CorruptFile, StorageUnavailable
from tiered_index.format.layout import HEADER_SIZE
from tiered_index.storage.prices import PriceTable

FILES = 8
ENTRIES = 1500


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Files of four slot groups each."""
    return cold_index(tmp_path_factory.mktemp("cold") / "root", files=FILES, entries=ENTRIES, slots=700)


@pytest.fixture(autouse=True)
def _forget(request):
    if "index" in request.fixturenames:
        index = request.getfixturevalue("index")
        index.storage.gate = None
        index.storage.reset()


def test_a_search_that_is_given_up_asks_for_nothing_more(index):
    """The newest files have no entry of the key, so several searches run when the answer is found. One hangs."""
    hanging, newest = index.stored[FILES - 5 : FILES - 3]
    arrived, release = threading.Event(), threading.Event()

    def gate(read):
        if read.name == hanging.name:
            arrived.set()
            assert release.wait(30)
        elif read.name == newest.name:
            assert arrived.wait(30)

    with index.reader(query_threads=8) as reader:
        index.storage.gate = gate
        answer = reader.query("t", f"k{FILES - 4}-3", max_count=1, begin_ms=hanging.second_min * 1000)
        outcomes = {report.file: (report.outcome, report.requests) for report in answer.explain.files}
        assert (len(answer), outcomes[hanging.file_id]) == (1, ("skipped_budget", 1))
        requests = len(index.storage.reads)
        release.set()
    # the reader is closed, so every search has ended
    assert len(index.storage.reads) == requests == answer.explain.requests


def test_a_group_that_failed_its_check_is_not_cached(index):
    stored = index.stored[0]
    question = ("t", "all", stored.second_min * 1000, stored.second_max * 1000)
    with index.reader() as reader:
        reader.query("t", "k0-3", max_requests=0, allow_partial=True)
        items = slice(HEADER_SIZE, stored.trailer_position)
        zeros = bytes(items.stop - items.start)
        with spoiled(index, stored.name, lambda data: data.__setitem__(items, zeros)):
            for _ in range(2):
                with pytest.raises(CorruptFile, match="CRC32"):
                    reader.query(*question)
            assert reader.cache_use()["slot_groups"].entries == 0
        assert len(reader.query(*question)) == 1


# the keys are in two of the four slot groups of each file, about 4,700 to 5,000 bytes apart
APART = [Lookup(topic="t", key=key) for key in ("k3-1213", "k2-757", "all")]


@pytest.mark.usefixtures("large_filters")
@pytest.mark.parametrize(("egress_usd", "joined"), [(0.0, 8), (0.09, 1), (100.0, 0)])
def test_a_gap_by_price_costs_no_more_than_a_request(index, egress_usd, joined):
    costs = {}
    for gap in (0, 256 << 10, "price"):
        prices = PriceTable(egress_per_gib_usd=egress_usd)
        with index.reader(coalesce_gap_bytes=gap, cache_slot_groups=False, prices=prices) as reader:
            reader.query("t", "all")
            explain = reader.query_many(APART).explain
            costs[gap] = explain.cost_usd
    assert sum(report.gap_bytes > 0 for report in explain.files) == joined
    assert costs["price"] <= min(costs.values())


THREADS = 4
DAILY_FILES = 13


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    """Files whose times do not overlap. The key "all" is in each."""
    return cold_index(tmp_path_factory.mktemp("cold") / "root", files=DAILY_FILES, entries=3)


@pytest.mark.parametrize("keys", [1, 2, 20])
def test_a_batch_of_any_size_reads_as_many_files_at_once_as_may_be(days, keys):
    lookups = [Lookup(topic="t", key="all")] + [Lookup(topic="t", key=f"k{number}-0") for number in range(keys - 1)]
    with days.reader(query_threads=THREADS, cache_slot_groups=False, filter_after_probes=10**6) as reader:
        # this reads the directories
        reader.query_many([Lookup(topic="t", key="warm")])
        days.storage.reset()
        answers = in_rounds(days.storage, lambda: reader.query_many(lookups), THREADS, DAILY_FILES)
        for q, answer in zip(lookups, answers, strict=True):
            assert [Answer.of(item) for item in answer] == days.expected("t", q.key)
        assert (days.storage.most_at_once, len(days.storage.reads)) == (THREADS, DAILY_FILES)


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
    index = cold_index(tmp_path_factory.mktemp("cold") / "root", files=0, items=1000)
    with index.writer() as writer:
        offset = 0
        for day in range(DAYS):
            keys = [key for key, entries in KEYS.items() for _ in range(entries(DAYS - 1 - day))]
            offsets, times = np.arange(len(keys)) + offset, BASE_MS + day * 86_400_000 + np.arange(len(keys)) * 1000
            put(index, writer, batch(len(keys), key=keys, offset=offsets, timestamp_ms=times))
            offset += len(keys)
            writer.seal()
        publish(index, writer)
    return index


@pytest.mark.parametrize("with_filters", [False, True])
def test_a_frequent_key_costs_its_newest_files_and_a_rare_one_a_round_trip_more(month, with_filters):
    with month.reader(cache_slot_groups=False, filter_after_probes=10**6) as reader:
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
        if kernels.compiled():
            # and one from memory needs none
            assert len(reader.query("t", "all", timeout_s=600)) == DAILY_FILES
        limit.refuse("tiered-index-query", 0)
        assert len(reader.query("t", "all", timeout_s=600)) == DAILY_FILES
    assert limit.refused > 0


SHARDS = 8
SHARD_KEYS = [f"k{number}" for number in range(200)]
ASKED = [Lookup(topic="t", key=key) for key in SHARD_KEYS]


@pytest.fixture(scope="module")
def life(tmp_path_factory):
    """One table of eight shards, which are smaller than those of a real merge."""
    life = Merging(tmp_path_factory.mktemp("merge"), settings={"slots": 64})
    with small_shards(1600):
        for hour in range(2):
            life.put((WINDOW_MS + hour * HOUR_MS + 1000 * number, key) for number, key in enumerate(SHARD_KEYS))
            life.publish()
        life.later()
        life.merge(DAY_S)
    (shards,) = life.state.tables.values()
    assert len(shards) == SHARDS
    yield life
    life.close()


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_shards_of_a_table_are_read_side_by_side(life, threads):
    """A fresh reader reads each directory and the items of each shard once. The lookup's own thread also searches."""
    recorder = Recorder(life.storage)
    settings = {"cache_slot_groups": False, "filter_after_probes": 10**6, "refresh_interval_s": 10**6}
    with IndexReader.open(storage_backend=recorder, clock=life.clock, query_threads=threads, **settings) as reader:
        answers = reader.query_many(ASKED, timeout_s=600)
        for q, answer in zip(ASKED, answers, strict=True):
            assert life.answers(answer) == life.model.query("t", q.key, max_count=None)
        assert answers.explain.requests == len(recorder.reads) == 2 * SHARDS and recorder.most_at_once <= threads
        (report,) = [report for report in answers.explain.files if report.outcome == "read"]
        assert (report.requests, report.matched) == (2 * SHARDS, 2 * len(SHARD_KEYS))
        recorder.reset()
        answers = in_rounds(recorder, lambda: reader.query_many(ASKED), threads, SHARDS)
        assert answers.counts.tolist() == [2] * len(SHARD_KEYS)
        assert (recorder.most_at_once, len(recorder.reads)) == (threads, SHARDS)
