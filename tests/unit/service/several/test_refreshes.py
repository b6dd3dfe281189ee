"""A reader of several indexes refreshes each of their logs, and reads them in parallel.

If one index fails, no answer is complete, and a partial one names its unread parts.
"""

import pytest

from tests.support.hanging import beside
from tests.support.several_indexes import Cluster, of, rows
from tiered_index import IndexReader, Lookup
from tiered_index.errors import CorruptFile, StorageUnavailable
from tiered_index.storage.memory import MemoryStorage

LOG = "log/"


@pytest.mark.parametrize("how", ["due", "asked"])
def test_logs_are_read_side_by_side(cluster, opened, clock, how):
    with cluster.reader(clock=clock, refresh_interval_s=10) as reader:
        for uri in cluster.uris:
            cluster.add(uri, rows(60, 30, seconds=9))
        hangs = [of(opened, uri).hang("get", name_prefix=LOG) for uri in reader.sources]
        clock.advance(11)
        ask, done = reader.refresh if how == "asked" else lambda: reader.query("t", "k", max_count=1000), []
        asking = beside(lambda: done.append(ask()))
        for hang in hangs:
            assert hang.entered.wait(30)  # no read waits for another one
        assert not done
        for hang in hangs:
            hang.release.set()
        assert not isinstance(asking(), BaseException)
        assert cluster.answers(reader.query("t", "k", max_count=1000)) == cluster.expected()


@pytest.mark.parametrize("how", ["due", "asked"])
def test_the_number_of_concurrent_log_reads_is_bounded(cluster, opened, clock, how):
    with IndexReader.open(cluster.uris, clock=clock, refresh_interval_s=10, query_threads=2) as reader:
        hangs = [of(opened, uri).hang("list", name_prefix=LOG) for uri in reader.sources]
        clock.advance(11)
        asking = beside(reader.refresh if how == "asked" else lambda: reader.query("t", "k", max_count=1000))
        assert hangs[0].entered.wait(30) and hangs[1].entered.wait(30)
        assert not hangs[2].entered.is_set()
        hangs[0].release.set()
        assert hangs[2].entered.wait(30)
        for hang in hangs:
            hang.release.set()
        assert not isinstance(asking(), BaseException)


def test_a_damaged_record_of_one_log_is_named_and_the_others_continue(cluster, opened, clock):
    with cluster.reader(clock=clock, refresh_interval_s=10) as reader:
        hurt = cluster.uris[1]
        record = f"log/{reader._views[1].log_state.number + 1:020}"
        for uri in cluster.uris:
            cluster.add(uri, rows(64, 30, seconds=9))
        of(opened, hurt).corrupt("get", name_prefix=record, times=None)
        clock.advance(11)
        with pytest.raises(CorruptFile, match=record):
            reader.query("t", "k", max_count=1000)
        answer = reader.query("t", "k", max_count=1000, allow_partial=True)
        assert [(report.source, report.file) for report in answer.failed] == [(hurt, record)]
        others = [uri for uri in cluster.uris if uri != hurt]
        of_others = [answer for answer in cluster.answers(answer) if answer.extra[0][1] != cluster.numbers[hurt]]
        assert of_others == cluster.expected(others)
        of(opened, hurt).clear()
        clock.advance(2)
        assert cluster.answers(reader.query("t", "k", max_count=1000)) == cluster.expected()


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
        rest = cluster.expected([uri for uri in cluster.uris if uri != lame])
        many = reader.query_many([Lookup("t", "k", max_count=1000)], allow_partial=True)[0]
        for answer in (many, reader.query("t", "k", max_count=1000, allow_partial=True)):
            assert answer.status == "partial"
            assert cluster.answers(answer) == rest
            assert {report.source for report in answer.failed} == {lame}
            assert sorted(report.file for report in answer.failed) == sorted(files)
        of(opened, lame).clear()
        assert cluster.answers(reader.query("t", "k", max_count=1000)) == cluster.expected()


def test_a_log_that_was_due_and_could_not_be_read_leaves_no_answer_complete(cluster, opened, clock):
    """The log's new records may have answers. A partial answer has the entries that the reader already knows."""
    with IndexReader.open(cluster.uris, clock=clock, refresh_interval_s=10) as reader:
        of(opened, cluster.uris[0]).fail("list", times=None)
        clock.advance(11)
        with pytest.raises(StorageUnavailable):
            reader.query("t", "k", max_count=1000)
        cluster.add(cluster.uris[2], rows(77, 9, seconds=8))
        clock.advance(11)
        # the other logs were still read
        answer = reader.query("t", "k", max_count=1000, allow_partial=True)
        assert cluster.answers(answer) == cluster.expected()
        assert answer.status == "partial"
        assert [(report.source, report.file) for report in answer.failed] == [(cluster.uris[0], "log")]
        of(opened, cluster.uris[0]).clear()
        clock.advance(2)
        assert reader.query("t", "k", max_count=1000).status == "complete"


def test_an_index_without_its_log_is_no_empty_folder(cluster):
    prefix = cluster.uris[0].rpartition("/")[0]
    MemoryStorage(prefix.removeprefix("memory://") + "/broken").put("epoch/00000000000000000001", b"x")
    with IndexReader.open(prefix) as reader:
        with pytest.raises(CorruptFile, match="log"):
            reader.query("t", "k")
        answer = reader.query("t", "k", max_count=1000, allow_partial=True)
    assert [report.source for report in answer.failed] == [f"{prefix}/broken"]
    assert cluster.answers(answer) == cluster.expected()


def test_objects_of_one_name_in_two_storages_are_distinguished(tmp_path, prefix):
    """A copy of an index under a second id would have the same object names.

    If one storage lost an object, the reader does not look for it in the other.
    """
    cluster = Cluster(tmp_path)
    for number in range(2):
        cluster.add(f"{prefix}/{number}", rows(number, 20))
    stored = [MemoryStorage(uri.removeprefix("memory://")) for uri in cluster.uris]
    with cluster.reader() as reader:
        names = [info.name for info in stored[0].list("data/")]
        for name in names:
            stored[1].put(name, b"not asked for")
            stored[0].delete_many([name])
        answer = reader.query("t", "k", max_count=1000, allow_partial=True)
        assert {report.source for report in answer.failed} == {cluster.uris[0]}
        assert cluster.answers(answer) == cluster.expected(cluster.uris[1:])
