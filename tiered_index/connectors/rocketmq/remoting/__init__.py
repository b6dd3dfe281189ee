"""Answers RocketMQ's remoting protocol from an index and archived segments.

May import archive, follow, log.
"""
