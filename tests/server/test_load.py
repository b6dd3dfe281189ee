"""The benchmark of the service with few entries: each load gets right answers. No test judges its speed."""

import pytest

from tests.benchmarks.service.__main__ import table
from tests.benchmarks.service.measuring import measure


@pytest.mark.long
def test_each_load_is_answered(tmp_path):
    rows = measure(tmp_path, entries=4_000, seconds=0.2, soak_s=0.3, connections=40)
    assert [(row["name"], row["wrong"]) for row in rows if row["wrong"] or not row["answers"]] == []
    names = [row["name"] for row in rows]
    assert {name.partition(":")[0] for name in names} >= {"hot", "cached", "cold", "40 connections"}
    assert next(row for row in rows if "beside writes" in row["name"])["written_per_s"] > 0
    lines = table(rows)
    assert len(lines) == 2 + len(rows) and all(line.count("|") == lines[0].count("|") for line in lines)
