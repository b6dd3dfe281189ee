"""Every refresh lists a prefix again. The reader adds new indexes below it, and never silently leaves one out."""

import pytest

from tests.support.several_indexes import Cluster, Watched, rows
from tiered_index import IndexReader
from tiered_index.errors import ConfigError, CorruptFile, SchemaMismatch, StorageUnavailable
from tiered_index.service.read.compacted import DamagedFile
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import PrefixedStorage, open_storage

INTERVAL_S = 10


@pytest.fixture
def reader(cluster, prefix, clock):
    with IndexReader.open(prefix, clock=clock, refresh_interval_s=INTERVAL_S) as reader:
        yield reader


def names(answer):
    return [one.source for one in answer.freshness]


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
    store, made = Watched(MemoryStorage()), Cluster(tmp_path)
    first, later = (PrefixedStorage(store.inner, name) for name in ("broker-0", "broker-1"))
    made.add(first.uri, rows(0), first)
    store.inner.put("broker-1/notes", b"nothing yet")
    with IndexReader.open(storage_backend=store, clock=clock, refresh_interval_s=INTERVAL_S) as reader:
        costs = []
        for _ in range(3):
            clock.advance(INTERVAL_S)
            answer = reader.query("t", "none")
            costs.append([report.requests for report in answer.explain.files if report.file == "log"])
            assert names(answer) == made.uris
        # the log's end, a listing of the prefix, and one request for the folder that is not an index
        assert costs == [[3]] * 3
        made.add(later.uri, rows(1), later)
        clock.advance(INTERVAL_S)
        answer = reader.query("t", "k", max_count=1000)
        assert (names(answer), made.answers(answer)) == (made.uris, made.expected())


@pytest.mark.parametrize("what", ["schema", "copy", "damage", "no answer"])
def test_an_index_that_cannot_be_read_with_the_others_is_named(cluster, prefix, clock, reader, monkeypatch, what):
    uri, good = f"{prefix}/broker-9", list(cluster.uris)
    error = {"schema": SchemaMismatch, "copy": ConfigError, "damage": CorruptFile}.get(what, StorageUnavailable)
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
                storage.delete(info.name)
        if what == "no answer":
            real = MemoryStorage.get

            def get(self, name):
                if self.uri == uri:
                    raise StorageUnavailable("it does not answer")
                return real(self, name)

            monkeypatch.setattr(MemoryStorage, "get", get)
        clock.advance(INTERVAL_S)
        for how in ({}, {"timeout_s": 300}):
            with pytest.raises(error):
                reader.query("t", "k", max_count=1000, **how)
            partial = reader.query("t", "k", max_count=1000, allow_partial=True, **how)
            assert [one.source for one in partial.failed] == [uri] and names(partial) == good
            expected = cluster.expected(good)
            assert (partial.status, cluster.answers(partial)) == ("partial", expected)
            assert len([handle for handle in reader.files() if isinstance(handle, DamagedFile)]) == 1
        with pytest.raises(error):
            reader.refresh()
        with pytest.raises(error):
            reader.query("t", "k")
        # after a repair, or after the index's removal, answers are complete
        if what in ("damage", "no answer"):
            monkeypatch.undo()
            for name, data in whole.items():
                storage.put(name, data)
        else:
            for info in list(storage.list()):
                storage.delete(info.name)
            MemoryStorage.forget(uri.removeprefix("memory://"))
            cluster.models.pop(uri, None)
        clock.advance(2)
        assert cluster.answers(reader.query("t", "k", max_count=1000)) == cluster.expected()


def test_an_index_that_vanishes_is_never_left_out_unsaid(cluster, clock, reader):
    gone = cluster.uris[1]
    with open_storage(gone) as storage:
        for info in list(storage.list()):
            storage.delete(info.name)
    MemoryStorage.forget(gone.removeprefix("memory://"))
    clock.advance(INTERVAL_S)
    with pytest.raises(StorageUnavailable, match=f"{gone}: log record"):
        reader.query("t", "k")
    answer = reader.query("t", "k", allow_partial=True)
    assert (answer.status, {one.source for one in answer.failed}) == ("partial", {gone})
    assert names(answer) == cluster.uris


def test_a_prefix_that_cannot_be_listed_is_named(tmp_path, clock):
    store, made = Watched(MemoryStorage()), Cluster(tmp_path)
    first = PrefixedStorage(store.inner, "broker-0")
    made.add(first.uri, rows(0), first)
    with IndexReader.open(storage_backend=store, clock=clock, refresh_interval_s=INTERVAL_S) as reader:
        clock.advance(INTERVAL_S)
        store.fail("list", name_prefix="", times=None)
        with pytest.raises(StorageUnavailable):
            reader.query("t", "k", timeout_s=300)
        store.clear()
        clock.advance(2)
        assert made.answers(reader.query("t", "k", max_count=1000)) == made.expected()
