"""Several indexes read as one: a list of URIs or a prefix, one order, each entry with its source, failures and bounds of all together."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest

from tests.several_indexes import BASE_MS, Cluster, rows
from tiered_index import IndexItem, IndexReader, KeyedIndexItem, Lookup, column
from tiered_index.clock import ManualClock
from tiered_index.errors import (
    BudgetExceeded,
    ConfigError,
    CorruptFile,
    InvalidArgument,
    InvalidCursor,
    NotAnIndex,
    SchemaMismatch,
    StorageUnavailable,
)
from tiered_index.service import index_view
from tiered_index.service import reader as reader_module
from tiered_index.service.sources import source_number
from tiered_index.storage.base import Storage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import open_storage
from tiered_index.storage.wrappers import PrefixedStorage
from tiered_index.testing.storage_faults import FaultStorage

SEVERAL = 3
_READS = ("get", "get_range", "get_ranges", "get_suffix", "head", "list")


class Watched(FaultStorage):
    """A storage with faults that knows whether it was closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1
        super().close()

    def requests(self) -> int:
        return sum(map(self.calls, _READS))


@pytest.fixture
def prefix(tmp_path):
    name = f"several-{tmp_path.name}-{time.time_ns()}"
    yield f"memory://{name}"
    for shelf in [shelf for shelf in MemoryStorage._shelves if shelf.startswith(name)]:
        MemoryStorage.forget(shelf)


@pytest.fixture
def cluster(tmp_path, prefix):
    made = Cluster(tmp_path)
    for number in range(SEVERAL):
        made.add(f"{prefix}/broker-{number}", rows(number))
    return made


@pytest.fixture
def opened(monkeypatch):
    """The storages that readers open, by URI, in order of their opening."""
    made: list[Watched] = []

    def watched(uri: str, **options: Any) -> Storage:
        made.append(Watched(open_storage(uri, **options)))
        return made[-1]

    for module in (index_view, reader_module):
        monkeypatch.setattr(module, "open_storage", watched)
    return made


def of(opened, uri):
    (found,) = [storage for storage in opened if storage.uri == uri]
    return found


# Answers


def test_one_order_whatever_the_order_of_the_sources(cluster, prefix):
    expected = cluster.model().query("t", "k", max_count=None)
    orders = [*itertools.permutations(cluster.uris), prefix, tuple(cluster.uris)]
    for given in orders:
        with IndexReader.open(given) as reader:
            whole = reader.query("t", "k", max_count=1000)
            assert cluster.answers(whole) == expected
            assert whole.status == "complete"
            assert sorted(reader.sources) == sorted(cluster.uris)
            asked = [Lookup(topic="t", key="k", max_count=1000), Lookup(topic="t", key="other"), Lookup(topic="x", key="k")]
            batch = reader.query_many(asked)
            assert batch[0].items == whole.items
            assert cluster.answers(batch[1]) == cluster.model().query("t", "other")
            assert len(batch[2]) == 0 and batch[2].status == "complete"
    # places that agree in all but the source: as many answers as sources
    places = [(a.timestamp_ms, a.offset, a.queue_id) for a in expected]
    assert len(set(places)) < len(places)


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
@pytest.mark.parametrize("many", [False, True])
def test_pages_by_readers_of_other_orders_and_of_one_source_more(cluster, count, many):
    """The cursor of one reader is continued by the next: sources in another order, then one more, then one less."""
    first = cluster.uris[:2]
    steps = [first, first[::-1], first, cluster.uris, cluster.uris[::-1], cluster.uris[1:]]
    readers = {}
    cursor, after, pages = None, None, 0
    for step in itertools.chain(steps, itertools.repeat(cluster.uris)):
        if pages and cursor is None:
            break
        if tuple(step) not in readers:
            readers[tuple(step)] = cluster.reader(step), cluster.model(step)
        reader, model = readers[tuple(step)]
        expected = model.query("t", "k", BASE_MS, BASE_MS + 3_999, None, after)
        asked = {"begin_ms": BASE_MS, "end_ms": BASE_MS + 3_999, "max_count": count, "cursor": cursor}
        page = reader.query_many([Lookup(topic="t", key="k", **asked)])[0] if many else reader.query("t", "k", **asked)
        after = cluster.check_page(page, expected, count) or after
        cursor = page.cursor
        pages += 1
    for reader, _ in readers.values():
        reader.close()
    assert pages > len(steps) or count == 1000


