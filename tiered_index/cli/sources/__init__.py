"""What `ingest` reads: NDJSON and Parquet files, as batches of messages with positions."""
