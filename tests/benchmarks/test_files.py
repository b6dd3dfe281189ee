"""The measurement of files: every way reads all rows, and has its figures."""

from __future__ import annotations

import pytest

from tests.benchmarks import files


def test_each_way_reads_all_rows_and_has_a_ratio(tmp_path):
    found = files.measure(300, rounds=1, root_dir=str(tmp_path))
    assert set(found["ratios"]) == {"ndjson duckdb", "ndjson duckdb-typed", "parquet duckdb"}
    assert min(found["ratios"].values()) > 0
    assert found["index_bytes_per_row"] > 0 and found["rows_ms"] > 30
    assert min(found["rows_per_cpu_s"].values()) > 0


@pytest.mark.parametrize("form", files.GOALS)
def test_duckdb_and_the_index_read_the_same_number_of_rows(tmp_path, form):
    files.write_rows(tmp_path / "rows", 50)
    path, rows = tmp_path / f"rows.{form}", 50 * (files.PARQUET_TIMES if form == "parquet" else 1)
    assert files.read_by_duckdb(path, typed=True) == files.read_by_duckdb(path, typed=False) == rows
    assert files.index(path, str(tmp_path))[0] == rows
