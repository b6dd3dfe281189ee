"""Reads untrusted tables as checked columns: messages as NDJSON, CSV, Parquet and Arrow, and lists of keys."""
