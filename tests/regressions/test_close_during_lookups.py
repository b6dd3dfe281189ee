"""Closing a reader or a service cancelled searches of running lookups, and those lookups waited permanently.

Other lookups began a new pool after the close, or got the executor's own error.
"""

from __future__ import annotations

import threading
import time

import pytest

from tests.regressions.conftest import ASK
from tests.support.hanging import until
from tests.support.storage_faults import FaultStorage
from tiered_index.errors import IndexClosed, TieredIndexError
from tiered_index.storage.pools import DaemonPool

NOW_MS = 1_700_000_000_000
FILES = 4


@pytest.fixture(params=["reader", "service"])
def stored(request, open_index, open_reader, storage):
    """A storage that fails on demand, and an index of files that only it has, searched by one thread."""
    service = open_index(local_keep_s=0)
    for number in range(FILES):
        service.put("t", 0, "k", number, 1, NOW_MS + number * 1000)
        service.seal()
        service.run_lifecycle()
    assert {handle.place for handle in service.files()} == {"storage"}
    service.close()
    faulty = FaultStorage(storage)
    opened = open_reader if request.param == "reader" else open_index
    return faulty, opened(storage_backend=faulty, query_threads=1)


def query_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("tiered-index-query")}


def check_threads(before):
    """Check that the threads end when their lookups do. A close waits for that only for a moment."""
    until(lambda: query_threads() <= before)


def check(lookup):
    assert lookup.ended(), "a lookup hangs"
    if lookup.error is None:
        assert [item.offset for item in lookup.value] == list(reversed(range(FILES)))
    else:
        assert isinstance(lookup.error, TieredIndexError), repr(lookup.error)


def test_lookups_under_way_end(stored, beside):
    faulty, index = stored
    before = query_threads()
    hang = faulty.hang("get_range", times=None, name_prefix="data/")
    lookups = [beside(lambda act=act: act(index)) for act in (ASK["query"], *ASK.values(), ASK["query"])]
    assert hang.entered.wait(60)
    time.sleep(0.05)  # so that the others wait in the queue
    closing = beside(index.close)
    closing.ended(0.05)
    hang.release.set()
    assert closing.ended()
    assert closing.error is None
    for lookup in lookups:
        check(lookup)
    for act in ASK.values():
        with pytest.raises(IndexClosed, match="closed"):
            act(index)
    check_threads(before)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_lookup_that_is_about_to_begin_a_search_ends(stored, beside, monkeypatch, ask, nth):
    _, index = stored
    before = query_threads()
    submit, calls, closings = DaemonPool.submit, [], []

    def close_then_submit(pool, *arguments):
        calls.append(pool)
        if len(calls) == nth:
            closings.append(beside(index.close))
            closings[0].ended(0.05)
        return submit(pool, *arguments)

    monkeypatch.setattr(DaemonPool, "submit", close_then_submit)
    lookup = beside(lambda: ask(index))
    check(lookup)
    assert closings[0].ended()
    assert closings[0].error is None
    check_threads(before)
