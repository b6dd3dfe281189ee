"""Jobs on Spark that write: build, merge, compaction and erasure, with their sources, plans, shards and log record."""
