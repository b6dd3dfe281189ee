"""Audit: an index proved by executors, and compared with its source. May import lookup, build."""
