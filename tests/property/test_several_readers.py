"""Readers of several indexes against the reference model: their pages are the sorted union of the indexes' entries."""

import contextlib
import itertools
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.several_indexes import BASE_MS, Cluster
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, Lookup
from tiered_index.base.clock import ManualClock
from tiered_index.config import IndexConfig
from tiered_index.errors import StorageUnavailable
from tiered_index.storage.memory import MemoryStorage

# few places and seconds, so that indexes often agree in both, and an index has some places twice
messages = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(["k", "k", "other"]), st.integers(0, 5), st.integers(0, 3)),
    max_size=12,
)
pages = st.tuples(st.integers(1, 7), st.booleans(), st.integers(0, 10))
LIMITS = [(None, None), (BASE_MS + 1000, BASE_MS + 2999)]


@contextlib.contextmanager
def made(contents):
    """Yield a cluster with an index for each of `contents`, and the storages of its readers by URI."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        cluster, storages = Cluster(Path(folder)), {}
        for rows in contents:
            storage = MemoryStorage()
            cluster.add(storage.uri, [("t", q, key, at, 10, BASE_MS + 1000 * s) for q, key, at, s in rows], storage)
            storages[storage.uri] = FaultStorage(storage)
        patch.setattr(IndexConfig, "open_storage", lambda config, uri=None: storages[uri or config.storage])
        yield cluster, storages


@settings(max_examples=25)
@given(st.lists(messages, min_size=1, max_size=4), st.lists(pages, min_size=1, max_size=5), st.sampled_from(LIMITS))
def test_pages_are_the_sorted_union(contents, sizes, limits):
    """Each page is asked with another size, alone or in a batch, of a reader with the indexes in another order."""
    with made(contents) as (cluster, _), contextlib.ExitStack() as stack:
        orders = [cluster.uris, cluster.uris[::-1], cluster.uris[1:] + cluster.uris[:1]]
        readers = [stack.enter_context(cluster.reader(uris)) for uris in orders]
        cursor = after = None
        for (count, many, which), _ in zip(itertools.cycle(sizes), range(100), strict=False):
            reader = readers[which % len(readers)]
            lookup = Lookup("t", "k", *limits, count, cursor)
            page = reader.query_many([lookup])[0] if many else reader.query("t", "k", *limits, count, cursor)
            after = cluster.check_page(page, cluster.model().query("t", "k", *limits, None, after), count) or after
            if (cursor := page.cursor) is None:
                break
        assert cursor is None


@settings(max_examples=15)
@given(st.lists(messages, min_size=2, max_size=4), st.integers(0, 3), st.integers(1, 7))
def test_one_that_is_away_leaves_the_others(contents, which, count):
    """Pages are partial, and have all entries of the other indexes; without `allow_partial`, lookups fail."""
    with made(contents) as (cluster, storages):
        away = cluster.uris[which % len(contents)]
        others = [uri for uri in cluster.uris if uri != away]
        clock = ManualClock(BASE_MS)
        with IndexReader.open(cluster.uris, clock=clock, refresh_interval_s=10) as reader:
            for operation in ("list", "get", "get_range", "get_suffix", "head"):
                storages[away].fail(operation, times=None)
            clock.advance(11)
            with pytest.raises(StorageUnavailable):
                reader.query("t", "k", max_count=count)
            cursor = after = None
            while True:
                page = reader.query("t", "k", max_count=count, cursor=cursor, allow_partial=True)
                expected = cluster.model(others).query("t", "k", None, None, None, after)
                answers = cluster.answers(page)
                assert answers == expected[:count]
                assert page.status == "partial" and {report.source for report in page.failed} == {away}
                assert (page.cursor is None) == (len(expected) <= count)
                if (cursor := page.cursor) is None:
                    break
                after = cluster.model([]).order_key_of(answers[-1])
