"""Builds from the files that a table has got since the index's position."""

from collections.abc import Callable, Sequence
from typing import Any

from tiered_index.config import IndexConfig
from tiered_index.errors import NotAnIndex
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.writing.build import BuildResult, build
from tiered_index.spark.writing.positions import SourceRange

AS_DATAFRAME = "Or read the table as a DataFrame by Spark's own reader of its format, and pass that to build"


def build_new(
    new: Callable[[int], tuple[Sequence[str], int]], spark: Any, source: str, storage: str, options: dict[str, Any]
) -> BuildResult | None:
    """Build from the files that `new` returns for the index's position of `source`; None if there are none."""
    try:
        address = StorageAddress(storage, (options.get("config") or IndexConfig()).s3)
        begin = address.state().positions.get(source, 0)
    except NotAnIndex:
        begin = 0
    files, end = new(begin)
    part = SourceRange(source, begin, end) if files else None
    return build(spark, files, storage=storage, mode="append", source_range=part, **options) if files else None