def test_entries_and_files_say_their_source(cluster):
    with cluster.reader() as several, cluster.reader(cluster.uris[:1]) as one, IndexReader.open(cluster.uris[0]) as plain:
        whole = several.query("t", "k", max_count=1000)
        assert {item.source for item in whole} == set(cluster.uris)
        assert {report.source for report in whole.explain.files} == set(cluster.uris)
        assert whole.to_dict()["items"][0]["source"] in cluster.uris
        assert {item.source for item in one.query("t", "k")} == {cluster.uris[0]} == set(one.sources)
        answer = plain.query("t", "k")
        assert {item.source for item in answer} == {None} == {report.source for report in answer.explain.files}
        assert "source" not in answer.to_dict()["items"][0]
        assert len(several.files()) == sum(len(IndexReader.open(uri).files()) for uri in cluster.uris)


def test_cursors_of_one_index_and_of_several_are_not_mixed_up(cluster):
    with cluster.reader(cluster.uris[:1]) as several, IndexReader.open(cluster.uris[0]) as plain:
        for mine, others in ((several, plain), (plain, several)):
            cursor = mine.query("t", "k", max_count=1).cursor
            assert cursor is not None
            with pytest.raises(InvalidCursor):
                others.query("t", "k", cursor=cursor)


# Further columns


@dataclass(frozen=True, kw_only=True)
class ZonedItem(KeyedIndexItem):
    """Its own column has the name that the source's would have; the identity column is 0 in many entries."""

    source_id: int = column(">i4")
    zone: int = column(">u2", identity=True)


@pytest.mark.parametrize("item_type", [ZonedItem, None])
@pytest.mark.parametrize("count", [1, 3])
def test_further_columns_and_identities_beside_the_source(tmp_path, prefix, item_type, count):
    made = Cluster(tmp_path, {"item_type": ZonedItem})
    expected = []
    for number in range(2):
        uri = f"{prefix}/{number}"
        made.models[uri] = None  # type: ignore[assignment]
        with made.writer(uri) as index:
            made.numbers[uri] = source_number(index.index_id)
            for offset, zone in itertools.product(range(3), (0, 1, 65_535)):
                index.put("t", 0, "k", offset, 10, BASE_MS, source_id=7 + number, zone=zone)
                expected.append((-offset, zone, made.numbers[uri], 7 + number, uri))
            index.seal()
            index.run_lifecycle()
    found, cursor = [], None
    with made.reader(item_type=item_type) as reader:
        while True:
            page = reader.query("t", "k", max_count=count, cursor=cursor)
            found += [(-i.offset, i.zone, made.numbers[i.source], i.source_id, i.source) for i in page]
            if (cursor := page.cursor) is None:
                break
    assert found == sorted(expected)


# Trouble


def test_one_source_that_does_not_answer(cluster, opened):
    lame = cluster.uris[1]
    with IndexReader.open(lame) as alone:
        files = [handle.file_id for handle in alone.files()]
    opened.clear()
    with cluster.reader() as reader:
        of(opened, lame).fail("get_range", times=None)
        with pytest.raises(StorageUnavailable):
            reader.query("t", "k", max_count=1000)
        with pytest.raises(StorageUnavailable):
            reader.query_many([Lookup(topic="t", key="k")])
        rest = cluster.model([uri for uri in cluster.uris if uri != lame]).query("t", "k", max_count=None)
        for answer in (
            reader.query("t", "k", max_count=1000, allow_partial=True),
            reader.query_many([Lookup(topic="t", key="k", max_count=1000)], allow_partial=True)[0],
        ):
            assert answer.status == "partial"
            assert cluster.answers(answer) == rest
            assert {report.source for report in answer.failed} == {lame}
            assert sorted(report.file for report in answer.failed) == sorted(files)
        of(opened, lame).clear()
        assert cluster.answers(reader.query("t", "k", max_count=1000)) == cluster.model().query("t", "k", max_count=None)


