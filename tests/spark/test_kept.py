"""DataFrames that Spark keeps for a while: as many partitions as there is data for, and the session as it was."""

from __future__ import annotations

from typing import Any

import pytest

from tiered_index.spark.audit.differences import kept

SETTING = "spark.sql.optimizer.canChangeCachedPlanOutputPartitioning"


@pytest.mark.parametrize("before", [None, "false", "true"])
def test_small_data_is_kept_in_few_partitions(spark: Any, before: str | None) -> None:
    session = spark.newSession()
    session.conf.set("spark.sql.shuffle.partitions", "40")
    if before is not None:
        session.conf.set(SETTING, before)
    frame = session.range(1000).selectExpr("id % 100 AS rest").groupBy("rest").count()
    told = session.conf.get(SETTING)
    with kept(frame) as rows:
        assert session.conf.get(SETTING) == told
        assert rows.is_cached and rows.count() == 100
        assert rows.rdd.getNumPartitions() < 10
    assert not frame.is_cached


def test_what_fails_is_not_kept(spark: Any) -> None:
    frame = spark.range(7).groupBy("id").count()
    with pytest.raises(ZeroDivisionError), kept(frame):
        raise ZeroDivisionError
    assert not frame.is_cached
