"""Builds an index from the new files of a Delta or Iceberg table, each file once. Driver only.

A build reads Parquet files as they are and only adds entries. So a table is refused, before anything is written, if its
files have rows that the table lacks, or columns under other names.
"""

from tiered_index.spark.tables.delta import build_delta, new_in_delta
from tiered_index.spark.tables.iceberg import build_iceberg, new_in_iceberg

__all__ = ["build_delta", "build_iceberg", "new_in_delta", "new_in_iceberg"]
