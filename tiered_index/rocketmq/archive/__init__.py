"""Closed segments of a commit log in the index's storage, and messages read from the log or from there.

May import follow, log.
"""
