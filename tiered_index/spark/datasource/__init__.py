"""Data sources of entries and of a log's messages: read, stream, write. May import audit, lookup, writing."""
