"""A lookup whose budget was too small for the log raised `BudgetExceeded` without a result, even with partial answers.

A batch with a cursor among its lookups raised the error with that lookup's result only. It also counted the requests of
the cursor's page as requests for the log.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cold_index import BASE_MS, ColdIndex, cold_index, columns, put
from tests.support.model import Answer
from tiered_index import IndexReader, Lookup, QueryResult
from tiered_index.clock import ManualClock
from tiered_index.errors import BudgetExceeded
from tiered_index.service.read.results import QueryResults

FILES = 3


@pytest.fixture
def made(tmp_path: Path) -> ColdIndex:
    return cold_index(tmp_path / "root", files=FILES)


def answers(result: QueryResult) -> list[Answer]:
    return [Answer.of(item) for item in result]


def test_a_refresh_that_is_due_and_can_not_be_afforded(made: ColdIndex) -> None:
    clock = ManualClock(BASE_MS)
    with made.reader(clock=clock, refresh_interval_s=10) as reader:
        expected = made.expected("t", "all")
        assert answers(reader.query("t", "all")) == expected
        with made.writer() as writer:
            put(made, writer, columns(FILES, 5))
            writer.seal()
            writer.run_lifecycle()
        clock.advance(11)
        # the reader has all files that it knows in memory: complete as of its log position
        for result in (
            reader.query("t", "all", max_requests=0),
            reader.query_many([Lookup(topic="t", key="all")], max_requests=0)[0],
        ):
            assert (answers(result), result.status, result.explain.requests) == (expected, "complete", 0)
        # one byte is not enough either
        assert answers(reader.query("t", "all", max_bytes=0)) == expected
        # and the next one tries again
        assert answers(reader.query("t", "all")) == made.expected("t", "all") != expected


def test_a_root_that_has_changed_beside_a_reader_that_can_not_afford_the_log(made: ColdIndex) -> None:
    with made.writer(local_keep_s=10**6) as writer:
        put(made, writer, columns(FILES, 5))
        writer.flush()
        with IndexReader.open(root=made.root, storage_backend=made.storage, refresh_interval_s=10**6) as reader:
            assert answers(reader.query("t", "all")) == made.expected("t", "all")
            writer.seal()
            writer.run_lifecycle()
            result = reader.query("t", "all", max_requests=0, allow_partial=True)
            assert (result.status, [report.file for report in result.failed]) == ("partial", ["log"])
            assert set(answers(result)) <= set(made.expected("t", "all"))
            with pytest.raises(BudgetExceeded) as caught:
                reader.query("t", "all", max_requests=0)
            assert isinstance(caught.value.result, QueryResult)
            assert answers(caught.value.result) == answers(result)
            assert answers(reader.query("t", "all")) == made.expected("t", "all")  # it isn't cached


@pytest.mark.parametrize("many", [False, True])
def test_an_object_that_is_gone_and_no_request_is_left_to_ask_the_log(made: ColdIndex, many: bool) -> None:
    with made.reader(block_cache_bytes=0) as reader:
        assert len(reader.query("t", "all")) == FILES  # the directories are known now
        gone = made.stored[-1]
        made.inner.delete(gone.name)
        asked = Lookup(topic="t", key="all")
        how = {"max_requests": 1, "allow_partial": True}
        result = reader.query_many([asked], **how)[0] if many else reader.query("t", "all", **how)
        assert result.status == "partial"
        assert gone.file_id in [report.file for report in result.failed]
        assert {report.error for report in result.failed if report.file == gone.file_id} != {None}
        assert result.explain.requests <= 1
        assert set(answers(result)) <= set(made.expected("t", "all"))
        with pytest.raises(BudgetExceeded) as caught:
            reader.query_many([asked], max_requests=1) if many else reader.query("t", "all", max_requests=1)
        assert caught.value.result is not None
        assert gone.file_id in [report.file for report in caught.value.failed]


def test_a_batch_with_cursors_and_a_bound(made: ColdIndex) -> None:
    with made.reader(block_cache_bytes=0) as reader:
        cursor = reader.query("t", "all", max_count=1).cursor
        asked = [
            Lookup(topic="t", key="all", cursor=cursor),
            Lookup(topic="t", key="k1-3"),
            Lookup(topic="t", key="all", cursor=cursor),
        ]
        results = reader.query_many(asked)
        rest = made.expected("t", "all")[1:]
        assert [answers(result) for result in results] == [rest, made.expected("t", "k1-3"), rest]
        made.storage.reset()
        again = reader.query_many(asked)
        assert again.explain.requests == len(made.storage.operations)
        assert again.explain.bytes == made.storage.delivered
        assert "log" not in [report.file for result in (again, *again) for report in result.explain.files]
        assert sum(report.requests for report in again.explain.files) == again.explain.requests
        needed = again.explain.requests
        for limit in range(needed):
            partial = reader.query_many(asked, max_requests=limit, allow_partial=True)
            assert partial.failed and partial.explain.requests <= limit
            with pytest.raises(BudgetExceeded) as caught:
                reader.query_many(asked, max_requests=limit)
            result = caught.value.result
            assert isinstance(result, QueryResults) and len(result) == len(asked)
            assert result.failed == caught.value.failed != ()
            assert [len(page) for page in result] == result.counts.tolist()
            assert all(set(page.items) <= set(whole.items) for page, whole in zip(result, results, strict=True))
        assert reader.query_many(asked, max_requests=needed)[0].items == results[0].items