def test_a_log_that_was_due_and_could_not_be_read_leaves_no_answer_complete(cluster, opened):
    """What the log has gained since may hold answers; what was known is still told where a part is asked for."""
    clock = ManualClock(BASE_MS)
    with IndexReader.open(cluster.uris, clock=clock, refresh_interval_s=10) as reader:
        of(opened, cluster.uris[0]).fail("get", times=None)
        clock.advance(11)
        with pytest.raises(StorageUnavailable):
            reader.query("t", "k", max_count=1000)
        cluster.add(cluster.uris[2], rows(77, 9, seconds=8))
        clock.advance(11)
        # the others were read on all the same
        answer = reader.query("t", "k", max_count=1000, allow_partial=True)
        assert cluster.answers(answer) == cluster.model().query("t", "k", max_count=None)
        assert answer.status == "partial"
        assert [(report.source, report.file) for report in answer.failed] == [(cluster.uris[0], "log")]
        of(opened, cluster.uris[0]).clear()
        clock.advance(2)
        assert reader.query("t", "k", max_count=1000).status == "complete"


def test_an_index_without_its_log_is_no_empty_folder(cluster):
    prefix = cluster.uris[0].rpartition("/")[0]
    MemoryStorage(prefix.removeprefix("memory://") + "/broken").put("epoch/00000000000000000001", b"x")
    with pytest.raises(CorruptFile, match="log"):
        IndexReader.open(prefix)


def test_an_object_that_one_source_lost(cluster):
    hurt = cluster.uris[2]
    storage = MemoryStorage(hurt.removeprefix("memory://"))
    with cluster.reader() as reader:
        with IndexReader.open(hurt) as alone:
            lost = max(alone.log_state.objects.values(), key=lambda stored: stored.count)
        storage.delete(lost.name)
        with pytest.raises(CorruptFile, match=lost.name):
            reader.query("t", "k", max_count=1000)
        answer = reader.query("t", "k", max_count=1000, allow_partial=True)
        assert answer.status == "partial"
        assert [(report.source, report.file) for report in answer.failed] == [(hurt, lost.file_id)]
        others = {uri for uri in cluster.uris if uri != hurt}
        found = [answer for answer in cluster.answers(answer) if answer.extra[0][1] != cluster.numbers[hurt]]
        assert found == cluster.model(others).query("t", "k", max_count=None)
        assert reader.query("t", "none", allow_partial=True).status in ("partial", "complete")


def test_objects_of_one_name_in_two_storages_are_told_apart(tmp_path, prefix):
    """A copy of an index under a second id would have the same object names: what one storage lost is not looked for in the other."""
    made = Cluster(tmp_path)
    for number in range(2):
        made.add(f"{prefix}/{number}", rows(number, 20))
    stored = [MemoryStorage(uri.removeprefix("memory://")) for uri in made.uris]
    with made.reader() as reader:
        names = [info.name for info in stored[0].list("data/")]
        for name in names:
            stored[1].put(name, b"not asked for")
            stored[0].delete(name)
        answer = reader.query("t", "k", max_count=1000, allow_partial=True)
        assert {report.source for report in answer.failed} == {made.uris[0]}
        assert made.answers(answer) == made.model(made.uris[1:]).query("t", "k", max_count=None)


