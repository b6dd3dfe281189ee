"""Tables that come from anybody, as checked columns: messages as NDJSON, CSV, Parquet and Arrow, and lists of keys."""
