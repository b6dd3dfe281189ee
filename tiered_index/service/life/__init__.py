"""The life of a file: sealed, compacted, uploaded, retired; recovery after a crash; merges in the background."""
