"""A reader that is many records behind its log, with lookups of few requests each: it catches up, and each lookup also
reads files.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cold_index import BASE_MS, cold_index
from tests.support.model import Answer
from tiered_index.clock import ManualClock


@pytest.mark.parametrize("limit", [2, 3, 6])
def test_lookups_with_few_requests_catch_up_with_the_log(tmp_path: Path, limit: int) -> None:
    made = cold_index(tmp_path / "root", files=2)
    clock = ManualClock(BASE_MS)
    with made.reader(clock=clock, refresh_interval_s=5, block_cache_bytes=0) as reader:
        known = [Answer.of(item) for item in reader.query("t", "all")]
        with made.writer() as writer:
            for number in range(12):
                writer.put("t", 0, "all", 10**6 + number, 1, BASE_MS + 10**9 + number * 1000)
                writer.seal()
                writer.run_lifecycle()
            behind = writer.log_state.number - reader.log_state.number
            whole = [Answer.of(item) for item in writer.query("t", "all")]
        assert behind >= 12 and len(whole) == len(known) + 12
        for asked in range(4 * behind):
            clock.advance(6)
            made.storage.reset()
            partly = reader.query("t", "all", max_count=100, max_requests=limit, allow_partial=True)
            assert len(made.storage.operations) <= limit
            if limit == 6 and asked == 0:
                # the log took half; the known files were read all the same
                assert [Answer.of(item) for item in partly] == known
            if reader.log_state.number >= writer.log_state.number:
                break
        else:
            pytest.fail(f"still at {reader.log_state.number}")
        assert [Answer.of(item) for item in reader.query("t", "all", max_count=100)] == whole
