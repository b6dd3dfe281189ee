"""Options of a write on an index that is there: given ones must be its own. What the driver does first, without a
session.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql.types import IntegerType, LongType, StringType, StructType

from tests.spark.in_process import build_here
from tiered_index.clock import SystemClock
from tiered_index.errors import ConfigError, InvalidArgument, SchemaMismatch, TieredIndexError
from tiered_index.service.log.log import StorageLog
from tiered_index.spark.datasource.options import Options
from tiered_index.spark.datasource.writing import WRITE_OPTIONS, prepared
from tiered_index.storage.opening import open_storage

COLUMNS = StructType()
for _name, _kind in (
    ("topic", StringType()),
    ("queue_id", IntegerType()),
    ("key", StringType()),
    ("offset", LongType()),
    ("size", IntegerType()),
    ("timestamp_ms", LongType()),
):
    COLUMNS = COLUMNS.add(_name, _kind)


def prepare(uri: str, **given: str) -> None:
    prepared(Options("tiered_index", {"path": uri, **given}, WRITE_OPTIONS), COLUMNS, streams=False)


WRONG: dict[str, tuple[dict[str, str], type[TieredIndexError], str]] = {
    "no_slots": ({"slots": "0"}, ConfigError, "slots must be greater than 0"),
    "no_items": ({"items": "0"}, ConfigError, "items must be greater than 1"),
    "slots": ({"slots": "65"}, SchemaMismatch, "64 slots, not native and 65"),
    "items": ({"items": "77"}, SchemaMismatch, "with 100,000 items a file, not 77"),
    "offset_space": ({"offsetSpace": "commitlog"}, SchemaMismatch, "'custom', not in 'commitlog'"),
    "no_window": ({"window": ""}, InvalidArgument, "a window is like 1h"),
}


@pytest.mark.parametrize("case", WRONG)
def test_options_that_are_not_the_indexs_are_refused(storage: str, tmp_path: Path, case: str) -> None:
    given, kind, text = WRONG[case]
    build_here(storage)
    with pytest.raises(kind, match=text):
        prepare(storage, **given)
    if kind is not SchemaMismatch:
        with pytest.raises(kind, match=text):
            prepare(f"file://{tmp_path}/new", **given)
        assert not (tmp_path / "new" / "log").exists()
    prepare(storage, slots="64", items="100000", preset="native", offsetSpace="custom", window="1h")
    prepare(storage)


def test_an_index_is_created_as_the_options_say(storage: str) -> None:
    prepare(storage, slots="65", items="77", offsetSpace="commitlog")
    prepare(storage, items="77")
    with open_storage(storage) as opened:
        genesis = StorageLog(opened, SystemClock()).open().genesis
    assert genesis is not None and (genesis.layout.slots, genesis.layout.items, genesis.offset_space) == (
        65,
        77,
        "commitlog",
    )