def test_new_files_of_one_source_are_seen_by_interval_and_when_asked(cluster):
    clock = ManualClock(BASE_MS)
    with IndexReader.open(cluster.uris, clock=clock, refresh_interval_s=10) as reader:
        before = cluster.model().query("t", "k", max_count=None)
        cluster.add(cluster.uris[1], rows(50, 30, seconds=9))
        assert cluster.answers(reader.query("t", "k", max_count=1000)) == before
        clock.advance(10)
        after = cluster.model().query("t", "k", max_count=None)
        assert after != before
        assert cluster.answers(reader.query("t", "k", max_count=1000)) == after
        cluster.add(cluster.uris[2], rows(51, 30, seconds=12))
        reader.refresh()
        assert cluster.answers(reader.query("t", "k", max_count=1000)) == cluster.model().query("t", "k", max_count=None)


@pytest.mark.parametrize("many", [False, True])
def test_bounds_are_of_all_sources_together(cluster, opened, many):
    asked = Lookup(topic="t", key="k", max_count=1000)
    everything = cluster.model().query("t", "k", max_count=None)
    entries = {(e.second * 1000, e.offset, e.queue_id, e.extra["source"]) for e in cluster.model().entries if e.key == "k"}
    whole = None
    for limit in range(40):
        with cluster.reader() as reader:
            before = sum(storage.requests() for storage in opened)
            how = {"max_requests": limit, "allow_partial": True}
            answer = reader.query_many([asked], **how)[0] if many else reader.query("t", "k", max_count=1000, **how)
            made = sum(storage.requests() for storage in opened) - before
            assert made == answer.explain.requests <= limit
            found = cluster.answers(answer)
            # an identity may be found in an older entry than the one that is in a file not read
            assert {(i.timestamp_ms, i.offset, i.queue_id, cluster.numbers[i.source]) for i in answer} <= entries
            named = {(report.source, report.file) for report in answer.failed}
            assert (answer.status == "partial") == bool(named)
            if not named:
                whole = limit
                assert found == everything
                break
            assert made == limit
            with pytest.raises(BudgetExceeded) as caught:
                reader.query_many([asked], max_requests=0) if many else reader.query("t", "k", max_count=1000, max_requests=0)
            assert caught.value.failed
        opened.clear()
    assert whole == 2 * sum(len(IndexReader.open(uri).files()) for uri in cluster.uris)  # a directory and a range each


# Opening


@pytest.mark.parametrize(
    "wrong", [[], [""], 5, b"memory://x", [5], ["memory://x", None], {"memory://x": 1}, ["nonsense://x"], ["memory://"]], ids=repr
)
def test_what_is_no_list_of_indexes(wrong):
    with pytest.raises((InvalidArgument, ConfigError)):
        IndexReader.open(wrong)


def test_several_have_no_root(cluster, tmp_path, monkeypatch):
    for given in ({"root": tmp_path}, {"storage_backend": MemoryStorage()}):
        with pytest.raises(InvalidArgument, match="without a root"):
            IndexReader.open(cluster.uris, **given)
    monkeypatch.setenv("TIERED_INDEX_ROOT", str(tmp_path))
    with pytest.raises(InvalidArgument, match="without a root"):
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
        with pytest.raises(SchemaMismatch, match=r"old stores IndexItem entries|broker-. stores KeyedIndexItem"):
            IndexReader.open(given)
    assert [storage.closed for storage in opened] == [1] * 2 * (SEVERAL + 1)


def test_a_prefix_of_other_schemas(cluster, prefix):
    cluster.add(f"{prefix}/old", rows(3), preset="rocketmq")
    with pytest.raises(SchemaMismatch, match="old stores IndexItem entries"):
        IndexReader.open(prefix)


def test_a_list_with_what_is_no_index(cluster, prefix, opened):
    with pytest.raises(NotAnIndex, match="nowhere"):
        IndexReader.open([*cluster.uris, f"{prefix}/nowhere"])
    assert len(opened) == SEVERAL + 1
    assert [storage.closed for storage in opened] == [1] * (SEVERAL + 1)


