"""Some places open as several indexes, and others are refused. A close closes all of them.

Every refresh lists a prefix again. The reader adds new indexes below it, and never silently leaves one out.
"""

import threading
from operator import attrgetter, methodcaller

import pytest

from tests.support.hanging import until
from tests.support.several_indexes import Cluster, Watched, rows
from tiered_index import IndexReader
from tiered_index.errors import (
    ConfigError,
    CorruptFile,
    IndexClosed,
    InvalidArgument,
    NotAnIndex,
    SchemaMismatch,
    StorageUnavailable,
)
from tiered_index.service.read.files.compacted import DamagedFile
from tiered_index.storage.base import WrapperStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import PrefixedStorage, open_storage

SEVERAL = 3


@pytest.mark.parametrize(
    "wrong",
    [[], [""], 5, b"memory://x", [5], ["memory://x", None], {"memory://x": 1}, ["nonsense://x"], ["memory://"]],
    ids=repr,
)
def test_an_invalid_list_of_indexes_is_refused(wrong):
    with pytest.raises((InvalidArgument, ConfigError)):
        IndexReader.open(wrong)


def test_several_have_no_root(cluster, tmp_path, monkeypatch):
    for settings in ({"root": tmp_path}, {"storage_backend": MemoryStorage()}, {}):
        if not settings:
            monkeypatch.setenv("TIERED_INDEX_ROOT", str(tmp_path))
        with pytest.raises(InvalidArgument, match="without one"):
            IndexReader.open(cluster.uris, **settings)


def test_places_that_can_not_be_read_together_are_refused_and_closed(cluster, prefix, opened, tmp_path):
    good, old, file = list(cluster.uris), f"{prefix}/old", f"file://{tmp_path}/stored"
    cluster.add(old, rows(3), preset="rocketmq")
    cluster.add(file, rows(1))
    for uris, error, told in (
        ([*good, old], SchemaMismatch, r"old .*IndexItem|broker-. .*KeyedIndexItem"),
        ([old, *good], SchemaMismatch, r"old .*IndexItem|broker-. .*KeyedIndexItem"),
        ([*good, f"{prefix}/nowhere"], NotAnIndex, "nowhere"),
        ([good[0], good[1], good[0]], InvalidArgument, "given twice"),
        ([file, f"{file}/"], InvalidArgument, "given twice"),
    ):
        with pytest.raises(error, match=told):
            IndexReader.open(uris)
    assert [storage.closed for storage in opened] == [1] * (3 * (SEVERAL + 1) + 2)


def test_a_close_closes_all(cluster, opened):
    before = set(threading.enumerate())
    reader = cluster.reader()
    assert len(reader.query("t", "k")) == 64
    reader.close()
    reader.close()
    assert len(opened) == SEVERAL
    assert all(storage.closed for storage in opened)
    until(lambda: set(threading.enumerate()) <= before)
    for ask in (lambda: reader.query("t", "k"), reader.refresh, reader.files, lambda: reader.query_many([])):
        with pytest.raises(IndexClosed, match="closed"):
            ask()


@pytest.mark.parametrize("children", [1, 5, 12])
def test_requests_to_open_a_prefix_of_an_object_store(tmp_path, children):
    """Each index needs three requests. A folder that is not an index needs three.

    Two requests find no index at the prefix itself, and the listings find the folders below it.
    """
    store = Watched(MemoryStorage())
    cluster = Cluster(tmp_path)
    for number in range(children):
        below = PrefixedStorage(store.inner, f"broker-{number:02}")
        cluster.add(below.uri, rows(number, 12), below, items=3 if number else 50)
    store.inner.put("readme.txt", b"a note")
    store.inner.put("backup/x/y", b"not an index")
    objects = sum(1 for _ in store.inner.list())
    with IndexReader.open(storage_backend=store) as reader:
        assert list(reader.sources) == cluster.uris
        assert store.calls("get") == children
        listings = store.calls("list") - 2 - 2 * children - 3
        assert 1 <= listings <= 1 + objects // 1000
        assert cluster.answers(reader.query("t", "k", max_count=1000)) == cluster.expected()
    assert store.closed


@pytest.mark.parametrize(
    "ask",
    [
        *map(attrgetter, ("genesis", "log_state", "storage", "segment_archive")),
        methodcaller("archived"),
        methodcaller("archived", "store"),
    ],
)
def test_members_of_one_index_only(cluster, prefix, ask):
    for sources in (cluster.uris, prefix, cluster.uris[:1]):
        with IndexReader.open(sources) as reader, pytest.raises(InvalidArgument, match="it was opened for several"):
            ask(reader)


INTERVAL_S = 10


@pytest.fixture
def reader(cluster, prefix, clock):
    with IndexReader.open(prefix, clock=clock, refresh_interval_s=INTERVAL_S) as reader:
        yield reader


def names(answer):
    return [freshness.source for freshness in answer.freshness]


@pytest.mark.parametrize("how", [{}, {"timeout_s": 300}, "refresh"])
def test_an_index_that_appears_is_read_without_a_restart(cluster, prefix, clock, reader, how):
    before = reader.query("t", "k", max_count=1000)
    assert names(before) == cluster.uris
    cluster.add(f"{prefix}/broker-9", rows(9))
    # the greatest age of an answer
    assert names(reader.query("t", "k", max_count=1000)) == cluster.uris[:-1]
    if how == "refresh":
        reader.refresh()
        how = {}
    else:
        clock.advance(INTERVAL_S)
    after = reader.query("t", "k", max_count=1000, **how)
    assert (after.status, cluster.answers(after)) == ("complete", cluster.expected())
    assert names(after) == list(reader.sources) == cluster.uris
    assert sorted(after.to_arrow()["source"].unique().to_pylist()) == sorted(cluster.uris)
    assert list(reader.segment_archives) == cluster.uris


