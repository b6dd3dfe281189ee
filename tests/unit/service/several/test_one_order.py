"""Several indexes that are read as one have one order and one way of paging. Each entry has its source.

The order in which the indexes are given does not matter.
"""

import contextlib
import itertools
from dataclasses import dataclass, replace

import pytest

from tests.support.pages import items_by_pages, pages_of
from tests.support.several_indexes import BASE_MS, Cluster
from tiered_index import Fetched, IndexReader, KeyedIndexItem, Lookup, column
from tiered_index.errors import InvalidCursor, StorageUnavailable
from tiered_index.service.read.answers.merged import index_number


class Brokers:
    """Return messages of several indexes. If `broken` is set, no message of that index can be read."""

    broken: str | None = None

    def fetch(self, items, topic, key):
        gone = {"state": "missing", "error": StorageUnavailable("away"), "problem": "away"}
        states = [gone if item.source == self.broken else {"state": "archived"} for item in items]
        read = {"read_from": "segment", "requests": 1}
        return [Fetched(item=item, **read, **state) for item, state in zip(items, states, strict=True)]


@pytest.mark.parametrize("count", [3, 1000])
def test_messages_have_the_order_of_their_entries(cluster, count):
    with cluster.reader() as reader:
        limits = {"max_count": count}
        read = pages_of(reader.messages, "t", "k", source=Brokers(), **limits)
        for page, entries in zip(read, pages_of(reader.query, "t", "k", **limits), strict=True):
            assert [message.item for message in page.messages] == list(entries)
            assert (page.status, page.cursor) == (entries.status, entries.cursor)
        broken = Brokers()
        broken.broken = cluster.uris[1]
        with pytest.raises(StorageUnavailable):
            reader.messages("t", "k", source=broken)
        partial = reader.messages("t", "k", allow_partial=True, source=broken)
        assert [(report.source, report.file) for report in partial.failed] == [(cluster.uris[1], "segment")]
        read = {report.source for report in partial.explain.files if report.place == "messages"}
        assert partial.status == "partial" and read == set(cluster.uris)


@pytest.mark.parametrize("rewritten", ["a", "b"])
def test_a_rewritten_message_is_looked_up_in_its_own_index(tmp_path, prefix, rewritten):
    """At that place the log has an older entry's message, while a newer entry hides it.

    The other index has the place, too.
    """
    cluster = Cluster(tmp_path)
    for name in "ab":
        again = [("t", 0, "k", 5, 10, BASE_MS + 2_000)] if name == rewritten else []
        cluster.add(f"{prefix}/{name}", [("t", 0, "k", 5, 10, BASE_MS), *again])

    class Log(Brokers):
        def fetch(self, items, topic, key):
            fetched = super().fetch(items, topic, key)
            older = [replace(message, instead=replace(message.item, timestamp_ms=BASE_MS)) for message in fetched]
            return [a if a.item.timestamp_ms == BASE_MS else b for a, b in zip(fetched, older, strict=True)]

    with cluster.reader() as reader:
        answer = reader.messages("t", "k", source=Log())
    places = sorted((message.item.source, message.item.timestamp_ms) for message in answer.messages)
    assert places == [(f"{prefix}/a", BASE_MS), (f"{prefix}/b", BASE_MS)]


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.long), 2, 7, 1000])
@pytest.mark.parametrize("many", [False, True])
def test_pages_by_readers_of_other_orders_and_of_one_source_more(cluster, count, many):
    """The next reader continues the cursor of the one before: sources in another order, one more, one fewer."""
    first = cluster.uris[:2]
    steps = [first, first[::-1], first, cluster.uris, cluster.uris[::-1], cluster.uris[1:]]
    cursor, after, pages = None, None, 0
    with contextlib.ExitStack() as stack:
        readers = {tuple(uris): stack.enter_context(cluster.reader(uris)) for uris in steps}
        for uris in itertools.chain(steps, itertools.repeat(cluster.uris)):
            reader = readers[tuple(uris)]
            expected = cluster.model(uris).query("t", "k", BASE_MS, BASE_MS + 3_999, None, after)
            limits = {"begin_ms": BASE_MS, "end_ms": BASE_MS + 3_999, "max_count": count, "cursor": cursor}
            page = reader.query_many([Lookup("t", "k", **limits)])[0] if many else reader.query("t", "k", **limits)
            after = cluster.check_page(page, expected, count) or after
            cursor, pages = page.cursor, pages + 1
            if cursor is None:
                break
    assert pages > len(steps) or count == 1000


def test_cursors_of_one_index_and_of_several_are_not_mixed_up(cluster):
    with cluster.reader(cluster.uris[:1]) as several, IndexReader.open(cluster.uris[0]) as plain:
        for mine, others in ((several, plain), (plain, several)):
            cursor = mine.query("t", "k", max_count=1).cursor
            assert cursor is not None
            with pytest.raises(InvalidCursor):
                others.query("t", "k", cursor=cursor)


@dataclass(frozen=True, kw_only=True)
class ZonedItem(KeyedIndexItem):
    """One column has the name that the source's would have. The identity column is 0 in many entries."""

    source_id: int = column(">i4")
    zone: int = column(">u2", identity=True)


@pytest.mark.parametrize("item_type", [ZonedItem, None])
@pytest.mark.parametrize("count", [1, 3])
def test_further_columns_and_identities_beside_the_source(tmp_path, prefix, item_type, count):
    cluster = Cluster(tmp_path, {"item_type": ZonedItem})
    expected = []
    for number in range(2):
        uri = f"{prefix}/{number}"
        cluster.models[uri] = None
        with cluster.writer(uri) as index:
            cluster.numbers[uri] = index_number(index.index_id)
            for offset, zone in itertools.product(range(3), (0, 1, 65_535)):
                index.put("t", 0, "k", offset, 10, BASE_MS, source_id=7 + number, zone=zone)
                expected.append((-offset, zone, cluster.numbers[uri], 7 + number, uri))
            index.seal()
            index.run_lifecycle()
    with cluster.reader(item_type=item_type) as reader:
        items = items_by_pages(reader.query, "t", "k", max_count=count)
    assert [(-i.offset, i.zone, cluster.numbers[i.source], i.source_id, i.source) for i in items] == sorted(expected)


def test_an_index_that_leaves_files_out_makes_the_answer_truncated(tmp_path, prefix):
    """The page is full with one file of the first index, and the second one has nothing."""
    cluster = Cluster(tmp_path)
    for part in range(3):
        times = [BASE_MS + 100_000 * part + 1000 * number for number in range(2)]
        cluster.add(f"{prefix}/a", [("t", 0, "k", time_ms - BASE_MS, 10, time_ms) for time_ms in times])
    cluster.add(f"{prefix}/b", [("t", 0, "other", 0, 10, BASE_MS)])
    with cluster.reader() as reader:
        for count in (1, 2):
            page = reader.query("t", "k", max_count=count)
            assert (len(page), page.status) == (count, "truncated")
            offsets = [item.offset for item in items_by_pages(reader.query, "t", "k", max_count=count)]
            assert offsets == [201_000, 200_000, 101_000, 100_000, 1000, 0]
