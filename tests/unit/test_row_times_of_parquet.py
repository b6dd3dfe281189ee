"""Times of Parquet rows that no index can have are refused, and never become other times."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.integration.cli.command_lines import run_here
from tests.support.batches import batch

NOW_S = 1_700_000_000


@pytest.mark.parametrize(("unit", "time"), [("us", -1), ("ns", -1), ("int96", (NOW_S + 2**64 // 10**9) * 10**6)])
def test_a_time_out_of_range_is_refused(tmp_path, unit, time):
    """As nanoseconds of 64 bits, times of 96 bits would wrap around every 584 years."""
    path, scale = tmp_path / "messages.parquet", 10**9 if unit == "ns" else 10**6
    times = pa.array([NOW_S * scale, time], pa.timestamp("ns" if unit == "ns" else "us"))
    table = pa.table(batch(2, offset=[0, 1], timestamp_ms=times))
    pq.write_table(table, path, use_deprecated_int96_timestamps=unit == "int96")
    place = ("--root", tmp_path / "root", "--storage", f"file://{tmp_path}/storage")
    run_here("ingest", path, *place, "--slots", 7, "--items", 20)
    items = run_here("query", "t", "k", *place, "--json").document["items"]
    times = {item["offset"]: item["timestamp_ms"] // 1000 for item in items}
    assert times.get(0, NOW_S) == NOW_S
    assert times.get(1) in (None, time // scale) and (unit == "int96" or 1 not in times)
