"""Builds that continue a source: one record has the entries and says up to where the index then has the source."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.spark.entries import check, messages, states, sweep, total, write_parquet
from tests.spark.in_process import planned, shards_of, written
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexConfig, IndexReader
from tiered_index.clock import SystemClock
from tiered_index.errors import InvalidArgument
from tiered_index.service.log.log import StorageLog
from tiered_index.spark import SourceRange, build
from tiered_index.spark.build import build as build_module
from tiered_index.spark.build.build import publish_tables
from tiered_index.storage.memory import MemoryStorage

TABLE, OTHER = messages(300, days=1), messages(200, days=1, seed=2)


def test_builds_continue_a_source_where_the_index_stands(
    spark: Any, storage: str, config: IndexConfig, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (write_parquet(t, tmp_path / f"{n}.parquet") for n, t in enumerate((TABLE, OTHER)))
    more: dict[str, Any] = {"storage": storage, "config": config, "mode": "append"}
    with pytest.raises(InvalidArgument, match="table up to position 0, but the build would continue from 2"):
        build(spark, second, source_range=SourceRange("table", 2, 3), **more)
    build(spark, first, source_range=SourceRange("table", 0, 2), **more)
    build(spark, second, source_range=SourceRange("table", 2, 5), **more)
    check(storage, TABLE, OTHER, keys=5)
    with IndexReader.open(storage) as reader:
        assert reader.log_state.positions == {"table": 5}
        assert reader.query("orders", "key-0").freshness[0].positions == {"table": 5}
    # a repeat is refused before the source is read
    monkeypatch.setattr(build_module, "entries_of", None)
    for again in (SourceRange("table", 0, 2), SourceRange("table", 2, 5), SourceRange("table", 4, 6)):
        with pytest.raises(InvalidArgument, match=f"table up to position 5, .* continue from {again.begin}"):
            build(spark, second, source_range=again, **more)
    assert (total(storage), states(storage).positions) == (500, {"table": 5})


def test_of_two_builds_that_continue_at_once_one_is_published(
    spark: Any, storage: str, config: IndexConfig, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one publishes while the first has written, and is about to."""
    paths = [write_parquet(t, tmp_path / f"{n}.parquet") for n, t in enumerate((TABLE, OTHER))]
    more: dict[str, Any] = {"storage": storage, "config": config, "mode": "append"}
    publish = build_module.publish_tables

    def beaten(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(build_module, "publish_tables", publish)
        build(spark, paths[1], source_range=SourceRange("table", 0, 2), **more)
        return publish(*arguments, **options)

    monkeypatch.setattr(build_module, "publish_tables", beaten)
    with pytest.raises(
        InvalidArgument, match="table up to position 2, but the build would continue from 0: another one"
    ):
        build(spark, paths[0], source_range=SourceRange("table", 0, 1), **more)
    check(storage, OTHER, keys=5)
    assert (total(storage), states(storage).positions) == (200, {"table": 2})
    # what the first one had written it took back
    assert sweep(storage) == 0


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_driver_killed_at_its_record_says_both_or_nothing(when: Any) -> None:
    class Killed(BaseException):
        """The driver's end: nothing runs after it."""

    inner, clock = MemoryStorage(), SystemClock()
    log = StorageLog(inner, clock)
    plan = planned(TABLE)
    log.create(plan.genesis)
    shards = shards_of(written(TABLE, plan, inner, now_ms=clock.now_ms()))
    struck = FaultStorage(inner)
    struck.fail("put_if_absent", when=when, error=Killed)
    with pytest.raises(Killed):
        publish_tables(shards, "append", struck, StorageLog(struck, clock), source_range=SourceRange("table", 0, 7))
    state = StorageLog(inner, clock).open()
    entries = sum(stored.count for stored in state.objects.values())
    assert (entries, state.positions) == ((300, {"table": 7}) if when == "after" else (0, {}))


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        *[("", 0, 1), ("t", -1, 1), ("t", 3, 3), ("t", 3, 2), ("t", 0, 2**63), (None, 0, 1), (7, 0, 1)],
        # in a record of the log no reader would take these
        *[("t", 0, 1.5), ("t", 0, True), ("t", False, 1), ("t", 0, "1"), ("t", None, 1)],
    ],
)
def test_ranges_that_are_none(name: Any, begin: Any, end: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"a range of a source has a name|must be an integer, not"):
        SourceRange(name, begin, end)


def test_positions_of_numpy_are_integers_of_the_record() -> None:
    part = SourceRange("t", np.uint8(3), np.int64(2**62))
    assert [(type(n), n) for n in (part.begin, part.end)] == [(int, 3), (int, 2**62)]
