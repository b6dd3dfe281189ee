"""A reader of several indexes refreshes each of their logs, and reads them in parallel.

If one index fails, no answer is complete, and a partial one names its unread parts.
"""

import pytest

from tests.support.hanging import beside
from tests.support.several_indexes import Cluster, of, rows
from tiered_index import IndexReader
from tiered_index.errors import CorruptFile, StorageUnavailable
from tiered_index.storage.memory import MemoryStorage

LOG = "log/"


@pytest.mark.parametrize("how", ["due", "asked"])
def test_logs_are_read_side_by_side_up_to_a_bound(cluster, opened, clock, how):
    with cluster.reader(clock=clock, refresh_interval_s=10, query_threads=2) as reader:
        for uri in cluster.uris:
            cluster.add(uri, rows(60, 30, seconds=9))
        hangs = [of(opened, uri).hang("get", name_prefix=LOG) for uri in reader.sources]
        clock.advance(11)
        asking = beside(reader.refresh if how == "asked" else lambda: reader.query("t", "k", max_count=1000))
        assert hangs[0].entered.wait(30) and hangs[1].entered.wait(30)
        assert not hangs[2].entered.is_set()
        hangs[0].release.set()
        assert hangs[2].entered.wait(30) and not asking.ended(0)
        for hang in hangs:
            hang.release.set()
        assert not isinstance(asking(), BaseException)
        assert cluster.answers(reader.query("t", "k", max_count=1000)) == cluster.expected()


@pytest.mark.parametrize("trouble", ["a damaged record", "no answer"])
def test_a_log_that_cannot_be_read_leaves_no_answer_complete_and_the_others_are_read(cluster, opened, clock, trouble):
    """Its new records may have answers. A partial answer has the entries that the reader already knows."""
    hurt, is_damaged = cluster.uris[1], trouble == "a damaged record"
    with cluster.reader(clock=clock, refresh_interval_s=10) as reader:
        known, record = cluster.expected([hurt]), f"log/{reader._views[1].log_state.number + 1:020}"
        for uri in cluster.uris:
            cluster.add(uri, rows(64, 30, seconds=9))
        if is_damaged:
            of(opened, hurt).corrupt("get", name_prefix=record, times=None)
        else:
            of(opened, hurt).fail("list", times=None)
        clock.advance(11)
        with pytest.raises(CorruptFile if is_damaged else StorageUnavailable, match=record if is_damaged else None):
            reader.query("t", "k", max_count=1000)
        answer = reader.query("t", "k", max_count=1000, allow_partial=True)
        unread = record if is_damaged else "log"
        assert (answer.status, [(report.source, report.file) for report in answer.failed]) == (
            "partial",
            [(hurt, unread)],
        )
        answers = cluster.answers(answer)
        of_hurt = [answer for answer in answers if answer.extra[0][1] == cluster.numbers[hurt]]
        assert of_hurt == known
        others = cluster.expected([uri for uri in cluster.uris if uri != hurt])
        assert [answer for answer in answers if answer not in of_hurt] == others
        of(opened, hurt).clear()
        clock.advance(2)
        assert cluster.answers(reader.query("t", "k", max_count=1000)) == cluster.expected()


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
