"""What tasks are told to read: a list of plain values a split, one split to a partition."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["each_split", "frame_of_splits"]


def frame_of_splits(spark: SparkSession, splits: Sequence[Sequence[Any]]) -> DataFrame:
    """Return a DataFrame with one split to a partition."""
    rows = [(json.dumps(split),) for split in splits]
    return spark.createDataFrame(spark.sparkContext.parallelize(rows, max(1, len(rows))), "split string")


def each_split(batches: Iterable[pa.RecordBatch]) -> Iterator[list[Any]]:
    """Yield the splits in a task's batches."""
    for batch in batches:
        for split in batch.column(0).to_pylist():
            yield json.loads(split)
