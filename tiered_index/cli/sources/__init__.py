"""What `ingest` takes beside stores: files of messages, wherever they are, as columns of entries."""
