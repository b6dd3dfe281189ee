"""Jobs that write on Spark: build, merge and compaction; their sources, plans, shards and final log record."""
