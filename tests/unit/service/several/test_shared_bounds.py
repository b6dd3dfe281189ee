"""Bounds of a lookup and of the caches cover all indexes that are read as one."""

import threading

import pytest

from tests.support.cold_index import Recorder
from tests.support.pages import asking
from tests.support.several_indexes import BASE_MS, Cluster, rows
from tiered_index import IndexReader, Lookup
from tiered_index.errors import BudgetExceeded
from tiered_index.storage import pools as workers
from tiered_index.storage.opening import PrefixedStorage, open_storage

SEVERAL = 3


@pytest.mark.parametrize("many", [False, True])
def test_bounds_are_of_all_sources_together(cluster, opened, many):
    asked = Lookup(topic="t", key="k", max_count=1000)
    everything = cluster.expected()
    keyed = [e for e in cluster.model().entries if e.key == "k"]
    entries = {(e.second * 1000, e.offset, e.queue_id, e.extra["source"]) for e in keyed}
    whole = None
    for limit in range(40):
        with cluster.reader() as reader:
            before = sum(storage.requests() for storage in opened)
            how = {"max_requests": limit, "allow_partial": True}
            answer = reader.query_many([asked], **how)[0] if many else reader.query("t", "k", max_count=1000, **how)
            made = sum(storage.requests() for storage in opened) - before
            assert made == answer.explain.requests <= limit
            found = cluster.answers(answer)
            # a partial answer may have an identity by an older entry, if its newest entry is in a file that was not
            # read
            assert {(i.timestamp_ms, i.offset, i.queue_id, cluster.numbers[i.source]) for i in answer} <= entries
            named = {(report.source, report.file) for report in answer.failed}
            assert (answer.status == "partial") == bool(named)
            if not named:
                whole = limit
                assert found == everything
                break
            assert made == limit
            with pytest.raises(BudgetExceeded) as caught:
                asking(reader, "t", "k", many=many)(max_requests=0)
            assert caught.value.failed
        opened.clear()
    assert whole == 2 * sum(len(IndexReader.open(uri).files()) for uri in cluster.uris)  # a directory and a range each


@pytest.mark.parametrize("given", ["list", "prefix"])
def test_each_index_may_have_the_whole_of_the_caches(cluster, prefix, given):
    """The bound is just enough for the directories of all files. A share per index would keep none of them."""
    with cluster.reader() as reader:
        reader.query("t", "k", max_count=1000)
        needed = reader.cache_use()["directories"].size_bytes
        files = len(reader.files())
        assert reader.cache_use()["directories"].entries == files > SEVERAL
    uris = cluster.uris if given == "list" else prefix
    with cluster.reader(uris, directory_cache_bytes=needed, block_cache_bytes=0) as reader:
        assert reader.query("t", "k", max_count=1000).explain.requests == 2 * files
        assert reader.query("t", "k", max_count=1000).explain.requests == files
        use = reader.cache_use()["directories"]
    assert (use.entries, use.size_bytes, use.max_bytes, use.evictions) == (files, needed, needed, 0)


def test_the_use_of_the_caches_is_counted_once(cluster):
    with cluster.reader() as reader:
        reader.query("t", "k", max_count=1000)
        first = reader.cache_use()
        files = len(reader.files())
        assert (first["directories"].entries, first["blocks"].misses) == (files, first["blocks"].entries)
        reader.query("t", "k", max_count=1000)
        second = reader.cache_use()
        assert second["blocks"].entries == first["blocks"].entries
    assert reader.cache_use()["blocks"].entries == 0
    alone = 0
    for uri in cluster.uris:
        with IndexReader.open([uri]) as reader:
            for _ in range(2):
                reader.query("t", "k", max_count=1000)
            alone += reader.cache_use()["blocks"].hits
    assert second["blocks"].hits - first["blocks"].hits == alone >= first["blocks"].entries > 0


def test_objects_of_one_name_are_kept_apart(tmp_path, prefix):
    """Two indexes have files with the same names. A reader never uses data of one for the other."""
    made = Cluster(tmp_path)
    for number in range(2):
        made.add(f"{prefix}/{number}", rows(number, 20))
    cache = tmp_path / "cache"
    with made.reader(cache_dir=cache, filter_after_probes=1) as reader:
        caches = reader._parts.caches
        for key in ("k", "other", *(f"none{n}" for n in range(20))):
            reader.query("t", key, max_count=1000)
        (first, second) = (view.genesis.index_id for view in reader._views)
        for kept in (caches.blocks, caches.directories, caches.filters):
            assert {key[0] for key in kept._entries} == {first, second}
    folders = {path.name for path in cache.iterdir()}
    assert folders == {first, second}


def test_one_bound_on_disk_over_all(cluster, tmp_path):
    cache = tmp_path / "cache"

    def used():
        return sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())

    with cluster.reader(cache_dir=cache, filter_after_probes=1) as reader:
        reader.query("t", "k", max_count=1000)
    whole, entries = used(), len(list(cache.rglob("*.trailer")))
    for path in cache.rglob("*.trailer"):
        path.unlink()
    largest = whole - whole // entries // 2  # all but one
    with cluster.reader(cache_dir=cache, cache_max_bytes=largest) as reader:
        for _ in range(3):
            reader.query("t", "k", max_count=1000)
            assert used() <= largest
    # no index was limited to a part of the bound
    assert used() > whole // 2


def test_one_bound_of_ranges_that_travel_over_all(tmp_path, prefix):
    made = Cluster(tmp_path, {"slots": 300, "items": 6000})
    storage = Recorder(open_storage(prefix))
    for number in range(SEVERAL):
        messages = [("t", 0, f"k{n}", n, 10, BASE_MS + n) for n in range(5000)]
        made.add(f"{prefix}/{number}", messages, PrefixedStorage(storage, str(number)))
    how = {"query_threads": 2, "block_cache_bytes": 0, "coalesce_gap_bytes": 0}
    how |= {"filter_after_probes": 10**6, "refresh_interval_s": 10**6}
    too_many, two = threading.Event(), threading.Barrier(2)

    def gate(read):
        if storage._at_once > 2:
            too_many.set()
        if read in storage.reads[:2]:
            two.wait(60)  # wait until as many ranges travel as the bound allows
        too_many.wait(0.02)

    with IndexReader.open(storage_backend=storage, **how) as reader:
        assert len(reader.sources) == SEVERAL
        # each key is in another slot group of its file
        asked = [Lookup(topic="t", key=f"k{n}") for n in range(0, 5000, 1237)]
        reader.query_many(asked)
        storage.reset()
        storage.gate = gate
        assert all(len(result) == SEVERAL for result in reader.query_many(asked))
        assert (len(storage.reads) > 2 * SEVERAL, storage.most_at_once) == (True, 2)
        ranges = [thread for thread in threading.enumerate() if thread.name.startswith("tiered-index-ranges")]
        assert len(ranges) <= 2


def test_a_close_waits_once_for_all(cluster, monkeypatch):
    closed = []
    real = threading.Thread.join

    def join(thread, timeout=None):
        if thread.name.startswith("tiered-index"):
            closed.append(timeout)
        real(thread, timeout)

    with cluster.reader() as reader:
        reader.query("t", "k", max_count=1000)
        reader.refresh()
        monkeypatch.setattr(workers, "_CLOSE_S", 30.0)
        monkeypatch.setattr(threading.Thread, "join", join)
        reader.close()
        monkeypatch.undo()
    # the threads of all pools share one deadline, so each wait is shorter
    assert len(closed) > 1 and closed == sorted(closed, reverse=True)
    assert len(set(closed)) == len(closed)
