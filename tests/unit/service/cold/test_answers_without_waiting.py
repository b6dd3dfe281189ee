"""`query_nowait` of a reader: an answer that is in memory, without a request; else None."""

from tests.support.cold_index import cold_index
from tiered_index import IndexReader
from tiered_index.storage.opening import open_storage


def test_a_reader_answers_from_memory_or_not_at_all(tmp_path, clock):
    index = cold_index(tmp_path / "root", files=2)
    recorder = index.storage
    with index.reader(clock=clock, refresh_interval_s=60) as reader:
        opened = len(recorder.operations)
        assert reader.query_nowait("t", "all") is None
        assert len(recorder.operations) == opened
        # the second one is answered by what the first one has cached
        expected = [reader.query("t", "all") for _ in range(2)][-1]
        read = len(recorder.operations)
        answer = reader.query_nowait("t", "all")
        assert (answer.items, answer.status, answer.cursor) == (expected.items, expected.status, expected.cursor)
        assert answer.to_dict()["items"] == expected.to_dict()["items"]
        assert reader.query_nowait("", "all") is reader.query_nowait("t", "all", cursor="none") is None
        # the log has to be read
        clock.advance(61)
        assert reader.query_nowait("t", "all") is None
        assert len(recorder.operations) == read
    assert reader.query_nowait("t", "all") is None


def test_a_reader_of_several_indexes_does_not_answer_without_waiting(tmp_path):
    uris = [f"file://{tmp_path / name}" for name in ("a", "b")]
    for uri in uris:
        with open_storage(uri) as storage:
            cold_index(tmp_path / uri[-1:] / "root", files=1, storage=storage)
    with IndexReader.open(uris) as reader:
        assert len(reader.query("t", "all"))
        assert reader.query_nowait("t", "all") is None
