"""An ability that an older Spark lacks has a twin that does the same."""

from __future__ import annotations

import numpy as np
import pytest
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from tiered_index.errors import ConfigError
from tiered_index.spark import session
from tiered_index.spark.datasource.entries import EntrySource
from tiered_index.spark.frames import hashed_into, repartitioned, repartitioned_by_hash


@pytest.mark.parametrize("count", [1, 7])
def test_rows_are_placed_by_hash_as_by_their_partitions_number(spark, count):
    rows = spark.range(2_000).withColumn("place", (F.col("id") % count).cast("int"))
    for place in (repartitioned, repartitioned_by_hash):
        placed = place(rows, count, F.col("place"))
        assert placed.rdd.getNumPartitions() == count
        assert placed.where(F.spark_partition_id() != F.col("place")).count() == 0


def test_each_partition_has_an_integer_of_its_own():
    assert len(np.unique(hashed_into(10_000))) == 10_000


def test_an_old_spark_is_named_with_the_version_that_is_needed(monkeypatch):
    monkeypatch.setattr("pyspark.__version__", "3.5.8")
    with pytest.raises(ConfigError, match=r"PySpark 3\.5\.8 is too old: this package needs 4\.0 or later"):
        session.register(None)
    monkeypatch.setattr("pyspark.__version__", "4.0.2")
    session.check_pyspark()
    with pytest.raises(ConfigError, match=r"PySpark 4\.0\.2 is too old: streams into an index need 4\.1 or later"):
        EntrySource({"path": "file:///tmp/index"}).streamWriter(StructType(), overwrite=False)
