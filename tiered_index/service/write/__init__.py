"""Writing: the write buffer, the flusher, and the unsealed files that entries are appended to."""