def test_a_folder_that_becomes_an_index(tmp_path, clock):
    store, cluster = Watched(MemoryStorage()), Cluster(tmp_path)
    first, later = (PrefixedStorage(store.inner, name) for name in ("broker-0", "broker-1"))
    cluster.add(first.uri, rows(0), first)
    store.inner.put("broker-1/notes", b"nothing yet")
    with IndexReader.open(storage_backend=store, clock=clock, refresh_interval_s=INTERVAL_S) as reader:
        costs = []
        for _ in range(3):
            clock.advance(INTERVAL_S)
            answer = reader.query("t", "none")
            costs.append([report.requests for report in answer.explain.files if report.file == "log"])
            assert names(answer) == cluster.uris
        # the log's end, a listing of the prefix, and one request for the folder that is not an index
        assert costs == [[3]] * 3
        cluster.add(later.uri, rows(1), later)
        clock.advance(INTERVAL_S)
        answer = reader.query("t", "k", max_count=1000)
        assert (names(answer), cluster.answers(answer)) == (cluster.uris, cluster.expected())


class Unlisted(WrapperStorage):
    """Refuses listings of everything; those of a folder are answered."""

    refuses = False

    def list(self, prefix="", *, start_after=""):
        if self.refuses and not prefix:
            raise StorageUnavailable("no listing")
        return self.inner.list(prefix, start_after=start_after)


def test_no_answer_is_complete_while_a_prefix_cannot_be_listed(tmp_path, clock):
    """It may lack the entries of an index that has appeared."""
    store, cluster = Unlisted(MemoryStorage()), Cluster(tmp_path)
    below = PrefixedStorage(store.inner, "broker-0")
    cluster.add(below.uri, rows(0), below)
    with IndexReader.open(storage_backend=store, clock=clock, refresh_interval_s=INTERVAL_S) as reader:
        store.refuses = True
        clock.advance(INTERVAL_S)
        with pytest.raises(StorageUnavailable, match="no listing"):
            reader.query("t", "k", timeout_s=300)
        answer = reader.query("t", "k", max_count=1000, allow_partial=True)
        assert (answer.status, cluster.answers(answer)) == ("partial", cluster.expected())
        store.refuses = False
        clock.advance(2)
        answer = reader.query("t", "k", max_count=1000)
        assert (answer.status, cluster.answers(answer)) == ("complete", cluster.expected())


@pytest.mark.parametrize(
    ("what", "error"), [("schema", SchemaMismatch), ("copy", ConfigError), ("damage", CorruptFile)]
)
def test_an_index_that_cannot_be_read_with_the_others_is_named(cluster, prefix, clock, reader, what, error):
    uri, good = f"{prefix}/broker-9", list(cluster.uris)
    with open_storage(uri) as storage, open_storage(good[0]) as other:
        if what == "schema":
            Cluster(cluster.folder / "other").add(uri, rows(9), preset="rocketmq")
        elif what == "copy":
            for info in other.list():
                storage.put(info.name, other.get(info.name))
        else:
            cluster.add(uri, rows(9))
        whole = {name: storage.get(name) for name in [info.name for info in storage.list("log/")]}
        if what == "damage":
            storage.put(next(iter(whole)), b"x")
            for info in list(storage.list("checkpoint/")):
                storage.delete_many([info.name])
        clock.advance(INTERVAL_S)
        for how in ({}, {"timeout_s": 300}):
            with pytest.raises(error):
                reader.query("t", "k", max_count=1000, **how)
            partial = reader.query("t", "k", max_count=1000, allow_partial=True, **how)
            assert [report.source for report in partial.failed] == [uri] and names(partial) == good
            expected = cluster.expected(good)
            assert (partial.status, cluster.answers(partial)) == ("partial", expected)
            assert len([handle for handle in reader.files() if isinstance(handle, DamagedFile)]) == 1
        with pytest.raises(error):
            reader.refresh()
        # after a repair, or after the index's removal, answers are complete
        if what == "damage":
            for name, data in whole.items():
                storage.put(name, data)
        else:
            for info in list(storage.list()):
                storage.delete_many([info.name])
            MemoryStorage.forget(uri.removeprefix("memory://"))
            cluster.models.pop(uri, None)
        clock.advance(2)
        assert cluster.answers(reader.query("t", "k", max_count=1000)) == cluster.expected()


def test_an_index_that_vanishes_is_never_left_out_unsaid(cluster, clock, reader):
    gone = cluster.uris[1]
    with open_storage(gone) as storage:
        for info in list(storage.list()):
            storage.delete_many([info.name])
    MemoryStorage.forget(gone.removeprefix("memory://"))
    clock.advance(INTERVAL_S)
    with pytest.raises(StorageUnavailable, match=f"{gone}: log record"):
        reader.query("t", "k")
    answer = reader.query("t", "k", allow_partial=True)
    assert (answer.status, {report.source for report in answer.failed}) == ("partial", {gone})
    assert names(answer) == cluster.uris


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
