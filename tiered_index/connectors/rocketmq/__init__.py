"""Reads RocketMQ's files, also while a broker runs, and never writes to them.

Commit log, consume queues, checkpoint, classic index. Start at `log.commitlog.CommitLogReader` (segments on disk),
`log.message.Message` (one message) and `log.columns.decode_index_columns` (all keys of a segment at once).
docs/rocketmq.md is its guide.
"""
