"""RocketMQ's own files, read beside a running broker and never written to.

Commit log, consume queues, checkpoint, classic index. Start at `log.commitlog.CommitLogReader` (segments on disk),
`log.message.Message` (one message) and `log.columns.decode_index_columns` (all keys of a segment at once).
"""
