"""A terminal shows services, readers and answers. Answers become tables. A lookup has positional fields."""

import datetime

import numpy as np
import pyarrow as pa
import pytest

from tests.support.batches import batch
from tiered_index import Lookup
from tiered_index.errors import ConfigError, InvalidArgument
from tiered_index.types import to_pandas

T = 1_700_000_000_000
TOPIC = "<b>orders & more</b>"


@pytest.fixture
def filled(index):
    for offset in range(30):
        index.put(TOPIC, 0, ["k", f"k{offset % 2}"], offset, 5, T + 1000 * offset)
    index.put("u", 0, "k", 1, 5, T)
    return index


def test_pairs_take_a_count_and_lookups_have_their_own(filled):
    lookups = [(TOPIC, "k"), (TOPIC, "k1"), Lookup(TOPIC, "k", max_count=2)]
    assert filled.query_many(lookups, max_count=3).counts.tolist() == [3, 3, 2]
    assert filled.query_many(lookups[:2], max_count=20).counts.tolist() == [20, 15]
    assert filled.query_many(lookups[:1]).counts.tolist() == [30]
    for wrong in (0, "5", None):
        with pytest.raises(InvalidArgument, match="max_count"):
            filled.query_many(lookups[:2], max_count=wrong)


def test_a_batch_is_one_table(filled):
    cursor = filled.query(TOPIC, "k", max_count=28).cursor
    for more in ([], [Lookup(TOPIC, "k", cursor=cursor)]):
        results = filled.query_many([("u", "k"), ("u", "none"), (TOPIC, "k1"), *more])
        table = results.to_arrow()
        rows = [{"lookup": at, **row} for at, result in enumerate(results) for row in result.to_arrow().to_pylist()]
        assert table.to_pylist() == rows and len(rows) > 15
        assert results.to_pandas()["lookup"].tolist() == table["lookup"].to_pylist()
        assert table.schema.names == ["lookup", *results[0].to_arrow().schema.names]
    for none in ([], [("u", "none")]):
        assert filled.query_many(none).to_arrow().schema == table.schema


def test_a_frame_without_pandas_names_the_extra():
    class Table:
        def to_pandas(self):
            raise ModuleNotFoundError("No module named 'pandas'")

    with pytest.raises(ConfigError, match=r"needs pandas: pip install .*\[pandas\]"):
        to_pandas(Table())


UTC = datetime.UTC
MOMENTS = [T, T + 1999]


DATES = [datetime.datetime.fromtimestamp(ms / 1000, UTC) for ms in MOMENTS]
NAIVE = pa.array(MOMENTS, pa.timestamp("ms"))
TIMES = [
    *(pa.array(MOMENTS, pa.timestamp("ms", "UTC")), pa.table({"at": NAIVE}).to_pandas()["at"]),
    *(np.array(MOMENTS, "M8[ms]"), np.array(MOMENTS, "M8[ms]").astype("M8[ns]"), np.array(DATES, object)),
    *([np.datetime64(ms, "ms") for ms in MOMENTS], DATES, [at.replace(tzinfo=None) for at in DATES]),
]


@pytest.mark.parametrize("times", TIMES, ids=lambda times: f"{type(times).__name__} {getattr(times, 'dtype', '')}")
def test_a_dict_of_columns_takes_timestamps(index, times):
    index.put_batch(batch(2, timestamp_ms=times))
    assert [item.timestamp_ms for item in index.query("t", "k")] == [T + 1000, T]


@pytest.mark.parametrize(
    "times",
    [np.array(["2023-11-14", "NaT"], "M8[ms]"), ["2023-11-14T00:00:00"] * 2, np.array([1.0, 2.0]), [1, None]],
    ids=str,
)
def test_an_invalid_time_is_refused(index, times):
    with pytest.raises(InvalidArgument, match="timestamp_ms"):
        index.put_batch(batch(2, timestamp_ms=times))


def test_days_are_their_midnight(index):
    day = np.array(["2023-11-14", "2023-11-15"], "M8[D]")
    index.put_batch(batch(2, timestamp_ms=day))
    assert [item.timestamp_ms % 86_400_000 for item in index.query("t", "k")] == [0, 0]
