"""Lookups of few requests beside a log that grows. The state machine of `tests/property` asks within other bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cold_index import BASE_MS, cold_index
from tests.support.model import Answer
from tiered_index import Lookup, QueryResult
from tiered_index.clock import ManualClock
from tiered_index.errors import BudgetExceeded
from tiered_index.service.read.results import QueryResults


def answers(result: QueryResult) -> list[Answer]:
    return [Answer.of(item) for item in result]


def test_a_batch_with_cursors_and_a_bound(tmp_path: Path) -> None:
    index = cold_index(tmp_path / "root", files=3)
    with index.reader(block_cache_bytes=0) as reader:
        cursor = reader.query("t", "all", max_count=1).cursor
        lookups = [
            Lookup(topic="t", key="all", cursor=cursor),
            Lookup(topic="t", key="k1-3"),
            Lookup(topic="t", key="all", cursor=cursor),
        ]
        results = reader.query_many(lookups)
        rest = index.expected("t", "all")[1:]
        assert [answers(result) for result in results] == [rest, index.expected("t", "k1-3"), rest]
        index.storage.reset()
        again = reader.query_many(lookups)
        assert again.explain.requests == len(index.storage.operations)
        assert again.explain.bytes == index.storage.delivered
        assert "log" not in [report.file for result in (again, *again) for report in result.explain.files]
        assert sum(report.requests for report in again.explain.files) == again.explain.requests
        needed = again.explain.requests
        for limit in range(needed):
            partial = reader.query_many(lookups, max_requests=limit, allow_partial=True)
            assert partial.failed and partial.explain.requests <= limit
            with pytest.raises(BudgetExceeded) as caught:
                reader.query_many(lookups, max_requests=limit)
            result = caught.value.result
            assert isinstance(result, QueryResults) and len(result) == len(lookups)
            assert result.failed == caught.value.failed != ()
            assert [len(page) for page in result] == result.counts.tolist()
            assert all(set(page.items) <= set(whole.items) for page, whole in zip(result, results, strict=True))
        assert reader.query_many(lookups, max_requests=needed)[0].items == results[0].items


@pytest.mark.parametrize("limit", [2, 6])
def test_lookups_with_few_requests_catch_up_with_the_log(tmp_path: Path, limit: int) -> None:
    index = cold_index(tmp_path / "root", files=2)
    clock = ManualClock(BASE_MS)
    with index.reader(clock=clock, refresh_interval_s=5, block_cache_bytes=0) as reader:
        known = [Answer.of(item) for item in reader.query("t", "all")]
        with index.writer() as writer:
            for number in range(12):
                writer.put("t", 0, "all", 10**6 + number, 1, BASE_MS + 10**9 + number * 1000)
                writer.seal()
                writer.run_lifecycle()
            behind = writer.log_state.number - reader.log_state.number
            whole = [Answer.of(item) for item in writer.query("t", "all")]
        assert behind >= 12 and len(whole) == len(known) + 12
        for attempt in range(4 * behind):
            clock.advance(6)
            index.storage.reset()
            partly = reader.query("t", "all", max_count=100, max_requests=limit, allow_partial=True)
            assert len(index.storage.operations) <= limit
            if limit == 6 and attempt == 0:
                # the log took half; the known files were read all the same
                assert [Answer.of(item) for item in partly] == known
            if reader.log_state.number >= writer.log_state.number:
                break
        else:
            pytest.fail(f"still at {reader.log_state.number}")
        assert [Answer.of(item) for item in reader.query("t", "all", max_count=100)] == whole
