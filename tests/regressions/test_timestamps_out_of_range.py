"""An Arrow timestamp too great for milliseconds wrapped around to some other time, and one shortly before 1970 became
1970.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.batches import batch
from tiered_index.cli.ingest import FileIntake
from tiered_index.errors import InvalidArgument
from tiered_index.follow import PatientPut
from tiered_index.sources.files import open_source
from tiered_index.sources.places import LocalFile

NOW_S = 1_700_000_000
BAD = [("s", 2**62), ("s", 2**62 + NOW_S), ("s", -(2**62)), ("us", -1), ("ns", -1)]
GOOD = [("s", NOW_S), ("ms", NOW_S * 10**3 + 999), ("us", NOW_S * 10**6 + 999_999), ("ns", NOW_S * 10**9 + 999_999_999)]


def take(service, path):
    """Ingest a file of messages."""
    source = open_source(LocalFile(path))
    intake = FileIntake(service, source, "file", skip_bad=False, patient=PatientPut(service, 0))
    try:
        for rows in source.batches(0):
            intake.take(rows)
    finally:
        service.flush()


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("unit", "time"), BAD)
def test_a_batch_is_refused(open_index, unit, time, chunked):
    service = open_index()
    times = pa.array([NOW_S, time], pa.timestamp(unit))
    with pytest.raises(InvalidArgument, match="timestamp_ms"):
        service.put_batch(batch(len(times), timestamp_ms=pa.chunked_array([times]) if chunked else times))
    assert service.health()["buffered_entries"] == 0


@pytest.mark.parametrize(("unit", "time"), GOOD)
def test_times_in_range_keep_their_second(open_index, unit, time):
    service = open_index()
    service.put_batch(batch(1, timestamp_ms=pa.array([time], pa.timestamp(unit))))
    assert [item.timestamp_ms for item in service.query("t", "k")] == [NOW_S * 1000]


@pytest.mark.parametrize(("unit", "time"), [bad for bad in BAD if bad[0] != "s"])
def test_a_parquet_row_is_refused(open_index, tmp_path, unit, time):
    service, path = open_index(), tmp_path / "messages.parquet"
    pq.write_table(
        pa.table(batch(2, offset=[0, 1], timestamp_ms=pa.array([NOW_S * 10**6, time], pa.timestamp(unit)))), path
    )
    with pytest.raises(InvalidArgument, match="timestamp_ms"):
        take(service, path)
    assert [item.offset for item in service.query("t", "k")] == [0]


def test_a_parquet_time_of_96_bits_does_not_wrap(open_index, tmp_path):
    """Some writers store such times. As nanoseconds of 64 bits they would wrap around every 584 years."""
    service, path = open_index(), tmp_path / "messages.parquet"
    later_s = NOW_S + 2**64 // 10**9
    table = pa.table(
        batch(2, offset=[0, 1], timestamp_ms=pa.array([NOW_S * 10**6, later_s * 10**6], pa.timestamp("us")))
    )
    pq.write_table(table, path, use_deprecated_int96_timestamps=True)
    try:
        take(service, path)
    except InvalidArgument as error:
        assert "timestamp_ms" in str(error)
    assert {item.offset: item.timestamp_ms // 1000 for item in service.query("t", "k")}.get(1) in (None, later_s)
    assert service.query("t", "k", NOW_S * 1000, NOW_S * 1000 + 5000).items[-1].offset == 0
