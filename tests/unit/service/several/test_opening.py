"""Some places open as several indexes, and others are refused. A close closes all of them."""

import threading
from operator import attrgetter, methodcaller

import pytest

from tests.support.hanging import until
from tests.support.several_indexes import Cluster, Watched, of, rows
from tiered_index import IndexReader
from tiered_index.config import IndexConfig
from tiered_index.errors import (
    ConfigError,
    IndexClosed,
    InvalidArgument,
    NotAnIndex,
    SchemaMismatch,
    StorageUnavailable,
)
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
    for given in ({"root": tmp_path}, {"storage_backend": MemoryStorage()}):
        with pytest.raises(InvalidArgument, match="without one"):
            IndexReader.open(cluster.uris, **given)
    monkeypatch.setenv("TIERED_INDEX_ROOT", str(tmp_path))
    with pytest.raises(InvalidArgument, match="without one"):
        IndexReader.open(cluster.uris)


def test_one_index_given_twice(cluster, tmp_path):
    with pytest.raises(InvalidArgument, match="given twice"):
        IndexReader.open([cluster.uris[0], cluster.uris[1], cluster.uris[0]])
    uri = f"file://{tmp_path}/stored"
    cluster.add(uri, rows(1))
    with pytest.raises(InvalidArgument, match="given twice"):
        IndexReader.open([uri, uri + "/"])


def test_other_schemas_are_not_read_together(cluster, prefix, opened):
    cluster.add(f"{prefix}/old", rows(3), preset="rocketmq")
    for given in (cluster.uris, cluster.uris[::-1]):
        with pytest.raises(SchemaMismatch, match=r"old .*IndexItem|broker-. .*KeyedIndexItem"):
            IndexReader.open(given)
    assert [storage.closed for storage in opened] == [1] * 2 * (SEVERAL + 1)


def test_a_prefix_of_other_schemas(cluster, prefix):
    cluster.add(f"{prefix}/old", rows(3), preset="rocketmq")
    with pytest.raises(SchemaMismatch, match=r"old .*IndexItem"):
        IndexReader.open(prefix)


def test_a_list_with_a_place_that_is_not_an_index(cluster, prefix, opened):
    with pytest.raises(NotAnIndex, match="nowhere"):
        IndexReader.open([*cluster.uris, f"{prefix}/nowhere"])
    assert len(opened) == SEVERAL + 1
    assert [storage.closed for storage in opened] == [1] * (SEVERAL + 1)


def test_a_prefix_whose_folders_are_no_indexes():
    store = MemoryStorage()
    store.put("backup/x", b"not an index")
    store.put("notes/y", b"nor this")
    with pytest.raises(NotAnIndex, match="no index is directly below it"):
        IndexReader.open(storage_backend=store)


def test_if_none_can_be_opened_none_stays_open(cluster, monkeypatch):
    made = []

    def watched(config, uri):
        made.append(Watched(open_storage(uri)))
        made[-1].fail("list", times=None)
        return made[-1]

    monkeypatch.setattr(IndexConfig, "open_storage", watched)
    before = set(threading.enumerate())
    with pytest.raises(StorageUnavailable):
        cluster.reader()
    assert [storage.closed for storage in made] == [1] * SEVERAL
    until(lambda: set(threading.enumerate()) <= before)


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


def test_a_close_continues_after_one_that_fails(cluster, opened, monkeypatch):
    reader = cluster.reader()
    failing = of(opened, cluster.uris[1])

    def close():
        raise StorageUnavailable("it hangs on")

    monkeypatch.setattr(failing, "close", close)
    with pytest.raises(StorageUnavailable):
        reader.close()
    assert [storage.closed for storage in opened if storage is not failing] == [1, 1]


def test_requests_to_open(cluster, prefix, opened):
    """Each index needs three requests: two for the newest checkpoint (listing, read), and one for the log after it."""
    cluster.reader().close()
    assert [storage.requests() for storage in opened] == [3] * SEVERAL


@pytest.mark.parametrize("children", [1, 5, 12])
def test_requests_to_open_a_prefix_of_an_object_store(tmp_path, children):
    """Each index needs three requests. A folder that is not an index needs three.

    Two requests find no index at the prefix itself, and the listings find the folders below it.
    """
    store = Watched(MemoryStorage())
    made = Cluster(tmp_path)
    for number in range(children):
        below = PrefixedStorage(store.inner, f"broker-{number:02}")
        made.add(below.uri, rows(number, 12), below, items=3 if number else 50)
    store.inner.put("readme.txt", b"a note")
    store.inner.put("backup/x/y", b"not an index")
    objects = sum(1 for _ in store.inner.list())
    with IndexReader.open(storage_backend=store) as reader:
        assert list(reader.sources) == made.uris
        assert store.calls("get") == children
        listings = store.calls("list") - 2 - 2 * children - 3
        assert 1 <= listings <= 1 + objects // 1000
        assert made.answers(reader.query("t", "k", max_count=1000)) == made.expected()
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
    for given in (cluster.uris, prefix, cluster.uris[:1]):
        with IndexReader.open(given) as reader, pytest.raises(InvalidArgument, match="it was opened for several"):
            ask(reader)
