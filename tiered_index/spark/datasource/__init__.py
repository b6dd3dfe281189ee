"""Data sources: entries of an index, messages of a commit log; read, stream, write. May import audit, lookup, build."""
