"""Warm lookups in several indexes: the compiled core answers in each, and each field is that of the cold way."""

import pickle
from itertools import chain

import pytest

from tests.support.core import compiled_core, using
from tests.support.pages import pages_of
from tests.support.several_indexes import BASE_MS, Cluster, rows
from tiered_index import KeyedIndexItem, column
from tiered_index.base.retention import Horizon
from tiered_index.errors import InvalidCursor
from tiered_index.service.log.expired import Expired
from tiered_index.service.log.records import LogRecord
from tiered_index.service.log.tombstones import Tombstone
from tiered_index.service.read.several import Several

RANGES = [{}, {"begin_ms": BASE_MS + 1000, "end_ms": BASE_MS + 3999}, {"begin_ms": BASE_MS + 9_000_000}]


def distinct(seed):
    """Return messages at different places, because the core leaves repeats to NumPy. Two seeds share most places."""
    return list({(queue_id, offset): row for row in rows(seed, 200) for _, queue_id, _, offset, *_ in [row]}.values())


@pytest.fixture
def cluster(tmp_path, prefix):
    indexes = Cluster(tmp_path)
    for number in range(3):
        indexes.add(f"{prefix}/broker-{number}", distinct(number))
    return indexes


def warm(reader, *questions):
    """Ask until the caches have what lookups need."""
    for topic, key in questions:
        for _ in range(3):
            reader.query(topic, key, max_count=1000)


@pytest.fixture
def no_search(monkeypatch):
    """Return a function after whose call a search of files fails the test."""
    compiled_core()

    def search_all(*_):
        pytest.fail("the core has not answered")

    return lambda: monkeypatch.setattr(Several, "search_all", search_all)


def check_same(answer, other):
    """Compare all fields of two answers but their cost."""
    assert answer.items == other.items
    for name in ("status", "cursor", "failed", "seen", "item_type", "places"):
        assert getattr(answer, name) == getattr(other, name), name
    assert answer.to_arrow().equals(other.to_arrow())
    assert answer.explain.folded_entries == other.explain.folded_entries
    assert {report.source for report in answer.explain.files} == {report.source for report in other.explain.files}
    document, known = answer.to_dict(), other.to_dict()
    for name in document.keys() - {"explain"}:
        assert document[name] == known[name], name
    assert pickle.loads(pickle.dumps(answer)) == answer


@pytest.mark.parametrize("limits", RANGES)
@pytest.mark.parametrize("count", [1, 3, 20, 1000])
@pytest.mark.parametrize("key", ["k", "other", "nowhere"])
def test_each_page_is_that_of_the_cold_way(cluster, no_search, limits, count, key):
    with cluster.reader() as reader:
        warm(reader, ("t", key))
        with using(None):
            expected = list(pages_of(reader.query, "t", key, max_count=count, **limits))
        no_search()
        pages = list(pages_of(reader.query, "t", key, max_count=count, **limits))
        for page, other in zip(pages, expected, strict=True):
            check_same(page, other)
        timed = list(pages_of(reader.query, "t", key, max_count=count, timeout_s=60, **limits))
        assert [page.items for page in timed] == [page.items for page in pages]
        model = cluster.model().query("t", key, limits.get("begin_ms"), limits.get("end_ms"), None)
        assert cluster.answers(chain.from_iterable(pages)) == model


def test_each_lookup_counts_once(cluster, no_search):
    with cluster.reader() as reader:
        warm(reader, ("t", "k"))
        before = reader._engine.counts()
        no_search()
        reader.query("t", "k", max_count=1)
        reader.query("t", "k", max_count=1000, timeout_s=60)
        counted = reader._engine.counts()
        counted.subtract(before)
        assert +counted == {("query", "truncated"): 1, ("query", "complete"): 1}


def test_a_topic_is_unknown_if_no_index_has_it(cluster, prefix, no_search):
    cluster.add(f"{prefix}/more", [("u", 0, "k", 1, 10, BASE_MS)])
    with cluster.reader() as reader:
        warm(reader, ("t", "k"), ("u", "k"), ("v", "k"), ("u", "none"))
        no_search()
        for topic in ("t", "u"):
            assert reader.query(topic, "none").seen.unknown_topics == ()
        assert reader.query("v", "k").seen.unknown_topics == ("v",)


def test_what_one_index_hides_the_others_show(tmp_path, prefix, no_search):
    """An expiry and an erasure in one index; the other has entries of the same places and times."""
    cluster = Cluster(tmp_path)
    for name in "ab":
        cluster.add(f"{prefix}/{name}", distinct(1))
    hidden = Expired((Horizon(0, (("t", BASE_MS + 2000),)),), {}, (Tombstone.of("t", BASE_MS + 90_000, key="other"),))
    with cluster.writer(f"{prefix}/a") as index:
        index._session.log.append("a life", None, lambda _: LogRecord(0, "erase", 0, "", 0, expired=hidden))
    cluster.models[f"{prefix}/a"].expire(0, {"t": BASE_MS + 2000})
    with cluster.reader() as reader:
        warm(reader, ("t", "k"), ("t", "other"))
        with using(None):
            expected = {(key, count): list(pages_of(reader.query, "t", key, max_count=count))
                        for key in ("k", "other") for count in (4, 1000)}  # fmt: skip
        no_search()
        for (key, count), pages in expected.items():
            for page, other in zip(pages_of(reader.query, "t", key, max_count=count), pages, strict=True):
                check_same(page, other)
        answer = reader.query("t", "k", max_count=1000)
        assert answer.seen.expired_before_ms == BASE_MS + 2000
        times = {uri: {item.timestamp_ms for item in answer if item.source == uri} for uri in cluster.uris}
        assert min(times[f"{prefix}/a"]) == BASE_MS + 2000 and min(times[f"{prefix}/b"]) == BASE_MS
        assert {item.source for item in reader.query("t", "other", max_count=1000)} == {f"{prefix}/b"}


class ZonedItem(KeyedIndexItem):
    """An entry with a column that is no identity."""

    __annotations__ = {"zone": int}
    zone = column(">u2")


def test_further_columns(tmp_path, prefix, no_search):
    from dataclasses import dataclass

    item_type = dataclass(frozen=True, kw_only=True)(ZonedItem)
    cluster = Cluster(tmp_path, {"item_type": item_type})
    for number in range(2):
        cluster.models[f"{prefix}/{number}"] = None
        with cluster.writer(f"{prefix}/{number}") as index:
            for offset in range(5):
                index.put("t", 0, "k", 2 * offset + number, 10, BASE_MS, zone=10 * number + offset)
            index.seal()
            index.run_lifecycle()
    with cluster.reader() as reader:
        warm(reader, ("t", "k"))
        no_search()
        answer = reader.query("t", "k", max_count=8)
        assert [(item.offset, item.zone) for item in answer] == [
            (offset, 10 * (offset % 2) + offset // 2) for offset in range(9, 1, -1)
        ]
        assert answer.status == "truncated" and answer.to_arrow().column("zone").to_pylist()[:2] == [14, 4]
        assert len(reader.query("t", "k", max_count=8, cursor=answer.cursor)) == 2


def test_a_cursor_of_another_lookup_is_refused(cluster, no_search):
    with cluster.reader() as reader:
        warm(reader, ("t", "k"))
        cursor = reader.query("t", "k", max_count=1).cursor
        no_search()
        with pytest.raises(InvalidCursor):
            reader.query("t", "other", cursor=cursor)
