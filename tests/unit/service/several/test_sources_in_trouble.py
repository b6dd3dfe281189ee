"""One of several indexes is in trouble: no answer is complete without it, and a partial one names what of it could not
be read.
"""

import pytest

from tests.support.several_indexes import BASE_MS, Cluster, of, rows
from tiered_index import IndexReader, Lookup
from tiered_index.clock import ManualClock
from tiered_index.errors import CorruptFile, StorageUnavailable
from tiered_index.storage.memory import MemoryStorage


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


def test_a_log_that_was_due_and_could_not_be_read_leaves_no_answer_complete(cluster, opened):
    """What the log has gained since may hold answers; what was known is still told where a part is asked for."""
    clock = ManualClock(BASE_MS)
    with IndexReader.open(cluster.uris, clock=clock, refresh_interval_s=10) as reader:
        of(opened, cluster.uris[0]).fail("list", times=None)
        clock.advance(11)
        with pytest.raises(StorageUnavailable):
            reader.query("t", "k", max_count=1000)
        cluster.add(cluster.uris[2], rows(77, 9, seconds=8))
        clock.advance(11)
        # the others were read on all the same
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
        assert found == cluster.expected(others)
        assert reader.query("t", "none", allow_partial=True).status in ("partial", "complete")


def test_objects_of_one_name_in_two_storages_are_told_apart(tmp_path, prefix):
    """A copy of an index under a second id would have the same object names: what one storage lost is not looked for in
    the other.
    """
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
        assert made.answers(answer) == made.expected(made.uris[1:])
