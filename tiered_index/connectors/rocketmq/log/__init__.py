"""Reads the formats of RocketMQ's files: messages, segments, commit log, consume queues, the store directory.

Imports no other folder of the adapter.
"""
