"""A thread cannot start. Lookups continue without it or raise an error, and the next lookup completes the work.

A close still closes.
"""

import pytest

from tests.support.cold_index import cold_index
from tests.support.model import Answer
from tests.support.storage_faults import FaultStorage
from tests.support.thread_limit import ThreadLimit
from tiered_index import IndexReader
from tiered_index.storage.context import RequestContext
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import PrefixedStorage, child_storages
from tiered_index.storage.pools import side_by_side

LONG_S = 300.0
MANY = 10**6


@pytest.fixture
def limit(monkeypatch):
    return ThreadLimit(monkeypatch)


@pytest.fixture
def several(tmp_path):
    """A prefix with two indexes below it."""
    storage = FaultStorage(MemoryStorage())  # one namespace, as in an object store
    for name in ("a", "b"):
        cold_index(tmp_path / name, files=2, storage=PrefixedStorage(storage, name))
    assert len(list(child_storages(storage))) == 2
    yield storage


@pytest.mark.parametrize("timeout_s", [None, LONG_S])
def test_a_due_refresh_without_a_thread_is_done_by_the_next_lookup(tmp_path, limit, clock, timeout_s):
    made = cold_index(tmp_path / "root", files=3)
    with made.reader(clock=clock, refresh_interval_s=10) as reader:
        before = [Answer.of(item) for item in reader.query("t", "all")]
        made.add(3)
        clock.advance(11)
        # the threads of the opening would do it
        reader._parts.threads.__init__(2, "tiered-index-log")
        # the lookup tries twice
        limit.refuse("tiered-index-log", 2)
        # The log is overdue by a second. The answer is as of the reader's log position.
        result = reader.query("t", "all", timeout_s=LONG_S)
        assert ([Answer.of(item) for item in result], result.status, limit.refused) == (before, "complete", 2)
        result = reader.query("t", "all", timeout_s=timeout_s)
        assert [Answer.of(item) for item in result] == made.expected("t", "all") != before


def test_refreshes_of_several_indexes_without_threads(several, limit, clock, log_readings):
    with IndexReader.open(storage_backend=several, clock=clock, refresh_interval_s=10) as reader:
        clock.advance(11)
        # the threads of the opening would do it
        reader._parts.threads.__init__(2, "tiered-index-log")
        limit.refuse("tiered-index-log", MANY)
        log_readings.clear()
        assert len(reader.query("t", "all")) == 4
        assert sorted(map(id, log_readings)) == sorted(map(id, reader._views))
        assert reader.refresh() == reader._views[0].log_state
        assert sorted(map(id, log_readings)) == sorted([*map(id, reader._views)] * 2)


def test_opening_without_threads(several, limit):
    limit.refuse("tiered-index-log", MANY)
    with IndexReader.open(storage_backend=several) as reader:
        assert len(reader.sources) == 2
        # the reader also reads each index's log in its own thread
        assert limit.refused == 4


def test_ranges_without_threads_are_read_by_the_lookup(tmp_path, limit):
    made = cold_index(tmp_path / "root", files=1)
    with made.reader() as reader:
        limit.refuse("tiered-index-ranges", MANY)
        cold = reader._cold_paths[0]
        with RequestContext(submit=cold._range_reads.submit).active():
            assert side_by_side([lambda: 1, lambda: 2, lambda: 3]) == [1, 2, 3]
        # the lookup reads the other ranges itself, and requests no further thread
        assert limit.refused == 1
