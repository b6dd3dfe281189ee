"""The ways that the suites of Spark measure, by their names in figures and tables."""

from __future__ import annotations

BUILD, BUILD_FRAME, MERGE, AUDIT = "build", "build of a DataFrame", "merge", "audit"
LOOKUP, JOIN = "lookup", "join with sorted buckets"
HASH_KEY, XXHASH = "hash_key of a column", "xxhash64 of a column"
PLAIN, TUNED = "Parquet, plain", "Parquet, tuned"
DUCK = "Parquet by hash, DuckDB"
ALL = (BUILD, BUILD_FRAME, AUDIT, MERGE, PLAIN, TUNED, DUCK, HASH_KEY, XXHASH)
BESIDE = {BUILD: (TUNED, PLAIN, DUCK), BUILD_FRAME: (TUNED,), AUDIT: (BUILD,), HASH_KEY: (XXHASH,), LOOKUP: (JOIN,)}
"""The ways to compare each way with, in the same run."""
LEFT_OUT = (BUILD_FRAME, PLAIN, HASH_KEY, XXHASH)
"""The ways that are not measured with many entries."""
