"""The results in deploy/SIZING.md follow from its inputs. Inputs that the code fixes equal the code's values."""

import pytest

from docs.generators.sizing_page import PAGE, computed, inputs_of, shown, sizing
from tiered_index.format.compacted import GROUP_BYTES
from tiered_index.format.trailer import GROUP_DTYPE
from tiered_index.service.jobs import merge_run as run
from tiered_index.service.jobs.rewriting import rewrite as task_module
from tiered_index.spark.writing import plan as plan_module
from tiered_index.storage.base import PART_BYTES
from tiered_index.storage.prices import PriceTable

_TEXT = PAGE.read_text()
_GIVEN = inputs_of(_TEXT)


def test_results_follow_from_the_inputs():
    assert shown(_TEXT) == computed(_GIVEN)


def test_inputs_equal_the_values_of_the_code():
    prices = PriceTable()
    assert (_GIVEN["PUT"], _GIVEN["GET"]) == (prices.put_per_1000_usd, prices.get_per_1000_usd)
    assert f"list prices as of {prices.as_of};" in _TEXT
    assert _GIVEN["MiB a part"] * 2**20 == PART_BYTES
    assert _GIVEN["entries a piece"] == task_module.PIECE_ITEMS
    # a piece's range of one day is shorter than one read
    assert task_module.PIECE_ITEMS / _GIVEN["days a window, merged"] * _GIVEN["bytes an entry"] < run._SPAN_BYTES
    assert (_GIVEN["KiB a slot group"] * 1024, _GIVEN["bytes a directory entry"]) == (GROUP_BYTES, GROUP_DTYPE.itemsize)
    text = (PAGE.parents[1] / "tiered_index/cli/spark/commands.py").read_text()
    assert f"shard_bytes: int = Option({_GIVEN['MiB a shard']:.0f} << 20" in text
    assert _GIVEN["MiB a shard"] * 2**20 == plan_module._SHARD_BYTES
    assert _GIVEN["least MiB a shard"] * 2**20 == plan_module._LEAST_BYTES


def test_arithmetic_by_hand():
    figures = _GIVEN | {"build": 100_000, "merge": 50_000, "bytes an entry": 32, "keys a message": 2}
    figures |= {"executors": 4, "executor hour": 0.1}
    year = sizing(figures, 1e9)
    assert year["entries a year"] == 2e9
    assert (year["executor hours a year, build"], year["executor hours a year, merge"]) == pytest.approx(
        (5.5556, 11.1111), rel=1e-4
    )
    assert year["minutes a day on the executors"] == pytest.approx(16.6667 * 60 / 365 / 4, rel=1e-4)
    assert year["GiB at the year's end"] == pytest.approx(64e9 / 2**30)
    # 13 windows of 4.92e9 bytes, 19 shards each
    assert year["objects at the year's end"] == 247
    # days of 175e6 bytes: 6 shards of at most 32 MiB, each of 4 parts. The others have 31 parts
    assert year["PUTs a year"] == 6 * 365 * 6 + 247 * 33
    assert year["GETs of merges a year"] == 1_908 * 30 + 365 * (6 + 19 - 1) + (6 * 365 + 247)
    assert (year["GETs a lookup of the year"], year["GETs a lookup of the year, not merged"]) == (27, 8_760)
    assert year["dollars a month: storage, at the year's end"] == pytest.approx(59.6 * 0.023, rel=1e-3)
    assert year["dollars a month: lookups"] == pytest.approx(10_000 * 365 / 12 * 27 * 0.0004 / 1000)
    assert year["dollars a month"] == pytest.approx(
        sum(value for name, value in year.items() if name.startswith("dollars a month:"))
    )
