"""RocketMQ's files as they are: messages, segments, commit log, consume queues, the store directory.

Imports no other folder of the adapter.
"""