@pytest.mark.parametrize("kth", range(SEVERAL))
def test_where_one_can_not_be_opened_none_stays_open(cluster, kth, monkeypatch):
    made: list[Watched] = []

    def watched(uri: str, **options: Any) -> Storage:
        storage = Watched(open_storage(uri, **options))
        if uri == cluster.uris[kth]:
            storage.fail("list", times=None)
        made.append(storage)
        return storage

    monkeypatch.setattr(index_view, "open_storage", watched)
    before = threading.active_count()
    with pytest.raises(StorageUnavailable):
        cluster.reader()
    assert [storage.closed for storage in made] == [1] * SEVERAL
    assert threading.active_count() == before


def test_a_close_closes_all(cluster, opened):
    before = {thread.name for thread in threading.enumerate()}
    reader = cluster.reader()
    assert len(reader.query("t", "k")) == 64
    reader.close()
    reader.close()
    assert len(opened) == SEVERAL
    assert all(storage.closed for storage in opened)
    assert {thread.name for thread in threading.enumerate()} <= before
    for ask in (lambda: reader.query("t", "k"), reader.refresh, reader.files, lambda: reader.query_many([])):
        with pytest.raises(InvalidArgument, match="closed"):
            ask()


def test_a_close_goes_on_past_one_that_fails(cluster, opened, monkeypatch):
    reader = cluster.reader()
    failing = of(opened, cluster.uris[1])

    def close() -> None:
        raise StorageUnavailable("it hangs on")

    monkeypatch.setattr(failing, "close", close)
    with pytest.raises(StorageUnavailable):
        reader.close()
    assert [storage.closed for storage in opened if storage is not failing] == [1, 1]


def test_requests_to_open(cluster, prefix, opened):
    """Three each as of any index: the newest checkpoint's listing and itself, and the log behind it."""
    cluster.reader().close()
    assert [storage.requests() for storage in opened] == [3] * SEVERAL


@pytest.mark.parametrize("children", [1, 5, 12])
def test_requests_to_open_a_prefix_of_an_object_store(tmp_path, children):
    """Two that find no index there, the listings of what is below, three an index, three for a folder that is none."""
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
        assert made.answers(reader.query("t", "k", max_count=1000)) == made.model().query("t", "k", max_count=None)
    assert store.closed


def test_bounds_of_the_caches_are_of_all_together(cluster):
    with cluster.reader(block_cache_bytes=900, directory_cache_bytes=60_000) as reader:
        for key in ("k", "other", "none"):
            reader.query("t", key, max_count=1000)
        use = reader.cache_use()
    assert use["blocks"].max_bytes <= 900
    assert use["directories"].max_bytes <= 60_000
    assert 0 < use["directories"].size_bytes <= 60_000


class NoSource:
    """A source of messages that must not be asked."""


@pytest.mark.parametrize(
    "ask",
    [
        lambda reader: reader.genesis, lambda reader: reader.log_state, lambda reader: reader.storage, lambda reader: reader.archived(),
        lambda reader: reader.archived("store"), lambda reader: reader.segment_archive,
        lambda reader: reader.messages("t", "k", source=NoSource()),
    ],
    ids=["genesis", "log_state", "storage", "archived", "archived of", "segment_archive", "messages"],
)  # fmt: skip
def test_what_is_of_one_index_only(cluster, prefix, ask):
    for given in (cluster.uris, prefix, cluster.uris[:1]):
        with IndexReader.open(given) as reader, pytest.raises(InvalidArgument, match="open the one that is meant"):
            ask(reader)


def test_items_of_the_plain_preset(tmp_path, prefix):
    made = Cluster(tmp_path, {"preset": "rocketmq"}, keyed=False)
    for number in range(2):
        made.add(f"{prefix}/{number}", rows(number))
    with made.reader() as reader:
        answer = reader.query("t", "k", max_count=1000)
        assert made.answers(answer) == made.model().query("t", "k", max_count=None)
        assert {type(item) for item in answer} == {IndexItem}
