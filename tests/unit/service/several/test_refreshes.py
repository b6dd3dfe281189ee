"""A reader of several indexes moves on with each of their logs."""

from __future__ import annotations

from tests.several_indexes import BASE_MS, rows
from tiered_index import IndexReader
from tiered_index.clock import ManualClock


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
