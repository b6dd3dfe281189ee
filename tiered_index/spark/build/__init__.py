"""What writes on Spark: build, merge and compaction, their sources, plans, shards, and the log record at the end."""
