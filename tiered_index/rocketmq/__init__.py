"""RocketMQ's own files: commit log, consume queues, checkpoint and classic index, read beside a running broker and
never written to.

Start at `commitlog.CommitLogReader` (segments on disk), `message.Message` (one message) and
`index_columns.decode_index_columns` (all keys of a segment at once). `store_writer.StoreWriter` makes such a store for
tests, demos and benchmarks.
"""
