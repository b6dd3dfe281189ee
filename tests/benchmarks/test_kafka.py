"""The measurement of Kafka's index: every way reads all records, also if they take several topics."""

from __future__ import annotations

import pytest

from tests.benchmarks import kafka


def test_each_way_reads_all_records_and_has_a_ratio(monkeypatch):
    monkeypatch.setattr(kafka, "run_way", None)  # the ways run in processes of their own
    found = kafka.measure(500, partitions=2, rounds=1)
    assert found["records"] == 500 and set(found["cpu_s"]) == set(kafka.WAYS)
    assert set(found["ratios"]) == set(found["goals"]) and min(found["ratios"].values()) > 0


@pytest.mark.parametrize(("records", "count"), [(1, 1), (24_000, 1), (24_001, 2)])
def test_no_topic_has_more_records_than_the_cluster_keeps(records, count):
    assert len(kafka.topics_of(records)) == count
