"""Follows a live commit log: the dispatcher, the unfinished end, fingerprints of read messages.

May import log.
"""
